"""``make bench-programs``: what programs without Spark send: in threads, in processes, thousands in flight.

Beside it, in turn in each round:

- the floor, which is what two commits cost by themselves: two Parquet files and two commits by delta-rs, in one thread
- RocketMQ 5.3.3 with its Java client, 64 threads, one broker that flushes after a while and one before it answers
- the transactions of a PostgreSQL database that a listener with a fence runs, by themselves

Environment: BENCH_ROUNDS (3), BENCH_SECONDS of each (3).
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import AddAction
from rich.console import Console
from rich.table import Table

import rmq_spark as txmq
from benchmarks.fences import Orders, orders
from benchmarks.push import soon
from benchmarks.report import write_medians
from benchmarks.rocketmq import server as rocketmq
from benchmarks.timing import Counted, in_flight, timed
from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared, Verdicts

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "3"))
THREADS = (1, 8, 64)
MANY = 64
PROCESSES, THREADS_EACH = 4, 16
IN_FLIGHT, PAIR = 4096, 2
BODY = b'{"order_id": 12345, "item": "tea", "quantity": 3}'
SCHEMA = pa.schema([("half_id", pa.string()), ("body", pa.binary())])
WARM_UP = 20
WARM_UP_S = 3.0
"""RocketMQ's client is a new Java each time."""

FLOOR = "two commits, by themselves"
OURS = {n: f"a producer, {n} thread{'s' if n > 1 else ''}" for n in THREADS}
FLUSHES = {"ASYNC_FLUSH": "RocketMQ, 64 threads, ASYNC_FLUSH", "SYNC_FLUSH": "RocketMQ, 64 threads, SYNC_FLUSH"}
TOGETHER = f"{PROCESSES} processes of {THREADS_EACH} threads"
ASYNC = f"send_message_in_transaction_async, {IN_FLIGHT:,} in flight"
SELDOM = "the same, full collections a tenth as often"
PLAIN = f"send_async, {IN_FLIGHT:,} in flight"
IN_PAIR = f"{PAIR} processes with {IN_FLIGHT // PAIR:,} in flight each, full collections a tenth as often"
ALONE = "PostgreSQL transactions alone, 64 threads"
FENCED = "a producer with PostgreSQL fences, 64 threads"


class Noting(CommitOncePrepared):
    """Commits at once, and notes how long after the call it is called: ``arg`` is the time of the call."""

    def __init__(self) -> None:
        self.since_call_s: list[float] = []

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        self.since_call_s.append(time.perf_counter() - batch.arg)
        return super().execute_local_transaction(batch)


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


def log_at(folder: Path) -> txmq.CommitLog:
    log = txmq.CommitLog.create(folder / "log", exist_ok=True)
    log.create_topic("orders", exist_ok=True)
    return log


def producer_of(folder: Path, listener: txmq.TransactionListener, **options: Any) -> txmq.TransactionMQProducer:
    return txmq.TransactionMQProducer(log_at(folder), "bench", listener, check_interval=None, **options).start()


def send_with(producer: txmq.TransactionMQProducer) -> Callable[[], object]:
    message = txmq.Message("orders", BODY, keys="12345")
    return lambda: producer.send_message_in_transaction(message, time.perf_counter())


def warmed(work: Callable[[], object]) -> Callable[[], object]:
    for _ in range(WARM_UP):
        work()
    return work


def in_threads(folder: Path, threads: int, listener: txmq.TransactionListener) -> Counted:
    producer = producer_of(folder, listener)
    found = timed(warmed(send_with(producer)), threads, SECONDS)
    producer.shutdown()
    return found


