"""The messages table: an exact prefix of what op placed, whoever drains, and as often as one likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from rmq_spark import CommitLog
from rmq_spark._core.messages import message_files as message_files
from rmq_spark._core.storage.data_file import FEW_ROWS
from rmq_spark.errors import CorruptLogError
from tests.support.half_batches import (
    another,
    commit,
    decide_one,
    fill_with_pieces,
    make_log,
    merge_op_files,
    move_half,
    paths_of,
    pending,
    prepare,
    roll_back,
    rows_of,
    split,
)
from tests.support.inside import MESSAGES_SCHEMA, PROPERTIES, SOURCE_SCHEMA, Change, DataFile, Table, drain
from tests.support.limits import Limit
from tests.support.meanwhile import at, seen_at

pytestmark = pytest.mark.log("memory", "delta", orders=2, points=1)


def drained(log: CommitLog, topic: str | None = None) -> pa.Table:
    """What the table messages holds, by topic, queue and offset."""
    rows = rows_of(another(log).engine.messages_table)
    rows = rows if topic is None else rows.filter(pc.equal(rows["topic"], topic))
    return rows.sort_by([(c, "ascending") for c in ("topic", "queue_id", "queue_offset")])


def require_same(log: CommitLog) -> None:
    """Every topic's messages are in the table as log.read has them."""
    for topic in log.topics():
        read = log.read(topic)
        assert drained(log, topic).select(SOURCE_SCHEMA.names).to_pylist() == read.to_pylist()


def test_a_drain_copies_what_is_placed_and_nothing_else(log: CommitLog) -> None:
    assert log.drain() == log.refresh()
    assert drained(log).num_rows == 0
    for i in range(3):
        commit(log, prepare(log, i))
    commit(log, prepare(log, 3, topic="points", per="message"))
    roll_back(log, prepare(log, 4))
    record = prepare(log, 5, 10, per="message")
    some, _ = split(pending(log, record), every=3)
    decide_one(log.engine, record, 1, commit=some)
    assert log.drain() == log.refresh()
    require_same(log)
    assert drained(log).schema == MESSAGES_SCHEMA
    assert log.drain() == log.refresh()
    require_same(log)


def test_messages_say_where_they_come_from(log: CommitLog) -> None:
    record = prepare(log, 0, {"body": ["a", "b", "c"], "order": ["1", "2", "2"]}, per="key", key="order", partitions=2)
    commit(log, record)
    log.drain()
    rows = drained(log).to_pylist()
    assert sorted((r["transaction_key"], r["body"]) for r in rows) == [("1", b"a"), ("2", b"b"), ("2", b"c")]
    assert {(r["half_id"], r["attempt"], r["transaction_per"]) for r in rows} == {("app:0", 1, "key")}
    assert len({(r["file_no"], r["row_no"]) for r in rows}) == 3
    assert {r["op_version"] for r in rows} == {log.version}


