"""Runs a message listener within spans, where the program traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_spark._core.consumers.message_listener import SUCCESS, EachMessage, Listen, Results
from rmq_spark._core.runtime.spans import Tracing
from rmq_spark._core.vocabulary.message import MessageExt


def traced(listener: Listen | EachMessage, here: Tracing, log: str, group: str) -> Listen | EachMessage:
    """Return a listener that runs each call in a span: for one message, a child of the message's span; for several
    messages, a span with links to theirs."""
    if isinstance(listener, EachMessage):
        function = listener.function

        def consume(message: MessageExt) -> Any:
            with here.processing_one(log, group, message) as span:
                result = function(message)
                if not _is_success(result):
                    here.failed(span, _name_of(result))
                return result

        return EachMessage(consume)
    call = listener

    def listen(messages: pa.Table) -> Results:
        with here.processing(log, group, messages) as span:
            results = call(messages)
            failed = [r for r in (results if isinstance(results, Sequence) else [results]) if not _is_success(r)]
            if failed:
                here.failed(span, _name_of(failed[0]))
            return results

    return listen


def _is_success(result: object) -> bool:
    return result is None or result is SUCCESS


def _name_of(result: object) -> str:
    return str(getattr(result, "name", result))
