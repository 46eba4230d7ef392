"""Processes of a machine meet: one of them serves the others, who ask it.

::

    process 1 ── has the lock of the place ───────────────┐ answers
    process 2 ── finds the lock taken ── asks ──▶ socket ─┤
    process 3 ── finds the lock taken ── asks ──▶ socket ─┘

The lock and the socket lie in a folder of the user's own, beside other temporary files. The lock is free as soon as its
process has ended, however it ended. Then the next one that comes serves.

Whoever asks must be able to do without an answer: the one that serves may end, stand still, or be of another version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO
from weakref import WeakSet

from rmq_spark.machine import Machine
from rmq_spark.redaction import traceback_of

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

HELLO_S_MAX = 0.5
"""Who serves says so at once. Else it is not asked."""
APART_S = 10.0
"""Who got no answer asks nobody for so long."""
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
ENDING_S_MAX = 0.2
"""A process that ends needs so long to give up its lock."""
CLOSING_S_MAX = 6.0
"""Who closes answers first what it has been asked."""
TRIES_AGAIN_S = 1.0
"""So long a server that can let nobody in, for want of files or threads, waits before it tries again."""
NAME_CHARS = 16
"""Of a file where they meet. On macOS a socket's path has 103 bytes at most, and half are the temporary folder's."""
WAITING_MAX = 64
"""Processes that wait to be let in."""

_LENGTH = struct.Struct("!I")


class NoAnswerError(Exception):
    """Somebody was asked and has not answered: nobody knows what came of it.

    Parameters
    ----------
    has_ended : bool
        Whether it has surely ended, or closed: then it works on nothing any more that it was asked for.
    """

    def __init__(self, has_ended: bool) -> None:
        super().__init__("no answer")
        self.has_ended = has_ended


class Meeting:
    """Where processes of one user on one machine meet under a name.

    Parameters
    ----------
    name : str
        Of what they meet for.
    version : str
        Processes of another version are not asked.
    serve : callable
        Takes a request and returns the answer, in a thread of its own.
    machine : Machine
    """

    def __init__(self, name: str, version: str, serve: Callable[[bytes], bytes], machine: Machine) -> None:
        self._serve = serve
        self._machine = machine
        self._place = hashlib.sha256(name.encode()).hexdigest()[:NAME_CHARS]
        self._who = {"name": name, "version": version, "clock": _clock()}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._server: _Server | None = None
        self._followed: str | None = None  # the id of the one that serves
        self._idle: list[_Line] = []
        self._apart_until_s = 0.0
        self._is_closed = False
        self._told = ""

    @property
    def follows(self) -> bool:
        """Whether another process serves this one."""
        return self._followed is not None

    def join(self) -> None:
        """Serve, if nobody does. Else ask the one that does, from now on."""
        with self._lock:
            if self._machine.monotonic() < self._apart_until_s:
                return
            try:
                self._meet()
            except Exception as problem:  # a full disk, or the other one does not listen yet
                self._stay_apart(APART_S)
                said = f"commits are not shared with other processes: {type(problem).__name__}: {problem}"
                logger.log(logging.DEBUG if said == self._told else logging.INFO, "%s", said)
                self._told = said

    def _meet(self) -> None:
        if self._is_closed or self._server is not None or self._followed is not None:
            return
        place = own_folder() / self._place
        self._server = _Server.open(place, self._who, self._serve, self._machine)
        if self._server is None:
            self._idle.append(self._connected(place))
            self._followed = self._idle[-1].server

    def ask(self, request: bytes, until_s: float) -> bytes | None:
        """The answer of the process that serves; None when nobody was asked.

        Parameters
        ----------
        request : bytes
        until_s : float
            Waits until then, by ``machine.monotonic()``.

        Raises
        ------
        NoAnswerError
            When the request was sent, and no answer came.
        """
        if len(request) > MESSAGE_BYTES_MAX:
            return None
        with self._lock:
            if self._followed is None:
                return None
            line = self._idle.pop() if self._idle else None
        try:
            line = line or self._connected(own_folder() / self._place)
        except Exception:
            with self._lock:
                self._stay_apart(APART_S)
            return None
        try:
            line.send(request, until_s)
            answer = line.receive(until_s)
        except Exception as problem:
            line.close()
            is_cut = isinstance(problem, (EOFError, ConnectionError))
            raise NoAnswerError(self._has_ended(line.server) if is_cut else self._stays_apart()) from problem
        with self._lock:
            if self._followed == line.server:
                self._idle.append(line)
            else:
                line.close()
        return answer

    def _has_ended(self, server: str) -> bool:
        """Whether the one that was asked has given up its lock, which a process has as long as it lives and serves: now
        this one has it, or asks another one that has."""
        with self._lock:
            if self._followed == server:
                self._stay_apart(0.0)
            until_s = self._machine.monotonic() + ENDING_S_MAX
            while self._followed is None and self._server is None and self._machine.monotonic() < until_s:
                if self._is_closed:
                    return False
                try:
                    self._meet()
                except Exception:  # its files are closed one after the other
                    self._machine.sleep(ENDING_S_MAX / 20)
            if self._server is not None or self._followed not in (None, server):
                return True
            self._stay_apart(APART_S)
            return False

    def _stays_apart(self) -> bool:
        with self._lock:
            self._stay_apart(APART_S)
        return False

    def _stay_apart(self, seconds: float) -> None:
        self._followed = None
        self._apart_until_s = self._machine.monotonic() + seconds
        for line in self._idle:
            line.close()
        self._idle.clear()

    def part(self, seconds: float) -> None:
        """Ask nobody for some time."""
        with self._lock:
            self._stay_apart(seconds)

    def open(self) -> None:
        """Meet again after :meth:`close`."""
        self._is_closed = False

    def close(self) -> None:
        """Serve no more, after the answers to what was asked; and ask no more."""
        if os.getpid() != self._pid:  # a forked copy: the meeting is its parent's
            return
        with self._lock:
            self._is_closed = True
            self._stay_apart(0.0)
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _connected(self, place: Path) -> _Line:
        """A line to the process that serves."""
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line = _Line(ours, self._machine)
        try:
            until_s = self._machine.monotonic() + HELLO_S_MAX
            ours.settimeout(HELLO_S_MAX)
            ours.connect(str(_socket_of(place)))
            hello = json.loads(line.receive(until_s))
            other = {key: hello[key] for key, value in self._who.items() if hello[key] != value}
            if other:
                raise ValueError(f"process {hello['pid']} has another {' and '.join(other)}: {other}")
        except BaseException:
            line.close()
            raise
        line.server = hello["id"]
        if self._followed is None and hello["pid"] != os.getpid():
            logger.info("process %d makes the commits of this one with its own", hello["pid"])
        return line


class _Line:
    """A socket through which whole messages go.

    Parameters
    ----------
    ends_at : socket
    machine : Machine
        By whose clock waits end.
    """

    def __init__(self, ends_at: socket.socket, machine: Machine) -> None:
        self._socket = ends_at
        self._machine = machine
        self.server = ""  # who is at its other end

    def send(self, message: bytes, until_s: float | None = None) -> None:
        """Send a message; TimeoutError after a time."""
        self._wait_until(until_s)
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def receive(self, until_s: float | None = None) -> bytes:
        """The next message; TimeoutError after a time, and EOFError when the other process has ended."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until_s))
        if length > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {length} bytes was announced: at most {MESSAGE_BYTES_MAX} are allowed")
        return self._exactly(length, until_s)

    def _exactly(self, length: int, until_s: float | None) -> bytes:
        received = bytearray(length)
        view = memoryview(received)
        while view:
            self._wait_until(until_s)
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError("the other process has ended")
            view = view[count:]
        return bytes(received)

    def _wait_until(self, until_s: float | None) -> None:
        if until_s is not None:
            left_s = until_s - self._machine.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)

    def end(self) -> None:
        """Wake up the thread that waits for a message: no more come."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it in this process."""
        self._socket.close()


