"""The file system of a table's folder, on a local disk or in an object store, and which paths lie in the folder.

Executors use this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from rmq_spark._core.vocabulary.redaction import cause_of
from rmq_spark.errors import CorruptLogError, OptionError

S3_DELAYED_OPEN = int(pa.__version__.split(".")[0]) >= 21
"""True when pyarrow can put a small file with one request. Before version 21 it took three, and a crash left parts
behind."""

S3_ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION",
                  "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_SKIP_SIGNATURE")  # fmt: skip
S3_SCHEMES = frozenset({"s3", "s3a"})
_S3_OF_PYARROW = frozenset(
    "access_key_id secret_access_key session_token token region default_region endpoint_url endpoint "
    "virtual_hosted_style_request skip_signature certificate_path".split()
)
_S3_OF_COMMITS = frozenset(
    "allow_http conditional_put copy_if_not_exists ec2_metadata_disabled ec2_metadata_timeout max_retries "
    "retry_timeout timeout connect_timeout pool_idle_timeout pool_max_idle_per_host s3_pool_idle_timeout_seconds "
    "s3_allow_unsafe_rename s3_get_internal_server_error_retries max_buffer_size".split()
)
"""Options that change how commits are made, and nothing about a data file."""
_S3_OF_DELTA_RS = re.compile(
    r"AWS_(SERVER_SIDE_ENCRYPTION|SSE_\w+|PROXY_\w+|CHECKSUM_ALGORITHM|REQUEST_PAYER|S3_EXPRESS|IAM_ROLE_\w+"
    r"|S3_ASSUME_ROLE_ARN|S3_ROLE_SESSION_NAME)"
)
"""Variables of the environment that delta-rs follows and pyarrow does not."""
_DELTA_SCHEMES = frozenset({"az", "adl", "azure", "abfs", "abfss", "gs"})
"""Schemes of delta-rs's other stores."""

_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_RELATIVE_PATH = re.compile(r"(?!/)[A-Za-z0-9_=%.-]+(/[A-Za-z0-9_=%.-]+)*")


def require_path(path: object, table: str) -> str:
    """Return the path, or raise CorruptLogError for an absolute path, a URI, or a path with ``..``: a log edited by
    hand must not make a reader read outside the table's folder."""
    if not isinstance(path, str) or _RELATIVE_PATH.fullmatch(path) is None or ".." in path.split("/"):
        raise CorruptLogError(
            f"table {table} names the file {path!r}, which is not inside the table: rmq_spark did not write the row"
        )
    return path


def filesystem(uri: str, storage_options: Mapping[str, str] | None = None) -> tuple[pafs.FileSystem, str]:
    """Return the file system of a local folder or an object-store URI, and the path on it. OptionError: there is no
    store for the URI's scheme. UnreachableStoreError: delta-rs cannot work with the options.

    Local folders and S3 are pyarrow's own, which need little memory, and on S3 are faster. All other stores are those
    of delta-rs; so is S3 with an option that pyarrow's own does not take. The options have delta-rs's names.
    """
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    if scheme == "file":
        return pafs.LocalFileSystem(), uri.removeprefix("file://").rstrip("/") or "/"
    if scheme in S3_SCHEMES:
        arguments = _s3_arguments(storage_options or {})
        path = unquote(uri.split("://", 1)[1]).rstrip("/")  # as delta-rs reads it
        if arguments is not None:
            with suppress(TypeError):  # an older pyarrow takes no certificates
                return pafs.S3FileSystem(**arguments), path
    if scheme in S3_SCHEMES | _DELTA_SCHEMES:
        from rmq_spark._core.storage.delta_store import delta_store  # it loads the engine

        return delta_store(uri, storage_options)
    try:
        fs, path = pafs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        message = f"path {uri!r} is on a file system that pyarrow does not know: {problem}"
        raise OptionError(message) from cause_of(problem)
    return fs, path.rstrip("/")


def _s3_arguments(storage_options: Mapping[str, str]) -> dict[str, str | bool] | None:
    """Return the options for pyarrow's own S3; None when it lacks one of them."""
    # delta-rs takes missing options from the environment; pyarrow alone would take only some of them.
    environment = {k.removeprefix("AWS_").lower(): v for k, v in os.environ.items() if k in S3_ENVIRONMENT}
    given = {k.lower().removeprefix("aws_"): v for k, v in storage_options.items()}
    options = {**environment, **given}
    endpoint = options.get("endpoint_url") or options.get("endpoint")
    if (
        given.keys() - _S3_OF_PYARROW - _S3_OF_COMMITS
        or any(_S3_OF_DELTA_RS.fullmatch(name) for name in os.environ)
        or _has_proxy(endpoint or "https://s3.amazonaws.com")
    ):
        return None
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
    if arguments.get("scheme") != "http":
        arguments["tls_ca_file_path"] = options.get("certificate_path") or os.environ.get("SSL_CERT_FILE")
    return {k: v for k, v in arguments.items() if v}


def _has_proxy(endpoint: str) -> bool:
    """Whether the environment names a proxy for an endpoint. delta-rs follows it, and pyarrow's own S3 does not."""
    if not any(name.lower() in _PROXY_VARIABLES for name in os.environ):
        return False
    from urllib.request import getproxies, proxy_bypass

    url = urlsplit(endpoint)
    return not {url.scheme, "all"}.isdisjoint(getproxies()) and not proxy_bypass(url.netloc)
