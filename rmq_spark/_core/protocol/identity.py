"""Identifies a micro-batch by its streaming query and a hash of its input.

Spark counts the batches of every checkpoint from 0, so a batch number alone identifies nothing. By the number alone,
the first batch of a new query would look like a replay of the old query's first batch, and not be sent::

    old checkpoint   query a1   batches 0 1 2 2        the second 2 is a replay: same query, same input
    new checkpoint   query b2   batch   0              new messages: another query

A batch that sends nothing leaves no trace in the log. So when one checkpoint is a copy of another, each may use batch
numbers that the other left free::

    checkpoint       query a1   batches 0 1 2          1 was empty, and the log has 0 and 2
    its old copy     query a1   batches 0       3      refused: its offsets/2 is not what the log knows of batch 2

Spark keeps the query's id in the checkpoint's file ``metadata``, and makes a new id when that file is lost. So the log
uses the first id that Spark gave. A file of our own beside ``metadata`` keeps it, written before anything is sent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rmq_spark._core.storage.file_system import filesystem
from rmq_spark._core.vocabulary.redaction import cause_of, sentence_of
from rmq_spark.errors import CheckpointMismatchError, OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

QUERY_ID_PROPERTY = "sql.streaming.queryId"
RUN_ID_PROPERTY = "spark.jobGroup.id"
LOG_FILE = "txmq.log_id"
"""In a query's checkpoint: the id of the commit log that it sends to."""

ID_FILE = "txmq.query_id"
"""In a query's checkpoint, beside Spark's ``metadata`` and in its form: the id by which the log knows the query."""
LAST_BATCH_FILE = "txmq.last_batch"
"""In a query's checkpoint: the last batch that was sent from it, and the hash of its offsets."""
REASON_CHARS_MAX = 300
"""Most characters of a store's error that are quoted. The JVM's errors come with all their frames."""

_known_ids: dict[tuple[str, str], str] = {}
"""The id in :data:`ID_FILE`, by checkpoint and Spark's id."""
_known_logs: set[tuple[str, str]] = set()  # checkpoints, each with the id of its log


@dataclass(frozen=True)
class Identity:
    """The identity of a micro-batch of ``foreachBatch``. ``query_id`` is the id by which the log knows the checkpoint,
    whatever Spark's id is now. ``lineage`` is the checkpoint's record of earlier batches.

    ``input_hash`` and ``lineage`` are None when the application has a name and Spark does not tell where the checkpoint
    is. A checkpoint that was restored from an older copy is then not noticed.
    """

    query_id: str
    input_hash: str | None
    lineage: Lineage | None = field(default=None, compare=False)


def identity_of(
    batch: DataFrame,
    batch_id: int,
    checkpoint_location: str | None,
    storage_options: Mapping[str, str] | None,
    api_name: str,
    advice: str | None,
) -> Identity:
    """Return a micro-batch's identity from the files of its checkpoint, at the caller's location or at Spark's.
    ``api_name`` is the class or function that takes ``checkpoint_location``, for the error's text; for ``advice`` see
    :func:`known_query_id`.

    OptionError: neither has the query's id, or ``checkpoint_location`` belongs to another query.
    CheckpointMismatchError: the newest batch in the checkpoint is another one, or the id under which it sent before is
    lost.
    """
    spark_id = query_id_of(batch)
    if checkpoint_location is not None:
        checkpoint = read_checkpoint(checkpoint_location, storage_options)
        if spark_id is not None and spark_id != checkpoint.query_id:
            raise OptionError(
                f"checkpoint_location={checkpoint_location!r} is that of query {checkpoint.query_id}, and this is "
                f"query {spark_id}: give {api_name} the checkpointLocation of its own query"
            )
        if checkpoint.batch_id != batch_id:
            raise CheckpointMismatchError(
                f"Spark runs batch {batch_id}, but the newest one in {checkpoint_location!r} is "
                f"{checkpoint.batch_id}: checkpoint_location is another query's, or two queries use it"
            )
        query_id = known_query_id(checkpoint_location, storage_options, checkpoint, advice)
        return Identity(query_id, checkpoint.input_hash, lineage_of(checkpoint_location, storage_options))
    if spark_id is None:
        raise OptionError(
            "this session hides the query's id (Spark Connect, another thread, or no stream), and batch numbers alone "
            f"do not tell a new checkpoint from the old one: give {api_name} checkpoint_location=..., the query's "
            "checkpointLocation, as a path that Python can read where Spark runs"
        )
    try:
        folder = _SparkFolder(batch.sparkSession, spark_id)
        input_hash = input_hash_of(folder.read(f"offsets/{batch_id}") or b"")
    except Exception as problem:  # these are internals of Spark, and another version may have others
        sentence = f"the checkpoint of query {spark_id} cannot be found ({type(problem).__name__})"
        if advice is not None:
            raise OptionError(
                f"{sentence}, and the id that Spark has may be a new one of an old checkpoint: give {api_name} "
                "checkpoint_location=..., the query's checkpointLocation"
            ) from cause_of(problem)
        logger.warning(
            "%s: pass checkpoint_location, and one that was restored from an older copy is noticed", sentence
        )
        return Identity(spark_id, None)
    return Identity(_known_query_id(folder, spark_id, batch_id, advice), input_hash, Lineage(folder))


