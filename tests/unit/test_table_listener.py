"""TableListener on a real database: SQLite here.

Tests that have a ``url`` run once more on PostgreSQL and MariaDB, in ``tests/process/test_table_listener.py``.
"""

from __future__ import annotations

import datetime as dt
import json
import pickle
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rmq_spark as txmq
from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, TableListener
from rmq_spark._core.listeners.json_fields import convert, fields_of
from rmq_spark.errors import ListenerError, MessageError, OptionError
from tests.support.fences import fence_rows, half_batch, run
from tests.support.inside import SINK_OPTIONS, Options, SinkSettings

ORDERS = (
    "CREATE TABLE orders (order_id BIGINT PRIMARY KEY, total DECIMAL(10, 2) NOT NULL, "
    "status VARCHAR(20) DEFAULT 'new', note VARCHAR(200), CHECK (total >= 0))"
)


def made(url: sa.URL, statement: str = ORDERS) -> sa.URL:
    """A database with a fence, and with the empty table ``orders``."""
    run(url, statement)
    txmq.create_fence(url)
    return url


@pytest.fixture
def file(tmp_path: Path) -> sa.URL:
    """A database in SQLite with nothing in it. What asks for it runs on no other."""
    return sa.make_url(f"sqlite:///{tmp_path / 'shop.db'}")


@pytest.fixture
def url(tmp_path: Path) -> sa.URL:
    return made(sa.make_url(f"sqlite:///{tmp_path / 'orders.db'}"))


def rows_in(url: sa.URL, statement: str) -> list[tuple[Any, ...]]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(sa.text(statement))]
    engine.dispose()
    return rows


def stored(url: sa.URL, columns: str = "order_id, total, status, note") -> list[tuple[Any, ...]]:
    rows = rows_in(url, f"SELECT {columns} FROM orders ORDER BY 1")
    return [tuple(float(v) if isinstance(v, Decimal) else v for v in row) for row in rows]


sends = iter(range(1_000_000))


def send(
    listener: TableListener, bodies: Sequence[dict[str, Any] | str | bytes], per: str = "key", **given: Any
) -> list[Any]:
    """Run the local transaction of a half batch, and return why each transaction was rolled back; None: committed."""
    keys = given.get("keys") or [str(n) for n in range(len(bodies))]
    texts = [json.dumps(body) if isinstance(body, dict) else body for body in bodies]
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    half_id = f"app-{next(sends)}"
    batch = half_batch(listener.store_id, keys, bodies=encoded, per=per, half_id=half_id)
    said = listener.execute_local_transaction(batch)
    assert isinstance(said, txmq.listeners.VerdictArray)
    found = said.each(batch.transactions.num_rows)
    # A check finds in the fence what the local transaction said.
    again = listener.check_local_transaction(half_batch(listener.store_id, keys, per=per, half_id=half_id))
    assert [v.state for v in again.each(len(found))] == [v.state for v in found]  # type: ignore[union-attr]
    assert all((v.state is COMMIT_MESSAGE) == (v.reason is None) for v in found)
    assert {v.state for v in found} <= {COMMIT_MESSAGE, ROLLBACK_MESSAGE}
    if per != "key":
        return [v.reason for v in found]
    by_key = dict(zip(batch.transactions["transaction_key"].to_pylist(), found, strict=True))
    return [by_key[key].reason for key in dict.fromkeys(keys)]


def order(order_id: Any, total: Any = 1.5, **others: Any) -> dict[str, Any]:
    return {"order_id": order_id, "total": total, **others}


# ---------------------------------------------------------------- columns
@pytest.mark.parametrize("per", ["batch", "key", "message"])
def test_a_row_for_each_message_with_the_table_s_columns_and_defaults(url: sa.URL, per: str) -> None:
    bodies = [order(2, note="ä", unknown=[1]), order(1, 7, status=None), order(3, status="paid", note=None)]
    assert not any(send(TableListener(url, "orders"), bodies, per))
    assert stored(url) == [(1, 7.0, "new", None), (2, 1.5, "new", "ä"), (3, 1.5, "paid", None)]


@pytest.mark.parametrize(
    "columns",
    [
        "order_id, total, status",
        ["order_id", "total", "status"],
        "order_id long, total double, status string",
        pa.schema([("order_id", pa.int32()), ("total", pa.decimal128(10, 3)), ("status", pa.string())]),
    ],
)
def test_named_columns_are_written_in_each_row(url: sa.URL, columns: Any) -> None:
    send(TableListener(url, "orders", columns=columns), [order(1, note="left out"), order(2, status="paid")])
    assert stored(url) == [(1, 1.5, None, None), (2, 1.5, "paid", None)]


