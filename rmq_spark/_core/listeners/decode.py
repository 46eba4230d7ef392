"""Decodes JSON bodies into columns, and says which bodies do not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.errors import MessageError, OptionError

if TYPE_CHECKING:
    pass

from typing import TYPE_CHECKING

RAISE, NULL = "raise", "null"

if TYPE_CHECKING:
    pass


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
    for part in re.split(r",(?![^(<]*[)>])", schema):
        name, _, kind = part.strip().partition(" ")
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
"""So many bad bodies are counted for an error. To look for more could take minutes, when all of a million are bad."""


def decode_json(
    bodies: pa.ChunkedArray,
    schema: str | pa.Schema,
    on_error: str = RAISE,
    name_of: Callable[[int], str] | None = None,
) -> pa.Table:
    """Return JSON bodies as an Arrow table with this schema (see :meth:`HalfBatch.decode`).

    Parameters
    ----------
    name_of : callable, optional
        The name of the message of a row, for the error.
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
    """Return a row for each JSON body, and why some bodies cannot be read: by their rows, all whose fields are null.

    With ``bad_max`` it looks for no more than so many of these, and takes what follows for null.
    """
    if len(bodies) == 0:
        return target.empty_table(), {}
    text = pa.chunked_array(bodies).combine_chunks() if isinstance(bodies, list) else bodies.combine_chunks()
    bad = _no_objects(text)
    if not bad:
        with suppress(pa.ArrowInvalid):
            return _read_objects(text, target), bad
    parts, rows = _read_good(text, target, bad, len(text) if bad_max is None else bad_max)
    # Rows of which nothing was read get a null index, and so nulls.
    index = pc.index_in(pa.array(range(len(text)), pa.int64()), value_set=pa.array(rows, pa.int64()))
    return pa.concat_tables([*parts, target.empty_table()]).take(index) if rows else _nulls(target, len(text)), bad


def _no_objects(bodies: pa.Array) -> dict[int, str]:
    """Return the rows of bodies that are not one JSON object each, and why. Python looks only at those that may be
    none.

    pyarrow ends the process with a segmentation fault when it finds ``null`` instead of an object.
    """
    begins = pc.match_substring_regex(bodies, r"^\s*\{")
    goes_on = pc.match_substring_regex(bodies, r"\}\s*[^\s,\]}]")  # something follows a }, which may be in a string
    found = _no_texts(bodies)
    for row in pc.indices_nonzero(pc.or_(pc.invert(begins), goes_on)).to_pylist():
        body = bodies[row].as_py()
        try:
            made = json.loads(body.decode() if isinstance(body, bytes) else body)
            if not isinstance(made, dict):
                found[row] = f"it is {type(made).__name__}" if made is not None else "it is null"
        except (ValueError, RecursionError) as problem:
            found[row] = str(problem)
    return found


def _no_texts(bodies: pa.Array) -> dict[int, str]:
    """Return the rows of bodies that are no UTF-8, which pyarrow's reader takes for texts."""
    with suppress(pa.ArrowInvalid):
        pc.cast(bodies, pa.string())
        return {}
    found: dict[int, str] = {}
    for row, body in enumerate(bodies.cast(pa.binary()).to_pylist()):
        try:
            (body or b"").decode()
        except UnicodeDecodeError as problem:
            found[row] = f"it is not UTF-8: {problem.reason} at byte {problem.start}"
    return found


def _read_objects(text: pa.Array, target: pa.Schema) -> pa.Table:
    """Read bodies, each of which begins as an object does, or raise ArrowInvalid."""
    import pyarrow.json as pj

    whole = pa.ListArray.from_arrays(pa.array([0, len(text)], pa.int32()), pc.cast(text, pa.binary()))
    joined = pc.binary_join(whole, b"\n")[0].as_py()
    options = pj.ParseOptions(explicit_schema=target, newlines_in_values=True, unexpected_field_behavior="ignore")
    table = pj.read_json(pa.BufferReader(joined), parse_options=options,
                         read_options=pj.ReadOptions(block_size=max(len(joined) + 1, 1 << 16)))  # fmt: skip
    if table.num_rows != len(text):
        raise pa.ArrowInvalid(f"{len(text)} bodies hold {table.num_rows} JSON objects: one in each is expected")
    return table.select(target.names)


def _read_good(
    text: pa.Array, target: pa.Schema, bad: dict[int, str], bad_max: int
) -> tuple[list[pa.Table], list[int]]:
    """Read the bodies that can be read, by halves; returns them and their rows. Adds the others to ``bad``, from left
    to right, until it has so many."""
    parts: list[pa.Table] = []
    rows: list[int] = []
    left = [[row for row in range(len(text)) if row not in bad]]
    while left and len(bad) < bad_max:
        some = left.pop()
        if not some:
            continue
        try:
            parts.append(_read_objects(text.take(pa.array(some, pa.int64())), target))
            rows += some
        except pa.ArrowInvalid as problem:
            if len(some) == 1:
                said = re.sub(r" in row \d+", "", str(problem).removeprefix("JSON parse error: ").strip())
                bad[some[0]] = said[:200]
            else:
                half = len(some) // 2
                left += [some[half:], some[:half]]
    return parts, rows


def _nulls(target: pa.Schema, rows: int) -> pa.Table:
    return pa.table([pa.nulls(rows, field.type) for field in target], schema=target)


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


"""What :meth:`HalfBatch.decode` does about a body that is no JSON object of the schema."""
