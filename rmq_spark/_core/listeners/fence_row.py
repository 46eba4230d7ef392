"""What a fence row says of an attempt of a half batch: what became of its transactions, by the places of their rows.

All of an attempt is one database transaction most of the time, so a word says it all, and nothing grows with the number
of transactions. Only where they differ does a row name the places of each: as runs, some bytes for thousands.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.rows import RowSet, bits_of, booleans_of
from rmq_spark.errors import FenceError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.half_batch import HalfBatch

STARTED = "started"
"""Committed only when work ended the database transaction in its middle. Then no check can answer."""
EXECUTED = "executed"
ROLLED_BACK = "rolled_back"
TOMBSTONE = "tombstone"
WORDS = (STARTED, EXECUTED, ROLLED_BACK, TOMBSTONE)
MIXED = "mixed"
"""In the column ``state``: its transactions differ."""

STATES_MAX = 1_000
"""So many different reasons are kept; the others become one, so that a database's longest statement holds them."""
SAME_MS = 2
"""Times of staging that differ by less are one, rounded otherwise."""
_CODE = pa.int32()
_UNREADABLE = (
    zlib.error, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, pa.ArrowException
)  # fmt: skip


class State(NamedTuple):
    """What became of a transaction: one of :data:`WORDS`, and why ``work`` rolled it back."""

    word: str
    reason: str | None = None


