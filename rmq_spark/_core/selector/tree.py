"""Evaluates a parsed selector for each row of an Arrow table.

A selector is a tree of small frozen classes, like those in RocketMQ's ``org.apache.rocketmq.filter.expression``. Whole
columns are evaluated at a time, to TRUE, FALSE or unknown (null). This module runs on executors, with pyarrow alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.vocabulary.message import PROPERTIES

STORED_COLUMNS: Mapping[str, str] = {"TAGS": "tags", "KEYS": "keys"}
"""The columns that hold what RocketMQ keeps as properties."""

LONG_MAX = 2**63 - 1


# ---------------------------------------------------------------- the tree
@dataclass(frozen=True)
class Property:
    """A property's value: a string, or missing (``PropertyExpression``)."""

    name: str


@dataclass(frozen=True)
class Text:
    value: str


@dataclass(frozen=True)
class Number:
    value: int | float


@dataclass(frozen=True)
class Now:
    """The time of planning, in milliseconds since 1970 (``NowExpression``)."""


@dataclass(frozen=True)
class Truth:
    """TRUE, FALSE, or NULL (None)."""

    value: bool | None


@dataclass(frozen=True)
class Not:
    operand: Condition


@dataclass(frozen=True)
class And:
    operands: tuple[Condition, ...]


@dataclass(frozen=True)
class Or:
    operands: tuple[Condition, ...]


