"""``make bench-push``: how fast and how soon consumers without Spark are, and what they cost when idle.

Each round makes a log of BENCH_MESSAGES (1,000,000) messages in tables of 100,000, and reads it in turn: all at once by
``CommitLog.read`` (the floor), by a listener of tables, and by a listener of single messages. Then single messages are
sent, 20 a second, while a consumer waits for them. Environment: BENCH_ROUNDS (5), BENCH_SECONDS (5).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

import rmq_spark as txmq
from benchmarks.report import write_medians
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "5"))
MESSAGES = int(os.environ.get("BENCH_MESSAGES", "1000000"))
EACH_SEND = 100_000
SENDS_APART_S = 0.05
DONE = txmq.ConsumeResult.SUCCESS


def producer_of(log: txmq.CommitLog) -> txmq.TransactionMQProducer:
    return txmq.TransactionMQProducer(log, "bench", CommitOncePrepared(), check_interval=None)


def fill(folder: Path) -> txmq.CommitLog:
    """A log of messages of about 290 bytes, written by tables."""
    log = txmq.CommitLog.create(folder / "log")
    log.create_topic("orders", queues=4)
    n = min(EACH_SEND, MESSAGES)
    table = pa.table(
        {
            "body": pa.array([os.urandom(100).hex().encode() for _ in range(n)], pa.binary()),
            "keys": [str(i) for i in range(n)],
            "tags": ["create"] * n,
        }
    )
    with producer_of(log) as producer:
        for _ in range(MESSAGES // n):
            producer.send(table, topic="orders")
    return log


def per_second(log: txmq.CommitLog, group: str, listener_of: Callable[[Callable[[int], None]], Any]) -> float:
    """Messages a second of a consumer, from its start to the last message."""
    total = MESSAGES // min(EACH_SEND, MESSAGES) * min(EACH_SEND, MESSAGES)
    seen, lock, all_came = 0, threading.Lock(), threading.Event()

    def count(messages: int) -> None:
        nonlocal seen
        with lock:
            seen += messages
            if seen >= total:
                all_came.set()

    began = time.perf_counter()
    with txmq.PushConsumer(
        log.another(), group, listener_of(count), "orders", consume_from_where="CONSUME_FROM_FIRST_OFFSET"
    ):
        all_came.wait()
        return total / (time.perf_counter() - began)


def of_tables(count: Callable[[int], None]) -> Callable[[pa.Table], Any]:
    def listen(messages: pa.Table) -> Any:
        count(messages.num_rows)
        return DONE

    return listen


def one_by_one(count: Callable[[int], None]) -> txmq.EachMessage:
    def listen(message: txmq.MessageExt) -> Any:
        count(1)
        return DONE

    return txmq.EachMessage(listen)


def read_at_once(log: txmq.CommitLog) -> float:
    """Messages a second of one ``CommitLog.read``."""
    began = time.perf_counter()
    return log.another().read("orders").num_rows / (time.perf_counter() - began)


def idle_share(log: txmq.CommitLog) -> float:
    """The part of a core that a consumer takes that waits."""
    with txmq.PushConsumer(log.another(), "idle", of_tables(lambda n: None), "orders"):
        time.sleep(1)
        cpu, began = time.process_time(), time.perf_counter()
        time.sleep(SECONDS)
        return (time.process_time() - cpu) / (time.perf_counter() - began)


def soon(log: txmq.CommitLog, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds from the call of ``send``, and from its return, to the call of the listener; sent for so long."""
    called: dict[str, float] = {}
    got: dict[str, float] = {}
    returned: dict[str, float] = {}

    def listen(messages: pa.Table) -> Any:
        now = time.perf_counter()
        got.update((body.decode(), now) for body in messages["body"].to_pylist())
        return DONE

    with txmq.PushConsumer(log.another(), "soon", listen, "orders"), producer_of(log.another()) as producer:
        for n in range(int(seconds / SENDS_APART_S)):
            called[str(n)] = time.perf_counter()
            producer.send(txmq.Message("orders", str(n)))
            returned[str(n)] = time.perf_counter()
            time.sleep(SENDS_APART_S)
        while len(got) < len(called):
            time.sleep(0.01)
    return [(got[n] - called[n]) * 1000 for n in called], [max(0.0, got[n] - returned[n]) * 1000 for n in called]


def main() -> None:
    found: dict[str, list[float]] = {name: [] for name in ("read", "tables", "single", "visible", "commit", "idle")}
    loads: list[float] = []
    for number in range(ROUNDS):
        folder = Path(tempfile.mkdtemp(prefix="txmq-push-"))
        log = fill(folder)
        found["read"].append(read_at_once(log))
        found["tables"].append(per_second(log, "tables", of_tables))
        found["single"].append(per_second(log, "single", one_by_one))
        found["idle"].append(100 * idle_share(log))
        since_call, since_commit = soon(log, SECONDS)
        found["visible"].append(median(since_call))
        found["commit"].append(median(since_commit))
        loads.append(os.getloadavg()[0])
        log.close()
        shutil.rmtree(folder)
        print(f"round {number + 1} of {ROUNDS}, load {loads[-1]:.1f}", flush=True)
    table = Table(title=f"consumers without Spark, {MESSAGES:,} messages in tables of {EACH_SEND:,}")
    for name in ("what", "median", "min–max"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for key, what in (
        ("read", "CommitLog.read of all, messages a second"),
        ("tables", "PushConsumer, a listener of tables, messages a second"),
        ("single", "PushConsumer, a listener of single messages, messages a second"),
        ("visible", "call of send to call of listener, ms"),
        ("commit", "return of send to call of listener, ms"),
        ("idle", "a consumer that waits, % of a core"),
    ):
        digits = 2 if key == "idle" else 0 if key in ("read", "tables", "single") else 1
        low, middle, high = min(found[key]), median(found[key]), max(found[key])
        table.add_row(what, f"{middle:,.{digits}f}", f"{low:,.{digits}f}–{high:,.{digits}f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"{os.cpu_count()} processors, load {min(loads):.1f}–{max(loads):.1f}")
    write_medians(
        {
            "push_consumer_per_s": round(median(found["tables"])),
            "push_consumer_one_by_one_per_s": round(median(found["single"])),
            "push_consumer_idle_percent": round(median(found["idle"]), 2),
            "visible_ms": round(median(found["visible"]), 1),
            "visible_after_commit_ms": round(median(found["commit"]), 1),
        }
    )


if __name__ == "__main__":
    main()
