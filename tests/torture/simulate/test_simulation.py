"""Seeds of the simulation show nothing, are the same whenever they are played, and misbehave as they should."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_spark.errors import LostCommitError
from tests.support.inside import OP_SCHEMA, Change
from tests.support.seeds import first_seed, how_many
from tests.torture.judge.history import History
from tests.torture.simulate.scheduler import Crash, NoEnd, Process, Scheduler, SimulatedEvent, SimulatedLock
from tests.torture.simulate.simulation import Scenario, Simulation, run, simulate
from tests.torture.simulate.store import Files, SimulatedTable, Unanswered, Weather
from tests.torture.simulate.world import SimulatedMachine

SEEDS = how_many(quick=36, in_all=20_000)
PARTS = how_many(quick=1, in_all=20)
PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Beside a worker of pytest there is another one, and they share two cores."""

DIGEST = """
import hashlib, logging
logging.disable(logging.CRITICAL)
from tests.torture.simulate.world import SimulatedMachine
from tests.torture.simulate.simulation import simulate
lines = [e.to_json() for seed in range({first}, {last}) for e in simulate(seed).history]
print(len(lines), hashlib.blake2b("\\n".join(lines).encode()).hexdigest())
"""


# ---------------------------------------------------------------- seeds
@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_shows_an_anomaly(part: int) -> None:
    size = SEEDS // PARTS
    report = run(seconds=float("inf"), seed=first_seed() + part * size, count=size, processes=PROCESSES)
    assert report["failures"] == []
    assert report["seeds"] == size
    # Enough went wrong on the way for that to mean something.
    for fault in (
        "crashes",
        "pauses",
        "Unanswered",
        "LocalTransactionError",
        "move",
        "merge",
        "clean up",
        "shared handles",
        "wrong clocks",
        "jobs",
        "tasks started again",
        "late tasks",
    ):
        assert int(str(report.get(fault, 0))) >= size // 250, fault


def test_what_expired_was_not_seen_before_it_was_placed() -> None:
    """The judge noted it for a reader with an older version of ``op`` than the one that told the first offsets."""
    assert simulate(124_915_946).anomalies == []


def test_an_older_version_of_messages_has_nothing_of_what_was_drained_later_and_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(1)
    ever = pa.table({"topic": ["orders"] * 2, "queue_id": [0, 0], "queue_offset": [0, 1], "op_version": [3, 7]})
    monkeypatch.setattr(simulation.world.messages, "ever", lambda: ever)
    for drained, expected in ((-1, []), (3, [0]), (None, [0, 1])):
        found = simulation.with_expired({("orders", 0): 2}, ever.slice(0, 0), drained=drained)
        assert found["queue_offset"].to_pylist() == expected


@pytest.mark.long
def test_the_same_seed_is_the_same_history_in_every_process() -> None:
    """Also where Python's hashes are others, so that no set's order decides anything, and where threads share a log, or
    executors run parts."""
    scenarios = [Scenario.draw(random.Random(seed)) for seed in range(1, 16)]
    assert max(scenario.threads for scenario in scenarios) > 1
    assert max(scenario.parts for scenario in scenarios) > 1
    found = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST.format(first=1, last=16)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert int(found.pop().split()[0]) > 300


def test_another_seed_is_another_history() -> None:
    scenario = Scenario(batches=2, rows=2, crash=0.02)
    histories = [[str(e) for e in simulate(seed, scenario).history] for seed in (1, 2)]
    assert histories[0] != histories[1]


# ---------------------------------------------------------------- the store
def table(weather: Weather) -> SimulatedTable:
    scheduler = Scheduler(random.Random(1))
    return SimulatedTable("op", OP_SCHEMA, scheduler, weather, History(), SimulatedMachine(scheduler), Files())


def change(of: SimulatedTable) -> Change:
    return Change(add=[of.write(OP_SCHEMA.empty_table())])


def append(to: SimulatedTable) -> bool:
    to.refresh()
    return to.try_commit(change(to))


def test_a_version_is_put_once() -> None:
    one = table(Weather())
    other = one.another()
    for handle in (one, other):
        handle.refresh()
    assert one.try_commit(change(one))
    assert not other.try_commit(change(other))
    assert other.refresh() == 1


@pytest.mark.parametrize(
    ("weather", "lands"),
    [(Weather(lost_ack=1.0), True), (Weather(failure=1.0), False)],
)
def test_an_error_of_unknown_outcome_may_hide_a_commit(weather: Weather, lands: bool) -> None:
    handle = table(weather)
    with pytest.raises(Unanswered):
        append(handle)
    assert handle.refresh() == int(lands)


@pytest.mark.parametrize(("weather", "lands"), [(Weather(own_race=1.0), True), (Weather(false_race=1.0), False)])
def test_a_lost_race_may_be_ones_own_or_none(weather: Weather, lands: bool) -> None:
    handle = table(weather)
    assert append(handle) is False
    assert handle.refresh() == int(lands)


def test_a_commit_may_land_after_it_was_given_up_when_its_version_is_still_free() -> None:
    weather = Weather(delayed=1.0)
    handle = table(weather)
    with pytest.raises(Unanswered):
        append(handle)
    assert handle.content.versions[-1].version == 0
    weather.calm()
    seen = [handle.refresh() for _ in range(20)]
    assert sorted(set(seen)) == [0, 1]


def test_a_commit_below_a_cleaned_up_head_is_acknowledged_and_lost() -> None:
    sleeper = table(Weather())
    sleeper.refresh()
    other = sleeper.another()
    for _ in range(3):
        assert append(other)
    other.clean_up(kept=0)
    lost = change(sleeper)
    assert sleeper.try_commit(lost)
    assert lost.add[0].path not in other.content.versions[-1].files


