"""The options ``table.*`` of the sink, from which ``transactionListener=txmq.table`` makes a TableListener."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from rmq_spark._core.database.url import is_reference, look_up
from rmq_spark._core.vocabulary.options import Options
from rmq_spark.errors import ListenerError, OptionError

if TYPE_CHECKING:
    from rmq_spark._core.listeners.table_listener import TableListener

_T = TypeVar("_T")

TABLE_LISTENER = "txmq.table"
TABLE_OPTIONS: Mapping[str, tuple[str, str]] = {
    "table.url": (
        "required with txmq.table",
        "The database: a URL without a password, or env:NAME or file:/path for where the driver finds the URL.",
    ),
    "table.name": ("required with txmq.table", "The table."),
    "table.columns": ("all of the table", "Names of columns, or Spark's DDL."),
    "table.key": ("none", "The columns of a unique key, with commas between."),
    "table.onConflict": ("error", "What becomes of a row whose key is there: error, ignore or update."),
    "table.onBadRow": (
        "fail",
        "fail: a row that does not fit ends the query. rollback: its transaction is rolled back.",
    ),
    "table.onUnknownField": (
        "ignore",
        "ignore: a field without a column is left out. error: its row does not fit.",
    ),
    "table.schema": ("the user's default", "The database schema of the table."),
    "table.fenceSchema": ("the user's default", "The database schema of the fence."),
}
"""The options of a TableListener: their default and their meaning."""
_SECRET = re.compile(r"passw|pwd|secret|token|credential", re.IGNORECASE)
"""Matches the name of a URL parameter that holds a secret."""


@dataclass(frozen=True)
class TableSettings:
    """The validated options of a TableListener. They hold no secret, and can be pickled."""

    url: str = field(repr=False)
    """A URL without a password, or a reference to a URL."""
    name: str
    columns: str | None
    key: str | None
    on_conflict: str
    on_bad_row: str
    on_unknown_field: str
    schema: str | None
    fence_schema: str | None

    @classmethod
    def of(cls, options: Options, listener: str) -> TableSettings | None:
        """Read the options. Return None for another listener."""
        names = [name for name in TABLE_OPTIONS if name in options]
        if listener.lower() != TABLE_LISTENER:
            if names:
                raise OptionError(f"option {names[0]!r} is for transactionListener={TABLE_LISTENER}, not {listener!r}")
            return None
        url, name = options.require_all(
            {
                "table.url": "a database URL without a password, env:NAME or file:/path",
                "table.name": f"the table that {TABLE_LISTENER} shall insert into",
            }
        )
        url = url.strip()
        if not _call_with_url(is_reference, url):
            _require_no_password(url)
        return cls(
            url=url,
            name=name.strip(),
            columns=options.get("table.columns"),
            key=options.get("table.key"),
            on_conflict=options.choice("table.onConflict", ("error", "ignore", "update"), "error"),
            on_bad_row=options.choice("table.onBadRow", ("fail", "rollback"), "fail"),
            on_unknown_field=options.choice("table.onUnknownField", ("ignore", "error"), "ignore"),
            schema=options.get("table.schema"),
            fence_schema=options.get("table.fenceSchema"),
        )

    def listener(self) -> TableListener:
        """Return the listener. Its URL is looked up now, in this process."""
        return _listener(self, _call_with_url(look_up, self.url))


@lru_cache(maxsize=8)
def _listener(settings: TableSettings, url: str) -> TableListener:
    """Return a cached listener: Spark reuses the process, and the listener holds its connections."""
    from rmq_spark._core.listeners.table_listener import TableListener

    given = asdict(settings) | {"url": url}
    return TableListener(given.pop("url"), given.pop("name"), **given)


def _call_with_url(function: Callable[[str], _T], url: str) -> _T:
    """Return ``function(url)``. An error names the option ``table.url``."""
    try:
        return function(url)
    except ListenerError as problem:
        raise OptionError(f"table.url: {problem}") from None


def _require_no_password(url: str) -> None:
    """Raise OptionError for a URL with a password, which Spark's plans would show. The error does not show it."""
    from rmq_spark._core.database.connection import Database

    Database(url)  # raises for a URL that cannot be parsed
    from sqlalchemy import make_url

    parsed = make_url(url)
    if parsed.password is not None or any(_SECRET.search(name) for name in parsed.query):
        raise OptionError(
            "table.url has a password in it, which Spark's plans and logs would show: write table.url=env:NAME or "
            "table.url=file:/path, where the driver finds the URL"
        )
