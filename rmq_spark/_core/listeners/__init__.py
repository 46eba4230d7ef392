"""Listeners of local transactions, and the fences that make a check's ROLLBACK binding."""
