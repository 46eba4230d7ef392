"""Processes of a simulation: threads of which one runs at a time, and a clock that only the simulation moves.

Whose turn it is, when a process dies and how long it sleeps comes from one ``random.Random``, so a seed is a run.
A thread runs until it comes to a :meth:`Scheduler.step`, sleeps or waits; then it hands the baton to another. Threads
that share their process's commit log hand it on at every look at a table and at every lock, too. Real threads do so
anywhere: what goes wrong between two lines that touch neither is for the races of real threads.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from typing import ClassVar

STEPS_MAX = 60_000
SLOW_CALLS = 0.15
SLOW_CALL_S = 1.0
"""So many calls of a thread take up to so long, while the other threads of its process go on."""


class Crash(BaseException):
    """This process was killed here; what was on its way up stays undone."""


class NoEnd(Exception):
    """The processes wait for each other, or do not come to an end."""


class Process:
    """What dies and is paused as a whole: one incarnation, with its threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.paused_until = 0.0
        self.immortal = False
        self.clock_offset_s = 0.0  # how far its machine's clock is ahead of all others
        self.shared = False  # its threads share a commit log
        self.tasks: list[Task] = []


class Task:
    """A thread of a process."""

    __slots__ = ("done", "joined_by", "name", "parked", "process", "token", "work", "worker")

    def __init__(self, process: Process, work: Callable[[], object], name: str | None = None) -> None:
        self.process = process
        self.name = name or process.name  # in the history: threads of a process are told apart
        self.work = work
        self.done = False
        self.parked = False  # it sleeps or waits, until somebody wakes it
        self.token = 0  # of its newest sleep: older ones do not end it
        self.joined_by: list[Task] = []
        self.worker: _Worker | None = None


class _Worker:
    """A real thread, which runs one task after the other: starting threads takes longer than most tasks."""

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.task: Task | None = None
        self.scheduler: Scheduler | None = None
        threading.Thread(target=self._loop, name="simulated", daemon=True).start()

    @classmethod
    def take(cls, scheduler: Scheduler, task: Task) -> _Worker:
        worker = cls.idle.pop() if cls.idle else cls()
        worker.scheduler, worker.task = scheduler, task
        return worker

    def _loop(self) -> None:
        while True:
            self.gate.acquire()
            scheduler, task = self.scheduler, self.task
            assert scheduler is not None
            assert task is not None
            scheduler.run_task(task)
            self.task = None
            _Worker.idle.append(self)
            scheduler.hand_on()


