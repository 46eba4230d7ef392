"""The pages of ``txmq serve``, made of the parts and figures of the report: home, and a half batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rmq_spark import __version__
from rmq_spark._core.inspect.finding import Finding
from rmq_spark._core.inspect.standing import Standing
from rmq_spark._core.inspect.trace import Trace, TraceKind, late_verdicts
from rmq_spark._core.report.components import (
    NAMES_MAX,
    ROWS_MAX,
    STATES,
    STYLE,
    Column,
    asset,
    commands,
    escape,
    find_address,
    first_of,
    folded,
    framed,
    half_address,
    headline,
    link,
    listed,
    number_or_dash,
    script,
    sha256,
    tiles,
)
from rmq_spark._core.report.report_figures import Figures
from rmq_spark._core.report.waterfall import reason_of, waterfall
from rmq_spark._core.vocabulary.text import count_of, duration
from rmq_spark._core.vocabulary.verdicts import ROLLBACK_MESSAGE

SCRIPT = script(asset("live.js"))
POLICY = (
    f"default-src 'none'; script-src 'sha256-{sha256(SCRIPT)}'; style-src 'sha256-{sha256(STYLE)}'; "
    "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of every page: its own script and style, and requests to its own server."""
KEYS_MAX = 20
"""The most keys of a transaction that are written out."""
GROUPS_MAX, QUEUES_MAX = 20, 4
"""The most consumer groups, and queues of each, that home lists."""
FIELDS = ("q", "topic", "queue", "offset")
"""The fields of the form that searches."""
TRANSACTIONS_MAX = 1_000
"""The most messages of a half batch whose transactions are listed."""


