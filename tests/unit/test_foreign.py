"""Upkeep tells what another writer did to the tables of a commit log."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

from rmq_spark import CommitLog
from rmq_spark.errors import CorruptLogError, ForeignChangeError, UnreadableFileError
from tests.support.foreign_writers import a_file, cut_back, delete_a_row_by_a_vector, put_entry, raise_protocol
from tests.support.half_batches import another, commit, let_leave, make_log, prepare, send
from tests.support.inside import Change, Entry, table_files
from tests.support.limits import Limit
from tests.support.meanwhile import at


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with three half batches in messages, and two above."""
    folder = tmp_path_factory.mktemp("made") / "log"
    log = make_log("delta", folder, orders=2)
    for batch_id in range(5):
        commit(log, prepare(log, batch_id, 5))
        if batch_id == 2:
            log.drain()
    return folder


@pytest.fixture
def log(made: Path, tmp_path: Path) -> CommitLog:
    return CommitLog.open(shutil.copytree(made, tmp_path / "log"))


def test_a_log_that_nobody_touched_has_nothing_to_tell(log: CommitLog) -> None:
    assert log.maintain().foreign is None
    let_leave(log)
    send(log, "pending")
    report = log.maintain(dry_run=True)
    assert report.foreign is None
    assert "careful" not in str(report)


# ---------------------------------------------------------------- messages
def optimize(table: str) -> None:
    DeltaTable(table).optimize.compact()


def append(table: str) -> None:
    write_deltalake(table, DeltaTable(table).to_pyarrow_table().slice(0, 2), mode="append")


def delete(table: str) -> None:
    DeltaTable(table).alter.set_table_properties({"delta.appendOnly": "false"})
    DeltaTable(table).delete("queue_offset = 1")


def move(table: str) -> None:
    """As many rows with other offsets."""
    DeltaTable(table).alter.set_table_properties({"delta.appendOnly": "false"})
    delta = DeltaTable(table)
    rows = delta.to_pyarrow_table().to_pylist()
    rows[3]["queue_offset"] += 1_000
    write_deltalake(delta, pa.Table.from_pylist(rows, pa.schema(delta.schema().to_arrow())), mode="overwrite")


def delete_by_a_vector(table: str) -> None:
    delete_a_row_by_a_vector(table)


def restore(table: str) -> None:
    DeltaTable(table).restore(1)


def hide(table: str) -> None:
    """Other statistics: readers skip the file."""
    add = a_file(table)
    said = {**json.loads(add["stats"]), "maxValues": {}}
    put_entry(table, "COMPUTE STATISTICS", [{"add": {**add, "dataChange": False, "stats": json.dumps(said)}}])


def say_what_is_drained(table: str) -> None:
    put_entry(table, "STREAMING UPDATE", [{"txn": {"appId": "txmq.op", "version": 99}}])


def add_a_column(table: str) -> None:
    DeltaTable(table).alter.add_columns([Field("seen", PrimitiveType("boolean"))])


def set_a_property(table: str) -> None:
    DeltaTable(table).alter.set_table_properties({"delta.logRetentionDuration": "interval 1 minutes"})


def switch_on_deletion_vectors(table: str) -> None:
    raise_protocol(table, ["deletionVectors"], ["deletionVectors"], **{"delta.enableDeletionVectors": "true"})


def switch_on_a_feature(table: str) -> None:
    raise_protocol(table, ["deletionVectors"], ["deletionVectors"])


WAYS = {
    optimize: r"added 1 file \(part-.*took out 2 files .*: OPTIMIZE by delta-rs",
    append: r"added 1 file .*: WRITE by delta-rs",
    delete: r"added 1 file .*took out 1 file .*delta.appendOnly=false.*: DELETE by delta-rs",
    move: r"added 1 file .*took out 2 files ",
    delete_by_a_vector: r"deleted rows, by deletion vectors, of 1 file \(messages-.*version 4: DELETE by bob, "
    r"Apache-Spark/4.2.0 Delta-Lake/4.4.0 at 2023-11-14 22:13:20 UTC",
    restore: r"took out 1 file .*: RESTORE by delta-rs",
    add_a_column: "changed its columns",
    set_a_property: r"changed its properties \(delta.logRetentionDuration=interval 1 minutes\)",
    switch_on_deletion_vectors: "changed its properties .*changed its protocol from 1 and 2 to 3 and 7 with a",
    switch_on_a_feature: "another writer changed its protocol",
}


