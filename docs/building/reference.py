"""The reference, made from the code: options, columns, configuration, errors, the command, limits. mkdocstrings makes
what is about Python, from the pages in ``docs/reference``.

Nothing here says a second time what the code says. What the code names and nobody has described is an error, so that
the build tells whoever adds it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.building import columns
from docs.building.docstrings import first_paragraph, paragraphs, prose
from rmq_spark import errors
from rmq_spark._core.vocabulary import options as config
from rmq_spark.cli.verbs import whole

ROOT = Path(__file__).parents[2]
COMMAND_PAGE = ROOT / "docs" / "command.md"
MADE = "*This page is made from the code.*"


class UndescribedError(LookupError):
    """The code names something that the documentation does not describe, or the other way round."""


def pages() -> dict[str, str]:
    """Return the text of each page of the reference, by its path on the site."""
    return {
        "reference/options.md": options(),
        "reference/columns.md": tables(),
        "reference/configuration.md": configuration(),
        "reference/metrics.md": metrics(),
        "reference/errors.md": all_errors(),
        "reference/command.md": command(),
        "reference/limits.md": limits(),
    }


# ---------------------------------------------------------------- options and columns
def options() -> str:
    """The options of ``format("txmq")``."""
    from rmq_spark._core.reads.option_names import SOURCE_TABLE
    from rmq_spark._core.spark.sink_options import SINK_TABLE

    storage = ("", "Credentials and endpoint, with delta-rs's names. It may be given several times.")
    return "\n".join(
        [
            "# Options",
            "",
            MADE + " An unknown option is an error that names the nearest right one. Upper and lower case are the "
            "same. Durations have a unit: `500ms`, `6s`, `5m`, `72h`, `7d`.",
            "",
            "## The sink",
            "",
            '`df.writeStream.format("txmq")`, and `df.write.format("txmq").mode("append")`.',
            "",
            _table(("option", "default", "meaning"), _option_rows({**SINK_TABLE, "storage.<key>": storage})),
            "",
            "## The source",
            "",
            '`spark.readStream.format("txmq")`, and `spark.read.format("txmq")`.',
            "",
            _table(("option", "default", "meaning"), _option_rows({**SOURCE_TABLE, "storage.<key>": storage})),
        ]
    )


def _option_rows(table: Mapping[str, tuple[str, str]]) -> Iterable[tuple[str, str, str]]:
    return ((f"`{name}`", default, meaning) for name, (default, meaning) in table.items())


def tables() -> str:
    """The columns that the sink takes, the source gives, and the tables of a log have."""
    from rmq_spark._core.client.columns import GROUPS, HALF, MESSAGES, OP, TOPICS
    from rmq_spark._core.log.group_table import GROUPS_SCHEMA
    from rmq_spark._core.log.half import HALF_SCHEMA
    from rmq_spark._core.log.op import OP_SCHEMA, OpKind
    from rmq_spark._core.log.topics import TOPICS_SCHEMA
    from rmq_spark._core.messages.messages_table import MESSAGES_SCHEMA, SOURCE_SCHEMA
    from rmq_spark._core.vocabulary.message import INPUT_COLUMNS

    _require_same([kind.value for kind in OpKind], columns.KINDS, "kinds of op rows")
    kinds = _table(("kind", "it says of the rows that it names"), ((f"`{k}`", s) for k, s in columns.KINDS.items()))
    own = {name: text for name, text in MESSAGES.items() if name not in SOURCE_SCHEMA.names}
    seen = {name: text for name, text in MESSAGES.items() if name in SOURCE_SCHEMA.names}
    return "\n\n".join(
        [
            "# Columns",
            MADE,
            "## What the sink takes",
            "And the column that `transactionKey` names. Any other column is an error.",
            _columns(INPUT_COLUMNS, columns.SINK, "columns of the sink"),
            "## What the source gives",
            '`.schema("keys string, body binary")` reads only those.',
            _columns(_types(SOURCE_SCHEMA), seen, "columns of the source"),
            "## The tables of a log",
            "All of them are Delta tables, which any reader of Delta may read, and rmq_spark alone may write.",
            "### messages",
            "Committed messages, and nothing else. It has the columns of the source, and these.",
            _columns(
                {name: kind for name, kind in _types(MESSAGES_SCHEMA).items() if name not in SOURCE_SCHEMA.names},
                own,
                "columns of messages",
            ),
            "### half",
            "Half messages: pending ones, and settled ones that have not left.",
            _columns(_types(HALF_SCHEMA), HALF, "columns of half"),
            "### op",
            "What was decided, checked, placed and archived. `op` alone decides what is visible.",
            _columns(_types(OP_SCHEMA), OP, "columns of op"),
            kinds,
            "### topics",
            _columns(_types(TOPICS_SCHEMA), TOPICS, "columns of topics"),
            "### groups",
            "How far consumer groups are.",
            _columns(_types(GROUPS_SCHEMA), GROUPS, "columns of groups"),
        ]
    )


def _types(schema: pa.Schema) -> dict[str, str]:
    return {field.name: _type_of(field.type) for field in schema}


def _type_of(kind: pa.DataType) -> str:
    """Return the name of a type in Spark's words."""
    if pa.types.is_list(kind):
        return f"array of {_type_of(kind.value_type)}"
    if pa.types.is_struct(kind):
        return "struct"
    if pa.types.is_map(kind):
        return f"map<{_type_of(kind.key_type)},{_type_of(kind.item_type)}>"
    names = {"int64": "bigint", "int32": "int", "bool": "boolean", "double": "double", "string": "string"}
    return names.get(str(kind), "timestamp" if pa.types.is_timestamp(kind) else str(kind))


