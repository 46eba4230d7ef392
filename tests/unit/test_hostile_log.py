"""Logs that are none, half of one, from the future, or edited by hand: a named error, and nothing read outside."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.client import delta_tables as opening
from rmq_spark.errors import CorruptLogError, LogFormatError, NotACommitLogError, StorageError
from tests.support.half_batches import (
    another,
    bodies,
    check_offsets,
    commit,
    copied_log,
    decide_one,
    make_log,
    paths_of,
    prepare,
    rows_of,
)
from tests.support.inside import HALF_SCHEMA, OP_SCHEMA, TOPICS_SCHEMA, Change, DeltaLogTable
from tests.support.limits import Limit
from tests.support.meanwhile import at, dies_at
from tests.support.sends import raising

ON_DELTA = pytest.mark.log("delta", orders=1)


# ---------------------------------------------------------------- what is no log
def topics_alone(path: Path) -> None:
    DeltaLogTable.create(str(path / "topics"), "topics", TOPICS_SCHEMA, None, {"txmq.format": str(opening.FORMAT)})


def without_entries(path: Path) -> None:
    CommitLog.create(path)
    for entry in (path / "op" / "_delta_log").iterdir():
        entry.unlink()


def with_a_broken_entry(path: Path) -> None:
    CommitLog.create(path)
    (path / "op" / "_delta_log" / f"{0:020d}.json").write_text("{not json")


NO_LOGS: dict[str, Callable[[Path], object]] = {
    "a missing folder": lambda path: None,
    "an empty folder": Path.mkdir,
    "a Delta table": lambda path: DeltaTable.create(str(path), schema=Schema.from_arrow(TOPICS_SCHEMA)),
    "a table named topics": lambda p: DeltaTable.create(str(p / "topics"), schema=Schema.from_arrow(TOPICS_SCHEMA)),
    "topics alone": topics_alone,
    "a log without its entries": without_entries,
    "a log with a broken entry": with_a_broken_entry,
}


@pytest.mark.parametrize("what", NO_LOGS)
def test_a_path_that_is_no_commit_log_is_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "log"
    NO_LOGS[what](path)
    with pytest.raises(NotACommitLogError, match=str(path)):
        CommitLog.open(path)


@pytest.mark.parametrize("crash_before", ["half", "op", "topics"])
def test_a_half_made_log_is_completed_by_making_it_again(tmp_path: Path, crash_before: str) -> None:
    with dies_at("table made", table=crash_before):
        CommitLog.create(tmp_path / "log")
    with pytest.raises(NotACommitLogError):
        CommitLog.open(tmp_path / "log")
    log = make_log("delta", tmp_path / "log")
    commit(log, prepare(log, 0))
    assert len(bodies(CommitLog.open(tmp_path / "log"))) == 5


@ON_DELTA
def test_a_log_that_has_lost_its_topics_is_not_made_anew_over_what_it_holds(log: CommitLog, tmp_path: Path) -> None:
    commit(log, prepare(log, 0))
    (tmp_path / "log" / "topics").rename(tmp_path / "topics")
    for use in (CommitLog.open, CommitLog.create, partial(CommitLog.create, exist_ok=True)):
        with pytest.raises(CorruptLogError, match=r"no table 'topics', and its table 'op' has been written to: "):
            use(tmp_path / "log")
    (tmp_path / "topics").rename(tmp_path / "log" / "topics")
    assert len(bodies(CommitLog.open(tmp_path / "log"))) == 5


@pytest.mark.parametrize("fails_at", ["half", "op", "topics"])
def test_a_log_that_cannot_be_made_to_its_end_leaves_nothing_behind(tmp_path: Path, fails_at: str) -> None:
    with (
        at("table made", raising(StorageError("the store is full")), table=fails_at),
        pytest.raises(StorageError, match=r"^the store is full$"),
    ):
        CommitLog.create(tmp_path / "shop" / "log")
    assert list(tmp_path.iterdir()) == []


def test_who_makes_a_log_that_another_process_gives_up_is_told_to_try_again(tmp_path: Path) -> None:
    other = copied_log(tmp_path / "other")
    there = tmp_path / "log"

    def gives_up() -> None:
        shutil.rmtree(there / "half")

    with (
        at("table made", lambda: shutil.copytree(other.path, there, dirs_exist_ok=True), table="half"),
        at("table made", gives_up, table="topics"),
        pytest.raises(StorageError, match="another process gave up making this commit log just now: try again"),
    ):
        CommitLog.create(there, exist_ok=True)


def test_two_who_make_a_log_at_once_are_not_told_that_it_lost_its_topics(tmp_path: Path) -> None:
    def other_is_faster() -> None:
        log = make_log("delta", tmp_path / "log")
        commit(log, prepare(log, 0))

    with at("log made", other_is_faster):
        log = CommitLog.create(tmp_path / "log", exist_ok=True)
    assert len(bodies(log)) == 5


@ON_DELTA
def test_a_log_that_has_lost_half_takes_no_sends_and_says_so(log: CommitLog, tmp_path: Path) -> None:
    table = another(log).engine.half.table
    table.refresh()
    shutil.rmtree(tmp_path / "log" / "half")
    with pytest.raises(CorruptLogError, match="half is not there: the commit log has lost a table"):
        table.clock.require_near()


@pytest.mark.parametrize("found", [str(opening.FORMAT + 1), "0", "99", "next", "-1"])
def test_another_format_is_refused_in_one_sentence(tmp_path: Path, found: str) -> None:
    CommitLog.create(tmp_path / "log")
    (entry,) = (tmp_path / "log" / "topics" / "_delta_log").glob("*.json")
    said = f'"txmq.format":"{opening.FORMAT}"'
    assert said in entry.read_text()
    entry.write_text(entry.read_text().replace(said, f'"txmq.format":"{found}"'))
    said = rf"/log has format {found}, and this version of rmq_spark reads and writes format 1 alone: use the version"
    for use in (CommitLog.open, partial(CommitLog.create, exist_ok=True)):
        with pytest.raises(LogFormatError, match=said):
            use(tmp_path / "log")


@pytest.mark.parametrize(("name", "schema"), [("half", HALF_SCHEMA), ("op", OP_SCHEMA)])
def test_a_table_that_lacks_a_column_is_not_used(tmp_path: Path, name: str, schema: pa.Schema) -> None:
    CommitLog.create(tmp_path / "log")
    shutil.rmtree(tmp_path / "log" / name)
    lost = schema.names[3]
    left = pa.schema([f for f in schema if f.name != lost])
    DeltaTable.create(str(tmp_path / "log" / name), schema=Schema.from_arrow(left))
    with pytest.raises(LogFormatError, match=f"{name} has no column '{lost}'"):
        CommitLog.open(tmp_path / "log").pending()  # half opens in the background


@ON_DELTA
def test_a_moved_log_opens_in_its_new_place(log: CommitLog, tmp_path: Path) -> None:
    commit(log, prepare(log, 0))
    open_one = prepare(log, 1)
    log.close()
    shutil.move(tmp_path / "log", tmp_path / "there")
    moved = CommitLog.open(tmp_path / "there")
    assert len(bodies(moved)) == 5
    commit(moved, moved.engine.get(open_one.half_id))
    check_offsets(moved)
    assert len(bodies(moved)) == 10
    assert not (tmp_path / "log").exists()


# ---------------------------------------------------------------- op rows edited by hand
def edit(log: CommitLog, **changes: object) -> CommitLog:
    """Replace the log's only op row by an edited one, and come back with a handle that has not seen the first."""
    op = another(log).engine.op_table
    paths = paths_of(op)
    (row,) = op.read(paths).to_pylist()
    rows = pa.Table.from_pylist([{**row, **changes}], schema=OP_SCHEMA)
    change = Change(add=[op.write(rows)], remove=paths, data_change=False)
    assert op.compare_and_set(lambda _: change, lambda c: c.add[0].path in op.actions()["path"].to_pylist()) is change
    return another(log)


