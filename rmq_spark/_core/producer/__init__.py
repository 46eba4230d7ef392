"""The producer without Spark."""
