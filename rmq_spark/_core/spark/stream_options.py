"""Finds the options with which a stream reads commit logs, in the stream's plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rmq_spark._core.reads.read_options import ReadOptions, read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FORMAT = "txmq"


def sources_of(stream: DataFrame) -> list[ReadOptions]:
    """Return the options of every ``readStream.format("txmq")`` that a stream comes from."""
    plan_options = _in_plan(stream._plan) if hasattr(stream, "_plan") else _in_java_plan(stream)
    return [read_options(options, streaming=True) for options in plan_options]


def _in_java_plan(stream: DataFrame) -> Iterator[dict[str, str]]:
    leaves = stream._jdf.queryExecution().analyzed().collectLeaves()
    for leaf in (leaves.apply(i) for i in range(leaves.size())):
        if leaf.nodeName() == "StreamingRelationV2" and leaf.sourceName() == FORMAT:
            yield dict(leaf.extraOptions().asCaseSensitiveMap())


def _in_plan(plan: Any) -> Iterator[dict[str, str]]:
    """Yield the options from the plan of a Spark Connect DataFrame."""
    from pyspark.sql.connect.plan import DataSource, LogicalPlan

    if isinstance(plan, DataSource):
        if plan._format == FORMAT:
            yield dict(plan._options or {})
        return
    for part in vars(plan).values():
        for child in part if isinstance(part, list) else [part]:
            if isinstance(child, LogicalPlan):
                yield from _in_plan(child)
