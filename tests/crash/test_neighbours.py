"""Programs that share commits, of which some are killed and some stand still."""

from __future__ import annotations

import random
import signal
import time
from itertools import count
from pathlib import Path

import pytest

from tests.crash.neighbours import STREAM
from tests.crash.processes import Program, wait_until
from tests.crash.shop import assert_agreement, check, is_refused, open_shop, orders, visible
from tests.seeds import first_seed

PROGRAMS = 3
SHARES = "makes the commits of this one"
STANDS_STILL_S = 2.0
"""Longer than the others wait for an answer."""


def told(root: Path) -> dict[str, str]:
    """What the programs were told of their orders."""
    lines = [line for file in root.glob("told-*") for line in file.read_text().splitlines()]
    return dict(line.split() for line in lines if len(line.split()) == 2)


@pytest.mark.parametrize("faults", [4, pytest.param(24, marks=pytest.mark.long)])
def test_neighbours_that_are_killed_or_stand_still_lose_and_double_nothing(tmp_path: Path, faults: int) -> None:
    chance = random.Random(f"{first_seed()}/{faults}")
    open_shop(tmp_path, [STREAM], batches=0)
    numbers = count()
    everyone = [Program("neighbours", tmp_path, str(next(numbers))) for _ in range(PROGRAMS)]
    running = list(everyone)

    for fault in range(faults):
        seen = len(told(tmp_path))
        wait_until(lambda seen=seen: len(told(tmp_path)) > seen + 10 * PROGRAMS, "orders that were told of")
        victim = chance.choice(running)
        if fault % 2:
            victim.signal(signal.SIGSTOP)
            time.sleep(STANDS_STILL_S)
            victim.signal(signal.SIGCONT)
        else:
            victim.kill()
            running.remove(victim)
            running.append(Program("neighbours", tmp_path, str(next(numbers))))
            everyone.append(running[-1])
    for program in running:
        program.kill()
    assert any(SHARES in program.text() for program in everyone), "nobody committed for another one"
    check(tmp_path, STREAM)
    seen = visible(tmp_path, STREAM)
    assert_agreement(tmp_path, STREAM, orders(tmp_path, STREAM))
    assert set(seen.values()) == {1}
    for order, verdict in told(tmp_path).items():
        assert verdict == ("ROLLBACK_MESSAGE" if is_refused(int(order), STREAM) else "COMMIT_MESSAGE")
        assert (order in seen) == (verdict == "COMMIT_MESSAGE")
