"""The settings of the check job, from ``conf/txmq.toml`` and the environment. The environment wins."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from rmq_spark._core.checks.example import NAME
from rmq_spark._core.checks.module_search import is_installed, require_module
from rmq_spark._core.checks.policy import DiscardPolicy, TransactionCheckListener, require_policy
from rmq_spark._core.checks.service import CheckService
from rmq_spark._core.checks.setting_names import CHECK_NAMES, NAMES, unknown_settings
from rmq_spark._core.client.draining import Draining
from rmq_spark._core.client.maintainer import Maintainer
from rmq_spark._core.listeners.transaction_listener import TransactionListener, load_listener, load_object
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.upkeep.fence_pruner import FencePruner
from rmq_spark._core.upkeep.leave import Graces
from rmq_spark._core.vocabulary.message import require_group_name
from rmq_spark._core.vocabulary.options import (
    AUDIT_S,
    CHECK_ROUND_TIMEOUT_S,
    CHECKS_MAX,
    DRAIN_EVERY_S,
    FENCE_RETENTION_S,
    FENCE_RETENTION_S_MIN,
    FILE_RESERVED_TIME_S,
    GRACE_S,
    GRACE_S_MIN,
    IDEMPOTENCY_S,
    MAINTENANCE_INTERVAL_S,
    TRANSACTION_CHECK_INTERVAL_S,
    TRANSACTION_CHECK_MAX,
    TRANSACTION_TIMEOUT_S,
    nearest,
    parse_duration,
)
from rmq_spark.errors import ConfigError, TxmqError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

NEEDED = ("TXMQ_PATH", "TXMQ_LISTENERS")
"""Environment variables with which no file is needed."""
OTHER_VARIABLES = ("TXMQ_CONFIG", "TXMQ_DEBUG", "TXMQ_KAFKA", "TXMQ_LOG_FORMAT", "TXMQ_SERVE_TOKEN", "TXMQ_TESTS")
"""Environment variables that are no settings of the check job. Variables that begin with TXMQ_KAFKA are the relay's."""

logger = logging.getLogger(__name__)


def _duration(value: object) -> float:
    seconds = parse_duration(value if isinstance(value, str) else repr(value))
    if seconds <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return seconds


def _duration_or_zero(value: object) -> float:
    return parse_duration(value if isinstance(value, str) else repr(value))


def _fences(value: object) -> float:
    seconds = _duration_or_zero(value)
    if 0 < seconds < FENCE_RETENTION_S_MIN:
        raise ValueError(f"{value!r} is less than 7d: fence rows must outlive the half batches that they speak for")
    return seconds