def test_values_arrive_as_they_are(url: sa.URL) -> None:
    run(
        url,
        "DROP TABLE orders",
        "CREATE TABLE orders (id INTEGER, exact DECIMAL(10, 2), x DOUBLE PRECISION, small SMALLINT, yes BOOLEAN, "
        "day DATE, at TIMESTAMP NULL, words TEXT)",
    )
    given = {"id": -5, "exact": 12.34, "x": 0.1, "small": 7, "yes": True, "day": "2026-02-28", "words": "a'b\\\n😀"}
    assert not any(send(TableListener(url, "orders"), [{**given, "at": "2026-11-27T12:30:15.5+01:00"}, {"id": 1}]))
    table = sa.Table("orders", sa.MetaData(), autoload_with=(engine := sa.create_engine(url)))
    with engine.connect() as connection:
        row, empty = connection.execute(sa.select(table).order_by(table.c.id)).all()
    at = dt.datetime(2026, 11, 27, 11, 30, 15, 500_000)
    wanted = (-5, Decimal("12.34"), 0.1, 7, True, dt.date(2026, 2, 28), at, "a'b\\\n😀")
    if url.get_backend_name() == "mariadb":  # its TIMESTAMP has no fractions unless it says so
        wanted = (*wanted[:6], at.replace(microsecond=0), wanted[7])
    assert (*row[:2], float(row[2]), *row[3:]) == wanted
    assert tuple(empty) == (1, *[None] * 7)


# ---------------------------------------------------------------- keys that are there
def test_a_key_that_is_there_fails_the_half_batch_or_rolls_back_its_transaction(url: sa.URL) -> None:
    send(TableListener(url, "orders"), [order(2)])
    said = r"row 1 \(transaction key '1', msg_id app-\d+:0\.1\).*this order_id is there"
    with pytest.raises(MessageError, match=said):
        send(TableListener(url, "orders"), [order(1), order(2), order(3)])
    assert stored(url, "order_id") == [(2,)]
    each = TableListener(url, "orders", on_bad_row="rollback")
    assert send(each, [order(1), order(2, 9), order(3)]) == [None, "a row with this order_id is there already", None]
    assert stored(url, "order_id, total") == [(1, 1.5), (2, 1.5), (3, 1.5)]


def test_the_first_of_two_transactions_with_one_key_is_inserted(url: sa.URL) -> None:
    bodies = [order(n) for n in (1, 2, 2, 3, 1, 4)]
    said = send(TableListener(url, "orders", on_bad_row="rollback"), bodies)
    assert [reason is None for reason in said] == [True, True, False, True, False, True]
    assert re.search(r"(?i)unique|duplicate", said[2])
    assert stored(url, "order_id") == [(1,), (2,), (3,), (4,)]


def test_a_transaction_with_one_bad_row_leaves_none_in_the_table(url: sa.URL) -> None:
    send(TableListener(url, "orders"), [order(5)])
    bodies = [order(1), order(2, None), order(3), order(4), order(5), order(6), order(7, -1), order(8), order(2)]
    said = send(TableListener(url, "orders", on_bad_row="rollback"), bodies, keys=list("aabbccddb"))
    assert [reason is None for reason in said] == [False, True, False, False]  # a null; fits; a key; a constraint
    assert stored(url, "order_id") == [(2,), (3,), (4,), (5,)]


@pytest.mark.parametrize("key", [None, "order_id"])
def test_ignored_rows_are_left_out_and_their_transactions_commit(url: sa.URL, key: str | None) -> None:
    listener = TableListener(url, "orders", key=key, on_conflict="ignore")
    assert send(listener, [order(1), order(2), order(1, 8)]) == [None] * 3
    assert send(listener, [order(2, 9), order(3)]) == [None] * 2
    assert stored(url, "order_id, total") == [(1, 1.5), (2, 1.5), (3, 1.5)]


def test_an_update_writes_the_last_row_of_each_key(url: sa.URL) -> None:
    listener = TableListener(url, "orders", columns="order_id, total, note", key="order_id", on_conflict="update")
    assert send(listener, [order(1, note="a"), order(2, 2), order(1, 3)]) == [None] * 3
    assert stored(url) == [(1, 3.0, "new", None), (2, 2.0, "new", None)]
    run(url, "UPDATE orders SET status = 'paid'")
    send(listener, [order(2, 5, note="x"), order(3, 6), order(2, 7, note="y")])
    assert stored(url) == [(1, 3.0, "paid", None), (2, 7.0, "paid", "y"), (3, 6.0, "new", None)]


