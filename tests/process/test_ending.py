"""A program whose main thread has ended, and whose other threads still send."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rmq_spark as txmq

PROGRAM = """
import sys, threading, time
import rmq_spark as txmq

class Shop(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        return txmq.COMMIT_MESSAGE
    def check_local_transaction(self, batch):
        return txmq.UNKNOWN

log = txmq.CommitLog.create(sys.argv[1])
log.create_topic("orders")
producer = txmq.TransactionMQProducer(log, "shop", Shop(), check_interval=None, listener_threads=1).start()
main = threading.current_thread()

def send(n):
    main.join()
    for i in range(10):
        message = txmq.Message("orders", b"%d" % (n * 10 + i))
        if sys.argv[2] == "async":
            sent = producer.send_message_in_transaction_async(message)
            sent.add_done_callback(lambda _: None)
            sent.result()
        else:
            producer.send_message_in_transaction(message)
    if n == 0:
        log.another().maintain(dry_run=True)

for n in range(3):
    threading.Thread(target=send, args=(n,)).start()
"""


@pytest.mark.parametrize("way", ["async", "sync"])
def test_what_other_threads_send_after_the_main_thread_has_ended_is_sent(tmp_path: Path, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), way], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    log = txmq.CommitLog.open(tmp_path / "log")
    assert sorted(int(b) for b in log.read("orders")["body"].to_pylist()) == list(range(30))
    assert log.pending().num_rows == 0
