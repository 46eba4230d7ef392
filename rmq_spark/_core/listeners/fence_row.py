"""The record of an attempt in a fence row: the states of its transactions, by the positions of their messages.

Most attempts end as a whole, so one word is enough, whatever the number of transactions. Only where their states differ
does the row list positions, as runs: a few bytes for thousands of messages.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.rows import RowSet, bits_of, booleans_of
from rmq_spark.errors import FenceError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.half_batch import HalfBatch

STARTED = "started"
"""Committed only when ``work`` ended the database transaction in its middle. Then no check can answer."""
EXECUTED = "executed"
ROLLED_BACK = "rolled_back"
TOMBSTONE = "tombstone"
BY_PART = "by_part"
"""Executors run the attempt. Each part of it has a row of its own; this row has no outcome, and names the messages."""
WORDS = (STARTED, EXECUTED, ROLLED_BACK, TOMBSTONE, BY_PART)
MIXED = "mixed"
"""In the column ``state``: the attempt's transactions have different states."""

STATES_MAX = 1_000
"""Distinct states in a row. Further reasons become one, so that the row fits into a database's longest statement."""
SAME_MS = 2
"""Times of staging that differ by no more are one time, rounded differently."""
_CODE = pa.int32()
_UNREADABLE = (
    zlib.error, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, pa.ArrowException
)  # fmt: skip


class State(NamedTuple):
    """The state of a transaction: one of :data:`WORDS`, and why ``work`` rolled it back."""

    word: str
    reason: str | None = None


class Recorded:
    """The states of an attempt's rows; immutable.

    ``states`` are distinct. ``files`` has, by file number, for each row of the half file the position of its state in
    ``states``; null where it is unknown. None: all rows of the half batch have the first state. ``staged_ms`` (when the
    half files were written, milliseconds since 1970) and ``layout`` (:meth:`~rmq_spark.HalfBatch.layout`) tell these
    half files from others.
    """

    __slots__ = ("files", "layout", "staged_ms", "states")

    def __init__(
        self,
        states: Sequence[State],
        files: Mapping[int, pa.Int32Array] | None = None,
        staged_ms: int | None = None,
        layout: str | None = None,
    ) -> None:
        self.states = tuple(states)
        self.files = files
        self.staged_ms = staged_ms
        self.layout = layout

    def __repr__(self) -> str:
        return f"Recorded({[state.word for state in self.states]}, {'all' if self.files is None else self.files})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorded) and (self.states, self.files) == (other.states, other.files)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, state: State, rows: RowSet, is_all: bool) -> Recorded:
        """Record one state for these rows; ``is_all`` says that the half batch has no others."""
        return cls([state]) if is_all and state.word != BY_PART else NOTHING.with_rows(rows, [state])

    def with_rows(self, rows: RowSet, states: Sequence[State], which: pa.Int32Array | None = None) -> Recorded:
        """Return a copy with the states of these rows added. ``which`` has the position in ``states`` for each of them,
        in send order; None: all have the first."""
        assert self.files is not None, "a state of all rows leaves none to add"
        positions: dict[State, int] = {state: n for n, state in enumerate(self.states)}
        codes = pa.array([_position(state, positions) for state in states], _CODE)
        row_codes = pa.repeat(codes[0], rows.count) if which is None else codes.take(which)
        files, start = dict(self.files), 0
        for file_no, bits in rows.items():
            file_codes = row_codes.slice(start, bits.count(1))
            start += len(file_codes)
            old_codes = files.get(file_no)
            files[file_no] = pc.replace_with_mask(
                pa.nulls(len(bits), _CODE) if old_codes is None else old_codes, booleans_of(bits), file_codes
            )
        return Recorded(list(positions), files, self.staged_ms, self.layout)

    def of_batch(self, batch: HalfBatch) -> Recorded:
        """Return a copy with the staging time and the layout, which identify the half files of the batch."""
        if self.files is None:
            return self
        return Recorded(self.states, self.files, batch.staged_ms, None if self.is_by_part else batch.layout())

    def is_staged_as(self, batch: HalfBatch) -> bool:
        """Whether the positions are those of the half files that the batch has now. A restored log has staged it again,
        and its messages may have other positions."""
        return self.files is None or self.staged_ms is None or abs(self.staged_ms - batch.staged_ms) <= SAME_MS

    def require_of(self, batch: HalfBatch) -> None:
        """Raise FenceError when the positions are those of other half files."""
        if self.is_by_part or self.is_staged_as(batch):
            return
        if self.layout is None or self.layout != batch.layout():
            raise restaged_error(batch)

    def has_files_of(self, batch: HalfBatch) -> bool:
        """Whether the files that have rows of the batch are as long as they were."""
        files = self.files or {}
        return all(len(files.get(file_no, ())) == len(bits) for file_no, bits in batch.rows.items())

    def among(self, rows: RowSet) -> pa.Int32Array:
        """Return the position of the state of each row, in send order; null where the state is unknown."""
        if self.files is None:
            return pa.repeat(pa.scalar(0, _CODE), rows.count)
        parts = []
        for file_no, bits in rows.items():
            codes = self.files.get(file_no)
            if codes is None:
                parts.append(pa.nulls(bits.count(1), _CODE))
                continue
            if len(codes) != len(bits):
                raise FenceError(
                    f"the fence knows {len(codes)} rows of half file {file_no}, which has {len(bits)}: the database is "
                    "damaged, or the row was changed by hand"
                )
            parts.append(codes.filter(booleans_of(bits)))
        return pa.concat_arrays(parts) if parts else pa.array([], _CODE)

    @property
    def is_by_part(self) -> bool:
        """Whether the parts of the attempt have rows of their own."""
        return any(state.word == BY_PART for state in self.states)

    def rows_in(self, word: str) -> RowSet | None:
        """Return the rows whose state has this word; None: all rows of the half batch."""
        codes = pa.array([n for n, state in enumerate(self.states) if state.word == word], _CODE)
        if self.files is None:
            return None if len(codes) else RowSet()
        return RowSet({n: bits_of(pc.is_in(of_file, value_set=codes)) for n, of_file in self.files.items()})

    # ------------------------------------------------------------------ as columns
    @property
    def state(self) -> str:
        """The column ``state``, for people: the word of all recorded states, or :data:`MIXED`."""
        words = {state.word for state in self.states}
        return words.pop() if len(words) == 1 else MIXED

    def encoded(self) -> bytes | None:
        """The column ``outcome``: runs of rows, compressed; None where :attr:`state` is enough."""
        if self.files is None and self.states[0].reason is None:
            return None
        files = None if self.files is None else {n: _runs(codes) for n, codes in self.files.items()}
        fields = {"states": self.states, "files": files, "staged_ms": self.staged_ms, "layout": self.layout}
        return zlib.compress(json.dumps(fields).encode())

    @classmethod
    def read(cls, state: object, outcome: bytes | None) -> Recorded:
        """Decode the columns of a fence row, or raise FenceError: the database is damaged, or the row was changed by
        hand."""
        if outcome is None:
            if state not in WORDS:
                raise _damaged(f"it says {state!r}, which is not one of {', '.join(WORDS)}")
            return cls([State(str(state))])
        try:
            fields = json.loads(zlib.decompress(outcome))
            states = [State(word, reason) for word, reason in fields["states"]]
            files = fields["files"]
            codes = None if files is None else {int(n): _from_runs(*runs) for n, runs in files.items()}
            recorded = cls(states, codes, fields["staged_ms"], fields["layout"])
            if not all(isinstance(word, str) and isinstance(why, str | None) for word, why in states):
                raise ValueError("a state is no text")
            if not (isinstance(recorded.staged_ms, int | None) and isinstance(recorded.layout, str | None)):
                raise ValueError("what tells half files apart is of another type")
        except _UNREADABLE as problem:
            raise _damaged(f"its outcome cannot be read ({type(problem).__name__})") from problem
        words = {state.word for state in states}
        used = {0} if codes is None else {code for of_file in codes.values() for code in pc.unique(of_file).to_pylist()}
        if not (used <= {None, *range(len(states))} and words <= set(WORDS) and recorded.state == state):
            raise _damaged(f"it says {state!r}, and its outcome {sorted(words)}")
        return recorded


