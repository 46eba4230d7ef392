"""The commit log as programs hold it, and its copies."""
