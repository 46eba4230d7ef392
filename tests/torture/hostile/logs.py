"""Doors that lead to a commit log: columns of messages, and rows of the log's own tables that somebody edited."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from rmq_spark import COMMIT_MESSAGE, CheckService, CommitLog, ConsumerGroup, HalfBatch, TransactionMQProducer
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import commit, count_check, decide_one, header_of, pending, prepare, roll_back, split
from tests.support.inside import (
    HALF_SCHEMA,
    OP_SCHEMA,
    Archived,
    Change,
    CommitOncePrepared,
    HalfWriter,
    Planner,
    Subscription,
    Table,
    TxmqStreamReader,
    Who,
    admit,
    from_checkpoint,
    json_message,
    normalize_verdicts,
    restored,
    sent_back,
    to_json,
)
from tests.support.source_logs import source_schema
from tests.torture.hostile.doors import Door, attempt, require
from tests.torture.hostile.values import ARROW_KINDS, anything, arrow_column, text

TOPICS = {"orders": 2, "points": 1}
UTC = timezone.utc


# ---------------------------------------------------------------- columns
_LIKELY: Mapping[str, tuple[pa.DataType, ...]] = {
    "body": (pa.string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())),
    "topic": (pa.string(),),
    "tags": (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())),
    "keys": (pa.string(), pa.list_(pa.string()), pa.large_list(pa.string())),
    "sharding_key": (pa.string(),),
    "queue_id": (pa.int8(), pa.int32(), pa.int64(), pa.uint64()),
    "properties": (pa.map_(pa.string(), pa.string()),),
    "born_timestamp": (pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC"), pa.timestamp("s", "Asia/Tokyo")),
    "deliver_at": (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "delay_level": (pa.int32(), pa.int64()),
}


def _table(rng: random.Random) -> pa.Table:
    rows = rng.choice((0, 1, 2, 3, 7))
    names = ["body", *rng.sample(sorted(set(_LIKELY) - {"body"}), rng.randrange(4))]
    if rng.random() < 0.1:
        names.append(text(rng).encode("utf-8", "ignore").decode())
    columns: list[pa.ChunkedArray] = []
    for name in names:
        odd = rng.random() < 0.1 or name not in _LIKELY
        kind = rng.choice(ARROW_KINDS if odd else _LIKELY[name])
        column = arrow_column(rng, kind, rows, 0.3 if rng.random() < 0.1 else 0.0)
        if name == "topic" and kind == pa.string() and rng.random() < 0.9:
            column = pa.chunked_array([pa.array([rng.choice(sorted(TOPICS)) for _ in range(rows)], pa.string())])
        columns.append(column)
    return pa.Table.from_arrays(columns, names=names)


def columns(rng: random.Random) -> bool:
    """Arrow columns of any type, normalized as an executor does it."""
    table = _table(rng)
    key = rng.choice((None, None, *table.column_names))
    writer = HalfWriter(header_of(0, per="key" if key else "batch"), TOPICS, rng.choice((None, "orders")), key)
    ok, made = attempt(
        lambda: writer.normalize(table), *table.column_names, "body", "topic", "propert", "transactionKey"
    )
    if ok and table.num_rows:
        assert made is not None
        _same_values(table, made)
        made.to_pylist()  # Python can hold them all
        rows, segments = writer.in_order(made, 0)
        require(rows.num_rows == table.num_rows == sum(s.last - s.first + 1 for s in segments), "rows were lost")
        require(sorted(rows["body"].to_pylist()) == sorted(made["body"].to_pylist()), "bodies were changed")
        require(rows["row_no"].to_pylist() == list(range(table.num_rows)), "row numbers")
        for s in segments:
            queue = set(rows.slice(s.first, s.last - s.first + 1)["queue_id"].to_pylist())
            require(queue == {s.queue_id} and 0 <= s.queue_id < TOPICS[s.topic], f"queue {queue} of {s}")
    return ok


def _same_values(given: pa.Table, made: pa.Table) -> None:
    for name in ("body", "tags", "sharding_key", "keys", "queue_id", "properties"):
        if name not in given.column_names:
            continue
        expected = given[name].to_pylist()
        if name == "body":
            expected = [v.encode() if isinstance(v, str) else v for v in expected]
        elif name == "keys":
            expected = [" ".join(v) if isinstance(v, list) else v for v in expected]
        elif name == "queue_id" and "sharding_key" in given.column_names:
            continue
        found = made[name].to_pylist()
        require(found == expected, f"{name}: {expected} became {found}")


def sends(rng: random.Random) -> bool:
    """A table of any kind through the producer, and what the log then shows."""
    log = InMemoryCommitLog(topics=TOPICS)
    table = _table(rng)
    with TransactionMQProducer(log, "group", CommitOncePrepared(), check_interval=None) as producer:
        per = rng.choice((None, None, "message", "batch", "key", text(rng)))
        key = rng.choice((None, None, None, *table.column_names))
        ok, sent = attempt(
            lambda: producer.send_messages_in_transaction(
                table,
                topic="orders",
                transaction_per=per,
                transaction_key=key,
                idempotency_key=rng.choice((None, text(rng))),
            )
        )
    shown = [r for topic in TOPICS for r in log.read(topic).to_pylist()]
    if not ok:
        require(not shown, f"refused, and shown: {shown[:2]}")
        return False
    assert sent is not None
    _comes_out(log, shown)
    if log.engine.ledger.view.waiting:  # delayed: it is not visible yet
        require(len(shown) < sent.messages, f"{sent} waits, and is shown")
        return True
    bodies = [v.encode() if isinstance(v, str) else v for v in table["body"].to_pylist()]
    require(sorted(r["body"] for r in shown) == sorted(bodies), f"{bodies} became {[r['body'] for r in shown]}")
    require(sent.messages == len(shown), f"{sent} for {len(shown)} messages")
    return True


def _comes_out(log: InMemoryCommitLog, shown: Sequence[dict[str, Any]]) -> None:
    """What was accepted passes through everything that a consumer meets."""
    for row in shown:
        json.dumps(json_message(dict(row)))
    for topic in TOPICS:
        read = restored(log.read(topic))
        sent_back(read, [None] * read.num_rows, "group", 16, None).to_pylist()
        log.read(topic, selector="TAGS IS NULL OR a > 5")
    group = ConsumerGroup(log, "group")
    group.reset("earliest", list(TOPICS))
    group.lag().to_pylist()
    for half_id in log.engine.open_half_ids():
        log.resolve(half_id, COMMIT_MESSAGE, "to its end")
    CheckService(log, {"group": CommitOncePrepared()}, transaction_timeout=0, round_timeout=None).run_once()


# ---------------------------------------------------------------- verdicts
def _open_batch(per: str) -> HalfBatch:
    log = InMemoryCommitLog(topics=TOPICS)
    record = prepare(log, 0, 3, per=per)
    return log.engine.half_batch(record, log.engine.state_of(record), 1, pending(log, record))


_OPEN = [_open_batch(per) for per in ("batch", "message")]


def verdicts(rng: random.Random) -> bool:
    """What a listener may return."""
    batch = rng.choice(_OPEN)
    words = ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOWN", "UNKNOW", None, text(rng), anything(rng))
    answer: Any = rng.choice(
        (
            anything(rng),
            [rng.choice(words) for _ in range(rng.choice((1, 3, 3, 4)))],
            pa.array([rng.choice(("COMMIT_MESSAGE", None, "UNKNOW", "x")) for _ in range(3)], pa.string()),
            arrow_column(rng, rng.choice(ARROW_KINDS), 3, 0.2),
        )
    )
    ok, _ = attempt(lambda: normalize_verdicts(answer, batch))
    return ok


# ---------------------------------------------------------------- offsets of a checkpoint, against a log
_LOG = InMemoryCommitLog(topics=TOPICS)
commit(_LOG, prepare(_LOG, 0, 10))
commit(_LOG, prepare(_LOG, 1, 4, topic="points"))


class _MemoryReader(TxmqStreamReader):
    """The stream's reader, planning on a log in memory."""

    def __init__(self, fail_on_data_loss: bool) -> None:
        options = {"path": "x", "subscribe": "orders,points", "failOnDataLoss": str(fail_on_data_loss).lower()}
        super().__init__(options, source_schema())
        self._planner = Planner(_LOG.engine, Subscription(tuple(TOPICS)), fail_on_data_loss)


