"""The headline of a report: one sentence about the commit log's health, and the action to take."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pyarrow.compute as pc

from rmq_spark._core.report.finding import Finding, Level
from rmq_spark._core.report.limits import LAG_S_MAX, PENDING_S_CRITICAL, PENDING_S_MAX, UNDRAINED_S_MAX
from rmq_spark._core.report.report_figures import Figures
from rmq_spark._core.report.units import are, have
from rmq_spark._core.vocabulary.redaction import one_line, redacted
from rmq_spark._core.vocabulary.text import count_of, duration


def findings_of(figures: Figures) -> list[Finding]:
    """Return the findings, the most urgent first. The first is the headline; there is at least one."""
    problems = [*_actions(figures), *_warnings(figures)]
    return problems or [_all_is_well(figures)]


def _command(figures: Figures, verb: str, *rest: str) -> str:
    """Return a command that can be copied."""
    return f"txmq {verb} {shlex.join(one_line(word) for word in (redacted(figures.path), *rest))}"


def _actions(figures: Figures) -> Iterator[Finding]:
    if count := len(figures.conflicts):
        yield Finding(
            "conflicts",
            Level.CRITICAL,
            f"{count_of(count, 'half batch').capitalize()} {have(count)} two verdicts that contradict each other.",
            f"Find out which verdict is true: {_command(figures, 'trace', figures.conflicts[0])} (ends with the "
            "commands that settle it)",
        )
    yield from _old_pending(figures)
    if count := len(figures.quarantined):
        yield Finding(
            "quarantined",
            Level.WARNING,
            f"{count_of(count, 'half batch').capitalize()} {are(count)} quarantined: checks gave up, and nobody sees "
            "the messages.",
            f"Let checks go on: {_command(figures, 'resume', figures.quarantined[0])}; or decide: "
            f"{_command(figures, 'trace', figures.quarantined[0])} (ends with the commands for that)",
        )


def _old_pending(figures: Figures) -> Iterator[Finding]:
    old = figures.pending.filter(pc.greater(figures.pending["seconds"], PENDING_S_MAX))
    old = old.filter(pc.invert(old["leased"]))
    if old.num_rows == 0:
        return
    oldest = old.slice(0, 1).to_pylist()[0]
    check_times = oldest["check_times"]
    sentence = f"A half batch of {oldest['producer_group']} has been pending for {duration(oldest['seconds'])}"
    if check_times:
        times = "once" if check_times == 1 else f"{check_times} times"
        yield Finding(
            "pending",
            Level.CRITICAL if oldest["seconds"] > PENDING_S_CRITICAL else Level.WARNING,
            f"{sentence}: it was asked about {times}, and its listener does not know.",
            f"Find out why its listener answers UNKNOWN, or decide: {_command(figures, 'trace', oldest['half_id'])} "
            "(ends with the commands for that)",
        )
    else:
        yield Finding(
            "pending",
            Level.CRITICAL,
            f"{sentence}, and no check has asked about it (or none since it was resumed).",
            f"See that a check job runs which has a listener for {oldest['producer_group']}: "
            f"{_command(figures, 'check', '--once')} (one round, which says what is wrong)",
        )


def _warnings(figures: Figures) -> Iterator[Finding]:
    if (count := figures.dead_letters) and (waiting := figures.dead_letters_waiting):
        kept_letters = "1 of those that are kept was" if waiting == 1 else f"{waiting:,} of those that are kept were"
        yield Finding(
            "dead letters",
            Level.WARNING,
            ("1 message became a dead letter" if count == 1 else f"{count:,} messages became dead letters")
            + f" in this time; {kept_letters} not sent again.",
            f"Look at them: {_command(figures, 'dlq list', figures.dead_letters_group)}; send them again when the "
            f"cause is gone: {_command(figures, 'dlq resend', figures.dead_letters_group, '--all')}",
        )
    slowest = figures.lag.sort_by([("seconds", "descending")]).slice(0, 1).to_pylist()
    if slowest and slowest[0]["seconds"] > LAG_S_MAX:
        group = slowest[0]
        yield Finding(
            "lag",
            Level.WARNING,
            f"Consumer group {group['group']} is behind by {count_of(group['messages'], 'message')}, the oldest of "
            f"them committed {duration(group['seconds'])} ago.",
            f"See that its consumers run and keep up, queue by queue: {_command(figures, 'group lag', group['group'])}",
        )
    if figures.undrained_s > UNDRAINED_S_MAX:
        yield Finding(
            "drain",
            Level.WARNING,
            f"Messages have been committed for {duration(figures.undrained_s)} and are not in the table messages yet.",
            f"See that upkeep runs: the check job does it, or {_command(figures, 'maintain', '--every', '60s')}",
        )


def _all_is_well(figures: Figures) -> Finding:
    if not figures.topics.num_rows:
        return Finding(
            "log",
            Level.OK,
            "This commit log is new: it has no topic yet.",
            f"Make one: {_command(figures, 'topic create', 'NAME')}",
        )
    if figures.is_empty:
        return Finding("log", Level.OK, "Nothing was sent in this time, and nothing is pending.")
    if figures.pending_messages:
        pending = (
            f"{count_of(figures.pending_messages, 'message')} {are(figures.pending_messages)} pending, none for long"
        )
    else:
        pending = "nothing is pending"
    return Finding(
        "log",
        Level.OK,
        f"All is well: {count_of(figures.committed, 'message')} appeared, {pending}, and nothing waits for a person.",
    )
