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


@pytest.mark.turns(2)
@pytest.mark.parametrize("way", ["async", "sync"])
def test_what_other_threads_send_after_the_main_thread_has_ended_is_sent(tmp_path: Path, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), way], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    log = txmq.CommitLog.open(tmp_path / "log")
    assert sorted(int(b) for b in log.read("orders")["body"].to_pylist()) == list(range(30))
    assert log.pending().num_rows == 0


CONSUMER = """
import sys, threading
import rmq_spark as txmq

def pull(**options):
    return txmq.PullConsumer(sys.argv[1], "points", "orders", pull_batch_size=5, **options)
"""
FORKS = """
import os
log = txmq.CommitLog.open(sys.argv[1])
done, way = threading.Event(), sys.argv[2]

def listen(message):
    pid = os.fork()
    if pid == 0:
        if way == "exit":
            sys.exit(3)
        if way == "raise":
            raise ValueError("in the fork")
    else:
        os.write(1, b"%d " % (os.waitpid(pid, 0)[1] >> 8))
        if message.body == b"9":
            done.set()
    return txmq.ConsumeResult.SUCCESS

begin = {"consume_from_where": "CONSUME_FROM_FIRST_OFFSET", "consume_thread_max": 1}
with txmq.PushConsumer(log, "points", txmq.EachMessage(listen), "orders", **begin):
    done.wait(60)
"""


@pytest.mark.turns(3)
@pytest.mark.parametrize(("way", "code"), [("exit", 3), ("raise", 1), ("return", 0)])
def test_a_fork_that_a_listener_leaves_alone_is_no_second_consumer(tmp_path: Path, way: str, code: int) -> None:
    """It called the listener for all messages that followed, or tried for ever to send one back."""
    log = txmq.CommitLog.create(tmp_path / "log")
    log.create_topic("orders", 1)
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        producer.send([txmq.Message("orders", b"%d" % n) for n in range(10)])
    done = subprocess.run(
        [sys.executable, "-c", CONSUMER + FORKS, log.path, way], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(code)] * 10
    assert done.stderr.count("ValueError: in the fork") == (10 if way == "raise" else 0)
    assert log.engine.groups.next_offsets("points")["orders", 0] == 10


CONSUMERS = {
    "an open iterator": (6, "consumer = iter(pull())\nfor _ in range(7): next(consumer)"),
    "polled messages": (5, "consumer = pull()\nassert len(consumer.poll()) == len(consumer.poll()) == 5"),
    "a consumer that was dropped": (5, "consumer = pull()\nconsumer.poll(), consumer.poll()\ndel consumer"),
    "a listener": (
        10,
        """
came = threading.Event()

def listen(messages):
    came.set()
    return txmq.ConsumeResult.SUCCESS

txmq.PushConsumer(
    sys.argv[1], "points", listen, "orders", consume_from_where="CONSUME_FROM_FIRST_OFFSET"
).start()
assert came.wait(60)
""",
    ),
    "a thread that begins late": (
        10,
        """
main = threading.current_thread()

def work():
    main.join()
    assert len(list(pull(stop_at_end=True))) == 10

threading.Thread(target=work).start()
""",
    ),
}


@pytest.mark.turns(len(CONSUMERS))
@pytest.mark.parametrize("way", CONSUMERS)
def test_a_program_that_ends_with_an_open_consumer_writes_its_progress_and_leaves(tmp_path: Path, way: str) -> None:
    """An open iterator ended Python with an abort. The next program waited a whole lease for the queues."""
    consumed, program = CONSUMERS[way]
    log = txmq.CommitLog.create(tmp_path / "log")
    log.create_topic("orders", 1)
    with txmq.TransactionMQProducer(log, "shop", check_interval=None) as producer:
        producer.send([txmq.Message("orders", b"%d" % n) for n in range(10)])
    done = subprocess.run(
        [sys.executable, "-c", CONSUMER + program, log.path], capture_output=True, text=True, timeout=100
    )
    told = [line for line in done.stderr.splitlines() if "a consumer was dropped" not in line]
    assert (done.returncode, told) == (0, [])
    position = log.engine.groups.positions("points")["orders", 0]
    assert (position.next_offset, position.owner) == (consumed, None)
