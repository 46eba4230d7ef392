"""Verdicts: what became of a local transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import pyarrow as pa

from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.redaction import TEXT_CHARS_MAX, one_line, redacted, text_of
from rmq_spark.errors import OptionError, VerdictError

BATCH = "batch"
MESSAGE = "message"
KEY = "key"
"""The units of a transaction: the half batch, a message, or all messages with one value of ``transactionKey``."""


def require_transaction_per(per: str, key: str | None, names: tuple[str, str]) -> None:
    """Raise OptionError unless ``per`` is ``batch``, ``message`` or ``key``, and a column is named with ``key`` alone.
    ``names``: how the door spells the two options."""
    if per not in (BATCH, MESSAGE, KEY) or (per == KEY) != (key is not None):
        raise OptionError(
            f"{names[0]}={per!r} and {names[1]}={key!r} contradict each other: set {names[1]} to a column for a "
            f"transaction per value of it, else {names[0]} to message or batch"
        )


class LocalTransactionState(str, Enum):
    """A verdict: what became of a local transaction (RocketMQ: ``LocalTransactionState``)."""

    COMMIT_MESSAGE = "COMMIT_MESSAGE"
    ROLLBACK_MESSAGE = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOWN"
    UNKNOW = "UNKNOWN"

    def __str__(self) -> str:
        return self.value


COMMIT_MESSAGE = LocalTransactionState.COMMIT_MESSAGE
ROLLBACK_MESSAGE = LocalTransactionState.ROLLBACK_MESSAGE
UNKNOWN = LocalTransactionState.UNKNOWN


REASON_CHARS_MAX = 200
"""The log keeps this much of a listener's reason for a rollback or an UNKNOWN."""


class Rollback(Exception):
    """A rollback, and why. ``work`` raises it to undo what it wrote; a listener may return or raise it in place of
    ROLLBACK_MESSAGE.

    In a SqlTransactionListener with ``per_transaction=True``, and in a PerMessageListener, it stands for one
    transaction, else for the whole half batch. :meth:`HalfBatch.verdicts` gives single transactions a reason.

    Parameters
    ----------
    reason : str, optional
        Why. Up to 200 characters are kept with the op marker, without secrets and control characters; ``txmq trace``
        and ``log.trace`` show them.
    refused : bool, default False
        For a check: the local transaction *ran and said no*, as a record of it tells. The rollback is then final, like
        every rollback of ``execute_local_transaction``. Otherwise a check's rollback promises that the local
        transaction never happened and never will, and a replay runs it as the next attempt.
    """

    def __init__(self, reason: object = None, *, refused: bool = False) -> None:
        super().__init__(*(() if reason is None else (reason,)))
        self.reason = reason
        self.refused = refused


@immutable
class Verdict:
    """The outcome of a transaction.

    Attributes
    ----------
    state : LocalTransactionState
    reason : str or None
        Why it was rolled back.
    refused : bool
        For a rollback: the local transaction ran and said no, so it is final.
    """

    state: LocalTransactionState
    reason: str | None = None
    refused: bool = False


class VerdictArray:
    """A verdict for each transaction of a half batch. Each distinct verdict is stored once, as in a dictionary array.

    Attributes
    ----------
    distinct : tuple of Verdict
    which : pyarrow.Array or None
        For each transaction, in the order of ``batch.transactions``, the position of its verdict in ``distinct``
        (int32). None: all transactions have the only verdict.
    """

    __slots__ = ("distinct", "which")

    def __init__(self, distinct: tuple[Verdict, ...], which: pa.Array | None = None) -> None:
        self.distinct = distinct
        self.which = which

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> VerdictArray:
        """Make one from a verdict for each transaction."""
        positions: dict[Verdict, int] = {}
        which = [positions.setdefault(verdict, len(positions)) for verdict in verdicts]
        return cls(tuple(positions), pa.array(which, pa.int32()))

    def __repr__(self) -> str:
        return f"VerdictArray({self.distinct!r}, {'all' if self.which is None else len(self.which)})"

    def each(self, count: int) -> list[Verdict]:
        """The verdicts of ``count`` transactions."""
        if self.which is None:
            return [self.distinct[0]] * count
        return [self.distinct[at] for at in self.which.to_pylist()]

    def counts(self, count: int) -> dict[LocalTransactionState, int]:
        """How many of ``count`` transactions have each state."""
        totals = dict.fromkeys(LocalTransactionState, 0)
        if self.which is None:
            totals[self.distinct[0].state] = count
            return totals
        for row in self.which.value_counts().to_pylist():
            totals[self.distinct[row["values"]].state] += row["counts"]
        return totals

    def with_reason(self, reason: str | None) -> VerdictArray:
        """The same verdicts, with a reason for the rollbacks that have none."""
        if reason is None or not any(v.state is ROLLBACK_MESSAGE and v.reason is None for v in self.distinct):
            return self
        distinct = [
            Verdict(v.state, reason, v.refused) if v.state is ROLLBACK_MESSAGE and v.reason is None else v
            for v in self.distinct
        ]
        return VerdictArray(tuple(distinct), self.which)


def reason_for_log(said: object) -> str | None:
    """A reason as the log keeps it: text on one line, without secrets, of at most 200 characters; None for nothing."""
    if said is None:
        return None
    text = (
        str.__str__(said) if isinstance(said, str) else text_of(said) if isinstance(said, BaseException) else repr(said)
    )
    text = one_line(redacted(text[:TEXT_CHARS_MAX])).strip()  # a secret that is cut would not be recognized
    return f"{text[: REASON_CHARS_MAX - 1]}…" if len(text) > REASON_CHARS_MAX else text or None


def rollback(reason: object = None, refused: bool = False) -> Verdict:
    return Verdict(ROLLBACK_MESSAGE, reason_for_log(reason), refused)


def call_for_verdicts(call: Callable[..., Any], *args: Any) -> Any:
    """Call the user's code and return its result. A :class:`Rollback` that it raises counts as its result."""
    try:
        return call(*args)
    except Rollback as raised:
        return raised


def verdict_of(one: object) -> Verdict:
    """The verdict that a word, a :class:`Rollback` or None stands for; VerdictError for anything else."""
    if isinstance(one, Rollback):
        return rollback(one.reason, one.refused)
    return Verdict(UNKNOWN if one is None else state_of(one))


def state_of(value: object) -> LocalTransactionState:
    if value == "UNKNOW":
        return UNKNOWN
    try:
        return LocalTransactionState(value)
    except ValueError:
        raise VerdictError(
            f"{value!r} is not a verdict: COMMIT_MESSAGE, ROLLBACK_MESSAGE or UNKNOWN is expected"
        ) from None
