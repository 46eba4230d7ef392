"""Consumers with and without Spark: listeners of messages, groups, dead letters, and the inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.consumers.consumer_group import ConsumerGroup as ConsumerGroup
    from rmq_spark._core.consumers.dead_letters import DeadLetters as DeadLetters
    from rmq_spark._core.consumers.inbox import SqlInbox as SqlInbox
    from rmq_spark._core.consumers.member_settings import ConsumeFromWhere as ConsumeFromWhere
    from rmq_spark._core.consumers.message_listener import ConsumeResult as ConsumeResult
    from rmq_spark._core.consumers.message_listener import EachBatch as EachBatch
    from rmq_spark._core.consumers.message_listener import EachMessage as EachMessage
    from rmq_spark._core.consumers.pull import PullConsumer as PullConsumer
    from rmq_spark._core.consumers.push import PushConsumer as PushConsumer
    from rmq_spark._core.spark.consume import consume as consume

__getattr__, __dir__, __all__ = public(__name__)
