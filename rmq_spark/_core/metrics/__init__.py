"""Metrics of commit logs and of this process, for Prometheus and for logs of Spark's queries."""
