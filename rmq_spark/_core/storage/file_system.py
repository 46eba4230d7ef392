"""The file system of a table's folder, on a local disk or in an object store, and which paths lie in the folder.

Executors use this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import CorruptLogError, OptionError

S3_DELAYED_OPEN = int(pa.__version__.split(".")[0]) >= 21
"""True when pyarrow can put a small file with one request. Before version 21 it took three, and a crash left parts
behind."""

S3_ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION",
                  "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_SKIP_SIGNATURE")  # fmt: skip
_RELATIVE_PATH = re.compile(r"(?!/)[A-Za-z0-9_=%.-]+(/[A-Za-z0-9_=%.-]+)*")


def require_path(path: object, table: str) -> str:
    """Return the path, after checking that it stays inside the table's folder.

    Raises
    ------
    CorruptLogError
        For an absolute path, a URI, or a path with ``..``. A log edited by hand must not make a reader read elsewhere.
    """
    if not isinstance(path, str) or _RELATIVE_PATH.fullmatch(path) is None or ".." in path.split("/"):
        raise CorruptLogError(
            f"table {table} names the file {path!r}, which is not inside the table: rmq_spark did not write the row"
        )
    return path


def filesystem(uri: str, storage_options: Mapping[str, str] | None = None) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a local folder or an object-store URI, and the path on it.

    Parameters
    ----------
    uri : str
        A local path, ``file://``, ``s3://bucket/prefix`` or another URI that pyarrow knows.
    storage_options : mapping, optional
        delta-rs's names (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ALLOW_HTTP``, …).
    """
    if uri.startswith(("s3://", "s3a://")):
        # delta-rs takes missing options from the environment; pyarrow alone would take only some of them.
        environment = {k.removeprefix("AWS_").lower(): v for k, v in os.environ.items() if k in S3_ENVIRONMENT}
        options = {**environment, **{k.lower().removeprefix("aws_"): v for k, v in (storage_options or {}).items()}}
        endpoint = options.get("endpoint_url") or options.get("endpoint")
        arguments: dict[str, str | bool | None] = {
            "access_key": options.get("access_key_id"),
            "secret_key": options.get("secret_access_key"),
            "session_token": options.get("session_token") or options.get("token"),
            "region": options.get("region") or options.get("default_region"),
            "force_virtual_addressing": options.get("virtual_hosted_style_request", "").lower() == "true",
            "anonymous": options.get("skip_signature", "").lower() == "true",
            "allow_delayed_open": S3_DELAYED_OPEN,
        }
        if endpoint:
            arguments["endpoint_override"] = endpoint.split("://")[-1]
            arguments["scheme"] = "http" if endpoint.startswith("http://") else "https"
        path = unquote(uri.split("://", 1)[1]).rstrip("/")  # as delta-rs reads it
        return pafs.S3FileSystem(**{k: v for k, v in arguments.items() if v}), path
    if "://" in uri and not uri.startswith("file://"):
        try:
            fs, path = pafs.FileSystem.from_uri(uri)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            message = f"path {uri!r} is on a file system that pyarrow does not know: {problem}"
            raise OptionError(message) from cause_of(problem)
        return fs, path.rstrip("/")
    return pafs.LocalFileSystem(), uri.removeprefix("file://").rstrip("/") or "/"
