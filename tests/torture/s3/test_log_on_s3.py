"""A commit log on a real S3 server, in a quick run. All else on S3 is in ``test_s3.py``."""

from __future__ import annotations

import rmq_spark as txmq
from tests.half_batches import another, bodies, check_offsets, commit, prepare, roll_back


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
