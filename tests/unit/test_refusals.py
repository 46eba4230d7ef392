"""Values that once came through a public door as somebody else's error, a hang or a crash: each is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from rmq_spark import UNKNOWN, CheckService, CommitLog, Message
from rmq_spark._core.log.message_columns import column_of
from rmq_spark._core.vocabulary.message import message_list
from rmq_spark.errors import (
    CorruptLogError,
    HalfBatchNotFoundError,
    ListenerError,
    MessageError,
    OffsetError,
    OptionError,
    TopicNotFoundError,
    VerdictError,
)
from rmq_spark.testing import InMemoryCommitLog
from tests.support.half_batches import commit, header_of, pending, prepare
from tests.support.inside import (
    BODY_BYTES_MAX,
    SINK_OPTIONS,
    HalfWriter,
    Options,
    SinkSettings,
    decode_json,
    from_json,
    load_listener,
    normalize_verdicts,
    parse_duration,
    require_message_types,
)
from tests.support.inside import message_table as to_table
from tests.torture.hostile.logs import edit_row


# ---------------------------------------------------------------- listeners
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1/0", "it is there, and its code raised this: mend it"),
        ("import no_such_driver", "it is there, and needs the module no_such_driver: install that"),
        (None, "put its folder on the PYTHONPATH"),
    ],
)
def test_a_module_that_fails_is_told_from_one_that_is_missing(
    code: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if code is not None:
        Path(tmp_path, "failing_listeners.py").write_text(code)
    with pytest.raises(ListenerError, match=words):
        load_listener("failing_listeners:listen")


# ---------------------------------------------------------------- messages
@pytest.mark.parametrize("given", ["hello", {"topic": "orders"}])
def test_what_is_no_list_of_messages_is_not_taken_for_one(given: Any) -> None:
    with pytest.raises(MessageError, match=rf"found {type(given).__name__}: a list of rmq_spark\.Message"):
        message_list(given)
    with pytest.raises(MessageError, match=rf"found {type(given).__name__} in the list of messages"):
        message_list([Message("orders", b"a"), given])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tags": 5}, "tags is int"),
        ({"sharding_key": b"x"}, "sharding_key is bytes"),
        ({"keys": 5}, "keys are int"),
        ({"keys": ["a", None]}, "None is among the keys"),
        ({"keys": b"ab"}, "keys are bytes"),
        ({"queue_id": "1"}, "queue_id='1'"),
        ({"queue_id": True}, "queue_id=True"),
        ({"queue_id": 2**40}, "queue_id=1099511627776"),
        ({"queue_id": -1}, "queue_id=-1"),
        ({"born_timestamp": datetime(2025, 3, 1)}, "with a time zone"),
        ({"born_timestamp": "now"}, "born_timestamp='now'"),
        ({"delay_level": 0}, "delay_level"),
        ({"deliver_at": datetime(2030, 1, 1)}, "with a time zone"),
        ({"properties": "a"}, "properties are str"),
        ({"properties": [("a", "b")]}, "properties are list"),
        ({"properties": {"a": "\ud800"}}, "cannot be written in UTF-8"),
        ({"properties": {"CHECK_IMMUNITY_TIME_IN_SECONDS": "-1"}}, "is not a number of seconds of 0 or more"),
        ({"properties": {"CHECK_IMMUNITY_TIME_IN_SECONDS": "\u0661"}}, "is not a number of seconds of 0 or more"),
        ({"body": b"x" * (BODY_BYTES_MAX + 1)}, "body has 4194305 bytes"),
        ({"body": "\ud800"}, "body .* cannot be written in UTF-8"),
        ({"tags": "\ud800"}, "tags .* cannot be written in UTF-8"),
    ],
)
def test_a_message_with_a_value_of_another_kind_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        Message(**{"topic": "orders", "body": b"x", **given})


NESTED = {
    "struct<a:int,b:string>": T.StructType([T.StructField("a", T.IntegerType()), T.StructField("b", T.StringType())]),
    "array<int>": T.ArrayType(T.IntegerType()),
    "map<string,int>": T.MapType(T.StringType(), T.IntegerType()),
    "variant": T.VariantType(),
}


def frame_schema(name: str, kind: T.DataType) -> T.StructType:
    fields = {"body": T.StructField("body", T.StringType()), name: T.StructField(name, kind)}
    return T.StructType(list(fields.values()))


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("name", ["body", "tags", "keys", "sharding_key", "order"])
def test_a_nested_column_is_told_to_become_json_and_not_to_be_cast(kind: str, name: str) -> None:
    """A cast of {"a": 1, "b": "x"} gives the text {1, x}, which nobody can take apart."""
    key = "order" if name == "order" else None
    with pytest.raises(MessageError) as caught:
        require_message_types(frame_schema(name, NESTED[kind]), "orders", key)
    said = str(caught.value)
    if (name, kind) == ("keys", "array<int>"):
        assert said.endswith("string or array<string> is expected; cast(keys as array<string>)")
    else:
        assert f"{name!r} has type {kind}: " in said
        assert f"make JSON of it with to_json({name})" in said
        assert "; cast it" not in said


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("body", T.LongType(), "cast it"),
        ("tags", T.BinaryType(), "cast it"),
        ("properties", NESTED["map<string,int>"], r"cast\(properties as map<string,string>\)"),
        ("properties", NESTED["struct<a:int,b:string>"], r"from_json\(to_json\(properties\), 'map<string,string>'\)"),
        ("properties", T.StringType(), r"from_json\(properties, 'map<string,string>'\)"),
    ],
)
def test_a_column_of_another_type_is_told_what_makes_it_right(name: str, kind: T.DataType, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        require_message_types(frame_schema(name, kind), "orders", None)


@pytest.mark.parametrize("body", [[{"a": 1}], [["x"]], pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))])
def test_a_nested_body_of_an_arrow_table_is_told_to_become_json(body: Any) -> None:
    with pytest.raises(MessageError, match=r"make JSON of each value, with json\.dumps for instance"):
        column_of(pa.table({"body": body}), "body", pa.binary())


def test_a_message_of_every_allowed_kind_is_stored_as_it_is() -> None:
    born = datetime(2025, 3, 1, tzinfo=timezone.utc)
    message = Message("orders", memoryview(b"xy"), "t", ("a", "b"), "s", {"p": ""}, 3, born)  # type: ignore[arg-type]
    (row,) = to_table([message]).to_pylist()
    expected = (b"xy", "t", "a b", "s", [("p", "")], 3, born)
    assert tuple(row[c] for c in "body tags keys sharding_key properties queue_id born_timestamp".split()) == expected


def test_braces_within_a_json_string_are_no_second_object() -> None:
    bodies = pa.chunked_array([pa.array([b' {"a": "} null"}', b'{"a": null}\n', b'{"b": {"c": [{}]}, "a": "x"}'])])
    assert decode_json(bodies, "a string")["a"].to_pylist() == ["} null", None, "x"]


def test_two_bodies_that_together_are_one_object_are_two_bad_ones() -> None:
    bodies = pa.chunked_array([pa.array([b'{"a": 1, "b": [', b'{"c": 2}]}', b'{"a": 3}'])])
    assert decode_json(bodies, "a long", "null")["a"].to_pylist() == [None, None, 3]


@pytest.mark.parametrize("kind", ["decimal(99,9)", "decimal(0,0)"])
def test_a_decimal_that_no_column_can_have_is_refused(kind: str) -> None:
    with pytest.raises(MessageError, match="cannot read the type 'decimal"):
        decode_json(pa.chunked_array([pa.array([b"{}"])]), f"a {kind}")


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("text", ["9" * 400 + "d", "36526d", "9999999h"])
def test_a_duration_beyond_a_century_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="longer than a century"):
        parse_duration(text, "transactionTimeout")
    assert parse_duration("36525d") == 100 * 365.25 * 86400


@pytest.mark.parametrize("value", [{"orders": {"0": 2**63}}, {"orders": {"0": 10**30}}, {"\ud800": {"0": 0}}])
def test_offsets_that_no_queue_can_have_are_refused(value: object) -> None:
    with pytest.raises(OffsetError, match="the checkpoint"):
        from_json(value, "the checkpoint")


# ---------------------------------------------------------------- doors of a log
TEXTS = [5, None, "\ud800", len]
IDS = ["", "\ud800", "é:0", "app:99", None]
VERDICTS = [UNKNOWN, "commit", None, 1]


@pytest.mark.parametrize(
    ("door", "values", "error", "words"),
    [
        (lambda log, v: log.create_topic("new", v), ["4", 1.5, True, 0], OptionError, "whole number of queues"),
        (lambda log, v: log.create_topic(v), TEXTS, MessageError, "topic"),
        (lambda log, v: log.read(v), TEXTS, TopicNotFoundError, "is not in the commit log"),
        (lambda log, v: log.read(v), ["%RETRY%shop", "%DLQ%shop"], TopicNotFoundError, r"txmq\.consume makes it when"),
        (lambda log, v: log.resolve("app:0", v, "reason"), VERDICTS, OptionError, "settles nothing"),
        (lambda log, v: log.engine.get(v), IDS, HalfBatchNotFoundError, "no half batch"),
        (lambda log, v: CheckService(log, {}, transaction_check_interval=v), [inf, 1e12], OptionError, "a century"),
    ],
    ids=["queues", "new topic", "topic", "own topic", "verdict", "half id", "interval"],
)
def test_a_door_of_a_log_refuses_what_it_cannot_use(
    log: CommitLog, door: Callable[[CommitLog, Any], object], values: list[Any], error: type[Exception], words: str
) -> None:
    prepare(log, 0, 1)
    for value in values:
        with pytest.raises(error, match=words):
            door(log, value)


def test_a_log_that_is_called_instead_of_opened_is_told_how_to_open_it() -> None:
    with pytest.raises(TypeError, match=r"CommitLog\.open\(path\) opens a commit log"):
        CommitLog("shop/log")  # type: ignore[arg-type]


def test_a_half_batch_has_its_own_columns_and_keys_alone(log: CommitLog) -> None:
    record = prepare(log, 0, {"body": [b"x"], "order": ["7"]}, per="key", key="order")
    (batch,) = log.half_batches(record.half_id)
    assert batch.messages(["transaction_id"])["transaction_id"].to_pylist() == ["app:0:1:7"]
    with pytest.raises(MessageError, match="no column 'boddy' in a half batch's messages: msg_id, "):
        batch.messages(["boddy"])
    with pytest.raises(VerdictError, match="'8' is not a transaction_key of half batch 'app:0'"):
        batch.verdicts(rollback=[7, 8])


NO_VERDICTS = [pa.array([[1]]), pa.array([b"\xff"]), pa.array([[("a", 1)]], pa.map_("string", "int8"))]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        *((answer, ".*strings are expected") for answer in NO_VERDICTS),
        *((answer, "") for answer in ("MAYBE", [7], pa.array(["maybe"]), 7, ["COMMIT_MESSAGE"] * 2)),
    ],
)
def test_a_wrong_answer_s_error_names_the_listener_and_the_batch(log: CommitLog, answer: object, words: str) -> None:
    record = prepare(log, 0, 1, per="message")
    batch = log.engine.half_batch(record, log.engine.state_of(record), 1, pending(log, record))
    said = f"^for half batch '{record.half_id}', the listener of '{record.header.producer_group}' returned {words}"
    with pytest.raises(VerdictError, match=said):
        normalize_verdicts(answer, batch)


@pytest.mark.parametrize("kind", [pa.map_(pa.int64(), pa.string()), pa.map_(pa.string(), pa.float64())])
def test_properties_of_other_types_are_not_turned_into_texts(kind: pa.DataType) -> None:
    table = pa.table({"body": ["x"], "properties": pa.array([[]], kind)})
    with pytest.raises(MessageError, match=r"column 'properties' has type map<"):
        HalfWriter(header_of(0), {"orders": 1}, "orders", None).normalize(table)


# ---------------------------------------------------------------- listeners
def test_the_allow_list_cannot_be_walked_around_through_a_module() -> None:
    with pytest.raises(ListenerError, match="goes through the module 'os'"):
        load_listener("tests.torture.hostile.allowed_listeners:os.abort", ["tests.torture.hostile.allowed_listeners"])


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("Make", r"allowed_listeners' has no 'Make': did you mean 'make'\?$"),
        ("NotOn", r"allowed_listeners' has no 'NotOn': did you mean 'NotOne'\?$"),
        ("shop", "has no 'shop': known are CommitOncePrepared, NotOne, annotations, broken, listener, make$"),
        ("listener.paid", r"allowed_listeners' has no 'listener\.paid'$"),
        ("broken", "allowed_listeners:broken.*RuntimeError: the bank is closed"),
    ],
)
def test_a_name_that_a_module_does_not_have_or_cannot_make_is_told(attribute: str, words: str) -> None:
    with pytest.raises(ListenerError, match=words):
        load_listener(f"tests.torture.hostile.allowed_listeners:{attribute}")


def test_a_sink_refuses_a_listener_that_has_nothing_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = "listen = rmq_spark.SqlTransactionListener('sqlite://')"
    (tmp_path / "only_checks.py").write_text(f"import rmq_spark\n{made}\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"path": "log", "producergroup": "shop", "transactionlistener": "only_checks:listen"}
    with pytest.raises(ListenerError, match=r"'only_checks:listen': .* has no work, so it answers checks"):
        SinkSettings.of(Options(given, SINK_OPTIONS)).listener()


# ---------------------------------------------------------------- op rows
def three_batches() -> InMemoryCommitLog:
    log = InMemoryCommitLog(topics={"orders": 1})
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 2))
    return log


@pytest.mark.parametrize(
    ("kind", "column", "value", "words"),
    [
        *(("mark", column, None, "table op has") for column in ("tails", "low_water", "since_version")),
        ("mark", "kind", "lease", "lost its newest mark"),
        *(("commit", column, None, "offsets that cannot be") for column in ("topic", "queue_id")),
    ],
)
def test_an_op_row_without_what_its_kind_needs_is_an_error(kind: str, column: str, value: Any, words: str) -> None:
    log = three_batches()
    if kind == "mark":
        assert log.engine.ledger.mark()
        commit(log, prepare(log, 3, 2))
    edit_row(log.engine.op_table, kind, column, value)
    with pytest.raises(CorruptLogError, match=words):
        log.another().pending()


@pytest.mark.parametrize("marked", [False, True])
def test_a_lost_placement_is_an_error_before_anything_is_placed_behind_it(marked: bool) -> None:
    log = three_batches()
    if marked:
        prepare(log, 3, 2)  # keeps what follows above the mark
        log.engine.ledger.mark()
        commit(log, prepare(log, 4, 2))
        commit(log, prepare(log, 5, 2))
    edit_row(log.engine.op_table, "commit", None, None, row=3 if marked else 1)
    with pytest.raises(CorruptLogError, match="op rows are lost or doubled"):
        log.another().pending()
