"""Drains between rounds of upkeep: every so many seconds, and never in a sink's way."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import OptionError
from tests.support.clocks import Pauses
from tests.support.half_batches import another, commit, make_log, prepare
from tests.support.inside import Draining, Maintainer, drained_up_to
from tests.support.limits import Limit
from tests.support.meanwhile import seen_at

ON_DELTA = pytest.mark.log("delta", orders=1)


def drained(log: CommitLog) -> int:
    table = another(log).engine.messages_table
    table.refresh()
    return drained_up_to(table)


def test_it_drains_again_and_again_after_pauses_of_about_so_many_seconds(log: CommitLog) -> None:
    seen: list[int] = []

    def meanwhile() -> None:
        seen.append(drained(log))
        commit(log, prepare(log, len(seen)))

    pauses = Pauses(20, meanwhile)
    Draining(log, every=30).run(pauses)
    assert seen[0] == -1, "the first drain comes after a pause"
    assert seen == sorted(set(seen))
    assert all(22.5 <= pause <= 37.5 for pause in pauses.seconds)
    assert max(pauses.seconds) - min(pauses.seconds) > 5, "programs that began together do not drain together"


def test_what_another_one_drained_is_drained_once(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30)
    assert log.drain() == beside.run_once() == log.refresh() == drained(log)
    assert log.engine.messages_table.refresh() == 1, "a drain that finds nothing commits nothing"


@ON_DELTA
def test_a_drain_waits_for_no_lock_of_the_sink_and_holds_none(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30)
    said: list[int] = []
    with log.engine.lock:  # a sink commits meanwhile
        thread = threading.Thread(target=lambda: said.append(beside.run_once()))
        thread.start()
        thread.join(60)
    assert said == [log.refresh()]


# ---------------------------------------------------------------- again and again
@ON_DELTA
def test_drains_go_on_after_a_failure(log: CommitLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a handle that has seen what is there no more, every drain would fail."""
    beside = Draining(another(log), every=0.01)
    shutil.copytree(log.path, tmp_path / "copy")
    commit(log, prepare(log, 0))
    beside.run_once()
    shutil.rmtree(log.path)
    shutil.move(tmp_path / "copy", log.path)
    restored = CommitLog.open(log.path)
    commit(restored, prepare(restored, 1))
    pauses = Pauses(2)
    beside.run(pauses)
    assert pauses.seconds[1] >= 60, "it lets the store alone for a while"
    assert drained(restored) == restored.refresh()
    assert "a drain of CommitLog" in caplog.text
    assert "an older copy put in its place" in caplog.text


@ON_DELTA
def test_an_old_handle_drains_no_new_log(log: CommitLog, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    beside = Draining(log, every=0.01)
    beside.run_once()
    shutil.rmtree(tmp_path / "log")
    new = make_log("delta", tmp_path / "log", orders=1)
    commit(new, prepare(new, 0))
    beside.run(Pauses(2))
    assert "made anew" in [r.getMessage() for r in caplog.records if r.levelname == "WARNING"][1]
    assert drained(new) == -1


def test_a_round_of_upkeep_and_a_drain_take_turns_with_messages_in_memory(log: CommitLog, limit: Limit) -> None:
    limit(MESSAGES_FILES_MAX=2)
    beside = Draining(log, every=30)
    held: list[bool] = []

    def is_held(**_: object) -> None:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(beside.turn.acquire(blocking=False)))  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        held.append(not free[0])

    commit(log, prepare(log, 0))
    log.drain()
    with seen_at("file written", is_held, table="messages"):
        commit(log, prepare(log, 1))
        assert Maintainer(log, turn=beside.turn).run_once().files_merged == 2
        commit(log, prepare(log, 2))
        beside.run_once()
    assert held == [True, True, True]


@pytest.mark.parametrize("wrong", [0, "30", "soon"])
def test_an_interval_that_cannot_be_used_is_refused(log: CommitLog, wrong: object) -> None:
    for loop in (Draining, Maintainer):
        with pytest.raises(OptionError, match=r"every|interval"):
            loop(log, wrong)  # type: ignore[operator]
