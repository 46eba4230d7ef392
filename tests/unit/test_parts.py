"""Local transactions in parts, as executors run them: each has a database transaction and a fence row of its own."""

from __future__ import annotations

import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa

import rmq_spark as txmq
from rmq_spark import CheckService, HalfBatch, SqlTransactionListener
from tests.support.half_batches import make_log
from tests.support.inside import HalfHeader, HalfWriter, Naming, PartAnswer, PartRunner, TwoPhase, batch_name, run_part
from tests.support.listeners import Scripted
from tests.support.meanwhile import Died
from tests.support.sends import raising

KEYS = 40
REFUSED = 7

Tasks = Callable[[Any, Sequence[HalfBatch]], Iterable[PartAnswer]]
"""What Spark's tasks make of a listener and the parts."""


def part_of(key: str, parts: int) -> int:
    return zlib.crc32(key.encode()) % parts


class Shop:
    """A database of orders beside a commit log, and the program that fills both from a micro-batch.

    Attributes
    ----------
    ran : list of int or None
        The part of each call of ``work``.
    """

    def __init__(self, folder: Path, kind: str = "memory") -> None:
        self.log = make_log(kind, folder / "log", orders=2)
        self.url = f"sqlite:///{folder}/orders.db"
        with sa.create_engine(self.url).begin() as connection:
            connection.exec_driver_sql("create table orders (k text, half_id text)")
        self.ran: list[int | None] = []
        self.refuses = True
        self.fails: Callable[[HalfBatch], None] = lambda batch: None
        self.comes_between: Callable[[], None] = lambda: None  # after the next staging, before its prepare
        self.listener = SqlTransactionListener(self.url, self.work, rollback_after=0)
        self.listener.create_fence()

    def work(self, connection: sa.Connection, batch: HalfBatch) -> Any:
        self.ran.append(batch.part)
        self.fails(batch)
        keys = batch.transactions["transaction_key"].to_pylist()
        refused = [key for key in keys if self.refuses and int(key) % REFUSED == 0]
        rows = [{"k": key, "h": batch.half_id} for key in keys if key not in refused]
        connection.execute(sa.text("insert into orders values (:k, :h)"), rows)
        return batch.verdicts(rollback=dict.fromkeys(refused, "no stock"))

    def send(self, tasks: Tasks | None = None, parts: int = 3, staged: int | None = None, batch_id: int = 0) -> Any:
        """One run of the micro-batch. ``tasks`` None: on the driver. ``staged``: rows are dealt out so, not by key."""
        header = HalfHeader.of(
            Naming.COUNTED, "app", batch_id, query_id="query", input_hash=f"input {batch_id}",
            fence_id=self.listener.store_id, transaction_per="key", producer_group="shop",
        )  # fmt: skip
        engine = self.log.another().engine
        runner = None if tasks is None else PartRunner(lambda listener, batches: list(tasks(listener, batches)))

        def stage() -> list[Any]:
            writer = HalfWriter(header, engine.topics(), "orders", "k")
            keys = [str(n) for n in range(KEYS)] * 2
            files: list[Any] = []
            for part in range(parts):
                places = [part_of(key, parts) if staged is None else row % staged for row, key in enumerate(keys)]
                chosen = [key for key, place in zip(keys, places, strict=True) if place == part]
                if chosen:
                    rows = pa.table({"body": [f"{key}" for key in chosen], "k": chosen})
                    files += engine.stage(writer, rows.to_batches(), part)
            if runner is not None and staged is None:
                runner.staged_here = header.half_id
            comes_between, self.comes_between = self.comes_between, lambda: None
            comes_between()
            return files

        run = {} if runner is None else {"run": runner}
        return TwoPhase(engine, self.listener, replay_check_timeout_s=0.0, **run).send(header, stage)

    def check(self) -> Any:
        return CheckService(self.log.another(), {"shop": self.listener}, transaction_timeout=0).run_once()

    def batch(self) -> HalfBatch:
        """The first half batch, under its first attempt."""
        engine = self.log.another().engine
        record = engine.find("app", 0)
        assert record is not None
        return engine.half_batch(record, engine.state_of(record), 1, record.all_rows)

    def bury(self) -> None:
        """Ask the fence about the first attempt, as a check of a process that does not see the lease."""
        batch = self.batch()
        batch.restarted = True
        self.listener.check_local_transaction(batch)

    def agree(self) -> None:
        """Require that each order is in the database once and told twice, or refused and neither."""
        with sa.create_engine(self.url).connect() as connection:
            rows = Counter(connection.exec_driver_sql("select k from orders").scalars())
        messages = Counter(body.decode() for body in self.log.another().read("orders")["body"].to_pylist())
        good = [str(n) for n in range(KEYS) if n % REFUSED or not self.refuses]
        assert rows == dict.fromkeys(good, 1)
        assert messages == dict.fromkeys(good, 2)
        assert self.log.another().pending().num_rows == 0

    def fence(self) -> dict[tuple[int, int], str]:
        """The states of the fence's rows, by attempt and part."""
        query = "select attempt, part, state from txmq_fence where app_id = 'app'"
        with sa.create_engine(self.url).connect() as connection:
            return {(row.attempt, row.part): row.state for row in connection.exec_driver_sql(query)}


