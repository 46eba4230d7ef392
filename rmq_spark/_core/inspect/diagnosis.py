"""The diagnosis of a commit log, for the doctor, the live page and the report: what is wrong, and what to do."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSelector, LocalFileSystem

from rmq_spark._core.inspect.finding import Finding, Level
from rmq_spark._core.inspect.limits import (
    FILES_MAX,
    LAG_S_MAX,
    PENDING_S_CRITICAL,
    PENDING_S_MAX,
    SILENT_INTERVALS,
    UNDRAINED_S_MAX,
)
from rmq_spark._core.inspect.standing import Standing
from rmq_spark._core.listeners.transaction_listener import NO_LISTENER_FENCE
from rmq_spark._core.log.group_table import SPARK, kind_of
from rmq_spark._core.storage.foreign_commits import foreign_change
from rmq_spark._core.vocabulary.options import TRANSACTION_CHECK_INTERVAL_S
from rmq_spark._core.vocabulary.redaction import one_line, redacted, sentence_of
from rmq_spark._core.vocabulary.text import byte_size, count_of, duration
from rmq_spark.errors import ForeignChangeError, HalfBatchLeftError

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table

NAMED = 3
PUT_BACK = "docs/backup.md says how to put files back"


def check_once(typed: str) -> str:
    """Return the command for a round of checks. It needs the check job's configuration: a sentence must say so."""
    file = os.environ.get("TXMQ_CONFIG") or "txmq.toml"
    return f"txmq check {typed}--config {shlex.quote(one_line(file))} --once"


