"""The ``txmq`` command."""

from __future__ import annotations

try:
    from rmq_spark.cli.app import app
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] == "rmq_spark":
        raise
    _name = missing.name

    def app() -> None:  # type: ignore[misc]
        """Say which extra the command needs."""
        raise SystemExit(f"the txmq command needs {_name}: install rmq_spark with its extra job")


__all__ = ["app"]
