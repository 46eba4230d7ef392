"""Looks for ``module:attribute`` in the source of the module. Nothing is imported, so none of its code runs."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder

from rmq_spark._core.listeners.transaction_listener import import_error, require_object_path
from rmq_spark.errors import ListenerError

DYNAMIC_NAMES = {"globals", "locals", "vars", "setattr", "exec", "eval"}
DYNAMIC_ATTRIBUTES = {"__dict__", "modules"}
"""Code that uses these may bind a name that its source does not show."""


def look_for(path: str, allowed_prefixes: Sequence[str] | None = None) -> str | None:
    """Look for ``module:attribute`` in the source that ``load_object`` would import.

    Parameters
    ----------
    allowed_prefixes : sequence of str, optional
        Modules that may be imported.

    Returns
    -------
    str or None
        None: the source has it. Else a sentence about what only running the module would tell.

    Raises
    ------
    ListenerError
        When the import is known to fail: the path is malformed or not allowed, the module or one that it imports does
        not exist, its source is not Python, or it does not have the attribute.
    """
    module, attribute = require_object_path(path, allowed_prefixes)
    unknown = f"listener {path!r}: only running {module!r} would tell whether it has {attribute!r}"
    folders: list[str] | None = None
    name, tree = "", None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _spec(name, folders)
        if spec is None:
            if tree is not None and _mentions(tree, "__path__"):
                return unknown
            raise import_error(path, module, ModuleNotFoundError(f"No module named {name!r}", name=name))
        try:
            tree = _tree(spec)
            if tree is not None:
                _require_imports(tree)
        except (ImportError, SyntaxError, ValueError) as problem:
            raise import_error(path, module, problem) from problem
        folders = list(spec.submodule_search_locations or ())
    return unknown if tree is None or not _has(tree, path, module, attribute.split(".")) else None


def is_installed(package: str) -> bool:
    """Return True when a package could be imported here."""
    return _spec(package) is not None


def _spec(name: str, folders: list[str] | None = None) -> ModuleSpec | None:
    """Return what an import would find. (``importlib.util.find_spec`` imports the packages around a module.)"""
    if name in sys.modules and sys.modules[name] is None:
        return None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, folders)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [os.getcwd()]) if folders is None else None  # as in the check job


def _tree(spec: ModuleSpec) -> ast.Module | None:
    """Return the source of a module; None where it has none."""
    get_source = getattr(spec.loader, "get_source", None)
    source = None if get_source is None else get_source(spec.name)
    return None if source is None else ast.parse(source)


def _require_imports(tree: ast.Module) -> None:
    """Raise ModuleNotFoundError for a missing package that the module imports unconditionally."""
    for statement in tree.body:
        names: list[str] = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        for root in (name.partition(".")[0] for name in names):
            if sys.modules.get(root) is None and _spec(root) is None:
                raise ModuleNotFoundError(f"No module named {root!r}", name=root)


def _has(tree: ast.Module, path: str, module: str, names: Sequence[str]) -> bool:
    """Return True when the source has the attribute, and False when it cannot be known."""
    body: ast.Module | ast.ClassDef = tree
    for depth, name in enumerate(names):
        bound = [node for bound_name, node in _bound(body) if bound_name == name]
        if not bound:
            if _may_bind(body, name):
                return False
            raise ListenerError(f"listener {path!r}: {module!r} has no {'.'.join(names)!r}")
        last = bound[-1]
        if all(isinstance(node, ast.Import) for node in bound):
            raise ListenerError(f"listener {path!r} goes through the module {name!r}: name that one itself")
        if depth + 1 == len(names):
            return True
        if len(bound) > 1 or not isinstance(last, ast.ClassDef):
            return False
        body = last
    return False


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that the body of a module or a class binds when it runs, and what binds them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name, child
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name.partition(".")[0], child) for alias in child.names)
        elif isinstance(child, ast.Name):
            if isinstance(child.ctx, ast.Store):
                yield child.id, child
        elif not isinstance(child, ast.Lambda) and not (isinstance(child, ast.AnnAssign) and child.value is None):
            yield from _bound(child)


def _may_bind(body: ast.Module | ast.ClassDef, name: str) -> bool:
    """Return True when a module or a class may have a name that its body does not show."""
    if isinstance(body, ast.ClassDef):
        return bool(body.bases or body.keywords or body.decorator_list) or _mentions(body, name)
    bound_names = {bound_name for bound_name, _ in _bound(body)}
    return bool(bound_names & {"*", "__getattr__"}) or _mentions(body, name)


def _mentions(tree: ast.AST, name: str) -> bool:
    """Return True when the code mentions this name, or may bind names that it does not show."""
    return any(
        (isinstance(node, ast.Name) and node.id in {name, *DYNAMIC_NAMES})
        or (isinstance(node, ast.Attribute) and node.attr in {name, *DYNAMIC_ATTRIBUTES})
        or (isinstance(node, ast.Global) and name in node.names)
        for node in ast.walk(tree)
    )
