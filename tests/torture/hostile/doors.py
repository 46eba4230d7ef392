"""Public doors that take text or Python values: a case goes through one of them and is accepted, or refused in words.

Each door is a function of a random generator. It raises :class:`Violation` when the property does not hold; an error
that is not ours escapes, and the runner counts it as a violation too.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from rmq_spark import (
    CheckService,
    ConsumerGroup,
    DeadLetters,
    LocalTransactionState,
    Message,
    SqlInbox,
    SqlTransactionListener,
    TransactionalSink,
    TransactionListener,
    TransactionMQProducer,
)
from rmq_spark.errors import TxmqError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.inside import (
    APP_ID_CHARS_MAX,
    BODY_BYTES_MAX,
    GROUP_CHARS_MAX,
    PROPERTIES_BYTES_MAX,
    SINK_OPTIONS,
    SOURCE_OPTIONS,
    TOPIC_CHARS_MAX,
    CommitOncePrepared,
    JobSettings,
    Options,
    ReadOptions,
    SinkSettings,
    decode_json,
    from_json,
    load_listener,
    location,
    parse_bool,
    parse_duration,
    parse_int,
    parse_offsets,
    parse_tags,
    parse_timestamp,
    read_options,
    require_app_id,
    require_group_name,
    require_topic_name,
    to_json,
)
from tests.support.inside import message_table as to_table
from tests.torture.hostile.values import EDGES, anything, text

Door = Callable[[random.Random], bool]
"""True when the input was accepted, False when it was refused."""

T = TypeVar("T")


class Violation(AssertionError):
    """The property does not hold for an input."""


def attempt(action: Callable[[], T], *words: object) -> tuple[bool, T | None]:
    """Whether the action accepted its input, and what it made of it.

    Parameters
    ----------
    words : objects
        An error must have one of them in its message: what was found, or the name of what it was found in.
    """
    try:
        return True, action()
    except TxmqError as problem:
        message = str(problem)
        named = not words or any(str(w).lower() in message.lower() or repr(w)[:60] in message for w in words)
        if len(message) < 15 or not named:
            raise Violation(f"the error does not say what was found: {type(problem).__name__}: {message}") from problem
        return False, None


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


# ---------------------------------------------------------------- options
def _options(rng: random.Random, known: tuple[str, ...], good: Mapping[str, str]) -> dict[str, str]:
    given = dict(good)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(known) if rng.random() < 0.85 else text(rng)
        if rng.random() < 0.2:
            name = name.upper()
        given[name] = text(rng)
    if rng.random() < 0.1 and given:
        del given[rng.choice(sorted(given))]
    return given


def source_options(rng: random.Random) -> bool:
    given = _options(rng, SOURCE_OPTIONS, {"path": "/tmp/log", "subscribe": "orders"})
    streaming = rng.random() < 0.5
    ok, found = attempt(lambda: read_options(given, streaming), *given, *SOURCE_OPTIONS, "topic")
    if ok:
        assert isinstance(found, ReadOptions)
        limits = (found.offsets_per_trigger_max, found.partitions_min, found.partition_records_max)
        require(all(n is None or n >= 1 for n in limits), f"a limit under 1: {found}")
        require(bool(found.path.strip()), f"an empty path: {found}")
    return ok


def sink_options(rng: random.Random) -> bool:
    good = {"path": "/tmp/log", "producerGroup": "shop", "transactionListener": "none", "topic": "orders"}
    given = _options(rng, tuple(SINK_OPTIONS), good)
    ok, found = attempt(lambda: SinkSettings.of(Options(given, SINK_OPTIONS)), *given, *SINK_OPTIONS, "producer group")
    if ok:
        assert isinstance(found, SinkSettings)
        require(math.isfinite(found.replay_check_timeout_s), f"an endless time-out: {found}")
        require((found.transaction_per == "key") == (found.transaction_key is not None), f"contradiction: {found}")
    return ok


def durations_and_numbers(rng: random.Random) -> bool:
    given = text(rng)
    kind = rng.randrange(4)
    if kind == 0:
        ok, seconds = attempt(lambda: parse_duration(given, "transactionTimeout"), "transactionTimeout")
        require(not ok or (isinstance(seconds, float) and 0 <= seconds < math.inf), f"{given!r} became {seconds}")
    elif kind == 1:
        ok, number = attempt(lambda: parse_int(given, "minPartitions"), "minPartitions")
        require(not ok or (isinstance(number, int) and number >= 1), f"{given!r} became {number}")
    elif kind == 2:
        ok, _ = attempt(lambda: parse_bool(given, "ordered"), "ordered")
    else:
        ok, when = attempt(lambda: parse_timestamp(given, "startingTimestamp"), "startingTimestamp")
        require(not ok or (isinstance(when, datetime) and when.tzinfo is not None), f"{given!r} became {when}")
    return ok


def names(rng: random.Random) -> bool:
    given = anything(rng) if rng.random() < 0.3 else text(rng)
    check, chars_max, what = rng.choice(
        (
            (require_topic_name, TOPIC_CHARS_MAX, "topic"),
            (require_group_name, GROUP_CHARS_MAX, "group"),
            (require_app_id, APP_ID_CHARS_MAX, "appId"),
        )
    )
    ok, found = attempt(lambda: check(given), what)
    allowed = set("%|_-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
    require(not ok or (found == given and 0 < len(given) <= chars_max and set(given) <= allowed), f"accepted {given!r}")
    return ok


def tag_selectors(rng: random.Random) -> bool:
    given = rng.choice((" || ", "||", "|", " | ")).join(text(rng)[:12] for _ in range(rng.randint(1, 3)))
    ok, tags = attempt(lambda: parse_tags(given), "tags")
    if ok and tags is not None:
        require("" not in tags and "*" not in tags and all(t == t.strip() for t in tags), f"{given!r} became {tags}")
        require(
            [t.strip() for t in given.split("||") if t.strip()] == list(tags) or len(set(tags)) == len(tags), "lost"
        )
    return ok


# ---------------------------------------------------------------- offsets
def _json_text(rng: random.Random) -> str:
    def value(depth: int) -> Any:
        kind = rng.random()
        if depth < 2 and kind < 0.75:
            keys = ("orders", "points", "0", "1", "00", "-1", "\ud800", "²", text(rng)[:20])
            return {rng.choice(keys): value(depth + 1) for _ in range(rng.randint(0, 3))}
        if kind < 0.95:
            return rng.choice((0, 1, 5, -1, -2, -3, 2**63, 10**30, 1.0, True, None, "0", math.nan))
        return [value(depth + 1)]

    made = json.dumps(value(0))
    if rng.random() < 0.2 and made:
        at = rng.randrange(len(made))
        made = made[:at] + rng.choice(("", "x", "}", "{", "\x00", '"')) + made[at + 1 :]
    return made if rng.random() < 0.9 else text(rng)


def offsets(rng: random.Random) -> bool:
    given = _json_text(rng)
    if rng.random() < 0.5:
        ok, found = attempt(
            lambda: parse_offsets(given, "startingOffsets", ("earliest", "latest"), (-1, -2)), "startingOffsets"
        )
        if ok and isinstance(found, dict):
            require(from_json(to_json(found), "x", (-2, -1)) == found, f"{given!r} does not survive JSON")
        return ok
    try:
        value = json.loads(given)
    except ValueError:
        value = given
    ok, positions = attempt(lambda: from_json(value, "the checkpoint"), "the checkpoint")
    if ok:
        assert positions is not None
        require(all(offset >= 0 for offset in positions.values()), f"{given!r} became {positions}")
        require(from_json(to_json(positions), "x") == positions, f"{given!r} does not survive JSON")
    return ok


# ---------------------------------------------------------------- messages
def _properties(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.2:
        return anything(rng)
    if kind < 0.4:
        size = rng.choice((PROPERTIES_BYTES_MAX, PROPERTIES_BYTES_MAX + 1, PROPERTIES_BYTES_MAX - 1)) - 1
        return {"p": "x" * size}
    name = rng.choice(("a", "KEYS", "__RMQ.x", "CHECK_IMMUNITY_TIME_IN_SECONDS", text(rng)))
    return {name: rng.choice((text(rng), "5", None, 7))}


def messages(rng: random.Random) -> bool:
    """One message, from Python values of any kind; what is accepted can be stored, and is stored as it is."""
    body: Any = anything(rng) if rng.random() < 0.4 else text(rng)
    if rng.random() < 0.002:
        body = b"x" * (BODY_BYTES_MAX + rng.choice((-1, 0, 1)))
    given: dict[str, Any] = {"topic": "orders", "body": body}
    for name in ("topic", "tags", "keys", "sharding_key", "queue_id", "born_timestamp"):
        if rng.random() < 0.25:
            given[name] = anything(rng) if rng.random() < 0.6 else text(rng)
    if rng.random() < 0.3:
        given["properties"] = _properties(rng)
    ok, message = attempt(lambda: Message(**given), "body", "propert", "topic", *given)
    if not ok:
        return False
    assert message is not None
    (row,) = to_table([message]).to_pylist()
    stored = body.encode() if isinstance(body, str) else bytes(body)
    require(row["body"] == stored, f"body {body!r} became {row['body']!r}")
    for name in ("topic", "tags", "sharding_key", "queue_id"):
        require(row[name] == given.get(name), f"{name}={given.get(name)!r} became {row[name]!r}")
    require(dict(row["properties"] or ()) == dict(given.get("properties") or {}), "properties changed")
    return True


def json_bodies(rng: random.Random) -> bool:
    """A listener's ``batch.decode``."""
    bodies = pa.array([text(rng).encode("utf-8", "ignore") for _ in range(rng.randint(0, 3))], pa.binary())
    if rng.random() < 0.5:
        bodies = pa.array(
            [json.dumps({"a": rng.choice((1, "x", None, 1.5, [1]))}).encode() for _ in range(3)], pa.binary()
        )
    types = ("long", "string", "double", "array<string>", "decimal(10,2)", "decimal(99,9)", "date", "map<a,b>", "")
    schema = f"a {rng.choice(types)}" if rng.random() < 0.8 else text(rng)
    on_error = rng.choice(("raise", "null", "null", text(rng)))
    ok, table = attempt(lambda: decode_json(pa.chunked_array([bodies]), schema, on_error))
    require(not ok or (table is not None and table.num_rows == len(bodies)), f"{bodies} as {schema!r}: {table}")
    return ok


