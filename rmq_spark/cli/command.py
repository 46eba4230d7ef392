"""Shared by every ``txmq`` command: the commit log's path, typed or configured, and errors on one line."""

from __future__ import annotations

import functools
import inspect
import os
import re
import select
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand

from rmq_spark.cli.completion import of_argument
from rmq_spark.cli.configuration import PATH_ENV, WHERE, configured
from rmq_spark.cli.stderr_log import open_closed_streams
from rmq_spark.cli.text import one_line
from rmq_spark.cli.words import sentence_for_command
from rmq_spark.errors import ConfigError, MessageError, NotACommitLogError, OptionError, TxmqError

if TYPE_CHECKING:
    from rmq_spark.log import CommitLog

STORAGE_ENV = "TXMQ_STORAGE__"
OK, FAILED, BAD_USAGE = 0, 1, 2
"""Exit codes of every command. A few commands have more: docs/command.md."""

LISTED_BY = {"GROUP": "txmq group list names the groups", "TOPIC": "txmq topic list names the topics"}
"""What names the values of an argument, by its metavar."""

P = ParamSpec("P")

_secrets: list[str] = []
_typed: list[str] = []
"""The commit log's path if it was typed. Commands in error messages repeat it."""
_wide: list[bool] = []
"""Whether ``--wide`` was given."""
_configured_storage: dict[str, str] = {}
"""The configuration's options for the store, when the commit log's path was not typed."""