ALIKE = (move, switch_on_deletion_vectors)
"""As others are: for `make test-all`."""


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.long if way in ALIKE else (), id=way.__name__) for way in WAYS]
)
def test_what_another_writer_did_to_messages_stops_upkeep_and_a_restore_mends_it(
    log: CommitLog, way: Callable[[str], None]
) -> None:
    """A row deleted by a vector was not noticed, messages were drained above it, and a merge doubled the file."""
    log.drain()
    messages = f"{log.path}/messages"
    way(messages)
    theirs = DeltaTable(messages).version()
    commit(log, prepare(log, 5, 5))
    half = log.engine.half.table.refresh()
    for upkeep in (log.drain, log.maintain, another(log).drain, lambda: let_leave(log)):
        with pytest.raises(ForeignChangeError, match=WAYS[way]) as caught:
            upkeep()
        assert str(caught.value).startswith("table messages is not what rmq_spark left in version 2: another writer ")
    assert DeltaTable(messages).version() == theirs
    assert log.engine.half.table.refresh() == half  # nothing left it
    told = log.maintain(dry_run=True).foreign
    assert told == str(caught.value)

    call = re.search(r"DeltaTable\('(.+)'\)\.restore\((\d+), protocol_downgrade_allowed=True\)", told)
    assert call is not None
    DeltaTable(call[1]).restore(int(call[2]), protocol_downgrade_allowed=True)
    assert log.maintain().foreign is None
    let_leave(log)
    expected = [f"app.{batch_id}.{i}".encode() for batch_id in range(6) for i in range(5)]
    assert sorted(another(log).read("orders")["body"].to_pylist()) == expected
    assert sorted(DeltaTable(messages).to_pyarrow_table()["body"].to_pylist()) == expected


@pytest.mark.turns(3)
@pytest.mark.parametrize("way", [delete_by_a_vector, optimize, set_a_property], ids=lambda way: way.__name__)
def test_reads_go_on_while_another_writers_change_stops_upkeep(log: CommitLog, way: Callable[[str], None]) -> None:
    log.drain()
    before = log.read("orders")
    way(f"{log.path}/messages")
    assert another(log).read("orders").equals(before)


@pytest.mark.turns(3, among="foreign: in a race")
def test_a_change_that_comes_while_a_drain_writes_its_files_stops_it(log: CommitLog) -> None:
    change = at("file written", lambda: delete_by_a_vector(f"{log.path}/messages"), table="messages")
    with change, pytest.raises(ForeignChangeError, match="deletion vectors"):
        log.drain()


@pytest.mark.turns(3, among="foreign: in a race")
def test_a_change_that_comes_while_a_merge_reads_stops_it(log: CommitLog, limit: Limit) -> None:
    limit(MESSAGES_FILES_MAX=2)
    log.drain()
    change = at("files read", lambda: delete_by_a_vector(f"{log.path}/messages"), table="messages")
    with change, pytest.raises(ForeignChangeError, match="deletion vectors"):
        table_files.compact_messages(another(log).engine.messages_table)
    assert DeltaTable(f"{log.path}/messages").version() == 4


