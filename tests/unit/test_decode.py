"""Bodies as columns: what becomes of those that are no JSON object of the schema, and what an error says of them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pj
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

import rmq_spark as txmq
from rmq_spark import CommitLog, HalfBatch
from rmq_spark._core.listeners.decode import BAD_COUNTED_MAX
from rmq_spark.errors import MessageError, OptionError
from tests.support.half_batches import pending, prepare
from tests.support.inside import decode_json

pytestmark = pytest.mark.log("memory", orders=1)

BODIES = [b'{"id": 1}', b'{"id": "x"}', b'{"id": 3}', b"null", b'{"id": 5', b'{"id": 6}']
GOOD = [1, None, 3, None, None, 6]


def half_batch(log: CommitLog, bodies: Sequence[bytes], per: str) -> HalfBatch:
    columns: dict[str, Any] = {"body": list(bodies)}
    if per == "key":
        columns["order"] = [f"order-{n}" for n in range(len(bodies))]
    record = prepare(log, 0, columns, per=per, key="order" if per == "key" else None)
    return log.engine.half_batch(record, log.engine.state_of(record), 1, pending(log, record))


@pytest.mark.parametrize(
    ("per", "name"),
    [
        ("batch", "transaction app:0:1, msg_id app:0:0.1"),
        ("message", "transaction app:0:1:0.1, msg_id app:0:0.1"),
        ("key", "transaction key 'order-1', msg_id app:0:0.1"),
    ],
)
def test_an_error_names_the_transaction_and_row_of_the_first_bad_body_and_how_many_there_are(
    log: CommitLog, per: str, name: str
) -> None:
    batch = half_batch(log, BODIES, per)
    with pytest.raises(MessageError) as caught:
        batch.decode("id long")
    said = str(caught.value)
    assert said.startswith(f"the body of row 1 ({name}) is not a JSON object of schema id int64: ")
    assert "Of 6 bodies 3 cannot be decoded; on_error='null'" in said
    assert " in row 0" not in said, "that would be the row of something else"


@pytest.mark.parametrize("per", ["batch", "message", "key"])
def test_with_null_the_fields_of_bad_bodies_are_null_and_the_others_are_there(log: CommitLog, per: str) -> None:
    batch = half_batch(log, BODIES, per)
    found = batch.decode("id long, name string", on_error="null")
    assert found["id"].to_pylist() == GOOD
    assert found.schema == pa.schema([("id", pa.int64()), ("name", pa.string())])
    bad = batch.messages(["msg_id"]).filter(found["id"].is_null())
    assert bad["msg_id"].to_pylist() == ["app:0:0.1", "app:0:0.3", "app:0:0.4"]


@pytest.mark.parametrize("kind", ["long", "string", "decimal(10,2)", "array<long>", "timestamp", "boolean"])
def test_bodies_that_are_all_bad_are_all_null(kind: str) -> None:
    found = decode_json(pa.chunked_array([pa.array([b"no", b"[]", b"{"])]), f"a {kind}, b {kind}", "null")
    assert found.to_pylist() == [{"a": None, "b": None}] * 3


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        ('{"total": "12"}', "double", "field 'total' is a string, and a number is expected"),
        ('{"total": {"n": 1}}', "string", "field 'total' is an object, and a string is expected"),
        ('{"total": [1]}', "boolean", "field 'total' is an array, and a boolean is expected"),
        ('{"total": true}', "decimal(10,2)", "field 'total' is a boolean, and a number or a string is expected"),
        ('{"total": ["a"]}', "array<long>", "field 'total/[]' is a string, and a number is expected"),
    ],
)
def test_an_error_says_which_field_has_another_type(body: str, kind: str, why: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode_json(pa.chunked_array([pa.array([body.encode()])]), f"total {kind}")
    assert f": {why}. Of 1 bodies 1 cannot be decoded" in str(caught.value)


def test_a_date_is_read_as_it_is_written_and_a_number_is_none() -> None:
    bodies = ['{"day": "2020-02-29"}', '{"day": "1899-12-31"}', '{"day": null}', "{}"]
    days = decode_json(pa.chunked_array([bodies]), "day date")["day"].to_pylist()
    assert days == [dt.date(2020, 2, 29), dt.date(1899, 12, 31), None, None]
    several = decode_json(pa.chunked_array([['{"days": ["2020-01-01", null]}']]), "days array<date>")
    assert several["days"].to_pylist() == [[dt.date(2020, 1, 1), None]]
    for value, why in (
        (1, "a number, and a string is expected"),
        ('"x"', "to a date, couldn't parse:x"),
        ('"2020-01-01T10:00:00"', "has a time of day"),
    ):
        with pytest.raises(MessageError, match=why):
            decode_json(pa.chunked_array([[f'{{"day": {value}}}']]), "day date")


def test_a_body_that_is_no_utf_8_is_bad() -> None:
    bodies = pa.chunked_array([pa.array([b'{"note": "a"}', b'{"note": "\xff"}', b'{"note": "\xc3\xa4"}'])])
    with pytest.raises(MessageError, match=r"body of row 1 .* it is not UTF-8: invalid start byte at byte 10"):
        decode_json(bodies, "note string")
    assert decode_json(bodies, "note string", "null")["note"].to_pylist() == ["a", None, "ä"]


def test_another_word_than_raise_or_null_is_refused(log: CommitLog) -> None:
    batch = half_batch(log, BODIES, "batch")
    with pytest.raises(OptionError, match="on_error='ignore' is not one of 'raise', 'null'"):
        batch.decode("id long", on_error="ignore")


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often JSON is read."""
    read, reads = pj.read_json, list[int]()
    monkeypatch.setattr(pj, "read_json", lambda *given, **options: (reads.append(1), read(*given, **options))[1])
    return reads