@pytest.mark.parametrize("at_once", [True, False])
def test_an_update_of_all_columns_keeps_what_is_not_given_however_batches_are_cut(url: sa.URL, at_once: bool) -> None:
    listener = TableListener(url, "orders", key=["order_id"], on_conflict="update")
    send(listener, [order(2, 2, status="paid", note="there")])
    bodies = [order(1, 1, note="a"), order(2, 3), order(1, 4, status="sent"), order(2, 5, note="n"), order(1, 6)]
    for some in [bodies] if at_once else [[body] for body in bodies]:
        send(listener, some)
    assert stored(url) == [(1, 6.0, "sent", "a"), (2, 5.0, "paid", "n")]


@pytest.mark.parametrize("on_conflict", ["error", "ignore", "update"])
def test_a_row_that_needs_an_earlier_one_is_inserted_after_it(url: sa.URL, on_conflict: str) -> None:
    """Rows that take other defaults go by other statements."""
    run(
        url,
        "CREATE TABLE places (id INTEGER PRIMARY KEY, parent INTEGER, status VARCHAR(9) DEFAULT 'new', "
        "FOREIGN KEY (parent) REFERENCES places (id))",
    )
    listener = TableListener(url, "places", key="id", on_conflict=on_conflict, on_bad_row="rollback")
    bodies = [{"id": 1}, {"id": 2, "parent": 1, "status": "x"}, {"id": 3, "parent": 2}]
    assert send(listener, bodies) == [None, None, None]
    assert rows_in(url, "SELECT id, parent, status FROM places ORDER BY id") == [
        (1, None, "new"),
        (2, 1, "x"),
        (3, 2, "new"),
    ]


def test_keys_that_only_letters_and_signs_tell_apart_stay_apart(url: sa.URL) -> None:
    run(url, "CREATE TABLE order_lines (id VARCHAR(20) PRIMARY KEY, v INTEGER, status VARCHAR(9) DEFAULT 'new')")
    listener = TableListener(url, "order_lines", key="id", on_conflict="update")
    bodies = [{"id": f"{n}-{m}", "v": n, **({"status": "x"} if m % 2 else {})} for n in range(60) for m in range(60)]
    assert send(listener, bodies) == [None] * 3600
    assert rows_in(url, "SELECT count(*), count(DISTINCT status) FROM order_lines") == [(3600, 2)]


def test_an_update_of_a_key_of_two_columns(url: sa.URL) -> None:
    run(url, "DROP TABLE orders", "CREATE TABLE orders (a VARCHAR(9), b INTEGER, n INTEGER, PRIMARY KEY (a, b))")
    listener = TableListener(url, "orders", key="b, a", on_conflict="update")
    send(listener, [{"a": "x", "b": 1, "n": 1}, {"a": "x", "b": 2, "n": 2}, {"a": "x", "b": 1, "n": 3}])
    assert stored(url, "a, b, n") == [("x", 1, 3), ("x", 2, 2)]
    each = TableListener(url, "orders", on_bad_row="rollback")
    said = send(each, [{"a": "x", "b": 3, "n": 1}, {"a": "x", "b": 2, "n": 9}, {"a": "y", "b": 2, "n": 4}])
    assert said == [None, "a row with this a, b is there already", None]
    only = TableListener(url, "orders", columns="a, b", key="a, b", on_conflict="update")
    send(only, [{"a": "x", "b": 1}, {"a": "z", "b": 1}])
    assert stored(url, "a, b, n") == [("x", 1, 3), ("x", 2, 2), ("x", 3, 1), ("y", 2, 4), ("z", 1, None)]


