"""The check service: asks listeners what became of open transactions, and makes their answers final.

``round.py`` does a round. Any number of checkers may run at once: each decision is a compare-and-set, and the first one
stands.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from datetime import datetime

from rmq_spark._core.checks.check_report import CheckReport, Tally
from rmq_spark._core.checks.policy import TransactionCheckListener, require_policy
from rmq_spark._core.checks.round import Checker, Rules
from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.listeners.transaction_listener import (
    TransactionListener,
    require_listener,
)
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime import observer
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.vocabulary.message import require_group_name
from rmq_spark._core.vocabulary.options import (
    CHECK_ROUND_TIMEOUT_S,
    CHECKS_MAX,
    FILE_RESERVED_TIME_S,
    TRANSACTION_CHECK_INTERVAL_S,
    TRANSACTION_CHECK_MAX,
    TRANSACTION_TIMEOUT_S,
    Duration,
    named,
    seconds,
    whole_number,
)
from rmq_spark._core.vocabulary.redaction import sentence_of
from rmq_spark.errors import OptionError

__all__ = ["CheckReport", "CheckService", "Tally"]

logger = logging.getLogger(__name__)

OWN_CHECK_PAUSE = 0.9
"""A producer skips half batches that a process of its group checked within this fraction of the check interval. So any
number of processes use up ``transaction_check_max`` no faster than one."""


class CheckService:
    """Settles transactions that a crash, or a listener's UNKNOWN, left open.

    Mirrors RocketMQ's ``TransactionalMessageCheckService``, which asks producers; here the checker has their listeners.

    Parameters
    ----------
    log : CommitLog or str
        The commit log, or its path.
    listeners : mapping of str to TransactionListener
        The listener of each producer group.
    transaction_timeout : float or str
        Seconds from prepare (or reopen) during which a transaction is left alone. The message property
        ``CHECK_IMMUNITY_TIME_IN_SECONDS`` overrides it; the largest among a transaction's messages counts.
    transaction_check_interval : float or str
        Seconds between the rounds of :meth:`run`.
    transaction_check_max : int
        Answers of UNKNOWN after which the discard policy decides.
    file_reserved_time : float or str
        Seconds after which an open half batch is quarantined, asked or not.
    round_timeout : float or str or None
        Seconds for a round. After them no more half batches are taken, and the next round begins with those that were
        not reached. An answer that comes later is used in a later round. None: no limit.
    discard_policy : {"quarantine", "rollback", "commit"} or TransactionCheckListener
        Decides on transactions that were checked too often.
    only_groups : bool
        Ignore half batches of groups without a listener here, and do not report them (a producer's own checks).
    elsewhere : collection of str
        Producer groups of another checker: nothing is logged about their half batches.
    storage_options : mapping, optional
        For a path: passed to delta-rs.
    clock : callable, optional
        The time, with a time zone; for tests.

    Raises
    ------
    OptionError, ListenerError
        For an invalid value.

    Notes
    -----
    Half batches of ``transactionListener=none`` need no listener: any check commits them.

    With a ``round_timeout``, listeners are called from threads of the service, one at a time; a call that does not
    return in time is left alone, and the next one begins. Listeners that need Spark are called from the thread of the
    round, which waits for them, because a Spark session belongs to a thread.

    Without ``only_groups``, a round ends with a call of each listener's
    :meth:`~rmq_spark.TransactionListener.require_reachable`.
    """

    @named
    def __init__(
        self,
        log: CommitLog | Engine | str | os.PathLike[str],
        listeners: Mapping[str, TransactionListener],
        *,
        transaction_timeout: Duration = TRANSACTION_TIMEOUT_S,
        transaction_check_interval: Duration = TRANSACTION_CHECK_INTERVAL_S,
        transaction_check_max: int = TRANSACTION_CHECK_MAX,
        file_reserved_time: Duration = FILE_RESERVED_TIME_S,
        round_timeout: Duration | None = CHECK_ROUND_TIMEOUT_S,
        discard_policy: str | TransactionCheckListener = "quarantine",
        only_groups: bool = False,
        elsewhere: Collection[str] = (),
        storage_options: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if not isinstance(listeners, Mapping):
            raise OptionError(
                f"listeners is {type(listeners).__name__}: which group has which listener is expected, such as "
                "{'shop': listener}"
            )
        self.listeners = {
            require_group_name(group): require_listener(listener, f"listeners[{group!r}]")
            for group, listener in listeners.items()
        }
        self.transaction_check_interval = seconds(transaction_check_interval, "transaction_check_interval", above=True)
        self.discard_policy = require_policy(discard_policy)
        rules = Rules(
            listeners=self.listeners,
            transaction_timeout=seconds(transaction_timeout, "transaction_timeout"),
            transaction_check_max=whole_number(transaction_check_max, "transaction_check_max", 1, CHECKS_MAX),
            file_reserved_time=seconds(file_reserved_time, "file_reserved_time", above=True),
            round_timeout=None if round_timeout is None else seconds(round_timeout, "round_timeout", above=True),
            discard_policy=self.discard_policy,
            only_groups=only_groups,
            elsewhere=frozenset(elsewhere),
            pause_s=OWN_CHECK_PAUSE * self.transaction_check_interval if only_groups else 0.0,
            clock=clock,
        )
        self.engine = engine_of(log, storage_options)
        self._checker = Checker(self.engine, rules)

    def run(self, stop_event: threading.Event, on_report: Callable[[CheckReport], None] | None = None) -> None:
        """Run rounds until the event is set: the first at once, then one every ``transaction_check_interval``.

        A round that fails as a whole (the storage does not answer) is reported, and the next one tries again.

        Parameters
        ----------
        stop_event : threading.Event
        on_report : callable, optional
            Called with the report of each round.
        """
        while not stop_event.is_set():
            started_at = self._checker.clock()
            try:
                report = self._round(stop_event)
            except Exception as problem:
                logger.error("a round of checks failed: %s", failure(problem))
                report = CheckReport(started_at)
                report.problem(None, f"the round failed with {sentence_of(problem)}")
                self._tell(report)
            if on_report is not None:
                on_report(report)
            stop_event.wait(self.transaction_check_interval)

    def run_once(self) -> CheckReport:
        """Run one round: ask about the transactions that are due, make the answers final, move the low-water mark, and
        look whether the listeners' databases answer.

        A fault of a single half batch or its listener does not end the round; the report's ``problems`` have it.
        """
        return self._round(self.engine.runtime.event())

    def _round(self, stop: threading.Event) -> CheckReport:
        report = self._checker.round(stop)
        self._tell(report)
        return report

    def _tell(self, report: CheckReport) -> None:
        if observer.observers():
            checker = "producer" if self._checker.rules.only_groups else "job"
            observer.tell(lambda o: o.checked(self.engine.path, checker, report))
