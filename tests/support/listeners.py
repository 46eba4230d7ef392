"""A transaction listener whose answers a test writes down beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rmq_spark import COMMIT_MESSAGE, HalfBatch, TransactionListener

Answer = Any
"""Verdicts to return, an exception to raise, or a function of the half batch, which does one of both itself."""


class Scripted(TransactionListener):
    """Gives the answers of a script.

    Parameters
    ----------
    execute, check : Answer, or sequence of Answer
        Of a list each call takes the next one, and the last one is repeated.

    Attributes
    ----------
    executed, checked : list of HalfBatch
        What was executed, and what was asked about, in this order.
    """

    def __init__(self, execute: Answer = COMMIT_MESSAGE, check: Answer = COMMIT_MESSAGE) -> None:
        self._answers = {"execute": _listed(execute), "check": _listed(check)}
        self.executed: list[HalfBatch] = []
        self.checked: list[HalfBatch] = []

    @property
    def asked(self) -> list[str]:
        """The half ids that were asked about."""
        return [batch.half_id for batch in self.checked]

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        self.executed.append(batch)
        return self._say("execute", batch)

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        self.checked.append(batch)
        return self._say("check", batch)

    def _say(self, what: str, batch: HalfBatch) -> Any:
        answers = self._answers[what]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer(batch) if callable(answer) else answer


def _listed(answer: Answer) -> list[Answer]:
    return list(answer) if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
