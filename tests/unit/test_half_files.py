"""Half files: the rules that a message must keep, how rows are laid out, and how they are read back."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark._core.log.half import FOOTER_COLUMNS
from rmq_spark._core.log.half_writer import HALF_FILE_BYTES_MAX
from rmq_spark._core.log.message_columns import require_message_columns
from rmq_spark._core.storage.file_system import require_path
from rmq_spark._core.storage.half_file_reader import RelocatingReader
from rmq_spark._core.storage.row_range import MATCHES
from rmq_spark.errors import CorruptLogError, LostFileError, MessageError, TopicNotFoundError
from tests.support.half_batches import header_of
from tests.support.inside import (
    HALF_SCHEMA,
    PROPERTIES,
    HalfFile,
    HalfWriter,
    RowRange,
    parse_selector,
    read_range,
    runs,
)
from tests.support.limits import Limit, limited

LOCAL = pafs.LocalFileSystem()
TOPICS = {"orders": 4, "points": 3, "one": 1}
MIB = 1024 * 1024


def writer(key: str | None = None, topic: str | None = "orders", batch_id: int = 0, **more: Any) -> HalfWriter:
    per = "key" if key else "batch"
    return HalfWriter(header_of(batch_id, per=per), TOPICS, topic, key, **more)


def write(
    folder: Path, columns: dict[str, Any] | pa.Table, partition: int = 0, with_writer: HalfWriter | None = None
) -> list[HalfFile]:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    return (with_writer or writer()).write(LOCAL, str(folder), partition, table.to_batches())


def stored(folder: Path, file: HalfFile) -> pa.Table:
    return pq.read_table(folder / file.data.path)


def maps(values: Sequence[Any]) -> pa.Array:
    return pa.array(values, PROPERTIES)


# ---------------------------------------------------------------- what is refused, and nothing written
OUTSIDE = ("orders/../x", "../x", "a/b", "..", "\u043erders", "\uff4frders", "orders\n")
"""Names with characters that no topic may have: the two letters o are a Cyrillic and a full-width one."""


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param({"tags": ["a"]}, "'body'.*missing", id="no body"),
        pytest.param({"body": [b"x", None]}, "the body is null in 1 message ", id="null body"),
        pytest.param({"body": pa.nulls(2)}, "the body is null in 2 messages ", id="only null bodies"),
        pytest.param({"body": [b"x" * (4 * MIB + 1)]}, f"{4 * MIB + 1} bytes", id="4 MiB and 1"),
        pytest.param({"body": ["é" * (2 * MIB) + "x"]}, f"{4 * MIB + 1} bytes", id="4 MiB and 1 in UTF-8"),
        pytest.param({"body": [1]}, "'body' has type int64", id="body is a number"),
        pytest.param({"body": [["x"]]}, "'body' has type list", id="body is a list"),
        pytest.param({"body": [b"x"], "tgas": ["a"]}, "'tgas'.*did you mean 'tags'", id="unknown column"),
        pytest.param({"body": [b"x"], "queue": [1]}, "'queue'.*did you mean 'queue_id'", id="another unknown column"),
        pytest.param({"body": [b"x"], "zzz": [1]}, "'zzz'.*known are", id="nothing like it"),
        pytest.param({"body": [b"x"], "tags": [5]}, "'tags' has type int64", id="tags are numbers"),
        pytest.param({"body": [b"x"], "topic": [5]}, "'topic' has type int64", id="topic is a number"),
        pytest.param({"body": [b"x"], "sharding_key": [1.5]}, "'sharding_key' has type double", id="sharding key"),
        pytest.param({"body": [b"x"], "keys": [7]}, "'keys' has type int64", id="keys are numbers"),
        pytest.param({"body": [b"x"], "keys": [[7]]}, "'keys' has type list", id="keys are lists of numbers"),
        pytest.param({"body": [b"x"], "keys": [["a", None]]}, "array of keys has a null", id="a null among keys"),
        pytest.param({"body": [b"x"], "queue_id": ["1"]}, "'queue_id' has type string", id="queue_id is a string"),
        pytest.param({"body": [b"x"], "queue_id": [1.0]}, "'queue_id' has type double", id="queue_id is a double"),
        pytest.param({"body": [b"x"], "queue_id": [2**40]}, "'queue_id'", id="queue_id is too long"),
        pytest.param({"body": [b"x"], "queue_id": [4]}, "queue_id 4.*0 to 3", id="queue_id past the last"),
        pytest.param({"body": [b"x", b"y"], "queue_id": [0, -1]}, "queue_id -1.*0 to 3", id="negative queue_id"),
        pytest.param({"body": [b"x"], "properties": [5]}, "'properties' has type int64", id="properties: a number"),
        pytest.param({"body": [b"x"], "properties": [{"a": "b"}]}, "'properties' has type struct", id="a struct"),
        pytest.param({"body": [b"x"], "born_timestamp": ["now"]}, "'born_timestamp' has type string", id="born"),
        pytest.param({"body": [b"x"], "born_timestamp": [date(2026, 1, 1)]}, "'born_timestamp' has type", id="a date"),
        pytest.param({"body": [b"x"], "properties": maps([[("KEYS", "1")]])}, "'KEYS' is reserved", id="reserved"),
        pytest.param({"body": [b"x"], "properties": maps([[("__RMQ.x", "1")]])}, "reserved", id="reserved prefix"),
        pytest.param({"body": [b"x"], "properties": maps([[("", "1")]])}, "empty name", id="empty property name"),
        pytest.param({"body": [b"x"], "properties": maps([[("a", None)]])}, "null value", id="null property value"),
        pytest.param(
            {"body": [b"x"], "properties": maps([[("a", "x" * 32 * 1024)]])}, "32769 bytes", id="32 KiB and 1"
        ),
        pytest.param(
            {"body": [b"x"] * 2, "properties": maps([[], [("é" * 1024, "x" * 30 * 1024 + "y")]])},
            "32769",
            id="in UTF-8",
        ),
        pytest.param(
            {"body": [b"x"], "properties": maps([[("CHECK_IMMUNITY_TIME_IN_SECONDS", "6s")]])}, "seconds", id="immunity"
        ),
        *(pytest.param({"body": [b"x"], "topic": [name]}, "outside", id=ascii(name)) for name in OUTSIDE),
        pytest.param({"body": [b"x"], "topic": [""]}, "empty", id="empty topic"),
        pytest.param({"body": [b"x"], "topic": ["x" * 128]}, "128 characters", id="long topic"),
        pytest.param({"body": [b"x"], "topic": ["RMQ_SYS_TRANS_HALF_TOPIC"]}, "RocketMQ's own", id="system topic"),
        pytest.param({"body": [b"x"], "topic": ["%RETRY%group"]}, "RocketMQ's own", id="retry topic"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        write(tmp_path, columns)
    assert list(tmp_path.iterdir()) == []


def test_properties_hidden_under_null_maps_do_not_count(tmp_path: Path) -> None:
    """As a column has that was computed by a condition."""
    names, values = pa.array(["a", "b"]), pa.array(["x" * 40_000, "1"])
    hidden = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), names, values, mask=pa.array([True, False]))
    (file,) = write(tmp_path, {"body": [b"x", b"y"], "properties": hidden}, with_writer=writer(topic="one"))
    assert stored(tmp_path, file)["properties"].to_pylist() == [None, [("b", "1")]]


def test_properties_of_a_slice_are_its_own(tmp_path: Path) -> None:
    big, small = [("a", "x" * 40_000)], [("b", "1"), ("c", "2")]
    table = pa.table({"body": [b"0", b"1", b"2", b"3"], "properties": maps([big, small, None, []])})
    (file,) = write(tmp_path, table.slice(1), with_writer=writer(topic="one"))
    assert stored(tmp_path, file)["properties"].to_pylist() == [small, None, []]
    with pytest.raises(MessageError, match="40001"):
        write(tmp_path, table.slice(0, 1))


def test_each_message_has_32_kib_of_properties(tmp_path: Path) -> None:
    full = [("a", "x" * (32 * 1024 - 1))]
    (file,) = write(tmp_path, {"body": [b"x"] * 3, "properties": maps([full] * 3)}, with_writer=writer(topic="one"))
    assert file.data.rows == 3
    with pytest.raises(MessageError, match="32769"):
        write(tmp_path, {"body": [b"x"] * 3, "properties": maps([full, full, [("ab", full[0][1])]])})


@pytest.mark.long  # 5 GB of memory
def test_more_than_2_gb_in_one_column_of_a_batch_are_cut(tmp_path: Path) -> None:
    """Spark passes such a batch when its session has Arrow's large types."""
    count = 2_200
    offsets = pa.array(range(0, (count + 1) * MIB, MIB), pa.int64()).buffers()[1]
    bodies = pa.Array.from_buffers(pa.large_binary(), count, [None, offsets, pa.py_buffer(bytes(count * MIB))])
    files = write(tmp_path, pa.table({"body": bodies}))
    rows = [pq.read_metadata(tmp_path / file.data.path).num_rows for file in files]
    assert sum(rows) == count
    assert max(rows) < 2 * HALF_FILE_BYTES_MAX // MIB


