"""``python -m rmq_spark.cli``: as ``python -m rmq_spark``."""

from rmq_spark.cli import app

app()
