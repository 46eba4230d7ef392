"""Shell completion of names in the commit log: topics, consumer groups, half batches that wait for a verdict.

The shell waits at every Tab, and shows all that is printed. So the time is limited, and errors print nothing. Without
names, the shell completes file names.
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
    from rmq_spark.log import CommitLog

SECONDS_MAX = 2.0
"""Maximum time that one Tab waits for the commit log."""

_before = ""
"""The part of the word at the cursor that bash keeps: see :func:`join_words_at_colons`."""


# ---------------------------------------------------------------- what typer calls
def of_argument(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names for the argument at the cursor, by its metavar. The first word may be the commit log's path, or the
    argument after a configured path: both are tried."""
    arguments = [p for p in ctx.command.params if p.param_type_name == "argument"]
    typed = [str(ctx.params[str(a.name)]) for a in arguments if ctx.params.get(str(a.name))]
    names: list[str] = []
    for path, position in ((None, len(typed) + 1), (typed[0] if typed else "", len(typed))):
        kind = KINDS.get(str(arguments[position].metavar)) if position < len(arguments) else None
        if kind is not None and path != "":
            names += _find_names(ctx, path, kind)
    return _matching(names, incomplete)


def topics_of_option(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return topics for an option. The path counts as typed when no argument is missing."""
    arguments = [p for p in ctx.command.params if p.param_type_name == "argument"]
    values = [ctx.params.get(str(a.name)) for a in arguments]
    return _matching(_find_names(ctx, str(values[0]) if values and all(values) else None, _topics), incomplete)


# ---------------------------------------------------------------- names in a commit log
def _topics(log: CommitLog) -> Iterable[str]:
    return sorted(log.topics())


def _groups(log: CommitLog) -> Iterable[str]:
    from rmq_spark._core.consumers.consumer_group import groups

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
"""The names that complete an argument, by its metavar."""


def _find_names(ctx: typer.Context, path: str | None, kind: Callable[[CommitLog], Iterable[str]]) -> list[str]:
    """Return the names found in time in the commit log at a path, or in the configured one."""
    names: list[str] = []

    def look() -> None:
        with suppress(BaseException):  # the thread would print it
            for name in kind(_open(ctx, path)):
                names.append(name)

    disabled_level = logging.root.manager.disable
    logging.disable()
    try:
        thread = threading.Thread(target=look, name="txmq-completion", daemon=True)
        thread.start()
        thread.join(SECONDS_MAX)
    finally:
        logging.disable(disabled_level)
    return list(names)


def _open(ctx: typer.Context, path: str | None) -> CommitLog:
    from rmq_spark.cli.command import storage_options
    from rmq_spark.cli.configuration import configured
    from rmq_spark.log import CommitLog

    options = storage_options(ctx.params.get("storage")) or {}
    if path is not None:
        return CommitLog.open(os.path.expanduser(path), options or None)
    configuration = configured()
    return CommitLog.open(str(configuration.path), {**configuration.storage, **options} or None)


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start with the word at the cursor, without the part that bash keeps."""
    word = _before + incomplete
    return [name[len(_before) :] for name in dict.fromkeys(names) if name.startswith(word) and name != _before]


# ---------------------------------------------------------------- bash
def join_words_at_colons() -> None:
    """Join the words that bash splits at colons, which half ids and URIs have. Bash replaces only the part after the
    last colon before the cursor."""
    global _before
    words, index = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    joined: list[list[str]] = []
    for word in words[: index + 1]:
        part_of_last = joined and (word.strip(":") == "" != word or joined[-1][-1].strip(":") == "" != joined[-1][-1])
        joined[-1].append(word) if part_of_last else joined.append([word])
    *previous, last = joined
    current = "" if last[-1].strip(":") == "" else last[-1]
    _before = "".join(last).removesuffix(current)
    os.environ["COMP_WORDS"] = "\n".join([*map("".join, previous), current])
    os.environ["COMP_CWORD"] = str(len(previous))
