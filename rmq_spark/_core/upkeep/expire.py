"""Lets messages expire that are older than their topic's retention: whole files leave the table ``messages``.

First an ``expire`` row of ``op`` moves the queues' first offsets. So readers know what is gone before it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.log.op import OpKind, OpRow
from rmq_spark._core.storage.foreign_commits import require_own
from rmq_spark._core.storage.table import take_out
from rmq_spark._core.upkeep.table_files import removed_earlier_s

if TYPE_CHECKING:
    from rmq_spark._core.protocol.engine import Engine


class Expirer:
    """Lets messages of one commit log expire, ``doubt_s`` seconds later than their retention says: see
    :mod:`~rmq_spark._core.log.clock_doubt`."""

    def __init__(self, engine: Engine, doubt_s: float) -> None:
        self._engine = engine
        self._doubt_s = doubt_s

    def run(self, dry_run: bool = False) -> list[str]:
        """Let all messages expire that may; return the files that left the table ``messages``."""
        engine = self._engine
        with engine.lock:
            retentions = {
                name: t.retention_s for name, t in engine.topic_store.all().items() if t.retention_s is not None
            }
            table = engine.messages_table
            table.refresh()
            if not dry_run:
                require_own(table)
            paths = [path for name, seconds in sorted(retentions.items()) for path in self._expired(name, seconds)]
            if paths and not dry_run:
                self._move_firsts(paths)
                self._remove(paths)
            return paths

    def _expired(self, topic: str, seconds: float) -> list[str]:
        """The files of a topic whose messages are all too old, and that hold the first messages of their queues."""
        actions = self._engine.messages_table.actions()
        of_topic = pc.and_(pc.equal(actions["min.topic"], topic), pc.equal(actions["max.topic"], topic))
        files = actions.filter(pc.fill_null(of_topic, False))
        limit = self._engine.runtime.now() - timedelta(seconds=seconds + self._doubt_s)
        old = files.filter(pc.fill_null(pc.less(files["max.commit_timestamp"], limit), False))
        young = files.filter(pc.invert(pc.is_in(files["path"], value_set=old["path"].combine_chunks())))
        # Files may overlap after a merge. An old file that holds anything behind a message that stays must stay: else
        # a queue would have a hole. op places in the order of its versions.
        while young.num_rows:
            oldest_young = pc.min(young["min.op_version"])
            is_behind = pc.fill_null(pc.greater_equal(old["max.op_version"], oldest_young), True)
            if not pc.any(is_behind).as_py():
                break
            young = pa.concat_tables([young, old.filter(is_behind)])
            old = old.filter(pc.invert(is_behind))
        return [str(path) for path in old["path"].to_pylist()]

    def _move_firsts(self, paths: Sequence[str]) -> None:
        columns = ["topic", "queue_id", "queue_offset"]
        rows = self._engine.messages_table.read(paths, columns).group_by(columns[:2], use_threads=False)
        ends = rows.aggregate([("queue_offset", "max")]).to_pylist()
        firsts = {(end["topic"], end["queue_id"]): end["queue_offset_max"] + 1 for end in ends}
        ledger = self._engine.ledger

        def build() -> list[OpRow]:
            moved = {queue: first for queue, first in firsts.items() if first > ledger.view.firsts.get(queue, 0)}
            return [OpRow(OpKind.EXPIRE, firsts=moved)] if moved else []

        ledger.append(build)

    def _remove(self, paths: Sequence[str]) -> None:
        table = self._engine.messages_table
        take_out(table, paths, removed_earlier_s=removed_earlier_s(table, 0.0))
