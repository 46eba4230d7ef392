"""A handle whose store fails for a moment, whose table is damaged for a moment, or whose log is gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark import TaskContext
from pyspark.sql.types import StringType, StructField, StructType

from rmq_spark import CommitLog
from rmq_spark._core.protocol.identity import LOG_FILE
from rmq_spark._core.spark.writers import BATCH_ID_PROPERTY, TxmqStreamWriter, cached_log
from rmq_spark.errors import (
    CheckpointMismatchError,
    CorruptLogError,
    NotACommitLogError,
    OptionError,
    StorageError,
    TxmqError,
    UnreachableStoreError,
)
from tests.support.half_batches import bodies, commit, make_log, prepare, roll_back
from tests.support.inside import OP_SCHEMA, SINK_OPTIONS, DeltaEntries, DeltaLogTable, Options, SinkSettings


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "log"
    log = make_log("delta", folder, orders=1)
    commit(log, prepare(log, 0, 2))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "log"))


@contextmanager
def unreadable(folder: Path, *tables: str) -> Iterator[None]:
    """The Delta logs of these tables cannot be listed or read for a moment: no folder is there, but a file."""
    logs = [folder / table / "_delta_log" for table in tables]
    for log in logs:
        log.rename(log.with_name("away"))
        log.write_text("")
    yield
    for log in logs:
        log.unlink()
        log.with_name("away").rename(log)


@contextmanager
def damaged(folder: Path, table: str) -> Iterator[None]:
    """The newest entry of a Delta log is no JSON for a moment."""
    entry = newest_entry(folder, table)
    content = entry.read_bytes()
    entry.write_bytes(content[: len(content) // 2])
    yield
    entry.write_bytes(content)


def newest_entry(folder: Path, table: str) -> Path:
    return max((folder / table / "_delta_log").glob("*.json"))


def make_anew(folder: Path, **topics: int) -> CommitLog:
    shutil.rmtree(folder)
    return make_log("delta", folder, **topics or {"orders": 1})


def test_a_log_that_was_made_anew_and_is_as_long_is_not_taken_for_the_old_one(folder: Path) -> None:
    """delta-rs went on with the new log's entries where the old ones had ended, and gave messages wrong offsets."""
    old = CommitLog.open(folder)
    assert len(bodies(old)) == 2
    new = make_anew(folder)
    for batch in range(3):
        roll_back(new, prepare(new, batch, 1))
    with pytest.raises(NotACommitLogError, match="made anew"):
        commit(old, prepare(old, 1, 1))
    with pytest.raises(NotACommitLogError, match="made anew"):
        old.read("orders")
    assert CommitLog.open(folder).read("orders").num_rows == 0


def options_of(folder: Path) -> dict[str, str]:
    return {"path": str(folder), "topic": "orders", "producerGroup": "group", "transactionListener": "none"}


def test_the_sink_s_process_opens_a_log_again_that_was_made_anew(folder: Path) -> None:
    """It kept the old handle, which said so at every batch."""
    settings = SinkSettings.of(Options(options_of(folder), SINK_OPTIONS))
    with cached_log(settings) as log:
        assert log.topics() == {"orders": 1}
    make_anew(folder, carts=1)
    with pytest.raises(NotACommitLogError), cached_log(settings) as log:
        log.topics()
    with cached_log(settings) as log:
        assert log.topics() == {"carts": 1}


def checkpoint_at(folder: Path, batch_id: int) -> Path:
    """The checkpoint of a query that runs this micro-batch."""
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text('{"id": "a-query"}')
    (folder / "offsets" / str(batch_id)).write_text("v1")
    return folder


def micro_batch(folder: Path, checkpoint: Path) -> tuple[TxmqStreamWriter, list[Any]]:
    """A writer of the checkpoint's newest micro-batch, and what its only task staged."""
    options = Options({**options_of(folder), "checkpointLocation": str(checkpoint)}, SINK_OPTIONS)
    writer = TxmqStreamWriter(options, StructType([StructField("body", StringType())]))
    return writer, [writer.write(iter([pa.record_batch({"body": ["one"]})]))]


