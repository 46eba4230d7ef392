"""Identifies a micro-batch by its streaming query and a hash of its input.

Spark counts the batches of every checkpoint from 0, so a batch number alone identifies nothing. With it alone, the
first batch of a new query would be taken for a replay of the old query's, and not be sent::

    old checkpoint   query a1   batches 0 1 2 2        the second 2 is a replay: same query, same input
    new checkpoint   query b2   batch   0              new messages: another query

A batch that sends nothing leaves no trace in the log. So the batches of two checkpoints, of which one is a copy of the
other, may take turns at numbers that the other one left free::

    checkpoint       query a1   batches 0 1 2          1 was empty, and the log has 0 and 2
    its old copy     query a1   batches 0       3      refused: its offsets/2 is not what the log knows of batch 2

Spark keeps the query's id in the checkpoint's file ``metadata``, and makes another one when that file is lost. So the
id by which the log knows a checkpoint is kept in a file of our own beside it. It is the one that Spark had at the first
batch, and it is written before anything is sent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rmq_spark._core.storage.files import filesystem
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
"""Of a store's error: the JVM's come with all their frames."""

_known_ids: dict[tuple[str, str], str] = {}
"""The id of :data:`ID_FILE`, by checkpoint and the id that Spark has."""
_known_logs: set[tuple[str, str]] = set()  # checkpoints, and the ids of the logs that they say


@dataclass(frozen=True)
class Identity:
    """The identity of a micro-batch of ``foreachBatch``.

    Attributes
    ----------
    query_id : str
        That of the checkpoint, whatever Spark calls the query now.
    input_hash : str or None
        None where the application has a name and Spark does not tell where the checkpoint lies. One that was restored
        from an older copy is then not noticed.
    lineage : Lineage or None
        What the checkpoint knows of earlier batches; None as for the hash.
    """

    query_id: str
    input_hash: str | None
    lineage: Lineage | None = field(default=None, compare=False)


def identity_of(
    batch: DataFrame,
    batch_id: int,
    checkpoint_location: str | None,
    storage_options: Mapping[str, str] | None,
    door: str,
    or_else: str | None,
) -> Identity:
    """Return a micro-batch's identity, from the checkpoint's files: where the caller says, or where Spark has it.

    Parameters
    ----------
    door : str
        Name of the class or function that takes ``checkpoint_location``, for the error's text.
    or_else : str or None
        As for :func:`known_query_id`.

    Raises
    ------
    OptionError
        When neither tells the query's id, or ``checkpoint_location`` belongs to another query.
    CheckpointMismatchError
        When the newest batch in the checkpoint is another one, or nobody knows as which query it sent before.
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
        query_id = known_query_id(checkpoint_location, storage_options, checkpoint, or_else)
        return Identity(query_id, checkpoint.input_hash, lineage_of(checkpoint_location, storage_options))
    if told is None:
        raise OptionError(
            "this session hides the query's id (Spark Connect, another thread, or no stream), and batch numbers alone "
            f"do not tell a new checkpoint from the old one: give {door} checkpoint_location=..., the query's "
            "checkpointLocation, as a path that Python can read where Spark runs"
        )
    try:
        folder = _OfSpark(batch.sparkSession, told)
        input_hash = input_hash_of(folder.read(f"offsets/{batch_id}") or b"")
    except Exception as problem:  # these are internals of Spark, and another version may have others
        what = f"the checkpoint of query {told} cannot be found ({type(problem).__name__})"
        if or_else is not None:
            raise OptionError(
                f"{what}, and the id that Spark has may be a new one of an old checkpoint: give {door} "
                "checkpoint_location=..., the query's checkpointLocation"
            ) from cause_of(problem)
        logger.warning("%s: pass checkpoint_location, and one that was restored from an older copy is noticed", what)
        return Identity(told, None)
    return Identity(_known_query_id(folder, told, batch_id, or_else), input_hash, Lineage(folder))


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


