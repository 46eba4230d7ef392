"""PullConsumer: gives messages to a script on request (RocketMQ: ``DefaultLitePullConsumer``)."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pyarrow as pa

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.member import GroupMember
from rmq_spark._core.consumers.member_settings import (
    CLUSTERING,
    HEARTBEAT_INTERVAL_S,
    MAX_SPAN,
    PERSIST_INTERVAL_S,
    ConsumeFromWhere,
    MemberSettings,
)
from rmq_spark._core.consumers.member_threads import MemberThreads
from rmq_spark._core.consumers.message_listener import messages_of
from rmq_spark._core.consumers.progress import Take
from rmq_spark._core.log.heartbeats import MEMBER_LEASE_S
from rmq_spark._core.runtime.runtime import owns_lock
from rmq_spark._core.vocabulary.message import MessageExt
from rmq_spark._core.vocabulary.options import Duration, flag, named, seconds, whole_number
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import ConsumeError

POLL_TIMEOUT_S = 5.0
PULL_BATCH_SIZE = 10_000
OTHERS_LOOK_S = 0.5
"""Seconds between two looks at the other members' positions, while a consumer waits for its group to reach the end."""


class PullConsumer:
    """Gives committed messages to a script that asks for them (RocketMQ: ``DefaultLitePullConsumer``).

    Only one thread at a time may use it. Consumers of one group share its queues, as those of :class:`PushConsumer` do.
    The group's retries are not read: the script itself handles a message that fails.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    group : str
        The consumer group. Spark must not read for it.
    topics : str or iterable of str
        Topics to read.
    tags, selector : str, optional
        As for :class:`PushConsumer`.
    tables : bool
        True: iterating gives ``pyarrow.Table`` s of messages of one queue (the source's columns), else single messages.
    stop_at_end : bool
        True: iterating ends when the group has read all that the log held at the start. False: it ends with
        :meth:`shutdown`.
    auto_commit : bool
        True: messages count as consumed when the script asks for more. So a script that raises over a message gets it
        again, and a killed one gets those of its last second. False: they count as consumed at :meth:`commit`.
    pull_batch_size : int
        Maximum number of messages of one :meth:`poll`.
    consume_from_where : ConsumeFromWhere or str
        Where a new group begins: at the first message, unlike a ``PushConsumer``.
    consume_timestamp, pull_interval, max_span, persist_consumer_offset_interval, heartbeat_interval, lease, take_over
        As for :class:`PushConsumer`. At most ``max_span`` messages of a queue may be given out and not committed.

    Raises
    ------
    OptionError, TopicNotFoundError

    Examples
    --------
    >>> for message in PullConsumer("log", "report", "orders", stop_at_end=True):  # doctest: +SKIP
    ...     print(message.keys)
    """

    @named
    def __init__(
        self,
        log: CommitLog | str | os.PathLike[str],
        group: str,
        topics: str | Iterable[str],
        tags: str | None = None,
        selector: str | None = None,
        *,
        tables: bool = False,
        stop_at_end: bool = False,
        auto_commit: bool = True,
        pull_batch_size: int = PULL_BATCH_SIZE,
        consume_from_where: ConsumeFromWhere | str = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET,
        consume_timestamp: datetime | None = None,
        pull_interval: Duration | None = None,
        max_span: int = MAX_SPAN,
        persist_consumer_offset_interval: Duration = PERSIST_INTERVAL_S,
        heartbeat_interval: Duration = HEARTBEAT_INTERVAL_S,
        lease: Duration = MEMBER_LEASE_S,
        message_model: str = CLUSTERING,
        take_over: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if consume_timestamp is not None and consume_from_where == ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET:
            consume_from_where = ConsumeFromWhere.CONSUME_FROM_TIMESTAMP
        settings = MemberSettings.of(
            group, topics, tags, selector, consume_from_where, consume_timestamp, heartbeat_interval, lease,
            persist_consumer_offset_interval, pull_interval, max_span, message_model, take_over,
        )  # fmt: skip
        self._tables = flag(tables, "tables")
        self._stop_at_end = flag(stop_at_end, "stop_at_end")
        self._auto_commit = flag(auto_commit, "auto_commit")
        self._batch_rows = whole_number(pull_batch_size, "pull_batch_size", 1)
        opened = engine_of(log, storage_options)
        self.member = GroupMember(opened, settings, reads_retries=False)
        self.member_threads = MemberThreads(self.member)
        self._runtime = opened.runtime
        self._given: list[Take] = []  # given out, and not committed
        self._handing: tuple[Take, int] | None = None  # the take that is given out one by one, and the next offset
        self._unseen: Take | None = None  # the newest take, until nothing keeps the script from seeing it
        self._dropped = False
        self._is_asked_to_end = False
        self._ending = opened.runtime.lock()
        self._within: int | None = None  # the thread that is in a call, or asks for the next message of a loop
        self._is_iterated = False
        self._ends: dict[Queue, int] = {}
        self._others: dict[Queue, int] = {}  # the positions of the group, at the last look
        self._others_at_s = 0.0
        self._open = False
        self._turn = 0

    def __repr__(self) -> str:
        return f"PullConsumer({self.member.engine!r}, {self.member.group!r})"

    # ------------------------------------------------------------------ life
    def start(self) -> PullConsumer:
        """Join the group (``with``, and the first request for messages, do it).

        Raises
        ------
        GroupInUseError
            When Spark reads for the group.
        ConsumeError
            In a fork of the process that made the consumer, or after :meth:`shutdown`.
        """
        self.member_threads.require_own_process()
        if (self._is_asked_to_end or self.member.stopping.is_set()) and not self._open:
            raise ConsumeError("this consumer was shut down: make a new one")
        if not self._open:
            if self._stop_at_end:  # messages that are due now count as present at the start
                self.member.place_due()
            self._ends = dict(self.member.engine.tails())
            self.member_threads.start(_weak_caller(self._at_exit))
            self._open = True
        return self

    def shutdown(self) -> None:
        """Write progress, and leave the group. Messages given out and not committed come again, at any member.

        A loop over the consumer ends, and a waiting :meth:`poll` returns None. Another thread or a signal handler may
        call it. When a handler interrupts a call of the consumer or of its log, the loop or the next :meth:`poll` does
        the rest. A consumer cannot be started again.
        """
        self._is_asked_to_end = True
        if not self._is_interrupted():
            self._end()

    def _is_interrupted(self) -> bool:
        """Whether this call interrupts one that holds what the end needs, as a signal handler may."""
        locks = (self.member.changed, self.member.engine.lock)
        return self._within == threading.get_ident() or any(map(owns_lock, locks))

    def _end(self, at_exit: bool = False) -> None:
        with self._ending:  # a second thread waits for the first
            if self._open or self.member_threads.is_running:
                self._open = False
                with self.member.changed:
                    for take in self._given:
                        take.queue.give_back(take, take.finished)
                    self._dropped = bool(self._given)
                    self._given, self._handing = [], None
                self.member_threads.stop(0.0, at_exit)

    def _at_exit(self) -> None:
        self._is_asked_to_end = True
        self._end(at_exit=True)

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.member_threads.abandon(self._given)

    def __enter__(self) -> PullConsumer:
        return self.start()

    def __exit__(self, *details: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ messages
    def poll(self, timeout: Duration = POLL_TIMEOUT_S) -> pa.Table | list[MessageExt] | None:
        """Return messages of one queue, in order; None when none come before the timeout.

        Parameters
        ----------
        timeout : float or str
            Seconds. 0 looks once.

        Returns
        -------
        list of MessageExt, pyarrow.Table (``tables=True``), or None

        Raises
        ------
        ConsumeError
            When ``max_span`` messages of every queue were given out and not committed, or when another thread asks at
            the same time.
        TxmqError
            When the log cannot be read, or a queue of it, and no other queue has messages.
        """
        end_s = self._runtime.monotonic() + seconds(timeout, "timeout")
        with self._one_call():
            self._begin()
            take = self._next_before(end_s)
        if take is None or self._is_asked_to_end:
            return None
        messages = take.messages if self._tables else list(messages_of(take.messages))
        self._unseen = None
        return messages

    def __iter__(self) -> Iterator[Any]:
        """Yield messages (``tables=True``: tables) one by one, and shut down at the end.

        Raises
        ------
        ConsumeError
            When an earlier iteration has not ended: each would count the other's messages as consumed. When another
            thread asks at the same time.
        """
        with self.member.changed:
            if self._is_iterated:
                raise ConsumeError(
                    "this consumer is iterated over already. Let one loop end before the next, and give each thread a "
                    "consumer of its own"
                )
            self._enter()
            self._is_iterated = True
        try:
            self._begin()
            while not self._is_asked_to_end:
                take = self._next_before(self._runtime.monotonic() + POLL_TIMEOUT_S)
                if take is not None and not self._is_asked_to_end:
                    yield from self._hand_out_take(take)
                elif self._stop_at_end and self._is_at_end():
                    return
        finally:
            self._is_iterated = False
            if self._within == threading.get_ident():
                self._within = None
            self.shutdown()

    def commit(self) -> None:
        """Count all messages given out as consumed, and write the progress.

        Raises
        ------
        ConsumeError
            When the group was reset, or another member has claimed a queue of which messages were given out: these
            messages come again, and the progress of the other queues is written. After :meth:`shutdown`, or the end of
            an iteration, when messages were given out and not committed. When another thread asks for messages at the
            same time.
        TxmqError
            When the progress could not be written; the messages may come again.
        """
        self.member_threads.require_own_process()
        if self._dropped and not self._open:
            raise ConsumeError(
                "this consumer was shut down, as at the end of an iteration: what was given out and not committed "
                "comes again. Call commit() within the loop, or poll() in place of iterating"
            )
        with self._one_call():
            with self.member.changed:
                queues = [take.queue for take in self._given]
            self._finish_given()
            self.member.persist()
        lost = sorted({queue.queue for queue in queues if queue.lost})
        if lost:
            names = ", ".join(f"queue {queue_id} of topic {topic!r}" for topic, queue_id in lost)
            raise ConsumeError(
                f"{names}: claimed by another member of group {self.member.group!r}, or the group was reset. What was "
                "given of it since the last commit comes again; go on with poll()"
            )

    # ------------------------------------------------------------------ inside
    def _begin(self) -> None:
        self.start()
        if self._auto_commit:
            self._finish_given()

    def _enter(self) -> None:
        thread_id = threading.get_ident()
        if self._within not in (None, thread_id):
            raise ConsumeError(
                "another thread is asking this consumer just now: what it gives to one thread would count as consumed "
                "when the other asks. Give each thread a consumer of its own"
            )
        self._within = thread_id

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Run one call of the consumer. A shutdown that a signal handler asks for meanwhile comes at its end."""
        is_nested = self._within == threading.get_ident()
        self._enter()
        try:
            yield
        finally:
            if not is_nested:
                self._within = None
                if self._is_asked_to_end:
                    self.shutdown()

    def _hand_out(self, item: Any) -> Iterator[Any]:
        self._within = None
        yield item
        self._enter()

    def _hand_out_take(self, take: Take) -> Iterator[Any]:
        self._unseen = None
        if self._tables:
            yield from self._hand_out(take.messages)
        else:
            for count, message in enumerate(messages_of(take.messages)):
                if count and (self._is_asked_to_end or not (take.queue.is_open and self.member.may_start())):
                    with self.member.changed:  # another member has the queue, or waits for it
                        if take in self._given:
                            take.queue.cut(take, count)
                    break
                self._handing = take, (message.queue_offset or 0) + 1
                yield from self._hand_out(message)
                if self._auto_commit:
                    with self.member.changed:
                        take.first = (message.queue_offset or 0) + 1
            self._handing = None
        if self._auto_commit:
            self._finish_given()

    def _finish_given(self) -> None:
        with self.member.changed:
            unfinished = []
            for take in self._given:
                if self._handing is not None and self._handing[0] is take:  # the script has not seen all of it
                    take.first = self._handing[1]
                    unfinished.append(take)
                else:
                    take.queue.give_back(take, 0 if take is self._unseen else take.messages.num_rows)
            self._given, self._unseen = unfinished, None

    def _next_before(self, end_s: float) -> Take | None:
        """Return the next messages; None when none come until a time, or the end is reached."""
        member = self.member
        while not self._is_asked_to_end:
            if member.problem is not None:
                raise member.problem
            take = self._take()
            if take is not None:
                return take
            fetched = member.fetch_past_damage()
            left_s = end_s - self._runtime.monotonic()
            if fetched:
                continue
            self._require_room()
            if member.fetch_problem is not None:
                raise member.fetch_problem
            if left_s <= 0 or (self._stop_at_end and self._is_at_end()):
                return None
            with member.changed:
                member.changed.wait(min(left_s, member.pull_interval_s))
        return None

    def _take(self) -> Take | None:
        with self.member.changed:
            queues = [q for q in self.member.queues.values() if q.is_open and q.rows]
            if self._is_asked_to_end or not queues or not self.member.may_start():
                return None
            self._turn += 1
            take = self._unseen = queues[self._turn % len(queues)].take(self._batch_rows)
            self._given.append(take)
            return take

    def _require_room(self) -> None:
        span = self.member.settings.max_span
        with self.member.changed:
            full = [q.queue for q in self.member.queues.values() if q.is_open and q.fetched_to - q.lowest >= span]
            rows = sum(take.messages.num_rows for take in self._given)
        if full and self._given and len(full) == len(self.member.queues):
            raise ConsumeError(
                f"{rows} messages were given out and not committed, {span} or more of each queue: call commit(), or "
                "raise max_span"
            )

    def _is_at_end(self) -> bool:
        """Whether the group has read all that the log held when this consumer started."""
        member = self.member
        with member.changed:
            own = {q.queue: (q.rows, q.fetched_to) for q in member.queues.values() if q.is_open}
        ends = {queue: end for queue, end in self._ends.items() if queue[0] in member.topics}
        if any(own[queue][0] or own[queue][1] < end for queue, end in ends.items() if queue in own):
            return False
        others = [queue for queue in ends if queue not in own]
        if not others:
            return True
        now_s = self._runtime.monotonic()
        if now_s >= self._others_at_s:
            self._others_at_s = now_s + OTHERS_LOOK_S
            self._others = member.engine.groups.next_offsets(member.group)
        return all(self._others.get(queue, 0) >= ends[queue] for queue in others)


def _weak_caller(method: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        live_method = reference()
        if live_method is not None:
            live_method()

    return call
