"""The notebooks run as they are, with plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
PRINTED = {
    "01_first_transaction": [
        "committed: [1, 2, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17]",
        "committed: [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]",
        "pending: 0",
    ],
    "02_crash_and_check": [
        "the program died after the commit: exit code -9",
        "the program died before the commit: exit code -9",
        "in the database: [1, 2] - told: [1] - pending: 2",
        "in the database: [1, 2] - told: [1, 2] - pending: 0",
        "committed by check, 1 message",
        "rolled_back by check, 1 message",
        "order 3 COMMIT_MESSAGE send.order-service.order-3:0-",
        "in the database: [1, 2, 3] - told: [1, 2, 3] - pending: 0",
    ],
    "03_ordered_orders_and_retries": [
        "visible: ['A created', 'B created', 'B paid', 'B shipped']",
        "in order: ['A created', 'A paid', 'A shipped']",
        "dead letters: [{'keys': 'B paid'",
        "behind by 0 messages; dead letters: 1",
    ],
    "04_operating": [
        "pending: 0 quarantined: 2",
        "behind by 500 messages",
        "warning: 2 half batches quarantined, and hidden",
        "chart: Messages that appeared, by topic",
        "committed by admin, 1 message",
        "All is well: 2,001 messages appeared",
    ],
    "05_history": [
        "turnover: [{'topic': 'orders', 'orders': 14, 'turnover': 1160.0}]",
        "{'kind': 'rollback', 'decided_by': 'execute', 'messages': 1}",
        "visible at noon: 9 9 9 9",
        "by Polars: ",
    ],
}
"""What each must print, in this order."""


def test_every_notebook_is_run() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == sorted(PRINTED)


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs_unchanged(notebook: Path, tmp_path: Path) -> None:
    assert notebook.read_text().startswith("# Databricks notebook source\n")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "FOLDER": str(tmp_path / "work"), "ORDERS": "17"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rest = done.stdout
    for words in PRINTED[notebook.stem]:
        _, found, rest = rest.partition(words)
        assert found, f"{words!r} was not printed, or not in its place:\n{done.stdout}"
