"""Prepared half batches in columns say the same as one object for each of them."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from rmq_spark._core.log.batch_index import PrepareEntry
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import prepare
from tests.support.inside import BatchIndex, SharedFiles
from tests.support.limits import Limit, set_limits

BATCHES = {"a": PrepareEntry(ms=30, rows=5), "b": PrepareEntry(ms=20, rows=1), "c": PrepareEntry(ms=40, rows=2)}


def settled(**rows: int) -> pa.Table:
    return pa.table({"half_id": pa.array(list(rows), pa.string()), "rows": pa.array(list(rows.values()), pa.int64())})


def test_they_are_a_mapping() -> None:
    found = BatchIndex.of(BATCHES)
    assert dict(found) == BATCHES
    assert len(found) == 3
    assert "b" in found
    assert "z" not in found
    assert found.get("z") is None


def test_none_at_all_can_be_asked_everything() -> None:
    none = BatchIndex.of({})
    assert dict(none) == {}
    assert dict(none.updated(BATCHES)) == BATCHES
    assert none.left_open(settled(a=1)) == {}
    assert none.left_open(settled()) == {}
    assert (none.after(0), none.newest_ms(), none.newest_ms(before=5)) == ([], 0, 0)
    assert none.lacks(pa.array(["a"])) == ["a"]


def test_what_is_said_later_counts() -> None:
    named = {"b": PrepareEntry(1, 9), "d": PrepareEntry(2, 3)}
    assert dict(BatchIndex.of(BATCHES).updated(named)) == {**BATCHES, **named}


def test_the_least_recently_used_of_many_shared_files_are_read_again(limit: Limit) -> None:
    limit(IDS_CACHED_MAX=4)
    reads: list[str] = []

    def read(paths: list[str]) -> pa.ChunkedArray:
        reads.extend(paths)
        return pa.chunked_array([[f"{paths[0]}1", f"{paths[0]}2"]])

    files = SharedFiles(read, lambda path: True)
    for path in "abacab":
        assert files.of(path)["rows"].to_pylist() == [1, 1]
    assert reads == ["a", "b", "c", "b"]


def test_times() -> None:
    found = BatchIndex.of(BATCHES)
    assert found.after(20) == ["a", "c"]
    assert (found.newest_ms(), found.newest_ms(before=40), found.newest_ms(before=20)) == (40, 30, 0)
    assert found.lacks(pa.chunked_array([["a", "x"], ["c", "y"]])) == ["x", "y"]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_open(seed: int) -> None:
    rng = random.Random(seed)
    batches = {f"h{i}": PrepareEntry(i, rng.randint(0, 4)) for i in range(rng.randint(0, 30))}
    gone = {f"h{i}": rng.randint(-2, 5) for i in rng.sample(range(40), 20)}
    expected = {h: p.rows - gone.get(h, 0) for h, p in batches.items() if p.rows > gone.get(h, 0)}
    assert BatchIndex.of(batches).left_open(settled(**gone)) == expected


def test_of_open_half_batches_the_newest_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is read is kept whatever its size: it would be read again for each decision beside it."""
    set_limits(monkeypatch, OPEN_ROWS_CACHED_MAX=8)
    log = InMemoryCommitLog(topics={"orders": 1})
    half_ids = [prepare(log, i, 3).half_id for i in range(4)]
    large = prepare(log, 4, 20).half_id
    found = {half_id: log.engine.ledger.open_batch(half_id) for half_id in half_ids}
    assert [log.engine.ledger.open_batch(h) is found[h] for h in reversed(half_ids)] == [True, True, False, False]
    kept = log.engine.ledger.open_batch(large)
    assert log.engine.ledger.open_batch(large) is kept
