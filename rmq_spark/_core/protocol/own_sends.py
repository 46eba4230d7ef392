"""Names of the half batches that rmq_spark itself makes of messages, and how long each may be looked up.

A process that makes such a half batch again finds the first one by its name, and does not send it twice. So the archive
is kept until the half batch cannot be made again, however long that takes. (A user's key keeps it for upkeep's
``idempotency``.)

=================================================  =====================================  =============================
name                                               made by                                not made again when
=================================================  =====================================  =============================
``back.<group>.<topic>.<queue>.<offset>.<epoch>``  a member, of a message that failed     the group has read on, or was
                                                                                          reset, which begins an epoch
``dead.<group>.<query>.<topic>.<queue>.<offset>``  an orderly query, of a message that    the group has read on
                                                   stopped its queue too often
``resend.<group>.<offset>``                        a resend of a dead letter              the letter has expired
=================================================  =====================================  =============================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmq_spark._core.vocabulary.message import DLQ_PREFIX

if TYPE_CHECKING:
    from rmq_spark._core.log.group_table import GroupPosition
    from rmq_spark._core.protocol.engine import Engine
    from rmq_spark._core.vocabulary.queues import Queue

PREFIXES = ("back.", "dead.", "resend.")
"""Prefixes of these names. A name that a user gives has no dot."""

_PART = r"([^.]+)"
_BACK = re.compile(rf"back\.{_PART}\.{_PART}\.(\d+)\.(\d+)\.{_PART}")
_DEAD = re.compile(rf"dead\.{_PART}\..+\.{_PART}\.(\d+)\.(\d+)")
_RESEND = re.compile(rf"resend\.{_PART}\.(\d+)")


def back_name(group: str, queue: Queue, offset: int, epoch: str) -> str:
    return f"back.{group}.{queue[0]}.{queue[1]}.{offset}.{epoch}"


def dead_name(group: str, query_name: str, queue: Queue, offset: int) -> str:
    return f"dead.{group}.{query_name}.{queue[0]}.{queue[1]}.{offset}"


def resend_name(group: str, offset: int | str) -> str:
    return f"resend.{group}.{offset}"


class OwnSends:
    """Tells which names may still be looked up, by the present state of the log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._firsts = engine.firsts(refresh=False)
        self._positions: dict[str, Mapping[Queue, GroupPosition]] = {}

    def may_come(self, app_id: str) -> bool:
        """Whether the half batch of this name may be made again."""
        if match := _RESEND.fullmatch(app_id):
            return int(match[2]) >= self._firsts.get((DLQ_PREFIX + match[1], 0), 0)
        if match := _BACK.fullmatch(app_id):
            position = self._position(match)
            return position is not None and position.epoch == match[5] and position.next_offset <= int(match[4])
        if match := _DEAD.fullmatch(app_id):
            position = self._position(match)
            return position is None or position.next_offset <= int(match[4])
        return False

    def _position(self, match: re.Match[str]) -> GroupPosition | None:
        group, queue = match[1], (match[2], int(match[3]))
        if group not in self._positions:
            self._positions[group] = self._engine.groups.positions(group) if self._engine.has_groups() else {}
        return self._positions[group].get(queue)
