"""Producers without Spark, killed with SIGKILL or paused at every point of the protocol."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from rmq_spark import CheckService, SqlTransactionListener
from tests.crash.flying import STEPS, STREAM
from tests.crash.processes import Program
from tests.crash.sender import send
from tests.crash.shop import (
    GROUP,
    accepted,
    assert_agreement,
    check,
    listener,
    log_of,
    open_shop,
    orders,
    visible,
)
from tests.torture.kill.points import SINK, Fate

PERS = (*(pytest.param(per, marks=pytest.mark.long) for per in ("batch", "message")), "key")
"""What a transaction is: one kind in `make test`, all of them in `make test-all`."""
APP_ID = f"send.{GROUP}.one"
WITHIN = ("prepared", "executing", "executed", "decided")
"""The points between the commit of a half batch and the end of its protocol."""


@pytest.fixture(params=PERS)
def per(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A stream of the shop that is named as its transactions."""
    open_shop(tmp_path, [request.param])
    return str(request.param)


def paused(root: Path, per: str, point: str, attempt: int = 1) -> Program:
    sender = Program("sender", root, per, fate=Fate(point, stops=True, batch=0, attempt=attempt))
    sender.wait_for(APP_ID)
    return sender


@pytest.mark.turns(6)
@pytest.mark.parametrize("point", SINK)
def test_a_sender_killed_at_a_point_loses_and_doubles_nothing(tmp_path: Path, per: str, point: str) -> None:
    paused(tmp_path, per, point).kill()
    done = point in ("executed", "decided", "sent")
    assert sum(orders(tmp_path, per).values()) == (sum(accepted(per, [0]).values()) if done else 0)
    result = send(tmp_path, per)
    assert result.replayed == (point != "staged")
    assert_agreement(tmp_path, per, accepted(per, [0]))
    check(tmp_path, per)
    assert_agreement(tmp_path, per, accepted(per, [0]))


@pytest.mark.turns(4)
@pytest.mark.parametrize("point", WITHIN)
def test_a_sender_killed_within_a_reopened_attempt_loses_and_doubles_nothing(
    tmp_path: Path, per: str, point: str
) -> None:
    paused(tmp_path, per, "prepared").kill()
    assert check(tmp_path, per).rolled_back.messages == 30
    paused(tmp_path, per, point, attempt=2).kill()
    send(tmp_path, per)
    assert_agreement(tmp_path, per, accepted(per, [0]))


@pytest.mark.turns(4)
@pytest.mark.parametrize("point", WITHIN)
def test_without_a_retry_a_check_alone_makes_orders_and_messages_agree(tmp_path: Path, per: str, point: str) -> None:
    """RocketMQ's own promise: whoever sent is gone for good."""
    paused(tmp_path, per, point).kill()
    check(tmp_path, per)
    happened = point in ("executed", "decided")
    assert_agreement(tmp_path, per, accepted(per, [0] if happened else []))


@pytest.mark.turns(3, among="senders: sleepers")
def test_a_sender_that_wakes_after_its_batch_was_rolled_back_and_replayed_is_stopped_by_the_fence(
    tmp_path: Path, per: str
) -> None:
    sleeper = paused(tmp_path, per, "prepared")
    assert check(tmp_path, per).rolled_back.messages == 30
    send(tmp_path, per)
    assert_agreement(tmp_path, per, accepted(per, [0]))
    sleeper.signal(signal.SIGCONT)
    sleeper.finish()
    assert_agreement(tmp_path, per, accepted(per, [0]))


@pytest.mark.turns(3, among="senders: sleepers")
def test_a_sender_that_wakes_before_anyone_replays_its_rolled_back_batch_sends_it_under_the_next_attempt(
    tmp_path: Path, per: str
) -> None:
    sleeper = paused(tmp_path, per, "prepared")
    check(tmp_path, per)
    sleeper.signal(signal.SIGCONT)
    sleeper.finish()
    assert_agreement(tmp_path, per, accepted(per, [0]))
    log = log_of(tmp_path, per)
    record = log.engine.find(APP_ID, 0)
    assert record is not None
    assert log.engine.state_of(record).opened_at.keys() == {2}


@pytest.mark.turns(3, among="senders: sleepers")
def test_a_sender_that_wakes_after_the_check_committed_for_it_changes_nothing(tmp_path: Path, per: str) -> None:
    sleeper = paused(tmp_path, per, "executed")
    check(tmp_path, per)
    assert visible(tmp_path, per) == accepted(per, [0])
    sleeper.signal(signal.SIGCONT)
    sleeper.finish()
    assert_agreement(tmp_path, per, accepted(per, [0]))


@pytest.mark.long
def test_a_checker_at_an_empty_or_another_database_decides_nothing_and_says_why(tmp_path: Path) -> None:
    open_shop(tmp_path, ["key"])
    paused(tmp_path, "key", "executed").kill()

    def check_with(name: str, fence: bool) -> str:
        url = f"sqlite:///{tmp_path / name}"
        wrong = SqlTransactionListener(url, lambda connection, batch: None, rollback_after=0.0)
        if fence:
            wrong.create_fence()
        service = CheckService(tmp_path / "key" / "log", {GROUP: wrong}, transaction_timeout=0.0)
        report = service.run_once()
        assert (report.committed.messages, report.rolled_back.messages, report.pending) == (0, 0, 1)
        with sa.create_engine(url).connect() as connection:
            tables = sa.inspect(connection).get_table_names()
            rows = connection.exec_driver_sql("SELECT count(*) FROM txmq_fence").scalar_one() if tables else 0
        assert rows == 0, "a tombstone was put into a database that knows nothing"
        return " ".join(problem for _, problem in report.problems)

    assert "has no fence" in check_with("empty.db", fence=False)
    said = check_with("another.db", fence=True)
    assert listener(tmp_path, "key").store_id in said
    assert "another database" in said
    assert check(tmp_path, "key").committed.transactions == 3
    assert_agreement(tmp_path, "key", accepted("key", [0]))


@pytest.mark.turns(len(STEPS))
@pytest.mark.parametrize("step", STEPS)
def test_asynchronous_sends_that_were_under_way_when_their_program_was_killed_agree(tmp_path: Path, step: str) -> None:
    open_shop(tmp_path, [STREAM])
    flying = Program("flying", tmp_path, step, "7")
    assert flying.end() == -signal.SIGKILL
    taken = orders(tmp_path, STREAM)
    check(tmp_path, STREAM)
    assert_agreement(tmp_path, STREAM, taken)
    assert taken <= accepted(STREAM, [0])
