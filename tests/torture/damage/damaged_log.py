"""A commit log with something of everything in it, and everything that can be asked of it: for tests that damage its
files and compare the answers.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql.streaming.datasource import ReadAllAvailable

from rmq_spark import (
    COMMIT_MESSAGE,
    CheckService,
    CommitLog,
    HalfBatch,
    LocalTransactionState,
    Message,
    TransactionListener,
    TransactionMQProducer,
)
from rmq_spark.errors import CorruptLogError, VerdictConflictError
from tests.support.half_batches import commit, count_check, decide_one, pending, prepare, roll_back, same_half_id, split
from tests.support.inside import (
    IDEMPOTENCY_S,
    PROPERTIES,
    Graces,
    RowState,
    TxmqReader,
    TxmqStreamReader,
    Who,
    half_header,
    maintain,
    op_merge,
)
from tests.support.source_logs import source_schema

GROUP = "group"  # of tests.support.half_batches
TOPICS = {"orders": 3, "points": 1}
TABLES = ("half", "op", "messages", "topics")
STABLE_COLUMNS = ("topic", "queue_id", "queue_offset", "msg_id", "tags", "keys", "sharding_key", "properties", "body")
"""Columns whose values do not depend on when a message was sent or committed."""


class AlwaysCommit(TransactionListener):
    """Answers COMMIT_MESSAGE to everything."""

    def execute_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
        return COMMIT_MESSAGE

    def check_local_transaction(self, batch: HalfBatch) -> LocalTransactionState:
        return COMMIT_MESSAGE


# ---------------------------------------------------------------- making it
def build(path: Path) -> None:
    """Make the log: half batches of every kind and state, of which some have left; compacted, marked, checkpointed,
    cleaned up, vacuumed."""
    log = CommitLog.create(path, queues=2)
    for topic, queues in TOPICS.items():
        log.create_topic(topic, queues)
    commit(log, prepare(log, 0, 40, partitions=2))
    by_message = prepare(log, 1, _columns(1, 30), per="message")
    rest, thirds = split(pending(log, by_message), 3)
    decide_one(log.engine, by_message, 1, commit=rest, rollback=thirds, who=Who.EXECUTE)
    _send(log, "first")
    roll_back(log, prepare(log, 2, 6))
    log.engine.ledger.mark()
    for _ in ("leave", "pruned"):
        maintain(log.engine, Graces(0.0, 0.0, IDEMPOTENCY_S))
    assert all(log.engine.archived(half_id) for half_id in LEFT)

    by_key = prepare(log, 3, _columns(3, 24), per="key", key="order")
    first, second = split(pending(log, by_key), 2)
    decide_one(log.engine, by_key, 1, commit=first, rollback={}, who=Who.EXECUTE)
    count_check(log.engine, by_key, 1, second, "asked once")
    for batch_id in (4, 5):  # rolled back by a check, and open again: one of them is committed since
        again = prepare(log, batch_id, 7)
        roll_back(log, again, who=Who.CHECK)
        log.engine.ledger.reopen(again, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "rolled back by a check")
        if batch_id == 4:
            commit(log, again, attempt=2)
    for batch_id in (6, 7):
        hidden = prepare(log, batch_id, 5)
        log.engine.ledger.quarantine(hidden, 1, pending(log, hidden), Who.DISCARD, "asked too often")
    log.resume("app:7")
    _compact(log)
    for name in ("half", "op", "messages"):
        _checkpoint(path / name)

    disputed = prepare(log, 8, 4)
    commit(log, disputed)
    with suppress(VerdictConflictError):
        decide_one(log.engine, disputed, 1, commit={}, rollback={0: b"\x01" * 4}, who=Who.CHECK)
    commit(log, prepare(log, 9, _columns(9, 12), topic="points"))
    prepare(log, 10, 6, partitions=2)
    _send(log, "second")
    _vacuum(log, path)
    log.close()


def _columns(batch_id: int, rows: int) -> dict[str, Any]:
    return {
        "body": [f"{batch_id}.{i}".encode() * (1 + i % 5) for i in range(rows)],
        "tags": pa.array([("a", "b", None)[i % 3] for i in range(rows)], pa.string()),
        "keys": [f"k{batch_id}.{i}" for i in range(rows)],
        "sharding_key": [f"s{i % 4}" for i in range(rows)],
        "properties": pa.array([[("n", str(i))] if i % 2 else None for i in range(rows)], PROPERTIES),
        **({"order": [f"order{i // 2}" for i in range(rows)]} if batch_id == 3 else {}),
    }


def _send(log: CommitLog, key: str) -> tuple[Any, ...]:
    made = TransactionMQProducer(log, GROUP, AlwaysCommit(), check_interval=None)
    with patch.object(half_header, "new_half_id", same_half_id), made as sender:  # copies of the log get the same rows
        message = Message("points", f"sent as {key}", tags="sent", keys=key)
        sent = sender.send_message_in_transaction(message, idempotency_key=key)
    return sent.local_transaction_state, dict(sent.queue_offsets), sent.replayed


def _compact(log: CommitLog) -> None:
    most = op_merge.OP_FILES_MAX
    op_merge.OP_FILES_MAX = 4
    try:
        log.engine.op_table.refresh()
        assert op_merge.compact_op(log.engine.op_table)
    finally:
        op_merge.OP_FILES_MAX = most


def _checkpoint(table: Path) -> None:
    """Write a checkpoint, and clean up the entries that it stands for, as an hour later."""
    hour_ago = time.time() - 3600
    for entry in (table / "_delta_log").glob("*.json"):
        os.utime(entry, (hour_ago, hour_ago))
    delta = DeltaTable(str(table))
    delta.create_checkpoint()
    delta.cleanup_metadata()


def _vacuum(log: CommitLog, path: Path) -> None:
    orphan = path / "half" / "half-0123456789abcdef0123456789abcdef.parquet"
    shutil.copy(next((path / "half").glob("*.parquet")), orphan)
    month_ago = time.time() - 30 * 86400
    os.utime(orphan, (month_ago, month_ago))
    assert log.vacuum() == [f"half/{orphan.name}"]


# ---------------------------------------------------------------- asking it
Rows = list[tuple[Any, ...]]


def _rows(table: pa.Table, columns: tuple[str, ...] | None = None) -> Rows:
    chosen = table if columns is None else table.select(list(columns))
    at = [chosen.column_names.index(c) for c in ("topic", "queue_id", "queue_offset")]
    columns_of = [chosen[c].to_pylist() for c in chosen.column_names]
    return sorted(zip(*columns_of, strict=True), key=lambda r: tuple(r[i] for i in at))


def read_all(log: CommitLog, columns: tuple[str, ...] | None = None) -> Rows:
    """Every visible message."""
    return [row for topic in TOPICS for row in _rows(log.read(topic), columns)]


def _open_ones(table: pa.Table) -> Rows:
    if unreadable := table.filter(pc.is_null(table["attempt"]))["half_id"].to_pylist():
        raise CorruptLogError(f"half batches of table half are listed as unreadable: {unreadable}")
    columns = ("half_id", "attempt", "messages", "check_times", "prepared_at")
    return list(zip(*(table[c].to_pylist() for c in columns), strict=True))


def _states(log: CommitLog, half_ids: tuple[str, ...]) -> Rows:
    found: Rows = []
    for half_id in half_ids:
        state = log.engine.state_of(log.engine.get(half_id))
        found.append((half_id, *((bytes(f.state), bytes(f.attempt)) for f in state.files.values())))
    return found


def _by_source(path: str) -> Rows:
    reader = TxmqReader({"path": path, "subscribe": ",".join(TOPICS)}, source_schema())
    return _run(reader, pickle.loads(pickle.dumps(reader.partitions())))


def _by_stream(path: str) -> Rows:
    options = {"path": path, "subscribe": ",".join(TOPICS), "startingOffsets": "earliest"}
    reader = TxmqStreamReader(options, source_schema())
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    return _run(reader, pickle.loads(pickle.dumps(reader.partitions(start, end))))


def _run(reader: Any, partitions: Any) -> Rows:
    worker = pickle.loads(pickle.dumps(reader))
    batches = [batch for partition in partitions for batch in worker.read(partition)]
    return _rows(pa.Table.from_batches(batches, reader.schema))


LEFT = ("app:0", "app:1")
HALF_IDS = tuple(f"app:{batch_id}" for batch_id in range(2, 11))


def questions(path: str) -> dict[str, Callable[[], Any]]:
    """What a log is asked without changing it; the first question opens it."""
    opened: list[CommitLog] = []

    def log() -> CommitLog:
        if not opened:
            opened.append(CommitLog.open(path))
        return opened[0]

    return {
        "open": lambda: repr(type(log())),
        "topics": lambda: log().topics(),
        "pending": lambda: _open_ones(log().pending()),
        "quarantined": lambda: _open_ones(log().quarantined()),
        "conflicts": lambda: log().conflicts(),
        "archived": lambda: [repr(log().engine.archived(half_id)) for half_id in LEFT],
        "states": lambda: _states(log(), HALF_IDS),
        "read": lambda: read_all(log()),
        "source": lambda: _by_source(path),
        "stream": lambda: _by_stream(path),
    }


class RoundHadProblems(Exception):
    """A round of checks that named problems instead of settling everything."""


def changes(path: str) -> dict[str, Callable[[], Any]]:
    """What a log is told to do: a round of checks, a send, and a send that was done before; then what it shows."""

    def check() -> Any:
        log = CommitLog.open(path)
        report = CheckService(log, {GROUP: AlwaysCommit()}, transaction_timeout=0, round_timeout=None).run_once()
        # The disputed half batch is reported by every round.
        problems = [f"{half_id}: {text}" for half_id, text in report.problems if half_id != "app:8"]
        if problems:
            raise RoundHadProblems("; ".join(problems))
        return report.committed.messages, report.pending

    return {
        "check": check,
        "send": lambda: _send(CommitLog.open(path), "third"),
        "send again": lambda: _send(CommitLog.open(path), "first"),
        "read after": lambda: read_all(CommitLog.open(path), STABLE_COLUMNS),
    }


def answers(asked: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The answer to each question; an exception is an answer too."""
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except BaseException as problem:  # a panic of Rust is no Exception
            if isinstance(problem, (KeyboardInterrupt, SystemExit)):
                raise
            found[name] = problem
    return found


def right_answers(folder: Path) -> dict[str, Any]:
    """What the untouched log in ``folder / "log"`` answers; the changes are made to a copy."""
    copy = folder / "copy"
    shutil.copytree(folder / "log", copy)
    right = answers(questions(str(copy)))
    right["read before"] = read_all(CommitLog.open(copy), STABLE_COLUMNS)
    right |= answers(changes(str(copy)))
    shutil.rmtree(copy)
    wrong = {name: answer for name, answer in right.items() if isinstance(answer, BaseException)}
    assert not wrong, wrong
    return right
