"""Selectors: RocketMQ's grammar, its three-valued logic, and what it refuses."""

from __future__ import annotations

import operator
import pickle
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_spark import Message
from rmq_spark._core.selector import SELECTOR_CHARS_MAX, parse_tags, tag_selector
from rmq_spark._core.selector.grammar import DEPTH_MAX
from rmq_spark.errors import MessageError, OptionError
from tests.support.half_batches import header_of
from tests.support.inside import PROPERTIES, HalfWriter, parse_selector

NOW_MS = 1_700_000_000_000
Row = Mapping[str, str]


def rows_of(rows: list[Row]) -> pa.Table:
    properties = [[(k, v) for k, v in row.items() if k not in ("TAGS", "KEYS")] or None for row in rows]
    return pa.table(
        {
            "properties": pa.array(properties, PROPERTIES),
            "tags": pa.array([row.get("TAGS") for row in rows], pa.string()),
            "keys": pa.array([row.get("KEYS") for row in rows], pa.string()),
        }
    )


def value(text: str, /, **row: str) -> bool | None:
    (found,) = parse_selector(text).at(NOW_MS).evaluate(rows_of([row])).to_pylist()
    assert found is None or isinstance(found, bool)
    return found


# ---------------------------------------------------------------- what RocketMQ's own tests ask
@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        ("v CONTAINS 'x' AND v STARTSWITH 'ax' AND v ENDSWITH 'xb'", {"v": "axb"}, True),
        ("v NOT CONTAINS 'x' OR v NOT STARTSWITH 'ax' OR v NOT ENDSWITH 'xb'", {"v": "axb"}, False),
        ("v CONTAINS 'x' OR v STARTSWITH 'x' OR v ENDSWITH 'x'", {"v": "abb"}, False),
        ("v NOT CONTAINS 'x' AND v NOT STARTSWITH 'x' AND v NOT ENDSWITH 'x'", {"v": "abb"}, True),
        ("'axb' CONTAINS 'x' AND 'axb' NOT CONTAINS 'u' AND ' ' ENDSWITH ' '", {}, True),
        ("'axb' CONTAINS '.' OR 's' CONTAINS '\\'", {}, False),
        ("TAGS IS NOT NULL AND TAGS = '''''tag'''''", {"TAGS": "''tag''"}, True),
        ("KEYS = 'k1 k2'", {"KEYS": "k1 k2"}, True),
        ("a=3 and b<>4 And c>5 AND d<=4", {"a": "3", "b": "5", "c": "6", "d": "1"}, True),
        ("a=3 and b<>4 And c>5 AND d<=4", {"a": "4", "b": "5", "c": "6", "d": "1"}, False),
        ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "4", "b": "4", "c": "3", "d": "2"}, True),
        ("a=3 or b<>4 Or c>5 OR d<=4", {"a": "4", "b": "4", "c": "3", "d": "10"}, False),
        ("a in ('3', '4', '5')", {"a": "4"}, True),
        ("a in ('3', '4', '5')", {"a": "8"}, False),
        ("(a not in ('6', '4', '5')) or (b in ('3', '4', '5'))", {"a": "6", "b": "3"}, True),
        ("(a between 2 and 10) AND (b not between 6 and 9)", {"a": "3.1", "b": "10"}, True),
        ("a not between 10 and 2", {"a": "5"}, True),
        ("a > 3.1E10", {"a": "31415000000.0"}, True),
        ("a > b", {"a": "20", "b": "10"}, True),
        ("a = b", {"a": "3.14", "b": "3.14"}, True),
        ("a <> b", {"a": "3.14", "b": "3.141"}, True),
        ("a=TRUE OR b=FALSE", {"a": "true", "b": "x"}, True),
        ("a=TRUE OR b=FALSE", {"a": "false", "b": "TRUE"}, False),
        ("a is null OR a='hello'", {}, True),
        ("a <= now AND now > 5", {"a": str(NOW_MS)}, True),
        ("a > NOW", {"a": str(NOW_MS)}, False),
        ("a > -5 AND a < +.5 AND a <> -1. AND a >= - - -3", {"a": "-2"}, True),
        ("NOT (a = 1) /* a\ncomment */ -- and another\n OR FALSE", {"a": "2"}, True),
        ("between_2 = 'x' AND $_ = 'y' AND Note = 'z'", {"between_2": "x", "$_": "y", "Note": "z"}, True),
    ],
)
def test_a_selector_means_what_rocketmq_says(text: str, row: Row, expected: bool) -> None:
    assert value(text, **row) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", None),
        ("a <> 1", None),
        ("1 = a", False),  # RocketMQ looks at the left side first
        ("here = a", False),
        ("here <> a", True),
        ("a = b", True),
        ("a > 1", None),
        ("a NOT BETWEEN 1 AND 2", None),
        ("a IN ('x')", None),
        ("a NOT IN ('x')", None),
        ("a IS NULL", True),
        ("a IS NOT NULL", False),
        ("a CONTAINS 'x'", False),
        ("a NOT CONTAINS 'x'", False),
        ("a NOT STARTSWITH 'x'", False),
        ("here NOT ENDSWITH ''", False),
        ("a LIKE '%'", None),
        ("a NOT LIKE '%'", None),
        ("a = TRUE", None),
        ("NOT (a = 1)", None),
        ("NULL", None),
        ("NULL IS NULL", True),
        ("(a = 1) IS NULL", True),
        ("a = 1 AND FALSE", False),
        ("a = 1 AND TRUE", None),
        ("a = 1 OR TRUE", True),
        ("a = 1 OR FALSE", None),
    ],
)
def test_a_missing_property_is_unknown_but_where_rocketmq_decides(text: str, expected: bool | None) -> None:
    assert value(text, here="5") is expected


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a > 5 OR r = 'eu'", True),
        ("r = 'eu' OR a > 5", True),
        ("a > 5 AND r = 'us'", False),
        ("NOT (r = 'us' AND a > 5)", True),
        ("NOT (a > 5 AND r = 'us')", True),
        ("NOT (a > 5)", False),
        ("a <> 5", False),
        ("(a > 5) IS NULL", True),
        ("a > r", False),
    ],
)
def test_what_is_no_number_is_unknown_as_a_number(text: str, kept: bool) -> None:
    for word in ("many", "", "0x10", "5d", " 5", "NaN", "\u0661"):
        (found,) = parse_selector(text).at(0).keeps(rows_of([{"a": word, "r": "eu"}])).to_pylist()
        assert found is kept, word


