"""What the processes of the soak do: they live long, nobody kills them, and each looks at what it sees.

::

    sender   sends ``orders``, with a database     driver   a Spark stream writes ``ticks``, another reads both
    job      checks, and all the upkeep            reader   ``log.read`` goes on where it stood
    vacuum   removes what no table names           table    reads ``<log>/messages`` with deltalake alone

What becomes of a message follows from its number (:func:`is_committed`). So a reader knows at once whether it may see
a message, and keeps a bit for each that it saw.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CheckService, SqlTransactionListener, TransactionMQProducer
from tests.support.inside import Graces, Maintainer, Verdicts, half_table, table_files, upkeep
from tests.support.inside import log as log_module

GROUP = "soak"
ORDERS, TICKS = "orders", "ticks"
BATCH = 20
SENDS_A_SECOND = 3.0
TICKS_A_SECOND = 50
GRACES = Graces(reader_s=60.0, audit_s=60.0, idempotency_s=300.0)
UPKEEP_S = 15.0
VACUUM_S = 120.0
TABLE_S = 20.0
REPLACED_FILES_S = 120.0
ORPHAN_AGE_S = 600.0
RETENTION = "5m"
"""Of ``ticks``. ``orders`` are kept for ever."""
ROLLED_BACK, ENDS_BADLY, UNANSWERED = 3, 7, 5
"""Last digits: of messages that are rolled back, of sends whose local transaction fails, and of sends that do not learn
what became of theirs. The checks settle the latter two."""


@dataclass(frozen=True)
class Soak:
    """The folder of a run."""

    root: Path

    @property
    def log(self) -> str:
        return str(self.root / "log")

    @property
    def database(self) -> Path:
        return self.root / "orders.db"

    @property
    def stop(self) -> Path:
        """When it is there, nothing new is written."""
        return self.root / "stop"

    @property
    def over(self) -> Path:
        """When it is there, readers end too."""
        return self.root / "over"

    def open(self) -> None:
        """Make the log and the database."""
        self.root.mkdir(parents=True, exist_ok=True)
        log_module.RETENTION_S_MIN = 60.0
        log = txmq.CommitLog.create(self.log)
        log.create_topic(ORDERS, 4)
        log.create_topic(TICKS, 2, retention=RETENTION)
        orders = listener(self)
        orders.create_fence()
        with sa.create_engine(f"sqlite:///{self.database}").begin() as connection:
            connection.execute(sa.text("CREATE TABLE orders (number INTEGER)"))

    def say(self, process: str, **said: object) -> None:
        """Let the supervisor know how far a process is."""
        file = self.root / f"{process}.json"
        file.with_suffix(".new").write_text(json.dumps(said))
        os.replace(file.with_suffix(".new"), file)

    def said(self, process: str) -> dict[str, int]:
        file = self.root / f"{process}.json"
        found: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
        return found


def is_committed(number: int) -> bool:
    return number // BATCH % 10 != ENDS_BADLY and number % 10 != ROLLED_BACK


class Orders(SqlTransactionListener):
    """Takes orders into the database. Some fail, and of some nobody learns at once that they did not."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Verdicts:
        verdicts = super().execute_local_transaction(batch)
        if int(batch.messages(["body"])["body"][0].as_py()) // BATCH % 10 == UNANSWERED:
            raise TimeoutError("the database committed, and its answer was lost")
        return verdicts


def listener(soak: Soak) -> Orders:
    def take(connection: sa.Connection, batch: txmq.HalfBatch) -> object:
        rows = batch.messages(["transaction_id", "body"]).to_pylist()
        numbers = {row["transaction_id"]: int(row["body"]) for row in rows}
        taken = [{"number": n} for n in numbers.values() if n % 10 != ROLLED_BACK]
        connection.execute(sa.text("INSERT INTO orders VALUES (:number)"), taken)
        if min(numbers.values()) // BATCH % 10 == ENDS_BADLY:
            raise ConnectionError("the database is gone")
        return batch.verdicts(rollback={i for i, n in numbers.items() if n % 10 == ROLLED_BACK})

    return Orders(f"sqlite:///{soak.database}", take, rollback_after=5.0, lock_timeout=30.0)


