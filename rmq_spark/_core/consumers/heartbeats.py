"""Heartbeats: which members of a consumer group are alive, as one member sees it.

A heartbeat is a small file that its member overwrites, ``groups/_members/<group>/<member>``. It has a counter. Nobody
compares clocks: an observer notes when it last saw the counter move, by its own monotonic clock. A member whose counter
has not moved for its lease, which the heartbeat names, is dead. Heartbeats are no commits. They cost a put each, and
nobody waits for another one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import pyarrow.fs as pafs

from rmq_spark._core.storage.store_errors import asking, writing
from rmq_spark._core.storage.table import Table
from rmq_spark._core.vocabulary.options import seconds
from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.errors import OptionError

logger = logging.getLogger(__name__)

FOLDER = "_members"
"""In the folder of the table ``groups``. Delta and its VACUUM leave names with an underscore alone."""
LEASE_S = 30.0
"""Three heartbeats: one that is late or lost costs no queue."""
FORGOTTEN_LEASES = 3.0
"""A heartbeat that has not moved for so many leases is removed. A member that comes later trusts the store's times."""


def new_member_name(unique_id: str) -> str:
    """Return a name that no other member has or had: host, process and something unique (RocketMQ: ``clientId``)."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64]
    return f"{host}@{os.getpid()}.{unique_id[:8]}"


class Heartbeat(NamedTuple):
    """The newest heartbeat of a member, for people to look at.

    Attributes
    ----------
    age_s : float
        Seconds since it was put: the store's clock then, and this machine's now.
    lease_s : float
        The member's own lease, in seconds, which the heartbeat names.
    """

    age_s: float
    lease_s: float

    @property
    def is_alive(self) -> bool:
        """Whether the member's lease lasts."""
        return self.age_s <= self.lease_s


@dataclass
class _Seen:
    """What an observer saw of a member, and since when."""

    content: bytes | None
    since_s: float
    lease_s: float
    topics: frozenset[str] = frozenset()
    chooses: str | None = None


class Members:
    """The members of a group, as one of them sees them.

    Parameters
    ----------
    table : Table
        The table ``groups``.
    group, member : str
    topics : collection of str
        Those that this member reads. The shares of a topic's queues are counted among members that read it.
    lease_s : float
        Seconds without a heartbeat after which a member is dead.
    margin_s : float
        A member starts no listener call in the last so many seconds of its own lease.
    chooses : str
        The tags or the selector of this member, empty when it wants all messages.
    """

    def __init__(
        self,
        table: Table,
        group: str,
        member: str,
        topics: Collection[str],
        lease_s: float,
        margin_s: float,
        chooses: str = "",
    ) -> None:
        self._table = table
        self._machine = table.machine
        self._folder = f"{table.folder}/{FOLDER}"
        self.group, self.member = group, member
        self.topics = frozenset(topics)
        self.chooses = chooses
        self._lease_s, self._margin_s = lease_s, margin_s
        self._counter = 0
        self._beat_s: float | None = None  # when the newest heartbeat that arrived was begun
        self._seen: dict[str, _Seen] = {}
        self.of_all_groups = 1
        """Heartbeats of all groups of the log that the last look found."""

    # ------------------------------------------------------------------ its own
    def beat(self) -> float:
        """Put a heartbeat, and return when that began. It counts only once :meth:`renew` was told so."""
        began_s = self._machine.monotonic()
        self._counter += 1
        told = {
            "counter": self._counter, "topics": sorted(self.topics), "chooses": self.chooses, "lease": self._lease_s
        }  # fmt: skip
        path = self._path(self.member)
        with writing(self._folder):
            if isinstance(self._table.fs, pafs.LocalFileSystem):
                self._table.fs.create_dir(path.rpartition("/")[0], recursive=True)
            with self._table.fs.open_output_stream(path) as stream:
                stream.write(json.dumps(told).encode())
        return began_s

    def renew(self, began_s: float) -> None:
        """The member's own lease runs from here."""
        self._beat_s = began_s

    def may_start(self) -> bool:
        """Return True while no other member may think that this one is dead, now or within the margin."""
        return self._beat_s is not None and self._machine.monotonic() - self._beat_s < self._lease_s - self._margin_s

    def leave(self) -> None:
        """Remove the heartbeat."""
        self._beat_s = None
        with suppress(FileNotFoundError), writing(self._folder):
            self._table.fs.delete_file(self._path(self.member))

    # ------------------------------------------------------------------ the others'
    def look(self) -> None:
        """Read the heartbeats of all members."""
        now_s = self._machine.monotonic()
        infos = _listed(self._table)
        self.of_all_groups = max(1, len(infos))
        found = _read(self._table, infos, self.group)
        _, own = found.get(self.member, (b"", None))
        for member, (content, written) in found.items():
            known = self._seen.get(member)
            if known is None and _is_forgotten(content, written, own):
                self._seen[member] = _seen(content, -math.inf, self._lease_s)
            elif known is None or known.content != content:
                self._seen[member] = _seen(content, now_s, self._lease_s)
            elif self._old(known, FORGOTTEN_LEASES) and member != self.member:
                with suppress(OSError):  # another member may do it
                    self._table.fs.delete_file(self._path(member))
        for member, known in list(self._seen.items()):
            if member not in found and known.content is not None:
                self._seen[member] = _Seen(None, now_s, known.lease_s)  # it has left, or somebody removed the file
            elif known.content is None and self._old(known, FORGOTTEN_LEASES):
                del self._seen[member]

    def live(self, topic: str) -> list[str]:
        """Return the living members that read a topic, this one among them, in the order that all of them see."""
        others = {member for member, seen in self._living() if topic in seen.topics}
        return sorted({self.member, *others} if topic in self.topics else others)

    def unlike(self) -> dict[str, tuple[frozenset[str], str]]:
        """Return the topics and the filter of each living member that subscribes to something else than this one."""
        mine = self.topics, self.chooses
        return {
            member: (seen.topics, seen.chooses)
            for member, seen in self._living()
            if seen.chooses is not None and (seen.topics, seen.chooses) != mine
        }

    def _living(self) -> Iterator[tuple[str, _Seen]]:
        return ((m, seen) for m, seen in self._seen.items() if seen.content is not None and not self._old(seen))

    def is_dead(self, owner: str) -> bool:
        """Return True when the owner of a queue has not moved its counter for its lease. One without a heartbeat has
        this member's lease, from the first time that somebody asks."""
        if owner == self.member:
            return False
        if owner not in self._seen:
            self._seen[owner] = _Seen(None, self._machine.monotonic(), self._lease_s)
        return self._old(self._seen[owner])

    def _old(self, seen: _Seen, leases: float = 1.0) -> bool:
        return self._machine.monotonic() - seen.since_s > leases * seen.lease_s

    def _path(self, member: str) -> str:
        return f"{self._folder}/{self.group}/{member}"


