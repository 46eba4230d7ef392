"""``txmq exporter``: printed once, served, pushed, and written to a file."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from rmq_spark import CommitLog
from rmq_spark._core.metrics import push_gateway
from rmq_spark.cli import app
from rmq_spark.errors import OptionError, StorageError
from tests.support.half_batches import commit, make_log, prepare, roll_back
from tests.support.inside import push_figures as push
from tests.support.meanwhile import at

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = make_log("delta", tmp_path / "log", orders=1)
    commit(made, prepare(made, 0, 3))
    prepare(made, 1, 2, group="shop")
    return made


def txmq(*arguments: object, code: int = 0) -> str:
    """What a run prints that must end with this exit code."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return " ".join(re.sub("[│╭─╮╰╯]", " ", result.output).split()) if code else result.stdout


def values(text: str) -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


class Gateway(BaseHTTPRequestHandler):
    """Takes what is pushed."""

    got: list[tuple[str, str, str]]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.got.append((self.command, self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    got: list[tuple[str, str, str]] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (Gateway,), {"got": got}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_metrics_are_printed_once(log: CommitLog) -> None:
    text = txmq("exporter", log.path, "--once", "--cluster", "eu")
    assert values(text)["rocketmq_commit_messages_total"] == 3
    assert values(text)["rocketmq_half_messages"] == 2
    assert 'cluster="eu"' in text
    assert "# TYPE rocketmq_commit_messages_total counter" in text


def test_it_serves_until_it_is_told_to_stop(log: CommitLog) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rmq_spark.cli", "exporter", log.path, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/metrics", said)
            assert found is not None, said
            with urllib.request.urlopen(found[0], timeout=60) as answer:
                assert values(answer.read().decode())["txmq_up"] == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_the_metrics_are_pushed(log: CommitLog, gateway: tuple[str, list[tuple[str, str, str]]]) -> None:
    url, got = gateway
    assert txmq("exporter", log.path, "--push", url, "--job", "nightly") == f"pushed to {url} as job nightly\n"
    ((_, path, text),) = got
    assert path == "/metrics/job/nightly"
    assert values(text)["rocketmq_commit_messages_total"] == 3


def test_a_push_ends_when_nobody_answers() -> None:
    import socket

    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StorageError, match="could not be pushed to 127"):
            push(prometheus_client.CollectorRegistry(), f"127.0.0.1:{silent.getsockname()[1]}", "job", timeout=0.2)


def test_a_push_that_fails_as_its_time_ends_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at its thread it could fail unseen."""
    may_end = threading.Event()

    class EndsBetween(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            """Its time is over, and it still runs."""

        def is_alive(self) -> bool:
            may_end.set()
            super().join()
            return False

    def fails() -> None:
        may_end.wait(60)
        raise OSError("refused")

    monkeypatch.setattr(threading, "Thread", EndsBetween)
    with pytest.raises((TimeoutError, OSError)):
        push_gateway._within(0.05, fails)
    may_end.set()


def test_the_metrics_are_written_for_a_node_exporter(log: CommitLog, tmp_path: Path) -> None:
    file = tmp_path / "txmq.prom"
    assert txmq("exporter", log.path, "--textfile", file) == f"{file} is written\n"
    assert values(file.read_text())["rocketmq_commit_messages_total"] == 3
    assert "does not end in .prom" in txmq("exporter", log.path, "--textfile", tmp_path / "txmq.txt", code=2)
    assert "cannot be written" in txmq("exporter", log.path, "--textfile", tmp_path / "no" / "a.prom", code=2)


def test_what_only_a_program_that_stays_can_count_is_left_out_of_a_single_look(log: CommitLog, tmp_path: Path) -> None:
    """Rollbacks and decisions were 0 in every file, however many there were between two."""
    roll_back(log, prepare(log, 2, 4))
    file = tmp_path / "shop.prom"
    txmq("exporter", log.path, "--textfile", file)
    for text in (file.read_text(), txmq("exporter", log.path, "--once")):
        assert "rocketmq_commit_messages_total{" in text
        assert "rocketmq_rollback_messages_total{" not in text
        assert "txmq_decided_messages_total{" not in text


def test_a_gateway_that_never_comes_to_its_end_does_not_hold_a_program(log: CommitLog) -> None:
    """urllib's limit is for each wait: one that sent a byte a second was waited for."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            with server.accept()[0] as connection:
                while not done.wait(0.2):
                    connection.sendall(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            registry = prometheus_client.CollectorRegistry()
            with pytest.raises(StorageError, match="it has not answered within 1 s"):
                push(registry, f"127.0.0.1:{server.getsockname()[1]}", "shop", timeout=1.0)
        finally:
            done.set()
            thread.join()
    with pytest.raises(OptionError, match="gateway is empty"):
        push(registry, " ", "shop")


def test_a_file_says_that_a_log_can_no_longer_be_opened(log: CommitLog, tmp_path: Path) -> None:
    """The file stayed as it was, with txmq_up 1, while nobody could read the log."""
    file = tmp_path / "shop.prom"
    txmq("exporter", log.path, "--textfile", file)
    assert values(file.read_text())["txmq_up"] == 1
    Path(log.path).rename(tmp_path / "away")
    assert "is not a commit log" in txmq("exporter", log.path, "--textfile", file, code=1)
    assert file.read_text().splitlines()[-1] == f'txmq_up{{cluster="DefaultCluster",node_id="{log.path}"}} 0.0'
    assert len(values(file.read_text())) == 1


def test_what_cannot_be_done_is_one_line(log: CommitLog, tmp_path: Path) -> None:
    assert "contradict each other" in txmq("exporter", log.path, "--once", "--push", "http://x", code=2)
    assert "it is empty" in txmq("exporter", log.path, "--once", "--cluster", " ", code=2)
    assert "is not a commit log" in txmq("exporter", tmp_path, "--once", code=1)
    assert "is not a duration" in txmq("exporter", log.path, "--once", "--cache", "5", code=2)
    assert "could not be pushed" in txmq("exporter", log.path, "--push", "http://127.0.0.1:1", code=1)
    with at("look begins", lambda: 1 / 0):
        said = txmq("exporter", log.path, "--once", code=1)
    assert f"the figures of {log.path} could not be read: the log says why" in said


def test_a_port_that_is_taken_is_told(log: CommitLog, gateway: tuple[str, object]) -> None:
    port = gateway[0].rpartition(":")[2]
    assert "Choose another port" in txmq("exporter", log.path, "--port", port, code=2)
