"""The check job: ``python -m rmq_spark.checks.job --config conf/txmq.toml [--once]``.

Exit codes: 0 when it was stopped, or when a single round (``--once``) left nothing for a person to decide; 1 when that
round had a problem (for example, a listener's database does not answer), when half batches wait for a listener that no
check job has, or when the log could not be opened; 2 when the configuration cannot be used.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

from rmq_spark.errors import ConfigError, ListenerError, OptionError, TxmqError

try:
    import typer

    from rmq_spark._core.checks.job_settings import JobSettings
    from rmq_spark.cli.output import tell, wrapped
    from rmq_spark.cli.stderr_log import json_handler, log_to_stderr, open_closed_streams
    from rmq_spark.cli.words import sentence_for_command
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] == "rmq_spark":
        raise
    sys.exit(f"the check job needs {missing.name}: install rmq_spark with its extra job")

from rmq_spark._core.listeners.transaction_listener import see_working_folder
from rmq_spark._core.protocol.engine import Engine
from rmq_spark._core.runtime.log_records import failure
from rmq_spark._core.runtime.threads import running, stopped_by_signals
from rmq_spark._core.storage.location import location
from rmq_spark._core.vocabulary.redaction import one_line, traceback_of
from rmq_spark.checks import CheckReport, Draining, Maintainer
from rmq_spark.listeners import TransactionListener

OK, PROBLEMS, BAD_CONFIGURATION = 0, 1, 2
APP_NAME = "txmq check"
RUN_IT = "a check job should have settled that: let txmq check run, or start txmq check --once by cron"
ANSWERS_SHOWN = 2
"""The most half batches of which a round's line has the listener's reason."""

logger = logging.getLogger("rmq_spark.checks.job")


def run_job(config: str | Path, once: bool = False, as_json: bool = False, quiet: bool = False) -> int:
    """Run the job of a TOML file, and return its exit code.

    It runs a round every ``transactionCheckInterval``, until SIGTERM or SIGINT. ``once``: a single round, and 1 when it
    had a problem or quarantined something. ``as_json``: each round's report as a line of JSON instead of a sentence.
    ``quiet``: print nothing while all is well.
    """
    open_closed_streams()
    log_to_stderr(logging.WARNING if quiet else logging.INFO)
    settings: JobSettings | None = None
    try:
        settings = JobSettings.load(config)
        see_working_folder()
        listeners = settings.load_listeners()
        service = settings.service(listeners)
        _start_spark_if_needed(listeners)
        draining = settings.draining(service.engine)
    except TxmqError as problem:
        _say_error(problem)
        if isinstance(problem, (ConfigError, ListenerError)):
            return BAD_CONFIGURATION
        _show_unreadable(settings)
        return PROBLEMS
    except Exception as problem:  # the store does not answer
        logger.debug("the job cannot start: %s", traceback_of(problem))
        _say_error(problem)
        return PROBLEMS
    groups = ", ".join(f"{group} ({settings.listeners[group]})" for group in sorted(listeners))
    logger.info("checking %s; listeners: %s", settings.path, groups or "none, so only plain sending is settled")

    reports: list[CheckReport] = []
    stop = threading.Event()

    def show(report: CheckReport) -> None:
        reports[:] = [report]
        write_metrics()
        text = f"{report.started_at:%Y-%m-%d %H:%M:%S}Z {report}"
        if once and report.unknown:
            text += _answers(service.engine, report)
        line = json.dumps(report.to_dict()) if as_json else text
        if not (quiet and report.ok and not report.quarantined):
            print(line if as_json else wrapped(one_line(line)), flush=True)
        if once:
            stop.set()
            if (report.committed or report.rolled_back) and sys.stderr.isatty():
                tell(RUN_IT, err=True)

    successes: list[bool] = []
    maintainer = settings.maintainer(service.engine, draining, listeners.values())
    optional_workers = {"txmq-drains": draining, "txmq-maintainer": maintainer}
    workers = {name: worker for name, worker in optional_workers.items() if worker is not None}
    try:
        metrics = _metrics(settings, service.engine, once)
        with metrics as write_metrics, stopped_by_signals(stop):
            if once:
                service.run(stop, show)
                successes = [_work_once(worker) for worker in workers.values()]
                write_metrics()  # again, with the figures of the workers
            else:
                with running(stop, {name: worker.run for name, worker in workers.items()}):
                    service.run(stop, show)
    except OptionError as problem:
        _say_error(problem)
        return BAD_CONFIGURATION
    service.engine.compaction.wait()
    if not once:
        return OK
    if not (reports and _all_answered(reports[-1], settings.elsewhere) and all(successes)):
        return PROBLEMS
    return OK if reports[-1].ok and not reports[-1].quarantined else PROBLEMS


def _answers(engine: Engine, report: CheckReport) -> str:
    """Return what listeners said with UNKNOWN in a round, of the first half batches; where to look when they said
    nothing."""
    from rmq_spark._core.inspect.standing import LOOKED_AT_MAX
    from rmq_spark.report import Standing

    answers = Standing(engine).last_answers(engine.open_half_ids()[:LOOKED_AT_MAX])
    said = [f"{half_id}: {reason}" for half_id, (at, reason) in answers.items() if at >= report.started_at]
    more = len(said) - ANSWERS_SHOWN
    return "".join(f"; {text}" for text in said[:ANSWERS_SHOWN]) + (
        f"; and {more} more (txmq pending lists them, txmq trace tells what was answered)" if more > 0 else ""
    )


def _metrics(settings: JobSettings, engine: Engine, once: bool) -> AbstractContextManager[Callable[[], None]]:
    """Return a context that publishes configured metrics. Its value is a function that writes them to a file."""
    metrics_settings = settings.metrics
    if not metrics_settings.wanted:
        return nullcontext(lambda: None)
    from rmq_spark._core.metrics.exposition import showing

    return showing(
        engine,
        port=metrics_settings.port if metrics_settings.port > 0 and not once else None,
        address=metrics_settings.address,
        cluster=metrics_settings.cluster,
        textfile=metrics_settings.textfile,
        once=once,
    )


def _show_unreadable(settings: JobSettings | None) -> None:
    """Replace the metrics file of a log that cannot be opened: its old figures are no longer true."""
    if settings is None or not settings.metrics.textfile:
        return
    try:
        from rmq_spark._core.metrics.exposition import write_unreadable

        write_unreadable(settings.metrics.textfile, location(settings.path), settings.metrics.cluster)
    except TxmqError as problem:
        logger.warning("the metrics were not written: %s", problem)


def _all_answered(report: CheckReport, elsewhere: Collection[str]) -> bool:
    """Return False when half batches wait for a listener that neither this job nor another check job has."""
    unanswered = sorted(report.without_listener.keys() - set(elsewhere))
    if unanswered:
        logger.error(
            "nobody answers for %s: name a listener under [listeners], or write elsewhere = %s when another check job "
            "has one",
            " and ".join(unanswered),
            json.dumps(unanswered),
        )
    return not unanswered


def _work_once(worker: Draining | Maintainer) -> bool:
    """Run one drain, or one round of upkeep. Return False when it failed, and log the failure."""
    try:
        worker.run_once()
        return True
    except Exception as problem:
        what = "a drain" if isinstance(worker, Draining) else "upkeep"
        logger.warning("%s of %r failed: %s", what, worker.engine, failure(problem))
        return False


def _say_error(problem: BaseException) -> None:
    if json_handler() is not None:
        logger.error("%s: %s", type(problem).__name__, sentence_for_command(problem))
        return
    tell(f"{type(problem).__name__}: {sentence_for_command(problem)}", err=True, fg="red")


def _start_spark_if_needed(listeners: Mapping[str, TransactionListener]) -> None:
    groups = [group for group, listener in listeners.items() if listener.requires_spark]
    if not groups:
        return
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise ConfigError(
            f"the listener of {groups[0]!r} needs Spark: install rmq_spark with its extra spark, or run this file with "
            "spark-submit"
        ) from None
    if SparkSession.getActiveSession() is not None:
        return
    builder = SparkSession.builder.appName(APP_NAME)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # under spark-submit, the user chooses the settings
        from delta import configure_spark_with_delta_pip

        builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension").config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
        builder = configure_spark_with_delta_pip(builder)
    builder.getOrCreate()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option("--config", "-c", envvar="TXMQ_CONFIG", help="The job's TOML file.")] = Path(
        "txmq.toml"
    ),
    once: Annotated[bool, typer.Option("--once", help="One round, for cron; exit code 1 on problems.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each round.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while all is well.")] = False,
) -> None:
    """Settle the transactions that a crash left open: ask the listeners of their producer groups, and decide."""
    raise typer.Exit(run_job(config, once, as_json, quiet))
