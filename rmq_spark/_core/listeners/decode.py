"""Decodes JSON bodies into columns, and says which bodies do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.errors import MessageError, OptionError

RAISE, NULL = "raise", "null"
"""Ways in which :meth:`HalfBatch.decode` treats a body that is not a JSON object of the schema."""

_TYPES = {
    "long": pa.int64(), "bigint": pa.int64(), "int": pa.int32(), "integer": pa.int32(), "smallint": pa.int16(),
    "double": pa.float64(), "float": pa.float32(), "string": pa.string(), "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"), "date": pa.date32(),
}  # fmt: skip


def arrow_schema(schema: str | pa.Schema) -> pa.Schema:
    """Read Spark's DDL, or return an Arrow schema as it is."""
    if not isinstance(schema, str):
        return schema
    fields = []
    for column in re.split(r",(?![^(<]*[)>])", schema):
        name, _, kind = column.strip().partition(" ")
        fields.append((name, _arrow_type(kind.strip().lower(), schema)))
    return pa.schema(fields)


def _arrow_type(kind: str, ddl: str) -> pa.DataType:
    if kind in _TYPES:
        return _TYPES[kind]
    if match := re.fullmatch(r"decimal\((\d+),\s*(\d+)\)", kind):
        with suppress(ValueError):  # a decimal has fewer digits
            return pa.decimal128(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"array<(.+)>", kind):
        return pa.list_(_arrow_type(match[1].strip(), ddl))
    raise MessageError(f"cannot read the type {kind!r} in schema {ddl!r}: known are {', '.join(_TYPES)}, decimal(p,s)")


BAD_COUNTED_MAX = 1_000
"""Bad bodies that an error counts at most. When all of a million are bad, a full count could take minutes."""


def decode_json(
    bodies: pa.ChunkedArray, schema: str | pa.Schema, on_error: str = RAISE, name_of: Callable[[int], str] | None = None
) -> pa.Table:
    """Return JSON bodies as an Arrow table with this schema (see :meth:`HalfBatch.decode`).

    Parameters
    ----------
    name_of : callable, optional
        Returns the name of a row's message, for the error.
    """
    if on_error not in (RAISE, NULL):
        raise OptionError(f"on_error={on_error!r} is not one of {RAISE!r}, {NULL!r}")
    target = arrow_schema(schema)
    table, bad = read_bodies(bodies, target, BAD_COUNTED_MAX if on_error == RAISE else None)
    if bad and on_error == RAISE:
        first = min(bad)
        name = "" if name_of is None else f" ({name_of(first)})"
        count = f"{BAD_COUNTED_MAX:,} or more" if len(bad) >= BAD_COUNTED_MAX else f"{len(bad):,}"
        raise MessageError(
            f"the body of row {first}{name} is not a JSON object of schema {_in_words(target)}: {bad[first]}. Of "
            f"{len(bodies):,} bodies {count} cannot be decoded; on_error='null' makes nulls of all their fields"
        )
    return table


def read_bodies(
    bodies: pa.ChunkedArray, target: pa.Schema, bad_max: int | None = None
) -> tuple[pa.Table, dict[int, str]]:
    """Return a row for each JSON body, and why bodies cannot be read, by row. All fields of such a row are null.

    The search ends after ``bad_max`` bad bodies. Rows of bodies that were not read by then are null, too.
    """
    if len(bodies) == 0:
        return target.empty_table(), {}
    array = pa.chunked_array(bodies).combine_chunks() if isinstance(bodies, list) else bodies.combine_chunks()
    bad = _find_non_objects(array)
    if not bad:
        with suppress(pa.ArrowInvalid):
            return _read_objects(array, target), bad
    tables, good_rows = _read_good(array, target, bad, len(array) if bad_max is None else bad_max)
    # Rows that were not read get a null index, and so nulls.
    index = pc.index_in(pa.array(range(len(array)), pa.int64()), value_set=pa.array(good_rows, pa.int64()))
    return pa.concat_tables([*tables, target.empty_table()]).take(index) if good_rows else _nulls(
        target, len(array)
    ), bad


def _find_non_objects(bodies: pa.Array) -> dict[int, str]:
    """Return why bodies are not exactly one JSON object, by row. Regular expressions pick suspects for Python to parse.

    pyarrow ends the process with a segmentation fault when it finds ``null`` instead of an object.
    """
    begins_object = pc.match_substring_regex(bodies, r"^\s*\{")
    has_more = pc.match_substring_regex(bodies, r"\}\s*[^\s,\]}]")  # text follows a }, which may be in a string
    reasons = _find_non_utf8(bodies)
    for row in pc.indices_nonzero(pc.or_(pc.invert(begins_object), has_more)).to_pylist():
        body = bodies[row].as_py()
        try:
            value = json.loads(body.decode() if isinstance(body, bytes) else body)
            if not isinstance(value, dict):
                reasons[row] = f"it is {type(value).__name__}" if value is not None else "it is null"
        except (ValueError, RecursionError) as problem:
            reasons[row] = str(problem)
    return reasons


