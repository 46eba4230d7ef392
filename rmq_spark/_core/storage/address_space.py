"""Requires the address space that Delta's engine needs, before the engine is loaded: with less, the engine ends the
process, or its libraries "fail to map a segment". Importing this module makes the check; ``_core/storage/table.py``
imports it first."""

from __future__ import annotations

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


require_address_space()
