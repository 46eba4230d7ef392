"""``make bench-growth``: what a log with 100,000 transactions costs beside one with 100, in turn, both with upkeep.

Five durations: a sink micro-batch of 100 messages (whole, on Spark), planning a micro-batch of a source at the head, a
cold start (open the log, find what is pending, plan), a round of checks, and the last 1,000 offsets of each queue by
``txmq.messages``. Before these: what each of many costs beside each of few, in processor time, which must be about as
much. 1,000 topics beside 100; 1,000 sends behind an open one of their FIFO key beside 200; a round of checks by a fence
for 10,000 pending half batches beside 1,000. BENCH_ONLY=many measures no more than that.

Environment: BENCH_ROUNDS (5), BENCH_OLD (100000), BENCH_YOUNG (100), BENCH_OPEN (1: all along one
half batch stays open, a message is delayed by three days, and 300 half batches of a FIFO key wait behind an open one),
BENCH_FOLDER (a folder whose two logs are kept, and taken when they are there).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median

from rich.progress import track

import rmq_spark as txmq
from benchmarks.report import Pairs, publish
from benchmarks.spark import median_ms, session
from benchmarks.throughput import SMALL_BATCHES, SMALL_ROWS, WARM_UP, stream, txmq_writer, write_input
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared
from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.log.decision import Decision
from rmq_spark._core.log.half_header import HalfHeader, Naming, batch_name
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.log.op import Who
from rmq_spark._core.log.single_messages import OneMessage, make_rows
from rmq_spark._core.log.staged_batches import Staged
from rmq_spark._core.upkeep.leave import Graces
from rmq_spark._core.upkeep.schedule import maintain
from rmq_spark._core.vocabulary.rows import NO_ROWS

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
YOUNG = int(os.environ.get("BENCH_YOUNG", "100"))
OLD = int(os.environ.get("BENCH_OLD", "100000"))
OPEN = os.environ.get("BENCH_OPEN") == "1"
DELAY = timedelta(hours=71)
WAITING = 300
TOGETHER = 1_000
"""Sends that are prepared, and decided, in one commit, as those of so many threads are: that builds a log fast."""
SENT_TOGETHER = 64
"""Sends of one commit, as those of a producer's threads are."""
UPKEEP_EVERY = 20_000
LAST_OFFSETS = 1_000
PLANS = 20
STARTS = 7
"""Cold starts a round."""
SENT_BEFORE_A_START = 9

COLD_START = """
import sys, time
import rmq_spark as txmq
import rmq_spark._core.client.commit_log, pyarrow.dataset
started = time.perf_counter()
log = txmq.CommitLog.open(sys.argv[1])
assert log.pending().num_rows <= 2
log.engine.ledger.refresh()
print((time.perf_counter() - started) * 1000)
"""


def staged(log: txmq.CommitLog, number: int, message: txmq.Message, fence_id: str = "none") -> OneMessage:
    """A single send, as a producer stages it."""
    app_id = f"send.bench.{number:032d}"
    header = HalfHeader(batch_name(app_id, 0), app_id, 0, None, None, fence_id, "batch", "bench", naming=Naming.MADE_UP)
    topics = log.engine.topic_store.with_names([message.topic])
    return OneMessage(
        log.engine.with_runtime(HalfWriter(header, topics.queues, None, None, log.fifo_topics())), message
    )


def prepare(log: txmq.CommitLog, many: Sequence[OneMessage]) -> list[HalfRecord]:
    """Prepare sends in one commit."""
    assert not make_rows(many)
    prepared = log.engine.prepare([Staged(one.writer.header, [one.rows]) for one in many if one.rows is not None])
    return [record for record in prepared if isinstance(record, HalfRecord)]


