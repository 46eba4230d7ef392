"""The messages table: an exact prefix of what op placed, whoever drains, and as often as one likes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_spark.commitlog import drain
from rmq_spark.commitlog import op as op_module
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.messages import MESSAGES_SCHEMA
from rmq_spark.commitlog.op import Who
from rmq_spark.commitlog.reading import SOURCE_SCHEMA
from rmq_spark.errors import CorruptLogError
from rmq_spark.storage.table import Change, Table
from tests.half_batches import (
    another,
    commit,
    make_log,
    merge_op_files,
    pending,
    prepare,
    rewrite_half,
    roll_back,
    split,
)


@pytest.fixture(params=["memory", "delta"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> CommitLog:
    return make_log(request.param, tmp_path / "log", orders=2, points=1)


def drained(log: CommitLog, topic: str | None = None) -> pa.Table:
    """What the table messages holds, by topic, queue and offset."""
    table = another(log).messages_table
    table.refresh()
    rows = table.read(table.actions()["path"].to_pylist())
    rows = rows if topic is None else rows.filter(pc.equal(rows["topic"], topic))
    return rows.sort_by([(c, "ascending") for c in ("topic", "queue_id", "queue_offset")])


def require_same(log: CommitLog) -> None:
    """Every topic's messages are in the table as log.read has them."""
    for topic in log.topics():
        read = log.read(topic)
        assert drained(log, topic).select(SOURCE_SCHEMA.names).to_pylist() == read.to_pylist()


def test_a_drain_copies_what_is_placed_and_nothing_else(log: CommitLog) -> None:
    assert log.drain() == log.refresh()
    assert drained(log).num_rows == 0
    for i in range(3):
        commit(log, prepare(log, i))
    commit(log, prepare(log, 3, topic="points", per="message"))
    roll_back(log, prepare(log, 4))
    record = prepare(log, 5, 10, per="message")
    some, _ = split(pending(log, record), every=3)
    log.decide(record, 1, commit=some, who=Who.EXECUTE)
    assert log.drain() == log.refresh()
    require_same(log)
    assert drained(log).schema == MESSAGES_SCHEMA
    assert log.drain() == log.refresh()
    require_same(log)


def test_messages_say_where_they_come_from(log: CommitLog) -> None:
    record = prepare(log, 0, {"body": ["a", "b", "c"], "order": ["1", "2", "2"]}, per="key", key="order", partitions=2)
    commit(log, record)
    log.drain()
    rows = drained(log).select(
        ["half_id", "file_no", "row_no", "attempt", "transaction_per", "transaction_key", "body"]
    )
    assert sorted((r["transaction_key"], r["body"]) for r in rows.to_pylist()) == [
        ("1", b"a"),
        ("2", b"b"),
        ("2", b"c"),
    ]
    assert {(r["half_id"], r["attempt"], r["transaction_per"]) for r in rows.to_pylist()} == {("app:0", 1, "key")}
    assert len({(r["file_no"], r["row_no"]) for r in rows.to_pylist()}) == 3
    versions = drained(log)["op_version"].unique().to_pylist()
    assert versions == [log.version]