def test_good_bodies_are_never_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = pa.chunked_array([pa.array([json.dumps({"id": n, "more": [{}]}).encode() for n in range(1_000)])])
    reads = reads_of(monkeypatch)
    monkeypatch.setattr(json, "loads", lambda *_: reads.append(1))
    for on_error in ("raise", "null"):
        assert decode_json(bodies, "id long", on_error)["id"].to_pylist() == list(range(1_000))
    assert len(reads) == 2, "one a column"


def test_bad_bodies_are_counted_as_far_as_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = pa.chunked_array([pa.repeat(pa.scalar(b'{"id": "x"}'), 10 * BAD_COUNTED_MAX)])
    reads = reads_of(monkeypatch)
    with pytest.raises(MessageError, match=f"of row 0 .*{BAD_COUNTED_MAX:,} or more cannot"):
        decode_json(bodies, "id long")
    assert len(reads) < 3 * BAD_COUNTED_MAX


JSON_LIKE = st.sampled_from(
    [b'{"id": 1}', b'{"id": 2, "x": "}"}', b'{"id": null}', b"{}", b' {"id":\n7} ', b'{"id": "x"}', b'{"id": 1.5}',
     b"null", b"", b" ", b"[]", b'{"id": 1', b"}", b'{"id": 1} {"id": 2}', b'{"id": [{},', b'{"x":2}]}', b"{null}",
     b'{"id": 1},null', b'{"id": 1}]', b"\xff", b'{"id": NaN}']
)  # fmt: skip


@given(st.lists(JSON_LIKE, max_size=12), st.integers(0, 3))
@settings(deadline=None)
def test_a_body_is_decoded_as_it_would_be_alone_whatever_stands_beside_it(bodies: list[bytes], cut: int) -> None:
    def alone(body: bytes) -> int | None:
        try:
            return decode_json(pa.chunked_array([pa.array([body])]), "id long")["id"].to_pylist()[0]  # type: ignore[no-any-return]
        except MessageError:
            return -1

    each = [alone(body) for body in bodies]
    sliced = pa.array([b"no", *bodies[cut:]], pa.binary()).slice(1)
    column = pa.chunked_array([pa.array(bodies[:cut], pa.binary()), sliced])
    assert decode_json(column, "id long", "null")["id"].to_pylist() == [None if n == -1 else n for n in each]
    if -1 not in each:
        assert decode_json(column, "id long")["id"].to_pylist() == each
        return
    said = rf"of row {each.index(-1)} is not .*Of {len(each)} bodies {each.count(-1)} cannot"
    with pytest.raises(MessageError, match=said):
        decode_json(column, "id long")


def test_a_transaction_of_a_sql_listener_decodes_with_the_same_arguments(log: CommitLog, tmp_path: Path) -> None:
    """One bad body fails for its own transaction, by name, and with null each of them goes on."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    decoded: dict[str, Any] = {}

    def work(connection: sa.Connection, order: txmq.listeners.HalfTransaction) -> Any:
        found = order.decode("id long", on_error="null")["id"].to_pylist()
        try:
            assert order.decode("id long")["id"].to_pylist() == found
        except MessageError as problem:
            found = str(problem)
        decoded[str(order.transaction_key)] = found

    listener = txmq.SqlTransactionListener(engine, work, per_transaction=True)
    listener.create_fence()
    table = pa.table({"body": [b'{"id": 1}', b'{"id": 2}', b"no", b'{"id": 4}'], "order": ["a", "b", "a", "c"]})
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None) as producer:
        producer.send_messages_in_transaction(table, topic="orders", transaction_key="order")
    assert (decoded["b"], decoded["c"]) == ([2], [4])
    assert decoded["a"].startswith("the body of row 1 (transaction key 'a', msg_id ")
    assert "Of 2 bodies 1 cannot be decoded" in decoded["a"]
