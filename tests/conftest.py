"""What every test may use."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import core, settings

from rmq_spark import CommitLog
from tests.support import jvm, seeds
from tests.support.half_batches import copied_log, make_log
from tests.support.limits import Limit, set_limits
from tests.torture.s3.server import BUILD_S_MAX, NoS3ServerError, S3Server, running
from tests.torture.stores import azure as azurite
from tests.torture.stores import google as fake_gcs
from tests.torture.stores.processes import NoEmulatorError

TOGETHER = tuple(
    f"tests/{name}/" for name in "spark crash process kafka torture/s3 torture/stores torture/damage".split()
)
"""Each folder has one Spark session, one server, or one log to damage, and stays with one worker. Two Spark sessions on
two cores gained nothing."""

ON_EVERY_LOG = ("test_commit_log", "test_two_phase", "test_leaving", "test_push_consumer")
"""`make test` runs these on each kind of log, one in four of their tests on the second kind. Others it runs on the
first kind of their mark: the kinds share all code but the commit to a table. `make test-all` runs all."""
SEEDS = pytest.StashKey[str]()

# Spark's workers must be this interpreter, also when pytest is started without make.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
jvm.start_quickly()

# How many examples hypothesis tries: a quick run sees few, `make test-all` many. A test whose examples are slow takes
# its share of them: `settings.default.max_examples // 5`.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("all", deadline=None, max_examples=500)
settings.load_profile("all" if seeds.ALL else "quick")


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    """Where a test's commit log may be made; nothing is there yet."""
    return str(tmp_path / "log")


# ---------------------------------------------------------------- seeds
def pytest_configure(config: pytest.Config) -> None:
    try:
        seeds.check_environment()
        config.stash[SEEDS] = seeds.say()
    except ValueError as problem:
        raise pytest.UsageError(str(problem)) from problem
    # Whatever is committed meanwhile, the processes of this run count from the same seed.
    os.environ["SEED"] = str(seeds.first_seed())
    if core.global_force_seed is None:  # --hypothesis-seed was not given
        core.global_force_seed = seeds.first_seed()


def pytest_report_header(config: pytest.Config) -> str:
    return config.stash[SEEDS]


# ---------------------------------------------------------------- workers
@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, when there is more than one worker
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        """One worker gets all of a folder of :data:`TOGETHER`. Any other file goes whole to whichever is free, so that
        it makes its log once; in `make test-all`, where some files take hours, any other test."""

        def _split_scope(self, nodeid: str) -> str:
            alone = nodeid if seeds.ALL else nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), alone)

    return ByFolder(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    take_turns(items)
    for item in items:
        if not {"s3", "azure", "google", "store"}.isdisjoint(getattr(item, "fixturenames", ())):
            # the first of them may build the server
            item.add_marker(pytest.mark.timeout(BUILD_S_MAX + 600))


# ---------------------------------------------------------------- turns
def take_turns(items: list[pytest.Item]) -> None:
    """Of alike cases `make test` runs one of so many, and others at the next commit: those of a test
    (``pytest.mark.turns(of)``), or tests with one ``among``. Somebody who names fewer gets all of them."""
    groups: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("turns")
        if marker is not None and item.get_closest_marker("long") is None:
            name = f"{item.path}::{getattr(item, 'originalname', item.name)}"
            groups[marker.kwargs.get("among", name), marker.args[0]].append(item)
    for (_, of), alike in groups.items():
        for number, item in enumerate(alike):
            if len(alike) >= of and not seeds.has_its_turn(number, of):
                item.add_marker(pytest.mark.long)


# ---------------------------------------------------------------- fixtures
@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """``limit(OP_FILES_MAX=2)``: a limit of the product that this test makes small."""
    return partial(set_limits, monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("log")
    if marker is not None and len(marker.args) > 1 and "log" in metafunc.fixturenames:
        first, *others = marker.args
        every = metafunc.module.__name__.rpartition(".")[2] in ON_EVERY_LOG
        mark = pytest.mark.turns(4, among=metafunc.module.__name__) if every else pytest.mark.long
        others = [pytest.param(kind, marks=mark) for kind in others]
        metafunc.parametrize("log", [first, *others], indirect=True)


@pytest.fixture
def log(request: pytest.FixtureRequest, log_path: str) -> CommitLog:
    """A commit log. ``pytest.mark.log("memory", "delta", orders=1)`` names its kinds, each in turn, and its topics.
    Without the mark it is in memory, and has the topic ``orders`` with two queues."""
    marker = request.node.get_closest_marker("log")
    kinds, topics = (marker.args, marker.kwargs) if marker is not None else ((), {})
    kind = getattr(request, "param", kinds[0] if kinds else "memory")
    return copied_log(Path(log_path), **topics) if kind == "delta" else make_log(kind, Path(log_path), **topics)


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


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[azurite.AzureServer]:
    """An emulator of Azure Blob Storage. Where npm cannot fetch it, the tests are skipped."""
    try:
        with azurite.running(tmp_path_factory.mktemp("azure") / "data") as server:
            yield server
    except NoEmulatorError as problem:
        pytest.skip(f"the tests on Azure need an emulator: {problem}")


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_gcs.GoogleServer]:
    """An emulator of Google Cloud Storage. Where Go cannot build it, the tests are skipped."""
    try:
        with fake_gcs.running(tmp_path_factory.mktemp("google") / "data") as server:
            yield server
    except NoEmulatorError as problem:
        pytest.skip(f"the tests on Google need an emulator: {problem}")
