"""Commit logs with a past, for the tests of reports: a shop's last days, and a hundred thousand transactions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone

import pyarrow as pa

from rmq_spark import ConsumerGroup
from rmq_spark.errors import VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import count_check, decide_one, prepare_one
from tests.support.inside import (
    Archived,
    ArchivedDecision,
    HalfHeader,
    HalfRecord,
    HalfWriter,
    OpKind,
    OpRow,
    RowSet,
    RowState,
    Runtime,
    Who,
    batch_name,
)

NOW_S = datetime(2026, 3, 12, 15, 20, tzinfo=timezone.utc).timestamp()
HOUR_S = 3600.0


class AtAnHour(Runtime):
    """A machine whose clock stands where a test sets it."""

    def __init__(self, at_s: float = NOW_S) -> None:
        self.at_s = at_s

    def time(self) -> float:
        return self.at_s

    def monotonic(self) -> float:
        return self.at_s


class Shop:
    """A commit log, and a clock to write its past with.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed: int = 7) -> None:
        self.runtime = AtAnHour()
        self.log = InMemoryCommitLog(queues=2, runtime=self.runtime)
        self.random = random.Random(seed)
        self.batches = 0

    def prepare(self, topics: Sequence[str], messages: int, group: str = "order-service") -> HalfRecord:
        """Half messages, dealt out to the topics."""
        self.batches += 1
        app = group.split("-")[0]
        header = HalfHeader(batch_name(app, self.batches), app, self.batches, "query", None, None, "batch", group)
        writer = HalfWriter(header, self.log.topics(), None, None, self.log.fifo_topics())
        columns = {
            "body": [f"order {i}" * 12 for i in range(messages)],
            "topic": [topics[i % len(topics)] for i in range(messages)],
        }
        return prepare_one(self.log.engine, header, self.log.engine.stage(writer, pa.table(columns).to_batches()))

    def settle(self, record: HalfRecord, rollback_every: int = 0, who: Who = Who.EXECUTE) -> None:
        """Commit what is pending, but for every so many messages."""
        rows = self.pending(record)
        back = RowSet()
        if rollback_every:
            back = rows & {n: bytes(i % rollback_every == 0 for i in range(len(bits))) for n, bits in rows.items()}
        decide_one(self.log.engine, record, 1, commit=rows - back, rollback=back, who=who)

    def pending(self, record: HalfRecord) -> RowSet:
        return self.log.engine.state_of(record).rows_in((RowState.PENDING,), 1)


def a_shop(days: float = 3.0, trouble: bool = True, every_s: float = 1800.0) -> InMemoryCommitLog:
    """A shop's last days: orders by day and fewer by night, some refused, some settled by a check, groups that lag; and
    with ``trouble`` what a person must look at. Its upkeep ran twice a day."""
    shop = Shop()
    log, chance = shop.log, shop.random
    for topic, queues in (("orders", 4), ("payments", 2), ("logistics", 2)):
        log.create_topic(topic, queues)
    trouble_now = trouble
    start_s = NOW_S - days * 24 * HOUR_S
    at_s, kept_up_s = start_s, start_s
    while at_s < NOW_S - 600:
        shop.runtime.at_s = at_s
        hour = datetime.fromtimestamp(at_s, timezone.utc).hour
        busy = 1.0 if 8 <= hour < 21 else 0.2
        messages = int(chance.uniform(40, 220) * busy) + 3
        record = shop.prepare(("orders", "payments", "logistics"), messages)
        if chance.random() < 0.12:  # the driver died: a check settled it
            shop.runtime.at_s = at_s + 61
            if chance.random() < 0.4:
                count_check(log.engine, record, 1, shop.pending(record), None)
                shop.runtime.at_s = at_s + 150
            shop.settle(record, who=Who.CHECK)
        else:
            shop.runtime.at_s = at_s + chance.uniform(0.2, 4.0)
            shop.settle(record, rollback_every=chance.choice((0, 0, 9, 17)))
        if at_s - kept_up_s > 12 * HOUR_S and at_s < NOW_S - 6 * HOUR_S:
            kept_up_s = at_s
            log.another().maintain(grace="1m")
        if trouble and at_s > NOW_S - 3 * HOUR_S:
            trouble = False
            _trouble(shop, at_s)
        at_s += every_s * chance.uniform(0.6, 1.4)
    if trouble_now:
        shop.runtime.at_s = NOW_S - 4
        shop.prepare(("orders", "payments"), 90)
    shop.runtime.at_s = NOW_S - 300
    ends = log.engine.tails()
    for group, behind, topics in (
        ("warehouse", 0, ("logistics",)),
        ("points", 60, ("orders",)),
        ("billing", 420, ("payments", "orders")),
    ):
        positions = {queue: max(0, end - behind) for queue, end in ends.items() if queue[0] in topics}
        log.engine.groups.set(group, positions, "test")
        assert ConsumerGroup(log, group).lag().num_rows
    log.another().drain()
    shop.runtime.at_s = NOW_S
    return log


def _trouble(shop: Shop, at_s: float) -> None:
    """What a person must look at: a half batch in quarantine, one that nobody can tell about, and two verdicts."""
    log = shop.log
    shop.runtime.at_s = at_s + 5
    given_up = shop.prepare(("payments",), 40, "payment-service")
    old = shop.prepare(("orders",), 25, "payment-service")
    late = shop.prepare(("orders",), 12)
    shop.runtime.at_s = at_s + 70
    log.engine.ledger.quarantine(given_up, 1, shop.pending(given_up), Who.DISCARD, "15 checks, all UNKNOWN")
    for _ in range(4):
        shop.runtime.at_s += 60
        count_check(log.engine, old, 1, shop.pending(old), "the bank does not answer")
    shop.settle(late, who=Who.CHECK)
    committed = log.engine.state_of(late).rows_in((RowState.COMMITTED,), 1)
    with suppress(VerdictConflictError):
        decide_one(log.engine, late, 1, rollback=committed, who=Who.EXECUTE)


def many(transactions: int) -> InMemoryCommitLog:
    """A log in which so many half batches were settled in the last two days and have left."""
    runtime = AtAnHour()
    log = InMemoryCommitLog(topics={"orders": 2}, runtime=runtime)
    step_s = 48 * HOUR_S / transactions
    size = 5_000
    for first in range(0, transactions, size):
        numbers = range(first, min(first + size, transactions))
        log.engine.ledger.append(lambda numbers=numbers: [_left(n, NOW_S - 48 * HOUR_S + n * step_s) for n in numbers])
    return log


def _left(number: int, at_s: float) -> OpRow:
    app, messages = f"send-{number:06}", number % 7 + 1
    decided = datetime.fromtimestamp(at_s + 0.05 + number % 100 / 50, timezone.utc)
    back = messages if number % 25 == 0 else 0
    kept = Archived(
        half_id=batch_name(app, 0),
        app_id=app,
        batch_id=0,
        query_id=None,
        input_hash=None,
        fence_id=None,
        transaction_per="batch",
        producer_group="order-service",
        prepared_ms=int(at_s * 1000),
        last_version=1,
        attempt=1,
        committed=messages - back,
        rolled_back=back,
        decisions=(
            ArchivedDecision(decided, "rollback" if back else "commit", 1, "execute", None, messages),
        ),
    )  # fmt: skip
    return OpRow(
        OpKind.ARCHIVED,
        kept.half_id,
        count=messages,
        attempt=1,
        transaction_per="batch",
        producer_group="order-service",
        prepared_ms=kept.prepared_ms,
        archived=kept,
    )
