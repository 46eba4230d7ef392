"""The txmq command, in this process, by typer's runner."""

from __future__ import annotations

import base64
import os
import pickle
import re
import shlex
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from rmq_spark import COMMIT_MESSAGE, CommitLog, ConsumerGroup
from rmq_spark._core.inspect.find import Wanted, find
from rmq_spark.cli import app
from rmq_spark.cli.output import show
from rmq_spark.cli.resolution import Resolving
from rmq_spark.cli.words import sentence_for_command
from rmq_spark.errors import CommitError, NotACommitLogError, OptionError, TxmqError
from rmq_spark.testing import InMemoryCommitLog
from tests.support import half_batches
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq, words
from tests.support.half_batches import commit, decide_one, in_conflict, let_leave, pending, prepare_one, quarantine
from tests.support.inside import (
    NO_LISTENER_FENCE,
    HalfRecord,
    HalfWriter,
    RowState,
    Who,
    dlq_topic,
    retry_topic,
    sent_back,
)
from tests.support.limits import Limit
from tests.support.meanwhile import at, seen_at

SECRET = "s3cr3t-value"


pytestmark = pytest.mark.log("delta", orders=2)


def prepare(
    log: CommitLog,
    batch_id: int = 0,
    bodies: tuple[object, ...] = (b"one", b"two"),
    tags: str | None = None,
    app: str = "app",
    **columns: Any,
) -> HalfRecord:
    n = len(bodies)
    keys, of_tags = [f"k{i}" for i in range(n)], pa.array([tags] * n, pa.string())
    table = {"body": pa.array(bodies, pa.binary()), "keys": keys, "tags": of_tags, **columns}
    return half_batches.prepare(log, batch_id, table, app=app, fence_id=NO_LISTENER_FENCE, group="shop")


# ---------------------------------------------------------------- upkeep
def test_a_drain_and_upkeep_say_what_they_did(log: CommitLog) -> None:
    for batch_id in range(3):
        commit(log, prepare(log, batch_id))
    log.engine.ledger.mark()
    assert "messages would be drained" in txmq("maintain", log.path, "--dry-run")[0]
    said, _ = txmq("drain", log.path)
    assert said == f"the table messages has every message that is committed (version {log.refresh()} of op)\n"
    assert half_batches.rows_of(log.engine.messages_table).num_rows == 6
    assert objects("topics", log.path)[0]["committed"] == 6
    assert "drained up to version" in txmq("maintain", log.path)[0]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_upkeep_again_and_again_drains_between_its_rounds(log: CommitLog) -> None:
    messages = [lambda: commit(log, prepare(log))]

    def in_a_drain(**_: object) -> None:
        if threading.current_thread().name == "txmq-drains" and messages:
            messages.pop()()

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with seen_at("table seen", in_a_drain), at("commit done", stop, table="messages"):
        said, _ = txmq("maintain", log.path, "--every", "1h", "--drain-every", "20ms")
    assert said.count("drained up to version ") == 1
    assert "txmq-drains" not in threads()

    names: set[str] = set()

    def begins() -> None:
        names.update(threads())
        if len(rounds) == 2:
            stop()
            raise CommitError("this round ends at once")

    with seen_at("upkeep begins", begins) as rounds:
        txmq("maintain", log.path, "--every", "20ms", "--drain-every", "0s")
    assert "txmq-drains" not in names


# ---------------------------------------------------------------- logs and topics
def test_a_log_and_a_topic_are_made_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert str(path) in txmq("create", path, "--queues", 3)[0]
    assert "no topics" in txmq("topics", path)[0]
    assert txmq("topic", "create", path, "orders")[0] == "topic orders has 3 queues\n"
    txmq("topic", "create", path, "bills", "--queues", 1)
    nothing = {"fifo": False, "retention_s": None, "committed": 0, "expired": 0, "bytes": 0, "waiting": 0}
    made = [{"topic": "bills", "queues": 1, **nothing}, {"topic": "orders", "queues": 3, **nothing}]
    assert objects("topics", path) == objects("topic", "list", path) == made
    assert "kept for 7d" in txmq("topic", "set", path, "bills", "--retention", "7d")[0]
    assert CommitLog.open(path).retentions() == {"bills": 7 * 86_400.0, "orders": None}
    assert "kept for ever" in txmq("topic", "set", path, "bills", "--retention", "forever")[0]
    txmq("create", path, "--exist-ok")


