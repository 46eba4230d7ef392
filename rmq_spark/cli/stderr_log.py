"""Writes the log of a job to standard error: the check job, the exporter and the relay. Opens closed streams."""

from __future__ import annotations

import logging
import os
import sys
import time

from rmq_spark.json_logs import JsonFormatter

FORMAT_ENV = "TXMQ_LOG_FORMAT"
"""``json`` makes the commands write their logs as lines of JSON."""


def log_to_stderr(level: int) -> None:
    """Log this package's records from ``level`` on, or all of them where ``TXMQ_DEBUG`` is set; and warnings of all
    others."""
    level = logging.DEBUG if os.environ.get("TXMQ_DEBUG") else level
    handler = json_handler() or _console_handler()
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rmq_spark").setLevel(level)


def _console_handler() -> logging.Handler:
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        rich_handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        rich_handler.setFormatter(logging.Formatter("%(message)s"))
        return rich_handler
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%SZ")
    formatter.converter = time.gmtime  # UTC, as in all output of txmq
    handler = logging.StreamHandler(sys.stderr)  # rich would wrap long lines
    handler.setFormatter(formatter)
    return handler


def json_handler() -> logging.Handler | None:
    """Return a handler that writes lines of JSON to standard error, if the environment asks for it; else None."""
    if os.environ.get(FORMAT_ENV, "").lower() != "json":
        return None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    return handler


def open_closed_streams() -> None:
    """Replace each closed standard stream (``>&-``), for which Python has None, by an empty file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
