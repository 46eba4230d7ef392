"""A commit log in a fork of a process that had one open: Delta's engine does not come along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORKS = """
import os
import sys
import rmq_spark as txmq

log = txmq.CommitLog.create(sys.argv[1])
log.create_topic("orders")
with txmq.TransactionMQProducer(log, "shop") as producer:
    producer.send(txmq.Message("orders", b"one"))
child = os.fork()
if child == 0:
    for use in (log.drain, log.maintain, log.refresh, lambda: log.read("orders"),
                lambda: txmq.CommitLog.open(sys.argv[1]), lambda: txmq.CommitLog.create(sys.argv[1] + "-2")):
        try:
            use()
        except txmq.OptionError as problem:
            assert "is a fork (os.fork) of process" in str(problem), problem
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
log.drain()
print(log.read("orders").num_rows)
"""


def test_a_log_in_a_fork_is_refused_in_words_and_not_with_a_panic(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "log")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (told.returncode, told.stdout) == (0, "1\n"), told.stderr
    assert "panicked" not in told.stderr
