"""Where a fence was made: what tells a database from a copy of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from rmq_spark.listeners.database import place_of


@pytest.mark.parametrize(("state", "is_told"), [("42501", True), ("42883", True), ("57014", False), ("40001", False)])
def test_a_fence_is_not_made_without_its_place_because_a_query_failed(state: str, is_told: bool) -> None:
    class Failed(Exception):
        sqlstate = state

    def fails(query: str) -> None:
        raise sa.exc.DBAPIError(query, None, Failed())

    connection: Any = SimpleNamespace(
        dialect=SimpleNamespace(name="postgresql"),
        begin_nested=lambda: SimpleNamespace(rollback=lambda: None),
        exec_driver_sql=fails,
    )
    if is_told:
        assert place_of(connection) is None
    else:
        with pytest.raises(sa.exc.DBAPIError):
            place_of(connection)
