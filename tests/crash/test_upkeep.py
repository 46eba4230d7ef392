"""Upkeep that is killed with SIGKILL at a point: nothing is lost or shown twice, and the next round ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_spark import CommitLog
from tests.crash import upkeep
from tests.support.half_batches import commit, decide_one, pending, prepare, roll_back, send, split
from tests.support.inside import Who
from tests.torture.kill.points import Fate

POINTS = (
    "messages file written", "messages commit begins", "messages commit done", "op file written", "op commit begins",
    "op commit done", "mark moved", "leaving begins", "leaving done", "stripping begins", "stripping done",
    "expiring begins", "expiring done", "pruning begins", "pruning done", "merge commit begins", "merge commit done",
)  # fmt: skip
TOPICS = {"orders": 2, "ticks": 1}


def fill(log: CommitLog, round_: int) -> None:
    """Half batches of every kind: committed, rolled back, partly open, and of a topic whose messages expire."""
    at = 10 * round_
    commit(log, send(log, f"sent{round_}", 5))
    roll_back(log, send(log, f"none{round_}", 2))
    commit(log, prepare(log, at, 6))
    record = prepare(log, at + 1, 12, per="message")
    kept, _ = split(pending(log, record), 6)
    decide_one(log.engine, record, 1, commit=kept, who=Who.EXECUTE)
    commit(log, prepare(log, round_, {"body": [f"tick{round_}.{i}" for i in range(4)]}, app="ticker", topic="ticks"))


def everything(path: Path) -> dict[str, list[tuple[int, int, bytes, str]]]:
    """What anybody reads now, by topic; of what has expired nothing."""
    log = CommitLog.open(path)
    columns = ["queue_id", "queue_offset", "body", "msg_id"]
    return {t: [tuple(m.values()) for m in log.read(t, columns=columns).to_pylist()] for t in TOPICS}


def drained(path: Path) -> pa.Table:
    """The table messages, as any reader of Delta sees it."""
    table = CommitLog.open(path).engine.messages_table
    table.refresh()
    return table.read(table.actions()["path"].to_pylist(), ["topic", "queue_id", "queue_offset", "body"])


@pytest.mark.crash
@pytest.mark.turns(len(POINTS))
@pytest.mark.parametrize("point", POINTS)
def test_upkeep_killed_at_a_point_loses_and_doubles_nothing(tmp_path: Path, point: str) -> None:
    path = tmp_path / "log"
    log = CommitLog.create(path)
    for name, queues in TOPICS.items():
        log.create_topic(name, queues)
    fill(log, 0)
    upkeep.keep_up(str(path))
    fill(log, 1)
    whole = everything(path)
    log.engine.topic_store.set_retention("ticks", 0.0)
    open_ids = set(log.engine.open_half_ids())

    environment = {**os.environ, **Fate(point).environment(tmp_path / "reached")}
    killed = subprocess.run([sys.executable, "-m", "tests.crash.upkeep", str(path)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL, point

    def agree() -> None:
        now = everything(path)
        assert now["orders"] == whole["orders"]
        assert now["ticks"] == whole["ticks"][len(whole["ticks"]) - len(now["ticks"]) :]
        rows = drained(path)
        places = list(zip(*(rows[name].to_pylist() for name in ("topic", "queue_id", "queue_offset")), strict=True))
        assert len(set(places)) == len(places)
        bodies = {(t, q, o): body for t, messages in whole.items() for q, o, body, _ in messages}
        assert {place: bodies[place] for place in places} == dict(zip(places, rows["body"].to_pylist(), strict=True))
        assert set(CommitLog.open(path).engine.open_half_ids()) == open_ids

    agree()
    upkeep.keep_up(str(path))
    agree()
    assert everything(path)["ticks"] == []
    for half_id in open_ids:
        commit(CommitLog.open(path), CommitLog.open(path).engine.get(half_id))
    assert len(everything(path)["orders"]) == 2 * (5 + 6 + 12)
    upkeep.keep_up(str(path))
    assert len(everything(path)["orders"]) == 2 * (5 + 6 + 12)
    assert len(CommitLog.open(path).engine.half.contents.all_batches()) == 2  # the last half batch of each stream
