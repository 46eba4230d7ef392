"""Consumers: groups and their positions, message listeners, retries and dead letters, and the inbox."""
