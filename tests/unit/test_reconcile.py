"""A log that was restored alone is brought to agree with its database, whatever was under way."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from itertools import count, takewhile
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, CheckService, CommitLog, Rollback, SqlTransactionListener
from rmq_spark._core.client import reconcile as reconcile_module
from rmq_spark._core.client.checkpoint import Stream
from rmq_spark._core.client.reconcile import Reconciler
from rmq_spark._core.client.reconcile_report import FindingKind, ReconcileReport
from rmq_spark.errors import ListenerError, OptionError
from rmq_spark.listeners import ExecutedAttempt, HalfTransaction
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq
from tests.support.half_batches import bodies, forget, let_leave, pending, prepare, prepare_one
from tests.support.inside import (
    IDEMPOTENCY_S,
    CommitOncePrepared,
    HalfHeader,
    HalfRecord,
    HalfWriter,
    Naming,
    TwoPhase,
    Who,
    batch_name,
    input_hash_of,
    new_half_id,
)
from tests.support.seeds import first_seed, how_many

QUERY = "0d7f2a1c"
SEND = "send.shop."


Messages = Callable[[sa.Connection, ExecutedAttempt], pa.Table]


def messages_of(connection: sa.Connection, attempt: ExecutedAttempt) -> pa.Table:
    """Make the messages of what was executed again, from its rows."""
    query = sa.text("select body from orders where half_id = :id and attempt = :attempt")
    found = connection.execute(query, {"id": attempt.half_id, "attempt": attempt.attempt}).scalars().all()
    return pa.table({"body": pa.array(found, pa.string()), "topic": ["orders"] * len(found)})


class Shop:
    """A log, its database, a program that sends under keys, and a stream with a checkpoint."""

    def __init__(self, folder: Path, messages: Messages | None = messages_of) -> None:
        self.folder = folder
        self.log = CommitLog.create(folder / "log")
        self.log.create_topic("orders", 2)
        self.url = f"sqlite:///{folder / 'orders.db'}"
        self.engine = sa.create_engine(self.url)
        with self.engine.begin() as connection:
            connection.execute(sa.text("create table orders (body text, half_id text, attempt int)"))
        self.listener = SqlTransactionListener(
            self.engine, self.work, per_transaction=True, rollback_after=0, messages=messages
        )
        self.listener.create_fence()
        self.checkpoint = folder / "checkpoint"
        for name in ("offsets", "commits"):
            (self.checkpoint / name).mkdir(parents=True)
        (self.checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
        self.next_batch = 0

    # ------------------------------------------------------------------ the local transaction
    def work(self, connection: sa.Connection, transaction: HalfTransaction) -> None:
        found = [body.decode() for body in transaction.messages(["body"])["body"].to_pylist()]
        if any("refused" in body for body in found):
            raise Rollback("refused")
        batch = transaction.batch
        rows = [{"body": body, "id": batch.half_id, "attempt": batch.attempt} for body in found]
        connection.execute(sa.text("insert into orders values (:body, :id, :attempt)"), rows)

    def rows(self) -> list[str]:
        with self.engine.connect() as connection:
            return sorted(connection.execute(sa.text("select body from orders")).scalars())

    # ------------------------------------------------------------------ senders
    def header(self, app: str, batch_id: int = 0) -> HalfHeader:
        numbered = app == QUERY
        app = app if numbered else f"{SEND}{app}"
        offsets = self.checkpoint / "offsets" / str(batch_id)
        query, naming = (QUERY, Naming.COUNTED) if numbered else (None, Naming.KEY)
        input_hash = input_hash_of(offsets.read_bytes()) if numbered else None
        fence_id, half_id = self.listener.store_id, batch_name(app, batch_id)
        return HalfHeader(half_id, app, batch_id, query, input_hash, fence_id, "key", "shop", naming)

    def stage(self, header: HalfHeader, names: list[str], log: CommitLog) -> Any:
        writer = HalfWriter(header, log.topics(), "orders", "key", log.fifo_topics())
        table = pa.table({"body": names, "key": names})
        return lambda: log.engine.stage(writer, table.to_batches())

    def send(self, app: str, *names: str, batch_id: int = 0, log: CommitLog | None = None) -> None:
        """All of it."""
        header, log = self.header(app, batch_id), log or self.log
        TwoPhase(log.engine, self.listener).send(header, self.stage(header, list(names or [app]), log))

    def begin(self, app: str, *names: str, batch_id: int = 0, executed: bool = False) -> HalfRecord:
        """Die before the local transaction, or after it."""
        header = self.header(app, batch_id)
        record = prepare_one(self.log.engine, header, self.stage(header, list(names or [app]), self.log)())
        if executed:
            batch = self.log.engine.half_batch(record, self.log.engine.state_of(record), 1, record.all_rows)
            self.listener.execute_local_transaction(batch)
        return record

    def run_stream(self, names: list[str], dies: bool = False) -> None:
        """A micro-batch, or the last one again."""
        batch_id = self.next_batch
        (self.checkpoint / "offsets" / str(batch_id)).write_text(json.dumps(names))
        self.send(QUERY, *names, batch_id=batch_id)
        if not dies:
            (self.checkpoint / "commits" / str(batch_id)).write_text("{}")
            self.next_batch += 1

    def restart_stream(self) -> None:
        planned = self.checkpoint / "offsets" / str(self.next_batch)
        if planned.exists():
            self.run_stream(json.loads(planned.read_text()))

    def check(self) -> None:
        CheckService(self.log, {"shop": self.listener}, transaction_timeout=0).run_once()

    # ------------------------------------------------------------------ disaster
    def back_up(self) -> None:
        self.log.backup(self.folder / "copy")

    def back_up_under_load(self, name: str) -> None:
        """Back up while another program sends; it has sent before the copy is begun, and sends once more after it."""
        other, begun, stop = self.log.another(), Event(), Event()

        def send() -> None:
            for n in takewhile(lambda _: not stop.is_set(), count()):
                self.send(f"{name}.{n}", log=other)
                begun.set()
            self.send(f"{name} after the copy", log=other)

        with ThreadPoolExecutor(1) as pool:
            sends = pool.submit(send)
            try:
                while not begun.wait(0.1):
                    assert not sends.done(), sends.exception()
                self.back_up()
            finally:
                stop.set()
            sends.result()

    def lose(self) -> None:
        shutil.rmtree(self.log.path)
        CommitLog.open(self.folder / "copy").backup(self.log.path)
        self.log = CommitLog.open(self.log.path)

    def send_and_lose(self, *keys: str) -> None:
        """The copy that the log is restored from has nothing of these."""
        self.back_up()
        for key in keys:
            self.send(key)
        self.lose()

    def reconcile(self, apply: bool = False, checkpoint: bool = True) -> ReconcileReport:
        streams = [Stream.read(str(self.checkpoint))] if checkpoint else []
        return Reconciler(self.log.engine, self.listener, streams).run(apply)

    def standings(self, **how: Any) -> dict[str, str]:
        """By app, and number for the stream, how what is not settled stands."""
        found = self.reconcile(**how).findings
        return {
            f"{f.app_id}:{f.batch_id}" if f.app_id == QUERY else str(f.app_id).removeprefix(SEND): f.standing.value
            for f in found
        }

    def require_agreement(self) -> None:
        assert Counter(bodies(self.log)) == Counter(self.rows())


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


# ---------------------------------------------------------------- long after the restore
def test_what_the_log_has_settled_and_forgotten_is_not_made_again(shop: Shop) -> None:
    """A week after the restore all of it was visible twice."""
    shop.send("before")
    shop.send_and_lose("lost")
    shop.reconcile(apply=True)
    shop.send("after")
    shop.require_agreement()
    forget(shop.log)
    assert shop.log.engine.find(f"{SEND}after", 0) is None
    report = shop.reconcile(apply=True)
    assert (report.left, report.findings) == ((), ())
    shop.require_agreement()


def test_what_was_executed_longer_ago_than_the_log_remembers_is_left_to_a_person(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages may have expired, and then nothing tells that they were visible."""
    shop.send_and_lose("lost")
    set_clock(monkeypatch, IDEMPOTENCY_S + 60)
    (found,) = shop.reconcile(apply=True).left
    assert (found.standing, found.done) == (FindingKind.PERSON, None)
    assert "may have settled and forgotten it" in found.what


