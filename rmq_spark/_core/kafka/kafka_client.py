"""Kafka's client: its import, its errors, and its log."""

from __future__ import annotations

import importlib
import logging
import math
import re
import time
from collections.abc import Callable
from typing import Any

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import OptionError, RelayError, RelayRefusedError

try:
    ck: Any = importlib.import_module("confluent_kafka")
    admin: Any = importlib.import_module("confluent_kafka.admin")
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "confluent_kafka":
        raise
    raise OptionError("a relay to Kafka needs confluent-kafka: install rmq_spark with its extra kafka") from None

CLIENT_LOG = logging.getLogger("rmq_spark.kafka.librdkafka")
"""The log of Kafka's client."""

LOGGED_AGAIN_S = 30.0
"""Seconds until an equal line of the client's log is shown again."""
LINES_MAX = 1_000
"""The most lines that are remembered for this."""

POISON = frozenset({ck.KafkaError.MSG_SIZE_TOO_LARGE, ck.KafkaError.INVALID_TIMESTAMP, ck.KafkaError.INVALID_RECORD})
"""Errors that a broker will report again for the same message."""

_OPERATOR_ERRORS = frozenset(
    {
        ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
        ck.KafkaError.SASL_AUTHENTICATION_FAILED,
        ck.KafkaError.UNSUPPORTED_SASL_MECHANISM,
        ck.KafkaError.INVALID_TRANSACTION_TIMEOUT,
        ck.KafkaError.TOPIC_EXCEPTION,
        ck.KafkaError.POLICY_VIOLATION,
    }
)
"""Lasting errors that no message caused: a person must change something."""
_RIGHTS = {
    ck.KafkaError.TOPIC_AUTHORIZATION_FAILED: (
        "Write and Describe on each topic, Read too on the positions topic, and Create on topics that it is to create"
    ),
    ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Write and Describe on the ids that begin with txmq.",
}
"""The rights in Kafka that the relay's user needs."""

_UNREACHED = frozenset(
    {ck.KafkaError._TRANSPORT, ck.KafkaError._ALL_BROKERS_DOWN, ck.KafkaError._RESOLVE, ck.KafkaError._TIMED_OUT}
)
_NO_RIGHT = re.compile(r'partition "([^"]+)" .*Topic authorization failed')
"""Matches the client's log line about a topic to which a transaction may not write."""
_ERROR_NAME = re.compile(r"\((\w+)\)$")
"""Matches the error name in the client's log line about a failed transaction."""
_NO_ANSWER = _UNREACHED | {ck.KafkaError._MSG_TIMED_OUT}
_NO_BROKER = (
    ". No broker answered: do the bootstrap servers run, and does this machine reach them (host, port, firewall)? "
    "Brokers with TLS or a login need settings such as security.protocol"
)


class ReportedErrors:
    """Errors that Kafka's client reports outside its calls. The calls themselves fail without the cause.

    ``error`` is a failed login or certificate, where the call reports that no broker answers. ``denied`` is a right
    that a transaction lacks, for ``topic``, where the delivery reports that the records were purged.
    """

    def __init__(self) -> None:
        self.error: Any = None
        self.denied: Any = None
        self.topic = ""
        self._logged_s: dict[str, float] = {}

    def __call__(self, error: Any) -> None:
        """Record an error (the client's ``error_cb``)."""
        if error.code() in (ck.KafkaError._AUTHENTICATION, ck.KafkaError._SSL):
            self.error = error

    def log(self, level: int, form: str, facility: str, *texts: str) -> None:
        """Record a line of the client's log (its ``logger``), and pass it on.

        While a broker is away, the same line comes twenty times a second.
        """
        line, now_s = re.sub(r"\d+ms", "", f"{facility} {texts[-1]}"), time.monotonic()
        if now_s - self._logged_s.get(line, -math.inf) > LOGGED_AGAIN_S:
            if len(self._logged_s) >= LINES_MAX:
                self._logged_s.clear()
            self._logged_s[line] = now_s
            CLIENT_LOG.log(level, form, facility, *texts)
        if facility == "ADDPARTS" and (match := _NO_RIGHT.search(texts[-1])):
            self.topic = match[1]
        elif facility == "TXNERR" and (match := _ERROR_NAME.search(texts[-1])):
            code = getattr(ck.KafkaError, match[1], None)
            self.denied = ck.KafkaError(code) if code in _OPERATOR_ERRORS else None

    @property
    def refuses(self) -> bool:
        """Return True when the error lasts until a person acts."""
        if self.error is None:
            return False
        return self.error.code() == ck.KafkaError._AUTHENTICATION or "verify" in self.error.str()


def error_of(problem: BaseException) -> Any:
    return problem.args[0] if problem.args else None


def problem_of(problem: BaseException, doing: str, reported: ReportedErrors | None = None) -> RelayError:
    error = error_of(problem)
    code = error.code() if isinstance(error, ck.KafkaError) else None
    why = "" if reported is None else why_refused(problem, reported)
    if why:
        kind = RelayRefusedError if reported is not None and reported.refuses else RelayError
    else:
        kind = RelayRefusedError if code in _OPERATOR_ERRORS else RelayError
        why = _NO_BROKER if code in _UNREACHED else ""
        why += f". The relay's user needs {_RIGHTS[code]} (docs/kafka.md)" if code in _RIGHTS else ""
    return kind(f"Kafka failed while {doing}: {problem_text(problem)}{why}")


def why_refused(problem: BaseException, reported: ReportedErrors) -> str:
    """Return the reported reason why no broker answers; empty for any other failure."""
    error = error_of(problem)
    if reported.error is None or not isinstance(error, ck.KafkaError) or error.code() not in _NO_ANSWER:
        return ""
    return f". A broker refuses the connection: {_error_text(reported.error)}"


def problem_text(problem: BaseException) -> str:
    """Return the message of Kafka's client, with the error's name."""
    error = error_of(problem)
    return _error_text(error) if isinstance(error, ck.KafkaError) else redacted(problem)


def _error_text(error: Any) -> str:
    return f"{redacted(error.str())} ({error.name()})"


def with_settings(kind: Callable[..., Any], settings: dict[str, Any], reported: ReportedErrors) -> Any:
    """Make a client with settings, some of them the user's: one that it does not know, or a value that it refuses, is
    an OptionError. The client reports failed logins to ``reported``."""
    try:
        return kind({"error_cb": reported, **settings}, logger=reported)
    except (ck.KafkaException, ValueError, TypeError) as problem:
        raise OptionError(f"Kafka's client refuses its settings: {problem_text(problem)}") from None
