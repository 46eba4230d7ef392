"""Lists, stories and the live screen in a terminal of 80 and of 120 columns: on a log with 30 topics, 6 groups and ids
as a producer makes them."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from copy import copy
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

import rmq_spark
from rmq_spark import CommitLog, ConsumerGroup
from rmq_spark.cli import app, output, top, watch
from tests.support.commands import objects, txmq, words
from tests.support.inside import Diagnosis, Letters, Level, Standing
from tests.support.listeners import Scripted

GROUP = "order-service-northern-branches"
TOPICS = [
    *(f"topic-{n:02}" for n in range(26)), "orders", "payments", "customer-invoices-of-the-northern-branches-v2",
    "warehouse-movements-eu-central-1-production",
]  # fmt: skip
LONG_GROUP = "billing-of-the-northern-branches-nightly"
LONG_REASON = "the bank has no such payment: a person looked at it, and said so by telephone"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> CommitLog:
    """One conflict, one half batch in quarantine, three pending ones."""
    made = CommitLog.create(str(tmp_path_factory.mktemp("shop") / "log"), queues=2)
    for topic in TOPICS:
        made.create_topic(topic)

    def answer(batch: rmq_spark.HalfBatch) -> rmq_spark.LocalTransactionState:
        """What the send's argument says; a person overrules it while it runs."""
        if batch.arg == "overruled":
            made.resolve(batch.half_id, rmq_spark.ROLLBACK_MESSAGE, LONG_REASON)
        return rmq_spark.COMMIT_MESSAGE if batch.arg in ("paid", "overruled") else rmq_spark.UNKNOWN

    bank = Scripted(answer, rmq_spark.UNKNOWN)
    with rmq_spark.TransactionMQProducer(made, GROUP, bank, check_interval=None) as producer:

        def send(topic: str, arg: str) -> None:
            messages = [rmq_spark.Message(topic, b"{}", keys=f"order-{n}") for n in range(4)]
            producer.send_messages_in_transaction(messages, arg)

        for topic in TOPICS[25:]:
            send(topic, "paid")
        send("payments", "unknown")
        checker = rmq_spark.CheckService(made, {GROUP: bank}, transaction_timeout=0, transaction_check_max=1)
        for _ in range(2):
            checker.run_once()
        for topic in TOPICS[27:]:
            send(topic, "unknown")
        with pytest.raises(rmq_spark.VerdictConflictError):
            send("orders", "overruled")
    for group, topics in (
        (LONG_GROUP, TOPICS[27:]),
        ("audit", TOPICS),
        *((f"group-{n}", ["orders"]) for n in range(4)),
    ):
        ConsumerGroup(made, group).reset("earliest", topics)
    return made


@pytest.fixture(scope="module")
def seen(log: CommitLog) -> Standing:
    return Standing(log.engine).read()


@pytest.fixture(params=[80, 120])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The width of a terminal."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("TXMQ_PATH", raising=False)
    monkeypatch.delenv("TXMQ_CONFIG", raising=False)
    width: int = request.param
    return width


def half_id_of(log: CommitLog, verb: str) -> str:
    return str(objects(verb, log.path)[0]["half_id"])


def lines_of(*arguments: object, code: int = 0) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", txmq(*arguments, code=code)[0]).splitlines()


def body_of(lines: list[str]) -> list[str]:
    """The rows of a table, without its header and its last sentence."""
    notes = ("shortened: ", "left out: ", "in messages: ")
    end = next((n for n, line in enumerate(lines) if line.startswith(notes)), len(lines))
    return lines[1:end]


# ---------------------------------------------------------------- lists
@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("verb", "rows", "needed"),
    [
        ("topics", 30, "committed retention"),
        ("group list", 6, "lag behind members"),
        (f"group lag {LONG_GROUP}", 6, "topic queue_id lag behind updated_by"),
        ("pending", 3, "half_id age"),
        ("quarantined", 1, "half_id age"),
        ("conflicts", 1, "half_id age history"),
        ("topic status orders", 2, "next_offset waiting last_commit"),
        ("query --key order-1", 10, "topic queue_offset state"),
    ],
)
def test_a_list_has_a_line_for_each_row_and_no_line_is_too_wide(
    log: CommitLog, columns: int, verb: str, rows: int, needed: str
) -> None:
    name, *rest = verb.split(" ", 2) if verb.startswith(("group", "topic ")) else verb.split(" ", 1)
    arguments = [name, log.path, *" ".join(rest).split()]
    if verb.startswith(("group", "topic ")):
        arguments = [name, rest[0], log.path, *rest[1:]]
    lines = lines_of(*arguments)
    assert max(map(cell_len, lines)) <= columns
    assert len(body_of(lines)) == rows
    header = lines[0].split()
    assert set(needed.split()) <= set(header)
    wide = lines_of(*arguments, "--wide")
    assert len(wide) == rows + 1
    counts = {"committed", "expired", "lag", "pending", "waiting"} & set(header)
    assert lines[-1] == f"in messages: {', '.join(sorted(counts, key=header.index))}" or not counts, "a unit"
    assert not {"True", "False"} & set(" ".join(wide).split()), "yes or no"
    assert not any("…" in line for line in wide)
    for column in {"age", "state"} & set(header):
        start = lines[0].index(f" {column}") + 1
        assert all(re.match(r"([\d.]+[a-z]+( \d+[a-z]+)?|[a-z_]+)( |$)", row[start:]) for row in body_of(lines))


