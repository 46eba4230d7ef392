"""The producer without Spark: RocketMQ's TransactionMQProducer on a commit log."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_spark._core.client.commit_log import CommitLog, engine_of
from rmq_spark._core.listeners.transaction_listener import (
    CommitOncePrepared,
    TransactionListener,
    is_coroutine,
    require_executing,
    require_listener,
)
from rmq_spark._core.log.single_messages import OneMessage
from rmq_spark._core.producer.admission import KeyLocks, OpenSends
from rmq_spark._core.producer.future import SendFuture
from rmq_spark._core.producer.input import is_small, require_message
from rmq_spark._core.producer.result import TransactionSendResult
from rmq_spark._core.producer.send_threads import SendThreads, event_loop
from rmq_spark._core.producer.sender import Request, Sender
from rmq_spark._core.producer.session_transaction import SessionTransaction, within
from rmq_spark._core.protocol.group_commit import AT_ONCE_MAX, GroupCommit
from rmq_spark._core.protocol.limits import NO_LIMITS, PendingLimits
from rmq_spark._core.protocol.send import TwoPhase
from rmq_spark._core.runtime.callables import name_of
from rmq_spark._core.runtime.spans import tracing
from rmq_spark._core.vocabulary.message import Message, message_list, require_group_name
from rmq_spark._core.vocabulary.options import (
    MAINTENANCE_INTERVAL_S,
    REPLAY_CHECK_TIMEOUT_S,
    TRANSACTION_CHECK_INTERVAL_S,
    TRANSACTION_TIMEOUT_S,
    Duration,
    named,
    seconds,
    whole_number,
)
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, require_transaction_per
from rmq_spark.errors import ListenerError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.enlisted_session import EnlistedSession

logger = logging.getLogger(__name__)

LISTENER_THREADS = 32
IN_FLIGHT_MAX = 256
AWAIT_TERMINATION_S = 30.0
AT_EXIT_S_MAX = 10.0
"""Seconds for which the end of Python waits for each thread of a producer that was not closed."""
LATE_S = 0.5
"""Seconds that the threads of checks and upkeep have to end when sends have used up ``await_termination``."""


class TransactionMQProducer:
    """Sends messages, transactional or not, from any Python program, and answers its own checks while it is open.

    Mirrors RocketMQ's ``org.apache.rocketmq.client.producer.TransactionMQProducer``.

    Parameters
    ----------
    log : CommitLog or str
        The commit log to send to, or its path.
    producer_group : str
        Names the listeners that can answer for each other's transactions; a check asks one of them.
    listener : TransactionListener, optional
        Runs local transactions and answers checks. A producer without one has only :meth:`send` and :meth:`send_async`
        (RocketMQ: ``DefaultMQProducer``).
    on_listener_error : {"unknown", "fail"}
        An exception of the listener counts as UNKNOWN, as in RocketMQ (default), or is raised.
    check_interval : float or str or None
        Seconds between the checks of this group's open transactions; None for no checks.
    transaction_timeout : float or str
        Seconds before a transaction is checked.
    maintenance_interval : float or str or None
        Seconds between two rounds of the log's upkeep (:meth:`CommitLog.maintain`, with its defaults, and pruning of
        the listener's fence), in a thread of this program; None (default) when the check job does it.
    max_pending_batches : int, optional
        Refuse new transactions, with PendingLimitError, while this many of the group's half batches are pending.
    max_pending_bytes : int or str, optional
        The same limit for the bytes of their files: ``"500m"``, ``"10g"``.
    listener_threads : int
        Local transactions of asynchronous sends that run at once. A send is not prepared while too many others wait for
        one of these threads.
    max_in_flight : int
        Maximum number of unfinished asynchronous sends. Another send waits in the caller's thread; in an event loop it
        is accepted, and waits in the producer.
    linger : float or str
        Seconds for which a send waits for sends of other threads, to share its commit. With 0, as in Kafka's producer,
        only sends that come together anyway share one.
    max_batch_messages : int
        Maximum number of sends that share a commit.
    replay_check_timeout : float or str
        Seconds for which a repeated send (``idempotency_key``) asks the listener about the first one, before
        UnresolvedTransactionError.
    await_termination : float or str
        Seconds for which :meth:`shutdown` waits for sends under way, their callbacks, and a check.

    Examples
    --------
    >>> with TransactionMQProducer(log, "shop", listener) as producer:       # doctest: +SKIP
    ...     producer.send_message_in_transaction(Message("orders", b"..."), arg=42)
    """

    @named
    def __init__(
        self,
        log: CommitLog | str | os.PathLike[str],
        producer_group: str,
        listener: TransactionListener | None = None,
        *,
        on_listener_error: str = "unknown",
        check_interval: Duration | None = TRANSACTION_CHECK_INTERVAL_S,
        transaction_timeout: Duration = TRANSACTION_TIMEOUT_S,
        maintenance_interval: Duration | None = None,
        max_pending_batches: int | None = None,
        max_pending_bytes: int | str | None = None,
        listener_threads: int = LISTENER_THREADS,
        max_in_flight: int = IN_FLIGHT_MAX,
        linger: Duration = 0.0,
        max_batch_messages: int = AT_ONCE_MAX,
        replay_check_timeout: Duration = REPLAY_CHECK_TIMEOUT_S,
        await_termination: Duration = AWAIT_TERMINATION_S,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.engine = engine_of(log, storage_options)
        self.producer_group = require_group_name(producer_group)
        self._has_listener = listener is not None
        self.listener: TransactionListener = CommitOncePrepared()
        if listener is not None:
            self.listener = require_listener(listener, "TransactionMQProducer")
        self._needs_loop = is_coroutine(self.listener)
        if self.listener.requires_spark:
            raise ListenerError("TransactionMQProducer has no Spark session: use a listener that needs none")
        self.check_interval = _interval(check_interval, "check_interval")
        self.transaction_timeout = seconds(transaction_timeout, "transaction_timeout")
        self.maintenance_interval = _interval(maintenance_interval, "maintenance_interval")
        limits = PendingLimits.of(max_pending_batches, max_pending_bytes)
        self._commits = GroupCommit(
            self.engine,
            seconds(linger, "linger"),
            whole_number(max_batch_messages, "max_batch_messages", 1, AT_ONCE_MAX),
            owns_send_lock=lambda: self._send_threads.owns_send_lock(),
        )
        self.two_phase = TwoPhase(
            self.engine,
            self.listener,
            on_listener_error=on_listener_error,
            replay_check_timeout_s=seconds(replay_check_timeout, "replay_check_timeout"),
            pending_limits=limits,
            commits=self._commits,
        )
        self._listener_threads = whole_number(listener_threads, "listener_threads", 1)
        self._in_flight_max = whole_number(max_in_flight, "max_in_flight", 1)
        self._await_s = seconds(await_termination, "await_termination")
        self._open_sends = OpenSends(self.engine.runtime)
        self._without_listener = self.two_phase.with_listener(CommitOncePrepared(), "fail")
        self._sender = Sender(self.two_phase, self.producer_group)
        self._reset_sends()
        self._pid = os.getpid()
        self._opening = self.engine.runtime.lock()
        self._closing = self.engine.runtime.event()
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------ life
    def start(self) -> TransactionMQProducer:
        """Open the producer (``with`` does it)."""
        self._require_own_process()
        with self._opening:
            if not self._open_sends.is_open:
                self._closing.set()  # ends the threads of an interrupted start
                # Threads of an earlier start keep the event that ended them.
                self._closing = self.engine.runtime.event()
                atexit.register(self._end)
                self._commits.hurry(False)
                self._reset_sends()
                start = self.engine.runtime.start_thread
                if self.check_interval is not None:
                    self._threads.append(start(partial(self._answer_checks, self._closing), "txmq-checks", daemon=True))
                if self.maintenance_interval is not None:
                    self._threads.append(start(partial(self._maintain, self._closing), "txmq-maintainer", daemon=True))
                self._open_sends.open()
        return self

    def _reset_sends(self) -> None:
        """Begin with free slots and keys: sends that an earlier shutdown left under way hold none of them."""
        self._sender.key_locks = KeyLocks(self.engine.runtime)
        self._send_threads = SendThreads(
            self.producer_group, self._commits, self._open_sends, self._enter, self._in_flight_max,
            self._listener_threads, self.transaction_timeout, self.engine.runtime,
        )  # fmt: skip

    def shutdown(self) -> None:
        """Close the producer: accept no more sends, and wait for sends, callbacks, a check and upkeep under way.

        It waits for ``await_termination`` seconds at most, and then logs what still runs. A send that has not begun by
        then is cancelled and leaves nothing; what one that has begun leaves, a check settles.
        """
        if os.getpid() != self._pid:  # a forked copy has none of the threads
            self._open_sends.is_open = False
            return
        end_s = self.engine.runtime.monotonic() + self._await_s

        def seconds_left() -> float:
            return max(0.0, end_s - self.engine.runtime.monotonic())

        self._commits.hurry()
        left = self._open_sends.close(self._await_s)
        if left:
            late = [f"local transaction of {name_of(self.listener)}"] if self._send_threads.give_up() else []
        else:
            late = self._send_threads.wait(seconds_left)
        self._closing.set()
        for thread in self._threads:
            thread.join(max(LATE_S, seconds_left()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        late += [thread.name for thread in self._threads]
        if not self._threads:
            atexit.unregister(self._end)
        if left or late:
            self._warn_of_late(left, late)
        else:  # a send that still ran would need the log
            self.engine.compaction.wait()

    def _warn_of_late(self, left: int, late: Sequence[str]) -> None:
        names = f" Still running: {'; '.join(sorted(set(late)))}." if late else ""
        logger.warning(
            "producer %r was closed with %d under way (await_termination=%g s).%s Sends that had not begun were "
            "cancelled; what runs goes on while the program lives, and the end of Python waits for callbacks and local "
            "transactions. A check settles what they leave. Give what blocks in them a time limit of its own",
            self.producer_group, left, self._await_s, names,
        )  # fmt: skip

    def _end(self) -> None:
        """Stop the threads at the end of Python, which a thread within delta-rs would crash."""
        self._open_sends.is_open = False
        if os.getpid() != self._pid:  # a forked copy has none of the threads
            return
        self._closing.set()
        for thread in self._threads:
            thread.join(AT_EXIT_S_MAX)

    def __enter__(self) -> TransactionMQProducer:
        return self.start()

    def __exit__(self, *details: object) -> None:
        self.shutdown()

    def _answer_checks(self, closing: threading.Event) -> None:
        from rmq_spark._core.checks.service import CheckService

        service = CheckService(
            self.engine,
            {self.producer_group: self.listener} if self._has_listener else {},  # anyone may settle what send() left
            transaction_timeout=self.transaction_timeout,
            transaction_check_interval=self.check_interval or TRANSACTION_CHECK_INTERVAL_S,
            only_groups=True,
        )
        service.run(closing)

    def _maintain(self, closing: threading.Event) -> None:
        from rmq_spark._core.client.maintainer import Maintainer
        from rmq_spark._core.upkeep.fence_pruner import FencePruner

        interval = self.maintenance_interval or MAINTENANCE_INTERVAL_S
        Maintainer(self.engine, interval, fences=FencePruner(self.engine, [self.listener])).run(closing)

    # ------------------------------------------------------------------ sending
    def send_message_in_transaction(
        self, message: Message, arg: Any = None, *, idempotency_key: str | None = None
    ) -> TransactionSendResult:
        """Prepare one message, run the local transaction, and commit or roll back.

        Parameters
        ----------
        message : Message
            The message, which is a transaction of its own.
        arg : object
            Handed to ``execute_local_transaction`` as ``batch.arg``.
        idempotency_key : str, optional
            A retry with the same key (characters of a group name) sends nothing twice.

        Raises
        ------
        ListenerError
            When the producer has no listener.
        """
        require_message(message)
        return self.send_messages_in_transaction([message], arg, idempotency_key=idempotency_key)

    def send_messages_in_transaction(
        self,
        messages: Iterable[Message] | pa.Table,
        arg: Any = None,
        *,
        topic: str | None = None,
        transaction_key: str | None = None,
        transaction_per: str | None = None,
        idempotency_key: str | None = None,
    ) -> TransactionSendResult:
        """Prepare messages as one half batch: one transaction, or one per message or value of a column.

        Parameters
        ----------
        messages : iterable of Message, or pyarrow.Table
            A table has the columns of the sink (``body``, ``topic``, ``tags``, …) and that of ``transaction_key``.
        topic : str, optional
            For rows of a table without a ``topic``.
        transaction_key : str, optional
            A column of the table.
        transaction_per : {"batch", "message"}, optional
            What makes a transaction without a ``transaction_key``: the whole batch by default.
        arg : object, optional
            Passed to the listener as ``batch.arg``.
        idempotency_key : str, optional
            A repeated send with this key returns the first one's outcome, and sends nothing.

        Raises
        ------
        OptionError, MessageError, TopicNotFoundError
            For an invalid argument; nothing is sent.
        UnresolvedTransactionError
            When it is not known what became of the send: a check settles it.
        """
        self._require_listener()
        per = transaction_per or (KEY if transaction_key else BATCH)
        require_transaction_per(per, transaction_key, ("transaction_per", "transaction_key"))
        return self._send(Request(self.two_phase, messages, arg, topic, transaction_key, per, idempotency_key))

    def send(
        self,
        messages: Message | Iterable[Message] | pa.Table,
        *,
        topic: str | None = None,
        idempotency_key: str | None = None,
    ) -> TransactionSendResult:
        """Send messages without a local transaction: they become visible together, and no listener is asked (RocketMQ:
        ``DefaultMQProducer.send``).

        Parameters
        ----------
        messages : Message, iterable of Message, or pyarrow.Table
        topic : str, optional
            For rows of a table without a ``topic``.
        idempotency_key : str, optional
            A retry with the same key sends nothing twice.
        """
        batch = [messages] if isinstance(messages, Message) else messages
        return self._send(Request(self._without_listener, batch, topic=topic, idempotency_key=idempotency_key))

    # ------------------------------------------------------------------ sending, and not waiting
    def send_message_in_transaction_async(
        self, message: Message, arg: Any = None, *, idempotency_key: str | None = None
    ) -> SendFuture:
        """:meth:`send_message_in_transaction`, without waiting.

        Returns
        -------
        concurrent.futures.Future
            Of the result. A coroutine may await it. A send that is cancelled before it begins leaves nothing; a send
            that has begun goes on.

        Raises
        ------
        ListenerError
            When the producer has no listener, or when ``execute_local_transaction`` is a coroutine function, which runs
            in the caller's event loop, and none is running here.
        """
        self._require_listener()
        require_message(message)
        loop = event_loop()
        if loop is None and self._needs_loop:
            raise ListenerError(
                "execute_local_transaction is a coroutine function, and no event loop is running here: call "
                "send_message_in_transaction_async in a coroutine, or make it a plain function"
            )

        if self._needs_no_thread([message], idempotency_key) and not self._needs_loop:
            return self._start_shared(Request(self.two_phase, [message], arg))
        threads = self._send_threads

        def send() -> TransactionSendResult:
            # A send that waits for an earlier one of its key must not take a slot from others.
            with (
                self._sender.key_locks.hold(idempotency_key),
                threads.listener_slots.admitted(self.listener, loop) as admitted,
            ):
                two_phase = self.two_phase.with_listener(admitted, self.two_phase.on_listener_error)
                return self._sender.send(Request(two_phase, [message], arg, idempotency_key=idempotency_key))

        return threads.start(send)

    def send_async(
        self, messages: Message | Iterable[Message], *, topic: str | None = None, idempotency_key: str | None = None
    ) -> SendFuture:
        """:meth:`send`, without waiting; see :meth:`send_message_in_transaction_async`."""
        # A copy: the caller may change its list before the thread reads it.
        batch = [messages] if isinstance(messages, Message) else messages
        batch = batch if isinstance(batch, pa.Table) else message_list(batch)
        request = Request(self._without_listener, batch, topic=topic, idempotency_key=idempotency_key)
        if self._needs_no_thread(batch, idempotency_key):
            return self._start_shared(request)
        return self._send_threads.start(lambda: self._sender.send(request))

    def _needs_no_thread(self, batch: list[Message] | pa.Table, idempotency_key: str | None) -> bool:
        """Whether a send needs no thread that may wait: it has no key, no pending limit and no span, and is small."""
        return (
            idempotency_key is None
            and self.two_phase.pending.limits == NO_LIMITS
            and tracing() is None
            and isinstance(batch, list)
            and is_small(batch)
        )

    def _start_shared(self, request: Request) -> SendFuture:
        def message() -> OneMessage:
            return OneMessage(self._sender.writer(request), request.batch[0])

        return self._send_threads.start_shared(request.two_phase, message, request.arg)

    # ------------------------------------------------------------------ with a session
    @named
    def transaction(self, session: Any) -> AbstractContextManager[SessionTransaction]:
        """Send messages with the changes of an open SQLAlchemy session: both become final, or neither does.

        At the end of the ``with`` statement the session is flushed, the messages are prepared, the listener's fence row
        joins the session's database transaction, the session commits, and the messages become visible. An exception
        rolls the session back, and nothing is sent. A commit of the session within the statement is refused.

        Parameters
        ----------
        session : sqlalchemy.orm.Session or sqlalchemy.Connection
            On the database of the producer's :class:`~rmq_spark.SqlTransactionListener`.

        Raises
        ------
        ListenerError
            When the producer's listener has no fence in a database, or the session cannot be used, as within another
            ``transaction()`` on the same database connection.
        FenceError
            When the session is of another database than the listener's fence.
        LocalTransactionError
            When the commit failed: the messages stay pending, and a check finds out whether the session committed.

        Examples
        --------
        >>> with producer.transaction(session) as transaction:       # doctest: +SKIP
        ...     session.add(Order(order_id=7))
        ...     transaction.send(Message("orders", b"..."))
        """
        return within(session, self.listener if self._has_listener else None, self._send_enlisted)

    def _send_enlisted(self, enlisted: EnlistedSession, messages: list[Message]) -> TransactionSendResult:
        return self._send(Request(self.two_phase.with_listener(enlisted, "fail"), messages))

    def _send(self, request: Request) -> TransactionSendResult:
        entry = object()
        try:
            self._enter(entry)
            self._commits.require_may_wait()
            batch = request.batch
            listed = batch if isinstance(batch, pa.Table) else message_list(batch)
            return self._sender.send(replace(request, batch=listed))
        finally:
            self._open_sends.leave(entry)

    def _enter(self, entry: object) -> None:
        self._require_own_process()
        if not self._open_sends.enter(entry):
            raise OptionError("the producer is not open: use it in a with statement, or call start()")

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise OptionError(
                "the producer was made in another process, of which this one is a copy (os.fork): its threads and "
                "connections did not come along. Make a producer in each worker, after the fork"
            )

    def _require_listener(self) -> None:
        if not self._has_listener:
            raise ListenerError(
                f"producer {self.producer_group!r} has no listener, which would run the local transaction and answer "
                "checks: give TransactionMQProducer one, or send messages that have no local transaction with send()"
            )
        require_executing(self.listener, f"producer {self.producer_group!r}")


def _interval(interval: Duration | None, name: str) -> float | None:
    return None if interval is None else seconds(interval, name, above=True)
