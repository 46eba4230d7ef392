"""The notebooks run as they are, with plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))

pytestmark = pytest.mark.long  # each starts a Spark of its own


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_unchanged(notebook: Path, tmp_path: Path) -> None:
    assert notebook.read_text().startswith("# Databricks notebook source\n")
    done = subprocess.run(
        [sys.executable, str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "FOLDER": str(tmp_path / "work"), "ORDERS": "17"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "committed: [1, 2, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17]" in done.stdout
    assert "committed: [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]" in done.stdout
    assert "pending: 0" in done.stdout
