"""A member of a consumer group claims its share of the queues, fetches, and writes progress. Both consumers without
Spark are built on it.

Its steps are called by threads (``member_threads.py``): one puts heartbeats, claims and releases queues, and writes
progress, another one fetches. One lock guards the state that they share. It is never held while a listener runs, a file
is read or a commit is made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

import pyarrow.fs as pafs

from rmq_spark._core.consumers.fetch import FETCH_BYTES, Fetcher
from rmq_spark._core.consumers.member_settings import ConsumeFromWhere, MemberSettings
from rmq_spark._core.consumers.progress import FetchPause, ProcessQueue
from rmq_spark._core.consumers.retry import dlq_topic, retry_topic
from rmq_spark._core.consumers.shares import Moves, moves
from rmq_spark._core.log.group_table import GroupPosition, Report
from rmq_spark._core.log.heartbeats import Members, new_member_name
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.reads.plan import Planner
from rmq_spark._core.reads.read_options import Subscription
from rmq_spark._core.runtime.spans import acknowledging, tracing
from rmq_spark._core.vocabulary.queues import Queue
from rmq_spark._core.vocabulary.redaction import redacted, traceback_of
from rmq_spark.errors import (
    CorruptLogError,
    GroupInUseError,
    ListenerError,
    NotACommitLogError,
    OffsetOutOfRangeError,
    StorageError,
)

logger = logging.getLogger(__name__)

PUTS_APART_S = 0.2
"""On an object store, minimum seconds between two writes of progress by all members of a log together: a store takes
few puts a second to one key."""
PULL_INTERVAL_S = 0.02
PULL_INTERVAL_REMOTE_S = 1.0
"""Seconds between two looks for new messages. On an object store each look costs a request."""
SLEEP_S_MAX = 0.1
"""The fetching thread sleeps through a pause up to this long. A longer pause ends when the consumer stops."""
BACKOFF_S_MAX = 30.0
NOT_PLACED = "delayed messages were not placed"
FATAL = (GroupInUseError, NotACommitLogError, ListenerError)
"""Errors after which another try would fail the same way."""
QUEUE_ERRORS = (CorruptLogError, OffsetOutOfRangeError)
"""Damage that may affect only some queues."""
FETCH_PAUSE_S_MIN = 1.0


class GroupMember:
    """One member of a consumer group. ``reads_retries``: it also reads the group's retry topic.

    Without threads, call its steps directly: :meth:`join`, :meth:`keep`, :meth:`fetch` and :meth:`leave`.
    """

    def __init__(self, engine: Engine, settings: MemberSettings, reads_retries: bool) -> None:
        self.engine, self.settings = engine, settings
        self.runtime = engine.runtime
        self.group = settings.group
        for topic in settings.topics:
            engine.require_topic(topic)
        self._retry = retry_topic(self.group) if reads_retries else None
        if reads_retries:
            for topic in (retry_topic(self.group), dlq_topic(self.group)):
                engine.create_own_topic(topic)
        self.topics = (*settings.topics, *((self._retry,) if self._retry else ()))
        self.name = new_member_name(self.runtime.unique_id())
        self.by = self.name.rpartition(".")[0]
        self.fields = {"consumer_group": self.group, "member": self.name}
        """The ``extra`` of its log messages."""
        self.changed = threading.Condition()
        """The lock of the shared state. Notified when messages can be taken, and when the consumer ends."""
        self.queues: dict[Queue, ProcessQueue] = {}
        self.problem: BaseException | None = None
        """The error that ended the consumer."""
        self._unfetched: Exception | None = None  # the error of the last fetch, if it failed for all queues
        self.stopping = threading.Event()
        self._fetcher = Fetcher(engine, set(self.topics).__contains__, settings.selector)
        table = engine.groups.table
        self._is_remote = isinstance(table.fs, pafs.FileSystem) and not isinstance(table.fs, pafs.LocalFileSystem)
        margin_s = min(settings.heartbeat_interval_s, settings.lease_s / 3)
        chooses = "" if settings.selector is None else settings.selector.text
        self._members = Members(table, self.group, self.name, self.topics, settings.lease_s, margin_s, chooses)
        self._unlike: dict[str, tuple[frozenset[str], str]] = {}  # subscriptions of members already warned about
        remote_s = PULL_INTERVAL_REMOTE_S if self._is_remote else PULL_INTERVAL_S
        self.pull_interval_s = remote_s if settings.pull_interval_s is None else settings.pull_interval_s
        self._beat_at_s = self._balance_at_s = self._persist_at_s = self._place_at_s = 0.0
        self._nothing_at: tuple[int, int] | None = None
        self._claims = 0  # counts claims: after a new one, the next fetch must look
        self._take_over = settings.take_over
        self._persisting = engine.runtime.lock()

    # ------------------------------------------------------------------ its part in the group
    def join(self) -> None:
        """Put the first heartbeat, and claim the member's share of the queues. When Spark reads for the group, that is
        a GroupInUseError."""
        try:
            self._beat()
            self._balance()
        except BaseException:
            if self.queues:
                self.leave()
            else:
                with suppress(Exception):  # the lease ends the membership
                    self._members.leave()
            raise
        self._beat_at_s = self.runtime.monotonic() + self.settings.heartbeat_interval_s

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
            except Exception as problem:  # the next round tries again
                self.note(problem, what)

    def wait_for_listeners(self, end_s: float) -> list[Queue]:
        """Wait for running listener calls until a time, and return the queues of those that still run."""
        with self.changed:
            for queue in self.queues.values():
                queue.releasing = True
                queue.drop_waiting()
            self.changed.notify_all()
            while any(q.running for q in self.queues.values()) and self.runtime.monotonic() < end_s:
                self.changed.wait(max(0.0, min(1.0, end_s - self.runtime.monotonic())))
            return [q.queue for q in self.queues.values() if q.running]

    def leave(self) -> None:
        """Write progress, release queues without running calls, and remove the heartbeat."""
        with self.changed:
            for queue in self.queues.values():
                queue.releasing = True
                queue.drop_waiting()
        for step in (self.persist, self._members.leave):
            try:
                step()
            except Exception as problem:  # the lease ends the membership
                text = _problem_text(problem)
                logger.warning("consumer group %r: leaving failed: %s", self.group, text, extra=self.fields)

    def may_start(self) -> bool:
        """Return True while this member's lease lasts: it may start listener calls."""
        return self._members.may_start()

    def _beat_when_due(self) -> None:
        now_s = self.runtime.monotonic()
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self.settings.heartbeat_interval_s
            self._balance_at_s = now_s
            self._beat()

    def _beat(self) -> None:
        began_s = self._members.beat()
        if self._members.may_start():
            self._members.renew(began_s)
            return
        # The lease had ended, so other members may have claimed the queues: look before going on.
        if self.queues:
            with self._persisting:
                self._drop_lost(self.engine.groups.positions(self.group))
        self._members.renew(began_s)
        with self.changed:
            self.changed.notify_all()

    def _drop_lost(self, positions: Mapping[Queue, GroupPosition]) -> None:
        with self.changed:
            owned = [(q, positions.get(q.queue)) for q in self.queues.values()]
            self._lose([q for q, p in owned if p is None or (p.owner, p.generation) != (self.name, q.generation)])

    def _balance_when_due(self) -> None:
        if self.runtime.monotonic() >= self._balance_at_s:
            self._balance()

    def _balance(self) -> None:
        """Release and claim queues until this member has its share."""
        self._members.look()
        self._warn_of_unlike()
        topics = self.engine.topics()
        queues = {topic: topics[topic] for topic in self.topics if topic in topics}
        with self._persisting:  # else a queue that is being released would look lost
            positions = self.engine.groups.positions(self.group)
            self._drop_lost(positions)
        with self.changed:
            owned = [queue for queue, state in self.queues.items() if state.is_open]
        changes = moves(self.name, owned, queues, positions, self._members.live, self._members.is_dead)
        with self.changed:
            for released in changes.release:
                if released in self.queues:
                    self.queues[released].releasing = True
                    self.queues[released].drop_waiting()
        unplaced = [(topic, q) for topic, count in queues.items() for q in range(count) if (topic, q) not in positions]
        if changes.claim or unplaced:
            self._claim(changes, unplaced)
        every_s = self.settings.heartbeat_interval_s
        self._balance_at_s = self.runtime.monotonic() + (every_s / 10 if changes.is_short else every_s)

    def _warn_of_unlike(self) -> None:
        """Warn once about each member whose subscription differs."""
        retries = {retry_topic(self.group)}  # a pull consumer does not read it
        own = _subscription_text(self._members.topics - retries, self._members.chooses)
        unlike = self._members.unlike()
        for member, subscribed in unlike.items():
            theirs = _subscription_text(subscribed[0] - retries, subscribed[1])
            if theirs != own and self._unlike.get(member) != subscribed:
                logger.warning(
                    "consumer group %r: this member reads %s, and member %r reads %s. Members share the queues and the "
                    "retries, so what the one that gets a message does not choose is read by none, and a retry may "
                    "come to one that does not expect it: give all members the same topics, tags and selector, or "
                    "groups of their own", self.group, own, member, theirs, extra=self.fields,
                )  # fmt: skip
        self._unlike = unlike

    def _claim(self, changes: Moves, unplaced: list[Queue]) -> None:
        if any(len(self._members.live(topic)) > 1 for topic in self.topics):
            self.runtime.sleep(self.runtime.random() * min(0.5, self.settings.heartbeat_interval_s / 20))
        start = self._start_offsets(unplaced)
        with self.changed:
            # A queue that is being released can be claimed again only after that.
            to_claim = {queue: generation for queue, generation in changes.claim.items() if queue not in self.queues}
        claimed = self.engine.groups.claim(self.group, self.name, to_claim, start, self.by, self._take_over)
        self._take_over = False
        if claimed:
            queues = sorted(claimed)
            logger.info("consumer group %r: %s claimed %s", self.group, self.name, queues, extra=self.fields)
        with self.changed:
            self._claims += 1
            for queue, claim in claimed.items():
                self.queues[queue] = ProcessQueue(queue, claim)

    def _start_offsets(self, queues: list[Queue]) -> dict[Queue, int]:
        """Return the offsets at which the group begins in queues without a position."""
        if not queues:
            return {}
        settings = self.settings
        firsts, tails = self.engine.firsts(), self.engine.tails(refresh=False)
        if settings.consume_from == ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET:
            starts: Mapping[Queue, int] = tails
        elif settings.consume_timestamp is not None:
            planner = Planner(self.engine, Subscription(settings.topics))
            starts = planner.resolve("consume_timestamp", settings.consume_timestamp)
        else:
            starts = firsts
        # The retry topic begins at its first message: a group keeps its retries when its progress is deleted.
        return {q: (firsts if q[0] == self._retry else starts).get(q, 0) for q in queues}

    # ------------------------------------------------------------------ problems
    def note(self, problem: Exception, what: str) -> None:
        """Log a problem that another try may solve. A fatal one ends the consumer."""
        if isinstance(problem, FATAL):
            self.fail(problem)
        else:
            logger.warning("consumer group %r: %s: %s", self.group, what, _problem_text(problem), extra=self.fields)

    def fail(self, problem: BaseException) -> None:
        with self.changed:  # all threads may report the same problem
            is_first, self.problem = self.problem is None, self.problem or problem
        if is_first:
            text = traceback_of(problem)
            logger.error("consumer group %r: the consumer ends: %s", self.group, text, extra=self.fields)
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ progress
    def _persist_when_due(self) -> None:
        now_s = self.runtime.monotonic()
        if now_s >= self._persist_at_s:
            apart_s = PUTS_APART_S * self._members.of_all_groups if self._is_remote else 0.0
            self._persist_at_s = now_s + max(self.settings.persist_interval_s, apart_s)
            self.persist()

    def persist(self) -> None:
        """Write each queue's progress, and free the queues that are to be released and run no calls.

        A script's commit and the member's thread take turns: else a queue that one of them has just released would look
        lost to the other.
        """
        with self._persisting:
            self._persist()

    def _persist(self) -> None:
        with self.changed:
            states = [(q, Report(q.lowest, q.generation, q.releasing and not q.running)) for q in self.queues.values()]
        reports = {q.queue: report for q, report in states if report.release or report.next_offset > q.written}
        if not reports:
            return
        finished = sum(r.next_offset - q.written for q, r in states if q.queue in reports)
        with acknowledging(self.engine.path, "ack", {topic for topic, _ in reports}, finished, group=self.group):
            refused = self.engine.groups.report(self.group, self.name, reports, self.by)
        with self.changed:
            self._lose([q for q, _ in states if q.queue in refused])
            for queue, report in states:
                if queue.queue in reports and queue.queue not in refused:
                    queue.written = max(queue.written, report.next_offset)
                    if report.release:
                        del self.queues[queue.queue]
        if refused:
            self._balance_at_s = 0.0  # after a reset of the group, the queue may be claimed again

    def _lose(self, queues: Iterable[ProcessQueue]) -> None:
        """Drop queues that were claimed by others or reset. The caller holds the lock."""
        for queue in queues:
            logger.warning(
                "consumer group %r: queue %d of topic %r was claimed by another member, or reset: what this member did "
                "from offset %d on comes again", self.group, queue.queue[1], queue.queue[0], queue.written,
                extra={
                    **self.fields, "topic": queue.queue[0], "queue_id": queue.queue[1], "queue_offset": queue.written
                },
            )  # fmt: skip
            queue.lost = True
            queue.drop_waiting()
            if self.queues.get(queue.queue) is queue:
                del self.queues[queue.queue]
        self.changed.notify_all()

    def _place_when_due(self) -> None:
        """Place delayed messages that are due: retries must come even if nothing is written to the log."""
        now_s = self.runtime.monotonic()
        if now_s >= self._place_at_s:
            self._place_at_s = now_s + max(1.0, self.pull_interval_s)
            self.engine.ledger.place_due()

    def place_due(self) -> None:
        """Place delayed messages that are due, now. A failing store is only noted."""
        try:
            self.engine.ledger.place_due()
        except Exception as problem:
            self.note(problem, NOT_PLACED)

    # ------------------------------------------------------------------ messages
    def fetch_on(self) -> None:
        """Fetch until the consumer stops: the work of a thread."""
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
                self.runtime.sleep(pause_s)  # cheaper than a wait
            elif not fetched:
                self.stopping.wait(pause_s)

    @property
    def fetch_problem(self) -> Exception | None:
        """The problem that keeps messages from being fetched, of all queues or of the first one that is paused; None
        without one. The member tries again."""
        with self.changed:
            pauses = [queue.fetch_pause for _, queue in sorted(self.queues.items()) if queue.fetch_pause is not None]
        return self._unfetched or (pauses[0].problem if pauses else None)

    def fetch_past_damage(self) -> bool:
        """Fetch as :meth:`fetch` does; a queue that cannot be read pauses for a while, and the rest go on."""
        try:
            return self.fetch()
        except QUEUE_ERRORS:
            self.engine.refresh()  # raises when the damage affects all queues
        with self.changed:
            queues = [queue for queue in self.queues.values() if queue.is_open]
        fetched = False
        for queue in queues:
            try:
                fetched |= self.fetch(queue)
            except QUEUE_ERRORS as problem:
                self._pause_fetches(queue, problem)
        return fetched

    def _pause_fetches(self, queue: ProcessQueue, problem: Exception) -> None:
        with self.changed:
            before = queue.fetch_pause
            pause_s = FETCH_PAUSE_S_MIN if before is None else min(BACKOFF_S_MAX, 2 * before.pause_s)
            queue.fetch_pause = FetchPause(problem, pause_s, self.runtime.monotonic() + pause_s)
        topic, queue_id = queue.queue
        self.note(problem, f"queue {queue_id} of topic {topic!r} is held up, and tried again in {pause_s:g} s")

    def fetch(self, only: ProcessQueue | None = None) -> bool:
        """Fetch what the queues have room for, or ``only`` one of them; False when nothing was fetched."""
        version, span = self.engine.refresh(), self.settings.max_span
        if self._nothing_at == (version, self._claims):  # nothing was written or claimed since an empty fetch
            return False
        with self.changed:
            claims = self._claims
            waiting_rows = sum(q.rows for q in self.queues.values())
            if waiting_rows and waiting_rows * self._fetcher.row_bytes > FETCH_BYTES:
                return False
            open_queues = [q for q in self.queues.values() if q.is_open]
            now_s = self.runtime.monotonic()
            # A queue that is not in starts counts as another member's, and its placements are forgotten.
            left_out = [q for q in open_queues if only not in (None, q) or q.fetch_is_paused(now_s)]
            starts = {
                q.queue: (q.fetched_to, 0 if q in left_out else span - (q.fetched_to - q.lowest)) for q in open_queues
            }
        tracer, began_ns = tracing(), int(self.runtime.time() * 1e9)
        fetched = self._fetcher.fetch(starts)
        tables = [new.messages for new in fetched.values() if new.messages.num_rows]
        if tracer is not None and tables:
            tracer.received(self.engine.path, self.group, tables, began_ns)
        if not fetched and all(room > 0 for _, room in starts.values()):
            self._nothing_at = (version, claims)
        with self.changed:
            for queue in open_queues:
                if queue not in left_out:
                    queue.fetch_pause = None
                new = fetched.get(queue.queue)
                if new is not None and queue.is_open and queue.fetched_to == starts[queue.queue][0]:
                    queue.put(new.messages, new.fetched_to)
            if fetched:
                self.changed.notify(sum(new.messages.num_rows for new in fetched.values()))
        return bool(fetched)


def _problem_text(problem: Exception) -> str:
    """Return a problem as text for a log message: a foreseen one's sentence, or another one's traceback."""
    foreseen = (StorageError, *QUEUE_ERRORS)
    return redacted(str(problem)) if isinstance(problem, foreseen) else traceback_of(problem)


def _subscription_text(topics: Iterable[str], chooses: str) -> str:
    names = ", ".join(repr(topic) for topic in sorted(topics))
    return f"{names} (of them {chooses!r})" if chooses else names
