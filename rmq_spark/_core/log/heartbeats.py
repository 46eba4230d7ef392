"""Heartbeats: which members of a consumer group are alive, as one member sees it.

A heartbeat is a small file, ``groups/_members/<group>/<member>``, which its member overwrites with a rising counter.
No clocks are compared: an observer notes, by its own monotonic clock, when it last saw the counter change. A member
whose counter has not changed for its lease, which the heartbeat names, is dead. A heartbeat is no commit: it costs one
put, and no member waits for another.
"""

from __future__ import annotations

import json
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

FOLDER = "_members"
"""In the folder of the table ``groups``. Delta and its VACUUM ignore names that begin with an underscore."""
MEMBER_LEASE_S = 30.0
"""Three heartbeat intervals, so that one late or lost heartbeat costs no queue."""
FORGOTTEN_LEASES = 3.0
"""An unchanged heartbeat is removed after this many leases. A new member judges its age by the store's times."""


def new_member_name(unique_id: str) -> str:
    """Return a name that no other member has or had: host, process and a unique part (RocketMQ: ``clientId``)."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64]
    return f"{host}@{os.getpid()}.{unique_id[:8]}"


class Heartbeat(NamedTuple):
    """The newest heartbeat of a member, for display: ``age_s``, the seconds from the store's time of the put to this
    machine's time now, and ``lease_s``, the member's own lease, as the heartbeat names it."""

    age_s: float
    lease_s: float

    @property
    def is_alive(self) -> bool:
        return self.age_s <= self.lease_s


@dataclass
class _Seen:
    """A heartbeat, and when an observer first saw this content; no content when there is no file."""

    content: bytes | None
    since_s: float
    lease_s: float
    topics: frozenset[str] = frozenset()
    chooses: str | None = None


class Members:
    """The members of a group, as one member sees them in the table ``groups``.

    The members that read a topic share its queues. ``margin_s``: seconds before the end of its own lease in which a
    member starts no listener call. ``chooses``: tags or selector of this member; empty when it reads all messages.
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
        self._runtime = table.runtime
        self._folder = f"{table.folder}/{FOLDER}"
        self.group, self.member = group, member
        self.topics = frozenset(topics)
        self.chooses = chooses
        self._lease_s, self._margin_s = lease_s, margin_s
        self._counter = 0
        self._beat_s: float | None = None  # when the put of the newest stored heartbeat began
        self._seen: dict[str, _Seen] = {}
        self.of_all_groups = 1
        """Number of heartbeats of all groups of the log, at the last look."""

    # ------------------------------------------------------------------ its own heartbeat
    def beat(self) -> float:
        """Put a heartbeat, and return the monotonic time at which the put began, for :meth:`renew`."""
        began_s = self._runtime.monotonic()
        self._counter += 1
        fields = {
            "counter": self._counter, "topics": sorted(self.topics), "chooses": self.chooses, "lease": self._lease_s
        }  # fmt: skip
        path = self._path(self.member)
        with writing(self._folder):
            if isinstance(self._table.fs, pafs.LocalFileSystem):
                self._table.fs.create_dir(path.rpartition("/")[0], recursive=True)
            with self._table.fs.open_output_stream(path) as stream:
                stream.write(json.dumps(fields).encode())
        return began_s

    def renew(self, began_s: float) -> None:
        """Begin the member's own lease at this time."""
        self._beat_s = began_s

    def may_start(self) -> bool:
        """Return True while no other member can take this one for dead, now or within the margin."""
        return self._beat_s is not None and self._runtime.monotonic() - self._beat_s < self._lease_s - self._margin_s

    def leave(self) -> None:
        self._beat_s = None
        with suppress(FileNotFoundError), writing(self._folder):
            self._table.fs.delete_file(self._path(self.member))

    # ------------------------------------------------------------------ all heartbeats
    def look(self) -> None:
        now_s = self._runtime.monotonic()
        infos = _list_heartbeats(self._table)
        self.of_all_groups = max(1, len(infos))
        contents = _read_content(self._table, infos, self.group)
        _, own_put = contents.get(self.member, (b"", None))
        for member, (content, put_at) in contents.items():
            seen = self._seen.get(member)
            if seen is None and _is_overdue(content, put_at, own_put):
                self._seen[member] = _parsed(content, -math.inf, self._lease_s)
            elif seen is None or seen.content != content:
                self._seen[member] = _parsed(content, now_s, self._lease_s)
            elif self._is_expired(seen, FORGOTTEN_LEASES) and member != self.member:
                with suppress(OSError):  # another member may have removed it
                    self._table.fs.delete_file(self._path(member))
        for member, seen in list(self._seen.items()):
            if member not in contents and seen.content is not None:
                self._seen[member] = _Seen(None, now_s, seen.lease_s)  # the member left, or its file was removed
            elif seen.content is None and self._is_expired(seen, FORGOTTEN_LEASES):
                del self._seen[member]

    def live(self, topic: str) -> list[str]:
        """Return the living members that read a topic, this one included, in the order that all members share."""
        others = {member for member, seen in self._live_members() if topic in seen.topics}
        return sorted({self.member, *others} if topic in self.topics else others)

    def unlike(self) -> dict[str, tuple[frozenset[str], str]]:
        """Return the topics and the filter of each living member whose subscription differs from this one's."""
        own_subscription = self.topics, self.chooses
        return {
            member: (seen.topics, seen.chooses)
            for member, seen in self._live_members()
            if seen.chooses is not None and (seen.topics, seen.chooses) != own_subscription
        }

    def _live_members(self) -> Iterator[tuple[str, _Seen]]:
        return ((m, seen) for m, seen in self._seen.items() if seen.content is not None and not self._is_expired(seen))

    def is_dead(self, owner: str) -> bool:
        """Return True when a queue's owner, another member, has not changed its counter for its lease. For an owner
        without a heartbeat, this member's lease runs from the first call."""
        if owner not in self._seen:
            self._seen[owner] = _Seen(None, self._runtime.monotonic(), self._lease_s)
        return self._is_expired(self._seen[owner])

    def _is_expired(self, seen: _Seen, leases: float = 1.0) -> bool:
        return self._runtime.monotonic() - seen.since_s > leases * seen.lease_s

    def _path(self, member: str) -> str:
        return f"{self._folder}/{self.group}/{member}"


