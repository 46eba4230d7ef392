"""Runs the ``txmq`` command as ``python -m rmq_spark``, for when its script is not on the path."""

from rmq_spark.cli import app

app()
