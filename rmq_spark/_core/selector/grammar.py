"""Parses selectors with RocketMQ's SQL92 grammar (``SelectorParser.jj``) and lark. It runs on drivers only.

The parser calls :class:`_Builder` bottom-up and keeps its own stack, so no text can make Python recurse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from rmq_spark._core.selector.tree import (
    LONG_MAX,
    And,
    Compare,
    Condition,
    In,
    IsNull,
    Like,
    Node,
    Not,
    Now,
    Number,
    Or,
    Property,
    Search,
    Text,
    Truth,
    is_condition,
)
from rmq_spark.errors import OptionError

DEPTH_MAX = 100
"""How deep conditions, parentheses and signs may be nested. RocketMQ's limit is the stack of its thread."""
PATTERN_CHARS_MAX = 1024
"""Longest pattern of LIKE. The time to match it grows with its length times that of the value."""

_GRAMMAR = r"""
?start: or_condition
?or_condition: and_condition (OR and_condition)*
?and_condition: equality (AND equality)*
?equality: comparison
    | equality EQ comparison                                   -> compare
    | equality NE comparison                                   -> compare
    | equality IS [NOT] NULL                                   -> is_null
?comparison: signed
    | comparison GT signed                                     -> compare
    | comparison GE signed                                     -> compare
    | comparison LT signed                                     -> compare
    | comparison LE signed                                     -> compare
    | comparison [NOT] (CONTAINS | STARTSWITH | ENDSWITH) TEXT -> search
    | comparison [NOT] LIKE TEXT [ESCAPE TEXT]                 -> like
    | comparison [NOT] BETWEEN signed AND signed               -> between
    | comparison [NOT] IN OPEN TEXT (COMMA TEXT)* CLOSE        -> in_list
?signed: primary
    | PLUS signed                                              -> plus
    | MINUS signed                                             -> minus
    | NOT signed                                               -> negation
?primary: TEXT                                                 -> text
    | INT                                                      -> number
    | FLOAT                                                    -> number
    | TRUE                                                     -> truth
    | FALSE                                                    -> truth
    | NULL                                                     -> truth
    | NOW                                                      -> now
    | NAME                                                     -> property
    | OPEN or_condition CLOSE                                  -> parentheses

NOT: "NOT"i
AND: "AND"i
OR: "OR"i
BETWEEN: "BETWEEN"i
IN: "IN"i
IS: "IS"i
NULL: "NULL"i
TRUE: "TRUE"i
FALSE: "FALSE"i
CONTAINS: "CONTAINS"i
STARTSWITH: "STARTSWITH"i
ENDSWITH: "ENDSWITH"i
LIKE: "LIKE"i
ESCAPE: "ESCAPE"i
NOW: "NOW"i
NAME: /[a-z_$][a-z0-9_$]*/i
FLOAT.2: /[0-9]+\.[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/i
INT.1: /0|[1-9][0-9]*l?/i
TEXT: /'(?:[^']|'')*'/
NE: "<>"
GE: ">="
LE: "<="
EQ: "="
GT: ">"
LT: "<"
PLUS: "+"
MINUS: "-"
OPEN: "("
CLOSE: ")"
COMMA: ","
_BLANK: /[ \t\n\r\f]+/
_LINE_COMMENT.3: /--[^\n\r]*(\r\n|\n|\r)/
_BLOCK_COMMENT.3: /\/\*(.|\n|\r)*?\*\//
%ignore _BLANK
%ignore _LINE_COMMENT
%ignore _BLOCK_COMMENT
"""

_WORDS = {
    "NAME": "a property",
    "TEXT": "a string in single quotes",
    "INT": "a number",
    "FLOAT": "a number",
    "$END": "the end",
    **dict(
        zip("NE GE LE EQ GT LT PLUS MINUS OPEN CLOSE COMMA".split(), "<> >= <= = > < + - ( ) ,".split(), strict=True)
    ),
}


@dataclass(frozen=True)
class _Parsed:
    """A node and its place in the text."""

    node: Node
    start: int
    end: int
    depth: int = 1


