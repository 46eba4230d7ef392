"""Inboxes whose work writes each message's body into the table ``results``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa

import rmq_spark as txmq


def count_each(connection: sa.Connection, messages: pa.Table) -> None:
    for body in messages["body"].to_pylist():
        connection.execute(sa.text("insert into results (body) values (:body)"), {"body": body.decode()})


def make_database(folder: Path) -> str:
    """A SQLite database with the empty table; its URL."""
    found = f"sqlite:///{folder / 'results.db'}"
    with sa.create_engine(found).begin() as connection:
        connection.execute(sa.text("create table results (body text)"))
    return found


def results(url: str) -> list[str]:
    with sa.create_engine(url).connect() as connection:
        return sorted(connection.execute(sa.text("select body from results")).scalars())


def inbox_of(
    url: str | sa.Engine, work: Callable[..., Any] = count_each, group: str = "points", **options: Any
) -> txmq.SqlInbox:
    made = txmq.SqlInbox(url, group, work, **options)
    made.create()
    return made
