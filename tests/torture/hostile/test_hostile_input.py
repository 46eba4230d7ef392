"""Hostile input, in short: every door of ``tests.torture.hostile`` some thousand times, from one seed."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from tests.torture.hostile.cases import DOORS, play, try_case

SEED = 1
CASES = {
    "source options": 2500,
    "sink options": 2500,
    "durations and numbers": 2500,
    "names": 2000,
    "tag selectors": 1500,
    "offsets": 2500,
    "messages": 3000,
    "JSON bodies": 700,
    "listener paths": 1500,
    "configuration files": 500,
    "check settings": 500,
    "log arguments": 500,
    "columns": 1500,
    "sends": 80,
    "verdicts": 400,
    "checkpoint offsets": 300,
    "edited op rows": 80,
    "edited half rows": 40,
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_every_door_is_tried() -> None:
    assert set(CASES) == set(DOORS)


@pytest.mark.parametrize("door", CASES)
def test_input_is_accepted_and_kept_or_refused_in_words(door: str) -> None:
    counts: Counter[str] = Counter()
    failures = [f for number in range(CASES[door]) if (f := try_case(SEED, door, number, counts))]
    assert not failures, "\n".join(map(str, failures[:5]))
    accepted = counts[f"{door}: accepted"]
    assert accepted > 0, "nothing was accepted: the door was never really tried"
    assert door in ("edited half rows",) or accepted < CASES[door], "nothing was refused: the input was not hostile"


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
    ],
)
def test_a_case_that_failed_once_is_played_again_from_its_number(seed: int, door: str, number: int) -> None:
    assert play(seed, door, number) == play(seed, door, number)
