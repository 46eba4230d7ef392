"""Upkeep of a commit log: settled half batches leave, op rows are pruned, messages expire, files are merged."""
