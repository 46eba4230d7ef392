"""Listeners that the sink's tests name as ``module:attribute``; they are imported by the process that runs commit()."""

from __future__ import annotations

from pathlib import Path

from rmq_spark import COMMIT_MESSAGE, UNKNOWN, HalfBatch, PerMessageListener, TransactionListener
from tests.support.inside import Verdicts


class RefuseKeyOne(TransactionListener):
    """Commits every key but "1"."""

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return batch.verdicts(rollback=["1"])

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return UNKNOWN


class AlwaysUnknown(TransactionListener):
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return None

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return COMMIT_MESSAGE


class Fails(TransactionListener):
    """Raises once a file named by the message body exists, as a database that is down would."""

    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        switch = Path(batch.messages(["tags"])["tags"][0].as_py())
        if switch.exists():
            raise RuntimeError("the database is down")
        return COMMIT_MESSAGE

    def check_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return COMMIT_MESSAGE


class OddBodies:
    """RocketMQ's own signature, message by message."""

    def execute_local_transaction(self, msg, arg):  # type: ignore[no-untyped-def]
        return "COMMIT_MESSAGE" if int(msg.body) % 2 else "ROLLBACK_MESSAGE"

    def check_local_transaction(self, msg):  # type: ignore[no-untyped-def]
        return "UNKNOW"


class NeedsSpark(AlwaysUnknown):
    requires_spark = True


class WrongLength(AlwaysUnknown):
    def execute_local_transaction(self, batch: HalfBatch) -> Verdicts:
        return [COMMIT_MESSAGE] * 3


refuse_key_one = RefuseKeyOne()
odd_bodies = PerMessageListener(OddBodies())
wrong_length = WrongLength
not_a_listener = "hello"
