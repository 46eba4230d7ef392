# Databricks notebook source
# MAGIC %md
# MAGIC # Operating a commit log
# MAGIC What is pending, and since when; who is behind; one page that says whether all is well. It is a
# MAGIC Databricks notebook, and runs with `python notebooks/04_operating.py`, where it was tried.
# MAGIC
# MAGIC On Databricks, install the package first: `%pip install` of its wheel with the extra `report`, then restart
# MAGIC Python.

# COMMAND ----------

import os
import sys
import tempfile

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import SparkSession

import rmq_spark as txmq
from rmq_spark import plots
from rmq_spark.report import figures_of, findings_of, page

spark = SparkSession.builder.appName("operating").getOrCreate()
txmq.register(spark)


def widget(name: str, default: str) -> str:
    """A notebook widget on Databricks; elsewhere the environment variable of that name in capitals."""
    try:
        dbutils.widgets.text(name, default)
        return dbutils.widgets.get(name)
    except NameError:
        return os.environ.get(name.upper(), default)


folder = widget("folder", "") or tempfile.mkdtemp(prefix="operating_")
print("everything is kept in", folder)


def display_chart(chart) -> None:
    """Shows a chart in a notebook; elsewhere says what it is."""
    try:
        displayHTML(chart.to_html())
    except NameError:
        print("chart:", chart.to_dict()["description"])


# COMMAND ----------

# MAGIC %md
# MAGIC ## Something to look at
# MAGIC A batch of 2,000 orders from Spark, and two payments of which nobody knows yet what became of them.

# COMMAND ----------

log = txmq.CommitLog.create(f"{folder}/log")
for topic in ("orders", "payments"):
    log.create_topic(topic, queues=2)

orders = spark.range(2_000).selectExpr("to_json(struct(*)) as body", "cast(id as string) as keys")
orders.write.format("txmq").mode("append").options(
    path=log.path, topic="orders", producerGroup="order-batch", transactionListener="none"
).save()


class Bank(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        return txmq.UNKNOWN

    def check_local_transaction(self, batch):
        return txmq.UNKNOWN


with txmq.TransactionMQProducer(log, "payments", Bank(), check_interval=None) as producer:
    for key in ("p1", "p2"):
        producer.send_message_in_transaction(txmq.Message("payments", b"{}", keys=key))

# COMMAND ----------

# MAGIC %md
# MAGIC ## What is pending
# MAGIC `log.pending()` lists what has no verdict. A check asks the listener of the group; after `transactionCheckMax`
# MAGIC answers of UNKNOWN (15 by default, here 2) the discard policy puts it into quarantine: hidden, and not lost.

# COMMAND ----------

print(log.pending().select(["half_id", "producer_group", "messages", "check_times"]).to_pylist())
checks = txmq.CheckService(log, listeners={"payments": Bank()}, transaction_timeout=0, transaction_check_max=2)
for _ in range(3):
    print(checks.run_once())
print("pending:", log.pending().num_rows, "quarantined:", log.quarantined().num_rows)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Who is behind
# MAGIC A group has read the first 1,500 orders. Its lag is told in messages, and in seconds since the oldest was
# MAGIC committed that it has not read.

# COMMAND ----------

reader = txmq.PullConsumer(log, "warehouse", topics="orders", stop_at_end=True)
with reader:
    for number, _ in enumerate(reader, start=1):
        if number > 1_500:  # whoever asks for the next message has done with the one before
            break
lag = txmq.ConsumerGroup(log, "warehouse").lag()
print("behind by", sum(lag["lag"].to_pylist()), "messages")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Is all well?
# MAGIC One sentence, and what to do. `txmq report` prints the same.

# COMMAND ----------

for finding in findings_of(figures_of(log)):
    print(f"{finding.level}: {finding}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Charts
# MAGIC Each function of `rmq_spark.plots` returns a chart of Altair. `page` makes one page of HTML with all of them:
# MAGIC it fetches nothing, so it can be kept or mailed.

# COMMAND ----------

for chart in (plots.throughput(log), plots.verdicts(log), plots.checks(log), plots.lag(log)):
    display_chart(chart)
with open(f"{folder}/report.html", "w") as file:
    file.write(page(figures_of(log)))
print("the page has", os.path.getsize(f"{folder}/report.html") // 1000, "kB")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A person decides
# MAGIC The bank says on the telephone that p1 was paid and p2 was not. `resolve` settles each for good; the reason is
# MAGIC kept.

# COMMAND ----------

first, second = log.quarantined()["half_id"].to_pylist()
log.resolve(first, txmq.COMMIT_MESSAGE, reason="paid, says the bank")
log.resolve(second, txmq.ROLLBACK_MESSAGE, reason="not paid, says the bank")
print(log.trace(half_id=first))
log.maintain()
print(findings_of(figures_of(log))[0])
assert log.quarantined().num_rows == 0
