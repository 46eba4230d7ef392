"""Reads and validates the options of ``spark.read`` and ``spark.readStream``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from rmq_spark._core.log.message_columns import require_known_topic
from rmq_spark._core.reads.offsets import (
    EARLIEST,
    EARLIEST_OFFSET,
    LATEST,
    LATEST_OFFSET,
    Positions,
    parse_offsets,
    parse_timestamp,
)
from rmq_spark._core.reads.option_names import SOURCE_OPTIONS
from rmq_spark._core.selector import SUB_ALL, parse_selector, parse_tags, tag_selector
from rmq_spark._core.selector.tree import Selector
from rmq_spark._core.storage.location import location
from rmq_spark._core.vocabulary.message import DLQ_PREFIX, RETRY_PREFIX, require_group_name, require_topic_name
from rmq_spark._core.vocabulary.options import Options
from rmq_spark.errors import OptionError


@dataclass(frozen=True)
class Subscription:
    """The topics to read: by name, or by a pattern that the whole name must match. A pattern matches topics of retries
    and dead letters only if it contains their prefix, ``%RETRY%`` or ``%DLQ%``. ``retry`` is the topic of a consumer
    group's retries, which is also read if it exists."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    retry: str | None = None

    def matches(self, topic: str) -> bool:
        if topic == self.retry:
            return True
        if self.pattern is None:
            return topic in self.topics
        # ".*" means the users' topics: with retries and dead letters, every failed message would come twice.
        prefix = next(
            (system_prefix for system_prefix in (RETRY_PREFIX, DLQ_PREFIX) if topic.startswith(system_prefix)), ""
        )
        return prefix in self.pattern and re.fullmatch(self.pattern, topic) is not None

    def topics_among(self, topics: Mapping[str, int]) -> dict[str, int]:
        """The topics to read among those of a log, with their numbers of queues. TopicNotFoundError: one of
        :attr:`topics` is not there."""
        for name in self.topics:
            require_known_topic(name, topics)
        return {name: count for name, count in topics.items() if self.matches(name)}


@dataclass(frozen=True)
class ReadOptions:
    """The options of one read. They can be pickled. ``starting`` and ``ending`` are ``earliest``, ``latest``, offsets
    by (topic, queue), or a commit time. ``selector`` is the filter by ``tags`` or the option ``selector``; None reads
    all."""

    path: str
    storage_options: Mapping[str, str] = field(repr=False)
    subscription: Subscription
    tags: tuple[str, ...] | None
    selector: Selector | None
    starting: str | Positions | datetime
    ending: str | Positions | datetime
    offsets_per_trigger_max: int | None
    limit_first_batch: bool
    partitions_min: int | None
    partition_records_max: int | None
    fail_on_data_loss: bool
    ordered: bool
    consumer_group: str | None = None


def read_options(given: Mapping[str, str], streaming: bool) -> ReadOptions:
    """Read and validate the options of a read. OptionError: one is missing, unknown or invalid, or contradicts another
    one. OffsetError: offsets are malformed."""
    options = Options(given, SOURCE_OPTIONS)
    group = options.get("consumerGroup")
    if group is not None:
        require_group_name(group, "consumerGroup")
        if not streaming:
            raise OptionError(
                "consumerGroup is for streams: a batch read has no progress to keep; use "
                "spark.readStream with trigger(availableNow=True)"
            )
    if streaming:
        for name in ("endingOffsets", "endingTimestamp"):
            if name in options:
                raise OptionError(
                    f"{name} is for batch reads: a stream has no end (trigger(availableNow=True) stops it)"
                )
    else:
        for name in ("maxOffsetsPerTrigger", "limitFirstBatch"):
            if name in options:
                raise OptionError(f"{name} is for streams: a batch read has no triggers; set endingOffsets")
    limit_first_batch = options.boolean("limitFirstBatch", False)
    if limit_first_batch and "maxOffsetsPerTrigger" not in options:
        raise OptionError("limitFirstBatch=true needs the limit: set maxOffsetsPerTrigger")
    options.at_most_one("tags", "selector")  # RocketMQ: a subscription is of type TAG or SQL92
    tags = parse_tags(options.get("tags", SUB_ALL) or "")
    selector = options.get("selector")
    ordered = options.boolean("ordered", False)
    if ordered:
        options.at_most_one("ordered", "minPartitions")
        options.at_most_one("ordered", "maxRecordsPerPartition")
    return ReadOptions(
        path=location(options.require("path", "give the folder or the URI of a commit log")),
        storage_options=options.storage_options,
        subscription=replace(_subscription(options), retry=None if group is None else RETRY_PREFIX + group),
        tags=tags,
        selector=tag_selector(tags) if selector is None else parse_selector(selector),
        starting=_starting(options, streaming),
        ending=_ending(options),
        offsets_per_trigger_max=options.integer("maxOffsetsPerTrigger"),
        limit_first_batch=limit_first_batch,
        partitions_min=options.integer("minPartitions"),
        partition_records_max=options.integer("maxRecordsPerPartition"),
        fail_on_data_loss=options.boolean("failOnDataLoss", True),
        ordered=ordered,
        consumer_group=group,
    )


def _subscription(options: Options) -> Subscription:
    options.at_most_one("subscribe", "subscribePattern")
    pattern = options.get("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as problem:
            raise OptionError(f"subscribePattern={pattern!r} is not a regular expression: {problem}") from problem
        return Subscription(pattern=pattern)
    text = options.require("subscribe", "name the topics to read (with commas between), or set 'subscribePattern'")
    return Subscription(tuple(dict.fromkeys(require_topic_name(name.strip(), own=True) for name in text.split(","))))


def _starting(options: Options, streaming: bool) -> str | Positions | datetime:
    options.at_most_one("startingOffsets", "startingTimestamp")
    time = options.get("startingTimestamp")
    if time is not None:
        return parse_timestamp(time, "startingTimestamp")
    if streaming:
        text = options.get("startingOffsets", LATEST) or ""
        return parse_offsets(text, "startingOffsets", (EARLIEST, LATEST), (EARLIEST_OFFSET, LATEST_OFFSET))
    # A batch that starts at the end would always be empty. Spark's Kafka source forbids it too.
    text = options.get("startingOffsets", EARLIEST) or ""
    return parse_offsets(text, "startingOffsets", (EARLIEST,), (EARLIEST_OFFSET,))


def _ending(options: Options) -> str | Positions | datetime:
    options.at_most_one("endingOffsets", "endingTimestamp")
    time = options.get("endingTimestamp")
    if time is not None:
        return parse_timestamp(time, "endingTimestamp")
    text = options.get("endingOffsets", LATEST) or ""
    return parse_offsets(text, "endingOffsets", (LATEST,), (LATEST_OFFSET,))
