"""Kafka's client: whether it is there, what its errors mean, and its own log."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from rmq_spark.errors import OptionError, RelayError, RelayRefusedError
from rmq_spark.redaction import redacted

try:
    ck: Any = importlib.import_module("confluent_kafka")
    admin: Any = importlib.import_module("confluent_kafka.admin")
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "confluent_kafka":
        raise
    raise OptionError("a relay to Kafka needs confluent-kafka: install rmq_spark with its extra kafka") from None

__all__ = ["CLIENT_LOG", "POISON", "admin", "ck", "error_of", "problem_of", "with_settings"]

CLIENT_LOG = logging.getLogger("rmq_spark.relay.librdkafka")
"""What Kafka's client has to say; at level INFO by default, where a broker that is away is a line each second."""

POISON = frozenset({ck.KafkaError.MSG_SIZE_TOO_LARGE, ck.KafkaError.INVALID_TIMESTAMP, ck.KafkaError.INVALID_RECORD})
"""Answers of a broker that it will give again to the same message."""

_FOR_A_PERSON = frozenset(
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
"""Answers that do not change by themselves, and that no message caused."""

_UNREACHED = frozenset(
    {ck.KafkaError._TRANSPORT, ck.KafkaError._ALL_BROKERS_DOWN, ck.KafkaError._RESOLVE, ck.KafkaError._TIMED_OUT}
)
_NO_BROKER = (
    ". No broker answered: does bootstrap_servers name brokers that run, and that this machine reaches (host, port, "
    "firewall)? One with TLS or a login needs kafka={'security.protocol': …} and so on"
)


def error_of(problem: BaseException) -> Any:
    """The KafkaError in an exception of Kafka's client."""
    return problem.args[0] if problem.args else None


def problem_of(problem: BaseException, doing: str) -> RelayError:
    """Return the error of this package for one of Kafka's client."""
    error = error_of(problem)
    code = error.code() if isinstance(error, ck.KafkaError) else None
    kind = RelayRefusedError if code in _FOR_A_PERSON else RelayError
    return kind(f"Kafka failed while {doing}: {said(problem)}{_NO_BROKER if code in _UNREACHED else ''}")


def said(problem: BaseException) -> str:
    """What Kafka's client says, with the name of its error."""
    error = error_of(problem)
    if not isinstance(error, ck.KafkaError):
        return redacted(problem)
    return f"{redacted(error.str())} ({error.name()})"


def with_settings(kind: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """Make a client with settings, some of which a user gave.

    Raises
    ------
    OptionError
        When the client does not know a setting, or cannot use its value.
    """
    try:
        return kind(settings, logger=CLIENT_LOG)
    except (ck.KafkaException, ValueError, TypeError) as problem:
        raise OptionError(f"Kafka's client refuses its settings: {said(problem)}") from None
