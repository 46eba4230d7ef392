"""Completes names for a shell from the commit log: topics, consumer groups, half batches that wait for a verdict.

A shell waits for it at every Tab, and shows whatever is printed. So it looks for a short time only, and is silent on
any problem: then the shell completes names of files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rmq_spark._core.client.commit_log import CommitLog

SECONDS_MAX = 2.0
"""So long one Tab waits for the commit log."""

_before = ""
"""What of the word at the cursor bash keeps as it is: see :func:`join_words_at_colons`."""


# ---------------------------------------------------------------- what typer calls
def of_argument(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names for the argument at the cursor, by its metavar. The first word may be the path of the commit log,
    or what follows a path that is configured: both are tried."""
    arguments = [p for p in ctx.command.params if p.param_type_name == "argument"]
    given = [str(ctx.params[str(a.name)]) for a in arguments if ctx.params.get(str(a.name))]
    found: list[str] = []
    for path, at in ((None, len(given) + 1), (given[0] if given else "", len(given))):
        kind = KINDS.get(str(arguments[at].metavar)) if at < len(arguments) else None
        if kind is not None and path != "":
            found += _names(ctx, path, kind)
    return _fitting(found, incomplete)


def topics_of_option(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return topics, for an option. The path counts as typed when all arguments are there."""
    arguments = [p for p in ctx.command.params if p.param_type_name == "argument"]
    given = [ctx.params.get(str(a.name)) for a in arguments]
    return _fitting(_names(ctx, str(given[0]) if given and all(given) else None, _topics), incomplete)


# ---------------------------------------------------------------- names in a commit log
def _topics(log: CommitLog) -> Iterable[str]:
    return sorted(log.topics())


def _groups(log: CommitLog) -> Iterable[str]:
    from rmq_spark._core.consumers.groups import groups

    return groups(log.engine) if log.engine.has_groups() else ()


def _unsettled(log: CommitLog) -> Iterator[str]:
    yield from log.engine.open_half_ids()
    yield from log.conflicts()
    yield from log.quarantined()["half_id"].to_pylist()


def _resumable(log: CommitLog) -> Iterator[str]:
    yield "all"
    yield from log.quarantined()["half_id"].to_pylist()


def _verdicts(_: CommitLog) -> Iterable[str]:
    return ("COMMIT", "ROLLBACK")


KINDS: Mapping[str, Callable[[CommitLog], Iterable[str]]] = {
    "TOPIC": _topics,
    "GROUP": _groups,
    "HALF_ID": _unsettled,
    "ID": _unsettled,
    "HALF_ID|all": _resumable,
    "COMMIT|ROLLBACK": _verdicts,
}
"""What arguments of these metavars stand for."""


def _names(ctx: typer.Context, path: str | None, kind: Callable[[CommitLog], Iterable[str]]) -> list[str]:
    """Return names in the commit log at a path, or in the configured one: those that were found in time."""
    found: list[str] = []

    def look() -> None:
        with suppress(BaseException):  # a thread would print it
            for name in kind(_opened(ctx, path)):
                found.append(name)

    before = logging.root.manager.disable
    logging.disable()
    try:
        thread = threading.Thread(target=look, name="txmq-completion", daemon=True)
        thread.start()
        thread.join(SECONDS_MAX)
    finally:
        logging.disable(before)
    return list(found)


def _opened(ctx: typer.Context, path: str | None) -> CommitLog:
    from rmq_spark._core.client.commit_log import CommitLog
    from rmq_spark.cli.command import storage_options
    from rmq_spark.cli.configuration import configured

    options = storage_options(ctx.params.get("storage")) or {}
    if path is not None:
        return CommitLog.open(os.path.expanduser(path), options or None)
    found = configured()
    return CommitLog.open(str(found.path), {**found.storage, **options} or None)


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin as the word at the cursor does, without the part that bash keeps."""
    begun = _before + incomplete
    return [name[len(_before) :] for name in dict.fromkeys(names) if name.startswith(begun) and name != _before]


# ---------------------------------------------------------------- bash
def join_words_at_colons() -> None:
    """Join the words that bash made of one. It parts them at colons, which half ids and URIs have, and it replaces only
    what follows the last colon before the cursor."""
    global _before
    words, at = os.environ.get("COMP_WORDS", "").split("\n"), os.environ.get("COMP_CWORD", "")
    _before = ""
    if not at.isdecimal() or int(at) >= len(words):
        return
    joined: list[list[str]] = []
    for word in words[: int(at) + 1]:
        part_of_last = joined and (word.strip(":") == "" != word or joined[-1][-1].strip(":") == "" != joined[-1][-1])
        joined[-1].append(word) if part_of_last else joined.append([word])
    *others, last = joined
    current = "" if last[-1].strip(":") == "" else last[-1]
    _before = "".join(last).removesuffix(current)
    os.environ["COMP_WORDS"] = "\n".join([*map("".join, others), current])
    os.environ["COMP_CWORD"] = str(len(others))
