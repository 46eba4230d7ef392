"""PushConsumer: hands messages to a listener in threads of this program, without Spark (``DefaultMQPushConsumer``)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.consumers.call_cost import TAKE_S_MAX, CallCost, Timed
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
from rmq_spark._core.consumers.message_listener import (
    EachMessage,
    Listen,
    answers,
    log_failures,
    require_table_listener,
)
from rmq_spark._core.consumers.progress import ProcessQueue, Take
from rmq_spark._core.consumers.retry import (
    CONCURRENTLY,
    ORDERLY,
    SUSPEND_S,
    require_retry_options,
    restored,
    tried,
    with_zero_retries,
)
from rmq_spark._core.consumers.send_back import RetrySender
from rmq_spark._core.consumers.traced_listener import traced
from rmq_spark._core.log.heartbeats import MEMBER_LEASE_S
from rmq_spark._core.runtime import observer
from rmq_spark._core.runtime.callables import name_of
from rmq_spark._core.runtime.spans import tracing
from rmq_spark._core.vocabulary.options import Duration, named, seconds, whole_number
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark.errors import ConsumeError, ListenerError, OptionError

THREADS = 20
TABLE_ROWS = 16_384
"""Default number of messages in a table listener's call."""
HANGS_S = 1.0
"""Seconds after which a call of a quick listener counts as hanging, and another thread works beside it."""
IDLE_S = 5.0
"""Seconds after which a thread that waits for a notice looks for work itself."""
AWAIT_TERMINATION_S = 30.0
STOP_LOOK_S = 0.2


