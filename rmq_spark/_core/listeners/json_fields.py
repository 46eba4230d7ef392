"""Fields of JSON bodies, which become values of columns: what a field is read as, and how its value is converted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

EXACT_DIGITS = 15
"""Decimal digits that a double keeps. A numeric column that may have more is read as decimals, which takes longer."""
_DECIMAL = pa.decimal256(76, 38)
_UTC, _NAIVE = pa.timestamp("us", "UTC"), pa.timestamp("us")
_TRAILING_ZEROS = r"^(-?\d+)(?:\.0*|(\.\d*[1-9])0*)?(E.*)?$", r"\1\2\3"
"""Those of ``1.500`` and of ``1.500E-10``, whose exponent stays whole."""
_BLANK = re.compile(r"[ \t\n\r]*")


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


_DECODER = json.JSONDecoder(parse_constant=_refuse)

JSON, _DATE = "JSON value", "date"


def type_in_json(kind: sa.types.TypeEngine[Any], dialect: str) -> pa.DataType | str | None:
    """Return what a field of this column type is read as; None for a type that has no form in JSON."""
    postgres, lite = dialect == "postgresql", dialect == "sqlite"
    if isinstance(kind, postgresql.DOMAIN):
        return type_in_json(kind.data_type, dialect)
    if isinstance(kind, sa.Boolean) or (isinstance(kind, mysql.TINYINT) and kind.display_width == 1):
        return pa.bool_()
    if isinstance(kind, sa.Integer):
        return pa.int64() if lite else _integer(kind)
    if isinstance(kind, sa.Float):
        return pa.float32() if postgres and isinstance(kind, sa.REAL) else pa.float64()
    if isinstance(kind, sa.Numeric):
        return pa.float64() if lite or (kind.precision or EXACT_DIGITS + 1) <= EXACT_DIGITS else _DECIMAL
    if isinstance(kind, sa.JSON):
        return JSON
    if isinstance(kind, sa.DateTime):
        return _UTC if postgres and kind.timezone else _NAIVE
    if isinstance(kind, sa.Date):
        return _DATE
    if isinstance(kind, sa.ARRAY):
        item = type_in_json(kind.item_type, dialect)
        return pa.list_(item) if isinstance(item, pa.DataType) else None
    if isinstance(kind, (sa.LargeBinary, sa.BINARY, sa.VARBINARY)) or (lite and isinstance(kind, sa.Time)):
        return None
    return pa.string()  # PostgreSQL converts text to other types: uuid, enum, inet, interval, time


def _integer(kind: sa.Integer) -> pa.DataType:
    signed = not getattr(kind, "unsigned", False)
    if isinstance(kind, sa.BigInteger):
        return pa.int64() if signed else pa.uint64()
    if isinstance(kind, sa.SmallInteger):
        return pa.int16() if signed else pa.uint16()
    if isinstance(kind, mysql.TINYINT):
        return pa.int8() if signed else pa.uint8()
    return pa.int32() if signed else pa.uint32()


def read_as(kind: pa.DataType | str) -> pa.DataType:
    return _NAIVE if isinstance(kind, str) else kind


def convert(column: pa.ChunkedArray, kind: pa.DataType | str) -> tuple[pa.ChunkedArray, pa.ChunkedArray | None]:
    """Return the values for the table, and which fields do not fit the column; None where all fit."""
    if kind == _DATE:
        day = pc.floor_temporal(column, unit="day")
        misfits = pc.or_(pc.not_equal(day, column), pc.less(day, pa.scalar(datetime.min, _NAIVE)))
        return pc.cast(day, pa.date32()), pc.fill_null(misfits, False)
    if kinds.is_floating(column.type):  # the reader accepts NaN, Infinity and numbers too large for 32 bits
        return column, pc.fill_null(pc.invert(pc.is_finite(column)), False)
    if kind == _DECIMAL:
        return pc.replace_substring_regex(pc.cast(column, pa.string()), *_TRAILING_ZEROS), None
    return column, None


def fields_of(body: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the JSON text of each field, so that numbers keep all digits; None for null."""
    position = _after_blanks(body, _after_blanks(body, 0) + 1)
    while body[position] != "}":
        name, position = scanstring(body, position + 1)
        start = _after_blanks(body, _after_blanks(body, position) + 1)
        value, position = _DECODER.raw_decode(body, start)
        yield name, None if value is None else body[start:position]
        position = _after_blanks(body, position)
        if body[position] == ",":
            position = _after_blanks(body, position + 1)


def _after_blanks(body: str, position: int) -> int:
    blanks = _BLANK.match(body, position)
    return position if blanks is None else blanks.end()
