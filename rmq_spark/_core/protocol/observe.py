"""Tells observers, if there are any, the outcome of a send."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime import observer

if TYPE_CHECKING:
    from rmq_spark._core.protocol.outcome import Outcome


def tell_not_sent(engine: Engine, producer_group: str, problem: Exception) -> None:
    """Tell observers what a send raised."""
    if observer.observers():
        observer.tell(lambda o: o.not_sent(engine.path, producer_group, problem))


def tell_sent(engine: Engine, producer_group: str, outcome: Outcome, began_s: float) -> None:
    """Tell observers the outcome of a send that began at ``began_s`` by the monotonic clock."""
    record = outcome.record
    if record is None or outcome.replayed or not observer.observers():  # a replay was reported when it was sent
        return
    topics: Counter[str] = Counter()
    for file in record.files.values():
        for segment in file.segments:
            topics[segment.topic] += segment.last - segment.first + 1
    finish_s = None
    if outcome.messages and not outcome.messages.get(RowState.PENDING):
        finish_s = max(0.0, (engine.runtime.now() - record.prepared_at).total_seconds())
    sent = observer.Sent(engine.path, producer_group, topics, engine.runtime.monotonic() - began_s, finish_s)
    observer.tell(lambda o: o.sent(sent))