class Scheduler:
    """Runs processes in turn.

    Parameters
    ----------
    chance : random.Random
    switch_rate : float
        How often a step hands the baton on.
    crash_rate, pause_rate : float
        How often a process dies at a step, or sleeps for some of :attr:`pauses_s`.
    tick_s : float
        A step takes up to so long.
    """

    pauses_s: tuple[float, ...] = (1.0, 15.0, 60.0, 300.0)

    def __init__(
        self,
        chance: random.Random,
        switch_rate: float = 0.3,
        crash_rate: float = 0.0,
        pause_rate: float = 0.0,
        tick_s: float = 0.02,
    ) -> None:
        self.chance = chance
        self.tick_s = tick_s
        self.switch_rate = switch_rate
        self.crash_rate = crash_rate
        self.pause_rate = pause_rate
        self.now = 0.0
        self.clock_offset_s = 0.0
        self.steps = 0
        self.crashes = 0
        self.pauses = 0
        self.problems: list[tuple[str, BaseException]] = []
        self.current: Task | None = None
        self._ready: list[Task] = []
        self._sleeping: list[tuple[float, int, Task, int]] = []
        self._serial = 0
        self._alive = 0
        self._tasks: list[Task] = []
        self._main = threading.Lock()
        self._main.acquire()

    # ------------------------------------------------------------------ processes
    def spawn(self, process: Process, work: Callable[[], object], name: str | None = None) -> Task:
        """Another thread of a process; it runs when its turn comes."""
        task = Task(process, work, name)
        process.tasks.append(task)
        self._tasks.append(task)
        self._alive += 1
        task.worker = _Worker.take(self, task)
        self._ready.append(task)
        return task

    def run(self) -> None:
        """Until every task has ended.

        Raises
        ------
        NoEnd
            When they wait for each other, or take too many steps.
        """
        first = self._pick()
        if first is not None:
            self._give(first)
            self._main.acquire()
        if self._alive:
            names = sorted({t.process.name for t in self._tasks if not t.done})
            self._unwind()
            raise NoEnd(f"{', '.join(names)} wait for each other")
        if self.steps > STEPS_MAX:
            raise NoEnd(f"no end after {STEPS_MAX} steps")

    def _unwind(self) -> None:
        """Let every thread go, so that the next seed can have it."""
        for task in self._tasks:
            self.kill(task.process)
        first = self._pick()
        if first is not None:
            self._give(first)
            self._main.acquire()

    def kill(self, process: Process) -> None:
        """Its threads end at their next step."""
        process.dead = True
        for task in process.tasks:
            self.wake(task)

    def run_task(self, task: Task) -> None:
        """In the task's own thread."""
        try:
            if not task.process.dead:
                task.work()
        except Crash:
            pass
        except BaseException as problem:
            self.problems.append((task.name, problem))
        task.done = True
        self._alive -= 1
        for waiting in task.joined_by:
            self.wake(waiting)

    # ------------------------------------------------------------------ the baton
    def _give(self, task: Task) -> None:
        self.current = task
        assert task.worker is not None
        task.worker.gate.release()

    def hand_on(self) -> None:
        """To whoever is next; the caller's task has ended."""
        following = self._pick()
        if following is None:
            self.current = None
            self._main.release()
        else:
            self._give(following)

    def _pick(self) -> Task | None:
        ready, sleeping = self._ready, self._sleeping
        while True:
            while sleeping and sleeping[0][0] <= self.now:
                _, _, task, token = heapq.heappop(sleeping)
                if task.parked and task.token == token:
                    task.parked = False
                    ready.append(task)
            if ready:
                at = int(self.chance.random() * len(ready))
                ready[at], ready[-1] = ready[-1], ready[at]
                task = ready.pop()
                if task.process.paused_until > self.now and not task.process.dead:
                    self._put_to_sleep(task, task.process.paused_until)
                    continue
                return task
            if not sleeping:
                return None
            self.now = max(self.now, sleeping[0][0])

    def _put_to_sleep(self, task: Task, until: float) -> None:
        self._serial += 1
        task.token += 1
        task.parked = True
        heapq.heappush(self._sleeping, (until, self._serial, task, task.token))

    def wake(self, task: Task) -> None:
        """Let a task that sleeps or waits go on."""
        if task.parked:
            task.parked = False
            self._ready.append(task)

    def _switch(self, task: Task) -> None:
        following = self._pick()
        if following is not task:
            worker = task.worker
            assert worker is not None
            if following is None:
                self.current = None
                self._main.release()
            else:
                self._give(following)
            worker.gate.acquire()
            self.current = task
        if task.process.dead:
            raise Crash

    # ------------------------------------------------------------------ what a task may do
    def step(self) -> None:
        """A point at which others may come between, or the process may die or be paused."""
        task = self.current
        if task is None:
            return
        process = task.process
        if process.dead:
            raise Crash
        self.steps += 1
        if self.steps > STEPS_MAX:
            for other in self._tasks:
                self.kill(other.process)
            raise Crash
        chance = self.chance.random
        self.now += chance() * self.tick_s
        if not process.immortal:
            fate = chance()
            if fate < self.crash_rate:
                self.crashes += 1
                self.kill(process)
                raise Crash
            if fate > 1.0 - self.pause_rate:
                self.pauses += 1
                process.paused_until = self.now + self.pauses_s[int(chance() * len(self.pauses_s))]
                self._put_to_sleep(task, process.paused_until)
                self._switch(task)
                return
        if process.shared and chance() < SLOW_CALLS:
            self.sleep(chance() * SLOW_CALL_S)
        elif chance() < self.switch_rate:
            self._ready.append(task)
            self._switch(task)

    def interleave(self) -> None:
        """A point at which another thread of the process may come between. It takes no time, and nobody dies."""
        task = self.current
        if task is None or not task.process.shared or task.process.dead:
            return
        if self.chance.random() < self.switch_rate:
            self._ready.append(task)
            self._switch(task)

    def sleep(self, seconds: float) -> None:
        task = self.current
        if task is None:
            self.now += seconds
            return
        if task.process.dead:
            raise Crash
        self._put_to_sleep(task, self.now + max(0.0, seconds))
        self._switch(task)

    def sleep_to_next(self, seconds: float) -> None:
        """Until the next multiple of so many seconds."""
        self.sleep(seconds - self.now % seconds)

    def wait(self) -> None:
        """Until somebody wakes the task."""
        task = self.current
        assert task is not None
        if task.process.dead:
            raise Crash
        task.token += 1
        task.parked = True
        self._switch(task)

    def join(self, task: Task) -> None:
        if not task.done and self.current is not None:
            task.joined_by.append(self.current)
            self.wait()

    # ------------------------------------------------------------------ clocks
    def wall_s(self) -> float:
        """What the clocks say that are not wrong, and the store's; it may step."""
        return EPOCH_S + self.now + self.clock_offset_s

    def machine_s(self) -> float:
        """What the clock of the current process's machine says."""
        return self.wall_s() + (self.current.process.clock_offset_s if self.current is not None else 0.0)


