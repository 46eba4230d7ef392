"""Checks and upkeep, as a service of a program or as a job (:mod:`rmq_spark.checks.job`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.checks.check_report import CheckReport as CheckReport
    from rmq_spark._core.checks.policy import TransactionCheckListener as TransactionCheckListener
    from rmq_spark._core.checks.service import CheckService as CheckService
    from rmq_spark._core.client.draining import Draining as Draining
    from rmq_spark._core.client.maintainer import Maintainer as Maintainer

__getattr__, __dir__, __all__ = public(__name__)
