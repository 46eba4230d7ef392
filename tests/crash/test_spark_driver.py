"""Spark drivers killed with SIGKILL at every point of the protocol: the next run makes all agree.

One driver runs four streams: transactions per batch, message and key through format("txmq"), and per key through
foreachBatch. All of them stop at the point, each in the same micro-batch; then the whole driver is killed. The next
driver settles that micro-batch, and dies at the next point in the next one: a driver takes long to start, so the cases
are one story, and each test looks at its part of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from dying import POINTS
from processes import Program
from shop import ROWS, STREAMS, accepted, assert_agreement, check, open_shop, orders, visible

CASES = [(point, 1) for point in POINTS] + [(point, 2) for point in ("prepared", "executed", "decided")]
"""The point, and the attempt: the second one is a batch that a check rolled back after its driver had died."""
EXECUTED = ("executed", "decided", "before Spark's commit")
DECIDED = ("decided", "before Spark's commit")


@dataclass
class Snapshot:
    """What the database and a reader have after a driver's death, by stream."""

    orders: dict[str, Counter[str]]
    visible: dict[str, Counter[str]]


class Story:
    """Goes on as far as a test needs. Case ``i`` dies in micro-batch ``i + 1``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._snapshots: list[Snapshot] = []
        open_shop(root, batches=len(CASES) + 2)

    def snapshot(self, case: int) -> Snapshot:
        """After the death of this case; the one behind the last case is after the end of all input."""
        while len(self._snapshots) <= case:
            self._next(len(self._snapshots))
        return self._snapshots[case]

    def _next(self, case: int) -> None:
        if case < len(CASES):
            point, attempt = CASES[case]
            if attempt == 2:
                self._die("prepared", case + 1, 1)
                for name in STREAMS:
                    assert check(self.root, name).rolled_back.messages == ROWS
            self._die(point, case + 1, attempt)
        else:
            Program("driver.py", self.root, *STREAMS, DIE_ROOT=str(self.root)).finish()
        self._snapshots.append(
            Snapshot(
                {name: orders(self.root, name) for name in STREAMS},
                {name: visible(self.root, name) for name in STREAMS},
            )
        )

    def _die(self, point: str, batch: int, attempt: int) -> None:
        at = {"DIE_AT": point, "DIE_BATCH": str(batch), "DIE_ATTEMPT": str(attempt)}
        driver = Program("driver.py", self.root, *STREAMS, DIE_ROOT=str(self.root), **at)
        driver.wait_for(*STREAMS)
        driver.kill()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story") / "shop")


def of_batches(counter: Counter[str], batches: range) -> Counter[str]:
    return Counter({n: times for n, times in counter.items() if int(n) // ROWS in batches})


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{point}, attempt {n}" for point, n in CASES])
def test_a_driver_killed_at_a_point_loses_and_doubles_nothing(story: Story, case: int, name: str) -> None:
    per, batch, (point, _) = STREAMS[name], case + 1, CASES[case]
    before, through = range(batch), range(batch + 1)

    killed = story.snapshot(case)  # the point was the right one, and all before it agrees
    assert killed.orders[name] == accepted(per, through if point in EXECUTED else before)
    assert killed.visible[name] == accepted(per, through if point in DECIDED else before)

    settled = story.snapshot(case + 1)
    assert of_batches(settled.orders[name], through) == accepted(per, through)
    assert of_batches(settled.visible[name], through) == accepted(per, through)


@pytest.mark.parametrize("name", STREAMS)
def test_after_all_deaths_every_order_is_in_the_database_and_visible_once(story: Story, name: str) -> None:
    story.snapshot(len(CASES))
    assert_agreement(story.root, name)
    check(story.root, name)
    assert_agreement(story.root, name)
