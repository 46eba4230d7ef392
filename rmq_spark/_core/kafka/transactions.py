"""Kafka transactions of one ``transactional.id``: begin, send, commit; or abort with a reason."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rmq_spark._core.kafka.kafka_client import (
    POISON,
    ReportedErrors,
    ck,
    error_of,
    problem_of,
    problem_text,
    why_refused,
    with_settings,
)
from rmq_spark._core.kafka.records import Record
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark.errors import RelayError, RelayRefusedError

logger = logging.getLogger(__name__)

TRY_S = 5.0
"""Timeout in seconds of one call of Kafka's client. The call is repeated until its deadline."""
PAUSE_S = 0.02
"""Seconds between two such calls, because some errors come at once."""
DELIVER_S = 0.1
FULL_S = 0.05
SLACK_S = 30.0
"""Seconds beyond the transaction's timeout. By then the broker has ended an abandoned transaction."""


class FencedByKafkaError(Exception):
    """Kafka has fenced this producer: another one took its transactional.id, or its transaction timed out."""


class UndeliveredError(Exception):
    """Kafka did not accept every record of a transaction, so it must not commit. The argument is Kafka's error."""


FAILURES = (ck.KafkaException, SystemError, UndeliveredError)
"""The exceptions of a transaction's steps, which :meth:`Transactions.ended` handles."""


