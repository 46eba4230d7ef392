"""Hostile input, in short: every door of ``tests.torture.hostile``, from the seed of this run."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.support.seeds import ALL, first_seed, how_many
from tests.torture.hostile.cases import DOORS, play, try_case

CASES = {
    "source options": how_many(220, 2500),
    "sink options": how_many(150, 2500),
    "durations and numbers": how_many(180, 2500),
    "names": how_many(100, 2000),
    "tag selectors": how_many(200, 1500),
    "offsets": how_many(100, 2500),
    "messages": how_many(110, 3000),
    "JSON bodies": how_many(160, 700),
    "listener paths": how_many(60, 3000),
    "configuration files": how_many(100, 500),
    "check settings": how_many(260, 500),
    "log arguments": how_many(60, 1000),
    "edges of arguments": how_many(100, 3000),
    "columns": how_many(80, 1500),
    "sends": how_many(22, 120),
    "verdicts": how_many(120, 400),
    "checkpoint offsets": how_many(60, 300),
    "edited op rows": how_many(5, 80),
    "edited half rows": how_many(3, 40),
}
SELDOM_ACCEPTED = {"durations and numbers", "listener paths", "configuration files", "log arguments", "sends"}
SELDOM_REFUSED = {"edited op rows"}
"""Doors whose few quick cases may all end alike; the many of ``make test-all`` do not."""
NEVER_REFUSED = {"edited half rows"}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    caplog.set_level(logging.CRITICAL, "rmq_spark")  # another test may have given it a level of its own


def test_every_door_is_tried() -> None:
    assert set(CASES) == set(DOORS)


@pytest.mark.parametrize("door", CASES)
def test_input_is_accepted_and_kept_or_refused_in_words(door: str) -> None:
    counts: Counter[str] = Counter()
    failures = [f for number in range(CASES[door]) if (f := try_case(first_seed(), door, number, counts))]
    assert not failures, "\n".join(map(str, failures[:5]))
    accepted = counts[f"{door}: accepted"]
    if ALL or door not in SELDOM_ACCEPTED:
        assert accepted > 0, "nothing was accepted: the door was never really tried"
    if door not in NEVER_REFUSED and (ALL or door not in SELDOM_REFUSED):
        assert accepted < CASES[door], "nothing was refused: the input was not hostile"


@pytest.mark.parametrize(
    ("seed", "door", "number"),
    [
        (1, "durations and numbers", 129),
        (1, "messages", 13),
        (1, "messages", 24),
        (1, "messages", 85),
        (1, "JSON bodies", 3),
        (1, "log arguments", 19),
        (1, "verdicts", 53),
        (1, "checkpoint offsets", 7),
        (1, "edited op rows", 22),
        (1, "edited op rows", 46),
        (11, "edited op rows", 156),
        (210060073, "edited op rows", 9),
        (778, "edited half rows", 16),
        (110754601, "edited half rows", 4),
        (238055324, "sends", 12),
    ],
)
def test_a_case_that_failed_once_is_played_again_from_its_number(seed: int, door: str, number: int) -> None:
    assert play(seed, door, number) == play(seed, door, number)
