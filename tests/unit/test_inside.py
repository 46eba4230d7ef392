"""The table of inside names that tests use is right, and no longer than it must be."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import inside

TESTS = Path(__file__).parents[1]


def test_each_name_of_the_inside_is_there() -> None:
    assert [name for name in dir(inside) if getattr(inside, name) is None] == []


def test_each_name_of_the_inside_is_used() -> None:
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py") if path.name != "inside.py")
    assert set(dir(inside)) - set(re.findall(r"\w+", text)) == set()
