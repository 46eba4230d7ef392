"""The check job: ``python -m rmq_spark.checks.job --config FILE [--once]``, or ``spark-submit`` of this file."""

from __future__ import annotations

from rmq_spark.cli.check_job import app

if __name__ == "__main__":
    app()
