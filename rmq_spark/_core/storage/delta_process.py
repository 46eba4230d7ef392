"""Requirements of Delta's engine on this process: enough address space, and no fork after its first use.

With less address space the engine ends the process, or its libraries "fail to map a segment". Importing this module
makes the check, so a module that loads the engine imports it first.
"""

from __future__ import annotations

from rmq_spark._core.storage import delta_fork
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


_has_space = False


def require_no_fork() -> None:
    """Raise OptionError in a fork of a process that has used delta-rs, or when the first use finds too little address
    space."""
    global _has_space
    if not _has_space:
        require_address_space()  # it may have been limited since this module was imported
        _has_space = True
    delta_fork.require_no_fork()


require_address_space()