def query_id_of(batch: DataFrame) -> str | None:
    """Return the id of the streaming query that this micro-batch belongs to, or None when the session hides it."""
    context = getattr(batch.sparkSession, "_sc", None)
    if context is None:
        return None
    value = context.getLocalProperty(QUERY_ID_PROPERTY)
    return None if value is None else str(value)


def run_of(batch: DataFrame) -> str | None:
    """Return the id of the streaming query's run, or None without a query. No batch comes twice in a run."""
    context = getattr(batch.sparkSession, "_sc", None)
    if context is None:
        return "this worker's"  # Spark Connect starts a worker for each run
    run_id = context.getLocalProperty(RUN_ID_PROPERTY)
    return None if run_id is None or query_id_of(batch) is None else str(run_id)


@dataclass(frozen=True)
class Checkpoint:
    """The running micro-batch, by Spark's own files in the query's checkpoint."""

    query_id: str
    batch_id: int
    input_hash: str


def read_checkpoint(location: str | None, storage_options: Mapping[str, str] | None = None) -> Checkpoint:
    """Read the query id, the newest batch id and the hash of its offsets. OptionError: the checkpoint cannot be read,
    or ``location`` is empty because a Spark setting gave it or it is temporary."""
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
            return Checkpoint(str(query_id), batch_id, input_hash_of(stream.readall()))
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise _unreadable(location, problem) from cause_of(problem)


def known_query_id(
    location: str, storage_options: Mapping[str, str] | None, checkpoint: Checkpoint, advice: str | None
) -> str:
    """Return the id by which the log knows a checkpoint's query. At the first batch Spark's id is written to the file.

    ``advice`` ends the error's text when the id is lost. None for an application with a name, by which the log knows
    its batches: then a lost id does no harm, and Spark's will do. CheckpointMismatchError: batches were sent before,
    and the id under which they were sent is lost. OptionError: the file cannot be read or written.
    """
    try:
        return _known_query_id(
            _python_folder(location, storage_options), checkpoint.query_id, checkpoint.batch_id, advice
        )
    except OSError as problem:
        raise _unreadable(location, problem) from cause_of(problem)


def _known_query_id(folder: Folder, spark_id: str, batch_id: int, advice: str | None) -> str:
    query_id = _known_ids.get((folder.name, spark_id))
    if query_id is None:
        content = folder.read(ID_FILE)
        query_id = _id_in(content)
        if query_id is None:
            query_id = spark_id
            # The file is written whole or not at all. So a file without an id was damaged, and batches may have run.
            _write_query_id(folder, query_id, batch_id, batch_id > 0 or content is not None, advice)
        elif query_id != spark_id:
            logger.warning(
                "the checkpoint %r is that of query %s, which Spark calls %s now: its file metadata was made anew",
                folder.name, query_id, spark_id,
            )  # fmt: skip
        _known_ids[folder.name, spark_id] = query_id
    return query_id


