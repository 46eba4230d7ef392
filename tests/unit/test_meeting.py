"""Processes of a machine meet: one serves, the others ask, and each can do without the others."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rmq_spark import meeting
from rmq_spark.machine import MACHINE, Machine
from rmq_spark.meeting import Meeting, NoAnswerError, own_folder

VERSION = "1"
SOON_S = 5.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they meet in a test. A socket's path has at most 107 bytes."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    return short


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    """Makes those who meet, and closes them."""
    made: list[Meeting] = []

    def make(serve: Callable[[bytes], bytes] = bytes.upper, version: str = VERSION) -> Meeting:
        made.append(Meeting("a-log", version, serve, MACHINE))
        made[-1].join()
        return made[-1]

    yield make
    for one in made:
        one.close()


def place() -> Path:
    (lock,) = own_folder().glob("*.lock")
    return lock


def program(then: str) -> subprocess.Popen[str]:
    """Another process, which serves without ever answering, and goes on as it is told."""
    code = (
        "import os, sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
        "from rmq_spark.meeting import Meeting; from rmq_spark.machine import MACHINE\n"
        f"one = Meeting('a-log', '1', lambda request: time.sleep(60), MACHINE); one.join()\n{then}"
    )
    return subprocess.Popen([sys.executable, "-c", code, tempfile.gettempdir()], stdout=subprocess.PIPE, text=True)


def ask(one: Meeting, request: bytes = b"hello", within_s: float = SOON_S) -> bytes | None:
    return one.ask(request, MACHINE.monotonic() + within_s)


def test_the_first_one_serves_and_the_others_ask_it(meet: Callable[..., Meeting]) -> None:
    first, second, third = meet(), meet(), meet()
    assert [one.follows for one in (first, second, third)] == [False, True, True]
    assert [ask(second), ask(third, b"again"), ask(second, b"x" * 1_000_000)] == [b"HELLO", b"AGAIN", b"X" * 1_000_000]
    assert ask(first) is None


def test_several_threads_of_one_process_ask_at_once(meet: Callable[..., Meeting]) -> None:
    both = threading.Barrier(2)

    def serve(request: bytes) -> bytes:
        both.wait(SOON_S)
        return request

    meet(serve)
    asks, answers = meet(), []
    threads = [threading.Thread(target=lambda i=i: answers.append(ask(asks, bytes([i])))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [b"\0", b"\1"]


def test_when_it_closes_it_answers_first_and_another_one_serves(meet: Callable[..., Meeting]) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def serve(request: bytes) -> bytes:
        asked.set()
        go_on.wait(SOON_S)
        return request

    first, second, answers = meet(serve), meet(), []
    waits = threading.Thread(target=lambda: answers.append(ask(second)))
    waits.start()
    asked.wait(SOON_S)
    closes = threading.Thread(target=first.close)
    closes.start()
    time.sleep(0.05)
    assert closes.is_alive()
    go_on.set()
    waits.join()
    closes.join()
    assert answers == [b"hello"]
    with pytest.raises(NoAnswerError) as caught:
        ask(second)
    assert caught.value.has_ended
    assert not second.follows  # it serves
    assert ask(meet()) == b"HELLO"
    first.join()
    assert not first.follows
    first.open()
    first.join()
    assert ask(first) == b"HELLO"


def test_who_gets_no_answer_hears_of_it_in_time_and_asks_nobody_for_a_while(meet: Callable[..., Meeting]) -> None:
    go_on = threading.Event()

    def serve(request: bytes) -> bytes:
        go_on.wait(SOON_S)
        return request

    meet(serve)
    second = meet()
    with pytest.raises(NoAnswerError) as caught:
        ask(second, within_s=0.05)
    assert not caught.value.has_ended
    assert not second.follows
    assert ask(second) is None
    second.join()
    assert not second.follows
    go_on.set()


def test_a_server_that_was_killed_is_noticed_and_followed_by_another_one(meet: Callable[..., Meeting]) -> None:
    with program("print('there', flush=True); time.sleep(60)") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "there\n"
        second = meet()
        assert second.follows
        threading.Timer(0.1, killed.send_signal, [signal.SIGKILL]).start()
        with pytest.raises(NoAnswerError) as caught:
            ask(second)
        assert caught.value.has_ended
    assert not second.follows  # it serves
    assert ask(meet()) == b"HELLO"


def test_a_forked_child_does_not_serve_and_keeps_nobody_from_it(meet: Callable[..., Meeting]) -> None:
    with program("if os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); time.sleep(60)") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait()
        try:
            first = meet()
            assert not first.follows
            assert ask(meet()) == b"HELLO"
        finally:
            os.kill(child, signal.SIGKILL)


def test_another_name_with_the_same_digits_is_not_asked(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "NAME_CHARS", 0)
    meet()
    other = Meeting("another-log", VERSION, bytes.upper, MACHINE)
    other.join()
    assert not other.follows


def test_another_version_is_not_asked(meet: Callable[..., Meeting]) -> None:
    meet()
    other = meet(version="2")
    assert not other.follows
    assert ask(other) is None


def test_another_clock_is_not_asked(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    meet()
    monkeypatch.setattr(meeting, "_clock", lambda: "of a container")
    assert not meet().follows


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_nobody_meets_where_another_user_may_look(folder: Path, meet: Callable[..., Meeting], mode: int) -> None:
    place = own_folder()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    place.chmod(mode)
    with pytest.raises(PermissionError, match="is not this user's alone"):
        own_folder()
    assert [one.follows for one in (meet(), meet())] == [False, False]
    assert list(place.iterdir()) == []


def test_nobody_meets_behind_a_link(folder: Path, tmp_path: Path, meet: Callable[..., Meeting]) -> None:
    tmp_path.chmod(0o700)
    (folder / f"rmq_spark-{os.getuid()}").symlink_to(tmp_path)
    assert [one.follows for one in (meet(), meet())] == [False, False]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_says_something_else_ends_its_own_line_alone(meet: Callable[..., Meeting]) -> None:
    meet()
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(str(place().with_suffix(".socket")))
    stranger.sendall(b"\xff" * 64)
    stranger.settimeout(SOON_S)
    with suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass  # until its line is closed
    stranger.close()
    assert ask(meet()) == b"HELLO"


def test_what_is_too_long_is_not_asked(meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MESSAGE_BYTES_MAX", 1_000)
    meet()
    second = meet()
    assert ask(second, b"x" * 1_001) is None
    assert ask(second, b"x" * 1_000) == b"X" * 1_000


def test_a_server_without_files_lets_others_in_later_and_serves_those_who_are_in(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cut the lines of all, who took that for its end while it still worked for them; and it served nobody again."""
    monkeypatch.setattr(meeting, "TRIES_AGAIN_S", 0.01)
    first = meet()
    second = meet()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    there = place().with_suffix(".socket")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        guest.connect(str(there))
        time.sleep(0.1)
        assert ask(second) == b"HELLO"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    guest.settimeout(SOON_S)
    assert guest.recv(4)
    guest.close()
    assert ask(meet()) == b"HELLO"
    first.close()