def test_the_products_loop_notices_a_commit_below_the_head() -> None:
    sleeper = table(Weather())
    other = sleeper.another()

    def propose(version: int) -> Change:
        for _ in range(3):
            assert append(other)
        other.clean_up(kept=0)
        return change(sleeper)

    def landed(change: Change) -> bool:
        return change.add[0].path in sleeper.actions()["path"].to_pylist()

    with pytest.raises(LostCommitError):
        sleeper.compare_and_set(propose, landed)


# ---------------------------------------------------------------- the scheduler
@pytest.mark.parametrize(("shared", "expected"), [(True, "abababab"), (False, "aaaabbbb")])
def test_threads_that_share_a_log_come_between_where_no_other_process_matters(shared: bool, expected: str) -> None:
    scheduler = Scheduler(random.Random(2), switch_rate=1.0)
    process, seen = Process("both"), []
    process.shared = shared

    def work() -> None:
        current = scheduler.current
        assert current is not None
        for _ in range(4):
            seen.append(current.name)
            scheduler.interleave()

    for name in "ab":
        scheduler.spawn(process, work, name)
    scheduler.run()
    assert sorted(seen) == sorted(expected)
    assert ("".join(seen) in ("aaaabbbb", "bbbbaaaa")) is not shared


def test_a_slow_call_of_a_thread_holds_up_no_other_thread_of_its_process() -> None:
    scheduler = Scheduler(random.Random(1), switch_rate=0.0)
    process = Process("both")
    process.shared = True
    took: dict[str, float] = {}

    def calls(name: str, count: int) -> None:
        for _ in range(count):
            scheduler.step()
        took[name] = scheduler.now

    scheduler.spawn(process, lambda: calls("many", 100))
    scheduler.spawn(process, lambda: calls("few", 5))
    scheduler.run()
    assert took["few"] < took["many"] / 5


def test_a_crash_ends_all_threads_of_a_process_at_once() -> None:
    scheduler = Scheduler(random.Random(1), switch_rate=0.5, crash_rate=0.2)
    process = Process("three")
    process.shared = True
    steps: list[str] = []

    def work() -> None:
        current = scheduler.current
        assert current is not None
        for _ in range(1_000):
            steps.append(current.name)
            scheduler.step()

    tasks = [scheduler.spawn(process, work, name) for name in "abc"]
    scheduler.run()
    assert scheduler.crashes == 1
    assert all(task.done for task in tasks)
    assert len(steps) < 100


def test_a_dead_process_ends_at_its_next_step_and_its_locks_are_free() -> None:
    scheduler = Scheduler(random.Random(1), switch_rate=1.0)
    lock = SimulatedLock(scheduler)
    seen: list[str] = []
    victim = Process("victim")

    def hold() -> None:
        try:
            with lock:
                while True:
                    scheduler.step()
        except Crash:
            seen.append("unwound")
            raise

    def kill() -> None:
        scheduler.sleep(1.0)
        scheduler.kill(victim)
        with lock:
            seen.append("lock is free")

    scheduler.spawn(victim, hold)
    scheduler.spawn(Process("killer"), kill)
    scheduler.run()
    assert seen == ["unwound", "lock is free"]


def test_a_task_whose_time_is_over_is_not_woken_by_what_it_waited_for() -> None:
    scheduler = Scheduler(random.Random(1), switch_rate=0.0, tick_s=0.0)
    first, second = SimulatedEvent(scheduler), SimulatedEvent(scheduler)
    lock = SimulatedLock(scheduler)
    seen: list[object] = []

    def waits() -> None:
        seen.append(first.wait(1.0))
        seen.append(lock.acquire(1.0))
        second.wait()
        seen.append((second.is_set(), scheduler.now))

    def sets() -> None:
        lock.acquire()
        scheduler.sleep(3.0)
        first.set()
        lock.release()
        scheduler.sleep(1.0)
        second.set()

    scheduler.spawn(Process("waits"), waits)
    scheduler.spawn(Process("sets"), sets)
    scheduler.run()
    assert seen == [False, False, (True, 4.0)]


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    scheduler = Scheduler(random.Random(1))
    woken: list[float] = []

    def sleeper(seconds: float) -> None:
        scheduler.sleep(seconds)
        woken.append(scheduler.now)

    for seconds in (3600.0, 5.0, 60.0):
        scheduler.spawn(Process(f"{seconds}"), lambda seconds=seconds: sleeper(seconds))
    scheduler.run()
    assert woken == [5.0, 60.0, 3600.0]


def test_processes_that_wait_for_each_other_are_reported() -> None:
    scheduler = Scheduler(random.Random(1))
    locks = SimulatedLock(scheduler), SimulatedLock(scheduler)

    def take(first: SimulatedLock, second: SimulatedLock) -> None:
        with first:
            scheduler.sleep(1.0)
            with second:
                pass

    scheduler.spawn(Process("a"), lambda: take(*locks))
    scheduler.spawn(Process("b"), lambda: take(*reversed(locks)))
    with pytest.raises(NoEnd, match="a, b wait for each other"):
        scheduler.run()


def test_a_process_without_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.torture.simulate.scheduler.STEPS_MAX", 100)
    scheduler = Scheduler(random.Random(1))

    def forever() -> None:
        while True:
            scheduler.step()

    scheduler.spawn(Process("forever"), forever)
    with pytest.raises(NoEnd):
        scheduler.run()


def test_an_exception_of_a_process_is_kept() -> None:
    scheduler = Scheduler(random.Random(1))
    scheduler.spawn(Process("a"), lambda: pa.array([object()]))
    scheduler.run()
    assert [(name, type(problem)) for name, problem in scheduler.problems] == [("a", pa.ArrowInvalid)]