def _write_query_id(folder: Folder, query_id: str, batch_id: int, may_have_sent: bool, advice: str | None) -> None:
    if may_have_sent and advice is not None:
        raise CheckpointMismatchError(
            f"nobody knows as which query the checkpoint {folder.name!r}, which is at batch {batch_id}, has sent its "
            f"batches: it has no file {ID_FILE} that can be read, and Spark makes another id when its file metadata is "
            f'lost, so a batch may be sent twice. Restore {ID_FILE} from a copy; or write {{"id": "..."}} into it, '
            f"with the query_id that log.trace tells of what was sent; {advice}"
        )
    try:
        folder.write(ID_FILE, json.dumps({"id": query_id}).encode())
    except Exception as problem:  # of pyarrow or of the JVM
        sentence = f"the checkpoint {folder.name!r} cannot be written to ({sentence_of(problem)[:REASON_CHARS_MAX]})"
        if advice is not None:
            raise OptionError(
                f"{sentence}, so nobody would know its query when Spark's file metadata is lost: give this program the "
                f"right to write there; {advice}"
            ) from cause_of(problem)
        logger.warning("%s, so its query is known by Spark's file metadata alone", sentence)


def _id_in(content: bytes | None) -> str | None:
    """Return the id in a file's content; None for a missing or damaged file."""
    try:
        return None if content is None else str(json.loads(content)["id"])
    except (KeyError, TypeError, ValueError):
        return None


class Lineage:
    """A checkpoint's record of the batches that were sent from it, or from the checkpoint of which it is a copy.

    Spark keeps only the offsets of the last batches (``spark.sql.streaming.minBatchesToRetain``), even when these sent
    nothing. So :data:`LAST_BATCH_FILE` also keeps the last batch that was sent, before Spark cleans its offsets.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def contains(self, batch_id: int, input_hash: str) -> bool:
        """Whether this batch was sent from the checkpoint: its offsets have this hash, or it was recorded by
        :meth:`record`. OptionError: the checkpoint cannot be read."""
        try:
            offsets = self._folder.read(f"offsets/{batch_id}")
            if offsets is not None and input_hash_of(offsets) == input_hash:
                return True
            return self._last_batch() == (batch_id, input_hash)
        except OSError as problem:
            raise _unreadable(self._folder.name, problem) from cause_of(problem)

    def record(self, batch_id: int, input_hash: str) -> None:
        """Record the last batch that was sent. If the checkpoint cannot be written to, log a warning."""
        try:
            if self._last_batch() != (batch_id, input_hash):
                content = json.dumps({"batch_id": batch_id, "input_hash": input_hash})
                self._folder.write(LAST_BATCH_FILE, content.encode())
        except Exception as problem:  # of pyarrow or of the JVM
            logger.warning(
                "the checkpoint %r cannot be written to (%s): when Spark has cleaned its file offsets/%d, the next "
                "batch with messages is refused", self._folder.name, sentence_of(problem)[:REASON_CHARS_MAX], batch_id,
            )  # fmt: skip

    def _last_batch(self) -> tuple[int, str] | None:
        content = self._folder.read(LAST_BATCH_FILE)
        try:
            fields = {} if content is None else json.loads(content)
            return int(fields["batch_id"]), str(fields["input_hash"])
        except (KeyError, TypeError, ValueError):
            return None


def lineage_of(location: str, storage_options: Mapping[str, str] | None) -> Lineage:
    return Lineage(_python_folder(location, storage_options))


def _unreadable(location: str, problem: BaseException) -> OptionError:
    return OptionError(
        f"checkpointLocation={location!r} cannot be read from Python ({type(problem).__name__}: {problem}): "
        "give the query's checkpointLocation, as a path that both Spark and Python reach"
    )


class Folder(Protocol):
    name: str

    def read(self, file: str) -> bytes | None:
        """Return a file's content; None when there is no file."""

    def write(self, file: str, content: bytes) -> None:
        """Write or replace a file, whole or not at all."""