# ---------------------------------------------------------------- the two holes of the page of steps
def test_a_half_batch_that_a_check_rolled_back_before_and_a_replay_ran_after_the_backup_is_found(shop: Shop) -> None:
    shop.begin("late")
    shop.check()
    shop.back_up()
    shop.send("late")  # its retry: reopened, and executed as attempt 2
    assert (shop.rows(), bodies(shop.log)) == (["late"], ["late"])
    shop.lose()
    assert bodies(shop.log) == []
    (found,) = shop.reconcile().findings
    assert (found.standing, found.half_id, found.attempt, found.done) == (FindingKind.LOST, "send.shop.late:0", 2, None)
    assert bodies(shop.log) == []
    (found,) = shop.reconcile(apply=True).findings
    assert found.done == "1 message became visible"
    shop.require_agreement()
    assert shop.reconcile(apply=True).findings == ()
    shop.send("late")
    shop.require_agreement()


def test_a_batch_that_a_stream_runs_again_is_not_sent_by_a_person_too(shop: Shop) -> None:
    shop.run_stream(["a", "b"])
    shop.back_up()
    shop.run_stream(["c"])
    shop.run_stream(["d"], dies=True)
    shop.lose()
    assert shop.standings() == {f"{QUERY}:1": "lost", f"{QUERY}:2": "replayed"}
    report = shop.reconcile(apply=True)
    assert report.left == ()
    assert f"stream {QUERY} ({shop.checkpoint}) runs batch 2 again; the log has batches up to 0" in str(report)
    shop.restart_stream()
    shop.require_agreement()
    shop.run_stream(["e"])
    shop.require_agreement()
    assert shop.reconcile(apply=True).findings == ()


