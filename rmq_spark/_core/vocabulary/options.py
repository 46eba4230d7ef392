"""Limits, durations and options: names and validates everything that a user may set."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import ParamSpec, TypeAlias, TypeVar

from rmq_spark.errors import OptionError, TxmqError

BODY_BYTES_MAX = 4 * 1024 * 1024
"""Largest body of a message (RocketMQ: ``maxMessageSize``)."""
PROPERTIES_BYTES_MAX = 32 * 1024
"""Largest sum of names and values of a message's properties, in UTF-8 bytes."""
TOPIC_CHARS_MAX = 127
"""Longest name of a topic."""
GROUP_CHARS_MAX = 255
"""Longest name of a producer or consumer group."""
APP_ID_CHARS_MAX = 127
"""Longest ``appId``, or idempotency key."""
LABEL_BYTES_MAX = 32 * 1024
"""Largest ``tags``, ``keys`` or ``sharding_key``, in UTF-8 bytes: RocketMQ keeps them among the properties."""
TRANSACTION_KEY_CHARS_MAX = 255
"""Longest value of a transaction key."""
QUEUES_MAX = 1024
"""Most queues of a topic."""
QUEUES_DEFAULT = 4
"""Queues of a topic that is created without a number, unless the log sets another one."""
ATTEMPTS_MAX = 250
"""A transaction that checks have rolled back this often is not tried again."""
CHECKS_MAX = 250
"""Largest ``transactionCheckMax``."""

TRANSACTION_TIMEOUT_S = 6.0
"""A half batch younger than this is not checked (RocketMQ: ``transactionTimeOut``)."""
Duration: TypeAlias = float | str
"""Seconds, or a text with a unit, such as ``"5m"``."""
ON_LISTENER_ERROR = ("fail", "unknown")
"""An exception of a local transaction ends the send, or counts as UNKNOWN."""
TRANSACTION_CHECK_INTERVAL_S = 60.0
"""Time between two rounds of checks (RocketMQ: ``transactionCheckInterval``, 30 s there)."""
TRANSACTION_CHECK_MAX = 15
"""After this many answers of UNKNOWN the discard policy decides (RocketMQ: ``transactionCheckMax``)."""
FILE_RESERVED_TIME_S = 72 * 3600.0
"""A half batch that stays open for longer is quarantined (RocketMQ: ``fileReservedTime``)."""
CHECK_ROUND_TIMEOUT_S = 60.0
"""Seconds after which a round of checks takes no more half batches."""
LEASE_S = 60.0
"""Seconds for which a lease keeps checkers away. A sink takes one when its local transaction has run for a third of
this (20 s), and renews it after every third."""
LEASE_S_MAX = 300.0
"""A lease that ends more seconds than this from now comes from a wrong clock."""
CLOCK_SKEW_S_MAX = 60.0
"""Seconds that a writer's clock may differ from the store's, and that a time in the log may lie in the future."""
FROM_THE_FUTURE_AGE_S = 3600.0
"""Assumed age of a half batch whose times all lie in the future, because some clock was ahead. Its real age is unknown.
At this age it is old enough to be checked and too young to be given up."""
REPLAY_CHECK_TIMEOUT_S = 60.0
"""How long a replay repeats its question to the listener while the answer is UNKNOWN."""
MAINTENANCE_INTERVAL_S = 60.0
"""Time between two rounds of upkeep."""
DRAIN_EVERY_S = 30.0
"""Seconds between two drains of committed messages. Each drain is a commit to ``messages``, whose Delta log keeps a
week of them, and more entries make each commit slower."""
JITTER = 0.25
"""Each pause is longer or shorter by up to this share, so that programs started together do not work together for
long."""
GRACE_S = 600.0
"""How long a half batch stays after its last op row, and its op rows after it has left."""
GRACE_S_MIN = 60.0
"""Shortest ``grace``."""
AUDIT_S = 7 * 24 * 3600.0
"""How long rolled-back messages stay."""
IDEMPOTENCY_S = 7 * 24 * 3600.0
"""How long the outcome of a half batch is kept after it left (Kafka: ``transactional.id.expiration.ms``)."""
FENCE_RETENTION_S_MIN = 7 * 24 * 3600.0
"""Fence rows are kept for at least this long. A local transaction that begins later does not run."""
FENCE_RETENTION_S = 14 * 24 * 3600.0
"""The check job prunes fence rows that are older."""
RETENTION_S_MIN = 3600.0
"""Messages of a topic are kept for at least this long after their commit."""
ORPHAN_AGE_S = 7 * 24 * 3600.0
"""vacuum removes staged files of this age that no commit names. prepare refuses files older than half of it."""

DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""Seconds of the delay levels 1 to 18 (RocketMQ: ``messageDelayLevel``)."""
DELIVER_DELAY_S_MAX = 3 * 24 * 3600.0
"""Longest delay of a message (RocketMQ: ``timerMaxDelaySec``)."""

TIME_MIN = datetime(1970, 1, 1, tzinfo=timezone.utc)
TIME_MAX = datetime(2261, 12, 31, 23, 59, 59, 999_999, tzinfo=timezone.utc)
"""Last time that a message, an option or a reset may name; :data:`TIME_MIN` is the first. pandas, and so Spark's
``toPandas``, counts nanoseconds in 64 bits, which end in 2262; Python's datetime ends in 9999. A message with a later
time would stop each of its consumers for ever."""
INT64_MAX = 2**63 - 1

DURATION_S_MAX = 100 * 365.25 * 86400.0
"""A century. Nobody means a longer duration."""

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")
_BYTES = re.compile(r"\s*(\d{1,19})\s*(?:([kmgt])b?|b)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, name: str = "duration") -> float:
    """Return the seconds of a duration such as ``500ms``, ``6s``, ``5m``, ``72h`` or ``7d``, or raise OptionError. A
    number alone is refused, because its unit would be a guess."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise OptionError(
            f"{_short(text)} is not a duration: write a number and a unit, such as '6s', '5m', '72h' or '7d'",
            argument=name,
        )
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > DURATION_S_MAX:
        raise OptionError(f"{str(text)[:40]!r} is longer than a century: is the unit right?", argument=name)
    return seconds


def parse_bool(text: str, name: str) -> bool:
    """Read ``true`` or ``false`` as Spark writes them, or raise OptionError for anything else."""
    value = str(text).strip().lower()
    if value not in ("true", "false"):
        raise OptionError(f"{text!r} is neither 'true' nor 'false'", argument=name)
    return value == "true"


def parse_int(text: str, name: str, minimum: int = 1) -> int:
    """Read a whole number from ``minimum`` on, or raise OptionError for anything else."""
    try:
        value = int(str(text).strip())
    except ValueError:
        raise OptionError(f"{_short(text)} is not a whole number", argument=name) from None
    if not minimum <= value <= INT64_MAX:
        raise OptionError(f"{_short(text)} is out of range: it must be at least {minimum}", argument=name)
    return value


def whole_number(value: object, name: str, minimum: int, maximum: int = INT64_MAX, of: str = "") -> int:
    """Return an argument that must be an int in this range; raise OptionError for anything else, also True and 4.0."""
    if type(value) is not int or not minimum <= value <= maximum:
        wrong = "is out of range" if type(value) is int else f"is a {type(value).__name__}"
        raise OptionError(
            f"{_short(value)} {wrong}: a whole number{of} from {minimum} to {maximum} is expected", argument=name
        )
    return value


def flag(value: object, name: str) -> bool:
    """Return an argument that must be True or False; raise OptionError for anything else: "no" would count as True."""
    if not isinstance(value, bool):
        raise OptionError(f"{_short(value)} is neither True nor False", argument=name)
    return value


def byte_count(value: object, name: str) -> int:
    """Return a number of bytes of 1 or more, or raise OptionError: from an int, or a text such as ``500m`` or ``10g``
    in Spark's units (of 1,024). A text without a unit is refused, as for durations: ``256`` may be meant as megabytes.
    """
    match = _BYTES.fullmatch(value.lower()) if isinstance(value, str) else None
    if match is not None:
        value = int(match[1]) * 1024 ** "bkmgt".index(match[2] or "b")
    elif isinstance(value, str):
        bare = value.strip().isdecimal()
        what = "has no unit" if bare else "is not a number of bytes"
        hint = (
            f"'{value.strip()[:20]}b' for bytes, or one such as '500m' or '10g'"
            if bare
            else "one such as '500m' or '10g'"
        )
        raise OptionError(f"{_short(value)} {what}: write {hint}", argument=name)
    return whole_number(value, name, 1, of=" of bytes")


