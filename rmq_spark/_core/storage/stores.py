"""Requires of a store what a commit log needs: the store refuses the second put of a file, and lists what was put.

Amazon S3 does both: it has conditional puts and consistent lists. Not every store that speaks S3 does;
:func:`require_put_if_absent` finds out.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from uuid import uuid4

from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.store_errors import is_denied, plainly, require_resources
from rmq_spark._core.storage.table import DeltaLogTable, claim_table, remove_table
from rmq_spark._core.vocabulary.redaction import traceback_of
from rmq_spark.errors import NotACommitLogError, OptionError, StorageError, TxmqError

logger = logging.getLogger(__name__)

CLAIMANTS = 3
ROUNDS_MAX = 40
"""Rounds of the probe. A round is conclusive when two writers come to the same put, as in about every second round."""
PROBE = "_probe-"

_YES = ("1", "true", "on", "yes", "y")


# ---------------------------------------------------------------- settings
def require_storage_options(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Refuse settings, in the options or the environment, that let two writers overwrite each other's commits.

    Raises
    ------
    OptionError
    """
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

    A store's answer may name the access key or the session token. A NotACommitLogError stays one. Errors of local
    folders pass unchanged, unless permission is missing.
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
    """Require that the store refuses the second of two puts of one file, and lists what was put. Commits are such puts,
    and such lists find them.

    In each round three writers create the same table below ``where`` at once, through delta-rs. A writer that sees
    another writer's table skips its put. Their three answers settle the question, or not::

        created, refused, (any)     the store has put-if-absent
        created, created, (any)     it has not: StorageError
        created, seen, seen         unknown: the next round

    Nothing stays behind.

    Raises
    ------
    StorageError
        When several writers were told that they had created the table, when a later list does not show it, or when no
        round settled the question.
    """
    for _ in range(ROUNDS_MAX):
        probe = f"{where}/{PROBE}{uuid4().hex}"
        claims: list[bool | None] = []
        try:
            _claim_at_once(probe, storage_options, claims)
            is_listed = DeltaLogTable.exists(probe, storage_options)
        finally:
            try:
                remove_table(probe, storage_options)
            except Exception as problem:  # remains of the probe do no harm
                if claims:  # else it was never made, and another error is being raised
                    logger.warning("%s could not be removed, delete it by hand: %s", probe, traceback_of(problem))
        if claims.count(True) > 1:
            raise StorageError(
                f"{where} is on a store without put-if-absent: {claims.count(True)} of {CLAIMANTS} writers that "
                "created one table at the same time were told that they had, so commits would be lost. Use a store "
                "with conditional puts (If-None-Match), or turn them on; docs/object-stores.md names some. Nothing "
                "was left behind"
            )
        if not is_listed:
            raise StorageError(
                f"{where} is on a store that answers with old lists: a file that had been put was not listed after "
                "that, so messages would be missed. Use a store with consistent lists; docs/object-stores.md names "
                "some. Nothing was left behind"
            )
        if False in claims:
            return
    raise StorageError(
        f"{where}: in {ROUNDS_MAX} rounds of {CLAIMANTS} writers no two came to the same put, so it is not known "
        "whether the store has put-if-absent: try again"
    )


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
