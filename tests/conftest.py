"""What every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import seeds
from tests.torture.s3.server import BUILD_S_MAX, NoS3ServerError, S3Server, running

HERE = Path(__file__).parent
SPARK = (HERE / "spark",)
PROCESSES = (HERE / "crash", HERE / "torture" / "kill", HERE / "torture" / "race")
"""Folders whose tests start, kill and watch processes."""
SERVERS = ("postgres", "s3")
"""Fixtures that start a server, and markers of tests that ask for it in another way."""

SEEDS = pytest.StashKey[str]()

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


# ---------------------------------------------------------------- seeds
def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEEDS] = seeds.say()
    # Whatever is committed meanwhile, the processes of this run count from the same seed.
    os.environ.setdefault("SEED", str(seeds.first_seed()))


def pytest_report_header(config: pytest.Config) -> str:
    return config.stash[SEEDS]


# ---------------------------------------------------------------- workers
@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "s3" in fixtures:  # the first of them may build the server
            item.add_marker(pytest.mark.timeout(BUILD_S_MAX + 600))
        group = group_of(item, fixtures)
        if group and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


def group_of(item: pytest.Item, fixtures: Collection[str]) -> str | None:
    """Tests of a group run in one worker, one after the other; a test without a group runs in whichever is free.

    So there is one Spark session and one server of a kind, and never two stories of killed processes at a time.
    """
    folders = item.path.parents
    if "spark" in fixtures or any(folder in folders for folder in SPARK):
        return "spark"
    if any(folder in folders for folder in PROCESSES):
        return "processes"
    return next((s for s in SERVERS if s in fixtures or item.get_closest_marker(s)), None)


# ---------------------------------------------------------------- fixtures


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
