"""A real Kafka broker for tests: version 4.1.0, one process with its own controller (KRaft), on the loopback."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.support.inside import Runtime
from tests.support.maven import Jar, NoJarsError, fetched, free_ports, java

VERSION = "4.1.0"
SCALA = "2.13"
CLUSTER = "dHhtcS10ZXN0cy1rYWZrYQ"
START_S_MAX = 90
ANSWER_S = 30

JAVA_OPTIONS = "-Xmx384m -Xms96m -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto".split()
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{login},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{login}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config={jaas}
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=200
broker.session.timeout.ms=3000
"""

USERS = [f"user{n}" for n in range(6)]
"""Who may log in with :data:`PASSWORD`. Nobody has rights by himself; who does not log in may do everything."""
PASSWORD = "correct horse"
JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule required {users};"

QUIET = logging.getLogger("tests.kafka.client")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


class NoKafkaError(Exception):
    """There is no Kafka here: Java or pyspark's ivy is missing, or the registry does not answer."""


def jars() -> Path:
    """The folder with Kafka's jars, fetched when they are not in the cache yet.

    Raises
    ------
    NoKafkaError
    """
    try:
        return fetched(f"kafka-{VERSION}", [Jar("org.apache.kafka", f"kafka_{SCALA}", VERSION)])
    except NoJarsError as problem:
        raise NoKafkaError(str(problem)) from None


def _java() -> str:
    try:
        return java()
    except NoJarsError as problem:
        raise NoKafkaError(str(problem)) from None


class Broker:
    """A broker that can be killed and started again. Use :func:`running`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._java = [_java(), *JAVA_OPTIONS, "-cp", f"{jars()}/*"]
        port, login, controller = free_ports(3)
        self._port = port
        self.login_servers = f"127.0.0.1:{login}"
        self._settings = folder / "server.properties"
        jaas = JAAS.format(users=" ".join(f'user_{user}="{PASSWORD}"' for user in USERS))
        ports = {"port": port, "login": login, "controller": controller}
        self._settings.write_text(SETTINGS.format(**ports, jaas=jaas, data=folder / "data"))
        self._run("kafka.tools.StorageTool", "format", "--cluster-id", CLUSTER, "--config", str(self._settings))
        self._process: subprocess.Popen[bytes] | None = None
        self._names = 0

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _run(self, *command: str) -> None:
        done = subprocess.run([*self._java, *command], capture_output=True, timeout=START_S_MAX, check=False)
        if done.returncode:
            raise NoKafkaError(f"{command[0]} failed: {(done.stdout + done.stderr).decode(errors='replace')[-500:]}")

    # ------------------------------------------------------------------ life
    def start(self) -> None:
        """Start it, and come back when it leads its topics."""
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._java, "kafka.Kafka", str(self._settings)], stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S_MAX
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self._folder / "broker.log").read_text(errors="replace")[-500:]
                raise NoKafkaError(f"Kafka {VERSION} does not start: {said.strip()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), 1):
                pass
            return bool(self.admin().list_topics(timeout=2).brokers)
        except (OSError, ck.KafkaException):
            return False

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def start_if_dead(self) -> None:
        if self._process is None:
            self.start()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # on a busy machine its threads go on for a moment

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    # ------------------------------------------------------------------ topics
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.servers}, logger=QUIET)

    def name(self, stem: str) -> str:
        """A name that no other test uses."""
        self._names += 1
        return f"{stem}-{self._names}"

    def create(self, topic: str, partitions: int = 1, **config: Any) -> None:
        """Make a topic; ``max_message_bytes=1`` is ``max.message.bytes=1``."""
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        admin = self.admin()  # what it is asked for ends with it
        for done in admin.create_topics([NewTopic(topic, partitions, 1, config=settings)]).values():
            done.result(ANSWER_S)

    def delete(self, topic: str) -> None:
        """Delete a topic, and come back when the broker does not know it any more."""
        admin = self.admin()
        for done in admin.delete_topics([topic]).values():
            done.result(ANSWER_S)
        while topic in self.topics():
            pass

    def grant(self, user: str, kind: ResourceType, name: str, *operations: str) -> None:
        """Give a user rights on what begins with a name."""
        rights = [
            AclBinding(
                kind, name, ResourcePatternType.PREFIXED, f"User:{user}", "*", AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]  # fmt: skip
        admin = self.admin()
        for done in admin.create_acls(rights).values():
            done.result(ANSWER_S)

    def topics(self) -> dict[str, int]:
        """All topics and their number of partitions."""
        found = self.admin().list_topics(timeout=ANSWER_S).topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def read(self, topic: str, isolation: str = "read_committed") -> dict[int, list[ck.Message]]:
        """All messages of a topic, by partition: what a consumer sees."""
        count = self.topics()[topic]
        consumer = ck.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "tests",
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
            },
            logger=QUIET,
        )
        found: dict[int, list[ck.Message]] = {partition: [] for partition in range(count)}
        open_ = set(found)
        deadline = time.monotonic() + ANSWER_S
        try:
            consumer.get_watermark_offsets(ck.TopicPartition(topic, 0), timeout=ANSWER_S)  # finds the broker at once
            consumer.assign([ck.TopicPartition(topic, partition, ck.OFFSET_BEGINNING) for partition in found])
            while open_:
                assert time.monotonic() < deadline, f"partitions {open_} of {topic} could not be read to their ends"
                message = consumer.poll(1)
                if message is None:
                    continue
                if message.error() is None:
                    found[message.partition()].append(message)
                elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                    open_.discard(message.partition())
                else:
                    assert message.error().retriable(), message.error()
        finally:
            consumer.close()
        return found


class Resuming(Runtime):
    """A machine that lets a paused broker go on instead of sleeping."""

    def __init__(self, kafka: Broker) -> None:
        self._kafka = kafka

    def sleep(self, seconds: float) -> None:
        self._kafka.resume()


@contextmanager
def running(folder: Path) -> Iterator[Broker]:
    """A broker that keeps its files below this folder.

    Raises
    ------
    NoKafkaError
    """
    broker = Broker(folder)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()
