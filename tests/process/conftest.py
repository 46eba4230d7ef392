"""Tests here need processes or servers of their own, and no JVM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import sqlalchemy as sa

from tests.process.mariadb import NoMariadbError
from tests.process.mariadb import running as mariadb_running
from tests.process.postgres import running as postgres_running
from tests.support import browser

QUICK_ON_MARIADB = (
    "test_the_database_passes_the_conformance_suite_of_fences",
    "test_a_check_of_an_old_half_batch_fences_a_late_execute",
    "test_a_check_of_a_running_local_transaction_is_unknown_and_quick",
    "test_a_check_waits_for_a_local_transaction_that_ends_in_time",
    "test_strange_keys_are_fenced_like_any_other",
    "test_two_executes_of_one_attempt_run_the_work_once",
    "test_no_check_answers_for_work_that_ended_its_transaction",
    "test_work_may_use_savepoints_of_its_own",
)
"""Of the tests of SQLite that run on MariaDB once more: what the databases do in ways of their own."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        again = item.path.name == "test_sql_listener_on_mariadb.py"
        if again and getattr(item, "originalname", None) not in QUICK_ON_MARIADB:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def postgres() -> Iterator[sa.URL]:
    """A PostgreSQL server for all tests. It runs as another user, to whom pytest's own folder is closed again whenever
    some other pytest begins."""
    with TemporaryDirectory(prefix="txmq-pg-") as folder, postgres_running(Path(folder)) as url:
        yield url


@pytest.fixture(scope="session")
def mariadb() -> Iterator[sa.URL]:
    """A MariaDB server for all tests. Without its program they are skipped; where ``CI`` is set they fail."""
    try:
        with mariadb_running() as url:
            yield url
    except NoMariadbError as problem:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    command = browser.find()
    if command is None:
        pytest.skip("there is no Chromium on this machine: apt-get install --no-install-recommends chromium")
    with browser.running(command, tmp_path_factory.mktemp("chromium")) as found:
        yield found