def _columns(types: Mapping[str, str], meanings: Mapping[str, str], what: str) -> str:
    _require_same(types, meanings, what)
    return _table(("column", "type", "meaning"), ((f"`{n}`", kind, meanings[n]) for n, kind in types.items()))


# ---------------------------------------------------------------- configuration
def configuration() -> str:
    """The settings of conf/txmq.toml: names and defaults from the models, meanings from the file's own comments."""
    from rmq_spark._core.checks.job_settings import JobSettings
    from rmq_spark._core.checks.setting_names import NAMES

    written = (ROOT / "conf" / "txmq.toml").read_text()
    meanings = _comments(written)
    sections: list[str] = []
    for name, field in JobSettings.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            shown = {python_name: file_name for file_name, python_name in NAMES.get(name, {}).items()}
            rows = [
                _setting(shown.get(inner, inner), of, f"TXMQ_{name.upper()}__{inner.upper()}", meanings[name])
                for inner, of in model.model_fields.items()
            ]
            sections += [f"## [{name}]", _table(("setting", "in the environment", "default", "meaning"), rows)]
        elif name in meanings:  # a table of names that the user chooses
            sections += [f"## [{name}]", meanings[name].get("", ""), f"In the environment: `TXMQ_{name.upper()}`…"]
        else:
            rows = [_setting(name, field, f"TXMQ_{name.upper()}", meanings[""])]
            if not sections or not sections[-1].startswith("| setting"):
                sections += ["## At the top", _table(("setting", "in the environment", "default", "meaning"), rows)]
            else:
                sections[-1] += "\n" + _table((), rows)
    return "\n\n".join(
        [
            "# Configuration",
            MADE + " `txmq init` writes the file below to `txmq.toml`. The environment goes before the file. Names of "
            "credentials in the environment: `TXMQ_STORAGE__AWS_SECRET_ACCESS_KEY`.",
            *sections,
            "## The file",
            f"```toml\n{written}```",
        ]
    )


def _setting(name: str, field: FieldInfo, variable: str, meanings: Mapping[str, str]) -> tuple[str, str, str, str]:
    if name not in meanings:
        raise UndescribedError(f"conf/txmq.toml has no setting {name!r} with a comment above it")
    default = field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else _default(name, default)
    return f"`{name}`", f"`{variable}`", shown, meanings[name]


