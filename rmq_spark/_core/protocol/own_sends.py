"""Names of the half batches that rmq_spark makes of messages, and for how long each may be asked for.

Whoever makes one again finds it by its name, and does not send it twice. So what is kept of it stays until nobody can
make it again, however long that takes; a key that a user gave counts for upkeep's ``idempotency``.

=================================================  =====================================  =============================
name                                               made by                                nobody makes it again when
=================================================  =====================================  =============================
``back.<group>.<topic>.<queue>.<offset>.<epoch>``  a member, of a message that failed     the group has read on, or was
                                                                                          reset, which begins an epoch
``dead.<group>.<query>.<topic>.<queue>.<offset>``  an orderly query, of a message that    the group has read on
                                                   stopped its queue too often
``resend.<group>.<offset>``                        whoever resends a dead letter          the letter has expired
=================================================  =====================================  =============================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rmq_spark._core.vocabulary.message import DLQ_PREFIX

if TYPE_CHECKING:
    from rmq_spark._core.log.groups import Place, Queue
    from rmq_spark._core.protocol.engine import Engine

PREFIXES = ("back.", "dead.", "resend.")
"""Of these names. A name that a user gives has no dot."""

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
    """Tells which names may still be asked for, as the log is now."""

    def __init__(self, log: Engine) -> None:
        self._log = log
        self._firsts = log.firsts(refresh=False)
        self._places: dict[str, Mapping[Queue, Place]] = {}

    def may_come(self, app_id: str) -> bool:
        """Whether somebody may make the half batch of this name again."""
        if found := _RESEND.fullmatch(app_id):
            return int(found[2]) >= self._firsts.get((DLQ_PREFIX + found[1], 0), 0)
        if found := _BACK.fullmatch(app_id):
            place = self._place(found)
            return place is not None and place.epoch == found[5] and place.next_offset <= int(found[4])
        if found := _DEAD.fullmatch(app_id):
            place = self._place(found)
            return place is None or place.next_offset <= int(found[4])
        return False

    def _place(self, found: re.Match[str]) -> Place | None:
        group, queue = found[1], (found[2], int(found[3]))
        if group not in self._places:
            self._places[group] = self._log.groups.places(group) if self._log.has_groups() else {}
        return self._places[group].get(queue)
