"""DeltaTransactionListener on real Delta tables."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, DeltaTransactionListener, HalfBatch, Rollback
from rmq_spark.errors import FencedError, FenceError, ListenerError, LocalTransactionError, VerdictError
from tests.support.inside import STREAM_TELLS_START, Verdict, verdict_of

pytestmark = [pytest.mark.spark, pytest.mark.delta_listener]

OLD = timedelta(hours=1)
YOUNG = timedelta(seconds=1)
VERSION = "spark.databricks.delta.write.txnVersion"
APP_ID = "spark.databricks.delta.write.txnAppId"
METADATA = "spark.databricks.delta.commitInfo.userMetadata"


class Rows:
    """The rows of a half batch in an Arrow table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self.table.select(list(columns))

    def to_spark(self, spark: Any) -> Any:
        return spark.createDataFrame(self.table)


def half_batch(
    fence_id: str | None,
    keys: Sequence[str] = ("a", "b"),
    *,
    age: timedelta = YOUNG,
    half_id: str = "app-7",
    attempt: int = 1,
    per: str = "batch",
    log_id: str = "a-log",
) -> HalfBatch:
    rows = pa.table({"file_no": pa.array([0] * len(keys), pa.int32()), "keys": pa.array(list(keys), pa.string())})
    return HalfBatch(
        half_id=half_id,
        app_id="app",
        batch_id=7,
        attempt=attempt,
        producer_group="order-service",
        prepared_at=datetime.now(timezone.utc) - age,
        check_times=0,
        transaction_per=per,
        fence_id=fence_id,
        rows=Rows(rows),
        staged_ms=1_800_000_000_000,
        log_id=log_id,
    )


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> str:
    """The path of an empty Delta table with one column, ``id``."""
    path = str(tmp_path / "gold")
    spark.createDataFrame([], "id string").write.format("delta").save(path)
    return path


def append(batch_df: Any, delta_table: Any) -> None:
    path = delta_table.detail().select("location").head()[0]
    batch_df.selectExpr("keys AS id").write.format("delta").mode("append").save(path)


def merge(batch_df: Any, delta_table: Any) -> None:
    source = batch_df.selectExpr("keys AS id")
    merged = delta_table.alias("t").merge(source.alias("s"), "t.id = s.id").whenNotMatchedInsertAll()
    merged.execute()


def stored(spark: Any, table: str) -> list[str]:
    return sorted(row.id for row in spark.read.format("delta").load(table).collect())


