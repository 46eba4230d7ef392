"""Starts an emulator on a free port, and ends it with its block."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.maven import free_ports

INSTALL_S_MAX = 1_800
START_S_MAX = 60
STOP_S_MAX = 10
PORT_TRIES = 3


class NoEmulatorError(Exception):
    """There is no emulator here: the program that fetches it is missing, or failed."""


def cached(name: str, fetch: Callable[[Path], tuple[Sequence[str], Mapping[str, str]]], program: str) -> Path:
    """Return the path of an emulator's program in the user's cache folder, and fetch it when it is not there.

    Parameters
    ----------
    fetch : function
        Returns the command, and variables of its environment, that put the program below a folder.
    program : str
        The program's path in that folder.

    Raises
    ------
    NoEmulatorError
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmq_spark"
    if (cache / name / program).exists():
        return cache / name / program
    cache.mkdir(parents=True, exist_ok=True)
    # Fetched beside its place and moved there, so that two test runs at once never meet half of it.
    with tempfile.TemporaryDirectory(dir=cache) as beside:
        command, variables = fetch(Path(beside) / name)
        try:
            subprocess.run(
                command, env={**os.environ, **variables}, check=True, capture_output=True, timeout=INSTALL_S_MAX
            )
        except FileNotFoundError:
            raise NoEmulatorError(f"{command[0]} is missing, which fetches {name}") from None
        except subprocess.TimeoutExpired:
            raise NoEmulatorError(f"{' '.join(command)} took more than {INSTALL_S_MAX} s") from None
        except subprocess.CalledProcessError as problem:
            last = problem.stderr.decode(errors="replace").strip().splitlines()[-5:]
            raise NoEmulatorError(f"{' '.join(command)} failed: {' / '.join(last)}") from None
        try:
            os.replace(Path(beside) / name, cache / name)
        except OSError:  # another run was faster
            assert (cache / name / program).exists()
    return cache / name / program


@contextmanager
def started(
    command: Callable[[int], Sequence[str]], look: str, log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Yield the port of a server that answers, until the block ends.

    Parameters
    ----------
    command : function
        Returns the command that serves on a port.
    look : str
        The path of a request that a running server answers, with whatever status.
    log : Path
        Where the server's output goes.

    Raises
    ------
    NoEmulatorError
        When it does not start.
    """
    for _ in range(PORT_TRIES):
        [port] = free_ports(1)
        with log.open("ab") as said:
            process = subprocess.Popen(
                command(port), env={**os.environ, **(variables or {})}, stdout=said, stderr=said, cwd=log.parent
            )
        try:
            if _answers(f"http://127.0.0.1:{port}{look}", process):
                yield port
                return
        finally:
            stop(process)
    raise NoEmulatorError(f"{command(0)[0]} does not start: {log.read_text(errors='replace')[-500:].strip()}")


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            time.sleep(0.05)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
