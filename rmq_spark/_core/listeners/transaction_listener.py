"""Listeners, which run and check local transactions, and the import of a listener by its path."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from types import ModuleType
from typing import Any, TypeAlias

import pyarrow as pa

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.vocabulary.options import nearest
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark._core.vocabulary.remedy import decide_by_hand
from rmq_spark._core.vocabulary.rows import RowSet
from rmq_spark._core.vocabulary.verdicts import BATCH, LocalTransactionState, Rollback, VerdictArray, call_for_verdicts
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
        UTC, by the clock of the machine that executed it.
    is_whole : bool
        False when the local transaction ended the store's transaction in its middle, so that its effect is unknown.
    rows : RowSet or None
        The positions of the messages whose transactions were executed; None: all of the half batch.
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

    It mirrors RocketMQ's ``org.apache.rocketmq.client.producer.TransactionListener``, for a half batch at a time.
    """

    requires_spark = False
    """True for a listener that needs a Spark session. ``format("txmq")``, which commits without one, refuses it."""

    needs_single_transactions = False
    """True for a listener that rolls back some messages of a half batch: sinks refuse it for half batches that are one
    transaction."""

    idempotent = False
    """True for a listener whose local transaction may run twice, or twice at once, with the effect of one run. Of the
    listeners without a fence, executors run only these (``TransactionalSink(run_on="executors")``)."""

    only_checks = False
    """True for a listener that answers checks and has no local transaction to run. Sends that need one refuse it."""

    store_id: str | None = None
    """Names the store that the local transactions change: a database, a table, a partner's account. A class or an
    instance sets it, to at most 200 printable characters. A listener with a fence has the fence's id. Each half batch
    keeps the name, and only a listener with the same name is asked about it. None: the group's listeners without a name
    answer for each other."""

    def require_ready(self) -> None:  # noqa: B027 - most have nothing to check
        """Raise when the local transaction cannot run, such as for a missing table. It is called before each prepare,
        and never for a check."""

    def require_reachable(self) -> None:  # noqa: B027 - most have no cheap query
        """Raise when the store does not answer, so that no check can be answered now. A check job calls it once a
        round, even when nothing is pending. Override it with a cheap query that changes nothing."""

    def begin_parts(self, batch: HalfBatch) -> bool:
        """Record that executors run the parts of this attempt, each by :meth:`execute_local_transaction`. Return False
        when the attempt was begun as a whole, which then goes on here.

        Raises
        ------
        ListenerError
            Without a fence, unless the listener is :attr:`idempotent`.
        """
        require_parts(self, repr(batch))
        return True

    @abstractmethod
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Do the work that must agree with the messages, and return the verdict(s).

        A rollback is final: the local transaction ran and said no. Give a reason by ``txmq.Rollback("why")``, returned
        or raised, by ``batch.reason``, or by ``batch.verdicts(rollback={key: why})``. Any other exception leaves the
        half batch pending, and a check or a replay settles it. The method may be a coroutine function only for
        :meth:`TransactionMQProducer.send_message_in_transaction_async`.
        """

    @abstractmethod
    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        """Return the outcome of the local transaction(s) of ``batch.transactions``.

        ROLLBACK_MESSAGE is a promise: the local transaction did not happen *and never will*. A replay of a micro-batch
        runs it as the next attempt. A listener without a fence cannot keep a late driver from committing, and knows no
        store but its own (:attr:`store_id`). It should answer UNKNOWN until it is sure, and may set ``batch.reason`` to
        a few words, which ``txmq trace`` shows.

        When a record shows that the local transaction *ran and said no*, answer
        ``txmq.Rollback("why", refused=True)``, or ``batch.verdicts(refused={key: why})`` for some of several. Then the
        rollback is final, and nothing runs again.
        """

    def check_local_transactions(self, batches: Sequence[HalfBatch]) -> Sequence[Verdicts | Exception]:
        """Return the answer of :meth:`check_local_transaction` for each half batch of a round of checks.

        A listener that can answer for many with one query overrides it. The half batches are small, and of one group,
        store and commit log. An exception may stand in place of an answer: :meth:`check_local_transaction` is then
        called for that half batch, and for all of them when this method raises.
        """
        return [call_for_verdicts(self.check_local_transaction, batch) for batch in batches]


def require_executing(listener: TransactionListener, where: str) -> TransactionListener:
    """Return the listener, or raise ListenerError when it only answers checks; ``where`` begins the error."""
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


def require_parts(listener: TransactionListener, where: str) -> TransactionListener:
    """Return the listener, or raise ListenerError when executors cannot run its local transactions."""
    if listener.requires_spark:
        raise ListenerError(
            f"{where}: {listener!r} works with a Spark session, which executors do not have. Its work is run by "
            "executors already: leave out run_on"
        )
    has_fence = type(listener).begin_parts is not TransactionListener.begin_parts
    if has_local_transaction(listener) and not (has_fence or listener.idempotent):
        raise ListenerError(
            f"{where}: {listener!r} has no fence, and Spark may run a task twice, or two at once. Use a "
            "SqlTransactionListener; or, when running twice has the effect of one run, say so: idempotent = True"
        )
    return listener


NO_LISTENER_FENCE = "none"
"""The store of half batches with ``transactionListener=none``. Any check commits them, whatever its listeners are."""
STORE_ID_CHARS_MAX = 200


class CommitOncePrepared(TransactionListener):
    """``transactionListener=none``: there is no local transaction, so every half batch commits once it is prepared."""

    store_id = NO_LISTENER_FENCE

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return LocalTransactionState.COMMIT_MESSAGE

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return LocalTransactionState.COMMIT_MESSAGE


def has_local_transaction(listener: TransactionListener) -> bool:
    """Whether there is anything to execute: not with ``transactionListener=none``."""
    return not isinstance(listener, CommitOncePrepared)


def store_id_of(listener: TransactionListener) -> str | None:
    """Return the listener's store id, or raise ListenerError when it is not the name of a store. The id of a fence is
    read from its database now."""
    store_id = listener.store_id
    if store_id is not None and has_local_transaction(listener):
        _require_store_id(store_id, type(listener).__name__)
    return store_id


def store_id_to_send(listener: TransactionListener) -> str | None:
    """Return the listener's store id, or raise when its local transaction cannot run."""
    listener.require_ready()
    return store_id_of(listener)


