"""NumPy-style docstrings and signatures as Markdown."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

SECTIONS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Warns", "Options", "Notes", "Examples")
ENTRIES = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Warns", "Options")
"""Sections of names, each with a text that is indented."""
LINE_CHARS_MAX = 88

_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod|exc):`~?(?:[^`]*?\.)?([^`.]+)`")
_DOUBLE = re.compile(r"``(.+?)``", re.DOTALL)

_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def markdown_of(docstring: str | None) -> str:
    """Return a docstring as Markdown, its sections in bold, and its entries as lists."""
    if not docstring:
        return ""
    done: list[str] = []
    for title, body in _sections(inspect.cleandoc(docstring)):
        if title:
            done += [f"**{title}**", ""]
        if title in ENTRIES:
            done += [_entries(body), ""]
        elif title == "Examples":
            done += ["```python", *(re.sub(r" *# doctest: .*$", "", line) for line in body), "```", ""]
        else:
            done += [prose("\n".join(body)), ""]
    return "\n".join(done).strip()


def prose(text: str) -> str:
    """Return running text without the roles and double backticks of reStructuredText."""
    return _DOUBLE.sub(r"`\1`", _ROLE.sub(r"`\1`", text)).strip()


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return paragraphs(docstring)[0]


def paragraphs(docstring: str | None) -> list[str]:
    """Return the paragraphs of a docstring before its first section, each in one line; one empty text for none."""
    title, body = next(_sections(inspect.cleandoc(docstring or "")))
    text = prose("\n".join(body)) if not title else ""
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]


def signature_of(thing: Any, name: str) -> str:
    """Return how something is called, in one line, or with a line for each parameter when it is long."""
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    parts: list[str] = []
    for at, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and (not at or _takes_place(parameters[at - 1])):
            parts.append("*")
        shown = parameter.name if parameter.default is parameter.empty else f"{parameter.name}={_value(parameter)}"
        parts.append(_STARS.get(parameter.kind, "") + shown)
    line = f"{name}({', '.join(parts)})"
    if len(line) <= LINE_CHARS_MAX:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), ")"])


def _takes_place(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)


def _value(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if isinstance(value, enum.Enum):
        return f"{value.name}"
    return getattr(value, "__name__", None) or repr(value)


def _sections(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, lines) of each section; the first one has no title."""
    title = ""
    lines: list[str] = []
    rest = docstring.split("\n")
    at = 0
    while at < len(rest):
        under = rest[at + 1] if at + 1 < len(rest) else ""
        if rest[at] in SECTIONS and set(under) == {"-"}:
            yield title, _trimmed(lines)
            title, lines = rest[at], []
            at += 2
        else:
            lines.append(rest[at])
            at += 1
    yield title, _trimmed(lines)


def _trimmed(lines: list[str]) -> list[str]:
    """Return lines without the empty ones before and after them."""
    return "\n".join(lines).strip("\n").split("\n")


def _entries(lines: list[str]) -> str:
    """Write ``name : type`` with an indented text as an item of a list."""
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") or not line:
            items[-1:] = [f"{items[-1]} {line.strip()}".rstrip()] if items else []
            continue
        name, _, kind = line.partition(" : ")
        kind = f" (*{prose(kind)}*)" if kind else ""
        items.append(f"- `{name.strip()}`{kind} –" if _is_name(name) else f"- {prose(name)} –")
    return "\n".join(item.removesuffix(" –") for item in (prose(item) for item in items))


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.]+(, [\w.]+)*", text.strip()) is not None
