"""What ``make bench-orders`` does with orders: the listeners that its sinks name, and the functions of plain Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pgpq import ArrowToPostgresBinaryEncoder
from pyspark.sql import DataFrame, Row

import rmq_spark
from rmq_spark import HalfBatch, SqlTransactionListener
from rmq_spark._core.listeners.transaction_listener import Verdicts

URL = "TXMQ_BENCH_URL"
"""The variable with the database's URL, which the workers of Spark inherit."""
PID = "TXMQ_BENCH_PID"
"""The variable with the file into which ``work`` writes whose memory is to be looked at."""
TABLE = "orders"
COLUMNS = ("order_id", "customer", "amount")
FIELDS = "order_id long, customer string, amount double"
MAKE_TABLE = f"CREATE TABLE {TABLE} (order_id bigint PRIMARY KEY, customer text, amount double precision)"
MAKE_COSTLY = (
    f"CREATE INDEX by_customer ON {TABLE} (customer)",
    f"CREATE INDEX by_amount ON {TABLE} (amount, customer)",
    f"CREATE INDEX by_both ON {TABLE} (customer, order_id, amount)",
    "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN NEW.customer := upper(NEW.customer); RETURN NEW; END $$",
    f"CREATE TRIGGER note BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION note()",
)
"""What makes the table cost the database work: three indexes and a trigger."""
MAKE_CHEAP = (
    "DROP INDEX IF EXISTS by_customer, by_amount, by_both",
    "DROP FUNCTION IF EXISTS note() CASCADE",
)
COPY = f"COPY {TABLE} ({', '.join(COLUMNS)}) FROM STDIN"
REFUSED_OF = 100
"""Every hundredth order is refused."""


# ------------------------------------------------------------------ with messages
def insert_all(connection: sa.Connection, batch: HalfBatch) -> None:
    Path(os.environ[PID]).write_text(str(os.getpid()))
    batch.insert(connection, TABLE, FIELDS)


def insert_good(connection: sa.Connection, batch: HalfBatch) -> Verdicts:
    rows = batch.decode(FIELDS)
    ids = rows["order_id"]
    bad = pc.equal(pc.subtract(ids, pc.multiply(pc.divide(ids, REFUSED_OF), REFUSED_OF)), 0)
    batch.insert(connection, TABLE, rows.filter(pc.invert(bad)))
    return batch.verdicts(rollback=dict.fromkeys(ids.filter(bad).to_pylist(), "not in stock"))


copying = SqlTransactionListener(f"env:{URL}", insert_all)
refusing = SqlTransactionListener(f"env:{URL}", insert_good)


def through_table() -> Any:
    return rmq_spark.TableListener(f"env:{URL}", TABLE, key="order_id")


# ------------------------------------------------------------------ plain, at least once
def _conninfo() -> str:
    url = sa.make_url(os.environ[URL]).set(drivername="postgresql")
    return url.render_as_string(hide_password=False)


def copy_rows(rows: Iterator[Row]) -> None:
    """COPY in the text format, row by row, as people write it."""
    with psycopg.connect(_conninfo()) as connection, connection.cursor() as cursor, cursor.copy(COPY) as copy:
        for row in rows:
            copy.write_row((row.order_id, row.customer, row.amount))


def copy_encoded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """COPY in the binary format, made by the encoder that ``batch.insert`` uses."""
    with (
        psycopg.connect(_conninfo()) as connection,
        connection.cursor() as cursor,
        cursor.copy(f"{COPY} (FORMAT BINARY)") as copy,
    ):
        encoder = None
        for batch in batches:
            if encoder is None:
                encoder = ArrowToPostgresBinaryEncoder(batch.schema)
                copy.write(encoder.write_header())
            copy.write(encoder.write_batch(batch))
        if encoder is not None:
            copy.write(encoder.finish())
    yield pa.record_batch({"done": [1]})


def by_rows(messages: Path) -> Callable[[DataFrame, int], None]:
    """For foreachBatch: the executors COPY row by row, and the messages are appended to a Delta table."""

    def work(batch: DataFrame, batch_id: int) -> None:
        batch.select(*COLUMNS).foreachPartition(copy_rows)
        append(batch, messages)

    return work


def by_encoder(messages: Path) -> Callable[[DataFrame, int], None]:
    """For foreachBatch: the executors COPY what the encoder made of Arrow, and the messages are appended to a Delta
    table."""

    def work(batch: DataFrame, batch_id: int) -> None:
        batch.select(*COLUMNS).mapInArrow(copy_encoded, "done long").collect()
        append(batch, messages)

    return work


def append(batch: DataFrame, messages: Path) -> None:
    """The batch is not persisted: to read its Parquet files twice takes less time than to keep them."""
    batch.select("body").write.format("delta").mode("append").save(str(messages))
