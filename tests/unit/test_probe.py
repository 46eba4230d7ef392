"""A round of checks looks whether listeners could answer, also when nothing is pending."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rmq_spark import CheckService, CommitLog, SqlTransactionListener, TableListener, TransactionListener
from rmq_spark._core.checks import probe
from tests.support.checks import DEADLINE_S, Hangs
from tests.support.clocks import Starts
from tests.support.consumers import memory_log
from tests.support.limits import Limit
from tests.support.listeners import Scripted

SECRET = "s3cr3t-passw0rd"


class Asked(Scripted):
    """A listener that can be asked whether it can answer."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.look = look
        self.threads: list[threading.Thread] = []

    def require_reachable(self) -> None:
        self.threads.append(threading.current_thread())
        self.look()


@pytest.fixture
def port() -> Iterator[int]:
    """One that nobody listens at, and that nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def problems(log: CommitLog, **listeners: TransactionListener) -> list[str]:
    report = CheckService(log, listeners).run_once()
    assert report.pending == 0
    assert all(half_id is None for half_id, _ in report.problems)
    return [sentence for _, sentence in report.problems]


@pytest.mark.parametrize("make", [SqlTransactionListener, lambda database: TableListener(database, "orders")])
def test_a_database_that_is_gone_is_a_problem_until_it_is_back(
    log: CommitLog, tmp_path: Path, make: Callable[[Any], SqlTransactionListener]
) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    url = f"sqlite:///{folder}/orders.db"
    listener = make(sa.create_engine(url, poolclass=sa.NullPool))
    listener.create_fence()
    service = CheckService(log, {"shop": listener, "mail": Scripted()})
    assert service.run_once().ok
    folder.rename(tmp_path / "away")
    ((half_id, sentence),) = service.run_once().problems
    assert half_id is None
    assert sentence.startswith(f"no check of producer group 'shop' can be answered: {listener!r} raised Operational")
    assert url in sentence
    (tmp_path / "away").rename(folder)
    assert service.run_once().ok


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
def test_a_server_that_is_down_is_named_without_its_password(log: CommitLog, port: int, driver: str) -> None:
    pytest.importorskip(driver.partition("+")[2])
    there = f"127.0.0.1:{port}/shop"
    (sentence,) = problems(log, shop=SqlTransactionListener(f"{driver}://till:{SECRET}@{there}"))
    assert f"SqlTransactionListener('{driver}://***@{there}') raised OperationalError" in sentence
    assert SECRET not in sentence


def test_a_database_without_a_fence_is_a_problem(log: CommitLog, tmp_path: Path) -> None:
    (sentence,) = problems(log, shop=SqlTransactionListener(f"sqlite:///{tmp_path}/orders.db"))
    assert "call create_fence() once" in sentence


def test_a_lock_that_somebody_holds_is_an_answer(log: CommitLog, tmp_path: Path) -> None:
    listener = SqlTransactionListener(f"sqlite:///{tmp_path}/orders.db", lock_timeout=0.01)
    listener.create_fence()
    holder = sqlite3.connect(tmp_path / "orders.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert problems(log, shop=listener) == []
    holder.close()


def test_a_listener_without_the_question_is_left_alone() -> None:
    runtime = Starts()
    log = memory_log(runtime)
    assert problems(log, mail=Scripted()) == []
    assert "txmq-probe" not in runtime.names
    assert problems(log, mail=Scripted(), shop=Asked()) == []
    assert runtime.names.count("txmq-probe") == 1


def test_a_producer_s_own_checks_do_not_look(log: CommitLog) -> None:
    asked = Asked()
    CheckService(log, {"shop": asked}, only_groups=True).run_once()
    assert asked.threads == []


def test_a_database_that_hangs_is_reported_and_holds_up_no_other(log: CommitLog, limit: Limit) -> None:
    limit(ANSWER_S_MAX=0.2, ALONE_S_MAX=0.1)
    answer = Hangs()
    hung, other = Asked(answer), Asked()
    service = CheckService(log, {"hung": hung, "other": other})
    for _ in range(2):
        ((_, sentence),) = service.run_once().problems
        assert "producer group 'hung'" in sentence
        assert "has not answered for" in sentence
    assert (len(hung.threads), len(other.threads)) == (1, 2)
    answer.may_come.set()
    hung.threads[0].join(DEADLINE_S)
    assert service.run_once().ok
    assert service.run_once().ok
    assert len(hung.threads) == 2


def test_stopping_does_not_wait_for_a_database_that_hangs(log: CommitLog) -> None:
    stop, answer = threading.Event(), Hangs()
    reports: list[Any] = []
    service = CheckService(log, {"shop": Asked(answer)})
    thread = threading.Thread(target=service.run, args=(stop, reports.append))
    thread.start()
    assert answer.asked.wait(DEADLINE_S)
    stopped_s = time.monotonic()
    stop.set()
    thread.join(DEADLINE_S)
    assert time.monotonic() - stopped_s < probe.ANSWER_S_MAX / 2
    assert [report.ok for report in reports] == [True]
    answer.may_come.set()


def test_without_a_time_limit_the_question_is_asked_in_the_callers_thread(log: CommitLog) -> None:
    asked = Asked()
    CheckService(log, {"shop": asked}, round_timeout=None).run_once()
    assert asked.threads == [threading.current_thread()]
