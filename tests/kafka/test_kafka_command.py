"""``txmq relay --to kafka``, and the exit codes that tell a supervisor whether to start it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rmq_spark import CommitLog
from rmq_spark.cli import app
from tests.kafka.broker import Broker
from tests.kafka.handing import Handing
from tests.kafka.test_kafka_relay import poisoned
from tests.support.half_batches import commit, make_log, prepare
from tests.support.limits import limited
from tests.torture.kill.points import ROOT

SECRET = "s3cr3t-pass-w0rd"


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    return make_log("delta", tmp_path / "log", orders=1)


def command(handing: Handing, log: CommitLog, *more: str) -> list[str]:
    options = {"--relay": handing.relay_name, "--topic-template": f"{handing.relay_name}.{{topic}}"}
    options |= {"--positions-topic": handing.positions_topic, "--parking-topic": handing.parking_topic}
    options |= {"--bootstrap-servers": handing.kafka.servers, "--transaction-timeout": "8s", "--poll-interval": "20ms"}
    return ["relay", log.path, "--to", "kafka", *(part for option in options.items() for part in option), *more]


def txmq(*arguments: str, code: int, **environment: str) -> tuple[str, str]:
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert SECRET not in result.output
    return result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _signals_as_they_were() -> object:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_it_hands_over_what_is_committed_and_says_what_a_person_must_decide(handing: Handing, log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    said = txmq(*command(handing, log, "--once"), code=4)[1]
    assert f"Kafka has no topic '{handing.topic()}': create it" in said
    assert "let the relay do that with --create-topics" in said
    out, _ = txmq(*command(handing, log, "--once", "--create-topics"), code=0)
    assert out.startswith("5 messages handed over (orders 5), in 1 transaction and ")
    out, _ = txmq(*command(handing, log, "--once", "--json"), code=0)
    assert json.loads(out)["messages"] == 0
    assert handing.require_same(log) == 5


@pytest.mark.long
def test_a_message_that_kafka_refuses_ends_it_with_what_to_do(handing: Handing, log: CommitLog) -> None:
    poisoned(log, "large")
    said = txmq(*command(handing, log, "--once", "--create-topics"), code=4)[1]
    assert "or go on with --on-poison park" in said
    txmq(*command(handing, log, "--once", "--on-poison", "park"), code=0)
    assert len(handing.parked()) == 2


@pytest.mark.long
def test_a_fenced_process_ends_with_a_code_of_its_own_and_a_stopped_one_with_0(
    handing: Handing, log: CommitLog
) -> None:
    processes = []
    for n in range(2):
        commit(log, prepare(log, n))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "rmq_spark.cli", *command(handing, log, "--create-topics")],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        assert processes[n].stdout is not None
        assert processes[n].stdout.readline().startswith("5 messages handed over"), processes[n].stderr.read()
        if n == 0:
            # The first may hand this over too; the second has to have something to say.
            processes[0].send_signal(signal.SIGSTOP)
    commit(log, prepare(log, 2))
    assert processes[1].stdout.readline().startswith("5 messages handed over")
    processes[0].send_signal(signal.SIGCONT)
    _, said = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 3, said
    assert "another process runs relay" in said
    processes[1].send_signal(signal.SIGTERM)
    assert processes[1].wait(60) == 0
    assert handing.require_same(log) == 15


@pytest.mark.turns(3, among="Kafka: what fails")
def test_wrong_usage_is_told_from_problems(kafka: Broker, log: CommitLog, tmp_path: Path) -> None:
    to = ("--to", "kafka", "--once")
    servers = ("--bootstrap-servers", kafka.servers)
    assert "is not known" in txmq("relay", log.path, "--to", "pulsar", code=2)[1]
    assert "--bootstrap-servers" in txmq("relay", log.path, *to, code=2)[1]
    assert "KEY=VALUE is expected" in txmq("relay", log.path, *to, *servers, "--kafka", SECRET, code=2)[1]
    said = txmq("relay", log.path, *to, *servers, "--kafka", "acks=1", code=2)[1]
    assert "Kafka's setting 'acks' cannot be given here" in said
    said = txmq("relay", log.path, *to, *servers, "--topic-template", "all", code=2)[1]
    assert "--topic-template 'all' must have {topic} in it once" in said
    said = txmq("relay", log.path, *to, *servers, "--shards", "2", "--shard", "2", code=2)[1]
    assert "--shard 2 is out of range: a whole number from 0 to 1 is expected" in said
    assert "is not a commit log" in txmq("relay", str(tmp_path), *to, *servers, code=2)[1]
    with limited(ANSWER_S=0.2, ASK_S=0.2):
        nobody = ("--bootstrap-servers", "127.0.0.1:1")
        said = txmq("relay", log.path, *to, *nobody, code=1, TXMQ_KAFKA__SASL_PASSWORD=SECRET)[1]
    assert "Kafka failed while its topics were listed (127.0.0.1:1)" in said


def test_secrets_of_the_environment_reach_kafka_s_client_and_no_output(kafka: Broker, log: CommitLog) -> None:
    given = ("--to", "kafka", "--once", "--bootstrap-servers", kafka.servers, "--kafka", "security.protocol=SASL_SSL")
    environment = {"TXMQ_KAFKA__SASL_MECHANISM": SECRET, "TXMQ_KAFKA__SASL_PASSWORD": SECRET}
    said = txmq("relay", log.path, *given, code=2, **environment)[1]
    assert "Kafka's client refuses its settings: " in said
    assert "Unsupported SASL mechanism: ***" in said


@pytest.mark.turns(3, among="Kafka: what fails")
@pytest.mark.parametrize(
    ("module", "code", "said"),
    [
        ("confluent_kafka", 2, "a relay to Kafka needs confluent-kafka: install rmq_spark with its extra kafka"),
        ("certifi", 1, "ModuleNotFoundError: No module named 'certifi'"),
    ],
)
def test_without_confluent_kafka_the_extra_is_named(
    log: CommitLog, tmp_path: Path, module: str, code: int, said: str
) -> None:
    """What it imports itself, and does not find, is named as it is."""
    missing = f"raise ModuleNotFoundError(\"No module named '{module}'\", name='{module}')"
    (tmp_path / "confluent_kafka.py").write_text(missing)
    done = subprocess.run(
        [sys.executable, "-m", "rmq_spark.cli", "relay", log.path, "--to", "kafka", "--bootstrap-servers", "a:1"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.strip() == said
