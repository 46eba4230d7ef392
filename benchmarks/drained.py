"""``make bench-drained``: what a drainer, topics and rolled back messages cost, each beside the same without, in turn.

The sink runs with a process beside it that drains every few seconds; it commits each message but every hundredth; and
one topic of ten is read of a table that holds all ten, beside all of them. Environment: BENCH_ROUNDS (5), BENCH_ROWS a
micro-batch (250000), BENCH_BATCHES (12).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import rmq_spark as txmq
from benchmarks.report import Pairs, publish
from benchmarks.spark import median_ms, session
from benchmarks.throughput import BATCHES, ROUNDS, ROWS, WARM_UP, seconds, stream, txmq_writer, write_input

DRAIN_EVERY_S = 5
TOPICS = 10

DRAIN = """
import sys, threading
from rmq_spark._core.client.maintainer import Maintainer
from rmq_spark._core.client.commit_log import CommitLog
Maintainer(CommitLog.open(sys.argv[1]), float(sys.argv[2])).run(threading.Event())
"""


@contextmanager
def drainer(log: txmq.CommitLog) -> Iterator[None]:
    """A process that does a log's upkeep all the time."""
    process = subprocess.Popen([sys.executable, "-c", DRAIN, log.path, str(DRAIN_EVERY_S)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="txmq_drained_"))
    spark = session()
    try:
        write_input(spark, folder / "in", ROWS, BATCHES)
        runs = iter(range(1_000_000))

        def make(*topics: str) -> tuple[txmq.CommitLog, Path]:
            work = folder / f"run{next(runs)}"
            log = txmq.CommitLog.create(work / "log")
            for topic in ("orders", *topics):
                log.create_topic(topic)
            return log, work

        def rate(listener: str = "none", drained: bool = False) -> float:
            """Messages a second of the sink."""
            log, work = make()
            writer = txmq_writer(stream(spark, folder / "in", 2), log, work / "cp").option("transactionPer", "message")
            writer = writer.option("transactionListener", listener)
            if drained:
                with drainer(log):
                    ms = median_ms(writer, WARM_UP)
            else:
                ms = median_ms(writer, WARM_UP)
            shutil.rmtree(work)
            return ROWS / ms * 1000

        def pairs(
            ours: Callable[[], float], peer: Callable[[], float], rounds: int = ROUNDS
        ) -> tuple[list[float], list[float]]:
            both = [(ours(), peer()) for _ in range(rounds + 1)][1:]
            return [a for a, _ in both], [b for _, b in both]

        of_each = "benchmarks.rollbacks:"
        log, work = make(*(f"orders{number}" for number in range(TOPICS)))
        mixed = stream(spark, folder / "in", 2).withColumn(
            "topic", F.concat(F.lit("orders"), (F.crc32("keys") % TOPICS).cast("string"))
        )
        median_ms(txmq_writer(mixed, log, work / "cp"), 0)
        log.drain()

        def read(topics: str | None) -> float:
            def frame() -> DataFrame:
                return txmq.messages(spark, log, topics)

            return seconds(frame)

        publish(
            f"{ROWS:,} messages of about 290 B a micro-batch, transactionPer=message",
            [
                Pairs("sink_drained_vs_not", f"sink, a drain every {DRAIN_EVERY_S} s beside it", "rows/s",
                      *pairs(lambda: rate(drained=True), rate), True),
                Pairs("sink_rolled_back_vs_not", "sink, 1 % of the messages rolled back", "rows/s",
                      *pairs(lambda: rate(f"{of_each}one_in_a_hundred"), lambda: rate(f"{of_each}none")), True),
                Pairs("native_one_topic_vs_all", f"txmq.messages, one topic of {TOPICS}, drained", "s",
                      *pairs(lambda: read("orders3"), lambda: read(None), 2 * ROUNDS), False),
            ],
            "without",
        )  # fmt: skip
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.getcwd())  # Spark's workers import the listeners
    main()
