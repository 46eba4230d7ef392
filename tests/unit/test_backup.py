"""A copy of a commit log is the log as it was at one moment, whatever went on meanwhile."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from itertools import count, islice, takewhile
from pathlib import Path

import pytest
from deltalake import DeltaTable

from rmq_spark import CommitLog, ConsumerGroup
from rmq_spark._core.client.backup import MANIFEST, SWITCH, finish
from rmq_spark._core.storage.delta_table import CHECKPOINT_INTERVAL
from rmq_spark.errors import CommitLogExistsError, CorruptLogError, ForeignChangeError, OptionError
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq
from tests.support.half_batches import another, bodies, check_offsets, commit, let_leave, prepare, roll_back, send
from tests.support.meanwhile import Died, at, seen_at, unhooked
from tests.support.seeds import first_seed, how_many

pytestmark = pytest.mark.log("delta")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Where the copy goes."""
    return tmp_path / "copy"


@pytest.fixture
def copied(log: CommitLog, copy: Path) -> Path:
    """A copy of the log, in which ``first`` is sent."""
    sent(log, "first")
    log.backup(copy)
    return copy


def sent(log: CommitLog, *keys: str) -> None:
    """Five messages under each key, which are visible."""
    for key in keys:
        commit(log, send(log, key))


def require_same(place: Path, log: CommitLog) -> None:
    copy = CommitLog.open(place)
    assert copy.id == log.id
    assert bodies(copy) == bodies(log)
    assert copy.pending().equals(log.pending())
    assert copy.engine.tails() == log.engine.tails()


def test_a_copy_has_all_that_the_log_had(log: CommitLog, copy: Path) -> None:
    sent(log, "key0", "key1", "key2", "key3")
    let_leave(log)
    sent(log, "later")
    prepare(log, 0)
    roll_back(log, send(log, "refused"))
    report = log.backup(copy)
    require_same(copy, log)
    assert not (copy / "op" / "_delta_log" / "_last_checkpoint").exists()
    assert report.files_copied > 0
    assert report.versions == {t.name: t.refresh() for t in log.engine.tables()}
    said = json.loads((copy / MANIFEST).read_text())
    assert said["log_id"] == log.id
    # It can be used in the place of the log.
    shutil.rmtree(log.path)
    shutil.move(copy, log.path)
    restored = CommitLog.open(log.path)
    commit(restored, send(restored, "after"))
    check_offsets(restored)


def test_a_log_that_another_writer_changed_is_not_copied_over_a_good_copy(log: CommitLog, copy: Path) -> None:
    """The copy got the merged file, and the log of a table that nobody could put back."""
    for key in ("key0", "key1"):
        sent(log, key)
        log.drain()
    log.backup(copy)
    before = bodies(CommitLog.open(copy))
    DeltaTable(f"{log.path}/messages").optimize.compact()
    with pytest.raises(ForeignChangeError, match="OPTIMIZE"):
        another(log).backup(copy)
    assert bodies(CommitLog.open(copy)) == before


@pytest.mark.turns(3)
@pytest.mark.parametrize("table", ["half", "groups", "messages", "op", "topics"])
def test_what_is_sent_drained_and_leaves_between_two_looks_is_whole_in_the_copy_or_not_there(
    log: CommitLog, copy: Path, table: str
) -> None:
    """The look at a table is followed by decisions, a drain, and half batches that leave."""
    sent(log, "old0", "old1", "old2")
    ConsumerGroup(log, "readers").reset("latest", ["orders"])
    opened = send(log, "opened")

    def go_on() -> None:
        commit(log, opened)
        sent(log, "new")
        assert let_leave(log).files_left >= 4

    with at("table seen", go_on, table=table):
        log.backup(copy)
    found = CommitLog.open(copy)
    old = {f"old{i}.{n}" for i in range(3) for n in range(5)}
    assert set(bodies(found)) >= old
    assert set(bodies(found)) - old in (set(), {f"{key}.{n}" for key in ("opened", "new") for n in range(5)})
    found.drain()
    check_offsets(found)


def test_a_log_that_lacks_what_op_places_is_not_copied(log: CommitLog, copy: Path) -> None:
    sent(log, "first", "lost")
    *_, newest = sorted(Path(log.path, "half", "_delta_log").glob("*.json"))
    newest.unlink()
    with pytest.raises(CorruptLogError, match="neither half nor messages has them"):
        log.another().backup(copy)