# ---------------------------------------------------------------- each kind
def test_what_the_log_knows_needs_nothing(shop: Shop) -> None:
    shop.send("whole", "1", "2", "refused 3")
    shop.begin("pending", executed=True)
    shop.begin("never")
    shop.back_up()
    shop.lose()
    report = shop.reconcile()
    assert (report.executed, report.settled, report.findings) == (2, 2, ())
    shop.check()
    shop.require_agreement()


@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_overruled_is_a_persons_and_what_has_left_with_its_refusals_needs_nothing(
    shop: Shop, leaves: bool
) -> None:
    shop.send("whole", "1", "refused 2")
    overruled = shop.begin("overruled", executed=True)
    shop.log.resolve(overruled.half_id, ROLLBACK_MESSAGE, "a person says so")
    if leaves:
        let_leave(shop.log)
    shop.back_up()
    shop.lose()
    assert (shop.log.engine.find(f"{SEND}whole", 0).left is not None) is leaves  # type: ignore[union-attr]
    assert shop.standings(apply=True) == {"overruled": "person"}
    assert shop.reconcile().settled == 1
    assert bodies(shop.log) == ["1"]


def it_was_pending_under_an_attempt_that_a_check_ended(shop: Shop) -> list[str]:
    shop.begin("odd", "1")
    shop.back_up()
    shop.check()  # the tombstone of attempt 1 is in the database, and not in the copy
    shop.send("odd", "1")
    return ["1"]


def it_was_in_quarantine_and_had_been_executed(shop: Shop) -> list[str]:
    record = shop.begin("odd", "1", "2", executed=True)
    shop.log.engine.ledger.quarantine(record, 1, pending(shop.log, record), Who.CHECK, "gave up")
    shop.back_up()
    return ["1", "2"]


def a_check_rolled_it_back_and_some_of_it_was_executed_later(shop: Shop) -> list[str]:
    shop.begin("odd", "1", "refused 2", "3")
    shop.check()
    shop.back_up()
    shop.send("odd", "1", "refused 2", "3")
    return ["1", "refused 2", "3"]


