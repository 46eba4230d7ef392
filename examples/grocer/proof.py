"""The proof compares the data set, the order database and the three topics row by row.

The demo runs it as ``python -m examples.grocer.proof``, in a process and a Spark session that had no part in the
stream.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from examples.grocer.baskets import ITEM, lines_of, read_input, with_zero_quantity
from examples.grocer.kill import Point
from examples.grocer.orders import read_table
from examples.grocer.settings import TOPICS, Folder, Settings
from rmq_spark.listeners import decode_json

EXAMPLES_MAX = 3
MESSAGE_COLUMNS = ["queue_id", "queue_offset", "keys", "body"]
ReadTopic = Callable[[str], pa.Table]
"""Returns the committed messages of a topic, with :data:`MESSAGE_COLUMNS`."""

ORDER_COLUMNS = ["order_id", "household_id", "total_cents"]
LINE_COLUMNS = ["order_id", "product_id", "quantity"]
BODIES = {
    "logistics": pa.schema([("order_id", pa.int64()), ("items", pa.list_(ITEM))]),
    "points": pa.schema([("order_id", pa.int64()), ("household_id", pa.int64()), ("spent_cents", pa.int64())]),
    "cart": pa.schema([("order_id", pa.int64()), ("household_id", pa.int64()), ("products", pa.list_(pa.int64()))]),
}


@dataclass
class Proof:
    """What was compared, and what disagrees.

    Attributes
    ----------
    baskets, refused, orders : int
        Baskets of the data set. Refused ones have a zero quantity, and the others must be orders.
    messages, duplicates, missing, unwanted : dict of str to int
        By topic: committed messages; orders told more than once; orders not told; messages of refused baskets or of no
        order at all.
    runs_started, runs_effective : int
        Baskets whose local transaction was started, and baskets whose database transaction committed.
    disagreements : list of str
        A sentence for each. When there is none, everything agrees.
    """

    baskets: int = 0
    refused: int = 0
    orders: int = 0
    messages: dict[str, int] = field(default_factory=dict)
    duplicates: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    unwanted: dict[str, int] = field(default_factory=dict)
    runs_started: int = 0
    runs_effective: int = 0
    disagreements: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.disagreements

    def require(self, what: str, found: object, expected: object) -> None:
        """Note a disagreement when the two are not equal."""
        if found != expected:
            self.disagreements.append(f"{what}: found {found}, expected {expected}")

    def require_same_rows(self, what: str, left: str, a: pa.Table, right: str, b: pa.Table) -> None:
        """Note a disagreement when the tables do not have the same rows equally often. Their order does not matter."""
        odd = odd_rows(a, b)
        if odd.num_rows:
            ids = pc.unique(odd["order_id"])
            examples = ", ".join(map(str, ids.slice(0, EXAMPLES_MAX).to_pylist()))
            more = pc.sum(pc.greater(odd["times"], 0)).as_py() or 0
            self.disagreements.append(
                f"{what}: {len(ids)} orders differ, such as {examples} ({more} rows more often in {left}, "
                f"{odd.num_rows - more} more often in {right})"
            )


def odd_rows(a: pa.Table, b: pa.Table) -> pa.Table:
    """Return rows that one table has more often than the other; ``times`` says how much more often ``a`` has them."""
    columns = a.column_names
    b = b.select(columns).cast(a.schema)
    signs = pa.concat_arrays([pa.repeat(pa.scalar(1), a.num_rows), pa.repeat(pa.scalar(-1), b.num_rows)])
    counted = pa.concat_tables([a, b]).append_column("times", signs).group_by(columns)
    counted = counted.aggregate([("times", "sum")]).rename_columns([*columns, "times"])
    return counted.filter(pc.not_equal(counted["times"], 0))


def prove(folder: Folder, read_topic: ReadTopic) -> Proof:
    """Compare everything, and return the proof, which says what disagrees."""
    proof = Proof()
    baskets = read_input(folder.input)
    refused = with_zero_quantity(baskets)
    accepted = baskets.filter(pc.invert(pc.is_in(baskets["basket_id"], refused)))
    accepted = accepted.rename_columns({"basket_id": "order_id", "spent_cents": "total_cents"})
    proof.baskets, proof.refused, proof.orders = baskets.num_rows, len(refused), accepted.num_rows

    orders = read_table(folder, f"select {', '.join(ORDER_COLUMNS)} from orders")
    lines = read_table(folder, f"select {', '.join(LINE_COLUMNS)} from order_lines")
    proof.require_same_rows("orders", "the database", orders, "the data set", accepted.select(ORDER_COLUMNS))
    proof.require_same_rows("order lines", "the database", lines, "the data set", lines_of(accepted, "order_id"))
    for topic in TOPICS:
        messages = read_topic(topic)
        _prove_offsets(proof, topic, messages)
        _prove_once(proof, topic, messages, orders, refused)
        _prove_contents(proof, topic, messages, orders, lines)
    _prove_runs(proof, folder)
    _prove_settled(proof, folder)
    return proof


def _prove_offsets(proof: Proof, topic: str, messages: pa.Table) -> None:
    """Require that the offsets of each queue are 0, 1, 2, … without gaps."""
    for queue_id in sorted(pc.unique(messages["queue_id"]).to_pylist()):
        offsets = messages.filter(pc.equal(messages["queue_id"], queue_id))["queue_offset"].sort()
        if not offsets.combine_chunks().equals(pa.array(range(len(offsets)), pa.int64())):
            found = pc.min_max(offsets).as_py()
            proof.disagreements.append(
                f"topic {topic}, queue {queue_id}: {len(offsets)} messages have offsets {found['min']} to "
                f"{found['max']}, with gaps or twice"
            )


def _prove_once(proof: Proof, topic: str, messages: pa.Table, orders: pa.Table, refused: pa.Array) -> None:
    """Require that every order of the database is told exactly once, and nothing else is."""
    told = messages["keys"].cast(pa.int64())
    times = pc.value_counts(told)
    twice = times.filter(pc.greater(times.field("counts"), 1)).field("values")
    missing = pc.unique(orders["order_id"].filter(pc.invert(pc.is_in(orders["order_id"], told))))
    unwanted = told.filter(pc.invert(pc.is_in(told, orders["order_id"])))
    of_refused = pc.sum(pc.is_in(unwanted, refused)).as_py() or 0
    proof.messages[topic] = messages.num_rows
    proof.duplicates[topic], proof.missing[topic], proof.unwanted[topic] = (
        len(twice),
        len(missing),
        len(unwanted),
    )
    for ids, what in (
        (twice, "orders are told more than once"),
        (missing, "orders of the database are not told"),
        (unwanted, f"messages have no order in the database, {of_refused} of them are of refused baskets"),
    ):
        if len(ids):
            examples = ", ".join(map(str, ids.slice(0, EXAMPLES_MAX).to_pylist()))
            proof.disagreements.append(f"topic {topic}: {len(ids)} {what}, such as {examples}")


def _prove_contents(proof: Proof, topic: str, messages: pa.Table, orders: pa.Table, lines: pa.Table) -> None:
    """Require that a topic tells what the database has."""
    bodies = decode_json(messages["body"], BODIES[topic])
    if not bodies["order_id"].equals(messages["keys"].cast(pa.int64())):
        proof.disagreements.append(f"topic {topic}: a body names another order than its message's key")
    if topic == "points":
        told, kept = bodies.rename_columns(ORDER_COLUMNS), orders
    elif topic == "logistics":
        told, kept = lines_of(bodies, "order_id"), lines
    else:
        products = bodies["products"].combine_chunks()
        told = bodies.select(["order_id", "household_id"]).take(pc.list_parent_indices(products))
        told = told.append_column("product_id", pc.list_flatten(products))
        households = orders["household_id"].take(pc.index_in(lines["order_id"], value_set=orders["order_id"]))
        kept = lines.select(["order_id"]).append_column("household_id", households)
        kept = kept.append_column("product_id", lines["product_id"])
    proof.require_same_rows(f"contents of {topic}", "the topic", told, "the database", kept)


def _prove_runs(proof: Proof, folder: Folder) -> None:
    """Require that each local transaction took effect once, and that none was started again without reason.

    There are two reasons: a kill undid the run, or all its baskets were refused and a check had settled them, so a
    replay runs them once more. In both cases nothing of the first run was left.
    """
    started = _read_json_lines(folder.journal.read_text(encoding="utf-8"))
    effective = read_table(folder, "select half_id, attempt, baskets from local_transactions").to_pylist()
    proof.runs_started = sum(run["baskets"] for run in started)
    proof.runs_effective = sum(run["baskets"] for run in effective)
    proof.require("baskets whose local transaction took effect", proof.runs_effective, proof.baskets)
    twice = [half_id for half_id, n in Counter(run["half_id"] for run in effective).items() if n > 1]
    proof.require("half batches with two effective local transactions", twice, [])
    undone = [kill for kill in read_kills(folder) if kill["point"] == Point.WORKING.value]
    refused_again = [run for run in started if run["attempt"] > 1 and run["refused"] == run["baskets"]]
    extra = Counter(map(_attempt, started)) - Counter(map(_attempt, [*effective, *undone, *refused_again]))
    proof.require("local transactions that were started once more than there was reason to", sorted(extra), [])


def _attempt(run: Mapping[str, Any]) -> tuple[str, int]:
    return run["half_id"], run["attempt"]


def _prove_settled(proof: Proof, folder: Folder) -> None:
    from rmq_spark import CommitLog

    log = CommitLog.open(str(folder.log))
    proof.require("half batches still pending", log.pending()["half_id"].to_pylist(), [])
    proof.require("half batches in quarantine", log.quarantined()["half_id"].to_pylist(), [])
    proof.require("half batches in conflict", log.conflicts(), [])


def read_kills(folder: Folder) -> list[dict[str, Any]]:
    """Return what the kills hit, oldest first."""
    return _read_json_lines(folder.kills.read_text(encoding="utf-8")) if folder.kills.exists() else []


def _read_json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def load(folder: Folder) -> Proof:
    """Read the proof that the process wrote."""
    kept: Mapping[str, Any] = json.loads(folder.proof.read_text(encoding="utf-8"))
    return Proof(**kept)


def main() -> None:
    """Read the topics with Spark, compare everything, and write the proof."""
    from examples.grocer.stream import start_spark

    folder = Settings().folder
    spark = start_spark(folder, "rmq_spark demo: proof")

    def read_topic(topic: str) -> pa.Table:
        source = spark.read.format("txmq").option("path", str(folder.log)).option("subscribe", topic)
        table: pa.Table = source.load().select(*MESSAGE_COLUMNS).toArrow()
        return table

    folder.proof.write_text(json.dumps(asdict(prove(folder, read_topic))), encoding="utf-8")
    spark.stop()


if __name__ == "__main__":
    main()