def test_columns_that_hardly_repeat_have_no_dictionary_in_a_large_file(tmp_path: Path) -> None:
    log = make_log("delta", tmp_path / "log", orders=1)
    n = FEW_ROWS + 1
    columns = {
        "body": [f"{i}" for i in range(n)],
        "keys": [f"k{i}" for i in range(n)],
        "tags": ["a", "b", "a"] * (n // 3),
        "properties": pa.array([[("region", f"{i}")] for i in range(n)], PROPERTIES),
    }
    commit(log, prepare(log, 0, columns))
    log.drain()
    (path,) = (tmp_path / "log" / "messages").glob("*.parquet")
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    plain = {chunk.path_in_schema for chunk in chunks if not chunk.has_dictionary_page}
    assert plain == {"body", "keys", "properties.key_value.value", "queue_offset", "msg_id", "row_no"}


def test_a_drain_goes_on_where_the_last_one_ended(log: CommitLog) -> None:
    for i in range(4):
        commit(log, prepare(log, i))
        log.drain()
        require_same(log)
    assert len(paths_of(another(log).engine.messages_table)) == 4
    with seen_at("file written") as written:
        log.drain()
    assert written == [], "there is nothing to copy"


@pytest.mark.parametrize(("op_rows", "op_bytes"), [(3, 1 << 30), (1_000, 20_000)])
def test_a_backlog_is_drained_in_steps(log: CommitLog, op_rows: int, op_bytes: int, limit: Limit) -> None:
    limit(OP_ROWS_MAX=op_rows, OP_READ_BYTES_MAX=op_bytes, STEP_MESSAGES_MAX=12, MESSAGES_FILE_BYTES_MAX=500)
    log.engine.compaction.is_on = False
    for i in range(9):
        commit(log, prepare(log, i, topic="points" if i % 4 == 1 else "orders"))
        if i in (3, 6):
            merge_op_files(log)
    commit(log, prepare(log, 9, 30, partitions=3))
    log.drain()
    require_same(log)
    for file in another(log).engine.messages_table.actions()["path"].to_pylist():
        rows = log.engine.messages_table.read([file])
        assert len(rows["topic"].unique()) == 1
        assert rows.equals(rows.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")]))


def test_files_of_op_that_overlap_are_drained_by_version(log: CommitLog, limit: Limit) -> None:
    """A merge lost to a writer may leave files whose versions lie between each other's; each holds a part."""
    limit(OP_ROWS_MAX=2)
    log.engine.compaction.is_on = False
    for i in range(6):
        commit(log, prepare(log, i))
    table = another(log).engine.op_table
    table.refresh()
    paths = table.actions().sort_by("min.version")["path"].to_pylist()
    for several in (paths[0::2], paths[1::2]):
        merged = table.write(table.read(several).sort_by("version"))
        change = Change(add=[merged], remove=several, data_change=False)
        table.compare_and_set(lambda _, c=change: c, lambda _: True)
    log.drain()
    require_same(log)


def test_at_every_step_the_table_is_a_prefix_of_op(log: CommitLog, limit: Limit) -> None:
    limit(STEP_MESSAGES_MAX=5)
    for i in range(4):
        commit(log, prepare(log, i, topic="points" if i % 2 else "orders"))
    seen: list[set[int]] = []

    class Looked(drain.Drainer):
        def _step(self, table: Table, position: int, until: int) -> bool:
            more = super()._step(table, position, until)
            seen.append(set(drained(log)["op_version"].to_pylist()))
            return more

    Looked(another(log).engine).run()
    versions = sorted(seen[-1])
    assert seen == [set(versions[:n]) for n in (1, 2, 3, 4)]


def on_disk(log: CommitLog) -> set[str]:
    """The Parquet files in the folder of messages, named by the table or not."""
    table = log.engine.messages_table
    infos = table.fs.get_file_info(pafs.FileSelector(table.folder))
    return {info.base_name for info in infos if info.base_name.endswith(".parquet")}


def test_many_drainers_copy_each_message_once(log: CommitLog) -> None:
    for i in range(3):
        commit(log, prepare(log, i))
    mine = drain.Drainer(another(log).engine)
    with at("file written", drain.Drainer(another(log).engine).run, table="messages"):
        assert mine.run() == log.refresh()
    require_same(log)
    live = set(paths_of(another(log).engine.messages_table))
    assert on_disk(log) == live, "the loser's files are deleted at once"


def test_files_of_a_commit_that_may_have_landed_are_kept(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    mine = another(log)

    def overtaken() -> None:
        drain.Drainer(another(log).engine).run()
        raise TimeoutError("nobody knows")

    with at("commit begins", overtaken, table="messages"):
        drain.Drainer(mine.engine).run()
    require_same(log)
    assert len(on_disk(log)) == 2


class Forgetful(drain.Drainer):
    """Loses a file."""

    def _write(self, table: Table, rows: pa.Table) -> Sequence[DataFile]:
        return super()._write(table, rows)[1:]


def test_files_that_lack_messages_are_not_committed(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    with pytest.raises(CorruptLogError, match="0 messages were written, and op placed 5 from version"):
        Forgetful(another(log).engine).run()
    log.drain()
    require_same(log)


@pytest.mark.turns(3)
@pytest.mark.parametrize("few_rows", [1, 3, 1_000])
def test_pieces_are_put_together_as_each_would_be_alone(log: CommitLog, few_rows: int, limit: Limit) -> None:
    fill_with_pieces(log)
    limit(SMALL_PIECE_ROWS=0)
    expected = {topic: log.read(topic) for topic in log.topics()}
    limit(SMALL_PIECE_ROWS=few_rows, TOGETHER_MAX=7, RUNS_AT_ONCE=12, ROWS_AT_ONCE=5)
    log.drain()
    for topic, read in expected.items():
        assert drained(log, topic).select(SOURCE_SCHEMA.names).to_pylist() == read.to_pylist()
    addresses = drained(log).select(["half_id", "file_no", "row_no", "msg_id"]).to_pylist()
    assert all(a["msg_id"] == f"{a['half_id']}:{a['file_no']}.{a['row_no']}" for a in addresses)
    table = another(log).engine.messages_table
    for file in paths_of(table):
        rows = table.read([file])
        assert rows.equals(rows.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")]))


def test_a_half_file_is_read_once_for_all_that_share_it(log: CommitLog) -> None:
    fill_with_pieces(log)
    with seen_at("files read", table="half") as reads:
        log.drain()
    of_keyed = {file.path for file in log.engine.get("app:0").files.values()}
    times = Counter(path for read in reads for path in read["paths"])
    assert sorted(times.values()) == [1] * (len(times) - len(of_keyed)) + [3] * len(of_keyed)


def test_messages_that_wait_keep_nothing_else_in_memory() -> None:
    rows = pa.table({"queue_id": [0] * 1_000, "queue_offset": range(1_000), "body": [b"x" * 1_000] * 1_000})
    collected = message_files._Collected()
    collected.add(rows.slice(500, 3))
    assert collected.take().get_total_buffer_size() < 10_000


def test_small_files_of_a_remote_store_are_read_ahead(log: CommitLog, limit: Limit) -> None:
    fill_with_pieces(log)
    limit(READS_AT_ONCE=3)
    mine = another(log)
    rows, _ = drain.Drainer(mine.engine)._next_placed(-1, mine.refresh())
    sizes = mine.engine.half.sizes(rows["path"])
    one, *_ = sizes
    table = another(log).engine.messages_table

    def written(sizes: Mapping[str, int]) -> list[dict[str, Any]]:
        files = message_files.message_files(
            message_files.placed_ranges(rows), mine.engine.half.read_range, another(log).engine.messages_table, sizes
        )
        found = [table.fs.open_input_file(f"{table.folder}/{file.path}") for file in files]
        return [row for file in found for row in pq.read_table(file).to_pylist()]

    assert written({**sizes, one: message_files.SMALL_FILE_BYTES}) == written({})


def test_files_that_moved_are_drained(log: CommitLog) -> None:
    for i in range(3):
        commit(log, prepare(log, i))
    move_half(log)
    merge_op_files(log)
    log.drain()
    require_same(log)


def test_versions_that_place_nothing_are_passed(log: CommitLog, limit: Limit) -> None:
    limit(VERSIONS_SKIPPED_MAX=5)
    for i in range(7):
        roll_back(log, prepare(log, i))
    assert log.drain() == log.refresh()
    assert drained(log).num_rows == 0
    commit(log, prepare(log, 7))
    log.drain()
    require_same(log)
