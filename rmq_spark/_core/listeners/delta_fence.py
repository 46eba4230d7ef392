"""Marks an attempt's commit to a Delta table with its transaction and its state, and reads the state in a commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from rmq_spark._core.listeners.fence_row import EXECUTED, ROLLED_BACK, TOMBSTONE
from rmq_spark._core.listeners.half_batch import HalfBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STATES = (EXECUTED, ROLLED_BACK, TOMBSTONE)

_APP_ID = "spark.databricks.delta.write.txnAppId"
TXN_VERSION = "spark.databricks.delta.write.txnVersion"
# Delta removes the version from the session when a write uses it. A second write finds txnAppId alone, and fails.
_AUTO_RESET = "spark.databricks.delta.write.txnVersion.autoReset.enabled"
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


def app_id_of(batch: HalfBatch) -> str:
    return f"txmq:{batch.log_id}:{batch.half_id}:{batch.attempt}"


def _user_metadata(batch: HalfBatch, state: str, reason: str | None = None) -> str:
    why = {} if reason is None else {"reason": reason}
    return json.dumps({"txmq": state, "log": batch.log_id, "half_id": batch.half_id, "attempt": batch.attempt, **why})


def state_in(user_metadata: str | None, batch: HalfBatch) -> tuple[str, str | None] | None:
    """Return the attempt's state and reason in a commit's userMetadata; None when it is of something else."""
    try:
        fields = json.loads(user_metadata or "")
        state, reason = fields["txmq"], fields.get("reason")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    is_ours = state in _STATES and user_metadata == _user_metadata(batch, state, reason)
    return (state, reason) if is_ours else None


@contextmanager
def fenced_session(
    spark: SparkSession, batch: HalfBatch, state: str, reason: str | None = None
) -> Iterator[SparkSession]:
    """Yield a copy of the session whose one Delta commit carries the attempt's transaction and this state.

    Other threads may use ``spark`` itself. With these settings they would write under our transaction, and Delta would
    silently skip their data. The copy loses the settings at the end, because ``work`` may keep the copy.
    """
    copy = _copy(spark)
    settings = {
        _APP_ID: app_id_of(batch),
        TXN_VERSION: "1",
        _AUTO_RESET: "true",
        _USER_METADATA: _user_metadata(batch, state, reason),
    }
    try:
        for name, value in settings.items():
            copy.conf.set(name, value)
        with _active(copy):
            yield copy
    finally:
        for name in settings:
            copy.conf.unset(name)


def _is_classic(spark: SparkSession) -> bool:
    return hasattr(spark, "_jsparkSession")


def _copy(spark: Any) -> SparkSession:
    """Return a session with the same settings and temporary views (with Spark Connect: what the client copies)."""
    if _is_classic(spark):
        copy = type(spark)(spark.sparkContext, spark._jsparkSession.cloneSession())
    else:
        copy = spark.cloneSession() if hasattr(spark, "cloneSession") else spark.newSession()
    return cast("SparkSession", copy)


@contextmanager
def _active(spark: Any) -> Iterator[None]:
    """Make this session the thread's active one, and restore the former one at the end.

    Code in ``work`` may ask for the active session. Spark's createDataFrame activates its session for good, but the
    copy must not stay active.
    """
    if not _is_classic(spark):
        yield
        return
    session_class = type(spark)
    jvm_class = session_class._get_j_spark_session_class(spark._jvm)
    before, jvm_before = session_class._activeSession, jvm_class.getActiveSession()
    session_class._activeSession = spark
    jvm_class.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        session_class._activeSession = before
        if jvm_before.isDefined():
            jvm_class.setActiveSession(jvm_before.get())
        else:
            jvm_class.clearActiveSession()
