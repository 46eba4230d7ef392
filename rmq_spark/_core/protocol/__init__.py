"""The protocol of a send (stage, prepare, execute, decide, settle), and of a replay."""
