"""The commit log's public handle, and its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmq_spark._core.lazy import public

if TYPE_CHECKING:
    from rmq_spark._core.client.backup import BackupReport as BackupReport
    from rmq_spark._core.client.commit_log import CommitLog as CommitLog
    from rmq_spark._core.inspect.trace import Trace as Trace
    from rmq_spark._core.inspect.trace import TraceEvent as TraceEvent
    from rmq_spark._core.log.batch_state import RowState as RowState
    from rmq_spark._core.log.decision import Placed as Placed
    from rmq_spark._core.log.op import Who as Who
    from rmq_spark._core.upkeep.leave import Graces as Graces
    from rmq_spark._core.upkeep.schedule import MaintenanceReport as MaintenanceReport

__getattr__, __dir__, __all__ = public(__name__)