def test_a_drain_goes_on_where_the_last_one_ended(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        commit(log, prepare(log, i))
        log.drain()
        require_same(log)
    files = another(log).messages_table
    files.refresh()
    assert files.actions().num_rows == 4
    monkeypatch.setattr(drain.Drainer, "_write", lambda *_: 1 / 0)
    log.drain()  # there is nothing to copy


def test_a_backlog_is_drained_in_steps(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "OP_ROWS_MAX", 3)
    monkeypatch.setattr(drain, "STEP_MESSAGES_MAX", 12)
    monkeypatch.setattr(drain, "FILE_BYTES_MAX", 500)
    log.upkeep = False
    for i in range(9):
        commit(log, prepare(log, i, topic="points" if i % 4 == 1 else "orders"))
        if i in (3, 6):
            merge_op_files(log)
    commit(log, prepare(log, 9, 30, partitions=3))
    log.drain()
    require_same(log)
    for file in another(log).messages_table.actions()["path"].to_pylist():
        rows = log.messages_table.read([file])
        assert len(rows["topic"].unique()) == 1
        assert rows.equals(rows.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")]))


def six_op_files(log: CommitLog) -> tuple[Table, list[str]]:
    """Commit six half batches. Returns another handle on op, and its files, the oldest first."""
    log.upkeep = False
    for i in range(6):
        commit(log, prepare(log, i))
    table = another(log).op
    table.refresh()
    return table, table.actions().sort_by("min.version")["path"].to_pylist()


def test_files_of_op_that_overlap_are_drained_by_version(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge lost to a writer may leave files whose versions lie between each other's; each holds a part."""
    monkeypatch.setattr(drain, "OP_ROWS_MAX", 2)
    table, paths = six_op_files(log)
    for several in (paths[0::2], paths[1::2]):
        merged = table.write(table.read(several).sort_by("version"), "op", op_module.STATS_COLUMNS)
        change = Change(add=[merged], remove=several, data_change=False)
        table.compare_and_set(lambda _, c=change: c, lambda _: True)
    log.drain()
    require_same(log)


def test_op_files_without_statistics_are_drained(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's OPTIMIZE writes files of which the Delta log says nothing."""
    monkeypatch.setattr(drain, "OP_ROWS_MAX", 2)
    table, paths = six_op_files(log)
    several = paths[2:4]
    untold = table.write(table.read(several), "op", ())
    change = Change(add=[untold], remove=several, data_change=False)
    table.compare_and_set(lambda _: change, lambda _: True)
    log.drain()
    require_same(log)


def test_at_every_step_the_table_is_a_prefix_of_op(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "STEP_MESSAGES_MAX", 5)
    for i in range(4):
        commit(log, prepare(log, i, topic="points" if i % 2 else "orders"))
    seen: list[set[int]] = []
    step = drain.Drainer._step

    def looking(self: drain.Drainer, table: Table, position: int, until: int) -> bool:
        more = step(self, table, position, until)
        seen.append(set(drained(log)["op_version"].to_pylist()))
        return more

    monkeypatch.setattr(drain.Drainer, "_step", looking)
    log.drain()
    versions = sorted(seen[-1])
    assert seen == [set(versions[:n]) for n in (1, 2, 3, 4)]


def test_many_drainers_copy_each_message_once(log: CommitLog) -> None:
    for i in range(3):
        commit(log, prepare(log, i))
    one, other = drain.Drainer(another(log)), drain.Drainer(another(log))
    write = one._write

    def slowly(*arguments: object) -> object:
        files = list(write(*arguments))  # type: ignore[arg-type]
        assert other.run() == log.refresh()
        return iter(files)

    one._write = slowly  # type: ignore[assignment,method-assign]
    assert one.run() == log.refresh()
    require_same(log)


def test_files_that_somebody_rewrote_are_drained(log: CommitLog) -> None:
    for i in range(3):
        commit(log, prepare(log, i))
    rewrite_half(log)
    merge_op_files(log)
    log.drain()
    require_same(log)


def test_a_log_whose_op_was_set_back_is_not_drained(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    log.drain()
    table = another(log).messages_table
    table.refresh()
    table.compare_and_set(lambda _: Change(transactions={"txmq.op": 99}), lambda _: True)
    with pytest.raises(CorruptLogError, match="set back"):
        log.drain()


def test_versions_that_place_nothing_are_passed(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "VERSIONS_SKIPPED_MAX", 5)
    for i in range(7):
        roll_back(log, prepare(log, i))
    assert log.drain() == log.refresh()
    assert drained(log).num_rows == 0
    commit(log, prepare(log, 7))
    log.drain()
    require_same(log)
