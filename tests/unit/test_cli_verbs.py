"""What a person who was called at night asks the txmq command."""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from rich.console import Console
from typer.testing import CliRunner

import rmq_spark as txmq_package
from rmq_spark import CommitLog, ConsumerGroup
from rmq_spark.cli import app, top
from rmq_spark.cli.bodies import BodyForm, shown
from rmq_spark.cli.statistics import WINDOWS
from rmq_spark.cli.text import escaped, short_age, size
from rmq_spark.cli.trace import argument_of, shown_keys
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq, words
from tests.support.half_batches import (
    commit,
    copied_log,
    count_check,
    decide_one,
    half_file,
    in_conflict,
    in_half,
    let_leave,
    make_log,
    pending,
    prepare,
    quarantine,
    split,
    too_late,
)
from tests.support.inside import RowState, Standing, Who, placed_within
from tests.support.limits import Limit
from tests.support.meanwhile import seen_at

NASTY = "\x1b[31mred\x07\n\u202egnp.exe\x9b2J"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommitLog:
    """A commit log that the environment names."""
    made = copied_log(tmp_path / "log", orders=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXMQ_PATH", made.path)
    monkeypatch.delenv("TXMQ_CONFIG", raising=False)
    return made


def orders(log: CommitLog, batch_id: int, *numbers: int, app: str = "shop", **columns: list[Any]) -> Any:
    """Prepare orders, each a transaction by its key ``o<number>``."""
    table = {
        "body": [json.dumps({"order_id": n}) for n in numbers],
        "keys": [f"order-{n} all" for n in numbers],
        "key": [f"o{n}" for n in numbers],
        "queue_id": pa.array([n % 2 for n in numbers], pa.int32()),
        **columns,
    }
    return prepare(log, batch_id, table, per="key", key="key", app=app)


def given_up(log: CommitLog, batch_id: int, group: str = "bank") -> str:
    record = prepare(log, batch_id, 2, app="nightly", group=group)
    quarantine(log, record)
    return record.half_id


def conflict(log: CommitLog) -> str:
    record = prepare(log, 0, 2, app="late")
    in_conflict(log, record)
    return record.half_id


def stopping(monkeypatch: pytest.MonkeyPatch, *steps: Any) -> list[float]:
    """Let a command that goes on until it is stopped run these steps in its pauses, and stop then."""
    waits: list[float] = []
    todo = list(steps)
    here, sleep = threading.get_ident(), time.sleep

    def wait(seconds: float) -> None:
        if threading.get_ident() != here:  # a thread that an earlier test has left
            sleep(seconds)
            return
        waits.append(seconds)
        if not todo:
            raise KeyboardInterrupt
        todo.pop(0)()

    monkeypatch.setattr(time, "sleep", wait)
    return waits


# ---------------------------------------------------------------- which log
def test_the_path_need_not_be_typed_where_it_is_configured(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(log, orders(log, 0, 1))
    assert objects("topics") == objects("topics", log.path)
    assert objects("read", "orders") == objects("read", log.path, "orders") != []
    assert objects("read", "--limit", 1, "orders", "--queue", 1) == objects("read", "orders")
    assert "orders is not" in txmq("topics", "orders", code=1)[1], "a path that is typed wins"
    assert "GROUP is expected, and nothing was given" in words(txmq("group", "lag", code=2)[1])
    monkeypatch.delenv("TXMQ_PATH")
    assert "[PATH], the commit log, may be left out" in words(txmq("topics", code=2)[1])
    assert "txmq group list names the groups" in words(txmq("group", "lag", code=2)[1])
    said = words(txmq("read", "orders", code=2)[1])
    assert "[PATH] TOPIC is expected, and orders was given" in said
    (tmp_path / "txmq.toml").write_text(f'path = "{log.path}"\n')
    assert objects("read", "orders") != []
    monkeypatch.chdir(tmp_path.parent)
    txmq("read", "orders", code=2)
    monkeypatch.setenv("TXMQ_CONFIG", str(tmp_path / "txmq.toml"))
    assert objects("read", "orders") != []
    assert "Usage: " in txmq("read", "--help")[0]


def test_an_option_with_one_value_is_given_once(log: CommitLog) -> None:
    said = words(txmq("query", log.path, "-k", "a", "--key", "b", code=2)[1])
    assert "--key was given 2 times, and it has one value. Run the command once for each" in said
    txmq("topics", log.path, "--json", "--json")


def test_a_configuration_that_cannot_be_used_ends_with_two(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TXMQ_PATH")
    for text, said in (("path = ", "is not TOML"), ("path = 7", "path is 7"), ("storage = 1", "are tables")):
        (tmp_path / "txmq.toml").write_text(text)
        assert said in txmq("topics", code=2)[1]
    (tmp_path / "latin.toml").write_bytes(b'path = "caf\xe9"')
    for file in ("latin.toml", str(tmp_path)):
        monkeypatch.setenv("TXMQ_CONFIG", file)
        assert f"{file} cannot be read: " in txmq("topics", code=2)[1]
    assert "cannot be read: " in txmq("doctor", log.path, code=2)[1]
    monkeypatch.setenv("TXMQ_CONFIG", "nowhere.toml")
    assert "nowhere.toml, which TXMQ_CONFIG names, does not exist: txmq init nowhere.toml" in txmq("topics", code=2)[1]


def test_the_configurations_storage_options_go_with_its_path_alone(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[object] = []
    monkeypatch.setattr(DeltaTable, "is_deltatable", lambda uri, options: got.append((uri, options)) or True)
    monkeypatch.delenv("TXMQ_PATH")
    (tmp_path / "txmq.toml").write_text('path = "s3://a"\n[storage]\naws_region = "eu"\nAWS_ENDPOINT = "x"\n')
    monkeypatch.setenv("TXMQ_STORAGE__AWS_ENDPOINT", "y")
    txmq("pending", code=1)
    txmq("pending", "s3://b", code=1)
    endpoint = {"AWS_ENDPOINT": "y"}
    assert got == [("s3://a/topics", {"AWS_REGION": "eu", **endpoint}), ("s3://b/topics", endpoint)]


def test_commands_in_errors_name_the_path_when_it_was_typed(log: CommitLog) -> None:
    assert "make it with txmq topic create bills" in txmq("read", "bills", code=1)[1].replace("'", "")
    assert f"txmq topic create {log.path} bills" in txmq("read", log.path, "bills", code=1)[1].replace("'", "")
    assert "PATH" not in txmq("read", log.path, "bills", code=1)[1]


def test_an_advised_command_can_be_copied_when_the_path_has_a_space(tmp_path: Path) -> None:
    spaced = make_log("delta", tmp_path / "my log", orders=1)
    hidden = prepare(spaced, 0, 1)
    quarantine(spaced, hidden)
    resume = re.search(r"txmq (resume .*)", txmq("trace", spaced.path, hidden.half_id)[0])
    assert resume is not None
    assert txmq(*shlex.split(resume[1]))[0]
    assert spaced.engine.state_of(hidden).count(RowState.PENDING) == 1


def test_what_readers_have_seen_can_only_be_confirmed(log: CommitLog) -> None:
    """The advice named ROLLBACK as well, which is refused."""
    record = prepare(log, 5, 2)
    commit(log, record)
    too_late(log, record, Who.CHECK, rollback=record.all_rows)
    told = txmq("trace", log.path, record.half_id)[0]
    assert told.splitlines()[-1].endswith(f"txmq resolve {log.path} {record.half_id} COMMIT --reason '…'")


# ---------------------------------------------------------------- query
def test_messages_are_found_by_a_key_a_place_and_a_time(log: CommitLog) -> None:
    for batch_id, (tag, *numbers) in enumerate([("new", 1, 2, 11), ("old", 3, 4, 1)]):
        commit(log, orders(log, batch_id, *numbers, tags=[tag] * 3))

    def found(*arguments: object, code: int = 0) -> list[str]:
        return [m["body"] for m in objects("query", *arguments, code=code)]

    assert found("--key", "order-1") == ['{"order_id": 1}'] * 2, "order-11 has another key"
    assert found("-k", "all", "--topic", "orders", "--limit", 3) == [f'{{"order_id": {n}}}' for n in (2, 4, 1)]
    assert found("--key", "order-1", "--tags", "new || other") == ['{"order_id": 1}']
    assert len(found("--tags", "old")) == 3
    assert found("--topic", "orders", "--queue", 1, "--offset", 2) == ['{"order_id": 3}']
    assert found("--topic", "orders", "--queue", 1, "--offset", 99, code=1) == []
    assert len(found("--since", "1h", "--until", "0s")) == 6
    assert found("--until", "1h", code=1) == found("--since", "2100-01-01T00:00:00Z", code=1) == []
    second = log.read("orders", columns=["commit_timestamp"])["commit_timestamp"].to_pylist()[1]
    assert len(found("--since", second.isoformat())) == 3
    assert len(found("--until", second.isoformat())) == 3
    log.drain()
    assert len(found("--since", second.isoformat(), "--key", "all")) == 3
    assert txmq("query", "--key", "nobody", code=1) == ("no such message\n", "keys are matched whole\n")
    said = txmq("query", "--key", "RDER-1", code=1)[1]
    assert said == "keys are matched whole: order-1, order-11 contain it\n"
    orders(log, 2, 4711)
    assert txmq("query", "--key", "4711", code=1)[1] == "keys are matched whole: order-4711 contains it\n"
    log.create_topic("bills")
    without = "no new message here has keys: a sink takes them from the column keys\n"
    assert txmq("query", "--key", "4711", "--topic", "bills", code=1)[1] == without
    (message,) = objects("query", "--key", "order-4711")
    told = txmq("query", "--key", "order-4711")[0]
    assert f"→ txmq trace {message['msg_id']}\n" in told
    assert "decided" not in told
    log.resolve("shop:2", txmq_package.ROLLBACK_MESSAGE, "never paid")
    told = txmq("query", "--key", "order-4711")[0]
    assert re.search(r"^decided +20\S+ \S+Z by admin$", told, re.MULTILINE)
    assert re.search(r"^reason +never paid$", told, re.MULTILINE)
    assert "stopped at 1: --limit N shows more" in txmq("query", "--key", "all", "--limit", 1)[1]


def test_by_an_id_messages_are_found_in_whatever_state(log: CommitLog) -> None:
    record = orders(log, 0, 1, 2, 3, 3)
    rows = pending(log, record)
    some, others = split(rows, 2)
    decide_one(log.engine, record, 1, commit=some)
    log.engine.ledger.quarantine(record, 1, others, Who.DISCARD, "asked 15 times")
    orders(log, 1, 9)
    found = objects("query", "--half-id", "shop:0")
    assert sorted((m["state"], m["body"]) for m in found) == sorted(
        [(m["state"], m["body"]) for n in range(4) for m in objects("query", "--message-id", f"shop:0:0.{n}")]
    )
    assert {m["state"] for m in found} == {"committed", "quarantined"}
    assert all(m["half_id"] == "shop:0" and m["msg_id"].startswith("shop:0:0.") for m in found)
    (waits,) = objects("query", "-t", "shop:1:1:o9")
    assert (waits["state"], waits["queue_offset"], waits["transaction_id"]) == ("pending", None, "shop:1:1:o9")
    assert len(objects("query", "--transaction-id", "shop:0:1:o3")) == 2
    assert len(objects("query", "--half-id", "shop:0", "--limit", 3)) == 3
    for batch_id in (2, 3):  # of which the last one of a stream stays
        commit(log, orders(log, batch_id, 5, 6))
    let_leave(log)
    assert in_half(log) == {"shop:0", "shop:1", "shop:3"}
    assert len(objects("query", "--half-id", "shop:0")) == 4
    assert [m["state"] for m in objects("query", "-t", "shop:2:1:o6")] == ["committed"]
    assert "not known: checks and leases are forgotten: upkeep pruned" in words(txmq("trace", "shop:2")[0])


def test_by_a_key_those_are_found_too_that_nobody_can_see(log: CommitLog) -> None:
    commit(log, orders(log, 0, 1, 2))
    orders(log, 1, 2, 3)
    back = orders(log, 2, 3, 4)
    decide_one(log.engine, back, 1, rollback=pending(log, back))

    def found(key: str, *options: object) -> set[tuple[str, str]]:
        return {(m["half_id"], m["state"]) for m in objects("query", "-k", key, *options)}

    assert found("order-2") == {("shop:0", "committed"), ("shop:1", "pending")}
    assert found("order-3") == {("shop:1", "pending"), ("shop:2", "rolled_back")}
    assert found("all", "--limit", 3) < found("all") == found("order-2") | found("order-3")
    assert "rolled_back" in txmq("query", "-k", "all")[0]
    assert "no such message" in txmq("query", "-k", "order-3", "--since", "1h", code=1)[0]
    assert "no such message" in txmq("query", "-k", "order-30", code=1)[0]


def test_query_says_which_message_is_in_conflict(log: CommitLog) -> None:
    """It said rolled_back, as of a verdict that nobody disputes."""
    in_conflict(log, prepare(log, 7, 1, app="disputed"))
    (found,) = objects("query", "--half-id", "disputed:7")
    assert found["state"] == "rolled_back_by_check"
    assert "in conflict" in found["reason"]
    assert "in conflict" in txmq("query", "--half-id", "disputed:7")[0]


def test_one_message_is_shown_whole_and_cannot_steer_the_terminal(log: CommitLog) -> None:
    properties = pa.array([[("region", "eu"), ("note", "a\x1b[2J")]], pa.map_(pa.string(), pa.string()))
    commit(log, orders(log, 0, 1, body=[NASTY], tags=["\x1b]0;x\x07"], properties=properties))
    out, _ = txmq("query", "--key", "order-1")
    assert {c for c in out if not c.isprintable()} <= {"\n"}
    assert r"\x1b[31mred\x07\n\u202egnp.exe\x9b2J" in out
    assert "state             committed" in out
    assert re.search(r"properties +region=eu\n +note=a\\x1b\[2J", out)
    assert "1b 5b 33 31 6d" in txmq("query", "--key", "order-1", "--body", "hex")[0]
    assert "red" not in txmq("query", "--key", "order-1", "--body", "none")[0]
    assert "4 of 24 bytes are shown" in txmq("query", "--key", "order-1", "--body-bytes", 4, "--body", "text")[0]
    commit(log, orders(log, 1, 1))
    assert "1b 5b 33 31 6d" in txmq("query", "--key", "order-1", "--body", "hex")[0]
    assert "red" not in txmq("query", "--key", "order-1", "--body", "none")[0]


@pytest.mark.parametrize("form", list(BodyForm))
@pytest.mark.parametrize(
    "body", [b"", NASTY.encode(), b"\xff\x00\x1b", b'{"a": "\\u001b[2J"}', b"[" * 9000, b'{"a"', b"7"]
)
def test_no_form_of_a_body_has_a_control_character(form: BodyForm, body: bytes) -> None:
    assert {c for c in shown(body, form, 5000) if not c.isprintable()} <= {"\n"}


def test_bodies_are_shown_as_what_they_are() -> None:
    assert shown(b'{"b":1}', BodyForm.AUTO) == '{\n  "b": 1\n}'
    assert shown(b"{no", BodyForm.AUTO) == "{no"
    assert shown(b"\xff\x00A", BodyForm.AUTO) == "00000000  ff 00 41                                         ..A"
    assert shown(b"\xffA", BodyForm.TEXT) == r"\xffA"
    assert shown(None, BodyForm.AUTO) == shown(b"x", BodyForm.NONE) == ""


# ---------------------------------------------------------------- trace
def test_a_trace_is_told_with_what_can_be_done(log: CommitLog) -> None:
    record = orders(log, 0, 1, 2)
    rows = pending(log, record)
    count_check(log.engine, record, 1, rows, "the database was away")
    out, _ = txmq("trace", "shop:0")
    assert "messages        2: 2 pending" in out
    assert [line.split()[3] for line in out.splitlines() if "+" in line] == ["checked"]
    assert "the database was away" in out
    assert out.splitlines()[-3:] == [
        "ask the listener of group, where the check job's txmq.toml is: txmq check --config txmq.toml --once",
        "or decide yourself, when its local transaction happened: txmq resolve shop:0 COMMIT --reason '…'",
        "or, when it did not happen: txmq resolve shop:0 ROLLBACK --reason '…'",
    ]
    assert f"txmq resolve {log.path} shop:0 ROLLBACK" in txmq("trace", log.path, "shop:0")[0].splitlines()[-1]
    commit(log, record)
    (found,) = objects("trace", "shop:0:1:o2")
    assert [e["kind"] for e in found["events"]] == ["prepared", "checked", "committed"]
    assert datetime.fromisoformat(found["events"][0]["at"]).tzinfo is not None
    assert "resolve" not in txmq("trace", "shop:0")[0]
    half_id = given_up(log, 0)
    assert f"txmq resume {half_id}" in txmq("trace", half_id)[0]
    half_id = conflict(log)
    told = txmq("trace", half_id)[0]
    assert "a verdict came too late" in told
    assert "2: 2 rolled back by a check\n" in told, "nobody knows that it never happened"
    assert told.splitlines()[-2:] == [
        f"when its local transaction happened: txmq resolve {half_id} COMMIT --reason '…' "
        "(readers will see 2 messages, for good)",
        f"when it did not happen: txmq resolve {half_id} ROLLBACK --reason '…' (nobody will see them)",
    ]
    assert "log.resolve" not in told


def test_equal_checks_are_one_line_of_a_trace(log: CommitLog) -> None:
    record = orders(log, 0, 1, 2)
    for reason in ("503", "503", "503", "the database was away", "503"):
        count_check(log.engine, record, 1, pending(log, record), reason)
    lines = [line for line in txmq("trace", "shop:0")[0].splitlines() if "checked" in line]
    found = re.search(r"3 × checked .* 503, from (\S+ \S+Z) to (\S+ \S+Z)$", lines[0])
    assert found is not None, lines
    assert found[1] <= found[2]
    assert [re.split(" {2,}", line)[2:] for line in lines[1:]] == [
        ["checked", "check", "the database was away"], ["checked", "check", "503"],
    ]  # fmt: skip
    assert len(objects("trace", "shop:0")[0]["events"]) == 6


def test_a_trace_tells_leases_due_times_and_what_a_person_resolved(log: CommitLog) -> None:
    delays, zeros = pa.array([18, None, None], pa.int32()), pa.array([0] * 3, pa.int32())
    record = prepare(log, 0, {"body": list("abc"), "delay_level": delays, "queue_id": zeros}, app="shop")
    log.engine.ledger.lease([record], 60)
    rows = pending(log, record)
    refused = rows - rows.first(2)
    paid = rows.first(2) - rows.first(1)
    decide_one(log.engine, record, 1, commit=rows - refused, rollback=refused)
    too_late(log, record, Who.CHECK, commit=refused)
    log.resolve("shop:0", txmq_package.ROLLBACK_MESSAGE, "the bank says no")
    too_late(log, record, Who.CHECK, rollback=paid)
    told = txmq("trace", "shop:0")[0]
    assert re.search(r"leased .*until 20\S+ \S+Z$", told, re.MULTILINE)
    assert re.search(r"committed .*  due 20\S+ \S+Z$", told, re.MULTILINE)
    assert re.search(r"conflict_resolved .* ROLLBACK_MESSAGE; the bank says no$", told, re.MULTILINE)
    assert told.splitlines()[-1] == "confirm what readers have seen: txmq resolve shop:0 COMMIT --reason '…'"
    log.resolve("shop:0", txmq_package.COMMIT_MESSAGE, "the bank says so")
    too_late(log, record, Who.CHECK, commit=refused)
    assert "(readers will see 1 message, for good)" in txmq("trace", "shop:0")[0], "nobody disputes the other one"


def test_a_trace_names_the_keys_of_the_first_messages(log: CommitLog) -> None:
    def keys_of(name: str) -> list[str]:
        (line,) = [line for line in txmq("trace", name)[0].splitlines() if line.startswith("keys ")]
        return line.removeprefix("keys").strip().split(", ")

    record = orders(log, 0, 1, 2)
    assert keys_of("shop:0") == ["order-1 all", "order-2 all"]
    assert keys_of("shop:0:1:o2") == ["order-2 all"]
    commit(log, record)
    assert keys_of("shop:0") == ["order-1 all", "order-2 all"]
    many = orders(log, 1, *range(3, 9))
    shown = keys_of("shop:1")
    assert len(shown) == 4
    assert sum(keys.endswith("all and those of 2 more messages: txmq query --half-id shop:1") for keys in shown) == 1
    story = log.trace(half_id="shop:1")
    half_file(log, many).unlink()
    assert shown_keys(log, story) is None, "the story can still be told"


def test_the_trace_of_a_message_that_waits_names_what_holds_it_up(log: CommitLog) -> None:
    log.create_topic("steps", 1, fifo=True)
    first, second = (prepare(log, i, {"body": ["x"], "sharding_key": ["k"]}, topic="steps") for i in (90, 91))
    commit(log, second)
    out, _ = txmq("trace", log.path, second.half_id)
    assert re.search(rf"waits.for +{first.half_id}\n", out)
    assert f"see what holds it up: txmq trace {log.path} {first.half_id}" in out


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a:1", "half_id"), ("a:1:0.7", "message_id"), ("a:1:2", "transaction_id"), ("a:1:2:0.7", "transaction_id"),
     ("a:1:2:k:e.y", "transaction_id"), ("a:1:nonsense", "transaction_id")],
)  # fmt: skip
def test_an_id_says_itself_what_it_is(name: str, kind: str) -> None:
    assert argument_of(name) == {kind: name}


# ---------------------------------------------------------------- topics
def test_a_shorter_retention_says_how_much_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch, -2 * 3600.0)
    log = make_log("delta", tmp_path / "log", orders=2, bills=1)
    for topic in ("orders", "bills"):
        commit(log, prepare(log, 0 if topic == "orders" else 1, 3, topic=topic))
    log.drain()
    clock.ahead_s = 0.0
    commit(log, prepare(log, 2, 5))
    log.drain()
    said = {kept: txmq("topic", "set", log.path, "orders", "--retention", kept)[0] for kept in ("1h", "3h", "forever")}
    assert said == {
        "1h": "messages of topic orders are kept for 1h: 3 messages older than that will go at the next upkeep\n",
        "3h": "messages of topic orders are kept for 3h\n",
        "forever": "messages of topic orders are kept for ever\n",
    }
    (row,) = objects("topic", "set", log.path, "orders", "--retention", "1h")
    assert row == {"topic": "orders", "retention_s": 3600.0, "expiring": 3}


def test_the_status_of_a_topic_has_its_offsets_messages_and_bytes(log: CommitLog) -> None:
    commit(log, orders(log, 0, 1, 2, 3))
    orders(log, 1, 5)
    before = objects("topic", "status", "orders")
    log.drain()
    rows = objects("topic", "status", "orders")
    assert [{k: r[k] for k in ("queue_id", "first_offset", "next_offset", "messages", "pending")} for r in rows] == [
        {"queue_id": 0, "first_offset": 0, "next_offset": 1, "messages": 1, "pending": 0},
        {"queue_id": 1, "first_offset": 0, "next_offset": 2, "messages": 2, "pending": 1},
    ]
    assert [r["bytes"] for r in before] == [0, 0]
    assert rows[1]["bytes"] > rows[0]["bytes"] > 0
    assert [r["last_commit"] for r in rows] == [r["last_commit"] for r in before]
    assert abs(objects("topics")[0]["bytes"] - sum(r["bytes"] for r in rows)) <= 2


# ---------------------------------------------------------------- what waits
def test_what_waits_has_age_size_and_group(log: CommitLog) -> None:
    orders(log, 0, 1)
    prepare(log, 0, 1, app="other", group="bank")
    given_up(log, 7)
    conflict(log)
    expected = {"pending": ["shop:0", "other:0"], "quarantined": ["nightly:7"], "conflicts": ["late:0"]}
    for verb, half_ids in expected.items():
        rows = objects(verb)
        assert [r["half_id"] for r in rows] == half_ids
        assert all(r["bytes"] > 0 and 0 <= r["age_seconds"] < 3600 and r["check_times"] == 0 for r in rows)
        assert {"age", "size"} <= set(txmq(verb)[0].split())
    assert [r["half_id"] for r in objects("pending", "--group", "bank")] == ["other:0"]
    assert objects("conflicts", "--group", "bank") == []


def test_watch_shows_it_again_until_it_is_stopped(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = stopping(monkeypatch, lambda: orders(log, 0, 1))
    out, _ = txmq("pending", "--watch", "2s")
    assert out.startswith("nothing is pending\n")
    assert "shop:0" in out
    assert waits == [2.0, 2.0]
    assert [r["half_id"] for r in objects("pending", "--watch", "1m")] == ["shop:0"]


@pytest.mark.parametrize("verb", [("group", "list"), ("pending",)])
def test_a_log_that_goes_away_is_told_to_who_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    """It said for ever that no group had read from the log."""
    made = make_log("delta", tmp_path / "log", orders=1)
    stopping(monkeypatch, lambda: Path(made.path).rename(tmp_path / "away"), lambda: None)
    _, err = txmq(*verb, made.path, "--watch", "1s", code=1)
    assert "commit log" in err


def test_ctrl_c_is_the_way_to_stop_and_no_error(log: CommitLog) -> None:
    def interrupt(**_: object) -> None:
        if len(looks) == 2:  # the first one is at the end, from where it goes on
            raise KeyboardInterrupt

    for command in (("pending", "--watch", "1ms"), ("read", "orders", "--follow")):
        with seen_at("table seen", interrupt, table="op") as looks:
            txmq(*command)


def test_all_that_is_quarantined_is_resumed(log: CommitLog) -> None:
    for batch_id, group in enumerate(["bank", "mail", "bank"]):
        given_up(log, batch_id, group)
    assert [r["half_id"] for r in objects("resume", "all", "--group", "bank")] == ["nightly:0", "nightly:2"]
    assert txmq("resume", "all") == (
        "nightly:1: 2 messages are pending again\n",
        "ask its listener now, where the check job's txmq.toml is: txmq check --config txmq.toml --once\n",
    )
    assert txmq("resume", "all")[0] == "nothing is quarantined\n"
    assert log.pending().num_rows == 3


# ---------------------------------------------------------------- reading on
def test_follow_shows_what_is_committed_from_now_on(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch_id in range(2):
        commit(log, orders(log, batch_id, 2 * batch_id, 2 * batch_id + 1))
    steps = [lambda n=n: commit(log, orders(log, n, n)) for n in (5, 6)]
    stopping(monkeypatch, *steps)
    assert [m["body"] for m in objects("read", "orders", "--follow")] == ['{"order_id": 5}', '{"order_id": 6}']
    stopping(monkeypatch, lambda: commit(log, orders(log, 9, 9)))
    followed = objects("read", "orders", "-f", "--last", 1, "--every", "50ms")
    assert [m["body"] for m in followed] == ['{"order_id": 6}', '{"order_id": 9}']
    stopping(monkeypatch)
    out, _ = txmq("read", "orders", "-f", "--from", "1=2", "--from", "0=2")
    assert [line.split("  ")[1] for line in out.splitlines()] == ["0=2", "1=2", "1=3"]


# ---------------------------------------------------------------- groups
def test_members_of_a_group_are_listed_with_owner_generation_and_heartbeat(log: CommitLog) -> None:
    commit(log, orders(log, 0, 1, 2))
    ConsumerGroup(log, "spark").reset("earliest", ["orders"])
    assert objects("group", "members", "spark") == []
    assert "has no members now" in txmq("group", "members", "spark")[0]
    with txmq_package.PullConsumer(log, "points", "orders") as consumer:
        assert consumer.poll(60) is not None
        (row,) = objects("group", "members", "points")
        assert (row["queues"], row["topics"], row["generation"]) == (["orders 0", "orders 1"], "orders", 1)
        assert 0 <= row["heartbeat_seconds"] < 600
        assert " ago" in txmq("group", "members", "points")[0]


def test_a_group_skips_what_it_has_not_read(log: CommitLog) -> None:
    commit(log, orders(log, 0, 1, 2, 3))
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    out, err = txmq("group", "skip", "points")
    assert "3 messages are skipped" in err
    assert sum(r["lag"] for r in objects("group", "lag", "points")) == 0
    assert [r["lag"] for r in objects("group", "list")] == [0]
    assert out.splitlines()[0].split() == ["topic", "queue_id", "next_offset"]


def test_a_misspelt_setting_is_told_once_by_every_verb_that_reads_the_file(
    log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "txmq.toml"
    file.write_text(f'path = "{log.path}"\nlisteners_modules = ["shop"]\n[check]\ntransactionTimout = "6s"\n')
    told = (
        "warning: txmq.toml: unknown setting 'listeners_modules': did you mean 'listener_modules'?\n"
        "warning: txmq.toml: unknown setting 'transactionTimout' in [check]: did you mean 'transactionTimeout'?\n"
    )
    for verb in (("pending",), ("group", "list"), ("topic", "list"), ("query", "--topic", "orders")):
        assert txmq(*verb, code=1 if verb[0] == "query" else 0)[1] == told
    assert txmq("pending", log.path)[1] == "", "the file is not read"
    monkeypatch.delenv("TXMQ_PATH")
    file.write_text(f'pth = "{log.path}"\n')
    assert txmq("pending", code=2)[1].startswith("warning: txmq.toml: unknown setting 'pth': did you mean 'path'?\n")
    monkeypatch.setenv("TXMQ_CONFIG", "other.toml")
    file.rename(tmp_path / "other.toml")
    assert "warning: other.toml: unknown setting 'pth'" in txmq("pending", code=2)[1]


@pytest.mark.parametrize("verb", ["delete", "hand-over"])
def test_without_any_group_it_is_said_that_none_has_read(log: CommitLog, verb: str) -> None:
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    assert objects("group", "delete", "points") == [{"consumer_group": "points"}]
    said = txmq("group", verb, "points", code=1)[1]
    assert said == "there is no consumer group 'points' (no group has read from this commit log yet)\n"


# ---------------------------------------------------------------- stats and top
def test_topics_and_stats_count_messages_that_wait_for_their_time(log: CommitLog) -> None:
    log.create_topic("bills", queues=1)
    commit(log, orders(log, 0, 1))
    for verb in ("topics", "stats"):
        assert "waiting" not in txmq(verb)[0], "nothing waits"
    commit(log, orders(log, 1, 2, 3, delay_level=pa.array([18, 18], pa.int32())))
    for verb in ("topics", "stats"):
        waiting = {row["topic"]: row["waiting"] for row in objects(verb) if "topic" in row}
        assert waiting == {"bills": 0, "orders": 2}
        assert "waiting" in txmq(verb)[0]


def test_a_pending_message_is_shown_with_the_last_answer_of_a_check(log: CommitLog) -> None:
    record = orders(log, 0, 1)
    assert "reason" not in txmq("query", "--key", "order-1")[0]
    count_check(log.engine, record, 1, pending(log, record), "the database was away")
    assert re.search(r"^state +pending\nreason +the database was away\n", txmq("query", "--key", "order-1")[0], re.M)


def test_stats_count_what_came_lately(log: CommitLog) -> None:
    commit(log, orders(log, 0, 1, 2, 3))
    orders(log, 1, 7)
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    rows = {row["kind"]: row for row in objects("stats")}
    counts = {"last_minute": 3, "last_hour": 3, "last_day": 3, "committed": 3, "kept": 3}
    assert rows["topic"].items() >= {"topic": "orders", **counts}.items()
    assert (rows["group"]["lag"], rows["group"]["dead_letters"]) == (3, 0)
    assert (rows["transactions"]["pending"], rows["transactions"]["undrained_messages"]) == (1, 3)
    assert "half batches: 1 pending, the oldest for" in txmq("stats")[0]


def test_stats_count_the_same_whether_drained_or_not(log: CommitLog) -> None:
    """Also where a window begins within a file: only that file is read."""
    for batch_id in range(3):
        commit(log, orders(log, batch_id, 1, 2))
    times = sorted(log.read("orders", columns=["commit_timestamp"])["commit_timestamp"].to_pylist())

    def counts() -> list[dict[str, int]]:
        ends = [times[2] + timedelta(minutes=1), times[-1], times[2] + timedelta(hours=1), times[0] + timedelta(days=2)]
        return [placed_within(CommitLog.open(log.path).engine, end, WINDOWS).get("orders", {}) for end in ends]

    before = counts()
    assert [found.get("last_minute") for found in before[:2]] == [4, 6]
    assert before[2] == {"last_minute": 0, "last_hour": 4, "last_day": 6}
    log.drain()
    assert [{k: v for k, v in found.items() if v} for found in counts()] == [
        {k: v for k, v in found.items() if v} for found in before
    ]


def test_looking_makes_no_table(log: CommitLog) -> None:
    for verb in ("stats", "doctor"):
        CliRunner().invoke(app, [verb])
    txmq("group", "list")
    assert not (Path(log.path) / "groups").exists()


def test_a_group_is_reset_to_a_time_ago_and_tables_show_its_lag_as_a_duration(log: CommitLog) -> None:
    commit(log, orders(log, 0, 2, 4))
    group = ConsumerGroup(log, "points")
    group.reset("latest", ["orders"])
    (moved, _) = objects("group", "reset", "points", "--to", "5m")
    assert moved == {"topic": "orders", "queue_id": 0, "next_offset": 0}
    assert [row["next_offset"] for row in objects("group", "reset", "points", "--to", "0s")] == [2, 0]
    group.reset("earliest")
    for verb in (("group", "list"), ("group", "lag", "points"), ("stats",)):
        out, _ = txmq(*verb)
        assert "behind" in out
        assert "lag_seconds" not in out
        assert re.search(r" [\d.]+m?s ", out)
    assert isinstance(objects("group", "list")[0]["lag_seconds"], float)
    assert "heartbeat" not in txmq("group", "lag", "points")[0]


def test_top_shows_rates_between_two_looks(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(log, orders(log, 0, 1))
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    half_id = given_up(log, 0)
    stopping(monkeypatch, lambda: commit(log, orders(log, 1, 2, 3)))
    (found,) = objects("top")
    assert (found["quarantined"], found["topics"][0]["committed"], found["groups"][0]["lag"]) == (1, 3, 3)
    assert found["topics"][0]["messages_per_s"] > 0
    stopping(monkeypatch, lambda: None)
    out, _ = txmq("top")
    assert "behind" in out
    assert re.search(rf"^quarantined  \S+  {half_id} ", out, re.MULTILINE)
    assert out.splitlines()[1] == "1 quarantined"


def test_the_live_screen_has_all_and_no_control_characters_of_others(log: CommitLog) -> None:
    conflict(log)
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    seen = Standing(log.engine).read()
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(top.screen("a\x1b[2Jb", seen, seen, top.View(), 100, 24))
    out = captured.get()
    assert "\x1b" not in out
    for word in ("txmq top   a", "late:0", "conflict", "points", "orders", "1 in conflict"):
        assert word in out


# ---------------------------------------------------------------- words
def test_ages_sizes_and_escapes_are_short() -> None:
    ages = {None: "", 0: "0s", 0.0123: "12ms", 59.6: "1m", 3600: "1h", 3725: "1h 2m", 200_000: "2d 7h"}
    assert {age: short_age(age) for age in ages} == ages
    sizes = {None: "", 0: "0 B", 999: "999 B", 1500: "1.5 kB", 5 * 10**9: "5.0 GB", 3 * 10**15: "3.0 PB"}
    assert {number: size(number) for number in sizes} == sizes
    assert escaped("a\tb\\ä\x00") == "a\\tb\\ä\\x00"


def completed(*words: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    environment = {"_TXMQ_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(["txmq", *words]),
                   "COMP_CWORD": str(len(words))}  # fmt: skip
    result = CliRunner().invoke(app, [], prog_name="txmq", env=environment)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.split()


def test_completion_knows_what_is_in_the_log(log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.create_topic("bills")
    assert completed("group", "lag", "") == []
    assert not (Path(log.path) / "groups").exists(), "completing writes nothing"
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    open_one = orders(log, 7, 1).half_id
    lost, late = given_up(log, 0), conflict(log)

    assert completed("qua") == ["quarantined"]
    assert completed("read", "") == completed("topic", "status", "") == ["bills", "orders"]
    assert completed("read", "or") == completed("query", "--topic", "or") == ["orders"]
    assert completed("group", "reset", "points", "--topic", "") == ["bills", "orders"]
    assert completed("group", "lag", "p") == completed("dlq", "list", "") == ["points"]
    assert completed("group", "clone", "points", "") == []
    assert completed("topic", "create", "") == []
    assert completed("resolve", "") == completed("trace", "") == [open_one, late, lost]
    assert completed("resolve", late, "") == ["COMMIT", "ROLLBACK"]
    assert completed("resume", "") == ["all", lost]

    monkeypatch.delenv("TXMQ_PATH")
    assert completed("read", "") == []
    assert completed("read", log.path, "o") == completed("read", "log", "o") == ["orders"]
    assert completed("group", "reset", log.path, "points", "--topic", "b") == ["bills"]
    (tmp_path / "txmq.toml").write_text(f'path = "{log.path}"\n')
    assert completed("read", "b") == ["bills"]
    (tmp_path / "txmq.toml").write_text("path = [")
    assert completed("read", "b") == []


def test_completion_in_bash_goes_on_behind_a_colon(log: CommitLog) -> None:
    for batch_id in (7, 70):
        orders(log, batch_id, batch_id)
    assert completed("resolve", "shop", ":") == ["7", "70"]
    assert completed("resolve", "shop", ":", "70") == ["70"]
    assert completed("resolve", "shop", ":", "7", "CO") == ["COMMIT"]
    assert completed("read", "file", ":", f"//{log.path}", "") == ["orders"]


def test_completion_does_not_wait_for_a_log_that_does_not_answer(log: CommitLog, limit: Limit) -> None:
    answers = threading.Event()
    limit(COMPLETES_S_MAX=0.01)
    with seen_at("table seen", lambda **_: answers.wait()):
        assert completed("read", "") == []
        answers.set()