def log_actions(table: str, kind: str) -> list[tuple[int, Any]]:
    found = []
    for file in sorted(Path(table, "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in file.read_text().splitlines()]
        found += [(int(file.stem), action[kind]) for action in actions if kind in action]
    return found


def listener(spark: Any, table: str, work: Callable[..., Any] = append, **settings: Any) -> DeltaTransactionListener:
    return DeltaTransactionListener(table, work, spark=spark, **settings)


def nothing_is_set(spark: Any) -> bool:
    return all(spark.conf.get(name, None) is None for name in (VERSION, APP_ID, METADATA))


# ---------------------------------------------------------------- execute and check agree
@pytest.mark.parametrize("work", [pytest.param(append, marks=pytest.mark.long), merge])
def test_execute_makes_one_commit_and_a_check_finds_it(spark: Any, table: str, work: Any) -> None:
    from delta.tables import DeltaTable

    given = DeltaTable.forPath(spark, table) if work is merge else table  # an opened table may be given, too
    gold = DeltaTransactionListener(given, work, spark=spark)
    batch = half_batch(gold.store_id)
    assert gold.execute_local_transaction(batch) == COMMIT_MESSAGE
    assert stored(spark, table) == ["a", "b"]
    assert [(v, t["appId"], t["version"]) for v, t in log_actions(table, "txn")] == [(1, "txmq:a-log:app-7:1", 1)]
    assert gold.check_local_transaction(half_batch(gold.store_id, age=OLD)) == COMMIT_MESSAGE
    # Once more under the same attempt: Delta skips the write, and the answer stays.
    assert gold.execute_local_transaction(batch) == COMMIT_MESSAGE
    assert stored(spark, table) == ["a", "b"]


@pytest.mark.long
def test_a_half_batch_of_the_same_name_in_another_log_is_another_one(spark: Any, table: str) -> None:
    """As in a log that was made anew: its work was skipped, and its messages became visible."""
    gold = listener(spark, table)
    one, two = (half_batch(gold.store_id, [name], age=OLD, log_id=name) for name in ("one", "two"))
    assert gold.execute_local_transaction(one) == COMMIT_MESSAGE
    assert verdict_of(gold.check_local_transaction(two)).state == ROLLBACK_MESSAGE
    assert gold.execute_local_transaction(half_batch(gold.store_id, ["two"], attempt=2, log_id="two")) == COMMIT_MESSAGE
    assert gold.check_local_transaction(one) == COMMIT_MESSAGE
    assert stored(spark, table) == ["one", "two"]


@pytest.mark.turns(2, among="Delta listener: tombstones")
@pytest.mark.parametrize("work", [append, pytest.param(merge, marks=pytest.mark.long)])
def test_a_tombstone_fences_a_late_execute_but_not_the_next_attempt(spark: Any, table: str, work: Any) -> None:
    gold = listener(spark, table, work)
    young = half_batch(gold.store_id)
    assert gold.check_local_transaction(young) == UNKNOWN
    assert young.reason == "the table has no commit of it yet, and rollback_after (60 s) is not over"
    assert len(log_actions(table, "commitInfo")) == 1, "a young half batch gets no tombstone"

    old = half_batch(gold.store_id, age=OLD)
    assert verdict_of(gold.check_local_transaction(old)).state == ROLLBACK_MESSAGE
    assert [(v, t["appId"], t["version"]) for v, t in log_actions(table, "txn")] == [(1, "txmq:a-log:app-7:1", 1)]
    assert [v for v, _ in log_actions(table, "add")] == [], "a tombstone adds no file"
    with pytest.raises(FencedError, match="came too late: a check has put a tombstone"):
        gold.execute_local_transaction(old)
    assert stored(spark, table) == []
    assert verdict_of(gold.check_local_transaction(old)).state == ROLLBACK_MESSAGE

    assert gold.execute_local_transaction(half_batch(gold.store_id, attempt=2)) == COMMIT_MESSAGE
    assert stored(spark, table) == ["a", "b"]


def fail(*_: object) -> None:
    raise ZeroDivisionError("a bug")


def roll_back(*_: object) -> Any:
    return ROLLBACK_MESSAGE


@pytest.mark.turns(2, among="Delta listener: tombstones")
@pytest.mark.parametrize("goes_on", [append, fail, roll_back])
def test_a_tombstone_that_comes_while_work_runs_wins_over_its_end(spark: Any, table: str, goes_on: Any) -> None:
    checker = listener(spark, table)

    def slow(batch_df: Any, delta_table: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(checker.check_local_transaction, half_batch(checker.store_id, age=OLD))
            assert verdict_of(answer.result()).state == ROLLBACK_MESSAGE
        return goes_on(batch_df, delta_table)

    with pytest.raises(FencedError):
        listener(spark, table, slow).execute_local_transaction(half_batch(checker.store_id, age=OLD))
    assert stored(spark, table) == []


@pytest.mark.long
def test_a_racing_execute_and_check_never_disagree(spark: Any, table: str) -> None:
    gold = listener(spark, table)
    fence = gold.store_id
    outcomes = []

    def execute(batch: HalfBatch, start: threading.Barrier) -> Any:
        start.wait(30)
        try:
            return gold.execute_local_transaction(batch)
        except FencedError:
            return "FENCED"

    def check(batch: HalfBatch, start: threading.Barrier) -> Any:
        start.wait(30)
        return gold.check_local_transaction(batch)

    with ThreadPoolExecutor(2) as pool:
        for round_no in range(6):
            batch = half_batch(fence, [f"order{round_no}"], age=OLD, half_id=f"race-{round_no}")
            start = threading.Barrier(2)
            executed, checked = pool.submit(execute, batch, start), pool.submit(check, batch, start)
            outcomes.append((executed.result(), checked.result()))
    assert set(outcomes) <= {(COMMIT_MESSAGE, COMMIT_MESSAGE), ("FENCED", ROLLBACK_MESSAGE)}
    committed = [f"order{i}" for i, outcome in enumerate(outcomes) if outcome[0] == COMMIT_MESSAGE]
    assert stored(spark, table) == committed


@pytest.mark.long
def test_others_commits_and_housekeeping_do_not_hide_whose_commit_it_was(spark: Any, table: str) -> None:
    gold = listener(spark, table)
    fence = gold.store_id

    def with_auto_compaction(batch_df: Any, delta_table: Any) -> None:
        batch_df.sparkSession.conf.set("spark.databricks.delta.autoCompact.enabled", "true")
        batch_df.sparkSession.conf.set("spark.databricks.delta.autoCompact.minNumFiles", "2")
        append(batch_df, delta_table)

    for n in range(3):
        spark.createDataFrame([(f"other{n}",)], "id string").write.format("delta").mode("append").save(table)
    assert listener(spark, table, with_auto_compaction).execute_local_transaction(half_batch(fence)) == COMMIT_MESSAGE
    operations = [info["operation"] for _, info in log_actions(table, "commitInfo")]
    assert "OPTIMIZE" in operations
    for n in range(3, 6):
        spark.createDataFrame([(f"other{n}",)], "id string").write.format("delta").mode("append").save(table)
    assert gold.check_local_transaction(half_batch(fence, age=OLD)) == COMMIT_MESSAGE
    assert (
        verdict_of(gold.check_local_transaction(half_batch(fence, age=OLD, half_id="app-8"))).state == ROLLBACK_MESSAGE
    )


@pytest.mark.long
def test_a_log_that_no_longer_tells_whose_commit_it_was_answers_nothing(spark: Any, table: str) -> None:
    gold = listener(spark, table)
    fence = gold.store_id
    gold.execute_local_transaction(half_batch(fence))
    spark.createDataFrame([("c",)], "id string").write.format("delta").mode("append").save(table)
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, table).checkpoint()
    # What log clean-up does, later: the checkpoint keeps the txn, the commit's own file goes.
    for version in (0, 1):
        Path(table, "_delta_log", f"{version:020}.json").unlink()
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    with pytest.raises(FenceError, match="its log no longer says whose commit it was"):
        gold.check_local_transaction(half_batch(fence, age=OLD))
    assert stored(spark, table) == ["a", "b", "c"]


# ---------------------------------------------------------------- what work does
@pytest.mark.turns(3, among="Delta listener: what work does")
def test_work_that_rolls_back_is_recorded_and_final(spark: Any, table: str) -> None:
    def refuse(*_: object) -> None:
        raise Rollback("the day is closed")

    gold = listener(spark, table, refuse)
    batch = half_batch(gold.store_id)
    refused = Verdict(ROLLBACK_MESSAGE, "the day is closed", True)
    assert verdict_of(gold.execute_local_transaction(batch)) == refused
    assert verdict_of(gold.check_local_transaction(batch)) == refused
    assert verdict_of(listener(spark, table).execute_local_transaction(batch)) == refused
    assert stored(spark, table) == []


@pytest.mark.turns(3, among="Delta listener: what work does")
def test_work_that_commits_and_then_rolls_back_is_an_error(spark: Any, table: str) -> None:
    def work(batch_df: Any, delta_table: Any) -> Any:
        append(batch_df, delta_table)
        return ROLLBACK_MESSAGE

    gold = listener(spark, table, work)
    with pytest.raises(LocalTransactionError, match="it has made a Delta commit, which stands"):
        gold.execute_local_transaction(half_batch(gold.store_id))
    assert gold.check_local_transaction(half_batch(gold.store_id)) == COMMIT_MESSAGE


@pytest.mark.long
def test_work_without_a_commit_is_an_error_and_stays_pending(spark: Any, table: str) -> None:
    def through_another_session(batch_df: Any, _: Any) -> None:
        spark.createDataFrame([("x",)], "id string").write.format("delta").mode("append").save(table)

    fence = listener(spark, table).store_id
    for work in (lambda *_: None, lambda _, t: t.delete("id = 'none'"), through_another_session):
        with pytest.raises(ListenerError, match="made no commit that is fenced"):
            listener(spark, table, work).execute_local_transaction(half_batch(fence))
    assert listener(spark, table).check_local_transaction(half_batch(fence)) == UNKNOWN


@pytest.mark.long
def test_work_with_two_commits_is_an_error_that_says_what_stands(spark: Any, table: str, tmp_path: Path) -> None:
    def twice(batch_df: Any, delta_table: Any) -> None:
        append(batch_df, delta_table)
        append(batch_df, delta_table)

    def elsewhere_first(batch_df: Any, delta_table: Any) -> None:
        batch_df.write.format("delta").save(str(tmp_path / "other"))
        append(batch_df, delta_table)

    def alter_first(batch_df: Any, delta_table: Any) -> None:
        batch_df.sparkSession.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('who' = 'me')")
        append(batch_df, delta_table)

    fence = listener(spark, table).store_id
    first = half_batch(fence)
    with pytest.raises(ListenerError, match=r"more than once.*is in the table, so a check will answer COMMIT"):
        listener(spark, table, twice).execute_local_transaction(first)
    assert stored(spark, table) == ["a", "b"]
    assert listener(spark, table).check_local_transaction(first) == COMMIT_MESSAGE

    second = half_batch(fence, half_id="app-8")
    with pytest.raises(ListenerError, match=r"more than once.*the first is not in it"):
        listener(spark, table, elsewhere_first).execute_local_transaction(second)
    assert stored(spark, table) == ["a", "b"]
    assert listener(spark, table).check_local_transaction(second) == UNKNOWN

    with pytest.raises(ListenerError, match="made one commit, and SET TBLPROPERTIES, which Delta does not fence"):
        listener(spark, table, alter_first).execute_local_transaction(half_batch(fence, half_id="app-9"))


@pytest.mark.turns(3, among="Delta listener: what work does")
def test_an_exception_in_work_is_raised_as_it_is(spark: Any, table: str) -> None:
    gold = listener(spark, table, fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        gold.execute_local_transaction(half_batch(gold.store_id))
    assert gold.check_local_transaction(half_batch(gold.store_id)) == UNKNOWN


@pytest.mark.turns(3, among="Delta listener: what work does")
def test_the_users_session_is_never_touched(spark: Any, table: str) -> None:
    seen: dict[str, Any] = {}

    def work(batch_df: Any, delta_table: Any) -> None:
        seen["own"] = own = batch_df.sparkSession
        seen["inside"] = own.conf.get(VERSION), own.conf.get(APP_ID), nothing_is_set(spark)
        seen["view"] = own.table("some_view").count()
        seen["active"] = type(spark).getActiveSession()._jsparkSession.equals(own._jsparkSession)
        append(batch_df, delta_table)

    spark.range(3).createOrReplaceTempView("some_view")
    before = type(spark).getActiveSession()
    gold = listener(spark, table, work)
    gold.execute_local_transaction(half_batch(gold.store_id))
    assert seen["inside"] == ("1", "txmq:a-log:app-7:1", True)
    assert seen["view"] == 3
    assert seen["active"]
    assert nothing_is_set(spark)
    assert nothing_is_set(seen["own"])
    assert type(spark).getActiveSession()._jsparkSession.equals(before._jsparkSession)

    with pytest.raises(ListenerError):
        listener(spark, table, lambda *_: None).execute_local_transaction(half_batch(gold.store_id, half_id="x"))
    assert nothing_is_set(spark)
    assert type(spark).getActiveSession()._jsparkSession.equals(before._jsparkSession)


@pytest.mark.turns(3, among="Delta listener: what work does")
def test_unknown_is_no_answer_of_work(spark: Any, table: str) -> None:
    gold = listener(spark, table, lambda *_: UNKNOWN)
    with pytest.raises(VerdictError, match="returned UNKNOWN"):
        gold.execute_local_transaction(half_batch(gold.store_id))


# ---------------------------------------------------------------- the fence
def test_another_table_or_none_answers_nothing(spark: Any, table: str, tmp_path: Path) -> None:
    gold = listener(spark, table)
    for ask in (gold.execute_local_transaction, gold.check_local_transaction):
        with pytest.raises(FenceError, match="prepared with table id other"):
            ask(half_batch("other", age=OLD))
        with pytest.raises(FenceError, match="prepared without a fence"):
            ask(half_batch(None, age=OLD))
        with pytest.raises(ListenerError, match="a transaction per key, but one Delta commit is one"):
            ask(half_batch(gold.store_id, per="key"))
    with pytest.raises(FenceError, match="is not a Delta table"):
        _ = listener(spark, str(tmp_path / "nowhere")).store_id
    assert len(log_actions(table, "commitInfo")) == 1


@pytest.mark.turns(3, among="Delta listener: what work does")
def test_a_table_that_forgets_its_transactions_is_warned_of_and_answers_nothing(
    spark: Any, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget = "'delta.setTransactionRetentionDuration' = 'interval 1 millisecond'"
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({forget})")
    gold = listener(spark, table)
    batch = half_batch(gold.store_id)
    assert "a half batch that stays pending for longer is not fenced any more" in caplog.text
    assert gold.execute_local_transaction(batch) == COMMIT_MESSAGE
    for ask in (gold.execute_local_transaction, gold.check_local_transaction):
        with pytest.raises(FenceError, match=r"has 2 commits for one attempt .*\(executed, executed\)"):
            ask(batch)


@pytest.mark.turns(3, among="Delta listener: what work does")
def test_a_table_that_takes_no_tombstone_answers_nothing(spark: Any, table: str) -> None:
    """Another program has set it to a feature that this Delta can read and not write."""
    gold = listener(spark, table)
    batch = half_batch(gold.store_id, age=OLD)
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["notKnownYet"]}
    Path(table, "_delta_log", f"{1:020}.json").write_text(json.dumps({"protocol": protocol}))
    with pytest.raises(Exception, match="notKnownYet"):
        gold.check_local_transaction(batch)


@pytest.mark.long
def test_a_named_table_that_is_hard_to_write_to_is_fenced_too(spark: Any) -> None:
    # Delta for Spark 4.0 and 4.1 has no identity columns.
    number = "n BIGINT GENERATED ALWAYS AS IDENTITY" if STREAM_TELLS_START else "n BIGINT"
    spark.sql(
        f"CREATE TABLE hard ({number}, id STRING NOT NULL) USING delta "
        "PARTITIONED BY (id) TBLPROPERTIES ('delta.appendOnly' = 'true')"
    )
    try:
        spark.sql("INSERT INTO hard (id) VALUES ('x')")

        def work(batch_df: Any, delta_table: Any) -> None:
            batch_df.selectExpr("keys AS id").write.format("delta").mode("append").saveAsTable("hard")

        gold = DeltaTransactionListener("hard", work)  # finds the active session
        assert gold.requires_spark
        fence = gold.store_id
        assert gold.execute_local_transaction(half_batch(fence)) == COMMIT_MESSAGE
        assert (
            verdict_of(gold.check_local_transaction(half_batch(fence, half_id="app-8", age=OLD))).state
            == ROLLBACK_MESSAGE
        )
        with pytest.raises(FencedError):
            gold.execute_local_transaction(half_batch(fence, half_id="app-8"))
        assert sorted(row.id for row in spark.table("hard").collect()) == ["a", "b", "x"]
    finally:
        spark.sql("DROP TABLE hard")