# ---------------------------------------------------------------- listeners and configuration
FORBIDDEN = "tests.torture.hostile.forbidden_module"
ALLOWED = "tests.torture.hostile.allowed_listeners"


def _listener_path(rng: random.Random) -> str:
    modules = (
        FORBIDDEN,
        ALLOWED,
        f"{ALLOWED}x",
        f"{ALLOWED}.x",
        "tests.torture",
        "os",
        "antigravity",
        "",
        "..",
        "a b",
        text(rng),
    )
    attributes = (
        "listener",
        "make",
        "broken",
        "NotOne",
        "os.system",
        "sys.exit",
        "__class__",
        "__dict__",
        "x",
        "",
        "a.b",
        text(rng),
    )
    path = f"{rng.choice(modules)}{rng.choice((':', ':', ':', '', '::', '.'))}{rng.choice(attributes)}"
    return path if rng.random() < 0.9 else text(rng)


def listener_paths(rng: random.Random) -> bool:
    given = _listener_path(rng)
    ok, found = attempt(lambda: load_listener(given, [ALLOWED]), "listener")
    _nothing_foreign_loaded(given)
    require(not ok or (isinstance(found, TransactionListener) and given.startswith(f"{ALLOWED}:")), f"loaded {given!r}")
    return ok


def _nothing_foreign_loaded(given: object) -> None:
    for name in (FORBIDDEN, "antigravity"):
        if name in sys.modules:
            del sys.modules[name]
            raise Violation(f"{name} was imported because of {given!r}")


