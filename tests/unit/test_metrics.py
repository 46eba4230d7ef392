"""The figures of a commit log, the collector that shows them to Prometheus, and what a process counts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pyarrow as pa
import pytest

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.metrics.exposition import showing
from rmq_spark._core.metrics.log_collector import DECISIONS
from rmq_spark._core.metrics.metric_names import ANSWERS, TABLES
from rmq_spark._core.runtime import observer
from rmq_spark.metrics import LogCollector, LogWatch, ProcessMetrics
from rmq_spark.testing import InMemoryCommitLog
from tests.support import report_logs
from tests.support.consumers import DONE, LATER, consume_all, go_on, joined, memory_log, push, send
from tests.support.half_batches import (
    commit,
    count_check,
    decide_one,
    in_conflict,
    let_leave,
    make_log,
    pending,
    prepare,
    quarantine,
    roll_back,
    split,
    too_late,
)
from tests.support.inside import BY_NAME, LOG, METRICS, PROCESS, Graces, Leaver, RowState, Standing, Who
from tests.support.limits import Limit
from tests.support.listeners import Scripted
from tests.support.maven import free_ports
from tests.support.meanwhile import at, seen_at

pytestmark = pytest.mark.log("memory", "delta", orders=2, points=1)


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def counted(registry: prometheus_client.CollectorRegistry) -> Iterator[prometheus_client.CollectorRegistry]:
    """A registry that counts what this process does."""
    metrics = ProcessMetrics(registry)
    yield registry
    metrics.close()


def value(registry: prometheus_client.CollectorRegistry, name: str, **labels: str) -> float | None:
    """The sum of a metric's samples with these labels; None when there is none."""
    found = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def says() -> Scripted:
    """A listener that says what the send's argument says, and knows nothing later."""
    return Scripted(lambda batch: batch.arg, txmq.UNKNOWN)


# ---------------------------------------------------------------- the log's figures
def test_the_figures_are_what_happened_in_the_log(log: CommitLog) -> None:
    watch = LogWatch(log)
    others, some = split(pending(log, prepare(log, 0, 40, per="message", partitions=2, group="shop")), every=4)
    decide_one(log.engine, log.engine.get("app:0"), 1, commit=others, rollback=some)
    prepare(log, 1, 5, topic="points", group="bank")
    hidden = prepare(log, 2, 3, group="shop")
    quarantine(log, hidden)
    in_conflict(log, prepare(log, 3, 2))
    found = watch.look()
    assert found.topics == {"orders": False, "points": False}
    assert found.placed == {"orders": 30}
    assert found.half_messages == {"points": 5}
    assert {group: of.half_batches for group, of in found.pending.items()} == {"bank": 1}
    assert 0 <= found.oldest_pending_s < 60
    assert found.quarantined == {"shop": 3}
    assert found.conflicts == 1
    assert found.rolled_back == {"orders": 12}
    assert found.decided[("commit", "execute")] == 30
    assert found.decided[("quarantine", "discard")] == 3
    assert found.undrained_messages == 30
    assert found.undrained_bytes > 0
    assert found.tables["half"].files == 5
    assert found.not_looked_at == 0


def test_what_is_settled_leaves_the_figures(log: CommitLog) -> None:
    watch = LogWatch(log)
    record = prepare(log, 0, 4, group="shop")
    hidden = prepare(log, 1, 3, group="shop")
    quarantine(log, hidden)
    assert watch.look().quarantined == {"shop": 3}
    log.resume(hidden.half_id, "look again")
    found = watch.look()
    assert (found.quarantined, found.half_messages) == ({}, {"orders": 7})
    commit(log, record)
    log.resolve(hidden.half_id, txmq.ROLLBACK_MESSAGE, "never happened")
    log.drain()
    found = watch.look()
    assert (found.half_messages, dict(found.pending), found.undrained_messages) == ({}, {}, 0)
    assert found.publish_lag_s == 0.0
    assert found.rolled_back == {"orders": 3}


def test_totals_from_offsets_are_for_ever_and_the_others_since_the_watch_began(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=2)
    commit(log, prepare(log, 0, 8))
    roll_back(log, prepare(log, 1, 4))
    before = LogWatch(log)
    roll_back(log, prepare(log, 2, 2))
    assert (before.look().placed, before.look().rolled_back) == ({"orders": 8}, {"orders": 2})
    let_leave(log)
    after = LogWatch(log).look()
    assert (after.placed, after.rolled_back) == ({"orders": 8}, {}), "its op rows are gone"
    assert before.look().rolled_back == {"orders": 2}


