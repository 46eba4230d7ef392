"""Other writers' commits: what they changed in a Delta table, from two of its versions and the entries between them,
and whether a writer of the log may go on with the table.

Only the outcome counts: a RESTORE that puts everything back leaves no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.errors import ForeignChangeError

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from rmq_spark._core.storage.table import Table

NAMED_MAX = 3
"""The most files, properties or commits that a sentence names."""
OFF = "false"
"""A Delta property with this value means the same as a missing one."""
OWN = "txmq.own"
"""Name under which each commit notes the version that it makes (Delta's ``txn``). If a table's version is higher,
another writer made it."""
READ_ALL_THE_SAME = frozenset({"messages"})
"""Tables that can still be read after another writer changed them. Nothing is committed to them until the change is
undone. A refresh of any other table raises, so nobody reads or decides by what rmq_spark did not write."""

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
    """Everything that decides what readers see of a table, and what writers may do with it. ``files`` has by path what
    the Delta log says of a live file, ``columns`` their names and types as JSON and the partition columns, and
    ``protocol`` its versions for readers and for writers."""

    files: Mapping[str, Mapping[str, Any]]
    columns: str
    properties: Mapping[str, str]
    protocol: str
    features: frozenset[str]


def snapshot_of(table: DeltaTable) -> Snapshot:
    """Return what a table holds at the version that the handle stands at."""
    live = pa.table(table.get_add_actions(flatten=True))
    metadata, protocol = table.metadata(), table.protocol()
    return Snapshot(
        # Neither the time of a file's last add nor columns that came later are part of what it holds.
        {
            file.pop("path"): {name: value for name, value in file.items() if value is not None}
            for file in live.drop_columns(["modification_time"]).to_pylist()
        },
        f"{table.schema().to_json()} {metadata.partition_columns}",
        dict(metadata.configuration),
        f"{protocol.min_reader_version} and {protocol.min_writer_version}",
        frozenset({*(protocol.reader_features or ()), *(protocol.writer_features or ())}),
    )


@dataclass(frozen=True)
class Entry:
    """An entry of a Delta log: one commit."""

    version: int
    actions: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, version: int, content: bytes) -> Entry:
        """Parse an entry. ValueError: the content is none."""
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


def describe_commits(entries: Sequence[Entry]) -> str:
    """Return a description of the commits: the first ones, and how many more there are."""
    more = f"; and {len(entries) - NAMED_MAX} more" if len(entries) > NAMED_MAX else ""
    return "; ".join(map(str, entries[:NAMED_MAX])) + more


@dataclass(frozen=True)
class Changed:
    """The changes by other writers. ``said`` names them, and the commits that made them, after the words "another
    writer". ``restorable`` tells whether a RESTORE undoes them: it puts back files by their paths, columns, properties
    and the protocol, but neither statistics nor applications' versions. With ``features`` delta-rs can neither write
    nor RESTORE."""

    said: str
    restorable: bool
    features: frozenset[str] = frozenset()


def changes(before: Snapshot, after: Snapshot, entries: Sequence[Entry]) -> Changed | None:
    """Return what other writers changed, in all commits between the two (``entries``); None when nothing is changed."""
    changes: list[str] = []
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
            changes.append(f"{text} {count_of(len(files), 'file')} ({_first_names(files)})")
    if before.columns != after.columns:
        changes.append("changed its columns")
    if changed := _changed_properties(before.properties, after.properties):
        changes.append(f"changed its properties ({_first_names(changed)})")
    if (before.protocol, before.features) != (after.protocol, after.features):
        features = f" with {', '.join(sorted(after.features))}" if after.features else ""
        changes.append(f"changed its protocol from {before.protocol} to {after.protocol}{features}")
    app_ids = {str(txn.get("appId")) for entry in entries for txn in entry.all("txn")}
    if app_ids := {app_id for app_id in app_ids if app_id.startswith("txmq.")}:
        changes.append(f"set what rmq_spark alone may set ({_first_names(app_ids)})")
    if not changes:
        return None
    text = f"{', '.join(changes)} ({describe_commits(entries)})"
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


def foreign_change(table: Table) -> str | None:
    """Return a sentence when other writers' commits have changed the table: what they did, whose they are, and how to
    undo it. None when the newest commit is ours, or all later ones are undone."""
    with table.lock:
        own, version = table.transaction_version(OWN) or 0, table.version
        if own == version:
            return None
        try:
            changed = table.changed_by_others(own)
        except ForeignChangeError as problem:
            return str(problem)
    if changed is None:
        return None
    consequence = "Nothing is drained, merged or deleted"
    if table.name not in READ_ALL_THE_SAME:
        consequence = "Nobody goes on with it"
    restore = f"DeltaTable({redacted(table.uri)!r}).restore({own}, protocol_downgrade_allowed=True)"
    remedy = f"put version {own} back with the package deltalake: {restore}"
    if changed.features:  # delta-rs refuses the RESTORE, too
        remedy = f"take that back {dropping(changed.features)}"
    elif not changed.restorable:
        remedy = f'cut its Delta log back to version {own} (docs/maintenance.md, "When another writer changed a table")'
    return (
        f"table {table.name} is not what rmq_spark left in version {own}: another writer {changed.said}. {consequence} "
        f"until that is undone, so nothing is lost. Keep that writer away, and {remedy}"
    )


def require_own(table: Table) -> None:
    """Raise ForeignChangeError when other writers' commits have changed the table."""
    if sentence := foreign_change(table):
        raise ForeignChangeError(sentence)
