"""Turns a store's answer to a failed request into an error of this package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rmq_spark._core.vocabulary.redaction import cause_of, is_secret, redacted
from rmq_spark.errors import StorageError, TxmqError, UnreachableStoreError

SECRET_CHARS_MIN = 4
"""Length of the shortest secret value that is hidden in a store's answer. In other text only longer ones are hidden."""


_XML_ERROR = re.compile(
    r"(?:<\?xml[^>]*> ?)?<Error>.{0,500}?<Code>([^<]*)</Code> ?<Message>([^<]*)</Message>.*?</Error>"
)
"""A store's answer to a refused request."""


def plainly(text: str, storage_options: Mapping[str, str] | None) -> str:
    """Return a store's answer on one line, without the values of options that may be secret."""
    for name, value in (storage_options or {}).items():
        if is_secret(name, value, SECRET_CHARS_MIN):
            text = text.replace(value, "***")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r'Os { code: \d+, kind: \w+, message: "([^"]*)" }', r"\1", text)  # as Rust shows it
    text = re.sub(r":?\s*↳\s*", ": ", text)
    text = _XML_ERROR.sub(r"\1: \2", re.sub(r"\s+", " ", text))
    return redacted(text.strip(" :"))


_DENIED = re.compile(r"permission denied|access[ _]?denied|403 forbidden", re.IGNORECASE)


def is_denied(problem: BaseException) -> bool:
    """Return True when the operating system or an object store says that permission is missing."""
    return isinstance(problem, PermissionError) or _DENIED.search(str(problem)) is not None


def denied(where: str) -> StorageError:
    return StorageError(f"{where} cannot be written to (permission denied): give this program the right to write")


_OUT_OF: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"too many open files|(?:os error|errno) 2[34]\b", re.IGNORECASE),
        "this process, or the machine, cannot open one more file: raise its limit (ulimit -n 65536, LimitNOFILE= of "
        "systemd, --ulimit nofile= of Docker; ENFILE: fs.file-max), or close files that the program leaves open",
    ),
    (
        re.compile(r"can't start new thread|tokio runtime|resource temporarily unavailable", re.IGNORECASE),
        "this user or container may start no more threads: raise ulimit -u, or pids_limit (--pids-limit of Docker)",
    ),
    (
        re.compile(r"failed to map segment|cannot allocate memory|alloc of size \d+ failed", re.IGNORECASE),
        "this process may take no more memory: raise ulimit -v or the container's limit; in Spark's Python workers "
        "spark.executor.pyspark.memory and spark.sql.planner.pythonExecution.memory",
    ),
)
"""Texts of systems and libraries about a resource that is used up, and what to do."""


def require_resources(problem: BaseException, where: str) -> None:
    """Raise UnreachableStoreError when a problem is a lack of descriptors, threads or memory: the store is sound."""
    text = str(problem)
    remedy = next((remedy for pattern, remedy in _OUT_OF if pattern.search(text)), None)
    if remedy is not None and not isinstance(problem, TxmqError):
        raise UnreachableStoreError(f"{where} cannot be used: {remedy}") from cause_of(problem)


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Turn an OSError of a write into a StorageError that names the place; an UnreachableStoreError when trying again
    may help. FileNotFoundError passes: the folder is gone."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as problem:
        where = redacted(where)
        require_resources(problem, where)
        if is_denied(problem):
            raise denied(where) from cause_of(problem)
        answer = plainly(str(problem), None)
        raise UnreachableStoreError(
            f"{where} cannot be written to, its store fails: {answer}; mend that and try again"
        ) from cause_of(problem)


@contextmanager
def asking(where: str, storage_options: Mapping[str, str] | None) -> Iterator[None]:
    """Turn an OSError, which delta-rs and pyarrow raise for any failure of a store, into an UnreachableStoreError with
    the table's name."""
    try:
        yield
    except TxmqError:
        raise
    except OSError as problem:
        require_resources(problem, where)
        answer = plainly(str(problem), storage_options)
        if is_denied(problem):
            raise UnreachableStoreError(f"{where} cannot be read (permission denied): {answer}") from None
        raise UnreachableStoreError(f"{where} cannot be read, its store fails: {answer}; try again") from None
