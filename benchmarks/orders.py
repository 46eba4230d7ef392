"""``make bench-orders``: orders into PostgreSQL with their messages, beside what people write without this package.

Each round runs every way once, in turn, over the same micro-batches. The server waits for its disk (``fsync``). Then:

- 1,000,000 orders by key in one micro-batch: seconds, memory of the process that runs the local transaction, bytes of
  the fence
- the same on executors
- calls that wait 20 ms for a partner, by ``PerMessageListener(threads=1, 16, 64)``, beside threads alone
- sends of one order each, by 64 threads and by one: with a fence, without a database, and the database's transactions
  alone
- a check of one half batch of pending transactions by key: executed ones, and others that never ran

Environment: BENCH_ROUNDS (5), BENCH_ROWS a micro-batch (100000), BENCH_BATCHES (8), BENCH_SECONDS of each kind of send
(3), BENCH_MANY rows of the one micro-batch (1000000), BENCH_ONLY: some of the cases, as in ``key,batch,million``. The
results are of the pairs that were both measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

import rmq_spark as txmq
from benchmarks import order_listeners
from benchmarks.fences import Orders, durable, pooled
from benchmarks.programs import MANY as THREADS
from benchmarks.programs import in_threads, log_at, spread, warmed
from benchmarks.report import Pairs, publish, write_medians
from benchmarks.spark import median_ms, micro_batch_ms, session
from benchmarks.throughput import WARM_UP
from benchmarks.timing import Counted, timed
from rmq_spark._core.listeners.transaction_listener import CommitOncePrepared, Verdicts

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
ROWS = int(os.environ.get("BENCH_ROWS", "100000"))
BATCHES = int(os.environ.get("BENCH_BATCHES", "8"))
SECONDS = float(os.environ.get("BENCH_SECONDS", "3"))
IN_ONE_BATCH = int(os.environ.get("BENCH_MANY", "1000000"))
SCHEMA = "order_id long, customer string, amount double"
FENCE = "txmq_fence"
LOOK_EVERY_S = 0.05

Write = Callable[[DataFrame, Path], DataStreamWriter]


# ------------------------------------------------------------------ the ways
def ours(listener: str, by_key: bool = False) -> Write:
    """``format("txmq")`` with a listener of :mod:`benchmarks.order_listeners`, or with none."""

    def write(orders: DataFrame, folder: Path) -> DataStreamWriter:
        log = log_at(folder)
        writer = orders.select("body", *(["order_id"] if by_key else [])).writeStream.format("txmq")
        writer = writer.option("path", log.path).option("topic", "orders").option("producerGroup", "bench")
        writer = writer.option("transactionListener", listener)
        return writer.option("transactionKey", "order_id") if by_key else writer

    return write


def plain(work: Callable[[Path], Callable[[DataFrame, int], None]]) -> Write:
    """``foreachBatch`` with a function of :mod:`benchmarks.order_listeners`."""

    def write(orders: DataFrame, folder: Path) -> DataStreamWriter:
        return orders.writeStream.foreachBatch(work(folder / "messages"))

    return write


def on_executors(orders: DataFrame, folder: Path) -> DataStreamWriter:
    """``foreachBatch`` with a sink whose local transactions run on the executors, by key."""
    sink = txmq.TransactionalSink(
        log_at(folder), topic="orders", producer_group="bench", listener=order_listeners.copying,
        transaction_key="order_id", run_on="executors",
    )  # fmt: skip
    return orders.select("body", "order_id").writeStream.foreachBatch(sink)


def listener(name: str) -> str:
    return f"{order_listeners.__name__}:{name}"


@dataclass(frozen=True)
class Way:
    """How orders get into the table: all of them, but for those that are refused, or none."""

    what: str
    write: Write
    stored: Callable[[int], int] = lambda rows: rows
    costly: bool = False
    """Whether the table has three indexes and a trigger."""


WAYS = {
    "none": Way("transactionListener=none", ours("none"), lambda _: 0),
    "batch": Way("the batch is one transaction, batch.insert", ours(listener("copying"))),
    "key": Way("each order a transaction, batch.insert", ours(listener("copying"), by_key=True)),
    "refused": Way(
        "the same, 1 % refused",
        ours(listener("refusing"), by_key=True),
        lambda rows: rows - len(range(0, rows, order_listeners.REFUSED_OF)),
    ),
    "plain": Way("at least once: COPY by rows on executors, Delta append", plain(order_listeners.by_rows)),
    "plain_pgpq": Way("at least once: COPY by pgpq on executors, Delta append", plain(order_listeners.by_encoder)),
    "executors": Way("each order a transaction, on executors", on_executors),
    "costly_key": Way("each order a transaction, costly table", ours(listener("copying"), by_key=True), costly=True),
    "costly_executors": Way("the same on executors, costly table", on_executors, costly=True),
    "costly_plain": Way("COPY by rows, Delta append, costly table", plain(order_listeners.by_rows), costly=True),
    "table_listener": Way("each order a transaction, TableListener", ours(listener("through_table"), by_key=True)),
}
COMPARED = {
    "orders_key_vs_batch": ("by key, beside the batch as one", "key", "batch"),
    "orders_key_vs_plain": ("by key, beside COPY by rows", "key", "plain"),
    "orders_key_vs_plain_pgpq": ("by key, beside COPY by pgpq", "key", "plain_pgpq"),
    "orders_table_listener_vs_plain": ("TableListener, beside COPY by rows", "table_listener", "plain"),
    "orders_refused_1_percent_vs_none": ("1 % refused, beside none refused", "refused", "key"),
    "orders_executors_vs_plain": ("by key on executors, beside COPY by rows", "executors", "plain"),
    "orders_executors_vs_driver": ("by key on executors, beside the driver", "executors", "key"),
    "orders_costly_executors_vs_plain": ("the same, costly table", "costly_executors", "costly_plain"),
    "orders_costly_executors_vs_driver": ("the same, costly table", "costly_executors", "costly_key"),
    "orders_batch_copy_vs_plain": ("the batch as one, beside COPY by rows", "batch", "plain"),
    "orders_batch_copy_vs_no_listener": ("the batch as one, beside no listener", "batch", "none"),
}
CASES = (*WAYS, "million", "million_executors", "calls", "sends", "checks")


def chosen() -> list[str]:
    """The cases of BENCH_ONLY, or all, but for what this version does not have."""
    only = [name.strip() for name in os.environ.get("BENCH_ONLY", ",".join(CASES)).split(",")]
    wrong = [name for name in only if name not in CASES]
    if wrong:
        raise SystemExit(f"BENCH_ONLY has {wrong[0]!r}, which is none of {', '.join(CASES)}")
    if "table_listener" in only and not hasattr(txmq, "TableListener"):
        print("table_listener is left out: rmq_spark has no TableListener", flush=True)
        only.remove("table_listener")
    return only


# ------------------------------------------------------------------ micro-batches
def write_input(spark: SparkSession, folder: Path, sizes: Sequence[int]) -> None:
    """A folder of orders a micro-batch, as Parquet with a file for each of two tasks."""
    first = 0
    for number, rows in enumerate(sizes):
        ids = spark.range(first, first + rows, numPartitions=2).withColumnRenamed("id", "order_id")
        customer = F.concat(F.lit("customer-"), F.col("order_id") % 1000)
        orders = ids.select("order_id", customer.alias("customer"), (F.col("order_id") % 10007 / 100).alias("amount"))
        orders.write.parquet(str(folder / f"{number:04}"))
        first += rows


class Runs:
    """Streams into one database, which is empty when each begins."""

    def __init__(self, spark: SparkSession, root: Path, engine: sa.Engine) -> None:
        self.spark, self.root, self.engine = spark, root, engine
        self.pid = Path(os.environ[order_listeners.PID])
        with engine.begin() as connection:
            connection.exec_driver_sql(order_listeners.MAKE_TABLE)
        txmq.SqlTransactionListener(engine).create_fence()
        write_input(spark, root / "in", [ROWS] * BATCHES)

    def _orders(self, folder: Path) -> DataFrame:
        frame = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 2).parquet(f"{folder}/*")
        return frame.withColumn("body", F.to_json(F.struct(*order_listeners.COLUMNS)))

    @contextmanager
    def _run(self, way: Way, source: Path) -> Iterator[DataStreamWriter]:
        """A stream that has not begun. Its files are gone at the end, and its rows when the next one begins."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql(f"TRUNCATE {order_listeners.TABLE}, {FENCE}")
            cheap = order_listeners.MAKE_CHEAP
            for statement in (*cheap, *order_listeners.MAKE_COSTLY) if way.costly else cheap:
                connection.exec_driver_sql(statement)
        with tempfile.TemporaryDirectory(dir=self.root) as folder:
            writer = way.write(self._orders(source), Path(folder))
            yield writer.option("checkpointLocation", f"{folder}/checkpoint")
        self.pid.unlink(missing_ok=True)

    def _require(self, rows: int) -> None:
        found = self._value(f"SELECT count(*) FROM {order_listeners.TABLE}")
        assert found == rows, f"the table has {found} orders, and {rows} are expected"

    def _value(self, query: str) -> int:
        with self.engine.connect() as connection:
            return int(connection.exec_driver_sql(query).scalar_one())

    def rate(self, name: str) -> float:
        """Rows a second of a way: of the micro-batches that are warm, the median."""
        with self._run(WAYS[name], self.root / "in") as writer:
            ms = median_ms(writer, WARM_UP)
            self._require(WAYS[name].stored(ROWS * BATCHES))
        return ROWS / ms * 1000

    def in_one_batch(self, name: str = "key") -> dict[str, float]:
        """Many orders by key in one micro-batch, after a small one."""
        source = self.root / "in one batch"
        if not source.exists():
            write_input(self.spark, source, [1000, IN_ONE_BATCH])
        # On executors the driver is this process: the sink has no other.
        pid = self.pid if name == "key" else Path(f"{self.root}/own-pid")
        pid.write_text(str(os.getpid()))
        with self._run(WAYS[name], source) as writer, peak_mb(pid) as peak:
            (ms,) = micro_batch_ms(writer, 1)
            self._require(IN_ONE_BATCH + 1000)
            size = self._value(f"SELECT pg_total_relation_size('{FENCE}')")
        return {"s": ms / 1000, "driver_mb": peak[0], "fence_bytes": size}


