"""Finds what keeps an object from being pickled to another process, by the name that it has in the user's program."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

from rmq_spark._core.runtime.callables import name_of
from rmq_spark._core.vocabulary.redaction import sentence_of
from rmq_spark.errors import ListenerError

_DEPTH_MAX = 8


def require_travels(value: object, what: str) -> None:
    """Require that Spark's pickler takes an object, which Spark Connect or an executor gets. Else a ListenerError names
    the variable that stays, and the object that uses it."""
    problem = _problem_of(value)
    if problem is None:
        return
    found = _stays(value, _DEPTH_MAX, {id(value)})
    if found is None:
        raise ListenerError(f"{what} cannot go to another process: {sentence_of(problem)}") from problem
    variable, owner, kind = found
    raise ListenerError(
        f"{what} cannot go to another process, because {owner} uses {variable!r}, a {kind}, which stays in its "
        "process: make it where it is used, inside the function"
    ) from problem


def _problem_of(value: object) -> Exception | None:
    try:
        from pyspark import cloudpickle
    except ImportError:  # no Spark, so another program's pickler is asking, which may take other things
        return None
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except ListenerError:
        raise  # one of our own objects says what is wrong
    except Exception as problem:
        return problem
    return None


def _stays(value: object, depth: int, seen: set[int]) -> tuple[str, str, str] | None:
    """Return the name of a variable that cannot be pickled, who uses it, and its type: the innermost one."""
    for name, part in _parts(value):
        if id(part) in seen or _problem_of(part) is None:
            continue
        seen.add(id(part))
        inner = _stays(part, depth - 1, seen) if depth and not _is_of_a_library(part) else None
        kind = type(part)
        return inner or (name, name_of(value), f"{kind.__module__}.{kind.__qualname__}")
    return None


def _is_of_a_library(value: object) -> bool:
    """Whether a user does not know what an object consists of."""
    module = value.__module__ if inspect.isroutine(value) else type(value).__module__
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    libraries = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return not module.startswith("rmq_spark.") and file.startswith(tuple(libraries))


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the variables that a function uses, or the attributes of an object."""
    function = getattr(value, "__func__", value)
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        yield from {**variables.globals, **variables.nonlocals}.items()
        if function is not value:
            yield "self", value.__self__
    elif not inspect.isclass(value):
        yield from getattr(value, "__dict__", {}).items()
