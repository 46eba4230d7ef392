"""All errors of rmq_spark. They have one base class, and each text says what was found and what to do.

The docstring of each class has a paragraph about the problem, and one about the remedy. The documentation's reference
is built from them.
"""

from __future__ import annotations

import re
from typing import Any

from rmq_spark._core.vocabulary.redaction import redacted, shortened
from rmq_spark._core.vocabulary.remedy import Remedy


class TxmqError(Exception):
    """The base of every error that rmq_spark raises on purpose. Its text never contains a secret.

    Parameters
    ----------
    argument : str, optional
        The argument that cannot be used. The text then begins with ``<argument>=``.
    remedy : Remedy, optional
        The end of the text: what a person does about it.
    """

    def __init__(self, *args: object, argument: str | None = None, remedy: Remedy | None = None) -> None:
        first, *others = [shortened(redacted(a)) if isinstance(a, str) else a for a in args or ("",)]
        self.problem = str(first)
        """The text without the argument's name and the remedy."""
        self.argument = argument
        self.remedy = None if remedy is None else Remedy(redacted(remedy.text), redacted(remedy.command))
        if argument is not None:
            first = f"{argument}={first}"
        if self.remedy is not None:
            first = f"{first}: {self.remedy}"
        super().__init__(*((first, *others) if args else ()))


def find_cause(problem: BaseException | str | None) -> TxmqError | None:
    """Find the error of rmq_spark in an exception of Spark's, whose text may have hundreds of lines.

    Parameters
    ----------
    problem : exception, str or None
        The exception of an action or of ``awaitTermination()``, or ``query.exception()``, or its text.

    Returns
    -------
    TxmqError or None
        The error, of its own class; None when rmq_spark raised none.

    Examples
    --------
    >>> try:  # doctest: +SKIP
    ...     query.awaitTermination()
    ... except Exception as problem:
    ...     raise errors.find_cause(problem) or problem from None
    """
    chain: list[BaseException] = []
    link = problem if isinstance(problem, BaseException) else None
    while link is not None and link not in chain:
        if isinstance(link, TxmqError):
            return link
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    text = str(problem)[-TEXT_SEARCHED_MAX:]
    for name, message in reversed(_RAISED.findall(text)):
        kind = globals().get(name)
        if isinstance(kind, type) and issubclass(kind, TxmqError):
            return kind(message.strip())
    if unreachable := _UNREACHABLE.findall(text):
        said = " ".join(unreachable[-1].split())
        return ListenerError(f"{said}: nothing was written. Start again when the database answers")
    for spark_error, advice in _ADVICE.items():
        if spark_error in text and "txmq" in text:
            return OptionError(advice)
    return None


TEXT_SEARCHED_MAX = 1_000_000
"""The most characters that are searched, at the end of a text."""
_RAISED = re.compile(
    r"^[ \t|]*rmq_spark\.errors\.(\w+): (.+?)(?=\n\s*\n|\n\s*at |\nTraceback| SQLSTATE: |\Z)", re.MULTILINE | re.DOTALL
)
"""Matches the last lines of a traceback. A database's message may have several lines."""
_UNREACHABLE = re.compile(r"(no connection to [^)\n]*)\)\n")
"""Matches the words of a database that does not answer: of a listener before the prepare, or of an inbox."""
_ADVICE = {
    "DATA_SOURCE_NOT_FOUND": "Spark's Python workers have no rmq_spark: txmq.register(spark) says what to set",
    "UNSUPPORTED_DATA_SOURCE_SAVE_MODE": "a batch write to format('txmq') needs .mode('append'): it has no other mode",
}
"""Advice for errors of Spark that occur before Spark calls this package."""


# ---------------------------------------------------------------- arguments of a user
class OptionError(TxmqError, ValueError):
    """An option is missing, unknown or invalid, or contradicts another one.

    Set the option as the message says; it names the nearest right one.
    """


class ConfigError(OptionError):
    """A configuration file (conf/txmq.toml) cannot be used.

    Correct the file or the ``TXMQ_…`` variable that the message names. ``txmq init`` writes a file with every
    setting.
    """


class MessageError(TxmqError, ValueError):
    """A message or one of its columns breaks a rule: name, size, type or reserved property.

    Correct the message or column that the error names, and send again. Nothing was sent.
    """