def the_log_has_never_seen_it(shop: Shop) -> list[str]:
    shop.back_up()
    shop.send("odd", "1", "2", "refused 3")
    return ["1", "2", "refused 3"]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "story",
    [
        it_was_pending_under_an_attempt_that_a_check_ended,
        it_was_in_quarantine_and_had_been_executed,
        a_check_rolled_it_back_and_some_of_it_was_executed_later,
        the_log_has_never_seen_it,
    ],
    ids=lambda story: story.__name__,
)
def test_what_is_lost_comes_back_when_that_is_applied_and_a_retry_finds_it(
    shop: Shop, story: Callable[[Shop], list[str]]
) -> None:
    names = story(shop)
    shop.lose()
    assert shop.standings() == {"odd": "lost"}
    assert bodies(shop.log) == []
    (found,) = shop.reconcile(apply=True).findings
    assert (found.standing, found.messages) == (FindingKind.LOST, sum("refused" not in name for name in names))
    shop.require_agreement()
    assert shop.reconcile(apply=True).findings == ()
    shop.check()
    shop.send("odd", *names)
    shop.require_agreement()


def test_what_nobody_can_make_again_is_listed_as_the_database_sees_it(tmp_path: Path) -> None:
    shop = Shop(tmp_path, messages=None)
    shop.send_and_lose("key")
    (found,) = shop.reconcile(apply=True).left
    assert (found.standing, found.app_id) == (FindingKind.LOST, "send.shop.key")
    assert "send them again" in found.what
    assert bodies(shop.log) == []


EMPTY: dict[str, Any] = {"list": [], "table": pa.table({"body": [], "topic": []})}
NO_MESSAGES = {**EMPTY, "text": "an order", "None": None}


def test_a_function_that_fails_or_makes_what_cannot_be_sent_is_told_and_stops_nothing_else(tmp_path: Path) -> None:
    def messages(connection: sa.Connection, attempt: ExecutedAttempt) -> Any:
        key = str(attempt.app_id).removeprefix(SEND)
        if key == "broken":
            raise ZeroDivisionError("no rows")
        if key in NO_MESSAGES:
            return NO_MESSAGES[key]
        return pa.table({"body": [key], "topic": ["unknown" if key == "nowhere" else "orders"]})

    shop = Shop(tmp_path, messages)
    shop.send_and_lose("good", "broken", "nowhere", *NO_MESSAGES)
    report = shop.reconcile(apply=True)
    assert bodies(shop.log) == ["good"]
    said = {str(f.app_id).removeprefix(SEND): f.what for f in report.left}
    assert said.keys() == {"broken", "nowhere", *NO_MESSAGES}
    assert "no rows" in said["broken"]
    assert "unknown" in said["nowhere"]
    for key, why in (
        *((key, "making them again failed: MessageError: no messages were made for attempt 1") for key in EMPTY),
        ("text", "making them again failed: MessageError: found str: a list of rmq_spark.Message"),
        ("None", "send them again, without a local transaction"),
    ):
        assert why in said[key]


def test_a_batch_of_a_stream_whose_checkpoint_nobody_named_is_not_made_again(shop: Shop) -> None:
    """Made again, it would stand in the way of the stream, which may run it again."""
    shop.run_stream(["a"])
    shop.back_up()
    shop.run_stream(["b"])
    shop.run_stream(["c"], dies=True)
    shop.lose()
    (b, c) = shop.reconcile(apply=True, checkpoint=False).left
    assert "--checkpoint" in b.what
    assert (b.standing, c.standing) == (FindingKind.LOST, FindingKind.LOST)
    assert bodies(shop.log) == ["a"]
    assert shop.reconcile(apply=True).left == ()
    shop.restart_stream()
    shop.require_agreement()


def test_a_checkpoint_that_is_older_than_the_database_is_a_persons(shop: Shop) -> None:
    shop.run_stream(["a"])
    shop.back_up()
    old = shop.folder / "old"
    shutil.copytree(shop.checkpoint, old)
    shop.run_stream(["b"])
    shop.run_stream(["c"])
    shop.lose()
    shutil.rmtree(shop.checkpoint)
    shutil.move(old, shop.checkpoint)
    assert shop.standings() == {f"{QUERY}:1": "person", f"{QUERY}:2": "person"}
    assert "older than the database" in shop.reconcile().findings[0].what