@dataclass(frozen=True)
class Compare:
    """``left operator right``; the operator is one of :data:`OPERATORS`."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class IsNull:
    operand: Node


@dataclass(frozen=True)
class In:
    operand: Property
    values: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """CONTAINS, STARTSWITH or ENDSWITH. A missing property or an empty text gives FALSE, even when negated."""

    operator: str
    operand: Property | Text
    text: str
    negated: bool = False


@dataclass(frozen=True)
class Like:
    """LIKE. A backslash in the pattern takes the next character literally."""

    operand: Property | Text
    pattern: str


Condition: TypeAlias = Truth | Not | And | Or | Compare | IsNull | In | Search | Like
Node: TypeAlias = Property | Text | Number | Now | Condition

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}
SEARCHES: Mapping[str, Callable[..., Any]] = {
    "CONTAINS": pc.match_substring,
    "STARTSWITH": pc.starts_with,
    "ENDSWITH": pc.ends_with,
}


@dataclass(frozen=True)
class Selector:
    """A condition on messages, with its text as the user wrote it. It can be pickled and hashed."""

    text: str
    tree: Condition

    def at(self, now_ms: int) -> Filter:
        return Filter(self.tree, now_ms)


@dataclass(frozen=True)
class Filter:
    """A selector with a fixed ``now``. A read applies it to the rows of the files."""

    tree: Condition
    now_ms: int

    @property
    def columns(self) -> list[str]:
        """The stored columns that the selector needs, in a fixed order; when it needs none, a small one."""
        columns: set[str] = set()
        nodes: list[Node] = [self.tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, Property):
                columns.add(STORED_COLUMNS.get(node.name, "properties"))
            nodes.extend(_children(node))
        return sorted(columns) or ["tags"]

    def evaluate(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return TRUE, FALSE or null for each row of a table with :attr:`columns`: ``properties`` map<string,string>,
        ``tags`` and ``keys`` string."""
        # One chunk at a time: all chunks together may be too long for one string array.
        results = [_Evaluation(batch, self.now_ms).condition(self.tree) for batch in rows.to_batches()]
        return pa.chunked_array(results, pa.bool_())

    def keeps(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return True for each row where the selector is TRUE, and False for all others."""
        return pc.fill_null(self.evaluate(rows), False)


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, (And, Or)):
        return node.operands
    if isinstance(node, Compare):
        return (node.left, node.right)
    if isinstance(node, (Not, IsNull, In, Search, Like)):
        return (node.operand,)
    return ()


def is_condition(node: Node) -> bool:
    """Return True when the node's value is TRUE, FALSE or unknown, and not a string or a number."""
    return not isinstance(node, (Property, Text, Number, Now))


# ---------------------------------------------------------------- its value
@dataclass(frozen=True)
class _Numbers:
    """Values as numbers. ``floats`` has all numbers, ``ints`` those that a long holds exactly. All else is null."""

    ints: Any
    floats: Any


class _Evaluation:
    """Evaluates conditions for one record batch, and takes each property out of the maps once."""

    def __init__(self, rows: pa.RecordBatch, now_ms: int) -> None:
        self._rows, self._now_ms = rows, now_ms
        self._strings: dict[str, Any] = {}
        self._numbers: dict[Property, _Numbers] = {}

    def condition(self, node: Node) -> Any:
        """The values of a condition; null where they are unknown."""
        if isinstance(node, Truth):
            return self._spread(pa.scalar(node.value, pa.bool_()))
        if isinstance(node, Not):
            return pc.invert(self.condition(node.operand))
        if isinstance(node, (And, Or)):
            combine = pc.or_kleene if isinstance(node, Or) else pc.and_kleene
            return reduce(combine, map(self.condition, node.operands))
        if isinstance(node, Compare):
            return self._equal(node.left, node.right) if node.operator == "=" else self._ordered(node)
        if isinstance(node, IsNull):
            if is_condition(node.operand):
                return pc.is_null(self.condition(node.operand))
            return self._spread(self._missing(node.operand))
        if isinstance(node, In):
            value = self._string(node.operand)
            inside = pc.is_in(value, value_set=pa.array(node.values, pa.string()))
            return self._spread(pc.if_else(pc.is_valid(value), inside, None))
        if isinstance(node, Search):
            value = self._string(node.operand)
            if not node.text:
                return self._spread(pa.scalar(False))
            matches = SEARCHES[node.operator](value, node.text)
            return self._spread(pc.fill_null(pc.invert(matches) if node.negated else matches, False))
        if isinstance(node, Like):
            return self._spread(pc.match_like(self._string(node.operand), node.pattern))
        raise TypeError(f"{type(node).__name__} is no condition")

    def _spread(self, values: Any) -> Any:
        return pa.repeat(values, self._rows.num_rows) if isinstance(values, pa.Scalar) else values

    def _equal(self, left: Node, right: Node) -> Any:
        """Evaluate ``=``. A missing side means what it does in ``ComparisonExpression.doCreateEqual``."""
        if is_condition(left) or is_condition(right):
            left_truth, right_truth = self._as_truth(left), self._as_truth(right)
            equal, right_missing, left_missing = (
                pc.equal(left_truth, right_truth),
                pc.is_null(right_truth),
                pc.is_null(left_truth),
            )
        else:
            left_missing, right_missing = self._missing(left), self._missing(right)
            if isinstance(left, (Property, Text)) and isinstance(right, (Property, Text)):
                equal = pc.equal(self._string(left), self._string(right))
            else:
                equal = _compare("=", self._number(left), self._number(right))
        return self._spread(pc.if_else(right_missing, left_missing, equal))

    def _ordered(self, node: Compare) -> Any:
        return self._spread(_compare(node.operator, self._number(node.left), self._number(node.right)))

    def _as_truth(self, node: Node) -> Any:
        """Evaluate a condition, or read a string as ``Boolean.valueOf`` does."""
        if isinstance(node, (Property, Text)):
            return self._spread(pc.equal(pc.ascii_lower(self._string(node)), "true"))
        return self.condition(node)

    def _missing(self, node: Node) -> Any:
        return pc.is_null(self._string(node)) if isinstance(node, (Property, Text)) else pa.scalar(False)

    def _string(self, node: Property | Text) -> Any:
        if isinstance(node, Text):
            return pa.scalar(node.value, pa.string())
        if node.name not in self._strings:
            self._strings[node.name] = self._column(node.name)
        return self._strings[node.name]

    def _column(self, name: str) -> Any:
        if name in STORED_COLUMNS:
            column = self._rows.column(STORED_COLUMNS[name])
            return column if column.type == pa.string() else column.cast(pa.string())
        properties = self._rows.column("properties")
        if properties.type != PROPERTIES:
            properties = properties.cast(PROPERTIES)
        return pc.map_lookup(properties, query_key=pa.scalar(name), occurrence="last")

    def _number(self, node: Node) -> _Numbers:
        if isinstance(node, Property):
            if node not in self._numbers:
                self._numbers[node] = _numbers(self._string(node))
            return self._numbers[node]
        if isinstance(node, Text):
            parsed = _numbers(pa.array([node.value]))
            return _Numbers(parsed.ints[0], parsed.floats[0])
        if not isinstance(node, (Number, Now)):
            raise TypeError(f"{type(node).__name__} is no number")
        value = self._now_ms if isinstance(node, Now) else node.value
        whole = pa.scalar(value if isinstance(value, int) else None, pa.int64())
        return _Numbers(whole, pa.scalar(float(value), pa.float64()))


_INT = r"^[+-]?[0-9]{1,19}$"
_FLOAT = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


def _numbers(strings: pa.Array) -> _Numbers:
    """Read strings as numbers; other strings become null. Nothing overflows and nothing raises."""
    longest = pc.max(pc.binary_length(strings)).as_py() or 0
    if longest < len(str(LONG_MAX)) and pc.all(pc.ascii_is_decimal(strings)).as_py():  # the usual case is faster
        ints = pc.cast(strings, pa.int64())
        return _Numbers(ints, pc.cast(ints, pa.float64(), safe=False))
    floats = pc.cast(pc.if_else(pc.match_substring_regex(strings, _FLOAT), strings, None), pa.float64())
    whole = pc.utf8_ltrim(strings, "+")
    digits = pc.utf8_ltrim(strings, "+-")
    fits = pc.or_(pc.less(pc.binary_length(digits), 19), pc.less_equal(digits, str(LONG_MAX)))
    is_int = pc.and_(pc.match_substring_regex(strings, _INT), fits)
    ints = pc.cast(pc.if_else(is_int, whole, None), pa.int64())
    return _Numbers(ints, floats)


def _compare(operator: str, left: _Numbers, right: _Numbers) -> Any:
    """The values of a comparison; null where a side is missing or no number."""
    function = OPERATORS[operator]
    exact = pc.and_(pc.is_valid(left.ints), pc.is_valid(right.ints))
    return pc.if_else(exact, function(left.ints, right.ints), function(left.floats, right.floats))
