"""The check: asks what became of local transactions that a crash or an UNKNOWN left open, and settles them."""