def test_what_was_quarantined_and_has_left_between_two_looks_is_quarantined_no_more(log: CommitLog) -> None:
    """It was shown as quarantined for as long as the exporter ran."""
    watch = LogWatch(log)
    hidden = prepare(log, 0, 3, group="shop")
    quarantine(log, hidden)
    assert watch.look().quarantined == {"shop": 3}
    log.resolve(hidden.half_id, txmq.ROLLBACK_MESSAGE, "never happened")
    let_leave(log)
    assert watch.look().quarantined == {}


def test_a_rollback_that_has_left_between_two_looks_is_counted_without_its_topic(log: CommitLog, registry: Any) -> None:
    registry.register(LogCollector(log, cache_seconds=0))
    assert value(registry, "rocketmq_rollback_messages_total") == 0
    roll_back(log, prepare(log, 0, 4))
    log.engine.ledger.mark()
    leaver = Leaver(log.another().engine, Graces(0, 0, 1e9))
    assert leaver.archive() == 1
    leaver.remove()
    assert value(registry, "rocketmq_rollback_messages_total", topic="") == 4


@pytest.mark.parametrize("who", [Who.CHECK, Who.EXECUTE])
def test_a_rollback_that_a_person_confirms_is_counted_once(log: CommitLog, who: Who) -> None:
    watch = LogWatch(log)
    record = prepare(log, 0, 5, per="message")
    wrong, hidden = split(pending(log, record), every=2)
    decide_one(log.engine, record, 1, rollback=wrong, who=who)
    watch.look()
    too_late(log, record, commit=wrong)
    log.engine.ledger.quarantine(record, 1, hidden, Who.DISCARD, "too often")
    log.resolve(record.half_id, txmq.ROLLBACK_MESSAGE, "it never happened")
    assert log.conflicts() == []
    assert watch.look().rolled_back == {"orders": 5}


@pytest.mark.parametrize("looks", [1, 2])
def test_the_rollbacks_of_a_crashed_and_replayed_half_batch_are_counted_once(log: CommitLog, looks: int) -> None:
    watch = LogWatch(log)
    replayed, asked_again, resumed = (prepare(log, n, 5) for n in range(3))
    roll_back(log, replayed, who=Who.CHECK)
    roll_back(log, asked_again, who=Who.DISCARD)
    quarantine(log, resumed)
    assert looks == 1 or watch.look().rolled_back == {"orders": 10}
    log.engine.ledger.reopen(replayed, 1, (RowState.ROLLED_BACK_BY_CHECK,), 2, Who.EXECUTE, "it never happened")
    log.engine.ledger.reopen(asked_again, 1, (RowState.ROLLED_BACK_BY_DISCARD,), 1, Who.EXECUTE, "asked again")
    log.resume(resumed.half_id)
    assert looks == 1 or watch.look().rolled_back == {"orders": 10}
    for record, attempt in ((replayed, 2), (asked_again, 1), (resumed, 1)):
        roll_back(log, record, attempt)
    found = watch.look()
    assert found.rolled_back == {"orders": 15}
    assert found.decided[("rollback", "execute")] == 15, "verdicts are counted each"


def test_a_quarantine_and_an_answer_from_before_are_found(log: CommitLog) -> None:
    record = prepare(log, 0, 3, group="shop")
    assert LogWatch(log).look().last_check is None
    count_check(log.engine, record, 1, pending(log, record), "UNKNOWN")
    quarantine(log, record)
    found = LogWatch(log).look()
    assert found.quarantined == {"shop": 3}
    assert found.last_check is not None
    assert abs(found.last_check - datetime.now(timezone.utc)) < timedelta(minutes=1)


def test_a_look_reads_an_open_half_batch_again_only_when_op_decides_something_new(log: CommitLog) -> None:
    watch = LogWatch(log)
    records = [prepare(log, batch_id, 2, per="message") for batch_id in range(3)]

    def read() -> list[str]:
        """The half files that a look reads."""
        with seen_at("files read", table="half") as reads:
            watch.look()
        return sorted(path for read in reads for path in read["paths"])

    assert read() == sorted(record.files[0].path for record in records)
    assert read() == []
    one = records[1]
    count_check(log.engine, one, 1, pending(log, one), "UNKNOWN")
    assert read() == [], "a check that changes nothing"
    some, _ = split(pending(log, one), every=2)
    decide_one(log.engine, one, 1, commit=some)
    assert read() == [one.files[0].path]
    assert watch.look().half_messages == {"orders": 5}