class TopicNotFoundError(TxmqError, LookupError):
    """A topic is not in the commit log.

    Correct the name, or create the topic with ``log.create_topic`` or ``txmq topic create``.
    """


class GroupNotFoundError(TxmqError, LookupError):
    """A consumer group has no progress in the commit log.

    Correct the name. A group exists once a consumer of it has run.
    """


class GroupInUseError(TxmqError):
    """Another query reads the same queues for the same consumer group.

    Stop the other query, or use a separate group. ``txmq group hand-over`` frees a group that no query reads for any
    more.
    """


class ConsumeError(TxmqError):
    """A stream cannot be consumed in this way.

    Read the stream as the message says, such as with the option ``ordered``. Make a new consumer after a shutdown
    or a fork.
    """


class InboxConflictError(TxmqError):
    """Two processes write the results of one queue for one consumer group, or its positions belong to another log.

    Stop the second process of the group. For a recreated log use another group.
    """


class TopicExistsError(TxmqError):
    """A topic already exists in the commit log.

    Use the existing topic (``exist_ok=True``), choose another name, or change its retention with
    ``log.set_retention``.
    """


class ListenerError(TxmqError):
    """A listener is missing, cannot be loaded, is not a TransactionListener, or breaks a rule for its work.

    Correct the listener or its path as the message says. Prepared messages stay pending until a check settles them.
    """


class TransactionEndedError(ListenerError):
    """``work`` ended the database transaction that it was given. A part of its writes may be committed.

    Look into the database, undo or finish the writes, and settle the half batch with ``log.resolve``. No check can
    settle it.
    """


class VerdictError(TxmqError, ValueError):
    """A listener did not return a verdict for every transaction of its half batch.

    Return one verdict for each row of ``batch.transactions``, or one for all.
    """


class OffsetError(TxmqError, ValueError):
    """An offset (JSON option or checkpoint) is malformed or names an unknown topic or queue.

    Correct the JSON, or start with a new checkpoint.
    """


class OffsetOutOfRangeError(OffsetError):
    """A read asks for offsets that the commit log does not have.

    Start at ``earliest``, or pass ``failOnDataLoss=false`` to skip expired messages. Keep messages longer than a
    consumer may be away.
    """


# ---------------------------------------------------------------- the commit log
class NotACommitLogError(TxmqError):
    """The path has no commit log, or only a part of one.

    Correct the path, create a log with ``txmq create``, or open the log again when it was recreated.
    """


class CommitLogExistsError(TxmqError):
    """The path already has a commit log.

    Open it, or pass ``exist_ok=True``.
    """


class LogFormatError(TxmqError):
    """The commit log has another format than this version of rmq_spark reads and writes, or its tables were changed by
    hand.

    Use the version that made the log, or a new log. Restore changed tables from a copy.
    """


class CorruptLogError(TxmqError):
    """The commit log is damaged: a file or a row was altered, contradicts the rest, or points outside the log.

    Stop writers, and restore the log from a copy. The message names the file.
    """


class ForeignChangeError(CorruptLogError):
    """Another program committed to a table of the commit log: it changed rows, files, columns, properties or table
    features.

    Keep that program away, and undo its changes as the message says. Until then nothing is committed to the table.
    """


class LostFileError(CorruptLogError, FileNotFoundError):
    """A file that a table of the commit log names is gone.

    Restore the file, or the log, from a copy. Keep other programs from vacuuming the log's tables.
    """


class StrippedError(LostFileError):
    """A half file no longer has the payload of drained rows, which are in the table ``messages``.

    Read the messages from the table ``messages``. Readers of rmq_spark do that by themselves.
    """


class UnreadableFileError(CorruptLogError, OSError):
    """A file of the commit log cannot be read: its store fails, permission is missing, or it is damaged.

    Give the program the right to read it, or try again. Restore a damaged file from a copy.
    """


class StorageError(TxmqError):
    """The store cannot be reached, or lacks a feature that a commit log needs.

    Correct the address, credentials or rights. Use a store with conditional puts.
    """


class OutOfThreadsError(TxmqError, RuntimeError):
    """The system allows no more threads.

    Raise the limit of the user or the container: ``ulimit -u``, ``--pids-limit`` of Docker.
    """


class ClockError(TxmqError):
    """This machine's clock is too far from the store's.

    Set this machine's clock (NTP), and run the program again. A check settles what was prepared before.
    """


