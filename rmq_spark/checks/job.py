"""The check job: ``python -m rmq_spark.checks.job --config conf/txmq.toml``, or ``spark-submit`` of this file."""

from __future__ import annotations

from rmq_spark.cli.check_job import main

if __name__ == "__main__":
    main()