def test_a_batch_that_is_cut_keeps_its_messages_and_their_order(tmp_path: Path, limit: Limit) -> None:
    limit(ARROW_BYTES_MAX=1000)
    bodies = [str(number) * (1 + number % 7) for number in range(500)]
    for column in (pa.array(bodies, pa.large_string()), pa.array(bodies)):
        (file,) = write(tmp_path, pa.table({"body": column, "queue_id": pa.array([0] * 500, pa.int32())}))
        assert [body.decode() for body in stored(tmp_path, file)["body"].to_pylist()] == bodies


def test_a_body_of_exactly_4_mib_is_kept(tmp_path: Path) -> None:
    (file,) = write(tmp_path, {"body": [b"x" * (4 * MIB)]})
    assert len(stored(tmp_path, file)["body"][0].as_py()) == 4 * MIB


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"k": pa.array(["a", None])}, "'k', the transactionKey, is null in 1 message "),
        ({"k": pa.array(["x" * 256, "a"])}, "256 characters"),
        ({"k": pa.array([["a"], ["b"]])}, "'k' has type list"),
        ({"k": pa.array([b"\xff", b"a"])}, "'k'"),
        ({"k": pa.array([{"a": 1}, {"a": 2}])}, "'k' has type struct"),
        ({}, "'k' is not a column"),
    ],
)
def test_a_transaction_key_must_be_there_short_and_plain(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(MessageError, match=words):
        write(tmp_path, {"body": ["1", "2"], **columns}, with_writer=writer(key="k"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keys", [[7, 8], ["x" * 255, "y"], [True, False], [date(2026, 1, 2), date(2026, 1, 3)]])
def test_a_transaction_key_may_be_anything_that_has_a_text(tmp_path: Path, keys: list[Any]) -> None:
    (file,) = write(tmp_path, {"body": ["1", "2"], "k": keys}, with_writer=writer(key="k", topic="one"))
    expected = [str(k).lower() if isinstance(k, bool) else str(k) for k in keys]
    assert stored(tmp_path, file)["transaction_key"].to_pylist() == expected


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], names=["body", "body"])
    with pytest.raises(MessageError, match=r"'body'.*twice"):
        write(tmp_path, table)


def test_a_topic_that_nobody_made_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(TopicNotFoundError, match=r"'order'.*did you mean 'orders'.*create_topic"):
        write(tmp_path, {"body": ["1"], "topic": ["order"]})
    with pytest.raises(MessageError, match="no topic"):
        write(tmp_path, {"body": ["1"], "topic": pa.nulls(1, pa.string())}, with_writer=writer(topic=None))
    with pytest.raises(MessageError, match="neither"):
        write(tmp_path, {"body": ["1"]}, with_writer=writer(topic=None))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- what is stored
def test_an_empty_partition_writes_nothing(tmp_path: Path) -> None:
    assert write(tmp_path, pa.table({"body": pa.array([], pa.binary())})) == []
    assert writer().write(LOCAL, str(tmp_path), 0, []) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["deliver_at", "born_timestamp"])