class _Builder:
    """Makes nodes from what the parser found. Each rule has a method; ``parts`` are the rule's tokens and nodes."""

    # ---------------------------------------------------------------- constants
    def text(self, children: list[Any]) -> _Parsed:
        return _parsed(Text(_literal(children[0])), children)

    def property(self, children: list[Any]) -> _Parsed:
        return _parsed(Property(str(children[0])), children)

    def now(self, children: list[Any]) -> _Parsed:
        return _parsed(Now(), children)

    def truth(self, children: list[Any]) -> _Parsed:
        return _parsed(Truth({"TRUE": True, "FALSE": False}.get(children[0].type)), children)

    def number(self, children: list[Any]) -> _Parsed:
        token = children[0]
        if token.type == "INT":
            digits = token.rstrip("lL")
            if len(digits) > len(str(LONG_MAX)) or int(digits) > LONG_MAX:
                raise _Refused(token, f"a whole number of at most {LONG_MAX}")
            return _parsed(Number(int(digits)), children)
        value = float(token)
        if math.isinf(value) or (value == 0 and re.match(r"[0.]*[1-9]", token)):
            raise _Refused(token, "a number that a double can hold")
        return _parsed(Number(value), children)

    def plus(self, children: list[Any]) -> _Parsed:
        return _parsed(children[1].node, children)

    def minus(self, children: list[Any]) -> _Parsed:
        operand = children[1]
        if not isinstance(operand.node, Number):
            raise _Refused(operand, "a number behind '-' (there is no arithmetic)")
        return _parsed(Number(-operand.node.value), children)

    # ---------------------------------------------------------------- conditions
    def parentheses(self, children: list[Any]) -> _Parsed:
        return _parsed(children[1].node, children)

    def negation(self, children: list[Any]) -> _Parsed:
        return _parsed(Not(_condition(children[1])), children)

    def and_condition(self, children: list[Any]) -> _Parsed:
        return _parsed(And(tuple(_condition(p) for p in children[::2])), children)

    def or_condition(self, children: list[Any]) -> _Parsed:
        return _parsed(Or(tuple(_condition(p) for p in children[::2])), children)

    def compare(self, children: list[Any]) -> _Parsed:
        left, operator, right = children
        if operator not in ("=", "<>"):
            return _parsed(_ordered(left, str(operator), right), children)
        for side in (left, right):
            if side.node == Truth(None):
                raise _Refused(side, "a value: IS NULL and IS NOT NULL ask for a missing one")
        for condition, number in ((left, right), (right, left)):
            if is_condition(condition.node) and isinstance(number.node, (Number, Now)):
                raise _Refused(number, "TRUE, FALSE, a property or a condition: no number is equal to a condition")
        equal = Compare("=", left.node, right.node)
        return _parsed(equal if operator == "=" else Not(equal), children)

    def is_null(self, children: list[Any]) -> _Parsed:
        null = IsNull(children[0].node)
        return _parsed(Not(null) if len(children) > 3 else null, children)

    def between(self, children: list[Any]) -> _Parsed:
        value, low, high = (p for p in children if isinstance(p, _Parsed))
        if len(children) > 5:
            outside = _ordered(value, "<", low), _ordered(value, ">", high)
            return _parsed(Or(outside), children)
        inside = _ordered(value, ">=", low), _ordered(value, "<=", high)
        if isinstance(low.node, Number) and isinstance(high.node, Number) and low.node.value > high.node.value:
            raise _Refused(high, f"a number of at least {low.node.value}, where BETWEEN begins")
        return _parsed(And(inside), children)

    def in_list(self, children: list[Any]) -> _Parsed:
        operand = children[0]
        if not isinstance(operand.node, Property):
            raise _Refused(operand, "a property before IN")
        values = (_literal(p) for p in children if isinstance(p, Token) and p.type == "TEXT")
        inside = In(operand.node, tuple(dict.fromkeys(values)))
        return _parsed(Not(inside) if children[1].type == "NOT" else inside, children)

    def search(self, children: list[Any]) -> _Parsed:
        operator = children[-2]
        operand = _string(children[0], operator)
        search = Search(str(operator.type), operand, _literal(children[-1]), children[1].type == "NOT")
        return _parsed(search, children)

    def like(self, children: list[Any]) -> _Parsed:
        operand = _string(children[0], "LIKE")
        texts = [p for p in children if isinstance(p, Token) and p.type == "TEXT"]
        escape = _literal(texts[1]) if len(texts) > 1 else None
        if escape is not None and len(escape) != 1:
            raise _Refused(texts[1], "one character behind ESCAPE")
        like = Like(operand, _pattern(texts[0], escape))
        return _parsed(Not(like) if children[1].type == "NOT" else like, children)


