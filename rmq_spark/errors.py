"""All errors of rmq_spark. They have one base class, and each says what was found and what to do."""

from __future__ import annotations

import re
from typing import Any

from rmq_spark.redaction import redacted, shortened


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
    """An option is missing, unknown, contradicts another one, or has a value that cannot be used."""


class ConfigError(OptionError):
    """A configuration file (conf/txmq.toml) cannot be used."""


class MessageError(TxmqError, ValueError):
    """A message or one of its columns breaks a rule: name, size, type or reserved property."""


class TopicNotFoundError(TxmqError, LookupError):
    """A topic is not in the commit log."""


class GroupNotFoundError(TxmqError, LookupError):
    """A consumer group has no progress in the commit log."""


class GroupInUseError(TxmqError):
    """Another query reads the same queues for the same consumer group."""


class ConsumeError(TxmqError):
    """A stream cannot be consumed in this way."""


class InboxConflictError(TxmqError):
    """Two processes write the results of one queue for one consumer group, or its positions belong to another log."""


class TopicExistsError(TxmqError):
    """A topic is in the commit log already."""


class ListenerError(TxmqError):
    """A listener is missing, cannot be loaded, is not a TransactionListener, or breaks a rule for its work."""


class TransactionEndedError(ListenerError):
    """``work`` ended the database transaction that it was given. A part of what it wrote may be committed."""


class VerdictError(TxmqError, ValueError):
    """A listener did not return a verdict for each transaction that it was asked about."""


class OffsetError(TxmqError, ValueError):
    """An offset (JSON option or checkpoint) is malformed or names an unknown topic or queue."""


class OffsetOutOfRangeError(OffsetError):
    """Somebody wants messages at offsets that the commit log does not have."""


# ---------------------------------------------------------------- what the commit log is
class NotACommitLogError(TxmqError):
    """The path has no commit log, or only a part of one."""


class CommitLogExistsError(TxmqError):
    """The path has a commit log already."""


class LogFormatError(TxmqError):
    """The commit log was made by a newer version of rmq_spark, or by an older one (run ``txmq upgrade``); or its tables
    were changed by hand."""


class CorruptLogError(TxmqError):
    """The commit log is damaged: a file or a row differs from what was written, contradicts the rest, or points outside
    the log."""


class LostFileError(CorruptLogError, FileNotFoundError):
    """A file that a table of the commit log names is gone."""


class StrippedError(LostFileError):
    """A half file has no payload any more of rows that were drained. Readers look into the table ``messages``."""


class UnreadableFileError(CorruptLogError, OSError):
    """A file of the commit log cannot be read: its store fails, permission is missing, or it is damaged."""


class StorageError(TxmqError):
    """The store cannot be reached, or cannot do what a commit log needs."""


class ClockError(TxmqError):
    """This machine's clock is too far from the store's."""


class UnreachableStoreError(StorageError, OSError):
    """The store failed while an open commit log was read. It may answer next time."""


class CommitError(TxmqError):
    """A commit to a Delta table did not succeed within its tries."""


class LostCommitError(CommitError):
    """A commit was acknowledged, but the table does not have its rows."""


class StagedFilesTooOldError(TxmqError):
    """Staged files are so old that vacuum may soon remove them."""


class LostStagedFileError(TxmqError):
    """A staged file was removed before its commit, so the commit was not made."""


# ---------------------------------------------------------------- what became of a transaction
class HalfBatchNotFoundError(TxmqError, LookupError):
    """No half batch has this id."""


class HalfBatchLeftError(HalfBatchNotFoundError):
    """A half batch was settled and has left the table ``half``: its outcome is kept for a time, not its messages."""

    def __init__(self, message: str, archived: Any = None) -> None:
        super().__init__(message)
        self.archived = archived
        """The :class:`~rmq_spark.commitlog.archived.Archived` that is kept of it; None when that is gone, too."""


class PendingLimitError(TxmqError):
    """A producer group has so much pending that its own limit refuses more: does a checker run?"""


class AlreadyPreparedError(TxmqError):
    """A half batch with this appId and batch id was prepared before."""


class CheckpointMismatchError(TxmqError):
    """A batch id comes again with another query or other input, so it is no replay."""


class StaleAttemptError(TxmqError):
    """A verdict names an attempt that is not the current one."""


class VerdictConflictError(TxmqError):
    """A verdict contradicts an earlier one, which is final."""

    def __init__(self, message: str, verdict: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        """The verdict that came too late."""


class LocalTransactionError(TxmqError):
    """The local transaction failed. Its half batch stays pending, and a check or a replay settles it."""


class UnresolvedTransactionError(TxmqError):
    """A replayed half batch could not be settled within replayCheckTimeout."""


class FenceError(TxmqError):
    """A fence (the table in the user's database, or the Delta table's txn) is missing or is another one."""


class FencedError(TxmqError):
    """This attempt was rolled back by a check before its local transaction could commit."""


# ---------------------------------------------------------------- what was handed over to another broker
class RelayError(TxmqError):
    """A relay cannot go on. Start it again: a broker did not answer, or nobody knows what became of a commit."""


class RelayRefusedError(RelayError):
    """A relay must not go on until a person has decided: the log, its messages or the topics of the other broker are
    not what they must be."""


class PoisonMessageError(RelayRefusedError):
    """The other broker refuses a message: it is too large, or its time is too far away."""


class RelayFencedError(RelayError):
    """Another process runs this relay now. Do not start this one again."""
