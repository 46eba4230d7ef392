"""Group commit: threads that wait at the same moment share a commit.

::

    thread 1 ── files ─┐                     ┌─ local transaction ─┐
    thread 2 ── files ─┼─ one commit to half ┼─ local transaction ─┼─ one commit to op ─▶ three results
    thread 3 ── files ─┘                     └─ local transaction ─┘

Requests that come during a commit share the next commit. A single thread waits for no other.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from rmq_spark._core.log.decision import Decided, Decision
from rmq_spark._core.log.half import HalfFile, HalfRows
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.log.single_messages import OneMessage, make_rows
from rmq_spark._core.log.staged_batches import PrepareError, Staged
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import Runtime, callers, owns_lock
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark.errors import (
    CorruptLogError,
    LostStagedFileError,
    OptionError,
    TxmqError,
)

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

AT_ONCE_MAX = 2048
"""Half batches in one commit: with those of a shared file, at most 128 MiB of messages."""
GATHER_POLL_S = 0.002
"""Seconds between two looks of a commit thread that gathers requests."""
GATHER_COMMITS_MAX = 3
"""A commit thread gathers at most as long as this many commits take."""
GATHER_S_MAX = 0.25
"""A commit thread gathers at most this many seconds. If the last commit ended longer ago, it does not gather."""
SINGLE_BATCH_ERRORS = (LostStagedFileError, CorruptLogError)
"""Errors that one half batch of a commit causes. Then the half batches are committed one by one."""

Request = TypeVar("Request")
Result = TypeVar("Result")


Stageable = HalfFile | HalfRows | OneMessage
"""A half file, or rows or a message that will be written to one."""


class GroupCommit:
    """Lets the half batches of many threads share commits. It commits in threads of its own, so an interrupt in a
    caller's thread ends only that thread's wait.

    A prepare waits ``linger_s`` seconds for others to share its commit, or until ``at_once_max`` have come.
    ``owns_send_lock`` returns True in a thread that holds a lock which ``on_answer`` takes: it would wait for itself.
    """

    def __init__(
        self,
        engine: Engine,
        linger_s: float = 0.0,
        at_once_max: int = AT_ONCE_MAX,
        owns_send_lock: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._owns_send_lock = owns_send_lock
        runtime, commit_lock = engine.runtime, engine.lock
        self._prepares: CommitQueue[OneMessage | Staged, HalfRecord | TxmqError] = CommitQueue(
            runtime, "txmq-prepare", self._prepare, linger_s, at_once_max, commit_lock=commit_lock
        )
        self._decides: CommitQueue[Decision, Decided] = CommitQueue(
            runtime,
            "txmq-decide",
            engine.decide,
            at_once_max=at_once_max,
            sibling=self._prepares,
            commit_lock=commit_lock,
        )

    def hurry(self, hurries: bool = True) -> None:
        """Stop lingering, or linger again."""
        self._prepares.hurries = hurries

    @property
    def may_wait(self) -> bool:
        """Whether this thread may wait for a commit: False within a commit, and while this thread holds a lock that a
        commit needs. Python may call a signal handler, ``__del__`` or a log handler there, which would wait for its own
        thread."""
        queues = (self._prepares, self._decides)
        return not (any(queue.owns_commit_lock for queue in queues) or is_within(queues) or self._owns_send_lock())

    def require_may_wait(self) -> None:
        """Raise OptionError in a thread that may not wait for a commit."""
        if not self.may_wait:
            raise OptionError(
                "a send waits for a commit, and this call came in the midst of one, from a signal handler, a log "
                "handler or __del__: it would wait for itself for ever. Send with send_async there, or hand the "
                "message to another thread"
            )

    def prepare(self, staged: Sequence[Staged]) -> Sequence[HalfRecord | PrepareError]:
        """Commit staged files together with those of other threads. Rows and messages are written to files first.
        What is raised is about one half batch, as in :meth:`Engine.prepare`; any other may be prepared."""
        self.require_may_wait()
        answers = self._prepares.ask({batch.header.name: batch for batch in staged})
        return [_require(answer, HalfRecord | PrepareError) for answer in answers]

    def prepare_async(self, message: OneMessage, on_answer: OnAnswer[HalfRecord | TxmqError]) -> None:
        """:meth:`prepare` one message without waiting. The commit thread calls ``on_answer``, which must not wait and
        must not raise."""
        self._prepares.put(message, message.header.name, on_answer)

    def decide(self, decisions: Sequence[Decision]) -> Sequence[Decided]:
        """Make verdicts final together with those of other threads. What is raised is about one half batch, as in
        :meth:`Engine.decide`; any other may be decided."""
        self.require_may_wait()
        answers = self._decides.ask({decision.record.half_id: decision for decision in decisions})
        return [_require(answer, Decided) for answer in answers]

    def decide_async(self, decision: Decision, on_answer: OnAnswer[Decided]) -> None:
        """:meth:`decide` without waiting: see :meth:`prepare_async`."""
        self._decides.put(decision, decision.record.half_id, on_answer)

    def _prepare(self, requests: Sequence[OneMessage | Staged]) -> list[HalfRecord | TxmqError]:
        problems = make_rows([file for request in requests for file in request.files if isinstance(file, OneMessage)])
        staged = [
            Staged(request.header, [cast(HalfRows, f.rows) if isinstance(f, OneMessage) else f for f in request.files])
            for request in requests
            if request.header.half_id not in problems
        ]
        prepared: Iterator[HalfRecord | PrepareError] = iter(())
        if staged:
            prepared = iter(self._engine.prepare(staged))
        return [problems.get(request.header.half_id) or next(prepared) for request in requests]


def _require(answer: Any, expected: type | UnionType) -> Any:
    if isinstance(answer, expected):
        return answer
    raise answer


OnAnswer: TypeAlias = Callable[[Result | None, BaseException | None], None]
"""A function that is called with the answer to a request, or with its problem."""


class _Entry(Generic[Request, Result]):
    """A request that waits in a queue, and its callback. ``key`` names the half batch."""

    __slots__ = ("answer", "key", "on_answer", "problem", "request")

    def __init__(self, request: Request, key: str, on_answer: OnAnswer[Result]) -> None:
        self.request = request
        self.key = key
        self.on_answer = on_answer
        self.answer: Result | None = None
        self.problem: BaseException | None = None

    def call_back(self) -> None:
        """Call ``on_answer`` with the answer or the problem."""
        try:
            self.on_answer(self.answer, self.problem)
        except BaseException as problem:  # the other callbacks must be called, too
            logger.error("what follows on half batch %r ended: %s", self.key, traceback_of(problem))


class CommitQueue(Generic[Request, Result]):
    """Makes one commit after the other, each for all requests that wait at its start. ``commit`` takes requests about
    different half batches and returns an answer for each.

    Its thread starts with the first request and ends when none is left. So an idle program has no thread, and Python
    exits after the commits that are under way. The first request waits ``linger_s`` seconds for others. A sender uses
    two queues in turn: it prepares in one, and decides in the other, the ``sibling``. A commit takes ``commit_lock``.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        commit: Callable[[Sequence[Request]], Sequence[Result]],
        linger_s: float = 0.0,
        at_once_max: int = AT_ONCE_MAX,
        sibling: CommitQueue[Any, Any] | None = None,
        commit_lock: object = None,
    ) -> None:
        self._runtime = runtime
        self.hurries = False
        self._commit_lock = commit_lock
        self._linger_s = linger_s
        self._at_once_max = at_once_max
        self._name = name
        self._commit = commit
        self._lock = runtime.lock()
        self._waiting: deque[_Entry[Request, Result]] = deque()
        self._has_thread = False
        self._group_sizes = deque([1], 2)  # of the last two groups, each plus what the sibling was committing then
        self._commit_s = 0.0  # duration of the last commit
        self._ended_s = 0.0
        self._committing = 0  # requests of the commit that is running
        self._sibling: CommitQueue[Any, Any] = self if sibling is None else sibling
        self._sibling._sibling = self

    @property
    def owns_commit_lock(self) -> bool:
        """Whether this thread has a lock that a commit needs."""
        return owns_lock(self._lock) or owns_lock(self._commit_lock)

    def put(self, request: Request, key: str, on_answer: OnAnswer[Result]) -> None:
        """Add a request. The commit thread calls ``on_answer`` with the result.

        When no thread can be started, the caller's thread commits.
        """
        self._put([_Entry(request, key, on_answer)])

    def ask(self, requests: Mapping[str, Request]) -> list[Result | BaseException]:
        """Add requests, by key; wait for their commits; return the answer or the problem of each."""
        waits: list[tuple[_Entry[Request, Result], threading.Event]] = []
        for key, request in requests.items():
            done = self._runtime.event()
            waits.append((_Entry(request, key, lambda *_, done=done: done.set()), done))
        self._put([entry for entry, _ in waits])
        for _, done in waits:
            done.wait()
        return [cast(Result, entry.answer) if entry.problem is None else entry.problem for entry, _ in waits]

    def _put(self, entries: Sequence[_Entry[Request, Result]]) -> None:
        started = True
        with self._lock:
            try:
                self._waiting.extend(entries)
                if not self._has_thread:
                    self._has_thread = True
                    started = self._start_thread()
            except BaseException:  # an interrupt. Two threads that work do no harm
                for entry in entries:
                    with suppress(ValueError):
                        self._waiting.remove(entry)
                self._has_thread = False
                if self._waiting:  # code that Python called in our midst added them, and relied on this thread
                    self._has_thread = self._start_thread()
                raise
        reach("commit awaited", queue=self._name)
        if not started:
            self._work()

    def _start_thread(self) -> bool:
        try:
            self._runtime.start_thread(self._work, self._name)
        except RuntimeError:
            return False
        return True

    def _work(self) -> None:
        try:
            self._gather()
            while group := self._next_group():
                began_s = self._runtime.monotonic()
                self._group_sizes.append(len(group) + self._sibling._committing)
                self._committing = len(group)
                self._commit_group(group)
                self._committing = 0
                self._ended_s = self._runtime.monotonic()
                self._commit_s = self._ended_s - began_s
                self._gather()
        except BaseException as problem:  # such as MemoryError: all that wait get it; a later request starts a thread
            with self._lock:
                self._has_thread = False
                entries, self._waiting = self._waiting, deque()
            for entry in entries:
                entry.problem = _copy_of(problem)
                entry.call_back()
            logger.error("%s ended, and the next request starts it anew: %s", self._name, traceback_of(problem))

    def _gather(self) -> None:
        """Wait until as many requests are here as in the last two groups: their senders come again soon, one by one.
        Otherwise the first one to return commits alone while the rest wait; or half of them prepare while the others
        decide, two groups for ever, at twice as many commits."""
        began_s = self._runtime.monotonic()
        linger_until_s = began_s + self._linger_s
        last_s = began_s + min(GATHER_COMMITS_MAX * self._commit_s, GATHER_S_MAX)
        if began_s > max(self._ended_s, self._sibling._ended_s) + GATHER_S_MAX and not self._sibling._committing:
            last_s = began_s
        while 0 < (waiting := len(self._waiting)) < self._at_once_max:
            now_s = self._runtime.monotonic()
            come_until_s = max(began_s, self._sibling._ended_s) + self._commit_s
            until_s = last_s if self._sibling._committing else min(last_s, come_until_s)
            lingers = now_s < linger_until_s and not self.hurries
            if not lingers and (now_s >= until_s or waiting >= max(self._group_sizes)):
                return
            self._runtime.sleep(GATHER_POLL_S)

    def _next_group(self) -> list[_Entry[Request, Result]]:
        """Take the next group, with each half batch once. An empty group ends the thread; a later request starts
        another."""
        with self._lock:
            while True:
                group = self._take_group()
                self._has_thread = bool(group)
                # Python may call us in our midst (__del__, a signal handler). A request that was added before that line
                # started no thread, so look again.
                if group or not self._waiting:
                    return group

    def _take_group(self) -> list[_Entry[Request, Result]]:
        group: dict[str, _Entry[Request, Result]] = {}
        later: list[_Entry[Request, Result]] = []
        while self._waiting and len(group) < self._at_once_max:
            entry = self._waiting.popleft()
            if group.setdefault(entry.key, entry) is not entry:
                later.append(entry)
        self._waiting.extendleft(reversed(later))
        return list(group.values())

    def _commit_group(self, group: Sequence[_Entry[Request, Result]]) -> None:
        try:
            reach("shared commit begins", queue=self._name, about=[entry.key for entry in group])
            answers = self._commit([entry.request for entry in group])
            for entry, answer in zip(group, answers, strict=True):
                entry.answer = answer
        except SINGLE_BATCH_ERRORS as problem:
            if len(group) > 1:
                for entry in group:
                    self._commit_group([entry])
                return
            group[0].problem = problem
        except BaseException as problem:  # a panic of delta-rs is no Exception; the waiting threads must get it
            for entry in group:
                entry.problem = problem if len(group) == 1 else _copy_of(problem)
        for entry in group:
            entry.call_back()


def is_within(queues: Collection[CommitQueue[Any, Any]]) -> bool:
    """Whether this call came from within the work of one of these queues."""
    return any(f.f_code is CommitQueue._work.__code__ and f.f_locals.get("self") in queues for f in callers())


def _copy_of(problem: BaseException) -> BaseException:
    """A copy of the problem for another thread, which raises it with a traceback of its own."""
    try:
        copied = copy.copy(problem)
    except Exception:
        return problem
    copied.__cause__ = problem.__cause__ or problem
    return copied