def _require_store_id(store_id: object, where: str) -> None:
    is_text = isinstance(store_id, str) and 0 < len(store_id) <= STORE_ID_CHARS_MAX and store_id.isprintable()
    if not is_text or store_id != str(store_id).strip() or store_id == NO_LISTENER_FENCE:
        raise ListenerError(
            f"{where}.store_id={str(store_id)[:STORE_ID_CHARS_MAX]!r} is not the name of a store: a text of 1 to "
            f"{STORE_ID_CHARS_MAX} printable characters is expected, without blanks at its ends, and not "
            f"{NO_LISTENER_FENCE!r}; or None for a store without a name"
        )


def require_same_store(half_id: str, prepared_with: str | None, found: str | None) -> None:
    """Raise FenceError when a half batch was not prepared with a listener of the store ``found``.

    Only a listener of the same store knows the local transaction. A named and an unnamed store differ, and both differ
    from ``transactionListener=none``.
    """
    if prepared_with != found:
        raise FenceError(
            f"half batch {half_id!r} was prepared with {_store(prepared_with)}, and the listener has {_store(found)}: "
            "it is of another database, or another listener. Restart with the one that the batch was prepared with, "
            "or let a checker that has it settle it",
            remedy=decide_by_hand(half_id, "else find out what became of its local transaction, and settle it with "),
        )


def _store(store_id: str | None) -> str:
    if store_id == NO_LISTENER_FENCE:
        return "no local transaction (transactionListener=none)"
    return "no store_id and no fence" if store_id is None else f"store_id {store_id!r}"


def require_work(work: object, call: str) -> None:
    """Raise ListenerError unless ``work`` is a function of two arguments; ``call`` shows the call in the error."""
    if not callable(work):
        raise ListenerError(f"work is {type(work).__name__}: a function {call} is expected")
    try:
        signature = inspect.signature(work)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as problem:
        name = getattr(work, "__qualname__", type(work).__name__)
        raise ListenerError(f"work is {name}{signature}: a function {call} is expected") from problem


