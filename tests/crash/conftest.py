"""Crash tests start real processes. Their programs import the modules of this folder, and so do the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook is called with the items of the whole run, not of this folder alone.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.crash)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    from processes import Program

    yield
    Program.kill_all()
