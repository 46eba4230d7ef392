"""Group commit: threads that wait at the same moment share a commit.

::

    thread 1 ── files ─┐                     ┌─ local transaction ─┐
    thread 2 ── files ─┼─ one commit to half ┼─ local transaction ─┼─ one commit to op ─▶ three results
    thread 3 ── files ─┘                     └─ local transaction ─┘

While a commit is under way, those who come wait for the next one, and share it. One thread alone waits for nobody.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

from rmq_spark._core.log.half import HalfFile, HalfRows
from rmq_spark._core.log.half_table import HalfRecord, PrepareError, Staged
from rmq_spark._core.log.op_table import Decided, Decision
from rmq_spark._core.log.single_messages import OneMessage, arrange
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import Runtime, callers, is_held
from rmq_spark._core.vocabulary.message import to_table
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark.errors import (
    AlreadyPreparedError,
    LostFileError,
    LostStagedFileError,
    OptionError,
    StagedFilesTooOldError,
    TxmqError,
)

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

AT_ONCE_MAX = 2048
"""Half batches in one commit: with those of a shared file, at most 128 MiB of messages."""
GATHERING_S = 0.002
"""A thread that waits for more to come looks so often."""
GATHERS_FOR = 3
"""It waits as long as so many commits take, at most."""
GATHERS_S_MAX = 0.25
"""It waits for so long, at most. Whoever comes later than this after a commit expects none of those who were in it."""
PREPARE_ERRORS = (AlreadyPreparedError, StagedFilesTooOldError)
OF_ONE = (LostStagedFileError, LostFileError)
"""Problems of one half batch among those of a commit. The others are tried again without it."""

Request = TypeVar("Request")
Result = TypeVar("Result")


Stageable = HalfFile | HalfRows | OneMessage
"""A half file, or what will be one."""


class Commits(Protocol):
    """How a sender commits: alone, as an :class:`Engine` does, or together with other threads."""

    def prepare(self, staged: Sequence[Staged]) -> Sequence[HalfRecord | PrepareError]:
        """Commit the staged files of half batches, and read what ``op`` says afterwards. As ``Engine.prepare``."""

    def decide(self, decisions: Sequence[Decision]) -> Sequence[Decided]:
        """Make verdicts final. As ``Engine.decide``."""


class GroupCommit:
    """Half batches of many threads share commits. Those are made in threads of their own: an interrupt in a caller's
    thread ends its waiting, and no commit.

    Parameters
    ----------
    log : Engine
    linger_s : float
        A prepare waits so long for others to share its commit, unless there are ``at_once_max`` of them.
    at_once_max : int
        Half batches of one commit, up to :data:`AT_ONCE_MAX`.
    """

    def __init__(self, log: Engine, linger_s: float = 0.0, at_once_max: int = AT_ONCE_MAX) -> None:
        self._log = log
        self.holds: Callable[[], bool] = bool
        """Whether this thread holds a lock that whoever is given an answer takes."""
        runtime, needs = log.runtime, log.lock
        self._prepares: CommitQueue[OneMessage | Staged, HalfRecord | TxmqError] = CommitQueue(
            runtime, "txmq-prepare", self._prepare, linger_s, at_once_max, needs=needs
        )
        self._decides: CommitQueue[Decision, Decided] = CommitQueue(
            runtime, "txmq-decide", log.decide, at_once_max=at_once_max, beside=self._prepares, needs=needs
        )

    def hurry(self, hurries: bool = True) -> None:
        """Linger no more, or again."""
        self._prepares.hurries = hurries

    @property
    def may_wait(self) -> bool:
        """Whether this thread may wait for a commit. One that commits may not, and one that holds a lock which a commit
        needs: what Python calls in its midst (a signal handler, ``__del__``, a log handler) would wait for itself."""
        lanes = (self._prepares, self._decides)
        return not (any(lane.is_held for lane in lanes) or is_within(lanes) or self.holds())

    def require_may_wait(self) -> None:
        """Raise OptionError in a thread that may not wait for a commit."""
        if not self.may_wait:
            raise OptionError(
                "a send waits for a commit, and this call came in the midst of one, from a signal handler, a log "
                "handler or __del__: it would wait for itself for ever. Send with send_async there, or hand the "
                "message to another thread"
            )

    def prepare(self, staged: Sequence[Staged]) -> Sequence[HalfRecord | PrepareError]:
        """Commit staged files together with those of other threads. What is in no file yet is written first.

        Raises
        ------
        TxmqError
            Another problem with one of them than those that :meth:`Engine.prepare` returns. Others may be prepared.
        """
        self.require_may_wait()
        found = self._prepares.ask({batch.header.name: batch for batch in staged})
        return [_answer(one, (HalfRecord, *PREPARE_ERRORS)) for one in found]

    def prepare_and_go_on(self, message: OneMessage, then: Then[HalfRecord | TxmqError]) -> None:
        """As :meth:`prepare` for one message, and nobody waits: ``then`` is called with what became of it.

        It is called in the thread that commits, so it must not wait for anything, and must not raise.
        """
        self._prepares.put(message, message.header.name, then)

    def decide(self, decisions: Sequence[Decision]) -> Sequence[Decided]:
        """Make verdicts final together with those of other threads.

        Raises
        ------
        TxmqError
            Another problem with one of them than those that :meth:`Engine.decide` returns. Others may be decided.
        """
        self.require_may_wait()
        found = self._decides.ask({decision.record.half_id: decision for decision in decisions})
        return [_answer(one, (Decided,)) for one in found]

    def decide_and_go_on(self, decision: Decision, then: Then[Decided]) -> None:
        """As :meth:`decide`, and nobody waits; see :meth:`prepare_and_go_on`."""
        self._decides.put(decision, decision.record.half_id, then)

    def _prepare(self, waiting: Sequence[OneMessage | Staged]) -> list[HalfRecord | TxmqError]:
        wrong = arrange([f for one in waiting for f in one.files if isinstance(f, OneMessage)])
        ready = [
            Staged(one.header, [_arranged(f) for f in one.files]) for one in waiting if one.header.half_id not in wrong
        ]
        prepared: Iterator[HalfRecord | PrepareError] = iter(())
        if ready:
            prepared = iter(self._log.prepare(ready))
        return [wrong.get(one.header.half_id) or next(prepared) for one in waiting]


def _answer(found: Any, expected: tuple[type, ...]) -> Any:
    if isinstance(found, expected):
        return found
    raise found


def _arranged(file: Stageable) -> HalfFile | HalfRows:
    if not isinstance(file, OneMessage):
        return file
    return file.rows or file.writer.rows_of(to_table([file.message]))


Then: TypeAlias = Callable[[Result | None, BaseException | None], None]
"""Takes the answer to a request, or the problem with it."""


class _Asked(Generic[Request, Result]):
    """A request, and who hears what became of it."""

    __slots__ = ("about", "answer", "problem", "request", "then")

    def __init__(self, request: Request, about: str, then: Then[Result]) -> None:
        self.request = request
        self.about = about
        self.then = then
        self.answer: Result | None = None
        self.problem: BaseException | None = None

    def tell(self) -> None:
        """Hand on what became of it."""
        try:
            self.then(self.answer, self.problem)
        except BaseException as problem:  # the others must hear of theirs
            logger.error("what follows on half batch %r ended: %s", self.about, traceback_of(problem))


class _Wait(Generic[Result]):
    """Lets a thread wait for what it asked for."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done
        self._answer: Result | None = None
        self._problem: BaseException | None = None

    def hear(self, answer: Result | None, problem: BaseException | None) -> None:
        """End the waiting."""
        self._answer, self._problem = answer, problem
        self._done.set()

    def outcome(self) -> Result | BaseException:
        """Wait for the answer, or the problem, and return it."""
        self._done.wait()
        return cast(Result, self._answer) if self._problem is None else self._problem


