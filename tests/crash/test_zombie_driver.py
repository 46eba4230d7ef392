"""A Spark driver that sleeps through its own replacement."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.crash.processes import start_driver
from tests.crash.shop import STREAMS, assert_agreement, check, open_shop
from tests.torture.kill.points import Fate

pytestmark = pytest.mark.long


def test_a_driver_that_wakes_after_its_batch_was_rolled_back_and_replayed_is_stopped_by_the_fence(
    tmp_path: Path,
) -> None:
    open_shop(tmp_path)
    sleeper = start_driver(tmp_path, *STREAMS, fate=Fate("prepared", stops=True, batch=1, attempt=1))
    sleeper.wait_for(*STREAMS)
    sleeper.signal(signal.SIGSTOP)  # the rest of it: the JVM, the other workers
    for name in STREAMS:
        assert check(tmp_path, name).rolled_back.messages == 30
    start_driver(tmp_path, *STREAMS).finish()
    for name in STREAMS:
        assert_agreement(tmp_path, name)
    sleeper.signal(signal.SIGCONT)
    sleeper.end()  # Spark itself ends such a query: the checkpoint has moved on
    for name in STREAMS:
        assert_agreement(tmp_path, name)