def test_a_micro_batch_takes_no_task_and_no_number_of_another_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two queries use the same checkpoint."""
    _, staged_before = micro_batch(folder, checkpoint_at(tmp_path / "checkpoint", 0))
    writer, staged = micro_batch(folder, checkpoint_at(tmp_path / "checkpoint", 1))
    for lost in (staged_before, [None]):
        with pytest.raises(OptionError, match=r"staged files for another half batch .*run the batch again"):
            writer.commit(lost, 1)
    with pytest.raises(CheckpointMismatchError, match=r"Spark commits batch 0, but the newest .* is 1: two queries"):
        writer.commit(staged, 0)
    monkeypatch.setattr(TaskContext, "_taskContext", None)
    TaskContext()._localProperties = {BATCH_ID_PROPERTY: "0"}
    with pytest.raises(CheckpointMismatchError, match=r"Spark runs batch 0, but the newest .* is 1: two queries"):
        writer.write(iter([pa.record_batch({"body": ["one"]})]))
    assert CommitLog.open(folder).read("orders").num_rows == 2


def test_a_replay_does_not_end_well_in_a_log_that_was_made_anew_meanwhile(folder: Path, tmp_path: Path) -> None:
    """Its executors had staged nothing, for the old log had the batch: it counted as an empty one."""
    checkpoint = checkpoint_at(tmp_path / "checkpoint", 0)
    write = partial(micro_batch, folder, checkpoint)
    writer, staged = write()
    writer.commit(staged, 0)
    replay, nothing = write()
    make_anew(folder)
    for _ in range(2):  # by the handle on the old log, and by one that a process opens anew
        with pytest.raises(NotACommitLogError, match="made anew"):
            replay.commit(nothing, 0)
    with cached_log(replay.settings) as log:
        assert log.last_batch_id("a-query") is None
    make_anew(folder)
    with pytest.raises(CheckpointMismatchError, match="earlier batches went into commit log"):
        write()
    (checkpoint / LOG_FILE).unlink()
    writer, staged = write()  # this process knew the log before
    writer.commit(staged, 0)
    assert CommitLog.open(folder).read("orders").num_rows == 1


def test_topics_are_looked_up_in_a_log_that_was_made_anew_before_their_first_use(folder: Path) -> None:
    """The handle had opened the table, and not read it: it looked for a file of the old log."""
    log = CommitLog.open(folder)
    assert log.engine.topic_store.table.version >= 0
    make_anew(folder, orders=3)
    with pytest.raises(NotACommitLogError, match="made anew"):
        log.engine.topic_store.with_names(["orders"])
    assert CommitLog.open(folder).engine.topic_store.with_names(["orders"]).queues == {"orders": 3}


# ---------------------------------------------------------------- a failure is told once
def test_a_store_that_fails_while_half_opens_is_asked_again_at_the_next_use(folder: Path) -> None:
    with unreadable(folder, "half"):
        log = CommitLog.open(folder)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"half cannot be read.*try again"):
                log.engine.find("app", 0)
    record = log.engine.find("app", 0)
    assert record is not None
    assert record.rows == 2


def test_an_entry_that_was_damaged_for_a_moment_does_not_poison_a_handle(folder: Path) -> None:
    log = CommitLog.open(folder)
    assert len(bodies(log)) == 2
    writer = CommitLog.open(folder)
    commit(writer, prepare(writer, 1, 1))
    with damaged(folder, "op"):
        for _ in range(2):
            with pytest.raises(CorruptLogError, match=f"entry {newest_entry(folder, 'op').name}.* is not JSON"):
                log.read("orders")
    with unreadable(folder, "op"):  # what a handle lost it opens anew, and the store fails
        for _ in range(2):
            with pytest.raises(StorageError):
                log.read("orders")
    assert len(bodies(log)) == 3


def test_a_handle_that_lost_its_table_gives_no_old_answers(folder: Path) -> None:
    table = CommitLog.open(folder).engine.op_table
    table.refresh()
    before = table.actions()
    with unreadable(folder, "op"):
        for ask in (table.refresh, table.actions, lambda: table.version, table.removed_since):
            with pytest.raises(UnreachableStoreError) as raised:
                ask()
            assert isinstance(raised.value, OSError)
            assert "\x1b" not in str(raised.value)
    assert table.refresh() == 1
    assert table.actions() == before


# ---------------------------------------------------------------- a log that is gone
def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def remove_delta_log(folder: Path) -> None:
    shutil.rmtree(folder / "op" / "_delta_log")


def empty_delta_log(folder: Path) -> None:
    remove_delta_log(folder)
    (folder / "op" / "_delta_log").mkdir()


@pytest.mark.parametrize("goes", [remove, remove_delta_log, empty_delta_log, make_anew])
def test_a_log_that_vanished_is_no_log_and_never_an_old_answer(folder: Path, goes: Callable[[Path], object]) -> None:
    """delta-rs takes a list without new entries for "nothing is new", also when no entry is left."""
    table = CommitLog.open(folder).engine.op_table
    assert table.refresh() == 1
    goes(folder)
    for ask in (table.refresh, table.refresh, table.actions, lambda: table.version):
        with pytest.raises(NotACommitLogError):
            ask()


def test_a_log_that_was_removed_has_no_topics_any_more(folder: Path) -> None:
    log = CommitLog.open(folder)
    assert log.topics() == {"orders": 1}
    shutil.rmtree(folder)
    for ask in (log.topics, log.pending, lambda: log.read("orders"), lambda: prepare(log, 1)):
        with pytest.raises(NotACommitLogError):
            ask()


def test_a_log_that_was_away_is_read_on_when_it_is_back(folder: Path) -> None:
    log = CommitLog.open(folder)
    assert len(bodies(log)) == 2
    folder.rename(folder.with_name("away"))
    with pytest.raises(NotACommitLogError):
        log.read("orders")
    folder.with_name("away").rename(folder)
    commit(CommitLog.open(folder), prepare(CommitLog.open(folder), 1, 1))
    assert len(bodies(log)) == 3


def test_a_table_that_was_set_back_is_not_read_on_by_who_has_seen_more(folder: Path) -> None:
    writer = CommitLog.open(folder)
    commit(writer, prepare(writer, 1, 1))
    table: DeltaLogTable = CommitLog.open(folder).engine.op_table  # type: ignore[assignment]
    assert table.refresh() == 2
    newest_entry(folder, "op").unlink()
    for _ in range(2):
        with pytest.raises(CorruptLogError, match=r"version 1.*has seen version 2"):
            table.refresh()
    assert CommitLog.open(folder).engine.op_table.refresh() == 1


# ---------------------------------------------------------------- threads
def test_threads_that_share_a_handle_all_hear_of_a_failed_opening_and_all_come_back(folder: Path) -> None:
    def ask(table: DeltaLogTable) -> int | None:
        try:
            return table.version
        except StorageError:
            return None

    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            with unreadable(folder, "op"):
                table = DeltaLogTable(str(folder / "op"), "op", OP_SCHEMA, None)
                assert set(threads.map(ask, [table] * 40)) == {None}
            assert set(threads.map(ask, [table] * 40)) == {1}


# ---------------------------------------------------------------- seeded bugs
# The simulation's tables are never opened: it cannot see these.
@pytest.mark.parametrize(
    ("story", "of", "method"),
    [
        (test_a_store_that_fails_while_half_opens_is_asked_again_at_the_next_use, DeltaLogTable, "_lose"),
        (test_an_entry_that_was_damaged_for_a_moment_does_not_poison_a_handle, DeltaLogTable, "_lose"),
        (test_a_log_that_was_removed_has_no_topics_any_more, DeltaEntries, "goes_on"),
        (test_a_table_that_was_set_back_is_not_read_on_by_who_has_seen_more, DeltaLogTable, "_require_same"),
    ],
    ids=["the failure is kept", "the damage is kept", "an empty folder has no news", "any table is the same"],
)
def test_a_seeded_bug_is_noticed(
    story: Callable[[Path], None], of: type, method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, method, lambda *_: True)
    with pytest.raises((AssertionError, TxmqError, pytest.fail.Exception)):
        story(folder)


def test_an_entry_that_upkeep_removes_while_a_paused_process_opens_the_table_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that slept between listing a Delta log and reading it said once that the log was corrupt."""
    listed: list[str] = []
    fails, read = 2, DeltaTable.__init__

    def paused(table: DeltaTable, uri: str, **more: Any) -> None:
        listed.append(uri)
        if len(listed) <= fails:
            raise DeltaError("Object at location op/_delta_log/00000000000000000001.json not found: No such file")
        read(table, uri, **more)

    log = CommitLog.open(folder)
    before = bodies(log)
    log.engine.op_table._lose()
    monkeypatch.setattr(DeltaTable, "__init__", paused)
    assert bodies(log) == before
    assert listed == [listed[0]] * 3
    listed.clear()
    fails = 100
    log.engine.op_table._lose()
    with pytest.raises(CorruptLogError, match="cannot be read any more"):
        bodies(log)
