"""Messages that are older than their topic's retention go, the oldest of a queue first, and readers are told."""

from __future__ import annotations

from datetime import datetime

import pyarrow.compute as pc
import pytest

from rmq_spark import CommitLog, ConsumerGroup
from rmq_spark.cli import message_choice
from rmq_spark.errors import CorruptLogError, OffsetOutOfRangeError, TopicExistsError
from tests.support.clocks import set_clock
from tests.support.half_batches import another, commit, let_leave, rows_of, send
from tests.support.inside import TIME_MIN, Change, Expirer, LogWatch
from tests.support.meanwhile import at, dies_at
from tests.torture.hostile.logs import edit_row

pytestmark = pytest.mark.log("memory", "delta", orders=2)


def drained_offsets(log: CommitLog) -> dict[int, list[int]]:
    """By queue, the offsets that the table messages holds."""
    rows = rows_of(another(log).engine.messages_table, ["queue_id", "queue_offset"])
    queues = sorted(pc.unique(rows["queue_id"]).to_pylist())
    return {q: sorted(rows.filter(pc.equal(rows["queue_id"], q))["queue_offset"].to_pylist()) for q in queues}


def send_and_drain(log: CommitLog, key: str, rows: int = 4) -> None:
    commit(log, send(log, key, rows))
    log.drain()


def expire(log: CommitLog) -> None:
    """All that is drained expires, in one file; then messages are kept for ever again."""
    log.engine.topic_store.set_retention("orders", 0.0)
    assert let_leave(log).files_expired == 1
    log.engine.topic_store.set_retention("orders", None)


def expire_and_go_on(log: CommitLog) -> None:
    """Another process lets all expire that is drained, and sends something new."""
    expire(another(log))
    send_and_drain(another(log), "new")


def test_what_is_older_than_the_retention_goes_and_the_first_offsets_move(log: CommitLog) -> None:
    send_and_drain(log, "old")
    log.engine.topic_store.set_retention("orders", 0.0)
    report = let_leave(log)
    assert report.files_expired == 1
    assert "1 file of messages expired" in str(report)
    assert another(log).trace(half_id="old:0").unknown[-1] == "of its 4 committed messages 4 have expired"
    tails = another(log).engine.tails()
    assert another(log).engine.firsts() == tails
    assert drained_offsets(log) == {}
    assert let_leave(log).files_expired == 0
    log.set_retention("orders", None)
    send_and_drain(log, "new")
    assert let_leave(log).files_expired == 0
    assert drained_offsets(log) == {q: list(range(tails["orders", q], tails["orders", q] + 2)) for q in (0, 1)}
    for i in range(5):  # the mark goes over the expire row
        commit(log, send(log, f"more{i}"))
    let_leave(log)
    assert another(log).engine.firsts() == tails


