"""The report's page in a real browser: what it draws, and that it asks for nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rmq_spark.testing import InMemoryCommitLog
from tests.support import browser, report_logs
from tests.support.half_batches import count_check, in_conflict, pending, prepare, quarantine
from tests.support.inside import figures_of, page

pytestmark = [pytest.mark.long, pytest.mark.browser]

DRAWN = """new Promise(done => {
  const root = document.documentElement;
  const look = () => "drawn" in root.dataset && done(Number(root.dataset.drawn));
  new MutationObserver(look).observe(root, {attributes: true});
  look();
})"""
"""Waits until all charts are drawn, and says how many."""


PAGES_MAX = 6
APP = "send.order-service-northern-branches.5c0dba62aae04b51be82a52dcd81cfdf-000000025"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty hours, and half batches with ids as a producer makes them, one of each trouble."""
    log = report_logs.a_shop(1.25)
    torn, hidden, checked = (prepare(log, number, 5, app=APP, group="order-service-northern") for number in range(3))
    in_conflict(log, torn, "no such payment")
    quarantine(log, hidden, "x" * 300)
    count_check(log.engine, checked, 1, pending(log, checked), "the bank does not answer")
    file = tmp_path_factory.mktemp("report") / "busy.html"
    file.write_text(page(figures_of(log), log.trace(half_id=torn.half_id)))
    return file


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_every_chart_is_drawn_and_nothing_is_fetched(
    chromium: browser.Browser, busy: Path, width: int, dark: bool
) -> None:
    shown = chromium.page(width, dark=dark)
    shown.open(busy)
    assert shown.evaluate(DRAWN) == 8
    # Each has marks, and they lie within its card.
    marks = shown.evaluate("[...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('path').length)")
    assert len(marks) == 8
    assert min(marks) > 2
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('.chart svg')].filter(s =>
      s.getBoundingClientRect().right > s.closest('.card').getBoundingClientRect().right + 1).length"""
    assert shown.evaluate(outside) == 0
    clipped = """[...document.querySelectorAll('.chart text')].filter(t => {
      const own = t.getBoundingClientRect(), all = t.closest('svg').getBoundingClientRect();
      return own.right > all.right + 1 || own.left < all.left - 1}).map(t => t.textContent)"""
    assert shown.evaluate(clipped) == []
    shown.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    sideways = """[...document.querySelectorAll('body *')].filter(e => e instanceof HTMLElement && e.clientWidth > 1
      && e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 90))"""
    assert shown.evaluate(sideways) == []
    paper = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(n) for n in paper[4:-1].split(",")) < 200) == dark
    assert shown.screenshot().startswith(b"\x89PNG")
    assert shown.errors == []
    assert [url for url in shown.requests if not url.startswith("data:")] == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_print_shows_every_hour_on_light_paper(chromium: browser.Browser, busy: Path, dark: bool) -> None:
    """The newest 10 of 30 hours were cut off in silence."""
    shown = chromium.page(1280, dark=dark)
    shown.open(busy)
    shown.evaluate(DRAWN)
    shown.evaluate(
        """matchMedia('print').addEventListener('change', found => { if (found.matches) window.printed = {
      width: document.documentElement.clientWidth,
      scales: [...document.querySelectorAll('.chart svg')].map(s =>
        s.getBoundingClientRect().width / s.viewBox.baseVal.width),
      ink: getComputedStyle(document.querySelector('.chart text')).fill,
      beyond: [...document.querySelectorAll('.chart svg')].map(s =>
        s.getBoundingClientRect().right - s.closest('.card').getBoundingClientRect().right)}})"""
    )
    drawn = "[...document.querySelectorAll('.chart svg')].map(s => s.viewBox.baseVal.width)"
    before = shown.evaluate(drawn)
    paper = shown.pdf()
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", paper)) <= PAGES_MAX
    printed = shown.evaluate("window.printed")
    assert printed["width"] < 800, "the paper's"
    assert max(printed["beyond"]) < 0
    assert min(printed["scales"]) > 0.75, "letters of 9 pixels or more"
    assert shown.evaluate(drawn) == before
    assert sum(int(n) for n in printed["ink"][4:-1].split(",")) < 400, "dark ink"


def test_an_empty_log_and_a_hundred_thousand_half_batches_are_pages_too(
    chromium: browser.Browser, tmp_path: Path
) -> None:
    for name, log, charts in (("empty", InMemoryCommitLog(), 0), ("many", report_logs.many(100_000), 3)):
        file = tmp_path / f"{name}.html"
        file.write_text(page(figures_of(log)))
        assert file.stat().st_size < 1_200_000
        shown = chromium.page()
        shown.open(file)
        assert shown.evaluate(DRAWN) == charts
        assert shown.errors == []
        assert [url for url in shown.requests if not url.startswith("data:")] == []


def test_words_of_others_run_no_script(chromium: browser.Browser, tmp_path: Path) -> None:
    evil = '</script><script>document.title="taken"</script><img src=x onerror="document.title=1">'
    shop = report_logs.Shop()
    shop.log.create_topic("orders", 2)
    record = shop.prepare(["orders"], 3)
    count_check(shop.log.engine, record, 1, shop.pending(record), evil)
    shop.settle(record)
    file = tmp_path / "evil.html"
    file.write_text(page(figures_of(shop.log), shop.log.trace(half_id=record.half_id)))
    shown = chromium.page()
    shown.open(file)
    assert shown.evaluate(DRAWN) > 0
    assert shown.evaluate("document.title").startswith("Commit log")
    assert evil in shown.evaluate("document.body.textContent")
    assert shown.errors == []