@contextmanager
def peak_mb(pid: Path) -> Iterator[list[float]]:
    """The most memory that the process named in a file has had, filled in at the end."""
    ended, peak = threading.Event(), [0.0]

    def look() -> None:
        while not ended.wait(LOOK_EVERY_S):
            try:
                status = Path(f"/proc/{pid.read_text()}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            said = dict(line.split(":", 1) for line in status.splitlines())
            peak[0] = max(peak[0], float(said.get("VmHWM", "0 kB").split()[0]) / 1024)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield peak
    finally:
        ended.set()
        looking.join()


def micro_batches(runs: Runs, names: Sequence[str]) -> None:
    """Each round each way; the first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS + 1):
        for name in names:
            rates[name].append(runs.rate(name))
        said = ", ".join(f"{name} {rates[name][-1]:,.0f}" for name in names)
        print(f"round {number} of {ROUNDS}, rows/s: {said}, load {os.getloadavg()[0]:.1f}", flush=True)
    for name in names:
        print(f"{WAYS[name].what}: {median(rates[name][1:]):,.0f} rows/s ({spread(rates[name][1:], 0)})")
    pairs = [
        Pairs(key, what, "rows/s", rates[mine][1:], rates[peer][1:], True)
        for key, (what, mine, peer) in COMPARED.items()
        if mine in names and peer in names
    ]
    if pairs:
        title = f"{ROWS:,} orders of three columns a micro-batch, one message each, into PostgreSQL"
        publish(title, pairs, "the other")


def one_micro_batch(runs: Runs, way: str = "key") -> None:
    found = [runs.in_one_batch(way) for _ in range(ROUNDS)]
    title = "orders_in_one_batch" if way == "key" else f"orders_in_one_batch_{way}"
    medians = {f"{title}_{name}": median(one[name] for one in found) for name in found[0]}
    s, mb, size = ([one[name] for one in found] for name in found[0])
    print(
        f"{IN_ONE_BATCH:,} orders by key in one micro-batch ({way}): {median(s):.1f} s ({spread(s, 1)}), "
        f"{median(mb):,.0f} MB "
        f"({spread(mb, 0)}) in the process of the local transaction, {median(size):,.0f} bytes of fence"
    )
    write_medians({name: round(value, 2) for name, value in medians.items()})


# ------------------------------------------------------------------ calls
CALL_S = 0.02


class Partner:
    """Answers after a while."""

    def execute_local_transaction(self, msg: txmq.MessageExt, arg: object) -> txmq.LocalTransactionState:
        time.sleep(CALL_S)
        return txmq.COMMIT_MESSAGE

    def check_local_transaction(self, msg: txmq.MessageExt) -> txmq.LocalTransactionState:
        return txmq.COMMIT_MESSAGE


def calls(root: Path) -> None:
    """Calls a second of a partner that takes 20 ms, by half batches of 200 calls a thread, beside threads alone."""
    pairs = []
    for threads in (1, 16, 64):
        rates: dict[str, list[float]] = {"ours": [], "alone": []}
        for number in range(ROUNDS + 1):
            log, count = log_at(root / f"calls-{threads}-{number}"), 200 * threads
            messages = pa.table({"body": [b"%d" % n for n in range(count)]})
            listener = txmq.PerMessageListener(Partner(), threads=threads)
            with txmq.TransactionMQProducer(log, "partner", listener, check_interval=None) as producer:
                began = time.perf_counter()
                producer.send_messages_in_transaction(messages, topic="orders", transaction_per="message")
                rates["ours"].append(count / (time.perf_counter() - began))
            log.close()
            with ThreadPoolExecutor(threads) as pool:
                began = time.perf_counter()
                list(pool.map(lambda _: time.sleep(CALL_S), range(count)))
                rates["alone"].append(count / (time.perf_counter() - began))
        ours, alone = rates["ours"][1:], rates["alone"][1:]
        pairs.append(
            Pairs(f"partner_calls_{threads}_threads_vs_alone", f"{threads} threads", "calls/s", ours, alone, True)
        )
    publish("calls of 20 ms by PerMessageListener, with the half batch's commits", pairs, "threads alone")


# ------------------------------------------------------------------ sends
def sends(root: Path, database: Orders) -> None:
    """Threads that send an order each, with a fence and without a database, and that only insert an order."""
    found: dict[tuple[str, int], list[Counted]] = {}
    for number in range(ROUNDS + 1):
        for threads in (THREADS, 1):
            folder = root / f"sends-{number}-{threads}"
            folder.mkdir()
            counted = {
                "fence": in_threads(folder / "fence", threads, database.listener()),
                "none": in_threads(folder / "none", threads, CommitOncePrepared()),
                "database": timed(warmed(database.alone()), threads, SECONDS),
            }
            for name, one in counted.items():
                found.setdefault((name, threads), []).append(one)
            shutil.rmtree(folder)
    for (name, threads), each in found.items():
        usual, p99 = median(one.median_ms for one in each[1:]), median(one.p99_ms for one in each[1:])
        rate = median(one.per_s for one in each[1:])
        print(f"{name}, threads: {threads}: {rate:,.0f} a second, median {usual:.1f} ms, p99 {p99:.1f} ms")

    def per_s(name: str) -> list[float]:
        return [one.per_s for one in found[name, THREADS][1:]]

    def ms(name: str) -> list[float]:
        return [one.median_ms for one in found[name, 1][1:]]

    publish(
        "sends of one order with a fence in PostgreSQL",
        [
            Pairs("orders_sends_vs_none", f"{THREADS} threads, beside sends without a database", "a second",
                  per_s("fence"), per_s("none"), True),
            Pairs("orders_sends_vs_database", f"{THREADS} threads, beside the database alone", "a second",
                  per_s("fence"), per_s("database"), True),
            Pairs("orders_send_ms_vs_none", "one thread, beside a send without a database", "ms",
                  ms("fence"), ms("none"), False),
            Pairs("orders_send_ms_vs_database", "one thread, beside the database alone", "ms",
                  ms("fence"), ms("database"), False),
        ],
        "the other",
    )  # fmt: skip


# ------------------------------------------------------------------ checks
class LeavesPending(txmq.SqlTransactionListener):
    """Runs the local transaction, or does not, and says UNKNOWN, as if its process had died. A check is timed."""

    def __init__(self, engine: sa.Engine, executes: bool) -> None:
        super().__init__(engine, lambda connection, batch: None, rollback_after=0)
        self.executes = executes
        self.check_s = 0.0

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Verdicts:
        if self.executes:
            super().execute_local_transaction(batch)
        return txmq.UNKNOWN

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Verdicts:
        began = time.perf_counter()
        answer = super().check_local_transaction(batch)
        self.check_s = time.perf_counter() - began
        return answer


def checks(root: Path, engine: sa.Engine) -> None:
    """One half batch of pending transactions by key: those that were executed, and those that a check has to bury."""
    ids = pa.array(range(ROWS), pa.int64())
    orders = pa.table({"body": [f'{{"order_id":{i}}}' for i in range(ROWS)], "order_id": ids})
    found: dict[str, list[float]] = {"executed": [], "buried": []}
    for number in range(ROUNDS + 1):
        for name, seconds in found.items():
            folder = root / f"checks-{number}-{name}"
            log, asked = log_at(folder), LeavesPending(engine, executes=name == "executed")
            asked.create_fence()
            with txmq.TransactionMQProducer(log, "bench", asked, check_interval=None) as producer:
                producer.send_messages_in_transaction(orders, topic="orders", transaction_key="order_id")
            report = txmq.CheckService(log, {"bench": asked}, transaction_timeout=0).run_once()
            answered = report.committed if name == "executed" else report.rolled_back
            assert answered.messages == ROWS, report
            seconds.append(asked.check_s)
            log.close()
            shutil.rmtree(folder)
    for name, seconds in found.items():
        said = f"{median(seconds[1:]):.2f} s ({spread(seconds[1:], 2)})"
        print(f"a check of one half batch of {ROWS:,} transactions by key, {name}: {said}")
    write_medians({f"orders_check_{name}_s": round(median(seconds[1:]), 3) for name, seconds in found.items()})


def main() -> None:
    names = chosen()
    with ExitStack() as ends:
        root = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="txmq-orders-")))
        url = ends.enter_context(durable(root / "postgres"))
        engine = ends.enter_context(pooled(url))
        # The workers of Spark inherit these.
        os.environ[order_listeners.URL] = url.render_as_string(hide_password=False)
        os.environ[order_listeners.PID] = str(root / "pid")
        ways = [name for name in names if name in WAYS]
        if ways or "million" in names or "million_executors" in names:
            spark = session()
            ends.callback(spark.stop)
            runs = Runs(spark, root, engine)
            if ways:
                micro_batches(runs, ways)
            if "million" in names:
                one_micro_batch(runs)
            if "million_executors" in names:
                one_micro_batch(runs, "executors")
        if "calls" in names:
            calls(root)
        if "sends" in names:
            sends(root, Orders(engine))
        if "checks" in names:
            checks(root, engine)


if __name__ == "__main__":
    main()
