"""Values that nobody should pass, and some that one may: drawn from a seeded random generator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa

ODD_TEXTS: Sequence[str] = (
    "",
    " ",
    "\x00",
    "\n",
    "é",
    "名前",
    "😀",
    "\ud800",
    "١٢",
    "²",
    "a" * 300,
    "*",
    "||",
    "TagA || TagB",
    "TagA||",
    "..",
    "../x",
    "/etc/passwd",
    "file:///etc/passwd",
    "s3://bucket/x",
    "C:\\x",
    "%RETRY%g",
    "rmq_sys_x",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "null",
    "None",
    "true",
    "TRUE",
    "0",
    "-1",
    "-0",
    "1e9",
    "NaN",
    "inf",
    "9" * 19,
    "9" * 400,
    "1_000",
    "0x10",
    "1.5",
    "6s",
    "6",
    "-6s",
    "6 s",
    "1e3s",
    "9" * 400 + "d",
    "٣s",
    "latest",
    "earliest",
    "EARLIEST ",
    "{}",
    "[]",
    '{"orders": {"0": 1}}',
    '{"orders": {"0": ' + "9" * 30 + "}}",
    '{"orders": {"0": NaN}}',
    '{"\\ud800": {"0": 0}}',
    "2025-03-01T08:00:00Z",
    "1740816000000",
    "orders",
    "orders,points",
    "points",
    "(",
    ".*",
    "fail",
    "unknown",
    "batch",
    "message",
    "key",
    "none",
    "module:attribute",
    "os:system",
    "$(reboot)",
    "'; drop table half; --",
)

ODD_NUMBERS: Sequence[float | int | Decimal] = (
    0, 1, -1, 2, 255, 256, 1024, 1025, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 0.0, -0.5, 1.5, 1e308,
    math.inf, -math.inf, math.nan, Decimal("1.10"), Decimal("NaN"),
)  # fmt: skip

UTC = timezone.utc
ODD_TIMES: Sequence[Any] = (
    datetime(2025, 3, 1, tzinfo=UTC),
    datetime(2025, 3, 1),
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(2025, 3, 1, tzinfo=timezone(timedelta(hours=14))),
    datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
    datetime(2262, 1, 1, tzinfo=UTC),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
    datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-14))),
    date(2025, 3, 1),
)
EDGES: Sequence[Any] = (
    None, True, False, math.nan, math.inf, -math.inf, 1e300, -1, 0, 1, 0.5, 2**31 - 1, 2**31, 2**63 - 1, 2**63,
    -(2**63), 10**400, "", " ", "\x00", "a\x00b", "\ud800", "x" * 2**20, b"x", b"",
    timedelta(seconds=5), Decimal("NaN"), [], {}, ["a"], {"a": 1}, *ODD_TIMES,
)  # fmt: skip
"""What an argument is not meant to be, and what it may just be."""


def text(rng: random.Random) -> str:
    """A text: an odd one, a mixture of two, or noise."""
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(ODD_TEXTS)
    if kind < 0.8:
        return rng.choice(ODD_TEXTS)[:40] + rng.choice(ODD_TEXTS)[:40]
    alphabet = "abcAB019 _-%|.:/\\{}[]\",'\t\x7f\u00e9\u4e2d\U0001f600"
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(24)))


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A Python value of any kind."""
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice((True, False)),
        lambda: rng.choice(ODD_NUMBERS),
        lambda: rng.randint(-5, 5),
        lambda: text(rng),
        lambda: text(rng),
        lambda: text(rng).encode("utf-8", "surrogatepass"),
        lambda: rng.choice(ODD_TIMES),
        lambda: object(),
        lambda: len,
        lambda: str,
    ]
    if depth < 2:
        makers += [
            lambda: [anything(rng, depth + 1) for _ in range(rng.randrange(3))],
            lambda: tuple(anything(rng, depth + 1) for _ in range(rng.randrange(3))),
            lambda: {text(rng): anything(rng, depth + 1) for _ in range(rng.randrange(3))},
        ]
    return rng.choice(makers)()


