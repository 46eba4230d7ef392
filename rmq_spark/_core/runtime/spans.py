"""Spans and trace context by OpenTelemetry, for programs that use it.

For each send or take, a program without a tracer provider pays a look into ``sys.modules``. Nothing here imports
opentelemetry before the program has.

The context of a message travels in its property ``traceparent`` (W3C), as with RocketMQ's own instrumentation::

    producer     create a ─┐                        one for each of several messages
                 create b ─┤ links
                 send      ┘── settle (commit)      a single message: send alone, and no create
    consumer     receive ── links to a, b
                 process a (a's child) or, of many messages at once, process ── links to a, b
                 settle (ack, or retry)

Baggage is not sent: messages stay in the log, where others than the callee read them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.message import PROPERTIES, Message, distinct
from rmq_spark._core.vocabulary.redaction import redacted, sentence_of
from rmq_spark.errors import MessageError

if TYPE_CHECKING:
    from opentelemetry.trace import Span


SYSTEM = "rocketmq"
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
"""The properties that carry a message's context."""
LINKS_MAX = 128
"""The most links of a span, and the most messages of a send that get a span each. OpenTelemetry's SDK drops more
links."""
NORMAL, TRANSACTION, FIFO, DELAY = "normal", "transaction", "fifo", "delay"

_made: tuple[Any, Tracing] | None = None


def tracing() -> Tracing | None:
    """Return what makes spans in this program; None while it has no tracer provider."""
    global _made
    api: Any = sys.modules.get("opentelemetry.trace")
    get = getattr(api, "get_tracer_provider", None)  # None while it is being imported
    if get is None:
        return None
    provider = get()
    if _made is None or _made[0] is not provider:
        if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
            return None
        _made = (provider, Tracing(provider))
    return _made[1]