def seconds(
    value: object, name: str, minimum: float = 0.0, above: bool = False, maximum: float = DURATION_S_MAX
) -> float:
    """Return a :data:`Duration` in seconds, or raise OptionError when it is out of the range. ``above`` refuses
    ``minimum`` itself."""
    if isinstance(value, str):
        value = parse_duration(value, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum or (above and value == minimum):  # type: ignore[operator]
        least = f"above {minimum:g}" if above else f"of {minimum:g} or more"
        most = "a century" if maximum == DURATION_S_MAX else f"{maximum:g}"
        remedy = f"; write {name}={_short(value)}.total_seconds()" if isinstance(value, timedelta) else ""
        raise OptionError(
            f"{_short(value)} cannot be used: seconds {least}, and of at most {most}, are expected{remedy}",
            argument=name,
        )
    return float(value)  # type: ignore[arg-type]


def require_time(value: object, name: str, error: type[TxmqError] = OptionError) -> datetime:
    """Return the time, and require that it has a time zone and lies between :data:`TIME_MIN` and :data:`TIME_MAX`."""
    if not isinstance(value, datetime):
        raise error(f"{_short(value)} is not a datetime with a time zone", argument=name)
    if value.utcoffset() is None:
        raise error(f"{name}={value} has no time zone: a datetime with a time zone is expected, or its hour is a guess")
    if not TIME_MIN <= value <= TIME_MAX:
        raise error(f"{name}={value} is {OUT_OF_TIME}")
    return value


OUT_OF_TIME = (
    f"out of range: {TIME_MIN:%Y-%m-%d} to {TIME_MAX:%Y-%m-%d} are allowed; were milliseconds or microseconds "
    "taken for seconds?"
)


def _short(value: object) -> str:
    """Return a value for an error's text, and cut it when it is long: it may have a megabyte."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}…"


PART_CHARS_MIN = 4
"""Length of the shortest part of a name that may stand for the name."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``did you mean 'topic'?`` for a name that is close to a known one, or part of it alone; else list the
    known names."""
    by_lower = {k.lower(): k for k in known}
    lower = str(name).lower()
    close = difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.6) or [
        k for k in by_lower if len(lower) >= PART_CHARS_MIN and lower in k
    ]
    if len(close) == 1:
        return f"did you mean {by_lower[close[0]]!r}?"
    return "known are " + ", ".join(sorted(by_lower.values()))


Taken = ParamSpec("Taken")
Made = TypeVar("Made")


def named(function: Callable[Taken, Made]) -> Callable[Taken, Made]:
    """Make a function refuse an unknown argument by an OptionError that names the nearest known one."""
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    what = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: Taken.args, **kwargs: Taken.kwargs) -> Made:
        for name in kwargs:
            if name not in known:
                raise OptionError(f"{what}() has no argument {name!r}: {nearest(name, known)}")
        return function(*args, **kwargs)

    return call


WORDS_OF_THE_OTHER_SIDE = {"topic": "subscribe", "topics": "subscribe", "subscribe": "topic"}
"""Options that a sink calls by one name, and a source by another."""


class Options:
    """The options of one ``format("txmq")`` call, by their documented names. Upper and lower case are the same, as for
    Spark, and ``storage.<key>`` is always known. An unknown name raises an OptionError that offers the nearest right
    one."""

    def __init__(self, given: Mapping[str, str], known: Iterable[str]) -> None:
        names = {k.lower(): k for k in known}
        self._values: dict[str, str] = {}
        self.storage_options: dict[str, str] = {}
        for key, value in given.items():
            lower = key.lower()
            if lower.startswith("storage."):
                self.storage_options[key[len("storage.") :]] = value
            elif lower in names:
                self._values[names[lower]] = value
            else:
                hint = nearest(WORDS_OF_THE_OTHER_SIDE.get(lower, key), names.values())
                raise OptionError(f"unknown option {key!r} for format('txmq'): {hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name, default)

    def require(self, name: str, why: str) -> str:
        """Return the value of an option that must be there; ``why`` ends the error's sentence."""
        return self.require_all({name: why})[0]

    def require_all(self, whys: Mapping[str, str]) -> list[str]:
        """Return the values of options that must be there. One error names all that are missing, each with its why."""
        missing = [name for name in whys if not self._values.get(name, "").strip()]
        if missing:
            raise OptionError("; ".join(f"option {name!r} is missing: {whys[name]}" for name in missing))
        return [self._values[name] for name in whys]

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        value = self._values.get(name, default).strip()
        known = {c.lower(): c for c in choices}
        if value.lower() not in known:
            raise OptionError(f"{name}={value!r} is not one of {', '.join(known.values())}")
        return known[value.lower()]

    def duration(self, name: str, default_s: float) -> float:
        value = self._values.get(name)
        return default_s if value is None else parse_duration(value, name)

    def integer(self, name: str) -> int | None:
        value = self._values.get(name)
        return None if value is None else parse_int(value, name)

    def byte_count(self, name: str) -> int | None:
        value = self._values.get(name)
        return None if value is None else byte_count(value, name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        return default if value is None else parse_bool(value, name)

    def at_most_one(self, *names: str) -> None:
        """Raise OptionError when more than one of these options is set: they contradict each other."""
        present = [n for n in names if n in self._values]
        if len(present) > 1:
            raise OptionError(f"options {' and '.join(map(repr, present))} contradict each other: set one of them")
