"""A member of a consumer group: it claims its share of the queues, fetches, and writes progress. What both consumers
without Spark are made of.

A thread of its own, ``txmq-member``, puts heartbeats, claims and releases queues, and writes progress. The consumer
fetches in another one. All that they share is guarded by one lock, which nobody holds while a listener runs, a file is
read or a commit is made.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

import pyarrow.fs as pafs

from rmq_spark._core.consumers.fetch import FETCH_BYTES, Fetcher
from rmq_spark._core.consumers.heartbeats import Members, new_member_name
from rmq_spark._core.consumers.progress import HeldUp, ProcessQueue, Queue, Take
from rmq_spark._core.consumers.retry import dlq_topic, retry_topic
from rmq_spark._core.consumers.shares import Moves, moves
from rmq_spark._core.log.groups import Place, Report
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.reads.options import Subscription
from rmq_spark._core.reads.plan import Planner
from rmq_spark._core.runtime.spans import acknowledging, tracing
from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags, tag_selector
from rmq_spark._core.selector.tree import Selector
from rmq_spark._core.vocabulary.message import require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import flag, require_time, seconds, whole_number
from rmq_spark._core.vocabulary.redaction import redacted, traceback_of
from rmq_spark.errors import (
    ConsumeError,
    CorruptLogError,
    GroupInUseError,
    ListenerError,
    NotACommitLogError,
    OffsetOutOfRangeError,
    OptionError,
    StorageError,
)

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 10.0
PERSIST_INTERVAL_S = 1.0
"""Progress is written no more often (RocketMQ: ``persistConsumerOffsetInterval``, 5 s there)."""
PUTS_APART_S = 0.2
"""On an object store, all members of a log together write progress no more often: one key takes about 15 puts a second,
and each commit needs some."""
PULL_INTERVAL_S = 0.02
PULL_INTERVAL_REMOTE_S = 1.0
"""Seconds between two looks for new messages: a look costs 11 µs on a local disk, and a request on an object store."""
MAX_SPAN = 100_000
"""Messages of a queue between the lowest unfinished one and the newest fetched. (RocketMQ's
``consumeConcurrentlyMaxSpan`` is 2,000, but there messages are not read in tables.)"""
SLEEP_S_MAX = 0.1
"""An end of the consumer waits for a shorter pause."""
KEEP_S = 0.1
"""The member's thread looks so often whether anything is due."""
BACKOFF_S_MAX = 30.0
AT_EXIT_S_MAX = 10.0
"""The end of Python waits so long for listener calls and for the store. A thread that is then within delta-rs may end
Python with a crash."""
LATE_S = 0.5
"""Threads that end have so long when a listener call goes on."""
OF_THE_STORE = {"member", "fetch"}
"""Threads that wait for the store."""
NOT_PLACED = "delayed messages were not placed"
FATAL = (GroupInUseError, NotACommitLogError, ListenerError)
"""After these another try would end the same way."""
OF_SOME_QUEUES = (CorruptLogError, OffsetOutOfRangeError)
"""Damage that may lie in some queues alone."""
HELD_UP_S_MIN = 1.0

CLUSTERING = "clustering"


