"""Drains between rounds of upkeep: every so many seconds, and never in a sink's way."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import OptionError
from tests.support.clocks import Pauses
from tests.support.half_batches import another, commit, make_log, prepare
from tests.support.inside import Drainer, Draining, Maintainer, drained_up_to, maintenance

ON_DELTA = pytest.mark.log("delta", orders=1)


def drained(log: CommitLog) -> int:
    table = another(log).messages_table
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
    assert log.messages_table.refresh() == 1, "a drain that finds nothing commits nothing"


@ON_DELTA
def test_a_drain_waits_for_no_lock_of_the_sink_and_holds_none(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30)
    said: list[int] = []
    with log.lock:  # a sink commits meanwhile
        thread = threading.Thread(target=lambda: said.append(beside.run_once()))
        thread.start()
        thread.join(60)
    assert said == [log.refresh()]


# ---------------------------------------------------------------- again and again
@ON_DELTA
def test_drains_go_on_after_a_failure(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(log, prepare(log, 0))
    tries: list[CommitLog] = []
    run = Drainer.run

    def fails_once(self: Drainer) -> int:
        tries.append(self._log)  # type: ignore[arg-type]
        if len(tries) == 1:
            raise OSError("the store does not answer")
        return run(self)

    monkeypatch.setattr(Drainer, "run", fails_once)
    pauses = Pauses(2)
    Draining(log, every=0.01).run(pauses)
    assert pauses.seconds[1] >= 60, "it lets the store alone for a while"
    assert drained(log) == log.refresh()
    assert tries[0] is not tries[1], "the second try opens the log again"
    assert "a drain of CommitLog" in caplog.text
    assert "the store does not answer" in caplog.text


@ON_DELTA
def test_an_old_handle_drains_no_log_that_was_made_anew(
    log: CommitLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = Draining(log, every=0.01)
    beside.run_once()
    shutil.rmtree(tmp_path / "log")
    new = make_log("delta", tmp_path / "log", orders=1)
    commit(new, prepare(new, 0))
    beside.run(Pauses(2))
    assert "made anew" in [r.getMessage() for r in caplog.records if r.levelname == "WARNING"][1]
    assert drained(new) == -1


def test_a_round_of_upkeep_and_a_drain_take_turns_with_messages_in_memory(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(log, prepare(log, 0))
    beside = Draining(log, every=30)
    held: list[bool] = []

    def is_held() -> bool:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(beside.turn.acquire(blocking=False)))  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        return not free[0]

    def noting(work: Callable[..., int]) -> Callable[..., int]:
        def noted(*arguments: object) -> int:
            held.append(is_held())
            return work(*arguments)

        return noted

    monkeypatch.setattr(Drainer, "run", noting(Drainer.run))
    monkeypatch.setattr(maintenance, "compact_messages", noting(maintenance.compact_messages))
    Maintainer(log, turn=beside.turn).run_once()
    beside.run_once()
    assert held == [True, True, True]


@pytest.mark.parametrize("wrong", [0, "30s"])
def test_an_interval_that_cannot_be_used_is_refused(log: CommitLog, wrong: object) -> None:
    with pytest.raises(OptionError, match="every"):
        Draining(log, every=wrong)  # type: ignore[arg-type]
