"""``transactionListener=txmq.table``: a stream's rows in a table, without code. The URL is in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

import rmq_spark as txmq

HIDDEN = "hunter2-secret"


def send(spark: SparkSession, log: txmq.CommitLog, folder: Path, **options: str) -> None:
    incoming = spark.readStream.schema("order_id long, total double").json(str(folder / "in"))
    frame = incoming.selectExpr("to_json(struct(*)) as body", "order_id")
    defaults = {
        "path": log.path,
        "topic": "orders",
        "producerGroup": "shop",
        "transactionListener": "txmq.table",
        "transactionKey": "order_id",
        "table.url": f"file:{folder}/url",
        "table.name": "orders",
        "table.key": "order_id",
        "checkpointLocation": str(folder / "checkpoint"),
    }
    query = frame.writeStream.format("txmq").options(**{**defaults, **options}).trigger(availableNow=True).start()
    query.awaitTermination(120)
    assert not query.isActive


@pytest.mark.turns(3, among="Spark: metrics and tables")
def test_a_stream_fills_a_table_with_options_alone(spark: SparkSession, log_path: str, tmp_path: Path) -> None:
    log = txmq.CommitLog.create(log_path)
    log.create_topic("orders", queues=2)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/orders.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (order_id INTEGER PRIMARY KEY, total DOUBLE NOT NULL)")
        connection.exec_driver_sql("INSERT INTO orders VALUES (3, 0)")
    txmq.create_fence(engine)
    (tmp_path / "url").write_text(f"sqlite:///{tmp_path}/orders.db\n")
    (tmp_path / "in").mkdir()
    given = [{"order_id": n, "total": n * 1.5} for n in range(1, 6)]
    given[1].pop("total")
    (tmp_path / "in" / "1.json").write_text("\n".join(map(json.dumps, given)))

    with pytest.raises(Exception, match="ListenerError: the database has no table 'order': it has orders, txmq_fence"):
        send(spark, log, tmp_path, **{"table.name": "order"})
    with pytest.raises(Exception, match=r"OptionError: table.url has a password in it") as refused:
        send(spark, log, tmp_path, **{"table.url": f"postgresql+psycopg://shop:{HIDDEN}@db/shop"})
    assert HIDDEN not in str(txmq.errors.find_cause(refused.value))
    assert log.pending().num_rows == 0

    send(spark, log, tmp_path, **{"table.onBadRow": "rollback"})
    later = [{"order_id": 5, "total": 9.0}, {"order_id": 6, "total": 9.0}]
    (tmp_path / "in" / "2.json").write_text("\n".join(map(json.dumps, later)))
    send(spark, log, tmp_path, **{"table.onConflict": "update"})

    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.exec_driver_sql("SELECT * FROM orders ORDER BY order_id")]
    assert rows == [(1, 1.5), (3, 0.0), (4, 6.0), (5, 9.0), (6, 9.0)]
    visible = sorted(json.loads(body)["order_id"] for body in log.read("orders")["body"].to_pylist())
    assert visible == [1, 4, 5, 5, 6]
    assert log.pending().num_rows == 0