def require_listener(listener: object, where: str) -> TransactionListener:
    """Return the listener, or raise ListenerError unless it is a TransactionListener; ``where`` begins the error."""
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
    store_id = inspect.getattr_static(listener, "store_id")
    if store_id is not None and not hasattr(type(store_id), "__get__") and not isinstance(listener, CommitOncePrepared):
        _require_store_id(store_id, f"{where}: {type(listener).__name__}")  # a property is read when it is needed
    if inspect.iscoroutinefunction(listener.check_local_transaction):
        raise ListenerError(
            f"{where}: {type(listener).__name__}.check_local_transaction is a coroutine function, and a check has no "
            "event loop: make it a plain function"
        )
    return listener


def answers_many(listener: TransactionListener) -> bool:
    """Whether a listener answers for many half batches itself. It does not when a subclass or an instance overrides
    ``check_local_transaction`` alone."""
    single, many = "check_local_transaction", "check_local_transactions"
    if single in vars(listener):
        return False
    classes = type(listener).__mro__
    first_class = {
        name: next(position for position, cls in enumerate(classes) if name in vars(cls)) for name in (single, many)
    }
    return first_class[many] <= first_class[single]


def is_coroutine(listener: TransactionListener) -> bool:
    return inspect.iscoroutinefunction(listener.execute_local_transaction)


_PATH = re.compile(r"[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_listener(path: str, allowed_prefixes: Sequence[str] | None = None) -> TransactionListener:
    """Import the listener that ``module:attribute`` names: an instance, or a class or function that makes one.

    The path comes from the user's own option or configuration file, never from a table. Of ``allowed_prefixes``,
    ``"shop"`` allows the modules ``shop`` and ``shop.orders``, not ``shopping``. A path that is malformed, not allowed,
    cannot be imported, or names no TransactionListener is a ListenerError.
    """
    listener = load_object(path, allowed_prefixes)
    if not isinstance(listener, TransactionListener) and callable(listener):
        try:
            listener = listener()
        except Exception as problem:
            raise ListenerError(
                f"listener {path!r} cannot be made: calling it raised {type(problem).__name__}: {problem}"
            ) from cause_of(problem)
    return require_listener(listener, f"listener {path!r}")


def see_working_folder() -> None:
    """Add the working folder to the end of the import path, for listeners. The allow-list of modules still holds."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def load_object(path: str, allowed_prefixes: Sequence[str] | None = None) -> Any:
    """Import and return the object that ``module:attribute`` names; see :func:`load_listener`."""
    module_name, attribute = require_object_path(path, allowed_prefixes)
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as problem:
        raise import_error(path, module_name, problem) from cause_of(problem)
    for name in attribute.split("."):
        if not hasattr(target, name):
            members = getattr(target, "__dict__", {})
            public = [n for n in members if n[0] != "_" and not isinstance(members[n], ModuleType)]
            hint = f": {nearest(name, public)}" if public else ""
            raise ListenerError(f"listener {path!r}: {module_name!r} has no {attribute!r}{hint}")
        target = getattr(target, name)
        if isinstance(target, ModuleType):  # which may not be allowed
            raise ListenerError(f"listener {path!r} goes through the module {target.__name__!r}: name that one itself")
    return target


def require_object_path(path: str, allowed_prefixes: Sequence[str] | None = None) -> tuple[str, str]:
    """Return the module and the attribute of a path that :func:`load_object` may import, or raise ListenerError."""
    if _PATH.fullmatch(path) is None:
        raise ListenerError(f"listener {path!r} is not 'module:attribute', such as 'shop.orders:listener'")
    module_name, _, attribute = path.partition(":")
    if allowed_prefixes is not None and not any(
        module_name == prefix.rstrip(".") or module_name.startswith(prefix.rstrip(".") + ".")
        for prefix in allowed_prefixes
    ):
        raise ListenerError(
            f"listener {path!r} is outside the allowed modules ({', '.join(allowed_prefixes) or 'none'}): "
            "add its package to listener_modules if you trust it"
        )
    return module_name, attribute


def import_error(path: str, module_name: str, problem: Exception) -> ListenerError:
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
