"""A relay that logs in: which rights are enough, and what it says of those that are missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import ResourceType

from rmq_spark import CommitLog, KafkaRelay
from rmq_spark.errors import OptionError, RelayRefusedError
from tests.kafka.broker import PASSWORD
from tests.kafka.handing import Handing
from tests.support.half_batches import commit, make_log, prepare
from tests.support.limits import Limit

RIGHTS = {
    "topic": (ResourceType.TOPIC, "{topic}", "WRITE"),
    "topic seen": (ResourceType.TOPIC, "{topic}", "DESCRIBE"),
    "positions": (ResourceType.TOPIC, "{positions}", "WRITE"),
    "positions read": (ResourceType.TOPIC, "{positions}", "READ"),
    "transactions": (ResourceType.TRANSACTIONAL_ID, "txmq.", "WRITE"),
}
"""As docs/kafka.md has them. Write and Read bring Describe with them."""


@pytest.fixture
def log(tmp_path: Path) -> CommitLog:
    made = make_log("memory", tmp_path, orders=2)
    commit(made, prepare(made, 0))
    return made


@pytest.fixture
def relay_of(handing: Handing, log: CommitLog) -> Callable[..., KafkaRelay]:
    """Make a relay of a user who has the rights that the page names, less some."""
    handing.kafka.create(handing.topic(), 2)
    handing.kafka.create(handing.positions_topic, cleanup_policy="compact")

    def make(user: str, *without: str, password: str = PASSWORD, **more: Any) -> KafkaRelay:
        for name, (kind, of, operation) in RIGHTS.items():
            if name not in without:
                of = of.format(topic=handing.topic(), positions=handing.positions_topic)
                handing.kafka.grant(user, kind, of, operation)
        login = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": password,
        }
        options = {**handing.options, "create_topics": False, "retry_timeout": 10.0, "kafka": login, **more}
        return KafkaRelay(log.another(), handing.kafka.login_servers, **options)

    return make


def test_the_rights_that_the_page_names_are_enough(
    handing: Handing, log: CommitLog, relay_of: Callable[..., KafkaRelay], caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka's client asks for a group that the relay does not use. Without a right on it the relay did not start."""
    with relay_of("user0") as relay:
        assert relay.run_once().messages == 5
    assert handing.require_same(log) == 5
    assert (
        "nobody sees whether positions stay there (cleanup.policy=compact). Grant DescribeConfigs on it" in caplog.text
    )


@pytest.mark.parametrize(
    ("user", "without", "sentence"),
    [
        ("user1", ["topic"], r"handed over to topic '.*orders'.*needs Write and Describe on each topic"),
        ("user2", ["positions"], r"handed over to topic '.*-positions'.*needs Write and Describe on each topic"),
        ("user5", ["positions read"], "the positions topic '.*-positions' was read.*Read too on the positions topic"),
        ("user3", ["transactions"], "needs Write and Describe on the ids that begin with txmq"),
        (
            "user4",
            ["topic", "topic seen"],
            "Kafka has no topic '.*orders'.*does not show it to this user, who needs Describe",
        ),
    ],
)
def test_a_right_that_is_missing_is_named(
    relay_of: Callable[..., KafkaRelay], user: str, without: list[str], sentence: str
) -> None:
    """Without the right to write it said INVALID_TXN_STATE, and that a restart may cure it."""
    with relay_of(user, *without) as relay, pytest.raises(RelayRefusedError, match=sentence):
        relay.run_once()


def test_a_topic_that_this_user_may_not_create_is_named(relay_of: Callable[..., KafkaRelay]) -> None:
    said = "topic '.*-parked' was created, which is not there, or not shown to this user.*needs .*Create on topics"
    with relay_of("user0", on_poison="park") as relay, pytest.raises(RelayRefusedError, match=said):
        relay.run_once()


@pytest.mark.turns(3, among="Kafka: what fails")
def test_a_wrong_password_is_not_taken_for_brokers_that_are_away(
    relay_of: Callable[..., KafkaRelay], limit: Limit
) -> None:
    """It was tried for half a minute, and a service manager would start it again and again."""
    limit(ASK_S=0.5)
    said = "A broker refuses the connection: .*Invalid username or password"
    with relay_of("user5", password="wrong") as relay, pytest.raises(RelayRefusedError, match=said) as refused:
        relay.run_once()
    assert "wrong" not in str(refused.value)


def test_settings_that_are_no_mapping_are_refused(log: CommitLog) -> None:
    given: Any = "sasl.password=hush"
    with pytest.raises(OptionError, match="kafka= is str: a mapping of settings is expected") as refused:
        KafkaRelay(log, "localhost:9092", kafka=given)
    assert "hush" not in str(refused.value)
