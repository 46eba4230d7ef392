"""One run of a half batch, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rmq_spark._core.listeners.transaction_listener import NO_LISTENER_FENCE
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.batch_state import BatchState, RowState
from rmq_spark._core.log.decision import Placed
from rmq_spark._core.log.half import HalfRows
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.vocabulary.redaction import sentence_of
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark.errors import (
    ClockError,
    CommitError,
    CorruptLogError,
    HalfBatchLeftError,
    LogFormatError,
    NotACommitLogError,
    StorageError,
    UnresolvedTransactionError,
)

LOG_ERRORS = (
    StorageError, CommitError, ClockError, CorruptLogError, NotACommitLogError, LogFormatError, OSError, MemoryError,
)  # fmt: skip
"""Errors of the log and its store. After the prepare they leave the half batch pending, with an unknown outcome."""


@dataclass
class Outcome:
    """The outcome of a half batch in this run. An empty batch leaves nothing in the log, and has no ``record``."""

    record: HalfRecord | None = None
    replayed: bool = False
    """Whether the batch had been prepared before this run."""
    attempt: int = 1
    """The newest attempt."""
    messages: dict[RowState, int] = field(default_factory=dict)
    """Messages in each state at the end."""
    placed: list[Placed] = field(default_factory=list)
    """The messages that this run made visible."""
    error: BaseException | None = None
    """The listener's exception, with ``onListenerError=unknown``."""


@dataclass
class Run:
    """One run of one half batch. A run executes only rows that it prepared or reopened itself (``executed``: the
    attempt, and its rows), and checks all others.

    ``store_id`` is the listener's present one. ``in_memory`` has all rows of a half batch that this run prepared, so
    nobody reads them from their file. ``numbered`` is copied from the header that was sent: one read from the log lacks
    it.
    ``unknown_because`` is the listener's reason at the last check.
    """

    record: HalfRecord
    store_id: str | None
    arg: Any
    outcome: Outcome
    executed: list[tuple[int, RowSet]] = field(default_factory=list)
    in_memory: HalfRows | None = None
    numbered: bool = True
    unknown_because: str | None = None

    def add_placed(self, attempt: int, placed: Sequence[Placed]) -> None:
        """Add the messages that a decision made visible to the outcome."""
        self.outcome.placed += placed
        visible = sum(p.count for p in placed if p.half_id == self.record.half_id)
        if visible == self.record.rows and not self.outcome.replayed:  # all are visible: nothing is left to settle
            self.outcome.attempt, self.outcome.messages = attempt, {RowState.COMMITTED: visible}

    def end_with(self, state: BatchState) -> None:
        """Set the final attempt and counts of the outcome."""
        self.outcome.attempt = max(max(f.attempt) for f in state.files.values())
        self.outcome.messages = {s: n for s in RowState if (n := state.count(s))}


def left_open(run: Run, problem: BaseException) -> UnresolvedTransactionError:
    """The error for a problem with the log that leaves a half batch pending."""
    header = run.record.header
    effect = "What the local transaction did stands. " if run.executed and header.fence_id != NO_LISTENER_FENCE else ""
    return UnresolvedTransactionError(
        f"half batch {run.record.half_id!r} is prepared, and could not be settled ({sentence_of(problem)}). "
        f"{effect}{stays_open(run.numbered)}"
    )


def stays_open(numbered: bool) -> str:
    """A sentence that says what settles a half batch that stays pending."""
    if numbered:
        return "It stays pending: start the query again, or let a CheckService settle it"
    return (
        "It stays pending until a check settles it, and then its messages may become visible: do not send them anew, "
        "except under the same idempotency key"
    )


def outcome_of_left(record: HalfRecord, archived: Archived) -> Outcome:
    """The outcome of a half batch that has left. It cannot run again: HalfBatchLeftError if a check rolled it back."""
    if not archived.final:
        raise HalfBatchLeftError(
            f"{archived.left_error()}. A check has rolled it back, and a retry would run it again: send its messages "
            "as new ones, under another batch id or idempotency key",
            archived,
        )
    counts = {RowState.COMMITTED: archived.committed, RowState.ROLLED_BACK: archived.rolled_back}
    return Outcome(record, True, archived.attempt, {state: n for state, n in counts.items() if n})
