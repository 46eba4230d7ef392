"""The names of the settings in the check job's file, which the ``txmq`` command reads, too. Light to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rmq_spark._core.vocabulary.options import nearest

CHECK_NAMES: Mapping[str, str] = {
    "transactionTimeout": "transaction_timeout",
    "transactionCheckInterval": "transaction_check_interval",
    "transactionCheckMax": "transaction_check_max",
    "discardPolicy": "discard_policy",
    "fileReservedTime": "file_reserved_time",
    "roundTimeout": "round_timeout",
}
"""The settings of ``[check]``: their names in the file, and in Python and the environment
(``TXMQ_CHECK__<upper case>``)."""
MAINTENANCE_NAMES: Mapping[str, str] = {name: name for name in ("interval", "grace", "audit", "idempotency", "fences")}
"""The same of ``[maintenance]`` (``TXMQ_MAINTENANCE__<upper case>``)."""
DRAIN_NAMES: Mapping[str, str] = {"every": "every"}
"""The same of ``[drain]`` (``TXMQ_DRAIN__<upper case>``)."""
METRICS_NAMES: Mapping[str, str] = {name: name for name in ("port", "address", "cluster", "textfile")}
"""The same of ``[metrics]`` (``TXMQ_METRICS__<upper case>``)."""
NAMES = {"check": CHECK_NAMES, "maintenance": MAINTENANCE_NAMES, "drain": DRAIN_NAMES, "metrics": METRICS_NAMES}
SECTIONS = ("path", "listener_modules", "elsewhere", "listeners", *NAMES, "storage")


def unknown_settings(values: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each name in a file that is no setting, with the nearest setting."""
    for name in values:
        if name not in SECTIONS:
            yield f"unknown setting {name!r}: {nearest(name, SECTIONS)}"
    for section, names in NAMES.items():
        section_values = values.get(section, {})
        for name in section_values if isinstance(section_values, Mapping) else ():
            if name not in names:
                yield f"unknown setting {name!r} in [{section}]: {nearest(name, names)}"
