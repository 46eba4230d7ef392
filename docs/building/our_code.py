"""What griffe, which reads the code for mkdocstrings, is to know of ours (``extensions`` in conf/mkdocs.yml)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod|exc):`~?([^`]+)`")


class OurCode(griffe.Extension):
    """Makes links of the roles in docstrings, shows constants as what they are, and names the values of an enum."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        described = list(_objects(pkg))
        for obj in described:
            for parameter in obj.parameters if isinstance(obj, griffe.Function) else ():
                if isinstance(parameter.default, griffe.ExprName):
                    value = getattr(importlib.import_module(obj.module.path), parameter.default.name)
                    parameter.default = getattr(value, "__name__", None) or repr(value)
        for obj in described:
            if obj.docstring is not None:
                _mend(obj, obj.docstring)


def _objects(within: griffe.Object) -> Iterator[griffe.Object]:
    yield within
    for member in within.members.values():
        if isinstance(member, griffe.Object):  # and no alias
            yield from _objects(member)


def _mend(obj: griffe.Object, docstring: griffe.Docstring) -> None:
    docstring.value = _ROLE.sub(lambda role: _link(obj, role[1]), docstring.value)
    if isinstance(obj, griffe.Class) and "Enum" in map(str, obj.bases):
        values = ", ".join(f"`{name}`" for name, member in obj.members.items() if member.is_attribute)
        docstring.value += f"\n\n**Values:** {values}."
    for section in docstring.parsed:
        for entry in section.value if isinstance(section.value, list) else ():
            if isinstance(getattr(entry, "annotation", None), griffe.ExprTuple):  # "int, str or path"
                entry.annotation.implicit = True  # without brackets


def _link(obj: griffe.Object, name: str) -> str:
    """Return a link to what an object's docstring calls by a name; its name, where the reference has no such thing."""
    try:
        path = obj.resolve(name)
    except griffe.NameResolutionError:
        path = name if name.startswith("rmq_spark.") else f"rmq_spark.{name}"
    shown = name.rpartition(".")[2] if name.startswith("rmq_spark.") else name
    return f'<autoref identifier="{path}" optional>`{shown}`</autoref>'
