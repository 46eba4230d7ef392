"""The documentation as a site: it builds strictly, fetches nothing, and its reference names what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import rmq_spark
from docs.building import docstrings, reference, repository
from docs.building.repository import DeadLinkError
from rmq_spark._core.checks.setting_names import CHECK_NAMES, DRAIN_NAMES, MAINTENANCE_NAMES, SECTIONS
from rmq_spark.cli import app
from tests.support.inside import METRICS, SINK_OPTIONS, SOURCE_OPTIONS, whole

ROOT = repository.ROOT
WRITTEN = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once. A warning (a dead link or anchor, a page that is in no menu) ends the build."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    build = "-m mkdocs build --strict --config-file conf/mkdocs.yml --site-dir"
    command = [sys.executable, *build.split(), str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


# ---------------------------------------------------------------- the site
class Fetched(HTMLParser):
    """Collects what a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("stylesheet", "icon", "preload", "preconnect", "modulepreload"):
            return
        self.found += [given[name] or "" for name in ("src", "href" if tag == "link" else "data-src") if name in given]


def test_a_page_fetches_only_files_of_the_site(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text())
        assert parser.found
        for address in parser.found:
            parts = urlsplit(address)
            assert (parts.scheme, parts.netloc) == ("", ""), f"{page.name} fetches {address}"
            assert page.name == "404.html" or (page.parent / unquote(parts.path)).is_file(), f"{page.name}: {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?https?:", style.read_text()), style.name


def test_the_search_knows_the_pages_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()
    assert index.startswith("var __index =")
    assert "tombstone" in index
    titles = re.findall(r'"title":"([^"]*)"', index)
    assert {"Troubleshooting", "Messages do not appear", "OptionError"} <= set(titles)
    assert "SqlTransactionListener" in index


def test_drawings_stand_in_the_page_and_have_a_text_for_those_who_cannot_see_them(site: Path) -> None:
    page = (site / "protocol.html").read_text()
    assert page.count("<figure") == page.count('<figure class="drawing" role="img" aria-label="') == 2
    assert page.count('<svg class="wide"') == page.count('<svg class="upright"') == 2


def test_both_shapes_of_a_drawing_say_the_same_of_each_state() -> None:
    def names(drawing: str) -> set[str]:
        return set(re.findall(r"d-name[^>]*>([^<]+)", (ROOT / "docs" / "assets" / drawing).read_text()))

    assert names("states.svg") - {"rolled back by a check"} == names("states-upright.svg") - {"by a check"}
    assert names("protocol.svg") - {"if the sender dies here …"} == names("protocol-upright.svg")


# ---------------------------------------------------------------- the reference
@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("options", [*SINK_OPTIONS, *SOURCE_OPTIONS]),
        ("metrics", [metric.name for metric in METRICS]),
        ("configuration", [*CHECK_NAMES, *MAINTENANCE_NAMES, *DRAIN_NAMES, *SECTIONS]),
        ("limits", ["BODY_BYTES_MAX", "QUEUES_MAX", "IDEMPOTENCY_S", "DELAY_LEVELS_S", "MAX_SPAN"]),
        ("columns", ["queue_offset", "op_version", "input_hash", "low_water", "suspended_until", "deliver_at"]),
    ],
)
def test_the_reference_names_all_that_the_code_has(site: Path, page: str, names: list[str]) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference" / f"{page}.html").read_text())
    cells = set(re.findall(r"\w+(?:\.\w+)*", text))
    assert not [name for name in names if name not in cells]


def test_the_reference_has_every_verb_of_the_command(site: Path) -> None:
    headings = re.findall(r"<h2[^>]*>(.*?)<a", (site / "reference" / "command.html").read_text())
    verbs = [" ".join(words) for words, _ in reference.verbs(whole(app))]
    assert len(verbs) > 20
    assert headings == verbs


