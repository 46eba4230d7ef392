"""Where a fence was made: what tells a database from a copy of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from rmq_spark._core.database.connection import place_of


class OfPsycopg(Exception):
    def __init__(self, state: str | None) -> None:
        super().__init__("it failed")
        self.sqlstate = state


class OfPsycopg2(Exception):
    def __init__(self, state: str | None) -> None:
        super().__init__("it failed")
        self.pgcode = state


class OfPg8000(Exception):
    def __init__(self, state: str | None) -> None:
        super().__init__({"S": "ERROR", "C": state} if state else "it failed")


@pytest.mark.parametrize("driver", [OfPsycopg, OfPsycopg2, OfPg8000])
@pytest.mark.parametrize(
    ("state", "is_told"), [("42501", True), ("42883", True), ("57014", False), ("40001", False), (None, False)]
)
def test_a_fence_is_not_made_without_its_place_because_a_query_failed(
    state: str | None, is_told: bool, driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(query: str) -> None:
        raise sa.exc.DBAPIError(query, None, driver(state))

    connection: Any = SimpleNamespace(
        dialect=SimpleNamespace(name="postgresql"),
        begin_nested=lambda: SimpleNamespace(rollback=lambda: None),
        exec_driver_sql=fails,
    )
    if is_told:
        assert place_of(connection) is None
        assert "a fence in a copy of it would not be noticed" in caplog.text
    else:
        with pytest.raises(sa.exc.DBAPIError):
            place_of(connection)