def test_entries_that_go_between_the_listing_and_the_reading_are_listed_again(log: CommitLog, copy: Path) -> None:
    """What made one of ten copies of a page's recipe unreadable: a checkpoint came, and entries went, meanwhile."""
    sent(log, "first")

    def clean_up() -> None:
        for i in range(CHECKPOINT_INTERVAL + 2):
            commit(log, send(log, f"more{i}", 1))
        for entry in Path(log.path, "op", "_delta_log").glob("*.json"):
            if int(entry.stem) < CHECKPOINT_INTERVAL:
                entry.unlink()

    with at("table seen", clean_up, table="op"):
        log.backup(copy)
    require_same(copy, log)


def test_a_file_that_upkeep_deletes_before_it_is_copied_lets_the_copy_begin_anew(log: CommitLog, copy: Path) -> None:
    sent(log, "key0", "key1", "key2")

    def leave_and_delete() -> None:
        before = {p.name for p in Path(log.path, "half").glob("*.parquet")}
        let_leave(log)
        gone = before - set(log.another().engine.half.table.actions()["path"].to_pylist())
        assert gone
        for name in gone:
            Path(log.path, "half", name).unlink()

    with at("table seen", leave_and_delete, table="topics"):
        log.backup(copy)
    require_same(copy, log.another())


@pytest.mark.parametrize(
    ("table", "said"),
    [("op", "half batches left the table half in"), ("topics", "deleted files before they were copied")],
)
def test_a_backup_beside_an_upkeep_that_never_rests_says_so(log: CommitLog, copy: Path, table: str, said: str) -> None:
    keys = map("key{}".format, count())

    def leave_and_delete(**_: object) -> None:
        with unhooked():
            let_leave(log)
            if table == "topics":
                for file in Path(log.path, "half").glob("*.parquet"):
                    file.unlink()
            sent(log, next(keys))

    sent(log, *islice(keys, 2))
    with (
        seen_at("table seen", leave_and_delete, table=table),
        pytest.raises(CorruptLogError, match=f"{said}.*: stop upkeep for the time of a backup"),
    ):
        log.backup(copy)


def test_a_copy_is_brought_up_to_date_with_the_files_that_it_lacks(log: CommitLog, copy: Path) -> None:
    sent(log, "key0", "key1", "key2")
    first = log.backup(copy)
    sent(log, "later")
    second = log.backup(copy)
    assert (second.files_copied, second.files_kept) == (2, first.files_copied)
    require_same(copy, log)
    let_leave(log)
    third = log.backup(copy)
    assert third.files_deleted > 0
    require_same(copy, log.another())
    assert log.backup(copy).files_copied == 0
    for table in log.another().engine.tables():
        assert {p.name for p in (copy / table.name).glob("*.parquet")} == set(table.actions()["path"].to_pylist())


def test_a_half_written_file_of_an_earlier_try_is_copied_again(log: CommitLog, copied: Path) -> None:
    (file,) = (copied / "half").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:100])
    assert log.backup(copied).files_copied == 1
    require_same(copied, log)


@pytest.mark.turns(2, among="backups at work")
def test_a_backup_that_is_killed_anywhere_leaves_the_older_copy_or_one_that_the_next_call_finishes(
    log: CommitLog, tmp_path: Path, copied: Path
) -> None:
    older = bodies(log)
    sent(log, "second")
    let_leave(log)
    newer = bodies(log.another())
    seen = set()
    every = how_many(3, 1)  # each run dies at other steps
    steps = first_seed() % every
    while True:
        target = tmp_path / f"copy{steps}"
        shutil.copytree(copied, target)
        left = iter(range(steps))

        def dies(left: Iterator[int] = left, **_: object) -> None:
            if next(left, None) is None:
                raise Died

        with suppress(Died), seen_at("copy changes", dies):
            log.backup(target)
            break
        if not (target / "topics" / "_delta_log").is_dir() or not any((target / "topics/_delta_log").iterdir()):
            with pytest.raises(CorruptLogError, match="txmq backup"):
                CommitLog.open(target)
            seen.add("between")
        finish(target, None)  # as a restore does, when the log is gone
        found = bodies(CommitLog.open(target))
        assert found in (older, newer), steps
        seen.add("older" if found == older else "newer")
        log.backup(target)
        require_same(target, log.another())
        assert not (target / SWITCH).exists()
        steps += every
    assert seen == {"older", "between", "newer"}
    assert steps > 10


