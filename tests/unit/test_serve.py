"""``txmq serve``: what its pages show, to whom, and that they only read."""

from __future__ import annotations

import html
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import pytest

from rmq_spark import COMMIT_MESSAGE, CommitLog, ConsumerGroup, EachMessage
from rmq_spark._core.inspect.finding import Finding
from rmq_spark._core.inspect.trace import TraceEvent, TraceKind
from rmq_spark._core.report import live_page, live_server, shared_look
from rmq_spark._core.report.components import commands, headline
from rmq_spark._core.report.live_server import Door, LivePages, View, serving
from rmq_spark._core.report.waterfall import steps_of, waterfall
from rmq_spark.cli import app, serve
from rmq_spark.cli.command import sentence_of
from rmq_spark.errors import OptionError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.commands import txmq
from tests.support.consumers import consume_all
from tests.support.half_batches import (
    commit,
    copied_log,
    count_check,
    decide_one,
    half_file,
    in_conflict,
    let_leave,
    make_log,
    pending,
    prepare,
    quarantine,
    roll_back,
    too_late,
)
from tests.support.inside import Diagnosis, HalfRecord, Level, Standing, Trace, Who, whole
from tests.support.limits import Limit
from tests.support.meanwhile import no_thread_starts
from tests.support.sends import raising

TOKEN = "a token that is long enough"
EVIL = '"><script>document.title="taken"</script><img/src=x/onerror=alert(1)>\u202e'


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


class Site(NamedTuple):
    """A running server."""

    url: str
    pages: LivePages

    def get(self, path: str = "/", method: str = "GET", **headers: str) -> Answer:
        """Ask for a path as it is written, without what a browser makes of it. The headers win over http.client's."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = Answer(answer.status, dict(answer.getheaders()), answer.read().decode())
        connection.close()
        return found

    def half(self, record: HalfRecord) -> str:
        answer = self.get(f"/half?id={quote(record.half_id)}")
        assert answer.status == 200, answer.text
        return answer.text

    def find(self, **fields: object) -> str:
        return self.get("/find?" + "&".join(f"{name}={quote(str(value))}" for name, value in fields.items())).text


@contextmanager
def showing(views: Mapping[str, View], door: Door | None = None, path: str = "log") -> Iterator[Site]:
    pages = LivePages(path, views, door or Door(), sentence_of)
    with serving(pages, (door or Door()).host, 0) as url:
        yield Site(url, pages)


@contextmanager
def served(log: CommitLog, door: Door | None = None, show_bodies: bool = False) -> Iterator[Site]:
    with showing(serve.Looker(log, "1d", show_bodies).views(), door, log.path) as site:
        yield site


def shown(log: CommitLog, record: HalfRecord | None = None) -> str:
    """The page of a half batch, or home."""
    with served(log) as site:
        return site.get().text if record is None else site.half(record)


def own_text_of(log: CommitLog, record: HalfRecord) -> str:
    """What a reader sees of a half batch's transactions."""
    return text_of(shown(log, record)).partition("Its transactions")[2]


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch, limit: Limit) -> None:
    """The log's path as a user has typed it, and servers that end at once."""
    limit(ENDS_S=0.01)
    monkeypatch.setattr("rmq_spark.cli.command._typed", ["shop/log"])


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return copied_log(tmp_path / "log", orders=2, payments=1)


def text_of(page: str) -> str:
    """What a reader sees of the main part, in one line."""
    main = page.partition("<main")[2].partition("</main>")[0].partition(">")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", main)).split())


