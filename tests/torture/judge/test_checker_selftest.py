"""Every seeded bug is caught as what it is, and the same seeds without it show nothing."""

from __future__ import annotations

import pytest

from tests.torture.judge.anomalies import AnomalyKind
from tests.torture.judge.mutants import MUTANTS
from tests.torture.judge.selftest import catch

NAMES = [m.name for m in MUTANTS]


def test_there_are_at_least_twenty_five_mutants_with_names_of_their_own() -> None:
    assert len(MUTANTS) >= 25
    assert len(set(NAMES)) == len(MUTANTS)
    assert all(m.expected <= set(AnomalyKind) for m in MUTANTS)


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=NAMES)
def test_the_mutant_is_caught_and_its_control_is_not(number: int) -> None:
    found = catch(number)
    assert found.caught, found.found
    assert found.control == ""