# ---------------------------------------------------------------- what is refused
def test_places_inside_the_log_and_around_it_are_refused(log: CommitLog, tmp_path: Path) -> None:
    os.symlink(log.path, tmp_path / "alias")
    for target in (log.path, Path(log.path, "op"), Path(log.path, "a", "b"), tmp_path, tmp_path / "alias"):
        with pytest.raises(OptionError, match=r"itself|lies inside"):
            log.backup(target)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("../outside.json", b"{}"),
        ("half/_delta_log/../../../outside.json", b"{}"),
        ("other/_delta_log/00000000000000000000.json", b"{}"),
        ("/half/_delta_log/00000000000000000000.json", b"{}"),
        (None, b"no archive"),
    ],
)
def test_a_switch_that_somebody_else_wrote_writes_nothing(tmp_path: Path, name: str | None, content: bytes) -> None:
    copy = tmp_path / "copies" / "copy"
    copy.mkdir(parents=True)
    if name is None:
        (copy / SWITCH).write_bytes(content)
    else:
        with zipfile.ZipFile(copy / SWITCH, "w") as file:
            file.writestr(MANIFEST, json.dumps({"log_id": "an id", "taken_at": None, "versions": {"half": 1}}))
            file.writestr(name, content)
    with pytest.raises(CorruptLogError, match=r"somebody else wrote it|is damaged"):
        finish(copy, None)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [SWITCH]


def test_another_log_and_what_is_no_copy_are_refused(log: CommitLog, tmp_path: Path, copy: Path) -> None:
    other = CommitLog.create(tmp_path / "other")
    with pytest.raises(CommitLogExistsError, match="no copy that a backup made"):
        log.backup(other.path)
    other.backup(copy)
    with pytest.raises(CommitLogExistsError, match="another commit log"):
        log.backup(copy)
    with pytest.raises(CommitLogExistsError, match="inside the commit log"):
        log.backup(Path(other.path, "copy"))
    shutil.copytree(log.path, tmp_path / "by-hand")
    with pytest.raises(CommitLogExistsError, match="no copy that a backup made"):
        log.backup(tmp_path / "by-hand")
    with pytest.raises(OptionError, match="memory"):
        InMemoryCommitLog().backup(tmp_path / "memory")


def test_a_copy_that_is_newer_or_in_use_is_left_as_it_is(log: CommitLog, tmp_path: Path) -> None:
    sent(log, "first")
    log.backup(tmp_path / "old")
    sent(log, "second")
    log.backup(tmp_path / "new")
    shutil.rmtree(log.path)
    shutil.copytree(tmp_path / "old", log.path)
    restored = CommitLog.open(log.path)
    with pytest.raises(CommitLogExistsError, match="set back"):
        restored.backup(tmp_path / "new")
    for key in ("third", "fourth"):  # the same versions, and more, of other messages
        commit(restored, send(restored, key))
    with pytest.raises(CommitLogExistsError, match="set back"):
        restored.backup(tmp_path / "new")
    assert "second.0" in bodies(CommitLog.open(tmp_path / "new"))
    used = CommitLog.open(tmp_path / "old")
    commit(used, send(used, "used"))
    with pytest.raises(CommitLogExistsError, match="in use"):
        restored.backup(tmp_path / "old")


@pytest.mark.parametrize(
    ("damage", "newest", "said"),
    [
        ("a flipped bit", False, "damaged"),
        ("a flipped bit", True, "damaged"),
        ("a lost file", True, "the copy was left as it was"),
        ("a longer file", True, "bytes, and its Delta log says"),
    ],
)
def test_a_damaged_log_replaces_no_good_copy(
    log: CommitLog, copied: Path, damage: str, newest: bool, said: str
) -> None:
    """A damaged file has the size that the Delta log says. Only the newest was read, and after the switch."""
    record = send(log, "damaged")
    commit(log, record)
    if not newest:
        sent(log, "newest")
    (file,) = {Path(log.path) / "half" / stored.path for stored in log.engine.get(record.half_id).files.values()}
    if damage == "a lost file":
        file.unlink()
    elif damage == "a longer file":
        file.write_bytes(file.read_bytes() + b"x")
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 0xFF
        file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(CorruptLogError, match=said):
            log.another().backup(copied)
    assert sorted(bodies(CommitLog.open(copied))) == [f"first.{n}" for n in range(5)]