@pytest.mark.parametrize(
    ("text", "a", "expected"),
    [
        # numbers are compared by value, and strings as they stand
        ("a > 5", "5.5", True),
        ("a > 5", "3000000000", True),
        ("a = 9223372036854775807", "9223372036854775807", True),
        ("a = 9223372036854775806", "9223372036854775807", False),
        ("a < 9223372036854775807", "9223372036854775806", True),
        ("a = 9007199254740993", "9007199254740992", False),
        ("a > 9223372036854775807", "9223372036854775808000", True),
        ("a >= 1e308", "1" + "0" * 400, True),
        ("a = -3", "-3.0", True),
        ("a = 7", "+007", True),
        ("a = 0.0", "0", True),
        ("a = '5'", "5.0", False),
        ("'5' = a", "5", True),
        ("5l = a", "5", True),
        ("TRUE = a", "True", True),
        # LIKE has the patterns of SQL
        ("a LIKE 'a_c%'", "abcd", True),
        ("a LIKE 'a_c'", "aéc", True),
        ("a LIKE '_'", "\n", True),
        ("a NOT LIKE 'b%'", "abc", True),
        ("a LIKE 'a.c'", "abc", False),
        ("a LIKE 'a\\_c'", "a\\bc", True),
        ("a LIKE '10!%' ESCAPE '!'", "10%", True),
        ("a LIKE '10!%' ESCAPE '!'", "100", False),
        ("a LIKE '!!%' ESCAPE '!'", "!x", True),
        ("a LIKE '\\%' ESCAPE '\\'", "%", True),
        ("a LIKE '\\%' ESCAPE '\\'", "x", False),
    ],
)
def test_a_property_is_compared_as_what_it_is_compared_with(text: str, a: str, expected: bool) -> None:
    assert value(text, a=a) is expected


