"""Bugs that the simulation found, each as the shortest story that shows it."""

from __future__ import annotations

import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import AlreadyPreparedError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import (
    another,
    bodies,
    commit,
    let_leave,
    send,
)
from tests.support.inside import Runtime


@pytest.fixture
def behind() -> CommitLog:
    """A handle that read op before a half batch was sent, committed and let go."""
    log = InMemoryCommitLog(topics={"orders": 1})
    found = another(log)
    found.refresh()
    commit(log, send(log, "key"))
    assert let_leave(log).files_left == 1
    return found


def test_what_has_left_since_op_was_read_is_not_sent_again(behind: CommitLog) -> None:
    """half is read as it is, without the half batch that has left. op says so, and was read before."""
    with pytest.raises(AlreadyPreparedError):
        send(behind, "key")
    assert len(bodies(behind)) == 5


def test_nothing_is_prepared_below_a_mark_that_was_made_since_op_was_read(
    behind: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """half is empty again, and the clock is behind: op alone says how far the mark is. Below it nobody looks for
    an open half batch."""
    monkeypatch.setattr(Runtime, "time", lambda _: 1_000_000_000.0)
    send(behind, "another")
    assert another(behind).engine.open_half_ids() == ["another:0"]
