"""Names of the inside of rmq_spark that tests use, and where they live.

A test of behaviour imports ``rmq_spark``, its public modules and this package. Whoever moves a thing of the inside
changes this table, and the folders of tests that prove that thing: ``tests/torture/simulate``, the
seeded bugs. A name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_LIVES_IN = {
    "rmq_spark._core.client.columns": "COLUMN_MEANINGS=COLUMNS",
    "rmq_spark._core.client.draining": "Draining",
    "rmq_spark._core.client.maintainer": "Maintainer",
    "rmq_spark._core.checks.check_report": "LEASED",
    "rmq_spark._core.checks.round": "Checker",
    "rmq_spark._core.checks.job_settings": "JobSettings",
    "rmq_spark._core.client": "log=commit_log",
    "rmq_spark._core.consumers": "push_module=push",
    "rmq_spark._core.log.heartbeats": "Members",
    "rmq_spark._core.consumers.message_listener": "FAILURE SUCCESS",
    "rmq_spark._core.consumers.retry": "ORIGIN_MESSAGE_ID RECONSUME_TIME dlq_topic restored retry_topic sent_back",
    "rmq_spark._core.database": "inserting=insert",
    "rmq_spark._core.database.connection": "Database",
    "rmq_spark._core.database.error_codes": "is_lock_problem",
    "rmq_spark._core.database.insert": "insert",
    "rmq_spark._core.inspect.trace": "Trace",
    "rmq_spark._core.kafka.kafka_client": "ReportedErrors",
    "rmq_spark._core.kafka.records": "Record",
    "rmq_spark._core.kafka.start": "Start",
    "rmq_spark._core.kafka.transactions": "AbortedError Transactions UndeliveredError",
    "rmq_spark._core.listeners.decode": "decode_json",
    "rmq_spark._core.listeners.fence": "FENCE_TABLE Fence",
    "rmq_spark._core.listeners.fence_row": "BY_PART EXECUTED NOTHING ROLLED_BACK Recorded STARTED State TOMBSTONE",
    "rmq_spark._core.listeners.half_batch": "normalize_verdicts",
    "rmq_spark._core.listeners.transaction_listener": "CommitOncePrepared NO_LISTENER_FENCE Verdicts load_listener",
    "rmq_spark._core.log": (
        "decision_module=decision op_reader half half_header half_table half_writer "
        "ledger marking=low_water_mark op_merge"
    ),
    "rmq_spark._core.log.archive": "Archived ArchivedDecision",
    "rmq_spark._core.log.batch_state": "BatchState RowState",
    "rmq_spark._core.log.decision": "Decided Decision Placed RolledBack UnknownCheck",
    "rmq_spark._core.log.group_table": "GroupPosition Session",
    "rmq_spark._core.log.half": "HALF_SCHEMA HalfFile",
    "rmq_spark._core.log.half_header": "HalfHeader Naming batch_name half_id_of name_of new_half_id",
    "rmq_spark._core.inspect.history": "retained_batches open_now placed_within",
    "rmq_spark._core.inspect.diagnosis": "Diagnosis",
    "rmq_spark._core.inspect.unsettled": "pending_table=pending",
    "rmq_spark._core.inspect.standing": "Letters Standing",
    "rmq_spark._core.log.half_record": "HalfRecord",
    "rmq_spark._core.log.half_table": "HalfTable",
    "rmq_spark._core.log.half_writer": "HalfWriter",
    "rmq_spark._core.log.op": "OP_SCHEMA OpKind OpRow Who op_table=to_table",
    "rmq_spark._core.log.ledger": "Ledger",
    "rmq_spark._core.log.batch_index": "BatchIndex",
    "rmq_spark._core.log.clock_doubt": "BELIEVED_S LOOK_INTERVAL_S",
    "rmq_spark._core.log.shared_files": "SharedFiles",
    "rmq_spark._core.log.staged_batches": "SharedFileWriter Staged",
    "rmq_spark._core.log.topics": "TOPICS_SCHEMA",
    "rmq_spark._core.messages": "drain",
    "rmq_spark._core.messages.border": "DrainBorder",
    "rmq_spark._core.messages.drain": "Drainer",
    "rmq_spark._core.messages.message_reader": "STORED_COLUMNS read_ranges read_topic",
    "rmq_spark._core.messages.messages_table": "MESSAGES_SCHEMA SOURCE_SCHEMA drained_up_to",
    "rmq_spark._core.metrics.log_figures": "LogWatch",
    "rmq_spark._core.metrics.metric_names": "BY_NAME LOG METRICS PROCESS",
    "rmq_spark._core.metrics.process": "ProcessMetrics",
    "rmq_spark._core.metrics.push_gateway": "push_figures=push",
    "rmq_spark._core.producer.async_send": "AsyncSend",
    "rmq_spark._core.protocol": "group_commit two_phase=send",
    "rmq_spark._core.protocol.engine": "Engine",
    "rmq_spark._core.protocol.parts": "PartAnswer PartRunner run_part",
    "rmq_spark._core.protocol.assemble_half_batch": "half_batch_of",
    "rmq_spark._core.protocol.split": "split_by_verdict",
    "rmq_spark._core.protocol.identity": "Identity Lineage identity_of input_hash_of read_checkpoint",
    "rmq_spark._core.protocol.replay": "Replays",
    "rmq_spark._core.protocol.send": "TwoPhase",
    "rmq_spark._core.protocol.steps": "Decide",
    "rmq_spark._core.reads.offsets": "Positions from_checkpoint from_json parse_offsets parse_timestamp to_json",
    "rmq_spark._core.reads.option_names": "SOURCE_OPTIONS",
    "rmq_spark._core.reads.read_options": "ReadOptions Subscription parse_tags read_options",
    "rmq_spark._core.reads.plan": "Planner admit partition_ranges",
    "rmq_spark._core.report.report_figures": "figures_of",
    "rmq_spark._core.inspect.finding": "Level",
    "rmq_spark._core.report.page": "page",
    "rmq_spark._core.runtime.runtime": "RUNTIME Runtime",
    "rmq_spark._core.selector": "parse_selector",
    "rmq_spark._core.spark": "native reader",
    "rmq_spark._core.spark.consume": "Concurrently=_Concurrently Orderly=_Orderly",
    "rmq_spark._core.spark.datasource": "TxmqDataSource",
    "rmq_spark._core.spark.frame": "require_message_types",
    "rmq_spark._core.spark.part_tasks": "PartRows",
    "rmq_spark._core.spark.reader": "TxmqReader TxmqStreamReader",
    "rmq_spark._core.spark.sink_options": "SINK_OPTIONS SinkSettings",
    "rmq_spark._core.spark.versions": "STREAM_TELLS_START",
    "rmq_spark._core.storage": "commit_loop=compare_and_set spark_parquet stores",
    "rmq_spark._core.storage.clock": "StoreClock",
    "rmq_spark._core.storage.data_file": "DataFile",
    "rmq_spark._core.storage.delta_entries": "DeltaEntries",
    "rmq_spark._core.storage.delta_table": "DeltaLogTable",
    "rmq_spark._core.storage.file_system": "filesystem",
    "rmq_spark._core.storage.foreign_commits": "Entry",
    "rmq_spark._core.storage.location": "location",
    "rmq_spark._core.storage.row_range": "PAYLOAD_COLUMNS RowRange read_range",
    "rmq_spark._core.storage.spark_parquet": "spark_schema",
    "rmq_spark._core.storage.stores": "PROBE require_put_if_absent",
    "rmq_spark._core.storage.table": "Change Table",
    "rmq_spark._core.storage.writer_lock": "WriterLock",
    "rmq_spark._core.upkeep": "table_files pruning=prune stripping=strip upkeep=schedule",
    "rmq_spark._core.upkeep.expire": "Expirer",
    "rmq_spark._core.upkeep.leave": "Graces Leaver",
    "rmq_spark._core.upkeep.prune": "Pruner",
    "rmq_spark._core.upkeep.schedule": "MaintenanceReport maintain",
    "rmq_spark._core.upkeep.strip": "Stripper",
    "rmq_spark._core.vocabulary.message": (
        "CHECK_IMMUNITY_PROPERTY INPUT_COLUMNS PROPERTIES TIMESTAMP message_table=to_table require_app_id "
        "require_group_name require_topic_name"
    ),
    "rmq_spark._core.vocabulary.options": (
        "APP_ID_CHARS_MAX BODY_BYTES_MAX GROUP_CHARS_MAX IDEMPOTENCY_S LEASE_S_MAX Options PROPERTIES_BYTES_MAX "
        "TIME_MIN TOPIC_CHARS_MAX parse_bool parse_duration parse_int"
    ),
    "rmq_spark._core.vocabulary.redaction": "TEXT_CHARS_MAX redacted",
    "rmq_spark._core.vocabulary.rows": "NO_ROWS RowSet runs",
    "rmq_spark._core.vocabulary.verdicts": "BATCH KEY MESSAGE Verdict verdict_of",
    "rmq_spark.cli.text": "json_message",
    "rmq_spark.cli.verbs": "whole",
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