NOTHING = Recorded([], {})


def merged(parts: Iterable[Recorded]) -> Recorded:
    """The states of all parts of an attempt, as one. An attempt without parts has one."""
    several = list(parts)
    if len(several) == 1:
        return several[0]
    positions: dict[State, int] = {}
    files: dict[int, pa.Int32Array] = {}
    for part in several:
        if part.files is None:
            raise FenceError("a fence row speaks for all rows of a half batch, which has other rows in the fence")
        codes = pa.array([positions.setdefault(state, len(positions)) for state in part.states], _CODE)
        files.update({file_no: codes.take(of_file) for file_no, of_file in part.files.items()})
    return Recorded(list(positions), dict(sorted(files.items())))


_MORE = "one of so many reasons that the database does not keep each"


def _position(state: State, positions: dict[State, int]) -> int:
    """Return the position of a state, which is added. When there is no room, its reason is replaced."""
    if state not in positions and len(positions) >= STATES_MAX and state.reason is not None:
        state = State(state.word, _MORE)
    return positions.setdefault(state, len(positions))


def restaged_error(batch: HalfBatch) -> FenceError:
    return FenceError(
        f"half batch {batch.half_id!r}, attempt {batch.attempt}, was executed with its messages in other places, and "
        "its transactions did not all run and end alike: the log was restored, and has dealt the messages out anew. "
        "Nothing can be said. Look which are in the database, and settle the half batch with log.resolve"
    )


def _damaged(contradiction: str) -> FenceError:
    return FenceError(f"{contradiction}: the database is damaged, or the row was changed by hand")


def _runs(codes: pa.Int32Array) -> tuple[list[int], list[int | None]]:
    runs = pc.run_end_encode(codes)
    ends = runs.run_ends.to_pylist()
    return [end - start for start, end in pairwise([0, *ends])], runs.values.to_pylist()


def _from_runs(lengths: Sequence[int], codes: Sequence[int | None]) -> pa.Int32Array:
    if len(lengths) != len(codes) or any(type(length) is not int or length <= 0 for length in lengths):
        raise ValueError("the runs of rows have no length")
    if any(code is not None and type(code) is not int for code in codes):
        raise ValueError("a code is no number")
    ends = pa.array(accumulate(lengths), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, pa.array(codes, _CODE)))
