"""Copies committed messages to another broker, each once and in the order of its queue.

A relay to Kafka (:class:`~rmq_spark.KafkaRelay`) has three parties::

    commit log ──read──▶ relay ──one Kafka transaction──▶ topic "orders"      queue 0 → partition 0, queue 1 → 1, …
                                                     └──▶ topic "txmq-positions"  (compacted): each queue's position

Messages and their positions are in one Kafka transaction, so both are there or neither is. A position is a record of
the positions topic, not of a consumer group. Its key is relay, log id, topic and queue. Its value is the next offset
and the id of the last message. The relay never writes to the commit log.

The steps of a start:

1. ``init_transactions()`` fences the last process with the same ``transactional.id`` (one for each log id, relay and
   shard), and ends its transaction.
2. A transaction begins with a *claim* in the positions topic: a record of the process that runs this shard.
3. The positions topic is read, read_committed, up to the claim. Transactions before the claim must end first, so no
   position is missed, even when another shard's open transaction hides later records. (The end that Kafka reports to a
   read_committed consumer lies before that transaction.)
4. The records must fit: the same log id, the same number of shards, and a log that still has all handed-over messages.
   Then the claim is committed. The relay's first claim also contains the start of each queue.

Then messages follow in transactions of ``max_batch_messages``. An aborted transaction is sent again. A commit without
an answer may or may not have happened, so it is repeated. If there is still no answer, the relay ends, and the next
start reads the positions. A fenced process ends for good.
"""