# ---------------------------------------------------------------- rows that do not fit
BAD = [
    ("no JSON", r"Invalid value|not a JSON|Expecting value"),
    ("[1]", "it is list"),
    ("null", "it is null"),
    ('{"order_id": 1, "total": 2} {"order_id": 3, "total": 2}', "Extra data"),
    ("{}", "none of the fields order_id, total, status, note"),
    ('{"other": 1}', "none of the fields"),
    (order("1"), "field 'order_id' is a string, and a number is expected"),
    (order(1.5), "couldn't parse:1.5"),
    (order(2**63), "couldn't parse:9223372036854775808"),
    (order(1, "much"), "total"),
    (order(1, None), "column 'total' cannot be null, and the field is null or missing"),
    ({"order_id": 1}, "column 'total' cannot be null"),
    (order(1, -1), r"(?i)check|constraint"),
    (order(1, note=5), "note"),
    ('{"order_id": 1, "total": NaN}', "column 'total' is a double, and the field is none"),
    ('{"order_id": 1, "total": Infinity}', "column 'total' is a double, and the field is none"),
    (b'{"order_id": 1, "total": 1, "note": "\xff"}', "it is not UTF-8: invalid start byte at byte 37"),
]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("body", "why"), BAD)
def test_a_row_that_does_not_fit_is_rolled_back_or_fails_the_batch(url: sa.URL, body: Any, why: str) -> None:
    bodies = [order(7), body, order(8)]
    with pytest.raises(MessageError, match=r"the message of row 1 \(transaction key '1'.*table 'orders': ") as failed:
        send(TableListener(url, "orders"), bodies)
    assert re.search(why, str(failed.value))
    assert stored(url) == []
    each = TableListener(url, "orders", on_bad_row="rollback")
    assert all(send(each, [body, body])), "all rows may be refused"
    assert stored(url) == []
    before, said, after = send(each, bodies)
    assert (before, after) == (None, None)
    assert re.search(why, said)
    assert stored(url, "order_id") == [(7,), (8,)]


def test_a_null_in_a_key_does_not_fit_though_the_database_would_number_it(url: sa.URL) -> None:
    listener = TableListener(url, "orders", key="order_id", on_conflict="ignore", on_bad_row="rollback")
    said = send(listener, [{"total": 1}, order(2)])
    assert said == ["column 'order_id' cannot be null, and the field is null or missing", None]


