"""The names of the failpoints in the package's code, and a hook for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rmq_spark._core.runtime.failpoints import set_hook

POINTS: Mapping[str, str] = {
    # a send
    "send begins": "a half batch enters the protocol; header",
    "half file written": "an executor's worker has written a half file, which no commit names yet; path, size_bytes",
    "staged": "all half files are written, and are to be prepared; header",
    "prepared": "a local transaction is to be executed; header, attempt",
    "executed": "a local transaction was executed, and no op marker says so; header, attempt",
    "decided": "the op markers of an executed local transaction are written; header, attempt",
    "replay asks": "a run that was interrupted asks what became of its local transaction",
    "sent": "a half batch leaves the protocol, with its verdicts; header",
    # a log that is made, and its tables
    "log made": "a commit log is to be made where none is",
    "table made": "a table of a new commit log is to be made; table",
    # a table of the log, of any kind
    "table seen": "a look at a table has found its newest version; table",
    "files read": "files of a table are to be read; table, paths",
    "file begins": "a file is to be written; path",
    "file written": "a file is written, which no commit names yet; table",
    "commit begins": "a commit is to be made; table, change",
    "commit done": "a commit has landed; table, change",
    # commits that many threads share
    "commit awaited": "a request waits for the next shared commit; queue",
    "shared commit begins": "the requests of many threads are to be committed; queue, about",
    # op
    "lease written": "checkers are kept away",
    "reopened": "rows are pending again",
    "check counted": "answered checks are counted",
    "quarantined": "rows are hidden",
    "mark moved": "the low-water mark was looked at",
    "open batches listed": "a round of checks knows what is open",
    # upkeep, and copies of a log
    "upkeep begins": "a round of upkeep is to be made",
    "copy changes": "a file of a copy is to be written or deleted; name",
    # the fence of a database
    "fence row written": "the fence row of an attempt is inserted, and not committed",
    "tombstone written": "a tombstone is inserted, and not committed",
    "tombstones commit": "the tombstones of a check are committed",
    "asked": "the fence is asked about a half batch",
    "answered": "the fence has answered",
    # the figures of a log
    "look begins": "what a log's metrics show is to be read",
    # a relay to Kafka
    "relay step": "a transaction of Kafka is opened, begun, sent, delivered or committed; step",
    # consumers
    "fetch begins": "a consumer is to fetch from where its queues stand; starts",
    "progress begins": "the progress of an orderly group is to be written",
    "progress written": "the progress of an orderly group is written",
}
"""By name, where the failpoint stands, and behind a semicolon the values that the hook gets."""


@contextmanager
def hooked(hook: Callable[..., None]) -> Iterator[None]:
    """Call a hook at each failpoint, in all threads of this process: ``hook(point, **known)``."""
    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)
