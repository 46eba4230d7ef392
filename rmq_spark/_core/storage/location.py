"""Gives the path of a commit log one spelling, which delta-rs, pyarrow and Spark all read as the same folder."""

from __future__ import annotations

import errno
import os
import re
import stat
from urllib.parse import unquote, urlsplit

from rmq_spark._core.vocabulary.remedy import Remedy
from rmq_spark.errors import NotACommitLogError, OptionError

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_NO_SLASH = re.compile(r"(file|dbfs|hdfs|s3a?|gc?s|az|abfss?|wasbs?):(?!/)", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?=:/)")
_BUCKET_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Schemes of stores that keep everything in buckets or containers. The bucket's name follows the scheme."""
_CREDENTIALS = re.compile(r"s3a?://[^/]*@|[A-Za-z][A-Za-z0-9+.-]*://[^@]*:[^@]*@")
_PASSWORD = re.compile(r"[^\s/:@]+:[^\s/@]+@")
_READ_OTHERWISE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\[\]^|*?{}\x00-\x1f\x7f]")
"""Characters that delta-rs, pyarrow and Spark read differently. delta-rs decodes percent escapes once more than
pyarrow, and takes a backslash for a slash. It can neither write nor read the other characters. Spark takes some of them
for patterns."""


def is_uri(path: str) -> bool:
    return _URI.match(path) is not None


def spark_path(root: str, table: str) -> str:
    """Return the folder of a log's table in Spark's spelling: a URI without percent escapes."""
    return unquote(f"{root}/{table}") if is_uri(root) else f"{root}/{table}"


def location(path: object) -> str:
    """Return the path of a commit log: an absolute local path, or the URI of a prefix in an object store. A local path
    is taken literally, and may be relative to the working folder.

    OptionError: it is no path, contains credentials, does not mean the same folder to delta-rs, pyarrow and Spark, or
    leads into a loop of symbolic links. NotACommitLogError: it is a file.
    """
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise OptionError(f"path is {type(path).__name__}: a string or a pathlib.Path is expected")
    if not text.strip():
        raise OptionError("path is empty: give the folder or the URI of a commit log")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"path {text!r} has characters that UTF-8 cannot write: use another folder") from None
    if text[0].isspace() and is_uri(text.strip()):
        raise OptionError("path begins with a blank, so it is a folder's name and no URI: remove the blank")
    if _PASSWORD.match(text):
        raise OptionError(
            "path begins as an address with a password does (user:password@…), and is neither a folder nor a URI, "
            "which has ://; write ./ before it if a folder of that name is meant"
        )
    if match := _SCHEME.match(text):
        text = match[0].lower() + text[match.end() :]
    if text.startswith("file:/"):
        text = _local_path(text)
    elif text.startswith("dbfs:/"):  # only Spark knows this scheme
        raise OptionError(f"path {text!r} is not a folder; write /dbfs/{text.removeprefix('dbfs:').lstrip('/')}")
    elif _NO_SLASH.match(text):
        raise OptionError(
            f"path {text!r} is neither a folder nor a URI, which has ://; write {'./' + text!r} if a folder of that "
            "name is meant"
        )
    elif is_uri(text):
        return _checked_uri(text)
    elif _ONE_SLASH.match(text):
        scheme, _, rest = text.partition(":/")
        raise OptionError(f"path {text!r} is neither a folder nor a URI, which has ://; write {scheme}://{rest}")
    require_no_tilde("path", text)
    try:
        absolute = os.path.abspath(text)
    except FileNotFoundError:
        raise OptionError(
            f"path {text!r} is relative, and the folder that the program works in is gone: give an absolute path"
        ) from None
    if not absolute.strip(os.path.sep):
        raise OptionError(f"path {os.fspath(path)!r} is the root folder of this machine: name a folder in it")  # type: ignore[call-overload]
    _require_characters(absolute, text)
    _require_no_file(absolute, text)
    return absolute


def _require_no_file(path: str, text: str) -> None:
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as problem:  # the first use of the folder reports other errors
        if problem.errno == errno.ELOOP:
            raise OptionError(
                f"path {text!r} leads nowhere: a symbolic link on it leads back to itself (ls -l shows where it "
                "points); remove the link, or name another folder"
            ) from None
        is_file = problem.errno == errno.ENOTDIR
    if is_file:
        raise NotACommitLogError(
            f"path {text!r} has no commit log, and one cannot be created there: this is a file, or leads through one. "
            "A commit log is a folder: name another"
        )


def require_no_tilde(name: str, path: str) -> None:
    """Raise OptionError for a path that a shell would expand to a home folder: all others read ``~`` as a name."""
    if re.match(r"~[^/]*(/|$)", path):
        or_else = f"{'./' + path!r} if a folder of that name is meant"
        raise OptionError(
            f"{name} {path!r} begins with ~, which only a shell replaces",
            remedy=Remedy(f"pass os.path.expanduser({name}), or {or_else}", f"leave the quotes away, or {or_else}"),
        )


def _local_path(uri: str) -> str:
    if re.match(r"file:/(?!/)", uri):  # as Hadoop writes it
        uri = uri.replace("file:", "file://", 1)
    if "?" in uri or "#" in uri:
        raise OptionError(f"path {uri!r} has a query part or a fragment: write a folder's name with # as a plain path")
    host, _, rest = uri.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise OptionError(
            f"path {uri!r} names the machine {host!r}: a file:// URI of this machine begins with file:///"
        )
    return "/" + unquote(rest)


def _checked_uri(uri: str) -> str:
    if _CREDENTIALS.match(uri):
        raise OptionError(
            "the path has credentials in it, which logs and errors would show: give them as storage options"
        )
    if "?" in uri or "#" in uri:
        raise OptionError(
            "the path has a query part or a fragment (after ? or #), in which a signature would be shown by logs and "
            "errors: leave it out, and give credentials as storage options"
        )
    try:
        url = urlsplit(uri)
    except ValueError as problem:
        raise OptionError(f"path {uri!r} is not a URI: {problem}") from problem
    if url.scheme.lower() in _BUCKET_SCHEMES and not url.netloc:
        raise OptionError(f"path {uri!r} names no bucket: {url.scheme}://<bucket>/<folder> is expected")
    _require_characters(unquote(url.netloc + url.path), uri)
    return uri.rstrip("/")


def _require_characters(path: str, text: str) -> None:
    match = _READ_OTHERWISE.search(path)
    if match:
        space = ", or write a space if that is meant" if match[0] == "%20" else ""
        raise OptionError(
            f"path {text!r} has {match[0]!r} in it, which delta-rs, pyarrow and Spark do not read alike, so that "
            f"one table would lie in two folders: use another name{space}"
        )
