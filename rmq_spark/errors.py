"""Every error of rmq_spark: one base class, one sentence each, saying what was found and what to do."""

from __future__ import annotations

from rmq_spark.redaction import redacted, shortened


class TxmqError(Exception):
    """The base of every error that rmq_spark raises on purpose. No secret is ever in its text."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shortened(redacted(a)) if isinstance(a, str) else a for a in args))


# ---------------------------------------------------------------- what a user asked for
class OptionError(TxmqError, ValueError):
    """An option is missing, unknown, contradictory or has a value that cannot be used."""


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
    """Two processes write the results of one queue for one consumer group."""


class TopicExistsError(TxmqError):
    """A topic is in the commit log already."""


class ListenerError(TxmqError):
    """A listener is missing, cannot be loaded, or is not a TransactionListener."""


class TransactionEndedError(ListenerError):
    """Work ended the database transaction that it was given; a part of what it wrote may be committed."""


class VerdictError(TxmqError, ValueError):
    """A listener returned something that is not a verdict for each transaction it was asked about."""


class OffsetError(TxmqError, ValueError):
    """An offset (JSON option or checkpoint) is malformed or names an unknown topic or queue."""


class OffsetOutOfRangeError(OffsetError):
    """Messages of a range are asked for that the commit log does not hold."""


# ---------------------------------------------------------------- what the commit log is
class NotACommitLogError(TxmqError):
    """The path holds no commit log, or not the whole of one."""


class CommitLogExistsError(TxmqError):
    """The path holds a commit log already."""


class LogFormatError(TxmqError):
    """The commit log was made by a newer version of rmq_spark, or its tables were changed by hand."""


class CorruptLogError(TxmqError):
    """A row of the commit log contradicts the rest of it, or points outside the log."""


class LostFileError(CorruptLogError, FileNotFoundError):
    """A file that a table of the commit log names is not there."""


class UnreadableFileError(CorruptLogError, OSError):
    """A file of the commit log cannot be read: it is damaged, or its storage fails."""


class StorageError(TxmqError):
    """The store cannot be reached, or cannot do what a commit log needs."""


class ClockError(TxmqError):
    """This machine's clock is too far from the store's."""


class UnreachableStoreError(StorageError, OSError):
    """The store failed when an open commit log was read: it may answer the next time."""


class CommitError(TxmqError):
    """A commit to a Delta table did not succeed within its tries."""


class LostCommitError(CommitError):
    """A commit was acknowledged, but its rows are not in the state of the table."""


class StagedFilesTooOldError(TxmqError):
    """Staged files are so old that vacuum may be about to remove them."""


class LostStagedFileError(TxmqError):
    """A staged file was removed before its commit, which was not made."""


# ---------------------------------------------------------------- what became of a transaction
class HalfBatchNotFoundError(TxmqError, LookupError):
    """No half batch has this id."""


class AlreadyPreparedError(TxmqError):
    """The half batch of this application and batch id has been prepared before."""


class CheckpointMismatchError(TxmqError):
    """A batch id comes back with another query or other input: not a replay."""


class StaleAttemptError(TxmqError):
    """A decision names an attempt that is not the current one."""


class VerdictConflictError(TxmqError):
    """A verdict is the opposite of one that was final before."""

    def __init__(self, message: str, verdict: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        """The verdict that came too late."""


class LocalTransactionError(TxmqError):
    """The local transaction failed; its half batch is pending, and a check or a replay settles it."""


class UnresolvedTransactionError(TxmqError):
    """A replayed half batch could not be settled within replayCheckTimeout."""


class FenceError(TxmqError):
    """A fence (the table in the user's database, or the Delta table's txn) is missing or is another one."""


class FencedError(TxmqError):
    """This attempt was rolled back by a check before its local transaction could commit."""
