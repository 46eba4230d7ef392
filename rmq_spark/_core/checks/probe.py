"""Looks once a round whether listeners could answer a check, even when there is nothing to check. Otherwise a database
that is down shows only when messages are stuck."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from rmq_spark._core.checks.calls import STOP_POLL_S
from rmq_spark._core.checks.check_report import CheckReport
from rmq_spark._core.listeners.transaction_listener import TransactionListener
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.redaction import one_line, redacted, sentence_of

logger = logging.getLogger(__name__)

ANSWER_S_MAX = 10.0
"""A listener that has not returned within this many seconds is reported. Its call goes on, and a later round takes its
answer."""
ALONE_S_MAX = 1.0
"""Most seconds that a call waits for the one before, because two listeners may share a connection."""


@dataclass(frozen=True)
class _Call:
    began_s: float
    back: Future[None] = field(default_factory=Future)


class Probe:
    """Calls :meth:`TransactionListener.require_reachable` of the listeners that override it.

    Parameters
    ----------
    listeners : mapping of str to TransactionListener
        By their producer groups.
    in_threads : bool
        False: every call is made in the caller's thread.
    """

    def __init__(self, runtime: Runtime, listeners: Mapping[str, TransactionListener], in_threads: bool) -> None:
        self._runtime = runtime
        self._in_threads = in_threads
        default = TransactionListener.require_reachable
        self._listeners = {
            group: listener for group, listener in listeners.items() if type(listener).require_reachable is not default
        }
        self._calls: dict[str, _Call] = {}

    def look(self, stop: threading.Event, report: CheckReport) -> None:
        """Report each producer group whose listener could not answer a check now. A checker that stops reports none."""
        until_s = self._runtime.monotonic() + ANSWER_S_MAX
        for group, listener in self._listeners.items():
            if group not in self._calls:
                self._calls[group] = self._begin(listener)
                self._wait([self._calls[group]], self._runtime.monotonic() + ALONE_S_MAX, stop)
        self._wait(self._calls.values(), until_s, stop)
        if stop.is_set():
            return
        for group, listener in self._listeners.items():
            reason = self._problem_of(group)
            if reason is None:
                continue
            name = redacted(one_line(repr(listener)))
            sentence = f"no check of producer group {group!r} can be answered: {name} {reason}"
            logger.warning("%s", sentence, extra={"producer_group": group})
            report.problem(None, sentence)

    def _begin(self, listener: TransactionListener) -> _Call:
        call = _Call(self._runtime.monotonic())
        if listener.requires_spark or not self._in_threads:
            _ask(listener, call, Exception)  # an exit or an interrupt of the user ends this thread
        else:  # nothing else would report what ends such a thread
            self._runtime.start_thread(lambda: _ask(listener, call, BaseException), "txmq-probe", daemon=True)
        return call

    def _wait(self, calls: Collection[_Call], until_s: float, stop: threading.Event) -> None:
        while not stop.is_set() and (left_s := until_s - self._runtime.monotonic()) > 0:
            if not wait([call.back for call in calls], min(STOP_POLL_S, left_s)).not_done:
                return

    def _problem_of(self, group: str) -> str | None:
        call = self._calls[group]
        if not call.back.done():
            return f"has not answered for {self._runtime.monotonic() - call.began_s:.1f} s"
        del self._calls[group]
        problem = call.back.exception()
        return None if problem is None else f"raised {sentence_of(problem)}"


def _ask(listener: TransactionListener, call: _Call, caught: type[BaseException]) -> None:
    try:
        listener.require_reachable()
    except caught as problem:
        call.back.set_exception(problem)
    else:
        call.back.set_result(None)
