"""The producer without Spark: RocketMQ's TransactionMQProducer on a commit log."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from rmq_spark.commitlog.half import HalfHeader, HalfWriter, half_id_of
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.commitlog.op import RowState
from rmq_spark.config import MAINTENANCE_INTERVAL_S, TRANSACTION_CHECK_INTERVAL_S, TRANSACTION_TIMEOUT_S, seconds
from rmq_spark.errors import ListenerError, MessageError, OptionError
from rmq_spark.listener import TransactionListener, require_listener
from rmq_spark.message import Message, require_app_id, require_group_name, to_table
from rmq_spark.sink.limits import PendingLimits
from rmq_spark.sink.two_phase import Outcome, TwoPhase
from rmq_spark.transaction import BATCH, KEY, MESSAGE, LocalTransactionState, batch_transaction_id

logger = logging.getLogger(__name__)


class SendStatus(str, Enum):
    """RocketMQ's ``SendStatus``: a send that does not raise is in the log."""

    SEND_OK = "SEND_OK"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TransactionSendResult:
    """What became of a send (RocketMQ: ``TransactionSendResult``).

    Attributes
    ----------
    send_status : SendStatus
    half_id : str
    transaction_id : str
        Of the half batch's only transaction; with ``transaction_key`` the part that all of them begin with.
    local_transaction_state : LocalTransactionState
        COMMIT_MESSAGE or ROLLBACK_MESSAGE when all messages share it, else UNKNOWN.
    queue_offsets : mapping of (topic, queue_id) to (first, last)
        Offsets of the messages that this send made visible; empty when none is.
    messages : int
    replayed : bool
        True when ``idempotency_key`` had been sent before.
    """

    send_status: SendStatus
    half_id: str
    transaction_id: str
    local_transaction_state: LocalTransactionState
    queue_offsets: Mapping[tuple[str, int], tuple[int, int]]
    messages: int
    replayed: bool

    @property
    def queue_id(self) -> int | None:
        """The queue of a single visible message."""
        return next(iter(self.queue_offsets))[1] if len(self.queue_offsets) == 1 else None

    @property
    def queue_offset(self) -> int | None:
        """The offset of a single visible message, or the first of several in one queue."""
        return next(iter(self.queue_offsets.values()))[0] if len(self.queue_offsets) == 1 else None


