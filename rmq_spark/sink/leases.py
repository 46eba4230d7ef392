"""Leases of local transactions that run for long: while one is renewed, checkers leave its half batch alone."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager

from rmq_spark.commitlog.half_store import HalfRecord
from rmq_spark.commitlog.log import CommitLog
from rmq_spark.redaction import traceback_of

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews the leases of all local transactions that run, several in one commit. A short transaction gets none.

    One thread serves them all: it starts with the first one that runs, and ends with the last.

    ::

        lease_s = 60     0 s        20 s         40 s        60 s
        transaction      begins ─── runs on ──── runs on ─── ends
        lease                       until 80 s   until 100 s

    Parameters
    ----------
    log : CommitLog
    lease_s : float
        Seconds that a lease lasts. It is written when a transaction has run for a third of them, and again after each
        further third.
    """

    def __init__(self, log: CommitLog, lease_s: float) -> None:
        self.lease_s = lease_s
        self._log = log
        self._lock = log.machine.lock()
        self._running: dict[Lease, float] = {}  # → when it is written next, by the monotonic clock
        self._writing = log.machine.lock()  # held while leases are written
        self._written: frozenset[Lease] = frozenset()  # those
        self._thread: threading.Thread | None = None
        self._over = log.machine.event()  # one for each thread, which ends when it is set
        self._over.set()

    def lease(self, record: HalfRecord) -> Lease:
        """The lease of a half batch, for a ``with`` statement around its local transaction."""
        return Lease(self, record)

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        machine = self._log.machine
        with self._lock:
            self._running[lease] = machine.monotonic() + self.lease_s / 3
            if self._over.is_set():
                self._over = over = machine.event()
                try:
                    self._thread = machine.start_thread(lambda: self._renew(over), "txmq-lease", daemon=True)
                except BaseException:  # an interrupt: nobody may know of the thread
                    over.set()
                    raise

    def remove(self, lease: Lease) -> threading.Thread | None:
        """Renew a lease no more, not even in a commit that is under way; returns the thread that ends now, when this
        was the last one."""
        with self._lock:
            self._running.pop(lease, None)
            last = not self._running
            if last:
                self._over.set()
            is_written = lease in self._written
        if is_written:
            with self._writing:
                pass
        return self._thread if last else None

    def _renew(self, over: threading.Event) -> None:
        while not over.wait(self._seconds_to_next()):
            with self._writing:
                due = self._due()
                try:
                    if due:
                        self._log.lease_many([lease.record for lease in due], self.lease_s)
                # Without a lease a check may ask early; the fence keeps that safe. A panic of delta-rs is no Exception,
                # and must not end the leases of the other transactions.
                except BaseException as problem:
                    names = [lease.record.half_id for lease in due]
                    said = traceback_of(problem)
                    logger.warning("leases of half batches %s not renewed: %s", names, said, extra={"half_ids": names})
                finally:
                    self._written = frozenset()

    def _seconds_to_next(self) -> float:
        with self._lock:
            now = self._log.machine.monotonic()
            return max(0.0, min(self._running.values(), default=now) - now)

    def _due(self) -> list[Lease]:
        """The leases to write: now, or so soon that one commit for all is better."""
        with self._lock:
            now = self._log.machine.monotonic()
            due = [lease for lease, at in self._running.items() if at <= now + self.lease_s / 6]
            self._running.update(dict.fromkeys(due, now + self.lease_s / 3))
            self._written = frozenset(due)
            return due


class Lease(AbstractContextManager[None]):
    """The lease of one half batch: it is renewed until the ``with`` statement ends."""

    def __init__(self, keeper: LeaseKeeper, record: HalfRecord) -> None:
        self.record = record
        self._keeper = keeper

    def __enter__(self) -> None:
        self._keeper.add(self)

    def __exit__(self, *details: object) -> None:
        thread = self._keeper.remove(self)
        if thread is not None:
            thread.join()

    def end(self) -> None:
        """Renew it no more. For an interrupt that comes while ``with`` enters or leaves."""
        self._keeper.remove(self)
