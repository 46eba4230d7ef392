"""The ``topics`` table. A topic is made once and never changes, so what a handle knows of one stays true."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import pyarrow as pa

from rmq_spark.config import QUEUES_MAX, whole_number
from rmq_spark.errors import TopicExistsError
from rmq_spark.message import TIMESTAMP
from rmq_spark.storage.table import Change, Table, has_held

TOPICS_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("queues", pa.int32()),
        ("fifo", pa.bool_()),
        ("retention_s", pa.float64()),
        ("created", TIMESTAMP),
    ]
)


class Topic(NamedTuple):
    """A topic: how many queues it has, and whether messages of a sharding key keep their order."""

    queues: int
    fifo: bool


class TopicStore:
    """The ``topics`` table of a commit log."""

    def __init__(self, table: Table, default_queues: int) -> None:
        self.table = table
        self.default_queues = default_queues
        self._known: tuple[int, dict[str, Topic]] | None = None  # as of a version of the table

    def all(self) -> dict[str, Topic]:
        """The topics by name, as the table has them now."""
        with self.table.lock:
            self.table.refresh()
            return self.known()

    def with_names(self, names: Collection[str]) -> dict[str, Topic]:
        """The topics that this handle knows. It looks at the table when one of these names is not among them."""
        with self.table.lock:
            if self._known is None or not self._known[1].keys() >= set(names):
                self.table.refresh()
            return self.known()

    def known(self) -> dict[str, Topic]:
        """The topics that this handle has seen when it last looked."""
        with self.table.lock:
            version = self.table.version
            if self._known is None or self._known[0] != version:
                paths = self.table.actions()["path"].to_pylist()
                rows = self.table.read(paths, ["name", "queues", "fifo"]).sort_by("name").to_pylist()
                self._known = (version, {row["name"]: Topic(row["queues"], bool(row["fifo"])) for row in rows})
            return self._known[1]

    def create(self, name: str, queues: int | None, fifo: bool, exist_ok: bool) -> None:
        """Add a topic; TopicExistsError when it is there already, unless ``exist_ok`` and of the same kind."""
        wanted = self.default_queues if queues is None else queues
        whole_number(wanted, "queues", 1, QUEUES_MAX, " of queues")
        row = {
            "name": [name],
            "queues": [wanted],
            "fifo": [bool(fifo)],
            "retention_s": [None],
            "created": [self.table.machine.now()],
        }

        def propose(version: int) -> Change | None:
            there = self.known().get(name)
            if there is not None:
                if exist_ok and queues in (None, there.queues) and there.fifo == bool(fifo):
                    return None
                advice = "takes it only as it is; use another name" if exist_ok else "takes it as it is"
                raise TopicExistsError(
                    f"topic {name!r} is there already, with {_kind(*there)} (asked for: {_kind(wanted, bool(fifo))}): "
                    f"exist_ok=True {advice}"
                )
            return Change(add=[self.table.write(pa.table(row, schema=TOPICS_SCHEMA), "topics", ("name",))])

        def landed(change: Change) -> bool:
            # A topic of this name may be another process's: what counts is the file, also when it was rewritten since.
            return all(has_held(self.table, file) for file in change.add)

        self.table.compare_and_set(propose, landed)


def _kind(queues: int, fifo: bool) -> str:
    return f"{queues} queues, {'a FIFO topic' if fifo else 'no FIFO topic'}"