def test_commits_of_others_that_change_nothing_stop_nobody(log: CommitLog) -> None:
    log.drain()
    messages = f"{log.path}/messages"
    put_entry(messages, "VACUUM START")
    DeltaTable(messages).alter.set_table_description("the shop's messages")
    DeltaTable(messages).alter.set_table_properties({"delta.enableDeletionVectors": "false"})
    commit(log, prepare(log, 5, 5))
    assert log.maintain().messages_drained == 5
    assert log.maintain().foreign is None


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("way", "said"),
    [
        (hide, r"gave other statistics to 1 file \(messages-.*: COMPUTE STATISTICS by bob"),
        (say_what_is_drained, r"set what rmq_spark alone may set \(txmq.op\) \(version 3: STREAMING UPDATE by bob"),
    ],
)
def test_what_no_restore_undoes_is_cut_off_the_delta_log(log: CommitLog, way: Callable[[str], None], said: str) -> None:
    log.drain()
    messages = f"{log.path}/messages"
    way(messages)
    with pytest.raises(ForeignChangeError, match=f"{said}.* cut its Delta log back to version 2 "):
        log.drain()
    commit(log, prepare(log, 5, 5))
    cut_back(messages, 2)
    again = another(log)
    assert again.maintain().messages_drained == 5
    assert again.read("orders").num_rows == DeltaTable(messages).to_pyarrow_table().num_rows == 30


def test_a_change_of_which_the_log_knows_no_more_is_told(log: CommitLog) -> None:
    log.drain()
    delete_by_a_vector(f"{log.path}/messages")
    DeltaTable(f"{log.path}/messages").create_checkpoint()
    for version in range(4):
        Path(log.path, "messages", "_delta_log", f"{version:020d}.json").unlink()
    with pytest.raises(ForeignChangeError, match=r"after version 2, and nobody can tell how: .* from a copy"):
        another(log).drain()


@pytest.mark.parametrize("time", [{}, {"timestamp": None}, {"timestamp": "soon"}, {"timestamp": 1e300}])
def test_a_commit_that_does_not_say_when_it_was_made_is_told_without_a_time(time: dict[str, Any]) -> None:
    info = {"commitInfo": {"operation": "WRITE", "userName": "bob", **time}}
    assert str(Entry.of(4, json.dumps(info).encode())) == "version 4: WRITE by bob"


@pytest.mark.parametrize("content", [b"[]", b"7", b'{"add": {}, "remove": {}}'])
def test_an_entry_with_other_lines_than_actions_is_none(content: bytes) -> None:
    with pytest.raises(ValueError, match="an action is no object"):
        Entry.of(4, content)


def test_nothing_of_messages_is_deleted_that_a_restore_may_need(log: CommitLog) -> None:
    log.drain()
    before = log.read("orders")
    delete(f"{log.path}/messages")
    *_, entry = sorted(Path(log.path, "messages", "_delta_log").glob("*.json"))
    long_ago, changed = re.subn(r'"deletionTimestamp":\d+', '"deletionTimestamp":1', entry.read_text())
    assert changed
    entry.write_text(long_ago)
    tables = [log.engine.messages_table]
    assert table_files.vacuum(tables, -1.0, dry_run=False) == []
    assert table_files.delete_replaced(tables[0], 0, dry_run=False) == []
    DeltaTable(f"{log.path}/messages").restore(2, protocol_downgrade_allowed=True)
    assert another(log).read("orders").equals(before)


@pytest.mark.turns(3, among="foreign: in a race")
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
    own = DeltaTable(f"{log.path}/messages").version() - 1
    with pytest.raises(ForeignChangeError, match=rf"restore\({own}, protocol_downgrade_allowed=True\)"):
        log.drain()
    theirs.restore(own, protocol_downgrade_allowed=True)
    log.drain()
    log.maintain()
    assert another(log).read("orders").equals(before)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# ---------------------------------------------------------------- the other tables
