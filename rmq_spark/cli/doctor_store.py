"""Checks of ``txmq doctor`` alone on a commit log's store: what this user may do there, and how it behaves."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rmq_spark._core.inspect.diagnosis import NAMED
from rmq_spark._core.storage.location import is_uri
from rmq_spark._core.storage.store_errors import is_denied
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark.cli.command import sentence_of
from rmq_spark.report import Finding, Level

if TYPE_CHECKING:
    from rmq_spark.log import CommitLog

SKEW_S = 5.0


def look_at_store(log: CommitLog) -> Iterator[Finding]:
    """Yield findings about what this user may write, and what the store and its clock then do."""
    checks: tuple[tuple[str, Callable[[CommitLog], Finding | None]], ...] = (
        ("permissions", _permissions),
        ("store", _store),
        ("clock", _clock),
    )
    for name, check in checks:
        try:
            finding = check(log)
        except Exception as problem:
            finding = _failed(name, problem)
        if finding is not None:
            yield finding


def _failed(name: str, problem: Exception) -> Finding:
    if name != "permissions" and (is_denied(problem) or "permission denied" in str(problem)):
        what = f"this user may not write to the store: enough for a reader ({sentence_of(problem)})"
        return Finding(name, Level.WARNING, what, "give a sender or a checker the right to write")
    return Finding(name, Level.CRITICAL, sentence_of(problem))


def _permissions(log: CommitLog) -> Finding | None:
    if is_uri(log.path):
        return None
    tables = [name for name in ("half", "op", "topics", "messages", "groups")
              if os.path.isdir(f"{log.path}/{name}")]  # fmt: skip
    folders = [f"{log.path}/{name}{sub}" for name in tables for sub in ("", "/_delta_log")]
    for right, word, level in (
        (os.R_OK | os.X_OK, "read", Level.CRITICAL),
        (os.W_OK, "write to", Level.WARNING),
    ):
        denied = [folder for folder in folders if not os.access(folder, right)]
        if denied:
            return Finding(
                "permissions",
                level,
                f"this user cannot {word} {', '.join(denied[:NAMED])}"
                + (": enough for a reader, not for a sender or a checker" if word != "read" else ""),
                f"chmod u+rwX -R {shlex.quote(log.path)} (as its owner), or run as the user who owns it",
            )
    return Finding("permissions", Level.OK, f"all {len(folders)} folders can be read and written")


def _store(log: CommitLog) -> Finding:
    from rmq_spark._core.storage.stores import reaching, require_put_if_absent

    options = log.storage_options or None
    started = log.engine.runtime.monotonic()
    with reaching(log.path, options):
        require_put_if_absent(log.path, options)
    took_ms = (log.engine.runtime.monotonic() - started) * 1000
    return Finding("store", Level.OK, f"put-if-absent and lists were tried, and hold ({took_ms:.0f} ms)")


def _clock(log: CommitLog) -> Finding:
    from rmq_spark._core.storage.clock import StoreClock

    table = log.engine.half.table
    before = log.engine.runtime.time()
    stored = StoreClock(table.fs, table.folder, table.runtime).stored_at()
    after = log.engine.runtime.time()
    ahead_s = before - stored if stored < before else min(0.0, after - stored)
    skew = abs(ahead_s)
    if skew <= SKEW_S:
        return Finding("clock", Level.OK, f"agrees with the store's within {max(skew, after - before):.1f} s")
    level = Level.CRITICAL if skew > CLOCK_SKEW_S_MAX else Level.WARNING
    direction = "ahead of" if ahead_s > 0 else "behind"
    limit = f"commits are refused from {CLOCK_SKEW_S_MAX:.0f} s on"
    what = f"this machine's clock is {skew:.0f} s {direction} the store's; {limit}"
    return Finding("clock", level, what, "timedatectl set-ntp true (or set this machine's clock otherwise)")
