"""What a configuration may name: the one module on the allow list of the hostile configurations."""

from __future__ import annotations

import os
import sys

from tests.support.inside import CommitOncePrepared

__all__ = ["NotOne", "broken", "listener", "make", "os", "sys"]

listener = CommitOncePrepared()
make = CommitOncePrepared


class NotOne:
    """No listener."""


def broken() -> CommitOncePrepared:
    raise RuntimeError("the bank is closed")
