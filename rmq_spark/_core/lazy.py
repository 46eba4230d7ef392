"""Public names that are loaded when they are first used.

Importing the package loads almost nothing: Spark's workers fork, and Delta's engine must not run in a process that
forks. Not everyone has SQLAlchemy, Spark or Prometheus' client, either.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

_EXTRAS = {"pyspark": "spark", "sqlalchemy": "sql"}


def public(module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a public module.

    Parameters
    ----------
    module : str
        The public module's ``__name__``.
    names : mapping of str to str
        Names with spaces between, by the module below ``rmq_spark._core`` that defines them.
    """
    lives_in = {name: where for where, several in names.items() for name in several.split()}

    def __getattr__(name: str) -> Any:
        if name not in lives_in:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"rmq_spark._core.{lives_in[name]}"), name)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").partition(".")[0]
            if package not in _EXTRAS:
                raise
            text = f"{module}.{name} needs {package}: install rmq_spark with its extra {_EXTRAS[package]}"
            raise ModuleNotFoundError(text, name=package) from None

    return __getattr__, lambda: sorted(lives_in), sorted(lives_in)