def test_a_queue_never_has_a_hole(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    for i in range(4):
        send_and_drain(log, f"key{i}")
        clock.ahead_s += 100.0
    table = another(log).engine.messages_table
    table.refresh()
    first, _, third, _ = table.actions().sort_by("min.op_version")["path"].to_pylist()
    merged = table.write(table.read([first, third]).sort_by([("queue_id", "ascending")]))
    change = Change(add=[merged], remove=[first, third], data_change=False)
    assert table.compare_and_set(lambda _: change, lambda _: True)
    log.engine.topic_store.set_retention("orders", 1000.0)
    clock.ahead_s = 1150.0
    # The second file alone is old enough, but the first messages lie in one with the third.
    assert Expirer(another(log).engine, 0.0).run() == []
    assert another(log).engine.firsts() == {}
    clock.ahead_s = 1250.0
    assert len(Expirer(another(log).engine, 0.0).run()) == 2


def test_what_is_not_drained_or_has_no_retention_stays(log: CommitLog) -> None:
    log.create_topic("points", 1)
    log.engine.topic_store.set_retention("points", 0.0)
    send_and_drain(log, "drained")
    log.engine.topic_store.set_retention("orders", 0.0)
    commit(log, send(log, "tail"))
    assert Expirer(another(log).engine, 0.0).run(dry_run=True) != []
    assert len(Expirer(another(log).engine, 0.0).run()) == 1
    assert sum(another(log).engine.firsts().values()) == 4


def test_a_retention_is_a_duration_of_an_hour_or_more(log: CommitLog) -> None:
    log.create_topic("kept", retention="7d")
    assert log.retentions() == {"kept": 7 * 86_400.0, "orders": None}
    log.set_retention("kept", "1h")
    assert another(log).retentions()["kept"] == 3600.0
    log.create_topic("kept", exist_ok=True)
    assert another(log).retentions()["kept"] == 3600.0
    log.create_topic("kept", exist_ok=True, retention="60m")
    version = log.engine.topics_table.refresh()
    log.set_retention("kept", "60m")
    assert log.engine.topics_table.refresh() == version
    with pytest.raises(TopicExistsError, match=r"kept for 1h \(asked for: for 7d\)"):
        log.create_topic("kept", exist_ok=True, retention="7d")
    with pytest.raises(TopicExistsError, match=r"kept for ever \(asked for: for 7d\)"):
        log.create_topic("orders", exist_ok=True, retention="7d")


@pytest.mark.parametrize(("first", "said"), [(99, "and it ends at 2"), (-1, "cannot be"), (None, "cannot be")])
def test_first_offsets_that_cannot_be_are_told(log: CommitLog, first: int | None, said: str) -> None:
    send_and_drain(log, "old")
    expire(log)
    firsts = [{"topic": "orders", "queue_id": 0, "first_offset": first}]
    edit_row(log.engine.op_table, "expire", "firsts", firsts)
    with pytest.raises(CorruptLogError, match=said):
        another(log).read("orders")


def test_a_crash_between_the_row_and_the_files_is_made_good(log: CommitLog) -> None:
    send_and_drain(log, "old")
    log.engine.topic_store.set_retention("orders", 0.0)
    with dies_at("commit begins", table="messages"):
        Expirer(another(log).engine, 0.0).run()
    assert sum(another(log).engine.firsts().values()) == 4
    version = another(log).refresh()
    assert len(Expirer(another(log).engine, 0.0).run()) == 1
    assert another(log).refresh() == version


@pytest.mark.parametrize(
    ("start", "point", "table"), [(None, "table seen", "op"), (TIME_MIN, "files read", "messages")]
)
def test_a_read_from_the_beginning_goes_on_when_messages_expire_meanwhile(
    log: CommitLog, start: datetime | None, point: str, table: str
) -> None:
    send_and_drain(log, "old")
    with at(point, lambda: expire_and_go_on(log), table=table):
        found = log.read("orders", start, columns=["body"])
    assert sorted(found["body"].to_pylist()) == [b"new.0", b"new.1", b"new.2", b"new.3"]


def test_the_command_reads_on_when_messages_expire_meanwhile(log: CommitLog) -> None:
    send_and_drain(log, "old")
    with at("table seen", lambda: expire_and_go_on(log), table="op"):
        assert message_choice.Choice(log, "orders").newest(4).num_rows == 4
    with pytest.raises(OffsetOutOfRangeError, match="queue 0"):
        message_choice.Choice(log, "orders").first({0: 0}, 10)


def test_what_has_expired_is_in_no_group_s_lag(log: CommitLog) -> None:
    """A group that stood before the first message that is left was behind by messages that nobody can read."""
    log.engine.groups.set("points", {("orders", 0): 1, ("orders", 1): 0}, "test")
    send_and_drain(log, "old")
    expire(log)
    assert ConsumerGroup(log, "points").lag()["lag"].to_pylist() == [0, 0]
    send_and_drain(log, "new", 2)
    behind = ConsumerGroup(log, "points").lag()
    assert behind["lag"].to_pylist() == [1, 1]
    assert behind["next_offset"].to_pylist() == [1, 0]
    assert LogWatch(log).look().lags["points", "orders"].messages == 2
