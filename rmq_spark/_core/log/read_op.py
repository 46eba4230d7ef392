"""Op rows as they are read from the table. A row that rmq_spark cannot have written is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import KINDS, Who
from rmq_spark._core.vocabulary.options import ATTEMPTS_MAX
from rmq_spark.errors import CorruptLogError

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table

DECIDERS = pa.array([who.value for who in Who])
SHOWN = ("version", "half_id", "kind", "decided_by", "attempt", "count", "queue_offset", "next_offset", "op_time")


def read_op(
    op: Table, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
) -> pa.Table:
    """Read rows of files of ``op`` by ``Table.read``, and check them; see :func:`validate_op`."""
    return validate_op(op.read(paths, columns, where))


def validate_op(rows: pa.Table) -> pa.Table:
    """Return the op rows if each row by itself is possible. Contradictions with a half batch are found elsewhere, where
    the half batch is known. Rules about absent columns are skipped.

    CorruptLogError: a row has an unknown word, no time, an impossible attempt or count, offsets without a queue or not
    matching its count, or row ranges that are empty, overlap, or do not match its count.
    """
    if rows.num_rows == 0:
        return rows
    for problem, is_right in _rules(rows):
        if not pc.all(is_right).as_py():
            wrong = rows.filter(pc.invert(is_right)).slice(0, 1)
            shown = wrong.select([name for name in SHOWN if name in rows.column_names]).to_pylist()[0]
            text = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
            raise CorruptLogError(f"table op has a row with {problem} ({text}): it was changed by hand")
    return rows


def _rules(rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    """Yield each fault that op rows may have, and which rows are free of it."""
    columns = set(rows.column_names)
    if "kind" in columns:
        yield "an unknown kind", pc.is_in(rows["kind"], value_set=pa.array(sorted(KINDS)))
    if "decided_by" in columns:
        yield "an unknown decider", _or_null(pc.is_in(rows["decided_by"], value_set=DECIDERS), rows["decided_by"])
    if "op_time" in columns:
        yield "no time", pc.is_valid(rows["op_time"])
    if "attempt" in columns:
        attempt = rows["attempt"]
        possible = pc.and_(pc.greater_equal(attempt, 1), pc.less_equal(attempt, ATTEMPTS_MAX))
        yield "an attempt that cannot be", _or_null(possible, attempt)
    if "count" in columns:
        yield "a count that cannot be", _true(pc.greater_equal(rows["count"], 0))
    if {"count", "queue_offset", "next_offset", "topic", "queue_id"} <= columns:
        offset, end = rows["queue_offset"], rows["next_offset"]
        right = pc.and_(pc.greater_equal(offset, 0), pc.equal(end, pc.add(offset, rows["count"])))
        right = pc.and_(right, pc.and_(pc.is_valid(rows["topic"]), pc.is_valid(rows["queue_id"])))
        yield "offsets that cannot be", pc.or_(_true(right), pc.and_(pc.is_null(offset), pc.is_null(end)))
    if {"count", "ranges"} <= columns:
        yield "rows that cannot be", _rows_right(rows)


def _rows_right(rows: pa.Table) -> pa.Array:
    """Which op rows name as many rows of half files as they count, in ascending ranges without overlap, or name all
    rows of their files. A row with an offset must name its rows, within its file."""
    ranges, count = rows["ranges"].combine_chunks(), rows["count"].combine_chunks()
    placed = pc.is_valid(rows["queue_offset"]) if "queue_offset" in rows.column_names else pa.scalar(False)
    if ranges.null_count == len(ranges):
        return pc.and_(pc.is_valid(count), pc.invert(placed))
    inner, of_row = pc.list_flatten(ranges), pc.list_parent_indices(ranges)
    first, last = (pc.struct_field(inner, name) for name in ("first", "last"))
    previous = pa.concat_arrays([pa.array([-1], pa.int64()), last.slice(0, max(0, len(last) - 1))])
    goes_on = pa.concat_arrays([pa.array([False]), pc.equal(of_row[1:], of_row[:-1])]) if len(of_row) else of_row
    lower_bound = pc.if_else(goes_on, previous, -1) if len(of_row) else previous.slice(0, 0)
    ascends = _true(pc.and_(pc.greater(first, lower_bound), pc.greater_equal(last, first)))
    sizes = pa.table({"row": of_row, "n": pc.add(pc.subtract(last, first), 1), "ascends": ascends, "last": last})
    sums = sizes.group_by("row", use_threads=False).aggregate([("n", "sum"), ("ascends", "all"), ("last", "max")])
    positions = pc.index_in(pa.array(range(rows.num_rows), pa.int64()), value_set=sums["row"].combine_chunks())
    right = _true(pc.and_(sums["ascends_all"].take(positions), pc.equal(sums["n_sum"].take(positions), count)))
    if "file_rows" in rows.column_names:
        inside = pc.less(sums["last_max"].take(positions), rows["file_rows"])
        right = pc.and_(right, pc.or_(_true(inside), pc.invert(placed)))
    return pc.or_(right, pc.and_(pc.is_null(ranges), pc.invert(placed)))


def _true(values: pa.Array) -> pa.Array:
    return pc.fill_null(values, False)


def _or_null(values: pa.Array, column: pa.Array) -> pa.Array:
    return pc.or_(_true(values), pc.is_null(column))
