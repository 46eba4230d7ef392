"""Names of the inside of rmq_spark that tests use, and where they live.

A test of behaviour imports ``rmq_spark``, its public modules and this package. Whoever moves a thing of the inside
changes this table, and the folders of tests that prove that thing: ``tests/inside``, ``tests/torture/simulate``, the
seeded bugs. A name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_LIVES_IN = {
    "rmq_spark.check.draining": "Draining",
    "rmq_spark.check.maintainer": "Maintainer",
    "rmq_spark.check.report": "LEASED",
    "rmq_spark.check.settings": "JobSettings",
    "rmq_spark.cli.text": "json_message",
    "rmq_spark.cli.verbs": "whole",
    "rmq_spark.commitlog": (
        "drain follower group_commit half half_store ledger log maintenance marking pruning stripping upkeep"
    ),
    "rmq_spark.commitlog.archived": "Archived ArchivedDecision",
    "rmq_spark.commitlog.asked": "half_batch_of split_by_verdict",
    "rmq_spark.commitlog.drain": "Drainer",
    "rmq_spark.commitlog.drained": "Drained",
    "rmq_spark.commitlog.expiring": "Expirer",
    "rmq_spark.commitlog.group_store": "Place Session",
    "rmq_spark.commitlog.half": (
        "HALF_SCHEMA HALF_STATS_COLUMNS=STATS_COLUMNS HalfFile HalfHeader HalfWriter Naming batch_name half_id_of "
        "name_of new_half_id"
    ),
    "rmq_spark.commitlog.half_store": "HalfRecord HalfStore Staged",
    "rmq_spark.commitlog.leaving": "Graces Leaver",
    "rmq_spark.commitlog.ledger": "Decided Decision Ledger Placed RolledBack",
    "rmq_spark.commitlog.messages": "MESSAGES_SCHEMA SOURCE_SCHEMA drained_up_to write_messages",
    "rmq_spark.commitlog.op": (
        "BatchState Kind OP_SCHEMA OP_STATS_COLUMNS=STATS_COLUMNS OpRow RowState Who op_table=to_table"
    ),
    "rmq_spark.commitlog.prepared": "PreparedBatches",
    "rmq_spark.commitlog.pruning": "Pruner",
    "rmq_spark.commitlog.reading": "STORED_COLUMNS read_ranges",
    "rmq_spark.commitlog.rows": "NO_ROWS RowSet runs",
    "rmq_spark.commitlog.second_look": "BELIEVED_S LOOK_INTERVAL_S",
    "rmq_spark.commitlog.stripping": "Stripper",
    "rmq_spark.commitlog.topics": "TOPICS_SCHEMA",
    "rmq_spark.commitlog.trace": "Trace",
    "rmq_spark.commitlog.upkeep": "MaintenanceReport",
    "rmq_spark.config": (
        "APP_ID_CHARS_MAX BODY_BYTES_MAX GROUP_CHARS_MAX IDEMPOTENCY_S LEASE_S_MAX Options PROPERTIES_BYTES_MAX "
        "TIME_MIN TOPIC_CHARS_MAX parse_bool parse_duration parse_int"
    ),
    "rmq_spark.consumer": "push_module=push",
    "rmq_spark.consumer.listener": "CONSUME_SUCCESS RECONSUME_LATER SUCCESS SUSPEND_CURRENT_QUEUE_A_MOMENT",
    "rmq_spark.consumer.members": "Members",
    "rmq_spark.consumer.retry": "ORIGIN_MESSAGE_ID RECONSUME_TIME dlq_topic restored retry_topic sent_back",
    "rmq_spark.datasource": "TxmqDataSource",
    "rmq_spark.listener": "CommitOncePrepared NO_LISTENER_FENCE Verdicts load_listener",
    "rmq_spark.listeners": "database inserting",
    "rmq_spark.listeners.database": "Database",
    "rmq_spark.listeners.fence": "Fence",
    "rmq_spark.listeners.inserting": "insert",
    "rmq_spark.listeners.recorded": "EXECUTED NOTHING ROLLED_BACK Recorded STARTED State TOMBSTONE",
    "rmq_spark.machine": "MACHINE Machine",
    "rmq_spark.message": (
        "CHECK_IMMUNITY_PROPERTY INPUT_COLUMNS PROPERTIES TIMESTAMP message_table=to_table require_app_id "
        "require_group_name require_topic_name"
    ),
    "rmq_spark.metrics.figures": "LogWatch",
    "rmq_spark.metrics.names": "BY_NAME LOG METRICS PROCESS",
    "rmq_spark.metrics.process": "ProcessMetrics",
    "rmq_spark.metrics.pushing": "push_figures=push",
    "rmq_spark.redaction": "TEXT_CHARS_MAX redacted",
    "rmq_spark.relay.records": "Record",
    "rmq_spark.relay.start": "Start",
    "rmq_spark.relay.transactions": "AbortedError Transactions",
    "rmq_spark.report.figures": "figures_of",
    "rmq_spark.report.finding": "Level",
    "rmq_spark.report.page": "page",
    "rmq_spark.selector": "parse_selector",
    "rmq_spark.sink": "two_phase",
    "rmq_spark.sink.flights": "Flight",
    "rmq_spark.sink.frame": "require_message_types",
    "rmq_spark.sink.identity": "Identity Lineage identity_of input_hash_of read_checkpoint",
    "rmq_spark.sink.settings": "SINK_OPTIONS SinkSettings",
    "rmq_spark.sink.two_phase": "TwoPhase",
    "rmq_spark.source": "SOURCE_OPTIONS native reader",
    "rmq_spark.source.offsets": "Positions from_checkpoint from_json parse_offsets parse_timestamp to_json",
    "rmq_spark.source.options": "ReadOptions Subscription parse_tags read_options",
    "rmq_spark.source.plan": "Planner admit split",
    "rmq_spark.source.reader": "TxmqReader TxmqStreamReader",
    "rmq_spark.spark_versions": "STREAM_TELLS_START",
    "rmq_spark.storage": "files spark_parquet stores table_module=table",
    "rmq_spark.storage.clock": "StoreClock",
    "rmq_spark.storage.files": "DataFile PAYLOAD_COLUMNS RowRange filesystem read_range",
    "rmq_spark.storage.location": "location",
    "rmq_spark.storage.spark_parquet": "spark_schema",
    "rmq_spark.storage.stores": "PROBE require_put_if_absent",
    "rmq_spark.storage.table": "Change DeltaLogTable Table",
    "rmq_spark.storage.turns": "Turns",
    "rmq_spark.transaction": "BATCH KEY MESSAGE Verdict decode_json normalize_verdicts verdict_of",
}


def located(table: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The module of each name, and what it is called there, from a table of names by module. ``a=b`` is ``b`` under the
    name ``a``."""
    return {
        name.partition("=")[0]: (module, name.rpartition("=")[2])
        for module, names in table.items()
        for name in names.split()
    }


_WHERE = located(_LIVES_IN)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"tests.support.inside has no {name!r}: add it to its table, with the module it lives in")
    module, inner = _WHERE[name]
    found = getattr(importlib.import_module(module), inner, None)
    return importlib.import_module(f"{module}.{inner}") if found is None else found


def __dir__() -> list[str]:
    return sorted(_WHERE)