def many_in_flight(folder: Path, plain: bool = False, most: int = IN_FLIGHT, at: float = 0.0) -> Counted:
    """The producer itself waits while it has ``max_in_flight`` sends under way. They begin at a time."""
    producer = producer_of(folder, CommitOncePrepared(), max_in_flight=most)
    message = txmq.Message("orders", BODY, keys="12345")
    warmed(lambda: producer.send(message))

    def send() -> Future[Any]:
        return producer.send_async(message) if plain else producer.send_message_in_transaction_async(message)

    time.sleep(max(0.0, at - time.time()))
    found = in_flight(send, most, SECONDS)
    producer.shutdown()
    return found


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """As docs/services.md advises programs with thousands of sends in flight."""
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def in_processes(folder: Path, processes: int) -> Counted:
    """Several processes together, on one log: of threads, or of many sends in flight in a pair.

    Their sends a second are added. The median and the 99 of 100 are those of the slowest process.
    """
    producer_of(folder, CommitOncePrepared()).shutdown()
    most = IN_FLIGHT // processes if processes == PAIR else 0
    command = [sys.executable, "-m", "benchmarks.programs", str(folder), str(time.time() + 6), str(most)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    found = [[float(figure) for figure in process.communicate()[0].split()] for process in running]
    per_s, median_ms, p99_ms = zip(*found, strict=True)
    return Counted(sum(per_s), max(median_ms), max(p99_ms))


def one_process(folder: Path, at: float, most: int) -> None:
    """A process of :func:`in_processes`: it starts at a time, and prints the figures of its sends."""
    if most:
        with collecting_seldom():
            found = many_in_flight(folder, most=most, at=at)
    else:
        producer = producer_of(folder, CommitOncePrepared())
        send = send_with(producer)
        send()
        time.sleep(max(0.0, at - time.time()))
        found = timed(send, THREADS_EACH, SECONDS)
        producer.shutdown()
    print(found.per_s, found.median_ms, found.p99_ms)


class Rounds:
    """What all rounds found, by what was measured."""

    def __init__(self) -> None:
        self.counted: dict[str, list[Counted]] = defaultdict(list)
        self.to_listener_ms: dict[int, list[float]] = defaultdict(list)
        self.visible_ms: list[float] = []
        self.loads: list[float] = []

    def run(self, folder: Path, peers: dict[str, rocketmq.Rocketmq], database: Orders) -> None:
        """One round: each of them once."""
        folder.mkdir()
        count = self.counted
        count[FLOOR].append(timed(warmed(floor(folder)), 1, SECONDS))
        for threads, name in OURS.items():
            listener = Noting()
            count[name].append(in_threads(folder / str(threads), threads, listener))
            self.to_listener_ms[threads].append(median(listener.since_call_s[WARM_UP:]) * 1000)
        for flush, peer in peers.items():
            count[FLUSHES[flush]].append(Counted(*peer.sends(BODY, MANY, WARM_UP_S, SECONDS)))
        count[TOGETHER].append(in_processes(folder / "processes", PROCESSES))
        count[ASYNC].append(many_in_flight(folder / "async"))
        with collecting_seldom():
            count[SELDOM].append(many_in_flight(folder / "seldom"))
        count[IN_PAIR].append(in_processes(folder / "pair", PAIR))
        count[PLAIN].append(many_in_flight(folder / "plain", plain=True))
        count[ALONE].append(timed(warmed(database.alone()), MANY, SECONDS))
        count[FENCED].append(in_threads(folder / "fenced", MANY, database.listener()))
        log = log_at(folder / "visible")
        self.visible_ms.append(median(soon(log, SECONDS)[0]))
        log.close()
        self.loads.append(os.getloadavg()[0])
        shutil.rmtree(folder)

    def per_s(self, name: str) -> list[float]:
        return [c.per_s for c in self.counted[name]]

    def beside(self, ours: str, peer: str) -> list[float]:
        """Our sends a second divided by a peer's, of each round."""
        return [a / b for a, b in zip(self.per_s(ours), self.per_s(peer), strict=True)]

    @property
    def of_floor(self) -> list[float]:
        """The time of a send of one thread divided by the floor's, of each round."""
        pairs = zip(self.counted[OURS[1]], self.counted[FLOOR], strict=True)
        return [one.median_ms / least.median_ms for one, least in pairs]

    def show(self) -> None:
        """Print what was found."""
        table = Table(title="programs without Spark, one message a send")
        for name in ("who", "a second", "min–max", "median ms", "p99 ms"):
            table.add_column(name, justify="left" if name == "who" else "right")
        for who, found in self.counted.items():
            times = f"{median(c.median_ms for c in found):.1f}", f"{median(c.p99_ms for c in found):.1f}"
            table.add_row(who, f"{median(self.per_s(who)):,.0f}", spread(self.per_s(who), 0), *times)
        console = Console(width=120)
        console.print(table)
        lines = {
            "one thread beside the floor, of its time": self.of_floor,
            f"{TOGETHER} beside 64 threads of one": self.beside(TOGETHER, OURS[MANY]),
            "64 threads with PostgreSQL fences beside the transactions alone": self.beside(FENCED, ALONE),
        }
        for flush, name in FLUSHES.items():
            if name in self.counted:
                lines[f"64 threads beside RocketMQ's, {flush}"] = self.beside(OURS[MANY], name)
                lines[f"{IN_FLIGHT:,} in flight in {PAIR} processes beside RocketMQ's, {flush}"] = self.beside(
                    IN_PAIR, name
                )
        for what, ratios in lines.items():
            console.print(f"{what}: {median(ratios):.3f} ({spread(ratios, 3)})")
        for threads, found_ms in self.to_listener_ms.items():
            what = f"call to call of the transaction listener, {OURS[threads]}"
            console.print(f"{what}: {median(found_ms):.1f} ms ({spread(found_ms, 1)})")
        visible = f"{median(self.visible_ms):.1f} ms ({spread(self.visible_ms, 1)})"
        console.print(f"call of send to call of a PushConsumer's listener: {visible}")
        console.print(f"{os.cpu_count()} processors, load {min(self.loads):.1f}–{max(self.loads):.1f}")

    @property
    def medians(self) -> dict[str, float]:
        """What goes into the results file."""
        of_64 = self.counted[OURS[MANY]]
        found = {
            "producer_1_thread_per_s": round(median(self.per_s(OURS[1])), 1),
            "producer_1_thread_vs_floor": round(median(self.of_floor), 3),
            "producer_8_threads_per_s": round(median(self.per_s(OURS[8])), 1),
            "producer_64_threads_per_s": round(median(self.per_s(OURS[MANY])), 1),
            "producer_64_threads_p99_ms": round(median(c.p99_ms for c in of_64), 1),
            "producer_64_threads_postgresql_vs_alone": round(median(self.beside(FENCED, ALONE)), 3),
            "producer_4096_in_flight_per_s": round(median(self.per_s(ASYNC)), 1),
            "producer_4096_in_flight_collecting_seldom_per_s": round(median(self.per_s(SELDOM)), 1),
            "producer_4096_in_flight_2_processes_per_s": round(median(self.per_s(IN_PAIR)), 1),
            "producer_processes_vs_threads": round(median(self.beside(TOGETHER, OURS[MANY])), 3),
            "producer_call_to_listener_ms": round(median(self.to_listener_ms[MANY]), 1),
            "visible_ms": round(median(self.visible_ms), 1),
        }
        if FLUSHES["ASYNC_FLUSH"] in self.counted:
            for key, ours in (("64_threads", OURS[MANY]), ("4096_in_flight_2_processes", IN_PAIR)):
                ratios = self.beside(ours, FLUSHES["ASYNC_FLUSH"])
                found[f"producer_{key}_vs_rocketmq"] = round(median(ratios), 4)
        return found


def spread(found: list[float], digits: int) -> str:
    return f"{min(found):,.{digits}f}–{max(found):,.{digits}f}"


def rocketmqs(folder: Path, ends: ExitStack) -> dict[str, rocketmq.Rocketmq]:
    """A server for each kind of flush; none, and a sentence, where there is no RocketMQ."""
    try:
        with ExitStack() as until_all_run:
            found = {f: until_all_run.enter_context(rocketmq.running(folder / f, f)) for f in FLUSHES}
            for peer in found.values():
                peer.sends(BODY, MANY, 0, WARM_UP_S)
            ends.enter_context(until_all_run.pop_all())
            return found
    except rocketmq.NoRocketmqError as problem:
        print(f"RocketMQ is left out: {problem}", flush=True)
        return {}


def main() -> None:
    rounds = Rounds()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="txmq-programs-")))
        database = ends.enter_context(orders(folder / "postgres"))
        peers = rocketmqs(folder / "rocketmq", ends)
        for number in range(ROUNDS):
            rounds.run(folder / str(number), peers, database)
            print(f"round {number + 1} of {ROUNDS}, load {rounds.loads[-1]:.1f}", flush=True)
    rounds.show()
    write_medians(rounds.medians)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_process(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
