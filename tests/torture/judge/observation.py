"""What the tables of a log hold, noted in a history without the code under test: no ledger, no planning, no folding.

Readers' results are noted here too, so that every level notes them in the same way.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet

from tests.torture.judge.history import Event, History, Kind, Phase, payload_hash

if TYPE_CHECKING:
    from deltalake import DeltaTable

HALF_COLUMNS = [
    "half_id", "batch_id", "transaction_per", "file_no", "row_no", "transaction_key", "topic", "sharding_key", "body",
]  # fmt: skip
OP_COLUMNS = [
    "version", "op_time", "commit_id", "kind", "half_id", "file_no", "ranges", "attempt", "decided_by", "reason",
    "refused",
    "topic", "queue_id", "queue_offset", "verdict",
]  # fmt: skip
DRAINED_COLUMNS = [
    "half_id", "file_no", "row_no", "attempt", "op_version", "topic", "queue_id", "queue_offset", "transaction_id",
    "body",
]  # fmt: skip
PLACE = ("topic", "queue_id", "queue_offset")
READ_COLUMNS = ["topic", "queue_id", "queue_offset", "msg_id", "transaction_id", "sharding_key", "body"]
"""What a reading must hold for :func:`note_messages`."""

Files = dict[str, dict[int, list[int]]]
"""By half id and file number, the row numbers that ``half`` holds."""


def note_tables(
    history: History,
    half: pa.Table,
    op: pa.Table,
    prepared_s: Mapping[str, float] | None = None,
    topics: Sequence[str] = (),
) -> None:
    """Note every row of ``half``, and every word of ``op`` about one, in version order.

    Parameters
    ----------
    prepared_s : mapping, optional
        When each half batch was prepared.
    topics : sequence of str
        The names in ``topics``.
    """
    for name in topics:
        history.note(Kind.TOPIC, topic=name)
    files: Files = defaultdict(lambda: defaultdict(list))
    for row in half.select(HALF_COLUMNS).to_pylist():
        files[row["half_id"]][row["file_no"]].append(row["row_no"])
        history.append(_half_row(row, (prepared_s or {}).get(row["half_id"], 0.0)))
    rows = op.select(OP_COLUMNS).to_pylist()
    for row in sorted(rows, key=lambda r: r["version"]):  # rows of one commit stay as they were written
        for event in _markers(row, files):
            history.append(event)


def _half_row(row: Mapping[str, Any], time: float) -> Event:
    address = f"{row['file_no']}.{row['row_no']}"
    behind = {"batch": "", "key": f":{row['transaction_key']}", "message": f":{address}"}[row["transaction_per"]]
    return Event(
        Kind.HALF_ROW,
        time=time,
        half_id=row["half_id"],
        batch_id=row["batch_id"],
        transaction_id=f"{row['half_id']}:1{behind}",
        key=row["sharding_key"],
        payload=payload_hash(row["body"]),
        topic=row["topic"],
        address=address,
        table="half",
    )


def _markers(row: Mapping[str, Any], files: Files) -> Iterator[Event]:
    """One event for every half row that an op row names."""
    half_id = row["half_id"]
    if half_id is None or row["kind"] in ("mark", "lease"):
        return
    if row["kind"] == "archived":
        yield Event(
            Kind.MARKER,
            time=row["op_time"].timestamp(),
            half_id=half_id,
            op="archived",
            table="op",
            version=row["version"],
            operation=row["commit_id"],
        )
        return
    stored = files.get(half_id, {})
    chosen = sorted(stored) if row["file_no"] is None else [row["file_no"]]
    offset = row["queue_offset"]
    for file_no in chosen:
        numbers = sorted(stored.get(file_no, ()))
        if row["ranges"] is not None:
            numbers = [n for r in row["ranges"] for n in range(r["first"], r["last"] + 1)]
        for number in numbers:
            yield Event(
                Kind.MARKER,
                time=row["op_time"].timestamp(),
                half_id=half_id,
                attempt=row["attempt"],
                topic=row["topic"],
                queue_id=row["queue_id"],
                queue_offset=offset,
                verdict=row["verdict"],
                op=row["kind"],
                who=row["decided_by"],
                reason=row["reason"],
                refused=row["refused"],
                address=f"{file_no}.{number}",
                table="op",
                version=row["version"],
                operation=row["commit_id"],
            )
            offset = None if offset is None else offset + 1


def note_drained(history: History, process: str, operation: str, rows: pa.Table, position: int) -> None:
    """Note a whole reading of the table ``messages``, which has everything up to a version of ``op``."""
    history.note(Kind.DRAINED, Phase.BEGIN, process, operation=operation, version=position)
    for row in rows.select(DRAINED_COLUMNS).to_pylist():
        history.note(
            Kind.DRAINED,
            Phase.OK,
            process,
            operation=operation,
            half_id=row["half_id"],
            address=f"{row['file_no']}.{row['row_no']}",
            transaction_id=row["transaction_id"],
            attempt=row["attempt"],
            payload=payload_hash(row["body"]),
            topic=row["topic"],
            queue_id=row["queue_id"],
            queue_offset=row["queue_offset"],
            version=row["op_version"],
        )


def note_expired(history: History, op: pa.Table, messages: pa.Table) -> None:
    """Note how old each message was when ``op`` said that it had expired.

    Parameters
    ----------
    messages : pyarrow.Table
        Everything that ever was in the table ``messages``.
    """
    said = op.filter(pc.equal(op["kind"], "expire")).select(["op_time", "firsts"]).to_pylist()
    said.sort(key=lambda row: row["op_time"])
    moved = [(row["op_time"], {(f["topic"], f["queue_id"]): f["first_offset"] for f in row["firsts"]}) for row in said]
    for row in messages.select([*PLACE, "commit_timestamp", "body"]).to_pylist():
        queue = (row["topic"], row["queue_id"])
        at = next((time for time, firsts in moved if firsts.get(queue, 0) > row["queue_offset"]), None)
        if at is not None:
            history.note(
                Kind.EXPIRED, Phase.OK, payload=payload_hash(row["body"]), topic=row["topic"],
                queue_id=row["queue_id"], queue_offset=row["queue_offset"],
                sequence=int((at - row["commit_timestamp"]).total_seconds()),
            )  # fmt: skip


def note_log(
    history: History, path: str, storage_options: Mapping[str, str] | None = None, left: Path | None = None
) -> None:
    """Note the rows of the Delta tables of a log at rest, read with deltalake and pyarrow alone.

    Parameters
    ----------
    left : Path, optional
        A folder with copies of files that have left the tables, in a folder a table.
    """
    from deltalake import DeltaTable  # its runtime must not start in a process that forks

    options = dict(storage_options or {}) or None
    half, op, topics = (DeltaTable(f"{path}/{name}", storage_options=options) for name in ("half", "op", "topics"))
    rows, prepared_s = _half_rows(half)
    names = topics.to_pyarrow_table(columns=["name"])["name"].to_pylist()
    said = op.to_pyarrow_table()
    if left is not None:
        rows = _with_copies(rows, left / "half", ["half_id", "file_no", "row_no"])
        said = _with_copies(said, left / "op", OP_COLUMNS)
    note_tables(history, rows, said, prepared_s, names)


def _with_copies(rows: pa.Table, folder: Path, identity: Sequence[str]) -> pa.Table:
    """Rows, and those of some files that are not among them."""
    found = rows.to_pylist()
    for path in sorted(folder.glob("*.parquet")):
        found += parquet.read_table(path, schema=rows.schema).to_pylist()
    found.sort(key=lambda row: row.get("body", b"") is not None)  # of a stripped row, the copy that was whole
    by_identity = {json.dumps([row[name] for name in identity], default=str): row for row in found}
    return pa.Table.from_pylist(list(by_identity.values()), schema=rows.schema)


def note_messages_table(
    history: History, process: str, operation: str, path: str, storage_options: Mapping[str, str] | None = None
) -> None:
    """Note what the table ``messages`` holds at this moment, read with deltalake and pyarrow alone."""
    from deltalake import DeltaTable

    while True:
        table = DeltaTable(f"{path}/messages", storage_options=dict(storage_options or {}) or None)
        position = table.transaction_version("txmq.op")
        try:
            rows = table.to_pyarrow_table(columns=DRAINED_COLUMNS)
        except FileNotFoundError:  # merged and deleted since it was listed
            continue
        note_drained(history, process, operation, rows, -1 if position is None else position)
        return


def _half_rows(table: DeltaTable) -> tuple[pa.Table, dict[str, float]]:
    """The rows of ``half``, and the newest time of a file of each half batch."""
    dataset = table.to_pyarrow_dataset()
    rows = dataset.to_table(columns=[*dataset.schema.names, "__filename"])
    actions = pa.table(table.get_add_actions(flatten=True)).select(["path", "modification_time"]).to_pylist()
    moments = {a["path"]: pa.scalar(a["modification_time"]).cast(pa.timestamp("ms", "UTC")).as_py() for a in actions}
    times: dict[str, float] = {}
    pairs = rows.select(["half_id", "__filename"]).group_by(["half_id", "__filename"]).aggregate([]).to_pylist()
    for pair in pairs:
        seconds = moments[pair["__filename"].rpartition("/")[2]].timestamp()
        times[pair["half_id"]] = max(times.get(pair["half_id"], 0.0), seconds)
    return rows.drop_columns(["__filename"]), times


def note_listing(history: History, path: str) -> None:
    """Note which versions the Delta logs of a local log hold now; twice in a run, it shows what was overwritten."""
    for table in ("half", "op", "topics"):
        for entry in sorted(Path(path, table, "_delta_log").glob("*.json")):
            if not entry.stem.isdigit():
                continue
            try:
                content = payload_hash(entry.read_bytes())
            except FileNotFoundError:  # cleaned up since it was listed
                continue
            history.note(Kind.LISTED, table=table, version=int(entry.stem), payload=content)


def note_messages(
    history: History,
    kind: Kind,
    process: str,
    operation: str,
    messages: pa.Table,
    version: int | None = None,
) -> None:
    """Note what a reader got, with :data:`READ_COLUMNS`.

    Parameters
    ----------
    kind : Kind
        READ for a topic from its start, POLL for what a consumer got next.
    version : int, optional
        The version of ``op`` that the reader went by.
    """
    for row in messages.select(READ_COLUMNS).to_pylist():
        history.note(
            kind,
            Phase.OK,
            process,
            operation=operation,
            half_id=row["msg_id"].rpartition(":")[0],
            transaction_id=row["transaction_id"],
            key=row["sharding_key"],
            payload=payload_hash(row["body"]),
            topic=row["topic"],
            queue_id=row["queue_id"],
            queue_offset=row["queue_offset"],
            version=version,
        )