def test_an_error_is_one_line_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (("topics",), ("pending",), ("quarantined",), ("conflicts",), ("vacuum",), ("drain",)):
        _, err = txmq(*command, tmp_path, code=1)
        assert len(err.splitlines()) == 1
        assert "is not a commit log" in err
    monkeypatch.setenv("TXMQ_PATH", "nowhere")
    assert "The path 'nowhere' comes from TXMQ_PATH or a configuration file" in txmq("topics", code=1)[1]
    monkeypatch.setenv("TXMQ_DEBUG", "1")
    assert isinstance(CliRunner().invoke(app, ["topics"]).exception, NotACommitLogError)


def test_an_unexpected_error_is_one_line_too(log: CommitLog) -> None:
    record = prepare(log)
    commit(log, record)
    half_batches.half_file(log, record).write_bytes(b"rubbish")
    _, err = txmq("read", log.path, "orders", code=1)
    assert len(err.splitlines()) == 1


# ---------------------------------------------------------------- what is refused
@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> CommitLog:
    """A log that the group ``points`` reads. It has the half batches ``app:0``, which is committed, and ``app:1``."""
    made = half_batches.make_log("delta", tmp_path_factory.mktemp("refusing") / "log", orders=2, bills=1)
    commit(made, prepare(made))
    prepare(made, 1)
    ConsumerGroup(made, "points").reset("earliest", ["orders"])
    return made


