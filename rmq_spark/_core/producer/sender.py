"""One call of a producer, from its messages to its result: the header, the half file, the steps, and the span."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pyarrow as pa

from rmq_spark._core.listeners.transaction_listener import TransactionListener, has_local_transaction, store_id_to_send
from rmq_spark._core.log.half_header import HalfHeader, Naming
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.producer.admission import KeyLocks
from rmq_spark._core.producer.input import stage, topics_in
from rmq_spark._core.producer.result import TransactionSendResult, result_of
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime.spans import tracing
from rmq_spark._core.vocabulary.message import Message, require_app_id
from rmq_spark._core.vocabulary.verdicts import BATCH
from rmq_spark.errors import MessageError


@dataclass(frozen=True)
class Request:
    """The input of one call of a producer, and the protocol that sends it, which has the listener that executes.
    ``topic`` is for rows of a table without one. ``transaction_key`` is a column of the table, and ``per`` one of
    ``batch``, ``message`` and ``key``."""

    two_phase: TwoPhase
    batch: list[Message] | pa.Table
    arg: Any = None
    topic: str | None = None
    transaction_key: str | None = None
    per: str = BATCH
    idempotency_key: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is no local transaction."""
        return not has_local_transaction(self.two_phase.listener)


class Sender:
    """Sends the requests of one producer, whose own listener ``two_phase`` has."""

    def __init__(self, two_phase: TwoPhase, producer_group: str) -> None:
        self.engine = two_phase.engine
        self.producer_group = producer_group
        self.key_locks = KeyLocks(self.engine.runtime)
        self._listener: TransactionListener = two_phase.listener
        self._started = self.engine.runtime.unique_id()
        self._sends = count(1)  # consecutive ids lie close together in a file, so its bounds find them

    def send(self, request: Request) -> TransactionSendResult:
        if len(request.batch) == 0:
            raise MessageError("no messages were given: a half batch has at least one")
        if (tracer := tracing()) is None:
            return self._send(request)
        fifo = self.engine.topic_store.known().fifo
        with tracer.sending(
            self.engine.path, self.producer_group, request.batch, request.topic, not request.is_plain, fifo
        ) as (traced, span):
            result = self._send(replace(request, batch=traced))
            span.set_attribute("txmq.half_id", result.half_id)
            span.set_attribute("txmq.verdict", str(result.local_transaction_state))
            if len(request.batch) == 1:
                span.set_attribute("messaging.message.id", f"{result.half_id}:0.0")
            if len(result.queue_offsets) == 1:
                span.set_attribute("messaging.destination.partition.id", str(result.queue_id))
            return result

    def _send(self, request: Request) -> TransactionSendResult:
        writer = self.writer(request)
        with self.key_locks.hold(request.idempotency_key):  # a repeated send finds the outcome of the first
            outcome = request.two_phase.send(
                writer.header, lambda: stage(self.engine, writer, request.batch), request.arg
            )
        return result_of(writer.header, outcome, len(request.batch))

    def writer(self, request: Request) -> HalfWriter:
        topics = self.engine.topic_store.with_names(topics_in(request.batch, request.topic))
        writer = HalfWriter(self._header(request), topics.queues, request.topic, request.transaction_key, topics.fifo)
        return self.engine.with_runtime(writer)

    def _header(self, request: Request) -> HalfHeader:
        # No group, key or appId has a dot. So keys of two groups differ, and none is taken for a stream's batch.
        key = request.idempotency_key
        name = f"{self._started}-{next(self._sends):09d}" if key is None else require_app_id(key, "idempotency_key")
        listener = request.two_phase.listener if request.is_plain else self._listener  # not the one that wraps it
        return HalfHeader.of(
            Naming.MADE_UP if key is None else Naming.KEY,
            f"send.{self.producer_group}.{name}",
            0,
            fence_id=store_id_to_send(listener),
            transaction_per=request.per,
            producer_group=self.producer_group,
            runtime=self.engine.runtime,
        )