def checkpoint_offsets(rng: random.Random) -> bool:
    """A checkpoint that somebody edited: the range that is planned lies within it, or it is refused."""

    def edited() -> Any:
        value: Any = {"orders": {"0": rng.randrange(6), "1": rng.randrange(6)}, "points": {"0": rng.randrange(5)}}
        value["@log"] = {_LOG.id: 0}
        where = rng.choice(("", "topic", "queue", "offset", "log", "all"))
        if where == "topic":
            value[rng.choice(("", "\ud800", "order", text(rng)))] = value.pop("points")
        elif where == "queue":
            value["orders"][rng.choice(("2", "999999999", "-1", "x", "01", text(rng)))] = 1
        elif where == "offset":
            value["orders"]["0"] = rng.choice((99, -1, 2**31, 2**63 - 1, 2**63, 10**30, None, True, 1.0, "1", []))
        elif where == "log":
            value["@log"] = rng.choice(({_LOG.id: 0}, {text(rng): 0}, {_LOG.id: 0, "x": 0}, anything(rng)))
        elif where == "all":
            value = anything(rng)
        return value

    reader = _MemoryReader(rng.random() < 0.5)
    start, end = edited(), edited()
    limit = rng.choice((ReadAllAvailable(), ReadMaxRows(3)))
    ok, _ = attempt(lambda: reader.latestOffset(start, limit))
    planned, partitions = attempt(lambda: reader.partitions(start, end))
    if planned:
        assert partitions is not None
        (first_of, _, begun), (stop_of, _, ended) = from_checkpoint(start, "x"), from_checkpoint(end, "x")
        require(not partitions or ended == _LOG.id, f"{end} is of another commit log, and was planned")
        mine = first_of if begun == _LOG.id else {}
        wanted = {queue: (mine.get(queue, 0), stop) for queue, stop in stop_of.items()}
        for placed in (p for partition in partitions for p in partition.ranges):  # type: ignore[attr-defined]
            first, stop = wanted[(placed.topic, placed.queue_id)]
            inside = first <= placed.queue_offset and placed.queue_offset + placed.count <= stop
            require(inside, f"{placed} is outside of {start} to {end}")
    attempt(lambda: reader.commit(end))
    return ok


