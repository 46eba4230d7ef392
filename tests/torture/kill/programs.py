"""What the processes of the kill matrix do: a producer, a checker, upkeep and a reader of one shop.

A folder holds the commit log, the shop's database, the history, and what the processes know of each other. Every
process may be killed at any moment and is started anew.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructType

import rmq_spark as txmq
from rmq_spark import CheckService, SqlTransactionListener, TransactionMQProducer
from rmq_spark._core.runtime import failpoints
from rmq_spark.errors import HalfBatchLeftError, LocalTransactionError, StaleAttemptError, UnresolvedTransactionError
from tests.support.inside import (
    Graces,
    TxmqDataSource,
    Verdicts,
    maintain,
    normalize_verdicts,
    op_merge,
    table_files,
)
from tests.support.limits import set_limits
from tests.torture.judge.history import History, Kind, Phase, payload_hash
from tests.torture.judge.observation import READ_COLUMNS, note_messages, note_messages_table
from tests.torture.kill.points import Fate, arm, name_of, reach

GROUP = "shop"
TOPIC = "orders"
QUEUES = 2
PERS = ("batch", "message", "key")
ROWS = 6
CHECKS_MAX = 3
ORPHAN_AGE_S = 30.0
"""vacuum's age limit here, for all processes: short enough that it removes what the dead left behind."""
GRACES = Graces(reader_s=0.3, audit_s=2.0, idempotency_s=86_400.0)
"""Short enough that half batches leave while their producers sleep. What is retried is remembered."""
REPLACED_FILES_S = 3.0
LIMITS = {
    "ORPHAN_AGE_S": ORPHAN_AGE_S,
    "STAGED_S_MAX": ORPHAN_AGE_S,
    "OP_FILES_MAX": 6,
    "REPLACED_FILES_S": REPLACED_FILES_S,
    "STRIPPED_BYTES_MIN": 1,
}
READER_SCHEMA = StructType()
for _name in READ_COLUMNS:
    _type = {"queue_id": IntegerType(), "queue_offset": LongType(), "body": BinaryType()}.get(_name, StringType())
    READER_SCHEMA.add(_name, _type)


@dataclass(frozen=True)
class Shop:
    """A folder of a run."""

    root: Path

    @property
    def log(self) -> str:
        return str(self.root / "log")

    @property
    def database(self) -> Path:
        return self.root / "orders.db"

    @property
    def stop(self) -> Path:
        """While it is not there, programs go on."""
        return self.root / "stop"

    @property
    def sent(self) -> Path:
        """A file for each batch whose send came back."""
        return self.root / "sent"

    @property
    def reached(self) -> Path:
        """A file for each process that came to its point."""
        return self.root / "reached"

    @property
    def left(self) -> Path:
        """A folder a table, with a copy of each file that has left it because what it held was over."""
        return self.root / "left"

    def keep(self, table: str, paths: Sequence[str]) -> None:
        """Keep copies of files that are about to leave a table."""
        folder = self.left / table
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with suppress(FileExistsError, FileNotFoundError):  # another process was faster
                os.link(f"{self.log}/{table}/{path}", folder / path)

    @property
    def readings(self) -> Path:
        """A file for each reading that was noted to its end: who dies in between has not seen half of a transaction."""
        return self.root / "readings"

    def history(self) -> History:
        return History(self.root / "history.jsonl")

    def open(self) -> None:
        """Make it: an empty log, and a database with its fence."""
        for folder in (self.root, self.sent, self.readings):
            folder.mkdir(parents=True, exist_ok=True)
        txmq.CommitLog.create(self.log).create_topic(TOPIC, QUEUES)
        with sqlite3.connect(self.database) as database:
            database.execute("CREATE TABLE orders (body TEXT, half_id TEXT, transaction_id TEXT, attempt INTEGER)")
            database.execute("CREATE TABLE refused (half_id TEXT, transaction_id TEXT, attempt INTEGER)")
        listener(self, self.history(), "main").create_fence()


def per_of(batch: int) -> str:
    return PERS[batch % len(PERS)]


def messages_of(batch: int) -> pa.Table:
    """The same at every try: a few messages with keys of their own."""
    numbers = range(ROWS)
    columns = {"body": [f"{batch}.{n}" for n in numbers], "sharding_key": [f"{batch}.{n % 2}" for n in numbers]}
    if per_of(batch) == "key":
        columns["k"] = [str(n % 3) for n in numbers]
    return pa.table(columns)