LATIN = "caf\udce9"
"""What a shell hands over of text in another encoding than UTF-8."""


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("nonsense", 2, "No such command 'nonsense'"),
        ("topics", 2, "[PATH], the commit log, may be left out"),
        ("topics LOG --jsn", 2, "--jsn"),
        (f"topics LOG --storage {SECRET}", 2, "--storage"),
        ("check", 2, "--config"),
        # upkeep
        ("maintain LOG --grace 1s", 2, "--grace '1s' is under 60 seconds"),
        ("maintain LOG --dry-run --every 1s", 2, "--dry-run"),
        ("maintain LOG --every 0s", 2, "--every 0s is no time: write --every 60s, for instance"),
        ("maintain LOG --drain-every 1s", 2, "--drain-every is about drains between two rounds"),
        ("maintain LOG --every 1h --drain-every 9", 2, "--drain-every '9' is not a duration"),
        ("vacuum LOG --older-than 1h", 2, "under 7d"),
        # logs and topics
        ("pending LOG-2", 1, "make one with txmq create LOG-2"),
        ("create LOG", 1, "is a commit log already"),
        ("create LOG-2 --queues 0", 2, "queues"),
        ("topic create LOG orders", 1, "is there already, with 2 queues, no FIFO topic: --exist-ok takes it as it is"),
        ("topic create LOG orders --queues 9", 1, "is there already"),
        ("topic create LOG 'my orders'", 2, "topic 'my orders' has characters outside"),
        ("topic set LOG bills --retention 7s", 2, "under 1h"),
        ("topic set LOG orders --retention never", 2, "--retention"),
        ("topic status LOG order", 1, "did you mean 'orders'?"),
        ("topic delete LOG orders", 1, "topic set LOG orders --retention 1h"),
        ("topic delete LOG order", 1, "did you mean 'orders'?"),
        # what is open
        ("resolve LOG app:1 MAYBE --reason r", 2, "MAYBE"),
        ("resolve LOG app:1 COMMIT", 2, "--reason"),
        ("resolve LOG app:1 COMMIT --reason ' '", 2, "a reason is kept"),
        ("resolve LOG app:1 COMMIT --reason …", 2, "it is …, which stands for your words: a reason is kept"),
        ("resume LOG app:1 --reason ...", 2, "it is ..., which stands for your words"),
        ("resolve LOG app:9 COMMIT --reason x", 1, "no half batch 'app:9'"),
        ("resume LOG app:7", 1, "no half batch 'app:7'"),
        ("resume LOG app:1", 1, "nothing of app:1 is quarantined: txmq trace LOG app:1 tells how it stands"),
        ("resume LOG app:1 --group bank", 2, "--group"),
        ("pending LOG --watch 0s", 2, "0s is no time"),
        ("pending LOG --watch 2", 2, "--watch '2' is not a duration"),
        ("trace LOG order-7", 2, "'order-7' is not an id: a transaction id, a half id or a message id is expected"),
        ("trace LOG order-7", 2, "txmq query --key finds messages by a key"),
        ("trace LOG b…:1", 1, "'b…:1' was shortened, and no half batch of this commit log has such an id"),
        (f"trace LOG {LATIN}", 2, "is no text in UTF-8"),
        # read
        ("read LOG order", 1, "did you mean 'orders'"),
        (f"read LOG {LATIN}", 2, "is no text in UTF-8"),
        ("read LOG orders --from x", 2, "--from"),
        ("read LOG orders --from 9", 1, "there is no offset 9 of queue 0"),
        ("read LOG orders --limit 0", 2, "--limit"),
        ("read LOG orders --last 2 --from 1", 2, "--last and --from contradict each other"),
        ("read LOG orders --last 2 --limit 1", 2, "--last and --limit contradict each other"),
        ("read LOG orders --follow --limit 1", 2, "contradict each other"),
        ("read LOG orders --tags a --selector 'b = 1'", 2, "--tags and --selector contradict each other"),
        ("read LOG orders --tags 'a | b'", 2, "--tags 'a | b' has a single bar"),
        ("read LOG orders --queue 1 --from 0=1", 2, "--from 0=1 and --queue 1 contradict each other"),
        ("read LOG orders --queue 2", 2, "--queue 2: topic 'orders' has the queues 0 to 1"),
        # query
        ("query LOG", 2, "say which messages"),
        ("query LOG --half-id a:1 --message-id a:1:0.0", 2, "--message-id and --half-id contradict each other"),
        ("query LOG --half-id a:1 --topic orders", 2, "--half-id and --topic contradict each other"),
        ("query LOG --half-id app:7", 1, "no half batch 'app:7'"),
        ("query LOG --queue 1", 2, "it needs --topic"),
        ("query LOG --topic orders --offset 1", 2, "it needs --queue"),
        ("query LOG --topic orders --queue 2", 2, "topic 'orders' has no queue 2"),
        ("query LOG --key a --body raw", 2, "is not one of"),
        (f"query LOG --key {LATIN}", 2, "is no text in UTF-8"),
        ("query LOG --since yesterday", 2, "or as a time ago, such as 2h"),
        ("query LOG --since 2h --until 3h", 2, "--since '2h' is not before --until '3h': no message can be between"),
        # groups
        ("group lag LOG 'my group'", 2, "'my group' has characters outside"),
        ("group lag LOG", 2, "GROUP is expected, and LOG was given"),
        ("group lag LOG", 2, "txmq group list names the groups"),
        ("group lag LOG points-3", 1, "did you mean 'points'"),
        ("group members LOG nobody", 1, "no progress"),
        ("group delete LOG pionts", 1, "there is no consumer group 'pionts' (did you mean 'points'?)"),
        ("group hand-over LOG pionts", 1, "there is no consumer group 'pionts' (did you mean 'points'?)"),
        ("group reset LOG points --to first", 2, "no place (did you mean earliest?): earliest, latest, a time such as"),
        ("group reset LOG points --to yesterday", 2, "--to 'yesterday' is no place: earliest, latest, a time"),
        ("group reset LOG points --to 2025-99-01", 2, "is not a time"),
        ("group reset LOG points --to '5 minutes'", 2, "or as a time ago, such as 2h"),
        ("""group reset LOG points --to '{"orders": {"1": 9}}'""", 1, "9 for topic 'orders', queue 1: past its end"),
        ("""group reset LOG points --to '{"orders": {"2": 0}}'""", 1, "which has the queues 0 to 1"),
        ("""group reset LOG points --to '{"orders": 2}'""", 2, "--to "),
        ("""group reset LOG points --to '{"orders": {"first": 0}}'""", 2, "--to "),
        ("""group reset LOG points --to '{"orders": {"0": -3}}'""", 2, "--to "),
        ("""group reset LOG points --topic bills --to '{"orders": {"1": 1}}'""", 2, "no offset of topic 'bills' is"),
        # reports
        ("report LOG --html LOG", 2, "is a folder"),
        ("report LOG --html LOG/no/out.html", 2, "there is no folder"),
        ("report LOG --transaction app:1", 2, "--html FILE"),
        ("report LOG --html LOG.html --transaction a:9", 1, "no half batch"),
        ("report LOG --since soon", 2, "since"),
        ("exporter LOG --push http://x --job ' '", 2, "job is empty: name the program whose metrics these are"),
        ("exporter LOG --push 'http://a b'", 2, "http://a b is no address of a Pushgateway (InvalidURL)"),
        # dead letters
        ("dlq list LOG pionts", 1, "'pionts' is not known in this commit log (did you mean 'points'?)"),
        ("dlq resend LOG pionts --all", 1, "'pionts' is not known in this commit log (did you mean 'points'?)"),
        ("dlq resend LOG points", 2, "say which letters"),
        ("dlq resend LOG points --offset 9", 1, "no dead letter 9"),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_the_command_and_changes_nothing(
    refusing: CommitLog, command: str, code: int, said: str
) -> None:
    path, group = refusing.path, ConsumerGroup(refusing, "points")

    def stands() -> tuple[object, ...]:
        return refusing.refresh(), refusing.engine.messages_table.refresh(), refusing.retentions(), group.positions()

    before = stands()
    _, err = txmq(*(word.replace("LOG", path) for word in shlex.split(command)), code=code)
    assert said.replace("LOG", path) in words(err)
    assert not re.search(r"CommitLog|log\.\w|exist_ok|None|(?<!--)\b[a-z_]+=", err.replace(path, "LOG")), err
    assert SECRET not in err
    assert stands() == before