class CheckSettings(BaseModel):
    """The settings of ``[check]``, with RocketMQ's names and defaults."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    transaction_timeout: Annotated[float, BeforeValidator(_duration_or_zero)] = TRANSACTION_TIMEOUT_S
    transaction_check_interval: Annotated[float, BeforeValidator(_duration)] = TRANSACTION_CHECK_INTERVAL_S
    transaction_check_max: int = Field(TRANSACTION_CHECK_MAX, ge=1, le=CHECKS_MAX)
    discard_policy: str = DiscardPolicy.QUARANTINE.value
    file_reserved_time: Annotated[float, BeforeValidator(_duration)] = FILE_RESERVED_TIME_S
    round_timeout: Annotated[float, BeforeValidator(_duration)] = CHECK_ROUND_TIMEOUT_S


class MaintenanceSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    interval: Annotated[float, BeforeValidator(_duration_or_zero)] = MAINTENANCE_INTERVAL_S
    grace: Annotated[float, BeforeValidator(_duration)] = Field(GRACE_S, ge=GRACE_S_MIN)
    audit: Annotated[float, BeforeValidator(_duration_or_zero)] = AUDIT_S
    idempotency: Annotated[float, BeforeValidator(_duration_or_zero)] = IDEMPOTENCY_S
    fences: Annotated[float, BeforeValidator(_fences)] = FENCE_RETENTION_S


class DrainSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    every: Annotated[float, BeforeValidator(_duration_or_zero)] = DRAIN_EVERY_S


class MetricsSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    port: int = Field(0, ge=0, le=65_535)
    address: str = Field("127.0.0.1", min_length=1)
    cluster: str = Field("DefaultCluster", min_length=1)
    textfile: str = ""

    @property
    def wanted(self) -> bool:
        """Whether a port or a file for metrics is set."""
        return self.port > 0 or self.textfile != ""


def _warn_of_unknown_variables(known: Iterable[str]) -> None:
    """Warn of environment variables that look like a setting and are none."""
    names = [f"TXMQ_{name.upper()}" for name in known]
    for variable in sorted(os.environ):
        if variable.startswith("TXMQ_") and variable.partition("__")[0] not in (*names, *OTHER_VARIABLES):
            hint = nearest(variable, names)
            logger.warning("the environment's %s is no setting, and nobody reads it (%s)", variable, hint)


class JobSettings(BaseSettings):
    """All settings of the check job.

    The environment wins over the file: ``TXMQ_PATH``, ``TXMQ_LISTENERS`` (JSON), ``TXMQ_CHECK__TRANSACTION_TIMEOUT``,
    ``TXMQ_STORAGE__AWS_SECRET_ACCESS_KEY`` and so on.
    """

    model_config = SettingsConfigDict(
        env_prefix="TXMQ_", env_nested_delimiter="__", extra="forbid", hide_input_in_errors=True
    )

    path: str = Field(min_length=1)
    listener_modules: list[str] = Field(default_factory=list)
    elsewhere: list[str] = Field(default_factory=list)
    listeners: dict[str, str] = Field(default_factory=dict)
    check: CheckSettings = Field(default_factory=CheckSettings)
    maintenance: MaintenanceSettings = Field(default_factory=MaintenanceSettings)
    drain: DrainSettings = Field(default_factory=DrainSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    storage: dict[str, SecretStr] = Field(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings  # the file's values come as arguments

    @field_validator("storage")
    @classmethod
    def _one_spelling(cls, values: dict[str, SecretStr]) -> dict[str, SecretStr]:
        # Names from the environment come in lower case. They are put last, so they win over the file's.
        return {name.upper(): values[name] for name in sorted(values, key=str.islower)}

    @classmethod
    def load(cls, file: str | Path) -> JobSettings:
        """Read the settings from a TOML file and the environment, which wins. ConfigError: the file cannot be read, a
        name is unknown, or a value cannot be used."""
        # The environment may have all settings, as in a container. A file that is named must exist.
        has_no_file = str(file) == NAME and not Path(file).exists()
        _warn_of_unknown_variables(cls.model_fields)
        values = {} if has_no_file and os.environ.keys() >= {*NEEDED} else _read(Path(file))
        try:
            return cls(**values)
        except ValidationError as problem:
            raise ConfigError("; ".join(_sentence(e, str(file)) for e in problem.errors(include_input=False))) from None
        except SettingsError as problem:
            field = re.search(r'field "(\w+)"', str(problem))
            raise ConfigError(
                f"the environment's {f'TXMQ_{field[1].upper()}' if field else 'TXMQ_…'} is not JSON, such as "
                'TXMQ_LISTENERS=\'{"group": "module:attribute"}\''
            ) from None

    # ------------------------------------------------------------------ what they stand for
    def load_listeners(self) -> dict[str, TransactionListener]:
        """Import the listener of every producer group, from the allowed modules only."""
        listeners: dict[str, TransactionListener] = {}
        for group, path in self.listeners.items():
            try:
                listeners[require_group_name(group)] = load_listener(path, self.listener_modules)
            except TxmqError as problem:
                raise ConfigError(f"[listeners] {group!r}: {problem}") from problem
        return listeners

    def load_policy(self) -> TransactionCheckListener:
        """Return the discard policy: a named one, or the user's own at ``module:attribute``."""
        policy = self.check.discard_policy
        try:
            if ":" not in policy:
                return require_policy(policy)
            loaded = load_object(policy, self.listener_modules)
            own_policy = loaded() if callable(loaded) and not isinstance(loaded, TransactionCheckListener) else loaded
            return require_policy(own_policy)
        except TxmqError as problem:
            raise ConfigError(f"[check] discardPolicy: {problem}") from problem

    def look(self) -> list[str]:
        """Look for the modules that the job would import, without running any. Returns a sentence for each thing that
        the job would refuse."""
        refused: list[str] = []
        looks: list[tuple[str, Callable[[], None]]] = [
            *((f"[listeners] {group!r}", partial(self._look_for_listener, group)) for group in self.listeners),
            ("[check] discardPolicy", self._look_for_policy),
            ("[metrics]", self._look_for_client),
        ]
        for where, look in looks:
            try:
                look()
            except TxmqError as problem:
                refused.append(f"{where}: {problem}")
        return refused

    def _look_for_listener(self, group: str) -> None:
        require_group_name(group)
        require_module(self.listeners[group], self.listener_modules)

    def _look_for_policy(self) -> None:
        if ":" in self.check.discard_policy:
            require_module(self.check.discard_policy, self.listener_modules)
        else:
            require_policy(self.check.discard_policy)

    def _look_for_client(self) -> None:
        if self.metrics.wanted and not is_installed("prometheus_client"):
            raise ConfigError("prometheus-client is not installed: install rmq_spark with its extra metrics")

    def storage_options(self) -> dict[str, str] | None:
        return {name: value.get_secret_value() for name, value in self.storage.items()} or None

    def service(self, listeners: Mapping[str, TransactionListener]) -> CheckService:
        check = self.check
        return CheckService(
            self.path,
            listeners,
            transaction_timeout=check.transaction_timeout,
            transaction_check_interval=check.transaction_check_interval,
            transaction_check_max=check.transaction_check_max,
            file_reserved_time=check.file_reserved_time,
            round_timeout=check.round_timeout,
            discard_policy=self.load_policy(),
            elsewhere=self.elsewhere,
            storage_options=self.storage_options(),
        )

    def draining(self, engine: Engine) -> Draining | None:
        """Return the drains of the log between two rounds of upkeep; None when they are switched off."""
        if self.drain.every == 0:
            return None
        return Draining(engine, self.drain.every)

    def maintainer(
        self, engine: Engine, draining: Draining | None = None, listeners: Iterable[TransactionListener] = ()
    ) -> Maintainer | None:
        """Return the upkeep of the log and the listeners' fences; None when it is switched off. It takes turns with
        ``draining``."""
        upkeep = self.maintenance
        if upkeep.interval == 0:
            return None
        graces = Graces(upkeep.grace, upkeep.audit, upkeep.idempotency)
        fences = FencePruner(engine, listeners, upkeep.fences) if upkeep.fences else None
        return Maintainer(engine, upkeep.interval, graces, None if draining is None else draining.turn, fences)


