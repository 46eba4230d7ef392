"""What a commit log needs of a store, the same for each kind of store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

import rmq_spark as txmq
from rmq_spark.errors import CommitLogExistsError, NotACommitLogError, StorageError
from tests.support.consumers import DONE, go_on, push, seen_by, send
from tests.support.half_batches import another, bodies, check_offsets, commit, let_leave, prepare, roll_back
from tests.support.inside import filesystem, stores
from tests.support.limits import Limit
from tests.support.meanwhile import at
from tests.torture.s3.proxy import proxy

ROOT = Path(__file__).parents[3]
LARGE_BYTES = 4 * 1024 * 1024
"""Of a body. Three of them make a file that is put in parts."""
RACE_SENDS = 15


class Told(txmq.TransactionListener):
    """Says what it is told: at once, and when it is asked."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> object:
        return batch.arg

    def check_local_transaction(self, batch: txmq.HalfBatch) -> object:
        return txmq.COMMIT_MESSAGE


# ---------------------------------------------------------------- the whole of a log's life
def test_what_was_decided_is_kept(log: txmq.CommitLog) -> None:
    records = [prepare(log, i) for i in range(4)]
    commit(log, records[0])
    roll_back(log, records[1])
    commit(log, records[2])
    for handle in (log, another(log)):
        assert sorted(bodies(handle)) == sorted(f"app.{i}.{j}" for i in (0, 2) for j in range(5))
        assert handle.pending()["half_id"].to_pylist() == ["app:3"]
        check_offsets(handle)


@pytest.mark.long
def test_a_producer_a_check_a_drain_and_upkeep_agree(log: txmq.CommitLog, store: Any, uri: str, limit: Limit) -> None:
    limit(OP_FILES_MAX=4)
    options = store.storage_options()
    with txmq.TransactionMQProducer(uri, "shop", Told(), check_interval=None, storage_options=options) as producer:
        for number, verdict in enumerate([txmq.COMMIT_MESSAGE, txmq.ROLLBACK_MESSAGE, txmq.UNKNOWN] * 2):
            producer.send_message_in_transaction(txmq.Message("orders", b"order %d" % number), verdict)
    assert sorted(bodies(log)) == ["order 0", "order 3"]
    report = txmq.CheckService(uri, {"shop": Told()}, transaction_timeout=0, storage_options=options).run_once()
    assert report.problems == []
    committed = [f"order {number}" for number in (0, 2, 3, 5)]
    assert sorted(bodies(log)) == committed
    assert log.drain() == log.refresh()
    let_leave(log)
    fresh = another(log)
    assert fresh.engine.half.table.actions().num_rows == 0, "all is settled and drained"
    assert sorted(bodies(fresh)) == committed
    check_offsets(fresh)


@pytest.mark.long
def test_a_file_in_parts_and_empty_bodies_are_read_back_as_written(log: txmq.CommitLog) -> None:
    sent = [os.urandom(size) for size in (0, 1, LARGE_BYTES, LARGE_BYTES, LARGE_BYTES)]
    commit(log, prepare(log, 0, {"body": sent}))
    for _ in range(2):
        assert sorted(another(log).read("orders", columns=["body"])["body"].to_pylist()) == sorted(sent)
        log.drain()


@pytest.mark.long
def test_vacuum_removes_an_orphan_and_nothing_else(log: txmq.CommitLog, store: Any, uri: str, limit: Limit) -> None:
    commit(log, prepare(log, 0))
    table = log.engine.half.table
    with table.fs.open_output_stream(f"{table.folder}/half-orphan.parquet") as stream:
        stream.write(b"left behind by a crash")
    assert log.vacuum() == [], "it is young"
    limit(ORPHAN_AGE_S=0)
    time.sleep(2)  # lists tell whole seconds
    assert log.vacuum() == ["half/half-orphan.parquet"]
    assert "half/half-orphan.parquet" not in store.objects(uri)
    assert len(bodies(another(log))) == 5