@dataclass(frozen=True)
class Checkpoint:
    """What a query's checkpoint says of the running micro-batch, in Spark's own files."""

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
            return Checkpoint(str(query_id), batch_id, input_hash_of(stream.readall()))
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise _unreadable(location, problem) from cause_of(problem)


def known_query_id(
    location: str, storage_options: Mapping[str, str] | None, checkpoint: Checkpoint, or_else: str | None
) -> str:
    """Return the id by which the log knows a checkpoint's query. The first batch makes it known: its id is Spark's.

    Parameters
    ----------
    or_else : str or None
        What a person may do when nobody knows the id, as the end of a sentence. None: the application has a name by
        which the log knows its batches, so Spark's id will do.

    Raises
    ------
    CheckpointMismatchError
        When batches were sent before, and nobody knows as which query.
    OptionError
        When the file cannot be read or made.
    """
    try:
        return _known_query_id(_of_python(location, storage_options), checkpoint.query_id, checkpoint.batch_id, or_else)
    except OSError as problem:
        raise _unreadable(location, problem) from cause_of(problem)


def _known_query_id(folder: Folder, spark_id: str, batch_id: int, or_else: str | None) -> str:
    known = _known_ids.get((folder.name, spark_id))
    if known is None:
        content = folder.read(ID_FILE)
        known = _id_in(content)
        if known is None:
            known = spark_id
            # The file is written whole or not at all. So one that says nothing was damaged, and batches may have run.
            _make_known(folder, known, batch_id, batch_id > 0 or content is not None, or_else)
        elif known != spark_id:
            logger.warning(
                "the checkpoint %r is that of query %s, which Spark calls %s now: its file metadata was made anew",
                folder.name, known, spark_id,
            )  # fmt: skip
        _known_ids[folder.name, spark_id] = known
    return known


def _make_known(folder: Folder, query_id: str, batch_id: int, may_have_sent: bool, or_else: str | None) -> None:
    if may_have_sent and or_else is not None:
        raise CheckpointMismatchError(
            f"nobody knows as which query the checkpoint {folder.name!r}, which is at batch {batch_id}, has sent its "
            f"batches: it has no file {ID_FILE} that can be read, and Spark makes another id when its file metadata is "
            f'lost, so a batch may be sent twice. Restore {ID_FILE} from a copy; or write {{"id": "..."}} into it, '
            f"with the query_id that log.trace tells of what was sent; {or_else}"
        )
    try:
        folder.write(ID_FILE, json.dumps({"id": query_id}).encode())
    except Exception as problem:  # of pyarrow or of the JVM
        what = f"the checkpoint {folder.name!r} cannot be written to ({sentence_of(problem)[:REASON_CHARS_MAX]})"
        if or_else is not None:
            raise OptionError(
                f"{what}, so nobody would know its query when Spark's file metadata is lost: give this program the "
                f"right to write there; {or_else}"
            ) from cause_of(problem)
        logger.warning("%s, so its query is known by Spark's file metadata alone", what)


def _id_in(content: bytes | None) -> str | None:
    """Return the id that a file says; None for one that is not there or is damaged."""
    try:
        return None if content is None else str(json.loads(content)["id"])
    except (KeyError, TypeError, ValueError):
        return None


