"""What every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.torture.s3.server import BUILD_S_MAX, NoS3ServerError, S3Server, running

# Spark's workers must be this interpreter, also when pytest is started without make.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

# How many examples hypothesis tries: a quick run sees few, `make test-all` many. A test whose examples are slow takes
# its share of them: `settings.default.max_examples // 5`.
settings.register_profile("quick", deadline=None, max_examples=50)
settings.register_profile("all", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("TXMQ_TESTS", "quick"))


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    """Where a test's commit log may be made; nothing is there yet."""
    return str(tmp_path / "log")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "s3" in getattr(item, "fixturenames", ()):  # the first of them may build the server
            item.add_marker(pytest.mark.timeout(BUILD_S_MAX + 600))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for all tests. Without Go they are skipped; where ``CI`` is set they fail."""
    try:
        with running(tmp_path_factory.mktemp("s3")) as server:
            yield server
    except NoS3ServerError as problem:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the tests on S3 need a server: {problem}")
