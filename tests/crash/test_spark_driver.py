"""Spark drivers killed with SIGKILL at points of the protocol: the next driver makes all agree.

One driver runs several streams of a shop. All of them stop at the point, each in the same micro-batch; then the whole
driver is killed. The next driver settles that micro-batch, and dies at the next point in the next micro-batch. A driver
takes long to start, so the deaths are one story.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.processes import kill_driver_at, start_driver
from tests.crash.shop import ROWS, STREAMS, accepted, assert_agreement, check, open_shop, orders, visible
from tests.torture.kill.points import SINK

Case = tuple[str, int]
"""The point of a death, and the attempt: the second one is of a batch that a check rolled back after a first death."""

SHORT: list[Case] = [(point, 1) for point in ("executed",)]
WHOLE: list[Case] = [(point, 1) for point in SINK] + [(point, 2) for point in ("prepared", "executed", "decided")]
EXECUTED = ("executed", "decided", "sent")
DECIDED = ("decided", "sent")


@dataclass
class Snapshot:
    """What the database and a reader have after a driver's death, by stream."""

    orders: dict[str, Counter[str]]
    visible: dict[str, Counter[str]]


class Story:
    """Goes on as far as a test needs. Case ``i`` dies in micro-batch ``first + i``; after the last a driver lives."""

    def __init__(self, root: Path, streams: Sequence[str], cases: Sequence[Case], first: int) -> None:
        self.root, self.streams, self.cases, self.first = root, streams, cases, first
        self._snapshots: list[Snapshot] = []
        open_shop(root, streams, batches=len(cases) + 2 * first)

    def assert_settled(self, case: int, name: str) -> None:
        """The driver died at the point and nowhere else, and the next driver made this stream agree."""
        point, _ = self.cases[case]
        per, before, through = STREAMS[name], range(case + self.first), range(case + self.first + 1)
        killed = self._snapshot(case)
        assert killed.orders[name] == accepted(per, through if point in EXECUTED else before)
        assert killed.visible[name] == accepted(per, through if point in DECIDED else before)
        settled = self._snapshot(case + 1)
        assert of_batches(settled.orders[name], through) == accepted(per, through)
        assert of_batches(settled.visible[name], through) == accepted(per, through)

    def assert_end(self, name: str) -> None:
        """Every order is in the database and visible once, and a check changes nothing."""
        self._snapshot(len(self.cases))
        assert_agreement(self.root, name)
        check(self.root, name)
        assert_agreement(self.root, name)

    def _snapshot(self, case: int) -> Snapshot:
        """After the death of this case; the one behind the last case is after the end of all input."""
        while len(self._snapshots) <= case:
            self._next(len(self._snapshots))
        return self._snapshots[case]

    def _next(self, case: int) -> None:
        if case < len(self.cases):
            point, attempt = self.cases[case]
            if attempt == 2:
                kill_driver_at("prepared", case + self.first, 1, self.root, *self.streams)
                for name in self.streams:
                    assert check(self.root, name).rolled_back.messages == ROWS
            kill_driver_at(point, case + self.first, attempt, self.root, *self.streams)
        else:
            start_driver(self.root, *self.streams).finish()
        self._snapshots.append(
            Snapshot(
                {name: orders(self.root, name) for name in self.streams},
                {name: visible(self.root, name) for name in self.streams},
            )
        )


def of_batches(counter: Counter[str], batches: range) -> Counter[str]:
    return Counter({n: times for n, times in counter.items() if int(n) // ROWS in batches})


def test_a_driver_killed_after_each_step_loses_and_doubles_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path / "shop", ["key", "foreach"], SHORT, first=0)
    for name in story.streams:
        for case in range(len(SHORT)):
            story.assert_settled(case, name)
        story.assert_end(name)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Transactions per batch, message and key through format("txmq"), and per key through foreachBatch."""
    return Story(tmp_path_factory.mktemp("story") / "shop", list(STREAMS), WHOLE, first=1)


@pytest.mark.long
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("case", range(len(WHOLE)), ids=[f"{point}, attempt {n}" for point, n in WHOLE])
def test_a_driver_killed_at_a_point_loses_and_doubles_nothing(story: Story, case: int, name: str) -> None:
    story.assert_settled(case, name)


@pytest.mark.long
@pytest.mark.parametrize("name", STREAMS)
def test_after_all_deaths_every_order_is_in_the_database_and_visible_once(story: Story, name: str) -> None:
    story.assert_end(name)