class Lineage:
    """What a checkpoint knows of the batches that were sent from it, or from the one of which it is a copy.

    Spark keeps the offsets of the last batches alone (``spark.sql.streaming.minBatchesToRetain``), also when these sent
    nothing. So the last batch that was sent is kept in :data:`LAST_BATCH_FILE`, too, before its offsets are cleaned.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def holds(self, batch_id: int, input_hash: str) -> bool:
        """Whether this batch was sent from it: its offsets have this hash, or :meth:`keep` was told so.

        Raises
        ------
        OptionError
            When the checkpoint cannot be read.
        """
        try:
            offsets = self._folder.read(f"offsets/{batch_id}")
            if offsets is not None and input_hash_of(offsets) == input_hash:
                return True
            return self._kept() == (batch_id, input_hash)
        except OSError as problem:
            raise _unreadable(self._folder.name, problem) from cause_of(problem)

    def keep(self, batch_id: int, input_hash: str) -> None:
        """Keep that this is the last batch that was sent.

        A checkpoint that cannot be written to stays without: the log says so.
        """
        try:
            if self._kept() != (batch_id, input_hash):
                content = json.dumps({"batch_id": batch_id, "input_hash": input_hash})
                self._folder.write(LAST_BATCH_FILE, content.encode())
        except Exception as problem:  # of pyarrow or of the JVM
            logger.warning(
                "the checkpoint %r cannot be written to (%s): when Spark has cleaned its file offsets/%d, the next "
                "batch with messages is refused", self._folder.name, sentence_of(problem)[:REASON_CHARS_MAX], batch_id,
            )  # fmt: skip

    def _kept(self) -> tuple[int, str] | None:
        content = self._folder.read(LAST_BATCH_FILE)
        try:
            said = {} if content is None else json.loads(content)
            return int(said["batch_id"]), str(said["input_hash"])
        except (KeyError, TypeError, ValueError):
            return None


def lineage_of(location: str, storage_options: Mapping[str, str] | None) -> Lineage:
    """Return what a checkpoint knows of the batches that were sent from it."""
    return Lineage(_of_python(location, storage_options))


def _unreadable(location: str, problem: BaseException) -> OptionError:
    return OptionError(
        f"checkpointLocation={location!r} cannot be read from Python ({type(problem).__name__}: {problem}): "
        "give the query's checkpointLocation, as a path that both Spark and Python reach"
    )


class Folder(Protocol):
    """A checkpoint's folder."""

    name: str

    def read(self, file: str) -> bytes | None:
        """Return what a file holds, None when it is not there."""

    def write(self, file: str, content: bytes) -> None:
        """Write a file, in place of what is there: whole or not at all."""


class _OfPython:
    """A checkpoint's folder as Python reaches it."""

    def __init__(self, fs: Any, root: str, name: str) -> None:
        self._fs, self._root, self.name = fs, root, name

    def read(self, file: str) -> bytes | None:
        try:
            with self._fs.open_input_stream(f"{self._root}/{file}") as stream:
                return bytes(stream.readall())
        except FileNotFoundError:
            return None

    def write(self, file: str, content: bytes) -> None:
        beside = f"{self._root}/.{file}.{secrets.token_hex(4)}"
        with self._fs.open_output_stream(beside) as stream:
            stream.write(content)
        self._fs.move(beside, f"{self._root}/{file}")


def _of_python(location: str, storage_options: Mapping[str, str] | None) -> _OfPython:
    return _OfPython(*_checkpoint_folder(location, storage_options), location)


class _OfSpark:
    """The checkpoint's folder of a running query as Spark reaches it."""

    def __init__(self, session: Any, query_id: str) -> None:
        from py4j.java_gateway import is_instance_of

        jvm, spark = session._jvm, session._jsparkSession
        # A micro-batch's session is a copy, whose StreamingQueryManager knows no queries. So ask the shared state.
        running = spark.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))
        self.name = str(running.resolvedCheckpointRoot())
        self._jvm = jvm
        self._fs = self._path("").getFileSystem(spark.sessionState().newHadoopConf())
        # A file with a checksum beside it could not be mended by hand.
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
        beside = self._path(f".{file}.{secrets.token_hex(4)}")
        stream = self._fs.create(beside, True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        self._fs.delete(self._path(file), False)  # no store's rename replaces a file
        if not self._fs.rename(beside, self._path(file)):
            raise OSError(f"{file} cannot be renamed into its place")


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
                "log: %s", location, sentence_of(problem)[:REASON_CHARS_MAX],
            )  # fmt: skip
    _known_logs.add((location, log_id))


def _checkpoint_folder(location: str, storage_options: Mapping[str, str] | None) -> tuple[Any, str]:
    return filesystem(location.replace("dbfs:/", "/dbfs/", 1), storage_options)


def input_hash_of(offsets: bytes) -> str:
    """Return the hash of a batch's offsets: a replay has the same, and a batch of another checkpoint has another."""
    return hashlib.sha256(offsets).hexdigest()[:32]