def document(
    log: str,
    main: str,
    note: str,
    *,
    searched: Mapping[str, str] | None = None,
    every_s: int = 0,
    is_stale: bool = False,
) -> str:
    """Return a page around its main part. With ``every_s`` the browser fetches that part again after this many seconds.
    A stale one is pale."""
    values = {name: escape((searched or {}).get(name, "")) for name in FIELDS}
    again = f'<noscript><meta http-equiv="refresh" content="{3 * every_s}"></noscript>' if every_s else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Commit log {escape(log)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
{again}
</head>
<body>
<header>
<p class="kind"><a href="/">txmq serve</a>: a commit log, live and only to look at</p>
<h1>{escape(log)}</h1>
<form action="/find" role="search">
<input name="q" value="{values["q"]}" placeholder="key, message id or half id" aria-label="key, message id or half id">
<input name="topic" value="{values["topic"]}" placeholder="topic" aria-label="topic">
<input name="queue" value="{values["queue"]}" inputmode="numeric" placeholder="queue" aria-label="queue">
<input name="offset" value="{values["offset"]}" inputmode="numeric" placeholder="offset" aria-label="offset">
<button>Find</button>
</form>
</header>
<main data-every="{every_s}"{' class="stale"' if is_stale else ""}>
<p class="when" role="status" id="note">{escape(note)}</p>
{main}
</main>
<footer><p>A half batch is what one micro-batch, batch write or send stored together; it has one transaction or several.
Times are UTC. rmq_spark {__version__}</p></footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


def notice(title: str, sentence: str) -> str:
    """Return the main part of a page that has only a sentence to say."""
    return f'<section class="card wide"><h2>{escape(title)}</h2><p class="hint">{commands(sentence)}</p></section>'


# ---------------------------------------------------------------- home
def home(figures: Figures, findings: Sequence[Finding], typed: str, more: str = "", *, has_links: bool = True) -> str:
    """Return the main part of the first page, and of a report.

    Parameters
    ----------
    findings : sequence of Finding
        The most urgent first; at least one.
    typed : str
        The log's path and a space for commands; empty when the configuration names the log.
    more : str
        Further cards.
    has_links : bool
        Whether there are pages of half batches.
    """
    now, span = figures.now, duration(figures.span.asked_s)
    committed, rolled_back = figures.committed_lately, figures.rolled_back_lately
    newest = f"The newest in {span}, with the age of the verdict"

    def half_batches(
        title: str,
        hint: str,
        rows: Sequence[Mapping[str, Any]],
        total: int,
        command: str = "",
        nothing: str = "",
        folds: str = "",
    ) -> str:
        if not rows:
            return framed(title, f"{hint}.", f'<p class="nothing">{nothing}</p>', wide=True) if nothing else ""
        columns = [
            Column("half batch", lambda row: row["half_id"] or "", "id", _address if has_links else lambda row: None),
            Column("producer group", lambda row: row["producer_group"] or ""),
            Column("messages", lambda row: number_or_dash(row["messages"]), "number"),
            Column("age", lambda row: duration(row["age_seconds"]), "number"),
            Column("checks", lambda row: number_or_dash(row["check_times"]), "number")
            if "check_times" in rows[0]
            else Column("by", lambda row: row["decided_by"] or "", "word"),
            Column("reason", _reason, "text"),
        ]
        content = listed(rows, columns, total, command and f"{command} {typed}")
        if folds:
            content = folded(folds, rows, content, f"The newest {len(rows)} of {total:,}")
        return framed(title, f"{hint}.", content, wide=True)

    cards = [
        half_batches("In conflict", "Two verdicts contradict each other: find out which is true", figures.conflicts,
                     len(now.conflicts), "txmq conflicts"),
        half_batches("Quarantined", "Checks gave up, and nobody sees these messages", figures.quarantined,
                     len(now.quarantined), "txmq quarantined"),
        half_batches("Pending", "No verdict yet: a check asks about what stays here", figures.pending,
                     now.pending_batches, "txmq pending", "Nothing is pending."),
        half_batches("Rolled back lately", newest, rolled_back.newest.to_pylist(), rolled_back.total, nothing="None."),
        _lags(now, typed),
        half_batches("Committed lately", newest, committed.newest.to_pylist(), committed.total, nothing="None.",
                     folds="committed"),
        _appeared(figures, span, typed, has_links),
        more,
    ]  # fmt: skip
    waiting = (now.conflicts, now.quarantined, now.pending)
    ids = {row["half_id"] for rows in waiting for row in rows if row["half_id"]} if has_links else ()
    top = headline(findings, {half_id: half_address(half_id) for half_id in ids})
    return f'{top}\n{tiles(figures)}\n<div class="grid">{"".join(cards)}</div>'


def _address(row: Mapping[str, Any]) -> str | None:
    return None if row["half_id"] is None else half_address(row["half_id"])


def _reason(row: Mapping[str, Any]) -> str:
    more = row.get("reasons", 0) - 1
    text = row["reason"] or ("its local transaction runs" if row.get("leased") else "")
    if row.get("answer"):
        text += f"; the last answer: {row['answer']}"
    return f"{text} (and {count_of(more, 'other reason')})" if more > 0 else text


def _lags(now: Standing, typed: str) -> str:
    if not now.groups:
        return framed("Consumer groups", "None reads from this commit log.", "", wide=True)
    rows = []
    groups = sorted(now.groups, key=lambda group: (-group["lag"], group["consumer_group"]))
    for group in groups[:GROUPS_MAX]:
        name = group["consumer_group"]
        own = [queue for queue in now.queues if queue["lag"] and queue["consumer_group"] == name]
        own.sort(key=lambda queue: -queue["lag"])
        rows.append((name, "all queues", group["lag"], group["lag_seconds"]))
        rows += [
            (name, f"{queue['topic']} queue {queue['queue_id']}", queue["lag"], queue["lag_seconds"])
            for queue in own[:QUEUES_MAX]
        ]
        if (more := len(own) - QUEUES_MAX) > 0:
            rows.append((name, f"{count_of(more, 'more queue')}", sum(q["lag"] for q in own[QUEUES_MAX:]), None))
    columns = [
        Column("group", lambda row: row[0]),
        Column("queue", lambda row: row[1]),
        Column("behind", lambda row: f"{row[2]:,}", "number"),
        Column("for", lambda row: "" if row[3] is None else duration(row[3]), "number"),
    ]
    hint = (
        f"Messages that a group has not read, and for how long the oldest has waited: txmq group list {typed}".strip()
    )
    content = listed(rows, columns, len(rows) + max(0, len(groups) - GROUPS_MAX))
    return framed("Consumer groups", hint, content, wide=True)


def _appeared(figures: Figures, span: str, typed: str, has_links: bool) -> str:
    topics = figures.now.topics
    appeared = {row["topic"]: row for row in figures.appeared.to_pylist()}
    rows = [*appeared.values(), *({"topic": name, "messages": 0, "last": None} for name in topics.keys() - appeared)]
    columns = [
        Column("topic", lambda row: row["topic"], "", lambda row: find_address(row["topic"]) if has_links else None),
        Column(f"in {span}", lambda row: f"{row['messages']:,}", "number"),
        Column("ever", lambda row: number_or_dash(topics[row["topic"]]["committed"]), "number"),
        Column("last (UTC)", lambda row: "" if row["last"] is None else f"{row['last']:%d %b %H:%M:%S}", "word"),
    ]
    rows.sort(key=lambda row: (-row["messages"], row["topic"]))
    if not rows:
        return framed("What appeared", "There is no topic yet.", "", wide=True)
    hint = "Messages that readers can see, by topic."
    content = listed(rows[:ROWS_MAX], columns, len(rows), f"txmq topics {typed}")
    return framed("What appeared", hint, folded("appeared", rows, content, count_of(len(rows), "topic")), wide=True)


# ---------------------------------------------------------------- a half batch
def half_batch(
    trace: Trace,
    transactions: Sequence[Mapping[str, Any]],
    advice: Sequence[str],
    now: datetime,
    *,
    has_links: bool = True,
) -> str:
    """Return the main part of a half batch's page.

    Parameters
    ----------
    transactions : sequence of mapping
        ``transaction_id, state, reason, messages, keys``, of which the keys are a list.
    advice : sequence of str
        What a person can do next, a sentence each.
    has_links : bool
        Whether there are pages of other half batches.
    """
    waits = "".join(
        f"<li>waits for {link(half_address(half_id), half_id) if has_links else escape(half_id)}</li>"
        for half_id in trace.waits_for[:NAMES_MAX]
    )
    unknown = "".join(f"<li>not known: {escape(sentence)}</li>" for sentence in trace.unknown)
    more = f'<ul class="later">{waits}{unknown}</ul>' if waits or unknown else ""
    name = trace.transaction_id or trace.message_id or trace.half_id
    cards = [
        f'<h2 class="id">{escape(name)}</h2>{_facts(trace, now)}{more}',
        framed("What to do", "", "".join(f'<p class="do">{commands(line)}</p>' for line in advice), wide=True)
        if advice
        else "",
        _two_verdicts(trace) if trace.in_conflict else "",
        framed("From the prepare on", "Each step ends so long after the prepare.", waterfall(trace, now), wide=True),
        _transactions(trace, transactions) if transactions else "",
    ]
    return f'<div class="grid one">{"".join(cards)}</div>'


def _facts(trace: Trace, now: datetime) -> str:
    states = [
        f'<b class="{STATES.get(state, "")}">{count:,} {escape(state.replace("_", " "))}</b>'
        for state, count in trace.outcome.items()
    ]
    if trace.in_conflict:
        states.append('<b class="critical">in conflict</b>')
    at = trace.prepared_at
    age = "" if at is None else duration(max(0.0, (now - at).total_seconds()))
    facts = [
        None if at is None else f"prepared {at:%Y-%m-%d %H:%M:%S} UTC ({age} ago)",
        trace.topics and f"topic{'s' * (len(trace.topics) > 1)} {first_of(trace.topics)}",
        f"producer group {trace.producer_group or 'unknown'}",
        trace.attempt and f"attempt {trace.attempt}",
    ]
    outcome = ", ".join(states) or "what became of them is not known"
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f'<p class="states">{count_of(trace.messages, "message")}: {outcome} <span>· {line}</span></p>'


def _two_verdicts(trace: Trace) -> str:
    columns = [
        Column("", lambda row: row[0]),
        Column("verdict", lambda row: row[1]),
        Column("by", lambda row: row[2].decided_by or ""),
        Column("when (UTC)", lambda row: f"{row[2].at:%Y-%m-%d %H:%M:%S}"),
        Column("messages", lambda row: f"{row[2].messages:,}", "number"),
        Column("reason", lambda row: reason_of(row[2]), "text"),
    ]
    words = {TraceKind.COMMITTED: "COMMIT", TraceKind.ROLLED_BACK: "ROLLBACK"}
    rows = [("counts", words[event.kind], event) for event in trace.events if event.kind in words]
    late = late_verdicts(trace)
    rows += [("too late", (event.verdict or "").removesuffix("_MESSAGE"), event) for event in late]
    count = count_of(sum(event.messages for event in late), "message")
    if {event.verdict for event in late} == {str(ROLLBACK_MESSAGE)}:
        decide = "Readers may have seen the messages: only COMMIT is possible."
    else:
        decide = (
            f"Decide COMMIT when the local transaction happened (readers will see {count}, for good), and ROLLBACK "
            "when it did not."
        )
    hint = f"They contradict each other. The first one counts until a person decides. {decide}"
    return framed("Two verdicts", hint, listed(rows[:ROWS_MAX], columns, len(rows)), wide=True)


def _transactions(trace: Trace, transactions: Sequence[Mapping[str, Any]]) -> str:
    looked_at = sum(row["messages"] for row in transactions)
    columns = [
        Column("transaction", lambda row: row["transaction_id"].removeprefix(f"{trace.half_id}:"), "id"),
        Column("keys", lambda row: first_of(row["keys"], KEYS_MAX), "text"),
        Column("messages" if looked_at == trace.messages else "messages read", lambda row: f"{row['messages']:,}",
               "number"),
        Column("state", lambda row: row["state"].replace("_", " ")),
        Column("reason", lambda row: row["reason"] or "", "text"),
    ]  # fmt: skip
    hint = "Those that are not visible come first. An id begins with the half id, which is left out."
    if looked_at < trace.messages:
        hint += f" These are of {count_of(looked_at, 'message')}; {trace.messages - looked_at:,} more are not read."
    content = listed(transactions[:ROWS_MAX], columns, len(transactions))
    return framed("Its transactions", hint, content, wide=True)