def test_a_look_is_bounded_and_the_next_one_goes_on(log: CommitLog, limit: Limit) -> None:
    limit(LOOKS_MAX=2)
    watch = LogWatch(log)
    for batch_id in range(3):
        prepare(log, batch_id, 2)
    found = watch.look()
    assert (found.not_looked_at, found.half_messages) == (1, {"orders": 4})
    found = watch.look()
    assert (found.not_looked_at, found.half_messages) == (0, {"orders": 6})
    for batch_id in range(3):
        record = log.engine.get(f"app:{batch_id}")
        quarantine(log, record)
        log.resume(record.half_id, "again")
    found = watch.look()
    assert (found.not_looked_at, found.half_messages) == (0, {"orders": 6}), "what was known stays until it is read"


def test_waiting_messages_are_told_by_their_reason() -> None:
    log = memory_log(orders=1)
    log.create_topic("steps", 1, fifo=True)
    later = log.engine.runtime.now() + timedelta(hours=1)
    commit(log, prepare(log, 0, {"body": ["a", "b"], "deliver_at": [later, None]}))
    prepare(log, 1, {"body": ["c"], "sharding_key": ["k"]}, topic="steps")
    commit(log, prepare(log, 2, {"body": ["d"], "sharding_key": ["k"]}, topic="steps"))
    found = LogWatch(log).look()
    assert (found.delayed, found.ordered) == (1, 1)


# ---------------------------------------------------------------- consumer groups
@pytest.mark.parametrize("drained", [False, True])
def test_lag_is_what_a_consumer_group_says(drained: bool) -> None:
    log = memory_log(orders=1)
    send(log, "abc")
    log.engine.runtime.sleep(60)
    send(log, "de")
    log.engine.runtime.sleep(5)
    if drained:
        log.drain()
    watch = LogWatch(log)
    assert watch.look().lags == {}
    log.engine.groups.set("points", {("orders", 0): 1}, "test")
    log.engine.groups.set("bills", {("orders", 0): 3}, "test")
    log.engine.groups.set("idle", {("orders", 0): 5}, "test")
    lags = watch.look().lags
    assert lags == {("points", "orders"): (4, 65.0), ("bills", "orders"): (2, 5.0), ("idle", "orders"): (0, 0.0)}
    for group in ("points", "bills", "idle"):
        said = txmq.ConsumerGroup(log, group).lag()
        assert lags[(group, "orders")] == (sum(said["lag"].to_pylist()), max(said["lag_seconds"].to_pylist()))
    assert watch.look().lag_of("points") == (4, 65.0)


def test_a_watch_makes_no_table(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0, 2))
    before = sorted(p.name for p in (tmp_path / "log").iterdir())
    assert LogWatch(tmp_path / "log").look().lags == {}
    assert sorted(p.name for p in (tmp_path / "log").iterdir()) == before


# ---------------------------------------------------------------- the collector
def scenario(log: CommitLog) -> None:
    """Something of everything."""
    with txmq.TransactionMQProducer(log, "shop", says(), check_interval=None) as producer:
        for verdict in (txmq.COMMIT_MESSAGE, txmq.ROLLBACK_MESSAGE, txmq.UNKNOWN):
            producer.send_message_in_transaction(txmq.Message("orders", b"x"), verdict)
        strict = txmq.TransactionMQProducer(log, "shop", says(), on_listener_error="fail", check_interval=None)
        with strict, pytest.raises(txmq.LocalTransactionError):
            strict.send_message_in_transaction(txmq.Message("orders", b"x"), ValueError("no"))
    consumer = consume_all(log, txmq.EachMessage(lambda _: LATER), max_reconsume_times=0)
    consumer.member.leave()
    txmq.CheckService(log, {"shop": says()}, transaction_timeout=0).run_once()
    hidden = prepare(log, 0, 3, group="shop")
    quarantine(log, hidden)


