"""SqlTransactionListener on MariaDB: every test that SQLite passes, and what only MariaDB can do."""

from __future__ import annotations

import inspect

import pytest
import sqlalchemy as sa

from tests.unit import test_sql_listener as suite
from tests.unit.test_sql_listener import make_orders, run

pytestmark = pytest.mark.mariadb

# pytest collects these as tests of this module, so they get its ``url``.
fence = suite.fence
globals().update(
    {n: f for n, f in vars(suite).items() if n.startswith("test_") and "url" in inspect.signature(f).parameters}
)


@pytest.fixture
def url(mariadb: sa.URL) -> sa.URL:
    """A database with the empty table ``orders`` and nothing else."""
    run(mariadb, "DROP DATABASE shop", "CREATE DATABASE shop CHARACTER SET utf8mb4")
    return make_orders(mariadb)