def ranges(*pairs: tuple[int, int]) -> list[dict[str, int]]:
    return [{"first": a, "last": b} for a, b in pairs]


UPWARDS = ("../outside.parquet", "x/../../outside.parquet")
PATHS = (*UPWARDS, "/etc/passwd", "file:///etc/passwd", "s3://bucket/x.parquet", None)
EDITS: dict[str, dict[str, object]] = {
    **{f"path {path}": {"path": path} for path in PATHS},
    "ranges backwards": {"ranges": ranges((2, 1), (4, 6))},
    "ranges overlapping": {"ranges": ranges((1, 2), (2, 3))},
    "ranges descending": {"ranges": ranges((4, 5), (1, 2))},
    "ranges negative": {"ranges": ranges((-2, -1), (4, 5))},
    "ranges empty": {"ranges": []},
    "ranges past the file": {"ranges": ranges((3, 6))},
    "ranges far past the file": {"ranges": ranges((10**14, 10**14 + 3)), "file_rows": 10**15},
    "count too large": {"count": 5, "next_offset": 5},
    "count and offsets disagree": {"count": 5},
    "offset negative": {"queue_offset": -1, "next_offset": 3},
    "another file": {"file_no": 7},
    "a file that is not there": {"file_no": 7, "path": f"half-{0:032x}.parquet"},
    "another half batch": {"half_id": "app:7"},
    "unknown kind": {"kind": "erase"},
}
SEEN_BY_THE_STATE = [e for e in EDITS if not e.startswith("path") and e != "another half batch"]


