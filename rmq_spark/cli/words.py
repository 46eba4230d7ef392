"""Replaces Python calls and arguments in error messages by the commands and options that do the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_PATH = "\0"
"""Placeholder for the commit log's path and the space after it."""

_CALLS: Sequence[tuple[str, str]] = (
    (r"CommitLog\.create\('([^']*)'\)", r"txmq create \1"),
    (r"log\.create_topic\('([^']*)'\)", rf"txmq topic create {_PATH}\1"),
    (r"log\.set_retention\b", "txmq topic set"),
    (r"log\.resolve\(half_id, verdict, reason=…\)", f"txmq resolve {_PATH}HALF_ID COMMIT|ROLLBACK --reason …"),
    (r"log\.resolve\('([^']*)', verdict, reason=…\)", rf"txmq resolve {_PATH}\1 COMMIT|ROLLBACK --reason …"),
    (r"log\.resume\('([^']*)'\)", rf"txmq resume {_PATH}\1"),
    (r"log\.resume\([^)]*\)", f"txmq resume {_PATH}HALF_ID"),
    (r"log\.(pending|quarantined|conflicts)\(\)", rf"txmq \1 {_PATH}"),
    (r" \(log\.firsts\(\)\)", ""),
)
"""Patterns of Python calls in error messages, and the commands that replace them."""
_ARGUMENTS: Sequence[tuple[str, str]] = (
    (r"pass os\.path\.expanduser\(path\)", "leave the quotes away"),
    (r"open it, or pass exist_ok=True", "use it as it is, or pass --exist-ok"),
    (r"exist_ok=True", "--exist-ok"),
    (r"None keeps messages for ever", "'forever' keeps messages for ever"),
    (r"\bstart names\b", "--from names"),
    (r"^to (?=has|names)", "--to "),
    (r"\bolder_than=", "--older-than "),
    (r"\bdrain_(every|bytes)=", r"--drain-\1 "),
    (r"create_topics=True", "--create-topics"),
    (r"reshard=True", "--reshard"),
    (r"on_poison='park'", "--on-poison park"),
    (r"on_expired='skip'", "--on-expired skip"),
    (r"\b(topic|transaction|retry|poll|on)_(template|pattern|timeout|interval|poison|expired)=", r"--\1-\2 "),
    (r"\bgive it as bootstrap_servers\b", "give it as --bootstrap-servers"),
    (r"\bdoes bootstrap_servers name\b", "does --bootstrap-servers name"),
    (r"kafka=\{'security\.protocol': …\}", "--kafka security.protocol=…"),
    (r"\bmax_batch_(messages|bytes)=", r"--max-batch-\1 "),
    (
        r"\b(queues|retention|grace|audit|idempotency|every|tags|selector|shards|shard|start|watch|follow|since|until)=",
        r"--\1 ",
    ),
)
"""Patterns of Python arguments in error messages, and the options that replace them."""


def as_commands(sentence: str, path: str | None = None) -> str:
    """Return an error's sentence with commands in place of Python calls.

    Parameters
    ----------
    path : str, optional
        The commit log's path to type in commands; None when the configuration names it.
    """
    typed = "" if path is None else f"{shlex.quote(path)} "
    return re.sub(rf" ?{_PATH}(?=\W|$)", f" {typed}".rstrip(), _replaced(sentence, _CALLS)).replace(_PATH, typed)


def in_words_of_the_command(sentence: str, path: str | None = None) -> str:
    """Return an error's sentence with commands and options in place of Python calls and arguments."""
    return _replaced(as_commands(sentence, path), _ARGUMENTS)


def _replaced(sentence: str, replacements: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in replacements:
        sentence = re.sub(pattern, replacement, sentence)
    return sentence
