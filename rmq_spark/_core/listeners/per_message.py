"""A listener with RocketMQ's own signature, which answers message by message, one after the other or in threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts
from rmq_spark._core.runtime.log_records import of_batch
from rmq_spark._core.vocabulary.message import MessageExt
from rmq_spark._core.vocabulary.options import flag, named, whole_number
from rmq_spark._core.vocabulary.redaction import text_of, traceback_of
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import (
    BATCH,
    MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Rollback,
    call_for_verdicts,
)
from rmq_spark.errors import ListenerError

logger = logging.getLogger(__name__)

THREADS_MAX = 1_000
_Answer = LocalTransactionState | Rollback | None


class PerMessageListener(TransactionListener):
    """Adapts a listener with RocketMQ's own signature, which answers message by message.

    Parameters
    ----------
    listener : object
        Has ``execute_local_transaction(msg, arg)`` and ``check_local_transaction(msg)``, where ``msg`` is a
        :class:`~rmq_spark.MessageExt`. Each returns a LocalTransactionState or None, or returns or raises a
        :class:`~rmq_spark.Rollback` with a reason. It may have a :attr:`~TransactionListener.store_id`.
    threads : int, default 1
        How many messages run, or are checked, at once (up to 1,000), for a listener that waits for a partner's answer.
        Its methods must allow that. Messages with one ``sharding_key`` run one after the other, in send order. On
        executors each task has so many threads, and that order holds within its part.
    idempotent : bool, default False
        Says that a local transaction may run twice, or twice at once, with the effect of one run. Executors run only
        listeners that say so (``TransactionalSink(run_on="executors")``).

    Notes
    -----
    It needs ``transactionPer=message``, or half batches of one message (a producer's single send), because a verdict on
    one message says nothing about the others.

    An exception for one message ends the half batch's local transaction: no further message begins, those that run
    end, and all stay pending. With ``onListenerError=unknown`` it is UNKNOWN for that message alone. In a check it
    always is, unless every message raises.
    """

    @named
    def __init__(self, listener: Any, *, threads: int = 1, idempotent: bool = False) -> None:
        for method in ("execute_local_transaction", "check_local_transaction"):
            if not callable(getattr(listener, method, None)):
                raise ListenerError(f"PerMessageListener got {type(listener).__name__}, which has no method {method}")
        self._listener = listener
        self._threads = whole_number(threads, "threads", 1, THREADS_MAX, of=" of messages at once")
        self.idempotent = flag(idempotent, "idempotent")
        self.store_id = getattr(listener, "store_id", None)

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        execute, arg = self._listener.execute_local_transaction, batch.arg
        return self._answers(batch, lambda msg: execute(msg, arg), batch.on_listener_error == "unknown")

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return self._answers(batch, self._listener.check_local_transaction, True)

    def _answers(self, batch: HalfBatch, ask: Callable[[MessageExt], Any], goes_on: bool) -> list[_Answer]:
        """Ask about each message. ``goes_on``: an exception is UNKNOWN for its message, unless all raise."""
        rows = self._rows(batch)
        answers: list[_Answer] = [None] * len(rows)
        problems: dict[int, Exception] = {}
        stop = threading.Event()

        sequences = deque([range(len(rows))] if self._threads == 1 else _by_sharding_key(rows))

        def positions() -> Iterator[int]:
            while True:
                try:
                    yield from sequences.popleft()
                except IndexError:
                    return

        def run() -> None:
            for position in positions():
                if stop.is_set():
                    return
                try:
                    answers[position] = call_for_verdicts(ask, _message(rows[position], batch))
                except Exception as problem:
                    problems[position] = problem
                    if not goes_on:
                        stop.set()
                except BaseException:
                    stop.set()
                    raise

        threads = min(self._threads, len(sequences))
        if threads <= 1:
            run()
        else:
            with ThreadPoolExecutor(threads, "txmq-listener") as pool:
                try:
                    for future in [pool.submit(copy_context().run, run) for _ in range(threads)]:
                        future.result()
                finally:  # also for an interrupt: nothing begins any more, and what runs is waited for
                    stop.set()
        if not problems:
            return answers
        first = min(problems)
        if not goes_on or len(problems) == len(rows):
            raise problems[first]
        msg_id = rows[first]["msg_id"]
        name = f"message {msg_id}: {type(problems[first]).__name__}: {text_of(problems[first])}"
        batch.reason = f"the listener raised for {count_of(len(problems), 'message')} of {len(rows)}, first {name}"
        text = "the listener raised for %d of %d messages of %r, which are UNKNOWN; first message %s: %s"
        details = (len(problems), len(rows), batch, msg_id, traceback_of(problems[first]))
        logger.warning(text, *details, extra=of_batch(batch))
        for position in problems:
            answers[position] = UNKNOWN
        return answers

    def _rows(self, batch: HalfBatch) -> list[dict[str, Any]]:
        table = batch.messages()
        if batch.transaction_per != MESSAGE and not (batch.transaction_per == BATCH and table.num_rows == 1):
            raise ListenerError(
                f"PerMessageListener answers per message, but half batch {batch.half_id!r} has transactions of several "
                "messages: set transactionPer=message"
            )
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows


def _message(row: dict[str, Any], batch: HalfBatch) -> MessageExt:
    """A message, made only when its turn has come: meanwhile others wait for their partner."""
    properties = dict(row["properties"] or ())
    common = {"producer_group": batch.producer_group, "check_times": batch.check_times}
    return MessageExt(**{**row, "properties": properties, **common})


def _by_sharding_key(rows: Sequence[dict[str, Any]]) -> list[Sequence[int]]:
    """The positions of the messages that run one after the other."""
    sequences: dict[tuple[bool, object], list[int]] = {}
    for position, row in enumerate(rows):
        key = row["sharding_key"]
        sequences.setdefault((key is None, position if key is None else key), []).append(position)
    return list(sequences.values())
