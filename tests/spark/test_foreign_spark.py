"""What Spark's own Delta does to the tables of a commit log, and what undoes it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.errors import ForeignChangeError
from tests.support.half_batches import another, commit, let_leave, prepare, send
from tests.support.limits import Limit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELTA = metadata.version("delta-spark")


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = CommitLog.create(tmp_path / "log")
    made.create_topic("orders", 1)
    return made


def alter(spark: SparkSession, table: str, statement: str) -> None:
    spark.sql(f"ALTER TABLE delta.`{table}` {statement}")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_row_that_spark_deletes_by_a_vector_stops_upkeep_until_a_restore(
    spark: SparkSession, log: CommitLog, limit: Limit
) -> None:
    """Counts ignore vectors: draining went on, a merge doubled the file, and the RESTORE lost what drained since."""
    limit(MESSAGES_FILES_MAX=2)
    messages = f"{log.path}/messages"
    for batch_id in range(3):
        commit(log, prepare(log, batch_id, 4))
        log.drain()
    own = DeltaTable(messages).version()
    alter(spark, messages, "SET TBLPROPERTIES ('delta.enableDeletionVectors'='true', 'delta.appendOnly'='false')")
    spark.sql(f"DELETE FROM delta.`{messages}` WHERE queue_offset = 6")
    assert spark.read.format("delta").load(messages).count() == 11

    commit(log, prepare(log, 3, 4))
    for upkeep in (log.drain, lambda: let_leave(log)):
        with pytest.raises(
            ForeignChangeError, match=r"by deletion vectors, of 1 file .*: DELETE by .*Delta-Lake"
        ) as caught:
            upkeep()
    assert txmq.messages(spark, another(log), "orders").count() == 16  # reads go on

    (version,) = re.findall(r"restore\((\d+), protocol_downgrade_allowed=True\)", str(caught.value))
    assert int(version) == own
    DeltaTable(messages).restore(own, protocol_downgrade_allowed=True)
    report = let_leave(log)
    assert (report.messages_drained, report.files_merged) == (4, 4)
    offsets = [row.queue_offset for row in spark.read.format("delta").load(messages).collect()]
    assert sorted(offsets) == list(range(16))
    assert txmq.messages(spark, another(log), "orders").count() == 16


@pytest.mark.turns(4, among="Spark: features and stops")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("op", "InCommitTimestamps"),
        pytest.param(
            "messages",
            "RowTracking",
            marks=pytest.mark.skipif(DELTA.startswith("4.0."), reason="Delta 4.0 does not drop row tracking"),
        ),
    ],
)
def test_the_statements_that_an_error_names_take_a_feature_back(
    spark: SparkSession, log: CommitLog, name: str, feature: str
) -> None:
    commit(log, prepare(log, 0, 4))
    record = prepare(log, 1, 4)
    alter(spark, f"{log.path}/{name}", f"SET TBLPROPERTIES ('delta.enable{feature}'='true')")
    with pytest.raises(ForeignChangeError) as caught:
        log.drain() if name == "messages" else commit(log, record)
    said = str(caught.value).partition(" in Spark by ")[2]
    statements = [statement.strip() for statement in said.replace(", then ", "").split("ALTER TABLE …")[1:]]
    assert statements
    for statement in statements:
        alter(spark, f"{log.path}/{name}", statement)
    commit(log, record)
    commit(log, send(log, "later", 4))
    log.maintain()
    assert another(log).read("orders").num_rows == 12
    assert spark.read.format("delta").load(f"{log.path}/messages").count() == 12
