"""Text that ``txmq`` prints. The content of messages must not control the terminal."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

from rmq_spark._core.vocabulary.redaction import one_line as one_line
from rmq_spark._core.vocabulary.text import byte_size, duration

BODY_CHARS_SHOWN = 80


def escaped(text: str) -> str:
    """Return the text with line ends and control characters as Python writes them: ``\\n``, ``\\x1b``, ``\\u202e``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def short(body: bytes) -> str:
    """Return the beginning of a body, as text."""
    return short_text(body[: BODY_CHARS_SHOWN * 4].decode(errors="replace"))


def short_text(text: str) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= BODY_CHARS_SHOWN else text[: BODY_CHARS_SHOWN - 1] + "…"


def short_time(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}Z"


def plain(value: object) -> object:
    """Return a value for JSON: a time as ISO text, others as they are."""
    return value.isoformat() if isinstance(value, datetime) else value


def json_message(row: dict[str, Any]) -> dict[str, Any]:
    """Return a message for JSON: its body is in ``body`` when it is UTF-8, else in ``body_base64``."""
    body: bytes | None = row.pop("body")
    content: dict[str, Any]
    try:
        content = {"body": None if body is None else body.decode()}
    except UnicodeDecodeError:
        content = {"body_base64": base64.b64encode(body or b"").decode()}
    properties = None if row["properties"] is None else dict(row["properties"])
    return {**{k: plain(v) for k, v in row.items()}, "properties": properties, **content}


def as_json(row: dict[str, Any]) -> str:
    """Return a row as a JSON object on one line."""
    return json.dumps({k: plain(v) for k, v in row.items()})


def short_age(seconds: float | None) -> str:
    """Return a duration as people read it, as in ``3h 12m``; an empty string for None."""
    return "" if seconds is None else duration(seconds)


def size(number: float | None) -> str:
    """Return bytes as people read them, as in ``1.4 MB``; an empty string for None."""
    return "" if number is None else byte_size(number)
