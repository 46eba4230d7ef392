"""The threads of a member of a consumer group: how they start, and how they end, at the latest when Python ends.

The member's own thread ``txmq-member`` puts heartbeats, claims and releases queues, and writes progress. The others are
its consumer's: they fetch, and call listeners.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence

from rmq_spark._core.consumers.member import GroupMember
from rmq_spark._core.consumers.progress import Take
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import ConsumeError

logger = logging.getLogger(__name__)

KEEP_S = 0.1
"""Seconds between two looks of the member's thread for due work."""
AT_EXIT_S_MAX = 10.0
"""Maximum seconds for which the end of Python waits for listener calls, and for the store. A thread that is still
within delta-rs then may crash Python."""
LATE_S = 0.5
"""Seconds that the threads have to end when a listener call still runs."""
STORE_THREADS = {"member", "fetch"}
"""Names of the threads that wait for the store."""


class MemberThreads:
    def __init__(self, member: GroupMember) -> None:
        self._member = member
        self._runtime = member.runtime
        self._pid = os.getpid()
        self._threads: dict[str, threading.Thread] = {}
        self._stop_at_exit: Callable[[], object] = member.stopping.set
        self._abandoned: Sequence[Take] | None = None
        self._is_ending = False
        self._in_this_thread = threading.local()

    def require_own_process(self) -> None:
        """Raise ConsumeError in a forked child, in which neither the threads nor the engine of delta-rs run."""
        if self._is_forked():
            raise ConsumeError(
                f"this consumer was made in process {self._pid}, and this is a fork of it: make one in each process"
            )

    def start(self, at_exit: Callable[[], object], **work: Callable[[], object]) -> None:
        """Join the group, and start the member's thread and one thread for each function in ``work``.

        ``at_exit`` is called when Python ends first. It must call :meth:`stop`.
        """
        self.require_own_process()
        self._member.join()
        try:
            self._stop_at_exit = at_exit
            atexit.register(self._at_exit)
            for name, function in {"member": self._keep_until_stopped, **work}.items():
                thread = self._runtime.start_thread(self._or_fail(function), f"txmq-{name}", daemon=True)
                self._threads[name] = thread
        except BaseException:  # an interrupt, or a thread could not start
            self.stop(0.0)
            raise

    def abandon(self, given: Sequence[Take]) -> None:
        """Let the member's thread give back these takes, and leave the group: the consumer object is gone.

        ``__del__`` calls this, which may interrupt any code, so it must not wait.
        """
        self._abandoned = given

    def _or_fail(self, work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            self._in_this_thread.is_own = True
            try:
                work()
            except BaseException as problem:  # a panic of delta-rs is no Exception
                self._member.fail(problem)

        return run

    def is_own_thread(self) -> bool:
        """Whether the current thread is one of the member's, in which listeners are called."""
        return getattr(self._in_this_thread, "is_own", False)

    @property
    def is_running(self) -> bool:
        """Whether it has threads: from :meth:`start` to the end of :meth:`stop`."""
        return bool(self._threads)

    def stop(self, timeout_s: float, at_exit: bool = False, listener: str = "the listener") -> None:
        """Wait for running calls, write progress, release the queues and leave the group.

        A queue with calls that still run after ``timeout_s`` is not released: its claim ends with the lease. With
        ``at_exit``, Python is ending: threads within the store are waited for at most :data:`AT_EXIT_S_MAX` seconds.
        ``listener`` names the listener in the warning that it still runs.
        """
        if self._is_forked():
            return
        with self._member.changed:
            is_first, self._is_ending = not self._is_ending, True
        end_s = self._runtime.monotonic() + (min(timeout_s, AT_EXIT_S_MAX) if at_exit else timeout_s)
        at_exit_s = self._runtime.monotonic() + AT_EXIT_S_MAX if at_exit else None
        if not is_first:  # another call of stop() is at work, perhaps in the member's thread
            self._wait_for_threads(at_exit_s, self._threads)
            return
        try:
            self._member.stopping.set()
            late = self._member.wait_for_listeners(end_s)
            late_s = max(end_s, self._runtime.monotonic() + LATE_S)
            # A call may still run for a queue that another member has claimed.
            late_calls = self._wait_for_threads(late_s, self._threads.keys() - STORE_THREADS)
            if late or late_calls:
                self._warn_of_late_calls(listener, timeout_s, late)
            running = late_calls | self._wait_for_threads(late_s if late or late_calls else at_exit_s, STORE_THREADS)
            if not (at_exit and running & STORE_THREADS):
                self._member.leave()
                self._member.engine.compaction.wait()
        except BaseException:  # an interrupt: the exit handler does the rest
            self._is_ending = False
            raise
        self._threads = {}
        atexit.unregister(self._at_exit)

    def _warn_of_late_calls(self, listener: str, timeout_s: float, late: list[Queue]) -> None:
        still = f"has messages of {late}" if late else "runs, with messages of queues that other members have by now"
        logger.warning(
            "consumer group %r: after %g s %s still %s: these queues are free when the lease is over, and their "
            "messages come again. Give what blocks in it a time limit of its own",
            self._member.group, timeout_s, listener, still, extra=self._member.fields,
        )  # fmt: skip

    def _wait_for_threads(self, end_s: float | None, names: Collection[str]) -> set[str]:
        """Wait for threads, until a time if one is given, and return the names of those that still run."""
        others = {name: t for name, t in self._threads.items() if name in names and t is not threading.current_thread()}
        for thread in others.values():
            thread.join(None if end_s is None else max(0.0, end_s - self._runtime.monotonic()))
        return {name for name, thread in others.items() if thread.is_alive()}

    def _at_exit(self) -> None:
        if not self._is_forked():
            self._stop_at_exit()
            if self._abandoned is not None:
                self._leave_abandoned(at_exit=True)

    def _is_forked(self) -> bool:
        """Whether this process is a fork, which has none of the consumer's threads and no heartbeat of its own."""
        return os.getpid() != self._pid

    def _keep_until_stopped(self) -> None:
        while not self._member.stopping.wait(min(KEEP_S, self._member.settings.heartbeat_interval_s / 4)):
            if self._abandoned is not None:
                logger.warning(
                    "consumer group %r: a consumer was dropped without shutdown(): it leaves the group, and what was "
                    "given out and not committed comes again", self._member.group, extra=self._member.fields,
                )  # fmt: skip
                self._leave_abandoned()
                return
            self._member.keep()

    def _leave_abandoned(self, at_exit: bool = False) -> None:
        with self._member.changed:
            takes, self._abandoned = self._abandoned or (), ()
            for take in takes:
                take.queue.give_back(take, take.finished)
        self.stop(0.0, at_exit)