class ShopListener(SqlTransactionListener):
    """Takes orders into the database, and notes what it was asked and what it said."""

    def __init__(self, url: str, work: Callable[..., object], history: History, process: str, **more: float) -> None:
        super().__init__(url, work, **more)  # type: ignore[arg-type]
        self._history, self._process = history, process

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Verdicts:
        verdicts = super().execute_local_transaction(batch)
        self._note(Kind.EXECUTE, Phase.OK, batch, verdicts)
        return verdicts

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Verdicts:
        self._note(Kind.CHECK, Phase.BEGIN, batch, None)
        verdicts = super().check_local_transaction(batch)
        self._note(Kind.CHECK, Phase.OK, batch, verdicts)
        return verdicts

    def _note(self, kind: Kind, phase: Phase, batch: txmq.HalfBatch, verdicts: Verdicts) -> None:
        ids = batch.transactions["transaction_id"].to_pylist()
        said: list[str | None] = [None] * len(ids)
        if verdicts is not None:
            said = [str(v.state) for v in normalize_verdicts(verdicts, batch).each(len(ids))]
        for transaction_id, verdict in zip(ids, said, strict=True):
            self._history.note(
                kind, phase, self._process, half_id=batch.half_id, attempt=batch.attempt,
                transaction_id=transaction_id, verdict=verdict,
            )  # fmt: skip


def listener(shop: Shop, history: History, process: str, chance: random.Random | None = None) -> ShopListener:
    """The shop's listener. With a ``chance`` its work is sometimes slow, and sometimes fails."""

    def take(connection: sa.Connection, batch: txmq.HalfBatch) -> object:
        if chance is not None and chance.random() < 0.15:
            raise ConnectionError("the shop is closed for a moment")
        name = "transaction_key" if batch.transaction_per == "key" else "transaction_id"
        rows = batch.messages(["transaction_id", "transaction_key", "body"]).to_pylist()
        refused = {r[name] for r in rows if _is_refused(r["body"].decode(), batch.transaction_per)}
        taken = [
            {"body": r["body"].decode(), "half_id": batch.half_id, "id": r["transaction_id"], "attempt": batch.attempt}
            for r in rows
            if r[name] not in refused
        ]
        if taken:
            connection.execute(sa.text("INSERT INTO orders VALUES (:body, :half_id, :id, :attempt)"), taken)
        # What it refuses is written down in the same database transaction.
        said_no = {r["transaction_id"] for r in rows if r[name] in refused}
        noted = [{"half_id": batch.half_id, "id": i, "attempt": batch.attempt} for i in sorted(said_no)]
        if noted:
            connection.execute(sa.text("INSERT INTO refused VALUES (:half_id, :id, :attempt)"), noted)
        reach("executing", batch)
        if chance is not None and chance.random() < 0.2:
            time.sleep(1.0)
        return batch.verdicts(rollback=refused)

    return ShopListener(f"sqlite:///{shop.database}", take, history, process, rollback_after=1.0, lock_timeout=0.3)


def _is_refused(body: str, per: str) -> bool:
    batch, number = (int(n) for n in body.split("."))
    return {"batch": batch % 4 == 0, "message": number % 4 == 1, "key": number % 3 == 2}[per]


# ---------------------------------------------------------------- programs
def produce(shop: Shop, history: History, process: str, chance: random.Random, batches: Sequence[int]) -> None:
    """Send batches under an idempotency key each; one sent before, or by another right now, is a retry."""
    orders = listener(shop, history, process, chance)
    with TransactionMQProducer(shop.log, GROUP, orders, on_listener_error="fail", check_interval=None) as producer:
        producer.two_phase.leases.lease_s = 0.9
        producer.two_phase.replay_check_timeout_s = 3.0
        for batch in batches:
            if shop.stop.exists():
                return
            send(shop, producer, history, process, batch)


def send(shop: Shop, producer: TransactionMQProducer, history: History, process: str, batch: int) -> None:
    note = partial(note_send, history, process, batch)
    note(Phase.BEGIN)
    per = per_of(batch)
    try:
        result = producer.send_messages_in_transaction(
            messages_of(batch), topic=TOPIC, idempotency_key=f"b{batch}",
            transaction_key="k" if per == "key" else None, transaction_per=None if per == "key" else per,
        )  # fmt: skip
    except (LocalTransactionError, UnresolvedTransactionError, StaleAttemptError) as problem:
        note(Phase.UNKNOWN, type(problem).__name__)  # pending: a retry or a check goes on
        return
    except HalfBatchLeftError as problem:  # a check has rolled it back, and its messages have left since
        note(Phase.UNKNOWN, type(problem).__name__)
        (shop.sent / str(batch)).touch()
        return
    verdict = str(result.local_transaction_state)
    note(Phase.OK, verdict if per == "batch" else None)
    (shop.sent / str(batch)).touch()


def note_send(history: History, process: str, batch: int, phase: Phase, verdict: str | None = None) -> None:
    """What a sender knows of its send, message by message."""
    for n, row in enumerate(messages_of(batch).to_pylist()):
        history.note(
            Kind.SEND, phase, process, payload=payload_hash(row["body"]), key=row["sharding_key"],
            sequence=n, topic=TOPIC, batch_id=batch, verdict=verdict, operation=f"{process}.{batch}",
        )  # fmt: skip