def in_turn(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
    return [run_part(listener, part) for part in parts]


def die_after(done: int) -> Tasks:
    """The driver dies when so many tasks are done."""

    def die(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
        for part in parts[:done]:
            run_part(listener, part)
        raise Died

    return die


@pytest.fixture(params=["memory", pytest.param("delta", marks=pytest.mark.turns(6, among="parts on Delta"))])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(tmp_path, request.param)


def test_each_part_has_a_transaction_and_a_fence_row_of_its_own(shop: Shop) -> None:
    outcome = shop.send(in_turn)
    assert sum(outcome.messages.values()) == 2 * KEYS
    assert shop.ran == [0, 1, 2]
    assert shop.fence() == {(1, -1): "by_part", (1, 0): "mixed", (1, 1): "mixed", (1, 2): "mixed"}
    shop.agree()


def test_all_parts_are_decided_in_one_commit(tmp_path: Path) -> None:
    shop = Shop(tmp_path, "delta")
    before = shop.log.another().refresh()
    shop.send(in_turn)
    assert shop.log.another().refresh() == before + 1


def test_a_task_that_runs_twice_answers_what_the_first_run_recorded(shop: Shop) -> None:
    def twice(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
        first = [run_part(listener, part) for part in parts]
        again = [run_part(listener, part) for part in reversed(parts)]
        for one, other in zip(first, reversed(again), strict=True):
            states = [[answer.verdicts[code].state for code in answer.by_row.to_pylist()] for answer in (one, other)]
            assert states[0] == states[1]
        return again[::-1]

    shop.send(twice)
    assert sorted(shop.ran) == [0, 1, 2]
    shop.agree()


@pytest.mark.turns(6)
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("settled_by", ["replay", "check"])
def test_a_part_that_fails_runs_again_alone(shop: Shop, failing: int, settled_by: str) -> None:
    def fail(batch: HalfBatch) -> None:
        if batch.part == failing and batch.attempt == 1:
            raise ConnectionError("the database went away")

    shop.fails = fail

    def going_on(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
        answers, problems = [], []
        for part in parts:
            try:
                answers.append(run_part(listener, part))
            except ConnectionError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        return answers

    with pytest.raises(txmq.LocalTransactionError, match="the database went away"):
        shop.send(going_on)
    assert shop.log.another().pending()["messages"].to_pylist() == [2 * KEYS]
    if settled_by == "check":
        report = shop.check()
        assert report.rolled_back.messages > 0
        assert shop.log.another().pending().num_rows == 0
    shop.send(in_turn)
    assert sorted(shop.ran, key=str) == sorted([0, 1, 2, failing], key=str)
    assert shop.fence()[1, failing] == "tombstone"
    shop.agree()


@pytest.mark.turns(8)
@pytest.mark.parametrize("done", [0, 1, 2, 3])
@pytest.mark.parametrize("again_on", ["executors", "driver"])
def test_a_driver_that_dies_among_its_tasks_is_settled_part_by_part(shop: Shop, done: int, again_on: str) -> None:
    with pytest.raises(Died):
        shop.send(die_after(done))
    shop.send(in_turn if again_on == "executors" else None)
    again = len({part for part in shop.ran[done:] if part is not None})
    assert again == (3 - done if again_on == "executors" else 0)
    shop.agree()


@pytest.mark.turns(6)
@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("settled_by", ["replay", "check"])
def test_a_driver_that_dies_in_an_attempt_of_some_parts_loses_none(shop: Shop, done: int, settled_by: str) -> None:
    with pytest.raises(Died):
        shop.send(die_after(1))
    with pytest.raises(Died):
        shop.send(die_after(done))  # two parts run again
    assert shop.fence()[2, -1] == "by_part"
    if settled_by == "check":
        shop.check()
    shop.send(in_turn)
    assert sorted(part for part in shop.ran if part is not None) == [0, 1, 2]
    shop.agree()


@pytest.mark.turns(3)
@pytest.mark.parametrize("late", [[0], [0, 2], [0, 1, 2]])
def test_a_task_that_comes_after_a_check_does_nothing(shop: Shop, late: list[int]) -> None:
    def overtaken(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
        early = {part.part: run_part(listener, part) for part in parts if part.part not in late}
        shop.bury()
        return [early.get(part.part) or run_part(listener, part) for part in parts]

    if len(late) == 3:
        shop.send(overtaken)  # nothing of the attempt ran, so the next attempt begins at once
        assert {attempt for attempt, _ in shop.fence()} >= {1, 2}
    else:
        with pytest.raises(txmq.LocalTransactionError, match=rf"{len(late)} of 3 parts"):
            shop.send(overtaken)
        shop.send(in_turn)
    shop.agree()


def test_a_check_before_the_first_task_makes_the_driver_begin_the_next_attempt(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    class Checked(PartRunner):
        def __call__(self, listener: Any, batch: HalfBatch) -> Any:
            attempts.append(batch.attempt)
            if batch.attempt == 1:
                shop.bury()
            return super().__call__(listener, batch)

    monkeypatch.setattr(f"{__name__}.PartRunner", Checked)
    shop.send(in_turn)
    assert attempts == [1, 2]
    assert shop.fence()[1, -1] == "tombstone"
    shop.agree()


def test_a_half_batch_whose_keys_lie_in_several_parts_runs_on_the_driver(shop: Shop) -> None:
    shop.fails = raising(Died())
    with pytest.raises(Died):
        shop.send(None, staged=3)  # as a sink without run_on stages it: rows of a key in two files
    shop.fails = lambda batch: None
    shop.send(in_turn)
    assert shop.ran == [None, None]
    shop.agree()


def test_a_half_batch_that_another_run_staged_otherwise_meanwhile_runs_on_the_driver(shop: Shop) -> None:
    """This run had staged it as well, and took the rows of a key in two parts for two transactions."""

    def another_run() -> None:
        shop.fails = raising(Died())
        with pytest.raises(Died):
            shop.send(None, staged=3)
        shop.fails = lambda batch: None

    shop.comes_between = another_run
    shop.send(in_turn)
    assert shop.ran == [None, None]
    shop.agree()


def test_an_attempt_that_the_driver_began_is_not_run_in_parts(shop: Shop) -> None:
    shop.send(None)
    verdicts = PartRunner(in_turn)(shop.listener, shop.batch())  # type: ignore[arg-type]
    assert shop.ran == [None]
    assert verdicts.counts(KEYS)[txmq.COMMIT_MESSAGE] == KEYS - 6  # type: ignore[union-attr]


def test_the_driver_does_not_take_over_an_attempt_that_was_begun_in_parts(shop: Shop) -> None:
    with pytest.raises(Died):
        shop.send(die_after(2))
    with pytest.raises(txmq.LocalTransactionError, match="in parts"):
        shop.listener.execute_local_transaction(shop.batch())
    assert shop.ran == [0, 1]


def test_the_parts_of_an_attempt_are_one_executed_attempt(shop: Shop) -> None:
    shop.send(in_turn)
    since = shop.log.engine.runtime.now().replace(year=2000)
    (attempt,) = shop.listener.executed_since(shop.log.id, since)
    assert attempt.half_id.startswith(batch_name("app", 0))
    assert attempt.is_whole
    assert attempt.rows is not None
    assert attempt.rows.count == 2 * (KEYS - 6)


def test_a_listener_without_a_fence_runs_in_parts_only_when_it_is_idempotent(shop: Shop) -> None:
    def run(batch: HalfBatch) -> Any:
        shop.ran.append(batch.part)
        return txmq.COMMIT_MESSAGE

    shop.listener = partner = Scripted(run, run)  # type: ignore[assignment]
    with pytest.raises(txmq.LocalTransactionError, match="has no fence, and Spark may run a task twice"):
        shop.send(in_turn)
    assert shop.ran == []
    partner.idempotent = True
    shop.send(in_turn, batch_id=1)
    assert shop.ran == [0, 1, 2]


def test_a_part_knows_its_own_messages_alone(shop: Shop) -> None:
    seen: dict[int | None, list[str]] = {}

    def look(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
        for part in parts:
            seen[part.part] = part.messages(["transaction_key"])["transaction_key"].to_pylist()
            assert not part.is_all
            assert sum(part.transactions["messages"].to_pylist()) == len(seen[part.part])
        return [run_part(listener, part) for part in parts]

    shop.send(look)
    assert all({part_of(key, 3) for key in keys} == {part} for part, keys in seen.items())
    assert sum(map(len, seen.values())) == 2 * KEYS


class Restored(Shop):
    """A shop whose log is set back to a copy that lacks the half batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "delta")
        self.folder = folder
        shutil.copytree(folder / "log", folder / "copy")

    def restore(self) -> None:
        shutil.rmtree(self.folder / "log")
        shutil.copytree(self.folder / "copy", self.folder / "log")
        self.log = txmq.CommitLog.open(self.folder / "log")
        time.sleep(0.01)  # the messages are staged again, at another millisecond

    def dies_and_is_restored(self, done: int) -> None:
        with pytest.raises(Died):
            self.send(die_after(done))
        self.restore()


@pytest.mark.turns(3)
@pytest.mark.parametrize("again", [None, in_turn], ids=["driver", "executors"])
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_restored_log_whose_stream_deals_out_anew_runs_nothing_twice(tmp_path: Path, parts: int, again: Any) -> None:
    """What ran whole is known to have run, wherever its messages lie now."""
    shop = Restored(tmp_path)
    shop.refuses = False
    shop.send(in_turn)
    shop.restore()
    shop.send(again, parts)
    assert shop.ran == [0, 1, 2]
    shop.agree()


@pytest.mark.turns(3)
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_restored_log_goes_on_with_the_parts_that_it_deals_out_alike(tmp_path: Path, done: int) -> None:
    shop = Restored(tmp_path)
    shop.dies_and_is_restored(done)
    shop.send(in_turn)
    assert sorted(part for part in shop.ran if part is not None) == [0, 1, 2]
    shop.agree()


@pytest.mark.turns(3)
@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("again", [None, in_turn], ids=["driver", "executors"])
def test_a_restored_log_with_other_parts_is_for_a_person_unless_all_ran(tmp_path: Path, done: int, again: Any) -> None:
    shop = Restored(tmp_path)
    shop.dies_and_is_restored(done)
    ran = list(shop.ran)
    for _ in range(2):
        with pytest.raises((txmq.LocalTransactionError, txmq.UnresolvedTransactionError), match="in other places"):
            shop.send(again, 2)
    report = shop.check()
    assert not report.ok
    assert shop.ran == ran
    assert shop.log.another().pending()["messages"].to_pylist() == [2 * KEYS]


def test_work_that_ends_its_transaction_in_a_part_holds_up_that_part_alone(shop: Shop) -> None:
    work = shop.work

    def ends(connection: sa.Connection, batch: HalfBatch) -> Any:
        verdicts = work(connection, batch)
        if batch.part == 1:
            connection.exec_driver_sql("COMMIT")
        return verdicts

    shop.listener = SqlTransactionListener(shop.url, ends, rollback_after=0)

    def going_on(listener: Any, parts: Sequence[HalfBatch]) -> Iterable[PartAnswer]:
        for part in parts:
            with suppress(txmq.errors.TransactionEndedError):
                run_part(listener, part)
        raise ConnectionError("the job failed")

    with pytest.raises(txmq.LocalTransactionError):
        shop.send(going_on)
    shop.check()
    in_part = [key for key in map(str, range(KEYS)) if part_of(key, 3) == 1]
    assert shop.log.another().pending()["messages"].to_pylist() == [2 * len(in_part)]
    report = shop.check()
    assert not report.ok  # nobody can answer for the rest
    told = {body.decode() for body in shop.log.another().read("orders")["body"].to_pylist()}
    assert told == {str(n) for n in range(KEYS) if n % REFUSED} - set(in_part)
