"""Where the seeds of a test run begin, and that the run says so."""

from __future__ import annotations

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


def test_without_a_commit_seeds_count_from_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path))  # which is no repository
    assert seeds.short_commit() is None
    assert seeds.first_seed() == 1
    assert seeds.say() == "seeds: from 1 (no commit; SEED=1 to replay)"


def test_without_git_seeds_count_from_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seeds.first_seed() == 1


def test_a_run_says_where_its_seeds_begin_and_passes_it_on(pytestconfig: pytest.Config) -> None:
    from tests.conftest import pytest_report_header

    assert pytest_report_header(pytestconfig).startswith("seeds: from ")
