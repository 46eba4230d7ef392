# Databricks notebook source
# MAGIC %md
# MAGIC # Ordered orders, retries and dead letters
# MAGIC The messages about one order must arrive in their order, also when one of them is decided late. And a consumer
# MAGIC must get past a message that it cannot consume. This notebook shows both. It is a Databricks notebook, and runs
# MAGIC with `python notebooks/03_ordered_orders_and_retries.py`, where it was tried.
# MAGIC
# MAGIC On Databricks, install the package first: `%pip install` of its wheel, then restart Python.

# COMMAND ----------

import os
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import rmq_spark as txmq

spark = SparkSession.builder.appName("ordered orders").getOrCreate()
txmq.register(spark)


def widget(name: str, default: str) -> str:
    """A notebook widget on Databricks; elsewhere the environment variable of that name in capitals."""
    try:
        dbutils.widgets.text(name, default)
        return dbutils.widgets.get(name)
    except NameError:
        return os.environ.get(name.upper(), default)


folder = widget("folder", "") or tempfile.mkdtemp(prefix="ordered_orders_")
print("everything is kept in", folder)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A FIFO topic
# MAGIC Messages with one sharding key share a queue, and keep the order in which they were sent.

# COMMAND ----------

log = txmq.CommitLog.create(f"{folder}/log")
log.create_topic("orders", queues=2, fifo=True)


class Shop(txmq.TransactionListener):
    """Its local transaction says what it is told to say; the bank answers later."""

    def execute_local_transaction(self, batch):
        return batch.arg

    def check_local_transaction(self, batch):
        return txmq.COMMIT_MESSAGE


def visible() -> list[str]:
    return sorted(log.read("orders", columns=["keys"])["keys"].to_pylist())


with txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None) as producer:
    for event in ("created", "paid", "shipped"):
        for order in ("A", "B"):
            # Nobody knows yet whether order A was paid.
            verdict = txmq.UNKNOWN if (order, event) == ("A", "paid") else txmq.COMMIT_MESSAGE
            message = txmq.Message("orders", event.encode(), keys=f"{order} {event}", sharding_key=order)
            producer.send_message_in_transaction(message, verdict)

print("visible:", visible())
print("pending:", log.pending()["messages"].to_pylist())

# COMMAND ----------

# MAGIC %md
# MAGIC Order A was shipped, and that is committed. It still waits: nobody may see *shipped* before *paid*. Order B
# MAGIC does not wait for A. The check settles the payment, and both messages appear in the same commit, in their
# MAGIC order.

# COMMAND ----------

print(txmq.CheckService(log, listeners={"shop": Shop()}, transaction_timeout=0).run_once())
rows = log.read("orders", columns=["queue_id", "queue_offset", "keys"]).to_pylist()
print("in order:", [row["keys"] for row in rows if row["keys"].startswith("A")])

# COMMAND ----------

# MAGIC %md
# MAGIC ## A consumer group on Spark
# MAGIC The listener runs on the executors. It cannot consume one message, and says so: `FAILURE`. The others
# MAGIC do not wait for it. Such a message comes again after 10 s, 30 s, 1 min and so on; after its last retry it is a
# MAGIC dead letter. Here it may not be retried at all, so that the notebook need not wait.

# COMMAND ----------

Result = txmq.ConsumeResult


def ship(messages):
    """Gets a table of messages, and returns a result for each."""
    return [Result.FAILURE if key == "B paid" else Result.SUCCESS for key in messages["keys"].to_pylist()]


def consume(listener) -> None:
    stream = spark.readStream.format("txmq").option("path", log.path).option("subscribe", "orders")
    stream = stream.option("consumerGroup", "warehouse").option("startingOffsets", "earliest").load()
    checkpoint = f"{folder}/warehouse"
    query = txmq.consume(stream, "warehouse", listener, max_reconsume_times=0, checkpoint_location=checkpoint)
    query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


consume(ship)
letters = txmq.DeadLetters(log, "warehouse")
print("dead letters:", letters.list().select(["keys", "reason"]).to_pylist())
print("behind by", sum(txmq.ConsumerGroup(log, "warehouse").lag()["lag"].to_pylist()), "messages")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Sending a dead letter again
# MAGIC When the cause is gone, the letter is sent again, to this group alone.

# COMMAND ----------

print("sent again:", letters.resend([0]))
consume(lambda messages: None)
behind = sum(txmq.ConsumerGroup(log, "warehouse").lag()["lag"].to_pylist())
print("behind by", behind, "messages; dead letters:", letters.list().num_rows)
assert behind == 0