@pytest.mark.parametrize("latin", ["\udcff", LATIN])
def test_text_of_another_encoding_is_no_damage(log: CommitLog, latin: str) -> None:
    commit(log, prepare(log))
    with pytest.raises(OptionError, match="no text that UTF-8 can hold"):
        find(log.engine, Wanted(key=latin), 10)


# ---------------------------------------------------------------- what is open
def test_pending_quarantine_resume_and_resolve(log: CommitLog) -> None:
    assert txmq("pending", log.path)[0] == "nothing is pending\n"
    record = prepare(log)
    found = objects("pending", log.path)
    assert [(r["half_id"], r["messages"], r["producer_group"]) for r in found] == [("app:0", 2, "shop")]
    assert re.search(r"^app:0 +shop +1 +2 +0 +\S+ +[\d.]+ kB +20", txmq("pending", log.path)[0], re.MULTILINE)
    out, _ = txmq("pending", log.path, "--group", "shpo")
    assert out == "nothing of group 'shpo' is pending (pending are half batches of 'shop')\n"
    quarantine(log, record)
    assert txmq("pending", log.path)[0] == "nothing is pending\n"
    assert "app:0" in txmq("quarantined", log.path)[0]
    assert txmq("resume", log.path, "app:0")[0] == "app:0: 2 messages are pending again\n"
    out, _ = txmq("resolve", log.path, "app:0", "commit", "--reason", "the bank says so", "--yes")
    assert out == "app:0: 2 messages became visible\n"
    assert log.read("orders").num_rows == 2
    assert log.engine.state_of(record).history[-1].reason == "the bank says so"


def test_a_conflict_is_shown_with_its_history_and_resolved(log: CommitLog) -> None:
    assert txmq("conflicts", log.path)[0] == "there are no conflicts\n"
    record = prepare(log)
    in_conflict(log, record)
    found = objects("conflicts", log.path)
    assert found[0]["half_id"] == "app:0"
    assert found[0]["history"][0].startswith("rollback by check (attempt 1, ")
    assert "rollback by check" in txmq("conflicts", log.path)[0]
    lines, _ = shown_before_it_asks(log)
    assert lines["in conflict"] == "2 messages: ROLLBACK by check; too late: COMMIT by execute"
    out, _ = txmq("resolve", log.path, "app:0", "ROLLBACK", "--reason", "never happened", "-y")
    assert out == "app:0: its messages were rolled back already, and stay so\n"
    assert txmq("conflicts", log.path)[0] == "there are no conflicts\n"


def test_resolve_says_what_it_did_and_acts_without_a_terminal_only_when_told_yes(log: CommitLog) -> None:
    prepare(log)
    shown_before_it_asks(log, "ROLLBACK")
    assert log.pending().num_rows == 1
    out, _ = txmq("resolve", log.path, "app:0", "ROLLBACK", "--reason", "never paid", "-y")
    assert out == "app:0: 2 messages were rolled back\n"
    # Nothing is left to be decided, so there is nothing to ask about.
    out, _ = txmq("resolve", log.path, "app:0", "ROLLBACK", "--reason", "never paid")
    assert out == "app:0: its messages were rolled back already, and stay so\n"
    assert "comes too late" in txmq("resolve", log.path, "app:0", "COMMIT", "--reason", "x", code=1)[1]


BOTH = "nothing was changed: {} committed and {} rolled back already"
BY_A_CHECK = ". What a check rolled back is not final"


