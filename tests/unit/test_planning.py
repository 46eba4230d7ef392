"""Planning a read: which half rows offsets mean, what a trigger takes, and how partitions share it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rmq_spark as txmq
from rmq_spark import CommitLog
from rmq_spark._core.log.message_range import PlacedRange
from rmq_spark._core.messages.message_reader import messages_of
from rmq_spark._core.reads.plan import BLOCK_ROWS
from rmq_spark._core.vocabulary.ids import message_ids, transaction_ids
from tests.support.half_batches import another, merge_op_files, prepare
from tests.support.inside import (
    OpKind,
    OpRow,
    Planner,
    Positions,
    RowRange,
    Subscription,
    admit,
    op_merge,
    parse_tags,
    partition_ranges,
    read_options,
)
from tests.support.limits import Limit
from tests.support.meanwhile import seen_at, unhooked
from tests.support.source_logs import decide, send

ORDERS = Subscription(("orders",))
NOW = datetime(2025, 3, 1, tzinfo=timezone.utc)
OPTIONS = {"path": "log", "subscribe": "orders"}


pytestmark = pytest.mark.log("memory", orders=3, carts=1)
both_kinds = pytest.mark.log("memory", "delta", orders=3, carts=1)
"""Where the files count: a log on Delta finds those to read by the statistics of its table."""


def planner(log: CommitLog, subscription: Subscription = ORDERS, **more: Any) -> Planner:
    return Planner(another(log).engine, subscription, **more)


def read(log: CommitLog, ranges: list[PlacedRange]) -> pa.Table:
    """The bodies and offsets that some ranges hold, in the order of queue and offset."""
    names = ["queue_id", "queue_offset", "msg_id", "body"]
    parts = [
        part
        for placed in ranges
        for part in messages_of([placed], log.engine.half.read_range(placed.rows, ["body"]), names)
    ]
    found = pa.concat_tables(parts) if parts else pa.table({name: [] for name in names})
    return found.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])


def whole(log: CommitLog) -> pa.Table:
    return log.read("orders", columns=["queue_id", "queue_offset", "msg_id", "body"])


# ---------------------------------------------------------------- ranges
def op_files(reads: Iterable[dict[str, Any]]) -> list[str]:
    """The files that were read, each as often as it was."""
    return [path for read in reads for path in read["paths"]]


def test_a_planner_follows_the_log_and_reads_only_what_is_new(log: CommitLog) -> None:
    send(log, 0)
    plans = planner(log)
    files: list[str] = []
    at: Positions = plans.latest()
    seen = 0
    for batch_id in range(1, 6):
        send(log, batch_id, 4)
        latest = plans.latest()
        with seen_at("files read", table="op") as reads:
            found = plans.ranges(at, latest)
        files += op_files(reads)
        seen += sum(placed.count for placed in found)
        plans.forget(latest)
        assert plans._placements._cached.rows.num_rows == 0
        at = latest
    assert seen == 20
    assert len(files) == len(set(files)) == 5


def test_what_was_planned_before_can_be_planned_again(log: CommitLog) -> None:
    for batch_id in range(6):
        send(log, batch_id)
    plans = planner(log)
    latest = plans.latest()
    first = plans.ranges({}, latest)
    plans.forget(latest)
    assert plans.ranges({}, latest) == first
    middle = {queue: offset // 2 for queue, offset in latest.items()}
    halves = plans.ranges({}, middle) + plans.ranges(middle, latest)
    assert read(log, halves).equals(whole(log))


@both_kinds
def test_ranges_are_the_same_after_op_was_compacted(log: CommitLog) -> None:
    for batch_id in range(6):
        send(log, batch_id)
    open_before, latest = planner(log), planner(log).latest()
    before = planner(log).ranges({}, latest)
    assert log.engine.ledger.mark()
    files = log.engine.op_table.actions().num_rows
    merge_op_files(log)
    log.engine.op_table.refresh()
    assert log.engine.op_table.actions().num_rows < files
    assert planner(log).ranges({}, latest) == before
    assert open_before.ranges({}, latest) == before
    send(log, 6)
    more = open_before.latest()
    assert sum(placed.count for placed in open_before.ranges(latest, more)) == 5


@both_kinds
def test_a_compaction_that_loses_races_to_a_busy_writer_merges_once(log: CommitLog, limit: Limit) -> None:
    for batch_id in range(4):
        send(log, batch_id)
    limit(OP_FILES_MAX=2)
    log.engine.compaction.is_on = False

    def overtaken(**_: Any) -> None:
        if len(tries) <= 3:
            with unhooked():
                send(log, 10 + len(tries))

    latest = planner(log).latest()
    before = planner(log).ranges({}, latest)
    with seen_at("commit begins", overtaken, table="op") as tries:
        assert op_merge.compact_op(another(log).engine.op_table)
    assert len(tries) == 4
    assert len({file.path for tried in tries for file in tried["change"].add}) == 1
    assert planner(log).ranges({}, latest) == before


def test_a_cache_over_its_size_is_filled_again_as_the_stream_goes_on(log: CommitLog, limit: Limit) -> None:
    for batch_id in range(12):
        send(log, batch_id, 6)
    limit(CACHE_ROWS_MAX=4)
    plans = planner(log)
    latest, at, parts = plans.latest(), {}, []
    while at != latest:
        end = admit(at, latest, 7)
        parts += plans.ranges(at, end)
        assert plans._placements._cached.rows.num_rows <= 4 * 4
        plans.forget(end)
        at = end
    assert read(log, parts).equals(whole(log))


@both_kinds
def test_a_cold_planner_at_the_head_and_a_read_near_the_end_read_the_newest_files_only(log: CommitLog) -> None:
    for batch_id in range(40):
        send(log, batch_id, 3)
    before = planner(log).latest()
    send(log, 40, 3)
    plans = planner(log)
    with seen_at("files read", table="op") as reads:
        assert sum(placed.count for placed in plans.ranges(before, plans.latest())) == 3
    assert 0 < len(op_files(reads)) <= 16
    start = {queue_id: offset for (_, queue_id), offset in before.items()}
    log.engine.tails()
    with seen_at("files read", table="op") as reads:
        assert log.read("orders", start).num_rows == 3
    assert 0 < len(op_files(reads)) <= 17


def test_ids_are_those_of_the_transaction(log: CommitLog) -> None:
    decide(log, prepare(log, 0, {"body": [f"{i}" for i in range(9)]}, per="message"), roll_back_every=2)
    plans = planner(log)
    for placed in plans.ranges({}, plans.latest()):
        for position, rows in log.engine.half.read_range(placed.rows, ["row_no"]):
            (made,) = messages_of([placed], [(position, rows)], ["msg_id", "transaction_id"])
            files = pa.array([placed.rows.file_no] * rows.num_rows)
            half_id = placed.rows.half_id
            assert made["msg_id"].to_pylist() == message_ids(pa.scalar(half_id), files, rows["row_no"]).to_pylist()
            ids = transaction_ids(half_id, 1, "message", pa.table({"file_no": files, "row_no": rows["row_no"]}))
            assert made["transaction_id"].to_pylist() == ids.to_pylist()


def test_a_pattern_finds_topics_that_come_later_from_their_start(log: CommitLog) -> None:
    plans = planner(log, Subscription(pattern="or.*|later"))
    send(log, 0, 2)
    at = plans.resolve("startingOffsets", "latest")
    log.create_topic("later", queues=1)
    send(log, 1, 3, topic="later")
    send(log, 2, 3, topic="carts")
    latest = plans.latest()
    assert ("later", 0) in latest
    assert ("carts", 0) not in latest
    assert {placed.topic for placed in plans.ranges(at, latest)} == {"later"}


def test_a_pattern_reads_retries_and_dead_letters_only_when_it_names_them(log: CommitLog) -> None:
    log.engine.topic_store.create(["%RETRY%points"], 1, fifo=False, exist_ok=False)
    assert not Subscription(pattern=".*").matches("%RETRY%points")
    assert not Subscription(pattern="%DLQ%.*").matches("%RETRY%points")
    assert Subscription(pattern="%RETRY%.*|or.*").matches("%RETRY%points")
    assert "%RETRY%points" not in planner(log, Subscription(pattern=".*")).queues()


def test_a_pattern_that_matches_no_topic_is_told(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    assert planner(log, Subscription(pattern="order")).queues() == {}
    (said,) = caplog.messages
    assert said.startswith("subscribePattern='order' matches no topic (there are: ")
    assert "orders" in said


def test_missing_offsets_are_an_error_or_a_warning(log: CommitLog, caplog: pytest.LogCaptureFixture) -> None:
    send(log, 0, 6)
    end = {("orders", 0): 2, ("orders", 1): 9, ("orders", 2): 2}
    said = "topic 'orders', queue 1: offsets 2 to 8 are not in the commit log, though"
    for look in (planner(log).ranges, planner(log).tail):
        with pytest.raises(txmq.OffsetOutOfRangeError, match=said):
            look({}, end)
    found = planner(log, fail_on_data_loss=False).ranges({}, end)
    assert sum(placed.count for placed in found) == 6
    assert "offsets 2 to 8 are not in the commit log" in caplog.text


def test_offsets_that_leave_out_a_groups_retries_read_them_from_the_start(log: CommitLog) -> None:
    log.engine.topic_store.create(["%RETRY%points"], 1, fifo=False, exist_ok=False)
    of_orders = {("orders", queue_id): 0 for queue_id in range(3)}
    plans = planner(log, Subscription(("orders",), retry="%RETRY%points"))
    assert plans.resolve("startingOffsets", of_orders) == {**of_orders, ("%RETRY%points", 0): 0}


def test_a_checkpoint_past_the_end_is_an_error_or_goes_back(log: CommitLog) -> None:
    send(log, 0, 6)
    start = {("orders", 0): 50}
    with pytest.raises(txmq.OffsetOutOfRangeError, match="offset 50 for topic 'orders', queue 0, which ends at 2"):
        planner(log).require_start(start, planner(log).latest())
    lenient = planner(log, fail_on_data_loss=False)
    assert lenient.require_start(start, lenient.latest()) == {("orders", 0): 2}


@both_kinds
def test_a_hand_edited_op_row_that_points_outside_the_log_is_an_error(log: CommitLog) -> None:
    send(log, 0, 3)
    offset = log.engine.ledger.view.tails[("orders", 0)]
    row = OpRow(OpKind.COMMIT, "app:0", 0, ((0, 0),), 1, 1, topic="orders", queue_id=0, queue_offset=offset,
                path="../../secret.parquet", file_rows=3, transaction_per="batch", producer_group="g")  # fmt: skip
    log.engine.ledger.append(lambda: [row])
    plans = planner(log)
    with pytest.raises(txmq.CorruptLogError, match="not inside the table"):
        plans.ranges({}, plans.latest())


# ---------------------------------------------------------------- times of commit
@both_kinds
def test_a_time_is_the_first_message_committed_then_or_later(log: CommitLog) -> None:
    for batch_id in range(3):
        send(log, batch_id, 4)
    plans = planner(log)
    times = {(p.queue_id, p.queue_offset): p.commit_timestamp for p in plans.ranges({}, plans.latest())}
    for moment in sorted(set(times.values())):
        for time in (moment, moment - timedelta(microseconds=1), moment + timedelta(microseconds=1)):
            found = plans.resolve("startingTimestamp", time)
            for queue_id in range(3):
                late = [offset for (q, offset), t in times.items() if q == queue_id and t >= time]
                assert found[("orders", queue_id)] == min(late, default=plans.latest()[("orders", queue_id)])


def test_a_time_before_the_log_is_its_start_and_a_later_one_its_end(log: CommitLog) -> None:
    send(log, 0, 4)
    plans = planner(log)
    assert plans.resolve("startingTimestamp", NOW) == {("orders", q): 0 for q in range(3)}
    future = datetime.now(timezone.utc) + timedelta(days=1)
    assert plans.resolve("startingTimestamp", future) == plans.resolve("o", "latest")


# ---------------------------------------------------------------- admission
queues = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))
positions = st.dictionaries(queues, st.integers(0, 1000), max_size=8)


@given(positions, positions, st.integers(1, 300))
def test_a_trigger_takes_at_most_its_limit_and_something_while_there_is_any(
    start: Positions, lags: Positions, limit: int
) -> None:
    latest = {queue: start.get(queue, 0) + lag for queue, lag in lags.items()}
    end = admit(start, latest, limit)
    taken = {queue: offset - start.get(queue, 0) for queue, offset in end.items()}
    assert sum(taken.values()) == min(limit, sum(lags.values()))
    assert all(0 <= n <= lags.get(queue, 0) for queue, n in taken.items())
    waiting = [queue for queue, lag in lags.items() if lag]
    if limit >= len(waiting):
        assert all(taken[queue] for queue in waiting)
    assert admit(start, latest, None) == {**start, **{q: n for q, n in latest.items() if n or q in start}}


def test_a_trigger_shares_in_proportion_to_what_waits() -> None:
    end = admit({}, {("a", 0): 1, ("a", 1): 300, ("a", 2): 700}, 100)
    assert end[("a", 0)] == 1
    assert end[("a", 1)] == pytest.approx(30, abs=1)
    assert end[("a", 2)] == pytest.approx(69, abs=1)


@given(st.integers(2, 8), st.integers(1, 7))
def test_no_queue_starves_when_the_limit_is_below_the_number_of_queues(count: int, limit: int) -> None:
    at: Positions = {("a", q): 0 for q in range(count)}
    latest = {("a", q): 1000 * (q == 0) + 3 for q in range(count)}
    for _ in range(3 * count):
        at = admit(at, latest, limit)
    assert all(at[("a", q)] > 0 for q in range(count))


def test_nothing_new_gives_the_same_offsets() -> None:
    start = {("a", 0): 3, ("b", 1): 0}
    assert admit(start, {("a", 0): 3, ("c", 0): 0}, 5) == start


# ---------------------------------------------------------------- cutting and splitting
@st.composite
def placed_ranges(draw: st.DrawFn, queue_id: int = 0, file_no: int = 0, offset: int = 0) -> PlacedRange:
    steps = draw(st.lists(st.tuples(st.integers(1, 400_000), st.integers(1, 300_000)), min_size=1, max_size=6))
    ranges, row = [], -1
    for gap, length in steps:
        ranges.append((row + gap, row + gap + length - 1))
        row = ranges[-1][1] + 1
    rows = RowRange(f"f{file_no}.parquet", "app:0", file_no, row + 5, tuple(ranges))
    return PlacedRange(rows, "orders", queue_id, offset, 1, "batch", "g", NOW + timedelta(seconds=file_no), 7)


@st.composite
def queues_of_ranges(draw: st.DrawFn) -> list[PlacedRange]:
    found: list[PlacedRange] = []
    file_no = 0
    for queue_id in range(draw(st.integers(1, 3))):
        offset = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 3))):
            found.append(draw(placed_ranges(queue_id, file_no, offset)))
            offset += found[-1].count
            file_no += 1
    return found


def row_spans(ranges: list[PlacedRange]) -> list[tuple[int, int, int, int, int]]:
    """(queue, offset, file, row, length) of every run of rows, with runs that follow each other joined."""
    spans: list[tuple[int, int, int, int, int]] = []
    for placed in sorted(ranges, key=lambda p: (p.queue_id, p.queue_offset)):
        offset = placed.queue_offset
        for first, last in placed.rows.ranges:
            n, file_no, queue_id = last - first + 1, placed.rows.file_no, placed.queue_id
            if spans:
                q, o, f, r, length = spans[-1]
                if (q, o + length, f, r + length) == (queue_id, offset, file_no, first):
                    spans[-1] = (q, o, f, r, length + n)
                    offset += n
                    continue
            spans.append((queue_id, offset, file_no, first, n))
            offset += n
    return spans


@given(placed_ranges(offset=7), st.data())
def test_cut_ranges_concatenate_to_the_whole(placed: PlacedRange, data: st.DataObject) -> None:
    stop = placed.queue_offset + placed.count
    at = sorted({*data.draw(st.lists(st.integers(7, stop), max_size=4)), 7, stop})
    parts = [placed.cut(a, b) for a, b in pairwise(at)]
    assert [p.count for p in parts] == [b - a for a, b in pairwise(at)]
    assert row_spans(parts) == row_spans([placed])


@given(queues_of_ranges(), st.none() | st.integers(1, 50), st.none() | st.integers(20_000, 10**6))
def test_any_split_concatenates_to_the_whole(
    ranges: list[PlacedRange], partitions_min: int | None, records_max: int | None
) -> None:
    parts = partition_ranges(ranges, False, partitions_min, records_max)
    assert row_spans([placed for part in parts for placed in part]) == row_spans(ranges)
    assert all(parts)
    if partitions_min is not None:
        assert len(parts) >= min(partitions_min, sum(placed.count for placed in ranges))
    if records_max is not None:
        assert all(sum(p.count for p in part) <= records_max for part in parts)


@given(queues_of_ranges())
def test_ordered_reads_each_queue_in_one_partition_in_order(ranges: list[PlacedRange]) -> None:
    parts = partition_ranges(ranges, ordered=True)
    assert [placed for part in parts for placed in part] == ranges
    assert len(parts) == len({placed.queue_id for placed in ranges})


@given(queues_of_ranges())
def test_no_block_of_row_groups_is_read_by_two_partitions(ranges: list[PlacedRange]) -> None:
    found: dict[tuple[int, int], int] = {}
    for i, part in enumerate(partition_ranges(ranges)):
        for placed in part:
            for first, last in placed.rows.ranges:
                assert found.setdefault((placed.rows.file_no, first // BLOCK_ROWS), i) == i
                assert last // BLOCK_ROWS == first // BLOCK_ROWS


# ---------------------------------------------------------------- options
ONE_BAR = r"has a single bar: RocketMQ separates tags by two, as in 'TagA \|\| TagB'"


@pytest.mark.parametrize(
    ("given_options", "streaming", "words"),
    [
        ({"subscribe": "orders"}, False, "option 'path' is missing"),
        ({"path": "log"}, False, "option 'subscribe' is missing"),
        ({**OPTIONS, "subscribePattern": "o.*"}, False, "'subscribe' and 'subscribePattern' contradict"),
        ({"path": "log", "subscribePattern": "o("}, False, "not a regular expression"),
        ({**OPTIONS, "startingOffset": "earliest"}, False, "did you mean 'startingOffsets'"),
        ({**OPTIONS, "topic": "orders"}, True, r"unknown option 'topic'.*did you mean 'subscribe'\?"),
        ({**OPTIONS, "group": "points"}, True, "did you mean 'consumerGroup'"),
        ({**OPTIONS, "startingOffsets": "earliest", "startingTimestamp": "1740816000000"}, True, "contradict"),
        ({**OPTIONS, "endingOffsets": "latest", "endingTimestamp": "1740816000000"}, False, "contradict"),
        ({**OPTIONS, "endingOffsets": "latest"}, True, "endingOffsets is for batch reads"),
        ({**OPTIONS, "endingTimestamp": "1740816000000"}, True, "endingTimestamp is for batch reads"),
        ({**OPTIONS, "maxOffsetsPerTrigger": "5"}, False, "is for streams"),
        ({**OPTIONS, "maxOffsetsPerTrigger": "0"}, True, "at least 1"),
        ({**OPTIONS, "limitFirstBatch": "true"}, False, "is for streams"),
        ({**OPTIONS, "limitFirstBatch": "true"}, True, "set maxOffsetsPerTrigger"),
        ({**OPTIONS, "minPartitions": "many"}, False, "not a whole number"),
        ({**OPTIONS, "failOnDataLoss": "no"}, False, "neither 'true' nor 'false'"),
        ({**OPTIONS, "ordered": "true", "minPartitions": "4"}, False, "contradict"),
        ({**OPTIONS, "consumerGroup": "billing"}, False, "consumerGroup is for streams"),
        ({**OPTIONS, "consumerGroup": "no group"}, True, "consumerGroup 'no group'"),
        ({**OPTIONS, "tags": "TagA || "}, False, "nor of the form"),
        *(({**OPTIONS, "tags": tags}, False, ONE_BAR) for tags in ("a | b", "a|b", "a ||| b", "a || b|c")),
        ({**OPTIONS, "startingOffsets": "latest"}, False, "'latest' cannot be used here"),
    ],
)
def test_options_that_cannot_be_used_are_refused(given_options: dict[str, str], streaming: bool, words: str) -> None:
    with pytest.raises((txmq.OptionError, ValueError), match=words):
        read_options(given_options, streaming)


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = read_options(OPTIONS, False), read_options(OPTIONS, True)
    assert (batch.starting, batch.ending, stream.starting) == ("earliest", "latest", "latest")
    assert batch.fail_on_data_loss
    assert pickle.loads(pickle.dumps(batch)) == batch


@pytest.mark.parametrize(
    ("text", "tags"), [("*", None), ("TagA", ("TagA",)), ("TagA||TagB", ("TagA", "TagB")), (" a || a ", ("a",))]
)
def test_tags_are_read_as_rocketmq_writes_them(text: str, tags: tuple[str, ...] | None) -> None:
    assert parse_tags(text) == tags
