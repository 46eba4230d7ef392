"""Runs the ``txmq`` command in this process, by typer's runner."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner

from rmq_spark.cli import app


def txmq(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a run that must end with this exit code."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stdout, result.stderr


def objects(*arguments: object, code: int = 0) -> list[dict[str, Any]]:
    """What ``--json`` prints: an object a line."""
    return [json.loads(line) for line in txmq(*arguments, "--json", code=code)[0].splitlines()]


def words(text: str) -> str:
    """A text that was put into a frame, on one line."""
    return " ".join(re.sub("[│╭─╮╰╯]", " ", text).split())