@pytest.mark.parametrize("per", ["key", "message"])
def test_a_half_batch_whose_rows_are_all_there_already_is_logged(
    url: sa.URL, per: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = TableListener(url, "orders", on_bad_row="rollback")
    send(listener, [order(1), order(2)], per)
    send(listener, [order(1), order(2), order(3)], per)
    send(listener, [order(1), order(4, -1)], per)
    send(listener, [order(1)], per)  # a service may send an order twice
    assert not caplog.records
    assert all(send(listener, [order(2), order(1)], per))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "all 2 transactions of half batch app-" in record.message
    assert "a row with this order_id is there already. Does a query read its input again, under a new" in record.message


def test_many_refused_rows_are_found_among_many(url: sa.URL) -> None:
    wrong = set(range(0, 500, 61))
    bodies = [order(n, -1 if n in wrong else 1) for n in range(500)]
    said = send(TableListener(url, "orders", on_bad_row="rollback"), bodies, "message")
    assert {n for n, reason in enumerate(said) if reason} == wrong
    assert {row[0] for row in stored(url)} == set(range(500)) - wrong


@pytest.mark.turns(3)
@pytest.mark.parametrize("on_conflict", ["error", "ignore", "update"])
def test_what_is_stored_is_what_a_simple_model_stores(url: sa.URL, on_conflict: str) -> None:
    """Transactions of several rows, of which some do not fit and some have a key that is there."""
    listener = TableListener(
        url, "orders", columns="order_id, total", key="order_id", on_conflict=on_conflict, on_bad_row="rollback"
    )
    # A message: its transaction, its key, and its total, which the database refuses below 0 and the listener for null.
    message = st.tuples(st.integers(0, 5), st.integers(0, 12), st.sampled_from([*range(1, 9), -1, None]))

    @settings(max_examples=settings.default.max_examples // 2, deadline=None)
    @given(st.lists(message, min_size=1, max_size=12), st.sets(st.integers(0, 12), max_size=4))
    def compare(sent: list[tuple[int, int, int | None]], there: set[int]) -> None:
        run(url, "DELETE FROM orders", *(f"INSERT INTO orders (order_id, total) VALUES ({key}, 100)" for key in there))
        of: dict[int, list[tuple[int, int | None]]] = {}
        for transaction, key, total in sent:
            of.setdefault(transaction, []).append((key, total))
        model: dict[int, int | None] = dict.fromkeys(there, 100)
        good = {t for t, rows in of.items() if all(total is not None and total >= 0 for _, total in rows)}
        if on_conflict == "error":
            for transaction in [t for t in of if t in good]:
                keys = [key for key, _ in of[transaction]]
                if len(set(keys)) < len(keys) or model.keys() & set(keys):
                    good.remove(transaction)
                else:
                    model.update(of[transaction])
        said = send(listener, [order(key, total) for _, key, total in sent], keys=[str(t) for t, *_ in sent])
        committed = {t for t, reason in zip(of, said, strict=True) if reason is None}
        for transaction, key, total in sent:
            if transaction in committed and (on_conflict == "update" or key not in model):
                model[key] = total
        assert dict(stored(url, "order_id, total")) == model
        if on_conflict == "update":  # the database need not see a row below 0 that another one overwrites
            good |= {t for t in committed if all(total is not None for _, total in of[t])}
            assert -1 not in model.values()
        assert committed == good

    compare()


def test_a_database_that_is_full_has_no_bad_rows(file: sa.URL) -> None:
    url = made(file)
    engine = sa.create_engine(url)
    sa.event.listen(engine, "connect", lambda driver, _: driver.execute("PRAGMA max_page_count = 1"))  # as it is now
    with pytest.raises(sa.exc.OperationalError, match="disk is full"):
        send(TableListener(engine, "orders", on_bad_row="rollback"), [order(n) for n in range(2_000)])
    engine.dispose()
    assert (stored(url), fence_rows(url)) == ([], {})


def test_a_half_batch_that_is_one_transaction_is_not_rolled_back_for_one_row(url: sa.URL) -> None:
    listener = TableListener(url, "orders", on_bad_row="rollback")
    with pytest.raises(ListenerError, match="is one transaction of 2 messages, and on_bad_row='rollback'"):
        send(listener, [order(1), "no"], "batch")
    assert send(listener, [order(1)], "batch") == [None]
    assert re.search("it is list", send(listener, ["[]"], "batch")[0])
    with pytest.raises(ListenerError, match="a whole micro-batch is one transaction: set transactionKey"):
        txmq.TransactionalSink(txmq.testing.InMemoryCommitLog(), producer_group="g", listener=listener)


# ---------------------------------------------------------------- fields that the table has no column for
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (order(1, statsu="paid"), "the table has no column 'statsu' (did you mean 'status'?)"),
        (order(1, statsu=None), "the table has no column 'statsu' (did you mean 'status'?)"),
        (order(1, NOTE="x", more={"note": 1}), "the table has no column 'NOTE' (did you mean 'note'?)"),
        (order(1, customer=5), "the table has no column 'customer' (known are note, order_id, status, total)"),
        ({"order_id": 1, "totl": 2}, "the table has no column 'totl' (did you mean 'total'?)"),
        (order(1, **{"n" * 300: 1}), f"the table has no column '{'n' * 60}…' (known are note, "),
        (order(1, token="x"), "the table has no column 'token' (known are note, "),
        (order("1", statsu="paid"), "field 'order_id' is a string, and a number is expected"),
        (f'{{"order_id": 1, "total": 2, "deep": {"[" * 100_000}{"]" * 100_000}}}', "it is not JSON: "),
    ],
)
def test_an_unknown_field_is_left_out_or_its_row_does_not_fit(url: sa.URL, body: Any, why: str) -> None:
    bodies = [order(7, note="x"), body, order(8)]
    each = TableListener(url, "orders", on_unknown_field="error", on_bad_row="rollback")
    before, said, after = send(each, bodies)
    assert (before, after) == (None, None)
    assert said.startswith(why)
    assert stored(url) == [(7, 1.5, "new", "x"), (8, 1.5, "new", None)]
    with pytest.raises(MessageError, match=r"the message of row 0 .* table 'orders': " + re.escape(why)):
        send(TableListener(url, "orders", on_unknown_field="error"), [body])


def test_a_column_that_is_not_among_columns_is_no_unknown_field(url: sa.URL) -> None:
    each = {"on_unknown_field": "error", "on_bad_row": "rollback"}
    listener = TableListener(url, "orders", columns="order_id long, total double", **each)
    said = send(listener, [order(1, note="left out"), order(2, notes="?")])
    assert said == [None, "the table has no column 'notes' (did you mean 'note'?)"]
    assert stored(url) == [(1, 1.5, "new", None)]


def test_an_unknown_field_rolls_back_all_of_its_transaction(url: sa.URL) -> None:
    listener = TableListener(url, "orders", on_unknown_field="error", on_bad_row="rollback")
    said = send(listener, [order(1), order(2, notes=""), order(3), order(4)], keys=list("aaba"))
    assert [reason is None for reason in said] == [False, True]
    assert stored(url, "order_id") == [(3,)]


@pytest.mark.parametrize("on_bad_row", ["fail", "rollback"])
def test_a_column_that_is_added_meanwhile_is_known(url: sa.URL, on_bad_row: str) -> None:
    listener = TableListener(url, "orders", on_unknown_field="error", on_bad_row=on_bad_row)
    send(listener, [order(1)])
    run(url, "ALTER TABLE orders ADD COLUMN customer INTEGER")
    assert send(listener, [order(2), order(3, customer=5)]) == [None, None]
    assert stored(url, "order_id, customer") == [(1, None), (2, None), (3, 5)]


