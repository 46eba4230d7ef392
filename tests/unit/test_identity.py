"""Who a micro-batch is, where no session tells it: by the checkpoint's files, or not at all."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmq_spark._core.protocol import identity
from rmq_spark._core.protocol.identity import known_query_id, lineage_of, read_checkpoint, require_same_log
from rmq_spark.errors import CheckpointMismatchError, OptionError
from tests.support.inside import Identity, identity_of, input_hash_of

HIDDEN: Any = SimpleNamespace(sparkSession=None)
"""A micro-batch over Spark Connect: its session has no context to ask."""


ADVICE = "or begin with a new checkpoint"


def telling(query_id: str) -> Any:
    """A micro-batch of a query whose id the session tells, and nothing else."""
    context = SimpleNamespace(getLocalProperty=lambda name: query_id)
    return SimpleNamespace(sparkSession=SimpleNamespace(_sc=context))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of query ``q``, which runs batch 8."""
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id":"q"}')
    (tmp_path / identity.ID_FILE).write_text('{"id":"q"}')
    for batch_id in (7, 8):
        (tmp_path / "offsets" / str(batch_id)).write_text(f"v1\n{batch_id}")
    return tmp_path


spellings = itertools.count(1)


def as_another_process(checkpoint: Path) -> str:
    """Its path, by which nothing is known of it yet: a process remembers what it has read by the path that it got."""
    return f"{checkpoint}{'/.' * next(spellings)}"