def test_a_database_that_is_older_than_the_log_is_noticed(shop: Shop) -> None:
    shop.send("old")
    shop.engine.dispose()
    shutil.copy(shop.folder / "orders.db", shop.folder / "orders.db.old")
    began = datetime.now(timezone.utc)
    shop.send("new")
    shop.send("gone")
    let_leave(shop.log)
    shop.engine.dispose()
    shutil.copyfile(shop.folder / "orders.db.old", shop.folder / "orders.db")
    shop.log.resolve(shop.begin("by hand").half_id, COMMIT_MESSAGE, "a person says so")
    prepare(shop.log, 0, fence_id=CommitOncePrepared.store_id)
    report = Reconciler(shop.log.engine, shop.listener, since=began - timedelta(seconds=1)).run(apply=True)
    found = {f.half_id: f for f in report.findings}
    assert {h: f.standing for h, f in found.items()} == dict.fromkeys(
        ("send.shop.new:0", "send.shop.gone:0"), FindingKind.UNKNOWN_TO_THE_DATABASE
    )
    assert len(report.left) == 2


def test_a_half_batch_that_is_damaged_does_not_hide_the_others(shop: Shop) -> None:
    for key in ("bad", "good"):
        shop.begin(key)
        shop.check()
    shop.back_up()
    for key in ("bad", "good"):
        shop.send(key)
    shop.lose()
    record = shop.log.engine.find(f"{SEND}bad", 0)
    assert record is not None
    Path(shop.log.path, "half", record.files[0].path).unlink()
    not_executed = prepare(shop.log, 0)
    Path(shop.log.path, "half", not_executed.files[0].path).unlink()
    assert shop.standings(apply=True) == {"bad": "person", "good": "lost", "None": "person"}
    assert bodies(shop.log) == ["good"]


def test_what_ended_its_database_transaction_in_its_middle_is_a_persons(shop: Shop) -> None:
    shop.begin("known", executed=True)
    shop.send_and_lose("lost")
    with shop.engine.begin() as connection:
        connection.execute(sa.text("update txmq_fence set state = 'started', outcome = null"))
    assert shop.standings(apply=True) == {"known": "person", "lost": "person"}
    assert bodies(shop.log) == []


def test_another_half_batch_of_the_same_name_is_a_persons(shop: Shop) -> None:
    shop.send_and_lose("key")
    app = f"{SEND}key"
    header = HalfHeader(new_half_id(app, 0), app, 0, None, None, None, "batch", "shop", naming=Naming.KEY)
    prepare_one(shop.log.engine, header, shop.stage(header, ["key"], shop.log)())
    assert shop.standings(apply=True) == {"key": "person"}
    assert bodies(shop.log) == []


def test_who_cannot_tell_is_refused(shop: Shop) -> None:
    with pytest.raises(ListenerError, match="SqlTransactionListener is expected"):
        Reconciler(shop.log.engine, CommitOncePrepared())
    with pytest.raises(OptionError, match="--since"):
        Reconciler(shop.log.engine, shop.listener)
    with pytest.raises(OptionError, match="cannot be read"):
        Stream.read(str(shop.folder / "nothing"))
    assert Stream.read(f"orders-app={shop.checkpoint}").app_id == "orders-app"


