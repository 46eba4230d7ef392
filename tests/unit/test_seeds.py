"""Where the seeds of a test run begin, and that the run says so."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support import seeds


@pytest.fixture(autouse=True)
def _no_seed_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEED", raising=False)


def at_commit(monkeypatch: pytest.MonkeyPatch, commit: str | None) -> None:
    monkeypatch.setattr(seeds, "short_commit", lambda: commit)


def test_seeds_count_from_the_short_hash_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    at_commit(monkeypatch, "75bcd15")
    assert seeds.first_seed() == 123456789
    assert seeds.say() == "seeds: from 123456789 (commit 75bcd15; SEED=123456789 to replay)"


def test_a_given_seed_comes_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    at_commit(monkeypatch, "75bcd15")
    monkeypatch.setenv("SEED", "7")
    assert seeds.first_seed() == 7
    assert seeds.say() == "seeds: from 7 (SEED)"


@pytest.mark.parametrize("lacks", ["GIT_DIR", "PATH"], ids=["a repository", "git itself"])
def test_without_a_commit_seeds_count_from_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str) -> None:
    monkeypatch.setenv(lacks, str(tmp_path))
    assert seeds.short_commit() is None
    assert seeds.first_seed() == 1
    assert seeds.say() == "seeds: from 1 (no commit; SEED=1 to replay)"


def test_a_run_says_where_its_seeds_begin_and_passes_it_on(pytestconfig: pytest.Config) -> None:
    from tests.conftest import pytest_report_header

    assert pytest_report_header(pytestconfig).startswith("seeds: from ")


def test_each_of_alike_cases_has_its_turn_at_some_commit(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.conftest import take_turns

    def run(tier: str, seed: int, cases: int) -> list[str]:
        monkeypatch.setattr(seeds, "TIER", tier)
        monkeypatch.setenv("SEED", str(seed))
        make = partial(pytest.Function.from_parent, request.node.parent, callobj=lambda: None)
        items = [make(name=f"case[{n}]", originalname="case") for n in range(cases)]
        for item in items:
            item.add_marker(pytest.mark.turns(3))
        take_turns(items)
        return [item.name for item in items if item.get_closest_marker("long") is None]

    assert [run("quick", seed, 4) for seed in (6, 7, 8)] == [["case[0]", "case[3]"], ["case[1]"], ["case[2]"]]
    assert run("quick", 7, 2) == ["case[0]", "case[1]"], "they were named"
    assert len(run("every", 7, 4)) == 4
