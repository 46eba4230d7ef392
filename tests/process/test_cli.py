"""The txmq command as a process."""

from __future__ import annotations

import functools
import os
import pty
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from rmq_spark import COMMIT_MESSAGE, CommitLog
from tests.support import half_batches
from tests.support.inside import NO_LISTENER_FENCE

ROOT = Path(__file__).parents[2]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rmq_spark.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_as_a_process(tmp_path: Path) -> None:
    failed = run("pending", tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert len(failed.stderr.splitlines()) == 1


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    failed = run("topics", tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert failed.returncode == 1
    assert failed.stderr.strip() == "the txmq command needs typer: install rmq_spark with its extra job"


def test_the_version_and_the_help_are_printed() -> None:
    assert run("--version").stdout.startswith("rmq-spark ")
    shown = run("topics", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")


@pytest.mark.long
def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=1)
    record = half_batches.prepare(log, 0, 2, fence_id="none")
    log.resolve(record.half_id, COMMIT_MESSAGE, "for the test")
    of_log = (("read", log.path, "orders", "--json"), ("read", log.path, "orders"), ("topics", log.path))
    for arguments in (*of_log, (*of_log[1], "--follow"), ("--help",), ("read", "--help")):
        ours, theirs = os.pipe()
        os.close(ours)
        done = subprocess.run(
            [sys.executable, "-m", "rmq_spark.cli", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(theirs)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.turns(3, among="the command's streams")
def test_a_command_with_closed_streams_does_its_work(tmp_path: Path) -> None:
    """It ended with an AttributeError, after its work or before."""
    run = functools.partial(subprocess.run, shell=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    command, log = f"{sys.executable} -m rmq_spark.cli", tmp_path / "log"
    assert run(f"{command} create {log} >&- 2>&-").returncode == 0
    opened = CommitLog.open(log)
    opened.create_topic("orders")
    half_id = half_batches.prepare(opened, 0, 2).half_id
    (tmp_path / "txmq.toml").write_text(f'path = "{log}"\n[check]\ntransactionTimeout = "0s"\n')
    checked = run(f"{command} check --once --config {tmp_path / 'txmq.toml'} 2>&-", capture_output=True, text=True)
    assert "1 half batch" in checked.stdout
    asked = run(f"{command} resolve {log} {half_id} COMMIT --reason x <&-", stderr=subprocess.PIPE, text=True)
    assert (asked.returncode, "there is no terminal" in asked.stderr) == (2, True)


@pytest.mark.turns(3, among="the command's streams")
def test_to_follow_ends_when_the_reader_has_enough(tmp_path: Path) -> None:
    CommitLog.create(tmp_path / "log").create_topic("orders")
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "rmq_spark.cli", "read", str(tmp_path / "log"), "orders", "--follow"]
    following = subprocess.Popen(
        [*command, "--every", "1h"], stdout=theirs, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    os.close(theirs)
    with pytest.raises(subprocess.TimeoutExpired):
        following.wait(3)
    os.close(ours)
    assert following.wait(60) == 0


@pytest.mark.turns(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_loop_of_upkeep_ends_well_when_it_is_told_to(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C ended it with 130, and other loops with 0."""
    CommitLog.create(tmp_path / "log")
    command = [sys.executable, "-m", "rmq_spark.cli", "maintain", str(tmp_path / "log"), "--every", "1h"]
    going = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert going.stdout is not None
    assert going.stdout.readline()  # the first round is over
    time.sleep(0.5)
    going.send_signal(number)
    _, err = going.communicate(timeout=60)
    assert (going.returncode, "Traceback" in err) == (0, False), err


def in_a_terminal(answer: str, *arguments: object) -> tuple[int, str]:
    """Run the command in a terminal, type the answer, and return its exit code and all that was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rmq_spark.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())  # waits in the terminal until it is asked for
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # so Linux says that the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def test_the_live_screen_gives_the_terminal_back_when_it_is_ended(tmp_path: Path) -> None:
    CommitLog.create(tmp_path / "log")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rmq_spark.cli", "top", str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while b"q ends" not in shown:
        shown += os.read(ours, 65536)
    process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # so Linux says that the other side is closed
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\x1b[?1049l" in shown


@pytest.mark.turns(3, among="the command's streams")
def test_resolve_asks_in_a_terminal(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=1)
    half_id = half_batches.prepare(log, 0, 2).half_id
    code, shown = in_a_terminal("n", "resolve", log.path, half_id, "ROLLBACK", "--reason", "never paid")
    assert code == 1
    assert "pending         2 messages" in shown
    assert "Roll them back?" in shown
    assert "nothing was changed" in shown
    assert log.pending().num_rows == 1
    code, shown = in_a_terminal("y", "resolve", log.path, half_id, "ROLLBACK", "--reason", "never paid")
    assert code == 0
    assert shown.endswith(f"{half_id}: 2 messages were rolled back\n")
    assert log.pending().num_rows == 0


def test_a_round_by_hand_that_settles_something_says_in_a_terminal_that_a_job_should_run(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=1)
    file = tmp_path / "txmq.toml"
    file.write_text(f'path = "{log.path}"\n[check]\ntransactionTimeout = "0s"\n')
    advice = "a check job should have settled that: let txmq check run"
    half_batches.prepare(log, 0, 2, fence_id=NO_LISTENER_FENCE)
    code, shown = in_a_terminal("", "check", "--once", "--config", file)
    assert (code, advice in shown) == (0, True), shown
    code, shown = in_a_terminal("", "check", "--once", "--config", file)
    assert (code, advice in shown) == (0, False), "nothing was settled"


def test_the_wheel_has_the_example_configuration_and_no_demo(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
        folders = {name.split("/")[0] for name in opened.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"rmq_spark", "pyspark_txmq"}
    example = (ROOT / "conf" / "txmq.toml").read_text()
    assert (tmp_path / "site" / "rmq_spark" / "_core" / "checks" / "txmq.toml").read_text() == example
    made = run("init", tmp_path / "made.toml", PYTHONPATH=str(tmp_path / "site"))
    assert (made.returncode, made.stderr) == (0, "")
    assert (tmp_path / "made.toml").read_text().splitlines()[2:] == example.splitlines()[2:]
