"""Compares a writer's clock with the store's: the ages in a log come from the clocks of many machines."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from rmq_spark._core.runtime.runtime import Runtime
from rmq_spark._core.storage.store_errors import writing
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark.errors import ClockError, CorruptLogError

PROBE = "_clock"
"""A small file in a table's folder that each comparison rewrites. Delta ignores names that begin with ``_``."""
STEP_S = 1.0
"""A clock that gains or loses this many seconds on the monotonic clock is compared with the store's again."""


class StoreClock:
    """Compares this machine's clock with that of the store that holds a table.

    The first comparison precedes the process's first write. Another follows when the machine's clock was set or has
    drifted. On a local disk the two are one clock and always agree.
    """

    def __init__(self, fs: Any, folder: str, runtime: Runtime) -> None:
        self._fs, self._folder, self._runtime = fs, folder, runtime
        self._looked_at: float | None = None  # clock minus monotonic clock, when the clock last agreed with the store's

    def require_near(self) -> None:
        """Raise ClockError when the two clocks are more than :data:`CLOCK_SKEW_S_MAX` apart."""
        before_s = self._runtime.time()
        offset_s = before_s - self._runtime.monotonic()
        if self._looked_at is not None and abs(offset_s - self._looked_at) < STEP_S:
            return
        store_s = self.stored_at()
        if not before_s - CLOCK_SKEW_S_MAX <= store_s <= self._runtime.time() + CLOCK_SKEW_S_MAX:
            ahead_s = before_s - store_s
            raise ClockError(
                f"this machine's clock says {_utc_text(before_s)}, the store's says {_utc_text(store_s)}: "
                f"{abs(ahead_s):.0f} s {'less' if ahead_s > 0 else 'more'}, and {CLOCK_SKEW_S_MAX:.0f} s are allowed. "
                "This commit was not made; set this machine's clock (NTP). What was prepared before stays pending, and "
                "a check settles it: send it again only under the same appId or idempotency key"
            )
        self._looked_at = offset_s

    def stored_at(self) -> float:
        """Write the probe file and return the time that the store gives it, in seconds since the epoch; this machine's
        time when the store gives none. CorruptLogError: the folder is gone. StorageError: it cannot be written to."""
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
        return self._runtime.time() if written is None else float(written.timestamp())


def _utc_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(sep=" ", timespec="seconds")