# ---------------------------------------------------------------- the command
def test_the_command_changes_nothing_without_apply_and_keeps_its_report(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.send_and_lose("key")
    monkeypatch.setattr(sys.modules[__name__], "listener_of_the_shop", shop.listener, raising=False)
    named = ("reconcile", shop.log.path, "--listener", f"{__name__}:listener_of_the_shop")
    given = (*named, "--checkpoint", shop.checkpoint)
    versions = {t.name: t.refresh() for t in shop.log.engine.tables()}
    said, _ = txmq(*given, code=1)
    assert "lost: half batch 'send.shop.key:0', attempt 1" in said
    assert "--apply makes visible" in said
    assert versions == {t.name: t.refresh() for t in shop.log.engine.tables()}
    (report,) = objects(*given, "--apply")
    assert report["findings"][0]["done"] == "1 message became visible"
    kept = json.loads(Path(report["report"]).read_text())
    assert Path(report["report"]).parent == shop.folder
    assert kept["findings"] == report["findings"]
    (again,) = objects(*named, "--report", shop.folder / "report.json")
    assert again["findings"] == []
    assert json.loads((shop.folder / "report.json").read_text())["settled"] == 1
    shop.require_agreement()


def test_what_the_comparison_may_not_have_seen_is_said(shop: Shop, tmp_path: Path) -> None:
    shop.send("key")
    shop.back_up()
    shop.lose()
    assert shop.reconcile().careful == ()
    long_ago = datetime.now(timezone.utc) - timedelta(days=8)
    (said,) = Reconciler(shop.log.engine, shop.listener, since=long_ago).run().careful
    assert "8 days old" in said
    (tmp_path / "beside").mkdir()
    beside = Shop(tmp_path / "beside")
    report = Reconciler(shop.log.engine, beside.listener).run()
    assert report.executed == 0
    assert "it may be another database" in str(report)


def test_half_batches_of_other_logs_are_left_alone(shop: Shop) -> None:
    other = CommitLog.create(shop.folder / "other")
    other.create_topic("orders", 2)
    shop.send("elsewhere", log=other)
    shop.back_up()
    shop.lose()
    assert shop.reconcile().executed == 0


# ---------------------------------------------------------------- the drill
@pytest.mark.turns(2, among="reconcile: the drill")
@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + how_many(1, 20)))
def test_after_any_losses_rows_and_messages_agree(shop: Shop, seed: int) -> None:
    drill(shop, random.Random(seed))


@pytest.mark.turns(2, among="reconcile: the drill")
def test_the_drill_notices_a_comparison_that_looks_at_half_ids_and_not_at_attempts(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(self: Reconciler, record: HalfRecord, attempt: ExecutedAttempt, apply: bool) -> Any:
        return reconcile_module._Finding(FindingKind.SETTLED, "the log knows it")

    monkeypatch.setattr(Reconciler, "_known", known)
    with pytest.raises(AssertionError):
        drill(shop, random.Random(first_seed()))


def drill(shop: Shop, chance: random.Random) -> None:
    """Send, back up under load, send on, lose the log, restore, reconcile, and start again."""
    begun: list[str] = []
    number = 0

    def act() -> None:
        nonlocal number
        number += 1
        name = f"n{number}"
        names = [f"{name}.{i}" + (" refused" if chance.random() < 0.2 else "") for i in range(chance.randint(1, 3))]
        kind = chance.choice(("send", "send", "begin", "executed", "stream", "stream", "check", "retry", "upkeep"))
        if kind == "send":
            shop.send(name, *names)
        elif kind in ("begin", "executed"):
            shop.begin(name, *names, executed=kind == "executed")
            begun.append(name)
        elif kind == "stream":
            shop.run_stream(names)
        elif kind == "check":
            shop.check()
        elif kind == "retry" and begun:
            shop.send(chance.choice(begun))
        elif kind == "upkeep":
            let_leave(shop.log, audit_s=1e9)

    for _ in range(chance.randint(2, 8)):
        act()
    shop.begin("planted")
    shop.check()
    shop.back_up_under_load("load")
    shop.send("planted")
    for _ in range(chance.randint(2, 8)):
        act()
    if chance.random() < 0.7:
        shop.run_stream(["the last"], dies=True)
    shop.lose()
    dry = shop.reconcile()
    assert any(f.app_id == f"{SEND}planted" for f in dry.findings)
    report = shop.reconcile(apply=True)
    assert report.left == (), str(report)
    assert [f.half_id for f in report.findings] == [f.half_id for f in dry.findings]
    shop.restart_stream()
    shop.check()
    shop.require_agreement()
    assert shop.reconcile(apply=True).findings == ()
    shop.run_stream(["goes on"])
    shop.require_agreement()
