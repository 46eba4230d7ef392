"""What every ``txmq`` command has: a commit log whose path need not be typed, and errors on one line."""

from __future__ import annotations

import functools
import inspect
import os
import re
import select
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand

from rmq_spark._core.vocabulary.redaction import redacted
from rmq_spark.cli.completing import of_argument
from rmq_spark.cli.configuration import PATH_ENV, WHERE, configured
from rmq_spark.cli.text import one_line
from rmq_spark.cli.words import in_words_of_the_command
from rmq_spark.errors import ConfigError, MessageError, NotACommitLogError, OptionError, TxmqError
from rmq_spark.logs import open_closed_streams

if TYPE_CHECKING:
    from rmq_spark._core.client.commit_log import CommitLog

STORAGE_ENV = "TXMQ_STORAGE__"
OK, FAILED, BAD_USAGE = 0, 1, 2
"""Exit codes of every command. A few commands have more: docs/command.md."""

P = ParamSpec("P")

_secrets: list[str] = []
_typed: list[str] = []
"""The commit log's path when it was typed: commands in errors name it."""
_configured_storage: dict[str, str] = {}
"""Options for the store of a commit log whose path was not typed."""

LogPath = Annotated[
    str,
    typer.Argument(
        metavar="[PATH]",
        help=f"The commit log: a folder or an object-store URI. May be left out where {WHERE} does.",
        default_factory=str,  # LogCommand puts one in its place
        show_default=False,
        autocompletion=of_argument,
    ),
]
Storage = Annotated[
    list[str] | None,
    typer.Option(
        "--storage",
        metavar="KEY=VALUE",
        help="An option for delta-rs; may be repeated. Other users of the machine can see arguments: set secrets as "
        f"{STORAGE_ENV}AWS_SECRET_ACCESS_KEY and so on in the environment.",
    ),
]
TopicName = Annotated[str, typer.Argument(metavar="TOPIC", autocompletion=of_argument)]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", autocompletion=of_argument)]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table: an object a line.")]


class LogCommand(TyperCommand):
    """A command whose first argument, the path of the commit log, may be left out where it is configured."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        _typed.clear()
        _configured_storage.clear()
        if arguments and arguments[0].name == "path" and not ctx.resilient_parsing:
            args = self._with_path(ctx, list(args), [str(a.name) for a in arguments])
        if ctx.resilient_parsing and args and args[-1].startswith("-"):
            args = args[:-1]  # a shell completes its value: without one nothing before it would be read
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"^[{\[](.*)[}\]]$", _usage_piece, piece) for piece in super().collect_usage_pieces(ctx)]

    def _with_path(self, ctx: Any, args: list[str], names: Sequence[str]) -> list[str]:
        options, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if any(value is True for name, value in options.items() if name == "help"):
            return args
        given = [str(options[name]) for name in names if isinstance(options.get(name), str)]
        if len(given) >= len(names):
            _typed.append(given[0])
            return args
        try:
            found = configured()
        except ConfigError as problem:
            fail(problem, BAD_USAGE)
        for sentence in found.unknown:
            colour = None if os.environ.get("NO_COLOR") else "yellow"
            typer.secho(one_line(f"warning: {sentence}"), fg=colour, err=True)
        if found.path is None:
            wanted = " ".join(str(p.metavar or p.name).upper() for p in self.params if p.name in names)
            _refuse(ctx, wanted, given)
        _configured_storage.update(found.storage)
        return [found.path, *args]


def _usage_piece(found: re.Match[str]) -> str:
    """An argument in the line of usage: in brackets when it may be left out."""
    inner = found[1].strip("[]{}")
    return f"[{inner}]" if inner in ("PATH", "FILE", "OPTIONS") else inner


def _refuse(ctx: Any, wanted: str, given: Sequence[str]) -> NoReturn:
    ctx.fail(
        f"{wanted} is expected, and {' '.join(given) or 'nothing'} was given. [PATH], the commit log, may be left out "
        f"where {WHERE} does (txmq init writes an example)"
    )
    raise AssertionError  # fail raises


class App(typer.Typer):
    """An app whose commands are :class:`LogCommand` s. A command's help is its docstring, without the line ends that
    the code has; lists of commands show its first sentence."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            said = str(settings.pop("help", None) or inspect.getdoc(function) or "")
            paragraphs = [" ".join(part.split()) for part in said.split("\n\n")]
            words = {"help": "\n\n".join(paragraphs), "short_help": _first_sentence(paragraphs[0])}
            return super(App, self).command(name, **{"cls": LogCommand, **words, **settings})(function)

        return add


