"""``txmq serve``: a live page about a commit log, which only reads it."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.cli.bodies import BYTES_SHOWN, BodyForm, shown
from rmq_spark.cli.command import name_path, path_to_type, sentence_of
from rmq_spark.cli.output import LogPath, Storage, open_log, plainly
from rmq_spark.cli.stderr_log import log_to_stderr
from rmq_spark.cli.text import one_line
from rmq_spark.errors import HalfBatchNotFoundError, OptionError

if TYPE_CHECKING:
    import pyarrow as pa

    from rmq_spark._core.report.live_server import Query, View
    from rmq_spark.log import CommitLog
    from rmq_spark.report import Diagnosis, Standing

PORT = 5558
FOUND_MAX, MORE = 20, 200
"""The most messages that a search by key or id shows, and the limit of the command that shows more."""


def register(app: Any) -> None:
    """Add the command to the app."""
    app.command()(serve)


@plainly
def serve(
    path: LogPath,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where browsers reach it; 0 takes a free one.")] = PORT,
    address: Annotated[
        str, typer.Option(help="The address to listen at. One that other machines reach needs a token.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(help="A further name of it in addresses, such as a proxy's; may be repeated. It needs a token."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TXMQ_SERVE_TOKEN",
            help="What a viewer has to know, 16 characters or more: open the address once with ?token=…. Other users "
            "of the machine can see arguments, so set it in the environment.",
        ),
    ] = None,
    since: Annotated[str, typer.Option(help='How far back verdicts and messages count: "7d", "12h".')] = "1d",
    show_bodies: Annotated[bool, typer.Option("--show-bodies", help="Show bodies of messages, too.")] = False,
    storage: Storage = None,
) -> None:
    """A live page in a browser: what is wrong and what to do, what waits, lag, one half batch, one message. It only
    reads the log."""
    from rmq_spark._core.report.live_server import Door, LivePages, serving
    from rmq_spark._core.runtime.threads import stopped_by_signals
    from rmq_spark.cli.command import hide
    from rmq_spark.cli.doctor import judge

    door = Door(address, name or (), token)
    log = open_log(path, storage)
    name_path(redacted(log.path))
    hide([token] if token else [])
    look = Looker(log, since, show_bodies, judge())
    look.require_span()
    pages = LivePages(redacted(log.path), look.views(), door, sentence_of)
    log_to_stderr(logging.WARNING)
    stop = threading.Event()
    with serving(pages, address, port) as url, stopped_by_signals(stop):
        typer.echo(f"{redacted(log.path)} is shown at {url}{'?token=…' if token else ''}")
        sys.stdout.flush()
        stop.wait()


class Looker:
    """Looks at a commit log for the pages. Its methods return the main parts of pages.

    Parameters
    ----------
    log : CommitLog
    since : str
        How far back verdicts and messages count.
    show_bodies : bool
    judge : callable, optional
        Makes a diagnosis of how the log stands.
    """

    def __init__(
        self,
        log: CommitLog,
        since: str = "1d",
        show_bodies: bool = False,
        judge: Callable[[Standing], Diagnosis] | None = None,
    ) -> None:
        from rmq_spark.report import Diagnosis

        self._log, self._since, self._show_bodies = log, since, show_bodies
        self._judge = judge or partial(Diagnosis, typed=path_to_type(), said=sentence_of)

    def views(self) -> dict[str, View]:
        """Return the pages by path."""
        from rmq_spark._core.report.live_page import FIELDS
        from rmq_spark._core.report.live_server import View
        from rmq_spark._core.report.search_page import BEFORE

        half_batch = View(self.half_batch, every_s=5, fields=("id",))
        found = View(self.found, fields=(*FIELDS, BEFORE))
        return {"/": View(self.home, every_s=3), "/half": half_batch, "/find": found}

    def require_span(self) -> None:
        """Raise OptionError when ``since`` is no time."""
        from rmq_spark._core.report.span import Span

        Span.of(self._log.engine, self._since)

    def home(self, query: Query) -> str:
        from rmq_spark._core.report.live_page import home
        from rmq_spark.report import figures_of, findings_of

        figures = figures_of(self._same_log(), self._since)
        diagnosis = self._judge(figures.now)
        return home(figures, findings_of(figures, diagnosis), diagnosis.typed)

    def half_batch(self, query: Query) -> str:
        from rmq_spark._core.inspect.find import transactions_of
        from rmq_spark._core.report.live_page import TRANSACTIONS_MAX, half_batch
        from rmq_spark.cli.trace import advice, argument_of

        engine = self._same_log().engine
        trace = self._log.trace(**argument_of(query.get("id", "")))
        if trace.transaction_id or trace.message_id:
            trace = self._log.trace(half_id=trace.half_id)
        transactions = transactions_of(engine, trace, TRANSACTIONS_MAX)
        return half_batch(trace, transactions, list(advice(trace)), engine.runtime.now())

    def found(self, query: Query) -> str:
        from rmq_spark._core.inspect.find import Wanted, find_everywhere
        from rmq_spark._core.report.live_page import FIELDS, notice
        from rmq_spark._core.report.search_page import BEFORE
        from rmq_spark.cli.trace import argument_of

        text, topic, queue, offset = (query.get(field, "").strip() for field in FIELDS)
        if not (text or topic):
            return notice("Find", "Write a key, a message id or a half id; or a topic, with a queue and an offset.")
        if text and not topic:
            with suppress(OptionError, HalfBatchNotFoundError):  # else it is a key, which may look like an id
                return self._found_by_id(text, argument_of(text))
        wanted = Wanted(topic or None, text or None, None, _number(queue, "queue"), _number(offset, "offset"))
        if wanted.queue_id is not None and wanted.topic is None:
            raise OptionError("a queue needs a topic: which topic's queue?")
        if wanted.offset is not None and wanted.queue_id is None:
            raise OptionError("an offset needs a queue: which queue's offset?")
        if wanted.key is None and wanted.offset is None:
            return self._newest(topic, wanted.queue_id, _number(query.get(BEFORE, ""), BEFORE))
        place = {"--key": text, "--topic": topic, "--queue": queue, "--offset": offset}
        found = find_everywhere(self._same_log().engine, wanted, FOUND_MAX + 1)
        return self._listed(found, place, wanted.topic, wanted.queue_id)

    def _found_by_id(self, text: str, argument: Mapping[str, str]) -> str:
        from rmq_spark._core.inspect.find import find_by_id

        if "half_id" in argument:
            return self.half_batch({"id": argument["half_id"]})
        found = find_by_id(self._same_log().engine, FOUND_MAX + 1, **argument)
        return self._listed(found, {"--transaction-id": text})

    def _newest(self, topic: str, queue: int | None, before: int | None) -> str:
        from rmq_spark._core.report.search_page import LISTED_MAX, newest
        from rmq_spark.cli.message_choice import Choice

        log = self._same_log()
        queues = log.engine.require_topic(topic)
        if queue is not None and queue >= queues:
            raise OptionError(f"topic {topic!r} has no queue {queue}: it has the queues 0 to {queues - 1}")
        if before is not None and queue is None:
            raise OptionError("an offset needs a queue: which queue's offset?")
        choice = Choice(log, topic, 0 if queues == 1 else queue)
        ends = choice.ends()
        rows = choice.newest_before(LISTED_MAX, ends if before is None else dict.fromkeys(ends, before)).to_pylist()
        rows.sort(key=lambda row: (row["commit_timestamp"], row["queue_offset"], row["queue_id"]), reverse=True)
        firsts = log.engine.firsts(refresh=False)
        kept = {queue: (firsts.get((topic, queue), 0), end) for queue, end in ends.items()}
        return newest(topic, rows[:LISTED_MAX], kept, before, self._readers())

    def _listed(
        self, messages: pa.Table, options: Mapping[str, str], topic: str | None = None, queue: int | None = None
    ) -> str:
        """Return the page of found messages. The options are those of the command that shows more."""
        from rmq_spark._core.inspect.find import similar_keys
        from rmq_spark._core.report.search_page import SIMILAR_MAX, found, not_found

        if not messages.num_rows:
            key = options.get("--key", "")
            similar = similar_keys(self._log.engine, key, topic, SIMILAR_MAX) if key and queue is None else []
            wanted = " ".join(one_line(value) for value in options.values() if value)
            return not_found(wanted, similar, sorted(self._log.topics()), topic, queue)
        rows = messages.slice(0, FOUND_MAX).to_pylist()
        bodies = [shown(row["body"], BodyForm.AUTO, BYTES_SHOWN) for row in rows] if self._show_bodies else None
        typed = " ".join(f"{name} {shlex.quote(one_line(value))}" for name, value in options.items() if value)
        more = f"txmq query {path_to_type()}{typed} --limit {MORE}" if messages.num_rows > FOUND_MAX else ""
        return found(rows, more, self._readers(), bodies)

    def _readers(self) -> Mapping[tuple[str, int], list[tuple[str, int]]]:
        """Return consumer groups and their next offsets by topic and queue."""
        readers: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for row in self._log.engine.groups.rows().to_pylist() if self._log.engine.has_groups() else ():
            place = (row["topic"], row["queue_id"])
            readers.setdefault(place, []).append((row["consumer_group"], row["next_offset"]))
        return readers

    def _same_log(self) -> CommitLog:
        """Return the log, read anew. Raises NotACommitLogError when it is gone, or another one is in its place."""
        self._log.engine.new_handle()
        self._log.refresh()
        return self._log


def _number(text: str, what: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise OptionError(f"{what} {text!r} is no number: 0 or more is expected")
    return int(text)
