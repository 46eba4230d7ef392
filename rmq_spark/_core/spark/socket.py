"""The socket through which Spark sends rows to a Python worker."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from ipaddress import ip_address

OPEN_FILES = "/proc/self/fd"


def acknowledge_at_once() -> None:
    """Acknowledge received data without TCP's delay, so that a small micro-batch ends sooner.

    Spark sends a task's command, and then its rows. Spark's kernel holds the rows until the command is acknowledged.
    The worker's kernel delays the acknowledgement by up to 40 ms, in case an answer can carry it::

        Spark    command ─▶                      rows ─▶
        worker             (silent, 40 ms)   ◀─ ACK

    This does nothing where the kernel has no ``TCP_QUICKACK``, and for Unix domain sockets, which have no delay.
    """
    if not hasattr(socket, "TCP_QUICKACK") or socket.getdefaulttimeout() is not None:
        return  # with a default timeout, Python would switch the socket to one that does not block
    with suppress(OSError):
        for number in map(int, os.listdir(OPEN_FILES)):
            with suppress(OSError, ValueError):  # the socket is not connected, or was closed meanwhile
                _acknowledge(number)


def _acknowledge(number: int) -> None:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return
    with socket.socket(fileno=os.dup(number)) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6) and ip_address(duplicate.getpeername()[0]).is_loopback:
            duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
