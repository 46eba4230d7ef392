"""A commit log on a real S3 server, in a quick run. All else on S3 is in ``test_s3.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

import rmq_spark as txmq
from tests.support.half_batches import another, bodies, check_offsets, commit, prepare, roll_back
from tests.torture.s3.server import S3Server


def test_a_log_on_s3_keeps_what_was_decided(log: txmq.CommitLog) -> None:
    records = [prepare(log, i) for i in range(4)]
    commit(log, records[0])
    roll_back(log, records[1])
    commit(log, records[2])
    for handle in (log, another(log)):
        assert sorted(bodies(handle)) == sorted(f"app.{i}.{j}" for i in (0, 2) for j in range(5))
        assert handle.pending()["half_id"].to_pylist() == ["app:3"]
        assert handle.read("orders", start={0: 1}, limit=3).num_rows == 3
        assert handle.topics() == {"orders": 2}
        check_offsets(handle)


def test_a_log_on_s3_is_backed_up_to_a_disk_and_to_s3_and_restored(
    log: txmq.CommitLog, s3: S3Server, uri: str, tmp_path: Path
) -> None:
    for batch_id in range(3):
        commit(log, prepare(log, batch_id))
    beside = f"{uri}-copy"
    log.backup(tmp_path / "copy")
    log.backup(beside)
    commit(log, prepare(log, 3))
    for target in (tmp_path / "copy", beside):
        assert log.backup(target).files_copied == 2
    on_disk = txmq.CommitLog.open(tmp_path / "copy")
    on_s3 = txmq.CommitLog.open(beside, s3.storage_options())
    assert bodies(on_disk) == bodies(on_s3) == bodies(log)
    on_disk.backup(f"{uri}-restored", s3.storage_options())
    restored = txmq.CommitLog.open(f"{uri}-restored", s3.storage_options())
    commit(restored, prepare(restored, 4))
    check_offsets(restored)
    shutil.rmtree(on_disk.path)
