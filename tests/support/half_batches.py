"""Half batches for the tests of the commit log: prepared, decided and looked at by hand."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_spark import CommitLog, Message, TransactionMQProducer, VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.inside import (
    NO_ROWS,
    PROPERTIES,
    BatchState,
    Change,
    CommitOncePrepared,
    Decision,
    Engine,
    Graces,
    HalfFile,
    HalfHeader,
    HalfRecord,
    HalfWriter,
    MaintenanceReport,
    Naming,
    Placed,
    RowSet,
    RowState,
    Staged,
    Table,
    UnknownCheck,
    Who,
    batch_name,
    op_merge,
    upkeep,
)
from tests.support.limits import limited

APP = "app"
PENDING = (RowState.PENDING,)


def make_log(kind: str, folder: Path, **topics: int) -> CommitLog:
    """A commit log of a kind (``delta`` or ``memory``) with these topics (``orders=2`` when none are named)."""
    log = InMemoryCommitLog() if kind == "memory" else CommitLog.create(folder)
    for name, queues in (topics or {"orders": 2}).items():
        log.create_topic(name, queues)
    return log


@cache
def _made_once(topics: tuple[tuple[str, int], ...]) -> Path:
    folder = tempfile.mkdtemp(prefix="txmq-log-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_log("delta", Path(folder, "log"), **dict(topics))
    return Path(folder, "log")


def copied_log(folder: Path, **topics: int) -> CommitLog:
    """What :func:`make_log` makes of the kind ``delta``, as a copy with ids of its own: to make one takes five times as
    long."""
    shutil.copytree(_made_once(tuple(topics.items())), folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    for entry in folder.glob("*/_delta_log/00000000000000000000.json"):
        text = entry.read_text()
        (own,) = set(re.findall(r'"metaData":\{"id":"([^"]+)"', text))
        entry.write_text(text.replace(own, str(uuid4())))
    return CommitLog.open(folder)


def same_half_id(app_id: str, batch_id: int, *_: object) -> str:
    """In the place of ``new_half_id``, where runs are compared: the digits of its own follow from the name."""
    return f"{batch_name(app_id, batch_id)}-{hashlib.sha256(app_id.encode()).hexdigest()[:12]}"


def another(log: CommitLog) -> CommitLog:
    """A handle that knows nothing yet, as another process has."""
    return log.another()


def header_of(
    batch_id: int, app: str = APP, per: str = "batch", fence_id: str | None = None, group: str = "group"
) -> HalfHeader:
    return HalfHeader(batch_name(app, batch_id), app, batch_id, None, None, fence_id, per, group)


def stage(
    log: CommitLog,
    header: HalfHeader,
    columns: Mapping[str, Any] | None = None,
    topic: str = "orders",
    partition: int = 0,
) -> list[HalfFile]:
    """The files of a half batch (of one message, unless told otherwise), which is not prepared."""
    writer = HalfWriter(header, log.topics(), topic, None, log.fifo_topics())
    return log.engine.stage(writer, pa.table(dict(columns or {"body": ["a"]})).to_batches(), partition)


def prepare(
    log: CommitLog,
    batch_id: int,
    columns: int | Mapping[str, Any] | pa.Table = 5,
    *,
    app: str = APP,
    per: str = "batch",
    key: str | None = None,
    topic: str | None = "orders",
    partitions: int = 1,
    fence_id: str | None = None,
    group: str = "group",
) -> HalfRecord:
    """Prepare a half batch of so many numbered messages, or of these columns, dealt out to half files."""
    if isinstance(columns, int):
        columns = {"body": [f"{app}.{batch_id}.{i}" for i in range(columns)]}
    header = header_of(batch_id, app, per, fence_id, group)
    writer = HalfWriter(header, log.topics(), topic, key, log.fifo_topics())
    table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
    size = -(-table.num_rows // partitions)
    files = []
    for partition in range(partitions):
        part = table.slice(partition * size, size)
        files += log.engine.stage(writer, part.to_batches(), partition)
    return prepare_one(log.engine, header, files)


def prepare_one(engine: Engine, header: HalfHeader, files: Sequence[Any]) -> HalfRecord:
    """Prepare one half batch; what would let it drop out is raised."""
    (prepared,) = engine.prepare([Staged(header, files)])
    if isinstance(prepared, HalfRecord):
        return prepared
    raise prepared


def decide_one(
    engine: Any, record: HalfRecord, attempt: int, *, commit: Any = NO_ROWS, rollback: Any = NO_ROWS, **more: Any
) -> list[Placed]:
    """Decide one half batch, as its sender does unless told otherwise; what lets the decision drop out is raised."""
    more.setdefault("who", Who.EXECUTE)
    (decided,) = engine.decide([Decision(record, attempt, RowSet(commit), RowSet(rollback), **more)])
    return list(decided.or_raise())


def count_check(
    engine: Any, record: HalfRecord, attempt: int, rows: Any, reason: str | None, pause_s: float = 0.0
) -> None:
    """Count an answered check of one half batch."""
    engine.ledger.record_checks([UnknownCheck(record, attempt, RowSet(rows), reason)], pause_s)


def pending(log: CommitLog, record: HalfRecord, attempt: int = 1) -> RowSet:
    return log.engine.state_of(record).rows_in(PENDING, attempt)


def commit(log: CommitLog, record: HalfRecord, attempt: int = 1, who: Who = Who.EXECUTE) -> list[Placed]:
    """Commit whatever is pending under the attempt."""
    return decide_one(log.engine, record, attempt, commit=pending(log, record, attempt), who=who)


def roll_back(log: CommitLog, record: HalfRecord, attempt: int = 1, who: Who = Who.EXECUTE) -> None:
    """Roll back whatever is pending under the attempt."""
    decide_one(log.engine, record, attempt, rollback=pending(log, record, attempt), who=who)


def quarantine(log: CommitLog, record: HalfRecord, reason: str = "too often") -> None:
    """Give up on whatever is pending."""
    log.engine.ledger.quarantine(record, 1, pending(log, record), Who.DISCARD, reason)


def too_late(log: CommitLog, record: HalfRecord, who: Who = Who.EXECUTE, **verdict: Any) -> VerdictConflictError:
    """Somebody contradicts the first verdict: that is refused, and leaves a conflict."""
    with pytest.raises(VerdictConflictError) as caught:
        decide_one(log.engine, record, 1, who=who, **verdict)
    return caught.value


def in_conflict(
    log: CommitLog, record: HalfRecord, reason: str | None = None, rows: Mapping[int, bytes] | None = None
) -> None:
    """A check rolls back these messages (without ``rows`` whatever is pending), and then the producer commits them."""
    rows = pending(log, record) if rows is None else rows
    decide_one(log.engine, record, 1, rollback=rows, who=Who.CHECK, reason=reason)
    too_late(log, record, commit=rows)


def split(rows: RowSet, every: int) -> tuple[RowSet, RowSet]:
    """Rows in two: the others, and each row of which the number can be divided by ``every``."""
    chosen = rows & {n: bytes(i % every == 0 for i in range(len(bits))) for n, bits in rows.items()}
    return rows - chosen, chosen


def merge_op_files(log: CommitLog) -> None:
    """Upkeep by another process, however few op files there are."""
    with limited(OP_FILES_MAX=2):
        op_merge.compact_op(another(log).engine.op_table)


def move_half(log: CommitLog) -> None:
    """Upkeep writes each half file anew under another name, as stripping does."""
    table = another(log).engine.half.table
    table.refresh()
    for file in table.actions().to_pylist():
        moved = table.write(table.read([file["path"]]))
        ms = file["modification_time"]
        change = Change(add=[moved], remove=[file["path"]], modification_time_ms=ms, data_change=False)
        assert table.compare_and_set(lambda _, change=change: change, lambda _: True) is not None


def share_half_file(log: CommitLog) -> None:
    """One half file for all half batches, as sends of many threads share one."""
    table = another(log).engine.half.table
    table.refresh()
    actions = table.actions()
    old = actions["path"].to_pylist()
    shared = table.write(table.read(old))
    ms = pc.max(actions["modification_time"]).as_py()
    change = Change(add=[shared], remove=old, modification_time_ms=ms, data_change=False)
    assert table.compare_and_set(lambda _: change, lambda _: True) is not None


def bodies(log: CommitLog, topic: str = "orders") -> list[str]:
    """Visible bodies, in (queue, offset) order."""
    return [b.decode() for b in log.read(topic, columns=["body"])["body"].to_pylist()]


def placements(log: CommitLog, topic: str = "orders") -> list[tuple[int, int]]:
    """(queue_id, queue_offset) of every visible message."""
    read = log.read(topic, columns=["queue_id", "queue_offset"])
    return list(zip(read["queue_id"].to_pylist(), read["queue_offset"].to_pylist(), strict=True))


def check_offsets(log: CommitLog, topic: str = "orders") -> None:
    """Every queue counts 0, 1, 2, … without gaps, and its tail is the next number."""
    by_queue: dict[int, list[int]] = {}
    for queue_id, offset in placements(log, topic):
        by_queue.setdefault(queue_id, []).append(offset)
    assert all(offsets == list(range(len(offsets))) for offsets in by_queue.values())
    log.engine.ledger.refresh()
    tails = {q: n for (t, q), n in log.engine.ledger.view.tails.items() if t == topic}
    assert tails == {q: len(offsets) for q, offsets in by_queue.items()}


def send(
    log: CommitLog, key: str, rows: int = 5, per: str = "batch", names: str | None = None, half_id: str | None = None
) -> HalfRecord:
    """Prepare what a producer sends under an idempotency key: an application of one half batch. Its id is its name when
    not given."""
    header = replace(header_of(0, key, per), naming=Naming.KEY)
    header = header if half_id is None else replace(header, half_id=half_id)
    return prepare_one(log.engine, header, stage(log, header, {"body": [f"{names or key}.{i}" for i in range(rows)]}))


def let_leave(
    log: CommitLog, reader_s: float = 0, audit_s: float = 0, idempotency_s: float = 1e9, dry_run: bool = False
) -> MaintenanceReport:
    """Upkeep by another process, with graces that are over at once."""
    with limited(PRUNED_SHARE_MIN=0, ROWS_LET_GO_MIN=1):
        return upkeep.maintain(another(log).engine, Graces(reader_s, audit_s, idempotency_s), dry_run)


def forget(log: CommitLog) -> None:
    """Let all that is settled leave, and the idempotency window of it end."""
    for _ in range(3):
        let_leave(log, idempotency_s=0)


def open_batches(log: CommitLog) -> list[tuple[HalfRecord, BatchState]]:
    """The half batches with pending rows, oldest first."""
    records = map(log.engine.get, log.engine.open_half_ids())
    states = [(record, log.engine.state_of(record)) for record in records]
    return [(record, state) for record, state in states if not state.is_settled]


def in_half(log: CommitLog) -> set[str]:
    """The half batches that the table half still has."""
    return set(another(log).engine.half.contents.all_batches())


def paths_of(table: Table) -> list[str]:
    """The files that a table of the log has now."""
    table.refresh()
    paths: list[str] = table.actions()["path"].to_pylist()
    return paths


def rows_of(table: Table, columns: Sequence[str] | None = None) -> pa.Table:
    """What a table of the log holds now."""
    return table.read(paths_of(table), columns)


def op_kinds(log: CommitLog, half_id: str) -> list[str]:
    """The kinds of the op rows of a half batch, in version order."""
    rows = rows_of(another(log).engine.op_table).sort_by("version")
    return [str(row["kind"]) for row in rows.to_pylist() if row["half_id"] == half_id]


def half_file(log: CommitLog, record: HalfRecord) -> Path:
    """The file of a half batch that has one."""
    (file,) = record.files.values()
    return Path(log.path, "half", file.path)


def orphan_of(log: CommitLog, number: int = 0) -> Path:
    """A file of a crashed writer that upkeep is to delete."""
    orphan = Path(log.path, "half", f"half-{number:032x}.parquet")
    orphan.write_bytes(b"x")
    os.utime(orphan, (0, 0))
    return orphan


def fill_with_pieces(log: CommitLog, number: int = 0) -> None:
    """What a drain has to put together, of the topics ``orders`` and ``points``: sends that share half files, topics
    that share them, rows that are left out, and half batches that are decided bit by bit."""
    with TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
        messages = [Message(("orders", "points")[i % 2], f"{number}.{i}", keys=f"k{i}") for i in range(40)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(producer.send_message_in_transaction, messages))
    columns = {
        "body": pa.array([(b"a", b"", b"\xff")[i % 3] for i in range(30)]),
        "order": [f"\u00e4{i % 7}:" for i in range(30)],
        "topic": [("orders", "points", "orders")[i % 3] for i in range(30)],
        "properties": pa.array(
            [([("n", "1")], None, [("n", "5"), ("m", "")], [])[i % 4] for i in range(30)], PROPERTIES
        ),
    }
    keyed = prepare(log, 2 * number, columns, per="key", key="order", topic=None, partitions=2)
    mixed = prepare(log, 2 * number + 1, 40, per="message")
    for record, every in ((keyed, 3), (mixed, 2), (keyed, 2)):
        _, some = split(pending(log, record), every)
        decide_one(log.engine, record, 1, commit=some)
    roll_back(log, mixed)
    commit(log, keyed)