class AbortedError(Exception):
    """The transaction was aborted: none of its records will become visible.

    For refused messages, ``first`` is the index of the first one in the transaction, ``suspects`` the largest possible
    number of them, and ``code`` Kafka's error. ``suspects`` is 0 for any other reason. ``stays``: the reason lasts
    until a person acts.
    """

    def __init__(
        self, reason: str, first: int = 0, suspects: int = 0, code: int | None = None, stays: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason, self.first, self.suspects, self.code, self.stays = reason, first, suspects, code, stays


class Transactions:
    """The producer of one ``transactional.id``, which ``settings`` of Kafka's client name."""

    def __init__(self, settings: dict[str, Any], timeout_s: float, runtime: Runtime) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._runtime = runtime
        self._producer: Any = None
        self._reported = ReportedErrors()
        self._number = 0  # counts transactions
        self._sent = 0
        self._refused: dict[int, Any] = {}  # by a record's index in its transaction
        self._offsets: dict[int, int] = {}

    def open(self) -> None:
        """Fence the previous producer with this ``transactional.id``, and end its transaction."""
        self._producer = with_settings(ck.Producer, self._settings, self._reported)
        deadline = self._runtime.monotonic() + self._timeout_s + SLACK_S
        while True:
            try:
                self._producer.init_transactions(TRY_S)
                reach("relay step", step="opened")
                return
            except ck.KafkaException as problem:
                error = error_of(problem)
                if error.fatal() or not error.retriable() or self._runtime.monotonic() > deadline:
                    raise problem_of(problem, "the relay's transactions were opened", self._reported) from None
            self._runtime.sleep(PAUSE_S)

    # ------------------------------------------------------------------ one transaction
    def transact(self, *shares: Sequence[Record]) -> None:
        """Send records in one transaction and commit it. When nobody knows whether the transaction was committed, that
        is a RelayError."""
        try:
            self.begin()
            for share in shares:
                self.send(share)
            self.deliver()
            self.commit()
        except FAILURES as problem:
            raise self.ended(problem) from None

    def begin(self) -> None:
        self._number += 1
        self._sent, self._refused, self._offsets = 0, {}, {}
        self._reported.denied, self._reported.topic = None, ""
        self._producer.begin_transaction()
        reach("relay step", step="begun")

    def send(self, records: Sequence[Record]) -> None:
        """Pass records to the client, which sends them in the background. Stops after Kafka has refused one."""
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

    def _answered(self, transaction: int, place: int, error: Any, message: Any) -> None:
        if transaction != self._number:
            return  # an answer for an aborted transaction
        if error is None:
            self._offsets[place] = message.offset()
        else:
            self._refused[place] = error

    def deliver(self) -> None:
        """Wait until Kafka has accepted every record. A record that Kafka refuses or does not answer is an
        UndeliveredError."""
        deadline = self._runtime.monotonic() + self._timeout_s + SLACK_S
        while self._producer.flush(DELIVER_S) and not self._refused and self._runtime.monotonic() < deadline:
            pass
        if len(self._offsets) < self._sent:
            raise UndeliveredError(next(iter(self._refused.values()), "Kafka does not answer"))
        reach("relay step", step="delivered")

    @property
    def first_offset(self) -> int:
        return self._offsets[0]

    def commit(self) -> None:
        """Commit. A commit without an answer is repeated, which is safe. When there is still none, that is a
        RelayError."""
        deadline = self._runtime.monotonic() + self._timeout_s + SLACK_S
        while True:
            try:
                self._producer.commit_transaction(TRY_S)
                self._reported.error = None
                reach("relay step", step="committed")
                return
            except ck.KafkaException as problem:
                error = error_of(problem)
                if error.fatal() or error.txn_requires_abort():
                    raise
                if not error.retriable() or self._runtime.monotonic() > deadline:
                    raise RelayError(
                        f"nobody knows whether Kafka committed the last transaction: {problem_text(problem)}. Start "
                        "the relay again: it reads the positions, which are in that transaction"
                    ) from None
                logger.warning("a commit is tried again: %s", problem_text(problem))
            self._runtime.sleep(PAUSE_S)

    def ended(self, problem: BaseException) -> Exception:
        """End a transaction after a failed step, and return the error to raise.

        The client raises a fatal error in its next call. Within a callback that is a SystemError, which hides the
        error. Aborting the transaction raises it again.
        """
        if isinstance(problem, ck.KafkaException) and error_of(problem).fatal():
            return self._fatal(problem)
        refused = {place: error for place, error in sorted(self._refused.items()) if error.code() in POISON}
        self._producer.poll(0)  # lets the client report the reason
        if self._reported.denied is not None:
            problem = ck.KafkaException(self._reported.denied)
        reason = problem_text(problem) + why_refused(problem, self._reported)
        where = f" to topic {self._reported.topic!r}" if self._reported.topic else ""
        lasting = problem_of(problem, f"messages were handed over{where}", self._reported)
        is_lasting = not refused and isinstance(lasting, RelayRefusedError) and not self._reported.refuses
        try:
            self.abort()
        except ck.KafkaException as abort_problem:
            if error_of(abort_problem).fatal():
                fatal = self._fatal(abort_problem)
                # Kafka does not know a transaction if this user may not write to its topics.
                return lasting if is_lasting and not isinstance(fatal, FencedByKafkaError) else fatal
            return problem_of(abort_problem, "a transaction was aborted", self._reported)
        if not refused:
            return lasting if is_lasting else AbortedError(reason, stays=self._reported.refuses)
        first, error = next(iter(refused.items()))
        return AbortedError(f"{error.str()} ({error.name()})", first, len(refused), error.code())

    def _fatal(self, problem: BaseException) -> Exception:
        error = error_of(problem)
        if error.code() in (ck.KafkaError._FENCED, ck.KafkaError.PRODUCER_FENCED, ck.KafkaError.INVALID_PRODUCER_EPOCH):
            return FencedByKafkaError(problem_text(problem))
        return problem_of(problem, "messages were handed over")

    def abort(self) -> None:
        deadline = self._runtime.monotonic() + self._timeout_s + SLACK_S
        while True:
            try:
                self._producer.abort_transaction(TRY_S)
                return
            except ck.KafkaException as problem:
                error = error_of(problem)
                if error.fatal() or not error.retriable() or self._runtime.monotonic() > deadline:
                    raise
            except SystemError:  # a fatal error within a callback: the next call raises it
                if self._runtime.monotonic() > deadline:
                    raise
            self._runtime.sleep(PAUSE_S)

    def listen(self) -> None:
        """Let the client run its callbacks when nothing is sent."""
        if self._producer is not None:
            self._producer.poll(0)

    def close(self) -> None:
        """Drop unsent records. The next start ends an open transaction."""
        if self._producer is not None:
            with suppress(ck.KafkaException, SystemError):
                self._producer.purge()
                self._producer.flush(0)
            self._producer = None