@pytest.mark.parametrize(
    ("committed", "others_by", "verdict", "said"),
    [
        (0, Who.CHECK, "ROLLBACK", "nothing was changed. A check has rolled it back already, which is not final"),
        (1, Who.EXECUTE, "COMMIT", BOTH.format("1 message is", "2 messages are") + "\n"),
        (1, Who.EXECUTE, "ROLLBACK", BOTH.format("1 message is", "2 messages are") + "\n"),
        (2, Who.CHECK, "COMMIT", BOTH.format("2 messages are", "1 message is") + BY_A_CHECK),
        (2, Who.CHECK, "ROLLBACK", BOTH.format("2 messages are", "1 message is") + BY_A_CHECK),
        (3, Who.EXECUTE, "COMMIT", "its messages were committed already, and stay so\n"),
    ],
)
def test_resolve_does_not_claim_what_was_decided_before_it(
    log: CommitLog, committed: int, others_by: Who, verdict: str, said: str
) -> None:
    record = prepare(log, bodies=(b"one", b"two", b"three"))
    paid = pending(log, record).first(committed)
    decide_one(log.engine, record, 1, commit=paid)
    decide_one(log.engine, record, 1, rollback=pending(log, record), who=others_by)
    version = log.refresh()
    out, _ = txmq("resolve", log.path, "app:0", verdict, "--reason", "x", *(["-y"] if not committed else []))
    assert out.startswith(f"app:0: {said}")
    assert log.refresh() == version


def test_resolve_of_both_verdicts_tells_that_a_conflict_is_over(log: CommitLog) -> None:
    record = prepare(log)
    paid = pending(log, record).first(1)
    decide_one(log.engine, record, 1, commit=paid, rollback=pending(log, record) - paid)
    half_batches.too_late(log, record, Who.CHECK, rollback=paid)
    out, _ = txmq("resolve", log.path, "app:0", "COMMIT", "--reason", "the bank says so", "-y")
    counts = "1 message is committed and 1 message is rolled back already"
    assert out == f"app:0: the conflict is over, and no message was changed: {counts}\n"
    assert txmq("conflicts", log.path)[0] == "there are no conflicts\n"


def shown_before_it_asks(log: CommitLog, verdict: str = "COMMIT") -> tuple[dict[str, str], list[str]]:
    """What ``resolve`` shows of the half batch, and of its messages, where there is no terminal to ask on."""
    *shown, unasked = txmq("resolve", log.path, "app:0", verdict, "--reason", "paid", code=2)[1].splitlines()
    assert unasked == f"there is no terminal to ask on: pass --yes to {verdict} it unasked"
    messages = [line for line in shown if line.startswith(("  ", "its messages"))]
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in shown if line not in messages), messages


def test_resolve_shows_the_half_batch_before_it_asks(log: CommitLog) -> None:
    record = prepare(log)
    log.engine.ledger.lease([record], 60)
    quarantine(log, record)
    lines, messages = shown_before_it_asks(log, "ROLLBACK")
    assert re.fullmatch(r"20.*Z, [\d.]+m?s ago", lines.pop("prepared_at"))
    assert re.fullmatch(r"20.*Z: its local transaction may be running", lines.pop("lease_until"))
    assert lines == {
        "half_id": "app:0",
        "producer_group": "shop",
        "app_id": "app",
        "batch_id": "0",
        "topics": "orders",
        "pending": "0 messages",
        "quarantined": "2 messages",
    }
    assert sorted(messages) == ["  orders  k0  one", "  orders  k1  two"]


def test_resolve_shows_the_first_messages_and_nothing_that_steers_the_terminal(log: CommitLog) -> None:
    bodies = (b'{"order_id": 1,\n "total": 10}', b"\x1b[2Jred", b"\xff" * 30, b"x" * 90, b"last")
    keys = ["order-1 all", "k\x07", None, "k" * 90, "o"]
    record = prepare(log, 0, bodies, keys=keys, queue_id=pa.array([0] * 5, pa.int32()))
    _, shown = shown_before_it_asks(log)
    assert [re.split(r" {2,}", line.strip()) for line in shown[:3]] == [
        ["orders", "order-1 all", '{"order_id": 1,\\n "total": 10}'],
        ["orders", "k\\x07", "\\x1b[2Jred"],
        ["orders", " ".join(["ff"] * 24) + "…"],
    ]
    assert shown[3] == f"  and 2 more messages: txmq query {log.path} --half-id app:0"
    # Of a half batch that is decided in part, those that are not; of one in conflict, those in conflict.
    decide_one(log.engine, record, 1, commit=pending(log, record).first(3))
    _, shown = shown_before_it_asks(log)
    assert len(shown) == 2
    assert "k" * 79 + "…" in "".join(shown)
    decide_one(log.engine, record, 1, rollback=pending(log, record), who=Who.CHECK)
    half_batches.too_late(log, record, commit=log.engine.state_of(record).rows_in((RowState.ROLLED_BACK_BY_CHECK,)))
    assert "last" in "".join(shown_before_it_asks(log, "ROLLBACK")[1])
    resolving = Resolving(log, "app:0", "ROLLBACK")  # and the file is lost while it looks
    half_batches.half_file(log, record).unlink()
    assert resolving.messages().startswith("its messages cannot be shown: ")


