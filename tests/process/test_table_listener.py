"""TableListener on PostgreSQL and MariaDB: the tests that SQLite passes, and what only these can do."""

from __future__ import annotations

import datetime as dt
import inspect
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import TableListener
from rmq_spark.errors import ListenerError, MessageError
from tests.support.limits import Limit
from tests.unit import test_table_listener as suite
from tests.unit.test_sql_listener import run
from tests.unit.test_table_listener import made, order, send, stored

# pytest collects these as tests of this module, so they get its ``url``.
globals().update(
    {n: f for n, f in vars(suite).items() if n.startswith("test_") and "url" in inspect.signature(f).parameters}
)

POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
MARIADB = pytest.param("mariadb", marks=pytest.mark.mariadb)


@pytest.fixture(params=[POSTGRES, pytest.param("mariadb", marks=[pytest.mark.mariadb, pytest.mark.long])])
def url(request: pytest.FixtureRequest) -> Iterator[sa.URL]:
    """A database with the empty table ``orders`` and a fence; others find it empty again."""
    server: sa.URL = request.getfixturevalue(request.param)
    empty = ["DROP SCHEMA IF EXISTS shop CASCADE", "DROP SCHEMA public CASCADE", "CREATE SCHEMA public"]
    if request.param == "mariadb":
        empty = ["DROP DATABASE shop", "CREATE DATABASE shop CHARACTER SET utf8mb4"]
    run(server, *empty)
    yield made(server)
    run(server, *empty)


of_postgres = pytest.mark.parametrize("url", [POSTGRES], indirect=True)
of_mariadb = pytest.mark.parametrize("url", [MARIADB], indirect=True)


def rows_of(url: sa.URL, query: str) -> list[tuple[Any, ...]]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.exec_driver_sql(query)]
    engine.dispose()
    return rows


ALL_TYPES = """
CREATE TYPE colour AS ENUM ('red', 'green');
CREATE DOMAIN percent AS smallint CHECK (VALUE BETWEEN 0 AND 100);
CREATE TABLE kinds (id bigint PRIMARY KEY, exact numeric, cents numeric(12,2), ratio real, yes boolean, day date,
at timestamptz, local timestamp, clock time, who uuid, note jsonb, plain json, colour colour, share percent,
words text, code char(4), tags {tags}, ip inet, span interval)
"""
VALUES: dict[str, Any] = {
    "id": 2**62, "exact": "@1234567890123456789012.345@", "cents": 12.345, "ratio": 0.1, "yes": False,
    "day": "2026-02-28", "at": "2026-11-27T12:30:15.123456+02:00", "local": "2026-11-27T12:30:15Z", "clock": "10:30:00",
    "who": "6F9619FF-8B86-D011-B42D-00CF4FC964FF", "note": {"a": [1, None, "ü"], "n": "@1.10@"}, "plain": ["x", 2],
    "colour": "green", "share": 7, "words": "a\tb\\N\n", "code": "ab", "ip": "10.0.0.1", "span": "90 minutes",
}  # fmt: skip
STORED = (
    2**62, Decimal("1234567890123456789012.345"), Decimal("12.35"), pytest.approx(0.1), False, dt.date(2026, 2, 28),
    dt.datetime(2026, 11, 27, 10, 30, 15, 123456, dt.timezone.utc), dt.datetime(2026, 11, 27, 12, 30, 15),
    dt.time(10, 30), UUID("6f9619ff-8b86-d011-b42d-00cf4fc964ff"), '{"a": [1, null, "ü"], "n": 1.10}', ["x", 2],
    "green", 7, "a\tb\\N\n", "ab  ",
)  # fmt: skip


