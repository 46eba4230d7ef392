"""RocketMQ's transactional messages for Spark: ``import rmq_spark as txmq``.

A name is loaded when it is first used, so importing the package loads almost nothing. Spark's workers fork, and Delta's
engine must not run in a process that forks.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  it cannot be imported any more when the main thread has ended
import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rmq_spark.check.policy import TransactionCheckListener as TransactionCheckListener
    from rmq_spark.check.report import CheckReport as CheckReport
    from rmq_spark.check.service import CheckService as CheckService
    from rmq_spark.commitlog.log import CommitLog as CommitLog
    from rmq_spark.consumer.consume import consume as consume
    from rmq_spark.consumer.dead_letters import DeadLetters as DeadLetters
    from rmq_spark.consumer.groups import ConsumerGroup as ConsumerGroup
    from rmq_spark.consumer.inbox import SqlInbox as SqlInbox
    from rmq_spark.consumer.listener import ConsumeConcurrentlyStatus as ConsumeConcurrentlyStatus
    from rmq_spark.consumer.listener import ConsumeOrderlyStatus as ConsumeOrderlyStatus
    from rmq_spark.consumer.listener import EachBatch as EachBatch
    from rmq_spark.consumer.listener import EachMessage as EachMessage
    from rmq_spark.consumer.member import ConsumeFromWhere as ConsumeFromWhere
    from rmq_spark.consumer.pull import PullConsumer as PullConsumer
    from rmq_spark.consumer.push import PushConsumer as PushConsumer
    from rmq_spark.datasource import register as register
    from rmq_spark.errors import *  # noqa: F403
    from rmq_spark.listener import ExecutedAttempt as ExecutedAttempt
    from rmq_spark.listener import PerMessageListener as PerMessageListener
    from rmq_spark.listener import TransactionListener as TransactionListener
    from rmq_spark.listeners.delta import DeltaTransactionListener as DeltaTransactionListener
    from rmq_spark.listeners.sql import HalfTransaction as HalfTransaction
    from rmq_spark.listeners.sql import SqlTransactionListener as SqlTransactionListener
    from rmq_spark.listeners.sql import create_fence as create_fence
    from rmq_spark.listeners.table import TableListener as TableListener
    from rmq_spark.message import Message as Message
    from rmq_spark.message import MessageExt as MessageExt
    from rmq_spark.relay.kafka import KafkaRelay as KafkaRelay
    from rmq_spark.relay.report import RelayReport as RelayReport
    from rmq_spark.sink.foreach_batch import TransactionalSink as TransactionalSink
    from rmq_spark.sink.producer import TransactionMQProducer as TransactionMQProducer
    from rmq_spark.sink.sent import TransactionSendResult as TransactionSendResult
    from rmq_spark.source.native import messages as messages
    from rmq_spark.transaction import COMMIT_MESSAGE as COMMIT_MESSAGE
    from rmq_spark.transaction import ROLLBACK_MESSAGE as ROLLBACK_MESSAGE
    from rmq_spark.transaction import UNKNOWN as UNKNOWN
    from rmq_spark.transaction import HalfBatch as HalfBatch
    from rmq_spark.transaction import LocalTransactionState as LocalTransactionState
    from rmq_spark.transaction import Rollback as Rollback
    from rmq_spark.transaction import VerdictArray as VerdictArray

_WHERE = {
    "CheckReport": "check.report",
    "CheckService": "check.service",
    "TransactionCheckListener": "check.policy",
    "CommitLog": "commitlog.log",
    "ConsumerGroup": "consumer.groups",
    "ConsumeConcurrentlyStatus": "consumer.listener",
    "ConsumeOrderlyStatus": "consumer.listener",
    "DeadLetters": "consumer.dead_letters",
    "ConsumeFromWhere": "consumer.member",
    "EachBatch": "consumer.listener",
    "EachMessage": "consumer.listener",
    "PullConsumer": "consumer.pull",
    "PushConsumer": "consumer.push",
    "SqlInbox": "consumer.inbox",
    "consume": "consumer.consume",
    "register": "datasource",
    "messages": "source.native",
    "ExecutedAttempt": "listener",
    "PerMessageListener": "listener",
    "TransactionListener": "listener",
    "DeltaTransactionListener": "listeners.delta",
    "SqlTransactionListener": "listeners.sql",
    "TableListener": "listeners.table",
    "HalfTransaction": "listeners.sql",
    "create_fence": "listeners.sql",
    "KafkaRelay": "relay.kafka",
    "RelayReport": "relay.report",
    "Message": "message",
    "MessageExt": "message",
    "TransactionalSink": "sink.foreach_batch",
    "TransactionMQProducer": "sink.producer",
    "TransactionSendResult": "sink.sent",
    "HalfBatch": "transaction",
    "LocalTransactionState": "transaction",
    "Rollback": "transaction",
    "VerdictArray": "transaction",
    "COMMIT_MESSAGE": "transaction",
    "ROLLBACK_MESSAGE": "transaction",
    "UNKNOWN": "transaction",
}
_MODULES = ("errors", "logs", "metrics", "plots", "testing")
__all__ = sorted([*_WHERE, "__version__", *_MODULES])


_OF_ROCKETMQ = {
    "DefaultMQProducer": "TransactionMQProducer, whose send() needs no listener,",
    "DefaultMQPushConsumer": "PushConsumer",
    "DefaultLitePullConsumer": "PullConsumer",
    "MessageListenerConcurrently": 'a function for PushConsumer(..., mode="concurrently")',
    "MessageListenerOrderly": 'a function for PushConsumer(..., mode="orderly")',
    "UNKNOW": "UNKNOWN",
}
_EXTRAS = {"pyspark": "spark", "sqlalchemy": "sql"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        try:
            return getattr(importlib.import_module(f"rmq_spark.{_WHERE[name]}"), name)
        except ModuleNotFoundError as missing:
            package = (missing.name or "").partition(".")[0]
            if package not in _EXTRAS:
                raise
            text = f"rmq_spark.{name} needs {package}: install rmq_spark with its extra {_EXTRAS[package]}"
            raise ModuleNotFoundError(text, name=package) from None
    if name in _MODULES:
        return importlib.import_module(f"rmq_spark.{name}")
    errors = importlib.import_module("rmq_spark.errors")
    if name.endswith("Error") and hasattr(errors, name):
        return getattr(errors, name)
    said = f"module 'rmq_spark' has no attribute {name!r}"
    raise AttributeError(f"{said}: RocketMQ's {name} is {_OF_ROCKETMQ[name]} here" if name in _OF_ROCKETMQ else said)


def __dir__() -> list[str]:
    errors = importlib.import_module("rmq_spark.errors")
    return sorted([*__all__, *(name for name in vars(errors) if name.endswith("Error"))])
