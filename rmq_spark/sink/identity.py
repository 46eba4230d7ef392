"""Identifies a micro-batch by its streaming query and a hash of its input.

Spark counts the batches of every checkpoint from 0, so a batch number alone identifies nothing. With it alone, the
first batch of a new query would be taken for a replay of the old query's, and not be sent::

    old checkpoint   query a1   batches 0 1 2 2        the second 2 is a replay: same query, same input
    new checkpoint   query b2   batch   0              new messages: another query
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmq_spark.errors import CheckpointMismatchError, OptionError
from rmq_spark.redaction import cause_of, line_of
from rmq_spark.storage.files import filesystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

QUERY_ID_PROPERTY = "sql.streaming.queryId"
RUN_ID_PROPERTY = "spark.jobGroup.id"
LOG_FILE = "txmq.log_id"
"""In a query's checkpoint: the id of the commit log that it sends to."""

_known_logs: set[tuple[str, str]] = set()  # checkpoints, and the ids of the logs that they say


@dataclass(frozen=True)
class Identity:
    """The identity of a micro-batch of ``foreachBatch``.

    Attributes
    ----------
    query_id : str
    input_hash : str or None
        None when the checkpoint cannot be read. A checkpoint that was restored from an older copy is then not noticed.
    """

    query_id: str
    input_hash: str | None


def identity_of(
    batch: DataFrame,
    batch_id: int,
    checkpoint_location: str | None,
    storage_options: Mapping[str, str] | None,
    door: str,
) -> Identity:
    """Return a micro-batch's identity, from the checkpoint's files or else from the Spark session.

    Parameters
    ----------
    door : str
        Name of the class or function that takes ``checkpoint_location``, for the error's text.

    Raises
    ------
    OptionError
        When neither tells the query's id, or ``checkpoint_location`` belongs to another query.
    CheckpointMismatchError
        When the newest batch in the checkpoint is another one.
    """
    told = query_id_of(batch)
    if checkpoint_location is not None:
        checkpoint = read_checkpoint(checkpoint_location, storage_options)
        if told is not None and told != checkpoint.query_id:
            raise OptionError(
                f"checkpoint_location={checkpoint_location!r} is that of query {checkpoint.query_id}, and this is "
                f"query {told}: give {door} the checkpointLocation of its own query"
            )
        if checkpoint.batch_id != batch_id:
            raise CheckpointMismatchError(
                f"Spark runs batch {batch_id}, but the newest one in {checkpoint_location!r} is "
                f"{checkpoint.batch_id}: checkpoint_location is another query's, or two queries use it"
            )
        return Identity(checkpoint.query_id, checkpoint.input_hash)
    if told is None:
        raise OptionError(
            "this session hides the query's id (Spark Connect, another thread, or no stream), and batch numbers alone "
            f"do not tell a new checkpoint from the old one: give {door} checkpoint_location=..., the query's "
            "checkpointLocation, as a path that Python can read where Spark runs"
        )
    return Identity(told, _hash_by_spark(batch, told, batch_id))


def query_id_of(batch: DataFrame) -> str | None:
    """Return the id of the streaming query that this micro-batch belongs to, or None when the session hides it."""
    context = getattr(batch.sparkSession, "_sc", None)
    if context is None:
        return None
    value = context.getLocalProperty(QUERY_ID_PROPERTY)
    return None if value is None else str(value)


def run_of(batch: DataFrame) -> str | None:
    """Return the run of the streaming query, in which no batch comes twice, or None without a query."""
    context = getattr(batch.sparkSession, "_sc", None)
    if context is None:
        return "this worker's"  # Spark Connect starts a worker for each run
    run_id = context.getLocalProperty(RUN_ID_PROPERTY)
    return None if run_id is None or query_id_of(batch) is None else str(run_id)


