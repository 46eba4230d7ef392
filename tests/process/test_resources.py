"""A process that has used up a resource says which, and which setting to change; and calls no sound log damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rmq_spark as txmq
from rmq_spark.errors import OutOfThreadsError, UnreachableStoreError
from tests.support.inside import require_put_if_absent

PROGRAM = """
import os, resource, sys
import rmq_spark as txmq

txmq.CommitLog, txmq.TxmqError  # what is imported later needs descriptors itself
path, way, number = sys.argv[1], sys.argv[2], int(sys.argv[3])

def only(left):
    files = len(os.listdir("/proc/self/fd")) - 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def read(left):
    log = txmq.CommitLog.open(path)
    log.read("orders")
    only(left)
    log.read("orders")

def opens(left):
    only(left)
    txmq.CommitLog.open(path)

def create(left):
    only(left)
    txmq.CommitLog.create(path + "-new")

def starve(mebibytes):
    log = txmq.CommitLog.open(path)
    log.read("orders")
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), resource.RLIM_INFINITY))
    log.read("large")

def in_little_space(mebibytes):
    resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, resource.RLIM_INFINITY))
    txmq.CommitLog.open(path)

try:
    {"read": read, "open": opens, "create": create, "space": in_little_space, "starve": starve}[way](number)
except BaseException as problem:
    print(isinstance(problem, txmq.TxmqError), type(problem).__name__, problem)
sys.stdout.flush()
os._exit(0)  # without descriptors the end of Python may fail, too
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    log = txmq.CommitLog.create(tmp_path_factory.mktemp("resources") / "log")
    log.create_topic("orders", 1)
    log.create_topic("large", 1)
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        producer.send(txmq.Message("orders", b"a"))
        producer.send([txmq.Message("large", b"x" * (4 << 20)) for _ in range(64)])
    log.drain()
    return log.path


def said(path: str, way: str, number: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, way, str(number)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},  # it reserves no address space beforehand
    )
    return done.stdout.strip()


@pytest.mark.turns(5)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it counts descriptors as Linux shows them")
@pytest.mark.parametrize(("way", "left"), [("read", 0), ("open", 0), ("open", 8), ("create", 0), ("create", 8)])
def test_a_full_table_of_file_descriptors_is_told_with_the_limit_to_raise(path: str, way: str, left: int) -> None:
    """It was a raw OSError, a panic of Rust, "no commit log", "the store has no put-if-absent"."""
    told = said(path, way, left)
    assert told.startswith("True UnreachableStoreError"), told
    assert "ulimit -n" in told


@pytest.mark.turns(2)
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to RLIMIT_AS")
@pytest.mark.parametrize("mebibytes", [512, 2048])
def test_too_little_address_space_is_told_with_the_settings_of_spark(path: str, mebibytes: int) -> None:
    """A library "failed to map segment", and with more of it the engine ended the process."""
    told = said(path, "space", mebibytes)
    assert told.startswith(f"True OptionError this process may reserve {mebibytes} MiB"), told
    assert "spark.executor.pyspark.memory" in told
    assert "spark.sql.planner.pythonExecution.memory" in told


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to RLIMIT_AS")
def test_a_file_that_does_not_fit_into_memory_is_not_called_damaged(path: str) -> None:
    """A reader was told to put a sound file back from a copy."""
    told = said(path, "starve", 100)
    assert told.startswith("True UnreachableStoreError"), told
    assert "this process may take no more memory" in told


def no_more(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_is_told_with_the_limit_to_raise(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = txmq.CommitLog.open(path)
    producer = txmq.TransactionMQProducer(log, "shop")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(OutOfThreadsError, match="ulimit -u"):
            producer.start()
    producer.shutdown()


def test_a_probe_of_the_store_that_gets_too_few_threads_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it had got waited for the last one for ever, and Python with them."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def some(self: threading.Thread) -> None:
        if len(started) == 2:
            no_more(self)
        started.append(self)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", some)
        with pytest.raises(UnreachableStoreError, match="ulimit -u"):
            require_put_if_absent(f"{path}-probe", None)
    for thread in started:
        thread.join(8)
        assert not thread.is_alive()


def test_the_doctor_of_a_user_without_a_home_says_what_else_it_finds(path: str) -> None:
    """A container's user may have neither HOME nor an entry in /etc/passwd: "Could not determine home directory"."""
    program = """
import pathlib, sys

def home():
    raise RuntimeError("Could not determine home directory.")

pathlib.Path.home = home
from rmq_spark.cli import app
app(sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", path],
        capture_output=True,
        text=True,
        timeout=100,
        env={name: value for name, value in os.environ.items() if name != "HOME"},
    )
    assert "home directory" not in done.stdout + done.stderr
    assert "python" in done.stdout
