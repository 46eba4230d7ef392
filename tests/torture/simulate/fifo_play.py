"""Half batches of some keys on a FIFO topic, which some processes send and decide in any order, with marks between."""

from __future__ import annotations

import random

import pyarrow as pa

from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import decide_one, prepare_one
from tests.support.inside import HalfHeader, HalfWriter, RowState, Who, batch_name
from tests.torture.judge.anomalies import Anomaly, Rules, find_anomalies
from tests.torture.judge.history import FINAL, History, Kind, Phase, payload_hash
from tests.torture.judge.observation import READ_COLUMNS, note_messages, note_tables

TOPIC = "fifo"


def play_fifo(seed: int) -> list[Anomaly]:
    """What a reader sees at the end is in the order in which it was sent, whoever was decided first."""
    chance = random.Random(seed)
    log, history = InMemoryCommitLog(), History()
    log.create_topic(TOPIC, 1, fifo=True)
    sequence: dict[str, int] = {}
    open_ones: list[str] = []
    processes = [log, log.another(), log.another()]
    left, sent = chance.choice((2, 3, 4, 6)), 0
    while left or open_ones:
        process = chance.choice(processes)
        if left and (not open_ones or chance.random() < 0.5):
            keys = [chance.choice("xyz") for _ in range(chance.choice((1, 2, 3)))]
            header = HalfHeader(batch_name("app", sent), "app", sent, None, None, None, "batch", "group")
            bodies = [f"{header.half_id}.{row}" for row in range(len(keys))]
            for key, body in zip(keys, bodies, strict=True):
                sequence[key] = sequence.get(key, -1) + 1
                history.note(Kind.SEND, Phase.BEGIN, "producer", half_id=header.half_id, key=key, topic=TOPIC,
                             payload=payload_hash(body.encode()), sequence=sequence[key])  # fmt: skip
            writer = HalfWriter(header, process.topics(), TOPIC, None, process.fifo_topics())
            table = pa.table({"body": bodies, "sharding_key": keys})
            prepare_one(process.engine, header, process.engine.stage(writer, table.to_batches()))
            open_ones.append(header.half_id)
            left, sent = left - 1, sent + 1
        else:
            record = process.engine.get(open_ones.pop(chance.randrange(len(open_ones))))
            rows = process.engine.state_of(record).rows_in((RowState.PENDING,))
            verdict = chance.choice(("commit", "commit", "rollback"))
            commit, rollback = (rows, {}) if verdict == "commit" else ({}, rows)
            decide_one(process.engine, record, 1, commit=commit, rollback=rollback, who=Who.CHECK)
        if chance.random() < 0.2:
            processes[0].another().engine.ledger.mark()
        if chance.random() < 0.2:
            processes[chance.randrange(3)] = log.another()
    for table in (log.engine.half.table, log.engine.op_table):
        table.refresh()
    half, op = (
        table.read(table.actions()["path"].to_pylist()) for table in (log.engine.half.table, log.engine.ledger.table)
    )
    note_tables(history, half, op)
    history.note(Kind.END)
    note_messages(history, Kind.READ, "final", FINAL, log.read(TOPIC, columns=READ_COLUMNS))
    return find_anomalies(history, Rules(fifo=frozenset({TOPIC})))