def test_the_reference_has_every_public_name_with_its_docstring(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").glob("python-*.html"))
    modules = "checks consumers errors kafka listeners log message producer report sink spark testing".split()
    for name in set(rmq_spark.__all__) - {"__version__", *modules}:  # their names stand on the pages one by one
        assert f'<h2 id="rmq_spark.{name}"' in pages
    for name in set(rmq_spark.metrics.__all__) | set(rmq_spark.plots.__all__):
        assert f'id="rmq_spark.metrics.{name}"' in pages or f'id="rmq_spark.plots.{name}"' in pages
    assert 'id="rmq_spark.TransactionMQProducer.send_message_in_transaction"' in pages
    assert "idempotency_key" in pages


def test_docstrings_lead_to_errors_and_methods_and_show_what_constants_and_enums_are(site: Path) -> None:
    page = (site / "reference" / "python-log.html").read_text()
    assert 'href="errors.html#CorruptLogError"' in page
    assert 'href="#rmq_spark.CommitLog.create_topics"' in page
    is_raw = re.search(r"QUEUES_DEFAULT|:(?:class|meth|func|data|attr|mod|exc):|={9}", page)
    assert is_raw is None, is_raw
    assert "PENDING" in page  # a value of an enum


def test_a_link_leads_to_each_error(site: Path) -> None:
    page = (site / "reference" / "errors.html").read_text()
    assert not [name for name in reference.error_classes() if f'<h2 id="{name}"' not in page]


def test_every_error_says_what_to_do() -> None:
    for name, kind in reference.error_classes().items():
        assert name == "TxmqError" or len(docstrings.paragraphs(kind.__doc__)) > 1, f"{name} says no remedy"


def test_what_nobody_described_ends_the_build() -> None:
    with pytest.raises(reference.UndescribedError, match=r"lacks \['new'\], and describes \['old'\]"):
        reference._require_same(["topic", "new"], ["topic", "old"], "columns")


# ---------------------------------------------------------------- what people write
@pytest.mark.parametrize("options", [SINK_OPTIONS, SOURCE_OPTIONS])
def test_the_page_of_spark_has_every_option(options: tuple[str, ...]) -> None:
    page = (ROOT / "docs" / "spark.md").read_text()
    assert not [name for name in options if f"`{name}`" not in page]


def test_the_docs_call_verbs_that_are_there() -> None:
    verbs = {words for words, _ in reference.verbs(whole(app))}
    groups = {words[0] for words in verbs if len(words) > 1}
    called = 0
    for page in WRITTEN:
        for verb, after in re.findall(r"(?:`|^|\$ )txmq ([a-z][a-z-]*)(?: ([a-z-]+))?", page.read_text(), re.MULTILINE):
            words = (verb, after) if verb in groups else (verb,)
            assert words in verbs, f"{page.name} calls txmq {' '.join(words)}"
            called += 1
    assert called > 50


def test_a_report_of_a_bug_asks_for_what_doctor_says_and_names_pages_that_are_there() -> None:
    templates = {path.name: path.read_text() for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert "`txmq doctor LOG --json`" in templates["bug.yml"]
    named = re.findall(r"docs/[a-z-]+\.md", "".join(templates.values()))
    assert len(named) > 2
    assert not [page for page in named if not (ROOT / page).is_file()]


def test_a_link_leads_from_page_to_page() -> None:
    text = "[a](../ARCHITECTURE.md#measured) [b](checker.md) [c](../conf/txmq.toml) [d](https://x.org) [e](#here)"
    assert repository.with_site_links(text, "guarantees.md") == (
        "[a](architecture.md#measured) [b](checker.md) [c](reference/configuration.md) [d](https://x.org) [e](#here)"
    )
    assert repository.with_site_links("[a](docs/checker.md)", "readme.md") == "[a](checker.md)"
    assert repository.with_site_links("see [programs](race/races.py)", "proof.md") == "see programs"
    assert repository.with_site_links("```\n[a](gone.md)\n```", "readme.md") == "```\n[a](gone.md)\n```"
    with pytest.raises(DeadLinkError, match=r"there is no 'gone\.py'"):
        repository.with_site_links("[a](gone.py)", "readme.md")


def test_lists_become_those_of_python_markdown() -> None:
    text = "It says:\n- one\n  - within\n- two\n\n  more\n\nAfter\n  all"
    assert repository.with_lists(text) == "It says:\n\n- one\n    - within\n- two\n\n    more\n\nAfter\n  all"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.02, "20ms"), (60, "60s"), (300, "5m"), (3600, "1h"), (259_200, "72h"), (604_800, "7d")]
)
def test_a_duration_is_written_as_users_write_it(seconds: float, shown: str) -> None:
    assert reference.duration(seconds) == shown
