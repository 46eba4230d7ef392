"""Runs the demo from beginning to end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from examples.grocer import baskets, orders
from examples.grocer.kill import Kill, Point
from examples.grocer.processes import Child, ChildFailed
from examples.grocer.proof import Proof, load, read_kills
from examples.grocer.settings import PRODUCER_GROUP, TOPICS, Folder
from examples.grocer.show import Bar, Show
from examples.grocer.stream import LISTENER
from rmq_spark import CommitLog

SETTLE_S_MAX = 60.0
CHECK_CONFIG = """\
# Written by the demo: the check job's settings, more impatient than RocketMQ's own.
path = {path}
listener_modules = ["examples.grocer"]

[listeners]
{group} = "{listener}"

[check]
transactionTimeout = "1s"
"""


@dataclass(frozen=True)
class Death:
    """A kill, and who settles the half batch that it leaves open."""

    kill: Kill
    checker: bool
    """True when the check job settles it while no driver runs. False when the next driver settles it by a replay."""

    @property
    def what_comes(self) -> str:
        """What the next driver does with the half batch, in words."""
        if self.kill.point is Point.WORKING:
            return "was rolled back by the check for good, so it runs, as attempt 2"
        if self.checker:
            return "is decided already"
        return "is replayed: its orders are asked for, not written again"


def deaths(batches: int) -> tuple[Death, ...]:
    """Return the three deaths: after a quarter, a half and three quarters of the stream."""
    return (
        Death(Kill(Point.COMMITTED, batches // 4), checker=False),
        Death(Kill(Point.COMMITTED, batches // 2), checker=True),
        Death(Kill(Point.WORKING, batches * 3 // 4), checker=True),
    )


@dataclass
class Story:
    """One run of the demo in a folder."""

    folder: Folder
    show: Show
    rows: int | None
    input: baskets.Input = field(init=False)
    stream_s: float = 0.0

    def tell(self) -> Proof:
        """Run everything, and return the proof, which says whether everything agrees."""
        self.set_up()
        plan = deaths(len(self.input.baskets_per_file))
        started = time.monotonic()
        with self.show.bar(self.input.baskets) as bar:
            opening = "the stream starts"
            for death in plan:
                self.show.phase(opening)
                self.stream_until_killed(death.kill, bar)
                self.show.pending("after the kill", self.pending())
                if death.checker:
                    self.settle()
                opening = f"the stream again: micro-batch {death.kill.batch_id} {death.what_comes}"
            self.show.phase(opening)
            self.stream_to_the_end(bar)
        self.stream_s = time.monotonic() - started
        proof = self.prove()
        self.show.result(proof, len(plan), self.input.lines, self.stream_s)
        return proof

    def set_up(self) -> None:
        """Make the input files, an empty commit log with its topics, and an empty order database with its fence."""
        self.show.phase("the data set, as input files of the stream")
        self.input = baskets.write_input(self.folder.input, self.rows)
        self.show.note(
            f"{self.input.lines:,} lines of {self.input.baskets:,} baskets, "
            f"{len(self.input.baskets_per_file)} micro-batches; "
            f"{self.input.zero_lines:,} lines have quantity zero, in {self.input.refusable:,} baskets"
        )
        log = CommitLog.create(str(self.folder.log))
        for topic in TOPICS:
            log.create_topic(topic)
        orders.create_database(self.folder)
        self.folder.check_config.write_text(check_config(self.folder), encoding="utf-8")

    # ------------------------------------------------------------------ the stream and its ends
    def stream_until_killed(self, kill: Kill, bar: Bar) -> None:
        """Run the driver until it dies as planned, and require that none of its processes is left."""
        before = len(read_kills(self.folder))
        with self._driver(kill) as child:
            code = child.wait(lambda: self._progress(bar))
            if code == 0 or len(read_kills(self.folder)) == before:
                child.require_success(code or 1)
            survivors = child.survivors()
        if survivors:
            raise ChildFailed(f"processes {survivors} of the killed driver live on")
        self.show.kill(read_kills(self.folder)[-1])

    def stream_to_the_end(self, bar: Bar) -> None:
        with self._driver(None) as child:
            child.require_success(child.wait(lambda: self._progress(bar)))
        self.show.pending("at the end", self.pending())

    def _driver(self, kill: Kill | None) -> Child:
        return Child(self.folder, "examples.grocer.stream", kill=kill)

    def _progress(self, bar: Bar) -> None:
        bar.at(self.input.baskets_in(self.folder.batches_done()))

    # ------------------------------------------------------------------ the checker
    def pending(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = CommitLog.open(str(self.folder.log)).pending().to_pylist()
        return rows

    def settle(self) -> None:
        """Run rounds of the check job until nothing is pending, while no driver lives."""
        self.show.phase("the check service, while no driver runs")
        deadline = time.monotonic() + SETTLE_S_MAX
        rounds = 0
        while self.pending():
            if time.monotonic() > deadline:
                raise ChildFailed(f"the check service left half batches pending for {SETTLE_S_MAX:.0f} s")
            with self._checker() as child:
                child.require_success(child.wait())
            rounds += 1
        self.show.pending(f"after {rounds} round{'s' * (rounds > 1)} of checks", self.pending())

    def _checker(self) -> Child:
        return Child(self.folder, "rmq_spark.checks.job", "--config", str(self.folder.check_config), "--once")

    # ------------------------------------------------------------------ the proof
    def prove(self) -> Proof:
        self.show.phase("the proof: data set, order database and topics compared")
        with Child(self.folder, "examples.grocer.proof") as child:
            child.require_success(child.wait())
        return load(self.folder)


def check_config(folder: Folder) -> str:
    """Return the text of the check job's configuration file."""
    return CHECK_CONFIG.format(path=json.dumps(str(folder.log)), group=PRODUCER_GROUP, listener=LISTENER)