@pytest.mark.log("memory", "delta", orders=1)
@pytest.mark.parametrize("edited", EDITS)
def test_an_edited_op_row_is_an_error_to_who_reads_it_and_to_who_decides_over_it(
    log: CommitLog, tmp_path: Path, edited: str
) -> None:
    outside = pa.table({"half_id": ["app:0"] * 6, "file_no": [0] * 6, "row_no": range(6), "body": ["outside"] * 6})
    pq.write_table(outside, tmp_path / "log" / "outside.parquet") if (tmp_path / "log").exists() else None
    four_of_six = {0: b"\0\1\1\0\1\1"}
    decide_one(log.engine, prepare(log, 0, 6, per="message"), 1, commit=four_of_six)
    changed = edit(log, **EDITS[edited])
    with pytest.raises(CorruptLogError):
        changed.read("orders")
    if edited in SEEN_BY_THE_STATE:
        engine = another(changed).engine
        with pytest.raises(CorruptLogError):
            decide_one(engine, engine.get("app:0"), 1, commit={0: b"\1\0\0\0\0\0"})
        assert rows_of(engine.op_table).num_rows == 1


@ON_DELTA
def test_a_half_table_that_names_a_file_outside_is_not_read(log: CommitLog, tmp_path: Path) -> None:
    record = prepare(log, 0)
    (file,) = record.files.values()
    shutil.copy(tmp_path / "log" / "half" / file.path, tmp_path / "log" / "outside.parquet")
    entry = sorted((tmp_path / "log" / "half" / "_delta_log").glob("*.json"))[-1]
    entry.write_text(entry.read_text().replace(file.path, "../outside.parquet"))
    with pytest.raises(CorruptLogError, match="not inside the table"):
        CommitLog.open(tmp_path / "log").engine.get("app:0")


@ON_DELTA
def test_a_half_file_of_which_the_delta_log_says_no_count_is_counted_by_its_rows(log: CommitLog) -> None:
    """Flipped bits in a checkpoint took the counts away, and every question about open half batches was a TypeError."""
    commit(log, prepare(log, 0, 2))
    record = prepare(log, 1, 3)
    for entry in sorted(Path(log.path, "half", "_delta_log").glob("*.json"))[1:]:
        uncounted, changed = re.subn(r'\\"numRecords\\": \d+, ', "", entry.read_text())
        assert changed
        entry.write_text(uncounted)
    log = another(log)
    assert log.engine.half.table.actions()["num_records"].to_pylist() == [None, None]
    assert log.engine.open_half_ids() == [record.half_id]
    assert log.pending()["messages"].to_pylist() == [3]
    assert log.engine.get(record.half_id).files == record.files


@ON_DELTA
def test_a_log_that_has_lost_its_file_of_topics_says_so(log: CommitLog) -> None:
    (path,) = paths_of(log.engine.topics_table)
    Path(log.path, "topics", path).unlink()
    with pytest.raises(CorruptLogError, match=f"{path}.* topics"):
        another(log).topics()


@ON_DELTA
def test_bounds_that_no_file_can_have_are_told(log: CommitLog) -> None:
    prepare(log, 0, 2)
    (_, entry) = sorted(Path(log.path, "half", "_delta_log").glob("*.json"))
    entry.write_text(
        entry.read_text().replace('minValues\\": {\\"half_id\\": \\"app:0', 'minValues\\": {\\"half_id\\": \\"zpp:0')
    )
    with pytest.raises(CorruptLogError, match="has impossible bounds for file"):
        another(log).pending()