class PushConsumer:
    """Hands committed messages to a message listener, in threads of this program (RocketMQ: ``DefaultMQPushConsumer``).

    Consumers of one group, in any number of processes, share its queues. A message is consumed at least once: after a
    crash, unfinished messages come again at a living member.

    Parameters
    ----------
    log : CommitLog or path
        The commit log, or its path.
    group : str
        The consumer group. Spark must not read for it.
    listener : callable, EachBatch, EachMessage or SqlInbox
        A function of a ``pyarrow.Table`` of messages of one queue (the source's columns and ``reconsume_times``). It
        returns one :class:`ConsumeResult` for all of them, a list with one for each, or nothing when all are consumed.
        :class:`EachBatch` wraps a function of a list of messages, :class:`EachMessage` a function of one message. A
        :class:`SqlInbox` needs ``mode="orderly"``. In mode ``concurrently``, several threads call the listener at once.
    topics : str or iterable of str
        Topics to read. The group's retries are read as well.
    tags : str, optional
        ``"TagA || TagB"``. All members of a group must choose the same messages.
    selector : str, optional
        SQL92. Contradicts ``tags``.
    mode : {"concurrently", "orderly"}
        ``concurrently``: several threads consume the messages of a queue. A message that fails goes to
        ``%RETRY%group``, comes again after 10 s, 30 s, 1 min and so on, and at last goes to ``%DLQ%group``.
        ``orderly``: one call at a time for each queue. A failure stops the queue at that message for a moment.
        The order holds until the lease is lost: a member that was paused within a call may end it when another member
        already has the queue.
    consume_thread_max : int
        Threads that call the listener.
    consume_message_batch_max_size : int, optional
        Messages of one call; when not given, 16,384 for a function of a table, and 1 for :class:`EachBatch`, as in
        RocketMQ.
    max_reconsume_times : int, optional
        Retries of a message before it is a dead letter; when not given, 16 for ``concurrently``, and no limit for
        ``orderly``.
    delay_level : int, optional
        Delay level of every retry, 1 to 18. When not given, it rises with each retry.
    suspend_s : float
        Seconds for which a queue is suspended.
    consume_from_where : ConsumeFromWhere or str
        Where a new group begins.
    consume_timestamp : datetime, optional
        For ``CONSUME_FROM_TIMESTAMP``: the first message that was committed then or later.
    pull_interval : float or str, optional
        Seconds between two looks for new messages; when not given, 0.02 on a local disk, and 1 on an object store.
    max_span : int
        Maximum number of messages of a queue under way, and so of those that come again after a crash. A message that
        is never finished stops its queue after this many.
    persist_consumer_offset_interval : float or str
        Minimum seconds between two writes of progress.
    heartbeat_interval, lease : float
        Seconds between two heartbeats, and seconds without one after which other members claim a member's queues.
    await_termination : float or str
        Seconds for which :meth:`shutdown` waits for running calls.
    message_model : {"clustering"}
        RocketMQ's ``BROADCASTING`` is refused.
    take_over : bool
        True takes over a group that Spark's queries have read. Stop them first.

    Raises
    ------
    OptionError, ListenerError, TopicNotFoundError

    Examples
    --------
    >>> with PushConsumer("log", "points", EachMessage(book), "orders") as consumer:  # doctest: +SKIP
    ...     consumer.run()  # until SIGTERM
    """

    @named
    def __init__(
        self,
        log: CommitLog | str | os.PathLike[str],
        group: str,
        listener: Listen | EachMessage | Any,
        topics: str | Iterable[str],
        tags: str | None = None,
        selector: str | None = None,
        mode: str = CONCURRENTLY,
        *,
        consume_thread_max: int = THREADS,
        consume_message_batch_max_size: int | None = None,
        max_reconsume_times: int | None = None,
        delay_level: int | None = None,
        suspend_s: float = SUSPEND_S,
        consume_from_where: ConsumeFromWhere | str = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET,
        consume_timestamp: datetime | None = None,
        pull_interval: Duration | None = None,
        max_span: int = MAX_SPAN,
        persist_consumer_offset_interval: Duration = PERSIST_INTERVAL_S,
        heartbeat_interval: Duration = HEARTBEAT_INTERVAL_S,
        lease: Duration = MEMBER_LEASE_S,
        await_termination: Duration = AWAIT_TERMINATION_S,
        message_model: str = CLUSTERING,
        take_over: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if mode not in (CONCURRENTLY, ORDERLY):
            raise OptionError(f"mode={mode!r} is neither {CONCURRENTLY!r} nor {ORDERLY!r}")
        settings = MemberSettings.of(
            group, topics, tags, selector, consume_from_where, consume_timestamp, heartbeat_interval, lease,
            persist_consumer_offset_interval, pull_interval, max_span, message_model, take_over,
        )  # fmt: skip
        self.orderly = mode == ORDERLY
        self._takes_positions = getattr(listener, "keeps_positions", False)
        self._name = name_of(listener.function if isinstance(listener, EachMessage) else listener)
        self._listener = self._listener_of(listener, group)
        self._require_ready = getattr(listener, "require_created", lambda: None)
        self._is_each = isinstance(listener, EachMessage)
        self._threads = whole_number(consume_thread_max, "consume_thread_max", 1, 1_000)
        if consume_message_batch_max_size is not None:
            whole_number(consume_message_batch_max_size, "consume_message_batch_max_size", 1)
        self._batch_rows = consume_message_batch_max_size or int(getattr(listener, "batch_rows", TABLE_ROWS))
        require_retry_options(max_reconsume_times, delay_level)
        self._suspend_s = seconds(suspend_s, "suspend_s")
        self._await_s = seconds(await_termination, "await_termination")
        opened = engine_of(log, storage_options)
        self.member = GroupMember(opened, settings, reads_retries=True)
        self.member_threads = MemberThreads(self.member)
        self._runtime = opened.runtime
        self._retries = RetrySender(self.member, max_reconsume_times, delay_level)
        self._cost = CallCost(self._is_each, self._batch_rows)
        self._open = self._stop_asked = False
        self._opening = opened.runtime.lock()
        self._turn = 0

    def _listener_of(self, listener: Any, group: str) -> Listen | EachMessage:
        if self._takes_positions:
            if not self.orderly:
                raise OptionError(
                    f"{listener!r} keeps a position for each queue, so it needs the messages of a queue one call after "
                    f"the other: use mode={ORDERLY!r}"
                )
            if listener.group != group:
                raise OptionError(
                    f"{listener!r} keeps the positions of consumer group {listener.group!r}, and this consumer is of "
                    f"group {group!r}, which would skip what the other one has read: make an inbox for each group"
                )

            def apply(messages: pa.Table) -> None:
                listener.apply(messages)

            return apply
        if not callable(listener) and not isinstance(listener, EachMessage):
            raise ListenerError(
                f"PushConsumer got {type(listener).__name__}: a function of a pyarrow.Table is expected"
            )
        require_table_listener(listener)
        return listener  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"PushConsumer({self.member.engine!r}, {self.member.group!r})"

    # ------------------------------------------------------------------ life
    def start(self) -> PushConsumer:
        """Join the group and begin to consume (``with`` does it).

        Raises
        ------
        GroupInUseError
            When Spark reads for the group.
        ListenerError
            When an inbox has no tables yet.
        ConsumeError
            In a fork of the process that made the consumer, or after :meth:`shutdown`.
        """
        self.member_threads.require_own_process()
        with self._opening:
            if self.member.stopping.is_set():
                raise ConsumeError("this consumer was shut down: make a new one")
            if not self._open:
                self._require_ready()
                workers = {f"consume-{n}": self.consume_on for n in range(self._threads)}
                self.member_threads.start(self._at_exit, fetch=self.member.fetch_on, **workers)
                self._open = True
                observer.CONSUMERS.add(self)
        return self

    def shutdown(self) -> None:
        """Stop fetching, wait for running listener calls, write progress, and leave the group.

        It waits for ``await_termination`` seconds at most. It may be called again.

        Raises
        ------
        ConsumeError
            When a call of the listener calls it: it would wait for itself.
        TxmqError
            The error that ended the consumer, unless it was raised already.
        """
        if self.member_threads.is_own_thread():
            raise ConsumeError(
                "shutdown() waits for running calls of the listener, so it cannot be called in one of them: call "
                "stop() there, which lets run() come to its end, or tell the thread that started the consumer"
            )
        self._end()
        problem, self.member.problem = self.member.problem, None
        if problem is not None:
            raise problem

    def _end(self, at_exit: bool = False) -> None:
        with self._opening:
            if self._open or self.member_threads.is_running:
                self._open = False
                observer.CONSUMERS.discard(self)
                self.member_threads.stop(self._await_s, at_exit, f"listener {self._name}")

    def _at_exit(self) -> None:
        self._end(at_exit=True)

    def __enter__(self) -> PushConsumer:
        return self.start()

    def __exit__(self, kind: object, problem: object, traceback: object) -> None:
        if problem is None:
            self.shutdown()
        else:
            self._end()

    def run(self) -> None:
        """Consume until SIGTERM or SIGINT (Ctrl-C) comes, or :meth:`stop` is called, and then shut down.

        In the main thread it handles both signals while it runs. In another thread only :meth:`stop` ends it.

        Raises
        ------
        TxmqError
            The error that ended the consumer.
        """
        old_handlers: dict[signal.Signals, Any] = {}
        self.member_threads.require_own_process()
        try:
            if threading.current_thread() is threading.main_thread():
                for signum in (signal.SIGTERM, signal.SIGINT):
                    old_handlers[signum] = signal.signal(signum, lambda *_: self.stop())
            self.start()
            while not self._stop_asked and not self.member.stopping.wait(STOP_LOOK_S):
                pass
        finally:
            self._end()
            for signum, handler in old_handlers.items():
                signal.signal(signum, handler)
        self.shutdown()

    def stop(self) -> None:
        """Let :meth:`run` come to its end, from another thread or a signal handler."""
        self._stop_asked = True  # no event: a signal handler may interrupt the holder of its lock

    @property
    def is_running(self) -> bool:
        """Whether the consumer runs, for a health check. False before :meth:`start`, after :meth:`shutdown`, and when a
        problem has ended it. One that cannot fetch tries again, and counts as running: see :attr:`problem`."""
        return self._open and not self.member.stopping.is_set()

    @property
    def problem(self) -> BaseException | None:
        """The error that ended the consumer, until :meth:`shutdown` or :meth:`run` has raised it; None without one.

        Of a running consumer: the error that keeps it from fetching the messages of a queue, or of all (a file is lost
        or damaged, the store fails). It tries again. Nothing raises this error, and a successful fetch clears it.
        """
        return self.member.problem or (self.member.fetch_problem if self.is_running else None)

    def queues(self) -> dict[Queue, int]:
        """Return this member's queues, and the lowest unfinished offset of each."""
        with self.member.changed:
            return {queue: state.lowest for queue, state in sorted(self.member.queues.items()) if state.is_open}

    def in_flight(self) -> dict[str, int]:
        """Return by topic how many messages this member has fetched and not finished, with those between them that a
        filter left out."""
        counts: dict[str, int] = {}
        with self.member.changed:
            for (topic, _), state in self.member.queues.items():
                counts[topic] = counts.get(topic, 0) + state.fetched_to - state.lowest
        return counts

    # ------------------------------------------------------------------ a thread's work
    def consume_on(self) -> None:
        """Consume until the consumer stops: the work of a thread."""
        member = self.member
        while not member.stopping.is_set():
            with member.changed:
                if member.stopping.is_set():  # the notice of it came before this thread waits
                    return
                take = self._take()
                if take is None:
                    member.changed.wait(self._until_next())
                    continue
            self.consume(take)

    def work(self) -> bool:
        """Consume one take, in the caller's thread; False when nothing can be taken."""
        with self.member.changed:
            take = self._take()
        if take is not None:
            self.consume(take)
        return take is not None

    def _take(self) -> Take | None:
        """Take the next messages for a thread, from each queue in turn. The caller holds the lock."""
        queues = [q for q in self.member.queues.values() if q.is_open and q.rows]
        now_s = self._runtime.monotonic()
        if self.orderly:
            queues = [q for q in queues if not q.running and q.suspended_until_s <= now_s]
        if not queues or not self.member.may_start():
            return None
        if self._cost.is_quick() and any(q.runs_since(now_s - HANGS_S) for q in self.member.queues.values()):
            return None
        self._turn += 1
        queue = queues[self._turn % len(queues)]
        return queue.take(self._cost.rows_to_take(queue), now_s)

    def _until_next(self) -> float:
        """Return the seconds until a suspended queue continues, or the one call of a quick listener counts as hanging.
        All other work comes with a notice."""
        longest_s = HANGS_S if self._cost.is_quick() and any(q.rows for q in self.member.queues.values()) else IDLE_S
        waiting = [q for q in self.member.queues.values() if self.orderly and q.rows and not q.running]
        left_s = min((q.suspended_until_s for q in waiting), default=0.0) - self._runtime.monotonic()
        return left_s if 0 < left_s < longest_s else longest_s

    def consume(self, take: Take) -> None:
        """Let the listener consume a take, and finish it."""
        # An inbox keeps positions of the queues that messages are read from, and not of a retry's original queue.
        messages = with_zero_retries(take.messages) if self._takes_positions else restored(take.messages)
        try:
            if self.orderly:
                self._consume_orderly(take, messages)
            else:
                self._consume_concurrently(take, messages)
        except BaseException:
            self._give_back(take, take.finished)
            raise

    def _consume_concurrently(self, take: Take, messages: pa.Table) -> None:
        began_s = self._runtime.monotonic()
        listener = self._listener_of_take()
        results: list[tuple[bool, str | None]] = []
        for result in answers(listener, messages):
            results.append(result)
            if self._is_each and self._stops_early(take.queue, began_s):
                break
        failed = [row for row, (consumed, _) in enumerate(results) if not consumed]
        self._note_cost(take.queue, listener, began_s, len(results), len(results) - len(failed), len(failed))
        done = len(results)
        if failed:
            reasons = [results[row][1] for row in failed]
            log_failures(self.member.group, take.queue.queue, len(failed), len(results), reasons[0])
            if not self._retries.send(take.queue, messages.take(pa.array(failed)), reasons, "retry"):
                done = failed[0]  # the consumer ends, or the queue is lost: they come again
        self._give_back(take, done)

    def _consume_orderly(self, take: Take, messages: pa.Table) -> None:
        queue, began_s = take.queue, self._runtime.monotonic()
        listener = self._listener_of_take()
        offsets = take.messages["queue_offset"].to_pylist()
        done = consumed_rows = failed = 0
        results = answers(listener, tried(messages, queue.tries))
        for consumed, reason in results:
            if not consumed:
                failed = 1 if self._is_each else 1 + sum(not is_consumed for is_consumed, _ in results)
                queue.tries += 1  # no other thread works on the queue meanwhile
                then = "The first one becomes a dead letter"
                if not self._retries.is_out_of_retries(queue.tries):
                    then = f"The queue waits {self._suspend_s:g} s and goes on there"
                log_failures(self.member.group, queue.queue, failed, messages.num_rows, reason, then)
                if self._retries.is_out_of_retries(queue.tries) and self._retries.send(
                    queue, messages.slice(done, 1), [reason], "dead", queue.tries - 1
                ):
                    queue.tries = 0
                    done += 1
                else:
                    queue.suspended_until_s = self._runtime.monotonic() + self._suspend_s
                break
            queue.tries = 0
            done, consumed_rows = done + 1, consumed_rows + 1
            if self._is_each:
                take.first = offsets[done - 1] + 1
                if self._stops_early(queue, began_s):
                    break
        self._note_cost(queue, listener, began_s, max(1, done), consumed_rows, failed)
        self._give_back(take, done)

    def _listener_of_take(self) -> Listen | EachMessage:
        tracer, listener = tracing(), self._listener
        if tracer is not None:
            listener = traced(listener, tracer, self.member.engine.path, self.member.group)
        return Timed(listener, self._runtime) if isinstance(listener, EachMessage) else listener

    def _stops_early(self, queue: ProcessQueue, began_s: float) -> bool:
        """Whether a thread gives back the rest of its take: its calls take longer than expected and others may help, or
        the member may start no more calls."""
        is_slow = self._runtime.monotonic() - began_s > TAKE_S_MAX
        return is_slow or not queue.is_open or not self.member.may_start()

    def _note_cost(
        self,
        queue: ProcessQueue,
        listener: Listen | EachMessage,
        began_s: float,
        answered: int,
        consumed: int,
        failed: int,
    ) -> None:
        took_s = self._runtime.monotonic() - began_s
        if observer.observers():
            log, group, topic = self.member.engine.path, self.member.group, queue.queue[0]
            event = observer.Consumed(log, group, topic, consumed, failed, took_s)
            observer.tell(lambda o: o.consumed(event))
        self._cost.note(listener, took_s, answered)

    def _give_back(self, take: Take, done: int) -> None:
        """End a take of which ``done`` messages are finished. The rest comes again."""
        with self.member.changed:
            take.queue.give_back(take, done)
            if take.queue.releasing:
                self.member.changed.notify_all()
            elif done < take.messages.num_rows or not self._cost.is_quick():
                self.member.changed.notify()  # another thread may help when calls take long