def test_a_server_without_threads_sends_away_who_comes(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Machine):
        full = False

        def start_thread(self, *given: Any, **more: Any) -> threading.Thread:
            if self.full:
                raise RuntimeError("can't start new thread")
            return super().start_thread(*given, **more)

    machine = Full()
    first = Meeting("a-log", VERSION, bytes.upper, machine)
    first.join()
    second = meet()
    machine.full = True
    assert not meet().follows
    assert ask(second) == b"HELLO"
    machine.full = False
    assert ask(meet()) == b"HELLO"
    first.close()


def test_a_line_that_breaks_is_no_end_of_the_server(meet: Callable[..., Meeting]) -> None:
    """It may work on what it was asked for."""
    first, second = meet(), meet()
    assert first._server is not None
    waits, go_on = threading.Event(), threading.Event()

    def breaks(request: bytes) -> bytes:
        waits.set()
        go_on.wait(SOON_S)
        return request

    first._server._serve = breaks
    found: list[NoAnswerError] = []

    def asks() -> None:
        with pytest.raises(NoAnswerError) as caught:
            ask(second)
        found.append(caught.value)

    thread = threading.Thread(target=asks)
    thread.start()
    waits.wait(SOON_S)
    for line in list(first._server._lines):
        line.end()
    thread.join()
    assert not found[0].has_ended
    assert not second.follows
    go_on.set()


def test_a_server_whose_lock_file_was_removed_leaves_the_socket_of_the_next_one(meet: Callable[..., Meeting]) -> None:
    first = meet()
    place().with_suffix(".lock").unlink()
    second = meet()
    assert not second.follows
    first.close()
    first.close()
    assert ask(meet()) == b"HELLO"


def test_why_nobody_meets_is_told_once(
    folder: Path, meet: Callable[..., Meeting], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "rmq_spark")
    monkeypatch.setattr(meeting, "APART_S", 0.0)
    own_folder().chmod(0o755)
    one = meet()
    one.join()
    (told,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.INFO]
    assert "commits are not shared with other processes: PermissionError" in told


def test_a_request_that_cannot_be_served_ends_the_line_and_not_the_server(meet: Callable[..., Meeting]) -> None:
    def serve(request: bytes) -> bytes:
        if request == b"bad":
            raise ValueError(request)
        return request

    meet(serve)
    second, third = meet(), meet()
    with pytest.raises(NoAnswerError):
        ask(second, b"bad")
    assert ask(third, b"good") == b"good"
