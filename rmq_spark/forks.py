"""Tells a fork (``os.fork``) from the process that it is a copy of, without a system call."""

from __future__ import annotations

import os

_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


def forks() -> int:
    """How many forks lie between this process and its first Python program. Kept, it tells later whether this is still
    the process that has kept it."""
    return _forks


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_count)
