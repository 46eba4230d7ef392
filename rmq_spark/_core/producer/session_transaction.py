"""Messages that are sent with the changes of an open SQLAlchemy session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rmq_spark._core.listeners.transaction_listener import TransactionListener
from rmq_spark._core.producer.result import TransactionSendResult
from rmq_spark._core.vocabulary.message import Message, message_list
from rmq_spark.errors import ListenerError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.enlisted_session import EnlistedSession


@dataclass
class SessionTransaction:
    """The messages of :meth:`TransactionMQProducer.transaction`.

    Attributes
    ----------
    result : TransactionSendResult or None
        Their result, after the ``with`` statement; None when none were sent.
    """

    messages: list[Message] = field(default_factory=list)
    result: TransactionSendResult | None = None
    ended: bool = field(default=False, repr=False)

    def send(self, messages: Message | Iterable[Message]) -> None:
        """Send messages when the session commits.

        Raises
        ------
        OptionError
            After the ``with`` statement, when nothing would send them.
        """
        if self.ended:
            raise OptionError(
                "transaction() has ended, so these messages were not sent: send them within the with statement, or "
                "with producer.send"
            )
        self.messages += [messages] if isinstance(messages, Message) else message_list(messages)


@contextmanager
def within(
    session: Any,
    listener: TransactionListener | None,
    send: Callable[[EnlistedSession, list[Message]], TransactionSendResult],
) -> Iterator[SessionTransaction]:
    """See :meth:`TransactionMQProducer.transaction`. ``send`` commits the session as the local transaction of the
    messages."""
    enlist = getattr(listener, "enlist", None)
    if enlist is None:
        listener_name = "no listener" if listener is None else type(listener).__name__
        raise ListenerError(
            f"transaction() needs a SqlTransactionListener, whose fence row joins the session: this producer has "
            f"{listener_name}"
        )
    enlisted: EnlistedSession = enlist(session)
    enlisted.begin()
    transaction = SessionTransaction()
    try:
        try:
            yield transaction
        finally:
            transaction.ended = True
        enlisted.flush()
        if transaction.messages:
            transaction.result = send(enlisted, transaction.messages)
        else:
            enlisted.let_commit()
            session.commit()
    except BaseException:
        with suppress(Exception):  # after a commit there is nothing to undo; the first error says more
            session.rollback()
        raise
    finally:
        enlisted.end()