class Recorded:
    """What became of rows of an attempt; it never changes.

    Parameters
    ----------
    states : sequence of State
        Distinct ones.
    files : mapping of int to pyarrow.Int32Array, optional
        By file number, for each row of the half file the position of its state, null where nothing is known. None: all
        rows of the half batch have the first state.
    staged_ms : int, optional
        When the half files were written whose rows these are.
    layout : str, optional
        :meth:`~rmq_spark.HalfBatch.layout` of these.
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
        """These rows have one state; ``is_all`` says that the half batch has no others."""
        return cls([state]) if is_all else NOTHING.with_rows(rows, [state])

    def with_rows(self, rows: RowSet, states: Sequence[State], which: pa.Int32Array | None = None) -> Recorded:
        """The same, and what became of these rows. ``which`` has the position in ``states`` for each of them in send
        order; None: all have the first."""
        if self.files is None:
            raise FenceError("a fence row that speaks for all rows of a half batch was to be added to")
        at: dict[State, int] = {state: n for n, state in enumerate(self.states)}
        codes = pa.array([_position(state, at) for state in states], _CODE)
        of_rows = pa.repeat(codes[0], rows.count) if which is None else codes.take(which)
        files, start = dict(self.files), 0
        for file_no, bits in rows.items():
            mine = of_rows.slice(start, bits.count(1))
            start += len(mine)
            before = files.get(file_no)
            files[file_no] = pc.replace_with_mask(
                pa.nulls(len(bits), _CODE) if before is None else before, booleans_of(bits), mine
            )
        return Recorded(list(at), files, self.staged_ms, self.layout)

    def of_batch(self, batch: HalfBatch) -> Recorded:
        """The same, with what tells its half files from others."""
        return self if self.files is None else Recorded(self.states, self.files, batch.staged_ms, batch.layout())

    def require_of(self, batch: HalfBatch) -> None:
        """Raise FenceError when the places are those of other half files: a restored log has staged the half batch once
        more, and its rows may have been dealt out otherwise."""
        if self.files is None or self.staged_ms is None or abs(self.staged_ms - batch.staged_ms) <= SAME_MS:
            return
        if self.layout is not None and self.layout == batch.layout():
            return
        raise FenceError(
            f"half batch {batch.half_id!r}, attempt {batch.attempt}, was executed with its messages in other places, "
            "and its transactions did not all end alike: the log was restored, and has dealt the messages out anew. "
            "Nothing can be said. Look which are in the database, and settle the half batch with log.resolve"
        )

    def among(self, rows: RowSet) -> pa.Int32Array:
        """For each of some rows, in send order, the position of its state; null where nothing is known.

        Raises
        ------
        FenceError
            A half file has another number of rows than the fence says.
        """
        if self.files is None:
            return pa.repeat(pa.scalar(0, _CODE), rows.count)
        found = []
        for file_no, bits in rows.items():
            codes = self.files.get(file_no)
            if codes is None:
                found.append(pa.nulls(bits.count(1), _CODE))
                continue
            if len(codes) != len(bits):
                raise FenceError(
                    f"the fence knows {len(codes)} rows of half file {file_no}, which has {len(bits)}: the database is "
                    "damaged, or the row was changed by hand"
                )
            found.append(codes.filter(booleans_of(bits)))
        return pa.concat_arrays(found) if found else pa.array([], _CODE)

    def rows_in(self, word: str) -> RowSet | None:
        """The rows of one state; None: all rows of the half batch."""
        codes = pa.array([n for n, state in enumerate(self.states) if state.word == word], _CODE)
        if self.files is None:
            return None if len(codes) else RowSet()
        return RowSet({n: bits_of(pc.is_in(of_file, value_set=codes)) for n, of_file in self.files.items()})

    # ------------------------------------------------------------------ as columns
    @property
    def state(self) -> str:
        """The column ``state``, for people: the word of all that is known, or :data:`MIXED`."""
        words = {state.word for state in self.states}
        return words.pop() if len(words) == 1 else MIXED

    def encoded(self) -> bytes | None:
        """The column ``outcome``: runs of rows, compressed; None where :attr:`state` says it all."""
        if self.files is None and self.states[0].reason is None:
            return None
        files = None if self.files is None else {n: _runs(codes) for n, codes in self.files.items()}
        said = {"states": self.states, "files": files, "staged_ms": self.staged_ms, "layout": self.layout}
        return zlib.compress(json.dumps(said).encode())

    @classmethod
    def read(cls, state: object, outcome: bytes | None) -> Recorded:
        """From the columns of a fence row.

        Raises
        ------
        FenceError
            The database is damaged, or the row was changed by hand.
        """
        if outcome is None:
            if state not in WORDS:
                raise _damaged(f"it says {state!r}, which is not one of {', '.join(WORDS)}")
            return cls([State(str(state))])
        try:
            said = json.loads(zlib.decompress(outcome))
            states = [State(word, reason) for word, reason in said["states"]]
            files = said["files"]
            codes = None if files is None else {int(n): _of_runs(*runs) for n, runs in files.items()}
            found = cls(states, codes, said["staged_ms"], said["layout"])
            if not all(isinstance(word, str) and isinstance(why, str | None) for word, why in states):
                raise ValueError("a state is no text")
            if not (isinstance(found.staged_ms, int | None) and isinstance(found.layout, str | None)):
                raise ValueError("what tells half files apart is of another type")
        except _UNREADABLE as problem:
            raise _damaged(f"its outcome cannot be read ({type(problem).__name__})") from problem
        words = {state.word for state in states}
        used = {0} if codes is None else {c for of_file in codes.values() for c in pc.unique(of_file).to_pylist()}
        if not (used <= {None, *range(len(states))} and words <= set(WORDS) and found.state == state):
            raise _damaged(f"it says {state!r}, and its outcome {sorted(words)}")
        return found


NOTHING = Recorded([], {})
_MORE = "one of so many reasons that the database does not keep each"


def _position(state: State, at: dict[State, int]) -> int:
    """The position of a state, which is added when there is room."""
    if state not in at and len(at) >= STATES_MAX and state.reason is not None:
        state = State(state.word, _MORE)
    return at.setdefault(state, len(at))


def _damaged(what: str) -> FenceError:
    return FenceError(f"{what}: the database is damaged, or the row was changed by hand")


def _runs(codes: pa.Int32Array) -> tuple[list[int], list[int | None]]:
    """The length and the code of each run."""
    runs = pc.run_end_encode(codes)
    ends = runs.run_ends.to_pylist()
    return [end - start for start, end in pairwise([0, *ends])], runs.values.to_pylist()


def _of_runs(lengths: Sequence[int], codes: Sequence[int | None]) -> pa.Int32Array:
    if len(lengths) != len(codes) or any(type(length) is not int or length <= 0 for length in lengths):
        raise ValueError("the runs of rows have no length")
    if any(code is not None and type(code) is not int for code in codes):
        raise ValueError("a code is no number")
    ends = pa.array(accumulate(lengths), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, pa.array(codes, _CODE)))