def files(folder: str) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and time."""
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


# ---------------------------------------------------------------- home
def test_home_says_that_all_is_well_and_what_appeared(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 3))
    roll_back(log, prepare(log, 1, 2))
    text = text_of(shown(log))
    assert "All is well: 3 messages appeared, nothing is pending" in text
    assert "Nothing is pending." in text
    assert re.search(r"Committed lately The newest in 1d, .*? app:0 group 3 [\d.]+m?s execute", text)
    assert re.search(r"Rolled back lately The newest in 1d, .*? app:1 group 2 [\d.]+m?s execute", text)
    assert re.search(r"What appeared .*? orders 3 3 .*? payments 0 0", text)
    assert "In conflict" not in text.replace("in conflict", ""), "a list that is empty, and should be, takes no room"


def test_home_of_a_log_without_a_topic_says_so(tmp_path: Path) -> None:
    assert "What appeared There is no topic yet." in text_of(shown(CommitLog.create(tmp_path / "log")))


def test_home_lists_what_waits_with_its_reason_and_whole_commands(log: CommitLog) -> None:
    hidden, torn, open_ = (prepare(log, n, 2, fence_id="bank") for n in (1, 2, 3))
    quarantine(log, hidden, "15 checks, all UNKNOWN")
    in_conflict(log, torn, "no such payment")
    count_check(log.engine, open_, 1, pending(log, open_), "the bank does not answer")
    page = shown(log)
    text = text_of(page)
    said = r"In conflict .*? app:2 group 2 .*? ROLLBACK by check \(no such payment\); too late: COMMIT by"
    assert re.search(said, text)
    assert re.search(r"Quarantined .*? app:1 group 2 .*? 15 checks, all UNKNOWN", text)
    assert re.search(r"Pending .*? app:3 group 2 .*? the bank does not answer", text)
    copied = re.findall(r"<code>(.*?)</code>", re.sub("</?span[^>]*>", "", page))
    for command in ("txmq trace shop/log app:2", "txmq resume shop/log app:1", "txmq trace shop/log app:1"):
        assert command in copied
    assert not any("GROUP" in command or "HALF_ID" in command or "|" in command for command in copied)
    assert page.index("contradict each other") < page.index("quarantined, and hidden"), "what is critical comes first"


def test_ids_and_topics_on_home_are_links(log: CommitLog) -> None:
    torn, hidden, open_ = (prepare(log, n, 2) for n in (1, 11, 12))
    in_conflict(log, torn)
    quarantine(log, hidden)
    top, _, rest = shown(log).partition('<dl class="tiles">')
    for half_id in (torn.half_id, hidden.half_id):
        target = f'<a href="/half?id={quote(half_id)}">{half_id}</a>'
        assert target in top
        assert target in rest
    assert f'<a href="/half?id={quote(open_.half_id)}">' in rest
    assert '<a href="/find?topic=orders">orders</a>' in rest


def test_what_went_well_stands_last_and_is_folded_when_it_is_long(log: CommitLog) -> None:
    for number in range(5):
        commit(log, prepare(log, number, 1))
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    with served(log) as site:
        page = site.get().text
        assert "<details" not in page
        commit(log, prepare(log, 5, 1))
        for number in range(4):
            log.create_topic(f"more-{number}", 1)
        site.pages.looks._looks.clear()
        page = site.get().text
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert titles == ["Pending", "Rolled back lately", "Consumer groups", "Committed lately", "What appeared"]
    folded = re.findall(r'<details class="list" id="(\w+)"><summary>([^<]*)</summary>', page)
    assert folded == [("committed", "The newest 6 of 6"), ("appeared", "6 topics")]


def test_a_quarantined_half_batch_is_listed_with_the_last_answer_of_its_checks(log: CommitLog) -> None:
    hidden = prepare(log, 1, 2, fence_id="bank")
    for reason in ("the bank is slow", "the bank answers 503"):
        count_check(log.engine, hidden, 1, pending(log, hidden), reason)
    quarantine(log, hidden, "2 checks were answered with UNKNOWN")
    text = text_of(shown(log))
    assert "2 checks were answered with UNKNOWN; the last answer: the bank answers 503" in text


def test_a_pending_half_batch_that_cannot_be_read_is_listed(log: CommitLog) -> None:
    half_file(log, prepare(log, 0, 2)).write_bytes(b"damaged")
    text = text_of(shown(log.another()))
    assert re.search(r"Pending .*? app:0 .*? it cannot be read: txmq doctor says more", text)


def test_lag_is_shown_by_group_and_queue(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 8))
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    ConsumerGroup(log, "billing").reset("latest", ["orders"])
    text = text_of(shown(log))
    queues = [rf"points orders queue {n} 4 [\d.]+m?s" for n in range(2)]
    assert re.search(" ".join([r"points all queues 8 [\d.]+m?s", *queues]), text)
    assert "billing all queues 0 0s" in text


def test_lists_are_bounded_and_say_how_many_more_there_are(log: CommitLog) -> None:
    for number in range(14):
        prepare(log, number, 1)
    page = shown(log)
    assert page.count('data-head="half batch"') == 10
    assert "4 more: txmq pending shop/log lists all" in text_of(page)


def test_a_log_that_changes_between_two_looks_is_shown_as_it_is(log: CommitLog, limit: Limit) -> None:
    limit(LOOK_EVERY_S=0.0, LOOK_REST=0.0)
    record = prepare(log, 0, 3)
    with served(log.another()) as site:
        assert "app:0" in text_of(site.get().text).partition("Pending No verdict")[2].partition("Rolled back")[0]
        assert "3 pending" in site.half(record)
        commit(log, record)
        log.create_topic("late", 1)
        text = text_of(site.get().text)
        assert "Nothing is pending." in text
        assert "late 0 0" in text
        assert "3 committed" in site.half(record)


def test_of_many_findings_the_worst_are_shown(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [Finding("groups", Level.WARNING, f"group-{n} is behind") for n in range(30)]
    bad.append(Finding("tables", Level.CRITICAL, "a file is gone"))
    monkeypatch.setattr(Diagnosis, "findings", lambda self, **_: iter(bad))
    page = shown(log)
    assert page.index("a file is gone") < page.index("group-0 is behind")
    assert "group-12 is behind" not in page
    assert '<b>19 more findings</b><p class="do"><code>txmq doctor shop/log</code></p>' in page


def test_dead_letters_alone_are_a_note() -> None:
    found = headline([Finding("dead letters", Level.NOTE, "points: 1 dead letter", "txmq dlq list shop/log points")])
    assert '<section class="headline note" aria-label="nothing is urgent">' in found
    assert "<code>txmq dlq list shop/log points</code>" in found


# ---------------------------------------------------------------- one half batch
def test_a_half_batch_has_its_steps_from_the_prepare_on_and_draining_apart(log: CommitLog) -> None:
    record = prepare(log, 0, 4, fence_id="bank")
    count_check(log.engine, record, 1, pending(log, record), "the bank does not answer")
    commit(log, record, who=Who.CHECK)
    log.drain()
    page = shown(log, record)
    phases = re.findall(r'class="phase">(\w+)<', page)
    assert phases == ["prepare", "execute", "check", "verdict", "placed"]
    text = text_of(page)
    assert "no verdict came from its local transaction" in text
    assert "UNKNOWN by check, 4 messages: the bank does not answer" in text
    assert re.search(r"placed [\d.]+m?s orders queue 0, offsets 0 to 1; orders queue 1, offsets 0 to 1", text)
    assert "drained: 4 messages in the table messages" in page.partition('class="later"')[2]


def test_a_local_transaction_that_runs_says_when_its_lease_ends(log: CommitLog) -> None:
    record = prepare(log, 0, 4)
    log.engine.ledger.lease([record], 60)
    text = text_of(shown(log, record))
    assert re.search(r"execute [\d.]+m?s its local transaction runs; the lease ends at [\d:]{8} UTC", text)


def test_a_late_drain_leaves_the_steps_apart() -> None:
    def event(second: float, kind: TraceKind, by: str | None = None) -> TraceEvent:
        return TraceEvent(datetime.fromtimestamp(1.7e9 + second, timezone.utc), kind, 1, decided_by=by)

    events = (
        event(0, TraceKind.PREPARED),
        event(2, TraceKind.COMMITTED, "execute"),
        event(4, TraceKind.PLACED),
        event(86400, TraceKind.DRAINED),
    )
    trace = Trace("app:0", "half", 1, {}, events=events)
    steps = [(step.phase, step.begin_s, step.end_s) for step in steps_of(trace, events[-1].at)]
    assert steps == [("prepare", 0, 0), ("execute", 0, 2), ("verdict", 0, 2), ("placed", 2, 4)]
    drawn = waterfall(trace, events[-1].at)
    assert '<rect x="50.00%" y="6" width="50.00%"' in drawn
    assert "at the latest 1d after the prepare" in drawn


def test_a_half_batch_says_its_state_in_colour_and_when_it_was_prepared(log: CommitLog) -> None:
    record = prepare(log, 0, 3)
    quarantine(log, record)
    commit(log, done := prepare(log, 1, 2, topic="payments"))
    page, other = shown(log, record), shown(log, done)
    facts = (
        rf"prepared {record.prepared_at:%Y-%m-%d %H:%M:%S} UTC \([\d.]+m?s ago\) · topic orders · producer group group"
    )
    assert re.search(rf"3 messages: 3 quarantined · {facts} · attempt 1", text_of(page))
    assert '<b class="critical">3 quarantined</b>' in page
    assert '<b class="ok">2 committed</b>' in other


def test_equal_checks_are_one_line_with_a_mark_for_each() -> None:
    def check(minute: float, reason: str) -> TraceEvent:
        at = datetime.fromtimestamp(1.7e9 + 60 * minute, timezone.utc)
        return TraceEvent(at, TraceKind.CHECKED, 1, decided_by="check", reason=reason)

    prepared = TraceEvent(datetime.fromtimestamp(1.7e9, timezone.utc), TraceKind.PREPARED, 1)
    down = [check(4 * n, "the bank is down") for n in range(1, 16)]
    trace = Trace("app:0", "half", 1, {}, fence_id="", events=(prepared, *down, check(64, "slow"), check(68, "slow")))
    steps = [step for step in steps_of(trace, down[-1].at) if step.phase == "check"]
    assert [(step.begin_s, step.end_s, step.what) for step in steps] == [
        (0.0, 3600.0, "15 × UNKNOWN by check, 1 message: the bank is down, from 4m to 1h"),
        (3600.0, 4080.0, "2 × UNKNOWN by check, 1 message: slow, from 1h 4m to 1h 8m"),
    ]
    drawn = waterfall(trace, down[-1].at)
    assert drawn.partition("15 ×")[0].rpartition("<li>")[2].count('width="4"') == 15


def test_a_half_batch_shows_its_transactions_and_the_ones_that_are_not_visible_first(log: CommitLog) -> None:
    columns = {"body": ["a", "b", "c"], "keys": ["order-1", "order-2", "order-3"]}
    record = prepare(log, 0, columns, per="key", key="keys", topic="payments")
    rows = pending(log, record)
    bad = rows & {file_no: b"\x00\x01\x00"[: len(rows[file_no])] for file_no in rows}
    decide_one(log.engine, record, 1, rollback=bad, who=Who.EXECUTE, reason="no money")
    decide_one(log.engine, record, 1, commit=rows - bad, who=Who.EXECUTE)
    text = own_text_of(log, record)
    assert re.search(r"1:order-2 order-2 1 rolled back no money.*1:order-1 order-1 1 committed", text)
    assert "1:order-3 order-3 1 committed" in text


def test_a_transaction_of_many_messages_shows_all_its_keys_up_to_a_limit(log: CommitLog) -> None:
    keys = [f"order-{n}" for n in range(30)]
    record = prepare(log, 0, {"body": ["b"] * 30, "keys": keys})
    text = own_text_of(log, record)
    assert re.search(r"(order-\d+, ){20}10 more 30 pending", text)


def test_of_more_messages_than_are_read_the_page_says_how_many_were_read(log: CommitLog, limit: Limit) -> None:
    limit(TRANSACTIONS_SHOWN_MAX=3)
    record = prepare(log, 0, 5)
    text = own_text_of(log, record)
    assert "These are of 3 messages; 2 more are not read." in text
    assert "messages read state reason" in text


def test_a_delayed_message_is_counted_at_home_and_says_when_it_is_due(log: CommitLog) -> None:
    due = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(hours=2)
    commit(log, prepare(log, 0, {"body": ["b"], "keys": ["order-7"], "deliver_at": [due]}))
    with served(log) as site:
        home, found = text_of(site.get().text), text_of(site.find(q="order-7"))
    assert "Messages pending now 0 1 delayed" in home
    assert f"state waiting : due {due:%Y-%m-%d %H:%M:%S} UTC" in found


def test_a_pending_message_says_what_the_last_check_answered(log: CommitLog) -> None:
    record = prepare(log, 0, {"body": ["b"], "keys": ["order-7"]}, fence_id="bank")
    count_check(log.engine, record, 1, pending(log, record), "the bank does not answer")
    with served(log) as site:
        found = site.find(q="order-7")
    assert "state pending : the bank does not answer" in text_of(found)
    assert f">{record.half_id}</a>, which says what to do</dd>" in found


def test_home_says_when_the_last_message_of_a_topic_was_committed(log: CommitLog) -> None:
    for number in range(2):
        commit(log, prepare(log, number, 2))
    log.drain()
    commit(log, prepare(log, 2, 2))
    last = max(log.read("orders")["commit_timestamp"].to_pylist())
    text = text_of(shown(log)).partition("What appeared")[2]
    assert f"orders 6 6 {last:%d %b %H:%M:%S}" in text


def test_both_verdicts_of_a_conflict_stand_side_by_side_with_the_next_step(log: CommitLog) -> None:
    record = prepare(log, 0, 2)
    rows = pending(log, record)
    decide_one(log.engine, record, 1, rollback=rows, who=Who.CHECK, reason="no such payment")
    for some in (rows.first(1), rows):
        too_late(log, record, commit=some)
    with served(log) as site:
        page = site.half(record)
        text = text_of(page)
        late = r"too late COMMIT execute [\d: -]{19} 1"
        assert re.search(rf"counts ROLLBACK check .*? 2 no such payment {late} {late}", text)
        said = "COMMIT when the local transaction happened (readers will see 2 messages, for good), and ROLLBACK"
        assert said in text
        for verdict, when in (("COMMIT", "its local transaction happened"), ("ROLLBACK", "it did not happen")):
            command = f'txmq resolve shop/log app:0 {verdict} <span class="option">--reason</span> &#x27;…&#x27;'
            assert f"when {when}: <code>{command}</code> " in page
        log.resolve(record.half_id, COMMIT_MESSAGE, "ticket 81")
        site.pages.looks._looks.clear()
        text = text_of(site.half(record))
        too_late(log, record, Who.CHECK, rollback=record.all_rows)
        site.pages.looks._looks.clear()
        again = text_of(site.half(record))
    assert "Two verdicts" not in text
    assert "ticket 81" in text
    assert "Readers may have seen the messages: only COMMIT is possible." in again, "the first conflict is over"


def test_a_half_batch_that_has_left_shows_what_is_kept(log: CommitLog) -> None:
    record = prepare(log, 0, 4)
    commit(log, record)
    commit(log, prepare(log, 1, 1))
    let_leave(log)
    let_leave(log)
    text = text_of(shown(log, record))
    assert "4 messages: 4 committed · prepared " in text
    assert "app:0" in text


@pytest.mark.parametrize("name", ["nothing:7", "no id", "", "a" * 3000, "app:0:1:1:1", "\u00fc:1"])
def test_what_is_not_there_is_a_page_that_says_so(log: CommitLog, name: str) -> None:
    with served(log) as site:
        answer = site.get(f"/half?id={quote(name)}")
    assert answer.status == 404
    assert "Not found" in text_of(answer.text)
    assert "Traceback" not in answer.text


# ---------------------------------------------------------------- search
def test_a_message_is_found_by_key_id_half_id_and_place(log: CommitLog) -> None:
    columns = {"body": ["b0", "b1"], "keys": ["order-1", "order-2"], "tags": ["paid", "paid"]}
    commit(log, prepare(log, 0, columns, topic="payments"))
    waiting = prepare(log, 1, {"body": ["b2"], "keys": ["order-9"]}, topic="payments")
    ConsumerGroup(log, "points").reset("latest", ["payments"])
    ConsumerGroup(log, "billing").reset("earliest", ["payments"])
    with served(log) as site:
        by_key = text_of(site.find(q="order-1"))
        message_id = re.findall(r"app:0:\S+", by_key)[0]
        by_place = text_of(site.find(topic="payments", queue=0, offset=0))
        said = f"{message_id} state committed topic payments place queue 0, offset 0 keys order-1 tags paid"
        for found in (by_key, text_of(site.find(q=message_id)), by_place):
            assert said in found
            assert "read by billing: not yet, 0 is its next offset; points: past it" in found
            assert "order-2" not in found
        assert "From the prepare on" in text_of(site.find(q=waiting.half_id)), "a half id leads to its half batch"
        for name in ("app:1:1", "app:1:0.0"):  # a transaction's and a message's
            assert "app:1 1 message: 1 pending" in text_of(site.get(f"/half?id={name}").text)
        hidden = text_of(site.find(q="order-9"))
        assert "state pending topic payments place none: it is not visible" in hidden
        assert "Nothing found for order-404 A key is matched whole. Of" in text_of(site.find(q="order-404"))
        assert "order-1" in text_of(site.find(q="order-1", topic="payments"))
        assert "a queue needs a topic" in text_of(site.find(q="order-1", queue=0))
        assert "an offset needs a queue" in text_of(site.find(topic="payments", offset=3))
        assert "queue 'one' is no number" in text_of(site.find(topic="payments", queue="one"))
        assert "did you mean 'orders'?" in text_of(site.find(topic="ordres"))
        assert "Write a key" in text_of(site.find())


def test_a_dead_letter_is_found_with_why_it_was_given_up(log: CommitLog) -> None:
    commit(log, prepare(log, 0, {"body": ["b"], "keys": ["order-1"]}))
    fails = EachMessage(raising(ValueError("no such customer")))
    consume_all(log, fails, max_reconsume_times=0).member.leave()
    with served(log) as site:
        found = text_of(site.find(q="order-1"))
    assert "state dead letter of points : ValueError: no such customer topic %DLQ%points place queue 0" in found


def test_a_key_that_looks_like_an_id_is_found(log: CommitLog) -> None:
    commit(log, prepare(log, 0, {"body": ["b0"], "keys": ["shop:17"]}))
    with served(log) as site:
        assert "keys shop:17" in text_of(site.find(q="shop:17"))


def test_a_search_that_finds_many_has_the_command_for_more(log: CommitLog) -> None:
    commit(log, prepare(log, 0, {"body": ["b"] * 50, "keys": ["order 1"] * 50}))
    with served(log) as site:
        pages = [site.find(q="order"), site.find(q="order", topic="orders"), site.find(q="1", topic="orders", queue=0)]
        by_transaction = text_of(site.find(q="app:0:1"))
    for page, place in zip(pages, ("", " --topic orders", " --topic orders --queue 0"), strict=True):
        assert page.count("<section") == serve.FOUND_MAX
        key = "1" if "queue" in place else "order"
        assert f"There are more: txmq query shop/log --key {key}{place} --limit 200" in text_of(page)
    assert "There are more: txmq query shop/log --transaction-id app:0:1 --limit 200" in by_transaction


def test_a_search_that_finds_nothing_says_how_keys_are_matched_and_links_to_what_there_is(log: CommitLog) -> None:
    commit(log, prepare(log, 0, {"body": ["b"], "keys": ["order-4711"]}))
    with served(log) as site:
        by_key, at_place = site.find(q="4711"), site.find(topic="orders", queue=1, offset=9)
    assert "Nothing found for 4711 A key is matched whole. Keys that contain it: order-4711" in text_of(by_key)
    assert '<a href="/find?q=order-4711">order-4711</a>' in by_key
    assert "Nothing found for orders 1 9" in text_of(at_place)
    for topic in ("orders", "payments"):
        assert f'<a href="/find?topic={topic}">{topic}</a>' in by_key
    assert '<a href="/find?topic=orders&amp;queue=1">orders queue 1</a>' in at_place


def offsets_in(page: str) -> list[int]:
    return [int(offset) for offset in re.findall(r'data-head="offset"><a [^>]*>(\d+)</a>', page)]


def test_a_topic_is_a_table_with_the_newest_first_and_pages_that_leave_nothing_out(log: CommitLog) -> None:
    columns = {"body": ["b"] * 120, "keys": [f"order-{n}" for n in range(120)], "tags": ["paid"] * 120}
    commit(log, prepare(log, 0, columns, topic="payments"))
    commit(log, prepare(log, 1, {"body": ["last"], "keys": ["order-120"]}, topic="payments"))
    ConsumerGroup(log, "points").reset("latest", ["payments"])
    ConsumerGroup(log, "billing").reset("earliest", ["payments"])
    with served(log) as site:
        page, seen, steps = site.find(topic="payments"), [], []
        first = text_of(page)
        while True:
            seen.append(offsets_in(page))
            links = {word: target for target, word in re.findall(r'<a href="([^"]*)">(older|newer)</a>', page)}
            steps.append(sorted(links))
            if "older" not in links:
                break
            page = site.get(links["older"].replace("&amp;", "&")).text
        assert [offset for part in seen for offset in part] == list(range(120, -1, -1))
        assert [len(part) for part in seen] == [50, 50, 21]
        assert steps == [["older"], ["newer", "older"], ["newer"]]
        page = site.get(links["newer"].replace("&amp;", "&")).text
        assert offsets_in(page) == seen[1]
        assert offsets_in(site.find(topic="payments", queue=0)) == seen[0]
        (card,) = re.findall(r'<a href="([^"]*)">120</a>', site.find(topic="payments"))
        assert "keys order-120" in text_of(site.get(card.replace("&amp;", "&")).text)
        assert "no number" in text_of(site.find(topic="payments", queue=0, before="x"))
        assert "an offset needs a queue" in text_of(site.find(topic="orders", before=3))
        assert "topic 'orders' has no queue 2: it has the queues 0 to 1" in text_of(site.find(topic="orders", queue=2))
        assert "There is no message that readers can see." in text_of(site.find(topic="orders"))
    assert re.search(r"120 \d{4}-\d\d-\d\d [\d:]{8} order-120 4 B points; not yet billing 119 ", first)


def test_a_topic_of_several_queues_leads_on_in_each(log: CommitLog) -> None:
    commit(log, prepare(log, 0, 130))
    with served(log) as site:
        page = site.find(topic="orders")
        seen = [(int(queue), int(offset)) for queue, offset in re.findall(r"queue=(\d)&amp;offset=(\d+)", page)]
        assert len(seen) == len(set(seen)) == 50
        targets = re.findall(r'<a href="([^"]*)">queue \d</a>', page)
        assert len(targets) == 2
        for queue, target in enumerate(targets):
            while target:
                page = site.get(target.replace("&amp;", "&")).text
                seen += [(queue, offset) for offset in offsets_in(page)]
                target = "".join(re.findall(r'<a href="([^"]*)">older</a>', page))
    assert sorted(seen) == [(queue, offset) for queue in range(2) for offset in range(65)]


@pytest.mark.parametrize("show_bodies", [False, True])
def test_bodies_are_shown_to_those_who_asked_for_them(log: CommitLog, show_bodies: bool) -> None:
    record = prepare(log, 0, {"body": ['{"name": "Ada"}'], "keys": ["order-1"]})
    commit(log, record)
    with served(log, show_bodies=show_bodies) as site:
        pages = [site.get().text, site.half(record), site.find(q="order-1")]
    assert [("Ada" in page) for page in pages] == [False, False, show_bodies]
    assert ("15 bytes, hidden" in pages[-1]) is not show_bodies


# ---------------------------------------------------------------- what others wrote
class Tags(HTMLParser):
    """Collects a page's tags, and its attributes that could run or fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.odd: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name.startswith("on") or name in ("src", "style", "srcdoc") or "script:" in str(value):
                self.odd.append((tag, name, value))


