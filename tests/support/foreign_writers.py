"""What programs other than rmq_spark do to a Delta table: by delta-rs, or by an entry of its log as Spark writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

Action = Mapping[str, Mapping[str, Any]]
BY_SPARK = {"engineInfo": "Apache-Spark/4.2.0 Delta-Lake/4.4.0", "userName": "bob", "timestamp": 1_700_000_000_000}


def entries(table: str) -> list[list[dict[str, Any]]]:
    """The actions of each version, from version 0 on."""
    paths = sorted(Path(table, "_delta_log").glob("*.json"))
    return [[json.loads(line) for line in path.read_text().splitlines() if line] for path in paths]


def put_entry(table: str, operation: str, actions: Sequence[Action] = ()) -> int:
    """Commit an entry of Spark's; returns its version."""
    version = DeltaTable(table).version() + 1
    lines = [json.dumps(action) for action in ({"commitInfo": {"operation": operation, **BY_SPARK}}, *actions)]
    Path(table, "_delta_log", f"{version:020d}.json").write_text("\n".join(lines) + "\n")
    return version


def raise_protocol(table: str, writer: Sequence[str], reader: Sequence[str] = (), **properties: str) -> int:
    """ALTER TABLE … SET TBLPROPERTIES that brings features with it."""
    protocol: dict[str, Any] = {
        "minReaderVersion": 3 if reader else 1,
        "minWriterVersion": 7,
        "writerFeatures": ["appendOnly", "invariants", *writer],
    }
    actions: list[Action] = [{"protocol": {**protocol, "readerFeatures": list(reader)} if reader else protocol}]
    if properties:
        metadata = next(action["metaData"] for action in entries(table)[0] if "metaData" in action)
        configuration = {**DeltaTable(table).metadata().configuration, **properties}
        actions.append({"metaData": {**metadata, "configuration": configuration}})
    return put_entry(table, "SET TBLPROPERTIES", actions)


def a_file(table: str) -> dict[str, Any]:
    """The newest live file, as the action that added it says."""
    live = set(pa.table(DeltaTable(table).get_add_actions())["path"].to_pylist())
    adds = [action["add"] for actions in entries(table) for action in actions if "add" in action]
    return next(add for add in reversed(adds) if add["path"] in live)


def delete_a_row_by_a_vector(table: str) -> int:
    """DELETE of one row of a table with deletion vectors, as Spark does it; returns its version."""
    properties = {"delta.enableDeletionVectors": "true", "delta.appendOnly": "false"}
    raise_protocol(table, ["deletionVectors"], ["deletionVectors"], **properties)
    add = a_file(table)
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 1, "sizeInBytes": 36}
    removed = {"path": add["path"], "deletionTimestamp": BY_SPARK["timestamp"], "dataChange": True, "size": add["size"]}
    actions = [{"add": {**add, "deletionVector": {**vector, "cardinality": 1}}}, {"remove": removed}]
    return put_entry(table, "DELETE", actions)


def cut_back(table: str, version: int) -> None:
    """Cut a Delta log back to a version, as docs/maintenance.md says."""
    for file in Path(table, "_delta_log").iterdir():
        number = file.name.lstrip(".")[:20]
        if file.name == "_last_checkpoint" or (number.isdigit() and int(number) > version):
            file.unlink()