class Seen:
    """The messages of a topic that a reader saw: each once, none that may not be seen, no offset left out."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.count = 0
        self._next: dict[int, int] = {}
        self._bits = bytearray()

    @property
    def positions(self) -> Mapping[int, int]:
        return self._next

    def add(self, messages: pa.Table) -> None:
        """Look at messages, of each queue in order.

        Raises
        ------
        AssertionError
            When a promise is broken.
        """
        queues, offsets, bodies = (messages[name].to_pylist() for name in ("queue_id", "queue_offset", "body"))
        for queue, offset, body in zip(queues, offsets, bodies, strict=True):
            expected = self._next.get(queue, 0)
            assert offset == expected, f"{self.topic} queue {queue}: offset {offset} came where {expected} was expected"
            self._next[queue] = offset + 1
            self._see(int(body))
        self.count += messages.num_rows

    def _see(self, number: int) -> None:
        assert self.topic == TICKS or is_committed(number), f"{self.topic}: {number} was rolled back, and is visible"
        at, bit = divmod(number, 8)
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        assert not self._bits[at] & 1 << bit, f"{self.topic}: {number} came twice"
        self._bits[at] |= 1 << bit

    def missing(self, expected: Iterable[int]) -> list[int]:
        """Of some numbers those that were not seen."""
        return [n for n in expected if n // 8 >= len(self._bits) or not self._bits[n // 8] & 1 << n % 8]


# ---------------------------------------------------------------- programs
def send(soak: Soak) -> None:
    """Send at an even pace. A send that does not learn its outcome is left to the checks."""
    started, sends = time.monotonic(), 0
    with TransactionMQProducer(soak.log, GROUP, listener(soak), check_interval=None) as producer:
        while not soak.stop.exists():
            numbers = range(sends * BATCH, (sends + 1) * BATCH)
            messages = pa.table({"body": [str(n) for n in numbers], "keys": [f"order-{n}" for n in numbers]})
            producer.send_messages_in_transaction(
                messages, topic=ORDERS, idempotency_key=f"send-{sends}", transaction_per="message"
            )
            sends += 1
            soak.say("sender", sent=sends * BATCH)
            time.sleep(max(0.0, started + sends / SENDS_A_SECOND - time.monotonic()))


def run_job(soak: Soak) -> None:
    """The check job: rounds of checks, and upkeep beside them."""
    over = threading.Event()
    service = CheckService(soak.log, {GROUP: listener(soak)}, transaction_timeout=2.0, transaction_check_interval=2.0)
    rounds = 0

    def note(report: object) -> None:
        nonlocal rounds
        rounds += 1
        soak.say("job", upkeep=rounds)

    maintainer = Maintainer(service.engine, UPKEEP_S, GRACES)
    threads = [
        threading.Thread(target=maintainer.run, args=(over, note), daemon=True),
        threading.Thread(target=service.run, args=(over,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    while not soak.over.exists():
        time.sleep(0.5)
        assert all(thread.is_alive() for thread in threads), "the check job ended"
    over.set()
    for thread in threads:
        thread.join()


def vacuum(soak: Soak) -> None:
    runs = 0
    log = txmq.CommitLog.open(soak.log)
    while not soak.over.exists():
        with log.engine.lock:
            table_files.vacuum(log.engine.tables(), ORPHAN_AGE_S, False)
        runs += 1
        soak.say("vacuum", runs=runs)
        _sleep(soak, VACUUM_S)


def read(soak: Soak) -> None:
    """A program that reads on, with one handle all the time."""
    log = txmq.CommitLog.open(soak.log)
    seen = {topic: Seen(topic) for topic in (ORDERS, TICKS)}
    while not soak.over.exists():
        for topic, those in seen.items():
            those.add(log.read(topic, start=those.positions, columns=["queue_id", "queue_offset", "body"]))
        soak.say("reader", **{topic: those.count for topic, those in seen.items()})
        time.sleep(0.3)
    _require_all(soak, seen)


def read_table(soak: Soak) -> None:
    """What any reader of Delta sees: whole sends, offsets without a gap, nothing that was rolled back."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    looks = 0
    while True:
        last = soak.over.exists()
        try:
            table = DeltaTable(f"{soak.log}/messages").to_pyarrow_table(
                filters=[("topic", "=", ORDERS)], columns=["queue_id", "queue_offset", "body"]
            )
        except (FileNotFoundError, TableNotFoundError):  # nothing drained yet, or merged under our eyes
            _sleep(soak, 1.0)
            continue
        seen = Seen(ORDERS)
        seen.add(table.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")]))
        numbers = pc.cast(pc.cast(table["body"], pa.string()), pa.int64())
        sizes = pc.value_counts(pc.divide(numbers, BATCH)).field("counts")
        parts = pc.filter(sizes, pc.not_equal(sizes, sum(map(is_committed, range(BATCH)))))
        assert len(parts) == 0, f"{len(parts)} sends are there in part"
        looks += 1
        soak.say("table", looks=looks, **{ORDERS: seen.count})
        if last:
            return _require_all(soak, {ORDERS: seen})
        _sleep(soak, TABLE_S)


def drive(soak: Soak) -> None:
    """A Spark driver with a stream that writes, and one that reads what both writers commit."""
    from pyspark.sql import DataFrame

    from tests.crash.session import start_session

    spark = start_session("local[2]", {"spark.driver.memory": "1g", "spark.sql.streaming.minBatchesToRetain": "10"})
    seen = {topic: Seen(topic) for topic in (ORDERS, TICKS)}
    problems: list[BaseException] = []

    def look(frame: DataFrame, batch_id: int) -> None:
        try:
            messages = frame.toArrow().sort_by([(name, "ascending") for name in ("topic", "queue_id", "queue_offset")])
            for topic, those in seen.items():
                those.add(messages.filter(pc.equal(messages["topic"], topic)))
        except BaseException as problem:
            problems.append(problem)
            raise
        soak.say("driver", **{topic: those.count for topic, those in seen.items()})

    columns = "topic string, queue_id int, queue_offset long, body binary"
    reader = spark.readStream.format("txmq").schema(columns).option("path", soak.log)
    reader = reader.option("subscribe", f"{ORDERS},{TICKS}").option("startingOffsets", "earliest").load().writeStream
    reading = (
        reader.option("checkpointLocation", str(soak.root / "cp-read"))
        .trigger(processingTime="3 seconds")
        .foreachBatch(look)
        .start()
    )
    rate = spark.readStream.format("rate").option("rowsPerSecond", TICKS_A_SECOND).load()
    writing = (
        rate.selectExpr("cast(value as string) body")
        .writeStream.format("txmq")
        .options(path=soak.log, topic=TICKS, producerGroup="ticks", transactionListener="none")
        .option("checkpointLocation", str(soak.root / "cp-write"))
        .trigger(processingTime="3 seconds")
        .start()
    )
    while not soak.stop.exists():
        assert writing.isActive, writing.exception()
        assert reading.isActive, (problems, reading.exception())
        time.sleep(1.0)
    writing.stop()
    while not soak.over.exists():
        assert reading.isActive, (problems, reading.exception())
        time.sleep(1.0)
    reading.processAllAvailable()
    reading.stop()
    _require_all(soak, seen)
    spark.stop()


def _require_all(soak: Soak, seen: Mapping[str, Seen]) -> None:
    """Require of a reader, at the very end, that it saw all that was committed."""
    sent = soak.said("sender")["sent"]
    if ORDERS in seen:
        missing = seen[ORDERS].missing(filter(is_committed, range(sent)))
        assert not missing, f"{len(missing)} committed orders were not seen, the first is {missing[0]}"
    if TICKS in seen:
        missing = seen[TICKS].missing(range(seen[TICKS].count))  # the source counts from 0
        assert not missing, f"{len(missing)} ticks were not seen, the first is {missing[0]}"


def _sleep(soak: Soak, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not soak.over.exists():
        time.sleep(0.2)


PROGRAMS: dict[str, Callable[[Soak], None]] = {
    "sender": send,
    "job": run_job,
    "vacuum": vacuum,
    "reader": read,
    "table": read_table,
    "driver": drive,
}


def main(role: str, root: str) -> None:
    half_table.ORPHAN_AGE_S = log_module.ORPHAN_AGE_S = upkeep.ORPHAN_AGE_S = ORPHAN_AGE_S
    table_files.REPLACED_FILES_S = REPLACED_FILES_S
    table_files.history_s = lambda table: 0.0
    log_module.RETENTION_S_MIN = 60.0
    PROGRAMS[role](Soak(Path(root)))


if __name__ == "__main__":
    main(*sys.argv[1:])