@pytest.mark.turns(3, among="on S3")
def test_a_log_is_backed_up_to_a_disk_and_beside_it_and_restored(
    log: txmq.CommitLog, store: Any, uri: str, tmp_path: Path
) -> None:
    options = store.storage_options()
    for batch_id in range(3):
        commit(log, prepare(log, batch_id))
    for target in (tmp_path / "copy", f"{uri}-copy"):
        log.backup(target)
    commit(log, prepare(log, 3))
    for target in (tmp_path / "copy", f"{uri}-copy"):
        assert log.backup(target).files_copied == 2
    on_disk = txmq.CommitLog.open(tmp_path / "copy")
    assert bodies(on_disk) == bodies(txmq.CommitLog.open(f"{uri}-copy", options)) == bodies(log)
    on_disk.backup(f"{uri}-restored", options)
    restored = txmq.CommitLog.open(f"{uri}-restored", options)
    commit(restored, prepare(restored, 4))
    check_offsets(restored)


@pytest.mark.long
def test_members_share_a_group_by_heartbeats(log: txmq.CommitLog) -> None:
    send(log, "abcd", queue_id=[0, 1] * 2)
    found: list[str] = []
    consumers: list[Any] = [push(log, seen_by(found, DONE)) for _ in range(2)]
    for consumer in consumers:
        assert consumer.member.pull_interval_s == 1.0
        consumer.member.join()
    assert len(txmq.ConsumerGroup(log, "points").members()) == 2
    for consumer in consumers * 2:  # the first one learns of the second, and releases what it has too much
        consumer.member._members.look()
        consumer.member._balance()
        consumer.member.persist()
    shares = [[queue for queue in consumer.queues() if queue[0] == "orders"] for consumer in consumers]
    assert [len(share) for share in shares] == [1, 1]
    for consumer in consumers:
        go_on(consumer)
    assert sorted(found) == list("abcd")
    assert sum(log.engine.groups.next_offsets("points").values()) == 4
    for consumer in consumers:
        consumer.member.leave()
    assert txmq.ConsumerGroup(log, "points").members() == {}
    assert all(position.owner is None for position in log.engine.groups.positions("points").values())


EXECUTOR = """
import json, resource, sys
limit = int(sys.argv[2]) << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import pyarrow as pa
from rmq_spark._core.storage.data_file import write_table
from rmq_spark._core.storage.file_system import filesystem
from rmq_spark._core.storage.row_range import RowRange, read_range

fs, folder = filesystem(sys.argv[1], json.loads(sys.stdin.read()))
file = write_table(fs, folder, pa.table({"body": [b"x" * 100] * 50_000}), prefix="messages", stats_columns=[])
wanted = RowRange(file.path, "", 0, file.rows, ((0, file.rows - 1),), "messages")
print(sum(table.num_rows for _, table in read_range(fs, folder, wanted, ["body"])))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to RLIMIT_AS")
def test_an_executor_writes_and_reads_rows_in_little_address_space(store: Any, uri: str) -> None:
    command = [sys.executable, "-c", EXECUTOR, f"{uri}/messages", "512" if uri.startswith("s3:") else "1024"]
    options = json.dumps(store.storage_options())
    done = subprocess.run(command, cwd=ROOT, input=options, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "50000\n"), done.stderr


# ---------------------------------------------------------------- commits
@pytest.mark.long
def test_of_writers_that_come_at_once_the_store_lets_one_create_a_table(store: Any, uri: str) -> None:
    claims: list[list[bool | None]] = [[] for _ in range(20)]
    for number, told in enumerate(claims):
        stores._claim_at_once(f"{uri}/{number}", store.storage_options(), told)
    assert [told.count(True) for told in claims] == [1] * len(claims)
    assert any(False in told for told in claims), "no two came to the same put"


SENDER = f"""
import json, sys
import rmq_spark as txmq

class Approve(txmq.TransactionListener):
    def execute_local_transaction(self, batch):
        return txmq.COMMIT_MESSAGE
    def check_local_transaction(self, batch):
        return txmq.UNKNOWN