def _listed(table: Table) -> list[pafs.FileInfo]:
    """Return the heartbeats of all groups."""
    selector = pafs.FileSelector(f"{table.folder}/{FOLDER}", allow_not_found=True, recursive=True)
    with asking(redacted(selector.base_dir), None):
        return [info for info in table.fs.get_file_info(selector) if info.type == pafs.FileType.File]


def _read(table: Table, infos: Iterable[pafs.FileInfo], group: str) -> dict[str, tuple[bytes, datetime | None]]:
    """Return what the heartbeats of a group's members say, and when each was put by the store's clock."""
    found: dict[str, tuple[bytes, datetime | None]] = {}
    for member, info in _of_group(table, infos, group):
        where = redacted(info.path)
        with asking(where, None), suppress(FileNotFoundError), table.fs.open_input_file(info.path) as stream:
            found[member] = bytes(stream.read()), info.mtime
    return found


def _of_group(table: Table, infos: Iterable[pafs.FileInfo], group: str) -> Iterator[tuple[str, pafs.FileInfo]]:
    """Yield the members of a group, and their heartbeats."""
    mine = f"{table.folder}/{FOLDER}/{group}/"
    for info in infos:
        if info.path.startswith(mine):
            yield info.path.removeprefix(mine), info


def _seen(content: bytes, since_s: float, lease_s: float) -> _Seen:
    """Return what a heartbeat says. One that was read while it was written says nothing, and has this lease."""
    try:
        told = json.loads(content)
        topics = frozenset(str(topic) for topic in told["topics"])
        return _Seen(content, since_s, _lease(content, lease_s), topics, str(told["chooses"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Seen(content, since_s, lease_s)


def _lease(content: bytes, otherwise_s: float) -> float:
    """Return the lease that a heartbeat names, in seconds."""
    try:
        return seconds(json.loads(content)["lease"], "lease", above=True)
    except (ValueError, KeyError, TypeError, OptionError):
        return otherwise_s


def _is_forgotten(content: bytes, written: datetime | None, now: datetime | None) -> bool:
    """Whether a heartbeat was put so long ago, by the store's clock, that its member is dead and nobody cleaned up."""
    age_s = 0.0 if written is None or now is None else (now - written).total_seconds()
    return age_s > FORGOTTEN_LEASES * _lease(content, LEASE_S)


def heartbeats(table: Table, group: str, now: datetime) -> dict[str, Heartbeat]:
    """Return the newest heartbeat of each member of a group. Members that were killed so long ago that only the
    clean-up is missing are left out."""
    return {
        member: Heartbeat(max(0.0, (now - written).total_seconds()), _lease(content, LEASE_S))
        for member, (content, written) in _read(table, _listed(table), group).items()
        if written is not None and not _is_forgotten(content, written, now)
    }


def forget(table: Table, group: str) -> None:
    """Remove the heartbeats of a group. A member that lives puts its own again, within one heartbeat's interval."""
    for _, info in _of_group(table, _listed(table), group):
        with suppress(FileNotFoundError):
            table.fs.delete_file(info.path)
