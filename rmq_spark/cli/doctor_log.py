"""Checks of ``txmq doctor`` on a commit log: its store, its tables, and stuck messages."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
from pyarrow.fs import FileSelector, LocalFileSystem

from rmq_spark._core.consumers.dead_letters import kept_letters
from rmq_spark._core.listeners.transaction_listener import NO_LISTENER_FENCE
from rmq_spark._core.report.limits import (
    FILES_MAX,
    LAG_S_MAX,
    PENDING_S_CRITICAL,
    PENDING_S_MAX,
    SILENT_INTERVALS,
    UNDRAINED_S_MAX,
)
from rmq_spark._core.storage.foreign_commits import foreign_change
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.store_errors import is_denied
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.command import sentence_of
from rmq_spark.cli.groups import group_rows
from rmq_spark.cli.text import one_line, short_age, size
from rmq_spark.cli.verdicts import conflict_rows, open_rows
from rmq_spark.consumers import DeadLetters
from rmq_spark.errors import ForeignChangeError, HalfBatchLeftError
from rmq_spark.report import Finding, Level

if TYPE_CHECKING:
    from rmq_spark._core.storage.table import Table
    from rmq_spark.log import CommitLog

SKEW_S = 5.0
NAMED = 3
OF_THE_STORE = ("permissions", "store", "clock")
"""Checks that try out what this user may write, and what the store then does."""
PUT_BACK = "docs/backup.md says how to put files back"


class LogDoctor:
    """Checks one commit log.

    Parameters
    ----------
    log : CommitLog
    typed : str
        The log's path and a space, for commands in remedies; empty when the configuration names the log.
    check_interval : float
        Seconds between two rounds of the checker.
    answered : collection of str or None
        Producer groups with a listener in the configuration or elsewhere; None without a configuration.
    """

    def __init__(
        self, log: CommitLog, typed: str, check_interval: float, answered: Sequence[str] | None = None
    ) -> None:
        self._log, self._engine = log, log.engine
        self._typed = typed
        self._interval = check_interval
        self._answered = answered
        self._now = self._engine.runtime.now()

    def look(self, *, only_read: bool = False) -> Iterator[Finding]:
        """Yield findings. A check that fails becomes a finding, and the other checks still run. With ``only_read``
        nothing is tried out at the store."""
        checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
            ("permissions", self._permissions),
            ("store", self._store),
            ("clock", self._clock),
            ("tables", self._tables),
            ("pending", self._pending),
            ("delayed", self._delayed),
            ("quarantined", self._quarantined),
            ("conflicts", self._conflicts),
            ("files", self._files),
            ("drain", self._drain),
            ("groups", self._groups),
            ("dead letters", self._dead_letters),
        )
        for name, check in checks:
            if only_read and name in OF_THE_STORE:
                continue
            try:
                yield from check()
            except ForeignChangeError:  # the check "tables" reports it
                continue
            except Exception as problem:
                yield self._failed(name, problem)

    @staticmethod
    def _failed(name: str, problem: Exception) -> Finding:
        if name in ("store", "clock") and (is_denied(problem) or "permission denied" in str(problem)):
            what = f"this user may not write to the store: enough for a reader ({sentence_of(problem)})"
            return Finding(name, Level.WARNING, what, "give a sender or a checker the right to write")
        return Finding(name, Level.CRITICAL, sentence_of(problem))

    def _command(self, verb: str, *rest: str) -> str:
        return f"txmq {verb} {self._typed}{shlex.join(map(one_line, rest))}".rstrip()

    def _story(self, half_id: str) -> str:
        return f"{self._command('trace', half_id)} (ends with the commands that settle it)"

    # ------------------------------------------------------------------ the store
    def _permissions(self) -> Iterator[Finding]:
        if is_uri(self._log.path):
            return
        tables = [name for name in ("half", "op", "topics", "messages", "groups")
                  if os.path.isdir(f"{self._log.path}/{name}")]  # fmt: skip
        folders = [f"{self._log.path}/{name}{sub}" for name in tables for sub in ("", "/_delta_log")]
        for right, word, level in (
            (os.R_OK | os.X_OK, "read", Level.CRITICAL),
            (os.W_OK, "write to", Level.WARNING),
        ):
            denied = [folder for folder in folders if not os.access(folder, right)]
            if denied:
                yield Finding(
                    "permissions",
                    level,
                    f"this user cannot {word} {', '.join(denied[:NAMED])}"
                    + (": enough for a reader, not for a sender or a checker" if word != "read" else ""),
                    f"chmod u+rwX -R {shlex.quote(self._log.path)} (as its owner), or run as the user who owns it",
                )
                return
        yield Finding("permissions", Level.OK, f"all {len(folders)} folders can be read and written")

    def _store(self) -> Iterator[Finding]:
        from rmq_spark._core.storage.stores import reaching, require_put_if_absent

        options = self._log.storage_options or None
        started = self._engine.runtime.monotonic()
        with reaching(self._log.path, options):
            require_put_if_absent(self._log.path, options)
        took_ms = (self._engine.runtime.monotonic() - started) * 1000
        yield Finding("store", Level.OK, f"put-if-absent and lists were tried, and hold ({took_ms:.0f} ms)")

    def _clock(self) -> Iterator[Finding]:
        from rmq_spark._core.storage.clock import StoreClock

        table = self._engine.half.table
        before = self._engine.runtime.time()
        stored = StoreClock(table.fs, table.folder, table.runtime).stored_at()
        after = self._engine.runtime.time()
        ahead_s = before - stored if stored < before else min(0.0, after - stored)
        skew = abs(ahead_s)
        if skew <= SKEW_S:
            yield Finding("clock", Level.OK, f"agrees with the store's within {max(skew, after - before):.1f} s")
            return
        level = Level.CRITICAL if skew > CLOCK_SKEW_S_MAX else Level.WARNING
        direction = "ahead of" if ahead_s > 0 else "behind"
        limit = f"commits are refused from {CLOCK_SKEW_S_MAX:.0f} s on"
        what = f"this machine's clock is {skew:.0f} s {direction} the store's; {limit}"
        yield Finding("clock", level, what, "timedatectl set-ntp true (or set this machine's clock otherwise)")

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
        engine = self._engine
        half, op = (table.actions().num_rows for table in (engine.half.table, engine.op_table))
        what = f"{half:,} live files in half, {op:,} in op"
        if max(half, op) > FILES_MAX:
            yield Finding(
                "files", Level.WARNING, f"{what}: upkeep is behind, or does not run", self._command("maintain")
            )
        else:
            yield Finding("files", Level.OK, what)

    def _drain(self) -> Iterator[Finding]:
        from rmq_spark._core.inspect.undrained import Undrained

        undrained = Undrained(self._engine.another_on_the_same_log())
        waiting = undrained.look()
        if not waiting.messages:
            yield Finding("drain", Level.OK, "every committed message is in the table messages")
            return
        age_s = undrained.seconds()
        amount = f"{count_of(waiting.messages, 'message')} ({size(waiting.bytes)})"
        what = f"{amount} committed and not in the table messages yet, the oldest for {short_age(age_s)}"
        if age_s > UNDRAINED_S_MAX:
            yield Finding("drain", Level.WARNING, f"{what}: nobody drains", self._command("maintain"))
        else:
            yield Finding("drain", Level.OK, what)

    # ------------------------------------------------------------------ transactions
    def _pending(self) -> Iterator[Finding]:
        rows = open_rows(self._log, self._log.pending(), None)
        if not rows:
            yield Finding("pending", Level.OK, "nothing is pending")
            yield Finding("checker", Level.OK, "nothing waits for a check")
            return
        unreadable = [row["half_id"] for row in rows if row["producer_group"] is None]
        named = [half_id for half_id in unreadable if half_id is not None]
        if named:
            what = f"{count_of(len(named), 'pending half batch')} cannot be read, so nobody can settle it"
            yield Finding("unreadable", Level.CRITICAL, f"{what}: {_some(list(map(one_line, named)))}", PUT_BACK)
        if shared := len(unreadable) - len(named):
            what = f"{count_of(shared, 'file')} that half batches share cannot be read, so nobody can settle these"
            yield Finding("unreadable", Level.CRITICAL, what, PUT_BACK)
        if unreadable:
            rows = [row for row in rows if row["producer_group"] is not None]
            if not rows:
                return
        oldest = max(rows, key=lambda row: float(row["age_seconds"]))
        count = len({row["half_id"] for row in rows})
        what = (
            f"{count_of(count, 'half batch')} pending, the oldest for {short_age(oldest['age_seconds'])} "
            f"({one_line(oldest['half_id'])} of {oldest['producer_group']}, {count_of(oldest['check_times'], 'check')})"
        )
        waiting = [row for row in rows if not self._is_leased(row)]
        age_s = max((row["age_seconds"] for row in waiting), default=0.0)
        level = Level.CRITICAL if age_s > PENDING_S_CRITICAL else Level.WARNING if age_s > PENDING_S_MAX else Level.OK
        remedy = None if level is Level.OK else self._command("trace", oldest["half_id"])
        yield Finding("pending", level, what, remedy)
        silent_s = SILENT_INTERVALS * self._interval
        yield from self._checker([row for row in waiting if row["age_seconds"] > silent_s])
        yield from self._listeners(rows)

    def _is_leased(self, row: dict[str, Any]) -> bool:
        return row["lease_until"] is not None and row["lease_until"] > self._now

    def _checker(self, overdue: Sequence[dict[str, Any]]) -> Iterator[Finding]:
        if not overdue:
            yield Finding("checker", Level.OK, "nothing waits for long")
            return
        op_rows = self._engine.ledger.scan(sorted({row["half_id"] for row in overdue}))
        newest = pc.max(op_rows.filter(pc.equal(op_rows["decided_by"], "check"))["op_time"]).as_py()
        limit = self._now - timedelta(seconds=SILENT_INTERVALS * self._interval)
        if newest is not None and newest > limit:
            age = short_age((self._now - newest).total_seconds())
            yield Finding("checker", Level.OK, f"its last word on what is overdue is {age} old")
            return
        since = "" if newest is None else f" for {short_age((self._now - newest).total_seconds())}"
        yield Finding(
            "checker",
            Level.CRITICAL,
            f"{count_of(len(overdue), 'half batch')} should have been checked, and no checker has said a word on that"
            f"{since} (it is due every {self._interval:g} s): it does not run, or has no listener for the group, or "
            "its listener fails",
            f"{self._command('check', '--once')} (its output says why), then see that the check job runs; when nobody "
            f"can answer, {self._story(overdue[0]['half_id'])}",
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
        limit = self._now - timedelta(seconds=SILENT_INTERVALS * self._interval)
        self._log.refresh()
        late = sum(
            count
            for counts in self._engine.ledger.view.waiting.values()
            for due, count in counts.items()
            if due is not None and due < limit
        )
        if late:
            yield Finding(
                "delayed",
                Level.CRITICAL,
                f"{count_of(late, 'delayed message')} should have appeared by now: no checker and no sender runs",
                self._command("check", "--once"),
            )

    def _quarantined(self) -> Iterator[Finding]:
        rows = open_rows(self._log, self._log.quarantined(), None)
        if not rows:
            yield Finding("quarantined", Level.OK, "nothing is quarantined")
            return
        half_ids = _some([one_line(row["half_id"]) for row in rows])
        what = f"{count_of(len(rows), 'half batch')} quarantined, and hidden: {half_ids}"
        remedy = f"{self._command('resume', rows[0]['half_id'])} (asks again); or {self._story(rows[0]['half_id'])}"
        yield Finding("quarantined", Level.WARNING, what, remedy)

    def _conflicts(self) -> Iterator[Finding]:
        rows = conflict_rows(self._log)
        if not rows:
            yield Finding("conflicts", Level.OK, "there are no conflicts")
            return
        half_ids = _some([one_line(row["half_id"]) for row in rows])
        what = f"{count_of(len(rows), 'half batch')} with two verdicts that contradict each other: {half_ids}"
        yield Finding("conflicts", Level.CRITICAL, what, self._story(rows[0]["half_id"]))

    # ------------------------------------------------------------------ consumers
    def _groups(self) -> Iterator[Finding]:
        from rmq_spark.consumers import ConsumerGroup

        rows = group_rows(self._log)
        if not rows:
            yield Finding("groups", Level.OK, "no consumer group has read yet")
            return
        has_problem = False
        for row in rows:
            group = ConsumerGroup(self._log, row["consumer_group"])
            beats = group.members()
            alive = {member for member, beat in beats.items() if beat.is_alive}
            behind = [queue for queue in group.lag().to_pylist() if queue["owner"] and queue["lag"]]
            if owners := [queue["owner"] for queue in behind if queue["owner"] not in alive]:
                has_problem = True
                beat = beats.get(owners[0])
                heartbeat = "it has no heartbeat"
                if beat is not None:
                    heartbeat = f"its heartbeat is {short_age(beat.age_s)} old, its lease {short_age(beat.lease_s)}"
                yield Finding(
                    "groups",
                    Level.WARNING,
                    f"{row['consumer_group']}: {count_of(len(owners), 'queue')} with messages, owned by a dead member "
                    f"({owners[0]}: {heartbeat}): no member lives that could take them",
                    self._command("group members", row["consumer_group"]),
                )
        for row in rows:
            if row["lag_seconds"] > LAG_S_MAX:
                has_problem = True
                yield Finding(
                    "groups",
                    Level.WARNING,
                    f"{row['consumer_group']}: {count_of(row['lag'], 'message')} behind, the oldest committed "
                    f"{short_age(row['lag_seconds'])} ago",
                    self._command("group lag", row["consumer_group"]),
                )
        if not has_problem:
            furthest = max(rows, key=lambda row: int(row["lag"]))
            lag = f"{count_of(int(furthest['lag']), 'message')}, {short_age(furthest['lag_seconds'])}"
            what = f"{count_of(len(rows), 'group')}; furthest behind {furthest['consumer_group']}: {lag}"
            yield Finding("groups", Level.OK, what)

    def _dead_letters(self) -> Iterator[Finding]:
        for group, count in sorted(kept_letters(self._engine).items()):
            if count and (waiting := DeadLetters(self._log, group).waiting()):
                what = f"{group}: {count_of(count, 'dead letter')}"
                what += "" if waiting == count else f", {waiting:,} of them not sent again"
                yield Finding("dead letters", Level.NOTE, what, self._command("dlq list", group))


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
