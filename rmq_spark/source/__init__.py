"""The source: committed messages of topics, as a batch or a stream.

This module is imported whenever Spark looks ``txmq`` up, so it holds names only.
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
"""Options of ``spark.read`` and ``spark.readStream``; ``storage.<key>`` comes on top."""

SOURCE_DDL = (
    "topic string, queue_id int, queue_offset bigint, msg_id string, transaction_id string, tags string, keys string, "
    "sharding_key string, properties map<string,string>, body binary, producer_group string, "
    "born_timestamp timestamp, store_timestamp timestamp, commit_timestamp timestamp"
)
"""The schema of the source, as Spark writes it."""