# ---------------------------------------------------------------- what is missing
def test_a_table_that_was_mended_after_a_failure_is_inspected_again(url: sa.URL) -> None:
    listener = TableListener(url, "orders")
    with pytest.raises(MessageError, match="total"):
        send(listener, [order(1, None)])
    run(url, "DROP TABLE orders")
    run(url, ORDERS.replace("total DECIMAL(10, 2) NOT NULL", "total DECIMAL(10, 2)"))
    assert send(listener, [order(1, None)]) == [None]
    assert stored(url) == [(1, None, "new", None)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topic": "orders"}, r"'path' is missing: .*; .*'producerGroup' .*; .*'transactionListener' "),
        ({"path": "log", "producerGroup": "shop"}, r"missing: 'txmq\.table' .*'module:attribute' .*, or 'none' "),
    ],
    ids=["all at once", "the one without code first, and none last"],
)
def test_what_a_sink_lacks_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        SinkSettings.of(Options(given, SINK_OPTIONS))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"table": "order"}, r"no table 'order': it has orders, txmq_fence"),
        ({"schema": None, "columns": "order_id, totl"}, "no column 'totl': it has order_id, total, status, note"),
        ({"columns": "order_id long, totl double"}, "no column 'totl'"),
        ({"key": "id", "on_conflict": "update"}, "no column 'id'"),
        ({"key": "status", "on_conflict": "update"}, "no unique key of the columns status: .* are order_id"),
        ({"key": "order_id,status", "on_conflict": "ignore"}, "no unique key of the columns order_id, status"),
    ],
)
def test_what_is_missing_is_found_before_the_first_batch(url: sa.URL, given: dict[str, Any], why: str) -> None:
    listener = TableListener(url, **{"table": "orders", **given})
    for _ in range(2):  # it does not pass for known when it is asked again
        with pytest.raises(ListenerError, match=why):
            listener.require_ready()


