"""``python -m rmq_spark.cli``: the ``txmq`` command where its script is not on the path."""

from rmq_spark.cli import app

app()
