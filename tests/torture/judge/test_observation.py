"""A log of the product, observed from outside: good as it is, and spoiled when its tables are."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from rmq_spark import CommitLog
from tests.support.half_batches import commit, make_log, prepare, roll_back
from tests.support.inside import Change, RowState, Who
from tests.torture.judge.anomalies import AnomalyKind, find_anomalies, kinds_of
from tests.torture.judge.history import FINAL, History, Kind
from tests.torture.judge.observation import READ_COLUMNS, note_listing, note_log, note_messages


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    """One batch committed, one rolled back by a check and committed under the next attempt, one refused."""
    log = make_log("delta", tmp_path / "log", orders=2)
    commit(log, prepare(log, 0, 5, partitions=2))
    checked = prepare(log, 1, 3)
    roll_back(log, checked, who=Who.CHECK)
    log.engine.ledger.reopen(checked, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "rolled back by a check")
    commit(log, checked, attempt=2)
    roll_back(log, prepare(log, 2, 4))
    return log


def observe(log: CommitLog) -> History:
    """All there is to note of a log at rest."""
    history = History()
    history.note(Kind.END)
    note_messages(history, Kind.READ, "final", FINAL, log.read("orders", columns=READ_COLUMNS))
    note_log(history, log.path)
    note_listing(history, log.path)
    return history


def test_a_log_of_the_product_shows_nothing(log: CommitLog) -> None:
    history = observe(log)
    assert find_anomalies(history) == []
    rows = [e for e in history if e.kind is Kind.HALF_ROW]
    assert len({(e.half_id, e.address) for e in rows}) == len(rows) == 12
    assert len({e.time for e in rows}) == 3
    assert all(e.time > 0 for e in rows)
    assert sum(e.queue_offset is not None for e in history if e.kind is Kind.MARKER) == 8
    assert sum(e.kind is Kind.READ for e in history) == 8


def test_a_topic_that_was_made_twice_is_seen(log: CommitLog) -> None:
    table = log.engine.topics_table
    file = table.write(table.read(table.actions()["path"].to_pylist()))
    assert table.compare_and_set(lambda _: Change(add=[file]), lambda _: True) is not None
    assert kinds_of(find_anomalies(observe(log))) == {AnomalyKind.DUPLICATE}


def test_a_reading_that_lacks_a_row_is_seen(log: CommitLog) -> None:
    history = observe(log)
    lost = next(e for e in history if e.kind is Kind.READ)
    spoiled = [e for e in history if e is not lost]
    assert AnomalyKind.LOST_WRITE in kinds_of(find_anomalies(spoiled))


def test_an_op_row_that_came_in_by_another_door_is_seen(log: CommitLog) -> None:
    """The rows of the first commit once more, appended by hand."""
    op = log.engine.op_table
    op.refresh()
    rows = op.read(op.actions()["path"].to_pylist()).sort_by("version").slice(0, 1)
    again = rows.set_column(0, "version", pa.array([op.version + 1], pa.int64()))
    write_deltalake(f"{log.path}/op", again, mode="append")
    history = History()
    note_log(history, log.path)
    assert AnomalyKind.DUPLICATE in kinds_of(find_anomalies(history))


def test_a_log_entry_that_was_overwritten_is_seen(log: CommitLog) -> None:
    history = observe(log)
    entry = Path(log.path, "op", "_delta_log", f"{2:020}.json")
    entry.write_text(entry.read_text() + "\n")
    note_listing(history, log.path)
    assert kinds_of(find_anomalies(history)) == {AnomalyKind.OVERWRITTEN_VERSION}


def test_a_log_entry_that_is_gone_is_seen(log: CommitLog) -> None:
    Path(log.path, "op", "_delta_log", f"{2:020}.json").unlink()
    history = History()
    note_listing(history, log.path)
    assert kinds_of(find_anomalies(history)) == {AnomalyKind.MISSING_VERSION}
