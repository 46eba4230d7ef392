"""Text for people without the secrets in it: credentials in URIs, storage options, and what a store's answer quotes."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping

HIDDEN = "***"
SECRET_CHARS_MIN = 8
"""Shorter values are not looked for: 'test' as a key would be found in every path."""

_PUBLIC = (
    "region",
    "endpoint",
    "allow_http",
    "conditional_put",
    "retr",
    "timeout",
    "virtual",
    "bucket",
    "provider",
    "rename",
)
"""Parts of the names of storage options whose values may be shown."""
_OF_ENVIRONMENT = re.compile(
    r"TXMQ_STORAGE__.+|(AWS|AZURE|GOOGLE|GCP)_.*(KEY|TOKEN|SECRET|PASSWORD|SAS|CREDENTIAL).*", re.IGNORECASE
)
_URI = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30}://)([^\s'\"<>]+)", re.IGNORECASE)
_NAMED = re.compile(
    r"\b(sig|signature|password|passwd|secret|x-amz-(?:signature|credential|security-token)"
    r"|(?:aws|azure|google)_\w{0,40}(?:key|token|secret|sas)\w{0,20})=[^\s&'\",;<>]+",
    re.IGNORECASE,
)
_ACCESS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")

_seen: set[str] = set()
"""Secret values of the storage options that this process was given."""


def _is_secret(name: str, value: object) -> bool:
    shown = any(part in name.lower() for part in _PUBLIC)
    return isinstance(value, str) and len(value) >= SECRET_CHARS_MIN and not shown


def remember(storage_options: Mapping[str, str] | None) -> None:
    """Take note of the values that :func:`redacted` must hide from now on."""
    _seen.update(value for name, value in (storage_options or {}).items() if _is_secret(name, value))


def redacted(text: object) -> str:
    """The text for an error, a log or a ``repr``: what may be secret in it is ``***``.

    Hidden are a URI's query part and ``user:password@``, the values of storage options (those given to this process,
    and those that delta-rs takes from the environment), and what looks like a signature or an access key.
    """
    shown = str(text)
    environment = {v for k, v in os.environ.items() if _OF_ENVIRONMENT.fullmatch(k) and _is_secret(k, v)}
    for secret in sorted(_seen | environment, key=len, reverse=True):
        shown = shown.replace(secret, HIDDEN)
    shown = _URI.sub(_redacted_uri, shown)
    shown = _NAMED.sub(rf"\1={HIDDEN}", shown)
    return _ACCESS_KEY.sub(HIDDEN, shown)


def _redacted_uri(found: re.Match[str]) -> str:
    rest, query, _ = found[2].partition("?")
    user, at, place = rest.rpartition("@")
    if ":" in user:  # abfss://container@account has none
        rest = f"{HIDDEN}{at}{place}"
    return f"{found[1]}{rest}{query}{HIDDEN if query else ''}"


TEXT_CHARS_MAX = 10_000
"""Of an error: what quotes a longer value is cut."""


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"


def cause_of(problem: BaseException) -> BaseException | None:
    """What ``raise … from`` may name: the problem itself, or None when a traceback of it would show a secret."""
    story = "".join(traceback.format_exception(problem))
    return problem if redacted(story) == story else None


def traceback_of(problem: BaseException) -> str:
    """The problem's traceback, for a log."""
    return redacted("".join(traceback.format_exception(problem))).rstrip()