def test_a_check_needs_no_table(url: sa.URL) -> None:
    send(TableListener(url, "orders"), [order(1)], keys=["a"])
    last = f"app-{next(sends) - 1}"
    run(url, "DROP TABLE orders")
    checker = TableListener(url, "orders")
    said = checker.check_local_transaction(half_batch(checker.store_id, ["a"], per="key", half_id=last))
    assert isinstance(said, txmq.listeners.VerdictArray)
    assert said.each(1)[0].state is COMMIT_MESSAGE


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"on_conflict": "upsert"}, "on_conflict='upsert' is not one of error, ignore, update"),
        ({"on_bad_row": "skip"}, "on_bad_row='skip' is not one of fail, rollback"),
        ({"on_unknown_field": "bad"}, "on_unknown_field='bad' is not one of ignore, error"),
        ({"on_conflict": "update"}, "needs key"),
        ({"on_conflict": "update", "key": "id", "columns": "a, b"}, "key='id' is not among columns"),
        ({"columns": "a, b, a"}, "columns names 'a' twice"),
        ({"columns": []}, "names of columns are expected"),
        ({"columns": "a,,b"}, "names of columns are expected"),
        ({"key": ""}, "names of columns are expected"),
        ({"table": ""}, "is not the name of a table"),
        ({"colums": "a"}, "has no argument 'colums': did you mean 'columns'"),
    ],
)
def test_arguments_that_cannot_be_used(given: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        TableListener("sqlite://", **{"table": "orders", **given})


# ---------------------------------------------------------------- SQLite alone
def test_messages_and_rows_agree_after_a_send(file: sa.URL) -> None:
    url = made(file)
    log = txmq.testing.InMemoryCommitLog(topics={"orders": 1})
    listener = txmq.TableListener(url, "orders", on_bad_row="rollback")
    rows = pa.table({"body": [json.dumps(order(n, n - 1)) for n in range(5)]})
    with txmq.TransactionMQProducer(log, "shop", listener, check_interval=None, on_listener_error="fail") as producer:
        sent = producer.send_messages_in_transaction(rows, topic="orders", transaction_per="message")
    assert [json.loads(body)["order_id"] for body in log.read("orders")["body"].to_pylist()] == [1, 2, 3, 4]
    assert stored(url, "order_id") == [(1,), (2,), (3,), (4,)]
    missing = TableListener(url, "order")
    with (
        txmq.TransactionMQProducer(log, "shop", missing, check_interval=None) as producer,
        pytest.raises(ListenerError, match="no table 'order': it has orders"),
    ):
        producer.send_messages_in_transaction(rows, topic="orders")
    assert log.pending().num_rows == 0
    assert "CHECK constraint failed" in str(log.trace(f"{sent.half_id}:1:0.0"))


@pytest.mark.parametrize("looked", [False, True])
def test_a_listener_goes_to_another_process(url: sa.URL, looked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_DB", url.render_as_string(hide_password=False))
    listener = TableListener("env:ORDERS_DB", "orders", key="order_id", on_conflict="update", on_bad_row="rollback")
    if looked:
        listener.require_ready()
    arrived = pickle.loads(pickle.dumps(listener))
    assert [reason is None for reason in send(arrived, [order(1), order(1, 2), "no"])] == [True, True, False]
    assert stored(url, "order_id, total") == [(1, 2.0)]


def test_a_json_column_takes_any_value(file: sa.URL) -> None:
    url = made(file, "CREATE TABLE orders (id INTEGER, note JSON)")
    values = [{"a": [1, None]}, "text", 5, True, None, "ü"]
    send(TableListener(url, "orders"), [{"id": n, "note": value} for n, value in enumerate(values)])
    assert [None if text is None else json.loads(str(text)) for _, text in stored(url, "id, note")] == values
    run(url, "DROP TABLE orders", "CREATE TABLE orders (note JSON)")
    bodies = [{"note": [1]}, "no", {"other": 1}, '{"note": [NaN]}']
    said = send(TableListener(url, "orders", on_bad_row="rollback"), bodies)
    assert [reason is None for reason in said] == [True, False, False, False]
    assert said[3] == "it is not JSON: JSON has no NaN"
    assert stored(url, "note") == [("[1]",)]


@given(st.decimals(min_value=-(10**30), max_value=10**30, places=38, allow_nan=False))
@settings(max_examples=50)
@example(Decimal("1E-10"))
@example(Decimal("-1.50E-20"))
@example(Decimal("100"))
def test_a_decimal_keeps_its_value_as_text(value: Decimal) -> None:
    texts, _ = convert(pa.chunked_array([pa.array([value], pa.decimal256(76, 38))]), pa.decimal256(76, 38))
    assert [Decimal(text) for text in texts.to_pylist()] == [value]


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ("{}", {}),
        (' {"a" : 1.10 , "b":{"c": "}"} }\n', {"a": "1.10", "b": '{"c": "}"}'}),
        ('{"\\u0061": null, "b": 12345678901234567890.5}', {"a": None, "b": "12345678901234567890.5"}),
        ('{"a": "x\\"y", "a": [1, 2]}', {"a": "[1, 2]"}),
    ],
)
def test_fields_of_an_object_are_found_as_they_are_written(body: str, fields: dict[str, str | None]) -> None:
    assert dict(fields_of(body)) == fields


def test_binary_columns_need_a_schema_of_their_own(file: sa.URL) -> None:
    url = made(file, "CREATE TABLE orders (id INTEGER, picture BLOB)")
    for columns in (None, "id, picture"):
        said = "column 'picture' of table 'orders' is BLOB, which has no form in JSON"
        with pytest.raises(ListenerError, match=said):
            TableListener(url, "orders", columns=columns).require_ready()
    send(TableListener(url, "orders", columns="id"), [{"id": 1, "picture": "abc"}])
    fields = pa.schema([("id", pa.int64()), ("picture", pa.binary())])
    send(TableListener(url, "orders", columns=fields), [{"id": 2, "picture": "abc"}])
    assert stored(url, "id, picture") == [(1, None), (2, b"abc")]


@pytest.mark.parametrize(
    ("value", "fits"),
    [("2026-02-28", True), ("2026-02-28T00:00:00Z", True), ("2026-02-30", False), ("2026-02-28 10:00:00", False),
     ("0000-01-01", False), (5, False), ("28.2.2026", False)],
)  # fmt: skip
def test_what_is_a_date(file: sa.URL, value: Any, fits: bool) -> None:
    url = made(file, "CREATE TABLE orders (id INTEGER, day DATE)")
    (said,) = send(TableListener(url, "orders", on_bad_row="rollback"), [{"id": 1, "day": value}])
    assert stored(url, "day") == ([("2026-02-28",)] if fits else [])
    assert (said is None) == fits