def _find_non_utf8(bodies: pa.Array) -> dict[int, str]:
    """Return why bodies are not UTF-8, by row. pyarrow's reader would accept them as text."""
    with suppress(pa.ArrowInvalid):
        pc.cast(bodies, pa.string())
        return {}
    reasons: dict[int, str] = {}
    for row, body in enumerate(bodies.cast(pa.binary()).to_pylist()):
        try:
            (body or b"").decode()
        except UnicodeDecodeError as problem:
            reasons[row] = f"it is not UTF-8: {problem.reason} at byte {problem.start}"
    return reasons


def _read_objects(bodies: pa.Array, target: pa.Schema) -> pa.Table:
    """Read bodies that each begin as an object does, or raise ArrowInvalid."""
    import pyarrow.json as pj

    as_one_list = pa.ListArray.from_arrays(pa.array([0, len(bodies)], pa.int32()), pc.cast(bodies, pa.binary()))
    joined = pc.binary_join(as_one_list, b"\n")[0].as_py()
    as_read = pa.schema([(field.name, _read_as(field.type)) for field in target])
    options = pj.ParseOptions(explicit_schema=as_read, newlines_in_values=True, unexpected_field_behavior="ignore")
    table = pj.read_json(pa.BufferReader(joined), parse_options=options,
                         read_options=pj.ReadOptions(block_size=max(len(joined) + 1, 1 << 16)))  # fmt: skip
    if table.num_rows != len(bodies):
        raise pa.ArrowInvalid(f"{len(bodies)} bodies hold {table.num_rows} JSON objects: one in each is expected")
    return pa.table([_as_type(table[field.name], field) for field in target], schema=target)


def _read_as(kind: pa.DataType) -> pa.DataType:
    """Return the type as which pyarrow shall read a field: it takes numbers for dates, and refuses dates."""
    if pa.types.is_list(kind):
        return pa.list_(_read_as(kind.value_type))
    return pa.timestamp("s") if pa.types.is_date32(kind) else kind


def _as_type(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    typed = column.cast(field.type)
    if not typed.cast(column.type).equals(column):
        raise pa.ArrowInvalid(f"field {field.name!r} has a time of day, and a date is expected")
    return typed


def _read_good(
    bodies: pa.Array, target: pa.Schema, bad: dict[int, str], bad_max: int
) -> tuple[list[pa.Table], list[int]]:
    """Read the good bodies, halving each part that fails, and return them with their rows.

    Adds the bad rows to ``bad``, from left to right, until it has ``bad_max``.
    """
    tables: list[pa.Table] = []
    good_rows: list[int] = []
    remaining = [[row for row in range(len(bodies)) if row not in bad]]
    while remaining and len(bad) < bad_max:
        rows = remaining.pop()
        if not rows:
            continue
        try:
            tables.append(_read_objects(bodies.take(pa.array(rows, pa.int64())), target))
            good_rows += rows
        except pa.ArrowInvalid as problem:
            if len(rows) == 1:
                bad[rows[0]] = _reason(problem)[:200]
            else:
                half = len(rows) // 2
                remaining += [rows[half:], rows[:half]]
    return tables, good_rows


_OTHER_KIND = re.compile(r"Column\(/(.*)\) changed from (\w+) to (\w+)", re.DOTALL)
_KINDS = {
    "string": "a string", "number": "a number", "number_or_string": "a number or a string", "boolean": "a boolean",
    "array": "an array", "object": "an object",
}  # fmt: skip


def _reason(problem: pa.ArrowInvalid) -> str:
    """Return why the only body cannot be read, without pyarrow's words for the types of JSON."""
    text = re.sub(r" in row \d+", "", str(problem).removeprefix("JSON parse error: ").strip())
    match = _OTHER_KIND.fullmatch(text)
    if match is None:
        return text.replace("timestamp[s]", "a date")  # see _read_as
    name, wanted, found = match.groups()
    return f"field {name!r} is {_KINDS.get(found, found)}, and {_KINDS.get(wanted, wanted)} is expected"


def _nulls(target: pa.Schema, rows: int) -> pa.Table:
    return pa.table([pa.nulls(rows, field.type) for field in target], schema=target)


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