def _default(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"`{duration(value)}`"
    if isinstance(value, int) and name == "bytes":
        return f"`{value // 1024**2}m`"
    return f"`{value}`" if value not in ([], {}, "", None) else "none"


def _comments(toml: str) -> dict[str, dict[str, str]]:
    """Return the comment above each setting, by section; the comment above a section under the name ``""``."""
    found: dict[str, dict[str, str]] = {"": {}}
    section, comment = "", list[str]()
    for line in toml.splitlines():
        if line.startswith("#") and not re.match(r'# "?[\w-]+"? = ', line):
            comment.append(line.lstrip("# "))
        elif header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
            found[section] = {"": " ".join(comment)} if comment else {}
        elif setting := re.match(r"(\w+) = ", line):
            found[section][setting[1]] = " ".join(comment)
        if not line.startswith("#"):
            comment = []
    return found


def duration(seconds: float) -> str:
    """Return seconds as a duration: 60s, 5m, 72h, 7d."""
    for unit, size, least in (("d", 86_400, 4 * 86_400), ("h", 3600, 3600), ("m", 60, 120), ("s", 1, 1)):
        if seconds >= least and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:.0f}ms"


# ---------------------------------------------------------------- metrics
def metrics() -> str:
    """Every metric, with its labels."""
    from rmq_spark._core.metrics.metric_names import COMMON, LOG, METRICS

    def table(of_log: bool) -> str:
        rows = [
            (f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.help)
            for m in METRICS
            if (m.origin == LOG) == of_log
        ]
        return _table(("metric", "kind", "labels", "meaning"), rows)

    return "\n\n".join(
        [
            "# Metrics",
            MADE
            + f" Each metric also has the labels {' and '.join(f'`{label}`' for label in COMMON)}. What to alarm on: "
            "[monitoring](../monitoring.md).",
            "## Of a log, by the exporter",
            table(True),
            "## Of a process",
            table(False),
        ]
    )


# ---------------------------------------------------------------- errors
def all_errors() -> str:
    """Every error, what it means, and what to do: a heading each, so that links and searches lead to it."""
    found = []
    for name, kind in error_classes().items():
        what, *remedy = paragraphs(kind.__doc__)
        if not remedy and kind is not errors.TxmqError:
            raise UndescribedError(f"{name} has no second paragraph, which says what to do")
        for_python = f"[](){{#rmq_spark.errors.{name}}}"  # where docstrings refer to
        found.append("\n\n".join([for_python, f"## {name} {{ #{name} }}", what, *remedy]))
    return "\n\n".join(
        [
            "# Errors",
            MADE + " Every error that rmq_spark raises on purpose is a `TxmqError`. Its text says what was found, what "
            "was expected and what to do; here is what each kind means, and what to do. Spark hides an error among "
            "hundreds of lines: `txmq.errors.find_cause(problem)` finds it.",
            *found,
        ]
    )


def error_classes() -> dict[str, type[errors.TxmqError]]:
    """Return the public classes of errors, in the order in which they stand in the code."""
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.TxmqError) and not name.startswith("_")
    }


# ---------------------------------------------------------------- the command
def command() -> str:
    """The verbs of ``txmq``, their arguments and options."""
    from rmq_spark import cli

    importlib.import_module("rmq_spark.cli.app")
    doc = inspect.getdoc(importlib.import_module("rmq_spark.cli.app")) or ""
    codes = next((p for p in doc.split("\n\n") if p.startswith("Exit codes")), "")
    codes = codes.replace(" (docs/command.md)", " ([which](../command.md))" if COMMAND_PAGE.exists() else "")
    parts = [
        "# The command txmq",
        MADE + " `txmq VERB --help` says the same in a terminal.",
        prose(" ".join(codes.split())),
    ]
    for words, verb in verbs(_click_command(cli.app)):
        parts += [f"## {' '.join(words)}", *_verb(words, verb)]
    return "\n\n".join(parts)


def _click_command(app: typer.Typer) -> Any:
    made = whole(app)
    made.name = "txmq"
    return made


