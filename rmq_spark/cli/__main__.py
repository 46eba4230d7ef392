"""``python -m rmq_spark.cli`` runs the ``txmq`` command when its script is not on the path."""

from rmq_spark.cli import app

app()
