"""Times: the epoch, and UTC."""

from __future__ import annotations

from datetime import datetime, timezone

EPOCH = datetime.fromtimestamp(0, timezone.utc)


def utc(moment: datetime) -> datetime:
    """The time with a time zone. Without one it is taken for UTC, as databases return it."""
    return moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment
