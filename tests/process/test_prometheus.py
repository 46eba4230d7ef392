"""A real Prometheus scrapes a program that sends, consumes and checks: it can answer the dashboard, and its alert leads
to the remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from typer.testing import CliRunner

import rmq_spark as txmq
from rmq_spark.cli import app
from rmq_spark.consumers import EachBatch
from tests.support.maven import free_ports

CONF = Path(__file__).parents[2] / "conf"
PROMETHEUS = shutil.which("prometheus")
FOR_A_LONG_TIME_S = 60

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        PROMETHEUS is None and not os.environ.get("CI"), reason="prometheus is not on the PATH (Debian: prometheus)"
    ),
]


class Prometheus:
    """A Prometheus server that scrapes one port each second, with our rules."""

    def __init__(self, folder: Path, port: int, scraped: int) -> None:
        self.at = f"127.0.0.1:{port}"
        rules = (CONF / "prometheus" / "txmq.rules.yml").read_text()
        (folder / "rules.yml").write_text(re.sub(r"for: \w+", "for: 1s", rules))
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yml]\nscrape_configs:\n"
            f"  - {{job_name: txmq, static_configs: [{{targets: ['127.0.0.1:{scraped}']}}]}}\n"
        )
        with (folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    PROMETHEUS or "prometheus", f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={self.at}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, path: str, **words: str | float) -> Any:
        with urllib.request.urlopen(f"http://{self.at}/api/v1/{path}?{urllib.parse.urlencode(words)}") as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Shop(txmq.TransactionListener):
    """Commits, rolls back, and does not know, in turn."""

    def __init__(self) -> None:
        self.calls = 0

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> txmq.LocalTransactionState:
        self.calls += 1
        return (txmq.COMMIT_MESSAGE, txmq.ROLLBACK_MESSAGE, txmq.UNKNOWN)[self.calls % 3]

    def check_local_transaction(self, batch: txmq.HalfBatch) -> txmq.LocalTransactionState:
        return txmq.COMMIT_MESSAGE


class Lost(txmq.TransactionListener):
    """Never knows."""

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> txmq.LocalTransactionState:
        return txmq.UNKNOWN

    def check_local_transaction(self, batch: txmq.HalfBatch) -> txmq.LocalTransactionState:
        return txmq.UNKNOWN


def wait_for(what: Callable[[], bool], name: str) -> None:
    until = time.monotonic() + FOR_A_LONG_TIME_S
    while not what():
        assert time.monotonic() < until, f"{name}: not within {FOR_A_LONG_TIME_S} s"
        time.sleep(0.3)


@contextmanager
def shop(log: txmq.CommitLog) -> Iterator[None]:
    """A program in which everything happens that the dashboard shows."""
    done = threading.Event()
    listeners = {"shop": Shop(), "lost": Lost()}

    def send() -> None:
        with (
            txmq.TransactionMQProducer(log, "shop", listeners["shop"]) as producer,
            txmq.TransactionMQProducer(log, "lost", listeners["lost"]) as lost,
        ):
            lost.send_message_in_transaction(txmq.Message("orders", b"lost"))
            while not done.wait(0.2):
                for message in (txmq.Message("orders", b"one"), txmq.Message("orders", b"later", delay_level=2)):
                    producer.send_message_in_transaction(message)
                with pytest.raises(txmq.TopicNotFoundError):
                    producer.send_message_in_transaction(txmq.Message("order", b"misspelt"))

    def check() -> None:
        service = txmq.CheckService(
            log, listeners, transaction_timeout=1, transaction_check_interval=0.5, transaction_check_max=2
        )
        while not done.wait(0.5):
            service.run_once()
            log.drain()

    def listen(messages: list[txmq.MessageExt]) -> txmq.ConsumeResult:
        if any(message.queue_offset % 3 == 0 for message in messages):
            raise ValueError("no points for this one")
        return txmq.ConsumeResult.SUCCESS

    consumer = txmq.PushConsumer(log, "points", EachBatch(listen), topics=["orders"], max_reconsume_times=0)
    threads = [threading.Thread(target=work) for work in (send, check)]
    consumer.start()
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
        consumer.shutdown()


def asked_by(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The queries of the dashboard's panels, as Grafana sends them when everything is chosen."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            asked = target["expr"].replace("$__rate_interval", "5s")
            yield f"{panel['title']}, {target['refId']}", re.sub(r"\$\w+", ".*", asked)


def test_a_real_prometheus_answers_the_dashboard_and_fires_what_the_remedy_mends(tmp_path: Path) -> None:
    log = txmq.CommitLog.create(tmp_path / "log")
    log.create_topic("orders", queues=2)
    registry = prometheus_client.CollectorRegistry()
    registry.register(txmq.metrics.LogCollector(log, cluster="eu", cache_seconds=0))
    counting = txmq.metrics.ProcessMetrics(registry, cluster="eu")
    scraped, port = free_ports(2)
    server, serving = prometheus_client.start_http_server(scraped, "127.0.0.1", registry)
    prometheus = Prometheus(tmp_path, port, scraped)
    try:
        began = time.time()
        with shop(log):
            wait_for(lambda: (tmp_path / "server.log").read_text().count("ready to receive"), "Prometheus")
            wait_for(lambda: {"TxmqQuarantined", "TxmqDeadLettersGrow"} <= prometheus.firing(), "alerts")
            time.sleep(5)  # a rate needs more than one scrape
        dashboard = json.loads((CONF / "grafana" / "txmq.json").read_text())
        asked = dict(asked_by(dashboard))
        span = {"start": began, "end": time.time(), "step": 1}
        shown = {name: prometheus.ask("query_range", query=query, **span)["result"] for name, query in asked.items()}
        assert [name for name, series in shown.items() if not series] == []
        for variable in dashboard["templating"]["list"][1:]:
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert prometheus.ask(f"label/{label}/values", **{"match[]": re.sub(r"\$\w+", ".*", series)})
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}

        (alert,) = [a for a in prometheus.ask("alerts")["alerts"] if a["labels"]["alertname"] == "TxmqQuarantined"]
        remedy = alert["annotations"]["remedy"].split()
        assert remedy == ["txmq", "quarantined", log.path]
        listed = CliRunner().invoke(app, [*remedy[1:], "--json"])
        half_id = json.loads(listed.stdout.splitlines()[0])["half_id"]
        assert "quarantine" in CliRunner().invoke(app, ["trace", log.path, half_id]).stdout
        settle = ["resolve", log.path, half_id, "rollback", "--reason", "the drill", "--yes"]
        assert CliRunner().invoke(app, settle).exit_code == 0
        wait_for(lambda: "TxmqQuarantined" not in prometheus.firing(), "the end of the alert")
    finally:
        prometheus.stop()
        server.shutdown()
        serving.join()
        counting.close()
