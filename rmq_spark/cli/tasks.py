"""``txmq-check`` and ``txmq-maintain``, for schedulers that call a function, as Databricks' ``python_wheel_task`` does.

They return on success. Otherwise they raise SystemExit with the exit code, so that the scheduler counts a failure.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rmq_spark.cli.command import STORAGE_ENV
from rmq_spark.errors import ConfigError

SecretScope = Annotated[
    str | None,
    typer.Option(
        "--secret-scope",
        metavar="NAME",
        help="A secret scope of Databricks. Its keys are options for delta-rs, such as AWS_SECRET_ACCESS_KEY.",
    ),
]
_check = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_maintain = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def check() -> None:
    """Run one round of the check job."""
    _run(_check)


def maintain() -> None:
    """Run one round of upkeep."""
    _run(_maintain)


@_check.command()
def _check_once(
    config: Annotated[Path, typer.Option("--config", "-c", help="The check job's TOML file.")],
    path: Annotated[
        str | None, typer.Option("--path", metavar="PATH", help="The commit log, in the place of the file's.")
    ] = None,
    secret_scope: SecretScope = None,
) -> None:
    """Settle the transactions that a crash left open: one round."""
    from rmq_spark.cli.check_job import run_job

    if path is not None:
        os.environ["TXMQ_PATH"] = path
    os.environ.update({STORAGE_ENV + name: value for name, value in storage_of(secret_scope).items()})
    raise typer.Exit(run_job(config, once=True))


@_maintain.command()
def _maintain_once(
    path: Annotated[str, typer.Option("--path", metavar="PATH", help="The commit log.")],
    secret_scope: SecretScope = None,
) -> None:
    """Do all the upkeep of a commit log, once."""
    from rmq_spark.log import CommitLog

    typer.echo(str(CommitLog.open(path, storage_of(secret_scope) or None).maintain()))


def storage_of(scope: str | None) -> dict[str, str]:
    """Return the secrets of a Databricks secret scope as storage options; none without a scope. Outside Databricks that
    is a ConfigError."""
    if scope is None:
        return {}
    try:
        from databricks.sdk.runtime import dbutils
    except ModuleNotFoundError:
        raise ConfigError(
            f"a secret scope ({scope!r}) is there on Databricks only: set {STORAGE_ENV}AWS_SECRET_ACCESS_KEY and so on "
            "in the environment"
        ) from None
    secrets = dbutils.secrets
    return {secret.key: secrets.get(scope=scope, key=secret.key) for secret in secrets.list(scope)}


def _run(app: typer.Typer) -> None:
    code = app(standalone_mode=False)
    if code:
        sys.exit(code)