def test_what_messages_contain_is_text(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Script in a body, key, tag, group and reason."""
    for module in ("log.group_table", "consumers.consumer_group"):  # a name that another program has written
        monkeypatch.setattr(f"rmq_spark._core.{module}.require_group_name", lambda name, what: name)
    record = prepare(log, 0, {"body": [EVIL], "keys": [EVIL], "tags": [EVIL]}, per="key", key="keys", group=EVIL)
    count_check(log.engine, record, 1, pending(log, record), EVIL)
    quarantined = prepare(log, 1, 1, group=EVIL)
    quarantine(log, quarantined, EVIL)
    refused = prepare(log, 2, {"body": [EVIL], "keys": [EVIL]}, per="key", key="keys")
    decide_one(log.engine, refused, 1, rollback=pending(log, refused), who=Who.EXECUTE, reason=EVIL)
    shown = prepare(log, 3, {"body": [EVIL], "keys": [EVIL], "tags": [EVIL]}, group=EVIL)
    commit(log, shown)
    log.engine.groups.set(EVIL, {("orders", 0): 0}, EVIL)
    with served(log, show_bodies=True) as site:
        pages = [site.get().text, *(map(site.half, (record, quarantined, refused, shown))), site.find(q=EVIL)]
        pages += [site.get(f"/half?id={quote(EVIL)}").text, site.find(topic=EVIL)]
    for page in pages:
        assert "taken" in page
        assert "\u202e" not in page
        parser = Tags()
        parser.feed(page)
        assert parser.tags["script"] == 1, "only the page's own"
        assert "img" not in parser.tags
        assert parser.odd == []


def test_a_command_to_copy_is_one_word_a_name() -> None:
    """Group names and applications may have a bar, which a shell takes for a pipe."""
    log = InMemoryCommitLog(topics={"orders": 1})
    quarantine(log, prepare(log, 0, 1, app="a|reboot"))
    found = {f.check: f for f in Diagnosis(Standing(log.engine), "shop/log ").findings()}
    assert str(found["quarantined"].remedy).startswith("txmq resume shop/log 'a|reboot:0' (asks again); or txmq trace")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("settle each with txmq resolve.", "settle each with <code>txmq resolve</code>."),
        ("txmq check l --once (why)", '<code>txmq check l <span class="option">--once</span></code> (why)'),
        ("txmq dlq list l g; then more", "<code>txmq dlq list l g</code>; then more"),
        ("txmq trace 'my shop;,(' a:0", "<code>txmq trace &#x27;my shop;,(&#x27; a:0</code>"),
        ("ask: txmq pending. Then wait", "ask: <code>txmq pending</code>. Then wait"),
        ("<b> & nothing to run", "&lt;b&gt; &amp; nothing to run"),
    ],
)
def test_commands_are_found_whole(text: str, expected: str) -> None:
    assert commands(text) == expected


# ---------------------------------------------------------------- who may look
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:5558", 200),
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:5558", 200),
        ("127.0.0.1.evil.example:5558", 403),
        ("evil.example", 403),
        ("192.0.2.7:5558", 403),
        ("", 403),
    ],
)
def test_a_foreign_host_is_refused(log: CommitLog, host: str, status: int) -> None:
    with served(log) as site:
        answer = site.get("/find", Host=host)
    assert answer.status == status
    assert ("orders" in answer.text) is False


def test_beyond_this_machine_the_own_names_and_addresses_are_known() -> None:
    door = Door("0.0.0.0", ["txmq.example"], TOKEN)
    own = ("192.0.2.7:5558", "txmq.example", "TXMQ.example:443", "localhost:1", "[2001:db8::1]:80")
    assert all(map(door.knows, own))
    assert not door.knows("evil.example")
    assert not Door("127.0.0.1").knows("192.0.2.7")


@pytest.mark.parametrize("arguments", [("0.0.0.0",), ("",), ("::",), ("192.0.2.7",), ("127.0.0.1", ["proxy.example"])])
def test_other_machines_need_a_token(arguments: tuple[object, ...]) -> None:
    with pytest.raises(OptionError, match="Set TXMQ_SERVE_TOKEN"):
        Door(*arguments)  # type: ignore[arg-type]
    Door(*arguments, **{"token": TOKEN})  # type: ignore[arg-type]


def test_a_short_token_is_refused() -> None:
    with pytest.raises(OptionError, match="the token has 6 characters: at least 16"):
        Door("0.0.0.0", token="secret")


def test_the_token_opens_the_page_and_leaves_the_address(log: CommitLog) -> None:
    with served(log, Door(token=TOKEN)) as site:
        for path in ("/", "/half?id=app:0", "/find?q=x", "/nothing", "/?token=wrong"):
            assert site.get(path).status == 401, path
        answer = site.get(f"/half?id=app%3A0&token={quote(TOKEN)}")
        assert (answer.status, answer.headers["Location"]) == (303, "/half?id=app%3A0")
        cookie = answer.headers["Set-Cookie"]
        assert TOKEN not in cookie
        assert "HttpOnly; SameSite=Strict" in cookie
        assert site.get("/find", Cookie=cookie.partition(";")[0]).status == 200
        assert site.get("/find", Authorization=f"Bearer {TOKEN}").status == 200
        assert site.get("/find", Cookie=cookie.partition("=")[0] + "=" + TOKEN).status == 401
        assert site.get("/find", Cookie='"\x7f=;;').status == 401
        ours = cookie.partition(";")[0]
        for cookies in (f'prefs={{"a":1}}; {ours}', f"a=b c; {ours}; x", f'{ours}; y[]="1'):
            assert site.get("/find", Cookie=cookies).status == 200, "a cookie of another program shut a viewer out"
        assert site.get(f"//evil.example/?token={quote(TOKEN)}").headers["Location"] == "/"


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/../../etc/passwd", "/half/..%2f..%2fetc/passwd", "/%2e%2e/", "//half", "/half/", "/page.css",
     "/half%00", "/favicon.ico", "/metrics", "*"],
)  # fmt: skip
def test_no_other_path_is_served(log: CommitLog, path: str) -> None:
    with served(log) as site:
        answer = site.get(path)
    assert answer.status == 404
    assert "root:" not in answer.text


def test_addresses_that_are_no_text_are_refused(log: CommitLog) -> None:
    with served(log) as site:
        assert site.get("/find?q=%ff").status == 400
        assert site.get("/find?" + "&".join("q=1" for _ in range(50))).status == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(log: CommitLog, method: str) -> None:
    with served(log) as site:
        answer = site.get("/", method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        head = site.get("/find", "HEAD")
        assert (head.status, head.text) == (200, "")


def test_every_answer_has_a_strict_policy(log: CommitLog) -> None:
    with served(log) as site:
        for path in ("/", "/half?id=x", "/find", "/nothing"):
            headers = site.get(path).headers
            policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["script-src"].startswith("'sha256-")
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"


def test_the_script_and_the_style_are_those_of_the_policy(log: CommitLog) -> None:
    with served(log) as site:
        page = site.get("/find").text
    assert f"<script>{live_page.SCRIPT}</script>" in page
    assert f"<style>{live_page.STYLE}</style>" in page
    assert " style=" not in page


# ---------------------------------------------------------------- how much it reads
def test_looking_writes_nothing(log: CommitLog, tmp_path: Path) -> None:
    record = prepare(log, 0, 3)
    commit(log, record)
    quarantine(log, prepare(log, 1, 1))
    in_conflict(log, prepare(log, 2, 1))
    before = files(log.path)
    with served(log.another()) as site:
        assert site.get().status == 200
        site.half(record)
        site.find(q="x")
        site.find(topic="orders")
    assert files(log.path) == before


def test_two_hundred_requests_are_one_read(log: CommitLog, monkeypatch: pytest.MonkeyPatch, limit: Limit) -> None:
    from rmq_spark._core.report import report_figures

    reads = []
    read = report_figures.figures_of
    monkeypatch.setattr(report_figures, "figures_of", lambda *a: reads.append(1) or read(*a))
    monkeypatch.setattr("rmq_spark.report.figures_of", report_figures.figures_of, raising=False)
    limit(LOOK_EVERY_S=60.0)
    commit(log, prepare(log, 0, 3))
    with served(log) as site, ThreadPoolExecutor(200) as viewers:
        answers = list(viewers.map(lambda n: site.get(f"/?another={n}"), range(200)))
    assert {answer.status for answer in answers} == {200}
    assert len(reads) == 1


def test_clients_that_send_a_byte_now_and_then_keep_nobody_out(log: CommitLog, limit: Limit) -> None:
    limit(CONNECTIONS_MAX=2, REQUEST_S_MAX=0.5)
    with served(log) as site:
        slow = [socket.create_connection(("127.0.0.1", urlsplit(site.url).port)) for _ in range(3)]
        ended = threading.Event()

        def drip() -> None:
            while not ended.wait(0.1):
                for client in slow:
                    with suppress(OSError):
                        client.send(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert site.get("/find").status == 200
        finally:
            ended.set()
            thread.join()
            for client in slow:
                client.close()


def test_without_threads_nothing_is_shown_and_later_all_is_as_before(log: CommitLog, limit: Limit) -> None:
    """Each connection for which no thread could start took a place for ever."""
    limit(CONNECTIONS_MAX=1)
    with served(log) as site:
        with no_thread_starts(), pytest.raises(ConnectionError):
            site.get()
        assert site.get("/find").status == 200


def test_a_look_without_a_thread_gives_a_page_that_says_so(log: CommitLog) -> None:
    pages, answers = LivePages("log", serve.Looker(log, "1d", False).views(), Door(), sentence_of), []
    asked = {"REQUEST_METHOD": "GET", "HTTP_HOST": "localhost:80", "PATH_INFO": "/", "SERVER_PORT": "80"}
    with no_thread_starts():
        (text,) = pages(asked, lambda status, _: answers.append(status))
    assert "Not shown RuntimeError: can't start new thread" in text_of(text.decode())
    pages.looks.join(1)
    pages(asked, lambda status, _: answers.append(status))
    assert [status[:3] for status in answers] == ["503", "200"]


def test_a_server_that_has_answered_can_be_started_again_at_once(log: CommitLog) -> None:
    with served(log) as site:
        assert site.get("/find").status == 200
    with serving(site.pages, "127.0.0.1", urlsplit(site.url).port or 0) as url:
        assert Site(url, site.pages).get("/find").status == 200


def test_nobody_looks_nothing_is_read(limit: Limit) -> None:
    looks: list[int] = []
    limit(LOOK_EVERY_S=0.01, LOOK_REST=0.0)
    with showing({"/": View(lambda query: str(looks.append(1)), 1)}) as site:
        site.get()
        time.sleep(0.1)
        assert len(looks) == 1
        site.get()
        assert len(looks) == 2


def test_a_slow_log_gives_a_page_that_says_so_and_the_old_figures(limit: Limit) -> None:
    limit(LOOK_WAIT_S=0.05, LOOK_EVERY_S=0.0, LOOK_REST=0.0)
    may_go, began = threading.Event(), []

    def slow(query: Mapping[str, str]) -> str:
        began.append(1)
        assert may_go.wait(30)
        return f"look {len(began)}"

    with showing({"/": View(slow, 3)}) as site:
        first = site.get()
        assert first.status == 202
        assert "Still reading" in text_of(first.text)
        assert 'data-every="3"' in first.text, "it comes by itself"
        assert site.get().status == 202
        assert len(began) == 1, "the next viewer waits for the same look"
        may_go.set()
        while "look 1" not in site.get().text:
            time.sleep(0.01)
        may_go.clear()
        (look,) = site.pages.looks._looks.values()
        look.join(10)
        old = site.get()
        assert old.status == 200
        assert "A look has been running for" in text_of(old.text)
        assert "look " in text_of(old.text)
        may_go.set()


def test_an_old_answer_is_pale_and_asks_again_while_a_new_look_runs(limit: Limit) -> None:
    limit(LOOK_EVERY_S=0.0, LOOK_REST=0.0, LOOK_WAIT_S=0.05, STALE_S=0.0)
    may_end = threading.Event()
    may_end.set()
    with showing({"/find": View(lambda query: str(may_end.wait(30)), fields=("q",))}) as site:
        assert '<main data-every="0">' in site.get("/find?q=1").text
        may_end.clear()
        assert '<main data-every="3" class="stale">' in site.get("/find?q=1").text
        may_end.set()


def test_a_look_that_took_long_rests_for_longer(limit: Limit) -> None:
    limit(LOOK_EVERY_S=0.0, LOOK_REST=1000.0)
    looks: list[int] = []
    look = shared_look.SharedLook(lambda: (looks.append(1), time.sleep(0.02)))
    assert look.ask().value is not None
    for _ in range(5):
        look.ask()
    assert len(looks) == 1


def test_many_searches_at_once_are_turned_away_and_home_is_not(limit: Limit) -> None:
    limit(LOOK_WAIT_S=0.05)
    may_end = threading.Event()
    views = {"/": View(lambda query: "home"), "/find": View(lambda query: str(may_end.wait(30)), fields=("q",))}
    with showing(views) as site:
        statuses = [site.get(f"/find?q={n}").status for n in range(shared_look.RUNNING_MAX + 3)]
        assert statuses == [202] * shared_look.RUNNING_MAX + [503] * 3
        assert site.get("/").status == 200
        may_end.set()


def test_what_is_remembered_is_bounded() -> None:
    looks = shared_look.SharedLooks[str]()
    for number in range(1000):
        look = looks.of(number, lambda: "x")
        assert look is not None
        look.ask()
    assert len(looks._looks) == shared_look.LOOKS_CACHED_MAX


# ---------------------------------------------------------------- what goes wrong
def test_a_log_that_vanishes_gives_a_page_that_says_so(log: CommitLog, limit: Limit) -> None:
    limit(LOOK_EVERY_S=0.0, LOOK_REST=0.0)
    record = prepare(log, 0, 3)
    commit(log, record)
    with served(log) as site:
        assert site.get().status == 200
        site.half(record)
        shutil.rmtree(log.path)
        for path in ("/", "/half?id=app:0", "/find?q=x", "/find?topic=orders"):
            answer = site.get(path)
            assert answer.status in (404, 503), path
            assert "Traceback" not in answer.text
            assert "cannot be read" in text_of(answer.text) or "Not found" in text_of(answer.text)
        home = site.get()
        assert home.status == 503
        assert "Committed lately" in text_of(home.text), "the last figures stay, and say how old they are"
        assert 'data-every="3"' in home.text


def test_an_error_has_no_secret() -> None:
    fails = raising(OSError("s3://key:hunter2secret@bucket/log does not answer"))
    with showing({"/": View(fails, 3)}) as site:
        answer = site.get()
    assert answer.status == 503
    assert "does not answer" in answer.text
    assert "hunter2secret" not in answer.text


def test_a_client_that_sends_nothing_is_dropped(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_server._Handler, "timeout", 0.1)
    with served(log) as site:
        parts = urlsplit(site.url)
        with socket.create_connection((str(parts.hostname), parts.port), 10) as idle:
            idle.sendall(b"GET / HT")
            assert idle.recv(100) == b""
        assert site.get("/find").status == 200


# ---------------------------------------------------------------- the command
def test_the_command_refuses_what_it_cannot_do(log: CommitLog, tmp_path: Path) -> None:
    assert "there is no token. Set TXMQ_SERVE_TOKEN" in txmq("serve", log.path, "--address", "0.0.0.0", code=2)[1]
    assert "is no time" in txmq("serve", log.path, "--since", "0s", code=2)[1]
    assert "not a commit log" in txmq("serve", tmp_path / "nothing", code=1)[1]


@pytest.mark.parametrize("configured", [False, True])
def test_the_command_of_the_docs_serves_until_it_is_stopped(tmp_path: Path, configured: bool) -> None:
    """Its page is for other shells, where commands need the whole path."""
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    known = {option for parameter in whole(app).commands["serve"].params for option in parameter.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) < known
    ((command, printed),) = re.findall(r"^```\n\$ txmq (.*)\n(.*)\n```$", text, re.MULTILINE)
    log = make_log("delta", tmp_path / "shop" / "log")
    commit(log, prepare(log, 0, 3))
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    if configured:
        (tmp_path / "txmq.toml").write_text('path = "shop/log"\n')
        command = command.replace(" shop/log", "")
    line = [sys.executable, "-m", "rmq_spark", *command.split(), "--port", "0"]
    environment = {**os.environ, "TXMQ_SERVE_TOKEN": TOKEN}
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=tmp_path) as running:
        assert running.stdout is not None
        said = running.stdout.readline().strip()
        port = re.findall(r":(\d+)/", said)[0]
        assert said == printed.replace("/srv", str(tmp_path)).replace(str(serve.PORT), port) + "?token=…"
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        while True:
            connection.request("GET", "/", headers={"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            page = answer.read().decode()
            if answer.status != 202:  # the first look still runs
                break
        assert answer.status == 200
        assert f"<code>txmq group list {log.path}</code>" in page
        connection.close()
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert errors == ""


def test_a_taken_port_is_named(log: CommitLog) -> None:
    with served(log) as site:
        port = urlsplit(site.url).port
        assert f"nothing can listen at 127.0.0.1:{port}" in txmq("serve", log.path, "--port", port, code=2)[1]
