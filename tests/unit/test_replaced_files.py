"""How long files that left ``messages`` stay, for readers that stand at an older version of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from rmq_spark import CommitLog
from tests.support.clocks import Clock, let_upkeep_believe, set_clock
from tests.support.half_batches import another, commit, make_log, prepare, send
from tests.support.inside import Expirer, table_files
from tests.support.limits import set_limits

HOUR_S = 3_600.0
DAY_S = 86_400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    set_limits(monkeypatch, MESSAGES_FILES_MAX=2)
    return set_clock(monkeypatch)


def merged_before(
    clock: Clock, folder: Path, seconds: float, retention: str | None = None, **settings: str
) -> CommitLog:
    """A log that was made so long ago, and of which upkeep merged the messages then, in files of 5."""
    clock.ahead_s = -seconds
    log = CommitLog.create(folder / "log", **settings)
    log.create_topic("orders", 1, retention=retention)
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 5))
        log.drain()
    merge(log)
    clock.ahead_s = 0.0
    let_upkeep_believe(clock, log)
    return log


def deleted_messages(log: CommitLog) -> list[str]:
    """What a round of upkeep deletes of messages."""
    return [path for path in log.maintain().files_deleted if path.startswith("messages/")]


def merge(log: CommitLog) -> None:
    """Merge as upkeep does. (delta-rs tells by a clock of its own how old a removal is: a whole round of upkeep would
    delete at once.)"""
    retentions = {name: s for name, s in log.retentions().items() if s is not None}
    assert table_files.compact_messages(another(log).engine.messages_table, retentions) == 3


def rows_at(log: CommitLog, version: int) -> int:
    """What a reader of Delta finds at a version."""
    return DeltaTable(f"{log.path}/messages", version=version).to_pyarrow_table().num_rows


@pytest.mark.turns(2)
@pytest.mark.parametrize("seconds", [3 * HOUR_S, 6 * DAY_S])
def test_a_reader_that_stands_at_an_old_version_goes_on_within_seven_days(
    tmp_path: Path, clock: Clock, seconds: float
) -> None:
    """The files of a merge were deleted after an hour, and a stream that stood for three could never go on."""
    log = merged_before(clock, tmp_path, seconds)
    assert deleted_messages(log) == []
    assert table_files.vacuum([another(log).engine.messages_table], -1.0, dry_run=False) == []
    assert [rows_at(log, version) for version in range(5)] == [0, 5, 10, 15, 15]


def test_after_seven_days_the_replaced_files_are_deleted(tmp_path: Path, clock: Clock) -> None:
    log = merged_before(clock, tmp_path, 7 * DAY_S + 2 * HOUR_S)
    assert len(deleted_messages(log)) == 3
    files = DeltaTable(f"{log.path}/messages").file_uris()
    assert sorted(path.name for path in Path(log.path, "messages").glob("*.parquet")) == [Path(f).name for f in files]
    assert another(log).read("orders").num_rows == 15


def test_a_longer_log_retention_keeps_them_longer(tmp_path: Path, clock: Clock) -> None:
    log = merged_before(clock, tmp_path, 20 * DAY_S, log_retention="30d")
    assert not deleted_messages(log)
    assert [rows_at(log, version) for version in range(1, 4)] == [5, 10, 15]
    said = DeltaTable(f"{log.path}/messages").metadata().configuration
    assert said["delta.deletedFileRetentionDuration"] == f"interval {31 * 86_400} seconds"


def test_the_files_of_a_merge_stay_no_longer_than_their_messages(tmp_path: Path, clock: Clock) -> None:
    """A topic that keeps its messages for two hours would have kept seven days of them on the disk."""
    assert len(deleted_messages(merged_before(clock, tmp_path, 3.5 * HOUR_S, retention="2h"))) == 3


def test_what_expired_is_deleted_after_the_hour(tmp_path: Path, clock: Clock) -> None:
    clock.ahead_s = -2.5 * HOUR_S
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, send(log, "old", 4))
    log.engine.topic_store.set_retention("orders", 0.0)
    log.drain()
    assert len(Expirer(another(log).engine, 0.0).run()) == 1
    clock.ahead_s = 0.0
    let_upkeep_believe(clock, log)
    assert len(deleted_messages(log)) == 1


class Sizes:
    """As much of a table as the choice of files to merge looks at: the sizes of files, the oldest first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def refresh(self) -> None:
        pass

    def actions(self) -> pa.Table:
        numbers, one = range(len(self.sizes)), ["orders"] * len(self.sizes)
        columns = {"path": [str(n) for n in numbers], "size_bytes": self.sizes, "num_records": [1] * len(self.sizes)}
        return pa.table({**columns, "min.topic": one, "max.topic": one, "min.op_version": list(numbers)})


def test_a_message_is_rewritten_a_few_times_only() -> None:
    """Each merge took the file of the one before along: a topic of 28 KB each 30 s wrote each byte 37 times."""
    table, drains, size, written, most = Sizes(), 2_000, 28_000, 0, 0
    for _ in range(drains):
        table.sizes.append(size)
        while chosen := table_files._messages_to_merge(table):  # type: ignore[arg-type]
            at = [int(path) for path in chosen]
            assert at == list(range(at[0], at[-1] + 1))  # so files do not overlap
            merged = sum(table.sizes[at[0] : at[-1] + 1])
            table.sizes[at[0] : at[-1] + 1] = [merged]
            written += merged
        most = max(most, sum(size < table_files.MESSAGES_FILE_BYTES for size in table.sizes))
    assert written <= 8 * drains * size
    assert most <= 12
