"""The tables of a commit log on a store: made once, and opened by every process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rmq_spark._core.log import half as half_module
from rmq_spark._core.log import op as op_module
from rmq_spark._core.log.groups import GROUPS_SCHEMA
from rmq_spark._core.log.half import HALF_SCHEMA
from rmq_spark._core.log.op import OP_SCHEMA
from rmq_spark._core.log.tables import LogTables
from rmq_spark._core.log.topics import TOPICS_SCHEMA
from rmq_spark._core.messages import table as messages
from rmq_spark._core.messages.table import MESSAGES_SCHEMA
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.stores import reaching
from rmq_spark._core.storage.table import DeltaLogTable, Table
from rmq_spark._core.vocabulary.options import QUEUES_DEFAULT
from rmq_spark.errors import CommitLogExistsError, CorruptLogError, LogFormatError, NotACommitLogError, StorageError

FORMAT = 1
"""The layout of the tables. A log of another one is not opened."""
LOG_RETENTION = "1m"
"""How long Delta's own log entries stay: nothing here needs them, and commits slow down with their number."""

OF_REPLACED_FILES = {
    # Of op and groups, which replace their own files all the time: their tombstones would make every checkpoint long
    # for a week.
    "delta.deletedFileRetentionDuration": "interval 5 minutes",
}


OF_LEAVING_FILES = {
    # Of half, which every settled half batch leaves: its log forgets a file some hours after that. Upkeep has deleted
    # the file by then, or a vacuum does it later.
    "delta.deletedFileRetentionDuration": "interval 6 hours",
}


def create_tables(where: str, queues: int, storage_options: Mapping[str, str] | None, retention_s: int) -> None:
    settings = {"delta.logRetentionDuration": f"interval {max(1, retention_s)} seconds"}
    half_settings = {"delta.dataSkippingStatsColumns": ",".join(half_module.STATS_COLUMNS), **OF_LEAVING_FILES}
    op_settings = {
        "delta.dataSkippingStatsColumns": ",".join(op_module.STATS_COLUMNS),
        **OF_REPLACED_FILES,
    }
    # topics comes last: it carries the format, so a log that a crash left half-made is not opened, but made again.
    for name, schema, more in (
        ("half", HALF_SCHEMA, half_settings),
        ("op", OP_SCHEMA, op_settings),
        ("messages", MESSAGES_SCHEMA, _messages_settings(retention_s)),
        ("topics", TOPICS_SCHEMA, {"txmq.format": str(FORMAT), "txmq.queues": str(queues)}),
    ):
        reach("table made", table=name)
        DeltaLogTable.create(f"{where}/{name}", name, schema, storage_options, {**settings, **more})


def _messages_settings(retention_s: int) -> dict[str, str]:
    kept_s = max(retention_s, messages.KEPT_S)
    return {
        "delta.logRetentionDuration": f"interval {kept_s} seconds",
        # Upkeep has deleted a replaced file by the time at which the log forgets it.
        "delta.deletedFileRetentionDuration": f"interval {kept_s + 86_400} seconds",
        "delta.dataSkippingStatsColumns": ",".join(messages.STATS_COLUMNS),
    }


def _require_log(where: str, storage_options: Mapping[str, str] | None) -> None:
    if not DeltaLogTable.exists(f"{where}/topics", storage_options):
        if not is_uri(where) and os.path.isdir(where) and not os.access(where, os.R_OK | os.X_OK):
            raise StorageError(f"{where} cannot be read (permission denied): give this program the right to read it")
        require_no_rest(where, storage_options)
        raise NotACommitLogError(
            f"{where} is not a commit log (it has no table 'topics'): see that path and disk are right, or "
            f"make one with CommitLog.create({where!r})"
        )


def require_no_log_around(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise CommitLogExistsError for a place inside a commit log, or inside one of its tables: upkeep and VACUUM would
    take the files of a log there for their own."""
    outer = where
    for _ in range(2):
        outer = outer.rpartition("/")[0]
        if not outer or outer.endswith(("/", ":")):
            return
        if all(DeltaLogTable.exists(f"{outer}/{name}", storage_options) for name in ("topics", "op")):
            raise CommitLogExistsError(f"{where} lies inside the commit log {outer}: choose a place beside it")


def require_no_rest(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise CorruptLogError for a place without the table ``topics`` where others have been written to. A log that a
    crash left half-made has empty ones."""
    for name, schema in (("op", OP_SCHEMA), ("half", HALF_SCHEMA), ("messages", MESSAGES_SCHEMA)):
        if (
            DeltaLogTable.exists(f"{where}/{name}", storage_options)
            and DeltaLogTable(f"{where}/{name}", name, schema, storage_options).version > 0
            and not DeltaLogTable.exists(f"{where}/topics", storage_options)  # another process has just made it
        ):
            raise CorruptLogError(
                f"{where} has no table 'topics', and its table {name!r} has been written to: the log has lost it, or "
                "is a copy that is not finished (txmq backup finishes it, as its PATH or its TARGET). Restore the log "
                "from a copy (docs/backup.md); without it no new log can be made here"
            )


def _require_format(where: str, topics: DeltaLogTable) -> None:
    found = topics.configuration.get("txmq.format")
    if found is None:
        raise NotACommitLogError(f"{where} is not a commit log: its table 'topics' has no property txmq.format")
    if found != str(FORMAT):
        raise LogFormatError(
            f"{where} has format {found}, and this version of rmq_spark reads and writes format {FORMAT} alone: use "
            "the version that made the log, or a new log"
        )


class DeltaTables(LogTables):
    """The Delta tables of a commit log on a store; ``half`` opens in the background."""

    @classmethod
    def open(cls, where: str, storage_options: Mapping[str, str] | None) -> DeltaTables:
        """Open the tables of the commit log at a place.

        Raises
        ------
        NotACommitLogError, LogFormatError, StorageError
        """
        with reaching(where, storage_options):
            _require_log(where, storage_options)
            topics, half, op = (
                DeltaLogTable(f"{where}/{name}", name, schema, storage_options)
                for name, schema in (("topics", TOPICS_SCHEMA), ("half", HALF_SCHEMA), ("op", OP_SCHEMA))
            )
            _require_format(where, topics)
            op.wait_until_open()
        queues = int(topics.configuration.get("txmq.queues", QUEUES_DEFAULT))
        return cls(where, half, op, topics, queues, storage_options)

    def messages(self) -> Table:
        with reaching(self.path, self.storage_options):
            return DeltaLogTable(f"{self.path}/messages", "messages", MESSAGES_SCHEMA, self.storage_options or None)

    def has_groups(self) -> bool:
        with reaching(self.path, self.storage_options):
            return DeltaLogTable.exists(f"{self.path}/groups", self.storage_options or None)

    def groups(self) -> Table:
        path, options = f"{self.path}/groups", self.storage_options or None
        with reaching(self.path, self.storage_options):
            if not DeltaLogTable.exists(path, options):
                assert isinstance(self.half, DeltaLogTable)
                kept = self.half.configuration.get("delta.logRetentionDuration", f"interval {LOG_RETENTION}")
                settings = {"delta.appendOnly": "false", "delta.logRetentionDuration": kept, **OF_REPLACED_FILES}
                DeltaLogTable.create(path, "groups", GROUPS_SCHEMA, options, settings)
            return DeltaLogTable(path, "groups", GROUPS_SCHEMA, options)

    def another(self) -> DeltaTables:
        return type(self).open(self.path, self.storage_options)
