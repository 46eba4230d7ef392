"""The commit log's public handle, its copies, and reconciliation after a restore."""
