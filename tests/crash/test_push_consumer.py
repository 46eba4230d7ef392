"""Three consumers of one group, killed or paused again and again: nothing is lost, and in an inbox nothing is doubled.

One that is paused until others have its queues goes on within its listener call: the inbox knows what it writes then.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from tests.crash.processes import Program, wait_until
from tests.crash.push_flood import FAILS_EVERY, GROUP, KEYS, QUEUES, TOPIC, inbox, make, table
from tests.support.inside import ORIGIN_MESSAGE_ID, RECONSUME_TIME, CommitOncePrepared
from tests.support.seeds import first_seed

CONSUMERS = 3
ROWS = 500


def is_done(group: txmq.ConsumerGroup) -> bool:
    """Whether all messages are consumed, and no retry waits for its time."""
    # One that becomes visible within a look is neither behind nor waiting there. The next look finds it behind.
    for _ in range(2):
        lag = group.lag().to_pylist()
        if len(lag) < QUEUES + 1 or any(row["lag"] or row["waiting"] or row["pending"] for row in lag):
            return False
    return True


@pytest.mark.parametrize("mode", ["concurrently", pytest.param("orderly", marks=pytest.mark.long)])
@pytest.mark.parametrize("kills", [2, pytest.param(16, marks=pytest.mark.long)])
def test_killed_members_lose_nothing(mode: str, kills: int, tmp_path: Path) -> None:
    chance = random.Random(first_seed())
    log = make(tmp_path)
    group = txmq.ConsumerGroup(log, GROUP)
    running = [Program("push_flood", tmp_path, mode, str(n)) for n in range(CONSUMERS)]
    sent = 0

    def have_joined() -> bool:
        members = group.members()
        return all(any(f"@{pid}." in name for name in members for pid in program.pids()) for program in running)

    def owned_by(pids: list[int]) -> list[str]:
        owners = [position.owner or "" for position in log.engine.groups.positions(GROUP).values()]
        return [owner for owner in owners for pid in pids if f"@{pid}." in owner]

    def send() -> None:
        nonlocal sent
        producer.send(table(sent, ROWS), topic=TOPIC)
        sent += ROWS

    def consumed() -> int:
        return sum(n for (topic, _), n in group.positions().items() if topic == TOPIC)

    with txmq.TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
        for kill in range(kills):
            wait_until(have_joined, "all have joined", 120)
            for _ in range(3):
                send()
            enough = sent - chance.randrange(2 * ROWS)
            wait_until(lambda enough=enough: consumed() >= enough, "messages are consumed", 120)  # type: ignore[misc]
            victim = kill % CONSUMERS
            send()
            if kill % 4 == 1:
                pids = running[victim].pids()
                running[victim].signal(signal.SIGSTOP)
                wait_until(lambda pids=pids: not owned_by(pids), "others have its queues", 120)  # type: ignore[misc]
                running[victim].signal(signal.SIGCONT)
            else:
                running[victim].kill()
                running[victim] = Program("push_flood", tmp_path, mode, str(victim))
        send()
    wait_until(have_joined, "all have joined", 120)
    wait_until(lambda: is_done(group), "all is consumed", 120)
    assert log.pending().num_rows == 0
    for program in running:
        program.signal(signal.SIGTERM)
    for program in running:
        assert "it came to its end" in program.finish()
    assert all(position.owner is None for position in log.engine.groups.positions(GROUP).values()), (
        "each has released its queues"
    )
    assert txmq.DeadLetters(log, GROUP).list().num_rows == 0
    expected = {f"{n % KEYS}:{n // KEYS}" for n in range(sent)}
    if mode == "concurrently":
        found = Counter(line for n in range(CONSUMERS) for line in (tmp_path / f"found-{n}").read_text().split())
        assert set(found) == expected
        again = [dict(found) for found in log.read(f"%RETRY%{GROUP}", columns=["properties"])["properties"].to_pylist()]
        assert again, f"none of {FAILS_EVERY} failed: the test tried too little"
        names = Counter((found[ORIGIN_MESSAGE_ID], found[RECONSUME_TIME]) for found in again)
        assert set(names.values()) == {1}, "a retry came twice"
        return
    with sa.create_engine(f"sqlite:///{tmp_path}/results.db").connect() as connection:
        rows = connection.execute(sa.text("select key, number from results order by id")).all()
    assert len(rows) == sent
    numbers: Counter[str] = Counter()
    for key, number in rows:
        assert number == numbers[key], f"of key {key} number {number} came, and {numbers[key]} is expected"
        numbers[key] += 1
    assert sum(inbox(tmp_path).positions().values()) == sent