uri, name, options = sys.argv[1], sys.argv[2], json.loads(sys.stdin.read())
with txmq.TransactionMQProducer(uri, name, Approve(), check_interval=None, storage_options=options) as producer:
    for number in range({RACE_SENDS}):
        message = txmq.Message("orders", f"{{name}} {{number}}")
        assert producer.send_message_in_transaction(message).local_transaction_state == txmq.COMMIT_MESSAGE
"""


@pytest.mark.long
def test_two_processes_that_race_lose_and_double_nothing(log: txmq.CommitLog, store: Any, uri: str) -> None:
    names = ["one", "two"]
    senders = [
        subprocess.Popen([sys.executable, "-c", SENDER, uri, name], cwd=ROOT, stdin=subprocess.PIPE, text=True)
        for name in names
    ]
    for sender in senders:
        assert sender.stdin is not None
        sender.stdin.write(json.dumps(store.storage_options()))
        sender.stdin.close()
    assert [sender.wait(300) for sender in senders] == [0, 0]
    assert sorted(bodies(log)) == sorted(f"{name} {number}" for name in names for number in range(RACE_SENDS))
    check_offsets(log)
    assert log.engine.half.table.refresh() == len(names) * RACE_SENDS, "each prepare is a version of its own"


def test_a_commit_whose_answer_is_lost_is_found_and_made_once(log: txmq.CommitLog, store: Any, uri: str) -> None:
    with proxy(store.endpoint, lossy=True) as between:
        through = txmq.CommitLog.open(uri, store.storage_options(between.endpoint))
        for batch_id in range(2):
            commit(through, prepare(through, batch_id))
        counts = between.taken()
        assert counts["lost", "half"] == counts["lost", "op"] == 2
    assert sorted(bodies(another(log))) == sorted(f"app.{i}.{j}" for i in range(2) for j in range(5))
    check_offsets(log)
    assert log.engine.half.table.refresh() == 2


# ---------------------------------------------------------------- refusals
def test_a_log_is_made_once_and_opened_only_where_there_is_one(log: txmq.CommitLog, store: Any, uri: str) -> None:
    options = store.storage_options()
    with pytest.raises(CommitLogExistsError):
        txmq.CommitLog.create(uri, storage_options=options)
    assert txmq.CommitLog.create(uri, exist_ok=True, storage_options=options).topics() == {"orders": 2}
    with pytest.raises(NotACommitLogError, match="make one with CommitLog"):
        txmq.CommitLog.open(f"{uri}/elsewhere", options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("store", "scheme"),
    [("s3", "s3a://stores"), ("azure", "az://stores"), ("azure", "abfss://stores")],
    indirect=["store"],
)
def test_another_spelling_of_a_uri_is_the_same_log(log: txmq.CommitLog, store: Any, uri: str, scheme: str) -> None:
    folder = uri.partition("://")[2].partition("/")[2]
    same = txmq.CommitLog.open(f"{scheme}/{folder}", store.storage_options())
    commit(same, prepare(same, 0))
    same.drain()
    assert same.id == log.id
    assert len(bodies(another(log))) == 5


@pytest.mark.long
@pytest.mark.parametrize("name", ["with space", "per%20cent", "ü", "a=b+c"])
def test_every_character_of_a_path_means_the_same_to_files_and_commits(store: Any, uri: str, name: str) -> None:
    log = txmq.CommitLog.create(f"{uri}/{name}", storage_options=store.storage_options())
    log.create_topic("orders", 1)
    commit(log, prepare(log, 0))
    assert len(bodies(another(log))) == 5
    assert name.replace("%20", " ") in {path.split("/")[0] for path in store.objects(uri)}
    assert name == name.replace("%20", " ") or not [path for path in store.objects(uri) if path.startswith(name)]


@pytest.mark.long
def test_the_file_system_lists_reads_and_deletes_what_it_wrote(store: Any, uri: str) -> None:
    fs, folder = filesystem(f"{uri}/files", store.storage_options())
    content = {"a": b"", "b/c": os.urandom(10), "b/%d|e": os.urandom(3_000_000)}
    for name, value in content.items():
        with fs.open_output_stream(f"{folder}/{name}") as stream:
            stream.write(value)
    listed = fs.get_file_info(pafs.FileSelector(folder, recursive=True))
    files = {info.path.removeprefix(f"{folder}/"): info for info in listed if info.type == pafs.FileType.File}
    assert {name: info.size for name, info in files.items()} == {name: len(value) for name, value in content.items()}
    assert all(abs(info.mtime.timestamp() - time.time()) < 60 for info in files.values())
    for name, value in content.items():
        for open_it in (fs.open_input_file, fs.open_input_stream):
            with open_it(f"{folder}/{name}") as source:
                assert source.read() == value
        fs.delete_file(f"{folder}/{name}")
        assert fs.get_file_info(f"{folder}/{name}").type == pafs.FileType.NotFound
        with pytest.raises(FileNotFoundError):
            fs.open_input_file(f"{folder}/{name}").read()
    rest = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    assert not [info.path for info in rest if info.type == pafs.FileType.File]
    with pytest.raises(FileNotFoundError):
        fs.get_file_info(pafs.FileSelector(f"{folder}/nothing"))


def test_a_bucket_that_is_not_there_is_one_sentence_and_leaves_nothing(store: Any, uri: str) -> None:
    elsewhere = uri.replace("stores", "nowhere", 1)
    options = {**store.storage_options(), "max_retries": "1"}
    for attempt in (txmq.CommitLog.create, txmq.CommitLog.open):
        with pytest.raises((StorageError, NotACommitLogError)) as caught:
            attempt(elsewhere, storage_options=options)
        assert "\n" not in str(caught.value)


def test_no_secret_is_in_what_a_wrong_secret_raises(store: Any, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(store, "wrong_options"):
        pytest.skip("the emulator of Google Cloud Storage asks for no secret")
    caplog.set_level("DEBUG")
    wrong = store.wrong_options()
    hidden = [*store.secrets, *(value for name, value in wrong.items() if name.endswith("KEY"))]
    for attempt in (txmq.CommitLog.create, txmq.CommitLog.open):
        with pytest.raises(StorageError) as caught:
            attempt(uri, storage_options=wrong)
        error: BaseException | None = caught.value
        assert "\n" not in str(error)
        while error is not None:
            assert not [word for word in hidden if word in f"{error} {error!r}"]
            error = error.__cause__
    assert not [word for word in hidden if word in caplog.text]
    assert store.objects(uri) == []


@pytest.mark.turns(3, among="on S3")
@pytest.mark.parametrize("failing", ["op", pytest.param("topics", marks=pytest.mark.long)])
def test_a_log_that_cannot_be_made_leaves_nothing_behind(store: Any, uri: str, failing: str) -> None:
    def fail() -> None:
        raise OSError("the store is out of order")

    with at("table made", fail, table=failing), pytest.raises(StorageError, match="the store is out of order"):
        txmq.CommitLog.create(uri, storage_options=store.storage_options())
    assert store.objects(uri) == []
    assert txmq.CommitLog.create(uri, storage_options=store.storage_options()).topics() == {}


@pytest.mark.long
def test_what_could_not_be_removed_is_named(store: Any, uri: str) -> None:
    ended: list[Any] = []

    def end() -> None:
        ended[0].close()

    with ExitStack() as stack:
        between = stack.enter_context(proxy(store.endpoint))
        ended.append(stack.pop_all())
        options = {**store.storage_options(between.endpoint), "max_retries": "0"}
        with at("table made", end, table="op"), pytest.raises(StorageError) as caught:
            txmq.CommitLog.create(uri, storage_options=options)
    assert f"left behind, and to be deleted by hand: {uri}/half (" in str(caught.value)
    assert store.objects(uri) == ["half/_delta_log/00000000000000000000.json"]
    assert txmq.CommitLog.create(uri, storage_options=store.storage_options()).topics() == {}
