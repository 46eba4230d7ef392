"""References to a database's URL, ``env:NAME`` or ``file:/path``: each process that uses the database looks it up."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rmq_spark.errors import ListenerError

_ENVIRONMENT, _FILE = "env:", "file:"


def is_reference(address: str) -> bool:
    """Whether an address is a reference to a URL; else it is the URL."""
    variable = address.removeprefix(_ENVIRONMENT)
    if variable != address and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable) is None:
        raise ListenerError(f"{_ENVIRONMENT!r} is not followed by the name of an environment variable")
    return address.startswith((_ENVIRONMENT, _FILE))


def look_up(address: str) -> str:
    """Return the URL that an address refers to, or the address itself when it is the URL. A variable or file without a
    URL is a ListenerError."""
    if not is_reference(address):
        return address
    kind, _, name = address.partition(":")
    if kind == "env":
        url = os.environ.get(name, "").strip()
        if not url:
            raise ListenerError(
                f"the environment variable {name}, which has the database's URL, is not set in this process: set it "
                "where the listener or the inbox runs (of Spark, the driver's environment, before it starts)"
            )
        return url
    try:
        url = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise ListenerError(f"file {name}, which has the database's URL, cannot be read: {reason}") from None
    if not url:
        raise ListenerError(f"file {name} is empty: the database's URL is expected in it")
    return url
