"""Reads whole data files of a table, and refuses those that differ from their seal or from the Delta log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.file_system import require_path
from rmq_spark._core.storage.row_range import THREADS_ROWS_MIN
from rmq_spark._core.storage.seal import reading, require_count, require_row_groups, require_seal
from rmq_spark._core.storage.store_errors import require_resources

PARQUET_WITH_CHECKSUMS = pads.ParquetFileFormat(
    default_fragment_scan_options=pads.ParquetFragmentScanOptions(page_checksum_verification=True)
)


class FileReader:
    def __init__(self, fs: pafs.FileSystem, folder: str, name: str, schema: pa.Schema) -> None:
        self.fs = fs
        self.folder = folder
        self.name = name
        self.schema = schema

    def read(
        self,
        paths: Sequence[str],
        row_counts_of: Callable[[Sequence[str]], Mapping[str, int | None]],
        columns: Sequence[str] | None,
        where: pc.Expression | None,
    ) -> pa.Table:
        """Return rows of some files. ``row_counts_of`` returns their row counts, by path, from the Delta log."""
        names = list(columns) if columns is not None else self.schema.names
        if not paths:
            return pa.schema([self.schema.field(n) for n in names]).empty_table()
        reach("files read", table=self.name, paths=paths)
        full_paths = [f"{self.folder}/{require_path(p, self.name)}" for p in paths]
        row_counts = row_counts_of(paths)
        if where is None and self._are_small(row_counts, paths):
            return pa.concat_tables([self._read_small(path, names, row_counts) for path in paths])
        try:
            dataset = pads.dataset(full_paths, schema=self.schema, format=PARQUET_WITH_CHECKSUMS, filesystem=self.fs)
            self._require_files(dataset, row_counts)
            return dataset.to_table(columns=names, filter=where)
        except (OSError, pa.ArrowException, ValueError) as problem:
            require_resources(problem, f"table {self.name}")
            for path, file in zip(paths, full_paths, strict=True):  # find the file that fails
                with reading(path, self.name):
                    file_dataset = pads.dataset(
                        [file], schema=self.schema, format=PARQUET_WITH_CHECKSUMS, filesystem=self.fs
                    )
                    self._require_files(file_dataset, row_counts)
                    file_dataset.to_table(columns=names, filter=where)
            raise

    def _are_small(self, row_counts: Mapping[str, int | None], paths: Sequence[str]) -> bool:
        """Return True for files that are read faster one after the other than by the threads of a dataset."""
        has_no_latency = len(paths) == 1 or isinstance(self.fs, pafs.LocalFileSystem)
        return has_no_latency and all(
            (row_counts.get(path) or THREADS_ROWS_MIN + 1) <= THREADS_ROWS_MIN for path in paths
        )

    def _read_small(self, path: str, names: Sequence[str], row_counts: Mapping[str, int | None]) -> pa.Table:
        fields = [self.schema.field(name) for name in names]
        with reading(path, self.name), self.fs.open_input_file(f"{self.folder}/{path}") as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            self._require_file(path, file.schema_arrow, file.metadata, row_counts)
            table = file.read(names, use_threads=False)
            columns = [
                column if column.type == field_.type else pc.cast(column, field_.type)
                for column, field_ in zip((table[name] for name in names), fields, strict=True)
            ]
        return pa.table(columns, schema=pa.schema(fields))

    def _require_files(self, dataset: pads.Dataset, row_counts: Mapping[str, int | None]) -> None:
        """Raise CorruptLogError for files that differ from their seal or from what the Delta log says of them."""
        for fragment in dataset.get_fragments():
            path = fragment.path.removeprefix(f"{self.folder}/")
            self._require_file(path, fragment.physical_schema, fragment.metadata, row_counts)

    def _require_file(
        self, path: str, schema: pa.Schema, footer: pq.FileMetaData, row_counts: Mapping[str, int | None]
    ) -> None:
        require_seal(schema, path, self.name, self.schema.names)
        require_count(footer.num_rows, row_counts.get(path), path, self.name)
        require_row_groups(footer, path, self.name)
