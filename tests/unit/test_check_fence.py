"""The conformance suite of fences: it passes on each database that has a fence, and finds what another one lacks.

Its rules run on PostgreSQL and MariaDB as tests of ``test_sql_listener.py`` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from rmq_spark import SqlTransactionListener
from rmq_spark.errors import FenceError, ListenerError
from rmq_spark.testing import check_fence
from tests.support.inside import Fence, Recorded


class Unknown(SQLiteDialect_pysqlite):
    """A database that nobody here has tested."""

    name = "unknown"
    supports_statement_cache = True


@pytest.fixture
def unknown(tmp_path: Path) -> Iterator[str]:
    registry.impls["unknown"] = lambda: Unknown
    yield f"unknown:///{tmp_path / 'orders.db'}"
    del registry.impls["unknown"]


def test_an_untested_database_is_refused_in_words_that_name_the_suite(unknown: str) -> None:
    with pytest.raises(ListenerError, match=r"'unknown' is not a database .*rmq_spark\.testing\.check_fence\(url\)"):
        SqlTransactionListener(unknown, print)


@pytest.mark.turns(2, among="the suite of fences")
def test_the_suite_tries_an_untested_database_and_says_what_it_lacks(unknown: str) -> None:
    assert len(check_fence(unknown)) == 8
    careless = sa.create_engine(unknown, isolation_level="READ UNCOMMITTED")
    with pytest.raises(FenceError, match=r"unknown:///.* cannot have a fence, because 1 of 9 .*\n- .*READ UNCOMMITTED"):
        check_fence(careless)
    assert sa.inspect(sa.create_engine(unknown)).get_table_names() == []
    with pytest.raises(ListenerError, match="not a database that this was tested with"):
        SqlTransactionListener(careless, print)


@pytest.mark.turns(2, among="the suite of fences")
def test_the_suite_notices_a_check_that_keeps_no_tombstone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fence, "fill", lambda _, connection, batch, state: Recorded.of(state, batch.rows, batch.is_all))
    with pytest.raises(FenceError, match=r"(?s)because \d of 9 .*after a check's ROLLBACK .*FencedError is expected"):
        check_fence(f"sqlite:///{tmp_path / 'orders.db'}")


def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    with pytest.raises(FenceError, match=r"(?s)postgresql.*The tables of a fence can be made") as raised:
        check_fence("postgresql+psycopg://user:secret@127.0.0.1:1/db")
    assert "secret" not in str(raised.value)