@of_postgres
@pytest.mark.parametrize("tags", ["text", "text[]"])
def test_the_types_of_postgresql(url: sa.URL, tags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an array the rows cannot go by COPY. What is stored is the same."""
    run(url, ALL_TYPES.format(tags=tags))
    values = {**VALUES, "tags": "x" if tags == "text" else ["x", None]}
    body = json.dumps(values).replace('"@', "").replace('@"', "")
    copied: list[str] = []
    copy = psycopg.Cursor.copy
    monkeypatch.setattr(psycopg.Cursor, "copy", lambda cursor, said: copied.append(said) or copy(cursor, said))
    assert send(TableListener(url, "kinds"), [body, {"id": 1}]) == [None, None]
    assert len(copied) == (tags == "text")
    columns = "id, exact, cents, ratio, yes, day, at, local, clock, who, note::text, plain, colour::text, share, words"
    empty, full = rows_of(url, f"SELECT {columns}, code, tags, host(ip), span FROM kinds ORDER BY id")
    assert full == (*STORED, values["tags"], "10.0.0.1", dt.timedelta(minutes=90))
    assert empty == (1, *[None] * 18)


@of_mariadb
def test_binary_columns_of_mariadb_have_no_form_in_json(url: sa.URL) -> None:
    run(url, "CREATE TABLE kinds (id BIGINT PRIMARY KEY, raw VARBINARY(9))")
    with pytest.raises(ListenerError, match=r"column 'raw' .* has no form in JSON"):
        TableListener(url, "kinds").require_ready()


@of_mariadb
def test_a_row_that_a_view_s_check_refuses_is_rolled_back(url: sa.URL) -> None:
    run(
        url,
        "CREATE TABLE base (id BIGINT PRIMARY KEY, v INT)",
        "CREATE VIEW kinds AS SELECT id, v FROM base WHERE v < 10 WITH CHECK OPTION",
    )
    refused = send(TableListener(url, "kinds", on_bad_row="rollback"), [{"id": 1, "v": 1}, {"id": 2, "v": 20}])
    assert [why is None for why in refused] == [True, False]
    assert rows_of(url, "SELECT id FROM base") == [(1,)]


@of_postgres
def test_small_numbers_keep_their_exponent(url: sa.URL) -> None:
    """1e-10 was stored as 0.1."""
    run(url, "CREATE TABLE kinds (id bigint PRIMARY KEY, exact numeric, cents numeric(50,30))")
    texts = ["1e-10", "1.5e-20", "-0.0000000001", "100", "0"]
    bodies = [f'{{"id": {n}, "exact": {text}, "cents": {text}}}' for n, text in enumerate(texts)]
    assert send(TableListener(url, "kinds"), bodies) == [None] * 5
    assert rows_of(url, "SELECT exact, cents FROM kinds ORDER BY id") == [(Decimal(t), Decimal(t)) for t in texts]


@of_postgres
def test_the_last_row_of_a_uuid_counts_in_whatever_spelling(url: sa.URL) -> None:
    run(url, "CREATE TABLE kinds (id uuid PRIMARY KEY, v int, d int DEFAULT 7)")
    upper, lower = "6F9619FF-8B86-D011-B42D-00CF4FC964FF", "6f9619ff8b86d011b42d00cf4fc964ff"
    listener = TableListener(url, "kinds", key="id", on_conflict="update")
    bodies = [{"id": upper, "v": 1}, {"id": str(UUID(int=1)), "v": 9}, {"id": lower, "v": 2}]
    assert send(listener, bodies) == [None] * 3
    assert rows_of(url, "SELECT v, d FROM kinds ORDER BY id") == [(9, 7), (2, 7)]


@of_postgres
@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ("ADD COLUMN c int NOT NULL DEFAULT 0", "c", 7),
        ("ALTER COLUMN v TYPE bigint", "v", 2**40),
        ("ALTER COLUMN w DROP NOT NULL", "w", None),
        ("ALTER COLUMN v TYPE jsonb USING to_jsonb(v)", "v", {"a": 1}),
    ],
)
def test_a_row_that_fits_the_altered_table_is_not_refused(url: sa.URL, change: str, field: str, value: Any) -> None:
    """A refusal is final, so the listener looks at the table once more."""
    run(url, "CREATE TABLE kinds (id bigint PRIMARY KEY, v int, w int NOT NULL)")
    listener = TableListener(url, "kinds", on_bad_row="rollback")
    assert send(listener, [{"id": 1, "v": 1, "w": 1}]) == [None]
    run(url, f"ALTER TABLE kinds {change}", *["ALTER TABLE kinds ALTER COLUMN c DROP DEFAULT"] * (field == "c"))
    assert send(listener, [{"id": 2, "v": 1, "w": 2, field: value}]) == [None]
    assert rows_of(url, f"SELECT id, {field} FROM kinds WHERE id = 2") == [(2, value)]


@of_postgres
def test_a_table_with_row_level_security_takes_rows_and_a_view_is_refused(url: sa.URL) -> None:
    """COPY does not work there."""
    seller = f"seller_{uuid4().hex}"
    run(
        url,
        "CREATE TABLE kinds (id bigint PRIMARY KEY, v int CHECK (v <> 5))",
        "CREATE VIEW seen AS SELECT id, v FROM kinds",
        "ALTER TABLE kinds ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY all_rows ON kinds USING (true)",
        f"CREATE ROLE {seller} LOGIN",
        f"GRANT USAGE ON SCHEMA public TO {seller}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {seller}",
    )
    limited = url.set(username=seller)
    listener = TableListener(limited, "kinds", on_bad_row="rollback")
    assert [why is None for why in send(listener, [{"id": n, "v": n} for n in (4, 5, 6)])] == [True, False, True]
    assert rows_of(url, "SELECT id FROM kinds ORDER BY id") == [(4,), (6,)]
    with pytest.raises(ListenerError, match="'seen' is a view, which does not tell the defaults"):
        TableListener(limited, "seen").require_ready()


@pytest.mark.turns(4)
@of_postgres
@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("who", "no", "invalid input syntax for type uuid"),
        ("colour", "blue", "invalid input value for enum colour"),
        ("share", 101, 'violates check constraint "percent_check"'),
        ("share", 40_000, "couldn't parse:40000"),
        ("code", "abcde", r"value too long for type character\(4\)"),
        ("cents", 1e12, "numeric field overflow"),
        ("words", "a\0b", "column 'words' has a NUL character, which the database cannot keep"),
        ("note", "a\0b", "unsupported Unicode escape sequence"),
        ("ratio", 1e300, "column 'ratio' is a float, and the field is none"),
        ("at", "0000-01-01", "column 'at' has a time outside of 1 to 9999"),
        ("ip", "10.0.0.256", "invalid input syntax for type inet"),
    ],
)
def test_what_postgresql_refuses_is_rolled_back(url: sa.URL, field: str, value: Any, why: str) -> None:
    run(url, ALL_TYPES.format(tags="text"))
    bodies = [{"id": 1, field: VALUES[field] if field != "exact" else 1}, {"id": 2, field: value}, {"id": 3}]
    first, said, last = send(TableListener(url, "kinds", on_bad_row="rollback"), bodies)
    assert (first, last) == (None, None)
    assert why.replace("\\", "") in said
    assert rows_of(url, "SELECT id FROM kinds ORDER BY id") == [(1,), (3,)]
    with pytest.raises(MessageError, match=rf"row 1 \(transaction key '1'.*: .*{why}"):
        send(TableListener(url, "kinds", on_conflict="ignore"), bodies)


@of_postgres
def test_columns_that_the_database_makes_are_left_to_it(url: sa.URL) -> None:
    run(
        url,
        "DROP TABLE orders",
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, a int, "
        "double_a int GENERATED ALWAYS AS (a * 2) STORED, n serial, made timestamptz NOT NULL DEFAULT now())",
    )
    send(TableListener(url, "orders"), [{"a": 1, "id": 77, "double_a": 5}, {"a": 2, "n": 40}, {"a": 3, "n": None}])
    assert sorted(rows_of(url, "SELECT a, double_a, n FROM orders WHERE made IS NOT NULL AND id < 4")) == [
        (1, 2, 1),
        (2, 4, 40),
        (3, 6, 2),
    ]


@of_postgres
def test_a_table_and_a_fence_in_schemas_of_their_own(url: sa.URL) -> None:
    run(url, "DROP TABLE txmq_fence, txmq_fence_id, orders", "CREATE SCHEMA shop")
    run(url, 'CREATE TABLE shop."Orders of May" ("the id" int PRIMARY KEY, "n%%" int, UNIQUE ("n%%"))')
    txmq.create_fence(url, schema="shop")
    given: dict[str, Any] = {"schema": "shop", "fence_schema": "shop", "key": ["the id"]}
    listener = TableListener(url, "Orders of May", on_conflict="update", **given)
    send(listener, [{"the id": 1, "n%": 1}, {"the id": 1, "n%": 2}])
    send(TableListener(url, "Orders of May", on_bad_row="rollback", **given), [{"the id": 1}, {"the id": 2, "n%": 3}])
    assert rows_of(url, 'SELECT * FROM shop."Orders of May" ORDER BY 1') == [(1, 2), (2, 3)]
    with pytest.raises(ListenerError, match=r"no table 'orders' in schema 'shop': it has Orders of May, txmq_fence"):
        TableListener(url, "orders", schema="shop", fence_schema="shop").require_ready()


@of_postgres
def test_an_update_refuses_a_row_that_another_unique_key_has(url: sa.URL) -> None:
    run(url, "CREATE UNIQUE INDEX note ON orders (note)", "CREATE UNIQUE INDEX half ON orders (status) WHERE total > 9")
    listener = TableListener(url, "orders", key="order_id", on_conflict="update", on_bad_row="rollback")
    send(listener, [order(1, note="a")])
    first, second = send(listener, [order(2, note="a"), order(3, note="b")])
    assert (first, second) == ('duplicate key value violates unique constraint "note"', None)
    with pytest.raises(ListenerError, match="no unique key of the columns status"):
        TableListener(url, "orders", key="status", on_conflict="ignore").require_ready()


@of_postgres
def test_a_deferred_constraint_fails_the_half_batch_at_its_commit(url: sa.URL) -> None:
    run(url, "CREATE TABLE shops (id int PRIMARY KEY)", "INSERT INTO shops VALUES (1)")
    run(url, "ALTER TABLE orders ADD shop int REFERENCES shops DEFERRABLE INITIALLY DEFERRED")
    listener = TableListener(url, "orders", on_bad_row="rollback")
    with pytest.raises(sa.exc.IntegrityError, match="violates foreign key constraint"):
        send(listener, [order(1, shop=1), order(2, shop=2)])
    assert stored(url) == []
    run(url, "ALTER TABLE orders ALTER CONSTRAINT orders_shop_fkey NOT DEFERRABLE")
    first, second = send(listener, [order(1, shop=1), order(2, shop=2)])
    assert first is None
    assert "violates foreign key constraint" in second


@pytest.mark.turns(4)
@of_postgres
@pytest.mark.parametrize("each_max", [3, 4_000])
@pytest.mark.parametrize("on_conflict", ["error", "update"])
def test_thousands_of_rows_of_which_some_are_refused(
    url: sa.URL, on_conflict: str, each_max: int, limit: Limit
) -> None:
    limit(EACH_MAX=each_max)
    key = "order_id" if on_conflict == "update" else None
    listener = TableListener(url, "orders", key=key, on_conflict=on_conflict, on_bad_row="rollback")
    send(listener, [order(n) for n in range(0, 5000, 50)])
    said = send(listener, [order(n, -1 if n % 1000 == 7 else 2) for n in range(5000)])
    wrong = {n for n, reason in enumerate(said) if reason}
    expected = {n for n in range(5000) if n % 1000 == 7 or (on_conflict == "error" and n % 50 == 0)}
    assert wrong == expected
    assert rows_of(url, "SELECT count(*), sum(total)::int FROM orders") == [
        (4995, 2 * 4995 - (100 if on_conflict == "error" else 0) // 2)
    ]


@pytest.mark.turns(3)
@of_postgres
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("it_commits", [True, False])
def test_a_key_that_another_transaction_is_inserting_is_waited_for(
    url: sa.URL, isolation: str, it_commits: bool
) -> None:
    listener = TableListener(sa.create_engine(url, isolation_level=isolation), "orders", on_bad_row="rollback")
    send(listener, [order(9)])
    with sa.create_engine(url).connect() as other, ThreadPoolExecutor(1) as pool:
        other.exec_driver_sql("INSERT INTO orders (order_id, total) VALUES (1, 77)")
        said = pool.submit(send, listener, [order(1), order(2)])
        while not rows_of(url, "SELECT 1 FROM pg_locks WHERE NOT granted") and not said.done():
            pass
        (other.commit if it_commits else other.rollback)()
        first, second = said.result(60)
    assert (first is None, second) == (not it_commits, None)
    assert not it_commits or "already" in first or "duplicate key" in first
    assert stored(url, "order_id, total") == [(1, 77.0 if it_commits else 1.5), (2, 1.5), (9, 1.5)]


# ---------------------------------------------------------------- MariaDB
@of_mariadb
def test_mariadb_must_undo_what_is_rolled_back_and_refuse_what_does_not_fit(url: sa.URL) -> None:
    run(url, "CREATE TABLE heap (id INT PRIMARY KEY) ENGINE=MyISAM")
    with pytest.raises(ListenerError, match="storage engine MyISAM, in which what is rolled back stays"):
        TableListener(url, "heap").require_ready()
    lax = sa.create_engine(url, connect_args={"init_command": "SET sql_mode = ''"})
    with pytest.raises(ListenerError, match="sql_mode is '', in which it cuts values"):
        TableListener(lax, "orders").require_ready()


@of_mariadb
def test_an_upsert_into_a_table_with_two_unique_keys_is_refused(url: sa.URL) -> None:
    run(url, "CREATE UNIQUE INDEX note ON orders (note)")
    for on_conflict in ("ignore", "update"):
        with pytest.raises(ListenerError, match=r"has 2 unique keys, and .* only on_conflict='error' can be used"):
            TableListener(url, "orders", key="order_id", on_conflict=on_conflict).require_ready()
    assert send(TableListener(url, "orders", key="order_id"), [order(1, note="a")]) == [None]


@of_mariadb
def test_the_types_of_mariadb(url: sa.URL) -> None:
    run(
        url,
        "CREATE TABLE kinds (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, exact DECIMAL(30, 3), tiny TINYINT, "
        "yes BOOLEAN, at DATETIME(6), day DATE, clock TIME, colour ENUM('red', 'green'), word VARCHAR(3))",
    )
    full = {"id": 2**63 + 5, "exact": "@123456789012345678901234.5@", "tiny": -128, "yes": True, "colour": "green"}
    times = {"at": "2026-11-27T12:30:15.123456Z", "day": "2026-02-28", "clock": "10:30:00", "word": "äöü"}
    body = json.dumps({**full, **times}).replace('"@', "").replace('@"', "")
    wrong = [{"tiny": 128}, {"colour": "blue"}, {"word": "four"}, {"clock": "late"}]
    assert send(TableListener(url, "kinds"), [{"tiny": 1}]) == [None]
    said = send(TableListener(url, "kinds", on_bad_row="rollback"), [body, *wrong])
    assert [reason is None for reason in said] == [True, False, False, False, False]
    one, other = rows_of(url, "SELECT * FROM kinds ORDER BY id")
    assert (one[0], one[2]) == (1, 1)
    assert other == (
        2**63 + 5, Decimal("123456789012345678901234.500"), -128, 1, dt.datetime(2026, 11, 27, 12, 30, 15, 123456),
        dt.date(2026, 2, 28), dt.timedelta(hours=10, minutes=30), "green", "äöü",
    )  # fmt: skip
