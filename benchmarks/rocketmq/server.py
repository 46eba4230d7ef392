"""RocketMQ 5.3.3 beside our producer: a name server and a broker on the loopback, and its own Java client.

The client sends as our benchmark does: so many threads, each of which sends one message after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.maven import Jar, NoJarsError, fetched, free_ports, java

VERSION = "5.3.3"
TOPIC = "orders"
START_S_MAX = 60
END_S_MAX = 15
NO_SENDS_S_MAX = 60
"""The client may take so much longer than the time it sends for."""
SOURCES = Path(__file__).parent
OPENED = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("sun.nio.ch", "java.nio", "java.lang")]

NAME_SERVER = """
listenPort={names}
bindAddress=127.0.0.1
"""
BROKER = """
brokerClusterName=bench
brokerName=bench
brokerId=0
brokerIP1=127.0.0.1
bindAddress=127.0.0.1
listenPort={port}
haListenPort={slaves}
namesrvAddr=127.0.0.1:{names}
storePathRootDir={folder}/store
storePathCommitLog={folder}/store/commitlog
mappedFileSizeCommitLog=268435456
flushDiskType={flush}
"""


class NoRocketmqError(Exception):
    """There is no RocketMQ here: Java or the registry is missing, or it does not start."""


class Rocketmq:
    """A name server and a broker. They stand still while nobody sends. Use :func:`running`."""

    def __init__(self, folder: Path, names: int, programs: list[subprocess.Popen[bytes]]) -> None:
        self._folder = folder
        self._names = names
        self._programs = programs

    def sends(self, body: bytes, threads: int, warm_up_s: float, seconds: float) -> tuple[float, float, float]:
        """Sends a second, and the median and the 99th percentile of one in milliseconds, of a client of its own.

        Raises
        ------
        NoRocketmqError
        """
        self._signal(signal.SIGCONT)
        arguments = [f"127.0.0.1:{self._names}", TOPIC, body.decode(), str(threads), str(warm_up_s), str(seconds)]
        command = _java_of(self._folder, "-Xmx512m", str(SOURCES / "Sends.java"), *arguments)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=warm_up_s + seconds + NO_SENDS_S_MAX, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            said = problem.stderr or ""  # bytes after a time out, whatever text=True says
            said = said if isinstance(said, str) else said.decode(errors="replace")
            why = [line for line in said.splitlines() if "Exception: " in line][-1:] or [str(problem)]
            raise NoRocketmqError(f"RocketMQ's client failed: {why[0]}") from None
        finally:
            self._signal(signal.SIGSTOP)
        rate, median_ms, p99_ms = (float(figure) for figure in done.stdout.split()[-3:])
        return rate, median_ms, p99_ms

    def _signal(self, number: signal.Signals) -> None:
        for program in self._programs:
            program.send_signal(number)


@contextmanager
def running(folder: Path, flush: str) -> Iterator[Rocketmq]:
    """A server that keeps its files below an empty folder. ``flush`` is RocketMQ's ``flushDiskType``.

    Raises
    ------
    NoRocketmqError
    """
    folder.mkdir(parents=True)
    names, slaves, port = _ports()
    settings = {"names": names, "port": port, "slaves": slaves, "folder": folder, "flush": flush}
    with ExitStack() as ends:
        programs = []
        for what, text, main in (
            ("name-server", NAME_SERVER, ["-Xmx128m", "org.apache.rocketmq.namesrv.NamesrvStartup"]),
            ("broker", BROKER, ["-Xms1g", "-Xmx1g", str(SOURCES / "Broker.java")]),
        ):
            (folder / f"{what}.conf").write_text(text.format(**settings))
            command = _java_of(folder, *main, "-c", str(folder / f"{what}.conf"))
            with (folder / f"{what}.log").open("wb") as log:
                program = subprocess.Popen(
                    command, stdout=log, stderr=log, env={**os.environ, "ROCKETMQ_HOME": str(folder)}
                )
            programs.append(program)
            ends.callback(_end, program)
            _wait_for(program, folder / f"{what}.log", what)
        yield Rocketmq(folder, names, programs)


def _ports() -> tuple[int, int, int]:
    """Ports of the name server, for slaves, and of the broker; the latter also takes the one two below its own."""
    while True:
        names, slaves, port = free_ports(3)
        if port - 2 not in (names, slaves):
            return names, slaves, port


def _java_of(folder: Path, *arguments: str) -> list[str]:
    """A Java that finds RocketMQ's jars, and writes its logs below a folder."""
    try:
        wanted = [Jar("org.apache.rocketmq", f"rocketmq-{part}", VERSION) for part in ("client", "broker", "namesrv")]
        jars = fetched(f"rocketmq-{VERSION}", wanted)
        return [java(), *OPENED, f"-Duser.home={folder}", "-cp", f"{jars}/*", *arguments]
    except NoJarsError as problem:
        raise NoRocketmqError(str(problem)) from None


def _wait_for(program: subprocess.Popen[bytes], log: Path, what: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while b"boot success" not in log.read_bytes():
        if program.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-500:].strip()
            raise NoRocketmqError(f"RocketMQ's {what} does not start: {said}")
        time.sleep(0.1)


def _end(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGCONT)
    program.terminate()
    try:
        program.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