def test_a_message_that_is_committed_and_waits_is_not_called_visible(log: CommitLog) -> None:
    prepare(log, 0, (b"now", b"later"), delay_level=pa.array([None, 18], pa.int32()))
    out, _ = txmq("resolve", log.path, "app:0", "COMMIT", "--reason", "paid", "-y")
    waits = "1 message is committed, and waits for a time or for an earlier message"
    assert out == f"app:0: 1 message became visible; {waits}\n"


def test_ages_are_told_in_the_largest_units(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    prepare(log)
    for ahead_s, age in ((50, r"5\d(\.\d)?s"), (3600, "1h( \\d+s)?"), (200_000, "2d 7h")):
        clock.ahead_s = ahead_s
        lines, _ = shown_before_it_asks(log)
        assert re.search(f"Z, {age} ago$", lines["prepared_at"])


# ---------------------------------------------------------------- reading
def in_json(*arguments: object) -> list[tuple[int, int]]:
    """Queue and offset of what a ``read`` shows."""
    return [(m["queue_id"], m["queue_offset"]) for m in objects("read", *arguments)]


def test_read_shows_messages_and_where_they_are(log: CommitLog) -> None:
    assert "has no messages here" in txmq("read", log.path, "orders")[0]
    for i in range(3):
        commit(log, prepare(log, i))
    assert in_json(log.path, "orders") == [(q, o) for q in (0, 1) for o in range(3)]
    assert {m["body"] for m in objects("read", log.path, "orders")} == {"one", "two"}
    assert len(in_json(log.path, "orders", "--limit", 4)) == 4
    assert in_json(log.path, "orders", "--from", 2) == [(0, 2), (1, 2)]
    assert in_json(log.path, "orders", "--from", "0=3", "--from", "1=1") == [(1, 1), (1, 2)]


def test_read_says_that_there_is_more(log: CommitLog) -> None:
    commit(log, prepare(log, bodies=(b"x",) * 19))
    assert txmq("read", log.path, "orders")[1] == ""
    commit(log, prepare(log, 1))
    assert txmq("read", log.path, "orders")[1] == "stopped at 20: --limit N shows more, --last N the newest\n"
    assert txmq("read", log.path, "orders", "--limit", 20)[1] == ""


def test_the_last_messages_are_the_newest_of_all_queues(log: CommitLog) -> None:
    for i in range(4):
        commit(log, prepare(log, i))
    commit(log, prepare(log, 4, bodies=(b"alone",)))  # goes to one queue
    table = log.read("orders", columns=["commit_timestamp", "queue_id", "queue_offset"])
    newest = sorted(table.to_pylist(), key=lambda m: (m["commit_timestamp"], m["queue_offset"], m["queue_id"]))
    for count in (1, 2, 3, 5, 9, 50):
        expected = sorted((m["queue_id"], m["queue_offset"]) for m in newest[-count:])
        assert in_json(log.path, "orders", "--last", count) == expected
    end = log.engine.tails()[("orders", 1)]
    assert in_json(log.path, "orders", "--last", 2, "--queue", 1) == [(1, end - 2), (1, end - 1)]
    log.create_topic("empty")
    assert "has no messages here" in txmq("read", log.path, "empty", "--last", 3)[0]


def test_the_last_messages_that_a_filter_keeps_are_looked_for_further_back(log: CommitLog, limit: Limit) -> None:
    limit(FILTERED_SPAN=2)
    for i in range(12):
        prepared = prepare(log, i, tags="rare" if i in (0, 3) else "often")
        commit(log, prepared)
    assert in_json(log.path, "orders", "--tags", "rare || never", "--last", 3) == [(0, 3), (1, 0), (1, 3)]
    assert in_json(log.path, "orders", "--tags", "rare", "--last", 9) == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert in_json(log.path, "orders", "--tags", "never", "--last", 9) == []
    assert in_json(log.path, "orders", "--selector", "TAGS = 'rare'", "--queue", 1) == [(1, 0), (1, 3)]
    assert in_json(log.path, "orders", "--tags", "often", "--limit", 2, "--from", 3, "--queue", 1) == [(1, 4), (1, 5)]


def test_the_last_messages_are_found_without_reading_those_before(log: CommitLog) -> None:
    records = [prepare(log, i) for i in range(6)]
    for record in records:
        commit(log, record)
    for record in records[:2]:
        half_batches.half_file(log, record).unlink()
    assert in_json(log.path, "orders", "--last", 4) == [(0, 4), (0, 5), (1, 4), (1, 5)]


def test_bodies_cannot_steer_the_terminal_and_bytes_come_as_base64(log: CommitLog) -> None:
    commit(log, prepare(log, bodies=(b"\x1b[31m[red]x[/red]\nnext", b"\xff\x00", b"a" * 500)))
    out, _ = txmq("read", log.path, "orders")
    assert "\x1b" not in out
    assert "[red]x[/red] next" in out
    assert "a" * 100 not in out
    found = objects("read", log.path, "orders")
    assert {m.get("body_base64") for m in found} == {None, base64.b64encode(b"\xff\x00").decode()}


# ---------------------------------------------------------------- storage options
def test_storage_options_reach_the_log_and_are_never_shown(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[object] = []

    def fail(uri: str, storage_options: object) -> bool:
        got.append(storage_options)
        raise OSError(f"no access with {SECRET}\nand a second line")

    monkeypatch.setattr(DeltaTable, "is_deltatable", fail)
    monkeypatch.setenv("TXMQ_STORAGE__AWS_REGION", "eu-central-1")
    _, err = txmq("topics", log.path, "--storage", f"AWS_SECRET_ACCESS_KEY={SECRET}", "--storage", "X=a=b", code=1)
    assert got == [{"AWS_REGION": "eu-central-1", "AWS_SECRET_ACCESS_KEY": SECRET, "X": "a=b"}]
    assert err == "OSError: no access with *** and a second line\n"


# ---------------------------------------------------------------- work
def test_vacuum_lists_orphans_and_removes_them(log: CommitLog) -> None:
    orphan = half_batches.orphan_of(log)
    assert objects("vacuum", log.path, "--dry-run")[0]["files"] == [f"half/{orphan.name}"]
    assert orphan.exists()
    assert "1 file was removed" in txmq("vacuum", log.path)[0]
    assert not orphan.exists()


# ---------------------------------------------------------------- dead letters
def test_dead_letters_are_listed_and_sent_again(log: CommitLog) -> None:
    assert "no group has read" in txmq("dlq", "list", log.path, "points", code=1)[1]
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    assert txmq("dlq", "list", log.path, "points")[0] == "there are no dead letters\n"
    for topic in (dlq_topic("points"), retry_topic("points")):
        log.engine.create_own_topic(topic)
    assert "there are no dead letters" in txmq("dlq", "list", log.path, "points")[0]
    commit(log, prepare(log))
    given_up = log.read("orders").append_column("reconsume_times", pa.array([16, 16], pa.int32()))
    header = half_batches.header_of(0, "dead", group="points")
    writer = HalfWriter(header, log.topics(), None, None, own=True)
    letters = sent_back(given_up, ["\x1b[31mno", None], "points", 16, None)
    commit(log, prepare_one(log.engine, header, log.engine.stage(writer, letters.to_batches())))
    out, _ = txmq("dlq", "list", log.path, "points")
    assert "one" in out
    assert "\x1b" not in out
    assert [r["reconsume_times"] for r in objects("dlq", "list", log.path, "points")] == [16, 16]
    assert "resent" not in out, "none was"
    key = log.read("orders")["keys"][0].as_py().split()[0]
    topics = [row["topic"] for row in objects("query", log.path, "--key", key)]
    assert topics == ["%DLQ%points", "orders"], "a dead letter looked delivered"
    assert [row["topic"] for row in objects("query", log.path, "--topic", "orders", "--key", key)] == ["orders"]
    whole = objects("dlq", "list", log.path, "points")[0]
    assert whole.keys() >= {"tags", "sharding_key", "properties", "born_timestamp", "died", "resent", "body"}
    assert "1 dead letter sent again" in txmq("dlq", "resend", log.path, "points", "--offset", "1")[0]
    first, second = (r["resent"] for r in objects("dlq", "list", log.path, "points"))
    assert first is None
    assert second.endswith("+00:00")
    let_leave(log)
    assert [r["resent"] for r in objects("dlq", "list", log.path, "points")] == [None, second], "it has left half"
    assert "resent" in txmq("dlq", "list", log.path, "points")[0]
    assert "1 dead letter sent again" in txmq("dlq", "resend", log.path, "points", "--all")[0]
    assert "0 dead letters sent again" in txmq("dlq", "resend", log.path, "points", "--all")[0]
    assert log.read(retry_topic("points")).num_rows == 2


# ---------------------------------------------------------------- tables
LONG_APP = "txmq-producer-12345678-9abc-def0-1234-56789abcdef0"


def test_a_table_leaves_out_what_only_repeats_the_half_id_and_json_has_it(log: CommitLog) -> None:
    prepare(log)
    header = txmq("pending", log.path)[0].splitlines()[0].split()
    known = ["half_id", "producer_group", "attempt", "messages", "check_times", "age", "size", "prepared_at"]
    assert header == known
    assert objects("pending", log.path)[0]["app_id"] == "app"


def test_a_narrow_terminal_gets_shorter_cells_then_fewer_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    made = [{"half_id": f"{LONG_APP}:{i}", "messages": i, "by": "someone", "reason": "word " * 9} for i in range(2)]

    def lines(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        show(made, False, "nothing", spare=["by"])
        shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()]
        assert max(map(len, shown)) <= columns
        return shown

    assert len(lines(130)) == 3
    assert lines(85)[0].split() == ["half_id", "messages", "by", "reason"]
    assert lines(85)[1].startswith("txmq-produc")
    assert f"{LONG_APP[-8:]}:0 " in lines(85)[1]
    assert lines(85)[-1] == "shortened: half_id, reason (--wide shows all)"
    assert lines(60)[0].split() == ["half_id", "messages", "reason"]
    assert lines(60)[-1] == "shortened: half_id, reason; left out: by (--wide shows all)"
    assert lines(20)[0].split() == ["half_id"]


# ---------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("call", "for_python", "for_command"),
    [
        (lambda log: log.read("bills"), "make it with log.create_topic('bills')", "txmq topic create 'my log' bills"),
        (lambda log: log.create_topic("orders", exist_ok=False), "exist_ok=True takes it", "--exist-ok takes it"),
        (lambda log: log.vacuum(older_than="1d"), "older_than='1d' is under 7d", "--older-than '1d' is under 7d"),
        (lambda log: log.create_topic("orders", 0), "queues=0 is out of range", "--queues 0 is out of range"),
        (lambda log: log.set_retention("orders", "1"), "None keeps messages", "'forever' keeps messages"),
        (lambda log: log.resolve("a:0", COMMIT_MESSAGE, "x"), "log.pending() lists", "txmq pending 'my log' lists"),
    ],
)
def test_an_error_words_its_remedy_for_a_program_and_for_the_command(
    call: Callable[[CommitLog], object], for_python: str, for_command: str
) -> None:
    with pytest.raises(TxmqError) as raised:
        call(InMemoryCommitLog(topics={"orders": 2}))
    travelled = pickle.loads(pickle.dumps(raised.value))  # from an executor
    for problem in (raised.value, travelled):
        assert for_python in str(problem)
        assert for_command in sentence_for_command(problem, "my log")


# ---------------------------------------------------------------- the rest
def test_a_round_of_checks_runs_in_any_thread_of_a_program(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    txmq("init")
    monkeypatch.setenv("TXMQ_PATH", log.path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(txmq, "check", "--config", "txmq.toml", "--once").result()


def test_init_writes_the_example_over_nothing(log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "txmq check --config txmq.toml --once" in txmq("init")[0]
    assert "[listeners]" in Path("txmq.toml").read_text()
    monkeypatch.setenv("TXMQ_PATH", log.path)
    txmq("check", "--config", "txmq.toml", "--once")
    monkeypatch.setenv("TXMQ_PATH", "nowhere")
    txmq("check", log.path, "--config", "txmq.toml", "--once")
    Path("txmq.toml").write_text("mine")
    assert "is there already" in txmq("init", code=2)[1]
    assert Path("txmq.toml").read_text() == "mine"
    assert "does not exist" in txmq("init", "nowhere/x.toml", code=2)[1]
    assert "'txmq.toml/x.toml' cannot be written: " in txmq("init", "txmq.toml/x.toml", code=2)[1]
    assert "has characters that cannot be printed: name another file" in txmq("init", "\x1b.toml", code=2)[1]
    txmq("init", "other.toml")
    assert "--config other.toml" in Path("other.toml").read_text()
