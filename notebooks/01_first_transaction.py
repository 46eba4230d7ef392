# Databricks notebook source
# MAGIC %md
# MAGIC # A first transaction
# MAGIC A stream of orders must do two things that agree: write each paid order into a database, and tell others
# MAGIC about it. This notebook makes a commit log, sends orders through the sink, looks at what is pending, lets a
# MAGIC check settle it, and reads what was committed. It is a Databricks notebook, and runs with
# MAGIC `python notebooks/01_first_transaction.py`, where it was tried.
# MAGIC
# MAGIC On Databricks, install the package first: `%pip install` of its wheel, then restart Python.

# COMMAND ----------

import json
import os
import sqlite3
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import rmq_spark as txmq

spark = SparkSession.builder.appName("first transaction").getOrCreate()


def widget(name: str, default: str) -> str:
    """A notebook widget on Databricks; elsewhere the environment variable of that name in capitals."""
    try:
        dbutils.widgets.text(name, default)
        return dbutils.widgets.get(name)
    except NameError:
        return os.environ.get(name.upper(), default)


folder = widget("folder", "") or tempfile.mkdtemp(prefix="first_transaction_")
topic = widget("topic", "orders")
order_count = int(widget("orders", "12"))
print("everything is kept in", folder)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The commit log
# MAGIC A folder with a few Delta tables; no server. Writing to a topic that does not exist is an error, so make it
# MAGIC first.

# COMMAND ----------

log = txmq.CommitLog.create(f"{folder}/log", exist_ok=True)
log.create_topic(topic, queues=2, exist_ok=True)
txmq.register(spark)  # only needed where the package arrived after Spark looked for data sources
print(log.topics())

# COMMAND ----------

# MAGIC %md
# MAGIC ## The local transaction
# MAGIC The listener does the work that must agree with the messages, and says for each order what became of it.
# MAGIC Orders of 0 are refused; every fifth order waits for the bank, so its fate is unknown for now.

# COMMAND ----------


class OrderListener(txmq.TransactionListener):
    def __init__(self, database: str) -> None:
        self.database = database
        with sqlite3.connect(database) as connection:
            connection.execute(
                "create table if not exists orders (order_id integer primary key, total real, paid integer)"
            )

    def execute_local_transaction(self, batch):
        orders = batch.decode("order_id long, total double").to_pylist()
        good = [(o["order_id"], o["total"], int(o["order_id"] % 5 != 0)) for o in orders if o["total"] > 0]
        with sqlite3.connect(self.database) as connection:
            connection.executemany("insert into orders values (?, ?, ?)", good)
        refused = [o["order_id"] for o in orders if o["total"] <= 0]
        waiting = [order_id for order_id, _, paid in good if not paid]
        return batch.verdicts(rollback=refused, unknown=waiting)

    def check_local_transaction(self, batch):
        with sqlite3.connect(self.database) as connection:
            paid = {str(i) for (i,) in connection.execute("select order_id from orders where paid = 1")}
        waiting = [k for k in batch.transactions["transaction_key"].to_pylist() if k not in paid]
        return batch.verdicts(unknown=waiting)


listener = OrderListener(f"{folder}/orders.db")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream
# MAGIC Some orders as JSON files stand in for a real source. Each order is a transaction of its own
# MAGIC (`transaction_key`).

# COMMAND ----------

os.makedirs(f"{folder}/incoming", exist_ok=True)
with open(f"{folder}/incoming/orders.json", "w") as file:
    for n in range(1, order_count + 1):
        file.write(json.dumps({"order_id": n, "total": 0.0 if n == 3 else 10.0 * n}) + "\n")

orders = (
    spark.readStream.schema("order_id long, total double")
    .json(f"{folder}/incoming")
    .selectExpr("to_json(struct(*)) as body", "cast(order_id as string) as keys", "order_id")
)
sink = txmq.TransactionalSink(
    log,
    topic=topic,
    producer_group="order-service",
    listener=listener,
    transaction_key="order_id",
    checkpoint_location=f"{folder}/checkpoint",  # Spark Connect hides whose batches these are
)
query = orders.writeStream.foreachBatch(sink).option("checkpointLocation", f"{folder}/checkpoint")
query.trigger(availableNow=True).start().awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## What is visible, and what is pending
# MAGIC Committed orders can be read; those that wait for the bank are pending, and nobody sees them.

# COMMAND ----------


def committed() -> list[int]:
    rows = spark.read.format("txmq").option("path", log.path).option("subscribe", topic).load()
    return sorted(int(r["keys"]) for r in rows.select("keys").collect())


before = committed()
print("committed:", before)
print("pending:", log.pending().select(["half_id", "messages", "prepared_at"]).to_pylist())

# COMMAND ----------

# MAGIC %md
# MAGIC ## The check
# MAGIC The bank answers. A check asks the listener again and settles what was open. In production a scheduled job
# MAGIC does this: `spark-submit` of `rmq_spark/checks/job.py` with `conf/txmq.toml`.

# COMMAND ----------

with sqlite3.connect(f"{folder}/orders.db") as connection:
    connection.execute("update orders set paid = 1")

report = txmq.CheckService(log, listeners={"order-service": listener}, transaction_timeout=0).run_once()
print(report)

# COMMAND ----------

after = committed()
print("committed:", after)
print("pending:", log.pending().num_rows)
assert after == [n for n in range(1, order_count + 1) if n != 3], "every order but the refused one is visible, once"
assert log.pending().num_rows == 0