class ConsumeFromWhere(str, Enum):
    """Where a group begins in a queue for which it has no progress (RocketMQ's enum of that name)."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class MemberSettings:
    """What both consumers let one set, validated. The consumers' docstrings say what each means."""

    group: str
    topics: tuple[str, ...]
    selector: Selector | None
    consume_from: ConsumeFromWhere
    consume_timestamp: datetime | None
    heartbeat_interval_s: float
    lease_s: float
    persist_interval_s: float
    pull_interval_s: float | None
    max_span: int
    take_over: bool

    @classmethod
    def of(
        cls,
        group: str,
        topics: str | Iterable[str],
        tags: str | None,
        selector: str | None,
        consume_from_where: ConsumeFromWhere | str,
        consume_timestamp: datetime | None,
        heartbeat_interval: float,
        lease: float,
        persist_consumer_offset_interval: float,
        pull_interval: float | None,
        max_span: int,
        message_model: str,
        take_over: bool,
    ) -> MemberSettings:
        """Validate arguments.

        Raises
        ------
        OptionError, MessageError
        """
        require_group_name(group, "consumerGroup")
        if str(message_model).lower() != CLUSTERING:
            raise OptionError(
                f"message_model={message_model!r}: only {CLUSTERING!r} is there. In RocketMQ's BROADCASTING each "
                "member gets every message: give each consumer a group of its own for that"
            )
        several = isinstance(topics, Iterable) and not isinstance(topics, bytes)
        names = [topics] if isinstance(topics, str) else list(topics) if several else []
        if not names:
            raise OptionError(f"topics={topics!r}: the name of a topic is expected, or several names")
        if tags is not None and selector is not None:
            raise OptionError("tags and selector contradict each other: give one of them")
        try:
            where = ConsumeFromWhere(consume_from_where)
        except ValueError:
            raise OptionError(
                f"consume_from_where={consume_from_where!r} is not one of {', '.join(ConsumeFromWhere)}"
            ) from None
        if (where == ConsumeFromWhere.CONSUME_FROM_TIMESTAMP) != (consume_timestamp is not None):
            raise OptionError("CONSUME_FROM_TIMESTAMP and consume_timestamp=<a datetime> need each other")
        interval_s = seconds(heartbeat_interval, "heartbeat_interval", above=True)
        lease_s = seconds(lease, "lease", above=True)
        if lease_s < 2 * interval_s:
            raise OptionError(
                f"lease={lease!r} is under two heartbeats of {interval_s:g} s: a heartbeat that is late would cost a "
                "member its queues"
            )
        wanted = parse_tags(SUB_ALL if tags is None else tags)
        return cls(
            group,
            tuple(dict.fromkeys(require_topic_name(name, own=True) for name in names)),
            tag_selector(wanted and tuple(sorted(wanted))) if selector is None else parse_selector(selector),
            where,
            None if consume_timestamp is None else require_time(consume_timestamp, "consume_timestamp"),
            interval_s,
            lease_s,
            seconds(persist_consumer_offset_interval, "persist_consumer_offset_interval"),
            None if pull_interval is None else seconds(pull_interval, "pull_interval", above=True),
            whole_number(max_span, "max_span", 1),
            flag(take_over, "take_over"),
        )