_GOOD_TOML = f"""
path = "/tmp/log"
listener_modules = ["{ALLOWED}"]
[listeners]
"order-service" = "{ALLOWED}:listener"
[check]
transactionTimeout = "6s"
transactionCheckMax = 15
discardPolicy = "quarantine"
[storage]
AWS_REGION = "eu"
"""


def _toml_value(rng: random.Random) -> str:
    odd = ("true", "1", "-1", "1.5", "inf", "nan", "[]", "{}", "1979-05-27", '["a"]', "{a = 1}", "9" * 30)
    return rng.choice(odd) if rng.random() < 0.5 else json.dumps(text(rng).encode("utf-8", "ignore").decode())


def configuration_files(rng: random.Random) -> bool:
    lines = _GOOD_TOML.strip().splitlines()
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(lines))
        name, _, _ = lines[at].partition(" = ")
        kind = rng.random()
        if kind < 0.5 and " = " in lines[at]:
            lines[at] = f"{name} = {_toml_value(rng)}"
        elif kind < 0.7:
            lines.insert(at, f"{rng.choice(('pth', 'path', 'listener', 'x'))} = {_toml_value(rng)}")
        elif kind < 0.8:
            lines[at] = f"[{rng.choice(('check', 'chekc', 'listeners', '[x]', ''))}]"
        elif kind < 0.9:
            lines[at] = text(rng)
        else:
            del lines[at]
        if not lines:
            lines = ["path = 1"]
    content = "\n".join(lines).encode("utf-8", "surrogatepass" if rng.random() < 0.1 else "ignore")
    file = _config_folder() / "txmq.toml"
    file.write_bytes(content)

    def load() -> JobSettings:
        settings = JobSettings.load(file)
        settings.load_listeners()
        settings.load_policy()
        return settings

    ok, settings = attempt(load)
    _nothing_foreign_loaded(content)
    if ok:
        assert settings is not None
        check = settings.check
        seconds = (
            check.transaction_timeout,
            check.transaction_check_interval,
            check.file_reserved_time,
            check.round_timeout,
        )
        require(all(math.isfinite(s) and s >= 0 for s in seconds), f"odd times: {seconds}")
    return ok