# ---------------------------------------------------------------- rows that somebody edited
def _log_to_edit(marked: bool) -> InMemoryCommitLog:
    """Half batches in all states."""
    log = InMemoryCommitLog(topics=TOPICS)
    commit(log, prepare(log, 0, 6, partitions=2))
    part = prepare(log, 1, 6, per="message")
    rest, third = split(pending(log, part), 3)
    decide_one(log.engine, part, 1, commit=rest, rollback={}, who=Who.EXECUTE)
    count_check(log.engine, part, 1, third, "asked once")
    roll_back(log, prepare(log, 2, 3))
    if marked:
        log.engine.ledger.mark()
    commit(log, prepare(log, 3, {"body": ["a", "b"], "k": ["x", "y"]}, per="key", key="k", topic="points"))
    hidden = prepare(log, 4, 2)
    log.engine.ledger.quarantine(hidden, 1, pending(log, hidden), Who.DISCARD, "asked too often")
    for table in (log.engine.half.table, log.engine.op_table, log.engine.topics_table):  # decoded once, for all copies
        table.read(table.actions()["path"].to_pylist())
    return log


_TO_EDIT = [_log_to_edit(marked) for marked in (False, True)]


_INTEGERS = (None, -1, 0, 1, 2, 3, 5, 6, 7, 100, 2**31 - 1, 2**53, 2**62, 2**63 - 1, -(2**63))
_PATHS = (
    "../x.parquet",
    "/etc/passwd",
    "file:///etc/passwd",
    "s3://bucket/x",
    "half-gone.parquet",
    "a/../../x",
    "",
    "a\x00b",
)
_TIMES = (
    None,
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, tzinfo=UTC),
    datetime.now(UTC) + timedelta(days=900),
)


