"""The commit log that ``txmq`` uses when no path is typed: from the environment or a configuration file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmq_spark._core.checks.setting_names import unknown_settings
from rmq_spark.errors import ConfigError

FILE_ENV, PATH_ENV = "TXMQ_CONFIG", "TXMQ_PATH"
FILE = "txmq.toml"
WHERE = f"{PATH_ENV} names it, or path in ./{FILE} (or in the file of {FILE_ENV})"


@dataclass(frozen=True)
class Configured:
    """The configured commit log, and options for its store.

    Attributes
    ----------
    path : str or None
    storage : mapping of str to str
        ``[storage]`` of the file.
    file : pathlib.Path or None
        The file that was read, if any.
    check_interval : str or None
        ``transactionCheckInterval``, as written in the file.
    unknown : tuple of str
        A sentence for each name in the file that is not a setting.
    """

    path: str | None = None
    storage: dict[str, str] = field(default_factory=dict)
    file: Path | None = None
    check_interval: str | None = None
    unknown: tuple[str, ...] = ()


def configured() -> Configured:
    """Read the configuration. The environment's path overrides the file's.

    Raises
    ------
    ConfigError
        When the file that ``TXMQ_CONFIG`` names does not exist, or a file is unreadable, is not TOML, or has a value of
        the wrong type.
    """
    named_file = os.environ.get(FILE_ENV)
    file = Path(named_file or FILE)
    values: dict[str, Any] = {}
    uses_file = bool(named_file) or file.is_file()
    if uses_file:
        values = _read(file)
    path = os.environ.get(PATH_ENV) or values.get("path")
    storage, check = values.get("storage", {}), values.get("check", {})
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{file}: path is {path!r}: a folder or an object-store URI is expected")
    if not isinstance(storage, dict) or not isinstance(check, dict):
        raise ConfigError(f"{file}: [storage] and [check] are tables of settings")
    interval = check.get("transactionCheckInterval")
    return Configured(
        path or None,
        {str(name).upper(): str(value) for name, value in storage.items()},
        file if uses_file else None,
        interval if isinstance(interval, str) else None,
        tuple(f"{file}: {sentence}" for sentence in unknown_settings(values)),
    )


def _read(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # pragma: no cover
        import tomli as tomllib
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}, which {FILE_ENV} names, does not exist: txmq init {file} makes one") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file} cannot be read: {problem}") from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{file} is not TOML: {problem}") from None
