"""The settings of a member of a consumer group, which both consumers have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags, tag_selector
from rmq_spark._core.selector.tree import Selector
from rmq_spark._core.vocabulary.message import require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import Duration, flag, require_time, seconds, whole_number
from rmq_spark.errors import OptionError

HEARTBEAT_INTERVAL_S = 10.0
PERSIST_INTERVAL_S = 1.0
"""Minimum seconds between two writes of progress (RocketMQ: ``persistConsumerOffsetInterval``, 5 s there)."""
MAX_SPAN = 100_000
"""Maximum number of messages of a queue between the lowest unfinished and the newest fetched one (RocketMQ:
``consumeConcurrentlyMaxSpan``, 2,000 there, without tables)."""
CLUSTERING = "clustering"


class ConsumeFromWhere(str, Enum):
    """Where a group begins in a queue for which it has no progress (RocketMQ's enum of that name)."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class MemberSettings:
    """The validated settings that both consumers have. The consumers' docstrings explain each."""

    group: str
    topics: tuple[str, ...]
    selector: Selector | None
    consume_from: ConsumeFromWhere
    consume_timestamp: datetime | None
    heartbeat_interval_s: float
    lease_s: float
    persist_interval_s: float
    pull_interval_s: float | None
    max_span: int
    take_over: bool

    @classmethod
    def of(
        cls,
        group: str,
        topics: str | Iterable[str],
        tags: str | None,
        selector: str | None,
        consume_from_where: ConsumeFromWhere | str,
        consume_timestamp: datetime | None,
        heartbeat_interval: Duration,
        lease: Duration,
        persist_consumer_offset_interval: Duration,
        pull_interval: Duration | None,
        max_span: int,
        message_model: str,
        take_over: bool,
    ) -> MemberSettings:
        require_group_name(group, "consumerGroup")
        if str(message_model).lower() != CLUSTERING:
            raise OptionError(
                f"message_model={message_model!r}: only {CLUSTERING!r} is there. In RocketMQ's BROADCASTING each "
                "member gets every message: give each consumer a group of its own for that"
            )
        is_iterable = isinstance(topics, Iterable) and not isinstance(topics, bytes)
        names = [topics] if isinstance(topics, str) else list(topics) if is_iterable else []
        if not names:
            raise OptionError(f"topics={topics!r}: the name of a topic is expected, or several names")
        if tags is not None and selector is not None:
            raise OptionError("tags and selector contradict each other: give one of them")
        try:
            consume_from = ConsumeFromWhere(consume_from_where)
        except ValueError:
            raise OptionError(
                f"consume_from_where={consume_from_where!r} is not one of {', '.join(ConsumeFromWhere)}"
            ) from None
        if (consume_from == ConsumeFromWhere.CONSUME_FROM_TIMESTAMP) != (consume_timestamp is not None):
            raise OptionError("CONSUME_FROM_TIMESTAMP and consume_timestamp=<a datetime> need each other")
        interval_s = seconds(heartbeat_interval, "heartbeat_interval", above=True)
        lease_s = seconds(lease, "lease", above=True)
        if lease_s < 2 * interval_s:
            raise OptionError(
                f"lease={lease!r} is under two heartbeats of {interval_s:g} s: a heartbeat that is late would cost a "
                "member its queues"
            )
        tag_names = parse_tags(SUB_ALL if tags is None else tags)
        return cls(
            group,
            tuple(dict.fromkeys(require_topic_name(name, own=True) for name in names)),
            tag_selector(tag_names and tuple(sorted(tag_names))) if selector is None else parse_selector(selector),
            consume_from,
            None if consume_timestamp is None else require_time(consume_timestamp, "consume_timestamp"),
            interval_s,
            lease_s,
            seconds(persist_consumer_offset_interval, "persist_consumer_offset_interval"),
            None if pull_interval is None else seconds(pull_interval, "pull_interval", above=True),
            whole_number(max_span, "max_span", 1),
            flag(take_over, "take_over"),
        )
