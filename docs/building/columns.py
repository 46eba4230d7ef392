"""What the sink's columns and the kinds of rows of ``op`` mean. What the columns of tables mean says
``rmq_spark/_core/client/columns.py``."""

from __future__ import annotations

from collections.abc import Mapping

SINK: Mapping[str, str] = {
    "body": "The message. Required, at most 4 MiB.",
    "topic": "A topic of the log; the option topic when there is no such column.",
    "tags": "One tag, by which consumers filter.",
    "sharding_key": "Messages of one sharding key share a queue; in a FIFO topic they keep their order.",
    "keys": "Business keys. Several are kept as one string, with blanks between.",
    "queue_id": "Chooses the queue.",
    "properties": "Anything else, at most 32 KiB. Names that RocketMQ reserves are refused.",
    "born_timestamp": "When the message was made; the time of sending when there is none.",
    "deliver_at": "A committed message does not appear before this time, at most three days ahead.",
    "delay_level": "1 to 18: the message appears 1 s to 2 h after it was sent.",
}
KINDS: Mapping[str, str] = {
    "commit": "committed; with an offset it is visible, without one it waits for its key or its time",
    "place": "gives the offset later",
    "rollback": "rolled back",
    "quarantine": "nobody knows the answer: hidden, and listed for a person",
    "check": "a check got an answer that decided nothing",
    "reopen": "pending again",
    "lease": "its local transaction is still running: checkers leave it alone",
    "conflict": "a verdict came that contradicts an earlier one",
    "mark": "everything that was prepared until then is settled, but for what it names",
    "archived": "the half batch leaves, and this is what is kept of it",
    "expire": "a queue's first offset moves up",
}