def _read(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing = [name for name in (*NEEDED, "TXMQ_LISTENER_MODULES") if name not in os.environ]
        raise ConfigError(
            f"{file} does not exist: name the file with --config, make one with txmq init, or set "
            f"{' and '.join(missing)}"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file} cannot be read: {problem}") from problem
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{file} is not TOML: {problem}") from None
    for sentence in unknown_settings(values):
        raise ConfigError(f"{file}: {sentence}")
    for section, names in NAMES.items():
        section_values = values.get(section, {})
        if isinstance(section_values, dict):
            values[section] = {names[name]: value for name, value in section_values.items()}
    return values


def _sentence(error: Any, file: str) -> str:
    """Return an error of pydantic as a sentence, without the value, which may be a secret."""
    names = {field: name for name, field in CHECK_NAMES.items()}
    location = [names.get(str(part), str(part)) for part in error["loc"]]
    where = ".".join(location) or file
    if error["type"] == "missing":
        return f"{where} is missing: set it in {file}, or TXMQ_{where.upper()} in the environment"
    if error["type"] == "extra_forbidden":
        return f"unknown setting {where!r}: {nearest(location[-1], NAMES.get(location[0], CHECK_NAMES).values())}"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, TxmqError):
        return re.sub(r"^(duration|bytes)=", lambda _: f"{where}=", str(cause))
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"
