"""``txmq relay``: hands committed messages over to another broker."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark.cli.output import LogPath, Storage, fail, hide, open_log, plainly, wrapped
from rmq_spark.cli.stderr_log import log_to_stderr
from rmq_spark.errors import (
    NotACommitLogError,
    OptionError,
    RelayFencedError,
    RelayRefusedError,
    TopicNotFoundError,
    TxmqError,
)

if TYPE_CHECKING:
    from rmq_spark.kafka import KafkaRelay, RelayReport

KAFKA = "kafka"
KAFKA_ENV = "TXMQ_KAFKA__"
"""Prefix of Kafka's settings in the environment: ``TXMQ_KAFKA__SASL_PASSWORD`` is ``sasl.password``."""
FAILED, BAD_USAGE, FENCED, REFUSED = 1, 2, 3, 4

HELP = f"""Hand committed messages over to Kafka, each of them once and in the order of its queue.

Exit codes: 0 when all is handed over (--once), or it was stopped; {FAILED} when something failed that a restart may
cure; {BAD_USAGE} for wrong usage; {FENCED} when another process runs this relay now, and {REFUSED} when a person has to
decide: do not restart after these two.
"""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command(help=HELP)(relay)


@plainly
def relay(
    path: LogPath,
    to: Annotated[str, typer.Option("--to", metavar=KAFKA, help=f"Where to: {KAFKA}.")],
    servers: Annotated[
        str | None, typer.Option("--bootstrap-servers", metavar="HOST:PORT,…", help="Kafka's brokers.")
    ] = None,
    topics: Annotated[str | None, typer.Option(help="Topics with commas between; all by default.")] = None,
    topic_pattern: Annotated[str | None, typer.Option(help="A regular expression for whole names.")] = None,
    topic_template: Annotated[str, typer.Option(help="Kafka's topic.")] = "{topic}",
    once: Annotated[bool, typer.Option("--once", help="Hand over what is committed now, and end.")] = False,
    name: Annotated[str, typer.Option("--relay", help="Its name: the positions are kept under it.")] = KAFKA,
    shards: Annotated[int, typer.Option(help="So many processes share the queues.")] = 1,
    shard: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    reshard: Annotated[
        bool, typer.Option("--reshard", help="Change the number of shards; ends all of the old number.")
    ] = False,
    start: Annotated[str, typer.Option(help="Where its first start begins: earliest or latest.")] = "earliest",
    on_poison: Annotated[
        str, typer.Option(help="A message that Kafka refuses: refuse ends the relay, park puts it aside.")
    ] = "refuse",
    parking_topic: Annotated[str, typer.Option(help="Where it is put.")] = "txmq-parked",
    on_expired: Annotated[
        str, typer.Option(help="Messages that expired before: stop ends the relay, skip records the gap.")
    ] = "stop",
    positions_topic: Annotated[str, typer.Option(help="Where the positions are kept.")] = "txmq-positions",
    create_topics: Annotated[
        bool, typer.Option("--create-topics", help="Create missing topics, with a partition for each queue.")
    ] = False,
    replication_factor: Annotated[int | None, typer.Option(help="Of topics that the relay creates.")] = None,
    max_batch_messages: Annotated[int, typer.Option(help="Of one Kafka transaction.")] = 10_000,
    max_batch_bytes: Annotated[str, typer.Option(help="Of one Kafka transaction.")] = "16m",
    transaction_timeout: Annotated[str, typer.Option(help="When Kafka aborts what a dead process left.")] = "60s",
    retry_timeout: Annotated[str, typer.Option(help="How long aborted transactions are tried again.")] = "5m",
    poll_interval: Annotated[str, typer.Option(help="Between two looks at a log that has nothing new.")] = "1s",
    kafka: Annotated[
        list[str] | None,
        typer.Option(
            "--kafka",
            metavar="KEY=VALUE",
            help="A setting of Kafka's client; may be repeated. Other users of the machine can see arguments: set "
            f"secrets in the environment, as {KAFKA_ENV}SASL_PASSWORD for sasl.password.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Reports as lines of JSON.")] = False,
    storage: Storage = None,
) -> None:
    if to != KAFKA:
        raise typer.BadParameter(f"{to!r} is not known: {KAFKA} is", param_hint="--to")
    settings = kafka_settings(kafka, os.environ)
    servers = servers or settings.pop("bootstrap.servers", None)
    if servers is None:
        raise typer.BadParameter(
            "no broker is named: write --bootstrap-servers broker1:9092,broker2:9092, or set "
            f"{KAFKA_ENV}BOOTSTRAP_SERVERS (docs/kafka.md)",
            param_hint="--bootstrap-servers",
        )
    log_to_stderr(logging.INFO)
    try:
        from rmq_spark._core.kafka.relay_settings import is_secret
        from rmq_spark.kafka import KafkaRelay

        log = open_log(path, storage)
        hide(value for key, value in settings.items() if is_secret(key))
        kafka_relay = KafkaRelay(
            log,
            servers,
            topics=None if topics is None else [t.strip() for t in topics.split(",") if t.strip()],
            topic_pattern=topic_pattern,
            topic_template=topic_template,
            relay=name,
            shards=shards,
            shard=shard,
            reshard=reshard,
            start=start,
            on_poison=on_poison,
            parking_topic=parking_topic,
            on_expired=on_expired,
            positions_topic=positions_topic,
            create_topics=create_topics,
            replication_factor=replication_factor,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            transaction_timeout=transaction_timeout,
            retry_timeout=retry_timeout,
            poll_interval=poll_interval,
            kafka=settings,
        )
        with kafka_relay:
            _run(kafka_relay, once, as_json)
    except TxmqError as problem:
        fail(problem, _exit_code(problem))


def _exit_code(problem: TxmqError) -> int:
    usage_errors = (OptionError, NotACommitLogError, TopicNotFoundError)
    for kind, code in ((RelayFencedError, FENCED), (RelayRefusedError, REFUSED), (usage_errors, BAD_USAGE)):
        if isinstance(problem, kind):
            return code
    return FAILED


def kafka_settings(given: Sequence[str] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Kafka's client: those of the environment, overridden by those given as arguments."""
    names = [name for name in environment if name.startswith(KAFKA_ENV)]
    settings = {name[len(KAFKA_ENV) :].lower().replace("_", "."): environment[name] for name in names}
    for text in given or ():
        key, equals_sign, value = text.partition("=")
        if not equals_sign or not key:
            raise typer.BadParameter("KEY=VALUE is expected (what was given is not shown)", param_hint="--kafka")
        settings[key] = value
    return settings


def _run(relay: KafkaRelay, once: bool, as_json: bool) -> None:
    stop = threading.Event()

    def request_stop(signum: int, frame: FrameType | None) -> None:
        stop.set()

    def show(report: RelayReport) -> None:
        typer.echo(json.dumps(report.to_dict()) if as_json else wrapped(str(report)))
        sys.stdout.flush()

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    if once:
        show(relay.run_once(stop))
    else:
        relay.run(stop, show)
