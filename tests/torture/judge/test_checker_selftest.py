"""Every seeded bug is caught as what it is, and the same seeds without it show nothing.

The first seed is always 1: a seeded bug is a known case. ``make checker-selftest SEED=n`` hunts from another one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.torture.judge.anomalies import FAMILIES, AnomalyKind
from tests.torture.judge.mutants import MUTANTS
from tests.torture.judge.selftest import ONE_OF_A_FAMILY, catch

NAMES = [m.name for m in MUTANTS]
SLOW_FAMILIES = {"leaving"}
OTHERS = [name for name in NAMES if name not in ONE_OF_A_FAMILY.values()]


def test_there_are_at_least_forty_mutants_with_names_of_their_own() -> None:
    assert len(MUTANTS) >= 40
    assert len(set(NAMES)) == len(MUTANTS)
    assert all(m.expected <= set(AnomalyKind) for m in MUTANTS)


def test_each_kind_of_anomaly_is_in_one_family_and_each_family_has_a_mutant() -> None:
    assert sorted(kind for kinds in FAMILIES.values() for kind in kinds) == sorted(AnomalyKind)
    assert set(ONE_OF_A_FAMILY) == set(FAMILIES)
    assert set(ONE_OF_A_FAMILY.values()) <= set(NAMES)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.long if f in SLOW_FAMILIES else ()) for f in FAMILIES]
)
def test_a_mutant_of_each_family_is_caught_as_a_kind_of_it_and_its_control_is_not(family: str) -> None:
    found = catch(NAMES.index(ONE_OF_A_FAMILY[family]), among=FAMILIES[family])
    assert found.caught, found.found
    assert AnomalyKind(found.found) in FAMILIES[family]
    assert found.control == ""


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_mutant_is_caught_and_its_control_is_not(name: str) -> None:
    found = catch(NAMES.index(name))
    assert found.caught, found.found
    assert found.control == ""


def test_the_page_of_the_proof_counts_the_seeded_bugs() -> None:
    text = Path("tests/torture/README.md").read_text()
    assert set(re.findall(r"\b(?:all (\d+)\b|(\d+) seeded bugs)", text)) == {
        (str(len(NAMES)), ""),
        ("", str(len(NAMES))),
    }
