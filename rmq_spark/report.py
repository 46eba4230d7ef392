"""The report of a commit log: its figures and findings, and one page of HTML with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.report.finding import Finding as Finding
    from rmq_spark._core.report.finding import Level as Level
    from rmq_spark._core.report.headline import findings_of as findings_of
    from rmq_spark._core.report.page import page as page
    from rmq_spark._core.report.report_figures import Figures as Figures
    from rmq_spark._core.report.report_figures import figures_of as figures_of

__getattr__, __dir__, __all__ = public(__name__)