def _list_heartbeats(table: Table) -> list[pafs.FileInfo]:
    selector = pafs.FileSelector(f"{table.folder}/{FOLDER}", allow_not_found=True, recursive=True)
    with asking(redacted(selector.base_dir), None):
        return [info for info in table.fs.get_file_info(selector) if info.type == pafs.FileType.File]


def _read_content(table: Table, infos: Iterable[pafs.FileInfo], group: str) -> dict[str, tuple[bytes, datetime | None]]:
    """Return the content of each heartbeat of a group, and when it was put by the store's clock."""
    contents: dict[str, tuple[bytes, datetime | None]] = {}
    for member, info in _files_of_group(table, infos, group):
        shown_path = redacted(info.path)
        with asking(shown_path, None), suppress(FileNotFoundError), table.fs.open_input_file(info.path) as stream:
            contents[member] = bytes(stream.read()), info.mtime
    return contents


def _files_of_group(table: Table, infos: Iterable[pafs.FileInfo], group: str) -> Iterator[tuple[str, pafs.FileInfo]]:
    prefix = f"{table.folder}/{FOLDER}/{group}/"
    for info in infos:
        if info.path.startswith(prefix):
            yield info.path.removeprefix(prefix), info


def _parsed(content: bytes, since_s: float, lease_s: float) -> _Seen:
    """Parse a heartbeat. A heartbeat that was read during its write has no topics, and the given lease."""
    try:
        fields = json.loads(content)
        topics = frozenset(str(topic) for topic in fields["topics"])
        return _Seen(content, since_s, _lease_of(content, lease_s), topics, str(fields["chooses"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Seen(content, since_s, lease_s)


def _lease_of(content: bytes, default_s: float) -> float:
    try:
        return seconds(json.loads(content)["lease"], "lease", above=True)
    except (ValueError, KeyError, TypeError, OptionError):
        return default_s


def _is_overdue(content: bytes, put_at: datetime | None, now: datetime | None) -> bool:
    """Whether a heartbeat is so old, by the store's clock, that it should have been removed."""
    age_s = 0.0 if put_at is None or now is None else (now - put_at).total_seconds()
    return age_s > FORGOTTEN_LEASES * _lease_of(content, MEMBER_LEASE_S)


def heartbeats(table: Table, group: str, now: datetime) -> dict[str, Heartbeat]:
    """Return the newest heartbeat of each member of a group, without heartbeats that should have been removed."""
    return {
        member: Heartbeat(max(0.0, (now - put_at).total_seconds()), _lease_of(content, MEMBER_LEASE_S))
        for member, (content, put_at) in _read_content(table, _list_heartbeats(table), group).items()
        if put_at is not None and not _is_overdue(content, put_at, now)
    }


def forget(table: Table, group: str) -> None:
    """Remove the heartbeats of a group. A living member puts its heartbeat again within one interval."""
    for _, info in _files_of_group(table, _list_heartbeats(table), group):
        with suppress(FileNotFoundError):
            table.fs.delete_file(info.path)
