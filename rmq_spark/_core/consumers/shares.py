"""Who reads which queues: each member works it out for itself, and all come to the same.

Nobody leads. A member's share of a topic is a number, which follows from the sorted living members::

    8 queues, 3 members        a: 3    b: 3    c: 2
    d joins                    a: 2    b: 2    c: 2    d: 2     a and b release one each, d claims what is free

Which queues it has does not follow from anything: a member keeps those that it has, so that few queues change hands.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from rmq_spark._core.log.groups import Place

Queue = tuple[str, int]


class Moves(NamedTuple):
    """What a member should do to have its share."""

    release: list[Queue]
    claim: dict[Queue, int]
    """Queues to claim, and their generation as it was seen."""
    is_short: bool
    """True when the member has less than its share, whether or not anything can be claimed now."""


def share(topic: str, queues: int, members: Sequence[str], member: str) -> int:
    """Return how many queues of a topic belong to a member.

    Who gets one more begins at another member for each topic: else the first one would have all topics of one queue.
    """
    if member not in members:
        return 0
    least, more = divmod(queues, len(members))
    at = (members.index(member) + zlib.crc32(topic.encode())) % len(members)
    return least + (at < more)


def moves(
    member: str,
    owned: Collection[Queue],
    queues: Mapping[str, int],
    places: Mapping[Queue, Place],
    live: Callable[[str], Sequence[str]],
    is_dead: Callable[[str], bool],
) -> Moves:
    """Return what a member should release and claim.

    Parameters
    ----------
    owned : collection of Queue
        Those that the member reads, without those that it is about to release.
    queues : mapping of str to int
        The topics that it reads, and how many queues each has.
    places : mapping
        The group's places.
    live : callable
        The sorted living members that read a topic.
    is_dead : callable
        Whether the owner of a queue is dead.
    """
    release: list[Queue] = []
    claim: dict[Queue, int] = {}
    is_short = False
    for topic, count in queues.items():
        members = live(topic)
        mine = sorted(queue for queue in owned if queue[0] == topic)
        wanted = share(topic, count, members, member)
        release += mine[wanted:]
        short = wanted - len(mine)
        if short <= 0:
            continue
        is_short = True
        # Members that look at the same moment begin at different queues.
        begin = members.index(member) * count // len(members)
        for queue in ((topic, (begin + n) % count) for n in range(count)):
            owner = places[queue].owner if queue in places else None
            if queue not in owned and short and (owner is None or owner == member or is_dead(owner)):
                claim[queue] = places[queue].generation if queue in places else 0
                short -= 1
    return Moves(release, claim, is_short)
