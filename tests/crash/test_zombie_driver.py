"""A Spark driver that sleeps through its own replacement."""

from __future__ import annotations

import signal
from pathlib import Path

from processes import Program
from shop import STREAMS, assert_agreement, check, open_shop


def test_a_driver_that_wakes_after_its_batch_was_rolled_back_and_replayed_is_stopped_by_the_fence(
    tmp_path: Path,
) -> None:
    open_shop(tmp_path)
    sleeper = Program("driver.py", tmp_path, *STREAMS, DIE_ROOT=str(tmp_path), DIE_AT="prepared", DIE_BATCH="1")
    sleeper.wait_for(*STREAMS)
    sleeper.signal(signal.SIGSTOP)  # the rest of it: the JVM, the other workers
    for name in STREAMS:
        assert check(tmp_path, name).rolled_back.messages == 30
    Program("driver.py", tmp_path, *STREAMS, DIE_ROOT=str(tmp_path)).finish()
    for name in STREAMS:
        assert_agreement(tmp_path, name)
    sleeper.signal(signal.SIGCONT)
    sleeper.end()  # Spark itself ends such a query: the checkpoint has moved on
    for name in STREAMS:
        assert_agreement(tmp_path, name)
