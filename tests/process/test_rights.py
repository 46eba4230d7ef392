"""What docs/rights.md says that each role needs: it works with that, and fails without any right to write."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torture.kill.points import ROOT

pytestmark = pytest.mark.long

TABLES = ("topics", "half", "op", "messages", "groups")
ROLES = {
    "sends": "producer('sent').send([Message('orders', b'one')])",
    "checks": "assert CheckService(PATH, {'left': Answers(COMMIT_MESSAGE)}, transaction_timeout=0).run_once().ok",
    "looks": "log = CommitLog.open(PATH); log.pending(); log.conflicts(); ConsumerGroup(log, 'pull').lag()",
    "reads": "assert CommitLog.open(PATH).read('orders').num_rows > 0",
    "reads the history only": "assert DeltaTable(PATH + '/messages').to_pyarrow_dataset().count_rows() > 0",
    "consumes with retries": "push('push')",
    "consumes without": "assert sum(1 for _ in PullConsumer(PATH, 'pull', 'orders', stop_at_end=True)) > 0",
    "does the upkeep": "log = CommitLog.open(PATH); assert log.maintain().messages_drained > 0; log.vacuum()",
}
"""What each role does, after a log was made in which there is something to do for it."""
PROGRAM = """
import sys, threading
from deltalake import DeltaTable
from rmq_spark import COMMIT_MESSAGE, UNKNOWN, CheckService, CommitLog, ConsumeResult, ConsumerGroup
from rmq_spark import Message, PullConsumer, PushConsumer, TransactionListener, TransactionMQProducer

PATH = sys.argv[1]

class Answers(TransactionListener):
    def __init__(self, verdict): self.verdict = verdict
    def execute_local_transaction(self, batch): return self.verdict
    def check_local_transaction(self, batch): return self.verdict

def producer(group, verdict=COMMIT_MESSAGE):
    return TransactionMQProducer(PATH, group, Answers(verdict), check_interval=None).start()

def push(group):
    '''Let all messages fail, so that they go to the retries; the end waits for that and for progress.'''
    came = threading.Event()
    def listen(messages):
        came.set()
        return ConsumeResult.FAILURE
    consumer = PushConsumer(PATH, group, listen, 'orders', consume_from_where='CONSUME_FROM_FIRST_OFFSET')
    with consumer:
        while not came.wait(0.1):
            if consumer.member.problem is not None: raise consumer.member.problem
            if consumer.member.stopping.is_set(): raise SystemExit('it ended')
    log = CommitLog.open(PATH)
    assert 'orders' in {topic for topic, _ in ConsumerGroup(log, group).positions()}
    assert any(waiting for (topic, _), (_, waiting) in log.open_messages().items() if topic == f'%RETRY%{group}')

"""
SETUP = """
log = CommitLog.create(PATH)
log.create_topic('orders', queues=1)
producer('sent').send([Message('orders', b'first')])
log.maintain()
push('before')
assert sum(1 for _ in PullConsumer(PATH, 'pull', 'orders', stop_at_end=True)) == 1
producer('sent').send([Message('orders', b'second')])
producer('left', UNKNOWN).send_message_in_transaction(Message('orders', b'open'))
"""


def rows_of_the_page() -> dict[str, list[str]]:
    """Return what the page says of each role: a right for each table."""
    text = (ROOT / "docs" / "rights.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+?)(?: \([^|]*\))? \| (.+) \|$", text, re.MULTILINE)
    return {
        role: rights.split(" | ") for role, rights in rows if rights.count(" | ") == len(TABLES) - 1 and role != "role"
    }


def drop_what_root_may() -> None:
    """Let permissions count for root, too: in the child, before it becomes Python."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program, str(path)],
        preexec_fn=drop_what_root_may if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )


def grant(path: Path, rights: dict[str, str]) -> None:
    """Give these rights to the tables' folders, and to nothing else."""
    path.chmod(0o555)
    for table, right in rights.items():
        may = 0 if right == "–" else 0o555 | (0o222 if right.startswith("write") else 0)
        for folder, _, files in os.walk(path / table):
            for file in files:
                own = 0o666 if file == "_clock" and "_clock" in right else may & 0o666
                (Path(folder) / file).chmod(own)
        for folder in [*(f for f, _, _ in os.walk(path / table, topdown=False))]:
            Path(folder).chmod(may)


@pytest.fixture
def a_log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "log"
    done = run(SETUP, path)
    assert done.returncode == 0, done.stderr[-3000:]
    yield path
    for folder, folders, _ in os.walk(path):
        Path(folder).chmod(0o755)
        for name in folders:
            (Path(folder) / name).chmod(0o755)


def test_the_page_names_every_role_that_is_tried() -> None:
    assert set(rows_of_the_page()) == set(ROLES)


NEEDED_SOMETIMES = {("does the upkeep", table) for table in TABLES if table != "messages"}
"""In a log as young as the one of this test nothing leaves, and nothing is merged."""


@pytest.mark.parametrize("role", ROLES)
def test_a_role_works_with_what_the_page_gives_it_and_needs_it(role: str, a_log: Path) -> None:
    rights = dict(zip(TABLES, rows_of_the_page()[role], strict=True))
    for table, right in rights.items():
        if right in ("–", "read") or (role, table) in NEEDED_SOMETIMES:
            continue
        grant(a_log, {**rights, table: "read"})
        refused = run(ROLES[role], a_log)
        assert refused.returncode != 0, f"{role} did its work without the right to write to {table}"
        said = r"(rmq_spark\.errors\.\w+|messages were not sent back|check of .* failed): .*permission denied"
        assert re.search(said, refused.stderr, re.IGNORECASE), refused.stderr
    grant(a_log, rights)
    done = run(ROLES[role], a_log)
    assert done.returncode == 0, done.stderr[-3000:]