LogPath = Annotated[
    str,
    typer.Argument(
        metavar="[PATH]",
        help=f"The commit log: a folder or an object-store URI. May be left out where {WHERE} does.",
        default_factory=str,  # LogCommand replaces it by the path
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


def _remember_wide(value: bool) -> bool:
    _wide[:] = [value]
    return value


Wide = Annotated[
    bool,
    typer.Option("--wide", help="Whole ids and texts, and all columns, however narrow.", callback=_remember_wide),
]
"""An option of each list. Commands do not pass it on: functions that write lines ask :func:`is_wide`."""


class LogCommand(TyperCommand):
    """A command whose first argument, the commit log's path, may be left out when it is configured."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        _typed.clear()
        _wide.clear()
        _configured_storage.clear()
        if arguments and arguments[0].name == "path" and not ctx.resilient_parsing:
            args = self._with_path(ctx, list(args), [str(a.name) for a in arguments])
        if ctx.resilient_parsing and args and args[-1].startswith("-"):
            args = args[:-1]  # the shell completes its value; without a value, click would read no argument
        if not ctx.resilient_parsing:
            self._require_once(ctx, args)
        return super().parse_args(ctx, args)

    def _require_once(self, ctx: Any, args: list[str]) -> None:
        """Refuse an option with one value that is given several times: click would take the last value."""
        given: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for option, times in Counter(given).items():
            if times > 1 and option.param_type_name == "option" and not (option.multiple or option.is_flag):
                ctx.fail(
                    f"{option.opts[0]} was given {times} times, and it has one value. Run the command once for each"
                )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"^[{\[](.*)[}\]]$", _usage_piece, piece) for piece in super().collect_usage_pieces(ctx)]

    def _with_path(self, ctx: Any, args: list[str], names: Sequence[str]) -> list[str]:
        options, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        help_option = self.get_help_option(ctx)
        if help_option is not None and options.get(help_option.name) is True:
            return args
        typed_values = [str(options[name]) for name in names if isinstance(options.get(name), str)]
        if len(typed_values) >= len(names):
            _typed.append(typed_values[0])
            return args
        try:
            configuration = configured()
        except ConfigError as problem:
            fail(problem, BAD_USAGE)
        for sentence in configuration.unknown:
            _tell(one_line(f"warning: {sentence}"), "yellow")
        if configuration.path is None:
            expected = " ".join(str(p.metavar or p.name).upper() for p in self.params if p.name in names)
            _refuse(ctx, expected, typed_values)
        needed = [str(p.metavar) for p in self.params if p.param_type_name == "argument" and p.required]
        if LISTED_BY.keys() & needed[len(typed_values) :]:
            _refuse(ctx, " ".join(needed), typed_values)
        _configured_storage.update(configuration.storage)
        return [configuration.path, *args]


def _usage_piece(match: re.Match[str]) -> str:
    """Return an argument as the usage line shows it: in brackets when it may be left out."""
    name = match[1].strip("[]{}")
    return f"[{name}]" if name in ("PATH", "FILE", "OPTIONS") else name


def _refuse(ctx: Any, needed: str, typed: Sequence[str]) -> NoReturn:
    ctx.fail(
        f"{needed} is expected, and {' '.join(typed) or 'nothing'} was given. [PATH], the commit log, may be left out "
        f"where {WHERE} does (txmq init writes an example)"
        + "".join(f". {sentence}" for metavar, sentence in LISTED_BY.items() if metavar in needed.split())
    )
    raise AssertionError  # fail raises


class App(typer.Typer):
    """An app whose commands are :class:`LogCommand` s. A command's help is its docstring, each paragraph on one line;
    lists of commands show its first sentence."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            text = str(settings.pop("help", None) or inspect.getdoc(function) or "")
            paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
            help_texts = {"help": "\n\n".join(paragraphs), "short_help": _first_sentence(paragraphs[0])}
            return super(App, self).command(name, **{"cls": LogCommand, **help_texts, **settings})(function)

        return add


def _first_sentence(text: str) -> str:
    match = re.match(r".*?[.](?=\s|$)", text)
    return (match[0] if match else text).removesuffix(".")


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
            usage_errors = (OptionError, MessageError)  # MessageError: a name that no topic or group can have
            fail(problem, BAD_USAGE if isinstance(problem, usage_errors) else FAILED)

    return run


def _require_text(values: Iterable[object]) -> None:
    """Refuse arguments that are not UTF-8: a shell with another encoding may pass such bytes."""
    for value in values:
        try:
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            raise OptionError(f"{value!r} is no text in UTF-8: set the terminal, or LANG, to UTF-8") from None


def fail(problem: Exception, code: int) -> NoReturn:
    """Print a problem in one sentence, and exit with this code. ``TXMQ_DEBUG=1`` shows the traceback instead."""
    if os.environ.get("TXMQ_DEBUG"):
        raise problem
    _tell(sentence_of(problem), "red")
    raise typer.Exit(code) from None


def _tell(sentence: str, colour: str) -> None:
    from rmq_spark.cli.output import tell

    tell(sentence, err=True, fg=colour)


def sentence_of(problem: Exception) -> str:
    """Return a problem as one line, without secrets, and with the command's own words for arguments and remedies."""
    message = sentence_for_command(problem, typed_path())
    if not isinstance(problem, TxmqError):
        message = f"{type(problem).__name__}: {message}"
    for secret in _secrets:
        message = message.replace(secret, "***")
    return one_line(message)


def path_to_type() -> str:
    """Return the typed path and a space, for a command in an advice; an empty string when the path was configured."""
    return f"{shlex.quote(_typed[0])} " if _typed else ""


def name_path(path: str) -> None:
    """Let commands in advice name this path, whether it was typed or configured: a page is for others' shells, too."""
    _typed[:] = [path]


def typed_path() -> str | None:
    """Return the commit log's path as it was typed; None when it was configured."""
    return _typed[0] if _typed else None


def is_wide() -> bool:
    return any(_wide)


def nobody_reads(seconds: float = 0.0) -> bool:
    """Wait at most this many seconds; return True as soon as the reader of standard output has closed the pipe. Output
    after that is dropped."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # standard output is not a file
        time.sleep(seconds)
        return False
    poll = select.poll()
    poll.register(stdout, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(1000 * seconds)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # or Python reports an error at exit
    return True


# ---------------------------------------------------------------- the commit log
def open_log(path: str, storage: Sequence[str] | None) -> CommitLog:
    from rmq_spark.log import CommitLog

    try:
        return CommitLog.open(path, storage_options(storage))
    except NotACommitLogError as problem:
        if typed_path() is not None:
            raise
        raise NotACommitLogError(
            f"{problem.problem}. The path {path!r} comes from {PATH_ENV} or a configuration file; a relative one "
            "begins in the folder where txmq runs",
            remedy=problem.remedy,
        ) from problem


def storage_options(
    given: Sequence[str] | None, environment: str = STORAGE_ENV, option: str = "--storage"
) -> dict[str, str] | None:
    """Return options for the store. Typed ones override the environment, which overrides the configuration."""
    options = {**_configured_storage} if environment == STORAGE_ENV else {}
    options.update({k[len(environment) :]: v for k, v in os.environ.items() if k.startswith(environment)})
    for text in given or ():
        key, equals_sign, value = text.partition("=")
        if not equals_sign or not key:
            raise typer.BadParameter("KEY=VALUE is expected (what was given is not shown)", param_hint=option)
        options[key] = value
    _secrets[:] = [v for v in options.values() if len(v) > 3]
    return options or None


def hide(values: Iterable[str]) -> None:
    _secrets.extend(v for v in values if len(v) > 3)
