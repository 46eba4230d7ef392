"""Commit logs with messages in them, for the tests of the source."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from rmq_spark import CommitLog
from tests.support.half_batches import decide_one, pending, prepare, split
from tests.support.inside import SOURCE_SCHEMA, HalfRecord, Who, spark_schema

_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "map<string,string>": MapType(StringType(), StringType()),
}


def source_schema(ddl: str | None = None) -> StructType:
    """A schema without a Spark session, which would parse it; all columns of the source without one."""
    if ddl is None:
        return spark_schema(SOURCE_SCHEMA)
    fields = [part.split(" ", 1) for part in ddl.split(", ") if part]
    return StructType([StructField(name, _TYPES[kind]) for name, kind in fields])


def decide(log: CommitLog, record: HalfRecord, roll_back_every: int | None = None) -> None:
    """Commit what is pending, but for every so-manieth row, which is rolled back."""
    mask = pending(log, record)
    commit, rollback = split(mask, roll_back_every) if roll_back_every else (mask, {})
    decide_one(log.engine, record, 1, commit=commit, rollback=rollback, who=Who.EXECUTE)


def send(log: CommitLog, batch_id: int, messages: int = 5, **more: Any) -> HalfRecord:
    """A half batch of numbered messages, committed."""
    bodies = [f"{batch_id}.{i}" for i in range(messages)]
    tags = [("a", "b", None)[i % 3] for i in range(messages)]
    table = pa.table({"body": bodies, "tags": pa.array(tags, pa.string()), "keys": [f"k{i}" for i in range(messages)]})
    record = prepare(log, batch_id, table, **more)
    decide(log, record)
    return record