def test_ids_that_differ_still_differ_when_they_are_shortened(log: CommitLog, columns: int) -> None:
    shown = [row.split()[0] for row in body_of(lines_of("pending", log.path))]
    whole = [row["half_id"] for row in objects("pending", log.path)]
    assert len(set(shown)) == len(whole) == 3
    for id_shown, half_id in zip(shown, whole, strict=True):
        begin, _, end = id_shown.partition("…")
        assert half_id.startswith(begin)
        assert half_id.endswith(end)


def test_a_shortened_id_is_taken_for_the_whole_one(log: CommitLog, columns: int) -> None:
    for verb in ("pending", "quarantined", "conflicts"):
        whole = half_id_of(log, verb)
        shown = {row.split()[0] for row in body_of(lines_of(verb, log.path))}
        (short,) = (s for s in shown if whole.startswith(s.partition("…")[0]) and whole.endswith(s.partition("…")[2]))
        assert "…" in short
        assert lines_of("trace", log.path, short) == lines_of("trace", log.path, whole)
        assert objects("query", log.path, "--half-id", short) == objects("query", log.path, "--half-id", whole)
        assert whole in txmq("resolve", log.path, short, "COMMIT", "--reason", "paid", code=2)[1], "it shows it, to ask"
        if verb != "quarantined":
            assert f"nothing of {whole} is quarantined" in words(txmq("resume", log.path, short, code=1)[1])
        (message, *_) = objects("query", log.path, "--half-id", whole)
        short = output.shortened(message["msg_id"], len(whole) - 8)
        assert objects("query", log.path, "--message-id", short) == [message]
    several = words(txmq("trace", log.path, "send.…", code=1)[1])
    assert "'send.…' was shortened, and it stands for send." in several
    assert half_id_of(log, "pending").split("-")[0] in several
    nothing = words(txmq("resume", log.path, "send.…-000000077:9", code=1)[1])
    assert "was shortened, and no half batch of this commit log has such an id: --wide shows it whole" in nothing


def test_names_that_differ_only_in_the_middle_get_the_room_for_it() -> None:
    rows = [{"topic": f"orders-of-the-{'north' if n else 'south'}-branches-and-all-of-their-customers"} for n in (0, 1)]
    (_, first, second), _ = output.fitted([{**row, "lag": 1} for row in rows], 50)
    assert first != second
    wide = [{"topic": "t" * 30, "reason": "r" * 30, "lag": 7, "age": "3h 12m"}]
    assert output.fitted(wide, 45)[0][0].split() == ["topic", "lag", "age"], "a narrow column stays beside a wide one"
    assert output.shortened("abcdefghij", 5) == "ab…ij"
    assert [output.shortened("漢字漢字漢字", n) for n in (12, 7, 4)] == ["漢字漢字漢字", "漢…漢字", "…字"]


@pytest.mark.turns(2)
def test_stats_fit(log: CommitLog, columns: int) -> None:
    lines = lines_of("stats", log.path)
    assert max(map(cell_len, lines)) <= columns
    assert sum(line.startswith("topic-") for line in lines) == 26
    assert len(lines) < 30 + 6 + 3 + 15


