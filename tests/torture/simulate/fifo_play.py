"""Half batches of some keys on a FIFO topic, decided in any order, and judged by their history."""

from __future__ import annotations

import random

import pyarrow as pa

from rmq_spark.commitlog.half import HalfHeader, HalfWriter, half_id_of
from rmq_spark.commitlog.op import RowState, Who
from rmq_spark.testing import InMemoryCommitLog
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
    records = []
    for batch_id in range(chance.choice((2, 3, 4))):
        keys = [chance.choice("xyz") for _ in range(chance.choice((1, 2, 3)))]
        header = HalfHeader(half_id_of("app", batch_id), "app", batch_id, None, None, None, "batch", "group")
        bodies = [f"{header.half_id}.{row}" for row in range(len(keys))]
        for key, body in zip(keys, bodies, strict=True):
            sequence[key] = sequence.get(key, -1) + 1
            history.note(Kind.SEND, Phase.BEGIN, "producer", half_id=header.half_id, key=key, topic=TOPIC,
                         payload=payload_hash(body.encode()), sequence=sequence[key])  # fmt: skip
        writer = HalfWriter(header, log.topics(), TOPIC, None, log.fifo_topics())
        table = pa.table({"body": bodies, "sharding_key": keys})
        records.append(log.prepare(header, log.stage(writer, table.to_batches())))
    for record in chance.sample(records, len(records)):
        rows = log.state_of(record).rows_in((RowState.PENDING,))
        verdict = chance.choice(("commit", "commit", "rollback"))
        commit, rollback = (rows, {}) if verdict == "commit" else ({}, rows)
        log.decide(record, 1, commit=commit, rollback=rollback, who=Who.CHECK)
    half, op = (table.read(table.actions()["path"].to_pylist()) for table in (log.half.table, log.ledger.table))
    note_tables(history, half, op)
    history.note(Kind.END)
    note_messages(history, Kind.READ, "final", FINAL, log.read(TOPIC, columns=READ_COLUMNS))
    return find_anomalies(history, Rules(fifo=frozenset({TOPIC})))
