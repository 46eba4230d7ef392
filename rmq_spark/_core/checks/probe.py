"""Finds out once a round whether listeners could answer a check, even when there is nothing to check. Otherwise a
database that is down would show only when messages are stuck."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from rmq_spark._core.checks.check_report import CheckReport
from rmq_spark._core.checks.open_call import OpenCall, wait_for
from rmq_spark._core.listeners.transaction_listener import TransactionListener
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.vocabulary.redaction import one_line, redacted, sentence_of

logger = logging.getLogger(__name__)

ANSWER_S_MAX = 10.0
"""A listener that has not returned within this many seconds is reported. Its call goes on, and a later round takes its
answer."""
ALONE_S_MAX = 1.0
"""A call waits at most this many seconds for the call before it, because two listeners may share a connection."""


class Probe:
    """Calls :meth:`TransactionListener.require_reachable` of each listener (by producer group) that overrides it.
    ``in_threads``: in threads of its own, since a connect may hang."""

    def __init__(self, runtime: Runtime, listeners: Mapping[str, TransactionListener], in_threads: bool) -> None:
        self._runtime = runtime
        self._in_threads = in_threads
        default = TransactionListener.require_reachable
        self._listeners = {
            group: listener for group, listener in listeners.items() if type(listener).require_reachable is not default
        }
        self._calls: dict[str, OpenCall[None]] = {}  # by producer group

    def look(self, stop: threading.Event, report: CheckReport) -> None:
        """Report each producer group whose listener could not answer a check now. A checker that stops reports none."""
        monotonic = self._runtime.monotonic

        def until(end_s: float) -> Callable[[], float]:
            return lambda: 0.0 if stop.is_set() else end_s - monotonic()

        all_s_left = until(monotonic() + ANSWER_S_MAX)
        for group, listener in self._listeners.items():
            if group not in self._calls:
                thread_name = "txmq-probe" if self._in_threads and not listener.requires_spark else None
                self._calls[group] = OpenCall.begin(self._runtime, listener.require_reachable, thread_name)
                wait_for([self._calls[group]], until(monotonic() + ALONE_S_MAX))
        wait_for(self._calls.values(), all_s_left)
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

    def _problem_of(self, group: str) -> str | None:
        call = self._calls[group]
        if not call.has_returned:
            return f"has not answered for {self._runtime.monotonic() - call.began_s:.1f} s"
        del self._calls[group]
        problem = call.result.exception()
        return None if problem is None else f"raised {sentence_of(problem)}"
