"""Races: some processes send, contend, check, merge and read on one log, on a local path or a real S3 server.

A race ends with everything settled, and the anomaly checker looks at its whole history: every message, and every
version of the Delta tables, which must be there once and be the commit that its writer was told it is.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow as pa

import rmq_spark as txmq
from tests.torture.judge.anomalies import Rules, find_anomalies
from tests.torture.judge.history import FINAL, Event, History, Kind, Phase
from tests.torture.judge.observation import READ_COLUMNS, note_log, note_messages, note_messages_table
from tests.torture.race import programs
from tests.torture.race.programs import (
    CONTESTED,
    CONTESTED_ROWS,
    FIFO_TOPIC,
    MERGED,
    QUEUES,
    TOPIC,
    Orders,
    Track,
    checks,
    commit_name,
)
from tests.torture.s3.server import NoS3ServerError, running

SPAWN = get_context("spawn")
LINE_UPS = {
    2: "sender sender",
    3: "sender sender upkeep",
    4: "sender sender checker upkeep",
    5: "sender sender checker upkeep reader",
    6: "sender contender contender checker upkeep reader",
    7: "sender sender contender contender checker upkeep reader",
    8: "sender sender sender contender contender checker upkeep reader",
}
CREWS = "rival+rival+checker+looker rival+rival+upkeep+looker"
"""A line-up of two processes, each of which has one handle for four threads."""
RACE_COMMITS = 2_500
"""Of one race of a long run, so that several line-ups have their turn; the first one has every role."""
LISTED_EVERY_S = 0.5
"""Entries of a Delta log stay for a minute at least, so none is missed."""
END_S_MAX = 120.0
SETTLE_S_MAX = 180.0
TABLES = ("half", "op", "topics", "messages")


@dataclass
class Report:
    """What a race did, and what was wrong.

    Attributes
    ----------
    contested : int
        The half batches that two processes decided with opposite verdicts.
    merges, marks : int
        What upkeep did beside the others: merges of op files, and moves of the low-water mark.
    """

    commits: int = 0
    seconds: float = 0.0
    processes: int = 0
    messages: int = 0
    contested: int = 0
    merges: int = 0
    marks: int = 0
    failures: list[str] = field(default_factory=list)


class Race:
    """One race.

    Parameters
    ----------
    track : Track
        Its root is an empty folder; there is no log yet.
    seed : int
        Chooses how many take part and what they do. The system's scheduler has its say too, so a race is run again, not
        replayed; its folder holds the whole history.
    """

    def __init__(self, track: Track, seed: int, processes: int | None = None, line_up: str | None = None) -> None:
        self.track = track
        self.chance = random.Random(seed)
        self.line_up = (line_up or LINE_UPS[processes or self.chance.choice(list(LINE_UPS))]).split()
        self.processes = len(self.line_up)
        track.local.mkdir(parents=True)
        self.history = track.history()
        self.listed: dict[tuple[str, int], str] = {}
        self._added: dict[str, tuple[str, int]] = {}
        self.failures: list[str] = []

    def run(self, commits: int, seconds: float) -> Report:
        """Race until there are so many commits and every role had its part, or the time is up; settle, and look."""
        log = txmq.CommitLog.create(self.track.uri, storage_options=self.track.storage_options)
        log.create_topic(TOPIC, QUEUES)
        log.create_topic(FIFO_TOPIC, 1, fifo=True)
        began = time.monotonic()
        processes = dict(self._start())
        try:
            while time.monotonic() < began + seconds and not self.failures:
                if len(self.listed) >= commits and self._all_had_their_part():
                    break
                time.sleep(LISTED_EVERY_S)
                self.list_versions()
                self._look_after(processes)
        finally:
            self.track.stop.touch()
            self._end(processes)
        took = time.monotonic() - began
        self.list_versions()
        made = len(self.listed)
        self._settle()
        self.list_versions()
        report = self.judge()
        report.commits, report.seconds = made, took
        return report

    # ------------------------------------------------------------------ processes
    def _start(self) -> Iterator[tuple[str, BaseProcess]]:
        contenders = 0
        for number, roles in enumerate(self.line_up):
            role = "crew" if "+" in roles else roles
            name = f"{role}{number}"
            more: tuple[bool | str, ...] = ()
            if role == "crew":
                more = (roles,)
            elif role == "contender":
                contenders += 1
                more = (contenders == 1,)
            arguments = (role, self.track, name, self.chance.randrange(2**32), *more)
            process = SPAWN.Process(target=programs.main, args=arguments)
            process.start()
            yield name, process

    def _look_after(self, processes: dict[str, BaseProcess]) -> None:
        for name, process in processes.items():
            if process.exitcode is not None:
                said = (self.track.root / f"{name}.out").read_text(errors="replace")
                self.failures.append(f"{name} ended with {process.exitcode}: {said[-2000:]}")

    def _end(self, processes: dict[str, BaseProcess]) -> None:
        deadline = time.monotonic() + END_S_MAX
        while any(p.is_alive() for p in processes.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
            self.list_versions(LISTED_EVERY_S)
        for name, process in processes.items():
            if process.is_alive():
                process.kill()
                self.failures.append(f"{name} did not come to an end within {END_S_MAX:.0f} s")
            elif process.exitcode and not self.failures:
                self._look_after({name: process})

    # ------------------------------------------------------------------ what was committed
    _listed_at = 0.0

    def list_versions(self, every_s: float = 0.0) -> None:
        """Note the versions that are new since the last time, and those that are another commit than then."""
        if time.monotonic() < self._listed_at + every_s:
            return
        for table in TABLES:
            for entry in (self.track.files / table / "_delta_log").glob("*.json"):
                try:
                    lines = [json.loads(line) for line in entry.read_text().splitlines()]
                except FileNotFoundError:  # cleaned up meanwhile
                    continue
                version = int(entry.stem)
                added = [line["add"]["path"] for line in lines if "add" in line]
                name = commit_name(added)
                if self.listed.get((table, version)) != name:
                    self.listed[table, version] = name
                    self.history.note(Kind.LISTED, table=table, version=version, payload=name)
                    self._see_added(table, version, added)
        self._listed_at = time.monotonic()

    def _see_added(self, table: str, version: int, paths: Sequence[str]) -> None:
        for path in paths:
            first = self._added.setdefault(path, (table, version))
            if first != (table, version):
                self.failures.append(f"{path} was added to {table} at version {version}, and before at {first}")

    def _settle(self) -> None:
        """Let checks settle what is open; on a slow machine that takes longer than entries of a Delta log stay."""
        with ThreadPoolExecutor(1) as pool:
            settled = pool.submit(self._check_all)
            while not settled.done():
                time.sleep(0.1)
                self.list_versions(LISTED_EVERY_S)
            settled.result()

    def _check_all(self) -> None:
        log = self.track.open()
        service = checks(log, Orders(self.track, self.history, "settler", self.chance), 0.0)
        deadline = time.monotonic() + SETTLE_S_MAX
        while time.monotonic() < deadline:
            service.run_once()
            if not self._open_half_ids(log) and not log.engine.ledger.view.waiting:
                return
        self.failures.append(f"still open after {SETTLE_S_MAX:.0f} s: {self._open_half_ids(log)[:5]}")

    def _open_half_ids(self, log: txmq.CommitLog) -> list[str]:
        return [str(h) for h in log.pending()["half_id"].to_pylist()]

    def judge(self) -> Report:
        """Look at the log at rest and at the whole history."""
        track = self.track
        note_log(self.history, track.uri, track.storage_options)
        self.history.note(Kind.END)
        log = track.open()
        topics = [topic for topic in (TOPIC, FIFO_TOPIC) if topic in log.topics()]
        messages = pa.concat_tables([log.read(topic, columns=READ_COLUMNS) for topic in topics])
        note_messages(self.history, Kind.READ, "judge", FINAL, messages, log.engine.op_table.version)
        with ThreadPoolExecutor(2) as pool:
            for drained in [pool.submit(track.open().drain) for _ in range(2)]:
                drained.result()
        self.list_versions()
        note_messages_table(self.history, "judge", FINAL, track.uri, track.storage_options)
        rules = Rules(fifo=frozenset({FIFO_TOPIC}))
        self.failures += [str(a) for a in find_anomalies(_without_contests(self.history), rules)]
        self._judge_contests(log, [b.decode() for b in messages["body"].to_pylist()])
        return Report(processes=self.processes, messages=messages.num_rows, **self._parts(), failures=self.failures)

    def _parts(self) -> dict[str, int]:
        """What the roles that race against the senders have done so far."""
        found: Counter[str] = Counter()
        for event in self.history:
            if event.kind is Kind.VERSION and event.process.startswith("upkeep"):
                found["merges" if event.op == MERGED else "marks"] += 1
            elif event.kind is Kind.DECIDE and event.phase is Phase.FAIL:
                found["contested"] += 1
        roles = {"merges": "upkeep", "marks": "upkeep", "contested": "contender"}
        return {part: found[part] for part, role in roles.items() if role in " ".join(self.line_up)}

    def _all_had_their_part(self) -> bool:
        try:
            return all(self._parts().values())
        except ValueError:  # a process is writing the last line
            return False

    def _judge_contests(self, log: txmq.CommitLog, bodies: Sequence[str]) -> None:
        """Each half batch that two decided has one winner, and every loser's verdict is on record."""
        winners: dict[str, list[str]] = {}
        losers: set[str] = set()
        for event in self.history:
            if event.kind is Kind.DECIDE and event.phase is Phase.FAIL:
                losers.add(event.half_id or "")
            elif event.kind is Kind.DECIDE:
                winners.setdefault(event.half_id or "", []).append(event.verdict or "")
        conflicts = set(log.conflicts())
        seen = [b.rpartition(".")[0].replace(".", ":") for b in bodies if b.startswith(CONTESTED)]
        for half_id in winners.keys() | losers:
            verdicts = winners.get(half_id, [])
            expected = CONTESTED_ROWS if verdicts == [str(txmq.COMMIT_MESSAGE)] else 0
            if len(verdicts) != 1 or seen.count(half_id) != expected:
                self.failures.append(f"{half_id}: {verdicts} won, and {seen.count(half_id)} of its messages are there")
        # The last ones may have a winner alone: the other contender had stopped.
        if conflicts != losers:
            self.failures.append(f"conflicts on record and verdicts refused differ: {sorted(conflicts ^ losers)[:5]}")


