"""No fork after the first use of delta-rs in a process: its threads do not survive one. Executors use this module."""

from __future__ import annotations

import os

from rmq_spark.errors import OptionError

_first_use: int | None = None
"""The id of the process in which delta-rs was used first."""


def require_no_fork() -> None:
    """Raise OptionError in a fork of a process that has used delta-rs: its calls would panic there, or hang."""
    global _first_use
    if _first_use is None:
        _first_use = os.getpid()
    elif _first_use != os.getpid():
        raise OptionError(
            f"this process is a fork (os.fork) of process {_first_use}, which had opened a commit log, and "
            "Delta's engine does not survive a fork: open commit logs after it, or start processes by "
            "multiprocessing's 'spawn' or 'forkserver'"
        )
