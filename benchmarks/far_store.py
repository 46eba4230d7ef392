"""``make bench-store``: what a log costs on an object store that answers late.

A real S3 server, and in front of it proxies whose answers come 30 and 100 ms later, or at once. One log is used through
each of them in turn: single sends by one thread and by 64, processes that race, a stream's micro-batches, a round of
checks, a drain, and a send by a program that was away while others made hundreds of commits.

Environment: BENCH_ROUNDS (3), BENCH_SECONDS of each of what runs for a time (20).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import rmq_spark as txmq
from benchmarks.spark import median_ms, session
from benchmarks.throughput import WARM_UP, stream, write_input
from benchmarks.timing import timed
from tests.torture.s3.proxy import proxy
from tests.torture.s3.server import running

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "20"))
DELAYS_MS = (0, 30, 100)
SENDS = 8
THREADS = 64
PROCESSES = 8
AWAY = 250
"""Sends of others, two commits each, while a program sends nothing."""
BATCHES = {100: 6, 50_000: 5}
"""Micro-batches by the number of their messages."""
BODY = b'{"order_id": 12345, "item": "tea", "quantity": 3}'

Options = dict[str, str]


def producer_of(path: str, options: Options) -> txmq.TransactionMQProducer:
    return txmq.TransactionMQProducer(path, "bench", check_interval=None, storage_options=options).start()


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Rounds:
    """The figures of all rounds, by what was measured and by how late the store answers."""

    def __init__(self, path: str, options: dict[int, Options], folder: Path) -> None:
        self.path, self.options, self.folder = path, options, folder
        self.found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.spark = session()
        for rows, batches in BATCHES.items():
            write_input(self.spark, folder / str(rows), rows, batches)

    def run(self, number: int) -> None:
        away = {ms: producer_of(self.path, options) for ms, options in self.options.items()}
        message = txmq.Message("orders", BODY, keys="12345")
        for ms, producer in away.items():
            producer.send(message)
            each = [seconds(lambda producer=producer: producer.send(message)) for _ in range(SENDS)]
            self.found["a send, one thread: s"][ms].append(median(each))
        with producer_of(self.path, self.options[0]) as other:
            for _ in range(AWAY):
                other.send(message)
        for ms, producer in away.items():
            self.found[f"the first send after {2 * AWAY} commits of others: s"][ms].append(
                seconds(lambda producer=producer: producer.send(message))
            )
            counted = timed(lambda producer=producer: producer.send(message), THREADS, SECONDS)
            self.found[f"sends a second, {THREADS} threads"][ms].append(counted.per_s)
            producer.shutdown()
        for ms, options in self.options.items():
            sent, failed = in_processes(self.path, options)
            self.found[f"sends a second, {PROCESSES} processes that race"][ms].append(sent / SECONDS)
            self.found[f"of these failed, {PROCESSES} processes"][ms].append(failed)
        log = txmq.CommitLog.open(self.path, storage_options=self.options[0])
        log.drain()  # so that each drain below has the same micro-batches to do
        log.close()
        for ms, options in self.options.items():
            for rows in BATCHES:
                took = median_ms(self._writer(rows, options, self.folder / f"cp{number}-{ms}-{rows}"), WARM_UP)
                self.found[f"a micro-batch of {rows:,} messages: s"][ms].append(took / 1000)
            log = txmq.CommitLog.open(self.path, storage_options=options)
            log.refresh()
            service = txmq.CheckService(log, {}, transaction_timeout=3600)
            service.run_once()
            self.found["a round of checks that finds nothing: s"][ms].append(seconds(service.run_once))
            self.found["a drain: s"][ms].append(seconds(log.drain))
            log.close()

    def _writer(self, rows: int, options: Options, checkpoint: Path) -> object:
        writer = stream(self.spark, self.folder / str(rows), 2).writeStream.format("txmq").option("path", self.path)
        for name, value in options.items():
            writer = writer.option(f"storage.{name}", value)
        writer = writer.option("topic", "orders").option("producerGroup", "bench")
        return writer.option("transactionListener", "none").option("checkpointLocation", str(checkpoint))

    def publish(self) -> None:
        table = Table(title="A log on a store that answers late: median (least–most)")
        table.add_column("what")
        for ms in self.options:
            table.add_column(f"{ms} ms later", justify="right")
        for what, by_delay in self.found.items():
            table.add_row(what, *(f"{median(f):,.2f} ({min(f):,.2f}–{max(f):,.2f})" for f in by_delay.values()))
        console = Console(width=140)
        console.print(table)
        console.print(f"{ROUNDS} rounds, {os.cpu_count()} processors")


def in_processes(path: str, options: Options) -> tuple[int, int]:
    """How many sends several processes made, each one after the other, and how many of these failed. They begin
    together, when each has sent one."""
    environment = {**os.environ, "BENCH_STORE": json.dumps(options)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(
                [sys.executable, "-m", "benchmarks.far_store", path],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            ))
            for _ in range(PROCESSES)
        ]  # fmt: skip
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        at = time.time() + 1
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{at}\n")
            process.stdin.flush()
        found = [process.communicate()[0] for process in processes]
    sent, failed = zip(*((int(n) for n in text.split()) for text in found), strict=True)
    return sum(sent), sum(failed)


def one_process(path: str) -> None:
    """A process of :func:`in_processes`: it prints how many sends it made, and how many failed."""
    message = txmq.Message("orders", BODY, keys="12345")
    sent = failed = 0
    with producer_of(path, json.loads(os.environ["BENCH_STORE"])) as producer:
        producer.send(message)
        print("ready", flush=True)
        at = float(sys.stdin.readline())
        time.sleep(max(0.0, at - time.time()))
        while time.time() < at + SECONDS:
            try:
                producer.send(message)
                sent += 1
            except txmq.errors.TxmqError:
                failed += 1
    print(sent, failed)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="txmq_store_"))
    (folder / "store").mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(running(folder / "store"))
        path = f"{server.bucket('shop')}/log"
        options = {
            ms: server.storage_options(stack.enter_context(proxy(server.endpoint, delay_s=ms / 1000)).endpoint)
            for ms in DELAYS_MS
        }
        log = txmq.CommitLog.create(path, storage_options=server.storage_options())
        log.create_topic("orders")
        log.close()
        rounds = Rounds(path, options, folder)
        for number in range(ROUNDS):
            rounds.run(number)
            rounds.publish()
        rounds.spark.stop()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_process(sys.argv[1])
    else:
        main()
