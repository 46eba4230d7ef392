"""docs/spark-versions.md: what can do what. Each ``yes`` of its table is a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDER, NEW, CONNECT, CLIENT, STORES = "4.0, 4.1", "4.2", "Connect", "`pyspark-client`", "S3, Azure, Google"
FRESH = "test_fresh_environment.py::test_every_door_works"
OVER_CONNECT = {CONNECT: f"{FRESH}_over_connect", CLIENT: f"{FRESH}_for_a_client_without_a_jvm"}
STREAMS_ON_STORES = "test_stores.py::test_streams_write_and_read_a_log_on_a_store"
FOREACH_ON_STORES = "test_stores.py::test_foreach_batch_sends_to_a_log_on_a_store"
PIPELINE = "test_databricks.py::test_the_declarative_pipeline_sends_each_row_once_also_with_a_listener"


def on_spark(test: str) -> dict[str, str]:
    return {OLDER: f"test_{test}", NEW: f"test_{test}"}


FOREACH = {**on_spark("doors.py::test_foreach_batch"), CONNECT: "test_doors.py::test_foreach_batch_over_spark_connect"}
TESTS = {
    "messages alone": {
        **on_spark("sink.py::test_a_stream_without_a_listener_sends_every_row_once"),
        **OVER_CONNECT,
        STORES: STREAMS_ON_STORES,
    },
    "a listener by its name": {**on_spark("doors.py::test_module_and_attribute"), **OVER_CONNECT},
    "rows into a table": {
        **on_spark("table_listener.py::test_a_stream_fills_a_table_with_options_alone"),
        **OVER_CONNECT,
    },
    "a listener for a database": {**OVER_CONNECT, **FOREACH},
    "a listener of your own": {**OVER_CONNECT, **FOREACH, STORES: FOREACH_ON_STORES},
    "a Delta table": on_spark("delta_listener.py::test_execute_makes_one_commit_and_a_check_finds_it"),
    "local transactions on executors": {
        **on_spark("parts.py::test_parts_run_on_executors_and_agree_after_a_task_failed"),
        **OVER_CONNECT,
    },
    "the source": {
        **on_spark("source.py::test_a_stream_goes_on_from_its_checkpoint"),
        **OVER_CONNECT,
        STORES: STREAMS_ON_STORES,
    },
    "history": {**on_spark("messages.py::test_messages_are_those_of_the_source"), **OVER_CONNECT},
    "consumers": {**on_spark("consume.py::test_a_poisoned_message_dies_and_can_be_sent_again"), **OVER_CONNECT},
    "a pipeline": {NEW: PIPELINE, CONNECT: PIPELINE},
}
"""By row and column of the table, the test in ``tests/spark``. ``make test-spark`` runs all of them on 4.0 and 4.1."""


def table() -> dict[str, dict[str, str]]:
    """Return the table's cells by the first words of a row, and by column."""
    page = (ROOT / "docs" / "spark-versions.md").read_text().partition("## What can do what")[2]
    head, _, *rows = re.findall(r"^\|(.*)\|$", page.partition("\n## ")[0], re.MULTILINE)
    _, *columns = (cell.strip() for cell in head.split("|"))
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {name.partition(":")[0]: dict(zip(columns, row, strict=True)) for name, *row in cells}


def test_each_yes_of_the_table_has_a_test_and_nothing_else_has() -> None:
    said = {name: {column for column, cell in row.items() if cell == "yes"} for name, row in table().items()}
    assert said == {name: set(tests) for name, tests in TESTS.items()}
    assert {cell for row in table().values() for cell in row.values()} <= {"yes", "not tried"}


@pytest.mark.parametrize("test", sorted({test for row in TESTS.values() for test in row.values()}))
def test_a_test_of_the_table_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    module = ast.parse((ROOT / "tests" / "spark" / file).read_text())
    assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
