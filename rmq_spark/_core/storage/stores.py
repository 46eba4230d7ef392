"""Requires of a store what a commit log needs: the store refuses the second put of a file, and lists what was put.

Amazon S3 does both: it has conditional puts and consistent lists. Not every store that speaks S3 does;
:func:`require_put_if_absent` finds out.
"""

from __future__ import annotations

from rmq_spark._core.storage.delta_process import require_no_fork  # isort: skip  (it looks before the engine is loaded)

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.fs import DeltaStorageHandler

from rmq_spark._core.storage.delta_table import DeltaLogTable
from rmq_spark._core.storage.file_system import filesystem
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.store_errors import denied, is_denied, plainly, require_resources
from rmq_spark._core.vocabulary.redaction import cause_of, redacted
from rmq_spark.errors import NotACommitLogError, OptionError, StorageError, TxmqError

CLAIMANTS = 3
ROUNDS_MAX = 40
"""Rounds of the probe. A round is conclusive when two writers come to the same put, as in about every second round."""
PROBE = "_probe-"

_YES = ("1", "true", "on", "yes", "y")


# ---------------------------------------------------------------- settings
def require_storage_options(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise OptionError for settings, in the options or the environment, that let two writers overwrite each other's
    commits."""
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise OptionError(
            f"storage_options is {type(storage_options).__name__}: a mapping of names to texts is expected, such as "
            "{'AWS_REGION': 'eu-west-1'}"
        )
    for name, value in (storage_options or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise OptionError(
                f"storage_options has {name!r} with a value of the type {type(value).__name__}: names and values are "
                "texts, such as 'true' or '10'"
            )
    settings = {name.lower(): str(value).strip().lower() for name, value in _settings(storage_options)}
    for name, value in settings.items():
        if name.endswith("allow_unsafe_rename") and value in _YES:
            raise OptionError(
                f"{name.upper()}={value} lets two writers overwrite each other's commits: leave it out. A store with "
                "conditional puts does not need it"
            )
        if name.removeprefix("aws_").removeprefix("s3_") == "locking_provider":
            raise OptionError(f"{name.upper()}={value}: delta-rs has no locking provider any more: leave it out")
        if name.removeprefix("aws_") == "conditional_put" and value.split(":")[0] in ("disabled", "dynamo"):
            raise OptionError(
                f"{name.upper()}={value}: a commit log needs conditional puts: leave it out, or set 'etag'"
            )


def _settings(storage_options: Mapping[str, str] | None) -> list[tuple[str, str]]:
    # delta-rs takes missing options from the environment.
    pattern = re.compile(r"allow_unsafe_rename$|locking_provider$|^aws_conditional_put$", re.IGNORECASE)
    return [(k, v) for k, v in os.environ.items() if pattern.search(k)] + list((storage_options or {}).items())


# ---------------------------------------------------------------- errors
@contextmanager
def reaching(where: str, storage_options: Mapping[str, str] | None) -> Iterator[None]:
    """Turn a store's error into a StorageError of one line, without the values of options that may be secret.

    A store's answer may name the access key or the session token. A NotACommitLogError stays one. Of a local folder's
    errors only a missing permission is turned.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, NotACommitLogError) as problem:
        answer = plainly(str(problem), storage_options)
        if is_denied(problem) and not isinstance(problem, TxmqError):
            raise StorageError(f"{where} cannot be used (permission denied): {answer}") from None
        if not is_uri(where):
            raise
        if isinstance(problem, NotACommitLogError):
            raise NotACommitLogError(answer) from None
        raise StorageError(f"{where} cannot be used: {answer}") from None


