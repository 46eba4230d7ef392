"""The txmq command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rmq_spark.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_as_a_process(tmp_path: Path) -> None:
    made = run("create", tmp_path / "log")
    assert (made.returncode, made.stderr) == (0, "")
    failed = run("pending", tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert len(failed.stderr.splitlines()) == 1


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    failed = run("topics", tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert failed.returncode == 1
    assert failed.stderr.strip() == "the txmq command needs typer: install rmq_spark with its extra job"