def test_of_a_property_that_is_there_twice_the_last_counts() -> None:
    twice = pa.array([[("a", "1"), ("a", "2")]], PROPERTIES)
    assert parse_selector("a = 2").at(0).keeps(pa.table({"properties": twice})).to_pylist() == [True]


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a and between 2 and 10", "line 1, column 7: found 'between', expected (, +, -, FALSE, NOT"),
        ("a = 1 AND\n  b >", "line 2, column 6: found the end, expected (, +"),
        ("", "found the end"),
        ("a = 1)", "column 6: found ')', expected the end"),
        ("(a = 1", "found the end, expected )"),
        ("a = 1 b = 2", "column 7: found 'b', expected <"),
        ("a = 'x", "column 5: found a string without its closing quote"),
        ("a != 5", "found '!'"),
        ("a = 1; drop table x", "found ';'"),
        ("a.b = 1", "column 2: found '.'"),
        ("a = \x00", "found '\\x00'"),
        ("\u0131s = 1", "found '\u0131'"),
        ("007 = a", "column 2: found '0'"),
        ("a > 0x10", "found 'x10'"),
        ("a IN (1)", "found '1', expected a string in single quotes"),
        ("a IN ()", "found ')', expected a string in single quotes"),
        ("5 IN ('x')", "found '5', expected a property before IN"),
        ("a CONTAINS x", "found 'x', expected a string in single quotes"),
        ("a CONTAINS 123", "found '123', expected a string in single quotes"),
        ("a NOT CONTAINS", "found the end, expected a string in single quotes"),
        ("5 CONTAINS '5'", "found '5', expected a property or a string before CONTAINS"),
        ("a between 10 and 0", "column 18: found '0', expected a number of at least 10"),
        ("a between -1 and -5", "found '-5', expected a number of at least -1"),
        ("a between '1' and '5'", "found \"'1'\", expected a number"),
        ("a > 'x'", "found \"'x'\", expected a number, now or a property beside >"),
        ("a < TRUE", "found 'TRUE', expected a number"),
        ("a > 5 > 3", "found 'a > 5', expected a number"),
        ("a >= NULL", "found 'NULL', expected a number"),
        ("a = NULL", "found 'NULL', expected a value: IS NULL"),
        ("TRUE = 5", "found '5', expected TRUE, FALSE"),
        ("now = (a > 1)", "found 'now', expected TRUE, FALSE"),
        ("a > 100000000000000000000000", "expected a whole number of at most 9223372036854775807"),
        ("a > 1e999", "expected a number that a double can hold"),
        ("a > 1e-999", "expected a number that a double can hold"),
        ("a > " + "1" * 50_000 + ".5", "expected a number that a double can hold"),
        ("a > -b", "found 'b', expected a number behind '-'"),
        ("5", "found '5', expected a condition"),
        ("'x' AND a = 1", "found \"'x'\", expected a condition"),
        ("a", "found 'a', expected a condition, such as a = TRUE or a IS NOT NULL"),
        ("NOT a = 5", "column 5: found 'a', expected a condition"),
        ("LIKE = 'x'", "found 'LIKE'"),
        ("a LIKE 'x' ESCAPE 'ab'", "expected one character behind ESCAPE"),
        ("a LIKE 'x!z' ESCAPE '!'", "expected '%', '_' or '!' behind each '!'"),
        ("a LIKE 'x!' ESCAPE '!'", "expected '%', '_' or '!' behind each '!'"),
        ("a LIKE '" + "%a_" * 500 + "'", "expected a pattern of at most 1024 characters"),
        ("/* a = 1", "found '/'"),
        ("a = 1" + " " * SELECTOR_CHARS_MAX, "at most 65536 are allowed"),
        ("a = '\ud800'", "not valid Unicode"),
    ],
)
def test_a_selector_that_is_none_is_refused_with_the_place_and_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)) as caught:
        parse_selector(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "NOT " * 10_000 + "TRUE",
        "(" * 20_000 + "a = 1" + ")" * 20_000,
        "a > " + "- " * 20_000 + "1",
        "a" + " = a" * 10_000,
        "(" * 60_000,
    ],
)
def test_deep_nesting_is_refused_in_words(text: str) -> None:
    with pytest.raises(OptionError, match=f"at most {DEPTH_MAX} levels|found the end"):
        parse_selector(text)


