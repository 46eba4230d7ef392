"""Tells observers what happens in this process: sends, consumed messages, checks, commits.

The layers above call :func:`tell`, and do not know what an observer does with the news. While there is no observer they
only look at an empty tuple::

    if observer.observers():
        observer.tell(lambda o: o.lost_race("op"))
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

from rmq_spark._core.vocabulary.redaction import traceback_of

logger = logging.getLogger(__name__)


class Sent(NamedTuple):
    """A half batch that a producer or a sink brought to its end.

    Attributes
    ----------
    log : str
        The path of the commit log.
    topics : mapping of str to int
        Its messages, by topic.
    seconds : float
        From the call to its end: staging, both commits and the local transaction.
    finish_seconds : float or None
        From the prepare to the verdict; None when no verdict came, or when it was prepared by an earlier run.
    """

    log: str
    producer_group: str
    topics: Mapping[str, int]
    seconds: float
    finish_seconds: float | None


class Consumed(NamedTuple):
    """The result of one call of a listener, or of a series of calls, for messages of one queue.

    Attributes
    ----------
    log : str
        The path of the commit log.
    consumed, failed : int
        Numbers of messages.
    """

    log: str
    consumer_group: str
    topic: str
    consumed: int
    failed: int
    seconds: float


class Observer:
    """Is told what happens. The methods do nothing here. Each is called in the thread in which the event happened."""

    def sent(self, sent: Sent) -> None:
        """A half batch came to its end."""

    def not_sent(self, log: str, producer_group: str, problem: Exception) -> None:
        """A send raised."""

    def consumed(self, consumed: Consumed) -> None:
        """A ``PushConsumer``'s listener came back."""

    def checked(self, log: str, checker: str, report: Any) -> None:
        """A round of checks ended, with a ``CheckReport``. ``checker`` is ``job``, or ``producer`` for a producer's own
        checks."""

    def committed(self, table: str) -> None:
        """A commit to a table was made."""

    def lost_race(self, table: str) -> None:
        """A commit was not made, because another writer took the version. It is tried again."""


CONSUMERS: WeakSet[Any] = WeakSet()
"""The started ``PushConsumer`` s of this process. ``in_flight()`` of each says what it has fetched."""

_observers: tuple[Observer, ...] = ()
_lock = threading.RLock()


def add(observer: Observer) -> None:
    """Tell an observer from now on."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)


def remove(observer: Observer) -> None:
    """Tell an observer no more."""
    global _observers
    with _lock:
        _observers = tuple(o for o in _observers if o is not observer)


def observers() -> tuple[Observer, ...]:
    """Return the observers that are told."""
    return _observers


def tell(what: Callable[[Observer], None]) -> None:
    """Call each observer. An observer's error is logged, and does not reach the caller."""
    for observer in _observers:
        try:
            what(observer)
        except Exception as problem:
            logger.warning("%s could not count: %s", type(observer).__name__, traceback_of(problem))