def test_every_metric_in_the_list_is_shown_and_no_other(log: CommitLog, counted: Any) -> None:
    counted.register(LogCollector(log, cache_seconds=0))
    scenario(log)
    observer.tell(lambda o: o.lost_race("op"))
    consumer = push(log, lambda _: DONE)
    with consumer:
        shown = {
            sample.name: set(sample.labels)
            for family in counted.collect()
            for sample in family.samples
            if not sample.name.endswith(("_created", "_bucket", "_sum"))
        }
    for metric in METRICS:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        assert shown.pop(name, None) == {"cluster", "node_id", *metric.labels}, metric.name
    assert not shown
    assert {metric.origin for metric in METRICS} == {LOG, PROCESS}
    assert all(name.endswith("_total") == (metric.kind == "counter") for name, metric in BY_NAME.items())


def test_a_counter_with_known_labels_is_0_before_it_counts(registry: Any, counted: Any) -> None:
    log = memory_log(orders=1)
    registry.register(LogCollector(log, cache_seconds=0))
    for verdict, by in (("commit", "check"), ("rollback", "admin"), ("quarantine", "discard"), ("reopen", "execute")):
        assert value(registry, "txmq_decided_messages_total", verdict=verdict, decided_by=by) == 0
    assert value(registry, "rocketmq_send_to_dlq_messages_total") is None, "there is no group yet"
    txmq.ConsumerGroup(log, "points").reset("earliest", ["orders"])
    assert value(registry, "rocketmq_send_to_dlq_messages_total", consumer_group="points", topic="%DLQ%points") == 0
    assert value(registry, "txmq_dead_letters", consumer_group="points") == 0
    assert {t.name for t in log.engine.tables()} <= set(TABLES)
    assert [value(counted, "txmq_commit_retries_total", table=table) for table in TABLES] == [0] * len(TABLES)
    txmq.CheckService(log, {}, transaction_timeout=0).run_once()
    assert value(counted, "txmq_check_rounds_total", result="ok") == 1
    assert value(counted, "txmq_check_rounds_total", result="problems") == 0
    assert [value(counted, "txmq_checked_transactions_total", verdict=answer) for answer in ANSWERS] == [0] * 5


def test_every_decision_that_there_may_be_is_known(log: CommitLog) -> None:
    watch = LogWatch(log)
    scenario(log)
    log.resolve("app:0", txmq.ROLLBACK_MESSAGE, "no")
    found = watch.look().decided
    assert {("commit", "execute"), ("quarantine", "discard"), ("rollback", "admin")} <= set(found) <= set(DECISIONS)


def test_rocketmq_s_names_show_rocketmq_s_figures(log: CommitLog, registry: Any) -> None:
    registry.register(LogCollector(log, cluster="eu", node_id="one", cache_seconds=0))
    scenario(log)
    own = {"cluster": "eu", "node_id": "one"}
    assert value(registry, "rocketmq_topic_number", **own) == 4
    assert value(registry, "rocketmq_half_messages", topic="orders", **own) == 2
    assert value(registry, "rocketmq_commit_messages_total", topic="orders") == 1
    assert value(registry, "rocketmq_rollback_messages_total", topic="orders") == 1
    assert value(registry, "rocketmq_messages_in_total", topic="%DLQ%points", message_type="normal") == 1
    assert value(registry, "rocketmq_send_to_dlq_messages_total", consumer_group="points") == 1
    assert value(registry, "rocketmq_consumer_lag_messages", consumer_group="points", is_retry="false") == 0
    assert value(registry, "rocketmq_consumer_lag_latency", topic="%RETRY%points", is_retry="true") == 0
    assert value(registry, "txmq_quarantined_messages", producer_group="shop") == 3


def test_a_log_that_cannot_be_read_shows_as_down_and_comes_back(
    tmp_path: Path, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0, 2))
    registry.register(LogCollector(tmp_path / "log", cache_seconds=0))
    other = prometheus_client.Counter("mine", "of the program", registry=registry)
    other.inc()
    assert value(registry, "rocketmq_commit_messages_total") == 2
    (tmp_path / "log").rename(tmp_path / "away")
    assert value(registry, "txmq_up") == 0
    assert value(registry, "rocketmq_commit_messages_total") is None, "nothing is shown that may be old"
    assert value(registry, "mine_total") == 1
    assert "could not be read" in caplog.text
    (tmp_path / "away").rename(tmp_path / "log")
    commit(log, prepare(log, 1, 3))
    assert value(registry, "txmq_up") == 1
    assert value(registry, "rocketmq_commit_messages_total") == 5