def send(log: txmq.CommitLog, many: Sequence[OneMessage]) -> None:
    """Prepare sends in one commit, and commit them in another."""
    records = prepare(log, many)
    every = [record.fresh_state().rows_in((RowState.PENDING,)) for record in records]
    log.engine.decide([Decision(r, 1, rows, NO_ROWS, Who.EXECUTE) for r, rows in zip(records, every, strict=True)])


def make_log(path: Path, transactions: int) -> txmq.CommitLog:
    """A log with so many single sends, and upkeep whose graces are over at once; the outcome of each is kept."""
    if path.exists():
        return txmq.CommitLog.open(path)
    log = txmq.CommitLog.create(path)
    log.create_topic("orders")
    if OPEN:
        log.create_topic("accounts", fifo=True)
    if OPEN:
        entry = txmq.Message("accounts", "x", sharding_key="one")
        later = txmq.Message("orders", "x", deliver_at=datetime.now(timezone.utc) + DELAY)
        numbers = iter(range(transactions, transactions + WAITING + 3))
        prepare(log, [staged(log, next(numbers), txmq.Message("orders", "x")), staged(log, next(numbers), entry)])
        send(log, [staged(log, next(numbers), later), *(staged(log, number, entry) for number in numbers)])
    message = txmq.Message("orders", "x" * 200)
    for at in track(range(0, transactions, TOGETHER), description=f"{transactions:,} transactions"):
        end = min(at + TOGETHER, transactions)
        send(log, [staged(log, number, message) for number in range(at, end)])
        if end % UPKEEP_EVERY == 0 or end == transactions:
            log.close()
            maintain(log.engine, Graces(0, 0, 1e9))
    return log


def topics_ms(folder: Path, count: int) -> float:
    """Making topics one by one, and reading them in a handle that is new, for each topic."""
    log = txmq.CommitLog.create(folder)
    began = time.process_time()
    for n in range(count):
        log.create_topic(f"topic{n}")
    assert len(txmq.CommitLog.open(folder).topics()) == count
    return (time.process_time() - began) / count * 1000


def fifo_ms(folder: Path, count: int) -> float:
    """Sends behind an open one of their sharding key, and the commit that releases them, for each send."""
    log = txmq.CommitLog.create(folder)
    log.create_topic("accounts", fifo=True)
    message = txmq.Message("accounts", "x", sharding_key="one")
    began = time.process_time()
    (blocker,) = prepare(log, [staged(log, 0, message)])
    for number in range(1, count + 1):
        send(log, [staged(log, number, message)])
    assert not log.engine.tails()
    log.engine.decide([Decision(blocker, 1, blocker.all_rows, NO_ROWS, Who.EXECUTE)])
    assert sum(log.engine.tails().values()) == count + 1
    log.close()
    return (time.process_time() - began) / count * 1000


def pending_ms(folder: Path, count: int) -> float:
    """A round of checks by a fence that knows none of the pending half batches, for each of them."""
    folder.mkdir()
    url = f"sqlite:///{folder / 'shop.db'}"
    fence_id = txmq.create_fence(url)
    log = txmq.CommitLog.create(folder / "log")
    log.create_topic("orders")
    message = txmq.Message("orders", "x" * 200)
    for at in range(0, count, SENT_TOGETHER):
        prepare(log, [staged(log, n, message, fence_id) for n in range(at, min(at + SENT_TOGETHER, count))])
    log.close()
    log = txmq.CommitLog.open(folder / "log")
    listener = txmq.SqlTransactionListener(url, rollback_after=0.0)
    service = txmq.CheckService(log, {"bench": listener}, transaction_timeout=0.0, round_timeout=None)
    began = time.process_time()
    report = service.run_once()
    assert (report.rolled_back.transactions, report.pending) == (count, 0), report
    log.close()
    return (time.process_time() - began) / count * 1000


