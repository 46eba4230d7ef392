"""All errors of rmq_spark. They have one base class, and each says what was found and what to do.

The docstring of each class says what happened, and then what to do about it. The reference of the documentation is made
from these.
"""

from __future__ import annotations

import re
from typing import Any

from rmq_spark._core.vocabulary.redaction import redacted, shortened


class TxmqError(Exception):
    """The base of every error that rmq_spark raises on purpose. Its text never has a secret in it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shortened(redacted(a)) if isinstance(a, str) else a for a in args))


def find_cause(problem: BaseException | str | None) -> TxmqError | None:
    """Find the error of rmq_spark in what Spark raised: its text has hundreds of lines, and this one says what to do.

    Parameters
    ----------
    problem : exception, str or None
        What an action or ``awaitTermination()`` raised, or ``query.exception()``, or its text.

    Returns
    -------
    TxmqError or None
        The error, of its own class; None when rmq_spark did not raise one.

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
    for name, said in reversed(_RAISED.findall(text)):
        kind = globals().get(name)
        if isinstance(kind, type) and issubclass(kind, TxmqError):
            return kind(said.strip())
    for of_spark, advice in _SPARK_S.items():
        if of_spark in text and "txmq" in text:
            return OptionError(advice)
    return None


TEXT_SEARCHED_MAX = 1_000_000
"""Characters; the end of a longer text is looked at."""
_RAISED = re.compile(
    r"^[ \t|]*rmq_spark\.errors\.(\w+): (.+?)(?=\n\s*\n|\n\s*at |\nTraceback| SQLSTATE: |\Z)", re.MULTILINE | re.DOTALL
)
"""The end of a traceback. A database's words may have several lines."""
_SPARK_S = {
    "DATA_SOURCE_NOT_FOUND": "Spark's Python workers have no rmq_spark: txmq.register(spark) says what to set",
    "UNSUPPORTED_DATA_SOURCE_SAVE_MODE": "a batch write to format('txmq') needs .mode('append'): it has no other mode",
}
"""Errors of Spark before it asks this package anything."""


# ---------------------------------------------------------------- what a user asked for
class OptionError(TxmqError, ValueError):
    """An option is missing, unknown, contradicts another one, or has a value that cannot be used.

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

    Correct the name, or make the topic with ``log.create_topic`` or ``txmq topic create``.
    """


class GroupNotFoundError(TxmqError, LookupError):
    """A consumer group has no progress in the commit log.

    Correct the name. A group is there once a consumer of it has run.
    """


class GroupInUseError(TxmqError):
    """Another query reads the same queues for the same consumer group.

    Stop the other one, or use a group of its own. ``txmq group hand-over`` frees a group that nobody reads for any
    more.
    """


class ConsumeError(TxmqError):
    """A stream cannot be consumed in this way.

    Read the stream as the message says, such as with the option ``ordered``. Make a new consumer after a shutdown
    or a fork.
    """


class InboxConflictError(TxmqError):
    """Two processes write the results of one queue for one consumer group, or its positions belong to another log.

    Stop the second process of the group. For a log that was made anew use another group.
    """


class TopicExistsError(TxmqError):
    """A topic is in the commit log already.

    Use the topic that is there (``exist_ok=True``), choose another name, or change its retention with
    ``log.set_retention``.
    """


class ListenerError(TxmqError):
    """A listener is missing, cannot be loaded, is not a TransactionListener, or breaks a rule for its work.

    Correct the listener or its path as the message says. What was prepared stays pending until a check settles it.
    """


class TransactionEndedError(ListenerError):
    """``work`` ended the database transaction that it was given. A part of what it wrote may be committed.

    Look what is in the database, undo or finish it, and settle the half batch with ``log.resolve``. No check
    answers for it.
    """


class VerdictError(TxmqError, ValueError):
    """A listener did not return a verdict for each transaction that it was asked about.

    Return one verdict for each row of ``batch.transactions``, or one for all.
    """


class OffsetError(TxmqError, ValueError):
    """An offset (JSON option or checkpoint) is malformed or names an unknown topic or queue.

    Correct the JSON, or start with a new checkpoint.
    """


class OffsetOutOfRangeError(OffsetError):
    """Somebody wants messages at offsets that the commit log does not have.

    Start at ``earliest``, or pass ``failOnDataLoss=false`` to skip what has expired. Keep messages longer than a
    consumer may be away.
    """


# ---------------------------------------------------------------- what the commit log is
class NotACommitLogError(TxmqError):
    """The path has no commit log, or only a part of one.

    Correct the path, make a log with ``txmq create``, or open it again when it was made anew.
    """


class CommitLogExistsError(TxmqError):
    """The path has a commit log already.

    Open it, or pass ``exist_ok=True``.
    """


class LogFormatError(TxmqError):
    """The commit log has another format than this version of rmq_spark reads and writes, or its tables were changed by
    hand.

    Use the version that made the log, or a new log. Restore tables that were changed from a copy.
    """


class CorruptLogError(TxmqError):
    """The commit log is damaged: a file or a row differs from what was written, contradicts the rest, or points outside
    the log.

    Stop writers, and restore the log from a copy. The message names the file.
    """


