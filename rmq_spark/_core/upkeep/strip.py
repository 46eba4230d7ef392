"""Strips drained messages of their payload in half files that cannot leave yet.

A half file leaves when all its half batches are settled. One open message keeps it, with everything sent beside it; so
does a rollback that is kept for a look, or the last batch of a stream, which a restart may replay. So its drained
messages are stripped, and keep their address::

    row_no   what became of it         body, before          body, after
    0        committed, drained        {"order_id": 1, …}    –
    1        open                      {"order_id": 2, …}    {"order_id": 2, …}
    2        rolled back               {"order_id": 3, …}    {"order_id": 3, …}
    3        committed, not drained    {"order_id": 4, …}    {"order_id": 4, …}

A file with the same rows replaces it. A reader with an older plan recognizes a stripped row by its missing
``born_timestamp``, and looks for the message in the table ``messages``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.batch_state import RowState
from rmq_spark._core.log.half import HALF_SCHEMA
from rmq_spark._core.log.half_contents import LargeFile
from rmq_spark._core.messages.messages_table import drained_up_to
from rmq_spark._core.storage.row_range import PAYLOAD_COLUMNS, RowRange
from rmq_spark._core.storage.table import Change, live_paths, was_added
from rmq_spark._core.upkeep.leave import Graces
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.rows import arange, bytes_array
from rmq_spark.errors import CorruptLogError, HalfBatchLeftError, HalfBatchNotFoundError

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine

logger = logging.getLogger(__name__)

STRIPPED_BYTES_MIN = 64 * 1024
"""Smaller half files are left alone."""
STRIPPED_SHARE_MIN = 0.5
"""A file is rewritten when at least this share of the rows that have a payload lose it, so each row is written a few
times at most."""
FILES_AT_ONCE_MAX = 1_000
"""Half files that are stripped in one round."""
PLACED_COLUMNS = ("half_id", "version", "op_time", "count", "queue_offset")


class Stripper:
    """Strips half files of one commit log. No other thread may use its engine."""

    def __init__(self, engine: Engine, graces: Graces) -> None:
        self._engine = engine
        self._graces = graces
        self._rows: dict[str, int] = {}  # by half batch, in all its files

    def run(self, dry_run: bool = False) -> list[str]:
        """Strip the files of which enough rows are drained; return the paths that they had."""
        engine = self._engine
        engine.ledger.refresh()
        engine.half.table.refresh()
        files = engine.half.contents.large_files(STRIPPED_BYTES_MIN, engine.ledger.view.low_water)
        if not files:
            return []
        batches = engine.half.contents.all_batches().table
        self._rows = dict(zip(batches["half_id"].to_pylist(), batches["rows"].to_pylist(), strict=True))
        placed = self._placed({h for file in files for h in file.inside["half_id"].to_pylist()})
        # Archived half batches are drained, or nobody need look at them any more.
        archived = frozenset(engine.ledger.archived_rows()["half_id"].to_pylist())
        done: list[str] = []
        for file in files:
            try:
                going = self._drained_rows(file, placed, archived)
                if going is not None and self._strip(file, going, dry_run):
                    done.append(file.path)
            except (HalfBatchLeftError, HalfBatchNotFoundError):  # another process let it leave meanwhile
                continue
            except CorruptLogError as problem:  # one file that is lost or damaged does not stop the upkeep
                logger.warning("half file %s is not stripped of what is drained: %s", file.path, redacted(problem))
            if len(done) == FILES_AT_ONCE_MAX:
                break
        return done

    # ------------------------------------------------------------------ which rows
    def _placed(self, half_ids: Collection[str]) -> dict[str, int]:
        """By half id, how many messages are placed, of half batches whose placed messages are all drained and past the
        grace."""
        engine = self._engine
        where = pc.field("half_id").isin(sorted(half_ids)) & pc.field("queue_offset").is_valid()
        rows = engine.op_table.read(live_paths(engine.op_table), PLACED_COLUMNS, where)
        engine.messages_table.refresh()
        sums = rows.group_by("half_id", use_threads=False).aggregate(
            [("count", "sum"), ("version", "max"), ("op_time", "max")]
        )
        latest = engine.runtime.now() - timedelta(seconds=self._graces.reader_s)
        ripe = pc.and_(
            pc.less_equal(sums["version_max"], drained_up_to(engine.messages_table)),
            pc.less_equal(sums["op_time_max"], pa.scalar(latest, sums.schema.field("op_time_max").type)),
        )
        sums = sums.filter(ripe)
        counts = dict(zip(sums["half_id"].to_pylist(), sums["count_sum"].to_pylist(), strict=True))
        return {half_id: count for half_id, count in counts.items() if half_id not in engine.ledger.view.conflicts}

    def _drained_rows(self, file: LargeFile, placed: Mapping[str, int], archived: Collection[str]) -> pa.Table | None:
        """The rows of a file that may go: a table of ``half_id`` for half batches that go whole, or of ``row_no`` in a
        file of one half batch; None when they are too few."""
        inside = dict(zip(file.inside["half_id"].to_pylist(), file.inside["rows"].to_pylist(), strict=True))
        most = sum(rows if h in archived else min(rows, placed.get(h, 0)) for h, rows in inside.items())
        if most < STRIPPED_SHARE_MIN * sum(inside.values()):
            return None
        whole = [h for h in inside if h in archived or placed.get(h) == self._rows.get(h, -1)]
        if whole or len(inside) > 1:
            return pa.table({"half_id": pa.array(whole, pa.string())})
        (half_id,) = inside
        record = self._engine.half.get(half_id)
        state = self._engine.state_of(record, refresh=False)
        committed = state.rows_in((RowState.COMMITTED,))
        if committed.count != placed[half_id]:  # more was placed since we looked, and is not drained
            return None
        for file_no, bits in committed.items():
            if record.files[file_no].path == file.path:
                return pa.table({"row_no": pc.filter(arange(len(bits)), pc.equal(bytes_array(bits), 1))})
        return None

    # ------------------------------------------------------------------ one file
    def _strip(self, file: LargeFile, drained: pa.Table, dry_run: bool) -> bool:
        """Replace a file by one without the payload of some rows. Return False when too few of them have a payload."""
        table = self._engine.half.table
        (name,) = drained.column_names
        rows = table.read([file.path], [name, "born_timestamp"])
        has_payload = pc.is_valid(rows["born_timestamp"])
        fresh_count = (
            pc.sum(pc.and_(has_payload, pc.is_in(rows[name], value_set=drained[name].combine_chunks()))).as_py() or 0
        )
        if not fresh_count or fresh_count < STRIPPED_SHARE_MIN * pc.sum(has_payload).as_py():
            return False
        if dry_run:
            return True
        can_read_in_parts = file.inside.num_rows == 1 and pc.all(has_payload).as_py()
        tables = self._row_groups(file) if can_read_in_parts else [table.read([file.path])]
        keys = drained[name].combine_chunks()
        stripped = [_without_payload(rows, pc.is_in(rows[name], value_set=keys)) for rows in tables]
        if not stripped:  # another process has stripped the file since we looked
            return False
        written = table.write(pa.concat_tables(stripped))

        def propose(version: int) -> Change | None:
            if file.path not in live_paths(table):  # another process was faster
                return None
            # As old as the replaced file, since its half batches are prepared no later than before.
            return Change(add=[written], remove=[file.path], modification_time_ms=file.ms, data_change=False)

        committed = table.compare_and_set(propose, lambda change: all(was_added(table, f) for f in change.add))
        return committed is not None

    def _row_groups(self, file: LargeFile) -> Iterator[pa.Table]:
        """The rows of a file of one half batch, in parts, so that few payloads are in memory together."""
        half = self._engine.half
        half_id, count = file.inside["half_id"][0].as_py(), file.inside["rows"][0].as_py()
        for file_no, stored in half.get(half_id).files.items():
            if stored.path == file.path:
                whole_file = RowRange(file.path, half_id, file_no, count, ((0, count - 1),))
                yield from (rows for _, rows in half.table.read_range(whole_file, HALF_SCHEMA.names))


def _without_payload(rows: pa.Table, is_drained: pa.ChunkedArray) -> pa.Table:
    indices = pc.if_else(is_drained, pa.scalar(None, pa.int64()), arange(rows.num_rows))
    for name in PAYLOAD_COLUMNS:
        rows = rows.set_column(rows.column_names.index(name), name, rows[name].take(indices))
    return rows