def _odd_value(rng: random.Random, name: str, kind: pa.DataType, column: list[Any]) -> Any:
    choice = rng.random()
    if choice < 0.25 and column:
        return rng.choice(column)  # another row's
    if choice < 0.35:
        return None
    if name == "ranges":
        return [{"first": rng.choice(_INTEGERS), "last": rng.choice(_INTEGERS)} for _ in range(rng.randrange(4))]
    if name == "tails":
        return [
            {
                "topic": rng.choice(("orders", "x", None)),
                "queue_id": rng.choice((0, 1, 9, None)),
                "next_offset": rng.choice(_INTEGERS),
            }
            for _ in range(rng.randrange(3))
        ]
    if name == "firsts":
        return [
            {
                "topic": rng.choice(("orders", "x", None)),
                "queue_id": rng.choice((0, 1, 9, None)),
                "first_offset": rng.choice(_INTEGERS),
            }
            for _ in range(rng.randrange(3))
        ]
    if name == "archived":
        kept = Archived("app:0", "app", 0, None, None, None, "batch", "group", 0, 1, 1, rng.choice((0, 5, 6)))
        value = kept.struct()
        name = rng.choice([n for n in value if isinstance(value[n], int)])
        return {**value, name: rng.choice((None, 0, 3))} | {"decisions": rng.choice(([], None))}
    if name == "below":
        return [
            {
                "half_id": rng.choice(("app:0", "app:1", "app:2", "app:99", None)),
                "ms": rng.choice(_INTEGERS),
                "first_ms": rng.choice(_INTEGERS),
                "pending": rng.choice(_INTEGERS),
                "versions": rng.choice(([], [rng.choice(_INTEGERS)], [0, 1], [1, 0], None)),
                "waiting": rng.choice(([], [{"until": rng.choice(_TIMES), "count": rng.choice(_INTEGERS)}], None)),
            }
            for _ in range(rng.randrange(3))
        ]
    if name == "kind":
        return rng.choice(
            (
                "commit",
                "place",
                "rollback",
                "quarantine",
                "check",
                "reopen",
                "lease",
                "conflict",
                "mark",
                "archived",
                "expire",
                "",
                "x",
            )
        )
    if name == "path":
        return rng.choice(_PATHS)
    if name == "half_id":
        return rng.choice(("app:0", "app:1", "app:2", "app:3", "app:99", "", "x"))
    if pa.types.is_timestamp(kind):
        return rng.choice(_TIMES)
    if pa.types.is_int32(kind):
        return rng.choice([n for n in _INTEGERS if n is None or -(2**31) <= n < 2**31])
    if pa.types.is_integer(kind):
        return rng.choice(_INTEGERS)
    if pa.types.is_map(kind):
        return rng.choice(([("a", "1")], [("CHECK_IMMUNITY_TIME_IN_SECONDS", "x")], [("a", None)]))
    if pa.types.is_binary(kind):
        return rng.choice((b"", b"\xff"))
    if pa.types.is_boolean(kind):
        return rng.choice((False, True))
    return rng.choice(("", "execute", "batch", "message", "key", "none", "os:system", "x" * 1000))


def _edit(rng: random.Random, table: Table, schema: pa.Schema) -> None:
    """Replace the table's files by one with some edited rows."""
    table.refresh()
    paths = table.actions()["path"].to_pylist()
    rows = table.read(paths).to_pylist()
    for _ in range(rng.choice((1, 1, 2, 3))):
        row = rng.choice(rows)
        deed = rng.random()
        if deed < 0.8:
            name = rng.choice(schema.names)
            row[name] = _odd_value(rng, name, schema.field(name).type, [r[name] for r in rows])
        elif deed < 0.9 and len(rows) > 1:
            rows.remove(row)
        else:
            rows.append(dict(row))
    _replace(table, paths, pa.Table.from_pylist(rows, schema=schema))


def edit_row(table: Table, kind: str, column: str | None, value: Any, row: int = 0) -> None:
    """Give a row of ``op`` (the so-manieth of a kind) another value; without a column, take the row out."""
    table.refresh()
    paths = table.actions()["path"].to_pylist()
    rows = table.read(paths).sort_by("version").to_pylist()
    at = [i for i, r in enumerate(rows) if r["kind"] == kind][row]
    if column is None:
        del rows[at]
    else:
        rows[at][column] = value
    _replace(table, paths, pa.Table.from_pylist(rows, schema=OP_SCHEMA))