class Tracing:
    """Makes spans with the conventions for messaging systems."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from rmq_spark import __version__

        self._api = trace
        self._tracer = provider.get_tracer("rmq_spark", __version__)
        self._propagator = TraceContextTextMapPropagator()

    # ------------------------------------------------------------------ sending
    @contextmanager
    def sending(
        self,
        log: str,
        group: str,
        given: list[Message] | pa.Table,
        topic: str | None,
        transactional: bool,
        fifo: frozenset[str],
    ) -> Iterator[tuple[list[Message] | pa.Table, Span]]:
        """The span of a send, and the messages with their context. ``topic`` is for rows of a table without one;
        ``transactional`` tells whether a local transaction runs."""
        common = {"messaging.system": SYSTEM, "messaging.rocketmq.namespace": redacted(log)}
        common["txmq.producer_group"] = group
        kinds = self._api.SpanKind
        links: Sequence[Any] = ()
        topics = _topics(given, topic)
        attributes: dict[str, Any] = {**common, **_operation("send", "send"), **_destination(topics)}
        single = isinstance(given, list) and len(given) == 1
        kind = kinds.PRODUCER
        if single:
            attributes |= _of_message(given[0], transactional, fifo)
        else:
            attributes["messaging.batch.message_count"] = len(given)
            if transactional:
                attributes["messaging.rocketmq.message.type"] = TRANSACTION
        if isinstance(given, list) and not single and len(given) <= LINKS_MAX:
            kind = kinds.CLIENT
            given, links = self._created(common, given, transactional, fifo)
        elif isinstance(given, list):
            links = self.links(m.properties or {} for m in given[:LINKS_MAX])
        with self._span("send", topics, kind, attributes, links) as span:
            yield self._with_context(given), span

    def _created(
        self, common: Mapping[str, Any], messages: Sequence[Message], transactional: bool, fifo: frozenset[str]
    ) -> tuple[list[Message], list[Any]]:
        """Messages with a context each, and the links to these contexts. A message that has a context keeps it."""
        traced: list[Message] = []
        links: list[Any] = []
        for message in messages:
            properties = message.properties or {}
            if TRACEPARENT not in properties:
                attributes = {**common, **_operation("create", "create"), **_destination([message.topic])}
                attributes |= _of_message(message, transactional, fifo)
                span = self._tracer.start_span(
                    f"create {message.topic}", kind=self._api.SpanKind.PRODUCER, attributes=attributes
                )
                message = self._injected(message, self._api.set_span_in_context(span))
                span.end()
                links.append(self._api.Link(span.get_span_context()))
            else:
                links += self.links([properties])
            traced.append(message)
        return traced, links

    def _with_context(self, messages: list[Message] | pa.Table) -> list[Message] | pa.Table:
        """The messages with the current context, unless they have one. Rows of a table that has properties stay as they
        are."""
        if isinstance(messages, list):
            return [m if TRACEPARENT in (m.properties or {}) else self._injected(m, None) for m in messages]
        if "properties" in messages.column_names or not messages.num_rows:
            return messages
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        same = pa.repeat(pa.scalar(list(carrier.items()), PROPERTIES), messages.num_rows)
        return messages.append_column("properties", same)

    def _injected(self, message: Message, context: Any) -> Message:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        try:
            return replace(message, properties={**(message.properties or {}), **carrier})
        except MessageError:  # there is no room for it
            return message

    def sending_batch(self, log: str, half_id: str, topic: str | None) -> AbstractContextManager[Span]:
        """See :func:`sending_batch`."""
        attributes = {
            "messaging.system": SYSTEM,
            "messaging.rocketmq.namespace": redacted(log),
            **_operation("send", "send"),
            **_destination([topic] if topic else []),
            "txmq.half_id": half_id,
        }
        return self._span("send", [topic] if topic else [], self._api.SpanKind.CLIENT, attributes)

    # ------------------------------------------------------------------ consuming
    def received(self, log: str, group: str, tables: Sequence[pa.Table], began_ns: int) -> None:
        """The span of a fetch that began at ``began_ns`` and has returned messages."""
        topics = sorted({name for table in tables for name in pc.unique(table["topic"]).to_pylist()})
        span = self._tracer.start_span(
            _name("receive", topics),
            kind=self._api.SpanKind.CLIENT,
            links=self.links_of(tables),
            start_time=began_ns,
            attributes={
                **self._consuming(log, group, topics, "receive", "receive"),
                "messaging.batch.message_count": sum(table.num_rows for table in tables),
            },
        )
        span.end()

    def processing(self, log: str, group: str, messages: pa.Table) -> AbstractContextManager[Span]:
        """The span of a listener's call for a table of messages, with links to their spans."""
        topics = sorted(pc.unique(messages["topic"]).to_pylist())
        attributes = self._consuming(log, group, topics, "process", "process")
        attributes["messaging.batch.message_count"] = messages.num_rows
        attributes |= _partition(pc.unique(messages["queue_id"]).to_pylist())
        links = self.links_of([messages])
        return self._span("process", topics, self._api.SpanKind.CONSUMER, attributes, links)

    def processing_one(self, log: str, group: str, message: Any) -> AbstractContextManager[Span]:
        """The span of a listener's call for one message: a child of the message's own span."""
        attributes = self._consuming(log, group, [message.topic], "process", "process")
        attributes |= {**_of_message(message, None, frozenset()), "messaging.message.id": message.msg_id}
        attributes |= _partition([message.queue_id])
        context = self._context(message.properties or {})
        return self._span("process", [message.topic], self._api.SpanKind.CONSUMER, attributes, (), context)

    # ------------------------------------------------------------------ settling
    def settling(
        self,
        log: str,
        verdict: str,
        topics: Iterable[str],
        messages: int,
        links: Sequence[Any] = (),
        **more: str | int,
    ) -> AbstractContextManager[Span]:
        """The span of a verdict: ``commit``, ``rollback``, ``ack``, ``retry``. ``more`` are attributes of our own, such
        as ``half_id`` for ``txmq.half_id``; ``group`` is the consumer group."""
        names = sorted(set(topics))
        group = more.pop("group", None)
        attributes = self._consuming(log, group, names, "settle", verdict)
        attributes["messaging.batch.message_count"] = messages
        attributes |= {f"txmq.{name}": value for name, value in more.items()}
        return self._span(verdict, names, self._api.SpanKind.CLIENT, attributes, links)

    # ------------------------------------------------------------------ parts
    @contextmanager
    def _span(
        self,
        operation: str,
        topics: Sequence[str],
        kind: Any,
        attributes: Mapping[str, Any],
        links: Sequence[Any] = (),
        context: Any = None,
    ) -> Iterator[Span]:
        """The current span of a ``with`` statement. It records what is raised, without secrets."""
        span = self._tracer.start_span(
            _name(operation, topics), context, kind=kind, attributes=attributes, links=links, record_exception=False
        )
        with self._api.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as problem:
                self.failed(span, problem)
                raise

    def failed(self, span: Span, problem: BaseException | str) -> None:
        kind, description = (
            (problem, problem) if isinstance(problem, str) else (type(problem).__name__, sentence_of(problem))
        )
        span.set_attribute("error.type", kind)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, description))

    @staticmethod
    def _consuming(
        log: str, group: str | int | None, topics: Sequence[str], operation: str, name: str
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {"messaging.system": SYSTEM, "messaging.rocketmq.namespace": redacted(log)}
        if group is not None:
            attributes["messaging.consumer.group.name"] = group
        return {**attributes, **_operation(operation, name), **_destination(topics)}

    def _context(self, properties: Mapping[str, str]) -> Any:
        carrier = {name: properties[name] for name in (TRACEPARENT, TRACESTATE) if name in properties}
        return self._propagator.extract(carrier) if carrier else None

    def links(self, many: Iterable[Mapping[str, str]]) -> list[Any]:
        """Links to the contexts in some messages' properties, each once."""
        links: dict[int, Any] = {}
        for properties in many:
            context = self._context(properties)
            if context is not None:
                span = self._api.get_current_span(context).get_span_context()
                if span.is_valid and len(links) < LINKS_MAX:
                    links[span.span_id] = self._api.Link(span)
        return list(links.values())

    def links_of(self, tables: Iterable[pa.Table]) -> list[Any]:
        """Links to the contexts of some messages; when there are many, of the first ones."""
        return self.links(dict(p) for p in _properties(tables))


def sending_batch(log: str, half_id: str, topic: str | None) -> AbstractContextManager[object]:
    """The span of a sink's micro-batch, where this program traces. Its messages have the context in their
    ``properties``: nothing is done for each row."""
    tracer = tracing()
    return nullcontext() if tracer is None else tracer.sending_batch(log, half_id, topic)


def settling(
    log: str,
    half_id: str,
    attempt: int,
    who: str,
    commit: int,
    rollback: int,
    topics: Iterable[str],
    messages: Callable[[], pa.Table] | None = None,
) -> AbstractContextManager[object]:
    """The span of verdicts on messages of a half batch, where this program traces. It links to the spans of
    ``messages``; within the span of their send it needs no links."""
    verdict = "settle" if commit and rollback else "commit" if commit else "rollback"
    ids: dict[str, str | int] = {"half_id": half_id, "attempt": attempt, "decided_by": who}
    return acknowledging(log, verdict, topics, commit + rollback, messages, **ids)


def acknowledging(
    log: str,
    what: str,
    topics: Iterable[str],
    messages: int,
    linked: Callable[[], pa.Table] | None = None,
    **more: str | int,
) -> AbstractContextManager[object]:
    """The span of an action on messages, such as ``ack`` or ``retry``, where this program traces, with links to their
    spans."""
    tracer = tracing()
    if tracer is None or not messages:  # a queue given back unread concerns no messages
        return nullcontext()
    links = [] if linked is None else tracer.links_of([linked()])
    return tracer.settling(log, what, topics, messages, links, **more)


# ---------------------------------------------------------------- attributes
def _name(operation: str, topics: Sequence[str]) -> str:
    return f"{operation} {topics[0]}" if len(topics) == 1 else operation


def _operation(kind: str, name: str) -> dict[str, Any]:
    return {"messaging.operation.type": kind, "messaging.operation.name": name}


def _destination(topics: Sequence[str]) -> dict[str, Any]:
    return {"messaging.destination.name": topics[0]} if len(topics) == 1 else {}


def _partition(queues: Sequence[int | None]) -> dict[str, Any]:
    return {"messaging.destination.partition.id": str(queues[0])} if len(queues) == 1 and queues[0] is not None else {}


def _of_message(message: Message, transactional: bool | None, fifo: frozenset[str]) -> dict[str, Any]:
    """The attributes of one message. ``transactional`` is None where nobody knows any more how the message was sent."""
    attributes: dict[str, Any] = {"messaging.message.body.size": len(message.body)}
    keys = message.keys_text
    if message.tags is not None:
        attributes["messaging.rocketmq.message.tag"] = message.tags
    if keys:
        attributes["messaging.rocketmq.message.keys"] = keys.split()
    if message.sharding_key is not None:
        attributes["messaging.rocketmq.message.group"] = message.sharding_key
    if message.deliver_at is not None:
        attributes["messaging.rocketmq.message.delivery_timestamp"] = int(message.deliver_at.timestamp() * 1_000)
    if message.delay_level is not None:
        attributes["messaging.rocketmq.message.delay_time_level"] = message.delay_level
    if transactional is not None:
        delayed = message.deliver_at is not None or message.delay_level is not None
        kind = TRANSACTION if transactional else DELAY if delayed else FIFO if message.topic in fifo else NORMAL
        attributes["messaging.rocketmq.message.type"] = kind
    return attributes


def _topics(messages: list[Message] | pa.Table, topic: str | None) -> list[str]:
    if isinstance(messages, list):
        return sorted({message.topic for message in messages})
    names = distinct(messages["topic"]) if "topic" in messages.column_names else [topic]
    return sorted({name if isinstance(name, str) else str(topic) for name in names if name or topic})


def _properties(tables: Iterable[pa.Table]) -> Iterator[Sequence[tuple[str, str]]]:
    """The properties of messages that have a context; when there are many, of the first ones."""
    left = LINKS_MAX
    for table in tables:
        column = table["properties"]
        has_context = pc.is_valid(pc.map_lookup(column, pa.scalar(TRACEPARENT), "first"))
        properties = column.filter(has_context).slice(0, left)
        left -= len(properties)
        yield from properties.to_pylist()
