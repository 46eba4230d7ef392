"""The examples of README and the how-tos, run in the order in which they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.process import postgres

ROOT = Path(__file__).parents[2]
NEEDS_A_SERVER = ("object-stores", "postgresql", "spark-postgresql", "recipes", "kafka")
"""test_stores.py, a test of their own and tests/kafka run them."""


def run_examples(page: Path, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a page's Python and bash blocks as one program, each ``# file:`` block written to a file; returns what it
    printed."""
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    program = ["import subprocess"]
    for language, block in blocks:
        if language == "bash":
            program.append(f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {block!r}], check=True)")
        elif name := re.match(r"# file: (\S+)\n", block):
            (folder / name[1]).write_text(block)
        else:
            program.append(block)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # python and txmq are this environment's
    (folder / "examples.py").write_text("\n".join(program))
    done = subprocess.run(
        [sys.executable, "examples.py"],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    printed = run_examples(page, tmp_path)
    (promised,) = re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert printed.startswith(promised)
    assert re.findall(r'"order_id": ?(\d+)', printed.removeprefix(promised)) == ["1", "3"]


def _is_slow(page: Path) -> bool:
    return "SparkSession" in page.read_text() or page.stem == "backup"


HOW_TOS = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.long] if _is_slow(page) else [])
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.stem not in NEEDS_A_SERVER
]
"""Those that start a Spark of their own take as long as the README."""


@pytest.mark.turns(9, among="how-tos")
@pytest.mark.parametrize("page", HOW_TOS)
def test_a_how_to_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    run_examples(page, tmp_path)


@pytest.mark.turns(9, among="how-tos")
@pytest.mark.postgres
@pytest.mark.parametrize(
    ("page", "user"),
    [
        ("postgresql", "shop_app"),
        pytest.param("spark-postgresql", None, marks=pytest.mark.long),
        pytest.param("recipes", None, marks=pytest.mark.long),
    ],
)
def test_the_how_to_for_postgresql_runs_from_top_to_bottom(page: str, user: str | None, tmp_path: Path) -> None:
    (tmp_path / "pg").mkdir()
    with postgres.running(tmp_path / "pg") as owner:
        urls = {"ORDERS_DB_OWNER": owner, "ORDERS_DB": owner.set(username=user or owner.username)}
        environment = {name: url.render_as_string(hide_password=False) for name, url in urls.items()}
        run_examples(ROOT / "docs" / f"{page}.md", tmp_path, environment)