def refuse_to_write(checkpoint: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands where the file is written, before it is moved to its place."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "beside")
    (checkpoint / f".{file}.beside").mkdir()


REFUSED = {
    "nobody says whose it is": (HIDDEN, None, r"Spark Connect.*give consume checkpoint_location=\.\.\."),
    "of another query": (
        telling("p"), "", "that of query q, and this is query p: give consume the checkpointLocation",
    ),
    "not there": (HIDDEN, "none", "cannot be read from Python"),
    "a new id of an old checkpoint": (
        telling("q"), None, r"may be a new one of an old checkpoint: give consume checkpoint_location=",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "where", "words"), REFUSED.values(), ids=REFUSED)
def test_a_batch_of_which_the_checkpoint_says_nothing_is_refused(
    checkpoint: Path, batch: Any, where: str | None, words: str
) -> None:
    folder = None if where is None else str(checkpoint / where)
    with pytest.raises(OptionError, match=words):
        identity_of(batch, 8, folder, None, "consume", ADVICE)


@pytest.mark.parametrize("batch", [HIDDEN, telling("q")])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_checkpoint_tells_the_query_and_the_offsets(checkpoint: Path, batch: Any, prefix: str) -> None:
    found = identity_of(batch, 8, f"{prefix}{checkpoint}", None, "consume", ADVICE)
    assert found == Identity("q", hashlib.sha256(b"v1\n8").hexdigest()[:32])


@pytest.mark.parametrize("batch_id", [0, 7, 9])
def test_a_checkpoint_that_stands_at_another_batch_is_refused(checkpoint: Path, batch_id: int) -> None:
    with pytest.raises(CheckpointMismatchError, match=rf"runs batch {batch_id}.* is 8.*another query's"):
        identity_of(HIDDEN, batch_id, str(checkpoint), None, "consume", ADVICE)


def test_a_checkpoint_belongs_to_one_commit_log(checkpoint: Path) -> None:
    """A sink with another path went on there: what it sent was missing in the first log, and nobody said so."""
    for _ in range(2):
        require_same_log(as_another_process(checkpoint), None, "one", "a/log")
    assert (checkpoint / identity.LOG_FILE).read_text() == "one"
    with pytest.raises(CheckpointMismatchError, match=r"went into commit log one, and b/log is commit log two"):
        require_same_log(str(checkpoint), None, "two", "b/log")
    (checkpoint / identity.LOG_FILE).write_text("")  # a crash while it was written
    require_same_log(str(checkpoint), None, "two", "b/log")
    assert (checkpoint / identity.LOG_FILE).read_text() == "two"


def test_a_checkpoint_that_cannot_be_written_stays_without(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint / identity.LOG_FILE).mkdir()
    require_same_log(str(checkpoint), None, "one", "a/log")
    assert re.search("cannot be written to, .*: (IsADirectoryError|OSError): ", caplog.text)


def test_a_sink_whose_checkpoint_cannot_be_found_has_a_name_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    assert identity_of(telling("q"), 0, None, None, "TransactionalSink", None) == Identity("q", None)
    assert "pass checkpoint_location" in caplog.text


# ---------------------------------------------------------------- the id that Spark makes anew
def name_of(checkpoint: Path, batch_id: int, advice: str | None = ADVICE) -> str:
    """By which query's name a process that starts knows a batch."""
    return identity_of(HIDDEN, batch_id, as_another_process(checkpoint), None, "consume", advice).query_id


def lose_metadata(checkpoint: Path, batch_id: int) -> None:
    """Spark 4.0 makes it anew, with another id, before it runs the batch."""
    (checkpoint / "metadata").write_text('{"id":"made anew"}')
    for file in (checkpoint / "offsets").iterdir():
        file.unlink()
    (checkpoint / "offsets" / str(batch_id)).write_text("v1")


def test_the_first_batch_s_id_stays_that_of_the_checkpoint(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint / identity.ID_FILE).unlink()
    lose_metadata(checkpoint, 0)
    (checkpoint / "metadata").write_text('{"id":"first"}')
    assert name_of(checkpoint, 0) == "first"
    for batch_id in (0, 1):
        lose_metadata(checkpoint, batch_id)
        assert name_of(checkpoint, batch_id) == "first"
    assert "query first, which Spark calls made anew now" in caplog.text


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"id', "{}"])
def test_a_checkpoint_with_batches_and_no_id_that_we_know_is_refused(checkpoint: Path, content: str | None) -> None:
    file = checkpoint / identity.ID_FILE
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(CheckpointMismatchError, match=r"is at batch 8, .* Restore txmq.query_id .* new checkpoint"):
        name_of(checkpoint, 8)
    assert not file.exists() or file.read_text() == content
    file.write_text('{"id": "q0"}')  # as the error says
    assert name_of(checkpoint, 8) == "q0"


def test_an_id_that_cannot_be_read_is_not_taken_for_a_lost_one(checkpoint: Path) -> None:
    (checkpoint / identity.ID_FILE).unlink()
    (checkpoint / identity.ID_FILE).mkdir()
    with pytest.raises(OptionError, match="cannot be read"):
        known_query_id(str(checkpoint), None, read_checkpoint(str(checkpoint)), ADVICE)


def test_an_application_with_a_name_needs_no_id(checkpoint: Path) -> None:
    """The log knows its last batch, and refuses it under another query's id."""
    (checkpoint / identity.ID_FILE).unlink()
    assert name_of(checkpoint, 8, None) == "q"
    assert name_of(checkpoint, 8) == "q"


@pytest.mark.parametrize("content", ["", '{"id'])
def test_a_damaged_id_says_that_batches_may_have_run(checkpoint: Path, content: str) -> None:
    """Batch 0 was sent, and its end never reached the checkpoint: it would be sent again under Spark's new id."""
    (checkpoint / identity.ID_FILE).write_text(content)
    lose_metadata(checkpoint, 0)
    with pytest.raises(CheckpointMismatchError, match=r"is at batch 0, .* Restore txmq.query_id"):
        name_of(checkpoint, 0)


def test_a_checkpoint_that_cannot_keep_the_id_is_refused_before_anything_is_sent(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is there in part would say that batches may have run."""
    (checkpoint / identity.ID_FILE).unlink()
    lose_metadata(checkpoint, 0)
    with monkeypatch.context() as patch:
        refuse_to_write(checkpoint, identity.ID_FILE, patch)
        with pytest.raises(OptionError, match=r"cannot be written to \(.*\).* right to write there; or begin"):
            name_of(checkpoint, 0)
        assert not (checkpoint / identity.ID_FILE).exists()
        assert name_of(checkpoint, 0, None) == "made anew"
    assert "known by Spark's file metadata alone" in caplog.text
    assert name_of(checkpoint, 0) == "made anew"
    assert (checkpoint / identity.ID_FILE).exists()


# ---------------------------------------------------------------- what was sent before
def test_a_checkpoint_holds_the_batches_whose_offsets_it_has(checkpoint: Path) -> None:
    lineage = identity_of(HIDDEN, 8, str(checkpoint), None, "consume", ADVICE).lineage
    assert lineage is not None
    assert lineage.contains(7, input_hash_of(b"v1\n7"))
    assert not lineage.contains(7, input_hash_of(b"another"))
    assert not lineage.contains(6, input_hash_of(b"v1\n6"))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"batch_id": "six", "input_hash": "hash of 6"}'])
def test_the_last_batch_stays_when_spark_has_cleaned_its_offsets(checkpoint: Path, content: str) -> None:
    lineage = lineage_of(str(checkpoint), None)
    lineage.record(6, "hash of 6")
    assert lineage.contains(6, "hash of 6")
    assert not lineage.contains(6, "another")
    assert not lineage.contains(5, "hash of 6")
    (checkpoint / identity.LAST_BATCH_FILE).write_text(content)
    assert not lineage.contains(6, "hash of 6")
    lineage.record(6, "hash of 6")
    assert lineage.contains(6, "hash of 6")


def test_what_is_kept_is_not_written_again(checkpoint: Path) -> None:
    lineage = lineage_of(str(checkpoint), None)
    lineage.record(6, "hash of 6")
    before = (checkpoint / identity.LAST_BATCH_FILE).stat()
    lineage.record(6, "hash of 6")
    assert (checkpoint / identity.LAST_BATCH_FILE).stat() == before


def test_a_checkpoint_that_cannot_keep_the_last_batch_says_what_that_leads_to(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_to_write(checkpoint, identity.LAST_BATCH_FILE, monkeypatch)
    lineage_of(str(checkpoint), None).record(6, "hash of 6")
    assert "cannot be written to (" in caplog.text
    assert "offsets/6, the next batch with messages is refused" in caplog.text


def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_a_fork(checkpoint: Path) -> None:
    (checkpoint / "offsets" / "7").unlink()
    (checkpoint / "offsets" / "7").mkdir()
    with pytest.raises(OptionError, match="cannot be read from Python"):
        lineage_of(str(checkpoint), None).contains(7, "hash")