@ON_DELTA
def test_bounds_that_name_another_half_batch_than_the_file_holds_are_told(log: CommitLog) -> None:
    sound, record = prepare(log, 0), prepare(log, 1)
    entry = max(Path(log.path, "half", "_delta_log").glob("*.json"))
    entry.write_text(entry.read_text().replace('half_id\\": \\"app:1', 'half_id\\": \\"app:9'))
    (file,) = record.files.values()
    with pytest.raises(CorruptLogError, match=f"file {file.path} of table half has rows of other half batches than"):
        another(log).engine.half.find_small([sound.half_id, "app:9"], 100)


@pytest.mark.log("memory", "delta", plain=1)
def test_a_half_batch_that_lies_twice_stops_every_decision_on_its_topic(log: CommitLog) -> None:
    """Nobody can say which copy its readers are to see, and what comes after it on a FIFO topic."""
    log.create_topic("orders", 1, fifo=True)
    columns = {"body": ["a", "b"], "sharding_key": ["k", "k"]}
    before = prepare(log, 0, columns)
    twice = prepare(log, 1, columns)
    table = another(log).engine.half.table
    table.refresh()
    (file,) = twice.files.values()
    copy = table.write(table.read([file.path]))
    assert table.compare_and_set(lambda _: Change(add=[copy]), lambda _: True) is not None
    for look in (
        lambda: commit(log, before),
        lambda: log.engine.get(twice.half_id),
        lambda: log.resolve(twice.half_id, txmq.COMMIT_MESSAGE, "it happened"),
    ):
        with pytest.raises(CorruptLogError, match="lies in"):
            look()
    assert bodies(another(log)) == []
    assert log.pending()["producer_group"].to_pylist() == ["group", None]


# ---------------------------------------------------------------- footers that say too little
@ON_DELTA
def test_a_half_file_that_gives_fewer_rows_than_the_delta_log_says_is_noticed(log: CommitLog, limit: Limit) -> None:
    """A flipped bit in the bounds of a footer let pyarrow pass over rows, and half of a transaction was visible."""
    limit(ROW_GROUP_ROWS=1)
    record = prepare(log, 1, 3)
    (file,) = Path(log.path, "half").glob("*.parquet")
    content = file.read_bytes()
    begin = content.rindex(b"\x07half_id")  # what the footer says of this column of the last row
    end = content.index(HALF_SCHEMA.names[HALF_SCHEMA.names.index("half_id") + 1].encode(), begin)
    bounds = record.half_id.encode()
    assert bounds in content[begin:end]
    lie = content[begin:end].replace(bounds, b"!" * len(bounds))
    file.write_bytes(content[:begin] + lie + content[end:])
    with pytest.raises(CorruptLogError, match="of table half has 2 rows"):
        another(log).resolve(record.half_id, txmq.COMMIT_MESSAGE, "the order is there")


@ON_DELTA
@pytest.mark.parametrize("marked", [False, True])
def test_a_footer_that_lies_about_its_versions_hides_no_op_row(log: CommitLog, tmp_path: Path, marked: bool) -> None:
    """A flipped bit in the bounds of a footer let pyarrow pass over a commit, and the next check committed it again."""
    commit(log, prepare(log, 0, 2))
    if marked:
        assert log.engine.ledger.mark()
    commit(log, prepare(log, 1, 3))
    for path in log.engine.op_table.actions()["path"].to_pylist():
        file = tmp_path / "log" / "op" / path
        bounds = log.engine.op_table.read([path], ["version"])["version"][0].as_py().to_bytes(8, "little")
        content = file.read_bytes()
        begin = content.rindex(b"\x07version")  # what the footer says of this column
        end = content.index(OP_SCHEMA.names[OP_SCHEMA.names.index("version") + 1].encode(), begin)
        assert bounds in content[begin:end]
        lie = content[begin:end].replace(bounds, (1 << 40).to_bytes(8, "little"))
        file.write_bytes(content[:begin] + lie + content[end:])
    assert another(log).engine.open_half_ids() == []
    assert len(bodies(another(log))) == 5
