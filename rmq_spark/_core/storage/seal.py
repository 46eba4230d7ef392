"""Seals: checksums in the files of a commit log, so that damage raises an error and never gives a wrong answer.

The footer of a Parquet file carries the file's own name and a checksum of its columns, and each page a checksum. A file
of ``messages`` that another program wrote has no seal and is taken as it is.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rmq_spark._core.storage.store_errors import is_denied, require_resources
from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import CorruptLogError, LostFileError, OptionError, TxmqError, UnreadableFileError

_NAME = b"txmq.file"
_ROWS = b"txmq.rows"
_COLUMNS = b"txmq.columns"

RESTORE = "restore it from a copy, and write nothing to this commit log before"
PUT_BACK = "put it back from a copy (docs/backup.md#put-one-file-back)"


# ---------------------------------------------------------------- Parquet files
def seal(schema: pa.Schema, path: str, rows: str) -> dict[bytes, bytes]:
    """Return a file's seal, as metadata of its footer. ``rows`` names the rows that the file holds."""
    return {_NAME: path.encode(), _ROWS: rows.encode(), _COLUMNS: _checksum_of(schema)}


def rows_of_half_file(half_id: str, file_no: int) -> str:
    """Return the text by which a seal names the rows of a half file."""
    return f"{half_id} {file_no}"


def _checksum_of(schema: pa.Schema) -> bytes:
    text = ",".join(f"{field.name} {_type_text(field.type)}" for field in schema)
    return b"%08x" % zlib.crc32(text.encode())


def _type_text(kind: pa.DataType) -> str:
    """Return the type as text, without the names that Parquet gives to the parts of lists and maps."""
    if pa.types.is_map(kind):
        return f"map<{_type_text(kind.key_type)},{_type_text(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{_type_text(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{field.name} {_type_text(field.type)}' for field in kind)}>"
    return str(kind)


def require_seal(schema: pa.Schema, path: str, table: str, columns: Iterable[str]) -> str | None:
    """Return which rows a file holds by its seal, or None when it has no seal of its own. CorruptLogError: the file was
    written under another name, has other columns than its seal says, or lacks one of ``columns``."""
    metadata = schema.metadata or {}
    name = path.rpartition("/")[2]
    sealed_name = metadata.get(_NAME, b"").decode(errors="replace")
    if sealed_name and sealed_name != name and _is_ours(name, table):
        raise UnreadableFileError(f"file {path} of table {table} holds what was written as {sealed_name}: {PUT_BACK}")
    present = set(schema.names)
    missing = [c for c in columns if c not in present]
    if missing or (sealed_name == name and metadata.get(_COLUMNS) != _checksum_of(schema)):
        fault = f"has no column {missing[0]!r}" if missing else "has other columns than it was written with"
        raise UnreadableFileError(f"file {path} of table {table} {fault}: {PUT_BACK}")
    return metadata.get(_ROWS, b"").decode(errors="replace") if sealed_name == name else None


def _is_ours(name: str, table: str) -> bool:
    return re.fullmatch(rf"{re.escape(table)}-[0-9a-f]{{32}}\.parquet", name) is not None


def require_count(found: int, said: int | None, path: str, table: str) -> None:
    """Raise CorruptLogError when a file does not have as many rows as the Delta log says."""
    if said is not None and found != said:
        raise UnreadableFileError(
            f"file {path} of table {table} has {found} rows, its Delta log says {said}: {PUT_BACK}"
        )


def require_row_groups(footer: pq.FileMetaData, path: str, table: str) -> None:
    """Raise CorruptLogError when the row groups of a file do not add up to the footer's row count.

    pyarrow believes each row group. It reads nothing of one that claims to be empty, and raises no error.
    """
    counted = sum(footer.row_group(g).num_rows for g in range(footer.num_row_groups))
    if counted != footer.num_rows:
        raise UnreadableFileError(
            f"file {path} of table {table} has {counted} rows in its row groups, its footer says {footer.num_rows}: "
            f"{PUT_BACK}"
        )


def require_bounds(actions: pa.Table, table: str) -> None:
    """Raise CorruptLogError when the Delta log gives a file a minimum above its maximum.

    A reader would not look into such a file. In most files both are equal, so damage to one easily passes the other.
    """
    for name in actions.column_names:
        if not name.startswith("min."):
            continue
        inverted = pc.fill_null(pc.greater(actions[name], actions[f"max.{name[4:]}"]), False)
        if pc.any(inverted).as_py():
            path = actions["path"].filter(inverted)[0].as_py()
            raise CorruptLogError(f"the Delta log of table {table} has impossible bounds for file {path}: {RESTORE}")


def is_panic(problem: BaseException) -> bool:
    """Return True for a panic of Rust: a BaseException whose class cannot be imported."""
    return type(problem).__name__ == "PanicException"


@contextmanager
def reading(path: str, table: str) -> Iterator[None]:
    """Turn an error while a file is read into one that names the file and the table: LostFileError for a file that is
    gone, UnreachableStoreError for a lack of descriptors, threads or memory (the file is sound), OptionError for a
    wanted text that is no UTF-8, and UnreadableFileError for every other error of the store or of pyarrow."""
    try:
        yield
    except TxmqError:
        raise
    except UnicodeEncodeError as problem:
        raise OptionError(f"{problem.object!r} is no text that UTF-8 can hold, so no message has it") from None
    except FileNotFoundError as problem:
        raise LostFileError(f"file {path} of table {table} is not there: {PUT_BACK} ({problem})") from cause_of(problem)
    except (OSError, pa.ArrowException, ValueError) as problem:
        require_resources(problem, f"file {path} of table {table}")
        if is_denied(problem):
            raise UnreadableFileError(
                f"file {path} of table {table} cannot be read (permission denied): give this program the right to read "
                f"it ({problem})"
            ) from cause_of(problem)
        raise UnreadableFileError(
            f"file {path} of table {table} cannot be read: its storage fails, or it is damaged; try again, or "
            f"{PUT_BACK} ({problem})"
        ) from cause_of(problem)


# ---------------------------------------------------------------- entries of a Delta log
def require_entries(log_folder: Path, table: str, since: int, until: int | None) -> None:
    """Raise CorruptLogError for entries of a local Delta log that are empty or no JSON. A power cut can leave an empty
    entry, which delta-rs takes for a commit that did nothing.

    It reads the entries after version ``since`` (a negative one stands for the newest checkpoint), up to version
    ``until`` or the newest. Entries that were cleaned up are skipped.
    """
    if until is None:
        until = max((int(f.stem) for f in log_folder.glob("*.json") if f.stem.isdigit()), default=-1)
    if since < 0:
        checkpoints = [int(f.name[:20]) for f in log_folder.glob("*.checkpoint*.parquet") if f.name[:20].isdigit()]
        since = max((v for v in checkpoints if v <= until), default=-1)
    for version in range(since + 1, until + 1):
        entry = log_folder / f"{version:020d}.json"
        try:
            content = entry.read_bytes()
        except FileNotFoundError:
            continue
        fault = _fault_of_entry(content)
        if fault:
            raise CorruptLogError(f"entry {entry.name} of the Delta log of table {table} {fault}: {RESTORE}")


def _fault_of_entry(content: bytes) -> str | None:
    try:
        actions = [json.loads(line) for line in content.splitlines() if line]
    except (ValueError, RecursionError) as problem:
        return f"is not JSON ({problem})"
    if not actions:
        return "is empty"
    if not all(isinstance(action, dict) and len(action) == 1 for action in actions):
        return "is no entry of a Delta log"
    return None
