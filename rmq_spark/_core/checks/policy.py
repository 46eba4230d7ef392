"""Discard policies, which decide on a transaction whose listener has answered UNKNOWN too often."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from rmq_spark._core.listeners.half_batch import HalfBatch
from rmq_spark._core.vocabulary.options import nearest
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE, LocalTransactionState
from rmq_spark.errors import OptionError


class DiscardPolicy(str, Enum):
    """The discard policies that have a name."""

    QUARANTINE = "quarantine"
    ROLLBACK = "rollback"
    COMMIT = "commit"


class TransactionCheckListener(ABC):
    """A discard policy of the user's own. It may mail someone, look into another system, or give a verdict.

    It mirrors RocketMQ's ``AbstractTransactionalMessageCheckListener.resolveDiscardMsg``.
    """

    @abstractmethod
    def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
        """Return a verdict for all transactions of ``batch``, which were checked too often.

        Parameters
        ----------
        batch : HalfBatch
            ``batch.transactions`` has only the transactions that are given up.
        reason : str
            A sentence with the number of checks.

        Returns
        -------
        LocalTransactionState or None
            COMMIT_MESSAGE, ROLLBACK_MESSAGE, or None or UNKNOWN for quarantine. An exception leaves the transactions
            pending, and the next round asks again.
        """


class NamedPolicy(TransactionCheckListener):
    def __init__(self, policy: DiscardPolicy) -> None:
        self.policy = policy

    def __repr__(self) -> str:
        return f"NamedPolicy({self.policy.value!r})"

    def resolve_discarded(self, batch: HalfBatch, reason: str) -> LocalTransactionState | None:
        return {DiscardPolicy.COMMIT: COMMIT_MESSAGE, DiscardPolicy.ROLLBACK: ROLLBACK_MESSAGE}.get(self.policy)


def require_policy(policy: object) -> TransactionCheckListener:
    """Return the policy that has this name, or the user's own policy unchanged; OptionError for anything else."""
    if isinstance(policy, TransactionCheckListener):
        return policy
    names = [p.value for p in DiscardPolicy]
    if isinstance(policy, str):
        if policy.lower() in names:
            return NamedPolicy(DiscardPolicy(policy.lower()))
        raise OptionError(f"discard policy {policy!r} is not one of {', '.join(names)} ({nearest(policy, names)})")
    kind = f"the class {policy.__name__}: pass an instance of it" if isinstance(policy, type) else type(policy).__name__
    raise OptionError(f"a discard policy is one of {', '.join(names)} or a TransactionCheckListener, not {kind}")
