"""What mkdocs calls while it builds the site (``hooks`` in mkdocs.yml)."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # mkdocs loads this file by its path
    sys.path.insert(0, str(ROOT))

from docs.building import reference, repository  # noqa: E402

log = logging.getLogger("mkdocs.hooks.rmq_spark")

WIDE = "when-not-to-use-it.md from-rocketmq.md from-kafka-transactions.md reference/metrics.md".split()
HIDDEN = {"index.md": ["navigation", "toc"], **{page: ["toc"] for page in WIDE}}
"""What a page does without beside it: the first one leads everywhere, and wide tables need the room."""
_LONG_NAME = re.compile(r'(<code>|-name">|<h[1-4] id="[^"]*">)([\w.]{12,})')
_WORDS_MEET = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[_.])(?=[^\W_])")
_PICTURE = re.compile(r'<p><img alt="(?P<alt>[^"]*)" src="(?P<path>[^"]*/)?(?P<name>[a-z-]+\.svg)"\s*/?></p>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere, and those that are made from the code."""
    for source, page in repository.PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, markdown in reference.pages().items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site. A link that leads nowhere is a warning, which ends a strict build."""
    path = page.file.src_uri
    page.meta.setdefault("hide", HIDDEN.get(path, []))
    page.meta.setdefault("search", {"boost": 2 if path == "troubleshooting.md" else 1})
    if path.startswith("reference/"):
        return markdown
    try:
        return repository.with_lists(repository.with_site_links(markdown, path))
    except repository.DeadLinkError as problem:
        log.warning("%s: %s", path, problem)
        return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put our own drawings into the page itself: there they have its colours, light or dark, and a phone's shape.

    In a narrow column a long name is broken between its words.
    """

    def drawn(picture: re.Match[str]) -> str:
        wide = Path(config.docs_dir) / "assets" / picture["name"]
        svgs = "".join(path.read_text() for path in (wide, wide.with_name(f"{wide.stem}-upright.svg")))
        return f'<figure class="drawing" role="img" aria-label="{picture["alt"]}" data-search-exclude>{svgs}</figure>'

    html = _LONG_NAME.sub(lambda name: name[1] + _WORDS_MEET.sub("<wbr>", name[2]), html)
    if page.file.src_uri.startswith("reference/"):
        html = f'<div class="reference">{html}</div>'
    return _PICTURE.sub(drawn, html)
