"""What a Python worker of Spark does with the memory of rows that it has written."""

from __future__ import annotations

from functools import lru_cache

MAPPED_BYTES_MAX = 32 * 1024 * 1024
"""glibc learns from blocks of up to so many bytes (``DEFAULT_MMAP_THRESHOLD_MAX``), its own few included."""


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of memory that it has freed.

    A worker holds the rows of a partition until it writes them. glibc gives that memory back when they are freed, and
    takes it again for the next micro-batch, page by page: 8,000 page faults for 36 MB, a fifth of the processor time
    that the sink takes in the worker. glibc keeps twice the size of the largest block that was freed after it had a
    mapping of its own. So one is made and freed here. Nothing is written to it, so it takes no memory. Other C
    libraries do not mind.
    """
    bytes(MAPPED_BYTES_MAX - 65_536)