ELSEWHERE = (optimize, append, delete_by_a_vector, restore, add_a_column, set_a_property, switch_on_a_feature)
TABLES = ("half", "op", "topics", "groups")
ALWAYS = dict(zip(ELSEWHERE, (*TABLES, "half", "op", "topics"), strict=True))
"""On which table a way is tried in each run; all have the one class that notices it."""


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=() if ALWAYS[way] == name else pytest.mark.long, id=f"{way.__name__}-{name}")
        for way in ELSEWHERE
        for name in TABLES
    ],
)
def test_what_another_writer_did_to_another_table_stops_the_log_and_a_restore_mends_it(
    log: CommitLog, name: str, way: Callable[[str], None]
) -> None:
    """Committed messages became pending again, pending ones were gone, or FIFO order broke, and nobody said a word."""
    for offset in (1, 2, 3):
        log.engine.groups.publish(f"points{offset}", {("orders", 0): offset})
    log.create_topic("bills", 1)
    before, pending = log.read("orders"), prepare(log, 5, 5)
    own = DeltaTable(f"{log.path}/{name}").version()
    opened = another(log)
    opened.read("orders")
    if way is append:
        put_entry(f"{log.path}/{name}", "WRITE", [{"add": {**a_file(f"{log.path}/{name}"), "path": "part-1.parquet"}}])
    else:
        way(f"{log.path}/{name}")
    theirs = DeltaTable(f"{log.path}/{name}").version()
    said = rf"table {name} is not what rmq_spark left in version {own}: another writer .* Nobody goes on with it until"
    uses: dict[str, Sequence[Callable[[CommitLog], object]]] = {
        "half": (lambda log: prepare(log, 6, 5), lambda log: log.pending(), lambda log: log.maintain(dry_run=True)),
        "op": (lambda log: commit(log, pending), lambda log: log.read("orders"), lambda log: log.drain()),
        "topics": (lambda log: log.create_topic("more"), lambda log: another(log).topics()),
        "groups": (
            lambda log: log.engine.groups.publish("points1", {("orders", 0): 4}),
            lambda log: log.engine.groups.rows(),
        ),
    }
    for use in uses[name]:
        for handle in (opened, another(log)):
            for _ in range(2):
                with pytest.raises(ForeignChangeError, match=said) as caught:
                    use(handle)
    assert DeltaTable(f"{log.path}/{name}").version() == theirs

    call = re.search(r"\.restore\((\d+), protocol_downgrade_allowed=True\)", str(caught.value))
    assert call is not None, caught.value
    DeltaTable(f"{log.path}/{name}").restore(int(call[1]), protocol_downgrade_allowed=True)
    assert another(log).read("orders").equals(before)
    commit(opened, pending)
    assert another(log).read("orders").num_rows == before.num_rows + 5
    assert another(log).engine.groups.publish("points1", {("orders", 0): 4})
    let_leave(log)


@pytest.mark.parametrize("name", ["half", "op"])
def test_commits_of_others_that_change_nothing_in_the_other_tables_stop_nobody(log: CommitLog, name: str) -> None:
    put_entry(f"{log.path}/{name}", "VACUUM START")
    DeltaTable(f"{log.path}/{name}").alter.set_table_description("the shop's messages")
    commit(log, prepare(log, 5, 5))
    assert another(log).read("orders").num_rows == 30


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["half", "op", "topics"])
def test_commits_of_others_that_change_nothing_take_no_entry_that_the_log_needs(log: CommitLog, name: str) -> None:
    """delta-rs cleans up at whoever's commit makes a checkpoint: our last version went, and the log stood still."""
    table = f"{log.path}/{name}"
    own = DeltaTable(table).version()
    for _ in range(60):
        DeltaTable(table).alter.set_table_description("the shop's table")
        for file in Path(table, "_delta_log").iterdir():
            long_ago = file.stat().st_mtime - 86_400
            os.utime(file, (long_ago, long_ago))
    assert another(log).read("orders").num_rows == 25
    commit(another(log), prepare(another(log), 5, 5))
    set_a_property(table)
    (changed,) = (t for t in another(log).engine.tables() if t.name == name)
    with pytest.raises(ForeignChangeError, match=r"restore\((\d+), protocol") as caught:
        changed.refresh()
    version = int(re.findall(r"restore\((\d+), ", str(caught.value))[0])
    assert version >= own
    DeltaTable(table).restore(version, protocol_downgrade_allowed=True)
    assert another(log).read("orders").num_rows == 30


