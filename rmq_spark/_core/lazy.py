"""Public names that are loaded when they are first used.

Importing the package loads almost nothing: Spark's workers fork, and Delta's engine must not run in a process that
forks. Not everyone has SQLAlchemy, Spark or Prometheus' client, either.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

_EXTRAS = {"pyspark": "spark", "sqlalchemy": "sql"}


def public(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a public module, which gives its ``__name__``.

    Its names are those that it imports for type checkers, as ``from rmq_spark._core.room.module import Name as Name``.
    So each is written once.
    """
    lives_in = dict(_names_for_type_checkers(module))

    def __getattr__(name: str) -> Any:
        if name not in lives_in:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(lives_in[name]), name)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").partition(".")[0]
            if package not in _EXTRAS:
                raise
            text = f"{module}.{name} needs {package}: install rmq_spark with its extra {_EXTRAS[package]}"
            raise ModuleNotFoundError(text, name=package) from None

    return __getattr__, lambda: sorted(lives_in), sorted(lives_in)


def _names_for_type_checkers(module: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a module exports from below the border, and the module that defines it."""
    spec = sys.modules[module].__spec__
    assert spec is not None
    loader: Any = spec.loader
    for node in ast.walk(ast.parse(loader.get_source(module))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("rmq_spark._core."):
            yield from ((alias.name, node.module) for alias in node.names if alias.asname == alias.name)
