"""Looks at a commit log: traces, searches, its history. Nothing below exists for reports."""