class CommitQueue(Generic[Request, Result]):
    """Hands requests to one commit after the other, as many as have come by then.

    Its thread starts with the first request and ends when none is left. So an idle program has no thread, and Python
    ends after the commits that are under way.

    Parameters
    ----------
    machine : Machine
    name : str
        Of the thread.
    commit : callable
        Takes requests about different half batches and returns an answer for each.
    linger_s : float
        So long the first one waits for others.
    at_once_max : int
        Requests of one commit.
    beside : Lane, optional
        Those who have their answer there come here next, and those who have it here go there.
    needs : lock, optional
        A commit takes it.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        commit: Callable[[Sequence[Request]], Sequence[Result]],
        linger_s: float = 0.0,
        at_once_max: int = AT_ONCE_MAX,
        beside: CommitQueue[Any, Any] | None = None,
        needs: object = None,
    ) -> None:
        self._machine = runtime
        self.hurries = False
        self._needs = needs
        self._linger_s = linger_s
        self._at_once_max = at_once_max
        self._name = name
        self._commit = commit
        self._lock = runtime.lock()
        self._waiting: deque[_Asked[Request, Result]] = deque()
        self._runs = False
        self._sizes = deque([1], 2)  # of the last groups, with those who were beside this lane
        self._commit_s = 0.0  # how long the last commit took
        self._ended_s = 0.0
        self._under_way = 0  # requests of the commit that is made now
        self._beside: CommitQueue[Any, Any] = self if beside is None else beside
        self._beside._beside = self

    @property
    def is_held(self) -> bool:
        """Whether this thread has a lock that a commit needs."""
        return is_held(self._lock) or is_held(self._needs)

    def put(self, request: Request, about: str, then: Then[Result]) -> None:
        """Hand in a request. ``then`` is called with what became of it, in the thread that commits.

        That is the caller's when there is no other one to be had.
        """
        self._put([_Asked(request, about, then)])

    def ask(self, requests: Mapping[str, Request]) -> list[Result | BaseException]:
        """Wait for the commits that have these requests, by half id; return the answer to each, or its problem."""
        waits: list[_Wait[Result]] = [_Wait(self._machine.event()) for _ in requests]
        asked = zip(requests.items(), waits, strict=True)
        self._put([_Asked(request, about, wait.hear) for (about, request), wait in asked])
        return [wait.outcome() for wait in waits]

    def _put(self, asked: Sequence[_Asked[Request, Result]]) -> None:
        has_thread = True
        with self._lock:
            try:
                self._waiting.extend(asked)
                if not self._runs:
                    self._runs = True
                    has_thread = self._starts()
            except BaseException:  # an interrupt. Two threads at work do no harm
                for one in asked:
                    with suppress(ValueError):
                        self._waiting.remove(one)
                self._runs = False
                if self._waiting:  # what Python called in our midst has put them there, and found a thread on its way
                    self._runs = self._starts()
                raise
        reach("commit awaited", lane=self._name)
        if not has_thread:
            self._work()

    def _starts(self) -> bool:
        try:
            self._machine.start_thread(self._work, self._name)
        except RuntimeError:
            return False
        return True

    def _work(self) -> None:
        try:
            self._gather()
            while group := self._next():
                began_s = self._machine.monotonic()
                self._sizes.append(len(group) + self._beside._under_way)
                self._under_way = len(group)
                self._answer(group)
                self._under_way = 0
                self._ended_s = self._machine.monotonic()
                self._commit_s = self._ended_s - began_s
                self._gather()
        except BaseException as problem:  # a full memory: those who wait must hear of it, and the next one starts anew
            with self._lock:
                self._runs = False
                left, self._waiting = self._waiting, deque()
            for asked in left:
                asked.problem = _one_more(problem)
                asked.tell()
            logger.error("%s ended, and the next request starts it anew: %s", self._name, traceback_of(problem))

    def _gather(self) -> None:
        """Wait for as many as came lately. Those of the last group come again soon, one after the other: the first of
        them would have a commit alone, for which all others wait. And two halves, of which one prepares while the other
        decides, would stay apart for ever, with twice as many commits."""
        began_s = self._machine.monotonic()
        linger_until = began_s + self._linger_s
        last = began_s + min(GATHERS_FOR * self._commit_s, GATHERS_S_MAX)
        if began_s > max(self._ended_s, self._beside._ended_s) + GATHERS_S_MAX and not self._beside._under_way:
            last = began_s
        while 0 < (waiting := len(self._waiting)) < self._at_once_max:
            now = self._machine.monotonic()
            come_until = max(began_s, self._beside._ended_s) + self._commit_s
            until = last if self._beside._under_way else min(last, come_until)
            lingers = now < linger_until and not self.hurries
            if not lingers and (now >= until or waiting >= max(self._sizes)):
                return
            self._machine.sleep(GATHERING_S)

    def _next(self) -> list[_Asked[Request, Result]]:
        """Those who are next, each half batch once. None, and the thread ends: who comes then starts another."""
        with self._lock:
            while True:
                group = self._group()
                self._runs = bool(group)
                # Python may call us in our midst (__del__, a signal handler). Who came before that line found a thread
                # that runs, so look again.
                if group or not self._waiting:
                    return group

    def _group(self) -> list[_Asked[Request, Result]]:
        group: dict[str, _Asked[Request, Result]] = {}
        later: list[_Asked[Request, Result]] = []
        while self._waiting and len(group) < self._at_once_max:
            asked = self._waiting.popleft()
            if group.setdefault(asked.about, asked) is not asked:
                later.append(asked)
        self._waiting.extendleft(reversed(later))
        return list(group.values())

    def _answer(self, group: Sequence[_Asked[Request, Result]]) -> None:
        try:
            reach("shared commit begins", lane=self._name, about=[asked.about for asked in group])
            answers = self._commit([asked.request for asked in group])
            for asked, answer in zip(group, answers, strict=True):
                asked.answer = answer
        except OF_ONE as problem:
            if len(group) > 1:
                for asked in group:
                    self._answer([asked])
                return
            group[0].problem = problem
        except BaseException as problem:  # a panic of delta-rs is no Exception; those who wait must hear of it
            for asked in group:
                asked.problem = problem if len(group) == 1 else _one_more(problem)
        for asked in group:
            asked.tell()


def is_within(lanes: Collection[CommitQueue[Any, Any]]) -> bool:
    """Whether this call came from within the work of one of some lanes."""
    return any(f.f_code is CommitQueue._work.__code__ and f.f_locals.get("self") in lanes for f in callers())


def _one_more(problem: BaseException) -> BaseException:
    """The same problem for another thread: each raises one of its own, with its own traceback."""
    try:
        twin = copy.copy(problem)
    except Exception:
        return problem
    twin.__cause__ = problem.__cause__ or problem
    return twin
