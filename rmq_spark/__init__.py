"""RocketMQ's transactional messages for Spark: ``import rmq_spark as txmq``.

This module has the names that programs use most. Results, reports and statuses are in the public modules beside it.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  after the main thread's end it can no longer be imported
import importlib
from typing import TYPE_CHECKING, Any

from rmq_spark._core.lazy import public

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rmq_spark._core.checks.service import CheckService as CheckService
    from rmq_spark._core.client.commit_log import CommitLog as CommitLog
    from rmq_spark._core.consumers.consumer_group import ConsumerGroup as ConsumerGroup
    from rmq_spark._core.consumers.dead_letters import DeadLetters as DeadLetters
    from rmq_spark._core.consumers.inbox import SqlInbox as SqlInbox
    from rmq_spark._core.consumers.message_listener import ConsumeResult as ConsumeResult
    from rmq_spark._core.consumers.message_listener import EachMessage as EachMessage
    from rmq_spark._core.consumers.pull import PullConsumer as PullConsumer
    from rmq_spark._core.consumers.push import PushConsumer as PushConsumer
    from rmq_spark._core.kafka.relay import KafkaRelay as KafkaRelay
    from rmq_spark._core.listeners.delta import DeltaTransactionListener as DeltaTransactionListener
    from rmq_spark._core.listeners.fence import create_fence as create_fence
    from rmq_spark._core.listeners.half_batch import HalfBatch as HalfBatch
    from rmq_spark._core.listeners.per_message import PerMessageListener as PerMessageListener
    from rmq_spark._core.listeners.sql import SqlTransactionListener as SqlTransactionListener
    from rmq_spark._core.listeners.table_listener import TableListener as TableListener
    from rmq_spark._core.listeners.transaction_listener import TransactionListener as TransactionListener
    from rmq_spark._core.producer.producer import TransactionMQProducer as TransactionMQProducer
    from rmq_spark._core.spark.consume import consume as consume
    from rmq_spark._core.spark.datasource import register as register
    from rmq_spark._core.spark.foreach_batch import TransactionalSink as TransactionalSink
    from rmq_spark._core.spark.native import messages as messages
    from rmq_spark._core.vocabulary.message import Message as Message
    from rmq_spark._core.vocabulary.message import MessageExt as MessageExt
    from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE as COMMIT_MESSAGE
    from rmq_spark._core.vocabulary.verdicts import ROLLBACK_MESSAGE as ROLLBACK_MESSAGE
    from rmq_spark._core.vocabulary.verdicts import UNKNOWN as UNKNOWN
    from rmq_spark._core.vocabulary.verdicts import LocalTransactionState as LocalTransactionState
    from rmq_spark._core.vocabulary.verdicts import Rollback as Rollback
    from rmq_spark.errors import *  # noqa: F403

_MODULES = (
    "checks consumers errors json_logs kafka listeners log message metrics plots producer report sink spark testing"
).split()
_of_core, _, _all = public(__name__)
__all__ = sorted([*_all, "__version__", *_MODULES])

_ROCKETMQ_NAMES = {
    "DefaultMQProducer": "TransactionMQProducer, whose send() needs no listener,",
    "DefaultMQPushConsumer": "PushConsumer",
    "DefaultLitePullConsumer": "PullConsumer",
    "MessageListenerConcurrently": 'a function for PushConsumer(..., mode="concurrently")',
    "MessageListenerOrderly": 'a function for PushConsumer(..., mode="orderly")',
    "ConsumeConcurrentlyStatus": "ConsumeResult",
    "ConsumeOrderlyStatus": "ConsumeResult",
    "UNKNOW": "UNKNOWN",
}


def __getattr__(name: str) -> Any:
    if name in _all:
        return _of_core(name)
    if name in _MODULES:
        return importlib.import_module(f"rmq_spark.{name}")
    errors = importlib.import_module("rmq_spark.errors")
    if name.endswith("Error") and hasattr(errors, name):
        return getattr(errors, name)
    unknown = f"module 'rmq_spark' has no attribute {name!r}"
    if name in _ROCKETMQ_NAMES:
        raise AttributeError(f"{unknown}: RocketMQ's {name} is {_ROCKETMQ_NAMES[name]} here")
    for module in () if name.startswith("_") else _MODULES:
        if name in getattr(importlib.import_module(f"rmq_spark.{module}"), "__all__", ()):
            raise AttributeError(f"{unknown}: it is rmq_spark.{module}.{name}")
    raise AttributeError(unknown if name.startswith("_") else f"{unknown}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    """The public name that a mistyped one is close to, or nothing."""
    from rmq_spark._core.vocabulary.options import nearest

    text = nearest(name, __dir__())
    return f": {text}" if text.startswith("did you mean") else ""


def __dir__() -> list[str]:
    errors = importlib.import_module("rmq_spark.errors")
    return sorted([*__all__, *(name for name in vars(errors) if name.endswith("Error"))])
