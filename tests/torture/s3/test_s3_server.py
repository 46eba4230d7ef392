"""Where no S3 server can be built the tests on S3 say so: they are skipped, and in CI they fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.s3.server import running

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
A_TEST = "tests/torture/stores/test_conformance.py::test_what_was_decided_is_kept[s3]"


def run_without_go(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CI", "PATH", "XDG_CACHE_HOME")}
    kept |= {"PATH": str(folder), "XDG_CACHE_HOME": str(folder), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", A_TEST]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_without_go_the_tests_on_s3_are_skipped_and_say_why(tmp_path: Path) -> None:
    done = run_without_go(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "Go is missing" in done.stdout


@pytest.mark.long
def test_without_go_the_tests_on_s3_fail_in_ci(tmp_path: Path) -> None:
    done = run_without_go(tmp_path, CI="true")
    assert done.returncode == 1
    assert "Go is missing" in done.stdout
    assert "1 error" in done.stdout.splitlines()[-1]


@pytest.mark.usefixtures("s3")
def test_two_servers_keep_apart_and_end_with_their_block(tmp_path: Path) -> None:
    with running(tmp_path / "a") as first, running(tmp_path / "b") as second:
        assert first.endpoint != second.endpoint
        assert first.secret_key != second.secret_key
    with pytest.raises(ConnectionRefusedError):
        _connect(first.endpoint)
    with pytest.raises(ConnectionRefusedError):
        _connect(second.endpoint)


def _connect(endpoint: str) -> None:
    host, _, port = endpoint.rpartition("//")[2].partition(":")
    socket.create_connection((host, int(port)), timeout=5).close()