# ---------------------------------------------------------------- stories and findings
@pytest.mark.turns(3)
@pytest.mark.parametrize("verb", ["quarantined", "conflicts", "pending"])
def test_a_trace_is_a_timeline_and_its_reasons_are_whole(log: CommitLog, columns: int, verb: str) -> None:
    half_id = half_id_of(log, verb)
    lines = lines_of("trace", log.path, half_id)
    table = lines[lines.index("") + 1 :]
    events = objects("trace", log.path, half_id)[0]["events"]
    rows = table[1 : table.index("")]
    told = [line.split() for line in rows if re.match(r"\d\d:\d\d:\d\d\.\d{3}Z", line)]
    assert [parts[1 if n == 0 else 2] for n, parts in enumerate(told)] == [event["kind"] for event in events]
    assert told[0][1] == "prepared"
    assert all(parts[1].startswith("+") for parts in told[1:])
    start = table[0].index("what")
    whole = " ".join(line[start:].strip() for line in rows)
    for event in events:
        assert event["kind"] == "conflict" or (event["reason"] or "") in whole
    for line in rows:
        assert re.match(r"\d\d:", line) or line[:start].strip() == "", "it goes on below its beginning"
    for line in lines:
        assert cell_len(line) <= columns or line.strip() == half_id or line.startswith("  txmq "), line
    commands = [line.partition("txmq ")[2] for line in table if "txmq " in line]
    assert commands
    for command in commands:
        assert not command.endswith(";")
        assert command.count("--reason") <= 1


@pytest.mark.turns(2)
def test_findings_are_wrapped_between_words_below_their_beginning(log: CommitLog, columns: int) -> None:
    lines = lines_of("doctor", log.path, code=6)
    findings = objects("doctor", log.path, code=6)
    known = {word for finding in findings for part in ("what", "remedy") for word in (finding[part] or "").split()}
    known |= {word for finding in findings for word in (*finding["check"].split(), finding["level"])} | {"→"}
    ages = re.compile(r"\(?[\d.]+(ms|[smhd])?\)?:?,?")
    for line in lines[:-1]:
        is_command = line.lstrip().startswith(("→ txmq ", "txmq "))
        assert cell_len(line) <= columns or is_command, line
        assert re.match(r"ok |note |warning |critical |  \S| {25}\S", line), line
        if cell_len(line) > columns:
            assert line.startswith(("  → txmq ", "  txmq ")), "a long command, and the words about it, at one indent"
        for word in line.split():
            assert word in known or "…" in word or ages.fullmatch(word), (word, line)
    assert f"→ txmq resume {log.path} {half_id_of(log, 'quarantined')} (" in " ".join(" ".join(lines).split())


@pytest.mark.turns(2)
def test_every_remedy_is_a_command_that_runs(log: CommitLog, columns: int) -> None:
    findings = [*objects("doctor", log.path, code=6), *objects("report", log.path)[0]["findings"]]
    commands = [c for f in findings for c in re.findall(r"txmq .*?(?= \(|;|, then|$)", f["remedy"] or "")]
    assert len(commands) > 5
    for command in dict.fromkeys(commands):
        verb = command.split(f" {log.path}")[0].removeprefix("txmq ")
        if verb in ("trace", "group lag", "maintain"):
            assert txmq(*shlex.split(command)[1:])[0]
        else:  # they change the log for other tests, or need a file
            assert verb in ("resume", "check", "init"), command


@pytest.mark.turns(2)
def test_a_report_is_wrapped_between_words(log: CommitLog, columns: int) -> None:
    lines = lines_of("report", log.path)
    whole = " ".join(" ".join(lines).split())
    assert "1 half batch with two verdicts that contradict each other" in whole
    for line in lines:
        assert cell_len(line) <= columns or line.startswith(("  txmq ", "  → txmq ")), line
    assert f"txmq trace {log.path} {half_id_of(log, 'conflicts')}" in whole


@pytest.mark.turns(2)
def test_one_message_is_shown_with_its_ids_beside_or_below_their_names(log: CommitLog, columns: int) -> None:
    half_id = half_id_of(log, "pending")
    lines = lines_of("query", log.path, "--message-id", f"{half_id}:0.1")
    assert all(line.startswith(("  send.", "→ txmq ")) or re.match(r"\w+ +", line) or len(line) < 20 for line in lines)
    ids = [line for line in lines if half_id in line and "txmq" not in line]
    assert len(ids) == 3
    for line in ids:
        assert line.startswith("  s" if len(line.split()[-1]) > columns - 18 else ("msg_", "trans", "half_")), line


@pytest.mark.usefixtures("columns")
def test_sentences_are_broken_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = CommitLog.create("an-empty-log-of-the-northern-branches", queues=1)
    no_file = txmq("check", "--once", code=2)[1]
    nothing = txmq("group", "list", made.path)[0]
    refused = txmq("trace", made.path, "order-4711-of-the-northern-branches", code=2)[1]
    for text in (no_file, nothing, refused):
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip().splitlines()
        assert max(map(cell_len, lines)) <= int(os.environ["COLUMNS"])
    assert "make one with txmq init, or set" in words(no_file)
    assert "set the option consumerGroup of a stream" in words(nothing)
    no_topics = words(txmq("topics", made.path)[0])
    assert no_topics == f"no topics: make one with txmq topic create {made.path} NAME"


