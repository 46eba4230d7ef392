"""Hands committed messages over to another broker, each of them once and in the order of its queue.

A relay to Kafka (:class:`~rmq_spark.KafkaRelay`) has three parties::

    commit log ──read──▶ relay ──one Kafka transaction──▶ topic "orders"      queue 0 → partition 0, queue 1 → 1, …
                                                     └──▶ topic "txmq-positions"  (compacted): how far each queue is

What is handed over and how far it is are one Kafka transaction, so both are there or neither is. The position is a
record of the positions topic, not of a consumer group: its key says relay, log id, topic and queue, its value the next
offset and the id of the last message. Nothing is ever written to the commit log.

A start, step by step:

1. ``init_transactions()`` fences the last process with the same ``transactional.id`` (one for each log id, relay and
   shard), and ends its transaction.
2. A transaction begins with a *claim*, a record of who runs this shard, at some offset of the positions topic.
3. The positions topic is read, read_committed, up to the claim: a transaction that stands before it ends first. So no
   position is missed, also when another shard's open transaction hides what follows it. (The end that a read_committed
   consumer is told lies before that transaction.)
4. What was read must fit: the same log id, the same number of shards, a log that has all that was handed over. Then the
   claim is committed, and with the relay's first claim where each queue begins.

Then messages follow in transactions of ``max_batch_messages``. One that is aborted is sent again. Nobody knows what
became of a commit whose answer does not come, so it is repeated; if that is in vain, the relay ends and the next start
reads the positions. A process that was fenced ends for good.
"""
