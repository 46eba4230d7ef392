"""Looks for the modules that settings name. Nothing is imported, so none of their code runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from rmq_spark._core.listeners.transaction_listener import import_error, require_object_path


def require_module(path: str, allowed_prefixes: Sequence[str] | None = None) -> None:
    """Raise ListenerError unless ``module:attribute`` is well-formed and allowed, and its module is there. Only an
    import tells whether the module has the attribute."""
    module, _ = require_object_path(path, allowed_prefixes)
    name, folders = "", None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _spec(name, folders)
        if spec is None:
            raise import_error(path, module, ModuleNotFoundError(f"No module named {name!r}", name=name))
        folders = list(spec.submodule_search_locations or ())


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
