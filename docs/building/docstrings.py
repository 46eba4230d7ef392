"""The text of NumPy-style docstrings as Markdown."""

from __future__ import annotations

import inspect
import re

_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod|exc):`~?(?:[^`]*?\.)?([^`.]+)`")
_DOUBLE = re.compile(r"``(.+?)``", re.DOTALL)
_SECTION = re.compile(r"^\w+\n-+$", re.MULTILINE)


def prose(text: str) -> str:
    """Return running text without the roles and double backticks of reStructuredText."""
    return _DOUBLE.sub(r"`\1`", _ROLE.sub(r"`\1`", text)).strip()


def first_paragraph(docstring: str | None) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return paragraphs(docstring)[0]


def paragraphs(docstring: str | None) -> list[str]:
    """Return the paragraphs of a docstring before its first section, each in one line; one empty text for none."""
    text = prose(_SECTION.split(inspect.cleandoc(docstring or ""))[0])
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
