"""``make bench-growth``: what a log with 10,000 transactions costs beside one with 100, in turn.

Three durations: a sink micro-batch of 100 messages (whole, on Spark), planning a micro-batch of a source at the
head, and a cold start (open the log, find what is pending, plan). Environment: BENCH_ROUNDS (5), BENCH_OLD (10000),
BENCH_YOUNG (100), BENCH_FOLDER (a folder whose two logs are kept, and taken when they are there).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import pyarrow as pa
from rich.progress import track

import rmq_spark as txmq
from benchmarks.report import Pairs, publish
from benchmarks.spark import median_ms, session
from benchmarks.throughput import SMALL_BATCHES, SMALL_ROWS, WARM_UP, stream, txmq_writer, write_input
from rmq_spark.listener import CommitOncePrepared

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
YOUNG = int(os.environ.get("BENCH_YOUNG", "100"))
OLD = int(os.environ.get("BENCH_OLD", "10000"))
PLANS = 20
STARTS = 7
"""Cold starts a round."""
SENT_BEFORE_A_START = 9

COLD_START = """
import sys, time
import rmq_spark as txmq
import rmq_spark.commitlog.log, pyarrow.dataset
started = time.perf_counter()
log = txmq.CommitLog.open(sys.argv[1])
assert log.pending().num_rows == 0
log.ledger.refresh()
print((time.perf_counter() - started) * 1000)
"""


def make_log(path: Path, transactions: int) -> txmq.CommitLog:
    """A log with so many transactions, a half batch each, sent one after the other."""
    if path.exists():
        return txmq.CommitLog.open(path)
    log = txmq.CommitLog.create(path)
    log.create_topic("orders")
    table = pa.table({"body": ["x" * 200] * 10})
    with txmq.TransactionMQProducer(log, "bench", CommitOncePrepared(), check_interval=None) as producer:
        for _ in track(range(transactions), description=f"{transactions:,} transactions"):
            producer.send_messages_in_transaction(table, topic="orders")
    return log


def cold_start_ms(log: txmq.CommitLog) -> float:
    """In a process of its own, after the imports; the median of some.

    A start reads what came after the last checkpoint and the last merge, be it one commit or a hundred: so some
    transactions are sent before each, and they stand at many places of that cycle.
    """
    taken = []
    with txmq.TransactionMQProducer(log, "bench", CommitOncePrepared(), check_interval=None) as producer:
        for _ in range(STARTS):
            for _ in range(SENT_BEFORE_A_START):
                producer.send_message_in_transaction(txmq.Message("orders", "x"))
            command = [sys.executable, "-c", COLD_START, log.path]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            taken.append(float(done.stdout.split()[-1]))
    return median(taken)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="txmq_growth_"))
    logs = Path(os.environ.get("BENCH_FOLDER", folder))
    old, young = make_log(logs / "old", OLD), make_log(logs / "young", YOUNG)
    sent = [log.half.table.actions().num_rows for log in (old, young)]  # a file each
    spark = session()
    try:
        write_input(spark, folder / "small", SMALL_ROWS, SMALL_BATCHES)

        def sink_ms(log: txmq.CommitLog, run: int) -> float:
            return median_ms(txmq_writer(stream(spark, folder / "small", 2), log, folder / f"cp{run}"), WARM_UP)

        def plan_ms(log: txmq.CommitLog, run: int) -> float:
            """latestOffset and partitions of a stream at the head, while messages arrive."""
            from pyspark.sql.streaming.datasource import ReadAllAvailable
            from pyspark.sql.types import StructType

            from rmq_spark.datasource import TxmqDataSource

            source = TxmqDataSource({"path": log.path, "subscribe": "orders", "startingOffsets": "latest"})
            schema = StructType.fromDDL(source.schema())
            reader = source.streamReader(schema)
            start = reader.initialOffset()
            taken = []
            with txmq.TransactionMQProducer(log, "bench", CommitOncePrepared(), check_interval=None) as producer:
                for _ in range(PLANS):
                    producer.send_message_in_transaction(txmq.Message("orders", "x"))
                    began = time.perf_counter()
                    end = reader.latestOffset(start, ReadAllAvailable())
                    reader.partitions(start, end)
                    taken.append((time.perf_counter() - began) * 1000)
                    start = end
            return median(taken)

        def pairs(measure, runs: int = ROUNDS):  # type: ignore[no-untyped-def]
            both = [(measure(old, 2 * r), measure(young, 2 * r + 1)) for r in range(runs + 1)][1:]
            return [a for a, _ in both], [b for _, b in both]

        results = [
            Pairs(name, what, "ms", *pairs(measure), False)
            for name, what, measure in (
                ("growth_sink", f"sink micro-batch of {SMALL_ROWS} messages", sink_ms),
                ("growth_plan", "planning a source's micro-batch at the head", plan_ms),
                ("growth_cold", "cold start: open, pending, tails", lambda log, _: cold_start_ms(log)),
            )
        ]
        publish(f"A log with {sent[0]:,} transactions (ours) beside one with {sent[1]:,}", results, f"{sent[1]:,}")
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
