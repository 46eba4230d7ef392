"""The table of inside names that tests use is right, and no longer than it must be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import inside

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", dir(inside))
def test_a_name_of_the_inside_is_there(name: str) -> None:
    assert getattr(inside, name) is not None


def test_each_name_of_the_inside_is_used() -> None:
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py") if path.name != "inside.py")
    assert [name for name in dir(inside) if not re.search(rf"\b{name}\b", text)] == []
