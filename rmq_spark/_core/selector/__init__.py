"""Selects the messages that a reader wants, by RocketMQ's tags and SQL92 (``MessageSelector.byTag``, ``bySql``).

The driver makes a :class:`~rmq_spark._core.selector.tree.Selector` from text. Executors evaluate it with pyarrow alone.
"""

from __future__ import annotations

from rmq_spark._core.selector.tree import In, Property, Selector
from rmq_spark.errors import OptionError

SUB_ALL = "*"
"""RocketMQ's expression for all tags."""

SELECTOR_CHARS_MAX = 64 * 1024
"""Longest text of a selector. RocketMQ has no limit."""


def parse_tags(expression: str) -> tuple[str, ...] | None:
    """Return the tags of RocketMQ's ``"TagA || TagB"``, or None for ``*`` (``FilterAPI.buildSubscriptionData``)."""
    if not isinstance(expression, str):
        raise OptionError(f"tags is {type(expression).__name__}: a string such as 'TagA || TagB' is expected")
    try:
        expression.encode()
    except UnicodeEncodeError as problem:
        raise OptionError(f"{expression[:40]!r} is not valid Unicode text: {problem.reason}", argument="tags") from None
    tags = tuple(dict.fromkeys(tag.strip() for tag in expression.split("||")))
    if tags == (SUB_ALL,):
        return None
    if "" in tags or SUB_ALL in tags:
        raise OptionError(f"{expression!r} is neither '*' nor of the form 'TagA || TagB'", argument="tags")
    if any("|" in tag for tag in tags):
        raise OptionError(
            f"{expression!r} has a single bar: RocketMQ separates tags by two, as in 'TagA || TagB', and no tag has "
            "a bar",
            argument="tags",
        )
    return tags


def tag_selector(tags: tuple[str, ...] | None) -> Selector | None:
    """Return the selector of messages with one of these tags; None, which keeps all, when ``tags`` is None."""
    return None if tags is None else Selector(" || ".join(tags), In(Property("TAGS"), tags))


def parse_selector(text: str) -> Selector:
    """Read a selector in RocketMQ's SQL92, such as ``a > 5 AND region IN ('eu', 'us')`` (``SelectorParser.parse``).

    For a text that is no selector, the OptionError names the place, what was found there, and what was expected.
    """
    if not isinstance(text, str):
        raise OptionError(f"selector is {type(text).__name__}: a string such as \"region = 'eu'\" is expected")
    if len(text) > SELECTOR_CHARS_MAX:
        raise OptionError(f"selector has {len(text)} characters: at most {SELECTOR_CHARS_MAX} are allowed")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise OptionError(f"selector is not valid Unicode text: {problem.reason}") from None
    try:
        from rmq_spark._core.selector.grammar import parse
    except ModuleNotFoundError as problem:
        if problem.name != "lark":
            raise
        raise OptionError(
            "selectors need the package lark on the driver: install rmq_spark with its extra sql92"
        ) from problem
    return Selector(text, parse(text))