class UnreachableStoreError(StorageError, OSError):
    """The store failed during a read or write of an open commit log. It may answer next time.

    Try again. When permission is denied, give the program the right to read. When a disk is full, make room.
    """


class CommitError(TxmqError):
    """A commit to a Delta table did not succeed within its tries.

    Run it again. When it loses races, use fewer writers, or let threads share one producer.
    """


class LostCommitError(CommitError):
    """A commit was acknowledged, but the table does not have its rows.

    Restart the process: it slept for longer than entries of the Delta log stay.
    """


class StagedFilesTooOldError(TxmqError):
    """Staged files are so old that vacuum may soon delete them.

    Run the batch again.
    """


class LostStagedFileError(TxmqError):
    """A staged file was deleted before its commit, so nothing was committed.

    Run the batch again. Keep other programs from vacuuming the table ``half``.
    """


# ---------------------------------------------------------------- transactions
class HalfBatchNotFoundError(TxmqError, LookupError):
    """No half batch has this id.

    Correct the id: ``txmq pending`` and ``log.pending()`` list the open ones.
    """


class HalfBatchLeftError(HalfBatchNotFoundError):
    """A half batch was settled and has left the table ``half``. Its outcome is kept for a time, its messages are not.

    Read committed messages from the table ``messages``. Send rolled back messages as new ones, under a new key.
    """

    def __init__(self, message: str, archived: Any = None) -> None:
        super().__init__(message)
        self.archived = archived
        """Its :class:`~rmq_spark._core.log.archive.Archived`; None when that is no longer kept."""


class PendingLimitError(TxmqError):
    """A producer group has reached its own limit of pending half batches or bytes.

    Run a checker for the group. ``txmq pending`` lists the half batches, and ``txmq resolve`` settles one by hand.
    """


class AlreadyPreparedError(TxmqError):
    """A half batch with this appId and batch id was prepared before.

    Do nothing: the sink treats the batch as a replay. Only programs that prepare half batches themselves see this
    error.
    """


class CheckpointMismatchError(TxmqError):
    """A batch id comes again with another query or other input, so the batch is no replay.

    Go back to the query's own newest checkpoint, or send under another ``appId``. Nothing was sent.
    """


class StaleAttemptError(TxmqError):
    """A verdict names an attempt that is not the current one.

    Do nothing: the newer attempt decides.
    """


class VerdictConflictError(TxmqError):
    """A verdict contradicts an earlier one, which is final.

    Find out which verdict is true, and settle the half batch with ``log.resolve``. ``txmq conflicts`` lists it.
    """

    def __init__(self, message: str, verdict: str | None = None, remedy: Remedy | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.verdict = verdict
        """The verdict that came too late."""


class LocalTransactionError(TxmqError):
    """The local transaction failed. Its half batch stays pending, and a check or a replay settles it.

    Correct the problem in the message, and start again. Do not send the messages anew before a check has settled them.
    """


class UnresolvedTransactionError(TxmqError):
    """A half batch is prepared and could not be settled: its verdict could not be written, or its listener answered
    UNKNOWN for as long as replayCheckTimeout.

    Correct the problem in the message. Then a check settles the half batch. You may also send it again under its
    idempotency key, start the query again, or call ``log.resolve``. Do not send its messages anew: they could come
    twice.
    """


class FenceError(TxmqError):
    """A fence (a table in the user's database, or the Delta table's txn) is missing, or belongs to another store.

    Point the listener to the store with which the batch was prepared. Call ``create_fence()`` once for a new
    database.
    """


class FencedError(TxmqError):
    """A check rolled this attempt back before its local transaction could commit.

    Do nothing: the next attempt runs the local transaction.
    """


# ---------------------------------------------------------------- the relay to another broker
class RelayError(TxmqError):
    """A relay cannot go on: a broker did not answer, or the outcome of a commit is unknown.

    Start the relay again. It continues at the positions in Kafka.
    """


class RelayRefusedError(RelayError):
    """A relay must not go on until a person has decided: the log, its messages or the other broker's topics are wrong.

    Follow the message, and only then start the relay again.
    """


class PoisonMessageError(RelayRefusedError):
    """The other broker refuses a message: it is too large, or its time is too far away.

    Let the other broker's topic accept the message, or go on with ``on_poison="park"``.
    """


class RelayFencedError(RelayError):
    """Another process runs this relay now.

    Do not restart this process. Find out why two were started.
    """
