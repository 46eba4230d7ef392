"""``make bench-programs``: what programs without Spark send, in one to 64 threads and in several processes.

The floor is what two commits cost by themselves: two Parquet files written, and two commits by delta-rs, in one thread.
Each round measures all of them, one after the other. Environment: BENCH_ROUNDS (5), BENCH_SECONDS of each (5).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import AddAction
from rich.console import Console
from rich.table import Table

import rmq_spark as txmq
from benchmarks.report import write_medians
from rmq_spark.listener import CommitOncePrepared

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "5"))
THREADS = (1, 8, 64)
PROCESSES, THREADS_EACH = 4, 16
BODY = b'{"order_id": 12345, "item": "tea", "quantity": 3}'
SCHEMA = pa.schema([("half_id", pa.string()), ("body", pa.binary())])
WARM_UP = 20


class Counted:
    """So many sends in so many seconds, and how long each took."""

    def __init__(self, seconds: float, each: list[float]) -> None:
        self.per_s = len(each) / seconds
        self.median_ms = median(each) * 1000
        self.p99_ms = sorted(each)[int(len(each) * 0.99)] * 1000


def timed(work: Callable[[], object], threads: int, seconds: float) -> Counted:
    each: list[float] = []
    began = time.perf_counter()

    def run() -> None:
        while (start := time.perf_counter()) < began + seconds:
            work()
            each.append(time.perf_counter() - start)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return Counted(time.perf_counter() - began, each)


def floor(folder: Path) -> Callable[[], object]:
    """Two Parquet files and two commits, one after the other."""
    tables = [DeltaTable.create(str(folder / name), Schema.from_arrow(SCHEMA)) for name in ("one", "two")]
    row = pa.table({"half_id": ["send"], "body": [BODY]}, schema=SCHEMA)

    def write() -> None:
        for table, name in zip(tables, ("one", "two"), strict=True):
            path = f"{uuid4().hex}.parquet"
            pq.write_table(row, folder / name / path)
            size = (folder / name / path).stat().st_size
            action = AddAction(path, size, {}, int(time.time() * 1000), True, '{"numRecords": 1}')
            table.create_write_transaction(
                [action], "append", Schema.from_arrow(SCHEMA), commit_properties=CommitProperties(max_commit_retries=0)
            )
            table.update_incremental()

    return write


def producer_of(folder: Path) -> txmq.TransactionMQProducer:
    log = txmq.CommitLog.create(folder / "log", exist_ok=True)
    log.create_topic("orders", exist_ok=True)
    return txmq.TransactionMQProducer(log, "bench", CommitOncePrepared(), check_interval=None).start()


def send_with(producer: txmq.TransactionMQProducer) -> Callable[[], object]:
    message = txmq.Message("orders", BODY, keys="12345")
    return lambda: producer.send_message_in_transaction(message)


def in_threads(folder: Path, threads: int) -> Counted:
    producer = producer_of(folder)
    send = send_with(producer)
    for _ in range(WARM_UP):
        send()
    found = timed(send, threads, SECONDS)
    producer.shutdown()
    return found


def in_processes(folder: Path) -> float:
    """Sends a second of several processes together, on one log."""
    producer_of(folder).shutdown()
    command = [sys.executable, "-m", "benchmarks.programs", str(folder), str(time.time() + 6)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    return sum(float(process.communicate()[0]) for process in running)


def one_process(folder: Path, at: float) -> None:
    """A process of :func:`in_processes`: it starts at a time, and prints what it has sent a second."""
    producer = producer_of(folder)
    send = send_with(producer)
    send()
    time.sleep(max(0.0, at - time.time()))
    print(timed(send, THREADS_EACH, SECONDS).per_s)
    producer.shutdown()


def main() -> None:
    floors: list[Counted] = []
    sends: dict[int, list[Counted]] = {threads: [] for threads in THREADS}
    processes: list[float] = []
    loads: list[float] = []
    for number in range(ROUNDS):
        folder = Path(tempfile.mkdtemp(prefix="txmq-programs-"))
        write = floor(folder)
        for _ in range(WARM_UP):
            write()
        floors.append(timed(write, 1, SECONDS))
        for threads in THREADS:
            sends[threads].append(in_threads(folder / str(threads), threads))
        processes.append(in_processes(folder / "processes"))
        loads.append(os.getloadavg()[0])
        shutil.rmtree(folder)
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    table = Table(title="programs without Spark, one message a send")
    for name in ("who", "a second", "min–max", "median ms", "p99 ms"):
        table.add_column(name, justify="left" if name == "who" else "right")
    named = {"two commits, by themselves": floors}
    named |= {f"a producer, {n} thread{'s' if n > 1 else ''}": found for n, found in sends.items()}
    for who, found in named.items():
        rates = [c.per_s for c in found]
        times = f"{median(c.median_ms for c in found):.1f}", f"{median(c.p99_ms for c in found):.1f}"
        table.add_row(who, f"{median(rates):,.0f}", f"{min(rates):,.0f}–{max(rates):,.0f}", *times)
    spread = f"{min(processes):,.0f}–{max(processes):,.0f}"
    table.add_row(f"{PROCESSES} processes of {THREADS_EACH} threads", f"{median(processes):,.0f}", spread, "", "")
    console = Console(width=120)
    console.print(table)
    console.print(f"{os.cpu_count()} processors, load {min(loads):.1f}–{max(loads):.1f}")
    rates = {threads: [c.per_s for c in found] for threads, found in sends.items()}
    ratios = [one.median_ms / least.median_ms for one, least in zip(sends[1], floors, strict=True)]
    shared = [several / one for several, one in zip(processes, rates[64], strict=True)]
    console.print(
        f"one thread beside the floor: {median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) of its time"
    )
    console.print(f"{PROCESSES} processes beside 64 threads of one: {median(shared):.2f}")
    write_medians(
        {
            "producer_1_thread_per_s": round(median(rates[1]), 1),
            "producer_1_thread_vs_floor": round(median(ratios), 3),
            "producer_8_threads_per_s": round(median(rates[8]), 1),
            "producer_64_threads_per_s": round(median(rates[64]), 1),
            "producer_64_threads_p99_ms": round(median(c.p99_ms for c in sends[64]), 1),
            "producer_processes_vs_threads": round(median(shared), 3),
        }
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_process(Path(sys.argv[1]), float(sys.argv[2]))
    else:
        main()
