"""The socket from Spark acknowledges at once, and nothing else about it or another file changes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_spark._core.spark.socket import acknowledge_at_once

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="this kernel has no TCP_QUICKACK")


@pytest.fixture
def worker() -> Iterator[socket.socket]:
    """The worker's end of a connection like Spark's, which delays its acknowledgements."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as spark:
        end, _ = server.accept()
        with end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            yield end
            assert spark.fileno() >= 0


def acknowledges_at_once(end: socket.socket) -> bool:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


def test_spark_is_acknowledged_at_once_beside_other_open_files(worker: socket.socket, tmp_path: Path) -> None:
    assert not acknowledges_at_once(worker)
    a, b = socket.socketpair()  # a Unix domain socket, as newer Sparks may use
    with a, b, open(tmp_path / "file", "w"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        open_before = len(os.listdir("/proc/self/fd"))
        acknowledge_at_once()
        assert len(os.listdir("/proc/self/fd")) == open_before
    assert acknowledges_at_once(worker)
    assert worker.getblocking()


def test_a_default_timeout_leaves_the_socket_one_that_blocks(worker: socket.socket) -> None:
    socket.setdefaulttimeout(5)
    try:
        acknowledge_at_once()
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(worker.fileno())
    assert not acknowledges_at_once(worker)
