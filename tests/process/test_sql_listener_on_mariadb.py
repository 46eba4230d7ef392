"""SqlTransactionListener on MariaDB: every test that SQLite passes, and what only MariaDB can do."""

from __future__ import annotations

import inspect

import pytest
import sqlalchemy as sa

from rmq_spark.errors import FencedError
from tests.unit import test_sql_listener as suite
from tests.unit.test_sql_listener import COMMIT, OLD, ROLLBACK, half_batch, listener, make_orders, run, verdicts

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


def test_mysqls_name_of_the_dialect_serves_as_well(url: sa.URL, fence: str) -> None:
    as_mysql = url.set(drivername="mysql+pymysql")
    batch = half_batch(fence, ["a", "A"], per="key", age=OLD)
    assert verdicts(listener(as_mysql).check_local_transaction(batch)) == [ROLLBACK]
    with pytest.raises(FencedError):
        listener(url).execute_local_transaction(batch)
    other = listener(as_mysql, fence_table="other")
    assert verdicts(other.execute_local_transaction(half_batch(other.create_fence()))) == [COMMIT]
    with sa.create_engine(url).connect() as connection:
        engines = connection.exec_driver_sql(
            "SELECT DISTINCT engine FROM information_schema.tables WHERE table_schema = 'shop'"
        )
        assert engines.scalars().all() == ["InnoDB"]
