"""The query: every basket is one transaction of three messages, which go to three topics.

The demo runs it as ``python -m examples.grocer.stream``, in a process that may be killed at any moment. When it is
started again, it goes on where its checkpoint and the commit log say.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from examples.grocer.baskets import BASKET_DDL
from examples.grocer.settings import PRODUCER_GROUP, Folder, Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LISTENER = "examples.grocer.orders:listener"
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM lives for a minute at most. Compiling code again, for more speed, would cost more than it saves."""


def start_spark(folder: Folder, name: str) -> SparkSession:
    """Start a quiet Spark session on two cores. Its workers use this Python, and its files stay in the folder."""
    folder.temporary.mkdir(exist_ok=True)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName(name)
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": f'{JVM_OPTIONS} "-Djava.io.tmpdir={folder.temporary}"',
        # A killed JVM cleans nothing up. Its files are removed with the folder.
        "spark.local.dir": str(folder.temporary),
        "spark.sql.warehouse.dir": str(folder.temporary / "warehouse"),
        "spark.driver.memory": "2g",
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def to_messages(baskets: DataFrame) -> DataFrame:
    """Return three messages for each basket: what to ship, what was spent, and what to clear."""
    from pyspark.sql import functions as F

    order_id = F.col("basket_id").alias("order_id")
    ship = F.to_json(F.struct(order_id, "store_id", "items"))
    spent = F.to_json(F.struct(order_id, "household_id", "spent_cents"))
    clear = F.to_json(F.struct(order_id, "household_id", F.col("items.product_id").alias("products")))
    bodies = {"logistics": ship, "points": spent, "cart": clear}
    messages = [F.struct(F.lit(topic).alias("topic"), body.alias("body")) for topic, body in bodies.items()]
    return baskets.select(
        "basket_id",
        F.col("basket_id").cast("string").alias("keys"),
        F.col("paid_at").alias("born_timestamp"),
        F.inline(F.array(*messages)),
    )


def run(folder: Folder) -> None:
    """Send every basket that no earlier run has sent, then return."""
    spark = start_spark(folder, "rmq_spark demo")
    baskets = spark.readStream.schema(BASKET_DDL).option("maxFilesPerTrigger", 1).parquet(str(folder.input))
    query = (
        to_messages(baskets)
        .writeStream.format("txmq")
        .option("path", str(folder.log))
        .option("producerGroup", PRODUCER_GROUP)
        .option("transactionListener", LISTENER)
        .option("transactionKey", "basket_id")
        .option("checkpointLocation", str(folder.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def main() -> None:
    folder = Settings().folder
    if os.getsid(0) == os.getpid():  # the demo started it, in a session of its own, which a kill may end
        folder.driver.write_text(str(os.getpid()), encoding="utf-8")
    run(folder)


if __name__ == "__main__":
    main()
