"""``python -m rmq_spark`` runs the ``txmq`` command when its script is not on the path."""

from rmq_spark.cli import app

app()
