"""Checkpoints that lost a file, came back from an older copy, or are new: no message twice, none dropped silently."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import start_driver
from tests.crash.shop import accepted, add_input, assert_agreement, batches_in, listener, open_shop

pytestmark = pytest.mark.long


def assert_all_sent_once(root: Path) -> None:
    assert_agreement(root, "key", accepted("key", batches_in(root)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop whose stream has run to the end of its input."""
    root = tmp_path_factory.mktemp("checkpoint") / "shop"
    open_shop(root, ["key"])
    start_driver(root, "key").finish()
    assert_all_sent_once(root)
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """The same for each test, under the path that the source's checkpoint knows."""
    shutil.copytree(finished, tmp_path / "kept")
    yield finished
    shutil.rmtree(finished)
    shutil.move(tmp_path / "kept", finished)
    listener(finished, "key").create_fence(moved=True)  # a copy answers only when somebody says that it is the original


def assert_refused(root: Path, *words: str) -> None:
    driver = start_driver(root, "key")
    assert driver.end() != 0
    said = driver.text()
    remedy = "Go on with the checkpoint that this app last used; or, if the input is meant to be sent again"
    for word in ("CheckpointMismatchError", remedy, *words):
        assert word in said, said[-4000:]


def test_a_checkpoint_that_lost_its_newest_commit_runs_the_batch_again_and_sends_nothing_twice(root: Path) -> None:
    commits = root / "key" / "checkpoint" / "commits"
    for file in (commits / "2", commits / ".2.crc"):
        file.unlink(missing_ok=True)
    start_driver(root, "key").finish()
    assert (commits / "2").exists()
    assert_all_sent_once(root)


def test_a_checkpoint_restored_from_an_older_copy_is_refused_with_the_remedy(root: Path) -> None:
    checkpoint = root / "key" / "checkpoint"
    shutil.copytree(checkpoint, root / "older")
    add_input(root, 1)
    start_driver(root, "key").finish()
    assert_all_sent_once(root)
    shutil.rmtree(checkpoint)
    shutil.move(root / "older", checkpoint)
    assert_refused(
        root,
        "batch 3 of app 'key' was prepared when the checkpoint's file offsets/3 held something else",
        "restored from an older copy",
    )
    assert_all_sent_once(root)


def test_a_new_checkpoint_under_the_same_app_id_is_refused_with_the_remedy(root: Path) -> None:
    shutil.rmtree(root / "key" / "checkpoint")
    assert_refused(root, "batch 0 of app 'key' was prepared by query", "the checkpoint is a new one")
    assert_all_sent_once(root)
