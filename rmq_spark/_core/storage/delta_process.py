"""Requirements of Delta's engine on this process: enough address space, and no fork after its first use.

With less address space the engine ends the process, or its libraries "fail to map a segment". Importing this module
makes the check, so a module that loads the engine imports it first.
"""

from __future__ import annotations

import os

from rmq_spark._core.runtime.forks import forks
from rmq_spark.errors import OptionError

ADDRESS_SPACE_MIN = 2_560 << 20
"""Bytes that the engine's threads reserve on two cores. On more cores they reserve more. Little of it becomes
memory."""


def require_address_space() -> None:
    """Raise OptionError when this process may not reserve as much as the engine needs."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE_MIN:
        raise OptionError(
            f"this process may reserve {limit >> 20} MiB of address space, and Delta's engine needs "
            f"{ADDRESS_SPACE_MIN >> 20}: it would end in the midst. In Spark's Python workers leave "
            "spark.executor.pyspark.memory and spark.sql.planner.pythonExecution.memory unset, or set them to 4g; "
            "elsewhere raise ulimit -v"
        )


_engine_process: tuple[int, int] | None = None
"""The process in which delta-rs was used first: its number of :func:`forks`, and its id. The engine's threads do not
survive a fork."""


def require_no_fork() -> None:
    """Raise OptionError in a fork of a process that has used delta-rs: its calls would panic there, or hang."""
    global _engine_process
    if _engine_process is None:
        require_address_space()  # it may have been limited since this module was imported
        _engine_process = (forks(), os.getpid())
    elif _engine_process[0] != forks():
        raise OptionError(
            f"this process is a fork (os.fork) of process {_engine_process[1]}, which had opened a commit log, and "
            "Delta's engine does not survive a fork: open commit logs after it, or start processes by "
            "multiprocessing's 'spawn' or 'forkserver'"
        )


require_address_space()
