"""Message listeners: functions that consume messages and may return a result for each."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.runtime.forks import called_here
from rmq_spark._core.vocabulary.message import MessageExt
from rmq_spark._core.vocabulary.redaction import redacted, text_of
from rmq_spark._core.vocabulary.times import EPOCH
from rmq_spark.errors import ListenerError

REASON_CHARS_MAX = 1024

logger = logging.getLogger(__name__)


class ConsumeResult(Enum):
    """A listener's answer for a message (``ConsumeResult`` of RocketMQ's gRPC clients).

    A failed message comes again: in mode ``concurrently`` later, by way of the group's retry topic, and in mode
    ``orderly`` after a moment, before the messages behind it.
    """

    SUCCESS = "SUCCESS"
    FAILURE = "FAILURE"


SUCCESS, FAILURE = ConsumeResult
Results: TypeAlias = ConsumeResult | Sequence[ConsumeResult | None] | None
"""One result for all messages of a table, or one for each row. None is SUCCESS: a listener needs no ``return``."""
Listen: TypeAlias = Callable[[pa.Table], Results]
"""A message listener takes a table of messages and returns results. It runs on executors, so it must be picklable."""


class EachMessage:
    """Makes a message listener from a function that takes one message at a time.

    Parameters
    ----------
    function : callable
        Gets a :class:`~rmq_spark.MessageExt` and returns a :class:`ConsumeResult`, or nothing when the message is
        consumed. An exception fails this message alone, and is the reason.
    """

    def __init__(self, function: Callable[[MessageExt], ConsumeResult | None]) -> None:
        if not callable(function):
            raise ListenerError(f"EachMessage got {type(function).__name__}: a function of one message is expected")
        _require_no_coroutine(function, "EachMessage")
        self.function = function

    def each(self, messages: pa.Table) -> Iterator[tuple[bool, str | None]]:
        """Yield for each message in turn whether it was consumed, and the reason when it was not. The next call is
        made when the caller asks: a consumer can stop at a failure."""
        for message in messages_of(messages):
            try:
                answer = _outcome(called_here(self.function, message))
            except KeyboardInterrupt:
                raise
            except BaseException as problem:  # one message must not end the consumer
                answer = False, reason_of(problem)
            yield answer


class EachBatch:
    """Makes a message listener from a function that takes a list of messages.

    Parameters
    ----------
    function : callable
        Gets a list of :class:`~rmq_spark.MessageExt` and returns one :class:`ConsumeResult` for all of them, a list
        with one for each, or nothing when all are consumed (RocketMQ:
        ``MessageListenerConcurrently.consumeMessage``).
    """

    batch_rows = 1
    """Default number of messages in a ``PushConsumer``'s call (RocketMQ: ``consumeMessageBatchMaxSize``)."""

    def __init__(self, function: Callable[[list[MessageExt]], Results]) -> None:
        if not callable(function):
            raise ListenerError(
                f"EachBatch got {type(function).__name__}: a function of a list of messages is expected"
            )
        _require_no_coroutine(function, "EachBatch")
        self.function = function

    def __call__(self, messages: pa.Table) -> Results:
        return self.function(list(messages_of(messages)))


def answers(listener: Listen | EachMessage, messages: pa.Table) -> Iterator[tuple[bool, str | None]]:
    """Yield for each message in turn whether it was consumed, and the reason when it was not.

    A value of another type, or a wrong number of results, counts as a failure. A listener that uses the table as if it
    were one message is a ListenerError.
    """
    if isinstance(listener, EachMessage):
        yield from listener.each(messages)
        return
    try:
        returned = called_here(listener, messages)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # RocketMQ counts every Throwable as a failure
        _require_not_taken_for_message(problem)
        yield from [(False, reason_of(problem))] * messages.num_rows
        return
    if not isinstance(returned, list | tuple):
        yield from [_outcome(returned)] * messages.num_rows
    elif len(returned) != messages.num_rows:
        text = f"the listener returned {len(returned)} results for {messages.num_rows} messages: return one for each"
        yield from [(False, text)] * messages.num_rows
    else:
        yield from map(_outcome, returned)


