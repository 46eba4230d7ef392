"""Runs a half batch's local transactions in parts, each in a task of its own, and puts their verdicts together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa

from rmq_spark._core.listeners.half_batch import HalfBatch, normalize_verdicts
from rmq_spark._core.listeners.transaction_listener import TransactionListener, Verdicts
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.verdicts import Verdict, VerdictArray, call_for_verdicts
from rmq_spark.errors import FencedError, LocalTransactionError, VerdictError


@immutable
class PartAnswer:
    """A task's answer for its part.

    Attributes
    ----------
    verdicts : tuple of Verdict
        Distinct ones.
    by_row : pyarrow.Int32Array or None
        For each undecided message of the part, in send order, the position of its verdict; None: all have the first.
        By row, since ``group_by`` of pyarrow does not keep the order in which values first appear.
    rows : int
        The number of undecided messages.
    fenced : str or None
        What the FencedError says, when a check has rolled back transactions of the part. Then there are no verdicts.
    """

    verdicts: tuple[Verdict, ...]
    by_row: pa.Int32Array | None
    rows: int
    fenced: str | None = None


Tasks: TypeAlias = Callable[[TransactionListener, Sequence[HalfBatch]], Sequence[PartAnswer]]
"""Runs :func:`run_part` for each part, somewhere and perhaps more than once, and returns one answer for each."""


def run_part(listener: TransactionListener, part: HalfBatch) -> PartAnswer:
    """Run the local transaction of a part."""
    try:
        answer = call_for_verdicts(listener.execute_local_transaction, part)
    except FencedError as problem:
        return PartAnswer((), None, part.rows.count, str(problem))
    verdicts = normalize_verdicts(answer, part)
    by_row = None if verdicts.which is None else part.by_row(verdicts.which)
    return PartAnswer(verdicts.distinct, by_row, part.rows.count)


class PartRunner:
    """Runs the local transaction of a half batch by its parts.

    Attributes
    ----------
    staged_here : str or None
        The half batch that this process staged last, with each transaction in one part.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.staged_here: str | None = None

    def __call__(self, listener: TransactionListener, batch: HalfBatch) -> Verdicts:
        """Run each part, and return their verdicts as those of the half batch.

        Raises
        ------
        FencedError
            A check has rolled back transactions of every part.
        LocalTransactionError
            It has rolled back transactions of some parts, and others ran.
        """
        parts = batch.parts()
        if not self._are_apart(batch, parts) or not listener.begin_parts(batch):
            return listener.execute_local_transaction(batch)
        answers = self._tasks(listener, list(parts.values()))
        fenced = [answer.fenced for answer in answers if answer.fenced is not None]
        if len(fenced) == len(answers):
            raise FencedError(fenced[0])
        if fenced:
            raise LocalTransactionError(
                f"a check has rolled back transactions of {len(fenced)} of {len(answers)} parts, and the other parts "
                f"ran: a check or a restart settles each ({fenced[0]})"
            )
        return _joined(answers, batch)

    def _are_apart(self, batch: HalfBatch, parts: Mapping[int, HalfBatch]) -> bool:
        """Whether each transaction lies in one part. True at once for the first attempt at what this process staged:
        it alone runs that. Else they are counted, since another run may have cut the parts differently."""
        if batch.half_id == self.staged_here and batch.attempt == 1:
            return True
        in_parts: int = sum(part.transactions.num_rows for part in parts.values())
        in_all: int = batch.transactions.num_rows
        return in_parts == in_all


def _joined(answers: Sequence[PartAnswer], batch: HalfBatch) -> VerdictArray:
    """The verdicts of all parts, for each transaction of the half batch.

    Raises
    ------
    VerdictError
        When a transaction has two verdicts.
    """
    positions: dict[Verdict, int] = {}
    by_row = []
    for answer in answers:
        codes = [positions.setdefault(verdict, len(positions)) for verdict in answer.verdicts]
        if answer.by_row is None:
            by_row.append(pa.repeat(pa.scalar(codes[0], pa.int32()), answer.rows))
        else:
            by_row.append(pa.array(codes, pa.int32()).take(answer.by_row))
    distinct = tuple(positions)
    if len(distinct) == 1:
        return VerdictArray(distinct)
    which = batch.by_transaction(pa.concat_arrays(by_row))
    if which.null_count:
        raise VerdictError(f"a transaction of half batch {batch.half_id!r} has two verdicts, from two of its parts")
    return VerdictArray(distinct, which)