# ---------------------------------------------------------------- Arrow
STRINGS = pa.string()
ARROW_KINDS: Sequence[pa.DataType] = (
    pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint32(), pa.uint64(), pa.float32(),
    pa.float64(), pa.decimal128(10, 2), pa.string(), pa.large_string(), pa.string_view(), pa.binary(),
    pa.large_binary(), pa.binary_view(), pa.binary(3), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"),
    pa.timestamp("ns", "UTC"), pa.timestamp("s", "Asia/Tokyo"), pa.duration("s"), pa.list_(pa.string()),
    pa.large_list(pa.string()), pa.list_(pa.int64()), pa.list_(pa.string(), 2), pa.list_(pa.list_(pa.string())),
    pa.struct([("a", pa.string())]), pa.map_(pa.string(), pa.string()), pa.map_(pa.string(), pa.int64()),
    pa.map_(pa.int64(), pa.string()), pa.map_(pa.large_string(), pa.large_string()),
    pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.binary()),
    pa.dictionary(pa.int32(), pa.int64()),
)  # fmt: skip


EDGE_SECONDS = (
    0, -1, 1_740_830_400, 1_740_830_400_000, 9_214_646_399, 9_214_646_400, -62_135_596_800, 253_402_300_800,
)  # fmt: skip
"""1970, just before, a day of 2025, its milliseconds, the last second of 2261, the next, the years 1 and 10000."""


def _utf8(rng: random.Random) -> str:
    return text(rng).encode("utf-8", "ignore").decode()


def arrow_value(rng: random.Random, kind: pa.DataType, nulls: float) -> Any:
    """A value that Arrow takes for a type."""
    t = pa.types
    if t.is_null(kind) or rng.random() < nulls:
        return None
    if t.is_dictionary(kind):
        return arrow_value(rng, kind.value_type, nulls)
    if t.is_boolean(kind):
        return rng.random() < 0.5
    if t.is_integer(kind):
        signed = t.is_signed_integer(kind)
        least = -(2 ** (kind.bit_width - 1)) if signed else 0
        return rng.choice((0, 1, 2, 3, 100, 0, 1, least, 2 ** (kind.bit_width - signed) - 1))
    if t.is_floating(kind):
        return rng.choice((0.0, 1.5, math.nan))
    if t.is_decimal(kind):
        return Decimal("1.10")
    if t.is_fixed_size_binary(kind):
        return b"abc"
    if "string" in str(kind) and not t.is_nested(kind):
        return _utf8(rng)
    if "binary" in str(kind):
        return rng.choice((b"", b"\xff\xfe", b"x" * 100, _utf8(rng).encode()))
    if t.is_date(kind):
        return date(2025, 3, 1)
    if t.is_timestamp(kind):
        if rng.random() < 0.7:
            return datetime(2025, 3, 1, 12, tzinfo=UTC if kind.tz else None)
        scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        whole = [n * scale for n in EDGE_SECONDS if abs(n * scale) < 2**63]
        return rng.choice((*whole, -(2**63), 2**63 - 1))
    if t.is_duration(kind):
        return timedelta(seconds=5)
    if t.is_fixed_size_list(kind):
        return [arrow_value(rng, kind.value_type, nulls) for _ in range(kind.list_size)]
    if t.is_map(kind):
        keys = {arrow_value(rng, kind.key_type, 0.0) for _ in range(rng.randrange(3))}
        return [(key, arrow_value(rng, kind.item_type, nulls)) for key in sorted(keys, key=repr)]
    if t.is_struct(kind):
        return {field.name: arrow_value(rng, field.type, nulls) for field in kind}
    return [arrow_value(rng, kind.value_type, nulls) for _ in range(rng.randrange(3))]


def arrow_column(rng: random.Random, kind: pa.DataType, rows: int, nulls: float) -> pa.ChunkedArray:
    """A column of a type: in one chunk, in several, or a slice of a longer one."""
    extra = rng.choice((0, 0, 2))
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    column = pa.array([arrow_value(rng, plain, nulls) for _ in range(rows + 2 * extra)], plain)
    if pa.types.is_dictionary(kind):
        column = column.dictionary_encode()
    column = column.slice(extra, rows)
    if rows > 1 and rng.random() < 0.3:
        return pa.chunked_array([column.slice(0, 1), column.slice(1)])
    return pa.chunked_array([column])
