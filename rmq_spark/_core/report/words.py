"""Numbers, sizes and times as people read them."""

from __future__ import annotations

_DURATIONS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
_AMOUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float) -> str:
    """``0.2 s``, ``45 s``, ``2 min 30 s``, ``3 h 5 min``, ``2 d 6 h``: two units at most."""
    if seconds < 1:
        return f"{seconds:.2f} s" if seconds >= 0.005 else "0 s"
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    rest = round(seconds)
    for at, (length, unit) in enumerate(_DURATIONS):
        if rest >= length:
            whole, rest = divmod(rest, int(length))
            smaller = _DURATIONS[at + 1] if at + 1 < len(_DURATIONS) else None
            part = int(rest // smaller[0]) if smaller else 0
            return f"{whole} {unit}" + (f" {part} {smaller[1]}" if smaller and part else "")
    return "0 s"


def size(count: float) -> str:
    """``0 B``, ``812 B``, ``4.2 MB``: powers of 1000."""
    at = 0
    while count >= 999.5 and at < len(_SIZES) - 1:
        count, at = count / 1000, at + 1
    return f"{count:.0f} {_SIZES[at]}" if at == 0 or count >= 99.5 else f"{count:.1f} {_SIZES[at]}"


def amount(count: float) -> str:
    """``950``, ``12.4k``, ``3.1M``."""
    for length, unit in _AMOUNTS:
        if count >= length:
            shown = count / length
            return f"{shown:.0f}{unit}" if shown >= 99.5 else f"{shown:.1f}{unit}"
    return f"{count:,.0f}"


def rate(count: float, seconds: float) -> str:
    """``3.2 a second``, ``150 an hour``: in the smallest unit that gives a number of 1 or more, and is no longer than
    the time; else ``0.6 a minute``."""
    if count == 0 or seconds <= 0:
        return ""
    for length, unit in ((1.0, "a second"), (60.0, "a minute"), (3600.0, "an hour"), (86400.0, "a day")):
        each = count * length / max(seconds, length)
        if length > max(seconds, 60.0):
            break
        if each >= 1:
            number = f"{each:.1f}".removesuffix(".0") if each < 10 else amount(round(each))
            return f"{number} {unit}"
    each = count * 60 / max(seconds, 60.0)
    return f"{each:.1f} a minute" if each >= 0.1 else ""


def have(count: int) -> str:
    """The verb of so many."""
    return "has" if count == 1 else "have"


def are(count: int) -> str:
    """The verb of so many."""
    return "is" if count == 1 else "are"
