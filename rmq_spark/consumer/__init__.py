"""Consumers: groups and their progress."""
