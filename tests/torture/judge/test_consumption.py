"""The checker of consumers says nothing of what is right, and names what is wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.torture.judge.consumption import (
    Delivery,
    Message,
    SentBack,
    of_deliveries,
    of_order,
    of_progress,
    of_results,
    of_retries,
)

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
MESSAGES = [Message(f"m{q}{o}", q, o, f"key-{q}:{o}") for q in (0, 1) for o in range(4)]
DELIVERIES = [Delivery(m.msg_id, m.queue, m.offset) for m in MESSAGES]
AGAIN = [Delivery("m01", 0, 0, 1), Delivery("m02", 0, 1, 1)]
RETRIES = [SentBack(d.msg_id, 1, NOW, NOW + timedelta(seconds=1)) for d in AGAIN]
DEAD = ["m02"]
RESULTS = [m.body for m in reversed(MESSAGES[4:])][::-1] + [m.body for m in MESSAGES[:4]]


def failures(message: Message) -> int:
    return {"m01": 1, "m02": 9}.get(message.msg_id, 0)


def key_of(body: str) -> str:
    return body.partition(":")[0]


def retries_with(**change: Any) -> list[str]:
    given = {"deliveries": DELIVERIES + AGAIN, "retries": RETRIES, "dead": DEAD, **change}
    return of_retries(MESSAGES, failures=failures, times_max=1, **given)


def test_what_is_right_is_silent() -> None:
    assert of_deliveries(MESSAGES, DELIVERIES) == []
    assert of_order(DELIVERIES[:3] + DELIVERIES[1:]) == [], "coming again is no anomaly"
    assert of_progress({0: 4, 1: 2}, {(d.queue, d.offset) for d in DELIVERIES[:6]}) == []
    assert retries_with() == []
    assert of_results(MESSAGES, RESULTS, key_of) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (of_deliveries(MESSAGES, DELIVERIES[1:]), "never delivered"),
        (of_deliveries(MESSAGES, [*DELIVERIES, Delivery("ghost", 0, 0)]), "in no topic"),
        (of_order(DELIVERIES[:1] + DELIVERIES[2:]), "out of order"),
        (of_progress({0: 3}, {(0, 0), (0, 2)}), "progress ahead"),
        (retries_with(retries=RETRIES[1:]), "retry 1 is lost"),
        (retries_with(retries=[*RETRIES, RETRIES[0]]), "is there 2 times"),
        (retries_with(retries=[replace(RETRIES[0], came=NOW - timedelta(seconds=1)), RETRIES[1]]), "before its time"),
        (retries_with(retries=[*RETRIES, replace(RETRIES[0], msg_id="m03")]), "without a failure"),
        (retries_with(deliveries=DELIVERIES + AGAIN[1:]), "was not delivered"),
        (retries_with(dead=[]), "not dead"),
        (retries_with(dead=["m02", "m02"]), "dead 2 times"),
        (retries_with(dead=["m02", "m01"]), "dead without a cause"),
        (of_results(MESSAGES, RESULTS[1:], key_of), "result lost"),
        (of_results(MESSAGES, [*RESULTS, RESULTS[0]], key_of), "doubled or made up"),
        (of_results(MESSAGES, [RESULTS[1], RESULTS[0], *RESULTS[2:]], key_of), "in another order"),
    ],
)
def test_what_is_wrong_is_named(found: list[str], words: str) -> None:
    assert any(words in sentence for sentence in found), found
