"""RocketMQ's example of ordered messages: create, pay, finish of each order; senders and a checker are killed."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path

import pytest
import sqlalchemy as sa

from rmq_spark import CommitLog
from tests.crash.fifo_sender import STEPS, TOPIC, make
from tests.crash.processes import Program, wait_until
from tests.support.seeds import first_seed

pytestmark = pytest.mark.long

SENDERS, ORDERS, KILLS = 2, 24, 12
SEED = first_seed()


def test_the_steps_of_every_order_stand_in_order_whoever_was_killed(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    make(tmp_path)

    def start(number: int) -> Program:
        return Program("fifo_sender", tmp_path, str(number), str(SENDERS), str(ORDERS))

    senders = [start(n) for n in range(SENDERS)]
    checker = Program("fifo_sender", tmp_path, "check")
    log = CommitLog.open(tmp_path / "log")
    for _ in range(KILLS):
        seen = log.engine.half.table.refresh()
        # Some messages further, and anywhere within a send.
        wait_until(lambda seen=seen: log.engine.half.table.refresh() > seen, "a sender sends", 120)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.15))
        at = chance.randrange(SENDERS + 1)
        if at == SENDERS:
            checker.kill()
            checker = Program("fifo_sender", tmp_path, "check")
        else:
            senders[at].kill()
            senders[at] = start(at)
    wait_until(lambda: all("all is sent" in s.output.read_text() for s in senders), "all is sent", 300)
    wait_until(lambda: log.pending().num_rows == 0, "all is settled", 60)
    held = log.engine.ledger.table.read(log.engine.ledger.table.actions()["path"].to_pylist(), ["kind"])[
        "kind"
    ].to_pylist()
    assert "place" in held, "no message had to wait for an earlier one: the test tried nothing"
    rows = log.read(TOPIC, columns=["queue_id", "sharding_key", "body"]).to_pylist()
    steps, queues = defaultdict(list), defaultdict(set)
    for row in rows:
        steps[row["sharding_key"]].append(row["body"].decode().split("-")[1])
        queues[row["sharding_key"]].add(row["queue_id"])
    assert dict(steps) == {f"order-{n}": list(STEPS) for n in range(ORDERS)}
    assert all(len(q) == 1 for q in queues.values())
    assert len(set().union(*queues.values())) > 1
    with sa.create_engine(f"sqlite:///{tmp_path}/shop.db").connect() as connection:
        done = connection.execute(sa.text("select step from steps")).scalars().all()
    assert sorted(done) == sorted(row["body"].decode() for row in rows)
    assert not log.engine.ledger.view.waiting
