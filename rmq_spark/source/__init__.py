"""The source: reads committed messages of topics, as a batch or a stream.

Spark imports this module whenever it looks up ``txmq``, so it holds names only.
"""

from __future__ import annotations

SOURCE_OPTIONS = (
    "path",
    "subscribe",
    "subscribePattern",
    "tags",
    "selector",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "ordered",
    "consumerGroup",
)
"""Options of ``spark.read`` and ``spark.readStream``, besides ``storage.<key>``."""

SOURCE_DDL = (
    "topic string, queue_id int, queue_offset bigint, msg_id string, transaction_id string, tags string, keys string, "
    "sharding_key string, properties map<string,string>, body binary, producer_group string, "
    "born_timestamp timestamp, store_timestamp timestamp, commit_timestamp timestamp"
)
"""The schema of the source, in Spark's DDL."""