EPOCH_S = 1_800_000_000.0


def _wait_among(waiting: list[Task], scheduler: Scheduler, task: Task, timeout_s: float | None) -> None:
    """Wait among others for a lock or an event. A task whose time is over is not woken later, when it waits for
    something else."""
    waiting.append(task)
    if timeout_s is None:
        scheduler.wait()
    else:
        scheduler.sleep(timeout_s)
    if task in waiting:
        waiting.remove(task)


class SimulatedLock:
    """``threading.RLock`` for tasks; also a database's lock on a row, which is waited for only so long."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._count = 0
        self._waiting: list[Task] = []

    def acquire(self, timeout: float | None = None) -> bool:
        self._scheduler.interleave()
        task = self._scheduler.current
        deadline = None if timeout is None else self._scheduler.now + timeout
        while self._owner is not None and self._owner is not task:
            assert task is not None
            if deadline is not None and self._scheduler.now >= deadline:
                return False
            timeout_s = None if deadline is None else deadline - self._scheduler.now
            _wait_among(self._waiting, self._scheduler, task, timeout_s)
        self._owner = task
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._owner = None
            while self._waiting:
                self._scheduler.wake(self._waiting.pop())
            self._scheduler.interleave()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *details: object) -> None:
        self.release()


class SimulatedEvent:
    """``threading.Event`` for tasks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        while self._waiting:
            self._scheduler.wake(self._waiting.pop())

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.current
        if task is None:
            return self._set
        until = None if timeout is None else self._scheduler.now + timeout
        while not self._set and (until is None or self._scheduler.now < until):
            timeout_s = None if until is None else until - self._scheduler.now
            _wait_among(self._waiting, self._scheduler, task, timeout_s)
        return self._set


class SimulatedThread:
    """``threading.Thread`` for tasks: it belongs to the process that starts it."""

    def __init__(self, scheduler: Scheduler, work: Callable[[], object]) -> None:
        current = scheduler.current
        self._scheduler = scheduler
        process, name = (Process("main"), None) if current is None else (current.process, current.name)
        self._task = scheduler.spawn(process, work, name)

    def is_alive(self) -> bool:
        return not self._task.done

    def join(self, timeout: float | None = None) -> None:
        self._scheduler.join(self._task)
