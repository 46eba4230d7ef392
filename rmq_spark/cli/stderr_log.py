"""Writes the log of a job to standard error: the check job, the exporter and the relay."""

from __future__ import annotations

import logging
import sys
import time

from rmq_spark.logs import json_handler


def log_to_stderr(level: int) -> None:
    """Log this package's records from ``level`` on, and warnings of all others."""
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
