"""Leases of local transactions that run for long: while one is renewed, checkers leave its half batch alone."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager

from rmq_spark._core.log.half_table import HalfRecord
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.vocabulary.redaction import traceback_of

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""A thread with nothing to renew waits so long for more: thousands of short transactions a second have one thread."""


class LeaseKeeper:
    """Renews the leases of all local transactions that run, several in one commit. A short transaction gets none.

    One thread serves them all: it starts with the first one that runs, and ends soon after the last. Who comes and goes
    takes no lock, because 64 threads that wait for one would spend more time on it than on their transactions.

    ::

        lease_s = 60     0 s        20 s         40 s        60 s
        transaction      begins ─── runs on ──── runs on ─── ends
        lease                       until 80 s   until 100 s

    Parameters
    ----------
    log : Engine
    lease_s : float
        Seconds that a lease lasts. It is written when a transaction has run for a third of them, and again after each
        further third.
    """

    def __init__(self, log: Engine, lease_s: float) -> None:
        self.lease_s = lease_s
        self._log = log
        self._running: dict[Lease, None] = {}
        self._nothing = log.runtime.event()  # set when none runs
        self._lock = log.runtime.lock()  # for the thread's start and end
        self._is_at_work = False
        self._writing = log.runtime.lock()  # held while leases are written
        self._written: frozenset[Lease] = frozenset()  # perhaps those

    def lease(self, record: HalfRecord) -> Lease:
        """The lease of a half batch, for a ``with`` statement around its local transaction."""
        return Lease(self, record)

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        lease.next_s = self._log.runtime.monotonic() + self.lease_s / 3
        self._running[lease] = None
        if self._is_at_work:
            return
        with self._lock:
            if not self._is_at_work:
                self._is_at_work = True
                try:
                    self._log.runtime.start_thread(self._work, "txmq-lease", daemon=True)
                except RuntimeError as problem:  # no thread to be had. A check may ask early; the fence keeps that safe
                    self._is_at_work = False
                    is_ending = not threading.main_thread().is_alive()
                    logger.log(logging.INFO if is_ending else logging.WARNING, "no leases: %s", problem)
                except BaseException:  # an interrupt. Two threads at work do no harm
                    self._is_at_work = False
                    raise

    def remove(self, lease: Lease) -> None:
        """Renew a lease no more, not even in a commit that is under way."""
        self._running.pop(lease, None)
        if not self._running:
            self._nothing.set()
        if lease in self._written:
            with self._writing:
                pass

    def _work(self) -> None:
        try:
            while True:
                if self._running and not self._nothing.wait(self._seconds_to_next()):
                    self._renew()
                    continue
                self._nothing.clear()
                self._log.runtime.sleep(LINGER_S)
                if self._may_end():
                    return
        except BaseException:  # the next one starts it anew
            self._is_at_work = False
            raise

    def _may_end(self) -> bool:
        """Say that nobody is at work, unless somebody has come meanwhile: who comes now starts a thread."""
        with self._lock:
            self._is_at_work = False
            self._is_at_work = bool(self._running)
            return not self._is_at_work

    def _renew(self) -> None:
        with self._writing:
            due = self._due()
            try:
                if due:
                    self._log.lease([lease.record for lease in due], self.lease_s)
            # Without a lease a check may ask early; the fence keeps that safe. A panic of delta-rs is no Exception,
            # and must not end the leases of the other transactions.
            except BaseException as problem:
                names = [lease.record.half_id for lease in due]
                said = traceback_of(problem)
                logger.warning("leases of half batches %s not renewed: %s", names, said, extra={"half_ids": names})
            finally:
                self._written = frozenset()

    def _seconds_to_next(self) -> float:
        now = self._log.runtime.monotonic()
        return max(0.0, min((lease.next_s for lease in list(self._running)), default=now) - now)

    def _due(self) -> list[Lease]:
        """The leases to write: now, or so soon that one commit for all is better."""
        now = self._log.runtime.monotonic()
        near = [lease for lease in list(self._running) if lease.next_s <= now + self.lease_s / 6]
        self._written = frozenset(near)
        due = [lease for lease in near if lease in self._running]  # who ends after this waits for the commit
        for lease in due:
            lease.next_s = now + self.lease_s / 3
        return due


class Lease(AbstractContextManager[None]):
    """The lease of one half batch: it is renewed until the ``with`` statement ends."""

    def __init__(self, keeper: LeaseKeeper, record: HalfRecord) -> None:
        self.record = record
        self.next_s = 0.0  # when it is written next, by the monotonic clock
        self._keeper = keeper

    def __enter__(self) -> None:
        self._keeper.add(self)

    def __exit__(self, *details: object) -> None:
        self.end()

    def end(self) -> None:
        """Renew it no more. For an interrupt that comes while ``with`` enters or leaves, too."""
        self._keeper.remove(self)
