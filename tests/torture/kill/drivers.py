"""Real Spark drivers and their workers, killed again and again over one shop: the long form of ``tests/crash``.

A driver runs four streams to the end of the input. It is killed when all of them have come to a point of the protocol,
or when a worker has died while it wrote, or at any moment. Then there is more input, and the next driver goes on. Now
and then a check comes in between, so that the next driver finds its batch rolled back. In the end the shop's databases
and the visible messages agree.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.crash.processes import Program, kill_driver_at, start_driver
from tests.crash.shop import STREAMS, add_input, assert_agreement, batches_in, check, open_shop
from tests.torture.kill.points import SINK, WORKER, Fate

KILLS_A_SHOP = 12
CHECKED = 0.4
"""How often a check comes between a driver's death and the next driver."""
ANY_MOMENT_S = (4.0, 20.0)


class Drivers:
    """One shop and its drivers' deaths."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.chance = random.Random(seed)
        self.kills: Counter[str] = Counter()
        open_shop(root, batches=1)

    def die(self) -> None:
        """One more driver, one more death. What it finds open it settles before it comes to the newest batch."""
        batch = len(batches_in(self.root)) - 1
        kind = self.chance.random()
        if kind < 0.7:
            self._die_at(self.chance.choice(SINK), batch)
        elif kind < 0.85:
            self._worker_dies(self.chance.choice(WORKER))
        else:
            driver = start_driver(self.root, *STREAMS)
            time.sleep(self.chance.uniform(*ANY_MOMENT_S))
            driver.kill()
            self.kills["anywhere"] += 1
        if self.chance.random() < CHECKED:
            for name in STREAMS:
                check(self.root, name)
        add_input(self.root, 1)

    def _die_at(self, point: str, batch: int) -> None:
        kill_driver_at(point, batch, 1, self.root, *STREAMS)
        self.kills[point] += 1
        if point == "prepared":
            for name in STREAMS:
                check(self.root, name)
            second = self.chance.choice(["prepared", "executed", "decided"])
            kill_driver_at(second, batch, 2, self.root, *STREAMS)
            self.kills[f"{second}, attempt 2"] += 1

    def _worker_dies(self, point: str) -> None:
        driver = start_driver(self.root, *STREAMS, fate=Fate(point), tries=self.chance.choice([1, 3]))
        driver.end()
        assert (driver.reached / point).exists(), driver.text()[-3000:]
        (driver.reached / point).unlink()
        self.kills[f"worker: {point}"] += 1

    def finish(self) -> None:
        """A driver that lives to the end of the input: all agrees."""
        start_driver(self.root, *STREAMS).finish()
        for name in STREAMS:
            assert_agreement(self.root, name)


def run(seconds: float, seed: int, kills: int = 100) -> dict[str, int | str | list[str]]:
    """Shops of some deaths each until the kills or the time are used up; a failed one's folder stays."""
    end = time.monotonic() + seconds
    total: Counter[str] = Counter()
    failures: list[str] = []
    shops = 0
    while time.monotonic() < end and sum(total.values()) < kills and not failures:
        root = Path(tempfile.mkdtemp(prefix=f"txmq_drivers_{seed + shops}_"))
        drivers = Drivers(root / "shop", seed + shops)
        shops += 1
        try:
            while time.monotonic() < end and sum(total.values()) < kills and sum(drivers.kills.values()) < KILLS_A_SHOP:
                before = drivers.kills.copy()
                drivers.die()
                total.update(drivers.kills - before)
                print(f"drivers: {sum(total.values())} kills", flush=True)
            drivers.finish()
        except AssertionError as problem:
            failures.append(f"seed {seed + shops - 1}, folder {root}: {problem}")
        finally:
            Program.kill_all()
        if not failures:
            shutil.rmtree(root)
    return {
        "kills": sum(total.values()),
        "shops": shops,
        "points": ", ".join(f"{p} {n}" for p, n in sorted(total.items())),
        "failures": failures,
    }


if __name__ == "__main__":
    print(run(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
