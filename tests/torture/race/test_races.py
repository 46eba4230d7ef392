"""Races on a local path and on a real S3 server; and that what they look for would be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmq_spark import CommitLog
from tests.support.half_batches import check_offsets, commit, prepare
from tests.support.seeds import first_seed
from tests.torture.judge.anomalies import AnomalyKind, find_anomalies, kinds_of
from tests.torture.judge.history import History, Kind, Phase
from tests.torture.race.programs import TOPIC, Track, note_versions
from tests.torture.race.races import CREWS, Race
from tests.torture.s3.server import S3Server

pytestmark = pytest.mark.timeout(1_500)

SECONDS_MAX = 240.0
"""A machine that is slow makes fewer commits in it, and at least COMMITS_MIN."""
COMMITS_MIN = 20


def check_race(track: Track, commits: int, processes: int | None, line_up: str | None = None) -> None:
    race = Race(track, seed=first_seed(), processes=processes, line_up=line_up)
    report = race.run(commits, SECONDS_MAX)
    assert report.failures == []
    assert report.commits >= COMMITS_MIN
    assert report.messages > 0
    roles = " ".join(race.line_up)
    if "contender" in roles:
        assert report.contested > 0
    if "upkeep" in roles:
        assert report.merges > 0
        assert report.marks > 0
    check_offsets(track.open(), TOPIC)


@pytest.mark.turns(2, among="races")
@pytest.mark.parametrize(
    ("processes", "commits"), [(6, 20), *(pytest.param(n, 250, marks=pytest.mark.long) for n in (2, 8))]
)
def test_racing_processes_on_a_local_path_lose_double_and_overwrite_nothing(
    tmp_path: Path, processes: int, commits: int
) -> None:
    check_race(Track(tmp_path / "race", str(tmp_path / "log"), tmp_path / "log"), commits, processes)


@pytest.mark.turns(2, among="races")
@pytest.mark.parametrize("commits", [30, pytest.param(1_000, marks=pytest.mark.long)])
def test_racing_threads_that_share_a_handle_lose_double_and_overwrite_nothing(tmp_path: Path, commits: int) -> None:
    check_race(Track(tmp_path / "race", str(tmp_path / "log"), tmp_path / "log"), commits, None, CREWS)


@pytest.mark.long
def test_racing_processes_on_s3_lose_double_and_overwrite_nothing(s3: S3Server, tmp_path: Path) -> None:
    uri = f"{s3.bucket('races')}/log"
    check_race(Track(tmp_path / "race", uri, s3.folder / "races" / "log", s3.storage_options()), 250, 7)


# ---------------------------------------------------------------- that it would be found
@pytest.fixture
def race(tmp_path: Path) -> Race:
    """A race in which nobody has started: a log with some commits, all of them noted."""
    track = Track(tmp_path / "race", str(tmp_path / "log"), tmp_path / "log")
    made = Race(track, seed=1)
    log = CommitLog.create(track.uri, log_retention="1h")
    log.create_topic(TOPIC, 2)
    note_versions(log, made.history, "writer")
    for number in range(4):
        commit(log, prepare(log, number, 2))
    made.list_versions()
    assert found(made) == set()
    return made


def found(race: Race) -> set[AnomalyKind]:
    return kinds_of(find_anomalies(race.history))


def entry(race: Race, version: int, table: str = "op") -> Path:
    return race.track.files / table / "_delta_log" / f"{version:020d}.json"


def test_each_acknowledged_commit_is_noted_with_its_version(race: Race) -> None:
    told = {(e.table, e.version): e.payload for e in race.history if e.kind is Kind.VERSION}
    assert set(told) == {(table, version) for table in ("half", "op") for version in range(1, 5)}
    assert told.items() <= race.listed.items()


def test_a_version_that_another_commit_overwrote_is_found(race: Race) -> None:
    entry(race, 2).write_bytes(entry(race, 3).read_bytes())
    race.list_versions()
    assert found(race) == {AnomalyKind.OVERWRITTEN_VERSION}


def test_a_version_that_was_overwritten_before_it_was_listed_is_found(race: Race) -> None:
    log = race.track.open()
    note_versions(log, race.history, "another writer")
    prepare(log, 9, 2)
    entry(race, 5, "half").write_bytes(entry(race, 4, "half").read_bytes())
    race.list_versions()
    assert found(race) == {AnomalyKind.OVERWRITTEN_VERSION}


def test_a_version_that_is_missing_is_found(race: Race) -> None:
    race.listed.clear()
    entry(race, 3).unlink()
    race.history = History(race.track.root / "anew.jsonl")
    race.list_versions()
    assert found(race) == {AnomalyKind.MISSING_VERSION}


def test_a_file_that_was_added_twice_is_found(race: Race) -> None:
    entry(race, 5).write_bytes(entry(race, 4).read_bytes())
    race.list_versions()
    (failure,) = race.failures
    assert "was added to op at version 5, and before at ('op', 4)" in failure


def test_two_winners_of_a_contested_batch_are_found(race: Race) -> None:
    log = race.track.open()
    record = prepare(log, 0, 2, app="contested")
    commit(log, record)
    for verdict in ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE"):
        race.history.note(Kind.DECIDE, half_id=record.half_id, transaction_id="contested:0:1", verdict=verdict)
    race.judge()
    assert any("contested:0: ['COMMIT_MESSAGE', 'ROLLBACK_MESSAGE'] won" in failure for failure in race.failures)


def test_a_refused_verdict_that_is_not_on_record_is_found(race: Race) -> None:
    log = race.track.open()
    record = prepare(log, 0, 2, app="contested")
    commit(log, record)
    for phase, verdict in ((Phase.OK, "COMMIT_MESSAGE"), (Phase.FAIL, "ROLLBACK_MESSAGE")):
        race.history.note(Kind.DECIDE, phase, half_id=record.half_id, transaction_id="contested:0:1", verdict=verdict)
    race.judge()
    assert race.failures == ["conflicts on record and verdicts refused differ: ['contested:0']"]


def test_a_race_that_leaves_something_open_fails(race: Race) -> None:
    prepare(race.track.open(), 9, 2)
    race.judge()
    assert any("stuck half" in failure for failure in race.failures)
