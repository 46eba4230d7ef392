"""Tests here talk to a real Kafka broker. Without one they are skipped; where ``CI`` is set they fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kafka.broker import Broker, NoKafkaError, running
from tests.kafka.handing import Handing
from tests.support.maven import FETCH_S_MAX


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/kafka/" in item.path.as_posix():
            item.add_marker(pytest.mark.kafka)
            item.add_marker(pytest.mark.timeout(FETCH_S_MAX + 300))  # the first of them may fetch the jars


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker for all tests."""
    try:
        with running(tmp_path_factory.mktemp("kafka")) as broker:
            yield broker
    except NoKafkaError as problem:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the tests on Kafka need a broker: {problem}")


@pytest.fixture
def handing(kafka: Broker) -> Iterator[Handing]:
    """A relay of this test alone, to topics of its own."""
    made = Handing(kafka)
    yield made
    made.close()
