"""100,000 messages of 1,000 keys through 8 queues into an inbox, with senders, checker and consumer killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from rmq_spark import CommitLog
from tests.crash.fifo_flood import MESSAGES, SENDERS, TOPIC, inbox, make
from tests.crash.processes import Program, wait_until
from tests.support.seeds import first_seed

pytestmark = pytest.mark.long

KILLS = 9
SEED = first_seed()


def test_every_message_counts_once_and_in_the_order_of_its_key(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    make(tmp_path)
    roles = [("send", str(n)) for n in range(SENDERS)] + [("check",), ("consume",)]
    running = {role: Program("fifo_flood", tmp_path, *role) for role in roles}
    log = CommitLog.open(tmp_path / "log")
    for kill in range(KILLS):
        seen = log.engine.half.table.refresh()
        wait_until(lambda seen=seen: log.engine.half.table.refresh() > seen + 4, "senders send", 300)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.3))
        role = roles[kill % len(roles)]
        running[role].kill()
        running[role] = Program("fifo_flood", tmp_path, *role)
    senders = [running[role] for role in roles[:SENDERS]]
    wait_until(lambda: all("all is sent" in s.text() for s in senders), "all is sent", 600)
    wait_until(lambda: log.pending().num_rows == 0, "all is settled", 120)
    wait_until(lambda: sum(inbox(tmp_path).positions().values()) == MESSAGES, "all is consumed", 300)
    with sa.create_engine(f"sqlite:///{tmp_path}/results.db").connect() as connection:
        rows = connection.execute(sa.text("select key, number from results order by id")).all()
    assert len(rows) == MESSAGES
    numbers: dict[str, int] = {}
    for key, number in rows:
        assert number == numbers.get(key, 0), f"of key {key} number {number} came, {numbers.get(key, 0)} is expected"
        numbers[key] = number + 1
    kinds = log.engine.ledger.table.read(log.engine.ledger.table.actions()["path"].to_pylist(), ["kind"])[
        "kind"
    ].to_pylist()
    assert "place" in kinds, "no message had to wait for an earlier one: the test tried nothing"
    assert not log.engine.ledger.view.waiting
    assert log.read(TOPIC, limit=1).num_rows == 1
