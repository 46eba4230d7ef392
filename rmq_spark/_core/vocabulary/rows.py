"""Rows by their numbers, and sets of rows of a half batch: the pending ones, those that a verdict is for, those that an
op row names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

Ranges = tuple[tuple[int, int], ...]
"""The first and the last row of each run of rows, ascending."""

_RUN = re.compile(rb"\x01+")
_OPPOSITE = bytes([1, 0, *range(2, 256)])


class RowSet(Mapping[int, bytes]):
    """An immutable set of rows of one half batch. It has a byte for each row of a half file, by file number: 1 for a
    row in the set, 0 for any other. Files without a row in the set are left out, and an empty set is false."""

    __slots__ = ("_count", "_files")

    def __init__(self, files: Mapping[int, bytes | bytearray] | None = None) -> None:
        items = (files or {}).items()
        self._files = {n: bytes(b) for n, b in (items if len(items) < 2 else sorted(items)) if b"\x01" in b}
        self._count = -1

    def __getitem__(self, file_no: int) -> bytes:
        return self._files[file_no]

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def __len__(self) -> int:
        """The number of half files with a row in the set; :attr:`count` is the number of rows."""
        return len(self._files)

    def __repr__(self) -> str:
        return f"RowSet({ {n: runs(bits) for n, bits in self._files.items()} })"

    def __and__(self, other: Mapping[int, bytes | bytearray]) -> RowSet:
        other = other._files if isinstance(other, RowSet) else other
        if not (self._files and other):
            return NO_ROWS
        if self._files == other:
            return self
        return RowSet({n: both(bits, other[n]) for n, bits in self._files.items() if n in other})

    def __sub__(self, other: Mapping[int, bytes | bytearray]) -> RowSet:
        """Rows that are not in the other set."""
        if not (self._files and other):
            return self
        return RowSet(
            {n: both(bits, other[n].translate(_OPPOSITE)) if n in other else bits for n, bits in self._files.items()}
        )

    @property
    def count(self) -> int:
        if self._count < 0:
            self._count = sum([bits.count(1) for bits in self._files.values()])
        return self._count

    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        """The runs of rows of each half file, by file number."""
        for file_no, bits in self._files.items():
            yield file_no, runs(bits)

    def first(self, count: int) -> RowSet:
        """The first ``count`` rows, in send order."""
        files: dict[int, bytes] = {}
        for file_no, bits in self._files.items():
            end = 0
            while count and (at := bits.find(1, end)) >= 0:
                end, count = at + 1, count - 1
            files[file_no] = bits[:end] + bytes(len(bits) - end)
        return RowSet(files)

    def where(self, chosen: pa.BooleanArray | pa.ChunkedArray) -> RowSet:
        """The rows for which ``chosen`` is true. It has a value for each row of the set, in send order."""
        flat = chosen.combine_chunks() if isinstance(chosen, pa.ChunkedArray) else chosen
        files: dict[int, bytes] = {}
        start = 0
        for file_no, bits in self._files.items():
            count = bits.count(1)
            files[file_no] = _put_back(bits, flat.slice(start, count))
            start += count
        return RowSet(files)


NO_ROWS = RowSet()


def runs(bits: bytes | bytearray, start: int = 0, end: int | None = None) -> Ranges:
    """The runs of bytes that are 1, from ``start`` to ``end``."""
    return tuple((m.start(), m.end() - 1) for m in _RUN.finditer(bits, start, len(bits) if end is None else end))


def bits_in(ranges: Ranges, rows: int) -> bytes:
    """A byte for each of ``rows`` rows: 1 for those in the ranges."""
    bits = bytearray(rows)
    for first, last in ranges:
        bits[first : last + 1] = b"\x01" * (last - first + 1)
    return bytes(bits)


def ranges_count(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges)


def both(a: bytes | bytearray, b: bytes | bytearray) -> bytes:
    """Bitwise and of two byte strings of the same length."""
    if a == b:
        return bytes(a)
    joined = int.from_bytes(a, "little") & int.from_bytes(b, "little")
    return joined.to_bytes(len(a), "little")


def bits_of(values: pa.BooleanArray | pa.ChunkedArray) -> bytes:
    """A byte for each value: 1 for true, 0 for false and null."""
    return _bytes_in(_numbers_of(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values))


def booleans_of(bits: bytes | bytearray) -> pa.BooleanArray:
    """True for each byte that is 1."""
    return pc.equal(bytes_array(bits), 1)


def _put_back(bits: bytes, chosen: pa.BooleanArray) -> bytes:
    """A value for each row of a set, as a byte for each row of its file."""
    if bits.count(1) == len(bits):
        return bits_of(chosen)
    # pyarrow before 26 takes the wrong booleans of a slice.
    return _bytes_in(pc.replace_with_mask(bytes_array(bits), booleans_of(bits), _numbers_of(chosen)))


def _numbers_of(values: pa.BooleanArray) -> pa.UInt8Array:
    """1 for true, 0 for false and null."""
    return pc.cast(pc.fill_null(values, False), pa.uint8())


def _bytes_in(numbers: pa.UInt8Array) -> bytes:
    if not len(numbers):
        return b""
    return bytes(memoryview(numbers.buffers()[1])[numbers.offset : numbers.offset + len(numbers)])


def bytes_array(values: bytes | bytearray) -> pa.Array:
    """Return the bytes as a uint8 array, without a copy."""
    return pa.Array.from_buffers(pa.uint8(), len(values), [None, pa.py_buffer(values)])


def arange(rows: int, start: int = 0) -> pa.Array:
    """Return the int64 array of ``rows`` numbers from ``start`` on, made without a Python loop."""
    positions = pc.cast(pc.indices_nonzero(pa.repeat(pa.scalar(True), rows)), pa.int64())
    return pc.add(positions, start) if start else positions
