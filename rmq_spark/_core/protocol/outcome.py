"""One run of a half batch, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rmq_spark._core.listeners.listener import NO_LISTENER_FENCE
from rmq_spark._core.log.archive import Archived
from rmq_spark._core.log.half import HalfRows
from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.log.op import BatchState, RowState
from rmq_spark._core.log.op_table import Placed
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

OF_THE_LOG = (
    StorageError, CommitError, ClockError, CorruptLogError, NotACommitLogError, LogFormatError, OSError, MemoryError,
)  # fmt: skip
"""Problems of the log and its store. After the prepare they leave a half batch pending, and say nothing of it."""


@dataclass
class Outcome:
    """What became of a half batch in this run.

    Attributes
    ----------
    record : HalfRecord or None
        None for an empty batch, which leaves nothing in the log.
    replayed : bool
        True when the batch had been prepared before this run.
    attempt : int
        The newest attempt.
    messages : dict of RowState to int
        Messages in each state at the end.
    placed : list of Placed
        What this run made visible.
    error : BaseException or None
        The listener's exception, with ``onListenerError=unknown``.
    """

    record: HalfRecord | None = None
    replayed: bool = False
    attempt: int = 1
    messages: dict[RowState, int] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    error: BaseException | None = None


@dataclass
class Run:
    """One run of one half batch.

    Attributes
    ----------
    fence_id : str or None
        That of the listener, as it is now.
    executed : list of (attempt, rows)
        What this run executed itself: only its prepare and its own reopens entitle it to. All else it checks.
    held : HalfRows or None
        All rows of a half batch that this run has prepared: they need not be read from their file.
    numbered : bool
        As in the header that the sender has. One that is read from the log does not say it.
    """

    record: HalfRecord
    fence_id: str | None
    arg: Any
    outcome: Outcome
    executed: list[tuple[int, RowSet]] = field(default_factory=list)
    held: HalfRows | None = None
    numbered: bool = True

    def keep(self, attempt: int, placed: Sequence[Placed]) -> None:
        """Add to the outcome what a decision made visible."""
        self.outcome.placed += placed
        visible = sum(p.count for p in placed if p.half_id == self.record.half_id)
        if visible == self.record.rows and not self.outcome.replayed:  # all of it: there is nothing to settle
            self.outcome.attempt, self.outcome.messages = attempt, {RowState.COMMITTED: visible}

    def end_with(self, state: BatchState) -> None:
        """Say in the outcome what became of it."""
        self.outcome.attempt = max(max(f.attempt) for f in state.files.values())
        self.outcome.messages = {s: n for s in RowState if (n := state.count(s))}


def left_open(run: Run, problem: BaseException) -> UnresolvedTransactionError:
    """What to raise when a problem with the log leaves a half batch pending."""
    header = run.record.header
    did = "What the local transaction did stands. " if run.executed and header.fence_id != NO_LISTENER_FENCE else ""
    return UnresolvedTransactionError(
        f"half batch {run.record.half_id!r} is prepared, and could not be settled ({sentence_of(problem)}). "
        f"{did}{stays_open(run.numbered)}"
    )


def stays_open(numbered: bool) -> str:
    """What becomes of it."""
    if numbered:
        return "It stays pending: start the query again, or let a CheckService settle it"
    return (
        "It stays pending until a check settles it, and then its messages may become visible: do not send them anew, "
        "except under the same idempotency key"
    )


def outcome_of_left(record: HalfRecord, kept: Archived) -> Outcome:
    """What became of a half batch that has left: nothing of it can be run again."""
    if not kept.final:
        raise HalfBatchLeftError(
            f"{kept.left_error()}. A check has rolled it back, and a retry would run it again: send its messages as "
            "new ones, under another batch id or idempotency key",
            kept,
        )
    counts = {RowState.COMMITTED: kept.committed, RowState.ROLLED_BACK: kept.rolled_back}
    return Outcome(record, True, kept.attempt, {state: n for state, n in counts.items() if n})
