"""A Spark driver with four consumers, killed with SIGKILL at each step of theirs and at any moment, over one log."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import sqlalchemy as sa
from deltalake import DeltaTable

import rmq_spark as txmq
from tests.crash.consuming import SUSPENDS, TOPIC, failures, make, number_of
from tests.crash.processes import Program, wait_until
from tests.support.seeds import first_seed
from tests.torture.judge.consumption import (
    Delivery,
    dead_of,
    messages_of,
    of_deliveries,
    of_order,
    of_progress,
    of_results,
    of_retries,
    retries_of,
)
from tests.torture.kill.points import CONSUMER, Fate

pytestmark = pytest.mark.long

MESSAGES_A_ROUND = 60
KEYS = 8
SEED = first_seed()


class Till(txmq.TransactionListener):
    """Commits, and rolls back what has no number."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        wrong = [key.startswith("rolled back") for key in batch.transactions["transaction_key"].to_pylist()]
        return [txmq.ROLLBACK_MESSAGE if w else txmq.COMMIT_MESSAGE for w in wrong]

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return txmq.UNKNOWN


class Sent:
    """What was sent, in order: the body of a message is its key and its number."""

    def __init__(self, log: txmq.CommitLog) -> None:
        self.log = log
        self.bodies: list[str] = []

    def more(self) -> None:
        numbers = range(len(self.bodies), len(self.bodies) + MESSAGES_A_ROUND)
        bodies = [f"key-{number % KEYS}:{number}" for number in numbers]
        keys = [body.partition(":")[0] for body in bodies]
        table = pa.table(
            {"body": [*bodies, "nothing"], "sharding_key": [*keys, "key-0"], "owner": [*keys, "rolled back"]}
        )
        with txmq.TransactionMQProducer(self.log, "till", Till(), check_interval=None) as producer:
            producer.send_messages_in_transaction(table, topic=TOPIC, transaction_key="owner")
        self.bodies += bodies


def deliveries(root: Path, who: str) -> list[Delivery]:
    file = root / f"{who}.jsonl"
    return [Delivery(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def results(root: Path) -> list[str]:
    with sa.create_engine(f"sqlite:///{root}/results.db").connect() as connection:
        return list(connection.execute(sa.text("select body from results order by id")).scalars())


def rows_of_table(root: Path) -> list[str]:
    if not DeltaTable.is_deltatable(str(root / "table")):
        return []
    return [str(body) for body in DeltaTable(root / "table").to_pyarrow_table()["body"].to_pylist()]


def progress_ahead(root: Path, log: txmq.CommitLog) -> list[str]:
    """Of every group: what its progress says is done, and is not."""
    places = {m.body: (m.queue, m.offset) for m in messages_of(log, TOPIC)}
    done = {
        **{who: {(d.queue, d.offset) for d in deliveries(root, who) if d.times == 0} for who in ("points", "books")},
        "inbox": {places[body] for body in results(root)},
        "table": {places[body] for body in rows_of_table(root)},
    }
    found: list[str] = []
    for group, known in done.items():
        positions = txmq.ConsumerGroup(log, group).positions()
        of_topic = {queue_id: offset for (topic, queue_id), offset in positions.items() if topic == TOPIC}
        found += [f"{group}: {sentence}" for sentence in of_progress(of_topic, known)]
    return found


def caught_up(log: txmq.CommitLog) -> bool:
    log.engine.ledger.refresh()
    if log.open_messages():
        return False
    try:
        lags = {group: txmq.ConsumerGroup(log, group).lag() for group in ("points", "books", "inbox", "table")}
    except txmq.GroupNotFoundError:
        return False
    return all((pc.sum(lag["lag"]).as_py() or 0) == 0 for lag in lags.values())


def run_until(root: Path, condition: Callable[[], bool], and_s: float = 0, fate: Fate | None = None) -> None:
    """Let a driver run until then, and kill it. Spark gives up where a worker starts slowly: then there is another."""
    driver = Program("consuming", root, fate=fate)

    def holds() -> bool:
        nonlocal driver
        if condition():
            return True
        if not driver.pids():
            driver = Program("consuming", root, fate=fate)
        return False

    wait_until(holds, "the consumers come so far")
    time.sleep(and_s)
    driver.kill()


def test_a_killed_driver_s_consumers_lose_nothing_and_keep_what_they_promise(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    log = make(tmp_path)
    sent = Sent(log)
    sent.more()
    for point in (*CONSUMER, None, None):
        if point is None:
            before = len(deliveries(tmp_path, "points"))
            run_until(
                tmp_path, lambda before=before: len(deliveries(tmp_path, "points")) > before, chance.uniform(0, 3)
            )  # type: ignore[misc]
        else:
            fate = Fate(point, stops=True, name=point)
            run_until(tmp_path, (tmp_path / "reached" / point).exists, fate=fate)
        assert progress_ahead(tmp_path, log) == []
        sent.more()
    run_until(tmp_path, lambda: caught_up(log))

    messages = messages_of(log, TOPIC)
    assert sorted(m.body for m in messages) == sorted(sent.bodies)
    key_of = lambda body: body.partition(":")[0]  # noqa: E731
    points, books = deliveries(tmp_path, "points"), deliveries(tmp_path, "books")
    anomalies = {
        "progress": progress_ahead(tmp_path, log),
        "in order": of_deliveries(messages, books) + of_order(books),
        "concurrently": of_deliveries(messages, points)
        + of_retries(
            messages,
            points,
            retries_of(log, "points"),
            dead_of(log, "points"),
            lambda m: failures(number_of(m.body)),
            times_max=1,
        ),
        "inbox": of_results(messages, results(tmp_path), key_of),
        "table": of_results(messages, rows_of_table(tmp_path), None),
    }
    assert not any(anomalies.values()), anomalies
    suspended = {f.name for f in (tmp_path / "suspended").iterdir()}
    assert suspended == {str(n) for n in range(len(sent.bodies)) if n % SUSPENDS == 0}
