"""Files of the repository as pages of the site: where each of them goes, and links between them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES: Mapping[str, str] = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/torture/README.md": "proof.md",
}
"""Pages that lie outside ``docs/``, and what they are called on the site."""
INSTEAD: Mapping[str, str] = {"conf/txmq.toml": "reference/configuration.md", "docs": "index.md"}
"""What a link to something that is no page leads to on the site."""

_FENCE = re.compile(r"^\s*(```+|~~~+)")
_ITEM = re.compile(r"^( *)([-*]|\d+\.) +")
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


class DeadLinkError(ValueError):
    """A page links to something that the site does not have."""


def site_path(path: str) -> str | None:
    """Return where a file of the repository is on the site; None for one that is no page, such as a program.

    Raises
    ------
    DeadLinkError
        When the repository has no such file.
    """
    if path in PAGES:
        return PAGES[path]
    if path in INSTEAD:
        return INSTEAD[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).exists():
        raise DeadLinkError(f"there is no {path!r}")
    return None


def repository_path(page: str) -> str:
    """Return which file of the repository a page of the site was made from."""
    sources = {site: source for source, site in PAGES.items()}
    return sources.get(page, f"docs/{page}")


def with_site_links(markdown: str, page: str) -> str:
    """Let the links of a page, which lead from file to file in the repository, lead from page to page of the site.

    A link to a file that is no page becomes its text.
    """
    source = repository_path(page)

    def moved(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        target = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        if target is None:
            return link[1]
        return f"[{link[1]}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return "\n".join(line if code else _LINK.sub(moved, line) for line, code in _lines(markdown))


def with_lists(markdown: str) -> str:
    """Write lists as Python-Markdown reads them: a blank line before them, and four blanks before what is in them.

    Other readers of Markdown, such as code hosts, need neither.
    """
    done: list[str] = []
    within = False  # a list
    for line, code in _lines(markdown):
        item = None if code else _ITEM.match(line)
        if item is not None and not within and done and done[-1].strip():
            done.append("")
        if item is not None:
            within = True
        elif line.strip() and not line.startswith("  ") and not (done and done[-1].strip()):
            within = False  # a paragraph after a blank line
        elif line.startswith(("#", "|", "```")):
            within = False
        indent = len(line) - len(line.lstrip(" "))
        done.append(" " * (4 - indent) + line if within and line.strip() and 2 <= indent < 4 else line)
    return "\n".join(done)


def _lines(markdown: str) -> list[tuple[str, bool]]:
    """Return each line, and whether it is code."""
    found: list[tuple[str, bool]] = []
    fence: str | None = None
    for line in markdown.split("\n"):
        edge = _FENCE.match(line)
        if fence is None and edge is not None:
            fence = edge[1]
            found.append((line, True))
        elif fence is not None:
            if edge is not None and line.strip() == fence:
                fence = None
            found.append((line, True))
        else:
            found.append((line, False))
    return found