def test_long_chains_are_no_nesting() -> None:
    text = " OR ".join(f"a = {i}" for i in range(3_000))
    assert value(text, a="2999") is True
    nested = "(" * (DEPTH_MAX - 3) + "a = 1" + ")" * (DEPTH_MAX - 3)
    assert value(nested, a="1") is True


def test_text_that_looks_like_code_is_only_text() -> None:
    hostile = "__import__('os').system('true')"
    with pytest.raises(OptionError, match="found '\\('"):
        parse_selector(hostile)
    quoted = hostile.replace("'", "''")
    assert value(f"a = '{quoted}'", a=hostile) is True
    assert value("__class__ IS NULL AND __init__ IS NULL") is True


@given(st.text(alphabet="abNOTANDIS NULL()'%_-+<>=.,0159eE\n/*\u00e9", max_size=40))
def test_any_text_is_a_selector_or_an_option_error(text: str) -> None:
    try:
        selector = parse_selector(text)
    except OptionError:
        return
    assert len(selector.at(0).evaluate(rows_of([{}, {"a": "1", "b": "x"}]))) == 2


# ---------------------------------------------------------------- the object
def test_a_selector_names_the_columns_it_needs_and_can_be_pickled_and_hashed() -> None:
    selector = parse_selector("TAGS = 'a' AND x > 5")
    assert selector.at(0).columns == ["properties", "tags"]
    assert parse_selector("KEYS IS NULL").at(0).columns == ["keys"]
    assert pickle.loads(pickle.dumps(selector)) == selector
    assert hash(selector) == hash(parse_selector("TAGS = 'a' AND x > 5"))
    assert parse_selector("a\n>1").tree == parse_selector("(a) > 1").tree != parse_selector("a > 2").tree


BLANKS = [chr(n) for n in range(0x110000) if chr(n).isspace()]
TAGS = st.text(st.sampled_from(["a", "B", "é", "|", "*", " ", "-", "'", "\u200b", "\x00", *BLANKS]), max_size=4)
WRITER = HalfWriter(header_of(0), {"orders": 1}, "orders", None)


def is_accepted(tag: str, normalize: bool = False) -> bool:
    """Whether a message with this tag can be made, or be written as a row."""
    with suppress(MessageError):
        if normalize:
            WRITER.normalize(pa.table({"body": ["x"], "tags": [tag]}))
        else:
            Message("orders", b"x", tags=tag)
        return True
    return False


@given(st.lists(TAGS | st.text(max_size=6), min_size=1, max_size=5, unique=True))
@settings(deadline=None)
def test_every_tag_that_is_accepted_selects_its_messages_and_no_other_and_all_doors_agree(tags: list[str]) -> None:
    accepted = [tag for tag in tags if is_accepted(tag)]
    assert [tag for tag in tags if is_accepted(tag, normalize=True)] == accepted
    rows = rows_of([{"TAGS": tag} for tag in accepted] + [{}])
    for tag in accepted:
        assert parse_tags(tag) == (tag,)
        wanted = tag_selector(parse_tags(tag))
        assert wanted is not None
        assert wanted.at(0).columns == ["tags"]
        assert wanted.at(0).keeps(rows).to_pylist() == [other == tag for other in accepted] + [False]
    if accepted:
        assert parse_tags(" || ".join(accepted)) == tuple(accepted)
    assert tag_selector(parse_tags("*")) is None


