"""Names the callables of users, so that a person finds them in a program."""

from __future__ import annotations

import functools
import inspect
import os


def name_of(called: object) -> str:
    """``shop.mail_the_customer (mail.py:12)`` for a function, ``shop.Orders`` for an object of that class."""
    while isinstance(called, functools.partial):
        called = called.func
    function = inspect.unwrap(called) if callable(called) else called
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    owner = called if hasattr(called, "__qualname__") else type(called)
    return f"{owner.__module__}.{owner.__qualname__}{where}"