def check(shop: Shop, history: History, process: str, chance: random.Random) -> None:
    """Rounds of checks, many more than anybody would run."""
    service = CheckService(
        shop.log,
        {GROUP: listener(shop, history, process)},
        transaction_timeout=0.2,
        transaction_check_max=CHECKS_MAX,
    )
    while not shop.stop.exists():
        service.run_once()
        time.sleep(chance.uniform(0.05, 0.3))


def keep_up(shop: Shop, history: History, process: str, chance: random.Random) -> None:
    """What maintenance does, and what other people's maintenance does: checkpoints, log clean-up."""
    from deltalake import DeltaTable

    _keep_what_leaves(shop)

    while not shop.stop.exists():
        log = txmq.CommitLog.open(shop.log)
        what = chance.choice(["mark", "merge", "maintain", "maintain", "checkpoint", "vacuum", "read"])
        if what == "mark":
            log.engine.ledger.mark()
        elif what == "merge":
            log.engine.ledger.refresh()
            op_merge.compact_op(log.engine.op_table)
        elif what == "maintain":
            maintain(log.engine, GRACES)
        elif what == "vacuum":
            log.vacuum()
            reach("vacuumed")
        elif what == "read":
            _read_all(shop, log, history, process, f"{process}.{time.time_ns()}")
        else:
            table = DeltaTable(f"{shop.log}/{chance.choice(['half', 'op'])}")
            table.create_checkpoint()
            reach("checkpoint made")
            table.cleanup_metadata()
        time.sleep(chance.uniform(0.05, 0.4))


def _keep_what_leaves(shop: Shop) -> None:
    """The judge looks at everything that ever was: keep copies of what leaves, is stripped and is pruned."""

    def keep(point: str, **known: Any) -> None:
        if name_of(point, **known) in ("leaving begins", "stripping begins", "pruning begins"):
            shop.keep(known["table"], known["change"].remove)
        if before is not None:
            before(point, **known)

    before = failpoints.set_hook(keep)


def read_on(shop: Shop, history: History, process: str, chance: random.Random) -> None:
    """A consumer that keeps its offsets in a file, through the source that Spark uses."""
    stored = shop.root / "offsets.json"
    options = {"path": shop.log, "subscribe": TOPIC, "startingOffsets": "earliest"}
    reader = TxmqDataSource(options).streamReader(READER_SCHEMA)
    start = json.loads(stored.read_text()) if stored.exists() else reader.initialOffset()
    polls = 0
    while not shop.stop.exists():
        end = reader.latestOffset(start, ReadAllAvailable())
        if end == start:
            time.sleep(chance.uniform(0.02, 0.1))
            continue
        parts = reader.partitions(start, end)
        reach("planned")
        operation = f"{process}.{polls}"
        polls += 1
        for part in parts:
            for batch in reader.read(part):
                reach("reading")
                note_messages(history, Kind.POLL, process, operation, pa.Table.from_batches([batch]))
        for queue, offset in end[TOPIC].items():
            begin = start.get(TOPIC, {}).get(queue, 0)
            history.note(
                Kind.POLLED, Phase.OK, process, operation=operation, topic=TOPIC, queue_id=int(queue),
                queue_offset=begin, next_offset=offset,
            )  # fmt: skip
        reach("read")
        stored.with_suffix(".new").write_text(json.dumps(end))
        reach("offsets written")
        os.replace(stored.with_suffix(".new"), stored)
        reach("offsets stored")
        start = end


def _read_all(shop: Shop, log: txmq.CommitLog, history: History, process: str, operation: str) -> None:
    messages = log.read(TOPIC, columns=READ_COLUMNS)
    note_messages(history, Kind.READ, process, operation, messages, log.engine.op_table.version)
    note_messages_table(history, process, operation, shop.log)
    (shop.readings / operation).touch()


# ---------------------------------------------------------------- their beginning
PROGRAMS: dict[str, Callable[..., None]] = {
    "producer": produce,
    "checker": check,
    "upkeep": keep_up,
    "reader": read_on,
}


def run(role: str, root: str, process: str, seed: int, fate: Fate | None, *arguments: object) -> None:
    """The body of a process: its role, with a fate or without. What it prints is kept beside the log."""
    shop = Shop(Path(root))
    out = os.open(shop.root / f"{process}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    set_limits(pytest.MonkeyPatch(), **LIMITS)
    table_files.history_s = lambda table: 0.0
    if fate is not None:
        arm(fate, shop.reached)
    PROGRAMS[role](shop, shop.history(), process, random.Random(seed), *arguments)
