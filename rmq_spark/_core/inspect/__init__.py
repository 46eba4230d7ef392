"""Inspects a commit log: traces, searches, history. No room below depends on it."""
