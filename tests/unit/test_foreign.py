"""Upkeep tells what another writer did to the tables of a commit log."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from rmq_spark.check.maintainer import Maintainer
from rmq_spark.commitlog import drained
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.upkeep import MaintenanceReport
from rmq_spark.errors import CorruptLogError, UnreadableFileError
from rmq_spark.storage.seal import taken_out_by_others
from tests.half_batches import another, commit, let_leave, make_log, prepare, send


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    log = make_log("delta", tmp_path / "log", orders=2)
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 5))
    log.drain()
    for batch_id in range(3, 5):
        commit(log, prepare(log, batch_id, 5))
    return log


def test_a_log_that_nobody_touched_has_nothing_to_tell(log: CommitLog) -> None:
    assert log.maintain().foreign == ()
    let_leave(log)
    send(log, "pending")
    report = log.maintain(dry_run=True)
    assert report.foreign == ()
    assert "careful" not in str(report)


@pytest.mark.parametrize("name", ["half", "op", "messages"])
def test_an_optimize_is_told(log: CommitLog, name: str) -> None:
    log.drain()
    before = log.read("orders")
    DeltaTable(f"{log.path}/{name}").optimize.compact()
    (told,) = log.maintain().foreign
    assert told.startswith(f"table {name} has files that rmq_spark did not write (part-")
    assert another(log).read("orders").equals(before)


def test_rows_that_somebody_adds_to_messages_are_told(log: CommitLog) -> None:
    log.drain()
    table = DeltaTable(f"{log.path}/messages")
    write_deltalake(table, table.to_pyarrow_table().slice(0, 2), mode="append")
    files, rows = log.maintain(dry_run=True).foreign
    assert "table messages has files" in files
    assert rows.startswith("table messages has 27 rows, and op placed 25, up to version")
    for upkeep in (log.drain, log.maintain):  # nothing is drained, and nothing leaves
        with pytest.raises(CorruptLogError, match="somebody wrote to it"):
            upkeep()


def test_an_optimize_that_doubles_what_upkeep_merged_is_told_and_a_restore_mends_it(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    """delta-rs commits a plan of OPTIMIZE although upkeep has merged the same files since."""
    for key in "abcdefghij":
        log.drain()
        commit(log, send(log, key))
    log.drain()
    before = log.read("orders")
    theirs = DeltaTable(f"{log.path}/messages")
    assert let_leave(log).files_merged
    theirs.optimize.compact()
    with pytest.raises(CorruptLogError, match=r"somebody wrote to it\. RESTORE it to the version before that"):
        log.drain()
    theirs.restore(DeltaTable(f"{log.path}/messages").version() - 1)
    log.drain()
    log.maintain()
    assert another(log).read("orders").equals(before)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("change", ["twice", "moved", "another queue"])
def test_as_many_rows_with_other_offsets_are_told(log: CommitLog, change: str) -> None:
    """The number of rows was right, and upkeep let the messages leave that the table had lost."""
    log.drain()
    DeltaTable(f"{log.path}/messages").alter.set_table_properties({"delta.appendOnly": "false"})
    table = DeltaTable(f"{log.path}/messages")
    rows = table.to_pyarrow_table().to_pylist()
    row = rows[3]
    if change == "twice":
        rows[3] = rows[4]
    elif change == "moved":
        row["queue_offset"] += 1_000
    else:
        row["queue_id"] = 7
    write_deltalake(table, pa.Table.from_pylist(rows, pa.schema(table.schema().to_arrow())), mode="overwrite")
    commit(log, prepare(log, 5, 1))
    for upkeep in (log.drain, log.maintain):
        with pytest.raises(CorruptLogError, match=r"table messages was changed by another writer: .*offset"):
            upkeep()
    assert any("was changed by another writer" in told for told in log.maintain(dry_run=True).foreign)


@pytest.mark.parametrize("name", ["half", "op"])
def test_a_restore_that_takes_rows_out_is_told(log: CommitLog, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Committed messages became pending again, and pending ones were gone, and nobody said a word."""
    table = DeltaTable(f"{log.path}/{name}")
    table.restore(table.version() - 1)
    told = log.maintain(dry_run=True).foreign
    restored = f"version {table.version()} of table {name} is another writer's RESTORE, which took out 1 file"
    assert [said for said in told if said.startswith(restored)]
    another(log).read("orders")
    assert any(restored in record.message and record.levelname == "ERROR" for record in caplog.records)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (b'{"commitInfo":{"operation":"DELETE"}}\n{"remove":{"path":"a"}}\n', "another writer's DELETE"),
        (b'{"remove":{"path":"a","dataChange":true}}\n', "another writer's change"),
        (b'{"commitInfo":{"operation":"OPTIMIZE"}}\n{"remove":{"path":"a","dataChange":false}}\n', None),
        (b'{"commitInfo":{"txmq.seal":"7:0"}}\n{"remove":{"path":"a"}}\n', None),
        (b'{"remove":{"path', None),
        (b'{"remove":7}\n', None),
        (b"7\n[" * 2000 + b'"remove"', None),
    ],
)
def test_only_another_writers_removal_of_rows_is_told(entry: bytes, said: str | None) -> None:
    told = taken_out_by_others(entry, "op", 7)
    assert (said is None) == (told is None)
    assert said is None or (told is not None and said in told)


