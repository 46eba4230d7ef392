"""Seals: checksums that the files of a commit log carry, so that damage raises an error and never gives a wrong answer.

A Parquet file carries its own name and a checksum of its columns in its footer, and a checksum in every page. A file of
``messages`` that somebody else wrote has no seal and is taken as it is.
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

_RESTORE = "restore it from a copy, and write nothing to this commit log before"


# ---------------------------------------------------------------- Parquet files
def seal(schema: pa.Schema, path: str, rows: str) -> dict[bytes, bytes]:
    """Return a file's seal, as metadata of its footer. ``rows`` says which rows the file holds."""
    return {_NAME: path.encode(), _ROWS: rows.encode(), _COLUMNS: _checksum_of(schema)}


def _checksum_of(schema: pa.Schema) -> bytes:
    text = ",".join(f"{field.name} {_words(field.type)}" for field in schema)
    return b"%08x" % zlib.crc32(text.encode())


def _words(kind: pa.DataType) -> str:
    """Return the type as text, without the names that Parquet gives to the insides of lists and maps."""
    if pa.types.is_map(kind):
        return f"map<{_words(kind.key_type)},{_words(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{_words(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{field.name} {_words(field.type)}' for field in kind)}>"
    return str(kind)


def require_seal(schema: pa.Schema, path: str, table: str, columns: Iterable[str]) -> str | None:
    """Return which rows a file holds by its seal, or None when it has no seal of its own.

    Parameters
    ----------
    schema : pyarrow.Schema
        The file's schema, with its metadata.
    columns : iterable of str
        Columns that the file must have.

    Raises
    ------
    CorruptLogError
        When the file was written under another name, has other columns than its seal says, or lacks a column.
    """
    said = schema.metadata or {}
    name = path.rpartition("/")[2]
    found = said.get(_NAME, b"").decode(errors="replace")
    if found and found != name and _is_ours(name, table):
        raise CorruptLogError(f"file {path} of table {table} holds what was written as {found}: {_RESTORE}")
    there = set(schema.names)
    missing = [c for c in columns if c not in there]
    if missing or (found == name and said.get(_COLUMNS) != _checksum_of(schema)):
        what = f"has no column {missing[0]!r}" if missing else "has other columns than it was written with"
        raise CorruptLogError(f"file {path} of table {table} {what}: {_RESTORE}")
    return said.get(_ROWS, b"").decode(errors="replace") if found == name else None


def _is_ours(name: str, table: str) -> bool:
    return re.fullmatch(rf"{re.escape(table)}-[0-9a-f]{{32}}\.parquet", name) is not None


def require_count(found: int, said: int | None, path: str, table: str) -> None:
    """Raise CorruptLogError when a file does not have as many rows as the Delta log says."""
    if said is not None and found != said:
        raise CorruptLogError(f"file {path} of table {table} has {found} rows, its Delta log says {said}: {_RESTORE}")


def require_row_groups(footer: pq.FileMetaData, path: str, table: str) -> None:
    """Raise CorruptLogError when a file's row groups do not have the rows that its footer counts.

    pyarrow believes each row group. When one says that it is empty, pyarrow reads nothing of it and raises no error.
    """
    found = sum(footer.row_group(g).num_rows for g in range(footer.num_row_groups))
    if found != footer.num_rows:
        raise CorruptLogError(
            f"file {path} of table {table} has {found} rows in its row groups, its footer says {footer.num_rows}: "
            f"{_RESTORE}"
        )


def require_bounds(actions: pa.Table, table: str) -> None:
    """Raise CorruptLogError when the Delta log gives a file a least value above its greatest.

    In most files the two are equal. Damage that moves one of them past the other would hide the file from a reader.
    """
    for name in actions.column_names:
        if not name.startswith("min."):
            continue
        wrong = pc.fill_null(pc.greater(actions[name], actions[f"max.{name[4:]}"]), False)
        if pc.any(wrong).as_py():
            path = actions["path"].filter(wrong)[0].as_py()
            raise CorruptLogError(f"the Delta log of table {table} has impossible bounds for file {path}: {_RESTORE}")


def is_panic(problem: BaseException) -> bool:
    """Return True for a panic of Rust: a BaseException whose class cannot be imported."""
    return type(problem).__name__ == "PanicException"


@contextmanager
def reading(path: str, table: str) -> Iterator[None]:
    """Turn an error while a file is read into one that names the file and the table.

    Raises
    ------
    OptionError
        For text that was asked for and is no UTF-8: no file has it.
    LostFileError
        For pyarrow's FileNotFoundError.
    UnreachableStoreError
        For a lack of descriptors, threads or memory: the file is sound.
    UnreadableFileError
        For every other error of the store or of pyarrow. It says when only permission is missing.
    """
    try:
        yield
    except TxmqError:
        raise
    except UnicodeEncodeError as problem:
        raise OptionError(f"{problem.object!r} is no text that UTF-8 can hold, so no message has it") from None
    except FileNotFoundError as problem:
        raise LostFileError(f"file {path} of table {table} is not there: {problem}") from cause_of(problem)
    except (OSError, pa.ArrowException, ValueError) as problem:
        require_resources(problem, f"file {path} of table {table}")
        if is_denied(problem):
            raise UnreadableFileError(
                f"file {path} of table {table} cannot be read (permission denied): give this program the right to read "
                f"it ({problem})"
            ) from cause_of(problem)
        raise UnreadableFileError(
            f"file {path} of table {table} cannot be read: its storage fails, or it is damaged; {_RESTORE} ({problem})"
        ) from cause_of(problem)


# ---------------------------------------------------------------- entries of a Delta log
def require_entries(log_folder: Path, table: str, since: int, until: int | None) -> None:
    """Raise CorruptLogError for entries of a local Delta log that are empty or no JSON.

    A power cut can leave an empty entry. delta-rs takes it for a commit that did nothing.

    Parameters
    ----------
    since : int
    until : int, optional
        Read the entries after version ``since``, up to version ``until`` (None: up to the newest). A negative ``since``
        stands for the newest checkpoint. Entries that were cleaned up are skipped.
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
        wrong = _wrong_with(content)
        if wrong:
            raise CorruptLogError(f"entry {entry.name} of the Delta log of table {table} {wrong}: {_RESTORE}")


def _wrong_with(content: bytes) -> str | None:
    try:
        actions = [json.loads(line) for line in content.splitlines() if line]
    except (ValueError, RecursionError) as problem:
        return f"is not JSON ({problem})"
    if not actions:
        return "is empty"
    if not all(isinstance(action, dict) and len(action) == 1 for action in actions):
        return "is no entry of a Delta log"
    return None