def test_times_without_a_time_zone_are_refused(tmp_path: Path, name: str) -> None:
    """They were taken for UTC: a reminder came nine hours late in Tokyo. A message was refused for the same."""
    times = {"body": ["a", "b"], name: pa.array([None, datetime(2026, 1, 2, 3)], pa.timestamp("us"))}
    with pytest.raises(MessageError, match=f"column '{name}' has times without a time zone .*assume_timezone"):
        write(tmp_path, pa.table(times))
    (file,) = write(tmp_path, pa.table({"body": ["a"], name: pa.array([None], pa.timestamp("us"))}))
    assert file.rows == 1


def test_every_column_is_stored_as_it_was_given(tmp_path: Path) -> None:
    born = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
    columns = {
        "body": pa.array(["ä", "b"], pa.large_string()),
        "topic": pa.array(["one", None]),
        "tags": pa.array(["t", None]).dictionary_encode(),
        "keys": pa.array([["k1", "k2"], None]),
        "sharding_key": pa.array([None, "s"]),
        "queue_id": pa.array([0, None], pa.int16()),
        "properties": maps([[("a", "b")], None]),
        "born_timestamp": pa.array([born, None], pa.timestamp("ns", "Europe/Paris")),
    }
    (file,) = write(tmp_path, columns, with_writer=writer(topic="one"))
    table = stored(tmp_path, file)
    assert table.schema.names == HALF_SCHEMA.names
    rows = table.to_pylist()
    assert [r["body"] for r in rows] == ["ä".encode(), b"b"]
    assert [r["topic"] for r in rows] == ["one", "one"]
    assert [r["tags"] for r in rows] == ["t", None]
    assert [r["keys"] for r in rows] == ["k1 k2", None]
    assert [r["sharding_key"] for r in rows] == [None, "s"]
    assert [r["properties"] for r in rows] == [[("a", "b")], None]
    assert rows[0]["born_timestamp"] == born
    assert rows[1]["born_timestamp"] is not None
    assert [r["row_no"] for r in rows] == [0, 1]
    assert {r["half_id"] for r in rows} == {"app:0"}
    header = {(r["app_id"], r["batch_id"], r["transaction_per"], r["producer_group"]) for r in rows}
    assert header == {("app", 0, "batch", "group")}


