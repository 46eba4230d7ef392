"""A producer group may limit what it leaves pending, so that a dead checker does not fill a disk in silence."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark.errors import OptionError, PendingLimitError
from rmq_spark.producer import TransactionSendResult
from tests.support.half_batches import another
from tests.support.inside import SINK_OPTIONS, Options, SinkSettings
from tests.support.listeners import Scripted

pytestmark = pytest.mark.log("memory", "delta", orders=1)


def producer(
    log: CommitLog, listener: txmq.TransactionListener, group: str = "shop", **limits: Any
) -> txmq.TransactionMQProducer:
    return txmq.TransactionMQProducer(log, group, listener, check_interval=None, **limits).start()


def send(sender: txmq.TransactionMQProducer, body: bytes = b"x", key: str | None = None) -> TransactionSendResult:
    return sender.send_message_in_transaction(txmq.Message("orders", body), idempotency_key=key)


def settle(log: CommitLog, listener: txmq.TransactionListener) -> None:
    """Another process checks, and each local transaction is done."""
    txmq.CheckService(another(log), {"shop": listener}, transaction_timeout=0, only_groups=True).run_once()


def test_a_group_with_too_many_pending_half_batches_sends_no_more(log: CommitLog) -> None:
    listener = Scripted(execute=txmq.UNKNOWN)
    sender = producer(log, listener, max_pending_batches=2)
    first = send(sender, key="first")
    send(sender)
    files = log.engine.half.table.actions().num_rows
    with pytest.raises(PendingLimitError) as told:
        send(sender)
    message = str(told.value)
    assert "producer group 'shop' has 2 half batches" in message
    assert "maxPendingBatches=2" in message
    assert f"oldest is {first.half_id!r}" in message
    log.engine.half.table.refresh()
    assert log.engine.half.table.actions().num_rows == files

    send(producer(another(log), listener, group="others", max_pending_batches=1))
    send(producer(another(log), listener))  # without a limit
    assert send(sender, key="first").replayed  # a replay needs no room
    with pytest.raises(PendingLimitError):
        send(sender)
    settle(log, listener)
    assert not send(sender).replayed


def test_a_group_with_too_many_pending_bytes_sends_no_more(log: CommitLog) -> None:
    listener = Scripted(execute=txmq.UNKNOWN)
    sender = producer(log, listener, max_pending_bytes="10k")
    send(sender, bytes(range(256)) * 4)
    size = log.engine.half.bytes_of(log.engine.get(log.engine.open_half_ids()[0]))
    assert size < 10_240
    for _ in range(-(-10_240 // size) - 1):
        send(sender, bytes(range(256)) * 4)
    with pytest.raises(PendingLimitError, match="maxPendingBytes=10240: nothing was sent"):
        send(sender)
    settle(log, listener)
    send(sender)


def test_a_limit_that_comes_near_is_told_once(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rmq_spark._core.protocol.limits")
    listener = Scripted(execute=txmq.UNKNOWN)
    sender = producer(log, listener, max_pending_batches=5)
    for _ in range(4):
        send(sender)
    assert not caplog.messages
    send(sender)
    with pytest.raises(PendingLimitError):
        send(sender)
    assert len(caplog.messages) == 1
    assert "producer group 'shop' has 4 half batches" in caplog.messages[0]
    settle(log, listener)
    for _ in range(5):
        send(sender)
    assert len(caplog.messages) == 2


@pytest.mark.log("memory", orders=1)
@pytest.mark.parametrize(
    "value", [0, -1, True, 2.0, "many", "", "10 parsecs", "1e3", "-5m", "1.5g", 2**63, "9" * 18 + "t"]
)
def test_a_limit_is_a_number_above_zero(log: CommitLog, value: Any) -> None:
    for name in ("max_pending_batches", "max_pending_bytes"):
        with pytest.raises(OptionError, match=name):
            producer(log, Scripted(), **{name: value})
        with pytest.raises(OptionError, match=name):
            txmq.TransactionalSink(log, producer_group="shop", listener=None, **{name: value})


@pytest.mark.parametrize(
    ("text", "size"), [("1b", 1), ("500b", 500), ("2k", 2048), (" 3 MB ", 3 * 1024**2), ("10g", 10 * 1024**3)]
)
def test_bytes_have_the_units_of_spark(text: str, size: int) -> None:
    given = {"path": "/log", "producerGroup": "shop", "transactionListener": "none", "maxPendingBatches": "7"}
    found = SinkSettings.of(Options({**given, "maxpendingbytes": text}, SINK_OPTIONS)).pending_limits
    assert (found.batches, found.size) == (7, size)
    for name, value in (("maxPendingBytes", f"{text}x"), ("maxPendingBatches", "0")):
        with pytest.raises(OptionError, match=name):
            SinkSettings.of(Options({**given, name: value}, SINK_OPTIONS))


def test_a_checkpoint_in_a_folder_named_tilde_is_refused_unless_it_is_meant() -> None:
    given = {"path": "/log", "producerGroup": "shop", "transactionListener": "none"}
    with pytest.raises(OptionError, match=r"expanduser\(checkpointLocation\), or './~/cp'"):
        SinkSettings.of(Options({**given, "checkpointLocation": "~/cp"}, SINK_OPTIONS))
    SinkSettings.of(Options({**given, "checkpointLocation": "./~/cp"}, SINK_OPTIONS))
