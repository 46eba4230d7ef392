"""What an error of offsets, consumer groups, dead letters and inboxes advises is done here, and it helps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CommitLog
from tests.support import commands
from tests.support.consumers import LATER, consume_all, memory_log, push, send
from tests.support.half_batches import let_leave, make_log, prepare
from tests.support.inboxes import inbox_of, make_database, results
from tests.support.inside import Planner, Session, from_json, read_options, to_json

ZERO = ("orders", 0)
ONE = ("orders", 1)


@pytest.fixture
def log() -> CommitLog:
    """Two messages in each queue of ``orders``."""
    made = memory_log(orders=2, returns=1)
    send(made, "abcd")
    return made


def group_of(log: CommitLog, name: str = "points") -> txmq.ConsumerGroup:
    return txmq.ConsumerGroup(log, name)


def bound_of(log: CommitLog, option: str, text: str, streaming: bool = False) -> Any:
    """Where a read with this option begins or ends."""
    given = read_options({"path": "log", "subscribe": "orders", option: text}, streaming)
    planner = Planner(log.engine, given.subscription)
    return planner.resolve(option, given.starting if option == "startingOffsets" else given.ending)


# ---------------------------------------------------------------- offsets
NAMES = {-2: "-2 for earliest", -1: "-1 for latest"}


@pytest.mark.parametrize(
    ("option", "streaming", "taken", "advised"),
    [
        ("startingOffsets", False, {-2: 0}, ", or -2 for earliest"),
        ("startingOffsets", True, {-2: 0, -1: 2}, ", or -1 for latest, or -2 for earliest"),
        ("endingOffsets", False, {-1: 2}, ", or -1 for latest"),
    ],
)
def test_each_mark_that_is_advised_in_the_place_of_an_offset_is_taken(
    log: CommitLog, option: str, streaming: bool, taken: dict[int, int], advised: str
) -> None:
    """A batch advised -1 for its start, and -2 for its end, and refused them."""
    with pytest.raises(txmq.OffsetError, match="leaves out queue 1") as caught:
        bound_of(log, option, '{"orders": {"0": 1}}', streaming)
    assert {mark for mark, words in NAMES.items() if words in str(caught.value)} == set(taken)
    with pytest.raises(txmq.OffsetError, match=f"has -3 for .*: at least 0 is expected{advised}$"):
        bound_of(log, option, '{"orders": {"0": -3, "1": 0}}', streaming)
    for mark, there in taken.items():
        given = json.dumps({"orders": {"0": 1, "1": mark}})
        assert bound_of(log, option, given, streaming) == {ZERO: 1, ONE: there}


@pytest.mark.parametrize("mark", [-1, -2])
def test_a_reset_takes_the_marks_that_it_advises_for_a_queue_that_was_left_out(log: CommitLog, mark: int) -> None:
    group = group_of(log)
    with pytest.raises(txmq.OffsetError, match=f"leaves out queue 1 .*{NAMES[mark]}"):
        group.reset({"orders": {"0": 1}})
    there = {-1: 2, -2: 0}[mark]
    assert group.reset({"orders": {"0": 1, "1": mark}}) == {ZERO: 1, ONE: there} == group.positions()
    assert group.reset({"orders": {"1": mark}}, others_stay=True) == {ONE: there}


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_the_example_of_offsets_that_an_error_shows_is_taken(log: CommitLog, option: str) -> None:
    """It had a -1 in it, which a batch refuses for its start."""
    send(log, map(str, range(100)))
    with pytest.raises(txmq.OffsetError, match="is not of the form") as caught:
        bound_of(log, option, "3")
    example = str(caught.value).partition("of the form ")[2].partition(": found")[0]
    assert bound_of(log, option, example) == {ZERO: 23, ONE: 7}
    with pytest.raises(txmq.OffsetError, match="is not of the form"):
        group_of(log).reset({"orders": 3})  # type: ignore[dict-item]
    assert group_of(log).reset(json.loads(example)) == {ZERO: 23, ONE: 7}


def test_offsets_of_another_log_are_refused_and_those_words_that_are_advised_are_taken(log: CommitLog) -> None:
    group = group_of(log)
    with pytest.raises(txmq.OffsetOutOfRangeError, match="Use 'earliest', or offsets of this log"):
        group.reset(to_json({ZERO: 1, ONE: 1}, log_id="another"))
    assert group.reset(to_json({ZERO: 1, ONE: 1}, log_id=log.id)) == {ZERO: 1, ONE: 1}
    assert group.reset("earliest", ["orders"]) == {ZERO: 0, ONE: 0}


def test_a_reset_to_what_has_expired_is_told_where_the_queue_starts(tmp_path: Path) -> None:
    log = make_log("memory", tmp_path)
    send(log, "abcd")
    log.engine.topic_store.set_retention("orders", 0.0)
    let_leave(log)
    with pytest.raises(txmq.OffsetOutOfRangeError, match="starts at offset 2 now"):
        group_of(log).reset({"orders": {"0": 0, "1": 2}})
    assert group_of(log).reset({"orders": {"0": 2, "1": 2}}) == {ZERO: 2, ONE: 2}


# ---------------------------------------------------------------- groups
def test_a_new_group_begins_at_topics_that_are_named(log: CommitLog) -> None:
    with pytest.raises(txmq.GroupNotFoundError, match="Name its topics to say where a new group begins"):
        group_of(log).reset("latest")
    assert group_of(log).reset("latest", ["orders"]) == {ZERO: 2, ONE: 2}


def test_a_topic_without_offsets_is_given_some_or_left_out(log: CommitLog) -> None:
    group = group_of(log)
    with pytest.raises(txmq.OptionError, match="give one for a queue of it, or leave out the topic"):
        group.reset({"orders": {"0": 0}}, ["orders", "returns"], others_stay=True)
    assert group.reset({"orders": {"0": 0}}, ["orders"], others_stay=True) == {ZERO: 0}
    both = {"orders": {"0": 0}, "returns": {"0": 0}}
    assert group.reset(both, ["orders", "returns"], others_stay=True) == {ZERO: 0, ("returns", 0): 0}


def test_a_clone_goes_to_a_group_that_was_deleted_or_has_another_name(log: CommitLog) -> None:
    for name in ("points", "other"):
        group_of(log, name).reset("latest", ["orders"])
    with pytest.raises(txmq.OptionError, match="delete it first, or choose another name"):
        group_of(log).clone("other")
    assert group_of(log).clone("another").positions() == {ZERO: 2, ONE: 2}
    assert group_of(log, "other").delete()
    assert group_of(log).clone("other").positions() == {ZERO: 2, ONE: 2}


def test_a_group_that_spark_reads_is_handed_over_by_the_command_that_is_advised(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log")
    log.engine.groups.publish("points", {ZERO: 0}, Session("a-query"))
    with pytest.raises(txmq.GroupInUseError, match="or stop the others and run: txmq group hand-over LOG points"):
        log.engine.groups.claim("points", "member", {ZERO: 1}, {}, "by")
    assert log.engine.groups.claim("a-group-of-its-own", "member", {ZERO: 0}, {ZERO: 0}, "by")
    commands.txmq("group", "hand-over", log.path, "points")
    generation = log.engine.groups.positions("points")[ZERO].generation
    assert log.engine.groups.claim("points", "member", {ZERO: generation}, {}, "by")


@pytest.mark.turns(4)
@pytest.mark.parametrize("to", ["earliest", "latest", "2025-03-01T08:00:00Z", "2h", '{"orders": {"0": -1, "1": -2}}'])
def test_each_place_that_the_command_advises_is_taken(tmp_path: Path, to: str) -> None:
    """It refused -1 and -2."""
    log = make_log("delta", tmp_path / "log")
    reset = ("group", "reset", log.path, "points", "--to")
    wrong = commands.txmq(*reset, "yesterday", code=2)[1]
    assert to in wrong or to.startswith("{")
    assert "Name its topics" in commands.txmq(*reset, "latest", code=1)[1]
    commands.txmq(*reset, to, "--topic", "orders")
    assert log.another().engine.groups.next_offsets("points") == {ZERO: 0, ONE: 0}


# ---------------------------------------------------------------- commands on messages and half batches
SELECTOR = """--selector "TAGS = 'a'" """
RESOLVE = "resolve LOG app:0 COMMIT --reason known"


@pytest.mark.parametrize(
    ("wrong", "advised", "right"),
    [
        ("read LOG orders --last 1 --from 0", "--last N counts", "read LOG orders --last 1"),
        (f"read LOG orders --tags a {SELECTOR}", "(a selector can say TAGS = 'a')", f"read LOG orders {SELECTOR}"),
        ("query LOG", "say which messages: --key, --message-id", "query LOG --key k"),
        ("query LOG", "--topic, --since or --until", "query LOG --topic orders"),
        ("query LOG", "--topic, --since or --until", "query LOG --since 2h"),
        ("query LOG", "--topic, --since or --until", "query LOG --until 2261-01-01T00:00:00Z"),
        ("query LOG --queue 0", "it needs --topic", "query LOG --queue 0 --topic orders"),
        ("query LOG --topic orders --offset 0", "it needs --queue", "query LOG --topic orders --offset 0 --queue 0"),
        ("resume LOG app:0 --group g", "write txmq resume all", "resume LOG all --group g"),
        (RESOLVE.replace("COMMIT", "MAYBE"), "neither COMMIT nor ROLLBACK", f"{RESOLVE} --yes"),
        (RESOLVE, "pass --yes to COMMIT it unasked", f"{RESOLVE} --yes"),
    ],
)
def test_a_command_does_what_it_advises(tmp_path: Path, wrong: str, advised: str, right: str) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    send(log, "a", keys=["k"], tags=["a"])
    half_id = prepare(log, 0, 1).half_id

    def run(line: str, code: int = 0) -> str:
        typed = [{"LOG": log.path, "app:0": half_id}.get(word, word) for word in shlex.split(line)]
        return commands.words(commands.txmq(*typed, code=code)[1])

    assert advised in run(wrong, code=2)
    run(right)


# ---------------------------------------------------------------- dead letters
def letters_of(log: CommitLog) -> txmq.DeadLetters:
    consume_all(log, lambda messages: LATER, max_reconsume_times=0)
    return txmq.DeadLetters(log, "points")


def test_letters_are_sent_again_by_the_offsets_that_are_advised(log: CommitLog) -> None:
    letters = letters_of(log)
    with pytest.raises(txmq.OffsetError, match="has no dead letter 9: it has those from 0 to 3"):
        letters.resend([9])
    assert letters.resend([0, 3]) == 2
    with pytest.raises(txmq.OffsetError, match=r"a list.*as in \[0, 2\]|no list: .*as in \[0, 2\]"):
        letters.resend(2)  # type: ignore[arg-type]
    assert letters.resend([0, 2]) == 1


@pytest.mark.parametrize("which", [["--offset", "0"], ["--all"]])
def test_the_command_that_sends_letters_again_takes_what_it_advises(tmp_path: Path, which: list[str]) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    send(log, "a")
    letters_of(log)
    resend = ("dlq", "resend", log.path, "points")
    unsaid = commands.words(commands.txmq(*resend, code=2)[1])
    assert "say which letters: --offset N (may be repeated), or --all" in unsaid
    assert "1 dead letter sent again" in commands.txmq(*resend, *which)[0]


# ---------------------------------------------------------------- inboxes
def test_an_inbox_whose_tables_are_missing_is_created(log: CommitLog, tmp_path: Path) -> None:
    inbox = txmq.SqlInbox(make_database(tmp_path), "points", lambda connection, messages: None)
    with pytest.raises(txmq.ListenerError, match=r"call create\(\) once"):
        inbox.apply(log.read("orders"))
    inbox.create()
    assert inbox.apply(log.read("orders")) == 4


@pytest.mark.parametrize("remedy", ["another group", "rows deleted"])
def test_an_inbox_of_another_log_goes_on_as_advised(log: CommitLog, tmp_path: Path, remedy: str) -> None:
    url = make_database(tmp_path)
    inbox_of(url)
    first = txmq.SqlInbox(url, "points", lambda connection, messages: None, log=log)
    assert first.apply(log.read("orders")) == 4
    anew = memory_log(orders=2)
    send(anew, "abcd")
    second = txmq.SqlInbox(url, "points", lambda connection, messages: None, log=anew)
    advised = "Use another group, or delete the group's rows in 'txmq_inbox' and 'txmq_inbox_log'"
    with pytest.raises(txmq.InboxConflictError, match=advised):
        second.apply(anew.read("orders"))
    if remedy == "another group":
        second = txmq.SqlInbox(url, "others", lambda connection, messages: None, log=anew)
    else:
        with sa.create_engine(url).begin() as connection:
            for table in ("txmq_inbox", "txmq_inbox_log"):
                connection.execute(sa.text(f"delete from {table} where consumer_group = 'points'"))
    assert second.apply(anew.read("orders")) == 4


def test_an_inbox_whose_work_ended_its_transaction_goes_on_where_it_is_told_to(log: CommitLog, tmp_path: Path) -> None:
    url = make_database(tmp_path)

    def end_it(connection: sa.Connection, messages: pa.Table) -> None:
        connection.connection.dbapi_connection.commit()  # type: ignore[union-attr]
        connection.execute(sa.text("select 1"))

    with pytest.raises(txmq.TransactionEndedError, match=r"call set_position\(topic, queue_id, next_offset\)"):
        inbox_of(url, end_it).apply(log.read("orders"))
    inbox = inbox_of(url)
    for queue in (ZERO, ONE):
        with pytest.raises(txmq.ListenerError, match=r"call set_position\('orders', \d, next_offset\)"):
            inbox.apply(log.read("orders"))
        inbox.set_position(*queue, 1)
    assert inbox.apply(log.read("orders")) == 2
    assert results(url) == ["b", "d"]


@pytest.mark.parametrize("name", ["points", "others"])
def test_an_inbox_is_given_to_a_consumer_as_advised(log: CommitLog, tmp_path: Path, name: str) -> None:
    url = make_database(tmp_path)
    wrong = {"mode": "concurrently"} if name == "points" else {"mode": "orderly"}
    advised = "use mode='orderly'" if name == "points" else "make an inbox for each group"
    with pytest.raises(txmq.OptionError, match=advised):
        push(log, inbox_of(url), name, **wrong)
    consume_all(log, inbox_of(url, group=name), name, mode="orderly")
    assert results(url) == ["a", "b", "c", "d"]


# ---------------------------------------------------------------- consumers
def test_each_of_a_member_s_settings_that_contradict_is_mended_as_advised(log: CommitLog) -> None:
    from_time = {"consume_from_where": "CONSUME_FROM_TIMESTAMP"}
    when = {"consume_timestamp": log.engine.runtime.now()}
    for wrong, advised, right in (
        ({"tags": "a", "selector": "TAGS = 'a'"}, "give one of them", {"selector": "TAGS = 'a'"}),
        ({"message_model": "BROADCASTING"}, "give each consumer a group of its own", {"message_model": "CLUSTERING"}),
        (from_time, "consume_timestamp=<a datetime>", from_time | when),
        ({"lease": 1.0, "heartbeat_interval": 1.0}, "under two heartbeats", {"lease": 2.0, "heartbeat_interval": 1.0}),
    ):
        with pytest.raises(txmq.OptionError, match=advised):
            txmq.PullConsumer(log, "points", "orders", **wrong)
        assert txmq.PullConsumer(log, "points", "orders", **right)


@pytest.mark.parametrize("remedy", ["commit", "max_span"])
def test_who_gave_out_all_that_may_be_given_out_goes_on_as_advised(log: CommitLog, remedy: str) -> None:
    span = 2 if remedy == "commit" else 4
    send(log, "efgh")
    options: dict[str, Any] = {"auto_commit": False, "tables": True, "pull_batch_size": 8}

    def rows(consumer: txmq.PullConsumer) -> int:
        found = consumer.poll(0)
        return found.num_rows if isinstance(found, pa.Table) else 0

    with txmq.PullConsumer(log.another(), "points", "orders", max_span=2, **options) as consumer:
        assert [rows(consumer), rows(consumer)] == [2, 2]
        said = r"^4 messages were given out and not committed.*call commit\(\), or raise max_span"
        with pytest.raises(txmq.ConsumeError, match=said):
            consumer.poll(0)
        if remedy == "commit":
            consumer.commit()
            assert rows(consumer) == span
    if remedy == "max_span":
        with txmq.PullConsumer(log.another(), "others", "orders", max_span=span, **options) as consumer:
            assert [rows(consumer), rows(consumer)] == [4, 4]


def test_positions_by_queue_are_no_offsets_and_are_refused_in_words() -> None:
    with pytest.raises(txmq.OffsetError, match=r"is not of the form .*: found \{\('orders', 0\): 1\}"):
        from_json({("orders", 0): 1}, "to")
