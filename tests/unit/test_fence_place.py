"""Where a fence was made: what tells a database from a copy of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from rmq_spark._core.database.connection import place_of


def failure(said: object = "it failed", **attributes: str | None) -> Exception:
    problem = Exception(said)
    vars(problem).update(attributes)
    return problem


DRIVERS: dict[str, Any] = {
    "psycopg": lambda state: failure(sqlstate=state),
    "psycopg2": lambda state: failure(pgcode=state),
    "pg8000": lambda state: failure({"S": "ERROR", "C": state} if state else "it failed"),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("state", "is_told"), [("42501", True), ("42883", True), ("57014", False), ("40001", False), (None, False)]
)
def test_a_fence_is_not_made_without_its_place_because_a_query_failed(
    state: str | None, is_told: bool, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(query: str) -> None:
        raise sa.exc.DBAPIError(query, None, DRIVERS[driver](state))

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
