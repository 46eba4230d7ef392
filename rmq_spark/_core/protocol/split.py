"""Splits the rows of a half batch by the listener's verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.log.decision import Decision, RolledBack
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.op import Who
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark._core.vocabulary.rows import NO_ROWS, RowSet, booleans_of
from rmq_spark._core.vocabulary.verdicts import (
    COMMIT_MESSAGE,
    ROLLBACK_MESSAGE,
    UNKNOWN,
    LocalTransactionState,
    Verdict,
    VerdictArray,
)

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine


@immutable
class Split:
    """Rows of a half batch by the verdict of their transaction. ``rolled_back``: those of ``rollback``, by reason."""

    commit: RowSet
    rollback: RowSet
    unknown: RowSet
    rolled_back: Sequence[RolledBack] = ()

    @property
    def decides(self) -> bool:
        """True unless all verdicts are UNKNOWN."""
        return bool(self.commit or self.rollback)

    def decision(self, record: HalfRecord, attempt: int, who: Who) -> Decision:
        return Decision(record, attempt, self.commit, self.rollback, who, rolled_back=self.rolled_back)


def split_by_verdict(
    engine: Engine, record: HalfRecord, rows: RowSet, batch: HalfBatch, verdicts: VerdictArray
) -> Split:
    which, distinct = verdicts.which, verdicts.distinct
    if which is not None and len(which) == 1:
        distinct = (distinct[which[0].as_py()],)
        which = None
    if which is None:
        verdict = distinct[0]
        if verdict.state is COMMIT_MESSAGE:
            return Split(rows, NO_ROWS, NO_ROWS)
        if verdict.state is UNKNOWN:
            return Split(NO_ROWS, NO_ROWS, rows)
        return Split(NO_ROWS, rows, NO_ROWS, [RolledBack(verdict.reason, verdict.refused, dict(rows.ranges()))])
    which = batch.by_row(which)
    codes = {
        kind: pa.array([code for code, v in enumerate(distinct) if v.state is kind], pa.int32())
        for kind in LocalTransactionState
    }
    of_state = {state: rows.where(pc.is_in(which, value_set=state_codes)) for state, state_codes in codes.items()}
    rollback = of_state[ROLLBACK_MESSAGE]
    rollback_codes = which.filter(pc.is_in(which, value_set=codes[ROLLBACK_MESSAGE]))
    return Split(of_state[COMMIT_MESSAGE], rollback, of_state[UNKNOWN], _by_reason(rollback, rollback_codes, distinct))


def _by_reason(
    rollback: RowSet, verdict_codes: pa.Array | pa.ChunkedArray, distinct: Sequence[Verdict]
) -> list[RolledBack]:
    """Rows by the reason and kind of their rollback. ``verdict_codes``: each row's index in ``distinct``."""
    ranges_by_reason: dict[tuple[str | None, bool], dict[int, list[tuple[int, int]]]] = {}
    codes = verdict_codes.combine_chunks() if isinstance(verdict_codes, pa.ChunkedArray) else verdict_codes
    offset = 0
    for file_no, bits in rollback.items():
        row_no = pc.indices_nonzero(booleans_of(bits))
        file_codes = codes.slice(offset, len(row_no))
        offset += len(row_no)
        ends = pc.or_(
            pc.not_equal(pc.subtract(row_no[1:], row_no[:-1]), 1), pc.not_equal(file_codes[1:], file_codes[:-1])
        )
        last = [*pc.indices_nonzero(ends).to_pylist(), len(row_no) - 1]
        first = [0, *(n + 1 for n in last[:-1])]
        for start, end, code in zip(
            row_no.take(pa.array(first)).to_pylist(),
            row_no.take(pa.array(last)).to_pylist(),
            file_codes.take(pa.array(first)).to_pylist(),
            strict=True,
        ):
            verdict = distinct[code]
            ranges_by_reason.setdefault((verdict.reason, verdict.refused), {}).setdefault(file_no, []).append(
                (start, end)
            )
    return [
        RolledBack(reason, refused, {n: tuple(ranges) for n, ranges in files.items()})
        for (reason, refused), files in ranges_by_reason.items()
    ]
