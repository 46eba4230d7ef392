"""The names of the source's options. Spark imports this module at each lookup of ``txmq``, so it holds nothing else."""

from __future__ import annotations

SOURCE_TABLE = {
    "path": ("required", "The commit log's folder or URI."),
    "subscribe": ("this or subscribePattern", "Topics to read, with commas between."),
    "subscribePattern": ("this or subscribe", "A regular expression that the whole name of a topic must match."),
    "tags": ("*", "Messages with one of these tags: TagA || TagB."),
    "selector": ("all messages", "A condition in RocketMQ's SQL92, instead of tags: a > 5 AND region IN ('eu', 'us')."),
    "startingOffsets": (
        "latest for streams, earliest for batches",
        'earliest, latest, or JSON that names every queue: {"orders": {"0": 23, "1": -2}} (-2 earliest, -1 latest).',
    ),
    "endingOffsets": ("latest", "Batches: latest, or JSON as for startingOffsets."),
    "startingTimestamp": ("", "Messages that were committed then or later, in place of startingOffsets."),
    "endingTimestamp": ("", "Batches: messages that were committed before, in place of endingOffsets."),
    "maxOffsetsPerTrigger": ("all", "Streams: at most so many messages a micro-batch."),
    "limitFirstBatch": (
        "false",
        "Streams before Spark 4.2: true: maxOffsetsPerTrigger also limits the first micro-batch of a run. Not with "
        "trigger(availableNow=True), whose run is one micro-batch there.",
    ),
    "minPartitions": ("", "Split large ranges, so that Spark has at least so many partitions."),
    "maxRecordsPerPartition": ("", "Split ranges that have more messages than this."),
    "failOnDataLoss": (
        "true",
        "false: warn and skip what the log no longer holds; a log that was made anew is read from its start.",
    ),
    "ordered": ("false", "true: one partition a queue, read in order."),
    "consumerGroup": (
        "none",
        "Streams: publish the progress of this group, start where it stands, and read its retries.",
    ),
}
"""Options of ``spark.read`` and ``spark.readStream``, besides ``storage.<key>``: their default and their meaning."""
SOURCE_OPTIONS = tuple(SOURCE_TABLE)
