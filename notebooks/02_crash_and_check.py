# Databricks notebook source
# MAGIC %md
# MAGIC # A crash, and a check
# MAGIC A program writes an order into a database and tells others about it. This notebook kills it with SIGKILL at
# MAGIC the two worst moments: after the database's commit and before the verdict, and before the database's commit. A
# MAGIC check finds out what happened, and the messages agree with the database each time. It needs no Spark. It is
# MAGIC a Databricks notebook, and runs with `python notebooks/02_crash_and_check.py`, where it was tried.
# MAGIC
# MAGIC On Databricks, install the package first: `%pip install` of its wheel with the extra `sql`, then restart
# MAGIC Python.

# COMMAND ----------

import os
import pathlib
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time

import sqlalchemy as sa

import rmq_spark as txmq


def widget(name: str, default: str) -> str:
    """A notebook widget on Databricks; elsewhere the environment variable of that name in capitals."""
    try:
        dbutils.widgets.text(name, default)
        return dbutils.widgets.get(name)
    except NameError:
        return os.environ.get(name.upper(), default)


folder = widget("folder", "") or tempfile.mkdtemp(prefix="crash_and_check_")
print("everything is kept in", folder)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A commit log, a database, and its fence
# MAGIC The fence is a table in the database. The local transaction writes a row into it, so whoever looks there knows
# MAGIC whether the transaction was committed.

# COMMAND ----------

log = txmq.CommitLog.create(f"{folder}/log")
log.create_topic("orders", queues=1)
database = f"sqlite:///{folder}/orders.db"
with sa.create_engine(database).begin() as connection:
    connection.execute(sa.text("create table orders (order_id integer primary key)"))

txmq.create_fence(database)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The program
# MAGIC It sends one order, and dies where it is told to. The work of the local transaction runs in one database
# MAGIC transaction with the fence row.

# COMMAND ----------

program = """
    import os
    import signal
    import sys

    import sqlalchemy as sa

    import rmq_spark as txmq

    path, database, order_id, where = sys.argv[1:]


    def die_at(place):
        if place == where:
            os.kill(os.getpid(), signal.SIGKILL)


    def work(connection, batch):
        connection.execute(sa.text("insert into orders values (:order_id)"), {"order_id": batch.arg})
        die_at("before the commit")


    class Orders(txmq.SqlTransactionListener):
        def execute_local_transaction(self, batch):
            verdict = super().execute_local_transaction(batch)
            die_at("after the commit")
            return verdict


    with txmq.TransactionMQProducer(path, "order-service", Orders(database, work)) as producer:
        message = txmq.Message("orders", b"a new order", keys=order_id)
        result = producer.send_message_in_transaction(message, int(order_id), idempotency_key=f"order-{order_id}")
        print("order", order_id, result.local_transaction_state.name, result.transaction_id)
"""
pathlib.Path(folder, "program.py").write_text(textwrap.dedent(program))


def run(order_id: int, where: str) -> None:
    """Run the program; a negative exit code is the signal that ended it."""
    command = [sys.executable, f"{folder}/program.py", log.path, database, str(order_id), where]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout.strip() or f"the program died {where}: exit code {done.returncode}")


def show() -> None:
    with sqlite3.connect(f"{folder}/orders.db") as connection:
        written = [order_id for (order_id,) in connection.execute("select order_id from orders order by order_id")]
    told = sorted(int(key) for key in log.read("orders", columns=["keys"])["keys"].to_pylist())
    print("in the database:", written, "- told:", told, "- pending:", log.pending().num_rows)


run(1, "nowhere")
run(2, "after the commit")
run(3, "before the commit")
show()
left_open = log.pending()["half_id"].to_pylist()

# COMMAND ----------

# MAGIC %md
# MAGIC Order 2 is in the database, and nobody was told; order 3 is in neither. Both half messages are pending, so
# MAGIC nobody sees them.
# MAGIC
# MAGIC ## The check
# MAGIC The check asks the listener of the same producer group. It looks into the fence: for order 2 it finds a row,
# MAGIC and commits. For order 3 it finds none. It first waits a while (`rollback_after`, 60 s by default), since the
# MAGIC program may be slow and not dead. Then it writes a row of its own, so that a program that wakes up too late
# MAGIC fails on it, and rolls back.

# COMMAND ----------

listener = txmq.SqlTransactionListener(database, rollback_after=1)
checks = txmq.CheckService(log, listeners={"order-service": listener}, transaction_timeout=0)
while log.pending().num_rows:
    print(checks.run_once())
    time.sleep(0.2)
show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The story of each
# MAGIC `log.trace` tells what happened to a transaction, and who decided.

# COMMAND ----------

for half_id in left_open:
    print(log.trace(half_id=half_id))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Sending again
# MAGIC Whoever called the program does not know what became of order 3, and sends it again under the same idempotency
# MAGIC key. It never happened, so it runs now, as the second attempt: `:2` at the end of the transaction id. Order 2
# MAGIC did happen: sending it again does nothing.

# COMMAND ----------

run(2, "nowhere")
run(3, "nowhere")
show()
assert sorted(log.read("orders", columns=["keys"])["keys"].to_pylist()) == ["1", "2", "3"]