def test_a_change_that_a_merge_finds_as_damage_stops_it(log: CommitLog) -> None:
    """The second proposal was committed above the change, and the way back was lost."""
    log.drain()
    table = another(log).engine.messages_table
    table.refresh()
    seen: list[int] = []

    def propose(version: int) -> Change:
        seen.append(version)
        if len(seen) == 1:
            theirs = DeltaTable(f"{log.path}/messages")
            theirs.optimize.compact()
            theirs.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
            table.read(table.actions()["path"].to_pylist())
        return Change(transactions={"txmq.test": 1}, data_change=False)

    with pytest.raises(ForeignChangeError, match="OPTIMIZE by delta-rs"):
        table.compare_and_set(propose, lambda _: True)
    assert len(seen) == 1


@pytest.mark.turns(2)
@pytest.mark.parametrize("sent", [2, 6])
def test_an_op_that_was_set_back_is_told(log: CommitLog, tmp_path: Path, sent: int) -> None:
    """Also when as much was written to it since as there was before."""
    for name in ("op", "half"):
        shutil.copytree(tmp_path / "log" / name, tmp_path / name)
    for batch_id in range(5, 8):
        commit(log, prepare(log, batch_id, 5))
    log.drain()
    for name in ("op", "half"):
        put_back(tmp_path / "log" / name, tmp_path / name)
    for i in range(sent):
        fresh = CommitLog.open(tmp_path / "log")
        commit(fresh, send(fresh, f"lost{i}"))
    for ask in (lambda: fresh.read("orders"), fresh.drain, fresh.maintain, lambda: another(fresh).read("orders")):
        with pytest.raises(CorruptLogError, match="set back to an older copy"):
            ask()


@pytest.fixture
def young(tmp_path: Path) -> CommitLog:
    """A log with one message."""
    log = make_log("delta", tmp_path / "young", orders=1)
    commit(log, prepare(log, 0, 1))
    return log


def put_back(folder: Path, copy: Path, **how: Any) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder, **how)


def test_a_handle_refuses_an_older_copy_that_was_written_to_since(young: CommitLog, tmp_path: Path) -> None:
    """A relay that was asleep meanwhile went on, and what was sent first after the copy never reached Kafka."""
    log = young
    shutil.copytree(tmp_path / "young", tmp_path / "copy")
    sleeper, same = another(log), another(log)
    for batch_id in (1, 2):
        commit(log, prepare(log, batch_id, 1))
    assert sleeper.read("orders").num_rows == 3
    put_back(tmp_path / "young", tmp_path / "copy")
    after = another(log)
    for batch_id in range(3, 7):
        commit(after, prepare(after, batch_id, 1))
    for _ in range(2):
        with pytest.raises(CorruptLogError, match="an older copy was put in its place, and written to since"):
            sleeper.refresh()
    assert same.read("orders").num_rows == after.read("orders").num_rows == 5


def test_a_handle_goes_on_with_the_newest_copy(young: CommitLog, tmp_path: Path) -> None:
    sleeper = another(young)
    assert sleeper.read("orders").num_rows == 1
    shutil.copytree(tmp_path / "young", tmp_path / "copy", copy_function=shutil.copy)
    put_back(tmp_path / "young", tmp_path / "copy", copy_function=shutil.copy)  # the same with other times
    after = another(young)
    commit(after, prepare(after, 1, 1))
    assert sleeper.read("orders").num_rows == 2


def test_a_file_with_other_types_is_named(log: CommitLog) -> None:
    (path, *_) = DeltaTable(f"{log.path}/op").file_uris()
    rows = pq.read_table(path).replace_schema_metadata(None)  # no seal of ours
    at = rows.column_names.index("version")
    pq.write_table(rows.set_column(at, "version", pa.array(["first"] * rows.num_rows)), path)
    with pytest.raises(UnreadableFileError, match=f"{Path(path).name} of table op cannot be read: .* damaged"):
        another(log).read("orders")
