"""What the user has given to be called, by a name that a person finds in a program."""

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
    named = called if hasattr(called, "__qualname__") else type(called)
    return f"{named.__module__}.{named.__qualname__}{where}"