_FOLDERS: list[Any] = []


def _config_folder() -> Path:
    if not _FOLDERS:
        _FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(_FOLDERS[0].name)


_LOG = InMemoryCommitLog(topics={"orders": 2})


def check_settings(rng: random.Random) -> bool:
    """Arguments of the check service."""
    names_of = (
        "transaction_timeout", "transaction_check_interval", "transaction_check_max", "file_reserved_time",
        "round_timeout", "discard_policy",
    )  # fmt: skip
    given = {rng.choice(names_of): anything(rng)}
    listeners: Any = {"shop": CommitOncePrepared()}
    if rng.random() < 0.2:
        listeners = {text(rng): rng.choice((CommitOncePrepared(), CommitOncePrepared, None, object()))}
    words = (*given, "discard", "group", "listener", "CommitOncePrepared")
    ok, service = attempt(lambda: CheckService(_LOG, listeners, **given), *words)
    if ok:
        assert service is not None
        rules = service._checker.rules
        require(rules.transaction_timeout >= 0 and 1 <= rules.transaction_check_max <= 250, f"accepted {given}")
    return ok


def log_arguments(rng: random.Random) -> bool:
    """Arguments of the commit log's own methods."""
    log = _LOG
    calls: tuple[Callable[[], Any], ...] = (
        lambda: log.create_topic(_name(rng), rng.choice((None, 0, 1, 1024, 1025, -1, 1.5, "4", True))),
        lambda: log.read(_name(rng), limit=rng.choice((None, 0, -1, 5, "5", 1.5))),
        lambda: log.read("orders", start={anything(rng, 2): anything(rng, 2)}),
        lambda: log.read("orders", columns=[text(rng)]),
        lambda: log.resolve(text(rng), rng.choice(list(LocalTransactionState)), text(rng)),
        lambda: log.resolve(text(rng), text(rng), "reason"),  # type: ignore[arg-type]
        lambda: log.resume(text(rng)),
        lambda: log.vacuum(text(rng)),
        lambda: log.engine.get(text(rng)),
        lambda: log.engine.require_topic(text(rng)),
    )
    ok, _ = attempt(rng.choice(calls))
    return ok