@pytest.mark.parametrize("tag", ["a|b", "a||b", "|", " a", "a ", "a\u00a0", "\na", "", " ", "*"])
def test_a_tag_to_which_nobody_could_subscribe_is_refused_with_its_row(tag: str) -> None:
    assert not is_accepted(tag)
    rows = pa.table({"body": ["0", "1", "2", "3"], "tags": ["TagA", None, tag, tag], "keys": ["k0", "k1", "k2", "k3"]})
    for table in (rows, rows.slice(1), rows.set_column(1, "tags", rows["tags"].dictionary_encode())):
        with pytest.raises(MessageError) as caught:
            WRITER.normalize(table)
        at = table["keys"].to_pylist().index("k2")
        assert f"tags {tag!r} is no tag, in 2 messages (the first is row {at} of its Arrow batch" in str(caught.value)
        assert "keys 'k2'" in str(caught.value)
    assert WRITER.normalize(rows.slice(0, 2))["tags"].to_pylist() == ["TagA", None]


def test_tags_with_blanks_within_or_of_any_script_are_accepted() -> None:
    for tag in ("Tag A", "*a", "täg-1_%.:/", "\u4e2d\u6587", "a'b"):
        assert is_accepted(tag)
        assert WRITER.normalize(pa.table({"body": ["x"], "tags": [tag]}))["tags"].to_pylist() == [tag]


@pytest.mark.parametrize("keys", [["order 1"], ["a", ""], ["a", " b"]])
def test_one_of_several_keys_with_a_blank_in_it_is_refused_for_it_would_be_two(keys: list[str]) -> None:
    with pytest.raises(MessageError, match="blanks separate keys"):
        Message("orders", b"x", keys=keys)
    for offset in (0, 1):
        rows = pa.table({"body": ["0", "1", "2"], "keys": [["x"], None, keys], "tags": ["A", "B", "C"]}).slice(offset)
        with pytest.raises(MessageError, match=rf"blanks separate keys.*row {2 - offset} of its.*tags 'C'"):
            WRITER.normalize(rows)
    assert Message("orders", b"x", keys="order 1").keys_text == "order 1", "these are two keys"


# ---------------------------------------------------------------- against a slow evaluator, a row at a time
Expression = tuple[str, Callable[[Row], Any]]
"""Text, and what it means: a string, a number, True, False or None."""

NAMES = ["a", "b", "c", "TAGS"]
VALUES = ["1", "2", "-3", "2.0", "1e1", "x", "TRUE", "", "9223372036854775807", "9223372036854775806", "ab", "a%b"]
NUMBERS = ["0", "1", "2", "-3", "2.5", "1E1", "9223372036854775807", "9223372036854775806"]


def _as_number(given: Any) -> int | float | None:
    if not isinstance(given, str):
        return given  # type: ignore[no-any-return]
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return None


def _same(left: Any, right: Any) -> bool | None:
    if left is None and right is None:
        return True
    if left is None:
        return None
    if right is None:
        return False
    if isinstance(left, bool) or isinstance(right, bool):
        left, right = (v.lower() == "true" if isinstance(v, str) else v for v in (left, right))
        return bool(left == right)
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    left, right = _as_number(left), _as_number(right)
    return None if left is None or right is None else left == right


def _order(left: Any, right: Any, holds: Callable[[Any, Any], bool]) -> bool | None:
    left, right = (None if side is None else _as_number(side) for side in (left, right))
    return None if left is None or right is None else holds(left, right)


HOLDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def _negate(found: bool | None) -> bool | None:
    return None if found is None else not found


FALSE_TO_TRUE = (False, None, True)
"""Of two values AND gives the one that stands first here, and OR the one that stands last."""


def _and(left: Expression, right: Expression) -> Expression:
    return f"({left[0]} AND {right[0]})", lambda row: min(left[1](row), right[1](row), key=FALSE_TO_TRUE.index)


def _or(left: Expression, right: Expression) -> Expression:
    return f"({left[0]} OR {right[0]})", lambda row: max(left[1](row), right[1](row), key=FALSE_TO_TRUE.index)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _literal(text: str) -> Expression:
    number = _as_number(text)
    return text, lambda row: number


