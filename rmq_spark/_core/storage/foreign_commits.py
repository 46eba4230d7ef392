"""Tells what other writers' commits changed in a Delta table, from two of its versions and the entries between them.

Only the outcome counts: a RESTORE that puts everything back leaves no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

from rmq_spark._core.vocabulary.text import count_of

NAMED_MAX = 3
"""The most files, properties or commits that a sentence names."""
OFF = "false"
"""A Delta property with this value means the same as a missing one."""

WITHOUT_FEATURES = {
    "delta.enableDeletionVectors": "false",
    "delta.enableRowTracking": "false",
    "delta.enableInCommitTimestamps": "false",
    "delta.enableTypeWidening": "false",
    "delta.enableChangeDataFeed": "false",
    "delta.columnMapping.mode": "none",
    "delta.checkpointPolicy": "classic",
    "delta.autoOptimize.autoCompact": "false",
    "delta.autoOptimize.optimizeWrite": "false",
}
"""Properties that a platform may switch on by itself in tables that do not set them. delta-rs cannot write to a table
with some of these, and older readers cannot read one. Switching them off raises no table's protocol."""
_WRITABLE = {
    "appendOnly", "invariants", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors",
    "generatedColumns", "timestampNtz", "v2Checkpoint",
}  # fmt: skip
"""Features of tables to which delta-rs can write."""
_NOT_DROPPED = {
    "checkpointProtection", "clustering", "typeWidening", "typeWidening-preview", "vacuumProtocolCheck"
}  # fmt: skip
"""Features that Spark drops never, only a day later, or only together with the table's history."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that decides what readers see of a table, and what writers may do with it.

    Attributes
    ----------
    files : mapping
        By path, what the Delta log says of a live file: its size and its statistics.
    columns : str
        Names and types of the columns, as JSON, and the partition columns.
    properties : mapping of str to str
    protocol : str
        Its versions, for readers and for writers.
    features : frozenset of str
    """

    files: Mapping[str, Mapping[str, Any]]
    columns: str
    properties: Mapping[str, str]
    protocol: str
    features: frozenset[str]


@dataclass(frozen=True)
class Entry:
    """An entry of a Delta log: one commit."""

    version: int
    actions: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, version: int, content: bytes) -> Entry:
        """Parse an entry.

        Raises
        ------
        ValueError
            When the content is no entry.
        """
        actions = [json.loads(line) for line in content.splitlines() if line.strip()]
        if not all(isinstance(action, dict) and len(action) == 1 for action in actions):
            raise ValueError("an action is no object")
        return cls(version, actions)

    def all(self, kind: str) -> Iterator[Mapping[str, Any]]:
        return (action[kind] for action in self.actions if isinstance(action.get(kind), dict))

    def __str__(self) -> str:
        info = next(self.all("commitInfo"), {})
        text = f"version {self.version}: {info.get('operation') or 'an operation without a name'}"
        writers = [str(info[name]) for name in ("userName", "userId", "engineInfo") if info.get(name)]
        text += f" by {', '.join(writers)}" if writers else ""
        try:
            time = datetime.fromtimestamp(info["timestamp"] / 1000, timezone.utc)
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            return text
        return f"{text} at {time:%Y-%m-%d %H:%M:%S} UTC"


def told(entries: Sequence[Entry]) -> str:
    """Return a description of the commits: the first ones, and how many more there are."""
    more = f"; and {len(entries) - NAMED_MAX} more" if len(entries) > NAMED_MAX else ""
    return "; ".join(map(str, entries[:NAMED_MAX])) + more


@dataclass(frozen=True)
class Changed:
    """What other writers changed.

    Attributes
    ----------
    said : str
        The end of a sentence that begins with "another writer": the changes, and the commits that made them.
    restorable : bool
        Whether a RESTORE undoes the changes. It puts back files by their paths, columns, properties and the protocol,
        but neither statistics nor applications' versions.
    features : frozenset of str
        Features that the table has now, and with which delta-rs can neither write nor RESTORE.
    """

    said: str
    restorable: bool
    features: frozenset[str] = frozenset()


def changes(before: Snapshot, after: Snapshot, entries: Sequence[Entry]) -> Changed | None:
    """Return what other writers changed; None when the table is as it was.

    Parameters
    ----------
    before, after : Snapshot
    entries : sequence of Entry
        All commits between the two.
    """
    parts: list[str] = []
    both = before.files.keys() & after.files.keys()
    with_vectors = deletion_vectors(entries) & after.files.keys()
    restated = {path for path in both if before.files[path] != after.files[path]}
    for files, text in (
        (after.files.keys() - both, "added"),
        (before.files.keys() - both, "took out"),
        (with_vectors, "deleted rows, by deletion vectors, of"),
        (restated, "gave other statistics to"),
    ):
        if files:
            parts.append(f"{text} {count_of(len(files), 'file')} ({_first_names(files)})")
    if before.columns != after.columns:
        parts.append("changed its columns")
    if changed := _changed_properties(before.properties, after.properties):
        parts.append(f"changed its properties ({_first_names(changed)})")
    if (before.protocol, before.features) != (after.protocol, after.features):
        features = f" with {', '.join(sorted(after.features))}" if after.features else ""
        parts.append(f"changed its protocol from {before.protocol} to {after.protocol}{features}")
    app_ids = {str(txn.get("appId")) for entry in entries for txn in entry.all("txn")}
    if app_ids := {app_id for app_id in app_ids if app_id.startswith("txmq.")}:
        parts.append(f"set what rmq_spark alone may set ({_first_names(app_ids)})")
    if not parts:
        return None
    text = f"{', '.join(parts)} ({told(entries)})"
    return Changed(text, restorable=not restated and not app_ids, features=after.features - _WRITABLE)


def deletion_vectors(entries: Sequence[Entry]) -> set[str]:
    """Return the paths of files whose last add had a deletion vector."""
    paths: set[str] = set()
    for entry in entries:
        for add in entry.all("add"):
            (paths.add if add.get("deletionVector") else paths.discard)(unquote(str(add.get("path"))))
    return paths


def _changed_properties(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    names = before.keys() | after.keys()
    return {
        f"{name}={after[name]}" if name in after else f"{name} removed"
        for name in names
        if before.get(name, OFF) != after.get(name, OFF)
    }


def _first_names(names: set[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(sorted(names)[:NAMED_MAX]) + more


def dropping(features: Iterable[str]) -> str:
    """Return how to drop the features of a table with which delta-rs cannot write: Spark's statements in their order,
    or where to read about it."""
    unwritable = sorted(set(features) - _WRITABLE, key=lambda name: (name == "domainMetadata", name))  # others need it
    if not unwritable or _NOT_DROPPED.intersection(unwritable):
        return 'as docs/maintenance.md says under "When another writer changed a table": Spark cannot'
    return f"in Spark by {', then '.join(f'ALTER TABLE … DROP FEATURE {name}' for name in unwritable)}"
