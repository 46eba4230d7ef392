"""Row sets: masks, ranges, and what op markers make of a half batch, against a model that goes row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark._core.log.batch_state import FileState
from rmq_spark._core.log.read_op import validate_op
from rmq_spark._core.vocabulary.rows import bits_of, ranges_count
from rmq_spark.errors import CorruptLogError
from tests.support.inside import OP_SCHEMA, BatchState, OpKind, OpRow, RowSet, RowState, Who, runs
from tests.support.inside import op_table as to_table

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
SIZES = {0: 7, 3: 1, 1000: 12}

bits = st.binary(max_size=64).map(lambda b: bytes(x & 1 for x in b))


def masks_of(sizes: dict[int, int]) -> st.SearchStrategy[dict[int, bytes]]:
    def of(size: int) -> st.SearchStrategy[bytes]:
        return st.lists(st.sampled_from((0, 1)), min_size=size, max_size=size).map(bytes)

    return st.fixed_dictionaries({}, optional={n: of(size) for n, size in sizes.items()})


def addresses(rows: Mapping[int, bytes]) -> set[tuple[int, int]]:
    return {(n, i) for n, m in rows.items() for i, bit in enumerate(m) if bit}


def op_row(**change: object) -> dict[str, object]:
    """A rollback of a whole file, in which somebody has changed something."""
    return to_table([OpRow(OpKind.ROLLBACK, "h", 0, None, 7, 1, Who.EXECUTE)], 1, NOW, "c").to_pylist()[0] | change


# ---------------------------------------------------------------- masks and ranges
@given(bits)
def test_runs_name_exactly_the_ones(mask: bytes) -> None:
    found = runs(mask)
    assert [i for a, b in found for i in range(a, b + 1)] == [i for i, bit in enumerate(mask) if bit]
    assert ranges_count(found) == mask.count(1)
    assert all(b + 1 < c for (_, b), (c, _) in pairwise(found))


@given(masks_of(SIZES), masks_of(SIZES))
def test_masks_of_files_behave_as_sets_of_addresses(a: dict[int, bytes], b: dict[int, bytes]) -> None:
    rows = RowSet(a)
    assert addresses(rows) == addresses(a)
    assert addresses(rows & b) == addresses(a) & addresses(b)
    assert addresses(rows - b) == addresses(a) - addresses(b)
    assert rows.count == len(addresses(a))
    assert bool(rows) == bool(addresses(a))
    for count in range(4):
        assert addresses(rows.first(count)) == set(sorted(addresses(a))[:count])
    assert {(n, i) for n, ranges in rows.ranges() for x, y in ranges for i in range(x, y + 1)} == addresses(a)
    assert all(b"\x01" in m for m in [*rows.values(), *(rows & b).values(), *(rows - b).values()])


@given(masks_of(SIZES), st.data())
def test_rows_are_chosen_by_a_value_for_each(a: dict[int, bytes], data: st.DataObject) -> None:
    rows = RowSet(a)
    values = data.draw(st.lists(st.sampled_from((True, False, None)), min_size=rows.count, max_size=rows.count))
    expected = {address for address, value in zip(sorted(addresses(rows)), values, strict=True) if value}
    for chosen in (pa.array(values, pa.bool_()), pa.chunked_array([values[:1], values[1:]], pa.bool_())):
        assert addresses(rows.where(chosen)) == expected


def test_a_second_file_is_not_given_the_verdicts_of_the_first() -> None:
    """pyarrow before 26 read a slice of booleans from its array's start: a rolled back message was committed."""
    rows = RowSet({0: b"\1\1", 1: b"\0\1\1"})
    assert dict(rows.where(pa.array([True, True, False, True]))) == {0: b"\1\1", 1: b"\0\0\1"}


