"""Shares of a group's queues: each member computes its own, and all agree.

There is no leader. A member's share of a topic is a number, which follows from the sorted living members::

    8 queues, 3 members        a: 3    b: 3    c: 2
    d joins                    a: 2    b: 2    c: 2    d: 2     a and b release one each, d claims what is free

Which queues make up the share is not computed: a member keeps those that it has, so that few queues change hands.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rmq_spark._core.log.group_table import GroupPosition
from rmq_spark._core.vocabulary.queues import Queue


class Moves(NamedTuple):
    """The queues that a member must release and claim to have its share."""

    release: list[Queue]
    claim: dict[Queue, int]
    """Queues to claim, each with its last seen generation."""
    is_short: bool
    """True when the member has less than its share, whether or not anything can be claimed now."""


def share(topic: str, queues: int, members: Sequence[str], member: str) -> int:
    """Return how many queues of a topic belong to a member.

    Which members get one queue more differs by topic: else the first member would get every topic of one queue.
    """
    if member not in members:
        return 0
    least, extra = divmod(queues, len(members))
    rank = (members.index(member) + zlib.crc32(topic.encode())) % len(members)
    return least + (rank < extra)


def moves(
    member: str,
    owned: Collection[Queue],
    queues: Mapping[str, int],
    positions: Mapping[Queue, GroupPosition],
    live: Callable[[str], Sequence[str]],
    is_dead: Callable[[str], bool],
) -> Moves:
    """Return what a member should release and claim. ``owned`` are the queues that it reads and is not about to
    release. ``queues`` has the topics that it reads, and how many queues each has. ``live`` returns the sorted
    living members that read a topic."""
    release: list[Queue] = []
    claim: dict[Queue, int] = {}
    is_short = False
    for topic, count in queues.items():
        members = live(topic)
        kept = sorted(queue for queue in owned if queue[0] == topic)
        own_share = share(topic, count, members, member)
        release += kept[own_share:]
        missing = own_share - len(kept)
        if missing <= 0:
            continue
        is_short = True
        # Members that look at the same moment begin at different queues.
        begin = members.index(member) * count // len(members)
        for queue in ((topic, (begin + step) % count) for step in range(count)):
            owner = positions[queue].owner if queue in positions else None
            if queue not in owned and missing and (owner is None or owner == member or is_dead(owner)):
                claim[queue] = positions[queue].generation if queue in positions else 0
                missing -= 1
    return Moves(release, claim, is_short)
