"""The house: public modules above a border, rooms behind it, and arrows that point down. Nothing is imported here."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rmq_spark"
PUBLIC = frozenset(
    "checks cli consumers errors json_logs kafka listeners log message metrics plots producer report sink spark "
    "testing".split()
)
ROOMS = (
    "vocabulary selector runtime database storage log messages listeners protocol upkeep inspect client reads checks "
    "producer consumers spark kafka metrics report"
).split()
"""From the bottom to the top. A room imports itself and the rooms before it."""
BELOW_ALL = ("rmq_spark.errors",)
"""Public modules that every room imports: they stand on the vocabulary alone."""


class Import(NamedTuple):
    """One import of ``name`` in the module at ``path``. It ``runs`` unless it is below ``if TYPE_CHECKING``, and runs
    ``at_once`` outside of functions."""

    path: Path
    name: str
    runs: bool
    at_once: bool


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def imports(path: Path) -> list[Import]:
    return list(_imports(path, ast.parse(path.read_text()), True, True))


def _imports(path: Path, node: ast.AST, runs: bool, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                is_module = (ROOT / child.module.replace(".", "/") / f"{alias.name}.py").exists()
                yield Import(path, f"{child.module}.{alias.name}" if is_module else child.module, runs, at_once)
        elif isinstance(child, ast.Import):
            yield from (Import(path, alias.name, runs, at_once) for alias in child.names)
        else:
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports(path, child, runs and not is_for_types, at_once and not is_function)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["rmq_spark", "_core"] and len(parts) > 2 and parts[2] in ROOMS else None


def named(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


CORE = modules(PACKAGE / "_core")


def test_every_module_is_public_or_in_a_room() -> None:
    top = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules(PACKAGE)}
    assert top == {*PUBLIC, "_core", "__init__", "__main__"}
    rooms = {path.relative_to(PACKAGE / "_core").parts[0] for path in CORE}
    assert rooms == {*ROOMS, "__init__.py", "lazy.py"}


def test_the_picture_of_the_house_names_each_room_and_modules_that_are_there() -> None:
    picture = (ROOT / "ARCHITECTURE.md").read_text().partition("=== the border")[2].partition("```")[0]
    rows = [line.partition(" ") for line in picture.splitlines()[1:]]
    assert [room for room, _, _ in rows] == list(reversed(ROOMS))
    for room, _, text in rows:
        named_modules = re.findall(r"\w+", re.sub(r"\([^)]*\)", "", text.rpartition(":")[2]))
        assert named_modules, f"the picture names no module of {room}"
        missing = [name for name in named_modules if not (PACKAGE / "_core" / room / f"{name}.py").exists()]
        assert not missing, f"the picture names {missing} in {room}"


def test_imports_of_rooms_point_down() -> None:
    up = [
        f"{named(path)} imports {name}"
        for path in CORE
        for _, name, runs, _ in imports(path)
        if runs and (there := room_of(name)) and (here := room_of(named(path)))
        if ROOMS.index(there) > ROOMS.index(here)
    ]
    assert up == []


def test_no_room_imports_what_stands_above_the_border() -> None:
    up = [
        f"{named(path)} imports {name}"
        for path in CORE
        for _, name, runs, _ in imports(path)
        if runs and name.startswith("rmq_spark.") and not name.startswith("rmq_spark._core")
        if not name.startswith(BELOW_ALL)
    ]
    assert up == []


def test_no_module_imports_itself_in_a_circle() -> None:
    known = {named(path): path for path in modules(PACKAGE)}
    at_once = {name: [i.name for i in imports(path) if i.runs and i.at_once] for name, path in known.items()}
    uses = {name: set(imported) & known.keys() for name, imported in at_once.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for used in sorted(uses[name] - {"rmq_spark"}):
                visit(used, (*way, name))
            done.add(name)

    for name in sorted(known):
        visit(name, ())


@pytest.mark.parametrize(
    ("package", "where"),
    [
        ("deltalake", {"storage"}),
        ("sqlalchemy", {"database", "listeners", "consumers", "spark"}),
        ("confluent_kafka", {"kafka"}),
        ("prometheus_client", {"metrics"}),
        ("altair", {"report"}),
    ],
)
def test_a_package_is_imported_in_its_rooms_alone(package: str, where: set[str]) -> None:
    found = {
        room_of(named(path)) or named(path)
        for path in modules(PACKAGE)
        for _, name, runs, _ in imports(path)
        if runs and name.split(".")[0] == package
    }
    assert found <= where


def test_docs_examples_and_notebooks_teach_public_modules_only() -> None:
    shown = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").iterdir()]
    shown += [*modules(ROOT / "examples"), *(path for path in (ROOT / "conf").rglob("*") if path.is_file())]
    assert [str(path) for path in shown if path.is_file() and "rmq_spark._core" in path.read_text()] == []


def test_the_command_imports_what_is_public_from_public_modules() -> None:
    def of_the_core(path: Path) -> set[tuple[str, str, bool]]:
        return {
            (node.module, alias.name, alias.name == alias.asname)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rmq_spark._core")
            for alias in node.names
        }

    facades = [*PACKAGE.glob("*.py"), PACKAGE / "checks" / "__init__.py"]
    public = {name for path in facades for _, name, is_exported in of_the_core(path) if is_exported}
    verbs = modules(PACKAGE / "cli")
    assert [(named(path), name) for path in verbs for _, name, _ in of_the_core(path) if name in public] == []


def _docstrings(path: Path) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_text()))
    yield from (ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))


@pytest.mark.turns(2, among="docstrings")
def test_docstrings_refer_to_what_is_there() -> None:
    """Eight named classes and modules that had moved."""

    def is_there(reference: str) -> bool:
        module, _, name = reference.rpartition(".")
        place = ROOT / module.replace(".", "/")
        if place.is_dir():
            is_module = any((place / f"{name}{end}").exists() for end in ("", ".py"))
            return is_module or name in (place / "__init__.py").read_text()
        if place.with_suffix(".py").exists():
            return re.search(rf"\b{name}\b", place.with_suffix(".py").read_text()) is not None
        return bool(module) and is_there(module)

    gone = [
        f"{named(path)}: {reference}"
        for path in modules(PACKAGE)
        for text in _docstrings(path)
        for reference in re.findall(r":\w+:`[~.]?(rmq_spark[\w.]+)`", text)
        if not is_there(reference)
    ]
    assert gone == []


def _names(path: Path) -> Iterator[str]:
    """The classes and imported names of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).rpartition(".")[2] for alias in node.names)


@pytest.mark.turns(2, among="docstrings")
def test_types_of_parameters_in_docstrings_are_classes_that_are_there() -> None:
    known = {name for path in modules(PACKAGE) for name in _names(path)} | set(dir(builtins)) | {"KafkaError"}
    gone = [
        f"{named(path)}: {kind}"
        for path in modules(PACKAGE)
        for text in _docstrings(path)
        for kind in re.findall(r"^\w[\w, *]* : ([A-Z]\w+)", text, re.MULTILINE)
        if kind not in known
    ]
    assert gone == []
