"""Check services of several processes on one log."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from rmq_spark import CheckService, HalfBatch, TransactionListener
from tests.support.half_batches import another, bodies, check_offsets, make_log, prepare
from tests.support.inside import KEY

DEADLINE_S = 60.0
KEYS = [f"k{i}" for i in range(6)]


class Judge(TransactionListener):
    """Decides by the key alone, so that all checkers agree."""

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        raise AssertionError

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        keys = batch.transactions["transaction_key"].to_pylist()
        return batch.verdicts(rollback=[k for k in keys if k in ("k1", "k4")])


def checker(path: str, start: Any, result: Any) -> None:
    service = CheckService(path, {"shop": Judge()}, transaction_timeout=0)
    start.wait(DEADLINE_S)
    reports = [service.run_once() for _ in range(3)]
    result.put([problem for report in reports for problem in report.problems])


def test_checkers_racing_on_one_log_settle_every_message_once(tmp_path: Path) -> None:
    batches = 8
    log = make_log("delta", tmp_path / "log")
    for i in range(batches):
        columns = {"body": [f"{i}.{k}" for k in range(len(KEYS))], "order_id": KEYS}
        prepare(log, i, columns, per=KEY, key="order_id", group="shop")
    spawn = multiprocessing.get_context("spawn")
    start, result = spawn.Barrier(3), spawn.Queue()
    workers = [spawn.Process(target=checker, args=(log.path, start, result)) for _ in range(3)]
    for w in workers:
        w.start()
    problems = [result.get(timeout=DEADLINE_S) for _ in workers]
    for w in workers:
        w.join(DEADLINE_S)
    assert problems == [[]] * len(workers)
    log = another(log)
    assert log.pending().num_rows == 0
    assert sorted(bodies(log)) == sorted(f"{b}.{k}" for b in range(batches) for k in range(6) if k not in (1, 4))
    check_offsets(log)
    assert log.conflicts() == []
