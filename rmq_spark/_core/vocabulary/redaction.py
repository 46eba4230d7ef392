"""Cleans text for people: removes secrets (credentials in URIs, storage options, quotes in a store's answer) and
characters that control a terminal."""

from __future__ import annotations

import json
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, quote_plus

HIDDEN = "***"
_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2])
SECRET_CHARS_MIN = 8
"""Length of the shortest secret value that is hidden. A shorter one, such as 'test', would be found in every path."""

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
    "account_name",
    "container",
    "certificate",
)
"""Parts of names of storage options whose values may be shown, unless the name also matches :data:`_SECRET`."""
_SECRET = re.compile(r"key|token|secret|passw|pwd|sas|credential|signature", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"TXMQ_STORAGE__.+|(AWS|AZURE|GOOGLE|GCP)_.*(KEY|TOKEN|SECRET|PASSWORD|SAS|CREDENTIAL).*", re.IGNORECASE
)
_URI = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30}://)([^\s'\"<>]+)", re.IGNORECASE)
_HTTP = re.compile(r"https?://$", re.IGNORECASE)
_URI_WITH_PASSWORD = re.compile(r"(://[^\s/@:'\"]*:)(?!\d+\b)(?:(?!://)[^\n@]){1,200}@")
"""A password may contain quotes and spaces. A port is no password."""
_ORACLE = re.compile(
    r"(jdbc:oracle:\w{1,10}:)[^\s@/'\"]{0,128}/(?:\"[^\"\n]{0,200}\"|[^\s@'\"]{1,200})@", re.IGNORECASE
)
"""Oracle's JDBC driver takes ``user/password@`` before the host."""
_NAMED = re.compile(
    r"\b(sig|signature|\w{0,40}(?:password|passwd|passphrase|pwd|secret|token)|authorization|(?:set-)?cookie"
    r"|(?:\w{0,40}_|x-)?(?:account|api|(?:shared[_-]?)?access|private)[_-]?key|fs\.azure\.account\.key[\w.]{0,80}"
    r"|x-amz-(?:signature|credential|security-token)|(?:aws|azure|google)_\w{0,40}(?:key|token|secret|sas)\w{0,20})"
    r"(['\"]?\s{0,3}=\s{0,3}|['\"]\s{0,3}:\s{0,3}"
    r"|(?<=sig|pwd|key):\s{0,3}|(?<=token):\s{0,3}|(?<=cookie|passwd|secret):\s{0,3}|(?<=password):\s{0,3}"
    r"|(?<=passphrase):\s{0,3}|(?<=authorization):\s{0,3})"
    r"('[^'\n]*'|\"[^\"\n]*\"|(?:bearer |basic |token )?[^\s&'\",;<>]+)",
    re.IGNORECASE,
)
_UNNAMED = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b(?:[\s:,]{1,3}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?"
    r"|\beyJ[\w-]{10,4000}\.[\w-]{10,4000}\.[\w-]{0,4000}"
    r"|(?<=\b[Bb]asic )[A-Za-z0-9+/]{1,4000}[A-Z0-9][A-Za-z0-9+/]{0,4000}={0,2}|(?<=\b[Bb]earer )[\w.~+/-]{16,4000}=*"
    r"|\bdapi[0-9a-f]{32}\b|\bgh[pousr]_\w{36,255}|\bgithub_pat_\w{22,255}"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,10000}(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
)
"""Secrets that are recognized by their form: AWS keys, JSON web tokens, credentials of HTTP headers, tokens, private
keys."""

_seen: set[str] = set()
"""Secret values in the storage options that this process was given."""


def is_secret(name: str, value: object, chars_min: int = SECRET_CHARS_MIN) -> bool:
    """Return True when the value of a storage option must not be shown."""
    shown = any(part in name.lower() for part in _PUBLIC) and not _SECRET.search(name)
    return isinstance(value, str) and len(value) >= chars_min and not shown


def remember(storage_options: Mapping[str, str] | None) -> None:
    """Make :func:`redacted` hide the secret values of these storage options from now on."""
    _seen.update(value for name, value in (storage_options or {}).items() if is_secret(name, value))


