"""Half batches that are settled and reopened in any order while marks are made and upkeep moves half files; then a
checker settles all that it finds open, and the history says whether anything was hidden from it."""

from __future__ import annotations

import random

import pyarrow as pa

from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import decide_one, move_half, prepare_one
from tests.support.inside import HalfHeader, HalfRecord, HalfWriter, RowState, Who, batch_name
from tests.torture.judge.anomalies import Anomaly, Rules, find_anomalies
from tests.torture.judge.history import FINAL, History, Kind, Phase, payload_hash
from tests.torture.judge.observation import READ_COLUMNS, note_messages, note_tables

TOPIC = "orders"
STEPS = 24


def play_marks(seed: int) -> list[Anomaly]:
    """Nothing that is open is hidden by a mark."""
    chance = random.Random(seed)
    log, history = InMemoryCommitLog(topics={TOPIC: 1}), History()
    records: list[HalfRecord] = []
    for _ in range(STEPS):
        step = chance.choice(("send", "settle", "settle", "mark", "mark", "move"))
        if step == "send" or not records:
            records.append(_send(log, history, len(records), chance))
        elif step == "settle":
            _settle(log, chance.choice(records).half_id, chance)
        elif step == "mark":
            log.another().engine.ledger.mark()
        else:
            move_half(log)
    checker = log.another()
    for half_id in checker.engine.open_half_ids():
        for attempt in checker.engine.state_of(checker.engine.get(half_id)).attempts(RowState.PENDING):
            _decide(checker, half_id, attempt, {}, whole=True)
    tables = (log.engine.half.table, log.engine.op_table)
    for table in tables:
        table.refresh()
    note_tables(history, *(table.read(table.actions()["path"].to_pylist()) for table in tables))
    history.note(Kind.END)
    note_messages(history, Kind.READ, "final", FINAL, log.read(TOPIC, columns=READ_COLUMNS))
    return find_anomalies(history, Rules())


def _send(log: InMemoryCommitLog, history: History, batch_id: int, chance: random.Random) -> HalfRecord:
    header = HalfHeader(batch_name("app", batch_id), "app", batch_id, None, None, None, "message", "group")
    bodies = [f"{header.half_id}.{row}" for row in range(chance.choice((1, 2, 3)))]
    for body in bodies:
        history.note(Kind.SEND, Phase.BEGIN, "producer", half_id=header.half_id, topic=TOPIC,
                     payload=payload_hash(body.encode()))  # fmt: skip
    writer = HalfWriter(header, log.topics(), TOPIC, None)
    half = chance.randrange(len(bodies) + 1)  # in one file or two
    parts = [part for part in (bodies[:half], bodies[half:]) if part]
    files = [
        f for n, part in enumerate(parts) for f in log.engine.stage(writer, pa.table({"body": part}).to_batches(), n)
    ]
    return prepare_one(log.engine, header, files)


def _settle(log: InMemoryCommitLog, half_id: str, chance: random.Random) -> None:
    """Decide some of a half batch; or reopen what a check rolled back."""
    record = log.another().engine.get(half_id)
    state = log.engine.state_of(record)
    rolled_back = (RowState.ROLLED_BACK_BY_CHECK,)
    for attempt in state.attempts(RowState.PENDING):
        _decide(log, half_id, attempt, {n: chance.random() for n in record.files}, whole=chance.random() < 0.6)
        return
    for attempt in state.attempts(*rolled_back):
        log.engine.ledger.reopen(record, attempt, rolled_back, attempt + 1, Who.EXECUTE, "rolled back by a check")


def _decide(log: InMemoryCommitLog, half_id: str, attempt: int, lot: dict[int, float], whole: bool) -> None:
    record = log.engine.get(half_id)
    mask = log.engine.state_of(record).rows_in((RowState.PENDING,), attempt)
    commit = mask if whole else {n: bits for n, bits in mask.items() if lot[n] < 0.5}
    rollback = {} if whole else {n: bits for n, bits in mask.items() if lot[n] > 0.7}
    if commit or rollback:
        decide_one(log.engine, record, attempt, commit=commit, rollback=rollback, who=Who.CHECK)
