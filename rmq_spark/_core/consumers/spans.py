"""Runs a message listener within spans, where the program traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rmq_spark._core.consumers.listener import CONSUME_SUCCESS, SUCCESS, EachMessage, Listen, Statuses
from rmq_spark._core.runtime.spans import Tracing
from rmq_spark._core.vocabulary.message import MessageExt


def traced(listener: Listen | EachMessage, here: Tracing, log: str, group: str) -> Listen | EachMessage:
    """Return a listener that runs each call in a span: for one message, a child of the message's span; for several
    messages, a span with links to theirs."""
    if isinstance(listener, EachMessage):
        function = listener.function

        def consume(message: MessageExt) -> Any:
            with here.processing_one(log, group, message) as span:
                status = function(message)
                if not _is_success(status):
                    here.failed(span, _status_name(status))
                return status

        return EachMessage(consume)
    call = listener

    def listen(messages: pa.Table) -> Statuses:
        with here.processing(log, group, messages) as span:
            statuses = call(messages)
            failed = [s for s in (statuses if isinstance(statuses, Sequence) else [statuses]) if not _is_success(s)]
            if failed:
                here.failed(span, _status_name(failed[0]))
            return statuses

    return listen


def _is_success(status: object) -> bool:
    return status in (CONSUME_SUCCESS, SUCCESS)


def _status_name(status: object) -> str:
    return str(getattr(status, "name", status))
