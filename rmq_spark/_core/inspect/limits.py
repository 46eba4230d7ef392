"""When a figure of a commit log is a finding: in ``txmq doctor``, in the report, and in the alert rules."""

SILENT_INTERVALS = 3
"""A checker that left no word for so many check intervals counts as silent."""
PENDING_S_MAX = 600.0
"""Seconds by which checks should have settled a pending half batch."""
PENDING_S_CRITICAL = 3600.0
LAG_S_MAX = 600.0
"""Most seconds since the commit of the oldest message that a consumer group has not read."""
UNDRAINED_S_MAX = 600.0
"""Most seconds from a message's commit until it is in the table ``messages``."""
FILES_MAX = 5_000
"""Most live files of ``half`` or ``op``. More mean that upkeep is behind, or that very many half batches are open."""
