"""What a fence row says: sets of rows by what became of their transactions."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark._core.listeners.fence_row import BY_PART, WORDS, merged
from rmq_spark.errors import FenceError
from tests.support.inside import EXECUTED, NOTHING, ROLLED_BACK, TOMBSTONE, Recorded, RowSet, State

FILES = {0: 5, 3: 1, 7: 12}
"""The half files of a half batch, and how many rows each has."""
PLACES = [(file_no, row) for file_no, rows in FILES.items() for row in range(rows)]

OF_MESSAGES = [word for word in WORDS if word != BY_PART]
"""The words that say what became of a message."""
states = st.builds(State, st.sampled_from(OF_MESSAGES), st.none() | st.text(max_size=5))
parts = st.lists(st.dictionaries(st.sampled_from(PLACES), states, min_size=1), max_size=6)


def rows_at(places: Any) -> RowSet:
    return RowSet({n: bytes((n, row) in places for row in range(rows)) for n, rows in FILES.items()})


def recorded(parts_of_it: list[dict[tuple[int, int], State]]) -> Recorded:
    found = NOTHING
    for part in parts_of_it:
        distinct = list(dict.fromkeys(part.values()))
        which = pa.array([distinct.index(part[place]) for place in sorted(part)], pa.int32())
        found = found.with_rows(rows_at(part), distinct, which)
    return found


def told(said: Recorded, places: Any) -> list[State | None]:
    codes = said.among(rows_at(places)).to_pylist()
    return [None if code is None else said.states[code] for code in codes]


@given(parts, st.sets(st.sampled_from(PLACES)))
def test_each_row_has_what_was_said_of_it_last(
    parts_of_it: list[dict[tuple[int, int], State]], asked: set[tuple[int, int]]
) -> None:
    model: dict[tuple[int, int], State] = {}
    for part in parts_of_it:
        model |= part
    made = recorded(parts_of_it)
    if model:
        made = Recorded.read(made.state, made.encoded())  # as the database has it
    assert told(made, asked) == [model.get(place) for place in sorted(asked)]
    for word in OF_MESSAGES:
        assert made.rows_in(word) == rows_at({p for p, state in model.items() if state.word == word})


@given(states, st.sets(st.sampled_from(PLACES), min_size=1))
def test_a_state_of_all_rows_needs_no_set(state: State, asked: set[tuple[int, int]]) -> None:
    made = Recorded.of(state, rows_at(PLACES), is_all=True)
    assert (made.encoded() is None) is (state.reason is None)
    read = Recorded.read(made.state, made.encoded())
    assert told(read, asked) == [state] * len(asked)
    assert read.rows_in(state.word) is None


def test_a_state_of_some_rows_says_nothing_of_others() -> None:
    made = Recorded.of(State(EXECUTED), rows_at([(0, 1)]), is_all=False)
    read = Recorded.read(made.state, made.encoded())
    assert read.state == EXECUTED
    assert told(read, [(0, 0), (0, 1), (7, 3)]) == [None, State(EXECUTED), None]


def test_a_thousand_of_a_hundred_thousand_take_two_kilobytes() -> None:
    rng, count = random.Random(1), 100_000
    which = pa.array([int(rng.random() < 0.01) for _ in range(count)], pa.int32())
    made = NOTHING.with_rows(RowSet({0: b"\x01" * count}), [State(EXECUTED), State(ROLLED_BACK, "no stock")], which)
    encoded = made.encoded()
    assert encoded is not None
    assert len(encoded) < 2_500
    assert Recorded.read(made.state, encoded) == made


def packed(said: object) -> bytes:
    return zlib.compress(json.dumps(said).encode())


def test_more_reasons_than_there_is_room_for_become_one() -> None:
    """100,000 of them were more than MariaDB takes in one statement, after the work was done."""
    count = 3_000
    said = [State(ROLLED_BACK, f"order {n}: " + "x" * 180) for n in range(count)]
    made = NOTHING.with_rows(RowSet({0: b"\x01" * count}), said, pa.array(range(count), pa.int32()))
    encoded = made.encoded()
    assert encoded is not None
    assert len(encoded) < 100_000
    read = Recorded.read(made.state, encoded)
    codes = read.among(RowSet({0: b"\x01" * count})).to_pylist()
    assert [read.states[code] for code in codes[:1_000]] == said[:1_000]
    assert {read.states[code].word for code in codes} == {ROLLED_BACK}
    assert "so many reasons" in str(read.states[codes[-1]].reason)


DAMAGED = [
    ("maybe", None),
    (None, None),
    (EXECUTED, b"no zlib"),
    (EXECUTED, packed([])),
    (TOMBSTONE, packed({"states": [["executed", None]], "files": None, "staged_ms": 1, "layout": None})),
    *(
        (EXECUTED, packed({"states": [["executed", None]], "files": None, "staged_ms": 1, "layout": None} | wrong))
        for wrong in (
            {"states": []},
            {"states": [["maybe", None]]},
            {"states": [["executed", 7]]},
            {"states": [[["executed"], None]]},
            {"files": []},
            {"files": {"0": [[5], [1]]}},
            {"files": {"0": [[5, 5], [0]]}},
            {"files": {"0": [[-5], [0]]}},
            {"files": {"0": [[5], [0.5]]}},
            {"files": {"0": [[10**30], [0]]}},
            {"staged_ms": "today"},
            {"layout": 7},
        )
    ),
    (EXECUTED, zlib.compress(b"[" * 100_000)),
]


@pytest.mark.parametrize(("state", "outcome"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_row_that_nobody_wrote_like_this_is_no_answer(state: object, outcome: bytes | None) -> None:
    with pytest.raises(FenceError, match="damaged, or the row was changed by hand"):
        Recorded.read(state, outcome)


def test_a_row_that_speaks_for_all_rows_is_none_of_several() -> None:
    with pytest.raises(FenceError, match="speaks for all rows of a half batch, which has other rows"):
        merged([NOTHING, Recorded([State(EXECUTED)])])


def test_a_half_file_of_another_size_is_no_answer() -> None:
    made = NOTHING.with_rows(RowSet({0: b"\x01" * 4}), [State(EXECUTED)])
    with pytest.raises(FenceError, match="knows 4 rows of half file 0, which has 5"):
        made.among(rows_at([(0, 1)]))
