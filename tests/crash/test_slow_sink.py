"""A sink whose local transaction takes longer than everything a checker waits for, beside that checker."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CheckService, SqlTransactionListener
from rmq_spark.checks import CheckReport
from tests.support.inside import LEASE_S_MAX, LEASED, HalfHeader, HalfWriter, TwoPhase, batch_name
from tests.support.limits import limited

pytestmark = pytest.mark.long

# The package's own defaults, in seconds; a local transaction of 90 s, and a checker every 5 s.
SLOW_S, INTERVAL_S, TIMEOUT_S, ROLLBACK_AFTER_S, LEASE_S = 90.0, 5.0, 6.0, 60.0, 60.0


@pytest.mark.parametrize(
    "scale",
    [pytest.param(1 / 30, id="30 times faster"), pytest.param(1.0, id="in real time")],
)
@pytest.mark.parametrize("leased", [True, False], ids=["with its lease", "with a lease that is never written"])
def test_a_slow_but_living_sink_beside_a_checker_has_one_outcome(tmp_path: Path, scale: float, leased: bool) -> None:
    log = txmq.CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=2)
    url = f"sqlite:///{tmp_path / 'orders.db'}"
    runs: list[int] = []

    def work(connection: sa.Connection, batch: txmq.HalfBatch) -> None:
        runs.append(batch.attempt)
        started = time.monotonic()
        rows = [{"id": b.decode()} for b in batch.messages(["body"])["body"].to_pylist()]
        connection.execute(sa.text("INSERT INTO orders VALUES (:id)"), rows)
        while time.monotonic() - started < SLOW_S * scale or len(reports) < 10:
            time.sleep(0.01)

    def make_listener() -> SqlTransactionListener:
        return SqlTransactionListener(
            url, work, rollback_after=ROLLBACK_AFTER_S * scale, lock_timeout=INTERVAL_S * scale
        )

    listener = make_listener()
    listener.create_fence()
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (id TEXT)"))

    reports: list[CheckReport] = []
    checker = CheckService(
        tmp_path / "log",
        {"shop": make_listener()},
        transaction_timeout=TIMEOUT_S * scale,
        transaction_check_interval=INTERVAL_S * scale,
        transaction_check_max=250,
    )
    stop = threading.Event()
    thread = threading.Thread(target=checker.run, args=(stop, reports.append))
    thread.start()
    try:
        head = HalfHeader(batch_name("app", 0), "app", 0, "query", None, listener.store_id, "batch", "shop")
        files = log.engine.stage(
            HalfWriter(head, log.topics(), "orders", None), pa.table({"body": list("abcdef")}).to_batches()
        )
        lease_s = LEASE_S * scale if leased else LEASE_S_MAX  # renewed at a third of it, which never comes
        with limited(LEASE_S=lease_s):
            outcome = TwoPhase(log.engine, listener).send(head, lambda: files)
        seen = len(reports)
        deadline = time.monotonic() + 60
        while len(reports) < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()

    assert runs == [1]
    assert outcome.attempt == 1
    with sa.create_engine(url).connect() as connection:
        assert sorted(connection.execute(sa.text("SELECT id FROM orders")).scalars()) == list("abcdef")
    assert sorted(log.read("orders")["body"].to_pylist()) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert all(r.rolled_back.messages == 0 and not r.problems for r in reports)
    assert reports[-1].pending == 0
    assert any(r.skipped[LEASED] for r in reports) == leased
    assert any(r.unknown.messages for r in reports)
