"""Damaged files, in short: every kind of file of a commit log in every way of damage, and every bit of a small file."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rmq_spark import CommitLog
from rmq_spark.errors import CorruptLogError
from tests.support.seeds import ALL, first_seed, how_many
from tests.torture.damage import corruption
from tests.torture.damage.corruption import (
    Result,
    files_by_kind,
    flip_bits,
    prepare_log,
    reader_of,
    run_case,
    run_seeds,
)
from tests.torture.damage.damaged_log import TABLES
from tests.torture.damage.ways import DAMAGES

CASES = how_many(quick=5, in_all=150)
PARTS = how_many(quick=1, in_all=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log, and the right answers to all questions."""
    made = tmp_path_factory.mktemp("damage")
    prepare_log(made)
    return made


def test_the_log_has_a_file_of_every_kind(folder: Path) -> None:
    kinds = files_by_kind(folder / "log")
    expected = {f"{table} {kind}" for table in TABLES for kind in ("parquet", "entry")}
    expected |= {
        f"{table} {kind}" for table in ("half", "op", "messages") for kind in ("checkpoint", "_last_checkpoint")
    }
    assert set(kinds) == expected


def seeds_of_damage(folder: Path) -> list[int]:
    """Some kinds of files, each in another way of damage; in ``make test-all`` each kind in every way.

    The rest of a seed's division by the number of kinds picks the file, the quotient picks the damage: each case takes
    the next of both.
    """
    if ALL:
        return [first_seed() + n for n in range(CASES)]
    kinds = len(files_by_kind(folder / "log"))
    damage, kind = divmod(first_seed(), kinds)
    return [(damage + n) * kinds + (kind + n) % kinds for n in range(CASES)]


def test_the_seeds_have_every_kind_of_file_and_every_way_of_damage(folder: Path) -> None:
    kinds = len(files_by_kind(folder / "log"))
    seeds = seeds_of_damage(folder)
    assert len({seed % kinds for seed in seeds}) == min(CASES, kinds)
    assert len({seed // kinds % len(DAMAGES) for seed in seeds}) == min(CASES, len(DAMAGES))
    if ALL:
        assert len({(seed % kinds, seed // kinds % len(DAMAGES)) for seed in seeds}) == kinds * len(DAMAGES)


@pytest.mark.turns(2, among="damage: the judge")
def test_an_untouched_log_gives_the_right_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.torture.damage.corruption.damage", lambda log, seed: Result(seed, "none", "none", "nothing")
    )
    result = run_case(folder, pickle.loads((folder / "right").read_bytes()), 0)
    assert (result.silent, result.unclear, result.errors) == ({}, {}, 0)


@pytest.mark.turns(2, among="damage: the judge")
def test_a_wrong_answer_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the checks: a log that lost its newest entry gives wrong answers, and no error."""

    def lose_the_newest_entry(log: Path, seed: int) -> Result:
        sorted((log / "op" / "_delta_log").glob("*.json"))[-1].unlink()
        return Result(seed, "op entry", "delete", "the newest")

    monkeypatch.setattr(corruption, "damage", lose_the_newest_entry)
    result = run_case(folder, pickle.loads((folder / "right").read_bytes()), 0)
    assert {"pending", "read", "source", "stream"} <= set(result.silent)
    assert not result.ok


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_gives_the_right_answer_or_a_clear_failure(folder: Path, part: int) -> None:
    seeds = seeds_of_damage(folder)[CASES * part // PARTS : CASES * (part + 1) // PARTS]
    results = list(run_seeds(folder, seeds))
    assert sorted(r.seed for r in results) == seeds
    assert not [str(r) for r in results if not r.ok]
    assert sum(r.errors > 0 for r in results) > len(seeds) // 10, "the damage hardly reached anything"


@pytest.mark.turns(len(TABLES))
@pytest.mark.parametrize("table", TABLES)
def test_a_flipped_bit_of_a_file_is_never_a_wrong_value(folder: Path, tmp_path: Path, table: str) -> None:
    file = files_by_kind(folder / "log")[f"{table} parquet"][0]
    counts, failures = flip_bits(file, table, tmp_path / "bits", step=7, first=3)
    assert not failures
    assert counts["columns elsewhere"] <= 1
    assert counts["right"] + counts["clear failures"] + counts["columns elsewhere"] == counts["cases"] > 100


# ---------------------------------------------------------------- cases that failed once
def test_a_swapped_op_file_is_noticed(folder: Path, tmp_path: Path) -> None:
    """Each holds good rows, but of other versions: what selects files by their bounds would pass rows over."""
    log = tmp_path / "log"
    shutil.copytree(folder / "log", log)
    live = sorted(CommitLog.open(log).engine.op_table.actions()["path"].to_pylist())
    one, other = (log / "op" / name for name in live[:2])
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(CorruptLogError, match="holds what was written as op-"):
        CommitLog.open(log).pending()


@pytest.mark.parametrize("table", ["half", "op", "topics"])
def test_a_row_group_that_says_it_has_fewer_rows_is_noticed(folder: Path, tmp_path: Path, table: str) -> None:
    """One bit of a footer: pyarrow then reads fewer rows, and says nothing."""
    file = files_by_kind(folder / "log")[f"{table} parquet"][0]
    content, rows = file.read_bytes(), pq.read_metadata(file).num_rows
    count = b"\x16" + bytes([2 * rows]) + b"&"  # in Thrift's words: a number, and the next field
    assert rows < 64
    damaged = bytearray(content)
    damaged[content.rindex(count) + 1] -= 2
    with pytest.raises(CorruptLogError, match="rows in its row groups"):
        reader_of(file, table, tmp_path / "one")(bytes(damaged))


@pytest.mark.parametrize("content", [b"", b"\0" * 512, b"{}\n", b"[1]\n", b"nonsense"])
def test_an_entry_that_a_power_cut_left_empty_is_noticed(folder: Path, tmp_path: Path, content: bytes) -> None:
    """delta-rs takes some of these for a commit that did nothing."""
    log = tmp_path / "log"
    shutil.copytree(folder / "log", log)
    entry = sorted((log / "op" / "_delta_log").glob("*.json"))[-2]
    entry.write_bytes(content)
    with pytest.raises(Exception, match=r"table '?op|table 'op'") as raised:
        CommitLog.open(log).pending()
    assert type(raised.value).__module__ == "rmq_spark.errors"


def test_a_reader_that_is_open_notices_a_damaged_entry_again_and_again(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shutil.copytree(folder / "log", log)
    reader, writer = CommitLog.open(log), CommitLog.open(log)
    before = reader.topics()
    writer.create_topic("more")
    (log / "topics" / "_delta_log" / f"{3:020d}.json").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CorruptLogError, match=r"entry 0+3.json of the Delta log of table topics is empty"):
            reader.topics()
    assert "more" not in before