# ---------------------------------------------------------------- the probe
def require_put_if_absent(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise StorageError for a store that does not refuse the second of two puts of one file, or does not list what was
    put: commits are such puts, and such lists find them.

    In each round three writers create the same table below ``where`` at once, through delta-rs. A writer that sees
    another writer's table skips its put. Their three answers settle the question, or not::

        created, refused, (any)     the store has put-if-absent
        created, created, (any)     it has not: StorageError
        created, seen, seen         unknown: the next round

    Nothing stays behind.
    """
    for _ in range(ROUNDS_MAX):
        probe = f"{where}/{PROBE}{uuid4().hex}"
        claims, is_listed = _probed(probe, storage_options)
        rest = remove_tables([probe], storage_options)
        if claims.count(True) > 1:
            raise StorageError(
                f"{where} is on a store without put-if-absent: {claims.count(True)} of {CLAIMANTS} writers that "
                "created one table at the same time were told that they had, so commits would be lost. Use a store "
                "with conditional puts (If-None-Match), or turn them on; docs/object-stores.md names some. "
                f"{rest or 'Nothing was left behind'}"
            )
        if not is_listed:
            raise StorageError(
                f"{where} is on a store that answers with old lists: a file that had been put was not listed after "
                "that, so messages would be missed. Use a store with consistent lists; docs/object-stores.md names "
                f"some. {rest or 'Nothing was left behind'}"
            )
        if rest:
            raise StorageError(f"{where}: {rest}. Upkeep must be able to remove files: give this program the right to")
        if False in claims:
            return
    raise StorageError(
        f"{where}: in {ROUNDS_MAX} rounds of {CLAIMANTS} writers no two came to the same put, so it is not known "
        "whether the store has put-if-absent: try again"
    )


def _probed(probe: str, storage_options: Mapping[str, str] | None) -> tuple[list[bool | None], bool]:
    """What each writer was told, and whether a list shows the table."""
    claims: list[bool | None] = []
    # Without a claim there is no table, but there may be folders.
    with removing(lambda: [probe] if claims or not is_uri(probe) else [], storage_options):
        _claim_at_once(probe, storage_options, claims)
        if claims.count(True) == 1:
            _put_and_get(probe, storage_options)
        return claims, DeltaLogTable.exists(probe, storage_options)


def _claim_at_once(probe: str, storage_options: Mapping[str, str] | None, claims: list[bool | None]) -> None:
    """Let several writers create one table, and append what each was told to ``claims``. Raise the first writer's
    error."""
    start = threading.Barrier(CLAIMANTS)
    problems: list[BaseException] = []

    def claim() -> None:
        try:
            start.wait()
            claims.append(claim_table(probe, storage_options))
        except BaseException as problem:  # a panic of delta-rs is no Exception
            problems.append(problem)

    threads = [threading.Thread(target=claim, name="txmq-probe") for _ in range(CLAIMANTS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as problem:  # threads that wait for this one must not wait for ever
        start.abort()
        require_resources(problem, probe)
        raise
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _put_and_get(probe: str, storage_options: Mapping[str, str] | None) -> None:
    """Put a data file, read it and delete it, since data files may take another way to the store than commits."""
    fs, folder = filesystem(probe, storage_options)
    path = f"{folder}/{PROBE}"
    with fs.open_output_stream(path) as stream:
        stream.write(b"txmq")
    try:
        with fs.open_input_stream(path) as stream:
            stream.read()
    finally:
        fs.delete_file(path)


# ---------------------------------------------------------------- the table of a probe
_FIRST_ENTRY = "_delta_log/00000000000000000000.json"
"""The only file of an empty table."""

_NO_HARD_LINKS = re.compile(r"rename file.*os error (1|38|45|95)\b", re.DOTALL)
"""What delta-rs says when the system refuses a hard link: not permitted, not implemented, not supported."""


def claim_table(uri: str, storage_options: Mapping[str, str] | None) -> bool | None:
    """Create an empty table. Returns True when this writer created it, False when the store refused the put of its
    first entry, because another writer's entry is there, and None when delta-rs saw another writer's table first, and
    skipped the put."""
    require_no_fork()
    options = dict(storage_options or {}) or None
    schema = Schema.from_arrow(pa.schema([("version", pa.int64())]))
    try:
        DeltaTable.create(
            uri, schema, storage_options=options, commit_properties=CommitProperties(max_commit_retries=0)
        )
    except CommitFailedError:
        return False
    except BaseException as problem:  # a panic of delta-rs is no Exception
        require_resources(problem, redacted(uri))
        if not is_uri(uri) and _NO_HARD_LINKS.search(str(problem)):
            where = uri.partition(f"/{PROBE}")[0]
            raise StorageError(
                f"{where} is on a file system without hard links, by which one commit excludes another: use a folder "
                "on another one, or, where an object store is mounted, the store's own URI (s3://, abfss://, gs://)"
            ) from None
        if not isinstance(problem, DeltaError):
            raise
        if DeltaTable.is_deltatable(uri, options):
            return None
        if is_denied(problem):
            raise denied(redacted(uri)) from None
        answer = plainly(str(problem), storage_options)
        raise NotACommitLogError(f"a table cannot be created at {redacted(uri)}: {answer}") from cause_of(problem)
    return True


def remove_table(uri: str, storage_options: Mapping[str, str] | None) -> None:
    """Remove an empty table, such as :func:`claim_table` makes, if there is one."""
    fs, folder = filesystem(uri, storage_options)
    if isinstance(fs, pafs.LocalFileSystem):
        if os.path.isdir(folder):
            fs.delete_dir(folder)
    else:
        # By its name, since a store with stale lists would not list it. pyarrow would put empty objects in the place
        # of folders.
        DeltaStorageHandler(uri, dict(storage_options or {}) or None).delete_file(_FIRST_ENTRY)


def remove_tables(uris: Iterable[str], storage_options: Mapping[str, str] | None) -> str:
    """Remove empty tables, and return a sentence that names those that could not be removed; without one, ``""``."""
    left: list[str] = []
    for uri in uris:
        try:
            with suppress(FileNotFoundError):
                remove_table(uri, storage_options)
        except Exception as problem:
            left.append(f"{redacted(uri)} ({plainly(str(problem), storage_options)})")
    return f"left behind, and to be deleted by hand: {', '.join(left)}" if left else ""


@contextmanager
def removing(made: Callable[[], Iterable[str]], storage_options: Mapping[str, str] | None) -> Iterator[None]:
    """When the block fails, remove the empty tables that it made. When some cannot be removed, a StorageError says that
    and the block's error."""
    try:
        yield
    except Exception as problem:
        rest = remove_tables(made(), storage_options)
        if rest:
            kind = type(problem) if isinstance(problem, StorageError) else StorageError
            raise kind(f"{plainly(str(problem), storage_options)} ({rest})") from cause_of(problem)
        raise


@contextmanager
def folders_removed(where: str) -> Iterator[None]:
    """When the block fails, remove the folders on a local path that were not there before, and are empty."""
    folders = [] if is_uri(where) else [f for f in (Path(where), *Path(where).parents) if not os.path.exists(f)]
    try:
        yield
    except Exception:
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()
        raise
