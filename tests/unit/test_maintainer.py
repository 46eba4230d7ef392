"""Upkeep again and again: it goes on after a failure, and stops when it is told to."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark import CommitLog, Message, SqlTransactionListener, TransactionMQProducer
from rmq_spark._core.upkeep.fence_pruner import FencePruner
from rmq_spark._core.vocabulary.options import FENCE_RETENTION_S
from rmq_spark.errors import NotACommitLogError, OptionError
from tests.support.clocks import Pauses, set_clock, wait_until
from tests.support.consumers import Steps, memory_log
from tests.support.fences import fence_rows, make_older, run
from tests.support.half_batches import commit, let_leave, make_log, orphan_of, rows_of, send
from tests.support.inside import CommitOncePrepared, Maintainer, MaintenanceReport

ON_DELTA = pytest.mark.log("delta", orders=1)


@ON_DELTA
def test_rounds_go_on_after_a_failure(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    commit(log, send(log, "key"))
    here, away = Path(log.path), Path(f"{log.path}-away")

    def away_for_a_round() -> None:
        if away.exists():
            away.rename(here)
        elif not pauses.seconds[1:]:
            here.rename(away)

    pauses = Pauses(3, away_for_a_round)
    reports: list[MaintenanceReport] = []
    Maintainer(log, 0.01).run(pauses, reports.append)
    assert [report.messages_drained for report in reports] == [5, 0]
    assert "upkeep of CommitLog" in caplog.text


@ON_DELTA
def test_orphans_are_looked_for_once_an_hour(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    upkeep = Maintainer(log)

    def orphans_found(number: int) -> bool:
        return f"half/{orphan_of(log, number).name}" in upkeep.run_once().files_deleted

    assert orphans_found(1)
    assert not orphans_found(2)
    clock.pauses.append(59 * 60.0)
    assert not orphans_found(3)
    clock.pauses.append(2 * 60.0)
    assert orphans_found(4)


@ON_DELTA
def test_a_producer_that_shall_keep_the_log_up_does(log: CommitLog) -> None:
    with pytest.raises(OptionError, match="maintenance_interval"):
        TransactionMQProducer(log, "shop", maintenance_interval=0)
    with TransactionMQProducer(log, "shop", check_interval=None, maintenance_interval=0.01) as producer:
        for sent in (1, 2):  # it may be opened again
            producer.start()
            producer.send(Message("orders", "x"))
            wait_until(lambda sent=sent: rows_of(log.engine.messages_table).num_rows == sent)
            producer.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name == "txmq-maintainer"]


class Keeping(CommitOncePrepared):
    """A listener whose database has so many pages of rows."""

    def __init__(self, *pages: int | Exception) -> None:
        self.pages, self.asked = pages, list[tuple[float, str]]()

    def pruning_in_turn(self, older_than: float, log: CommitLog, every: float) -> Iterator[int]:
        self.asked.append((older_than, log.id))
        for page in self.pages:
            if isinstance(page, Exception):
                raise page
            yield page


def test_fences_are_pruned_once_a_day_a_piece_at_a_time() -> None:
    runtime = Steps()
    log = memory_log(runtime)
    first, second = Keeping(1, 2), Keeping(4)
    fences = FencePruner(log.engine, [first, CommitOncePrepared(), second])
    assert fences.run(0.0) == 0
    assert fences.run(60.0, iter([False, True]).__next__) == 1
    assert fences.run(60.0) == 2 + 4
    assert fences.run(60.0) == 0
    runtime.sleep(1.1 * 86_400)
    assert fences.run(60.0) == 7
    assert first.asked == second.asked == [(FENCE_RETENTION_S, log.id)] * 2


def test_a_fence_that_cannot_be_pruned_is_a_warning_a_day_and_stops_nothing(
    log: CommitLog, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Keeping(1, OSError("permission denied"), 5), Keeping(3)
    upkeep = Maintainer(log, fences=FencePruner(log.engine, [bad, good]))
    for _ in range(3):
        assert upkeep.run_once().drained_up_to == log.refresh()
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "permission denied" in told
    assert "right to delete" in told
    assert len(bad.asked) == len(good.asked) == 1


@ON_DELTA
def test_rounds_of_upkeep_prune_the_fence_of_what_has_left(log: CommitLog, tmp_path: Path) -> None:
    """Fence rows were never pruned by any job."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    listener = SqlTransactionListener(url, lambda *_: None)
    listener.create_fence()
    with TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        for n in range(3):
            producer.send_message_in_transaction(Message("orders", str(n)))

    def executed() -> int:
        return list(fence_rows(url).values()).count("executed")

    make_older(url, 1000)
    Maintainer(log, fences=FencePruner(log.engine, [listener])).run_once()
    assert executed() == 3  # the grace of those that leave is not over
    let_leave(log)
    run(url, "DELETE FROM txmq_fence WHERE state = 'pruned'")
    again = SqlTransactionListener(url, lambda *_: None)
    with TransactionMQProducer(log, "shop", again, check_interval=None, maintenance_interval=0.01):
        wait_until(lambda: executed() == 0)


def test_a_log_that_was_made_anew_is_not_kept_up_by_an_old_handle(tmp_path: Path) -> None:
    old = make_log("delta", tmp_path / "log", orders=1)
    shutil.rmtree(tmp_path / "log")
    new = make_log("delta", tmp_path / "log", orders=1)
    commit(new, send(new, "key"))
    for upkeep in (old.drain, old.maintain):
        with pytest.raises(NotACommitLogError, match="made anew"):
            upkeep()
    assert new.engine.messages_table.refresh() == 0
