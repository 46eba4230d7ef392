"""docs/command.md: its examples print what it says, and it has every verb."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rmq_spark import CommitLog
from rmq_spark.cli import app
from rmq_spark.cli.command import App
from rmq_spark.cli.verbs import VERBS
from tests.support.inside import whole
from tests.support.machines import be_fine

PAGE = Path(__file__).parents[2] / "docs" / "command.md"
CHANGES = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", "TIME"),
    (r"\+?\b\d+(\.\d)?(ms|[smhd])( \d+[smhd])?\b(?! --)", "AGE"),
    (r"\b[\d.]+ [KMG]?i?B\b", "SIZE"),
    (r'"(age_seconds|bytes|prepared_at|lag_seconds)": [^,}]+', r'"\1": …'),
    (r"\b\d+\.\d+\b", "NUMBER"),
    (r"/\S+/shop/", "/srv/shop/"),
    (r"(:\d+)-[0-9a-f]{12}\b", r"\1-ID"),
    (r"[ \t]+", " "),
)
"""What differs from run to run: times, ages, sizes, rates, and so the width of columns; the last digits of an id."""


def examples(text: str) -> Iterator[tuple[str, str]]:
    """The commands of the page, and what it says that they print."""
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = example.partition("\n")
            yield command, printed


def run(command: str) -> str:
    """What a command prints, and its exit code when it is not 0."""
    name, *arguments = shlex.split(command)
    assert name == "txmq"
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "140"})
    code = f"[exit code {result.exit_code}]\n" if result.exit_code else ""
    return f"{result.output}{code}"


def alike(text: str) -> str:
    for pattern, word in CHANGES:
        text = re.sub(pattern, word, text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def of_this_run(command: str) -> str:
    """A command with the ids of this run."""
    ids = CommitLog.open("shop/log").engine.half.contents.all_batches()
    known = {half_id.rpartition("-")[0]: half_id for half_id in ids}
    return re.sub(r"(\S+:\d+)-[0-9a-f]{12}\b", lambda found: known[found[1]], command)


def test_every_example_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    for name in ("TXMQ_PATH", "TXMQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    be_fine(monkeypatch, tmp_path)
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {"__name__": "command_page"})
    commands = 0
    for command, printed in examples(text):
        assert alike(run(of_this_run(command))) == alike(printed), command
        commands += 1
    assert commands > 9


def verbs(command: Any, before: str = "") -> Iterator[str]:
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from verbs(inner, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def test_the_page_has_every_verb_and_no_other() -> None:
    text = PAGE.read_text()
    headings = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    elsewhere = {name for cell in cells for name in re.findall(r"`([a-z -]+)`", cell)}
    known = set(verbs(whole(app)))
    assert headings <= known
    assert elsewhere == known - headings


def test_the_help_lists_each_verb_with_its_own_first_sentence() -> None:
    listed = {name: said for verbs in VERBS.values() for name, (_, said) in verbs.items()}
    real = whole(app).commands
    assert listed == {name: verb.short_help or verb.help for name, verb in real.items()}


@pytest.mark.parametrize("module", sorted({module for verbs in VERBS.values() for module, _ in verbs.values()}))
def test_the_help_lists_all_that_a_module_registers(module: str) -> None:
    made = App()
    importlib.import_module(f"rmq_spark.cli.{module}").register(made)
    names = [c.name or c.callback.__name__ for c in made.registered_commands if c.callback]
    names += [str(g.name) for g in made.registered_groups]
    assert set(names) == {name for verbs in VERBS.values() for name, (where, _) in verbs.items() if where == module}


def test_the_page_has_every_exit_code() -> None:
    from rmq_spark.cli import command, doctor, relay

    codes = {command.OK, command.FAILED, command.BAD_USAGE, relay.FENCED, relay.REFUSED, doctor.WARNINGS,
             doctor.CRITICAL}  # fmt: skip
    table = re.findall(r"^\| (\d) \| ", PAGE.read_text(), re.MULTILINE)
    assert sorted(map(int, table)) == sorted(codes)