# ---------------------------------------------------------------- top
def screen_of(seen: Standing, width: int, height: int, *keys: str) -> list[str]:
    view = top.View()
    for key in keys:
        assert view.press(key)
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as captured:
        console.print(top.screen("/srv/shop/log", seen, seen, view, width, height))
    return captured.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 16), (40, 12)])
@pytest.mark.parametrize("keys", ["", "\t\t\tj", "\t\t", "w", "w\t\t", "/order\r"])
def test_the_screen_is_never_larger_than_the_terminal(seen: Standing, width: int, height: int, keys: str) -> None:
    lines = screen_of(seen, width, height, *keys)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert lines[-1].startswith(("↑ ↓", "only rows")), "the keys stay"
    for begin, column in (("state ", "age"), ("consumer_group ", "messages_per_s"), ("topic ", "messages_per_s")):
        for n, line in enumerate(lines):
            if line.startswith(begin) and height > 12:
                assert column in line
                assert lines[n + 1].strip(), "a heading has one line, and rows below it"


def test_whole_ids_are_scrolled_to(seen: Standing) -> None:
    half_id = top.open_half_batches(seen)[0]["half_id"]
    near = [line for line in screen_of(seen, 80, 24, "w") if line.startswith("conflict  ")]
    assert all(line.endswith("…") and half_id.startswith(line.split()[-1][:-1]) for line in near)
    further = screen_of(seen, 80, 24, "w", "\x1b[C", "\x1b[C")
    assert any(half_id[-50:] in line for line in further[9:]), "the end of an id"
    far = screen_of(seen, 80, 24, "w", *["\x1b[C"] * 99)
    assert not any(line.endswith("…") for line in far[9:])
    assert screen_of(seen, 80, 24, "w", "\x1b[C", "\x1b[D") == screen_of(seen, 80, 24, "w")
    assert "w short ids" in far[-1]


def test_the_second_line_counts_the_other_findings_and_leaves_out_what_is_well(log: CommitLog, seen: Standing) -> None:
    found = [f for f in Diagnosis(seen).findings(tables=False) if f.level is not Level.OK]
    first, second = screen_of(seen, 120, 40)[1:3]
    assert f" · {len(found) - 1} more finding" in f"{first} {second}"
    assert f"txmq doctor {log.path}" in f"{first} {second}"
    assert "live files" not in first + second
    assert "not drained" not in first + second, "these messages are young"
    well = copy(seen)
    well.pending, well.quarantined, well.conflicts, well.queues, well.groups, well.dead_letters = [], [], [], [], [], {}
    assert screen_of(well, 80, 24)[1] == "all is well"
    assert top.lines("log", well, well, top.View(), 80)[1] == ("all is well", "green")


def test_colours_say_what_needs_a_person(seen: Standing) -> None:
    late = copy(seen)
    young, old = ({**seen.pending[0], "half_id": f"{n}:0", "age_seconds": age} for n, age in (("a", 1.0), ("b", 700.0)))
    leased = {**old, "half_id": "c:0", "leased": True}
    late.pending = [old, young, leased]
    group = {**seen.groups[0], "lag": 1, "lag_seconds": 0.0}
    names = {"still": {"lag_seconds": 700.0}, "letters": {}, "well": {}}
    late.groups = [{**group, "consumer_group": name, **others} for name, others in names.items()]
    late.dead_letters = {"letters": Letters(2, 2)}
    late.members = {}
    shown = top.lines("log", late, late, top.View(), None)
    styles = {line.split()[0]: style for line, style in shown if line}
    pending = {name: style for line, style in shown for name in ("a:0", "b:0", "c:0") if f" {name} " in line}
    assert pending == {"a:0": "", "b:0": "yellow", "c:0": ""}
    assert (styles["conflict"], styles["quarantined"]) == ("bold red", "red")
    assert [styles[name] for name in names] == ["yellow", "yellow", ""]


def test_trouble_stands_first_with_its_age_and_state_whole(seen: Standing) -> None:
    lines = screen_of(seen, 80, 29)
    assert lines[1].startswith("1 in conflict; 1 quarantined; 3 pending, the oldest for ")
    assert lines[3] == "conflicts: 1 half batch with two verdicts that contradict each other:"
    conflict = seen.conflicts[0]["half_id"]
    command = f"txmq trace {seen.engine.path} {conflict}"
    assert f"→ {command}" in "".join(lines[4:12]), "a command is whole, and folded where the terminal ends"
    start = next(n for n, line in enumerate(lines) if line.startswith("state "))
    rows = lines[start + 1 : start + 6]
    assert [row.split()[0] for row in rows] == ["conflict", "quarantined", "pending", "pending", "pending"]
    whole = {row["age"] for row in top.open_half_batches(seen)}
    assert {row[13:].split("  ")[0].strip() for row in rows} == whole
    groups, topics = (
        next(n for n, line in enumerate(lines) if f"more {what}" in line) for what in ("consumer groups", "topics")
    )
    assert groups < topics
    assert lines[-1].endswith("q ends")