def many_beside_few(folder: Path) -> None:
    """What each of many costs beside each of few."""
    results: list[Pairs] = []
    for name, what, measure, many, few in (
        ("growth_topics", "each of 1,000 topics, beside 100", topics_ms, 1_000, 100),
        ("growth_fifo", "each of 1,000 sends behind an open one of their key, beside 200", fifo_ms, 1_000, 200),
        ("growth_pending", "a check of each of 10,000 pending half batches, beside 1,000", pending_ms, 10_000, 1_000),
    ):
        both = [
            (measure(folder / f"{name}{n}.many", many), measure(folder / f"{name}{n}.few", few)) for n in range(ROUNDS)
        ]
        results.append(Pairs(name, what, "ms of a processor", [a for a, _ in both], [b for _, b in both], False))
    publish("Each of many (ours) beside each of few", results, "few")


def check_ms(log: txmq.CommitLog) -> float:
    """A round of checks that finds nothing due."""
    service = txmq.CheckService(log, {}, transaction_timeout=3600)
    taken = []
    for _ in range(STARTS):
        began = time.perf_counter()
        service.run_once()
        taken.append((time.perf_counter() - began) * 1000)
    return median(taken)


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
    many_beside_few(folder)
    if os.environ.get("BENCH_ONLY") == "many":
        shutil.rmtree(folder, ignore_errors=True)
        return
    logs = Path(os.environ.get("BENCH_FOLDER", folder))
    old, young = make_log(logs / "old", OLD), make_log(logs / "young", YOUNG)
    sent = (OLD, YOUNG)
    for log in (old, young):
        log.engine.half.table.refresh()
        log.refresh()
        live = [t.actions().num_rows for t in (log.engine.half.table, log.engine.op_table)]
        print(
            f"{log!r}: {live[0]:,} live files of half, {live[1]:,} of op, {sum(log.engine.tails().values()):,} messages"
        )
    spark = session()
    try:
        write_input(spark, folder / "small", SMALL_ROWS, SMALL_BATCHES)

        def sink_ms(log: txmq.CommitLog, run: int) -> float:
            return median_ms(txmq_writer(stream(spark, folder / "small", 2), log, folder / f"cp{run}"), WARM_UP)

        def plan_ms(log: txmq.CommitLog, run: int) -> float:
            """latestOffset and partitions of a stream at the head, while messages arrive."""
            from pyspark.sql.streaming.datasource import ReadAllAvailable

            from rmq_spark._core.spark.datasource import TxmqDataSource

            source = TxmqDataSource({"path": log.path, "subscribe": "orders", "startingOffsets": "latest"})
            schema = source.schema()
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

        def native_ms(log: txmq.CommitLog, _: int) -> float:
            tails = {str(q): n for (_, q), n in log.engine.tails().items()}
            start = {"orders": {q: max(0, n - LAST_OFFSETS) for q, n in tails.items()}}
            began = time.perf_counter()
            txmq.messages(spark, log, "orders", starting=start).write.format("noop").mode("overwrite").save()
            return (time.perf_counter() - began) * 1000

        def pairs(measure, runs: int = ROUNDS):  # type: ignore[no-untyped-def]
            both = [(measure(old, 2 * r), measure(young, 2 * r + 1)) for r in range(runs + 1)][1:]
            return [a for a, _ in both], [b for _, b in both]

        results = [
            Pairs(name, what, "ms", *pairs(measure), False)
            for name, what, measure in (
                ("growth_sink", f"sink micro-batch of {SMALL_ROWS} messages", sink_ms),
                ("growth_plan", "planning a source's micro-batch at the head", plan_ms),
                ("growth_cold", "cold start: open, pending, tails", lambda log, _: cold_start_ms(log)),
                ("growth_check", "a round of checks", lambda log, _: check_ms(log)),
                ("growth_native", f"the last {LAST_OFFSETS:,} offsets by txmq.messages", native_ms),
            )
        ]
        publish(f"A log with {sent[0]:,} transactions (ours) beside one with {sent[1]:,}", results, f"{sent[1]:,}")
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
