"""The tables of a commit log: half messages, op markers, topics and groups, and what they say."""
