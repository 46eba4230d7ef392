"""What the columns of a log's tables mean: the comments that ``DESCRIBE`` shows, and the reference of the docs."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

MESSAGES: Mapping[str, str] = {
    "topic": "The message's topic.",
    "queue_id": "The message's queue.",
    "queue_offset": "Its place in the queue: 0, 1, 2, … without gaps.",
    "msg_id": "Names the message. It never changes.",
    "transaction_id": "Names the transaction and its attempt.",
    "tags": "The message's tag.",
    "keys": "Its business keys, as one string with blanks between.",
    "sharding_key": "Its sharding key.",
    "properties": "Its properties.",
    "body": "Its body.",
    "producer_group": "Who sent it.",
    "born_timestamp": "When it was made, as its sender says.",
    "store_timestamp": "When it was written.",
    "commit_timestamp": "When it became visible. It never runs backwards within a queue.",
    "half_id": "The half batch that it came with.",
    "file_no": "With row_no its address in the half batch.",
    "row_no": "See file_no.",
    "attempt": "The attempt that was committed.",
    "op_version": "The version of op that placed it.",
    "transaction_per": "batch, message or key: what made one transaction.",
    "transaction_key": "The value of the transaction key.",
}
HALF: Mapping[str, str] = {
    "half_id": "Names the half batch: the messages of one micro-batch, batch write or send.",
    "app_id": "Who sent it: a query, an appId, or one send of a producer.",
    "batch_id": "The number of the micro-batch.",
    "query_id": "The id in the query's checkpoint.",
    "input_hash": "A hash of the checkpoint's file offsets/<batch_id>.",
    "fence_id": "The fence of the listener that it was prepared with.",
    "transaction_per": "batch, message or key: what makes one transaction.",
    "producer_group": "Whose listeners answer for it.",
    "file_no": "With row_no the message's address, for good.",
    "row_no": "See file_no.",
    "transaction_key": "The value of the transaction key.",
    "topic": "As the sink got it.",
    "queue_id": "The queue that was chosen for it.",
    "tags": "As the sink got it.",
    "keys": "As the sink got it, as one string.",
    "sharding_key": "As the sink got it.",
    "properties": "As the sink got it.",
    "body": "As the sink got it; null when it was drained and stripped.",
    "born_timestamp": "As the sink got it; null when the row was stripped.",
    "store_timestamp": "When the row was written.",
    "deliver_at": "When it is to appear, if it was delayed.",
}
OP: Mapping[str, str] = {
    "version": "The version of this table at which the row was committed.",
    "op_time": "When the row was committed.",
    "commit_id": "One id for each commit to this table.",
    "kind": "What the row says: commit, place, rollback, check, lease, mark and others.",
    "half_id": "The half batch of which the row says it.",
    "file_no": "The file of the half batch; null for all.",
    "ranges": "The rows of the file; null for all.",
    "count": "How many rows.",
    "attempt": "The attempt of which the row says it.",
    "decided_by": "execute, check, discard or admin.",
    "refused": "rollback: true when the local transaction ran and said no, so it is final. Null in other rows.",
    "reason": "Why, in words.",
    "topic": "Of a commit or place: the topic.",
    "queue_id": "Of a commit or place: the queue.",
    "queue_offset": "The offset of the first row named; the others follow in order. Null: decided, not yet placed.",
    "next_offset": "queue_offset + count.",
    "path": "Where the rows lay when this was written: a hint.",
    "file_rows": "Rows of the half file as written.",
    "transaction_per": "As in half.",
    "producer_group": "As in half.",
    "until": "Of a lease: its end. Of a commit without an offset: when its messages are due.",
    "verdict": "Of a conflict: the verdict that came too late.",
    "low_water": "Of a mark: the time of prepare (ms) up to which everything is settled, but for what below names.",
    "since_version": "Of a mark: op rows before this version are not needed for what is open.",
    "tails": "Of a mark: the next offset of every queue.",
    "firsts": "Of an expire or mark: the first offset that is kept of queues.",
    "reopened_ms": "Of a mark: when a transaction was last reopened.",
    "below": "Of a mark: half batches at or below low_water that are open.",
    "prepared_ms": "Of an archived: when the half batch was prepared.",
    "archived": "Of an archived: what is kept of a half batch that leaves.",
}
TOPICS: Mapping[str, str] = {
    "name": "The topic.",
    "queues": "How many queues it has.",
    "fifo": "Whether each sharding key keeps its order.",
    "retention_s": "Seconds for which messages are kept; null for ever.",
    "created": "When it was made or changed.",
}
GROUPS: Mapping[str, str] = {
    "consumer_group": "The group.",
    "topic": "The topic that it reads.",
    "queue_id": "The queue.",
    "next_offset": "The first offset that it has not consumed.",
    "updated": "When the row was written.",
    "updated_by": "Who wrote it.",
    "suspended_until": "Until when an orderly consumer has suspended the queue.",
    "session": "Which run of a Spark query has claimed it.",
    "consumer": "spark or members: who reads for the group.",
    "owner": "Which member has the queue.",
    "generation": "Raised by each claim, so that a member that lost the queue is refused.",
    "epoch": "Made anew by a reset.",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "messages": MESSAGES,
    "half": HALF,
    "op": OP,
    "topics": TOPICS,
    "groups": GROUPS,
}
"""By table, what each of its columns means."""


def commented(table: str, schema: pa.Schema) -> pa.Schema:
    """Return a table's schema with what each column means as its comment, for the table's creation alone. Schemas of
    files and of commits have no comments, and delta-rs keeps those of the table."""
    return pa.schema([field.with_metadata({"comment": COLUMNS[table][field.name]}) for field in schema])
