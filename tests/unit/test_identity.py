"""Who a micro-batch is, where no session tells it: by the checkpoint's files, or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmq_spark.errors import CheckpointMismatchError, OptionError
from rmq_spark.sink import identity
from rmq_spark.sink.identity import Identity, identity_of, require_same_log

HIDDEN: Any = SimpleNamespace(sparkSession=None)
"""A micro-batch over Spark Connect: its session has no context to ask."""


def telling(query_id: str) -> Any:
    """A micro-batch of a query whose id the session tells, and nothing else."""
    context = SimpleNamespace(getLocalProperty=lambda name: query_id)
    return SimpleNamespace(sparkSession=SimpleNamespace(_sc=context))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of query ``q``, which runs batch 8."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id":"q"}')
    for batch_id in (7, 8):
        (tmp_path / "offsets" / str(batch_id)).write_text(f"v1\n{batch_id}")
    return tmp_path


def test_a_batch_of_which_nobody_says_whose_it_is_is_refused() -> None:
    with pytest.raises(OptionError, match=r"Spark Connect.*give consume checkpoint_location=\.\.\."):
        identity_of(HIDDEN, 0, None, None, "consume")


@pytest.mark.parametrize("batch", [HIDDEN, telling("q")])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_checkpoint_tells_the_query_and_the_offsets(checkpoint: Path, batch: Any, prefix: str) -> None:
    found = identity_of(batch, 8, f"{prefix}{checkpoint}", None, "consume")
    assert found == Identity("q", hashlib.sha256(b"v1\n8").hexdigest()[:32])


def test_the_checkpoint_of_another_query_is_refused(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match="that of query q, and this is query p: give consume the checkpointLocation"):
        identity_of(telling("p"), 8, str(checkpoint), None, "consume")


@pytest.mark.parametrize("batch_id", [0, 7, 9])
def test_a_checkpoint_that_stands_at_another_batch_is_refused(checkpoint: Path, batch_id: int) -> None:
    with pytest.raises(CheckpointMismatchError, match=rf"runs batch {batch_id}.* is 8.*another query's"):
        identity_of(HIDDEN, batch_id, str(checkpoint), None, "consume")


def test_a_checkpoint_belongs_to_one_commit_log(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink with another path went on there: what it sent was missing in the first log, and nobody said so."""
    for _ in range(2):
        require_same_log(str(checkpoint), None, "one", "a/log")
        monkeypatch.setattr(identity, "_known_logs", set())  # as in another process
    assert (checkpoint / identity.LOG_FILE).read_text() == "one"
    with pytest.raises(CheckpointMismatchError, match=r"went into commit log one, and b/log is commit log two"):
        require_same_log(str(checkpoint), None, "two", "b/log")
    (checkpoint / identity.LOG_FILE).write_text("")  # a crash while it was written
    require_same_log(str(checkpoint), None, "two", "b/log")
    assert (checkpoint / identity.LOG_FILE).read_text() == "two"


def test_a_checkpoint_that_cannot_be_written_to_stays_without(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / identity.LOG_FILE).mkdir()
    require_same_log(str(checkpoint), None, "one", "a/log")
    assert "cannot be written to" in caplog.text


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read from Python"):
        identity_of(HIDDEN, 0, str(tmp_path / "none"), None, "consume")


def test_a_query_whose_checkpoint_cannot_be_found_is_known_by_its_id_alone_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert identity_of(telling("q"), 0, None, None, "consume") == Identity("q", None)
    assert "pass checkpoint_location" in caplog.text