def _without_contests(history: History) -> Iterator[Event]:
    """The history without the conflicts that were asked for: the checker takes each for an anomaly."""
    for event in history:
        contested = (event.half_id or "").startswith(CONTESTED)
        on_record = event.kind is Kind.MARKER and event.op == "conflict"
        refused = event.kind is Kind.DECIDE and event.phase is Phase.FAIL
        if not (contested and (on_record or refused)):
            yield event


# ---------------------------------------------------------------- tracks
@contextmanager
def local_track(root: Path) -> Iterator[Track]:
    yield Track(root / "race", str(root / "log"), root / "log")


@contextmanager
def s3_track(root: Path) -> Iterator[Track]:
    with running(root / "s3") as server:
        uri = f"{server.bucket('races')}/log"
        yield Track(root / "race", uri, server.folder / "races" / "log", server.storage_options())


TRACKS = {"local": local_track, "s3": s3_track}


def run_on(
    where: str, seconds: float, seed: int, commits: int, processes: int | None = None
) -> dict[str, int | str | list[str]]:
    """Races until there are so many commits or the time is up; the folder of a failed one stays.

    Without a number of processes the first race has every role, every other one is of crews, and each of the rest has
    a line-up of its own.
    """
    end = time.monotonic() + seconds
    total = Report()
    races = 0
    line_ups: list[str] = []
    while total.commits < commits and time.monotonic() < end and not total.failures:
        root = Path(tempfile.mkdtemp(prefix=f"txmq_race_{where}_{seed + races}_"))
        with TRACKS[where](root) as track:
            left = min(RACE_COMMITS, commits - total.commits)
            crews = CREWS if processes is None and races % 2 else None
            race = Race(track, seed + races, processes or (None if races else max(LINE_UPS)), crews)
            report = race.run(left, end - time.monotonic())
        total.commits += report.commits
        total.seconds += report.seconds
        total.messages += report.messages
        total.contested += report.contested
        total.merges += report.merges
        total.marks += report.marks
        total.failures += [f"seed {seed + races}, folder {root}: {f}" for f in report.failures]
        races += 1
        line_ups.append(f"{report.commits} by {report.processes}")
        if not report.failures:
            shutil.rmtree(root)
        print(
            f"races on {where}: {total.commits:,} commits, {report.processes} processes in the last race, "
            f"{report.seconds / max(1, report.commits) * 1000:.0f} ms a commit",
            flush=True,
        )
    return {
        "races": f"{races} ({', '.join(line_ups)} processes)",
        "commits": total.commits,
        "messages": total.messages,
        "contested batches": total.contested,
        "merges": total.merges,
        "moves of the mark": total.marks,
        "seconds": round(total.seconds),
        "ms a commit": round(total.seconds / max(1, total.commits) * 1000),
        "failures": total.failures,
    }


def run(seconds: float, seed: int, commits: int = 10_000) -> dict[str, int | str | list[str]]:
    """So many commits on a local path, and as many on S3, in half of the time each."""
    found: dict[str, int | str | list[str]] = {}
    failures: list[str] = []
    for where in TRACKS:
        try:
            result = run_on(where, seconds / 2, seed, commits)
        except NoS3ServerError as problem:
            found[f"{where}: not run"] = str(problem)
            continue
        failures += result.pop("failures")  # type: ignore[arg-type]
        found.update({f"{where}: {name}": value for name, value in result.items()})
    return {**found, "failures": failures}
