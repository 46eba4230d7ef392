"""The figures of a report, its sentences, its charts and its page."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CommitLog, plots
from rmq_spark._core.inspect.standing import Letters, NotDrained
from rmq_spark._core.inspect.trace import TraceEvent, TraceKind
from rmq_spark._core.report import charts, over_time
from rmq_spark._core.report.report_figures import FINDINGS_MAX, Figures, findings_of
from rmq_spark._core.report.span import PERIODS_MAX, Span
from rmq_spark._core.report.waterfall import EVENT_COLOURS, EVENTS_MAX, waterfall
from rmq_spark._core.vocabulary.text import byte_size, duration, rate
from rmq_spark.errors import OptionError, VerdictConflictError
from rmq_spark.testing import InMemoryCommitLog
from tests.support import report_logs
from tests.support.clocks import Ticking
from tests.support.commands import objects, txmq
from tests.support.half_batches import (
    commit,
    count_check,
    decide_one,
    in_conflict,
    let_leave,
    make_log,
    prepare,
    quarantine,
    roll_back,
    split,
)
from tests.support.half_batches import pending as pending_rows
from tests.support.inside import TIMESTAMP, HalfRecord, Level, RowState, Trace, Who, figures_of, page
from tests.support.limits import Limit
from tests.support.meanwhile import seen_at
from tests.support.report_logs import NOW_S, Shop

NOW = datetime.fromtimestamp(NOW_S, timezone.utc)


@pytest.fixture(scope="module")
def shop() -> InMemoryCommitLog:
    return report_logs.a_shop(0.4)


@pytest.fixture(scope="module")
def figures(shop: InMemoryCommitLog) -> Figures:
    return figures_of(shop)


def by(table: pa.Table, name: str, value: str) -> dict[str, int]:
    sums = table.group_by(name).aggregate([(value, "sum")]).to_pylist()
    return {row[name]: row[f"{value}_sum"] for row in sums}


def require_same_when_all_has_left(log: CommitLog, settled: int) -> Figures:
    """The figures of so many settled half batches, which are the same before and after upkeep."""
    prepare(log, 9, 1)  # the last one of its application stays
    before = figures_of(log)
    let_leave(log)
    assert len(log.another().engine.half.contents.all_batches()) == 1
    after = figures_of(log)
    assert after.verdicts.to_pylist() == before.verdicts.to_pylist()
    assert after.settled == before.settled == settled
    return after


# ---------------------------------------------------------------- figures
def test_messages_that_appeared_are_those_that_can_be_read(shop: InMemoryCommitLog, figures: Figures) -> None:
    assert by(figures.throughput, "topic", "messages") == {name: shop.read(name).num_rows for name in shop.topics()}
    assert figures.committed == by(figures.verdicts, "verdict", "messages")[over_time.COMMITTED]


def test_figures_are_the_same_before_and_after_upkeep() -> None:
    shop = Shop()
    log = shop.log
    log.create_topic("orders", 2)
    log.create_topic("points", 2)
    for n in range(12):
        shop.runtime.at_s = NOW_S - 7200 + 300 * n
        record = shop.prepare(("orders", "points"), 10 + n)
        shop.runtime.at_s += 1 + n / 10
        shop.settle(record, rollback_every=n % 4, who=Who.CHECK if n % 3 == 0 else Who.EXECUTE)
    shop.runtime.at_s = NOW_S
    before = figures_of(log)
    log.maintain(grace="1m", audit="1m")
    after = figures_of(log)
    assert len(log.engine.half.contents.all_batches()) == 1  # the application's last one stays
    for name in ("throughput", "verdicts", "checks", "largest", "slowest"):
        assert getattr(before, name).to_pylist() == getattr(after, name).to_pylist(), name
    assert before.settled == after.settled == 12
    assert before.now.undrained.seconds > 0 == after.now.undrained.seconds


def test_a_rollback_that_a_person_confirms_is_counted_once_before_and_after_upkeep() -> None:
    log = InMemoryCommitLog(topics={"orders": 2})
    late, mixed, hidden = (prepare(log, n, 5, per="message") for n in (1, 2, 3))
    for record, rows in ((late, pending_rows(log, late)), (mixed, split(pending_rows(log, mixed), every=2)[0])):
        decide_one(log.engine, record, 1, rollback=rows, who=Who.CHECK)
        with pytest.raises(VerdictConflictError):
            decide_one(log.engine, record, 1, commit=rows, who=Who.EXECUTE)
    for record in (mixed, hidden):
        quarantine(log, record)
    for record in (late, mixed, hidden):
        log.resolve(record.half_id, ROLLBACK_MESSAGE, "it never happened")
    found = require_same_when_all_has_left(log, settled=3)
    assert by(found.verdicts, "verdict", "messages") == {over_time.ROLLED_BACK: 5 + 5 + 5}, "the last word counts"


def test_a_reopen_takes_back_no_decision_on_an_earlier_attempt() -> None:
    log = InMemoryCommitLog(topics={"orders": 2})
    record = prepare(log, 1, 5, per="message")
    _, again = split(pending_rows(log, record), every=2)
    for attempt in (1, 2):
        decide_one(log.engine, record, attempt, rollback=again, who=Who.CHECK)
        if attempt == 2:
            quarantine(log, record)
        log.engine.ledger.reopen(
            record, attempt, (RowState.ROLLED_BACK_BY_CHECK,), attempt + 1, Who.EXECUTE, "it never happened"
        )
    commit(log, record, 3)
    log.engine.ledger.reopen(record, 1, (RowState.QUARANTINED,), 1, Who.EXECUTE, "asked again")
    commit(log, record)
    found = require_same_when_all_has_left(log, settled=1)
    assert by(found.verdicts, "verdict", "messages") == {over_time.COMMITTED: 5}


@pytest.mark.parametrize("verdict", ["commit", "rollback"])
def test_a_transaction_counts_by_its_last_verdict_whatever_a_replay_or_a_person_took_back(verdict: str) -> None:
    """A crashed batch that a check rolled back, and whose replay was refused, had its messages rolled back twice."""
    # Checks are counted for each second, so all of them are within one.
    log = InMemoryCommitLog(topics={"orders": 2}, runtime=Ticking(time.time() // 60 * 60, 0.001))
    replayed, asked_again, resumed, pending_again = (prepare(log, n, 5, per="message") for n in (1, 2, 3, 4))
    in_part, rest = split(pending_rows(log, replayed), every=2)

    def settle(record: HalfRecord, attempt: int) -> None:
        decide_one(log.engine, record, attempt, **{verdict: pending_rows(log, record, attempt)}, who=Who.EXECUTE)

    decide_one(log.engine, replayed, 1, rollback=rest, who=Who.EXECUTE)
    for attempt in (1, 2):
        decide_one(log.engine, replayed, attempt, rollback=in_part, who=Who.CHECK)
        log.engine.ledger.reopen(
            replayed, attempt, (RowState.ROLLED_BACK_BY_CHECK,), attempt + 1, Who.EXECUTE, "it never happened"
        )
    settle(replayed, 3)
    roll_back(log, asked_again, who=Who.DISCARD)
    log.engine.ledger.reopen(asked_again, 1, (RowState.ROLLED_BACK_BY_DISCARD,), 1, Who.EXECUTE, "asked again")
    settle(asked_again, 1)
    quarantine(log, resumed)
    log.resume(resumed.half_id)
    settle(resumed, 1)
    roll_back(log, pending_again, who=Who.CHECK)
    log.engine.ledger.reopen(pending_again, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "it never happened")
    before = figures_of(log)
    word = {"commit": over_time.COMMITTED, "rollback": over_time.ROLLED_BACK}[verdict]
    expected = Counter({over_time.ROLLED_BACK: 3})
    expected[word] += 2 + 5 + 5
    assert by(before.verdicts, "verdict", "messages") == expected
    assert (before.rolled_back, before.pending_messages, before.settled) == (expected[over_time.ROLLED_BACK], 5, 3)
    assert by(before.checks, "verdict", "batches") == {over_time.ROLLED_BACK: 2, over_time.BY_POLICY: 2}
    settle(pending_again, 2)
    after = require_same_when_all_has_left(log, settled=4)
    assert by(after.verdicts, "verdict", "messages") == expected + Counter({word: 5})


def test_verdicts_are_told_apart() -> None:
    log = InMemoryCommitLog(topics={"orders": 2})
    commit(log, prepare(log, 1, 5))
    commit(log, prepare(log, 2, 7), who=Who.CHECK)
    roll_back(log, prepare(log, 3, 3))
    roll_back(log, prepare(log, 4, 4), who=Who.CHECK)
    roll_back(log, prepare(log, 5, 2), who=Who.DISCARD)
    asked = prepare(log, 6, 6)
    count_check(log.engine, asked, 1, pending_rows(log, asked), "no answer")
    found = figures_of(log)
    expected = {over_time.COMMITTED: 12, over_time.ROLLED_BACK: 3, over_time.BY_CHECK: 4, over_time.BY_POLICY: 2}
    assert by(found.verdicts, "verdict", "messages") == expected
    each = (over_time.COMMITTED, over_time.ROLLED_BACK, over_time.BY_POLICY, over_time.UNKNOWN)
    assert by(found.checks, "verdict", "batches") == dict.fromkeys(each, 1)
    assert (found.rolled_back, found.settled, found.pending_messages) == (7, 5, 6)


def test_a_quarantined_half_batch_is_not_settled_and_is_pending_again_when_it_is_resumed() -> None:
    log = InMemoryCommitLog(topics={"orders": 1})
    commit(log, prepare(log, 0, 2))
    hidden = prepare(log, 1, 3)
    quarantine(log, hidden)
    log.engine.ledger.mark()
    found = figures_of(log)
    assert (found.settled, [row["half_id"] for row in found.quarantined]) == (1, [hidden.half_id])
    assert found.pending_messages == 0
    assert [row["half_id"] for row in found.slowest.to_pylist()] == ["app:0"]
    log.resume(hidden.half_id)
    found = figures_of(log)
    assert (found.pending_messages, len(found.pending), found.quarantined) == (3, 1, [])
    log.resolve(hidden.half_id, COMMIT_MESSAGE, "the bank says yes")
    assert figures_of(log).settled == 2


def test_what_is_pending_is_told_by_age_and_the_oldest_are_named(figures: Figures) -> None:
    bars = charts.pending(figures.now.pending).chart.to_dict()["data"]["values"]
    ages = {bar["name"]: (bar["value"], bar["more"]) for bar in bars if bar["value"]}
    assert ages == {"under 10 s": (90, "1 half batch"), "under 1 day": (25, "1 half batch")}
    oldest = figures.pending[0]
    assert (oldest["producer_group"], oldest["messages"], oldest["check_times"]) == ("payment-service", 25, 4)
    assert oldest["reason"] == "the bank does not answer"
    assert (len(figures.quarantined), len(figures.conflicts)) == (1, 1)


def test_of_many_pending_half_batches_the_oldest_are_read(limit: Limit) -> None:
    limit(LOOKED_AT_MAX=10)
    shop = Shop()
    shop.log.create_topic("orders", 1)
    for number in range(30):
        shop.runtime.at_s = NOW_S - 3600 + number
        shop.prepare(("orders",), 2)
    shop.runtime.at_s = NOW_S
    with seen_at("files read", table="half") as reads:
        figures = figures_of(shop.log)
    assert (figures.pending_messages, figures.now.pending_batches) == (60, 30)
    files = [path for read in reads for path in read["paths"]]
    assert len(set(files)) == len(files) == 10
    assert [row["producer_group"] for row in figures.now.pending] == ["order-service"] * 10 + [None] * 20
    ages = [row["age_seconds"] for row in figures.now.pending]
    assert ages == [3600.0 - number for number in range(30)]
    said = {finding.check: str(finding) for finding in findings_of(figures)}
    assert "30 half batches pending, the oldest for 1h (" in said["pending"]


def test_small_topics_are_summed_up_and_dead_letters_never() -> None:
    log = InMemoryCommitLog(queues=1)
    names = [f"topic{n}" for n in range(7)]
    for n, name in enumerate(names):
        log.create_topic(name, 1)
        commit(log, prepare(log, n, 10 + n, topic=name))
    log.engine.create_own_topic("%DLQ%points")
    log.engine.create_own_topic("%RETRY%points")
    for n, name in enumerate(("%DLQ%points", "%RETRY%points")):
        columns = {"body": [b"x"], "topic": [name]}
        commit(log, prepare(log, 100 + n, columns, topic=None))
    found = figures_of(log)
    expected = {"topic6": 16, "topic5": 15, "topic4": 14, "topic3": 13, over_time.OTHERS: 10 + 11 + 12}
    expected |= {over_time.DEAD_LETTERS: 1, over_time.RETRIES: 1}
    assert by(found.throughput, "topic", "messages") == expected
    assert found.dead_letters == 1


@pytest.mark.long
@pytest.mark.parametrize("transactions", [1, 5_000])
def test_the_page_is_no_larger_for_more_transactions(transactions: int) -> None:
    log = report_logs.many(transactions)
    found = figures_of(log)
    assert found.settled == transactions
    assert len(pc.unique(found.verdicts["at"])) <= PERIODS_MAX
    assert found.slowest.num_rows == min(10, transactions)
    assert len(page(found)) < 1_100_000


@pytest.mark.parametrize("seconds", [0, 0.5, 59, 61, 3600, 86_400, 7 * 86_400, 400 * 86_400, 30 * 365 * 86_400])
def test_a_span_has_few_periods_and_at_least_some(seconds: float) -> None:
    span = Span(NOW - timedelta(days=20_000), NOW).around(NOW - timedelta(seconds=seconds))
    length_s = (span.until - span.period_start(span.since)).total_seconds()
    assert length_s / span.period_s <= PERIODS_MAX
    assert length_s >= max(seconds, 20)
    times = pa.chunked_array([pa.array([span.since, span.until], TIMESTAMP)])
    assert span.period_of(times)[0].as_py() == span.period_start(span.since)


def test_only_what_happened_since_is_counted() -> None:
    shop = Shop()
    shop.log.create_topic("orders", 1)
    for hours in (30, 2):
        shop.runtime.at_s = NOW_S - hours * 3600
        shop.settle(shop.prepare(("orders",), hours))
        shop.log.drain()
    shop.runtime.at_s = NOW_S
    assert figures_of(shop.log, "1d").committed == 2
    assert figures_of(shop.log, "7d").committed == 32


@pytest.mark.parametrize("since", ["", "7", "0s", "week"])
def test_a_time_that_is_none_is_refused(since: str) -> None:
    with pytest.raises(OptionError, match="since"):
        figures_of(InMemoryCommitLog(), since)


# ---------------------------------------------------------------- sentences
def pending(age_s: float, check_times: int = 0, leased: bool = False) -> dict[str, Any]:
    row = dict.fromkeys(("app_id", "batch_id", "attempt", "lease_until", "bytes"))
    row |= {"half_id": "app:1", "producer_group": "shop", "prepared_at": NOW, "messages": 3, "check_times": check_times}
    return {"pending": [{**row, "age_seconds": age_s, "leased": leased}]}


def behind(age_s: float) -> dict[str, Any]:
    row = {"consumer_group": "points", "lag": 7, "lag_seconds": age_s, "topics": "orders", "members": 0}
    return {"groups": [row], "members": {}, "queues": []}


def batches(*half_ids: str) -> list[dict[str, Any]]:
    return [{"half_id": half_id, "producer_group": "shop"} for half_id in half_ids]


@pytest.mark.parametrize(
    ("changed", "level", "said"),
    [
        ({}, Level.OK, "This commit log is new: it has no topic yet. Make one: txmq topic create "),
        ({"conflicts": batches("a:1", "a:2")}, Level.CRITICAL, "2 half batches with two verdicts that contradict"),
        ({"quarantined": batches("a:1")}, Level.WARNING, "1 half batch quarantined, and hidden: a:1"),
        ({"conflicts": batches("a:1"), "quarantined": batches("a:2")}, Level.CRITICAL, "1 half batch with two verdict"),
        (pending(100), Level.OK, "new"),
        (pending(900), Level.CRITICAL, "1 half batch should have been checked, and no checker has said a word on that"),
        (pending(900, leased=True), Level.OK, "new"),
        (
            {"dead_letters": {"points": Letters(4, 2)}},
            Level.NOTE,
            "points: 4 dead letters, 2 of them not sent again txmq dlq list memory: points (says why); when the cause "
            "is gone, txmq dlq resend memory: points --all",
        ),
        ({"dead_letters": {"points": Letters(4, 0)}}, Level.OK, "new"),
        (behind(5000), Level.WARNING, "points: 7 messages behind, the oldest committed 1h 23m ago"),
        (behind(500), Level.OK, "new"),
        ({"undrained": NotDrained(3, 812, 3000.0)}, Level.WARNING, "3 messages (812 B) committed and not in the table"),
    ],
)
def test_the_headline_is_the_most_pressing_finding(changed: dict[str, Any], level: Level, said: str) -> None:
    figures = figures_of(InMemoryCommitLog())
    vars(figures.now).update(changed)
    first = findings_of(figures)[0]
    assert first.level is level
    assert said in str(first)


def test_of_many_findings_the_worst_stand_first_and_the_others_are_counted() -> None:
    figures = figures_of(InMemoryCommitLog())
    rows = [{**behind(5000)["groups"][0], "consumer_group": f"group-{n}"} for n in range(30)]
    vars(figures.now).update({**behind(0), "groups": rows, "conflicts": batches("a:1")})
    findings = findings_of(figures)
    assert (findings[0].level, len(findings)) == (Level.CRITICAL, FINDINGS_MAX + 1)
    assert str(findings[-1]) == "19 more findings txmq doctor memory:"


def test_a_log_that_is_well_says_so() -> None:
    log = InMemoryCommitLog(topics={"orders": 1})
    assert str(findings_of(figures_of(log))[0]) == "Nothing was sent in this time, and nothing is pending."
    commit(log, prepare(log, 1, 5))
    prepare(log, 2, 1)
    assert str(findings_of(figures_of(log))[0]) == (
        "All is well: 5 messages appeared, 1 message is pending, none for long, and nothing waits for a person."
    )


def test_numbers_are_written_for_people() -> None:
    seconds = (0, 0.2, 1.5, 59.7, 60, 150, 3_900, 194_400, 86_400)
    assert [duration(s) for s in seconds] == [
        "0s", "200ms", "1.5s", "1m", "1m", "2m 30s", "1h 5m", "2d 6h", "1d",
    ]  # fmt: skip
    assert [byte_size(n) for n in (0, 812, 4_200_000, 999_999)] == ["0 B", "812 B", "4.2 MB", "1.0 MB"]
    assert [rate(n, 3600) for n in (0, 2, 7200, 180)] == ["", "2 an hour", "2 a second", "3 a minute"]
    assert [rate(6, 640), rate(2, 900), rate(2, 30)] == ["0.6 a minute", "0.1 a minute", "2 a minute"]


# ---------------------------------------------------------------- charts
OF_A_LOG: list[Callable[[Any], Any]] = [
    plots.throughput, plots.verdicts, plots.checks, plots.pending,
    plots.lag, plots.largest, plots.slowest, plots.topics,
]  # fmt: skip


@pytest.mark.parametrize("plot", OF_A_LOG, ids=lambda plot: plot.__name__)
def test_a_plot_is_a_chart_of_altair_of_any_log(plot: Callable[[Any], Any], shop: InMemoryCommitLog) -> None:
    drawn = plot(shop).to_dict()  # altair validates it
    assert drawn["title"] == drawn["description"] != ""
    rows = (
        [row for data in drawn["datasets"].values() for row in data] if "datasets" in drawn else drawn["data"]["values"]
    )
    assert rows
    plot(InMemoryCommitLog()).to_dict()


def test_a_column_is_named_in_the_largest_unit_of_which_it_has_a_whole_number() -> None:
    named = {1: "second", 90: "90 seconds", 600: "10 minutes", 3600: "hour", 129_600: "36 hours", 604_800: "week"}
    assert {seconds: charts.period(Span(NOW, NOW, seconds)) for seconds in named} == named


def test_a_tooltip_counts_one_message_as_one() -> None:
    log = InMemoryCommitLog(topics={"orders": 1})
    commit(log, prepare(log, 1, 1))
    roll_back(log, prepare(log, 2, 2))
    rows = [r for r in plots.verdicts(log).to_dict()["data"]["values"] if "amount" in r]
    assert sorted(r["amount"] for r in rows) == ["1 message", "2 messages"]
    assert any(r["said"].endswith(": 1 message") for r in rows)


def test_a_long_story_is_drawn_from_both_ends() -> None:
    times = (NOW + timedelta(minutes=n) for n in range(500))
    events = tuple(TraceEvent(at, TraceKind.CHECKED, 1, reason=f"answer {n}") for n, at in enumerate(times))
    drawn = waterfall(Trace("app:1", "half", 1, {}, events=events), NOW)
    assert drawn.count('class="phase"') == EVENTS_MAX
    assert '<li class="more">460 steps between</li>' in drawn


def test_half_batches_are_named_by_their_group_and_time(figures: Figures) -> None:
    for drawn in (charts.largest(figures.largest), charts.slowest(figures.slowest)):
        spec = drawn.chart.to_dict()
        rows = spec["layer"][0]["data"]["values"] if "data" not in spec else spec["data"]["values"]
        listed = {row["half_id"]: row for row in figures.largest.to_pylist() + figures.slowest.to_pylist()}
        assert len({row["name"] for row in rows}) == len(rows) == 10
        for row in rows:
            batch = listed[row["id"]]
            shown = row["name"].split("\n")[:2]
            assert shown == [batch["producer_group"], f"{batch['settled_at']:%d %b %H:%M:%S}"]


def test_a_long_group_is_shortened_in_a_chart() -> None:
    log = InMemoryCommitLog(topics={"orders": 1})
    commit(log, prepare(log, 1, 1, group="order-service-of-the-north"))
    assert '"order-service-of-…\\n' in json.dumps(plots.largest(log).to_dict(), ensure_ascii=False)


STATES = {*charts.WORD_COLOURS.values(), *EVENT_COLOURS.values(), *(colour for _, _, colour in charts.AGES)}


def test_no_topic_looks_like_a_state() -> None:
    assert not STATES & {*charts.TOPIC_COLOURS}


def test_colours_stand_out_from_a_light_and_a_dark_page() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for colour in {*charts.TOPIC_COLOURS, *STATES}:
        for paper in ("#ffffff", "#1a1f26"):  # the cards of page.css
            low, high = sorted((luminance(colour), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 3, (colour, paper)


# ---------------------------------------------------------------- page and command
@pytest.mark.turns(2, among="the report's page")
def test_the_page_holds_all_and_names_no_address(shop: InMemoryCommitLog, figures: Figures) -> None:
    text = page(figures, shop.trace(half_id=shop.conflicts()[0]))
    head, _, rest = text.partition("<script>")
    own = rest.rpartition("<script>")[2]
    assert "://" not in head + own
    assert text.count("</script>") == 3
    drawn = json.loads(head.partition('id="charts">')[2].partition("</script>")[0])
    assert set(drawn) == {
        "throughput", "verdicts", "checks", "pending", "lag", "largest", "slowest", "topics",
    }  # fmt: skip
    assert not any("title" in spec for spec in drawn.values()), "its card has the title"
    assert "<code>txmq trace memory: order:18</code> (ends" in head


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_without_the_packages_that_draw_the_extra_is_named(
    package: str, shop: InMemoryCommitLog, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OptionError, match="install rmq_spark with its extra report"):
        page(figures)


@pytest.fixture
def log(log_path: str) -> CommitLog:
    """A log on a disk, of which the command can tell."""
    made = make_log("delta", Path(log_path))
    commit(made, prepare(made, 1, 5))
    return made


def test_the_sentence_needs_no_package_that_draws(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("altair", "vl_convert"):
        monkeypatch.setitem(sys.modules, package, None)
    assert txmq("report", log.path)[0].startswith("All is well: 5 messages appeared")


@pytest.mark.turns(2, among="the report's page")
def test_the_command_says_a_sentence_and_writes_the_page(log: CommitLog, tmp_path: Path) -> None:
    said = "All is well: 5 messages appeared, nothing is pending, and nothing waits for a person.\n"
    assert txmq("report", log.path)[0] == said
    file = tmp_path / "out.html"
    assert txmq("report", log.path, "--html", file, "--since", "1h", "--transaction", "app:1:1")[0] == said
    assert '<h2 class="id">app:1:1</h2>' in file.read_text()


def test_the_page_of_a_log_in_which_nothing_was_sent_has_no_half_batch(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    txmq("report", CommitLog.create(tmp_path / "log").path, "--html", file)
    assert "From the prepare on" not in file.read_text()


def test_the_pages_half_batch_has_the_cards_of_the_live_page(log: CommitLog, tmp_path: Path) -> None:
    torn = prepare(log, 2, {"body": ["b"], "keys": ["order-7"]})
    in_conflict(log, torn, "no such payment")
    file = tmp_path / "out.html"
    txmq("report", log.path, "--html", file)  # what waits for a person comes before what was slow
    main = file.read_text().partition(f'<h2 class="id">{torn.half_id}</h2>')[2]
    assert re.findall(r"<h2>([^<]*)</h2>", main)[:4] == [
        "What to do", "Two verdicts", "From the prepare on", "Its transactions",
    ]  # fmt: skip
    assert f"<code>txmq resolve {log.path} {torn.half_id} COMMIT" in main
    assert 'data-head="keys">order-7</td>' in main


def test_a_report_has_no_links_to_pages_that_a_file_does_not_have(log: CommitLog) -> None:
    trace = replace(log.trace(half_id="app:1"), waits_for=("app:7",))
    text = page(figures_of(log), trace)
    assert "<li>waits for app:7</li>" in text
    assert 'href="/' not in text


def test_the_command_prints_json(log: CommitLog) -> None:
    (found,) = objects("report", log.path)
    assert (found["level"], found["messages_appeared"], found["half_batches_settled"]) == ("ok", 5, 1)
    assert datetime.fromisoformat(found["until"].replace("Z", "+00:00")) > NOW


def test_a_page_stands_whatever_topics_and_reasons_are_called() -> None:
    log = InMemoryCommitLog(topics={"at": 1, "by": 1})
    for number, topic in enumerate(("at", "by")):
        commit(log, prepare(log, number, topic=topic))
    record = prepare(log, 2, topic="at")
    log.resolve(record.half_id, COMMIT_MESSAGE, "\x1b[31m\u202ereason\x00")
    made = page(figures_of(log), log.trace(f"{record.half_id}:1"))
    assert not set(made) & set("\x1b\u202e\x00")
    assert "[31m\ufffdreason\ufffd" in made
