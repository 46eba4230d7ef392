"""Where the tables of one commit log are opened: on a store, or in memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from rmq_spark._core.storage.table import Table
from rmq_spark._core.vocabulary.options import QUEUES_DEFAULT


class LogTables(ABC):
    """The tables of one commit log. ``messages`` and ``groups`` are opened when they are first needed. A topic that is
    created without a number of queues gets ``default_queues``."""

    def __init__(
        self,
        path: str,
        half: Table,
        op: Table,
        topics: Table,
        default_queues: int = QUEUES_DEFAULT,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.half, self.op, self.topics = path, half, op, topics
        self.default_queues = default_queues
        self.storage_options = dict(storage_options or {})

    @abstractmethod
    def messages(self) -> Table:
        """Open the table ``messages``, which only drainers and some readers need."""

    @abstractmethod
    def has_groups(self) -> bool:
        """Whether the table ``groups`` exists: a consumer group has made it."""

    @abstractmethod
    def groups(self) -> Table:
        """Open the table ``groups``, and make it if it does not exist."""

    @abstractmethod
    def another(self) -> LogTables:
        """The same tables as another process would open them, with nothing read yet."""

    def in_background(self, work: Callable[[], None]) -> threading.Thread | None:
        """Run upkeep in another thread; None when it is done already."""
        return self.half.runtime.start_thread(work, "txmq-maintenance")