def verbs(group: Any, before: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return every verb of a command with the words that call it, and not those that are hidden."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, verb in sorted(group.commands.items()):
        if verb.hidden:
            continue
        if hasattr(verb, "commands"):
            found += verbs(verb, (*before, name))
        else:
            found.append(((*before, name), verb))
    return found


def _verb(words: Sequence[str], verb: Any) -> Iterable[str]:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    switches = [p for p in verb.params if p.param_type_name == "option" and not p.hidden]
    called = [(p.metavar or p.name.upper()).strip("[]") for p in arguments]
    names = [name if p.required else f"[{name}]" for name, p in zip(called, arguments, strict=True)]
    usage = " ".join(["txmq", *words, *names, *(["[OPTIONS]"] if switches else [])])
    yield f"```text\n{usage}\n```"
    yield prose(inspect.cleandoc(verb.help or ""))
    rows = [(f"`{name}`", "", getattr(p, "help", None) or "") for name, p in zip(called, arguments, strict=True)]
    rows += [(", ".join(f"`{o}`" for o in [*p.opts, *p.secondary_opts]), _kind(p), p.help or "") for p in switches]
    if rows:
        yield _table(("argument", "value", "meaning"), rows)


def _kind(option: Any) -> str:
    """Return what is to be given with an option, and its default."""
    if option.is_flag:
        return ""
    found = option.metavar or getattr(getattr(option, "type_descriptor", None), "annotation", None) or option.type
    names = {"str": "text", "int": "number", "float": "number", "Path": "file"}
    name = str(found if isinstance(found, str) else getattr(found, "__name__", None) or getattr(found, "name", found))
    given = names.get(name, name)
    shown = isinstance(option.default, (str, int, float)) and option.default != ""
    return f"{given}, `{option.default}` by default" if shown else given


# ---------------------------------------------------------------- limits
LIMIT_MODULES = (
    ("rmq_spark._core.vocabulary.options", "Sizes, names and times"),
    ("rmq_spark._core.producer.producer", "Producers"),
    (
        "rmq_spark._core.consumers.member_settings rmq_spark._core.consumers.member "
        "rmq_spark._core.consumers.member_threads",
        "Members of a group",
    ),
    ("rmq_spark._core.consumers.push rmq_spark._core.consumers.call_cost", "PushConsumer"),
    ("rmq_spark._core.consumers.pull", "PullConsumer"),
    ("rmq_spark._core.consumers.retry", "Retries"),
    ("rmq_spark._core.kafka.relay_settings", "The relay to Kafka"),
    ("rmq_spark._core.selector", "Selectors"),
)
"""Modules whose constants a user may meet. Several may share a title."""


def limits() -> str:
    """The named constants of the code that have a docstring."""
    parts = [
        "# Limits and defaults",
        MADE + " These are the named constants of the code. `…_MAX` and `…_MIN` are bounds; the others are defaults "
        "and rhythms. Settings that change them have the same words in their names.",
    ]
    for modules, title in LIMIT_MODULES:
        found = [constant for module in modules.split() for constant in constants(module)]
        rows = [(f"`{name}`", _shown(name, value), text) for name, value, text in found]
        parts += [f"## {title}", _table(("name", "value", "meaning"), rows)]
    return "\n\n".join(parts)


def constants(module: str) -> list[tuple[str, Any, str]]:
    """Return (name, value, meaning) of the public constants of a module that are numbers, and have a docstring."""
    loaded = importlib.import_module(module)
    body = ast.parse(inspect.getsource(loaded)).body
    found: list[tuple[str, Any, str]] = []
    for at, node in enumerate(body):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        value = getattr(loaded, name)
        if name.startswith("_") or not name.isupper() or not _is_limit(value):
            continue
        after = body[at + 1] if at + 1 < len(body) else None
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found.append((name, value, first_paragraph(str(after.value.value))))
    return found


def _is_limit(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_limit(one) for one in value)
    return isinstance(value, (int, float)) and not isinstance(value, (bool, Enum))


def _shown(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(duration(one) if "_S" in name else str(one) for one in value)
    if re.search(r"_BYTES(_|$)", name) and value % 1024 == 0:
        return f"{value // 1024**2} MiB" if value % 1024**2 == 0 else f"{value // 1024} KiB"
    if re.search(r"_S(_|$)", name):
        return f"{value * 1e6:.0f} µs" if value < 0.001 else _spaced(duration(value))
    if value == config.INT64_MAX:
        return "2⁶³ − 1"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _spaced(text: str) -> str:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return f"{number} {({'m': 'min'}).get(unit, unit)}"


# ---------------------------------------------------------------- Markdown
def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"] if heads else []
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return prose(" ".join(text.split())).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;") if text else ""


def _require_same(of_code: Iterable[str], described: Iterable[str], what: str) -> None:
    code, text = set(of_code), set(described)
    if code != text:
        raise UndescribedError(
            f"{what}: columns.py (docs/building; of a table, rmq_spark/_core/client) lacks {sorted(code - text)}, "
            f"and describes {sorted(text - code)}, which the code does not have"
        )
