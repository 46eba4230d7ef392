"""Gives the path of a commit log one spelling, which delta-rs, pyarrow and Spark all read as the same folder."""

from __future__ import annotations

import errno
import os
import re
import stat
from urllib.parse import unquote, urlsplit

from rmq_spark.errors import NotACommitLogError, OptionError

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_NO_SLASH = re.compile(r"(file|dbfs|hdfs|s3a?|gc?s|az|abfss?|wasbs?):(?!/)", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?=:/)")
_OF_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Schemes of stores that keep everything in buckets or containers, whose name follows the scheme."""
_CREDENTIALS = re.compile(r"s3a?://[^/]*@|[A-Za-z][A-Za-z0-9+.-]*://[^@]*:[^@]*@")
_READ_OTHERWISE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\[\]^|*?{}\x00-\x1f\x7f]")
"""What delta-rs, pyarrow and Spark read differently. delta-rs decodes percent escapes once more than pyarrow, and takes
a backslash for a slash. It cannot write or read the other characters. Spark takes some of them for patterns."""


def is_uri(path: str) -> bool:
    return _URI.match(path) is not None


def spark_path(root: str, table: str) -> str:
    """Return the folder of a log's table as Spark takes it: as it is, where a URI has percent escapes."""
    return unquote(f"{root}/{table}") if is_uri(root) else f"{root}/{table}"


def location(path: object) -> str:
    """Return the path of a commit log: an absolute local path, or the URI of a prefix in an object store.

    Parameters
    ----------
    path : str or path
        A local path, which is taken as it is and may be relative to the working folder; ``file://`` and a path in
        percent encoding; or another URI.

    Raises
    ------
    OptionError
        When it is no path, has credentials in it, does not mean the same folder to delta-rs, pyarrow and Spark, or
        leads into a loop of symbolic links.
    NotACommitLogError
        When it is a file.
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
    if found := _SCHEME.match(text):
        text = found[0].lower() + text[found.end() :]
    if text.startswith("file:/"):
        text = _local_of(text)
    elif text.startswith("dbfs:/"):  # Spark alone knows it
        raise OptionError(f"path {text!r} is not a folder; write /dbfs/{text.removeprefix('dbfs:').lstrip('/')}")
    elif _NO_SLASH.match(text):
        raise OptionError(
            f"path {text!r} is neither a folder nor a URI, which has ://; write {'./' + text!r} if a folder of that "
            "name is meant"
        )
    elif is_uri(text):
        return _plain_uri(text)
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


def _require_no_file(path: str, given: str) -> None:
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as problem:  # all others are told by whoever needs the folder
        if problem.errno == errno.ELOOP:
            raise OptionError(
                f"path {given!r} leads nowhere: a symbolic link on it leads back to itself (ls -l shows where it "
                "points); remove the link, or name another folder"
            ) from None
        is_file = problem.errno == errno.ENOTDIR
    if is_file:
        raise NotACommitLogError(
            f"path {given!r} has no commit log, and one cannot be created there: this is a file, or leads through one. "
            "A commit log is a folder: name another"
        )


def require_no_tilde(name: str, path: str) -> None:
    """Raise OptionError for a path that means the home folder to a shell, and a folder named ``~`` to all others."""
    if re.match(r"~[^/]*(/|$)", path):
        raise OptionError(
            f"{name} {path!r} begins with ~, which only a shell replaces: pass os.path.expanduser({name}), or "
            f"{'./' + path!r} if a folder of that name is meant"
        )


def _local_of(uri: str) -> str:
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


def _plain_uri(uri: str) -> str:
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
        parts = urlsplit(uri)
    except ValueError as problem:
        raise OptionError(f"path {uri!r} is not a URI: {problem}") from problem
    if parts.scheme.lower() in _OF_BUCKETS and not parts.netloc:
        raise OptionError(f"path {uri!r} names no bucket: {parts.scheme}://<bucket>/<folder> is expected")
    _require_characters(unquote(parts.netloc + parts.path), uri)
    return uri.rstrip("/")


def _require_characters(path: str, given: str) -> None:
    found = _READ_OTHERWISE.search(path)
    if found:
        space = ", or write a space if that is meant" if found[0] == "%20" else ""
        raise OptionError(
            f"path {given!r} has {found[0]!r} in it, which delta-rs, pyarrow and Spark do not read alike, so that "
            f"one table would lie in two folders: use another name{space}"
        )
