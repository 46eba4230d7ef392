"""The pages of ``txmq serve`` in a real browser: on a phone and on a desk, while the log changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from rmq_spark import CommitLog, ConsumerGroup
from rmq_spark._core.report.live_server import Door, LivePages, serving
from rmq_spark.cli import serve
from rmq_spark.cli.command import sentence_of
from tests.support import browser
from tests.support.half_batches import commit, count_check, in_conflict, make_log, pending, prepare, quarantine

pytestmark = [pytest.mark.long, pytest.mark.browser]

APP = "send.order-service.5c0dba62aae04b51be82a52dcd81cfdf-000000025"
EVIL = '"><script>document.title="taken"</script><img/src=x/onerror=document.title=1>'
REPLACED_S_MAX = 60.0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> CommitLog:
    """A log with a producer's default ids, and one of each trouble."""
    made = make_log("delta", tmp_path_factory.mktemp("shop") / "log", **{f"topic-{n}": 2 for n in range(12)}, orders=4)
    columns = {"body": [EVIL] * 40, "keys": [EVIL] * 40, "tags": [EVIL] * 40}
    commit(made, prepare(made, 0, columns, app=APP))
    open_, hidden, torn = (prepare(made, n, columns, app=APP, fence_id="bank", group="orders") for n in (1, 2, 3))
    count_check(made.engine, open_, 1, pending(made, open_), EVIL)
    quarantine(made, hidden, EVIL)
    in_conflict(made, torn, "x" * 300)
    for number in range(6):
        ConsumerGroup(made, f"consumer-group-with-a-long-name-{number}").reset("earliest", ["orders"])
    return made


@pytest.fixture(scope="module")
def url(log: CommitLog) -> Iterator[str]:
    looker = serve.Looker(log.another(), show_bodies=True)
    with serving(LivePages(log.path, looker.views(), Door(), sentence_of), "127.0.0.1", 0) as found:
        yield found


def text_when(page: browser.Page, word: str) -> str:
    """The text of a page as soon as it has a word."""
    end = time.monotonic() + REPLACED_S_MAX
    while word not in (text := str(page.evaluate("document.body.innerText"))):
        assert time.monotonic() < end, text
        time.sleep(0.1)
    return text


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_pages_fit_the_screen_and_run_only_their_own_script(
    chromium: browser.Browser, url: str, width: int, dark: bool
) -> None:
    page = chromium.page(width, dark=dark)
    for path, word in (
        ("", "Two verdicts contradict each other"),
        (f"half?{urlencode({'id': f'{APP}:3'})}", "too late"),
        (f"half?{urlencode({'id': f'{APP}:1'})}", "From the prepare on"),
        (f"find?{urlencode({'topic': 'orders', 'queue': 0})}", "nobody yet"),
        ("half?id=nothing:1", "Not found"),
    ):
        page.open(f"{url}{path}")
        text_when(page, word)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate("document.title").startswith("Commit log"), path
        inside = """[...document.querySelectorAll('.card *, .headline *, .tile *')].filter(e =>
          e.getBoundingClientRect().right > e.closest('.card, .headline, .tile').getBoundingClientRect().right + 1
        ).map(e => e.outerHTML.slice(0, 80))"""
        assert [html for html in page.evaluate(inside) if "clip" not in html and not html.startswith("<t")] == [], path
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(n) for n in paper[4:-1].split(",")) < 200) == dark
    assert [error for error in page.errors if "404" not in error] == []
    assert {request for request in page.requests if not request.startswith(("data:", url))} == set()


def test_a_page_follows_the_log_and_keeps_the_place_of_the_keyboard(
    chromium: browser.Browser, log: CommitLog, url: str
) -> None:
    page = chromium.page()
    page.open(url)
    text_when(page, f"{APP}:1")
    page.evaluate("document.querySelector('details#appeared').open = true")
    page.evaluate("document.querySelector('.rows a').focus()")
    late = prepare(log, 9, 3, app="late")
    text_when(page, "late:9")
    assert page.evaluate("document.activeElement.matches('.rows a')")
    assert page.evaluate("document.querySelector('details#appeared').open"), "a list that was opened stays open"
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.headline code'))")
    commit(log, late)
    time.sleep(7)  # two reloads are due
    assert page.evaluate("getSelection().toString()").startswith("txmq "), "what is marked to be copied stays"
    page.evaluate("getSelection().removeAllRanges()")
    card = "[...document.querySelectorAll('.card')].find(c => c.querySelector('h2').textContent == 'Pending').innerText"
    end = time.monotonic() + REPLACED_S_MAX
    while "late:9" in page.evaluate(card):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert page.errors == []