def test_a_log_that_was_made_anew_is_followed(tmp_path: Path, registry: Any) -> None:
    commit(make_log("delta", tmp_path / "log", orders=1), prepare(CommitLog.open(tmp_path / "log"), 0, 2))
    registry.register(LogCollector(tmp_path / "log", cache_seconds=0))
    assert value(registry, "rocketmq_commit_messages_total") == 2
    shutil.rmtree(tmp_path / "log")
    log = make_log("delta", tmp_path / "log", orders=1)
    commit(log, prepare(log, 0, 1))
    roll_back(log, prepare(log, 1, 4))
    value(registry, "txmq_up")  # finds out
    assert value(registry, "txmq_up") == 1
    assert value(registry, "rocketmq_commit_messages_total") == 1
    assert value(registry, "rocketmq_rollback_messages_total") == 4


def test_scrapes_share_a_look_and_a_cached_one() -> None:
    collector = LogCollector(memory_log(orders=1), cache_seconds=3_600)
    inside, go = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go.wait(60)

    with seen_at("look begins", slow) as looks:
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(lambda: len(list(collector.collect()))) for _ in range(3)]
            assert inside.wait(60)
            go.set()
        assert len({scrape.result() for scrape in found}) == 1
        list(collector.collect())
    assert len(looks) == 1


def test_one_collector_shows_several_logs(registry: Any) -> None:
    first, second = memory_log(orders=1), memory_log(orders=1, points=2)
    first.engine.path, second.engine.path = "first", "second"
    send(first, "abc")
    registry.register(LogCollector(first, second))
    assert value(registry, "rocketmq_topic_number", node_id="first") == 1
    assert value(registry, "rocketmq_topic_number", node_id="second") == 2
    assert value(registry, "rocketmq_commit_messages_total", node_id="first", topic="orders") == 3
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count("# TYPE txmq_up gauge") == 1
    for logs, more in (((), {}), ((first, second), {"node_id": "one"})):
        with pytest.raises(txmq.OptionError, match="logs are given"):
            LogCollector(*logs, **more)  # type: ignore[arg-type]
    with pytest.raises(txmq.OptionError, match="the log first is given twice"):
        LogCollector(first, second, first)


def test_secrets_are_in_no_label(registry: Any) -> None:
    log = memory_log(orders=1)
    log.engine.path = "s3://bucket/log?sig=s3cr3t-value"
    registry.register(LogCollector(log))
    text = prometheus_client.generate_latest(registry).decode()
    assert "s3://bucket/log" in text
    assert "s3cr3t" not in text


# ---------------------------------------------------------------- this process
def test_a_process_counts_its_sends_and_their_time_to_a_verdict(log: CommitLog, counted: Any) -> None:
    scenario(log)
    assert value(counted, "txmq_sent_messages_total", producer_group="shop", topic="orders") == 3
    assert value(counted, "txmq_send_seconds_count", producer_group="shop") == 3
    assert value(counted, "rocketmq_finish_message_latency_count", topic="orders") == 2, "one is UNKNOWN"
    assert value(counted, "txmq_send_errors_total", error="LocalTransactionError") == 1
    assert (value(counted, "txmq_process_commits_total", table="op") or 0) >= 4


def test_a_replay_is_not_counted_again(counted: Any) -> None:
    log = memory_log(orders=1)
    with txmq.TransactionMQProducer(log, "shop", says(), check_interval=None) as producer:
        for _ in range(2):
            message = txmq.Message("orders", b"x")
            producer.send_message_in_transaction(message, txmq.COMMIT_MESSAGE, idempotency_key="7")
    assert value(counted, "txmq_sent_messages_total") == 1


def test_consumed_and_failed_messages_are_counted(counted: Any) -> None:
    log = memory_log(orders=1)
    send(log, "abcde")
    consumer = joined(log, txmq.EachMessage(lambda m: LATER if m.body == b"c" else DONE))
    observer.CONSUMERS.add(consumer)
    assert consumer.member.fetch()
    assert value(counted, "rocketmq_consumer_inflight_messages", consumer_group="points", topic="orders") == 5
    go_on(consumer)
    assert value(counted, "rocketmq_consumer_inflight_messages", topic="orders") == 0
    assert value(counted, "rocketmq_messages_out_total", consumer_group="points", topic="orders") == 4
    assert value(counted, "txmq_failed_messages_total", topic="orders") == 1
    observer.CONSUMERS.discard(consumer)