def test_an_older_list_of_op_is_no_deletion(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of messages knew that a file had expired, and that of op did not (the simulation found it)."""
    log.drain()
    reader = another(log)
    reader.refresh()
    assert log.topic_store.set_retention("orders", 0.0) is None
    assert let_leave(log).files_expired > 0
    newest, answers = reader.op.refresh, iter(range(4))
    monkeypatch.setattr(
        reader.op, "refresh", lambda: reader.op.version if next(answers, None) is not None else newest()
    )
    assert reader.drained.odd_rows() is None


def test_rows_that_are_missing_in_messages_are_told(log: CommitLog) -> None:
    log.drain()
    DeltaTable(f"{log.path}/messages").restore(1)  # its files alone go back
    commit(log, prepare(log, 5, 5))
    for upkeep in (log.drain, log.maintain):
        with pytest.raises(CorruptLogError, match="somebody deleted from it"):
            upkeep()


def test_each_finding_is_told_once(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    DeltaTable(f"{log.path}/op").optimize.compact()
    caplog.set_level(logging.WARNING, "rmq_spark.check.maintainer")
    done = threading.Event()
    reports: list[MaintenanceReport] = []

    def count(report: MaintenanceReport) -> None:
        reports.append(report)
        if len(reports) == 3:
            done.set()

    Maintainer(log, 0.01).run(done, count)
    assert [len(report.foreign) for report in reports] == [1, 1, 1]
    (told,) = caplog.messages
    assert "table op has files that rmq_spark did not write" in told


@pytest.mark.parametrize("sent", [2, 6])
def test_an_op_that_was_set_back_is_told(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """Also when as much was written to it since as there was before."""
    monkeypatch.setattr(drained, "LOOK_AGAIN_S", 0.001)
    for name in ("op", "half"):
        shutil.copytree(tmp_path / "log" / name, tmp_path / name)
    for batch_id in range(5, 8):
        commit(log, prepare(log, batch_id, 5))
    log.drain()
    for name in ("op", "half"):
        shutil.rmtree(tmp_path / "log" / name)
        shutil.copytree(tmp_path / name, tmp_path / "log" / name)
    for i in range(sent):
        fresh = CommitLog.open(tmp_path / "log")
        commit(fresh, send(fresh, f"lost{i}"))
    for ask in (lambda: fresh.read("orders"), fresh.drain, fresh.maintain, lambda: another(fresh).read("orders")):
        with pytest.raises(CorruptLogError, match="set back to an older copy"):
            ask()


def test_a_handle_refuses_an_older_copy_that_was_written_to_since(tmp_path: Path) -> None:
    """A relay that was asleep meanwhile went on, and what was sent first after the copy never reached Kafka."""
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0, 1))
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    sleeper, same = another(log), another(log)
    for batch_id in (1, 2):
        commit(log, prepare(log, batch_id, 1))
    assert sleeper.read("orders").num_rows == 3
    shutil.rmtree(tmp_path / "log")
    shutil.copytree(tmp_path / "copy", tmp_path / "log")
    after = another(log)
    for batch_id in range(3, 7):
        commit(after, prepare(after, batch_id, 1))
    for _ in range(2):
        with pytest.raises(CorruptLogError, match="an older copy was put in its place, and written to since"):
            sleeper.refresh()
    assert same.read("orders").num_rows == after.read("orders").num_rows == 5


def test_a_handle_goes_on_with_the_newest_copy(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0, 1))
    sleeper = another(log)
    assert sleeper.read("orders").num_rows == 1
    shutil.copytree(tmp_path / "log", tmp_path / "copy", copy_function=shutil.copy)
    shutil.rmtree(tmp_path / "log")
    shutil.copytree(tmp_path / "copy", tmp_path / "log", copy_function=shutil.copy)  # the same with other times
    after = another(log)
    commit(after, prepare(after, 1, 1))
    assert sleeper.read("orders").num_rows == 2


def test_a_file_with_other_types_is_named(log: CommitLog) -> None:
    (path, *_) = DeltaTable(f"{log.path}/op").file_uris()
    rows = pq.read_table(path).replace_schema_metadata(None)  # no seal of ours
    at = rows.column_names.index("version")
    pq.write_table(rows.set_column(at, "version", pa.array(["first"] * rows.num_rows)), path)
    with pytest.raises(UnreadableFileError, match=f"{Path(path).name} of table op cannot be read: .* damaged"):
        another(log).read("orders")
