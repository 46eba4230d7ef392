"""Offsets and times in options and checkpoints: what they mean, and what each wrong one is told."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_spark._core.reads.offsets import CountedPositions, first_begin, resolve
from rmq_spark.errors import OffsetError, OffsetOutOfRangeError, OptionError
from tests.support.inside import from_checkpoint, from_json, parse_offsets, parse_timestamp, to_json

BOTH = ("earliest", "latest")
MARKS = (-2, -1)
QUEUES = {"orders": 2, "carts": 1}
TAILS = {("orders", 0): 10, ("carts", 0): 4}
PAST_THE_END = {("orders", 0): 11, ("orders", 1): 0, ("carts", 0): 0}


def parse(text: str) -> object:
    return parse_offsets(text, "startingOffsets", BOTH, MARKS)


def test_keywords_are_taken_in_any_case_and_json_offsets_as_spark_writes_them() -> None:
    assert (parse(" Earliest "), parse("latest")) == ("earliest", "latest")
    found = parse('{"orders": {"0": 23, "1": -1}, "carts": {"0": -2}}')
    assert found == {("orders", 0): 23, ("orders", 1): -1, ("carts", 0): -2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither 'earliest' nor 'latest' nor JSON"),
        ("latests", "did you mean 'latest'"),
        ('{"orders": {"0": 23}', "nor JSON"),
        ("[1]", "is not of the form"),
        ("3", "is not of the form"),
        ('{"orders": 3}', "is not of the form"),
        ('{"orders": {"first": 3}}', "queue 'first'"),
        ('{"orders": {"-1": 3}}', "queue '-1'"),
        ('{"orders": {"01": 3}}', "queue '01'"),
        ('{"orders": {"0": "3"}}', "a whole number is expected"),
        ('{"orders": {"0": 3.0}}', "a whole number is expected"),
        ('{"orders": {"0": true}}', "a whole number is expected"),
        ('{"orders": {"0": null}}', "a whole number is expected"),
        ('{"orders": {"0": -3}}', "has -3 for topic 'orders', queue 0"),
        ('{"orders": {"0": 1, "0": 2}}', "'0' stands there twice"),
        ("[" * 100_000, "nor JSON"),
    ],
)
def test_malformed_offsets_are_refused(text: str, words: str) -> None:
    with pytest.raises(OffsetError, match=words):
        parse(text)


@pytest.mark.parametrize("begin", [["orders"], {"orders": 3}, {"[1": 3}, {'["orders", "first"]': 3}])
def test_a_begin_that_no_stream_wrote_is_refused(begin: object) -> None:
    with pytest.raises(OffsetError, match="the checkpoint"):
        first_begin({"@begin": begin}, "the checkpoint")


def test_marks_and_keywords_are_refused_where_kafka_refuses_them() -> None:
    with pytest.raises(OffsetError, match="'latest' cannot be used here"):
        parse_offsets("latest", "startingOffsets", ("earliest",), (-2,))
    with pytest.raises(OffsetError, match=r"has -1 .*: at least 0 is expected, or -2 for earliest$"):
        parse_offsets('{"orders": {"0": -1}}', "startingOffsets", ("earliest",), (-2,))
    with pytest.raises(OffsetError, match=r"has -2 .*: at least 0 is expected, or -1 for latest$"):
        parse_offsets('{"orders": {"0": -2}}', "endingOffsets", ("latest",), (-1,))


def test_keywords_and_marks_resolve_to_the_ends_of_every_queue() -> None:
    assert resolve("o", "earliest", QUEUES, TAILS) == {("orders", 0): 0, ("orders", 1): 0, ("carts", 0): 0}
    assert resolve("o", "latest", QUEUES, TAILS) == {("orders", 0): 10, ("orders", 1): 0, ("carts", 0): 4}
    marked = {("orders", 0): -1, ("orders", 1): -1, ("carts", 0): -2}
    assert resolve("o", marked, QUEUES, TAILS) == {("orders", 0): 10, ("orders", 1): 0, ("carts", 0): 0}
    exact = {("orders", 0): 10, ("orders", 1): 0, ("carts", 0): 3}
    assert resolve("o", exact, QUEUES, TAILS) == exact


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        ({("order", 0): 1}, OffsetError, "did you mean 'orders'"),
        ({("orders", 2): 1}, OffsetError, "has the queues 0 to 1"),
        ({("orders", 0): 1, ("orders", 1): 0}, OffsetError, "leaves out queue 0 of topic 'carts'"),
        (PAST_THE_END, OffsetOutOfRangeError, "has 11 for topic 'orders', queue 0: past its end, which is 10"),
    ],
)
def test_offsets_of_unknown_or_left_out_queues_and_past_the_end_are_refused(
    positions: dict[tuple[str, int], int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolve("startingOffsets", positions, QUEUES, TAILS)


@given(st.dictionaries(st.tuples(st.text(min_size=1, max_size=3), st.integers(0, 1023)), st.integers(0, 2**62)))
def test_positions_survive_json_and_stand_in_one_order(positions: dict[tuple[str, int], int]) -> None:
    value = to_json(positions)
    assert from_json(value, "the checkpoint") == positions
    assert str(value) == str(to_json(dict(reversed(positions.items()))))
    assert from_checkpoint(to_json(positions, log_id="a log")) == (positions, {}, "a log")


def test_offsets_of_a_progress_report_are_taken_as_an_option() -> None:
    reported = to_json({("orders", 0): 3}, {("orders", 0): (1, datetime.now(timezone.utc))}, "a log")
    found = parse(json.dumps(reported))
    assert isinstance(found, CountedPositions)
    assert (found, found.log_id) == ({("orders", 0): 3}, "a log")
    with pytest.raises(OffsetError, match="is null, as the start of a stream's first batch is: use 'earliest'"):
        parse("null")


@pytest.mark.parametrize("text", ["2025-03-01T08:00:00Z", "2025-03-01T09:00:00+01:00", " 1740816000000 "])
def test_times_with_a_zone_and_epoch_milliseconds_are_taken(text: str) -> None:
    assert parse_timestamp(text, "startingTimestamp") == datetime(2025, 3, 1, 8, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2025-03-01T08:00:00", "no time zone"),
        ("2025-03-01", "no time zone"),
        ("1740816000", "are they seconds"),
        ("yesterday", "is not a time"),
        ("", "is not a time"),
        ("9" * 30, "is not a time"),
        ("9" * 5_000, "is not a time"),
        ("253402300799000", "is out of range"),
        ("-1740816000000", "is not a time"),
    ],
)
def test_times_that_would_be_a_guess_are_refused(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_timestamp(text, "startingTimestamp")
