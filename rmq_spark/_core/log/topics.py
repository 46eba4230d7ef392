"""The ``topics`` table. A topic's queues and kind never change, so what a handle knows of them stays true."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.storage.merge import compact
from rmq_spark._core.storage.table import Change, Table, live_paths, was_added
from rmq_spark._core.vocabulary.message import TIMESTAMP
from rmq_spark._core.vocabulary.options import QUEUES_MAX, whole_number
from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark.errors import CorruptLogError, TopicExistsError

logger = logging.getLogger(__name__)

TOPICS_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("queues", pa.int32()),
        ("fifo", pa.bool_()),
        ("retention_s", pa.float64()),
        ("created", TIMESTAMP),
    ]
)


TOPICS_FILES_MAX = 16
"""Number of files that are merged into one."""


class Topic(NamedTuple):
    """A topic: its number of queues, whether messages of a sharding key keep their order, and for how many seconds
    messages are kept (None: for ever)."""

    queues: int
    fifo: bool
    retention_s: float | None = None


class Known(NamedTuple):
    """The topics as of a version of the table, the number of queues of each, and the names of FIFO topics."""

    version: int
    topics: dict[str, Topic]
    queues: Mapping[str, int]
    fifo: frozenset[str]


_COLUMNS = ["name", *Topic._fields]
_NO_ROWS = pa.schema([TOPICS_SCHEMA.field(name) for name in _COLUMNS]).empty_table()


class TopicTable:
    def __init__(self, table: Table, default_queues: int) -> None:
        self.table = table
        self.default_queues = default_queues
        self._known: Known | None = None
        self._rows: dict[str, pa.Table] = {}  # of the files read last, by path

    def all(self) -> dict[str, Topic]:
        """The topics by name, as the table has them now."""
        with self.table.lock:
            self.table.refresh()
            return self.known().topics

    def with_names(self, names: Collection[str]) -> Known:
        """The topics that this handle knows. The table is read when one of these names is unknown."""
        needed, known = set(names), self._known
        if known is None or not known.topics.keys() >= needed:
            with self.table.lock:
                if self._known is None or not self.known().topics.keys() >= needed:
                    self.table.refresh()
        return self.known()

    def known(self) -> Known:
        """The topics as of this handle's last read. Only a read waits for a commit under way."""
        known = self._known
        if known is not None and known.version == self.table.version:
            return known
        with self.table.lock:
            if self._known is None or self._known.version != self.table.version:
                rows = self._read().sort_by("name").to_pylist()
                version = self.table.version
                topics = {r["name"]: Topic(r["queues"], r["fifo"], r["retention_s"]) for r in rows}
                queues = {name: topic.queues for name, topic in topics.items()}
                self._known = Known(version, topics, queues, frozenset(n for n, t in topics.items() if t.fifo))
            return self._known

    def _read(self) -> pa.Table:
        """The rows of the version that this handle has read, or of the newest one when upkeep has deleted its files. A
        file never changes, so it is read once."""
        while True:
            version = self.table.version
            try:
                paths = live_paths(self.table)
                self._rows = {p: self._rows[p] if p in self._rows else self.table.read([p], _COLUMNS) for p in paths}
                return pa.concat_tables([_NO_ROWS, *self._rows.values()])
            except (CorruptLogError, FileNotFoundError):
                if self.table.refresh() == version:
                    raise

    def create(
        self, names: Iterable[str], queues: int | None, fifo: bool, exist_ok: bool, retention_s: float | None = None
    ) -> None:
        """Add topics of one kind in one commit, or none of them. TopicExistsError: a topic exists; with ``exist_ok``,
        only when another kind or retention was asked for."""
        queue_count = self.default_queues if queues is None else queues
        whole_number(queue_count, "queues", 1, QUEUES_MAX, " of queues")
        topic_names = list(dict.fromkeys(names))

        def is_there(name: str) -> bool:
            topic = self.known().topics.get(name)
            if topic is None:
                return False
            as_asked = queues in (None, topic.queues) and topic.fifo == bool(fifo)
            if exist_ok and as_asked:
                if retention_s not in (None, topic.retention_s):
                    raise TopicExistsError(
                        f"topic {name!r} is there already, and its messages are kept {_how_long(topic.retention_s)}"
                        f" (asked for: {_how_long(retention_s)})",
                        remedy=Remedy("change that with log.set_retention", "change that with txmq topic set"),
                    )
                return True
            advice = "takes it only as it is; use another name" if exist_ok else "takes it as it is"
            current = _kind(topic.queues, topic.fifo)
            extra = "" if as_asked else f" (asked for: {_kind(queue_count, bool(fifo))})"
            raise TopicExistsError(
                f"topic {name!r} is there already, with {current}{extra}",
                remedy=Remedy(f"exist_ok=True {advice}", f"--exist-ok {advice}"),
            )

        def propose(version: int) -> Change | None:
            new_names = [name for name in topic_names if not is_there(name)]
            kind = {"queues": queue_count, "fifo": bool(fifo), "retention_s": retention_s}
            rows = [{"name": name, **kind, "created": self.table.runtime.now()} for name in new_names]
            table = pa.Table.from_pylist(rows, schema=TOPICS_SCHEMA)
            return Change(add=[self.table.write(table)]) if new_names else None

        def landed(change: Change) -> bool:
            # A topic of this name may be another process's, so only the file counts, even when it was merged since.
            return all(was_added(self.table, file) for file in change.add)

        if self.table.compare_and_set(propose, landed) is not None:
            self._merge()

    def _merge(self) -> None:
        """Merge small files. Otherwise each topic would be a file that every process reads for ever."""

        def choose(table: Table) -> list[str]:
            paths: list[str] = live_paths(table)
            return paths if len(paths) >= TOPICS_FILES_MAX else []

        def merge(paths: list[str]) -> Change:
            file = self.table.write(self.table.read(paths))
            return Change(add=[file], remove=paths, data_change=False)

        try:
            compact(self.table, choose, merge)
        except Exception as problem:  # the topics exist; the next create tries again
            logger.info("the files of table topics were not merged: %s", failure(problem))

    def set_retention(self, name: str, retention_s: float | None) -> None:
        """Change how long messages of a topic are kept; None for ever. The topic must exist."""

        def propose(version: int) -> Change | None:
            if self.known().topics[name].retention_s == retention_s:
                return None
            for path in live_paths(self.table):
                rows = self.table.read([path])
                is_topic = pc.equal(rows["name"], name)
                if pc.any(is_topic).as_py():
                    at = rows.column_names.index("retention_s")
                    changed = pc.if_else(is_topic, pa.scalar(retention_s, pa.float64()), rows["retention_s"])
                    file = self.table.write(rows.set_column(at, "retention_s", changed))
                    return Change(add=[file], remove=[path], data_change=False)
            return None

        self.table.compare_and_set(propose, lambda change: all(was_added(self.table, file) for file in change.add))


def _how_long(retention_s: float | None) -> str:
    if retention_s is None:
        return "for ever"
    unit, unit_s = next((u, n) for u, n in (("d", 86_400), ("h", 3_600), ("s", 1)) if retention_s % n == 0 or n == 1)
    return f"for {retention_s / unit_s:g}{unit}"


def _kind(queues: int, fifo: bool) -> str:
    return f"{queues} queue{'' if queues == 1 else 's'}, {'a FIFO topic' if fifo else 'no FIFO topic'}"