class _PythonFolder:
    """A checkpoint's folder, reached from Python."""

    def __init__(self, fs: Any, root: str, name: str) -> None:
        self._fs, self._root, self.name = fs, root, name

    def read(self, file: str) -> bytes | None:
        try:
            with self._fs.open_input_stream(f"{self._root}/{file}") as stream:
                return bytes(stream.readall())
        except FileNotFoundError:
            return None

    def write(self, file: str, content: bytes) -> None:
        temporary_path = f"{self._root}/.{file}.{secrets.token_hex(4)}"
        with self._fs.open_output_stream(temporary_path) as stream:
            stream.write(content)
        self._fs.move(temporary_path, f"{self._root}/{file}")


def _python_folder(location: str, storage_options: Mapping[str, str] | None) -> _PythonFolder:
    return _PythonFolder(*_checkpoint_folder(location, storage_options), location)


class _SparkFolder:
    """The checkpoint's folder of a running query, reached through Spark."""

    def __init__(self, session: Any, query_id: str) -> None:
        from py4j.java_gateway import is_instance_of

        jvm, spark = session._jvm, session._jsparkSession
        # A micro-batch's session is a copy, whose StreamingQueryManager knows no queries. So ask the shared state.
        query = spark.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))
        self.name = str(query.resolvedCheckpointRoot())
        self._jvm = jvm
        self._fs = self._path("").getFileSystem(spark.sessionState().newHadoopConf())
        # A person could not mend a file that has a checksum beside it.
        if is_instance_of(session.sparkContext._gateway, self._fs, "org.apache.hadoop.fs.ChecksumFileSystem"):
            self._fs = self._fs.getRawFileSystem()

    def _path(self, file: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.name}/{file}" if file else self.name)

    def read(self, file: str) -> bytes | None:
        path = self._path(file)
        if not self._fs.exists(path):
            return None
        stream = self._fs.open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, file: str, content: bytes) -> None:
        temporary_path = self._path(f".{file}.{secrets.token_hex(4)}")
        stream = self._fs.create(temporary_path, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        self._fs.delete(self._path(file), False)  # Hadoop's rename replaces no file
        if not self._fs.rename(temporary_path, self._path(file)):
            raise OSError(f"{file} cannot be renamed into its place")


def require_same_log(location: str, storage_options: Mapping[str, str] | None, log_id: str, log_path: str) -> None:
    """Raise CheckpointMismatchError when the checkpoint's file names another commit log for the query's earlier
    micro-batches: each log would lack messages of the query. A checkpoint without the file gets one, if Python may
    write there."""
    if (location, log_id) in _known_logs:
        return
    fs, root = _checkpoint_folder(location, storage_options)
    file = f"{root}/{LOG_FILE}"
    try:
        with fs.open_input_stream(file) as stream:
            file_id = stream.readall().decode(errors="replace").strip()
    except OSError:
        file_id = ""
    if file_id and file_id != log_id:
        raise CheckpointMismatchError(
            f"the query's earlier batches went into commit log {file_id}, and {log_path} is commit log {log_id}: give "
            "the sink the path of that one, or begin with a new checkpoint. If this log stands in that one's place, "
            f"remove {LOG_FILE} from the checkpoint {location!r}"
        )
    if not file_id:
        try:
            with fs.open_output_stream(file) as stream:
                stream.write(log_id.encode())
        except OSError as problem:
            logger.warning(
                "the checkpoint %r cannot be written to, so nobody will notice when it is used with another commit "
                "log: %s", location, sentence_of(problem)[:REASON_CHARS_MAX],
            )  # fmt: skip
    _known_logs.add((location, log_id))


def _checkpoint_folder(location: str, storage_options: Mapping[str, str] | None) -> tuple[Any, str]:
    return filesystem(location.replace("dbfs:/", "/dbfs/", 1), storage_options)


def input_hash_of(offsets: bytes) -> str:
    """Return the hash of a batch's offsets. A replay has the same hash; a batch of another checkpoint does not."""
    return hashlib.sha256(offsets).hexdigest()[:32]
