# Databricks notebook source
# MAGIC %md
# MAGIC # The history is a Delta table
# MAGIC Committed messages lie in the Delta table `messages`, and what was decided about them in `op`. Any reader of
# MAGIC Delta can ask them. This notebook asks with SQL, looks back in time, and reads with Polars, without Spark. It
# MAGIC is a Databricks notebook, and runs with `python notebooks/05_history.py`, where it was tried.
# MAGIC
# MAGIC On Databricks, install the package first: `%pip install` of its wheel, and of `polars`; then restart Python.

# COMMAND ----------

import datetime as dt
import os
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import polars as pl
from pyspark.sql import SparkSession

import rmq_spark as txmq

builder = SparkSession.builder.appName("history")
if "DATABRICKS_RUNTIME_VERSION" not in os.environ:  # Databricks has Delta already
    from delta import configure_spark_with_delta_pip

    builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension").config(
        "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    )
    builder = configure_spark_with_delta_pip(builder.config("spark.databricks.delta.snapshotPartitions", "2"))
spark = builder.getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "2")
txmq.register(spark)


def widget(name: str, default: str) -> str:
    """A notebook widget on Databricks; elsewhere the environment variable of that name in capitals."""
    try:
        dbutils.widgets.text(name, default)
        return dbutils.widgets.get(name)
    except NameError:
        return os.environ.get(name.upper(), default)


folder = widget("folder", "") or tempfile.mkdtemp(prefix="history_")
print("everything is kept in", folder)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A morning and an afternoon
# MAGIC Ten orders in the morning, of which one is refused; then the drain copies what is committed into `messages`
# MAGIC (the check job does that each half minute). In the afternoon five more.

# COMMAND ----------

log = txmq.CommitLog.create(f"{folder}/log")
log.create_topic("orders", queues=2)


class Shop(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        orders = batch.decode("order_id long, total double").to_pylist()
        return batch.verdicts(rollback=[o["order_id"] for o in orders if o["total"] <= 0])

    def check_local_transaction(self, batch):
        return txmq.UNKNOWN


def send(first: int, last: int) -> None:
    rows = [{"order_id": n, "total": 0.0 if n == 4 else 10.0 * n} for n in range(first, last + 1)]
    body = [f'{{"order_id": {r["order_id"]}, "total": {r["total"]}}}' for r in rows]
    table = {"topic": ["orders"] * len(rows), "body": body, "order_id": [r["order_id"] for r in rows]}
    with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
        producer.send_messages_in_transaction(pl.DataFrame(table).to_arrow(), transaction_key="order_id")


send(1, 10)
log.drain()
noon, morning_version = dt.datetime.now(dt.timezone.utc), log.version
send(11, 15)
log.drain()

# COMMAND ----------

# MAGIC %md
# MAGIC ## SQL over `messages`
# MAGIC Each order's body is JSON. The refused order is not there, and never was.

# COMMAND ----------

messages, op = f"delta.`{log.path}/messages`", f"delta.`{log.path}/op`"
turnover = spark.sql(f"""
    select topic, count(*) as orders, sum(cast(get_json_object(cast(body as string), '$.total') as double)) as turnover
    from {messages} group by topic
""").collect()
print("turnover:", [row.asDict() for row in turnover])

# COMMAND ----------

# MAGIC %md
# MAGIC ## SQL over `op`
# MAGIC What was decided, by whom, and on how many messages. `op` holds the recent past: upkeep takes rows away that
# MAGIC nobody needs any more.

# COMMAND ----------

decided = spark.sql(f"""
    select kind, decided_by, sum(count) as messages from {op}
    where kind in ('commit', 'rollback') group by kind, decided_by order by kind
""").collect()
print("decided:", [row.asDict() for row in decided])

# COMMAND ----------

# MAGIC %md
# MAGIC ## Looking back
# MAGIC Three ways. `as_of` asks what was visible at a time or at a version of `op`, and sees what is not drained yet,
# MAGIC too. A filter on `commit_timestamp` does the same for what is drained, with any reader and for as long as
# MAGIC messages are kept. Delta's own time travel goes back about a week.

# COMMAND ----------

at_noon = txmq.messages(spark, log, "orders", as_of=noon).count()
at_version = txmq.messages(spark, log, "orders", as_of=morning_version).count()
by_filter = spark.sql(
    f"select count(*) from {messages} where commit_timestamp <= timestamp'{noon.isoformat()}'"
).first()[0]
versions = [row["version"] for row in spark.sql(f"describe history {messages}").collect()]
travelled = spark.sql(f"select count(*) from {messages} version as of {max(versions) - 1}").first()[0]
print("visible at noon:", at_noon, at_version, by_filter, travelled)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Without Spark
# MAGIC Polars reads the same table. A filter on the topic, the queue or the offset skips files.

# COMMAND ----------

last = (
    pl.scan_delta(f"{log.path}/messages")
    .filter(pl.col("topic") == "orders")
    .sort("queue_id", "queue_offset")
    .group_by("queue_id", maintain_order=True)
    .agg(pl.len().alias("messages"), pl.col("queue_offset").max().alias("last_offset"))
    .collect()
)
print("by Polars:", last.sort("queue_id").to_dicts())
assert at_noon == at_version == by_filter == travelled == 9
assert last["messages"].sum() == 14
