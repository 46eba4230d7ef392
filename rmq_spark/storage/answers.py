"""What a store answers to a request that failed, as one of our errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rmq_spark.errors import TxmqError, UnreachableStoreError
from rmq_spark.redaction import is_secret, redacted

SECRET_CHARS_MIN = 4
"""In a store's answer shorter values are hidden than in other text."""


def plainly(text: str, storage_options: Mapping[str, str] | None) -> str:
    """An answer as one line, without the values of options that may be secret."""
    for name, value in (storage_options or {}).items():
        if is_secret(name, value, SECRET_CHARS_MIN):
            text = text.replace(value, "***")
    text = re.sub(r"\x1b\[[0-9;]*m|[^\S ]", " ", text)
    return redacted(re.sub(r" +(↳ )?", " ", text).strip())


@contextmanager
def asking(where: str, storage_options: Mapping[str, str] | None) -> Iterator[None]:
    """Says which table could not be read when the store fails, and that it is the store that fails.

    Raises
    ------
    UnreachableStoreError
        For an OSError, which is what delta-rs and pyarrow make of every failure of a store.
    """
    try:
        yield
    except TxmqError:
        raise
    except OSError as problem:
        said = plainly(str(problem), storage_options)
        raise UnreachableStoreError(f"{where} cannot be read, its store fails: {said}; try again") from None
