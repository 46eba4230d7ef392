"""Processes of a real log killed and stopped at named points, and disks that fail under it: nothing is lost or doubled.

The longest forms are ``python -m tests.torture kills``, ``drivers`` and ``disks``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rmq_spark import COMMIT_MESSAGE, HalfBatch, TransactionListener
from rmq_spark.listeners import VerdictArray
from tests.support.inside import Verdicts, normalize_verdicts
from tests.support.seeds import first_seed
from tests.torture.judge.anomalies import AnomalyKind
from tests.torture.judge.history import Phase
from tests.torture.kill import disks, programs
from tests.torture.kill.kills import Matrix, judge, settle
from tests.torture.kill.points import BY_ROLE
from tests.torture.kill.programs import GROUP, Shop, listener


@pytest.mark.crash
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "points"), [(6, 2), pytest.param(45, 8, marks=pytest.mark.long)])
def test_processes_killed_and_stopped_at_named_points_lose_and_double_nothing(
    tmp_path: Path, kills: int, points: int
) -> None:
    report = Matrix(tmp_path / "shop", seed=first_seed()).run(kills)
    assert report.failures == []
    assert sum(report.kills.values()) >= kills
    assert len(report.points) >= points
    assert report.messages > 0


def test_there_are_at_least_48_named_points() -> None:
    assert len({point for points in BY_ROLE.values() for point in points}) >= 48


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    found = Shop(tmp_path / "shop")
    found.open()
    return found


class TurnedRound(TransactionListener):
    """Says the opposite of what the shop's local transactions did."""

    def __init__(self, orders: TransactionListener) -> None:
        self.orders, self.store_id = orders, orders.store_id

    def execute_local_transaction(self, batch: HalfBatch) -> VerdictArray:
        said = normalize_verdicts(self.orders.execute_local_transaction(batch), batch)
        keys = batch.transactions["transaction_key" if batch.transaction_per == "key" else "transaction_id"].to_pylist()
        done = [k for k, verdict in zip(keys, said.each(len(keys)), strict=True) if verdict.state is COMMIT_MESSAGE]
        return batch.verdicts(rollback=done)

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return self.orders.check_local_transaction(batch)


def send_all(
    shop: Shop, batches: range, of: Callable[[TransactionListener], TransactionListener] = lambda orders: orders
) -> None:
    history = shop.history()
    orders = of(listener(shop, history, "sender"))
    with programs.TransactionMQProducer(shop.log, GROUP, orders, check_interval=None) as producer:
        for batch in batches:
            programs.send(shop, producer, history, "sender", batch)


def test_the_judge_finds_nothing_in_a_good_run(shop: Shop) -> None:
    send_all(shop, range(6))
    settle(shop, [])
    messages, failures = judge(shop)
    assert failures == []
    assert messages > 0


def test_the_judge_sees_a_message_whose_local_transaction_did_not_happen(shop: Shop) -> None:
    """A verdict turned round on its way to the log."""
    send_all(shop, range(6), TurnedRound)
    _, failures = judge(shop)
    assert any(f.startswith(AnomalyKind.LOCAL_STATE_DISAGREES.value) for f in failures)


def test_the_judge_sees_a_commit_that_was_reported_and_is_not_there(shop: Shop) -> None:
    send_all(shop, range(3))
    programs.note_send(shop.history(), "sender", 3, Phase.BEGIN)
    programs.note_send(shop.history(), "sender", 3, Phase.OK, str(COMMIT_MESSAGE))
    _, failures = judge(shop)
    assert any(f.startswith(AnomalyKind.LOST_WRITE.value) for f in failures)


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.skipif(disks.compiler() is None, reason="a C compiler makes the failing disk")
def test_full_broken_and_slow_disks_lose_and_double_nothing() -> None:
    report = disks.run_preloaded(seconds=600, seed=first_seed(), cases=8)
    assert report["failures"] == []
    assert report["cases"] == 8
    assert int(str(report["ended with an error"])) > 0
