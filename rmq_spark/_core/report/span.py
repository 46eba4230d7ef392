"""The span of a report, and its periods, which are few enough to be drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.options import parse_duration
from rmq_spark.errors import OptionError

SINCE = "7d"
PERIODS_MAX = 60
"""The most columns of a chart over time."""
PERIODS_MIN = 20
PERIODS_S = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400, 28 * 86400)


@dataclass(frozen=True)
class Span:
    """The span of a report.

    Attributes
    ----------
    since, until : datetime
        From the first event on, once it is known.
    period_s : int
        Seconds of a chart's column. Periods begin at multiples of it since 1970.
    asked_s : float
        The length that was asked for.
    """

    since: datetime
    until: datetime
    period_s: int = PERIODS_S[0]
    asked_s: float = 0.0

    @classmethod
    def of(cls, engine: Engine, since: str) -> Span:
        """Return the span of a duration up to now, by the log's clock.

        Raises
        ------
        OptionError
            When ``since`` is no duration, or is not positive.
        """
        length_s = parse_duration(since, "since")
        if length_s <= 0:
            raise OptionError(f"{since!r} is no time: write how far back, such as '7d'", argument="since")
        now = engine.runtime.now()
        return cls(
            max(datetime.fromtimestamp(0, timezone.utc), now - timedelta(seconds=length_s)), now, asked_s=length_s
        )

    def around(self, first: datetime | None) -> Span:
        """Return the span from the first event, with the shortest periods of which few enough are needed."""
        begin = self.since if first is None else max(first, self.since)
        begin = max(self.since, min(begin, self.until - timedelta(seconds=PERIODS_MIN * PERIODS_S[0])))
        length_s = (self.until - begin).total_seconds()
        fitting = (period for period in PERIODS_S if length_s / period <= PERIODS_MAX - 1)
        return replace(self, since=begin, period_s=next(fitting, int(-(-length_s // (PERIODS_MAX - 1)))))

    def period_of(self, at: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the start of each time's period."""
        step = self.period_s * 1_000_000
        return pc.cast(pc.multiply(pc.divide(pc.cast(at, pa.int64()), step), step), TIMESTAMP)

    def period_start(self, at: datetime) -> datetime:
        """Return the start of a time's period."""
        return datetime.fromtimestamp(at.timestamp() // self.period_s * self.period_s, timezone.utc)