class _Server:
    """Answers until it is closed, or its process ends.

    Parameters
    ----------
    place : Path
    held : file
        Whose lock this process has.
    door : socket
        Listens.
    who : mapping
        What both must have alike.
    serve : callable
    machine : Machine
    """

    def __init__(
        self,
        place: Path,
        held: IO[bytes],
        door: socket.socket,
        who: Mapping[str, str],
        serve: Callable[[bytes], bytes],
        machine: Machine,
    ) -> None:
        self._socket_path = _socket_of(place)
        self._inode = self._socket_path.stat().st_ino
        self._held = held
        self._door = door
        self._hello = {**who, "pid": os.getpid(), "id": machine.unique_id()}
        self._serve = serve
        self._machine = machine
        self._lock = threading.RLock()
        self._lines: set[_Line] = set()
        self._asked = 0
        self._nobody_waits = threading.Event()
        self._nobody_waits.set()
        self._is_closed = False
        _SERVERS.add(self)
        machine.start_thread(self._let_in, "txmq-meeting", daemon=True)

    @classmethod
    def open(
        cls, place: Path, who: Mapping[str, str], serve: Callable[[bytes], bytes], machine: Machine
    ) -> _Server | None:
        """Serve at a place; None when another process does."""
        held = place.with_suffix(".lock").open("ab")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.close()
            return None
        except BaseException:
            held.close()
            raise
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _socket_of(place).unlink(missing_ok=True)  # of a process that was killed
            door.bind(str(_socket_of(place)))
            door.listen(WAITING_MAX)
            return cls(place, held, door, who, serve, machine)
        except BaseException:
            door.close()
            _free(held)
            raise

    def _let_in(self) -> None:
        while not self._is_closed:
            try:
                came, _ = self._door.accept()
            except OSError as problem:
                if not self._is_closed:  # too many open files: those who are in go on
                    logger.warning("no other process can be let in now: %s", problem)
                    self._machine.sleep(TRIES_AGAIN_S)
                continue
            line = _Line(came, self._machine)
            try:
                self._machine.start_thread(partial(self._answer, line), "txmq-meeting", daemon=True)
            except RuntimeError as problem:
                logger.warning("another process cannot be served now: %s", problem)
                line.close()

    def _answer(self, line: _Line) -> None:
        """Answer what comes on a line, one request after the other."""
        with self._lock:
            self._lines.add(line)
        try:
            line.send(json.dumps(self._hello).encode())
            while True:
                request = line.receive()
                if not self._begins():
                    return
                try:
                    line.send(self._serve(request))
                finally:
                    self._ends()
        except (OSError, EOFError):
            pass  # the other one has ended
        except Exception as problem:
            logger.warning("another process was not answered: %s", traceback_of(problem))
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    def _begins(self) -> bool:
        with self._lock:
            if not self._is_closed:
                self._asked += 1
                self._nobody_waits.clear()
            return not self._is_closed

    def _ends(self) -> None:
        with self._lock:
            self._asked -= 1
            if self._asked == 0:
                self._nobody_waits.set()

    def close(self) -> None:
        """Answer what was asked, and let another process serve."""
        with self._lock:
            self._is_closed = True
        self._nobody_waits.wait(CLOSING_S_MAX)
        with suppress(OSError):
            if self._socket_path.stat().st_ino == self._inode:
                self._socket_path.unlink()
        with self._lock:
            lines = list(self._lines)
        for line in [_Line(self._door, self._machine), *lines]:
            line.end()
        self._door.close()
        _free(self._held)

    def leave_to_parent(self) -> None:
        """Close what a forked child has open, too: behind its door nobody would answer, when the parent has ended."""
        for each in (self._door.close, self._held.close, *(line.close for line in self._lines)):
            with suppress(OSError):
                each()


def own_folder() -> Path:
    """The folder of this user for what processes meet at.

    Raises
    ------
    OSError
        When there can be none, or another user may look into it.
    """
    if fcntl is None:
        raise OSError("this system has no locks that end with their process")
    folder = Path(tempfile.gettempdir()) / f"rmq_spark-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _socket_of(place: Path) -> Path:
    return place.with_suffix(".socket")


def _free(held: IO[bytes]) -> None:
    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open, too
        held.close()


def _clock() -> str:
    """Of what clock the times are that processes compare. Those of a container may have one of their own."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    return ""


_SERVERS: WeakSet[_Server] = WeakSet()


def _leave_to_parent() -> None:
    for server in list(_SERVERS):
        server.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
