"""Crash tests start real processes, and leave none behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Program

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook is called with the items of the whole run, not of this folder alone.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.crash)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    yield
    Program.kill_all()
