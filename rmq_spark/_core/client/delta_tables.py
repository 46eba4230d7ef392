"""The tables of a commit log on a store: created once, and opened by every process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from rmq_spark._core.client.columns import commented
from rmq_spark._core.log.group_table import GROUPS_SCHEMA
from rmq_spark._core.log.half import HALF_SCHEMA
from rmq_spark._core.log.log_tables import LogTables
from rmq_spark._core.log.op import OP_SCHEMA
from rmq_spark._core.log.topics import TOPICS_SCHEMA
from rmq_spark._core.messages import messages_table as messages
from rmq_spark._core.messages.messages_table import MESSAGES_SCHEMA
from rmq_spark._core.runtime.failpoints import reach
from rmq_spark._core.storage.delta_table import DeltaLogTable
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.stores import claim_table, reaching, removing
from rmq_spark._core.storage.table import BOUNDS, Table
from rmq_spark._core.vocabulary.options import QUEUES_DEFAULT
from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark.errors import CommitLogExistsError, CorruptLogError, LogFormatError, NotACommitLogError, StorageError

FORMAT = 1
"""The version of the tables' layout. A log with another one is not opened."""
LOG_RETENTION = "1m"
"""How long Delta's log entries stay. Nothing here needs them, and commits slow down with their number."""

REPLACED_FILE_SETTINGS = {
    # op and groups replace their own files constantly. By default the tombstones would lengthen every checkpoint for a
    # week.
    "delta.deletedFileRetentionDuration": "interval 5 minutes"
}


LEAVING_FILE_SETTINGS = {
    # Every settled half batch leaves half. Its Delta log forgets the file hours later. By then upkeep has deleted the
    # file, or a vacuum does so later.
    "delta.deletedFileRetentionDuration": "interval 6 hours"
}


def create_tables(where: str, queues: int, storage_options: Mapping[str, str] | None, retention_s: int) -> None:
    """Make the tables of a log; when that fails, remove those that were made. StorageError: another process was making
    the same log, and has just given up."""
    settings = {"delta.logRetentionDuration": f"interval {max(1, retention_s)} seconds"}
    half_settings = {"delta.dataSkippingStatsColumns": ",".join(BOUNDS["half"]), **LEAVING_FILE_SETTINGS}
    op_settings = {"delta.dataSkippingStatsColumns": ",".join(BOUNDS["op"]), **REPLACED_FILE_SETTINGS}
    # topics comes last and carries the format: a half-created log is created again, and never opened.
    tables = {
        "half": (HALF_SCHEMA, half_settings),
        "op": (OP_SCHEMA, op_settings),
        "messages": (MESSAGES_SCHEMA, _messages_settings(retention_s)),
        "topics": (TOPICS_SCHEMA, {"txmq.format": str(FORMAT), "txmq.queues": str(queues)}),
    }
    made: list[str] = []

    def make(name: str) -> None:
        reach("table made", table=name)
        schema, own_settings = tables[name]
        schema = commented(name, schema)
        if DeltaLogTable.create(f"{where}/{name}", name, schema, storage_options, {**settings, **own_settings}):
            made.append(f"{where}/{name}")

    with removing(lambda: _removable(where, made, storage_options), storage_options):
        for name in tables:
            make(name)
        # A process that made one of them before may have given up meanwhile, and removed it.
        found = [name for name in tables if f"{where}/{name}" not in made]
        for name in [name for name in found if not DeltaLogTable.exists(f"{where}/{name}", storage_options)]:
            if "topics" in found:
                raise StorageError(f"{where}: another process gave up making this commit log just now: try again")
            make(name)  # after topics is there, nobody removes a table


def _removable(where: str, made: list[str], storage_options: Mapping[str, str] | None) -> list[str]:
    """The tables that were made, when no other process can complete the log with them any more: a claim in the place of
    ``topics``, which goes last, sees to that."""
    topics = f"{where}/topics"
    if not made or topics in made:
        return []
    try:
        return [*made, topics] if claim_table(topics, storage_options) else []
    except Exception:
        return made  # the store fails, so these cannot be removed either, and are named


def _messages_settings(retention_s: int) -> dict[str, str]:
    log_retention_s = max(retention_s, messages.RETENTION_S)
    return {
        "delta.logRetentionDuration": f"interval {log_retention_s} seconds",
        # By then upkeep has deleted a replaced file.
        "delta.deletedFileRetentionDuration": f"interval {log_retention_s + 86_400} seconds",
        "delta.dataSkippingStatsColumns": ",".join(BOUNDS["messages"]),
    }


def _require_log(where: str, storage_options: Mapping[str, str] | None) -> None:
    if not DeltaLogTable.exists(f"{where}/topics", storage_options):
        if not is_uri(where) and os.path.isdir(where) and not os.access(where, os.R_OK | os.X_OK):
            raise StorageError(f"{where} cannot be read (permission denied): give this program the right to read it")
        require_no_rest(where, storage_options)
        raise NotACommitLogError(
            f"{where} is not a commit log (it has no table 'topics')",
            remedy=Remedy(
                f"see that path and disk are right, or make one with CommitLog.create({where!r})",
                f"see that path and disk are right, or make one with txmq create {shlex.quote(where)}",
            ),
        )


def require_no_log_around(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise CommitLogExistsError for a place inside a commit log or one of its tables, whose upkeep and VACUUM would
    delete the files of a log there."""
    outer = where
    for _ in range(2):
        outer = outer.rpartition("/")[0]
        if not outer or outer.endswith(("/", ":")):
            return
        if all(DeltaLogTable.exists(f"{outer}/{name}", storage_options) for name in ("topics", "op")):
            raise CommitLogExistsError(f"{where} lies inside the commit log {outer}: choose a place beside it")


def require_no_rest(where: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise CorruptLogError for a place without the table ``topics`` whose other tables have commits. A half-created
    log has empty tables."""
    for name, schema in (("op", OP_SCHEMA), ("half", HALF_SCHEMA), ("messages", MESSAGES_SCHEMA)):
        if (
            DeltaLogTable.exists(f"{where}/{name}", storage_options)
            and DeltaLogTable(f"{where}/{name}", name, schema, storage_options).version > 0
            and not DeltaLogTable.exists(f"{where}/topics", storage_options)  # another process may have just created it
        ):
            raise CorruptLogError(
                f"{where} has no table 'topics', and its table {name!r} has been written to: the log has lost it, or "
                "is a copy that is not finished (txmq backup finishes it, as its PATH or its TARGET). Restore the log "
                "from a copy (docs/backup.md); without it no new log can be made here"
            )


def _require_format(where: str, topics: DeltaLogTable) -> None:
    format_ = topics.configuration.get("txmq.format")
    if format_ is None:
        raise NotACommitLogError(f"{where} is not a commit log: its table 'topics' has no property txmq.format")
    if format_ != str(FORMAT):
        raise LogFormatError(
            f"{where} has format {format_}, and this version of rmq_spark reads and writes format {FORMAT} alone: use "
            "the version that made the log, or a new log"
        )


class DeltaTables(LogTables):
    """The Delta tables of a commit log on a store. ``half`` opens in the background."""

    @classmethod
    def open(cls, where: str, storage_options: Mapping[str, str] | None) -> DeltaTables:
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
                settings = {"delta.appendOnly": "false", "delta.logRetentionDuration": kept, **REPLACED_FILE_SETTINGS}
                DeltaLogTable.create(path, "groups", commented("groups", GROUPS_SCHEMA), options, settings)
            return DeltaLogTable(path, "groups", GROUPS_SCHEMA, options)

    def another(self) -> DeltaTables:
        return type(self).open(self.path, self.storage_options)