def require_table_listener(listener: Callable[..., object]) -> None:
    """Refuse an unwrapped function whose annotation names a message or a list of messages. The ListenerError names the
    class to wrap it in."""
    _require_no_coroutine(listener, "the message listener")
    try:
        parameters = list(inspect.signature(listener).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return
    hint = parameters[0].annotation if parameters else inspect.Parameter.empty
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", "") if isinstance(hint, type) else str(hint)
    if re.search(r"\bMessage(Ext)?\b", text):
        is_single = re.fullmatch(r"(\w+\.)*Message(Ext)?", text) is not None
        raise _not_wrapped(f"{_name(listener)} takes {text}", EachMessage if is_single else EachBatch, _name(listener))


def _require_no_coroutine(function: Callable[..., object], what: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ListenerError(
            f"{what} got the coroutine function {_name(function)}: a plain function is expected, which may call "
            "asyncio.run"
        )


def _require_not_taken_for_message(problem: BaseException) -> None:
    """Raise ListenerError when a function took the table for one message (``table.body``). Otherwise all its messages
    would be retried in vain, and become dead letters."""
    if isinstance(problem, AttributeError) and isinstance(problem.obj, pa.Table) and problem.name in _DEFAULTS:
        raise _not_wrapped(f"the message listener asked a pyarrow.Table for .{problem.name}", EachMessage) from problem


def _not_wrapped(what: str, wrapper: type, name: str = "function") -> ListenerError:
    of = "one message" if wrapper is EachMessage else "a list of messages"
    return ListenerError(
        f"{what}: a listener gets a pyarrow.Table of messages. Wrap a function of {of}: txmq.{wrapper.__name__}({name})"
    )


def _name(listener: object) -> str:
    return str(getattr(listener, "__name__", type(listener).__name__))


COMES_AGAIN = "What has a try left comes again, the rest becomes dead letters"


def log_failures(
    group: str, queue: tuple[str, int], failed: int, of: int, reason: str | None, then: str = COMES_AGAIN
) -> None:
    """Log that a message listener failed, with the first reason, so that its retries are explained."""
    logger.warning(
        "message listener of group %r: %d of %d messages of topic %r, queue %d failed. %s. The first: %s",
        group, failed, of, *queue, then, reason,
        extra={"consumer_group": group, "topic": queue[0], "queue_id": queue[1]},
    )  # fmt: skip


def _outcome(result: object) -> tuple[bool, str | None]:
    """Return whether a result says that a message was consumed, and the reason when it does not."""
    if result is None or result is SUCCESS:
        return True, None
    if result is FAILURE:
        return False, "the listener returned FAILURE"
    wrong = f"something of the type {type(result).__name__}"
    return False, f"the listener returned {wrong}: a ConsumeResult is expected, or nothing when the message is consumed"


def reason_of(problem: BaseException) -> str:
    """Return an exception as text that fits into a property, without secrets."""
    text = f"{type(problem).__name__}: {text_of(problem)}".encode(errors="backslashreplace").decode()  # no surrogate
    return redacted(text)[:REASON_CHARS_MAX]


_FIELDS = (
    "topic", "body", "tags", "keys", "sharding_key", "queue_id", "born_timestamp", "msg_id", "transaction_id",
    "producer_group", "store_timestamp", "queue_offset", "reconsume_times",
)  # fmt: skip


_DEFAULTS: dict[str, Any] = {
    "topic": "", "body": b"", "tags": None, "keys": None, "sharding_key": None, "properties": None, "queue_id": None,
    "born_timestamp": None, "deliver_at": None, "delay_level": None, "msg_id": "", "transaction_id": "",
    "transaction_key": None, "producer_group": "", "store_timestamp": None, "check_times": 0, "queue_offset": None,
    "reconsume_times": 0,
}  # fmt: skip
"""All fields of a message in their order, with defaults."""


def messages_of(table: pa.Table) -> Iterator[MessageExt]:
    """Yield the rows of a table as messages.

    They are not validated: stored messages were validated when they were sent.
    """
    names = [name for name in _FIELDS if name in table.column_names]
    columns = [_python_values(table[name]) for name in names]
    if "properties" in table.column_names:
        names.append("properties")
        columns.append([None if p is None else dict(p) for p in _python_values(table["properties"])])
    new, set_field = MessageExt.__new__, object.__setattr__
    for values in zip(*columns, strict=True):
        message = new(MessageExt)
        set_field(message, "__dict__", {**_DEFAULTS, **dict(zip(names, values, strict=True))})
        yield message


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python values. A repeated value is made once, and a time without a look-up of its zone."""
    n = len(column)
    if column.null_count == n:
        return [None] * n
    kind = column.type
    if pa.types.is_timestamp(kind):
        microseconds = pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64())
        time_of: dict[int, datetime] = {}
        times: list[Any] = []
        for value in microseconds.to_pylist():
            if value is not None and value not in time_of:
                time_of[value] = EPOCH + timedelta(microseconds=value)
            times.append(None if value is None else time_of[value])
        return times
    if (pa.types.is_string(kind) or pa.types.is_integer(kind)) and n > 1 and column[0].equals(column[n - 1]):
        bounds = pc.min_max(column).as_py() if not column.null_count else {"min": 0, "max": 1}
        if bounds["min"] == bounds["max"]:
            return [bounds["min"]] * n
    return list(column.to_pylist())