class GroupMember:
    """One member of a consumer group.

    Its steps, :meth:`join`, :meth:`keep`, :meth:`fetch` and :meth:`leave`, can be called one by one, without threads.

    Parameters
    ----------
    log : Engine
    settings : MemberSettings
    reads_retries : bool
        Whether the group's topic of retries is read as well.
    """

    def __init__(self, log: Engine, settings: MemberSettings, reads_retries: bool) -> None:
        self.log, self.settings = log, settings
        self.machine = log.machine
        self.group = settings.group
        for topic in settings.topics:
            log.require_topic(topic)
        self._retry = retry_topic(self.group) if reads_retries else None
        if reads_retries:
            for topic in (retry_topic(self.group), dlq_topic(self.group)):
                log.create_own_topic(topic)
        self.topics = (*settings.topics, *((self._retry,) if self._retry else ()))
        self.name = new_member_name(self.machine.unique_id())
        self.by = self.name.rpartition(".")[0]
        self._fields = {"consumer_group": self.group, "member": self.name}
        self.changed = threading.Condition()
        """The lock, and the news that something can be taken, or that the end has come."""
        self.queues: dict[Queue, ProcessQueue] = {}
        self.problem: BaseException | None = None
        """What ended the consumer."""
        self._unfetched: Exception | None = None  # why nothing at all could be fetched the last time
        self.stopping = threading.Event()
        self._fetcher = Fetcher(log, set(self.topics).__contains__, settings.selector)
        table = log.groups.table
        self._is_remote = isinstance(table.fs, pafs.FileSystem) and not isinstance(table.fs, pafs.LocalFileSystem)
        margin_s = min(settings.heartbeat_interval_s, settings.lease_s / 3)
        chooses = "" if settings.selector is None else settings.selector.text
        self._members = Members(table, self.group, self.name, self.topics, settings.lease_s, margin_s, chooses)
        self._unlike: dict[str, tuple[frozenset[str], str]] = {}  # members that subscribe otherwise, as far as told
        remote_s = PULL_INTERVAL_REMOTE_S if self._is_remote else PULL_INTERVAL_S
        self.pull_interval_s = remote_s if settings.pull_interval_s is None else settings.pull_interval_s
        self._beat_at_s = self._balance_at_s = self._persist_at_s = self._place_at_s = 0.0
        self._nothing_at: tuple[int, int] | None = None
        self._claims = 0  # nothing is known of a queue that was claimed since the last fetch
        self._take_over = settings.take_over
        self._pid = os.getpid()
        self._persisting = log.machine.lock()
        self._threads: dict[str, threading.Thread] = {}
        self._stop_at_exit: Callable[[], object] = self.stopping.set
        self._abandoned: Sequence[Take] | None = None
        self._is_ending = False
        self._in_this_thread = threading.local()

    def require_own_process(self) -> None:
        """Raise ConsumeError in a forked child: threads, and the engine of delta-rs, do not live on in it."""
        if self._is_copy():
            raise ConsumeError(
                f"this consumer was made in process {self._pid}, and this is a fork of it: make one in each process"
            )

    # ------------------------------------------------------------------ threads
    def start(self, at_exit: Callable[[], object], **work: Callable[[], object]) -> None:
        """Join the group, and start the threads: the member's own, and one for each of these functions.

        ``at_exit`` is called when Python ends before :meth:`stop`, and calls it.
        """
        self.require_own_process()
        self.join()
        try:
            self._stop_at_exit = at_exit
            atexit.register(self._at_exit)
            for name, function in {"member": self._keep_on, **work}.items():
                thread = self.machine.start_thread(self._or_fail(function), f"txmq-{name}", daemon=True)
                self._threads[name] = thread
        except BaseException:  # an interrupt, or there are too many threads
            self.stop(0.0)
            raise

    def abandon(self, given: Sequence[Take]) -> None:
        """Nobody has the consumer any more: the member's thread gives back what was given out, and leaves the group.

        Python calls this within anything, so it waits for nothing.
        """
        self._abandoned = given

    def _or_fail(self, work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            self._in_this_thread.is_own = True
            try:
                work()
            except BaseException as problem:  # a panic of delta-rs is no Exception
                self.fail(problem)

        return run

    def is_own_thread(self) -> bool:
        """Whether this is one of the member's threads, in which listeners are called."""
        return getattr(self._in_this_thread, "is_own", False)

    @property
    def is_running(self) -> bool:
        """Whether it has threads: since :meth:`start`, and until the end of :meth:`stop`."""
        return bool(self._threads)

    def stop(self, timeout_s: float, at_exit: bool = False, listener: str = "the listener") -> None:
        """End: wait for what runs, write progress, release the queues and leave the group.

        Queues of which something still runs after so many seconds are not released: the lease ends them. ``at_exit``
        says that Python ends: then threads that are within the store are waited for :data:`AT_EXIT_S_MAX` seconds.
        ``listener`` is named when it still runs.
        """
        if self._is_copy():
            return
        with self.changed:
            is_first, self._is_ending = not self._is_ending, True
        end_s = self.machine.monotonic() + (min(timeout_s, AT_EXIT_S_MAX) if at_exit else timeout_s)
        at_exit_s = self.machine.monotonic() + AT_EXIT_S_MAX if at_exit else None
        if not is_first:  # the member's own thread may be at it
            self._wait_for_threads(at_exit_s, self._threads)
            return
        try:
            self.stopping.set()
            late = self._wait_for_listeners(end_s)
            late_s = max(end_s, self.machine.monotonic() + LATE_S)
            # A call may go on of a queue that somebody else has got.
            calls = self._wait_for_threads(late_s, self._threads.keys() - OF_THE_STORE)
            if late or calls:
                self._tell_late(listener, timeout_s, late)
            goes_on = calls | self._wait_for_threads(late_s if late or calls else at_exit_s, OF_THE_STORE)
            if not (at_exit and goes_on & OF_THE_STORE):
                self.leave()
                self.log.close()
        except BaseException:  # an interrupt: the end of Python does the rest
            self._is_ending = False
            raise
        self._threads = {}
        atexit.unregister(self._at_exit)

    def _wait_for_listeners(self, end_s: float) -> list[Queue]:
        """Wait for running calls of the listener until a time, and return the queues of which some are late."""
        with self.changed:
            for queue in self.queues.values():
                queue.releasing = True
                queue.drop_waiting()
            self.changed.notify_all()
            while any(q.running for q in self.queues.values()) and self.machine.monotonic() < end_s:
                self.changed.wait(max(0.0, min(1.0, end_s - self.machine.monotonic())))
            return [q.queue for q in self.queues.values() if q.running]

    def _tell_late(self, listener: str, timeout_s: float, late: list[Queue]) -> None:
        has = f"has messages of {late}" if late else "runs, with messages of queues that other members have by now"
        logger.warning(
            "consumer group %r: after %g s %s still %s: these queues are free when the lease is over, and their "
            "messages come again. Give what blocks in it a time limit of its own",
            self.group, timeout_s, listener, has, extra=self._fields,
        )  # fmt: skip

    def _wait_for_threads(self, end_s: float | None, names: Collection[str]) -> set[str]:
        """Wait for some threads, until a time when one is given, and return the names of those that go on."""
        others = {name: t for name, t in self._threads.items() if name in names and t is not threading.current_thread()}
        for thread in others.values():
            thread.join(None if end_s is None else max(0.0, end_s - self.machine.monotonic()))
        return {name for name, thread in others.items() if thread.is_alive()}

    def _at_exit(self) -> None:
        if not self._is_copy():
            self._stop_at_exit()
            if self._abandoned is not None:
                self._leave_abandoned(at_exit=True)

    def _is_copy(self) -> bool:
        """Whether this process is a fork of the consumer's: it has none of the threads, and no heartbeat of its own."""
        return os.getpid() != self._pid

    def _keep_on(self) -> None:
        while not self.stopping.wait(min(KEEP_S, self.settings.heartbeat_interval_s / 4)):
            if self._abandoned is not None:
                logger.warning(
                    "consumer group %r: a consumer was dropped without shutdown(): it leaves the group, and what was "
                    "given out and not committed comes again", self.group, extra=self._fields,
                )  # fmt: skip
                self._leave_abandoned()
                return
            self.keep()

    def _leave_abandoned(self, at_exit: bool = False) -> None:
        with self.changed:
            given, self._abandoned = self._abandoned or (), ()
            for take in given:
                take.queue.give_back(take, take.finished)
        self.stop(0.0, at_exit)

    def fetch_on(self) -> None:
        """Fetch until the end: the work of a thread."""
        pause_s = self.pull_interval_s
        while not self.stopping.is_set():
            try:
                fetched = self.fetch_past_damage()
                pause_s, self._unfetched = self.pull_interval_s, None
            except Exception as problem:
                self._unfetched = problem
                self.note(problem, "messages were not fetched")
                fetched, pause_s = False, min(BACKOFF_S_MAX, max(1.0, 2 * pause_s))
            if not fetched and pause_s <= SLEEP_S_MAX:
                self.machine.sleep(pause_s)  # costs two thirds of what a wait costs
            elif not fetched:
                self.stopping.wait(pause_s)

    @property
    def held_up_by(self) -> Exception | None:
        """What keeps messages from being fetched while the member tries again: of all queues, or of the first one that
        is held up. None when nothing does."""
        with self.changed:
            held = [queue.held_up for _, queue in sorted(self.queues.items()) if queue.held_up is not None]
        return self._unfetched or (held[0].problem if held else None)

    def note(self, problem: Exception, what: str) -> None:
        """Log a problem after which another try may do better. Others end the consumer."""
        if isinstance(problem, FATAL):
            self.fail(problem)
        else:
            logger.warning("consumer group %r: %s: %s", self.group, what, _told(problem), extra=self._fields)

    def fail(self, problem: BaseException) -> None:
        """End the consumer with a problem."""
        with self.changed:  # all threads may come with the same one
            is_first, self.problem = self.problem is None, self.problem or problem
        if is_first:
            said = traceback_of(problem)
            logger.error("consumer group %r: the consumer ends: %s", self.group, said, extra=self._fields)
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ its place in the group
    def join(self) -> None:
        """Put the first heartbeat, and claim what there is to claim.

        Raises
        ------
        GroupInUseError
            When Spark reads for the group.
        """
        try:
            self._beat()
            self._balance()
        except BaseException:
            if self.queues:
                self.leave()
            else:
                with suppress(Exception):  # the lease does it
                    self._members.leave()
            raise
        self._beat_at_s = self.machine.monotonic() + self.settings.heartbeat_interval_s

    def keep(self) -> None:
        """Do what is due: heartbeat, claims and releases, progress, delayed messages."""
        for step, what in (
            (self._beat_when_due, "no heartbeat was put"),
            (self._balance_when_due, "queues were not claimed"),
            (self._persist_when_due, "progress was not written"),
            (self._place_when_due, NOT_PLACED),
        ):
            try:
                step()
            except Exception as problem:  # the next round does it
                self.note(problem, what)

    def leave(self) -> None:
        """Write progress, release queues of which nothing runs, and remove the heartbeat."""
        with self.changed:
            for queue in self.queues.values():
                queue.releasing = True
                queue.drop_waiting()
        for step in (self.persist, self._members.leave):
            try:
                step()
            except Exception as problem:  # the lease does it
                said = _told(problem)
                logger.warning("consumer group %r: leaving failed: %s", self.group, said, extra=self._fields)

    def may_start(self) -> bool:
        """Return True while this member's lease lasts: it may start listener calls."""
        return self._members.may_start()

    def _beat_when_due(self) -> None:
        now_s = self.machine.monotonic()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self.settings.heartbeat_interval_s
            self._balance_at_s = now_s
            self._beat()

    def _beat(self) -> None:
        began_s = self._members.beat()
        if self._members.may_start():
            self._members.renew(began_s)
            return
        # The lease was over. Somebody may have the queues by now, so the member looks before it goes on.
        if self.queues:
            with self._persisting:
                self._drop_lost(self.log.groups.places(self.group))
        self._members.renew(began_s)
        with self.changed:
            self.changed.notify_all()

    def _drop_lost(self, places: Mapping[Queue, Place]) -> None:
        with self.changed:
            mine = [(q, places.get(q.queue)) for q in self.queues.values()]
            self._lose([q for q, p in mine if p is None or (p.owner, p.generation) != (self.name, q.generation)])

    def _balance_when_due(self) -> None:
        if self.machine.monotonic() >= self._balance_at_s:
            self._balance()

    def _balance(self) -> None:
        """Have the share that the living members leave to this one."""
        self._members.look()
        self._tell_unlike()
        topics = self.log.topics()
        queues = {topic: topics[topic] for topic in self.topics if topic in topics}
        with self._persisting:  # else a queue that is released just now would look lost
            places = self.log.groups.places(self.group)
            self._drop_lost(places)
        with self.changed:
            owned = [queue for queue, known in self.queues.items() if known.is_open]
        todo = moves(self.name, owned, queues, places, self._members.live, self._members.is_dead)
        with self.changed:
            for name in todo.release:
                if name in self.queues:
                    self.queues[name].releasing = True
                    self.queues[name].drop_waiting()
        new = [(topic, q) for topic, count in queues.items() for q in range(count) if (topic, q) not in places]
        if todo.claim or new:
            self._claim(todo, new)
        every_s = self.settings.heartbeat_interval_s
        self._balance_at_s = self.machine.monotonic() + (every_s / 10 if todo.is_short else every_s)

    def _tell_unlike(self) -> None:
        """Warn of members that subscribe otherwise, once of each."""
        own = {retry_topic(self.group)}  # a pull consumer has none
        mine = _subscribed(self._members.topics - own, self._members.chooses)
        unlike = self._members.unlike()
        for member, subscribed in unlike.items():
            theirs = _subscribed(subscribed[0] - own, subscribed[1])
            if theirs != mine and self._unlike.get(member) != subscribed:
                logger.warning(
                    "consumer group %r: this member reads %s, and member %r reads %s. Members share the queues and the "
                    "retries, so what the one that gets a message does not choose is read by none, and a retry may "
                    "come to one that does not expect it: give all members the same topics, tags and selector, or "
                    "groups of their own", self.group, mine, member, theirs, extra=self._fields,
                )  # fmt: skip
        self._unlike = unlike

    def _claim(self, todo: Moves, new: list[Queue]) -> None:
        if any(len(self._members.live(topic)) > 1 for topic in self.topics):
            self.machine.sleep(self.machine.random() * min(0.5, self.settings.heartbeat_interval_s / 20))
        start = self._start_of(new)
        with self.changed:
            # One that is being released cannot be claimed anew before.
            wanted = {queue: generation for queue, generation in todo.claim.items() if queue not in self.queues}
        got = self.log.groups.claim(self.group, self.name, wanted, start, self.by, self._take_over)
        self._take_over = False
        if got:
            queues = sorted(got)
            logger.info("consumer group %r: %s claimed %s", self.group, self.name, queues, extra=self._fields)
        with self.changed:
            self._claims += 1
            for queue, claim in got.items():
                self.queues[queue] = ProcessQueue(queue, claim)

    def _start_of(self, queues: list[Queue]) -> dict[Queue, int]:
        """Where the group begins in queues for which it has no place."""
        if not queues:
            return {}
        settings = self.settings
        firsts, tails = self.log.firsts(), self.log.tails(refresh=False)
        if settings.consume_from == ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            found: Mapping[Queue, int] = tails
        elif settings.consume_timestamp is not None:
            planner = Planner(self.log, Subscription(settings.topics))
            found = planner.resolve("consume_timestamp", settings.consume_timestamp)
        else:
            found = firsts
        # Retries of a group whose progress was deleted are still its own.
        return {q: (firsts if q[0] == self._retry else found).get(q, 0) for q in queues}

    # ------------------------------------------------------------------ progress
    def _persist_when_due(self) -> None:
        now_s = self.machine.monotonic()
        if now_s >= self._persist_at_s:
            apart_s = PUTS_APART_S * self._members.of_all_groups if self._is_remote else 0.0
            self._persist_at_s = now_s + max(self.settings.persist_interval_s, apart_s)
            self.persist()

    def persist(self) -> None:
        """Write how far each queue is finished, and release those that have come to their end.

        A script's commit and the member's own thread take turns: the second one would find what is released lost.
        """
        with self._persisting:
            self._persist()

    def _persist(self) -> None:
        with self.changed:
            told = [(q, Report(q.lowest, q.generation, q.releasing and not q.running)) for q in self.queues.values()]
        reports = {q.queue: report for q, report in told if report.release or report.next_offset > q.written}
        if not reports:
            return
        finished = sum(r.next_offset - q.written for q, r in told if q.queue in reports)
        with acknowledging(self.log.path, "ack", {topic for topic, _ in reports}, finished, group=self.group):
            refused = self.log.groups.report(self.group, self.name, reports, self.by)
        with self.changed:
            self._lose([q for q, _ in told if q.queue in refused])
            for queue, report in told:
                if queue.queue in reports and queue.queue not in refused:
                    queue.written = max(queue.written, report.next_offset)
                    if report.release:
                        del self.queues[queue.queue]
        if refused:
            self._balance_at_s = 0.0  # it may be ours again: somebody has reset the group

    def _lose(self, queues: Iterable[ProcessQueue]) -> None:
        """Somebody else has these queues. The caller holds the lock."""
        for queue in queues:
            logger.warning(
                "consumer group %r: queue %d of topic %r was claimed by another member, or reset: what this member did "
                "from offset %d on comes again", self.group, queue.queue[1], queue.queue[0], queue.written,
                extra={
                    **self._fields, "topic": queue.queue[0], "queue_id": queue.queue[1], "queue_offset": queue.written
                },
            )  # fmt: skip
            queue.lost = True
            queue.drop_waiting()
            if self.queues.get(queue.queue) is queue:
                del self.queues[queue.queue]
        self.changed.notify_all()

    def _place_when_due(self) -> None:
        """Place the delayed messages whose time has come: retries must come even if nobody else writes."""
        now_s = self.machine.monotonic()
        if now_s >= self._place_at_s:
            self._place_at_s = now_s + max(1.0, self.pull_interval_s)
            self.log.place_due()

    def place_due(self) -> None:
        """Place them now. A store that fails is no reason not to go on."""
        try:
            self.log.place_due()
        except Exception as problem:
            self.note(problem, NOT_PLACED)

    # ------------------------------------------------------------------ messages
    def fetch_past_damage(self) -> bool:
        """:meth:`fetch`, and when some queues cannot be read, only these wait: they are held up for a while."""
        try:
            return self.fetch()
        except OF_SOME_QUEUES:
            self.log.refresh()  # which raises when the damage is of all
        with self.changed:
            queues = [queue for queue in self.queues.values() if queue.is_open]
        fetched = False
        for queue in queues:
            try:
                fetched |= self.fetch(queue)
            except OF_SOME_QUEUES as problem:
                self._hold_up(queue, problem)
        return fetched

    def _hold_up(self, queue: ProcessQueue, problem: Exception) -> None:
        with self.changed:
            before = queue.held_up
            pause_s = HELD_UP_S_MIN if before is None else min(BACKOFF_S_MAX, 2 * before.pause_s)
            queue.held_up = HeldUp(problem, pause_s, self.machine.monotonic() + pause_s)
        topic, queue_id = queue.queue
        self.note(problem, f"queue {queue_id} of topic {topic!r} is held up, and tried again in {pause_s:g} s")

    def fetch(self, only: ProcessQueue | None = None) -> bool:
        """Fetch what queues have room for, or one of them; False when nothing was fetched."""
        version, span = self.log.refresh(), self.settings.max_span
        if self._nothing_at == (version, self._claims):  # two looks at the disk, and nothing else
            return False
        with self.changed:
            claims = self._claims
            waiting = sum(q.rows for q in self.queues.values())
            if waiting and waiting * self._fetcher.row_bytes > FETCH_BYTES:
                return False
            open_queues = [q for q in self.queues.values() if q.is_open]
            now_s = self.machine.monotonic()
            # A queue that is not named would count as read by others, and its placements would be forgotten.
            left_out = [q for q in open_queues if only not in (None, q) or q.is_held_up(now_s)]
            starts = {
                q.queue: (q.fetched_to, 0 if q in left_out else span - (q.fetched_to - q.lowest)) for q in open_queues
            }
        here, began_ns = tracing(), int(self.machine.time() * 1e9)
        found = self._fetcher.fetch(starts)
        tables = [new.messages for new in found.values() if new.messages.num_rows]
        if here is not None and tables:
            here.received(self.log.path, self.group, tables, began_ns)
        if not found and all(room > 0 for _, room in starts.values()):
            self._nothing_at = (version, claims)
        with self.changed:
            for queue in open_queues:
                if queue not in left_out:
                    queue.held_up = None
                new = found.get(queue.queue)
                if new is not None and queue.is_open and queue.fetched_to == starts[queue.queue][0]:
                    queue.put(new.messages, new.fetched_to)
            if found:
                self.changed.notify(sum(new.messages.num_rows for new in found.values()))
        return bool(found)


def _told(problem: Exception) -> str:
    """Return what a log says of a problem: its sentence, and of one that nobody foresaw where it came from."""
    foreseen = (StorageError, *OF_SOME_QUEUES)
    return redacted(str(problem)) if isinstance(problem, foreseen) else traceback_of(problem)


def _subscribed(topics: Iterable[str], chooses: str) -> str:
    """Topics and a filter, for people."""
    names = ", ".join(repr(topic) for topic in sorted(topics))
    return f"{names} (of them {chooses!r})" if chooses else names