names = st.sampled_from(NAMES).map(lambda n: (n, lambda row: row.get(n)))
numbers = st.sampled_from(NUMBERS).map(_literal)
texts = st.sampled_from(VALUES).map(lambda t: (_quote(t), lambda row: t))
in_order = st.one_of(names, names, numbers)
truths = st.sampled_from([("TRUE", True), ("FALSE", False)]).map(lambda t: (t[0], lambda row: t[1]))


@st.composite
def comparisons(draw: st.DrawFn) -> Expression:
    kind = draw(st.sampled_from(["=", "<>", "order", "between", "in", "search", "null", "truth", "like"]))
    name, of = draw(names)
    negated = draw(st.booleans())
    no = " NOT" if negated else ""
    flip: Callable[[Any], Any] = _negate if negated else lambda found: found
    if kind in ("=", "<>"):
        (left, lv), (right, rv) = draw(st.one_of(in_order, texts)), draw(st.one_of(in_order, texts))
        change = _negate if kind == "<>" else lambda found: found
        return f"{left} {kind} {right}", lambda row: change(_same(lv(row), rv(row)))
    if kind == "order":
        sign = draw(st.sampled_from(sorted(HOLDS)))
        (left, lv), (right, rv) = draw(in_order), draw(in_order)
        return f"{left} {sign} {right}", lambda row: _order(lv(row), rv(row), HOLDS[sign])
    if kind == "between":
        low, high = sorted(draw(st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=2)), key=_as_number)
        above: Expression = ("", lambda row: _order(of(row), _as_number(low), HOLDS[">="]))
        below: Expression = ("", lambda row: _order(of(row), _as_number(high), HOLDS["<="]))
        within = _and(above, below)[1]
        return f"{name}{no} BETWEEN {low} AND {high}", lambda row: flip(within(row))
    if kind == "in":
        values = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=3))
        listed = ", ".join(map(_quote, values))
        return f"{name}{no} IN ({listed})", lambda row: None if of(row) is None else (of(row) in values) is not negated
    if kind == "search":
        word, has = draw(st.sampled_from([
            ("CONTAINS", str.__contains__), ("StartsWith", str.startswith), ("endswith", str.endswith)]))  # fmt: skip
        part = draw(st.sampled_from(["", "1", "x", "a", "%"]))
        return (
            f"{name}{no} {word} {_quote(part)}",
            lambda row: False if of(row) is None or not part else has(of(row), part) is not negated,
        )
    if kind == "null":
        return f"{name} IS{no} NULL", lambda row: (of(row) is None) is not negated
    if kind == "like":
        pattern = draw(st.sampled_from(["%", "_", "a%", "%b", "1_", "%.%"]))
        regex = re.compile(re.escape(pattern).replace("%", ".*").replace("_", "."), re.DOTALL)
        return (
            f"{name}{no} LIKE {_quote(pattern)}",
            lambda row: flip(None if of(row) is None else regex.fullmatch(of(row)) is not None),
        )
    text, truth = draw(truths)
    return f"{name} = {text}", lambda row: _same(of(row), truth(row))


def _larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.tuples(inner, inner).map(lambda p: _and(*p)),
        st.tuples(inner, inner).map(lambda p: _or(*p)),
        inner.map(lambda e: (f"NOT ({e[0]})", lambda row: _negate(e[1](row)))),
        inner.map(lambda e: (f"({e[0]}) IS NULL", lambda row: e[1](row) is None)),
    )


conditions = st.recursive(comparisons(), _larger, max_leaves=8)
messages = st.lists(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)), min_size=1, max_size=12)


@given(conditions, messages)
def test_columns_give_what_a_row_at_a_time_gives(expression: Expression, rows: list[Row]) -> None:
    text, evaluate = expression
    expected: list[bool | None] = [evaluate(row) for row in rows]
    filter_ = parse_selector(text).at(NOW_MS)
    table = rows_of(rows)
    assert filter_.evaluate(table).to_pylist() == expected
    assert filter_.keeps(pa.concat_tables([table, table.slice(1)])).to_pylist() == [
        found is True for found in [*expected, *expected[1:]]
    ]
