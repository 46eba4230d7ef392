"""The protocol of a send: stage, prepare, execute, decide, settle; and what a replay does."""
