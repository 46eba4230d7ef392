"""The options of the sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rmq_spark._core.listeners.transaction_listener import (
    NO_LISTENER_FENCE,
    CommitOncePrepared,
    TransactionListener,
    load_listener,
    require_executing,
    require_transactions_for,
)
from rmq_spark._core.protocol.limits import PendingLimits
from rmq_spark._core.spark.send_settings import SendSettings
from rmq_spark._core.spark.table_options import TABLE_OPTIONS, TableSettings
from rmq_spark._core.storage.location import location, require_no_tilde
from rmq_spark._core.vocabulary.message import require_group_name
from rmq_spark._core.vocabulary.options import ON_LISTENER_ERROR, REPLAY_CHECK_TIMEOUT_S, Options
from rmq_spark._core.vocabulary.verdicts import BATCH, KEY, MESSAGE, require_transaction_per
from rmq_spark.errors import ListenerError

SINK_TABLE: Mapping[str, tuple[str, str]] = {
    "path": ("required", "The commit log's folder or URI."),
    "topic": ("none", "For messages without a topic column."),
    "producerGroup": ("required", "Whose listeners answer for these transactions."),
    "transactionListener": (
        "required",
        "txmq.table for a TableListener of the options table.*, module:attribute (an instance, or a callable that "
        "makes one), or none for plain exactly-once sending.",
    ),
    "transactionKey": ("the whole batch is one", "A column: equal values share one transaction."),
    "transactionPer": ("batch", "batch, or message for one transaction a message."),
    "appId": (
        "made up",
        "With batchId it names a batch write, so that a retry sends nothing twice. On a stream it replaces the query's "
        "id in names, and a new checkpoint under the same appId is refused.",
    ),
    "batchId": ("made up", "Batch writes: the number that goes with appId."),
    "onListenerError": (
        "fail",
        "fail: an exception ends the query with the batch pending. unknown: log it and go on, as RocketMQ does; a "
        "check decides about the batch, all of it.",
    ),
    "replayCheckTimeout": (
        f"{REPLAY_CHECK_TIMEOUT_S:.0f}s",
        "How long a replayed batch asks its listener again while the answer is UNKNOWN.",
    ),
    "maxPendingBatches": ("no limit", "Refuse a new batch while so many half batches of the group are pending."),
    "maxPendingBytes": ("no limit", "The same for the bytes of their files: 10g."),
    "checkpointLocation": ("required for streams", "The query's; its id names the application."),
    **TABLE_OPTIONS,
}
"""The options of the sink, besides ``storage.<key>``: their default and their meaning."""
SINK_OPTIONS = tuple(SINK_TABLE)


@dataclass(frozen=True, kw_only=True)
class SinkSettings(SendSettings):
    """The validated options of ``format("txmq")``."""

    path: str
    listener_path: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    table: TableSettings | None = None

    @classmethod
    def of(cls, options: Options) -> SinkSettings:
        """Read the options of ``format("txmq")``, or raise an OptionError that says what is missing or wrong."""
        path, group, listener = options.require_all(
            {
                "path": "the folder or URI of a commit log, made with rmq_spark.CommitLog.create",
                "producerGroup": "the listeners that can answer for this query's transactions",
                "transactionListener": "'txmq.table' for rows into a table, 'module:attribute' of a "
                "TransactionListener, or 'none' to send without one",
            }
        )
        require_no_tilde("checkpointLocation", options.get("checkpointLocation") or "")
        key = options.get("transactionKey")
        per = options.choice("transactionPer", (BATCH, MESSAGE, KEY), KEY if key else BATCH)
        require_transaction_per(per, key, ("transactionPer", "transactionKey"))
        return cls(
            path=location(path),
            topic=options.get("topic"),
            producer_group=require_group_name(group),
            listener_path=listener.strip(),
            transaction_per=per,
            transaction_key=key,
            on_listener_error=options.choice("onListenerError", ON_LISTENER_ERROR, "fail"),
            replay_check_timeout_s=options.duration("replayCheckTimeout", REPLAY_CHECK_TIMEOUT_S),
            pending_limits=PendingLimits(options.integer("maxPendingBatches"), options.byte_count("maxPendingBytes")),
            storage_options=dict(options.storage_options),
            table=TableSettings.of(options, listener.strip()),
        )

    def listener(self) -> TransactionListener:
        """Load the listener that the option names, in this process."""
        if self.listener_path.lower() == NO_LISTENER_FENCE:
            return CommitOncePrepared()
        listener = load_listener(self.listener_path) if self.table is None else self.table.listener()
        if listener.requires_spark:
            raise ListenerError(
                f"listener {self.listener_path!r} works through a Spark session, but format('txmq') commits "
                "without one: use writeStream.foreachBatch(rmq_spark.TransactionalSink(...)) instead"
            )
        where = f"listener {self.listener_path!r}"
        return require_transactions_for(require_executing(listener, where), self.transaction_per, where)
