"""Runs a message listener within spans, where the program traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_spark._core.consumers.listener import CONSUME_SUCCESS, SUCCESS, EachMessage, Listen, Statuses
from rmq_spark._core.runtime.spans import Tracing
from rmq_spark._core.vocabulary.message import MessageExt


def traced(listener: Listen | EachMessage, here: Tracing, log: str, group: str) -> Listen | EachMessage:
    """Return a listener that makes a span for each call: for a message a child of its own span, for several messages
    one with links to theirs."""
    if isinstance(listener, EachMessage):
        function = listener.function

        def consume(message: MessageExt) -> Any:
            with here.processing_one(log, group, message) as span:
                status = function(message)
                if not _is_success(status):
                    here.failed(span, _word(status))
                return status

        return EachMessage(consume)
    call = listener

    def listen(messages: pa.Table) -> Statuses:
        with here.processing(log, group, messages) as span:
            found = call(messages)
            failed = [s for s in (found if isinstance(found, Sequence) else [found]) if not _is_success(s)]
            if failed:
                here.failed(span, _word(failed[0]))
            return found

    return listen


def _is_success(status: object) -> bool:
    return status in (CONSUME_SUCCESS, SUCCESS)


def _word(status: object) -> str:
    return str(getattr(status, "name", status))
