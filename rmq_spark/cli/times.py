"""Times that a person types: a point in time, or how long ago it was."""

from __future__ import annotations

from datetime import datetime, timedelta

from rmq_spark._core.vocabulary.options import parse_duration
from rmq_spark.errors import OptionError


def time_of(text: str, now: datetime, option: str) -> datetime:
    """Parse a point in time, or a duration before now.

    Raises
    ------
    OptionError
        When the text is neither.
    """
    from rmq_spark._core.reads.offsets import parse_timestamp

    try:
        return now - timedelta(seconds=parse_duration(text, option))
    except OptionError:
        pass
    try:
        return parse_timestamp(text, option)
    except OptionError as problem:
        raise OptionError(f"{problem.problem}; or as a time ago, such as 2h", argument=option) from None
