"""Listeners, which run and check local transactions, and finding a listener by its name."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import ModuleType
from typing import Any, TypeAlias

import pyarrow as pa

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.vocabulary.message import MessageExt
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import BATCH, MESSAGE, LocalTransactionState, Rollback, VerdictArray, returned
from rmq_spark.errors import FenceError, ListenerError

Verdicts: TypeAlias = (
    LocalTransactionState
    | Rollback
    | Sequence[LocalTransactionState | Rollback | None]
    | VerdictArray
    | pa.Array
    | None
)
"""One verdict for all transactions of a half batch, or one for each row of ``batch.transactions``, as
``batch.verdicts(...)`` makes them. None is UNKNOWN."""


@dataclass(frozen=True)
class ExecutedAttempt:
    """An attempt that a listener's store has executed.

    Attributes
    ----------
    half_id, app_id, batch_id, attempt :
        Of the half batch. ``app_id`` and ``batch_id`` are its name in the log.
    executed_at : datetime
        When that was (UTC), by the clock of the machine that executed it.
    is_whole : bool
        False when the local transaction ended the store's transaction in its middle: nobody knows what was done.
    rows : RowSet or None
        The places of the messages whose transactions were executed; None: all of the half batch.
    """

    half_id: str
    app_id: str
    batch_id: int
    attempt: int
    executed_at: datetime
    is_whole: bool = True
    rows: RowSet | None = None


class TransactionListener(ABC):
    """Runs a half batch's local transaction, and later tells a check what became of it.

    It mirrors RocketMQ's ``org.apache.rocketmq.client.producer.TransactionListener``, but takes a half batch at a time.
    """

    requires_spark = False
    """True for a listener that needs a Spark session. ``format("txmq")`` refuses it, because it commits without one."""

    needs_single_transactions = False
    """True for a listener that rolls back some messages of a half batch: sinks refuse it for half batches that are one
    transaction."""

    only_checks = False
    """True for a listener that answers checks and has no local transaction to run. Sends that need one refuse it."""

    store_id: str | None = None
    """Names the store that the local transactions change: a database, a table, a partner's account. Each half batch
    keeps it, and only a listener of the same store is asked about that. Of a listener with a fence it is the fence's
    id. None: listeners of the group that name no store answer for each other. A class or an instance sets it, to at
    most 200 printable characters."""

    def require_ready(self) -> None:  # noqa: B027 - most have nothing to look at
        """Raise when the local transaction could not run: a table is missing. It is called before each half batch is
        prepared, and never for a check."""

    def require_reachable(self) -> None:  # noqa: B027 - most have no cheap question
        """Raise when no check could be answered now: the store does not answer. A check job calls it once a round, also
        when nothing is pending, so override it with a cheap question that changes nothing."""

    @abstractmethod
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Do the work that must agree with the messages, and return the verdict(s).

        A rollback is final: the local transaction ran and said no. ``txmq.Rollback("why")`` in its place, returned or
        raised, says why, and so do ``batch.reason`` and ``batch.verdicts(rollback={key: why})``. Any other
        exception leaves the half batch pending, and a check or a replay settles it. It may be a coroutine function
        for :meth:`TransactionMQProducer.send_message_in_transaction_async`, and for nothing else.
        """

    @abstractmethod
    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Return what became of the local transaction(s) of ``batch.transactions``.

        ROLLBACK_MESSAGE is a promise: the local transaction did not happen *and never will*. A replay of a micro-batch
        runs it as the next attempt. A listener without a fence cannot keep a late driver from committing, nor know of a
        store that it does not look into: see :attr:`store_id`. It should answer UNKNOWN until it is sure, and may say
        why in ``batch.reason``: a few words, which ``txmq trace`` shows.

        When a record tells that the local transaction *ran and said no*, the answer is
        ``txmq.Rollback("why", refused=True)``, or ``batch.verdicts(refused={key: why})`` for some of several. Then the
        rollback is final, and nothing runs again.
        """

    def check_local_transactions(self, batches: Sequence[HalfBatch]) -> Sequence[Verdicts | Exception]:
        """Return for each half batch what :meth:`check_local_transaction` returns: those that a round of checks found.

        A listener that can answer many with one question overrides it. The half batches are small, of one group, store
        and commit log. An exception that is returned in the place of an answer stands for that half batch alone.
        :meth:`check_local_transaction` is then asked about it, and about all of them when this method raises.
        """
        return [returned(self.check_local_transaction, batch) for batch in batches]


class PerMessageListener(TransactionListener):
    """Makes a TransactionListener from a listener with RocketMQ's own signature, which answers message by message.

    Parameters
    ----------
    listener : object
        Has ``execute_local_transaction(msg, arg)`` and ``check_local_transaction(msg)``, where ``msg`` is a
        :class:`~rmq_spark.MessageExt`. Each returns a LocalTransactionState or None, or returns or raises a
        :class:`~rmq_spark.Rollback`, which says why. It may have a ``store_id``; see
        :attr:`TransactionListener.store_id`.

    Notes
    -----
    It needs ``transactionPer=message``, or half batches of one message (a producer's single send), because a verdict on
    one message says nothing about the others.
    """

    def __init__(self, listener: Any) -> None:
        _require_methods(listener, "PerMessageListener")
        self._listener = listener
        self.store_id = getattr(listener, "store_id", None)

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        ask = self._listener.execute_local_transaction
        return [returned(ask, msg, batch.arg) for msg in self._messages(batch)]

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return [returned(self._listener.check_local_transaction, msg) for msg in self._messages(batch)]

    def _messages(self, batch: HalfBatch) -> Iterable[MessageExt]:
        table = batch.messages()
        if batch.transaction_per != MESSAGE and not (batch.transaction_per == BATCH and table.num_rows == 1):
            raise ListenerError(
                f"PerMessageListener answers per message, but half batch {batch.half_id!r} has transactions of several "
                "messages: set transactionPer=message"
            )
        for row in table.to_pylist():
            row["properties"] = dict(row["properties"] or ())
            yield MessageExt(**row, producer_group=batch.producer_group, check_times=batch.check_times)


def require_executing(listener: TransactionListener, where: str) -> TransactionListener:
    """Return the listener, or raise ListenerError when it only answers checks; ``where`` says what it would run."""
    if listener.only_checks:
        raise ListenerError(
            f"{where}: {listener!r} has no work, so it answers checks and has no local transaction to run. Give it "
            "work(connection, batch), or send with producer.transaction(session) or send()"
        )
    return listener


def require_transactions_for(listener: TransactionListener, transaction_per: str, where: str) -> TransactionListener:
    """Return the listener, or raise ListenerError when it needs more than one transaction in a half batch."""
    if listener.needs_single_transactions and transaction_per == BATCH:
        raise ListenerError(
            f"{where}: {listener!r} rolls back messages that do not fit, and here a whole micro-batch is one "
            "transaction: set transactionKey, or transactionPer=message"
        )
    return listener


NO_LISTENER_FENCE = "none"
"""Kept as the store of half batches with ``transactionListener=none``. Any check commits them, whichever listeners it
has."""
STORE_ID_CHARS_MAX = 200


class CommitOncePrepared(TransactionListener):
    """``transactionListener=none``: there is no local transaction, so every half batch commits once it is prepared."""

    store_id = NO_LISTENER_FENCE

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return LocalTransactionState.COMMIT_MESSAGE

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return LocalTransactionState.COMMIT_MESSAGE


def store_id_of(listener: TransactionListener) -> str | None:
    """Return the store of a listener's local transactions. A fence's id is looked up now, in its database.

    Raises
    ------
    ListenerError
        When it is not the name of a store.
    """
    found = listener.store_id
    if found is not None and not isinstance(listener, CommitOncePrepared):
        _require_store_id(found, type(listener).__name__)
    return found


def store_id_to_send(listener: TransactionListener) -> str | None:
    """Return the store of a listener whose local transaction is to run."""
    listener.require_ready()
    return store_id_of(listener)


def _require_store_id(found: object, where: str) -> None:
    good = isinstance(found, str) and 0 < len(found) <= STORE_ID_CHARS_MAX and found.isprintable()
    if not good or found != str(found).strip() or found == NO_LISTENER_FENCE:
        raise ListenerError(
            f"{where}.store_id={str(found)[:STORE_ID_CHARS_MAX]!r} is not the name of a store: a text of 1 to "
            f"{STORE_ID_CHARS_MAX} printable characters is expected, without blanks at its ends, and not "
            f"{NO_LISTENER_FENCE!r}; or None for a store without a name"
        )


def require_same_fence(half_id: str, prepared_with: str | None, found: str | None) -> None:
    """Raise FenceError when a listener of the store ``found`` cannot know what became of a half batch.

    Only a listener of the store of the prepare knows its local transaction. One of another store, one that names none
    where the half batch has one (or the other way round), and ``transactionListener=none`` would answer without
    knowing.
    """
    if prepared_with != found:
        raise FenceError(
            f"half batch {half_id!r} was prepared with {_store(prepared_with)}, and the listener has {_store(found)}: "
            "it is of another database, or another listener. Restart with the one that the batch was prepared with, "
            "let a checker that has it settle it, or find out what became of its local transaction and settle it with "
            "log.resolve(half_id, verdict, reason=…)"
        )


def _store(store_id: str | None) -> str:
    if store_id == NO_LISTENER_FENCE:
        return "no local transaction (transactionListener=none)"
    return "no store_id and no fence" if store_id is None else f"store_id {store_id!r}"


def _require_methods(listener: object, what: str) -> None:
    for method in ("execute_local_transaction", "check_local_transaction"):
        if not callable(getattr(listener, method, None)):
            raise ListenerError(f"{what} got {type(listener).__name__}, which has no method {method}")


def require_work(work: object, call: str) -> None:
    """Raise ListenerError when ``work`` is no function of two arguments; ``call`` shows how it is called."""
    if not callable(work):
        raise ListenerError(f"work is {type(work).__name__}: a function {call} is expected")
    try:
        signature = inspect.signature(work)
    except (TypeError, ValueError):  # some functions written in C do not tell
        return
    try:
        signature.bind(None, None)
    except TypeError as problem:
        name = getattr(work, "__qualname__", type(work).__name__)
        raise ListenerError(f"work is {name}{signature}: a function {call} is expected") from problem


def require_listener(listener: object, where: str) -> TransactionListener:
    """Return the listener, or raise ListenerError when it is no TransactionListener; ``where`` says whence it came."""
    if listener is None:
        raise ListenerError(f"{where}: no listener was given; pass a TransactionListener")
    if isinstance(listener, type) and issubclass(listener, TransactionListener):
        raise ListenerError(f"{where}: {listener.__name__} is a class; pass an instance of it")
    if not isinstance(listener, TransactionListener):
        raise ListenerError(
            f"{where}: {type(listener).__name__} is not a TransactionListener; subclass it, or wrap a listener with "
            "RocketMQ's per-message signature in PerMessageListener"
        )
    for method in (listener.execute_local_transaction, listener.check_local_transaction):
        try:
            inspect.signature(method).bind(None)
        except TypeError as problem:
            raise ListenerError(
                f"{where}: {type(listener).__name__}.{method.__name__}{inspect.signature(method)} does not take one "
                "argument, the half batch; wrap a listener with the arguments of RocketMQ in PerMessageListener"
            ) from problem
    found = inspect.getattr_static(listener, "store_id")
    if found is not None and not hasattr(type(found), "__get__") and not isinstance(listener, CommitOncePrepared):
        _require_store_id(found, f"{where}: {type(listener).__name__}")  # what a property says shows when it is needed
    if inspect.iscoroutinefunction(listener.check_local_transaction):
        raise ListenerError(
            f"{where}: {type(listener).__name__}.check_local_transaction is a coroutine function, and a check has no "
            "event loop: make it a plain function"
        )
    return listener


def answers_many(listener: TransactionListener) -> bool:
    """Whether a listener has an answer of its own for many half batches: one that a subclass changes for one half batch
    does not count."""
    one, many = "check_local_transaction", "check_local_transactions"
    if one in vars(listener):
        return False
    kinds = type(listener).__mro__
    first = {name: next(at for at, kind in enumerate(kinds) if name in vars(kind)) for name in (one, many)}
    return first[many] <= first[one]


def is_coroutine(listener: TransactionListener) -> bool:
    """Whether a local transaction needs an event loop."""
    return inspect.iscoroutinefunction(listener.execute_local_transaction)


_PATH = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_listener(path: str, allowed_prefixes: Sequence[str] | None = None) -> TransactionListener:
    """Import the listener that ``module:attribute`` names: an instance, or a class or function that makes one.

    Parameters
    ----------
    path : str
        Comes from the user's own option or configuration file, never from a table.
    allowed_prefixes : sequence of str, optional
        Modules that may be imported: ``"shop"`` allows ``shop`` and ``shop.orders``, not ``shopping``.

    Raises
    ------
    ListenerError
        When the path is malformed, not allowed, cannot be imported, or names no TransactionListener.
    """
    found = load_object(path, allowed_prefixes)
    if not isinstance(found, TransactionListener) and callable(found):
        try:
            found = found()
        except Exception as problem:
            raise ListenerError(
                f"listener {path!r} cannot be made: calling it raised {type(problem).__name__}: {problem}"
            ) from cause_of(problem)
    return require_listener(found, f"listener {path!r}")


def see_working_folder() -> None:
    """Let listeners be imported from the working folder, last on the path. The allow-list of modules still holds."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def load_object(path: str, allowed_prefixes: Sequence[str] | None = None) -> Any:
    """Import what ``module:attribute`` names, and return it as it is; see :func:`load_listener`."""
    module_name, attribute = require_object_path(path, allowed_prefixes)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as problem:
        raise import_error(path, module_name, problem) from cause_of(problem)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ListenerError(f"listener {path!r}: {module_name!r} has no {attribute!r}")
        found = getattr(found, name)
        if isinstance(found, ModuleType):  # it may not be among the allowed modules
            raise ListenerError(f"listener {path!r} goes through the module {found.__name__!r}: name that one itself")
    return found


def require_object_path(path: str, allowed_prefixes: Sequence[str] | None = None) -> tuple[str, str]:
    """Return the module and the attribute of a path that :func:`load_object` may import, or raise ListenerError."""
    if _PATH.fullmatch(path) is None:
        raise ListenerError(f"listener {path!r} is not 'module:attribute', such as 'shop.orders:listener'")
    module_name, _, attribute = path.partition(":")
    if allowed_prefixes is not None and not any(
        module_name == p.rstrip(".") or module_name.startswith(p.rstrip(".") + ".") for p in allowed_prefixes
    ):
        raise ListenerError(
            f"listener {path!r} is outside the allowed modules ({', '.join(allowed_prefixes) or 'none'}): "
            "add its package to listener_modules if you trust it"
        )
    return module_name, attribute


def import_error(path: str, module_name: str, problem: Exception) -> ListenerError:
    """Return what to raise when the module of ``module:attribute`` cannot be imported."""
    missing = problem.name if isinstance(problem, ModuleNotFoundError) else None
    remedy = "put its folder on the PYTHONPATH, install it, or hand it over with spark-submit --py-files"
    if missing is None:
        remedy = "it is there, and its code raised this: mend it"
    elif not f"{module_name}.".startswith(f"{missing}."):
        remedy = f"it is there, and needs the module {missing}: install that"
    return ListenerError(
        f"listener {path!r}: module {module_name!r} cannot be imported here ({type(problem).__name__}: {problem}); "
        f"{remedy}"
    )
