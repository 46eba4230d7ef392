"""Small plays of one rule each: more seeds in a second than the simulation has in a minute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.seeds import first_seed
from tests.torture.judge.anomalies import Anomaly
from tests.torture.simulate.clock_play import play_clocks
from tests.torture.simulate.fifo_play import play_fifo
from tests.torture.simulate.mark_play import play_marks
from tests.torture.simulate.retry_play import play_retries
from tests.torture.simulate.sleeper_play import play_sleepers
from tests.torture.simulate.upkeep_play import play_upkeep

PLAYS = (play_fifo, play_marks, play_clocks, play_sleepers, play_retries, play_upkeep)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("part", "seeds"), [(0, 1), *(pytest.param(n, 50, marks=pytest.mark.long) for n in range(6))])
@pytest.mark.parametrize("play", PLAYS)
def test_no_play_shows_an_anomaly(play: Callable[[int], list[Anomaly]], part: int, seeds: int) -> None:
    first = first_seed() + part * seeds
    shown = {seed: found for seed in range(first, first + seeds) if (found := play(seed))}
    assert not shown
