"""How a commit log stands, what is wrong with it and what to do; and a report, one page of HTML with both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.inspect.diagnosis import Diagnosis as Diagnosis
    from rmq_spark._core.inspect.finding import Finding as Finding
    from rmq_spark._core.inspect.finding import Level as Level
    from rmq_spark._core.inspect.standing import Standing as Standing
    from rmq_spark._core.report.page import page as page
    from rmq_spark._core.report.report_figures import Figures as Figures
    from rmq_spark._core.report.report_figures import figures_of as figures_of
    from rmq_spark._core.report.report_figures import findings_of as findings_of

__getattr__, __dir__, __all__ = public(__name__)