def _spellings(secret: str) -> Iterator[str]:
    """Yield a value as it is, and as URIs, JSON and Python spell it."""
    yield from (secret, quote(secret), quote(secret, safe=""), quote_plus(secret))
    yield from (json.dumps(secret)[1:-1], repr(secret)[1:-1])


@lru_cache(maxsize=4096)
def _is_store_variable(name: str) -> bool:
    """Whether delta-rs reads a storage option from this environment variable."""
    return _SECRET_VARIABLE.fullmatch(name) is not None


def redacted(text: object) -> str:
    """Return the text for an error, a log or a ``repr``, with ``***`` for everything in it that may be secret.

    It hides a URI's query part, ``user:password@``, and the user of an http URI, which may be a token; the values of
    storage options (given to this process, or read by delta-rs from the environment); and what looks like a signature
    or an access key.
    """
    shown = str(text)
    variables = {k: os.environ.get(k, "") for k in os.environ if _is_store_variable(k)}
    from_environment = {v for k, v in variables.items() if is_secret(k, v)}
    for spelling in sorted(
        {s for secret in _seen | from_environment for s in _spellings(secret)}, key=len, reverse=True
    ):
        shown = shown.replace(spelling, HIDDEN)
    shown = _URI.sub(_redacted_uri, shown)
    shown = _ORACLE.sub(rf"\1{HIDDEN}@", shown)
    shown = _URI_WITH_PASSWORD.sub(rf"\1{HIDDEN}@", shown)
    shown = _NAMED.sub(rf"\1\2{HIDDEN}", shown)
    return _UNNAMED.sub(HIDDEN, shown)


def _redacted_uri(match: re.Match[str]) -> str:
    rest, query, arguments = match[2].partition("?")
    if (
        "@" in arguments and re.match(r"[^/@]*:(?!\d+(/|$))", rest) and "@" not in rest
    ):  # a password with a question mark
        return f"{match[1]}{HIDDEN}@{HIDDEN}"
    user, at, place = rest.rpartition("@")
    if ":" in user:  # abfss://container@account has none
        rest = f"{HIDDEN}{at}{place}"
    elif _HTTP.search(match[1]) and "@" in (host := re.match(r"[^/]*", rest)[0]):  # type: ignore[index]
        rest = f"{HIDDEN}{rest[host.rindex('@') :]}"  # a token in place of a user
    return f"{match[1]}{rest}{query}{HIDDEN if query else ''}"


def one_line(text: str) -> str:
    """Return the text without line ends and control characters: text from others must not control the terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


TEXT_CHARS_MAX = 10_000
"""Longest text of an error. A text that quotes a longer value is cut."""


def shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"


def cause_of(problem: BaseException) -> BaseException | None:
    """Return what ``raise … from`` may name: the problem, or None when its traceback would show a secret."""
    story = "".join(traceback.format_exception(problem))
    return problem if redacted(story) == story else None


def line_of(problem: BaseException) -> str:
    """Return where in the user's own code the problem arose, such as `` (shop.py, line 12, in charge)``; empty if
    nowhere."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not _is_library(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return redacted(f" ({os.path.basename(last.filename)}, line {last.lineno}, in {last.name})")


def _is_library(file: str) -> bool:
    libraries = (_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    return file.startswith("<frozen") or "/pyspark/" in file or any(file.startswith(f"{f}{os.sep}") for f in libraries)


def text_of(problem: BaseException) -> str:
    """The problem's message, even when its own ``__str__`` raises."""
    try:
        return str(problem)
    except (Exception, SystemExit) as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def sentence_of(problem: BaseException) -> str:
    """The problem's class and message on one line, for a report, without SQLAlchemy's link."""
    text = re.sub(r"\s*\(Background on this error at: \S+\)", "", text_of(problem))
    return f"{type(problem).__name__}: {one_line(redacted(text))}" if text else type(problem).__name__


def traceback_of(problem: BaseException) -> str:
    """Return the problem's traceback for a log, without secrets and control characters."""
    text = redacted("".join(traceback.format_exception(problem))).rstrip()
    return "\n".join(one_line(line.expandtabs()) for line in text.splitlines())