sends = st.lists(
    st.tuples(
        st.sampled_from(("orders", "points", "one")),
        st.one_of(st.none(), st.sampled_from(("a", "b", "c", "ü"))),
        st.one_of(st.none(), st.just(0)),
    ),
    min_size=1,
    max_size=60,
)


@given(sends, st.integers(0, 5), st.integers(0, 9), st.integers(1, 4))
def test_rows_stand_by_topic_and_queue_in_the_order_they_came(
    tmp_path_factory: pytest.TempPathFactory, sent: list[Any], partition: int, batch_id: int, chunks: int
) -> None:
    folder = tmp_path_factory.mktemp("half")
    topics, shards, queues = zip(*sent, strict=True)
    table = pa.table(
        {
            "body": [f"{i}" for i in range(len(sent))],
            "topic": topics,
            "sharding_key": pa.array(shards, pa.string()),
            "queue_id": pa.array(queues, pa.int32()),
        }
    )
    size = -(-len(sent) // chunks)
    batches = [b for i in range(chunks) for b in table.slice(i * size, size).to_batches()]
    (file,) = writer(batch_id=batch_id).write(LOCAL, str(folder), partition, batches)
    rows = stored(folder, file).to_pylist()
    assert [r["row_no"] for r in rows] == list(range(len(sent)))
    assert {r["file_no"] for r in rows} == {file.file_no}
    order = [(r["topic"], r["queue_id"], int(r["body"])) for r in rows]
    assert order == sorted(order)
    assert sorted(o[2] for o in order) == list(range(len(sent)))
    found, first = [], 0
    for (topic, queue_id), run in groupby(order, key=lambda o: o[:2]):
        count = len(list(run))
        found.append((topic, queue_id, first, first + count - 1))
        first += count
    assert [(s.topic, s.queue_id, s.first, s.last) for s in file.segments] == found
    by_shard: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        topic, shard, chosen = sent[int(row["body"])]
        assert row["topic"] == topic
        assert 0 <= row["queue_id"] < TOPICS[topic]
        assert chosen in (None, row["queue_id"])
        if shard is not None and chosen is None:
            by_shard.setdefault((topic, shard), set()).add(row["queue_id"])
    assert all(len(queues) == 1 for queues in by_shard.values())


def test_a_sharding_key_keeps_its_queue_over_files_and_batches(tmp_path: Path) -> None:
    queues: dict[str, set[int]] = {}
    for batch_id in range(4):
        for partition in range(3):
            columns = {"body": list("abcdefgh"), "sharding_key": [f"k{i * (partition + 1) % 8}" for i in range(8)]}
            (file,) = write(tmp_path, columns, partition, writer(batch_id=batch_id))
            for row in stored(tmp_path, file).select(["sharding_key", "queue_id"]).to_pylist():
                queues.setdefault(row["sharding_key"], set()).add(row["queue_id"])
    assert all(len(q) == 1 for q in queues.values())
    assert len(set.union(*queues.values())) > 1


@pytest.mark.parametrize(("rows", "partitions", "batches"), [(400, 1, 1), (1, 40, 1), (1, 1, 40), (3, 8, 5)])
def test_messages_without_a_key_spread_evenly(tmp_path: Path, rows: int, partitions: int, batches: int) -> None:
    counts = dict.fromkeys(range(TOPICS["orders"]), 0)
    for batch_id in range(batches):
        for partition in range(partitions):
            (file,) = write(tmp_path, {"body": ["x"] * rows}, partition, writer(batch_id=batch_id))
            for s in file.segments:
                counts[s.queue_id] += s.last - s.first + 1
    total = rows * partitions * batches
    assert max(counts.values()) - min(counts.values()) <= max(1, total // 10)


def test_a_large_partition_becomes_several_files(tmp_path: Path, limit: Limit) -> None:
    limit(HALF_FILE_BYTES_MAX=2_000)
    batches = pa.table({"body": [f"{i:0100}" for i in range(100)]}).to_batches(max_chunksize=10)
    files = writer().write(LOCAL, str(tmp_path), 3, batches)
    assert len(files) > 3
    assert [f.file_no for f in files] == [3000 + i for i in range(len(files))]
    seen = [int(b) for f in files for b in stored(tmp_path, f)["body"].to_pylist()]
    assert sorted(seen) == list(range(100))
    assert all(pc.unique(stored(tmp_path, f)["file_no"]).to_pylist() == [f.file_no] for f in files)
    spread = {s.queue_id: 0 for f in files for s in f.segments}
    assert set(spread) == set(range(4))
    limit(FILES_PER_PARTITION_MAX=3)
    with pytest.raises(MessageError, match=r"partition 3 holds more than 3 files of .*: repartition the batch"):
        writer().write(LOCAL, str(tmp_path), 3, batches)


@pytest.mark.parametrize(
    ("body", "compressed"),
    [
        (lambda i: random.Random(i).randbytes(300), False),
        (lambda i: b"", False),
        (lambda i: f'{{"order_id": {i}, "state": "paid", "currency": "EUR"}}'.encode(), True),
        (lambda i: b"x" * 5 + random.Random(i).randbytes(300) if i % 1_000 else b"x" * 100_000, False),
    ],
)
def test_bodies_are_compressed_where_that_pays(tmp_path: Path, body: Callable[[int], bytes], compressed: bool) -> None:
    columns = {
        "body": [body(i) for i in range(3_000)],
        "keys": [f"order-{i}" for i in range(3_000)],
        "properties": maps([[("region", "eu")]] * 3_000),
        "queue_id": [0] * 3_000,
    }
    (file,) = write(tmp_path, columns)
    group = pq.ParquetFile(tmp_path / file.data.path).metadata.row_group(0)
    codecs = {c.path_in_schema: c.compression for c in map(group.column, range(group.num_columns))}
    raw = {name for name, codec in codecs.items() if codec == "UNCOMPRESSED"}
    assert raw == {"row_no", "born_timestamp", *(() if compressed else ("body",))}
    encodings = {c.path_in_schema: c.encodings for c in map(group.column, range(group.num_columns))}
    assert {name for name, used in encodings.items() if "DELTA_BINARY_PACKED" in used} == {"row_no", "born_timestamp"}
    assert stored(tmp_path, file)["body"].to_pylist() == columns["body"]


def test_statistics_are_those_of_the_file(tmp_path: Path) -> None:
    columns = {"body": list("abcde"), "topic": ["orders", "points", "orders", "one", "points"]}
    (file,) = write(tmp_path, columns)
    table = stored(tmp_path, file)
    stats = json.loads(file.data.stats)
    assert stats["numRecords"] == file.data.rows == 5
    assert file.data.size_bytes == (tmp_path / file.data.path).stat().st_size
    bounds = pc.min_max(table["half_id"]).as_py()
    assert (stats["minValues"]["half_id"], stats["maxValues"]["half_id"]) == (bounds["min"], bounds["max"])
    assert stats["nullCount"]["half_id"] == 0
    footer = pq.ParquetFile(tmp_path / file.data.path).metadata.row_group(0)
    for i in range(footer.num_columns):
        column = footer.column(i)
        if column.path_in_schema in ("half_id", *FOOTER_COLUMNS):
            bounds = pc.min_max(table[column.path_in_schema]).as_py()
            assert column.statistics is not None
            assert (column.statistics.min, column.statistics.max) == (bounds["min"], bounds["max"])


# ---------------------------------------------------------------- reading rows back
def read(folder: Path, path: str, file: HalfFile, ranges: Any, columns: Sequence[str]) -> list[dict[str, Any]]:
    wanted = RowRange(path, file.half_id, file.file_no, file.data.rows, tuple(ranges))
    found: list[dict[str, Any]] = []
    for position, part in read_range(LOCAL, str(folder), wanted, columns):
        assert position == len(found)
        assert part.schema.names == list(columns)
        found += part.to_pylist()
    return found


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_reads_by_position_and_by_address_agree(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("half")
    rows = data.draw(st.integers(1, 50), "rows")
    group = data.draw(st.integers(1, 60), "rows of a row group")
    mask = bytes(data.draw(st.lists(st.sampled_from((0, 1)), min_size=rows, max_size=rows).filter(any), "mask"))
    with limited(ROW_GROUP_ROWS=group):
        (file,) = write(folder, {"body": [f"{i}" for i in range(rows)], "tags": [f"t{i}" for i in range(rows)]})
        (stranger,) = write(folder, {"body": ["stranger"] * 3}, with_writer=writer(batch_id=1))
    whole = stored(folder, file)
    # Somebody's OPTIMIZE: rows of several files in one, in any order, in other row groups.
    together = pa.concat_tables([whole, stored(folder, stranger)])
    order = data.draw(st.permutations(range(together.num_rows)), "order")
    pq.write_table(together.take(pa.array(order)), folder / "part-0.parquet", row_group_size=7)

    ranges = list(runs(mask))
    columns = data.draw(st.sampled_from([["body"], ["row_no", "body"], ["tags", "properties"], ["row_no"]]), "columns")
    expected = [r for r, bit in zip(whole.select(columns).to_pylist(), mask, strict=True) if bit]
    assert read(folder, file.data.path, file, ranges, columns) == expected
    assert read(folder, "part-0.parquet", file, ranges, columns) == expected


class CountedFiles:
    """A file system that counts what is read of its files."""

    def __init__(self) -> None:
        self.bytes = 0

    def open_input_file(self, path: str) -> pa.PythonFile:
        count = self

        class Counted(io.FileIO):
            def read(self, size: int = -1) -> bytes:  # type: ignore[override]
                found = super().read(size) or b""
                count.bytes += len(found)
                return found

        return pa.PythonFile(Counted(path), mode="r")


def bytes_read(
    folder: Path, file: HalfFile, selector: str | None = None, rows: tuple[int, int] | None = None, path: str = ""
) -> tuple[int, int]:
    """Bytes read of a half file (all rows of it, where it was written, unless told otherwise), and messages kept."""
    counted, kept = CountedFiles(), 0
    where = None if selector is None else parse_selector(selector).at(0)
    ranges = (rows or (0, file.data.rows - 1),)
    wanted = RowRange(path or file.data.path, file.half_id, file.file_no, file.data.rows, ranges)
    for _, part in read_range(counted, str(folder), wanted, ["body", "keys"], where):  # type: ignore[arg-type]
        kept += part.num_rows if where is None else pc.sum(part[MATCHES]).as_py()
    return counted.bytes, kept


def test_a_file_as_written_is_read_by_position(tmp_path: Path, limit: Limit) -> None:
    limit(ROW_GROUP_ROWS=100)
    (file,) = write(tmp_path, {"body": [random.Random(i).randbytes(2_000) for i in range(1_000)]})
    pq.write_table(stored(tmp_path, file), tmp_path / "part-0.parquet", row_group_size=100)
    read_bytes, rows = bytes_read(tmp_path, file, rows=(150, 249))
    assert rows == 100
    assert 2 * 100 * 2_000 < read_bytes < 3 * 100 * 2_000, "two row groups of ten hold the rows"
    read_bytes, rows = bytes_read(tmp_path, file, rows=(150, 249), path="part-0.parquet")
    assert rows == 100
    assert read_bytes > 1_000 * 2_000, "a file that somebody else wrote is searched for the rows"


def test_a_filter_fetches_bodies_only_where_it_keeps_something(tmp_path: Path, limit: Limit) -> None:
    limit(ROW_GROUP_ROWS=500)
    rows = 4_000
    columns = {
        "body": [random.Random(i).randbytes(2_000) for i in range(rows)],
        "tags": ["rare" if i < 500 else "often" for i in range(rows)],
        "properties": maps([[("price", str(i))] for i in range(rows)]),
        "queue_id": [0] * rows,
    }
    (file,) = write(tmp_path, columns)
    everything, all_rows = bytes_read(tmp_path, file)
    assert all_rows == rows
    assert everything > rows * 2_000
    for selector, kept, share in (
        ("TAGS = 'none'", 0, 0.06),
        ("TAGS = 'rare'", 500, 0.18),
        ("price < 500", 500, 0.22),
        ("price >= 0", rows, 1.1),
    ):
        read_bytes, found = bytes_read(tmp_path, file, selector)
        assert found == kept
        assert read_bytes < everything * share, selector


def test_rows_that_a_file_does_not_hold_are_an_error(tmp_path: Path) -> None:
    (file,) = write(tmp_path, {"body": ["x"] * 4})
    with pytest.raises(CorruptLogError, match="which has 4 rows"):
        read(tmp_path, file.data.path, file, [(2, 4)], ["body"])
    with pytest.raises(FileNotFoundError):
        read(tmp_path, "half-gone.parquet", file, [(0, 0)], ["body"])
    pq.write_table(stored(tmp_path, file).slice(1), tmp_path / "part-0.parquet")
    with pytest.raises(CorruptLogError, match="holds 1 of the 2 rows"):
        read(tmp_path, "part-0.parquet", file, [(0, 1)], ["body"])
    pq.write_table(pa.concat_tables([stored(tmp_path, file)] * 2), tmp_path / "part-1.parquet")
    with pytest.raises(CorruptLogError):
        read(tmp_path, "part-1.parquet", file, [(0, 1)], ["body"])


@pytest.mark.parametrize(
    "path", [*"../x.parquet a/../../x /etc/passwd file:///etc/passwd s3://b/x .. a//b".split(), "a b", "a\n", "", None]
)
def test_a_path_outside_the_table_is_not_read(path: object) -> None:
    with pytest.raises(CorruptLogError, match="not inside the table"):
        require_path(path, "half")


# ---------------------------------------------------------------- files that somebody rewrote
def test_a_file_that_goes_while_it_is_read_is_read_on_from_its_new_place() -> None:
    rows = [pa.table({"row_no": list(range(first, first + 3))}) for first in (0, 3, 6)]
    asked: list[str] = []

    def read(wanted: RowRange, columns: Sequence[str], where: Any) -> Iterator[tuple[int, pa.Table]]:
        asked.append(wanted.path)
        if wanted.path == "new.parquet":
            yield 0, pa.concat_tables(rows)  # a rewritten file is read by address, in one part
            return
        yield 0, rows[0]
        raise FileNotFoundError(wanted.path)

    files = RelocatingReader(read, lambda half_id, file_no: "new.parquet")
    wanted = RowRange("old.parquet", "app:0", 0, 9, ((0, 8),))
    parts = list(files.read(wanted, ["row_no"]))
    assert {position: part["row_no"].to_pylist() for position, part in parts} == {0: [0, 1, 2], 3: [3, 4, 5, 6, 7, 8]}
    list(files.read(wanted, ["row_no"]))
    assert asked == ["old.parquet", "new.parquet", "new.parquet"], "the new place is remembered"


def test_a_file_that_nobody_finds_again_is_an_error() -> None:
    def read(wanted: RowRange, columns: Sequence[str], where: Any) -> Iterator[tuple[int, pa.Table]]:
        raise FileNotFoundError(wanted.path)
        yield

    def locate(half_id: str, file_no: int) -> str:
        raise LostFileError("table half was set back")

    with pytest.raises(LostFileError, match="set back"):
        list(RelocatingReader(read, locate).read(RowRange("old.parquet", "app:0", 0, 9, ((0, 8),)), ["row_no"]))


def test_a_misspelt_transaction_key_is_named_and_not_another_column() -> None:
    with pytest.raises(MessageError, match=r"transactionKey='order_di' is not a column.*'order_id'"):
        require_message_columns(["body", "order_id"], "orders", "order_di")