def _first_sentence(text: str) -> str:
    found = re.match(r".*?[.](?=\s|$)", text)
    return (found[0] if found else text).removesuffix(".")


# ---------------------------------------------------------------- errors
def plainly(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command show an error on one line, without secrets. ``TXMQ_DEBUG=1`` shows the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            open_closed_streams()
            _require_text(kwargs.values())
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as problem:
            if isinstance(problem, BrokenPipeError) and nobody_reads():
                raise typer.Exit(OK) from None
            wrong = (OptionError, MessageError)  # the latter of a name that no topic or group can have
            fail(problem, BAD_USAGE if isinstance(problem, wrong) else FAILED)

    return run


def _require_text(values: Iterable[object]) -> None:
    """Refuse arguments that are no text: in a shell of another encoding bytes may come that UTF-8 does not have."""
    for value in values:
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            raise OptionError(f"{value!r} is no text in UTF-8: set the terminal, or LANG, to UTF-8") from None


def fail(problem: Exception, code: int) -> NoReturn:
    """End with an exit code, and the problem on one line. ``TXMQ_DEBUG=1`` shows the traceback instead."""
    if os.environ.get("TXMQ_DEBUG"):
        raise problem
    typer.secho(sentence_of(problem), fg=None if os.environ.get("NO_COLOR") else "red", err=True)
    raise typer.Exit(code) from None


def sentence_of(problem: Exception) -> str:
    """Return a problem as one line without secrets, in the words of the command."""
    said = redacted(problem if isinstance(problem, TxmqError) else f"{type(problem).__name__}: {problem}")
    for secret in _secrets:
        said = said.replace(secret, "***")
    return one_line(in_words_of_the_command(said, typed_path()))


def path_to_type() -> str:
    """What a command that is advised has before its other arguments: the path as it was typed, and a space."""
    return f"{shlex.quote(_typed[0])} " if _typed else ""


def typed_path() -> str | None:
    """The commit log's path as it was typed; None when the configuration named it."""
    return _typed[0] if _typed else None


def nobody_reads(seconds: float = 0.0) -> bool:
    """Return True as soon as standard output is a pipe that its reader has closed, within a time. What is left to be
    written is dropped then."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # it is no file
        time.sleep(seconds)
        return False
    poll = select.poll()
    poll.register(stdout, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(1000 * seconds)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # or Python complains when it ends
    return True


# ---------------------------------------------------------------- the commit log
def open_log(path: str, storage: Sequence[str] | None) -> CommitLog:
    """Open the commit log of a command."""
    from rmq_spark._core.client.commit_log import CommitLog

    try:
        return CommitLog.open(path, storage_options(storage))
    except NotACommitLogError as problem:
        if typed_path() is not None:
            raise
        raise NotACommitLogError(
            f"{problem}. The path {path!r} comes from {PATH_ENV} or a configuration file; a relative one begins in the "
            "folder where txmq runs"
        ) from problem


def storage_options(
    given: Sequence[str] | None, environment: str = STORAGE_ENV, option: str = "--storage"
) -> dict[str, str] | None:
    """Return options for the store: those given win over the environment's, and these over the configuration's."""
    options = {**_configured_storage} if environment == STORAGE_ENV else {}
    options.update({k[len(environment) :]: v for k, v in os.environ.items() if k.startswith(environment)})
    for text in given or ():
        key, found, value = text.partition("=")
        if not found or not key:
            raise typer.BadParameter("KEY=VALUE is expected (what was given is not shown)", param_hint=option)
        options[key] = value
    _secrets[:] = [v for v in options.values() if len(v) > 3]
    return options or None


def hide(values: Iterable[str]) -> None:
    """Never show these values in an error."""
    _secrets.extend(v for v in values if len(v) > 3)
