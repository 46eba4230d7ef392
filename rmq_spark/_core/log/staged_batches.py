"""Half batches that are to be prepared: their staged files, and the files that several half batches share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rmq_spark._core.log.half import HalfFile, HalfRows
from rmq_spark._core.log.half_header import HalfHeader, Naming
from rmq_spark._core.vocabulary.immutable import immutable
from rmq_spark.errors import AlreadyPreparedError, MessageError, StagedFilesTooOldError

if TYPE_CHECKING:
    from rmq_spark._core.log.half_table import HalfTable


@immutable
class Staged:
    """A half batch to prepare: its files are written, or its rows are few and will share a file."""

    header: HalfHeader
    files: Sequence[HalfFile | HalfRows]

    @property
    def is_looked_for(self) -> bool:
        """Whether the log must be searched for the half batch's name. A numbered half batch is known by its number."""
        return self.header.naming is Naming.KEY


PrepareError = AlreadyPreparedError | StagedFilesTooOldError
"""Why a half batch could not be prepared."""


class SharedFileWriter:
    """Writes the rows of half batches that have no file yet, for one commit: rows of several half batches go to one
    file.

    A half batch that is refused must not lie in such a file. So when one drops out, the rest get a new file. Half
    batches with generated ids share a file. These ids ascend, so the file's bounds in the Delta log tell which it has.
    Ids that users gave would widen the bounds, so their half batches share another file.
    """

    def __init__(self, half: HalfTable) -> None:
        self._half = half
        self._known: dict[tuple[str, ...], list[HalfFile]] = {}

    def written(self, chosen: Sequence[Staged]) -> dict[str, Sequence[HalfFile]]:
        """The half files of half batches, by half id."""
        rows = [f for batch in chosen for f in batch.files if isinstance(f, HalfRows)]
        shared_files: dict[str, HalfFile] = {}
        for is_made_up in (True, False):
            group = [r for r in rows if (r.writer.header.naming is Naming.MADE_UP) is is_made_up]
            shared_files.update({file.half_id: file for file in self._in_one_file(group)})
        return {
            batch.header.half_id: [shared_files[f.half_id] if isinstance(f, HalfRows) else f for f in batch.files]
            for batch in chosen
        }

    def _in_one_file(self, rows: Sequence[HalfRows]) -> list[HalfFile]:
        half_ids = tuple(r.half_id for r in rows)
        if rows and half_ids not in self._known:
            table = self._half.table
            alone = len(rows) == 1
            self._known[half_ids] = [rows[0].write(table.fs, table.folder)] if alone else self._half.write_shared(rows)
        return self._known[half_ids] if rows else []


def require_staged(header: HalfHeader, files: Sequence[HalfFile | HalfRows]) -> None:
    if not files:
        raise MessageError(f"half batch {header.half_id!r} has no messages: there is nothing to prepare")
    for file in files:
        if file.half_id != header.half_id:
            raise MessageError(f"a file of half batch {file.half_id!r} was staged for {header.half_id!r}")
    numbers = [f.file_no for f in files]
    if len(set(numbers)) < len(numbers):
        twice = next(n for n in numbers if numbers.count(n) > 1)
        raise MessageError(
            f"file {twice} of half batch {header.half_id!r} was staged twice: give each partition a number of its own"
        )


def require_each_once(staged: Sequence[Staged]) -> None:
    names = [f"half batch {batch.header.name!r}" for batch in staged]
    names += [f"a numbered half batch of app {b.header.app_id!r}" for b in staged if b.header.numbered]
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"{name} is to be prepared twice in one commit: the second one needs a commit of its own")
