"""The ``half`` table: preparing half batches, finding them again, and reading their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.half import HALF_SCHEMA, HalfFile, HalfRows, together
from rmq_spark._core.log.half_contents import HalfContents, single_batch_files
from rmq_spark._core.log.half_header import FIRST, HEADER_COLUMNS, HalfHeader, batch_name
from rmq_spark._core.log.half_record import HalfRecord, StoredFile, record_of, stored_files_of
from rmq_spark._core.log.shared_files import rows_by_batch
from rmq_spark._core.log.staged_batches import PrepareError, SharedFileWriter, Staged, require_each_once, require_staged
from rmq_spark._core.selector.tree import Filter
from rmq_spark._core.storage.file_system import require_path
from rmq_spark._core.storage.half_file_reader import RelocatingReader
from rmq_spark._core.storage.row_range import RowRange
from rmq_spark._core.storage.seal import PUT_BACK, RESTORE, require_count
from rmq_spark._core.storage.table import Change, Table, live_paths
from rmq_spark._core.vocabulary.options import ORPHAN_AGE_S
from rmq_spark._core.vocabulary.remedy import LIST_PENDING
from rmq_spark._core.vocabulary.rows import RowSet, booleans_of
from rmq_spark.errors import (
    AlreadyPreparedError,
    CorruptLogError,
    HalfBatchNotFoundError,
    LostFileError,
    StagedFilesTooOldError,
    StrippedError,
)

FOUND_COLUMNS = [*HEADER_COLUMNS, "file_no", "row_no", "topic", "queue_id", "deliver_at", "store_timestamp"]
SMALL_COLUMNS = [*FOUND_COLUMNS, "transaction_key", "properties"]
"""Columns that a check reads before it asks a listener."""
SMALL_SHARED_ROWS_MAX = 65_536
"""A shared file with at most this many rows is kept in memory, without payload."""


class HalfTable:
    def __init__(self, table: Table) -> None:
        self.table = table
        self._last_shared = "", pa.table({})  # path of a shared file, and its rows without payload
        self._files = RelocatingReader(lambda *arguments: self.table.read_range(*arguments), self.locate)
        self.contents = HalfContents(table)

    def write_shared(self, several: Sequence[HalfRows]) -> list[HalfFile]:
        rows = together(several)
        data = self.table.write(rows)
        self.contents.shared.remember(data.path, rows_by_batch(rows["half_id"]))
        return [half_rows.in_file(data) for half_rows in several]

    def prepare(
        self,
        staged: Sequence[Staged],
        after_ms: Callable[[], int] = lambda: 0,
        left_among: Callable[[Collection[str]], Collection[str]] = lambda names: (),
    ) -> list[HalfRecord | PrepareError]:
        """Commit the staged files of half batches in one commit. From here on the half batches exist, and no reader
        sees them. Each half batch comes once, and each application has at most one numbered half batch among them.

        ``after_ms`` returns the time (ms) after which they must be prepared: nobody searches below the low-water mark
        for open half batches. ``left_among`` takes names, and returns the names whose half batches have left the
        refreshed table.

        A refused half batch does not stop the others. Its result is AlreadyPreparedError (the log has this batch id, or
        a later one of the application) or StagedFilesTooOldError (vacuum may remove its files soon). Any other problem,
        such as a staged file that is gone or a store that does not answer, is raised, and nothing is prepared then.
        """
        for batch in staged:
            require_staged(batch.header, batch.files)
        require_each_once(staged)
        tried_ms: list[int] = []
        refused: dict[str, PrepareError] = {}
        shared = SharedFileWriter(self)
        files: dict[str, Sequence[HalfFile]] = {}  # of the last try, by half id

        def propose(version: int) -> Change | None:
            refused.clear()
            looked_for = [batch.header.name for batch in staged if batch.is_looked_for]
            known_names = {*self.contents.ids_named(looked_for), *left_among(looked_for)} if looked_for else set[str]()
            for batch in staged:
                if (problem := self._refusal(batch, known_names)) is not None:
                    refused[batch.header.half_id] = problem
            chosen = [batch for batch in staged if batch.header.half_id not in refused]
            if not chosen:
                return None
            files.clear()
            files.update(shared.written(chosen))
            tried_ms.append(max(self.table.runtime.time_ms(), self._last_prepared_ms() + 1, after_ms() + 1))
            return Change(
                add=list({f.data.path: f.data for batch_files in files.values() for f in batch_files}.values()),
                transactions={b.header.app_id: b.header.batch_id for b in chosen if b.header.numbered},
                modification_time_ms=tried_ms[-1],
            )

        def landed(change: Change) -> bool:
            live = {f.path for f in change.add}.intersection(live_paths(self.table))
            return all(self._was_prepared(half_id, batch_files, live) for half_id, batch_files in files.items())

        self.table.compare_and_set(propose, landed)
        times = self._times_of({f.data.path for batch_files in files.values() for f in batch_files})
        return [
            refused.get(b.header.half_id) or record_of(b.header, files[b.header.half_id], min(tried_ms), times)
            for b in staged
        ]

    def _refusal(self, batch: Staged, known_names: Collection[str]) -> PrepareError | None:
        """Why a half batch cannot be prepared now; None when it can. The log already has ``known_names``."""
        header, last_id = batch.header, None
        if header.numbered:
            last_id = self.table.transaction_version(header.app_id)
        elif batch.is_looked_for and header.name in known_names:
            last_id = header.batch_id
        if last_id is not None and last_id >= header.batch_id:
            return AlreadyPreparedError(
                f"batch {header.batch_id} of app {header.app_id!r} cannot be prepared: batch {last_id} is in the log"
            )
        if header.follows is not None and header.follows != (FIRST if last_id is None else last_id):
            return AlreadyPreparedError(
                f"batch {header.batch_id} of app {header.app_id!r} cannot be prepared: it was to follow batch "
                f"{header.follows}, and another process has prepared batch {last_id}"
            )
        age_s = self.table.runtime.time() - min(f.staged_at for f in batch.files)
        if age_s > ORPHAN_AGE_S / 2 and any(isinstance(f, HalfFile) for f in batch.files):
            return StagedFilesTooOldError(
                f"the files of half batch {header.half_id!r} were staged {age_s / 3600:.0f} h ago: vacuum may "
                "remove them soon; run the batch again"
            )
        return None

    def _times_of(self, paths: Collection[str]) -> dict[str, int]:
        """When files were prepared (ms), as :meth:`find` will see it: at the try that landed."""
        actions = self.table.actions()
        own_actions = actions.filter(pc.is_in(actions["path"], value_set=pa.array(paths, pa.string())))
        return dict(zip(own_actions["path"].to_pylist(), own_actions["modification_time"].to_pylist(), strict=True))

    def bytes_of(self, record: HalfRecord) -> int:
        """The bytes of a half batch's files in the present table; of a shared file, the half batch's share."""
        actions = self.table.actions()
        rows = {file.path: 0 for file in record.files.values()}
        for file in record.files.values():
            rows[file.path] += file.rows
        own_actions = actions.filter(pc.is_in(actions["path"], value_set=pa.array(rows, pa.string())))
        return sum(f["size_bytes"] * rows[f["path"]] // max(f["num_records"] or 1, 1) for f in own_actions.to_pylist())

    def sizes(self, paths: pa.ChunkedArray) -> dict[str, int]:
        """The bytes of those half files that are in the table now, by path."""
        self.table.refresh()
        actions = self.table.actions()
        own_actions = actions.filter(pc.is_in(actions["path"], value_set=pc.unique(paths)))
        sizes = zip(own_actions["path"].to_pylist(), own_actions["size_bytes"].to_pylist(), strict=True)
        return {path: size or 0 for path, size in sizes}

    def has(self, record: HalfRecord) -> bool:
        self.table.refresh()
        paths = pa.array({file.path for file in record.files.values()}, pa.string())
        if pc.sum(pc.is_in(self.table.actions()["path"], value_set=paths)).as_py() == len(paths):
            return True
        return self._find(record.half_id) is not None

    def newest_ms(self) -> int:
        """When the newest file was prepared (ms)."""
        self.table.refresh()
        return self._last_prepared_ms()

    def _last_prepared_ms(self) -> int:
        return pc.max(self.table.actions()["modification_time"]).as_py() or 0

    def _was_prepared(self, half_id: str, files: Sequence[HalfFile], live: Collection[str]) -> bool:
        paths = {f.data.path for f in files}
        if paths.issubset(live):
            return True
        # A file that is missing now was either added and removed since, by upkeep, or never added, because another
        # process won.
        return self.table.removed_since().issuperset(paths.difference(live))

    # ------------------------------------------------------------------ finding
    def find(self, app_id: str, batch_id: int) -> HalfRecord | None:
        """The half batch of an application and batch id; None when there is none."""
        self.table.refresh()
        half_ids = self.contents.ids_named([batch_name(app_id, batch_id)]).values()
        return next(map(self._find, half_ids), None)

    def get(self, half_id: str) -> HalfRecord:
        """The half batch of this id; HalfBatchNotFoundError when there is none."""
        self.table.refresh()
        may_be_id = isinstance(half_id, str) and half_id.isascii()
        record = self._find(half_id) if may_be_id else None
        if record is None:
            named = self.contents.ids_named([half_id]).get(half_id) if may_be_id else None
            missing = f"no half batch {half_id!r} in this commit log"
            if named is not None:
                raise HalfBatchNotFoundError(f"{missing}: the one of this name is {named!r} now")
            raise HalfBatchNotFoundError(missing, remedy=LIST_PENDING)
        return record

    def _find(self, half_id: str) -> HalfRecord | None:
        actions, problem = self.contents.files_that_may_hold(half_id)
        record = self._record_from(half_id, [(a, self._rows_in(a["path"], half_id)) for a in actions])
        if record is None and problem is not None:
            raise problem
        return record

    def _record_from(
        self, half_id: str, files_with_rows: Sequence[tuple[Mapping[str, Any], pa.Table]]
    ) -> HalfRecord | None:
        """The record of a half batch, from the files that may hold it, each with its rows there; None without rows."""
        files: dict[int, StoredFile] = {}
        header: HalfHeader | None = None
        prepared_ms = staged_ms = 0
        for action, rows in files_with_rows:
            if action["min.half_id"] == half_id == action["max.half_id"]:
                require_count(rows.num_rows, action["num_records"], action["path"], "half")
            if rows.num_rows == 0:
                continue
            if header is None:
                header = HalfHeader(**{c: rows[c][0].as_py() for c in HEADER_COLUMNS})
            stored_files = stored_files_of(action["path"], rows)
            staged_ms = max(staged_ms, int(pc.max(rows["store_timestamp"]).as_py().timestamp() * 1000))
            prepared_ms = max(prepared_ms, action["modification_time"])
            for file_no, stored in stored_files:
                if file_no in files:
                    raise CorruptLogError(
                        f"file {file_no} of half batch {half_id!r} lies in {files[file_no].path} and in {stored.path}: "
                        "table half was changed by hand"
                    )
                files[file_no] = stored
        if header is None:
            return None
        return HalfRecord(header, prepared_ms, dict(sorted(files.items())), staged_ms)

    def find_small(self, half_ids: Collection[str], rows_max: int) -> dict[str, tuple[HalfRecord, pa.Table]]:
        """The half batches that have at most ``rows_max`` rows, each with its rows in send order: the columns
        :data:`SMALL_COLUMNS`. All files are read together. A damaged file raises CorruptLogError; the half batches of a
        damaged shared file are left out."""
        self.table.refresh()
        actions = self.table.actions()
        is_single, low = single_batch_files(actions)
        ids = pa.array(sorted(half_ids), pa.string())
        single = actions.filter(pc.and_(is_single, pc.is_in(low, value_set=ids))).to_pylist()
        large = {a["min.half_id"] for a in single if a["num_records"] is None or a["num_records"] > rows_max}
        single = [a for a in single if a["min.half_id"] not in large]
        files_of: dict[str, list[tuple[Mapping[str, Any], pa.Table]]] = {}
        rows = self.table.read([a["path"] for a in single], SMALL_COLUMNS)
        half_ids_found = rows["half_id"].to_pylist()
        file_of_each = [a for a in single for _ in range(a["num_records"])]
        if half_ids_found != [a["min.half_id"] for a in file_of_each]:
            pairs = zip(file_of_each, half_ids_found, strict=True)
            wrong = next(a["path"] for a, half_id in pairs if half_id != a["min.half_id"])
            raise CorruptLogError(
                f"file {wrong} of table half has rows of other half batches than the Delta log says: {PUT_BACK}"
            )
        start = 0
        for action in single:
            rows_of_file = rows.slice(start, action["num_records"])
            start += action["num_records"]
            files_of.setdefault(action["min.half_id"], []).append((action, rows_of_file))
        shared = {action["path"]: action for action in actions.filter(pc.invert(is_single)).to_pylist()}
        for path, batches in self.contents.shared.readable(shared):
            action = shared[path]
            own_ids = batches["half_id"].filter(pc.is_in(batches["half_id"], value_set=ids)).to_pylist()
            if not own_ids:
                continue
            if not self.contents.shared.is_small(action["path"], SMALL_SHARED_ROWS_MAX):
                large.update(own_ids)
                continue
            file_rows = self.table.read([action["path"]], SMALL_COLUMNS)
            positions: dict[str, list[int]] = {}
            for position, half_id in enumerate(file_rows["half_id"].to_pylist()):
                positions.setdefault(half_id, []).append(position)
            for half_id in own_ids:
                files_of.setdefault(half_id, []).append((action, file_rows.take(positions[half_id])))
        small: dict[str, tuple[HalfRecord, pa.Table]] = {}
        for half_id in half_ids:
            batch_rows = pa.concat_tables(
                [rows_of_file for _, rows_of_file in files_of.get(half_id, ())] or [rows.slice(0, 0)]
            )
            if half_id not in large and 0 < batch_rows.num_rows <= rows_max:
                record = self._record_from(half_id, files_of[half_id])
                if record is not None:
                    in_order = [("file_no", "ascending"), ("row_no", "ascending")]
                    small[half_id] = record, batch_rows.sort_by(in_order) if batch_rows.num_rows > 1 else batch_rows
        return small

    def _rows_in(self, path: str, half_id: str) -> pa.Table:
        """The rows of a half batch in a file, without their payload."""
        file_rows = self._shared_rows(path)
        if file_rows is None:
            return self.table.read([path], FOUND_COLUMNS, pc.field("half_id") == half_id)
        return file_rows.filter(pc.equal(file_rows["half_id"], half_id))

    def _shared_rows(self, path: str) -> pa.Table | None:
        """All rows of a small shared file, without their payload; None for another file. The last file is kept: its
        half batches are read one after the other."""
        if not self.contents.shared.is_small(path, SMALL_SHARED_ROWS_MAX):
            return None
        if self._last_shared[0] != path:
            self._last_shared = path, self.table.read([path], FOUND_COLUMNS)
        return self._last_shared[1]

    def locate(self, half_id: str, file_no: int) -> str:
        """The path where a half file's rows lie now, for a reader whose hint is out of date. LostFileError: this handle
        does not see the half batch, so the rows that ``op`` names are lost."""
        try:
            record = self.get(half_id)
        except HalfBatchNotFoundError as problem:
            raise LostFileError(
                f"the files of half batch {half_id!r} are not where op says, and version {self.table.version} of table "
                "half has no such half batch: table half was set back to an older copy. Restore the newest one"
            ) from problem
        if file_no not in record.files:
            paths = ", ".join(file.path for file in record.files.values())
            raise CorruptLogError(
                f"half batch {half_id!r} has no file {file_no}, which op names: it has {paths}. {RESTORE.capitalize()}"
            )
        return record.files[file_no].path

    # ------------------------------------------------------------------ rows
    def has_payload(self, wanted: RowRange) -> bool | None:
        """Whether rows still have their payload in the present table; None when the table lacks their half batch."""
        try:
            current = replace(wanted, path=self.locate(wanted.half_id, wanted.file_no))
            for _ in self.table.read_range(current, ["born_timestamp"]):
                pass
        except StrippedError:
            return False
        except FileNotFoundError:
            return None
        return True

    def deliver_times(self, record: HalfRecord, rows: RowSet) -> pa.Array:
        """When rows of a half batch are due, in send order."""
        paths = {file.path for file in record.files.values()}
        file_rows = self._shared_rows(paths.pop()) if len(paths) == 1 else None
        if file_rows is None:
            return self.read(record, rows, ["deliver_at"])["deliver_at"].combine_chunks()
        own_rows = file_rows.filter(pc.equal(file_rows["half_id"], record.half_id))
        own_rows = (
            own_rows.sort_by([("file_no", "ascending"), ("row_no", "ascending")]) if own_rows.num_rows > 1 else own_rows
        )
        bits = b"".join(rows.get(n) or bytes(file.rows) for n, file in record.files.items())
        return own_rows["deliver_at"].combine_chunks().filter(booleans_of(bits))

    def read(self, record: HalfRecord, rows: RowSet, columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([HALF_SCHEMA.field(c) for c in columns])
        tables = [table for wanted in ranges_of(record, rows) for _, table in self.read_range(wanted, columns)]
        return pa.concat_tables([t.cast(schema) for t in tables]) if tables else schema.empty_table()

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: Filter | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows of a range, as ``row_range.read_range`` does."""
        return self._files.read(wanted, columns, where)


def ranges_of(record: HalfRecord, rows: RowSet) -> list[RowRange]:
    """Where rows of a half batch lie, in send order."""
    files = record.files
    return [
        RowRange(require_path(files[n].path, "half"), record.half_id, n, files[n].rows, ranges)
        for n, ranges in rows.ranges()
    ]
