"""Tells a replay (a batch that was prepared before) from a new batch, and refuses a batch that may be neither."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from rmq_spark._core.log.half_header import FIRST, HalfHeader, Naming
from rmq_spark._core.log.half_record import HalfRecord
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.protocol.identity import LAST_BATCH_FILE, Lineage
from rmq_spark._core.protocol.outcome import stays_open
from rmq_spark._core.vocabulary.redaction import cause_of, sentence_of
from rmq_spark.errors import CheckpointMismatchError, UnresolvedTransactionError


class Replays:
    """Finds the half batches that earlier runs have prepared."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(self, header: HalfHeader) -> HalfRecord | None:
        """The half batch of a replay; None for a new batch. Raises when the batch may be neither."""
        if header.naming is Naming.KEY:
            return self._engine.find(header.app_id, header.batch_id)
        return self.require(header) if self._engine.is_replay(header) else None

    def predecessor_of(self, header: HalfHeader, lineage: Lineage | None) -> HalfHeader | None:
        """Return the header of the application's last batch, which a new one of a query follows; None for the first.
        CheckpointMismatchError: the new one does not follow it.

        A micro-batch that sends nothing leaves no trace in the log, so its number is free. A copy of the checkpoint may
        have sent under that number what this query has yet to send. Then the checkpoint lacks the log's last batch.
        """
        if header.query_id is None or not header.numbered:
            return None
        batch_id = self._engine.last_batch_id(header.app_id, refresh=False)
        if batch_id is None:
            return None
        last = self._engine.header_of(header.app_id, batch_id)
        if last is None:
            raise CheckpointMismatchError(
                f"batch {batch_id} of app {header.app_id!r}, the last one in the log, is not there any more: nobody "
                f"can say whether batch {header.batch_id} follows it. " + _REMEDY
            )
        if not _is_same_query(last, header):
            raise CheckpointMismatchError(_of_another_query(last, header))
        if lineage is not None and last.input_hash is not None and not lineage.contains(batch_id, last.input_hash):
            content = json.dumps({"batch_id": batch_id, "input_hash": last.input_hash})
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} does not follow batch {batch_id}, the last one in "
                f"the log: the checkpoint's file offsets/{batch_id} is missing or holds something else. So another "
                "checkpoint, a copy of this one or a newer one, has sent that batch, and this one may send its "
                f"messages again. {_REMEDY}; or, when nobody else has sent and the file was cleaned or the log "
                f"restored (docs/guarantees.md), write {content} into the checkpoint's file {LAST_BATCH_FILE}"
            )
        return last

    def require(self, header: HalfHeader) -> HalfRecord:
        record = self._engine.find(header.app_id, header.batch_id)
        if record is None:
            last = self._engine.last_batch_id(header.app_id, refresh=False)
            why = "the checkpoint is a new or an older one. " + _REMEDY
            if header.naming is Naming.GIVEN:
                why = f"a new batch write needs a batchId above {last}; or set a new appId"
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} is not above {last}, the last one in the log, and "
                f"is not in it: {why}"
            )
        if not _is_same_query(record.header, header):
            raise CheckpointMismatchError(_of_another_query(record.header, header))
        # A hash is None where a foreachBatch sink could not read the checkpoint.
        hashes = (record.header.input_hash, header.input_hash)
        if None not in hashes and hashes[0] != hashes[1]:
            raise CheckpointMismatchError(
                f"batch {header.batch_id} of app {header.app_id!r} was prepared when the checkpoint's file "
                f"offsets/{header.batch_id} held something else: the checkpoint was restored from an older copy, or "
                "changed by hand. " + _REMEDY
            )
        return record

    def require_not_prepared(self, header: HalfHeader, problem: BaseException) -> None:
        """After a failed prepare: return when the log lacks the half batch. Otherwise its commit was made after all, or
        the log cannot be read: raise UnresolvedTransactionError, and a check settles the half batch."""
        with suppress(Exception):
            if self._engine.find(header.app_id, header.batch_id) is None:
                return
        raise UnresolvedTransactionError(
            f"half batch {header.half_id!r} may be prepared ({sentence_of(problem)}). {stays_open(header.numbered)}"
        ) from cause_of(problem)


def _is_same_query(prepared: HalfHeader, now: HalfHeader) -> bool:
    """Whether both headers belong to one query: their query ids are equal. Without an id, only a name or key from a
    user tells that, because two checkpoints may count to the same number."""
    is_known = now.query_id is not None or now.naming is not Naming.COUNTED
    return is_known and prepared.query_id == now.query_id


def following(header: HalfHeader, last: HalfHeader | None, lineage: Lineage | None) -> HalfHeader:
    """The header of a new half batch. With a lineage, it can only be prepared directly after ``last``."""
    if lineage is None:
        return header
    return replace(header, follows=FIRST if last is None else last.batch_id)


def _of_another_query(prepared: HalfHeader, now: HalfHeader) -> str:
    return (
        f"batch {prepared.batch_id} of app {now.app_id!r} was prepared by {_query(prepared)}, and now "
        f"{'comes' if prepared.batch_id == now.batch_id else f'batch {now.batch_id} comes'} from {_query(now)}: the "
        "checkpoint is a new one, or another's. " + _REMEDY
    )


def _query(header: HalfHeader) -> str:
    if header.query_id is not None:
        return f"query {header.query_id}"
    return "a batch write" if header.naming is Naming.GIVEN else "a query that is not known, or a batch write"


_REMEDY = (
    "Go on with the checkpoint that this app last used; or, if the input is meant to be sent again, set a new appId"
)
