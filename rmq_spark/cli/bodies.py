"""Message bodies for a terminal: shortened, and with control characters escaped."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any

import typer

from rmq_spark.cli.text import escaped, short

BYTES_SHOWN = 4096
HEX_WIDTH = 16
PEEKED_BYTES = 24
"""Bytes of a binary body that one line shows."""


class BodyForm(str, Enum):
    """How a body is shown."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"
    HEX = "hex"
    NONE = "none"


Form = Annotated[
    BodyForm,
    typer.Option(
        "--body", help="How bodies are shown. auto: JSON where it is JSON, else text where it is UTF-8, else hex."
    ),
]
BodyBytes = Annotated[
    int, typer.Option("--body-bytes", min=1, help="So much of each body is shown; --json always has all of it.")
]


def shown(body: bytes | None, form: BodyForm, bytes_max: int = BYTES_SHOWN) -> str:
    """Return the first ``bytes_max`` bytes of a body as lines of text. Control characters are escaped, as ``\\x1b``."""
    if form is BodyForm.NONE or body is None:
        return ""
    if form is BodyForm.AUTO:
        form = _form_of(body)
    part = body[:bytes_max]
    if form is BodyForm.HEX:
        text = hex_dump(part)
    elif form is BodyForm.JSON:
        text, part = _pretty(body, bytes_max)
    else:
        text = escaped(part.decode(errors="backslashreplace"))
    if len(part) < len(body):
        text += f"\n… {len(part):,} of {len(body):,} bytes are shown (--body-bytes shows more)"
    return text


def peek(body: bytes) -> str:
    """Return the beginning of a body on one line: as text with control characters escaped, or in hex when the body is
    not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return short_hex(body)
    return escaped(short(body))


def short_hex(body: bytes) -> str:
    return body[:PEEKED_BYTES].hex(" ") + ("…" if len(body) > PEEKED_BYTES else "")


def _form_of(body: bytes) -> BodyForm:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return BodyForm.HEX
    if text.lstrip()[:1] in ("{", "["):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return BodyForm.TEXT
        return BodyForm.JSON
    return BodyForm.TEXT


def _pretty(body: bytes, bytes_max: int) -> tuple[str, bytes]:
    """Return a body as indented JSON, and the bytes shown. Text that is not JSON, or too long, is not indented."""
    if len(body) <= bytes_max:
        try:
            value: Any = json.loads(body)
            return "\n".join(map(escaped, json.dumps(value, indent=2, ensure_ascii=False).split("\n"))), body
        except (ValueError, RecursionError):
            pass
    part = body[:bytes_max]
    return escaped(part.decode(errors="backslashreplace")), part


def hex_dump(data: bytes) -> str:
    """Return bytes as ``xxd`` shows them: offset, hex digits, ASCII characters."""
    lines = []
    for offset in range(0, len(data), HEX_WIDTH):
        row = data[offset : offset + HEX_WIDTH]
        digits = " ".join(f"{byte:02x}" for byte in row)
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{offset:08x}  {digits:<{HEX_WIDTH * 3 - 1}}  {characters}")
    return "\n".join(lines)
