"""A Spark driver with four consumers, killed with SIGKILL at each step of theirs and at any moment, over one log."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from consuming import ALWAYS, POINTS, TOPIC, make, number_of
from deltalake import DeltaTable
from processes import Program, wait_until

import rmq_spark as txmq
from rmq_spark.consumer.retry import ORIGIN_MESSAGE_ID, RECONSUME_TIME, dlq_topic, retry_topic

MESSAGES_A_ROUND = 60
KEYS = 8
SEED = 20261122


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


def lines(root: Path, who: str) -> list[dict[str, Any]]:
    file = root / f"{who}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def caught_up(log: txmq.CommitLog) -> bool:
    log.ledger.refresh()
    if log.open_messages():
        return False
    try:
        lags = {group: txmq.ConsumerGroup(log, group).lag() for group in ("points", "books", "inbox", "table")}
    except txmq.GroupNotFoundError:
        return False
    return all((pc.sum(lag["lag"]).as_py() or 0) == 0 for lag in lags.values())


def run_until(root: Path, condition: Callable[[], bool], and_s: float = 0, **environment: str) -> None:
    """Let a driver run until then, and kill it. Spark gives up where a worker starts slowly: then there is another."""
    driver = Program("consuming.py", root, **environment)

    def holds() -> bool:
        nonlocal driver
        if condition():
            return True
        if not driver.pids():
            driver = Program("consuming.py", root, **environment)
        return False

    wait_until(holds, "the consumers come so far")
    time.sleep(and_s)
    driver.kill()


def test_a_killed_driver_s_consumers_lose_nothing_and_keep_what_they_promise(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    log = make(tmp_path)
    sent = Sent(log)
    sent.more()
    for point in (*POINTS, None, None):
        if point is None:
            before = len(lines(tmp_path, "points"))
            run_until(tmp_path, lambda before=before: len(lines(tmp_path, "points")) > before, chance.uniform(0, 3))  # type: ignore[misc]
        else:
            run_until(tmp_path, (tmp_path / point).exists, DIE_AT=point)
        sent.more()
    run_until(tmp_path, lambda: caught_up(log))

    bodies = set(sent.bodies)
    # Into a database and a Delta table: each once.
    with sa.create_engine(f"sqlite:///{tmp_path}/results.db").connect() as connection:
        results = list(connection.execute(sa.text("select body from results order by id")).scalars())
    assert sorted(results) == sorted(sent.bodies)
    assert_order_of_keys(results)
    assert sorted(DeltaTable(tmp_path / "table").to_pyarrow_table()["body"].to_pylist()) == sorted(sent.bodies)

    # In order: all of it, and nothing before what stands before it.
    notes = lines(tmp_path, "books")
    assert {n["body"] for n in notes} == bodies
    reached: dict[int, int] = defaultdict(int)
    for n in notes:
        assert n["offset"] <= reached[n["queue"]], f"{n} came before what stands before it"
        reached[n["queue"]] = max(reached[n["queue"]], n["offset"] + 1)
    suspended = {f.name for f in (tmp_path / "suspended").iterdir()}
    assert suspended == {str(n) for n in range(len(sent.bodies)) if n % 11 == 0}

    # Concurrently: all of it; what failed came again once, and is dead once when it failed again.
    notes = lines(tmp_path, "points")
    assert {n["body"] for n in notes} == bodies
    again = Counter((n["body"], n["times"]) for n in notes)
    failing = {body for body in bodies if number_of(body.encode()) % 7 == 0 or number_of(body.encode()) % ALWAYS == 0}
    assert {body for body, times in again if times == 1} == failing
    retries = log.read(retry_topic("points"), columns=["properties", "body", "commit_timestamp"]).to_pylist()
    assert sorted(r["body"].decode() for r in retries) == sorted(failing)
    origins = Counter(
        (dict(r["properties"])[ORIGIN_MESSAGE_ID], dict(r["properties"])[RECONSUME_TIME]) for r in retries
    )
    assert set(origins.values()) == {1}
    half = DeltaTable(tmp_path / "log" / "half").to_pyarrow_table(columns=["topic", "body", "deliver_at"]).to_pylist()
    due = {row["body"]: row["deliver_at"] for row in half if row["topic"] == retry_topic("points")}
    assert all(r["commit_timestamp"] >= due[r["body"]] for r in retries), "a retry came before its time"
    dead = [bytes(body).decode() for body in log.read(dlq_topic("points"), columns=["body"])["body"].to_pylist()]
    assert sorted(dead) == sorted(body for body in bodies if number_of(body.encode()) % ALWAYS == 0)


def assert_order_of_keys(results: list[str]) -> None:
    of_key: dict[str, list[int]] = defaultdict(list)
    for body in results:
        key, number = body.split(":")
        of_key[key].append(int(number))
    assert all(numbers == sorted(numbers) for numbers in of_key.values())
