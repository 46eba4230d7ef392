"""Limits of the product that a test makes small, so that a few rows, files or seconds reach them.

The table says where a limit stands. Whoever moves one changes the table, and no test.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest

from tests.support.inside import located

_STANDS_IN = {
    "rmq_spark._core.checks.asker": "HUNG_CALLS_MAX",
    "rmq_spark._core.client.draining": "AFTER_FAILURE_S",
    "rmq_spark._core.client.maintainer": "ORPHANS_EVERY_S",
    "rmq_spark._core.checks.probe": "ALONE_S_MAX ANSWER_S_MAX",
    "rmq_spark._core.client.commit_log": "ORPHAN_AGE_S",
    "rmq_spark._core.consumers.member": "FETCH_BYTES",
    "rmq_spark._core.consumers.member_threads": "AT_EXIT_S_MAX",
    "rmq_spark._core.consumers.send_back": "SEND_AGAIN_S",
    "rmq_spark._core.inspect.undrained": "UNDRAINED_OP_ROWS_MAX=OP_ROWS_MAX",
    "rmq_spark._core.kafka.brokers": "ANSWER_S ASK_S=TRY_S READ_SLACK_S=SLACK_S",
    "rmq_spark._core.kafka.kafka_client": "LINES_MAX",
    "rmq_spark._core.kafka.relay": "LOOK_AGAIN_S",
    "rmq_spark._core.kafka.transactions": "SLACK_S TRY_S",
    "rmq_spark._core.listeners.fence": "PRUNED_AT_ONCE",
    "rmq_spark._core.listeners.target_table": "EACH_MAX",
    "rmq_spark._core.log.half_writer": "ARROW_BYTES_MAX=BATCH_BYTES_MAX FILES_PER_PARTITION_MAX HALF_FILE_BYTES_MAX",
    "rmq_spark._core.log.half_table": "STAGED_S_MAX=ORPHAN_AGE_S",
    "rmq_spark._core.log.low_water_mark": "NAMED_MAX ROWS_LET_GO_MIN",
    "rmq_spark._core.log.op_merge": "OP_FILES_MAX",
    "rmq_spark._core.log.op_reader": "OPEN_ROWS_CACHED_MAX",
    "rmq_spark._core.log.ledger": "ATTEMPTS_MAX MARK_TRIES_MAX TRY_AGAIN_S",
    "rmq_spark._core.log.shared_files": "IDS_CACHED_MAX",
    "rmq_spark._core.messages.border": "RUNS_CACHED_MAX",
    "rmq_spark._core.messages.placements": "CACHE_ROWS_MAX",
    "rmq_spark._core.log.topics": "TOPICS_FILES_MAX",
    "rmq_spark._core.log.op_walk": "OP_READ_BYTES_MAX",
    "rmq_spark._core.messages.drain": "OP_ROWS_MAX STEP_MESSAGES_MAX VERSIONS_SKIPPED_MAX",
    "rmq_spark._core.messages.message_files": ("MESSAGES_FILE_BYTES_MAX READS_AT_ONCE ROWS_AT_ONCE RUNS_AT_ONCE"),
    "rmq_spark._core.messages.message_reader": "SMALL_PIECE_ROWS TOGETHER_MAX",
    "rmq_spark._core.metrics.log_figures": "LOOKS_MAX",
    "rmq_spark._core.protocol.engine": "SMALL_ROWS_MAX",
    "rmq_spark._core.protocol.group_commit": "GATHER_S_MAX",
    "rmq_spark._core.protocol.leases": "LEASES_LINGER_S=LINGER_S",
    "rmq_spark._core.protocol.send": "LEASE_S",
    "rmq_spark._core.report.live_server": "CONNECTIONS_MAX ENDS_S REQUEST_S_MAX STALE_S",
    "rmq_spark._core.report.live_page": "TRANSACTIONS_SHOWN_MAX=TRANSACTIONS_MAX",
    "rmq_spark._core.report.shared_look": "LOOK_EVERY_S=EVERY_S LOOK_REST=REST LOOK_WAIT_S=WAIT_S",
    "rmq_spark._core.inspect.standing": "LOOKED_AT_MAX",
    "rmq_spark._core.runtime.pools": "POOLS_LINGER_S=LINGERS_S",
    "rmq_spark._core.spark.native": "DRAINED_PATHS_MAX HALF_PATHS_MAX",
    "rmq_spark._core.spark.reader": "BATCH_BYTES_MAX BATCH_ROWS_MIN",
    "rmq_spark._core.storage.compare_and_set": "BACKOFF_S_MAX COMMIT_TRIES_MAX",
    "rmq_spark._core.storage.data_file": "ROW_GROUP_ROWS",
    "rmq_spark._core.upkeep.table_files": "MESSAGES_FILES_MAX REPLACED_FILES_S",
    "rmq_spark._core.upkeep.prune": "PRUNED_BYTES_MAX=MERGED_BYTES_MAX PRUNED_SHARE_MIN",
    "rmq_spark._core.upkeep.strip": "STRIPPED_AT_ONCE_MAX=FILES_AT_ONCE_MAX STRIPPED_BYTES_MIN",
    "rmq_spark.cli.completion": "COMPLETES_S_MAX=SECONDS_MAX",
    "rmq_spark._core.inspect.diagnosis": "FILES_MAX",
    "rmq_spark.cli.message_choice": "FILTERED_SPAN",
}
_WHERE = located(_STANDS_IN)


class Limit(Protocol):
    """The fixture ``limit``: ``limit(OP_FILES_MAX=2)`` holds until the test ends."""

    def __call__(self, **limits: Any) -> None: ...


def set_limits(patch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Set some limits, by their names in the table, until the patch is undone."""
    for name, value in limits.items():
        module, inner = _WHERE[name]
        patch.setattr(importlib.import_module(module), inner, value)


@contextmanager
def limited(**limits: Any) -> Iterator[None]:
    """Some limits, within a ``with`` block."""
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, **limits)
        yield
