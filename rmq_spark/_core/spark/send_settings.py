"""What both sinks are told: which transactions they make, and what becomes of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmq_spark._core.listeners.transaction_listener import TransactionListener, store_id_to_send
from rmq_spark._core.log.half_header import HalfHeader, Naming
from rmq_spark._core.log.half_writer import HalfWriter
from rmq_spark._core.protocol.limits import PendingLimits
from rmq_spark._core.spark.frame import topics_for

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.protocol.send import TwoPhase


@dataclass(frozen=True, kw_only=True)
class SendSettings:
    """Validated settings, which can be pickled."""

    topic: str | None
    producer_group: str
    transaction_per: str
    transaction_key: str | None
    on_listener_error: str
    replay_check_timeout_s: float
    pending_limits: PendingLimits

    def header(
        self,
        naming: Naming,
        app_id: str,
        batch_id: int,
        listener: TransactionListener,
        query_id: str | None = None,
        input_hash: str | None = None,
    ) -> HalfHeader:
        """Return the header of a half batch that the listener shall answer for."""
        return HalfHeader.of(
            naming,
            app_id,
            batch_id,
            query_id=query_id,
            input_hash=input_hash,
            fence_id=store_id_to_send(listener),
            transaction_per=self.transaction_per,
            producer_group=self.producer_group,
        )

    def half_writer(self, engine: Engine, header: HalfHeader, columns: Sequence[str]) -> HalfWriter:
        """Return the writer of a half batch of rows with these columns, for executors."""
        topics = topics_for(engine, columns, self.topic)
        return HalfWriter(header, topics, self.topic, self.transaction_key, engine.topic_store.known().fifo)

    def two_phase(self, engine: Engine, listener: TransactionListener, **more: Any) -> TwoPhase:
        """Return what prepares, executes and decides."""
        from rmq_spark._core.protocol.send import TwoPhase  # executors have no use for it

        return TwoPhase(
            engine,
            listener,
            on_listener_error=self.on_listener_error,
            replay_check_timeout_s=self.replay_check_timeout_s,
            **more,
        )