def test_keys_move_filter_and_show_whole_ids(seen: Standing) -> None:
    moved = screen_of(seen, 80, 24, "\t", "\t", "\t", "\x1b[6~", "\x1b[A")
    assert "9 above, " in moved[-2]
    assert "more topics" in moved[-2]
    end = screen_of(seen, 80, 24, "\t", "\t", "\t", *["\x1b[6~"] * 9)
    assert "0 more topics" in end[-2]
    filtered = screen_of(seen, 80, 24, "/", *"wareq", "\x7f", "\r")
    assert [line.split()[0] for line in filtered if "production" in line] == [TOPICS[-1]]
    assert not any("orders" in line or "pending " in line for line in filtered[2:-1])
    assert filtered[-1] == "only rows with 'ware', until Esc · q ends"
    long = screen_of(seen, 40, 24, "/", *"a word of a filter that is wider than the terminal", "\r")
    assert long[-1].endswith(", until Esc · q ends")
    assert cell_len(long[-1]) <= 40
    assert screen_of(seen, 80, 24, "/", "x", "\x1b") == screen_of(seen, 80, 24)
    half_id = top.open_half_batches(seen)[0]["half_id"]
    assert any(half_id in line for line in screen_of(seen, 150, 24, "w")[6:])
    assert not top.View().press("q")


def test_many_pending_half_batches_are_counted_and_found(seen: Standing) -> None:
    row = seen.pending[0]
    many = [{**row, "half_id": f"send.{'x' * 60}-{n:09}:0", "age_seconds": float(n)} for n in range(5000)]
    crowded = copy(seen)
    crowded.pending = many
    lines = screen_of(crowded, 80, 24)
    rows = [line for line in lines if line.startswith(("conflict ", "quarantined ", "pending "))]
    assert f"{5_002 - len(rows):,} more half batches" in lines
    lines = screen_of(crowded, 80, 24, *["\x1b[6~"] * 200)
    rows = [line for line in lines if line.startswith("pending ")]
    assert f"{top.ROWS_MAX - len(rows):,} above, {5_002 - top.ROWS_MAX:,} more half batches" in lines
    (found,) = [line for line in screen_of(crowded, 80, 24, "/", *"0000017:0", "\r") if "pending  " in line]
    assert found.split()[1] == "17s"


def test_the_live_screen_listens_to_keys_and_leaves_the_terminal_as_it_was(log: CommitLog) -> None:
    main, terminal = pty.openpty()
    code = "from rmq_spark.cli import app; app()"
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", code, "top", log.path, "--every", "1m"]
    import termios

    before = termios.tcgetattr(terminal)
    program = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    shown = ""

    def until(word: str) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while word not in shown and time.monotonic() < end:
            if select.select([main], [], [], 0.1)[0]:
                shown += os.read(main, 65536).decode(errors="replace")
        assert word in shown, shown[-3000:]

    try:
        until("q ends")
        assert "1 in conflict" in shown
        assert shown.index(f"reading {log.path}"[:40]) < shown.index("1 in conflict")
        os.write(main, b"/ware\r")
        until("only rows with 'ware'")
        os.write(main, b"q")
        assert program.wait(60) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        if program.poll() is None:
            program.send_signal(signal.SIGKILL)
        os.close(main)
        os.close(terminal)


def test_the_live_screen_goes_on_without_a_keyboard() -> None:
    with watch.keyboard() as pressed:
        assert pressed(0.0) == []


def test_every_list_has_json_and_wide() -> None:
    from tests.support.inside import whole

    lists = {"topics", "stats", "top", "read", "query", "pending", "quarantined", "conflicts", "trace"}
    commands = whole(app).commands
    found = {name: {option for p in commands[name].params for option in p.opts} for name in lists}
    for group in ("topic", "group", "dlq"):
        for name in {"list", "status", "lag", "members"} & set(commands[group].commands):
            found[f"{group} {name}"] = {o for p in commands[group].commands[name].params for o in p.opts}
    assert len(found) == 15
    assert all({"--json", "--wide"} <= options for options in found.values()), found