class TransactionMQProducer:
    """Sends transactional messages from any Python program, and answers its own checks while it is open.

    Mirrors RocketMQ's ``org.apache.rocketmq.client.producer.TransactionMQProducer``.

    Parameters
    ----------
    log_or_path : CommitLog or str
    producer_group : str
    listener : TransactionListener
    on_listener_error : {"unknown", "fail"}
        An exception of the listener counts as UNKNOWN, as in RocketMQ (default), or is raised.
    check_interval : float or None
        Seconds between the checks of this group's open transactions; None for no checks.
    transaction_timeout : float
        Seconds before a transaction is checked.
    maintenance_interval : float or None
        Seconds between two rounds of the log's upkeep (:meth:`CommitLog.maintain`, with its defaults), in a thread of
        this program; None (default) where the check job does it.
    max_pending_batches : int, optional
        Refuse new transactions, with PendingLimitError, while so many of the group's half batches are pending.
    max_pending_bytes : int or str, optional
        The same for the bytes of their files: ``"500m"``, ``"10g"``.

    Examples
    --------
    >>> with TransactionMQProducer(log, "shop", listener) as producer:       # doctest: +SKIP
    ...     producer.send_message_in_transaction(Message("orders", b"..."), arg=42)
    """

    def __init__(
        self,
        log_or_path: CommitLog | str | os.PathLike[str],
        producer_group: str,
        listener: TransactionListener,
        *,
        on_listener_error: str = "unknown",
        check_interval: float | None = TRANSACTION_CHECK_INTERVAL_S,
        transaction_timeout: float = TRANSACTION_TIMEOUT_S,
        maintenance_interval: float | None = None,
        max_pending_batches: int | None = None,
        max_pending_bytes: int | str | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if listener is None:
            raise ListenerError("TransactionMQProducer needs a listener: who else could answer its checks?")
        self.log = log_or_path if isinstance(log_or_path, CommitLog) else CommitLog.open(log_or_path, storage_options)
        self.producer_group = require_group_name(producer_group)
        self.listener = require_listener(listener, "TransactionMQProducer")
        if self.listener.requires_spark:
            raise ListenerError("TransactionMQProducer has no Spark session: use a listener that needs none")
        self.check_interval = None if check_interval is None else seconds(check_interval, "check_interval", above=True)
        self.transaction_timeout = seconds(transaction_timeout, "transaction_timeout")
        self.maintenance_interval = (
            None if maintenance_interval is None else seconds(maintenance_interval, "maintenance_interval", above=True)
        )
        limits = PendingLimits.of(max_pending_batches, max_pending_bytes)
        self.two_phase = TwoPhase(self.log, self.listener, on_listener_error=on_listener_error, pending_limits=limits)
        self._closing = self.log.machine.event()
        self._threads: list[threading.Thread] = []
        self._open = False

    # ------------------------------------------------------------------ life
    def start(self) -> TransactionMQProducer:
        """Open the producer (``with`` does it)."""
        if not self._open:
            self._closing.clear()
            start = self.log.machine.start_thread
            if self.check_interval is not None:
                self._threads.append(start(self._answer_checks, "txmq-checks", daemon=True))
            if self.maintenance_interval is not None:
                self._threads.append(start(self._keep_up, "txmq-maintainer", daemon=True))
            self._open = True
        return self

    def shutdown(self) -> None:
        """Close the producer: wait for a check, or upkeep, that is under way."""
        self._open = False
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self.log.close()

    def __enter__(self) -> TransactionMQProducer:
        return self.start()

    def __exit__(self, *details: object) -> None:
        self.shutdown()

    def _answer_checks(self) -> None:
        from rmq_spark.check.service import CheckService

        service = CheckService(
            self.log,
            {self.producer_group: self.listener},
            transaction_timeout=self.transaction_timeout,
            transaction_check_interval=self.check_interval or TRANSACTION_CHECK_INTERVAL_S,
            only_groups=True,
        )
        service.run(self._closing)

    def _keep_up(self) -> None:
        from rmq_spark.check.maintainer import Maintainer

        Maintainer(self.log, self.maintenance_interval or MAINTENANCE_INTERVAL_S).run(self._closing)

    # ------------------------------------------------------------------ sending
    def send_message_in_transaction(
        self, message: Message, arg: Any = None, *, idempotency_key: str | None = None
    ) -> TransactionSendResult:
        """Prepare one message, run the local transaction, and commit or roll back.

        Parameters
        ----------
        message : Message
        arg : object
            Handed to ``execute_local_transaction`` as ``batch.arg``.
        idempotency_key : str, optional
            A retry with the same key (characters of a group name) sends nothing twice.
        """
        if not isinstance(message, Message):
            raise MessageError(f"found {type(message).__name__}: rmq_spark.Message is expected")
        return self.send_messages_in_transaction([message], arg, idempotency_key=idempotency_key)

    def send_messages_in_transaction(
        self,
        messages: Iterable[Message] | pa.Table,
        arg: Any = None,
        *,
        topic: str | None = None,
        transaction_key: str | None = None,
        transaction_per: str | None = None,
        idempotency_key: str | None = None,
    ) -> TransactionSendResult:
        """Prepare messages as one half batch: one transaction, or one per message or value of a column.

        Parameters
        ----------
        messages : iterable of Message, or pyarrow.Table
            A table has the columns of the sink (``body``, ``topic``, ``tags``, …) and the transaction key's.
        topic : str, optional
            For rows of a table without a ``topic``.
        transaction_key : str, optional
            A column of the table.
        transaction_per : {"batch", "message"}, optional
        """
        if not self._open:
            raise OptionError("the producer is closed: use it in a with statement, or call start()")
        per = transaction_per or (KEY if transaction_key else BATCH)
        if per not in (BATCH, MESSAGE, KEY) or (per == KEY) != (transaction_key is not None):
            raise OptionError(f"transaction_per={per!r} and transaction_key={transaction_key!r} contradict each other")
        table = messages if isinstance(messages, pa.Table) else to_table(_message_list(messages))
        if table.num_rows == 0:
            raise MessageError("no messages were given: a half batch has at least one")
        header = self._header(per, idempotency_key)
        writer = HalfWriter(header, self.log.topics(), topic, transaction_key, self.log.fifo_topics())
        outcome = self.two_phase.send(header, lambda: self.log.stage(writer, table.to_batches()), arg)
        return self._result(header, outcome, table.num_rows)

    def _header(self, per: str, idempotency_key: str | None) -> HalfHeader:
        # A dot is in no group, key or appId: so a key is its group's own, and is never taken for a stream's batch.
        if idempotency_key is None:
            one_send = self.log.machine.unique_id()
        else:
            one_send = require_app_id(idempotency_key, "idempotency_key")
        app_id = f"send.{self.producer_group}.{one_send}"
        return HalfHeader(
            half_id=half_id_of(app_id, 0),
            app_id=app_id,
            batch_id=0,
            query_id=None,
            input_hash=None,
            fence_id=self.listener.fence_id,
            transaction_per=per,
            producer_group=self.producer_group,
            numbered=False,
            made_up=idempotency_key is None,
        )

    def _result(self, header: HalfHeader, outcome: Outcome, rows: int) -> TransactionSendResult:
        states = set(outcome.messages)
        rolled_back = {RowState.ROLLED_BACK, RowState.ROLLED_BACK_BY_CHECK, RowState.ROLLED_BACK_BY_DISCARD}
        verdict = LocalTransactionState.UNKNOWN
        if states and states <= {RowState.COMMITTED, RowState.DECIDED}:
            verdict = LocalTransactionState.COMMIT_MESSAGE
        elif states and states <= rolled_back:
            verdict = LocalTransactionState.ROLLBACK_MESSAGE
        offsets: dict[tuple[str, int], tuple[int, int]] = {}
        for p in outcome.placed:
            first, _ = offsets.get((p.topic, p.queue_id), (p.queue_offset, 0))
            offsets[(p.topic, p.queue_id)] = (first, p.queue_offset + p.count - 1)
        return TransactionSendResult(
            send_status=SendStatus.SEND_OK,
            half_id=header.half_id,
            transaction_id=batch_transaction_id(header.half_id, outcome.attempt),
            local_transaction_state=verdict,
            queue_offsets=offsets,
            messages=rows,
            replayed=outcome.replayed,
        )


def _message_list(messages: object) -> list[Message]:
    if isinstance(messages, Message) or not isinstance(messages, Iterable):
        raise MessageError(
            f"found {type(messages).__name__}: a list of rmq_spark.Message or a pyarrow.Table is expected"
        )
    return list(messages)