def _replace(table: Table, paths: list[str], rows: pa.Table) -> None:
    change = Change(add=[table.write(rows)], remove=paths, data_change=False)
    table.compare_and_set(lambda _: change, lambda c: c.add[0].path in table.actions()["path"].to_pylist())


def _ask_everything(log: CommitLog, outside: list[str]) -> list[dict[str, Any]]:
    """Ask and tell the log everything; returns what it shows."""
    for question in (
        log.topics, log.pending, log.quarantined, log.conflicts, log.engine.ledger.mark,
        lambda: log.engine.state_of(log.engine.get("app:1")), lambda: _plan(log), lambda: log.resume("app:4"),
    ):  # fmt: skip
        attempt(question)
    shown = _shown(log)
    attempt(CheckService(log, {"group": CommitOncePrepared()}, transaction_timeout=0, round_timeout=None).run_once)
    attempt(lambda: commit(log, prepare(log, 9, 3)))
    require(not outside, f"files outside of the log were asked for: {outside}")
    return shown + _shown(log)


def _shown(log: CommitLog) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    for topic in TOPICS:
        ok, table = attempt(lambda topic=topic: log.read(topic))  # type: ignore[misc]
        if ok:
            assert table is not None
            shown += table.to_pylist()
    return shown


def _plan(log: CommitLog) -> None:
    planner = Planner(log.engine, Subscription(tuple(TOPICS)))
    latest = planner.latest()
    planner.ranges({}, admit({}, latest, 5))
    planner.ranges({}, latest)
    planner.resolve("startingTimestamp", datetime(2025, 3, 1, tzinfo=UTC))
    to_json(latest)


def _watch_paths(log: InMemoryCommitLog) -> list[str]:
    """Names of files that are opened and lie outside of the tables."""
    asked: list[str] = []
    for table in (log.engine.half.table, log.engine.op_table):
        opened = table.fs.open_input_file

        def watching(path: str, opened: Callable[[str], Any] = opened, folder: str = table.folder) -> Any:
            if not path.startswith(f"{folder}/") or ".." in path:
                asked.append(path)
            return opened(path)

        table.fs.open_input_file = watching
    return asked


def _true_rows(log: CommitLog) -> dict[str, tuple[Any, ...]]:
    half = log.engine.half.table
    half.refresh()
    rows = half.read(half.actions()["path"].to_pylist()).to_pylist()
    return {f"{r['half_id']}:{r['file_no']}.{r['row_no']}": (r["body"], r["tags"], r["keys"]) for r in rows}


def edited_op_rows(rng: random.Random) -> bool:
    """``op`` decides alone, so a row that contradicts nothing is believed; but only half rows are ever shown, as they
    are, at offsets without gaps."""
    made = rng.choice(_TO_EDIT).copy()
    outside = _watch_paths(made)
    _edit(rng, made.engine.op_table, OP_SCHEMA)
    log = made.another()
    shown = _ask_everything(log, outside)
    true = _true_rows(log)
    for row in shown:
        found = true.get(row["msg_id"])
        require(found == (row["body"], row["tags"], row["keys"]), f"{row} is shown, and half has {found}")
    return bool(shown)


def edited_half_rows(rng: random.Random) -> bool:
    """Whatever becomes of the edited ones, no other half batch's messages change."""
    made = rng.choice(_TO_EDIT).copy()
    outside = _watch_paths(made)
    before = {r["msg_id"]: r["body"] for r in _shown(made)}
    _edit(rng, made.engine.half.table, HALF_SCHEMA)
    shown = _ask_everything(made.another(), outside)
    return bool(shown) and bool(before)


DOORS: Mapping[str, tuple[Door, int]] = {
    "columns": (columns, 75),
    "sends": (sends, 3),
    "verdicts": (verdicts, 10),
    "checkpoint offsets": (checkpoint_offsets, 15),
    "edited op rows": (edited_op_rows, 3),
    "edited half rows": (edited_half_rows, 1),
}
"""By name: the door, and how often it is taken."""
