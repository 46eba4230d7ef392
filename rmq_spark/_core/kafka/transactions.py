"""Kafka transactions of one ``transactional.id``: begin, send, commit; or abort and say why."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rmq_spark._core.kafka.client import POISON, Heard, ck, error_of, problem_of, said, why_no_answer, with_settings
from rmq_spark._core.kafka.records import Record
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.machine import Machine
from rmq_spark.errors import RelayError, RelayRefusedError

logger = logging.getLogger(__name__)

TRY_S = 5.0
"""A call of Kafka's client comes back after so long, and is repeated until its own time is over."""
PAUSE_S = 0.02
"""Between two such calls: some errors come at once."""
DELIVER_S = 0.1
FULL_S = 0.05
SLACK_S = 30.0
"""Beyond the transaction's timeout: then the broker has ended a transaction that nobody else will."""


class FencedByKafkaError(Exception):
    """Kafka takes nothing more of this producer: another one has its transactional.id, or its transaction timed out."""


class UndeliveredError(Exception):
    """Kafka has not taken every record of a transaction, so it must not be committed. The argument is Kafka's error."""


FAILURES = (ck.KafkaException, SystemError, UndeliveredError)
"""What the steps of a transaction raise, and :meth:`Transactions.ended` takes."""


class AbortedError(Exception):
    """The transaction was aborted: nothing of it will ever be seen.

    Attributes
    ----------
    first, suspects : int
        When Kafka refused messages: the place of the first of those among all that were sent, and how many they may be.
        ``suspects`` is 0 when something else was the reason.
    code : int or None
        Kafka's error, for messages that were refused.
    reason : str
    stays : bool
        Whether the reason stays until a person changes it.
    """

    def __init__(
        self, reason: str, first: int = 0, suspects: int = 0, code: int | None = None, stays: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason, self.first, self.suspects, self.code, self.stays = reason, first, suspects, code, stays


class Transactions:
    """The producer of one ``transactional.id``.

    Parameters
    ----------
    settings : dict
        Of Kafka's client, with a ``transactional.id``.
    timeout_s : float
        The transaction's timeout.
    """

    def __init__(self, settings: dict[str, Any], timeout_s: float, machine: Machine) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._machine = machine
        self._producer: Any = None
        self._heard = Heard()
        self._number = 0  # of the transaction
        self._sent = 0
        self._refused: dict[int, Any] = {}  # by the place of a record among those of its transaction
        self._offsets: dict[int, int] = {}

    def open(self) -> None:
        """Fence whoever had this ``transactional.id`` before, and end that producer's transaction.

        Raises
        ------
        OptionError, RelayError, RelayRefusedError
        """
        self._producer = with_settings(ck.Producer, self._settings, self._heard)
        end = self._machine.monotonic() + self._timeout_s + SLACK_S
        while True:
            try:
                self._producer.init_transactions(TRY_S)
                reach("relay step", step="opened")
                return
            except ck.KafkaException as problem:
                error = error_of(problem)
                if error.fatal() or not error.retriable() or self._machine.monotonic() > end:
                    raise problem_of(problem, "the relay's transactions were opened", self._heard) from None
            self._machine.sleep(PAUSE_S)

    # ------------------------------------------------------------------ one transaction
    def transact(self, *parts: Sequence[Record]) -> None:
        """Send records in one transaction and commit it.

        Raises
        ------
        AbortedError
            When it was aborted.
        FencedByKafkaError
        RelayError
            When it is not known whether it was committed.
        """
        try:
            self.begin()
            for part in parts:
                self.send(part)
            self.deliver()
            self.commit()
        except FAILURES as problem:
            raise self.ended(problem) from None

    def begin(self) -> None:
        self._number += 1
        self._sent, self._refused, self._offsets = 0, {}, {}
        self._heard.denied, self._heard.topic = None, ""
        self._producer.begin_transaction()
        reach("relay step", step="begun")

    def send(self, records: Sequence[Record]) -> None:
        """Hand records to the client, which sends them in the background. It stops early once Kafka has refused one."""
        producer, answered = self._producer, self._answered
        for record in records:
            if self._refused:
                return
            place = self._sent
            self._sent += 1
            while True:
                try:
                    producer.produce(
                        record.topic,
                        record.value,
                        record.key,
                        record.partition,
                        on_delivery=functools.partial(answered, self._number, place),
                        timestamp=0 if record.timestamp_ms is None else max(1, record.timestamp_ms),  # 0 means now
                        headers=list(record.headers),
                    )
                    break
                except BufferError:
                    producer.poll(FULL_S)
                except ck.KafkaException as problem:
                    self._refused.setdefault(place, error_of(problem))
                    raise
            producer.poll(0)
        reach("relay step", step="sent")

    def _answered(self, number: int, place: int, error: Any, message: Any) -> None:
        if number != self._number:
            return  # of a transaction that was aborted
        if error is None:
            self._offsets[place] = message.offset()
        else:
            self._refused[place] = error

    def deliver(self) -> None:
        """Wait until Kafka has taken each record.

        Raises
        ------
        UndeliveredError
            When it refuses one, or does not answer.
        """
        end = self._machine.monotonic() + self._timeout_s + SLACK_S
        while self._producer.flush(DELIVER_S) and not self._refused and self._machine.monotonic() < end:
            pass
        if len(self._offsets) < self._sent:
            raise UndeliveredError(next(iter(self._refused.values()), "Kafka does not answer"))
        reach("relay step", step="delivered")

    def offset_of(self, place: int) -> int:
        """At which offset of its partition a delivered record stands."""
        return self._offsets[place]

    def commit(self) -> None:
        """Commit. A commit that Kafka does not answer is repeated: it is the same one.

        Raises
        ------
        RelayError
            When it is not known whether it was committed.
        """
        end = self._machine.monotonic() + self._timeout_s + SLACK_S
        while True:
            try:
                self._producer.commit_transaction(TRY_S)
                self._heard.error = None
                reach("relay step", step="committed")
                return
            except ck.KafkaException as problem:
                error = error_of(problem)
                if error.fatal() or error.txn_requires_abort():
                    raise
                if not error.retriable() or self._machine.monotonic() > end:
                    raise RelayError(
                        f"nobody knows whether Kafka committed the last transaction: {said(problem)}. Start the relay "
                        "again: it reads the positions, which are in that transaction"
                    ) from None
                logger.warning("a commit is tried again: %s", said(problem))
            self._machine.sleep(PAUSE_S)

    def ended(self, problem: BaseException) -> Exception:
        """End a transaction of which a step failed, and return what that means.

        The client raises a fatal error in whatever it is asked next. In the midst of a callback that is a SystemError,
        which does not say which error it was. It is raised again when the transaction is to be aborted.
        """
        if isinstance(problem, ck.KafkaException) and error_of(problem).fatal():
            return self._fatal(problem)
        refused = {place: e for place, e in sorted(self._refused.items()) if e.code() in POISON}
        self._producer.poll(0)  # then the client says why
        if self._heard.denied is not None:
            problem = ck.KafkaException(self._heard.denied)
        reason = said(problem) + why_no_answer(problem, self._heard)
        where = f" to topic {self._heard.topic!r}" if self._heard.topic else ""
        meant = problem_of(problem, f"messages were handed over{where}", self._heard)
        is_meant = not refused and isinstance(meant, RelayRefusedError) and not self._heard.refuses
        try:
            self.abort()
        except ck.KafkaException as worse:
            if error_of(worse).fatal():
                ended = self._fatal(worse)
                # Kafka knows nothing of a transaction in whose topics this user may not write.
                return meant if is_meant and not isinstance(ended, FencedByKafkaError) else ended
            return problem_of(worse, "a transaction was aborted", self._heard)
        if not refused:
            return meant if is_meant else AbortedError(reason, stays=self._heard.refuses)
        first, e = next(iter(refused.items()))
        return AbortedError(f"{e.str()} ({e.name()})", first, len(refused), e.code())

    def _fatal(self, problem: BaseException) -> Exception:
        error = error_of(problem)
        if error.code() in (ck.KafkaError._FENCED, ck.KafkaError.PRODUCER_FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH):
            return FencedByKafkaError(said(problem))
        return problem_of(problem, "messages were handed over")

    def abort(self) -> None:
        """Abort the transaction."""
        end = self._machine.monotonic() + self._timeout_s + SLACK_S
        while True:
            try:
                self._producer.abort_transaction(TRY_S)
                return
            except ck.KafkaException as problem:
                error = error_of(problem)
                if error.fatal() or not error.retriable() or self._machine.monotonic() > end:
                    raise
            except SystemError:  # a fatal error in the midst of a callback: the next call raises it
                if self._machine.monotonic() > end:
                    raise
            self._machine.sleep(PAUSE_S)

    def listen(self) -> None:
        """Let the client say what it has to say, when nothing is sent."""
        if self._producer is not None:
            self._producer.poll(0)

    def close(self) -> None:
        """Forget what was not sent. A transaction that is open is left to the next start."""
        if self._producer is not None:
            with suppress(ck.KafkaException, SystemError):
                self._producer.purge()
                self._producer.flush(0)
            self._producer = None
