"""Leases of local transactions that run for long. While a lease is renewed, checkers leave its half batch alone."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager

from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.vocabulary.redaction import traceback_of

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""Seconds for which an idle thread waits for more leases, so that short transactions in a row share one thread."""


class LeaseKeeper:
    """Renews the leases of all running local transactions, several in one commit. A lease lasts ``lease_s``. It is
    written after a third of that time, and again after each further third. So a short transaction gets no lease.

    One thread renews all leases. It starts with the first transaction, and ends soon after the last. Adding or removing
    a lease usually takes no lock: many threads would wait for the lock longer than their transactions take::

        lease_s = 60     0 s        20 s         40 s        60 s
        transaction      begins ─── runs on ──── runs on ─── ends
        lease                       until 80 s   until 100 s
    """

    def __init__(self, engine: Engine, lease_s: float) -> None:
        self.lease_s = lease_s
        self._engine = engine
        self._running: dict[Lease, None] = {}
        self._idle = engine.runtime.event()  # set when no transaction runs
        self._lock = engine.runtime.lock()  # for the thread's start and end
        self._has_thread = False
        self._writing = engine.runtime.lock()  # held while leases are written
        self._being_written: frozenset[Lease] = frozenset()  # leases that a commit may be writing

    def lease(self, record: HalfRecord) -> Lease:
        """The lease of a half batch, for a ``with`` statement around its local transaction."""
        return Lease(self, record)

    def add(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        lease.next_s = self._engine.runtime.monotonic() + self.lease_s / 3
        self._running[lease] = None
        if self._has_thread:
            return
        with self._lock:
            if not self._has_thread:
                self._has_thread = True
                try:
                    self._engine.runtime.start_thread(self._work, "txmq-lease", daemon=True)
                except RuntimeError as problem:  # no thread. A check may ask early; the fence keeps that safe
                    self._has_thread = False
                    is_ending = not threading.main_thread().is_alive()
                    logger.log(logging.INFO if is_ending else logging.WARNING, "no leases: %s", problem)
                except BaseException:  # an interrupt. Two threads that work do no harm
                    self._has_thread = False
                    raise

    def remove(self, lease: Lease) -> None:
        """Stop renewing a lease, after a commit that may be writing it has ended."""
        self._running.pop(lease, None)
        if not self._running:
            self._idle.set()
        if lease in self._being_written:
            with self._writing:
                pass

    def _work(self) -> None:
        try:
            while True:
                if self._running and not self._idle.wait(self._seconds_to_next()):
                    self._renew()
                    continue
                self._idle.clear()
                self._engine.runtime.sleep(LINGER_S)
                if self._may_end():
                    return
        except BaseException:  # the next lease starts another thread
            self._has_thread = False
            raise

    def _may_end(self) -> bool:
        with self._lock:
            self._has_thread = False
            self._has_thread = bool(self._running)
            return not self._has_thread

    def _renew(self) -> None:
        with self._writing:
            taken = self._take_near()
            try:
                if taken:
                    self._engine.ledger.lease([lease.record for lease in taken], self.lease_s)
            # Without a lease a check may ask early; the fence keeps that safe. A panic of delta-rs is no Exception,
            # and must not end the leases of the other transactions.
            except BaseException as problem:
                half_ids = [lease.record.half_id for lease in taken]
                text = traceback_of(problem)
                logger.warning(
                    "leases of half batches %s not renewed: %s", half_ids, text, extra={"half_ids": half_ids}
                )
            finally:
                self._being_written = frozenset()

    def _seconds_to_next(self) -> float:
        now = self._engine.runtime.monotonic()
        return max(0.0, min((lease.next_s for lease in list(self._running)), default=now) - now)

    def _take_near(self) -> list[Lease]:
        """The leases to write: those due now, or so soon that they share the commit."""
        now = self._engine.runtime.monotonic()
        near = [lease for lease in list(self._running) if lease.next_s <= now + self.lease_s / 6]
        self._being_written = frozenset(near)
        taken = [lease for lease in near if lease in self._running]  # a lease that ends after this waits for the commit
        for lease in taken:
            lease.next_s = now + self.lease_s / 3
        return taken


class Lease(AbstractContextManager[None]):
    """The lease of one half batch, which is renewed until the ``with`` statement ends."""

    def __init__(self, keeper: LeaseKeeper, record: HalfRecord) -> None:
        self.record = record
        self.next_s = 0.0  # when it is written next, by the monotonic clock
        self._keeper = keeper

    def __enter__(self) -> None:
        self._keeper.add(self)

    def __exit__(self, *details: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop renewing the lease, also after an interrupt while ``with`` enters or leaves."""
        self._keeper.remove(self)
