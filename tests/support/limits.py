"""Limits of the inside that tests make small, so that a few messages reach them, and where they live."""

from __future__ import annotations

from typing import Any

import pytest

_LIVES_IN = {
    "rmq_spark.commitlog.drain": "OP_ROWS_MAX STEP_MESSAGES_MAX VERSIONS_SKIPPED_MAX",
    "rmq_spark.commitlog.follower": "OPEN_ROWS_KEPT",
    "rmq_spark.commitlog.group_commit": "GATHERS_S_MAX",
    "rmq_spark.commitlog.ledger": "ATTEMPTS_MAX MARK_TRIES_MAX",
    "rmq_spark.commitlog.maintenance": "MESSAGES_FILES_MAX OP_FILES_MAX REPLACED_FILES_S",
    "rmq_spark.commitlog.marking": "NAMED_MAX ROWS_LET_GO_MIN",
    "rmq_spark.commitlog.message_files": (
        "MESSAGES_FILE_BYTES_MAX=FILE_BYTES_MAX READS_AT_ONCE ROWS_AT_ONCE RUNS_AT_ONCE"
    ),
    "rmq_spark.commitlog.pruning": "PRUNED_SHARE_MIN",
    "rmq_spark.commitlog.reading": "FEW_ROWS TOGETHER_MAX",
    "rmq_spark.commitlog.stripping": "STRIPPED_BYTES_MIN",
    "rmq_spark.commitlog.undrained": "UNDRAINED_OP_ROWS_MAX=OP_ROWS_MAX",
    "rmq_spark.commitlog.walk": "OP_FILE_BYTES_MAX=FILE_BYTES_MAX",
    "rmq_spark.sink.leases": "LEASES_LINGER_S=LINGER_S",
    "rmq_spark.storage.files": "ROW_GROUP_ROWS",
    "rmq_spark.storage.pools": "POOLS_LINGER_S=LINGERS_S",
    "rmq_spark.storage.table": "BACKOFF_S_MAX COMMIT_TRIES_MAX",
}
_WHERE = {
    name.partition("=")[0]: f"{module}.{name.rpartition('=')[2]}"
    for module, names in _LIVES_IN.items()
    for name in names.split()
}


def set_limits(patch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Set limits, until the patch is undone."""
    for name, limit in limits.items():
        patch.setattr(_WHERE[name], limit)
