"""Compares a writer's clock with the store's, because ages in the log come from the clocks of many machines."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from rmq_spark._core.runtime.machine import Machine
from rmq_spark._core.storage.store_errors import writing
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark.errors import ClockError, CorruptLogError

PROBE = "_clock"
"""A small file in a table's folder, which each comparison writes anew. Delta ignores names that begin with ``_``."""
STEP_S = 1.0
"""Seconds that a clock may gain or lose on the monotonic clock before it is compared with the store's again."""


class StoreClock:
    """Compares this machine's clock with that of the store in which a table lies.

    It asks the store before the process's first write, and again when the machine's clock was set or has drifted. On a
    local disk the two are one clock and always agree.
    """

    def __init__(self, fs: Any, folder: str, machine: Machine) -> None:
        self._fs, self._folder, self._machine = fs, folder, machine
        self._looked_at: float | None = None  # clock minus monotonic clock, when the clock last agreed with the store's

    def require_near(self) -> None:
        """Raise ClockError when the two clocks are more than :data:`CLOCK_SKEW_S_MAX` apart."""
        began = self._machine.time()
        from_monotonic = began - self._machine.monotonic()
        if self._looked_at is not None and abs(from_monotonic - self._looked_at) < STEP_S:
            return
        stored = self.stored_at()
        if not began - CLOCK_SKEW_S_MAX <= stored <= self._machine.time() + CLOCK_SKEW_S_MAX:
            ahead_s = began - stored
            raise ClockError(
                f"this machine's clock says {_when(began)}, the store's says {_when(stored)}: "
                f"{abs(ahead_s):.0f} s {'less' if ahead_s > 0 else 'more'}, and {CLOCK_SKEW_S_MAX:.0f} s are allowed. "
                "This commit was not made; set this machine's clock (NTP). What was prepared before stays pending, and "
                "a check settles it: send it again only under the same appId or idempotency key"
            )
        self._looked_at = from_monotonic

    def stored_at(self) -> float:
        """Write the probe file and return the store's time of it, in seconds since the epoch.

        A store that tells no time is believed to have this machine's.

        Raises
        ------
        CorruptLogError
            When the folder is gone.
        StorageError
            When it cannot be written to.
        """
        path = f"{self._folder}/{PROBE}"
        try:
            with writing(path), self._fs.open_output_stream(path) as stream:
                stream.write(b"txmq")
        except FileNotFoundError:
            raise CorruptLogError(
                f"the folder {self._folder} is not there: the commit log has lost a table. Restore it from a copy "
                "(docs/backup.md)"
            ) from None
        written = self._fs.get_file_info(path).mtime
        return self._machine.time() if written is None else float(written.timestamp())


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(sep=" ", timespec="seconds")