@given(st.lists(st.sampled_from((True, False, None)), max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_a_mask_of_a_slice_is_the_slice_of_the_mask(values: list[bool | None], start: int, length: int) -> None:
    whole = pa.array(values, pa.bool_())
    expected = bytes(1 if v else 0 for v in values)
    assert bits_of(whole.slice(start, length)) == expected[start : start + length]
    assert bits_of(pa.chunked_array([whole.slice(0, start), whole.slice(start)])) == expected


@given(st.lists(st.one_of(st.none(), bits.filter(lambda m: 1 in m)), max_size=6))
def test_op_rows_as_they_are_written_are_valid(masks: list[bytes | None]) -> None:
    rows = [OpRow(OpKind.ROLLBACK, "h", ranges=None if m is None else runs(m), count=7 if m is None else m.count(1))
            for m in masks]  # fmt: skip
    table = to_table(rows, 1, NOW, "c")
    for part in (table, table.slice(1), pa.concat_tables([table, table])):
        assert validate_op(part) is part


@pytest.mark.parametrize(
    ("bad", "count"),
    [([], 0), ([(3, 1)], -1), ([(3, 1)], 1), ([(-1, 2)], 4), ([(0, 4), (4, 6)], 8), ([(5, 6), (0, 1)], 4),
     ([(None, 1)], 2), ([(0, None)], 1), ([(0, 1), (3, 4)], 5)],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 2])
def test_ranges_that_nobody_writes_are_refused(bad: list[tuple[int, int]], count: int, place: int) -> None:
    rows = to_table([OpRow(OpKind.ROLLBACK, "h", 0, ((0, 1), (3, 3)), 3)] * 3, 1, NOW, "c").to_pylist()
    rows[place] |= {"ranges": [{"first": a, "last": b} for a, b in bad], "count": count}
    with pytest.raises(CorruptLogError, match=r"rows that cannot be|a count that cannot be"):
        validate_op(pa.Table.from_pylist(rows, OP_SCHEMA))


# ---------------------------------------------------------------- fold
@dataclass
class Row:
    """The model of one half row."""

    state: RowState = RowState.PENDING
    attempt: int = 1
    checks: int = 0
    conflict: bool = False


AFTER_ROLLBACK = {
    Who.EXECUTE: RowState.ROLLED_BACK,
    Who.ADMIN: RowState.ROLLED_BACK,
    Who.CHECK: RowState.ROLLED_BACK_BY_CHECK,
    Who.DISCARD: RowState.ROLLED_BACK_BY_DISCARD,
}


def apply(row: Row, kind: OpKind, who: Who, attempt: int, placed: bool) -> None:
    if kind is OpKind.COMMIT:
        row.state = RowState.COMMITTED if placed else RowState.WAITING
    elif kind is OpKind.PLACE:
        row.state = RowState.COMMITTED
    elif kind is OpKind.ROLLBACK:
        row.state = AFTER_ROLLBACK[who]
    elif kind is OpKind.QUARANTINE:
        row.state = RowState.QUARANTINED
    elif kind is OpKind.CHECK:
        row.checks = min(row.checks + 1, 255)
    elif kind is OpKind.REOPEN:
        row.state, row.attempt, row.checks = RowState.PENDING, attempt, 0
    elif kind is OpKind.CONFLICT:
        row.conflict = True


ROW_KINDS = [OpKind(kind) for kind in "commit place rollback quarantine check reopen conflict".split()]
event = st.tuples(
    st.sampled_from(ROW_KINDS), st.sampled_from(tuple(Who)), st.integers(1, 250), st.booleans(), masks_of(SIZES),
    st.booleans(),
)  # fmt: skip


@given(st.lists(event, max_size=12))
def test_fold_does_to_ranges_what_the_model_does_to_rows(steps: list[tuple[object, ...]]) -> None:
    state = fresh()
    model = {(n, i): Row() for n, size in SIZES.items() for i in range(size)}
    for kind, who, attempt, placed, mask, whole in steps:
        named = {n: b"\x01" * size for n, size in SIZES.items()} if whole else mask
        common = {"attempt": attempt, "decided_by": who, "queue_offset": 0 if placed else None}
        if whole:
            rows = [OpRow(kind, "h", count=sum(SIZES.values()), **common)]  # type: ignore[arg-type]
        else:
            rows = [
                OpRow(kind, "h", n, runs(m), m.count(1), **common)  # type: ignore[arg-type]
                for n, m in mask.items()  # type: ignore[attr-defined]
                if 1 in m
            ]
        for row in to_table(rows, 1, NOW, "c").to_pylist():
            state.fold(OpRow.of(row))
        for address, row_model in model.items():
            if named.get(address[0], bytes(99))[address[1]]:  # type: ignore[attr-defined]
                apply(row_model, kind, who, attempt, placed)  # type: ignore[arg-type]

    for (n, i), row_model in model.items():
        file = state.files[n]
        found = Row(RowState(file.state[i]), file.attempt[i], file.checks[i], bool(file.conflict[i]))
        assert found == row_model, (n, i)
    for wanted in RowState:
        expected = {a for a, r in model.items() if r.state is wanted}
        assert addresses(state.rows_in((wanted,))) == expected
        assert state.count(wanted) == len(expected)
        assert state.attempts(wanted) == sorted({model[a].attempt for a in expected})
    assert state.is_settled == all(r.state is not RowState.PENDING for r in model.values())
    assert state.in_conflict == any(r.conflict for r in model.values())
    assert state.conflicting().count == sum(r.conflict for r in model.values())
    everything = RowSet({n: b"\x01" * size for n, size in SIZES.items()})
    assert state.check_times(everything) == max(r.checks for r in model.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "erase"}, "an unknown kind .*kind=erase"),
        ({"kind": None}, "an unknown kind"),
        ({"decided_by": "nobody"}, "an unknown decider .*decided_by=nobody"),
        ({"attempt": 251}, "an attempt that cannot be .*attempt=251"),
        ({"attempt": -1}, "attempt=-1"),
        ({"attempt": 0}, "attempt=0"),
        ({"count": -1}, "count=-1"),
        ({"count": None}, "a count that cannot be"),
        ({"op_time": None}, "no time"),
        ({"queue_offset": 0, "next_offset": 6, "topic": "t", "queue_id": 0}, "offsets that cannot be"),
        ({"queue_offset": -1, "next_offset": 6, "topic": "t", "queue_id": 0}, "offsets that cannot be"),
        ({"queue_offset": 0, "next_offset": 7, "topic": "t"}, "offsets that cannot be"),
        ({"next_offset": 7}, "offsets that cannot be"),
        ({"queue_offset": 0, "next_offset": 7, "topic": "t", "queue_id": 0}, "rows that cannot be"),
        (
            {"ranges": [{"first": 1, "last": 7}], "queue_offset": 0, "next_offset": 7, "topic": "t", "queue_id": 0,
             "file_rows": 7},
            "rows that cannot be",
        ),
    ],
)  # fmt: skip
def test_an_op_row_that_nobody_writes_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(CorruptLogError, match=words):
        validate_op(pa.Table.from_pylist([op_row(**change)], OP_SCHEMA))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file_no": 5}, "no such file"),
        ({"ranges": [{"first": 0, "last": 7}]}, "7 rows"),
        ({"count": 6}, "counts 6"),
    ],
)
def test_an_op_row_that_contradicts_its_half_batch_changes_nothing(change: dict[str, object], words: str) -> None:
    state = fresh()
    with pytest.raises(CorruptLogError, match=words):
        state.fold(OpRow.of(op_row(**change)))
    assert state.count(RowState.PENDING) == state.rows


def fresh() -> BatchState:
    return BatchState("h", {n: FileState(f"half-{n}.parquet", size, ()) for n, size in SIZES.items()})