@pytest.mark.parametrize("on_conflict", ["error", "ignore"])
def test_a_value_that_the_column_s_type_does_not_take_does_not_fit(file: sa.URL, on_conflict: str) -> None:
    url = made(file, "CREATE TABLE orders (day DATE PRIMARY KEY, id INTEGER)")
    fields = pa.schema([("day", pa.string()), ("id", pa.int64())])
    each = TableListener(url, "orders", columns=fields, key="day", on_conflict=on_conflict, on_bad_row="rollback")
    (said,) = send(each, [{"id": 1, "day": "2026-02-28"}])
    assert "SQLite Date type only accepts Python date objects as input" in said
    assert stored(url, "day") == []


# ---------------------------------------------------------------- options
SECRET = "hunter2-secret"


def sink_settings(**table: str) -> SinkSettings:
    given = {"path": "log", "producerGroup": "shop", "transactionListener": "txmq.table", "transactionKey": "k"}
    return SinkSettings.of(Options({**given, **{f"table.{k}": v for k, v in table.items()}}, SINK_OPTIONS))


@pytest.mark.parametrize("where", ["text", "env", "file"])
def test_options_make_a_table_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    made(sa.make_url(url))
    monkeypatch.setenv("ORDERS_DB", url)
    (tmp_path / "secret").write_text(f"{url}\n")
    named = {"text": url, "env": "env:ORDERS_DB", "file": f"file:{tmp_path}/secret"}[where]
    found = sink_settings(
        url=named, name="orders", key="order_id", onConflict="update", onBadRow="rollback", onUnknownField="error"
    )
    listener = pickle.loads(pickle.dumps(found)).listener()
    assert isinstance(listener, TableListener)
    assert listener is found.listener()  # with its connections
    send(listener, [order(1), order(1, 2), "no", order(3, notes="")])
    assert stored(sa.make_url(url), "order_id, total") == [(1, 2.0)]


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://shop:{SECRET}@db/shop",
        f"postgresql+psycopg://db/shop?user=shop&password={SECRET}",
        f"mariadb+pymysql://db/shop?ssl_key_passwd={SECRET}",
        f"postgresql+psycopg://shop:{SECRET}@x@db/shop",
    ],
)
def test_a_password_in_the_options_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises((OptionError, ListenerError), match=r"password in it|@ in its password") as refused:
        sink_settings(url=url, name="orders")
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(refused.value.__cause__)


def test_a_password_in_the_environment_is_in_no_text_and_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_DB", f"postgresql+psycopg://shop:{SECRET}@localhost:1/shop")
    found = sink_settings(url="env:ORDERS_DB", name="orders")
    listener = found.listener()
    with pytest.raises(sa.exc.OperationalError) as failed:
        listener.require_ready()
    assert SECRET.encode() not in pickle.dumps(found)
    for text in (repr(found), repr(listener), str(failed.value), repr(found.table)):
        assert SECRET not in text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "orders"}, "option 'table.url' is missing"),
        ({"url": "sqlite://"}, "option 'table.name' is missing"),
        ({"columns": "id"}, "option 'table.url' is missing: .*; option 'table.name' is missing: "),
        ({"url": "env:NOT_SET", "name": "orders"}, r"^table\.url: the environment variable NOT_SET, .* is not set"),
        ({"url": "file:/not/there", "name": "orders"}, r"^table\.url: file /not/there, .* cannot be read: No such"),
        ({"url": "oracle://db", "name": "orders"}, "'oracle' is not a database"),
        ({"url": "sqlite://", "name": "orders", "onConflict": "upsert"}, "'upsert' is not one of error, ignore, "),
        ({"url": "sqlite://", "name": "orders", "onConflict": "update"}, "needs key"),
        ({"url": "sqlite://", "name": "orders", "onUnknownField": "bad"}, "'bad' is not one of ignore, error"),
        ({"url": "sqlite://", "name": "orders", "onconflct": "error"}, "unknown option 'table.onconflct'"),
    ],
)
def test_options_that_cannot_be_used(given: dict[str, str], why: str) -> None:
    with pytest.raises((OptionError, ListenerError), match=why):
        sink_settings(**given).listener()


def test_options_of_a_table_are_for_its_listener_and_a_rollback_needs_transactions() -> None:
    given = {"path": "log", "producerGroup": "shop", "table.name": "orders"}
    with pytest.raises(OptionError, match=r"'table.name' is for transactionListener=txmq.table, not 'none'"):
        SinkSettings.of(Options({**given, "transactionListener": "none"}, SINK_OPTIONS))
    given |= {"transactionListener": "txmq.table", "table.url": "sqlite://", "table.onBadRow": "rollback"}
    with pytest.raises(ListenerError, match="a whole micro-batch is one transaction: set transactionKey"):
        SinkSettings.of(Options(given, SINK_OPTIONS)).listener()
