"""A real cluster: Spark's standalone master, two workers, PostgreSQL, ``spark-submit``, and an executor that dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from rmq_spark import CommitLog, SqlTransactionListener
from tests.support.cluster import DEADLINE_S, Cluster, wait_until

ROOT = Path(__file__).parents[2]
FILES, ROWS = 12, 50
REFUSED = 7
"""Of every so many orders one is refused."""

SHOP = """
import os
import time
import sqlalchemy as sa
import rmq_spark as txmq

URL = {url!r}

def work(connection, batch):
    numbers = [int(body) for body in batch.messages(["body"])["body"].to_pylist()]
    good = [n for n in numbers if n % {refused}]
    connection.execute(sa.text("insert into orders values (:n)"), [{{"n": n}} for n in good])
    return batch.verdicts(rollback=[n for n in numbers if n not in good])

def listener():
    return txmq.SqlTransactionListener(URL, work)
"""

SETTINGS = {
    "tasks run twice at once": {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.25",
        "spark.speculation.minTaskRuntime": "200ms",
    },
    "each task has a Python worker of its own": {"spark.python.worker.reuse": "false"},
    "a shuffle is indeterminate": {"spark.sql.execution.sortBeforeRepartition": "false"},
}
"""What makes a worker's life hard, beside an executor that dies."""

pytestmark = [pytest.mark.long, pytest.mark.postgres, pytest.mark.timeout(1500)]


def test_orders_go_through_a_cluster_of_which_an_executor_dies(cluster: Cluster, database: str, tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=2)
    (tmp_path / "consumed").mkdir()
    (tmp_path / "in").mkdir()
    for at in range(FILES):
        rows = [json.dumps({"n": n}) for n in range(at * ROWS, (at + 1) * ROWS)]
        (tmp_path / "in" / f"{at:03}.json").write_text("\n".join(rows))
    shop = tmp_path / "cluster_shop.py"
    shop.write_text(SHOP.format(url=database, refused=REFUSED))
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        connection.execute(sa.text("create table orders (n integer primary key)"))
    SqlTransactionListener(engine, lambda connection, batch: None).create_fence()

    program = str(ROOT / "tests/spark/cluster_program.py")
    settings = {name: value for each in SETTINGS.values() for name, value in each.items()}
    driver = cluster.submit("--py-files", str(shop), program, str(tmp_path), settings=settings)
    wait_until(lambda: driver.poll() is not None or sum(log.engine.tails().values()) >= ROWS, "the first micro-batch")
    first, *_ = cluster.executors() or [0]
    assert driver.poll() is None, cluster.said()
    assert first, "no executor is there"
    os.kill(first, signal.SIGKILL)
    assert driver.wait(2 * DEADLINE_S) == 0, cluster.said()  # each task starts a Python

    expected = [n for n in range(FILES * ROWS) if n % REFUSED]
    with engine.connect() as connection:
        assert list(connection.execute(sa.text("select n from orders order by n")).scalars()) == expected
    assert sorted(int(body) for body in log.read("orders")["body"].to_pylist()) == expected
    assert sorted(int(file.name) for file in (tmp_path / "consumed").iterdir()) == expected
    result = json.loads((tmp_path / "result.json").read_text())
    assert result == {"read": expected, "native": len(expected), "drained": len(expected)}
    assert first not in cluster.executors()
    engine.dispose()

    config = tmp_path / "txmq.toml"
    config.write_text(
        f'path = "{tmp_path}/log"\nlistener_modules = ["cluster_shop"]\n[listeners]\nshop = "cluster_shop:listener"\n'
    )
    job = cluster.submit("--py-files", str(shop), str(job_file()), "--config", str(config), "--once")
    assert job.wait(DEADLINE_S) == 0, cluster.said()


def job_file() -> Path:
    import rmq_spark.checks.job

    return Path(rmq_spark.checks.job.__file__)