def edges_of_arguments(rng: random.Random) -> bool:
    """Every argument that has a range: a value at its edges is taken, or refused in words."""
    v = rng.choice(EDGES) if rng.random() < 0.9 else anything(rng)
    log = InMemoryCommitLog(topics={"orders": 2})
    log.engine.create_own_topic("%DLQ%group")
    seconds = rng.choice(("transaction_timeout", "check_interval", "on_listener_error"))
    group, letters = ConsumerGroup(log, "group"), DeadLetters(log, "group")
    sql = SqlTransactionListener("sqlite://", print)

    def send(**more: Any) -> Any:
        given = {"messages": [Message("orders", b"")], **more}
        with TransactionMQProducer(log, "shop", CommitOncePrepared(), check_interval=None) as producer:
            return producer.send_messages_in_transaction(given.pop("messages"), **given)

    def sink(**more: Any) -> Any:
        return TransactionalSink(log, listener=None, **{"producer_group": "shop", **more})

    calls: tuple[Callable[[], Any], ...] = (
        lambda: TransactionMQProducer(log, "shop", CommitOncePrepared(), **{seconds: v}),
        lambda: TransactionMQProducer(log, v, CommitOncePrepared()),
        lambda: send(messages=v),
        lambda: send(topic=v),
        lambda: send(transaction_key=v),
        lambda: send(transaction_per=v),
        lambda: send(idempotency_key=v),
        lambda: sink(**{rng.choice(("topic", "transaction_key", "transaction_per", "app_id", "producer_group")): v}),
        lambda: sink(**{rng.choice(("replay_check_timeout", "on_listener_error")): v}),
        lambda: SqlTransactionListener("sqlite://", print, **{rng.choice(("rollback_after", "lock_timeout")): v}),
        lambda: SqlTransactionListener("sqlite://", print, fence_table=v),
        lambda: SqlInbox("sqlite://", rng.choice(("group", v)), print, table=v),
        lambda: sql.prune(v) if rng.random() < 0.5 and not isinstance(v, (int, float)) else sql.__repr__(),
        lambda: log.read("orders", limit=v),
        lambda: log.read("orders", start={0: v}),
        lambda: log.read("orders", columns=rng.choice((v, [v]))),
        lambda: log.read("orders", **{rng.choice(("tags", "selector")): v}),
        lambda: log.read(v),
        lambda: log.create_topic("new", v),
        lambda: log.create_topic(v),
        lambda: log.vacuum(v),
        lambda: log.engine.get(v),
        lambda: log.resume(v),
        lambda: log.resolve(v, LocalTransactionState.COMMIT_MESSAGE, "reason"),
        lambda: log.resolve("x:0", v, "reason"),
        lambda: log.resolve("x:0", LocalTransactionState.COMMIT_MESSAGE, v),
        lambda: group.reset(v, ["orders"]),
        lambda: group.reset("latest", rng.choice((v, [v]))),
        lambda: group.clone(v),
        lambda: letters.list(v),
        lambda: letters.resend([v]),
        lambda: location(v),
        lambda: Message("orders", b"", **{rng.choice(("born_timestamp", "deliver_at", "queue_id", "delay_level")): v}),
    )
    ok, _ = attempt(rng.choice(calls))
    log.pending().to_pylist()
    return ok


def _name(rng: random.Random) -> Any:
    return anything(rng, 2) if rng.random() < 0.2 else text(rng)


DOORS: Mapping[str, tuple[Door, int]] = {
    "source options": (source_options, 90),
    "sink options": (sink_options, 90),
    "durations and numbers": (durations_and_numbers, 60),
    "names": (names, 45),
    "tag selectors": (tag_selectors, 30),
    "offsets": (offsets, 90),
    "messages": (messages, 120),
    "JSON bodies": (json_bodies, 30),
    "listener paths": (listener_paths, 45),
    "configuration files": (configuration_files, 45),
    "check settings": (check_settings, 30),
    "log arguments": (log_arguments, 30),
    "edges of arguments": (edges_of_arguments, 60),
}
"""By name: the door, and how often it is taken."""