def _hash_by_spark(batch: DataFrame, query_id: str, batch_id: int) -> str | None:
    """Return the hash of a micro-batch's offsets, which Spark reads from the query's checkpoint; None if it cannot."""
    session: Any = batch.sparkSession
    try:
        jvm, spark = session._jvm, session._jsparkSession
        # A micro-batch's session is a copy, whose StreamingQueryManager knows no queries. So ask the shared state.
        running = spark.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))
        path = jvm.org.apache.hadoop.fs.Path(running.resolvedCheckpointRoot(), f"offsets/{batch_id}")
        stream = path.getFileSystem(spark.sessionState().newHadoopConf()).open(path)
        try:
            return _hash(bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream)))
        finally:
            stream.close()
    except Exception as problem:  # these are internals of Spark, and another version may have others
        logger.warning(
            "the checkpoint of query %s cannot be found (%s): pass checkpoint_location, and one that was restored "
            "from an older copy is noticed",
            query_id,
            type(problem).__name__,
        )
        return None


@dataclass(frozen=True)
class Checkpoint:
    """What a query's checkpoint says of the running micro-batch."""

    query_id: str
    batch_id: int
    input_hash: str


def read_checkpoint(location: str | None, storage_options: Mapping[str, str] | None = None) -> Checkpoint:
    """Read the query id, the newest batch id and the hash of its offsets.

    Raises
    ------
    OptionError
        When the checkpoint cannot be read, or the option is not set: a Spark setting gave the location, or it is
        temporary.
    """
    if not location:
        raise OptionError(
            "option 'checkpointLocation' is missing: the sink takes the query's identity from it, and cannot "
            "when it comes from a Spark setting or is temporary; set .option('checkpointLocation', ...)"
        )
    import pyarrow.fs as pafs

    fs, root = _checkpoint_folder(location, storage_options)
    try:
        with fs.open_input_stream(f"{root}/metadata") as stream:
            query_id = json.loads(stream.readall())["id"]
        names = [i.base_name for i in fs.get_file_info(pafs.FileSelector(f"{root}/offsets"))]
        batch_id = max(int(n) for n in names if n.isdigit())
        with fs.open_input_stream(f"{root}/offsets/{batch_id}") as stream:
            return Checkpoint(str(query_id), batch_id, _hash(stream.readall()))
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise OptionError(
            f"checkpointLocation={location!r} cannot be read from Python ({type(problem).__name__}: {problem}): "
            "give the query's checkpointLocation, as a path that both Spark and Python reach"
        ) from cause_of(problem)


def require_same_log(location: str, storage_options: Mapping[str, str] | None, log_id: str, log_path: str) -> None:
    """Require that a query's earlier micro-batches went into this commit log: a file in the checkpoint says so.

    A checkpoint without the file gets it. One that Python may not write to stays without.

    Raises
    ------
    CheckpointMismatchError
        When they went into another one: its messages would be missing here, and these there.
    """
    if (location, log_id) in _known_logs:
        return
    fs, root = _checkpoint_folder(location, storage_options)
    file = f"{root}/{LOG_FILE}"
    try:
        with fs.open_input_stream(file) as stream:
            found = stream.readall().decode(errors="replace").strip()
    except OSError:
        found = ""
    if found and found != log_id:
        raise CheckpointMismatchError(
            f"the query's earlier batches went into commit log {found}, and {log_path} is commit log {log_id}: give "
            "the sink the path of that one, or begin with a new checkpoint. If this log stands in that one's place, "
            f"remove {LOG_FILE} from the checkpoint {location!r}"
        )
    if not found:
        try:
            with fs.open_output_stream(file) as stream:
                stream.write(log_id.encode())
        except OSError as problem:
            logger.warning(
                "the checkpoint %r cannot be written to, so nobody will notice when it is used with another commit "
                "log: %s", location, line_of(problem),
            )  # fmt: skip
    _known_logs.add((location, log_id))


def _checkpoint_folder(location: str, storage_options: Mapping[str, str] | None) -> tuple[Any, str]:
    return filesystem(location.replace("dbfs:/", "/dbfs/", 1), storage_options)


def _hash(offsets: bytes) -> str:
    """Return the hash of a batch's offsets: a replay has the same, and a batch of another checkpoint has another."""
    return hashlib.sha256(offsets).hexdigest()[:32]