class _Refused(Exception):
    """Raised for text that the grammar allows and RocketMQ's types do not."""

    def __init__(self, where: _Parsed | Token, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.start, self.end = _span(where)


def _span(child: _Parsed | Token) -> tuple[int, int]:
    return (child.start_pos or 0, child.end_pos or 0) if isinstance(child, Token) else (child.start, child.end)


def _parsed(node: Node, children: list[Any]) -> _Parsed:
    first, last = children[0], children[-1]
    depth = 1 + max((p.depth for p in children if isinstance(p, _Parsed)), default=0)
    parsed = _Parsed(node, _span(first)[0], _span(last)[1], depth)
    if parsed.depth > DEPTH_MAX:
        raise _Refused(parsed, f"at most {DEPTH_MAX} levels within each other")
    return parsed


def _literal(token: Token) -> str:
    return str(token)[1:-1].replace("''", "'")


def _pattern(token: Token, escape: str | None) -> str:
    """Return the pattern with a backslash as its escape character, as Arrow's ``match_like`` wants it."""
    if len(token) > PATTERN_CHARS_MAX + 2:
        raise _Refused(token, f"a pattern of at most {PATTERN_CHARS_MAX} characters behind LIKE")
    escaped: list[str] = []
    characters = iter(_literal(token))
    for c in characters:
        if c == escape:
            c = next(characters, "")
            if c not in ("%", "_", escape):
                raise _Refused(token, f"'%', '_' or {escape!r} behind each {escape!r}")
            escaped.append(f"\\{c}" if c in "%_\\" else c)
        else:
            escaped.append("\\\\" if c == "\\" else c)
    return "".join(escaped)


# ---------------------------------------------------------------- what fits where
def _condition(child: _Parsed) -> Condition:
    """Return the part's node, which must be a condition (``SelectorParser.asBooleanExpression``)."""
    node = child.node
    if isinstance(node, Property):
        raise _Refused(
            child,
            f"a condition, such as {node.name} = TRUE or {node.name} IS NOT NULL (NOT binds more tightly than "
            f"a comparison: NOT ({node.name} = …))",
        )
    if isinstance(node, (Text, Number, Now)):
        raise _Refused(child, "a condition")
    return node


def _ordered(left: _Parsed, operator: str, right: _Parsed) -> Compare:
    """Compare two sides, which must be numbers or properties (``ComparisonExpression.checkLessThanOperand``)."""
    for side in (left, right):
        if not isinstance(side.node, (Property, Number, Now)):
            raise _Refused(side, f"a number, now or a property beside {operator}")
    return Compare(operator, left.node, right.node)


def _string(child: _Parsed, operator: str) -> Property | Text:
    if not isinstance(child.node, (Property, Text)):
        raise _Refused(child, f"a property or a string before {operator}")
    return child.node


# ---------------------------------------------------------------- the door
_PARSER = Lark(
    _GRAMMAR,
    parser="lalr",
    lexer="basic",
    transformer=_Builder(),
    keep_all_tokens=True,
    maybe_placeholders=False,
    g_regex_flags=re.ASCII,
)


def parse(text: str) -> Condition:
    """Return the tree of a selector, or raise OptionError, which names the place, what was found there and what was
    expected."""
    try:
        return _condition(_PARSER.parse(text))  # type: ignore[arg-type]
    except _Refused as problem:
        raise _error(text, problem.start, repr(_short(text[problem.start : problem.end])), problem.expected) from None
    except UnexpectedCharacters as problem:
        position = problem.pos_in_stream or 0
        found = "a string without its closing quote" if text[position] == "'" else repr(text[position])
        raise _error(text, position, found, "a word, a number, a string in single quotes or an operator") from None
    except UnexpectedToken as problem:
        token = problem.token
        ended = token.type == "$END"
        found = "the end" if ended else repr(_short(str(token)))
        raise _error(text, len(text) if ended else _span(token)[0], found, _terminal_names(problem.accepts)) from None


def _terminal_names(terminals: Iterable[str]) -> str:
    *words, last = sorted({_WORDS.get(t, t) for t in terminals})
    return f"{', '.join(words)} or {last}" if words else last


def _short(text: str, chars_max: int = 40) -> str:
    return text if len(text) <= chars_max else f"{text[:chars_max]}…"


def _error(text: str, position: int, found: str, expected: str) -> OptionError:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return OptionError(f"selector, line {line}, column {column}: found {found}, expected {expected}")
