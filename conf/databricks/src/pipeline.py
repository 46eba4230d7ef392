"""A declarative pipeline that sends: a source file for Lakeflow, or for ``spark-pipelines`` of Spark 4.1 and newer.

Its configuration names ``txmq.source`` (a table, or a view of the pipeline) and ``txmq.log`` (a commit log with the
topic ``orders``).
"""

from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
source, log = spark.conf.get("txmq.source"), spark.conf.get("txmq.log")

dp.create_sink(
    "orders_sent",
    "txmq",
    {
        "path": log,
        "topic": "orders",
        "producerGroup": "order-pipeline",
        "transactionListener": "none",
        "transactionKey": "order_id",
    },
)


@dp.append_flow(target="orders_sent", name="send_orders")
def send_orders():
    rows = spark.readStream.table(source)
    return rows.selectExpr("to_json(struct(*)) as body", "cast(order_id as string) as keys", "order_id")
