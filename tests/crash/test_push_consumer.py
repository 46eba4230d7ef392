"""Three consumers of one group, killed again and again: nothing is lost, and in an inbox nothing is doubled."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark.listener import CommitOncePrepared
from tests.crash.processes import Program, wait_until
from tests.crash.push_flood import FAILS_EVERY, GROUP, KEYS, QUEUES, TOPIC, inbox, make, table
from tests.seeds import first_seed

CONSUMERS = 3
ROWS = 500


@pytest.mark.parametrize("mode", ["orderly", "concurrently"])
@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
def test_killed_members_lose_nothing(mode: str, kills: int, tmp_path: Path) -> None:
    chance = random.Random(first_seed())
    log = make(tmp_path)
    group = txmq.ConsumerGroup(log, GROUP)
    running = [Program("push_flood", tmp_path, mode, str(n)) for n in range(CONSUMERS)]
    sent = 0

    def send() -> None:
        nonlocal sent
        producer.send(table(sent, ROWS), topic=TOPIC)
        sent += ROWS

    def consumed() -> int:
        return sum(n for (topic, _), n in group.positions().items() if topic == TOPIC)

    with txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
        for kill in range(kills):
            wait_until(lambda: len(group.members()) >= CONSUMERS, "all have joined", 120)
            for _ in range(3):
                send()
            enough = sent - chance.randrange(2 * ROWS)
            wait_until(lambda enough=enough: consumed() >= enough, "messages are consumed", 120)  # type: ignore[misc]
            victim = kill % CONSUMERS
            send()
            running[victim].kill()
            running[victim] = Program("push_flood", tmp_path, mode, str(victim))
        send()
    wait_until(lambda: group.lag()["lag"].to_pylist() == [0] * (QUEUES + 1) and not sum(group.lag()["waiting"].to_pylist()),
               f"all is consumed: {group.lag().to_pylist()}", 120)  # fmt: skip
    assert log.pending().num_rows == 0
    for program in running:
        program.signal(signal.SIGTERM)
    for program in running:
        assert "it came to its end" in program.finish()
    assert all(place.owner is None for place in log.groups.places(GROUP).values()), "each has released its queues"
    assert txmq.DeadLetters(log, GROUP).list().num_rows == 0
    expected = {f"{n % KEYS}:{n // KEYS}" for n in range(sent)}
    if mode == "concurrently":
        found = Counter(line for n in range(CONSUMERS) for line in (tmp_path / f"found-{n}").read_text().split())
        assert set(found) == expected
        assert log.read(f"%RETRY%{GROUP}", limit=1).num_rows, f"none of {FAILS_EVERY} failed: the test tried too little"
        return
    with sa.create_engine(f"sqlite:///{tmp_path}/results.db").connect() as connection:
        rows = connection.execute(sa.text("select key, number from results order by id")).all()
    assert len(rows) == sent
    numbers: Counter[str] = Counter()
    for key, number in rows:
        assert number == numbers[key], f"of key {key} number {number} came, and {numbers[key]} is expected"
        numbers[key] += 1
    assert sum(inbox(tmp_path).positions().values()) == sent