class ForeignChangeError(CorruptLogError):
    """Another program committed to a table of the commit log: it changed rows, files, columns, properties or table
    features.

    Keep that program away, and undo what it did as the message says. Nothing is committed to the table until then.
    """


class LostFileError(CorruptLogError, FileNotFoundError):
    """A file that a table of the commit log names is gone.

    Restore the file, or the log, from a copy. Keep other programs from vacuuming the log's tables.
    """


class StrippedError(LostFileError):
    """A half file has no payload any more of rows that were drained. Readers look into the table ``messages``.

    Read the messages from the table ``messages``. Readers of rmq_spark do that by themselves.
    """


class UnreadableFileError(CorruptLogError, OSError):
    """A file of the commit log cannot be read: its store fails, permission is missing, or it is damaged.

    Give the program the right to read it, or try again. Restore a damaged file from a copy.
    """


class StorageError(TxmqError):
    """The store cannot be reached, or cannot do what a commit log needs.

    Correct the address, credentials or rights. Use a store with conditional puts.
    """


class OutOfThreadsError(TxmqError, RuntimeError):
    """There is no room for one more thread.

    Raise the number that the user or the container may have: ``ulimit -u``, ``--pids-limit`` of Docker.
    """


class ClockError(TxmqError):
    """This machine's clock is too far from the store's.

    Set this machine's clock (NTP), and run it again. What was prepared before is settled by a check.
    """


class UnreachableStoreError(StorageError, OSError):
    """The store failed while an open commit log was read or written. It may answer next time.

    Try again. When permission is denied, give the program the right to read. When a disk is full, make room.
    """


class CommitError(TxmqError):
    """A commit to a Delta table did not succeed within its tries.

    Run it again. When races are lost, use fewer writers, or let threads share one producer.
    """


class LostCommitError(CommitError):
    """A commit was acknowledged, but the table does not have its rows.

    Start the process again: it slept for longer than entries of the Delta log stay.
    """


class StagedFilesTooOldError(TxmqError):
    """Staged files are so old that vacuum may soon remove them.

    Run the batch again.
    """


class LostStagedFileError(TxmqError):
    """A staged file was removed before its commit, so the commit was not made.

    Run the batch again. Keep other programs from vacuuming the table ``half``.
    """


# ---------------------------------------------------------------- what became of a transaction
class HalfBatchNotFoundError(TxmqError, LookupError):
    """No half batch has this id.

    Correct the id: ``txmq pending`` and ``log.pending()`` list the open ones.
    """


class HalfBatchLeftError(HalfBatchNotFoundError):
    """A half batch was settled and has left the table ``half``: its outcome is kept for a time, not its messages.

    Read committed messages from the table ``messages``. Send what was rolled back as new messages, under a new key.
    """

    def __init__(self, message: str, archived: Any = None) -> None:
        super().__init__(message)
        self.archived = archived
        """The :class:`~rmq_spark._core.log.archive.Archived` that is kept of it; None when that is gone, too."""


class PendingLimitError(TxmqError):
    """A producer group has so much pending that its own limit refuses more: does a checker run?

    Run a checker for the group. ``txmq pending`` lists what waits, and ``txmq resolve`` settles it by hand.
    """


class AlreadyPreparedError(TxmqError):
    """A half batch with this appId and batch id was prepared before.

    Do nothing: the sink takes it for a replay. It reaches a program that prepares half batches itself.
    """


class CheckpointMismatchError(TxmqError):
    """A batch id comes again with another query or other input, so it is no replay.

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

    def __init__(self, message: str, verdict: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        """The verdict that came too late."""


class LocalTransactionError(TxmqError):
    """The local transaction failed. Its half batch stays pending, and a check or a replay settles it.

    Correct what the message names, and start again. Do not send the messages anew before a check has settled them.
    """


class UnresolvedTransactionError(TxmqError):
    """A half batch is prepared and could not be settled: its verdict could not be written, or its listener answered
    UNKNOWN for as long as replayCheckTimeout.

    Mend what the message names. Then a check settles the half batch. You may also send it again under its idempotency
    key, start the query again, or call ``log.resolve``. Do not send its messages anew: they could come twice.
    """


class FenceError(TxmqError):
    """A fence (a table in the user's database, or the Delta table's txn) is missing, or a listener is of another store.

    Point the listener to the store that the batch was prepared with. Call ``create_fence()`` once for a new
    database.
    """


class FencedError(TxmqError):
    """This attempt was rolled back by a check before its local transaction could commit.

    Do nothing: the next attempt runs the local transaction.
    """


# ---------------------------------------------------------------- what was handed over to another broker
class RelayError(TxmqError):
    """A relay cannot go on. A broker did not answer, or nobody knows what became of a commit.

    Start the relay again. It goes on where Kafka's positions say.
    """


class RelayRefusedError(RelayError):
    """A relay must not go on until a person has decided: the log, its messages or the topics of the other broker are
    not what they must be.

    Do what the message says, and only then start the relay again.
    """


class PoisonMessageError(RelayRefusedError):
    """The other broker refuses a message: it is too large, or its time is too far away.

    Let the topic of the other broker take the message, or go on with ``on_poison="park"``.
    """


class RelayFencedError(RelayError):
    """Another process runs this relay now.

    Leave this process stopped. Find out why two were started.
    """
