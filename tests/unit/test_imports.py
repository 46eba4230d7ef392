"""What an import may bring along: Spark's workers fork, and Delta's engine must not run in a process that forks."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = (
    "import rmq_spark",
    "import rmq_spark; dir(rmq_spark); rmq_spark.Message; rmq_spark.COMMIT_MESSAGE; rmq_spark.TransactionListener",
    "import rmq_spark.commitlog",
    "import rmq_spark.commitlog.files",
    "import rmq_spark.commitlog.half",
    "import rmq_spark.commitlog.op",
    "import rmq_spark.commitlog.reading",
    "import rmq_spark.selector",
    "import rmq_spark.consumer.in_order, rmq_spark.consumer.listener, rmq_spark.consumer.retry",
)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    # Spark itself imports pyspark_txmq, for every look-up of a Python data source.
    [
        *((s, ("deltalake", "lark", "pyspark", "sqlalchemy")) for s in LIGHT),
        ("import pyspark_txmq", ("deltalake", "lark", "sqlalchemy")),
        # What Spark's workers load to run a task of the source or the sink.
        ("import rmq_spark.source.reader", ("deltalake", "sqlalchemy")),
        ("import rmq_spark.sink.writers", ("deltalake", "sqlalchemy")),
    ],
)
def test_importing_loads_no_engine_and_starts_no_thread(statement: str, unwanted: tuple[str, ...]) -> None:
    script = (
        f"import sys, threading; {statement}\n"
        f"heavy = [m for m in sys.modules if m.split('.')[0] in {unwanted!r}]\n"
        "assert not heavy, heavy\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
