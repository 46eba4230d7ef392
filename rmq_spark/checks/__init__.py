"""Checks and upkeep, as a service of a program or as a job (:mod:`rmq_spark.checks.job`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.checks.drains import Draining as Draining
    from rmq_spark._core.checks.maintainer import Maintainer as Maintainer
    from rmq_spark._core.checks.policy import TransactionCheckListener as TransactionCheckListener
    from rmq_spark._core.checks.report import CheckReport as CheckReport
    from rmq_spark._core.checks.service import CheckService as CheckService

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "checks.drains": "Draining",
        "checks.maintainer": "Maintainer",
        "checks.policy": "TransactionCheckListener",
        "checks.report": "CheckReport",
        "checks.service": "CheckService",
    },
)