def test_a_copy_that_somebody_writes_to_while_it_is_made_is_none(log: CommitLog, copy: Path) -> None:
    def write(**_: object) -> None:
        if len(reached) == 2:  # the first time it is put there, the second time the copy is complete
            with unhooked():
                CommitLog.open(copy).create_topic("other")

    sent(log, "key")
    with (
        seen_at("copy changes", write, name=SWITCH) as reached,
        pytest.raises(CorruptLogError, match=r"table topics of the copy .* somebody wrote to the copy"),
    ):
        log.backup(copy)


def test_what_others_put_into_a_copy_stays(log: CommitLog, tmp_path: Path, copy: Path) -> None:
    outside = tmp_path / "outside"
    log.backup(copy)
    outside.mkdir()
    mine = [copy / "mine" / "notes.txt", copy / "half" / "notes.txt", outside / "precious.parquet"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (copy / "link").symlink_to(outside)
    sent(log, "first")
    log.backup(copy)
    assert all(path.read_text() == "mine" for path in mine)


def test_a_backup_that_died_over_its_manifest_is_finished_by_the_next_one(log: CommitLog, copied: Path) -> None:
    sent(log, "second")

    def dies(**_: object) -> None:
        (copied / MANIFEST).write_bytes((copied / MANIFEST).read_bytes()[:10])
        raise Died

    with pytest.raises(Died), seen_at("copy changes", dies, name=MANIFEST):
        log.backup(copied)
    log.backup(copied)
    require_same(copied, log)


def test_a_clock_that_is_ahead_does_not_say_when_a_copy_was_taken(log: CommitLog, copy: Path) -> None:
    """A restore would not look at what the database has executed before that time."""
    sent(log, "first")
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, 8 * 86_400.0)
        report = log.another().backup(copy)
    assert report.taken_at <= datetime.now(timezone.utc)


# ---------------------------------------------------------------- the command
def test_the_command_backs_up_and_restores(log: CommitLog, copy: Path) -> None:
    sent(log, "key")
    said, _ = txmq("backup", log.path, copy)
    assert "is the log as it was at" in said
    (again,) = objects("backup", log.path, copy)
    assert again["files_copied"] == 0
    sent(log, "lost")
    shutil.rmtree(log.path)
    (back,) = objects("backup", copy, log.path)
    assert back["taken_at"] == again["taken_at"]  # of what is in it
    assert sorted(bodies(CommitLog.open(log.path))) == [f"key.{n}" for n in range(5)]
    _, problem = txmq("backup", log.path, log.path, code=2)
    assert "is the commit log itself" in problem


# ---------------------------------------------------------------- under load
@pytest.mark.turns(2, among="backups at work")
@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + how_many(1, 20)))
def test_copies_taken_while_others_send_and_upkeep_runs_are_prefixes(log: CommitLog, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stop = threading.Event()

    def go_on(act: Callable[[int], object]) -> None:
        for n in takewhile(lambda _: not stop.is_set(), count()):
            act(n)

    senders = [log.another() for _ in range(2)]
    upkeep = log.another()
    outcomes = [chance.random() for _ in range(100)]

    def send_one(own: CommitLog, name: str, n: int) -> None:
        record = send(own, f"{name}.{n}", 3)
        if outcomes[n % 100] < 0.8:
            commit(own, record)
        elif outcomes[n % 100] < 0.9:
            roll_back(own, record)

    acts = [partial(send_one, own, f"sender{i}") for i, own in enumerate(senders)]
    with ThreadPoolExecutor(3) as pool:
        beside = [pool.submit(go_on, act) for act in (*acts, lambda n: let_leave(upkeep))]
        try:
            seen = 0
            for n in range(how_many(4, 8)):
                target = tmp_path / f"copy{n // 2}"  # each second one brings an older copy up to date
                log.backup(target)
                copy = CommitLog.open(target)
                check_offsets(copy)
                found = bodies(copy)
                assert len(found) >= seen
                seen = len(found)
                for name in {body.rpartition(".")[0] for body in found}:
                    assert {f"{name}.{i}" for i in range(3)} <= set(found), name
            copy.drain()
            assert bodies(copy) == found
        finally:
            stop.set()
    for thread in beside:
        thread.result()
    assert seen > 0