def test_a_queue_in_order_counts_each_try(counted: Any) -> None:
    log = memory_log(orders=1)
    send(log, "abc")
    consume_all(log, txmq.EachMessage(lambda m: LATER if m.body == b"b" else DONE), mode="orderly")
    consumed = value(counted, "rocketmq_messages_out_total", topic="orders")
    assert (consumed, value(counted, "txmq_failed_messages_total", topic="orders")) == (1, 1)


def test_rounds_of_checks_are_counted_with_their_answers(counted: Any) -> None:
    log = memory_log(orders=1)
    prepare(log, 0, 2, group="shop")
    txmq.CheckService(log, {"shop": says()}, transaction_timeout=0, only_groups=True).run_once()
    txmq.CheckService(log, {"shop": says()}, transaction_timeout=0).run_once()
    assert value(counted, "txmq_check_rounds_total", checker="job", result="ok") == 1
    assert value(counted, "txmq_check_rounds_total", checker="producer") == 1
    assert value(counted, "txmq_checked_transactions_total", verdict="unknown") == 2
    assert value(counted, "txmq_check_last_round_timestamp_seconds", checker="job") > 1e9  # type: ignore[operator]


def test_a_round_that_fails_as_a_whole_is_counted(counted: Any) -> None:
    service = txmq.CheckService(memory_log(orders=1), {"shop": says()})
    stop = threading.Event()
    with at("open batches listed", lambda: 1 / 0):
        service.run(stop, lambda _: stop.set())
    assert value(counted, "txmq_check_rounds_total", result="problems") == 1


def test_a_lost_race_is_counted_as_a_retry(counted: Any) -> None:
    log = memory_log(orders=1)
    with at("commit begins", lambda: log.another().create_topic("bills"), table="topics"):
        log.create_topic("points")
    assert value(counted, "txmq_commit_retries_total", table="topics") == 1
    assert value(counted, "txmq_process_commits_total", table="topics") == 3, "orders, bills, points"


