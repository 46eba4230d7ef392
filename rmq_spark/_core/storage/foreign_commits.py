"""What other writers' commits changed in a Delta table, told from two of its versions and the entries between them.

Only the outcome counts: a RESTORE that puts back all that was there leaves no difference.
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
"""Files, properties and commits that a sentence names."""
OFF = "false"
"""A property of Delta's own with this value means the same as none."""

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
"""What a platform may switch on by itself in tables that do not say otherwise. delta-rs cannot write to a table with
some of these, and older readers cannot read one. To say so raises the table's protocol for nobody."""
_WRITABLE = {
    "appendOnly", "invariants", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors",
    "generatedColumns", "timestampNtz", "v2Checkpoint",
}  # fmt: skip
"""Features with which delta-rs writes."""
_NOT_DROPPED = {
    "checkpointProtection", "clustering", "typeWidening", "typeWidening-preview", "vacuumProtocolCheck"
}  # fmt: skip
"""Features that Spark does not drop, or only a day later, or only together with the table's history."""


@dataclass(frozen=True)
class Snapshot:
    """All that decides what readers see of a table, and what writers may do with it.

    Attributes
    ----------
    files : mapping
        By path what the Delta log says of a live file: its size, and its statistics.
    columns : str
        Their names and types, as JSON, and those by which the table is partitioned.
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
    """An entry of a Delta log: a commit."""

    version: int
    actions: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, version: int, content: bytes) -> Entry:
        """Parse it.

        Raises
        ------
        ValueError
            When it is no entry.
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
        by = [str(info[name]) for name in ("userName", "userId", "engineInfo") if info.get(name)]
        text += f" by {', '.join(by)}" if by else ""
        try:
            at = datetime.fromtimestamp(info["timestamp"] / 1000, timezone.utc)
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            return text
        return f"{text} at {at:%Y-%m-%d %H:%M:%S} UTC"


def told(entries: Sequence[Entry]) -> str:
    """Return who committed what, the first commits by name."""
    more = f"; and {len(entries) - NAMED_MAX} more" if len(entries) > NAMED_MAX else ""
    return "; ".join(map(str, entries[:NAMED_MAX])) + more


@dataclass(frozen=True)
class Changed:
    """What other writers changed.

    Attributes
    ----------
    said : str
        The end of a sentence that begins "another writer": what, and whose commits it was.
    restorable : bool
        Whether a RESTORE undoes it. It puts back files by their paths, columns, properties and the protocol; it knows
        neither statistics nor applications' versions.
    features : frozenset of str
        Features that the table has now, and with which delta-rs cannot write, so that it cannot RESTORE either.
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
    found: list[str] = []
    both = before.files.keys() & after.files.keys()
    deleted_in = deletion_vectors(entries) & after.files.keys()
    other_said = {path for path in both if before.files[path] != after.files[path]}
    for files, said in (
        (after.files.keys() - both, "added"),
        (before.files.keys() - both, "took out"),
        (deleted_in, "deleted rows, by deletion vectors, of"),
        (other_said, "gave other statistics to"),
    ):
        if files:
            found.append(f"{said} {count_of(len(files), 'file')} ({_named(files)})")
    if before.columns != after.columns:
        found.append("changed its columns")
    if changed := _changed(before.properties, after.properties):
        found.append(f"changed its properties ({_named(changed)})")
    if (before.protocol, before.features) != (after.protocol, after.features):
        features = f" with {', '.join(sorted(after.features))}" if after.features else ""
        found.append(f"changed its protocol from {before.protocol} to {after.protocol}{features}")
    ours = {str(txn.get("appId")) for entry in entries for txn in entry.all("txn")}
    if ours := {app_id for app_id in ours if app_id.startswith("txmq.")}:
        found.append(f"set what rmq_spark alone may set ({_named(ours)})")
    if not found:
        return None
    said = f"{', '.join(found)} ({told(entries)})"
    return Changed(said, restorable=not other_said and not ours, features=after.features - _WRITABLE)


def deletion_vectors(entries: Sequence[Entry]) -> set[str]:
    """Return the paths of files that were added last with a deletion vector."""
    found: set[str] = set()
    for entry in entries:
        for add in entry.all("add"):
            (found.add if add.get("deletionVector") else found.discard)(unquote(str(add.get("path"))))
    return found


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    names = before.keys() | after.keys()
    return {
        f"{name}={after[name]}" if name in after else f"{name} removed"
        for name in names
        if before.get(name, OFF) != after.get(name, OFF)
    }


def _named(names: set[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(sorted(names)[:NAMED_MAX]) + more


def dropping(features: Iterable[str]) -> str:
    """Return what takes back the features of a table with which delta-rs cannot write: statements of Spark, in their
    order, or where to read of it."""
    added = sorted(set(features) - _WRITABLE, key=lambda name: (name == "domainMetadata", name))  # what needs it first
    if not added or _NOT_DROPPED.intersection(added):
        return 'as docs/maintenance.md says under "When another writer changed a table": Spark cannot'
    return f"in Spark by {', then '.join(f'ALTER TABLE … DROP FEATURE {name}' for name in added)}"