class Diagnosis:
    """Judges how a commit log stands.

    Parameters
    ----------
    standing : Standing
    typed : str, optional
        The log's path and a space, for commands in remedies; empty when the configuration names the log. By default
        the log's own path.
    check_interval_s : float
        Seconds between two rounds of the checker.
    answered : collection of str or None
        Producer groups with a listener in the configuration or elsewhere; None without a configuration.
    said : callable
        Says an error on one line, without secrets.
    """

    def __init__(
        self,
        standing: Standing,
        typed: str | None = None,
        check_interval_s: float = TRANSACTION_CHECK_INTERVAL_S,
        answered: Sequence[str] | None = None,
        said: Callable[[Exception], str] = sentence_of,
    ) -> None:
        self._standing, self._engine, self._now = standing, standing.engine, standing.at
        self.typed = f"{shlex.quote(one_line(redacted(self._engine.path)))} " if typed is None else typed
        self._interval_s, self._answered, self._said = check_interval_s, answered, said

    def findings(self, *, tables: bool = True) -> Iterator[Finding]:
        """Yield findings, also of what is well. A check that fails becomes a finding, and the other checks still run.
        Without ``tables`` it is not looked whether each file is there."""
        checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
            ("tables", self._tables),
            ("conflicts", self._conflicts),
            ("pending", self._pending),
            ("delayed", self._delayed),
            ("quarantined", self._quarantined),
            ("files", self._files),
            ("groups", self._groups),
            ("drain", self._drain),
            ("dead letters", self._dead_letters),
        )
        for name, check in checks if tables else checks[1:]:
            try:
                yield from check()
            except ForeignChangeError:  # the check "tables" reports it
                continue
            except Exception as problem:
                yield Finding(name, Level.CRITICAL, self._said(problem))

    def problems(self, most: int, *, tables: bool = True) -> list[Finding]:
        """Return at most so many findings of what is not well, the worst first, and how many more there are."""
        order = list(Level)
        found = [finding for finding in self.findings(tables=tables) if finding.level is not Level.OK]
        found.sort(key=lambda finding: -order.index(finding.level))
        if (more := len(found) - most) > 0:
            found[most:] = [Finding("doctor", Level.NOTE, count_of(more, "more finding"), self.command("doctor"))]
        return found

    def command(self, verb: str, *rest: str) -> str:
        """Return a command that can be copied."""
        return f"txmq {verb} {self.typed}{shlex.join(map(one_line, rest))}".rstrip()

    def _story(self, half_id: str) -> str:
        return f"{self.command('trace', half_id)} (ends with the commands that settle it)"

    # ------------------------------------------------------------------ the tables
    def _tables(self) -> Iterator[Finding]:
        engine = self._engine
        tables = engine.tables()
        if changes := [change for table in tables if (change := _change_by_others(table)) is not None]:
            for change in changes:
                yield Finding(
                    "tables", Level.CRITICAL, change, "docs/maintenance.md#when-another-writer-changed-a-table"
                )
            return
        versions = ", ".join(f"{table.name} {table.version}" for table in tables)
        has_problem = False
        odd_rows = engine.drained.odd_rows()
        if odd_rows is not None:
            has_problem = True
            yield Finding("tables", Level.CRITICAL, odd_rows, "docs/backup.md says how to restore it")
        lost = [f"{table.name}/{file}" for table in tables for file in _lost_files(table)]
        if lost:
            has_problem = True
            what = f"{count_of(len(lost), 'file')} of the tables gone, cut or unreadable: {_some(lost)}"
            yield Finding("tables", Level.CRITICAL, what, PUT_BACK)
        if not has_problem:
            yield Finding("tables", Level.OK, f"all files are there, and agree; at versions {versions}")

    def _files(self) -> Iterator[Finding]:
        half, op = (self._standing.tables[name].files for name in ("half", "op"))
        what = f"{half:,} live files in half, {op:,} in op"
        if max(half, op) > FILES_MAX:
            yield Finding(
                "files", Level.WARNING, f"{what}: upkeep is behind, or does not run", self.command("maintain")
            )
        else:
            yield Finding("files", Level.OK, what)

    def _drain(self) -> Iterator[Finding]:
        waiting = self._standing.undrained
        if not waiting.messages:
            yield Finding("drain", Level.OK, "every committed message is in the table messages")
            return
        amount = f"{count_of(waiting.messages, 'message')} ({byte_size(waiting.bytes)})"
        what = f"{amount} committed and not in the table messages yet, the oldest for {duration(waiting.seconds)}"
        if waiting.seconds > UNDRAINED_S_MAX:
            yield Finding("drain", Level.WARNING, f"{what}: nobody drains", self.command("maintain"))
        else:
            yield Finding("drain", Level.OK, what)

    # ------------------------------------------------------------------ transactions
    def _pending(self) -> Iterator[Finding]:
        rows = self._standing.pending
        if not rows:
            yield Finding("pending", Level.OK, "nothing is pending")
            yield Finding("checker", Level.OK, "nothing waits for a check")
            return
        looked_at = [row for row in rows if row["leased"] is not None]
        unreadable = [row["half_id"] for row in looked_at if row["producer_group"] is None]
        named = [half_id for half_id in unreadable if half_id is not None]
        if named:
            what = f"{count_of(len(named), 'pending half batch')} cannot be read, so nobody can settle it"
            yield Finding("unreadable", Level.CRITICAL, f"{what}: {_some(list(map(one_line, named)))}", PUT_BACK)
        if shared := len(unreadable) - len(named):
            what = f"{count_of(shared, 'file')} that half batches share cannot be read, so nobody can settle these"
            yield Finding("unreadable", Level.CRITICAL, what, PUT_BACK)
        known = [row for row in looked_at if row["producer_group"] is not None]
        if not known:
            return
        waiting = [row for row in known if not row["leased"]]
        age_s = max((row["age_seconds"] for row in waiting), default=0.0)
        level = Level.CRITICAL if age_s > PENDING_S_CRITICAL else Level.WARNING if age_s > PENDING_S_MAX else Level.OK
        oldest = max(known if level is Level.OK else waiting, key=lambda row: float(row["age_seconds"]))
        what = (
            f"{count_of(self._standing.pending_batches - len(unreadable), 'half batch')} pending, the oldest for "
            f"{duration(oldest['age_seconds'])} ({one_line(oldest['half_id'])} of {oldest['producer_group']}, "
            f"{count_of(oldest['check_times'], 'check')})"
        )
        yield Finding("pending", level, what, None if level is Level.OK else self.command("trace", oldest["half_id"]))
        silent_s = SILENT_INTERVALS * self._interval_s
        yield from self._checker([row for row in waiting if row["age_seconds"] > silent_s])
        yield from self._listeners(known)

    def _checker(self, overdue: Sequence[dict[str, Any]]) -> Iterator[Finding]:
        if not overdue:
            yield Finding("checker", Level.OK, "nothing waits for long")
            return
        newest = self._standing.last_check(sorted({row["half_id"] for row in overdue}))
        limit = self._now - timedelta(seconds=SILENT_INTERVALS * self._interval_s)
        if newest is not None and newest > limit:
            age = duration((self._now - newest).total_seconds())
            yield Finding("checker", Level.OK, f"its last word on what is overdue is {age} old")
            return
        since = "" if newest is None else f" for {duration((self._now - newest).total_seconds())}"
        yield Finding(
            "checker",
            Level.CRITICAL,
            f"{count_of(len(overdue), 'half batch')} should have been checked, and no checker has said a word on that"
            f"{since} (it is due every {self._interval_s:g} s): it does not run, or has no listener for the group, or "
            "its listener fails",
            f"{check_once(self.typed)} (where the check job's txmq.toml is; its output says why), then see that the "
            f"check job runs; when nobody can answer, {self._story(overdue[0]['half_id'])}",
        )

    def _listeners(self, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
        if self._answered is None:
            return
        groups = set()
        for row in rows:
            with suppress(HalfBatchLeftError):
                # Plain sending needs no listener.
                if self._engine.get(row["half_id"]).header.fence_id != NO_LISTENER_FENCE:
                    groups.add(row["producer_group"])
        missing = sorted(groups - set(self._answered))
        if missing:
            yield Finding(
                "listeners",
                Level.WARNING,
                f"no listener in the configuration for pending half batches of {', '.join(missing[:NAMED])}",
                f"name one under [listeners], or write elsewhere = {json.dumps(missing[:NAMED])} when another does",
            )

    def _delayed(self) -> Iterator[Finding]:
        limit = self._now - timedelta(seconds=SILENT_INTERVALS * self._interval_s)
        late = sum(count for due, count in self._standing.delayed.items() if due < limit)
        if late:
            yield Finding(
                "delayed",
                Level.CRITICAL,
                f"{count_of(late, 'delayed message')} should have appeared by now: no checker and no sender runs",
                f"{check_once(self.typed)} (where the check job's txmq.toml is), then see that the check job runs",
            )

    def _quarantined(self) -> Iterator[Finding]:
        rows = self._standing.quarantined
        if not rows:
            yield Finding("quarantined", Level.OK, "nothing is quarantined")
            return
        half_ids = _some([one_line(row["half_id"]) for row in rows])
        what = f"{count_of(len(rows), 'half batch')} quarantined, and hidden: {half_ids}"
        answers = self._standing.last_answers([rows[0]["half_id"]])
        if answers:
            ((_, answer),) = answers.values()
            what += f" (the last check{' of the first' if len(rows) > 1 else ''}: {one_line(answer)})"
        resumed = rows[0]["half_id"] if len({row["half_id"] for row in rows}) == 1 else "all"
        remedy = f"{self.command('resume', resumed)} (asks again); or {self._story(rows[0]['half_id'])}"
        yield Finding("quarantined", Level.WARNING, what, remedy)

    def _conflicts(self) -> Iterator[Finding]:
        rows = self._standing.conflicts
        if not rows:
            yield Finding("conflicts", Level.OK, "there are no conflicts")
            return
        half_ids = _some([one_line(row["half_id"]) for row in rows])
        what = f"{count_of(len(rows), 'half batch')} with two verdicts that contradict each other: {half_ids}"
        yield Finding("conflicts", Level.CRITICAL, what, self._story(rows[0]["half_id"]))

    # ------------------------------------------------------------------ consumers
    def _groups(self) -> Iterator[Finding]:
        groups = self._standing.groups
        if not groups:
            yield Finding("groups", Level.OK, "no consumer group has read yet")
            return
        has_problem = False
        for name, beats in self._standing.members.items():
            queues = [row for row in self._standing.queues if row["consumer_group"] == name and row["lag"]]
            owners = [row["owner"] for row in queues if row["owner"]]
            dead = [owner for owner in owners if owner not in beats or not beats[owner].is_alive]
            if dead:
                has_problem = True
                beat = beats.get(dead[0])
                heartbeat = "it has no heartbeat"
                if beat is not None:
                    heartbeat = f"its heartbeat is {duration(beat.age_s)} old, its lease {duration(beat.lease_s)}"
                what = f"{name}: {count_of(len(dead), 'queue')} with messages, owned by a dead member ({dead[0]}: "
                what += f"{heartbeat}): no member lives that could take them"
                yield Finding("groups", Level.WARNING, what, self._start_member(name))
        for row in groups:
            if row["lag_seconds"] > LAG_S_MAX:
                has_problem = True
                what = f"{row['consumer_group']}: {count_of(row['lag'], 'message')} behind, the oldest committed "
                what += f"{duration(row['lag_seconds'])} ago{self._last_move(row['consumer_group'])}"
                remedy = self.command("group lag", row["consumer_group"])
                if not row["members"] and self._kind_of(row["consumer_group"]) != SPARK:
                    what += ", and no member lives"
                    remedy = self._start_member(row["consumer_group"])
                yield Finding("groups", Level.WARNING, what, remedy)
        if not has_problem:
            furthest = max(groups, key=lambda row: int(row["lag"]))
            lag = f"{count_of(furthest['lag'], 'message')}, {duration(furthest['lag_seconds'])}"
            what = f"{count_of(len(groups), 'group')}; furthest behind {furthest['consumer_group']}: {lag}"
            yield Finding("groups", Level.OK, what)

    def _last_move(self, group: str) -> str:
        """Return when a group's position last moved, and who moved it, as the end of a sentence."""
        rows = [row for row in self._standing.queues if row["consumer_group"] == group and row["updated"]]
        if not rows:
            return ""
        last = max(rows, key=lambda row: row["updated"])
        age = duration((self._now - last["updated"]).total_seconds())
        return f", last moved {age} ago ({one_line(str(last['updated_by']))})"

    def _kind_of(self, group: str) -> str | None:
        return kind_of(self._engine.groups.positions(group).values()) if self._engine.has_groups() else None

    def _start_member(self, group: str) -> str:
        return (
            f"start a member of {one_line(group)} (it takes over when the lease of a dead one is over); "
            f"{self.command('group members', group)} (who read for it)"
        )

    def _dead_letters(self) -> Iterator[Finding]:
        for group, letters in self._standing.dead_letters.items():
            if letters.waiting:
                what = f"{group}: {count_of(letters.kept, 'dead letter')}"
                what += "" if letters.waiting == letters.kept else f", {letters.waiting:,} of them not sent again"
                remedy = f"{self.command('dlq list', group)} (says why); when the cause is gone, "
                yield Finding("dead letters", Level.NOTE, what, remedy + self.command("dlq resend", group, "--all"))


def _change_by_others(table: Table) -> str | None:
    """Return what another writer did to a table, if anything."""
    try:
        table.refresh()
    except ForeignChangeError as problem:
        return str(problem)
    return foreign_change(table)


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _lost_files(table: Table) -> list[str]:
    """Return live files that are gone, cannot be read, or have another size than their table says."""

    def live() -> dict[str, int]:
        table.refresh()
        actions = table.actions()
        return dict(zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True))

    # The table is read before the folder, so that a file written in between does not count as lost.
    sizes = live()
    infos = {info.base_name: info for info in table.fs.get_file_info(FileSelector(table.folder))}

    def is_lost(path: str) -> bool:
        info = infos.get(path)
        if info is None or info.size != sizes[path]:
            return True
        return isinstance(table.fs, LocalFileSystem) and not os.access(info.path, os.R_OK)

    # A path with a slash or an escape belongs to a file of another program, outside this folder.
    lost = [path for path in sizes if not re.search("[/%]", path) and is_lost(path)]
    return sorted(set(lost) & live().keys()) if lost else []
