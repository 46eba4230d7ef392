"""Upkeep again and again: it goes on after a failure, and stops when it is told to."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from rmq_spark.check import maintainer as maintainer_module
from rmq_spark.check.maintainer import Maintainer
from rmq_spark.commitlog.leaving import Graces
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.upkeep import MaintenanceReport
from rmq_spark.errors import NotACommitLogError, OptionError
from tests.half_batches import commit, make_log, send


def test_rounds_go_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, send(log, "key"))
    stop = threading.Event()
    reports: list[MaintenanceReport] = []
    another, calls = type(log).another, []

    def fails_once(self: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the store does not answer")
        return another(self)  # type: ignore[arg-type]

    def keep(report: MaintenanceReport) -> None:
        reports.append(report)
        if len(reports) == 2:
            stop.set()

    monkeypatch.setattr(type(log), "another", fails_once)
    Maintainer(log, 0.01).run(stop, keep)
    assert len(calls) == 3
    assert log.messages_table.refresh() == 1


def test_orphans_are_looked_for_once_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log("memory", tmp_path, orders=1)
    looks = []
    keep_up = type(log).keep_up

    def noted(self: CommitLog, graces: Graces, orphans: bool) -> MaintenanceReport:
        looks.append(orphans)
        return keep_up(self, graces, orphans=orphans)

    monkeypatch.setattr(type(log), "keep_up", noted)
    upkeep = Maintainer(log)
    upkeep.run_once()
    upkeep.run_once()
    monkeypatch.setattr(maintainer_module, "ORPHANS_EVERY_S", 0.0)
    upkeep.run_once()
    assert looks == [True, False, True]


def test_an_interval_is_a_time(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        Maintainer(make_log("memory", tmp_path, orders=1), 0)


def test_a_log_that_was_made_anew_is_not_kept_up_by_an_old_handle(tmp_path: Path) -> None:
    old = make_log("delta", tmp_path / "log", orders=1)
    shutil.rmtree(tmp_path / "log")
    new = make_log("delta", tmp_path / "log", orders=1)
    commit(new, send(new, "key"))
    for upkeep in (old.drain, old.maintain):
        with pytest.raises(NotACommitLogError, match="made anew"):
            upkeep()
    assert new.messages_table.refresh() == 0