def test_an_observer_that_fails_harms_no_send(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(observer.Observer):
        def sent(self, sent: observer.Sent) -> None:
            raise RuntimeError("no room")

    log, broken = memory_log(orders=1), Broken()
    observer.add(broken)
    try:
        send(log, "a")
    finally:
        observer.remove(broken)
    assert log.read("orders").num_rows == 1
    assert "Broken could not count" in caplog.text


def test_closed_metrics_leave_the_registry_and_count_no_more(registry: Any) -> None:
    metrics = ProcessMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        ProcessMetrics(registry)
    assert len(observer.observers()) == 1
    metrics.close()
    taken = prometheus_client.Gauge("rocketmq_consumer_inflight_messages", "of the program", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        ProcessMetrics(registry)
    registry.unregister(taken)
    assert not observer.observers()
    ProcessMetrics(registry).close()
    assert list(registry.collect()) == []


def test_without_prometheus_client_the_extra_is_named_and_all_else_works() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import rmq_spark as txmq\n"
        "from rmq_spark.testing import InMemoryCommitLog\n"
        "log = InMemoryCommitLog(topics={'orders': 1})\n"
        "assert txmq.metrics.LogWatch(log).look().placed == {}\n"
        "try:\n    txmq.metrics.LogCollector\n"
        "except Exception as problem:\n    print(type(problem).__name__, problem)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "OptionError metrics need prometheus-client: install rmq_spark with its extra metrics\n"


# ---------------------------------------------------------------- shown while a job runs
def test_a_job_shows_its_metrics_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, port, file = memory_log(orders=1), free_ports(1)[0], tmp_path / "txmq.prom"
    with showing(log.engine, port=port, cluster="eu", textfile=str(file)) as write:
        txmq.CheckService(log, {}).run_once()
        write()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            served = answer.read().decode()
        with pytest.raises(txmq.OptionError, match="Choose another port"), showing(log.engine, port=port):
            pass
        assert len(observer.observers()) == 1
    for text in (served, file.read_text()):
        assert 'rocketmq_topic_number{cluster="eu",node_id="memory:"} 1.0' in text
        assert 'txmq_check_rounds_total{checker="job",cluster="eu",node_id="memory:",result="ok"} 1.0' in text
    assert not observer.observers()
    with showing(log.engine, textfile=str(tmp_path / "gone" / "txmq.prom")) as write:
        write()
    assert "the metrics were not written" in caplog.text


# ---------------------------------------------------------------- Spark's queries
def progress(batch_id: int) -> Any:
    numbers = {"id": "q1", "runId": "r1", "name": "orders", "batchId": batch_id, "numInputRows": 7}
    return SimpleNamespace(progress=SimpleNamespace(**numbers))


def test_a_query_s_progress_is_logged_with_the_log_s_figures(caplog: pytest.LogCaptureFixture) -> None:
    log = memory_log(orders=1)
    send(log, "abc")
    prepare(log, 1, 2, group="shop")
    log.engine.runtime.sleep(30)
    log.engine.groups.set("points", {("orders", 0): 1}, "test")
    log.engine.groups.set("idle", {("orders", 0): 3}, "test")
    told: list[Any] = []
    listener = txmq.metrics.QueryListener(log, every=60, on_figures=told.append)
    with caplog.at_level("INFO", "rmq_spark"):
        listener.onQueryStarted(None)
        listener.onQueryProgress(progress(4))
        listener.onQueryProgress(progress(5))
        log.engine.runtime.sleep(60)
        listener.onQueryProgress(progress(6))
        listener.onQueryTerminated(None)
    first, second = caplog.records
    assert first.getMessage() == (
        "query orders, batch 4: 1 half batches are pending (the oldest for 30 s), the slowest group is behind by 2 "
        "messages (30 s), 3 messages are not drained"
    )
    assert vars(first).items() >= {"query_id": "q1", "batch_id": 4, "half_messages": 2, "lag_messages": 2}.items()
    assert (second.batch_id, second.lag_seconds) == (6, 90.0)  # type: ignore[attr-defined]
    assert [figures["batch_id"] for figures in told] == [4, 6]
    txmq.metrics.QueryListener(log, "idle", on_figures=told.append).onQueryProgress(progress(7))
    assert told[-1]["lag_messages"] == 0


def test_figures_that_cannot_be_read_harm_no_query(caplog: pytest.LogCaptureFixture) -> None:
    listener = txmq.metrics.QueryListener(memory_log(orders=1))
    with at("look begins", lambda: 1 / 0):
        listener.onQueryProgress(progress(1))
    assert "were not told" in caplog.text
    with pytest.raises(txmq.MessageError):
        txmq.metrics.QueryListener(memory_log(orders=1), "a group")


def test_figures_of_messages_in_a_table_are_told_by_topic(counted: Any) -> None:
    log = InMemoryCommitLog(topics={"orders": 2, "points": 1})
    with txmq.TransactionMQProducer(log, "shop", says(), check_interval=None) as producer:
        table = pa.table({"body": list("abc"), "topic": ["orders", "points", "orders"]})
        producer.send_messages_in_transaction(table, txmq.COMMIT_MESSAGE)
    assert value(counted, "txmq_sent_messages_total", topic="orders") == 2
    assert value(counted, "txmq_sent_messages_total", topic="points") == 1


def test_the_exporter_and_the_report_have_the_same_figures() -> None:
    """The same functions compute them, or there is no reason why they should agree."""
    log = report_logs.a_shop(0.4)
    seen, now = LogWatch(log).look(), Standing(log.engine).read()
    for name, topic in now.topics.items():
        assert (seen.placed.get(name, 0), seen.expired.get(name, 0)) == (topic["committed"], topic["expired"])
    for row in now.groups:
        assert seen.lag_of(row["consumer_group"]) == pytest.approx((row["lag"], row["lag_seconds"]), abs=0.1)
    assert seen.tables == now.tables
    assert (seen.undrained_messages, seen.undrained_bytes, seen.publish_lag_s) == now.undrained
    assert sum(group.half_batches for group in seen.pending.values()) == now.pending_batches == 2
    assert seen.oldest_pending_s == pytest.approx(now.oldest_pending_s, abs=0.1)
    assert sum(seen.half_messages.values()) == sum(row["messages"] for row in now.pending)
    assert sum(seen.quarantined.values()) == sum(row["messages"] for row in now.quarantined) > 0
    assert seen.conflicts == len(now.conflicts) == 1
