"""A log that an older version of rmq_spark made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from rmq_spark.commitlog.group_store import GROUPS_SCHEMA
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import OP_SCHEMA, STATS_COLUMNS, RowState
from rmq_spark.errors import GroupInUseError, LogFormatError, NotACommitLogError
from rmq_spark.storage.table import Change, DeltaLogTable
from tests.half_batches import another, bodies, check_offsets, commit, prepare, roll_back

NEW_SINCE_FORMAT_1 = ("firsts", "reopened_ms", "below", "prepared_ms", "archived")
NEW_SINCE_FORMAT_3 = ("consumer", "owner", "generation", "epoch")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A log of format 1: its op table has no columns for what is open below a mark, and there is no table messages."""
    path = tmp_path / "log"
    log = CommitLog.create(path)
    log.create_topic("orders", 2)
    commit(log, prepare(log, 0))
    roll_back(log, prepare(log, 1))
    prepare(log, 2)
    assert log.move_mark()
    commit(log, prepare(log, 3))
    rows = log.op.read(log.op.actions()["path"].to_pylist())
    shutil.rmtree(path / "op")
    shutil.rmtree(path / "messages")
    schema = pa.schema([f for f in OP_SCHEMA if f.name not in NEW_SINCE_FORMAT_1])
    DeltaLogTable.create(str(path / "op"), "op", schema, None, {})
    op = DeltaLogTable(str(path / "op"), "op", schema, None)
    for version in sorted(rows["version"].unique().to_pylist()):
        of_version = rows.filter(pc.equal(rows["version"], version)).select(schema.names)
        op.compare_and_set(lambda _, r=of_version: Change(add=[op.write(r, "op", STATS_COLUMNS[:3])]), lambda _: True)
    DeltaTable(str(path / "topics")).alter.set_table_properties({"txmq.format": "1"}, raise_if_not_exists=False)
    return path


def test_an_older_log_is_not_opened_and_the_error_says_what_to_do(older: Path) -> None:
    with pytest.raises(LogFormatError, match=rf"format 1.*txmq upgrade {older}"):
        CommitLog.open(older)


def test_an_upgraded_log_says_what_it_said_and_goes_on(older: Path) -> None:
    added = [*(f"column {name} of table op" for name in NEW_SINCE_FORMAT_1), "table messages", "format 4"]
    assert CommitLog.upgrade(older) == added
    assert CommitLog.upgrade(older) == []
    log = CommitLog.open(older)
    assert len(bodies(log)) == 10
    check_offsets(log)
    assert log.pending()["half_id"].to_pylist() == ["app:2"]
    assert log.state_of(log.get("app:1")).count(RowState.ROLLED_BACK) == 5
    assert log.move_mark()
    for handle in (log, another(log)):
        assert handle.pending()["half_id"].to_pylist() == ["app:2"]
    commit(log, log.get("app:2"))
    commit(log, prepare(log, 4))
    log.drain()
    assert log.read("orders").num_rows == 20
    check_offsets(another(log))


def test_a_group_of_format_3_goes_on_where_it_stood(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = CommitLog.create(path)
    log.create_topic("orders", 2)
    commit(log, prepare(log, 0))
    older = pa.schema([f for f in GROUPS_SCHEMA if f.name not in NEW_SINCE_FORMAT_3])
    row = {"consumer_group": "points", "topic": "orders", "queue_id": 1, "next_offset": 1, "session": "0179 host@7"}
    DeltaLogTable.create(str(path / "groups"), "groups", older, None, {"delta.appendOnly": "false"})
    groups = DeltaLogTable(str(path / "groups"), "groups", older, None)
    file = groups.write(pa.Table.from_pylist([row], older), "groups", ("consumer_group",))
    groups.compare_and_set(lambda _: Change(add=[file]), lambda _: True)
    DeltaTable(str(path / "topics")).alter.set_table_properties({"txmq.format": "3"}, raise_if_not_exists=False)
    with pytest.raises(LogFormatError, match="format 3"):
        CommitLog.open(path)
    assert CommitLog.upgrade(path) == [*(f"column {name} of table groups" for name in NEW_SINCE_FORMAT_3), "format 4"]
    log = CommitLog.open(path)
    assert log.groups.positions("points") == {("orders", 1): 1}
    assert log.groups.publish("points", {("orders", 1): 2}), "Spark goes on"
    with pytest.raises(GroupInUseError, match="is read by Spark"):
        log.groups.claim("points", "a member", {("orders", 1): 1}, {}, "a member")
    got = log.groups.claim("points", "a member", {("orders", 1): 1}, {}, "a member", take_over=True)
    assert got[("orders", 1)][:2] == (2, 3)


def test_an_upgrade_that_a_crash_stopped_is_done_again(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLogTable, "set_properties", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            CommitLog.upgrade(older)
    with pytest.raises(LogFormatError):
        CommitLog.open(older)
    assert CommitLog.upgrade(older) == ["format 4"]
    assert len(bodies(CommitLog.open(older))) == 10


def test_what_is_no_log_is_not_upgraded(tmp_path: Path) -> None:
    with pytest.raises(NotACommitLogError):
        CommitLog.upgrade(tmp_path)
