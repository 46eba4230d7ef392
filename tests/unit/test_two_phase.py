"""The sink's protocol, state by state, on both kinds of commit log: no Spark."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE, UNKNOWN, CommitLog, HalfBatch, TransactionListener
from rmq_spark.errors import (
    CheckpointMismatchError,
    FencedError,
    FenceError,
    LocalTransactionError,
    LostFileError,
    OptionError,
    StaleAttemptError,
    StorageError,
    UnresolvedTransactionError,
    VerdictConflictError,
)
from tests.support.checks import states
from tests.support.clocks import set_clock
from tests.support.half_batches import another, commit, decide_one, pending, prepare_one, quarantine, roll_back
from tests.support.inside import (
    BATCH,
    KEY,
    MESSAGE,
    Change,
    CommitOncePrepared,
    HalfHeader,
    HalfRecord,
    Lineage,
    Naming,
    RowState,
    TwoPhase,
    Who,
    input_hash_of,
)
from tests.support.inside import two_phase as module
from tests.support.limits import limited, set_limits
from tests.support.listeners import Scripted
from tests.support.meanwhile import at, dies_at, seen_at
from tests.support.sends import raising
from tests.support.sink_batches import KEYS, QUERY, bodies, check, header, prepared, send, stage, visible

pytestmark = pytest.mark.log("memory", "delta")
MEMORY = pytest.mark.log("memory")
"""Where headers and verdicts are judged. That Delta gives them back as they were is shown in ``test_commit_log``."""

COMMIT, ROLLBACK = COMMIT_MESSAGE, ROLLBACK_MESSAGE
PERS = (BATCH, MESSAGE, KEY)
DEADLINE_S = 20.0


# ---------------------------------------------------------------- logs and batches
def send_nothing(log: CommitLog, head: HalfHeader, checkpoint: Checkpoint) -> Any:
    """A micro-batch of which a filter keeps nothing."""
    return TwoPhase(log.engine, Scripted()).send(head, lambda: (), lineage=Lineage(checkpoint))


@dataclass
class Checkpoint:
    """The folder of a checkpoint, and what its batches are called."""

    name: str = "checkpoint"
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def read(self, file: str) -> bytes | None:
        self.asked.append(file)
        return self.files.get(file)

    def write(self, file: str, content: bytes) -> None:
        self.files[file] = content

    def copy(self) -> Checkpoint:
        return Checkpoint("its copy", dict(self.files))

    def header(self, batch_id: int, planned: str) -> HalfHeader:
        """That of a batch which Spark plans."""
        self.files[f"offsets/{batch_id}"] = planned.encode()
        return header(batch_id=batch_id, input_hash=input_hash_of(planned.encode()))


def ids(batch: HalfBatch) -> list[str]:
    return batch.transactions["transaction_id"].to_pylist()


def attempts(batches: Sequence[HalfBatch]) -> list[int]:
    return [batch.attempt for batch in batches]


# ---------------------------------------------------------------- listeners
class Database:
    """The user's database: orders, and the fence row of each transaction. It outlives every driver."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.orders: Counter[str] = Counter()
        self.fence: dict[str, str] = {}


class Fenced(TransactionListener):
    """A listener with a fence on :class:`Database`, as SqlTransactionListener is one. Of which transactions of a half
    batch a check knows anything, by their position, ``checks`` says."""

    def __init__(
        self, database: Database, checks: Callable[[HalfBatch, int], bool] = lambda batch, position: True
    ) -> None:
        self.database, self.checks = database, checks

    def execute_local_transaction(self, batch: HalfBatch) -> Any:
        bodies = [body.decode() for body in batch.messages(["body"])["body"].to_pylist()]
        with self.database.lock:
            if any(self.database.fence.get(i) == "tombstone" for i in ids(batch)):
                raise FencedError("a check was faster")
            assert not any(i in self.database.fence for i in ids(batch)), "a transaction was executed twice"
            self.database.orders.update(bodies)
            self.database.fence.update(dict.fromkeys(ids(batch), "executed"))
        return COMMIT

    def check_local_transaction(self, batch: HalfBatch) -> Any:
        with self.database.lock:
            return [self._look(i) if self.checks(batch, n) else UNKNOWN for n, i in enumerate(ids(batch))]

    def _look(self, transaction_id: str) -> Any:
        found = self.database.fence.setdefault(transaction_id, "tombstone")
        return COMMIT if found == "executed" else ROLLBACK


# ---------------------------------------------------------------- verdicts
@pytest.mark.parametrize("per", PERS)
def test_committed_messages_are_visible_in_send_order(log: CommitLog, per: str) -> None:
    listener = Scripted()
    outcome = send(log, listener, header(per))
    assert visible(log) == bodies()
    assert outcome.messages == {RowState.COMMITTED: len(KEYS)}
    assert not outcome.replayed
    assert sum(p.count for p in outcome.placed) == len(KEYS)
    assert len(listener.executed) == 1
    assert not listener.checked


@pytest.mark.parametrize("per", PERS)
def test_rolled_back_messages_never_appear_and_take_no_offset(log: CommitLog, per: str) -> None:
    outcome = send(log, Scripted(ROLLBACK), header(per))
    assert outcome.messages == {RowState.ROLLED_BACK: len(KEYS)}
    assert visible(log) == []
    send(log, Scripted(), header(per, 1))
    assert visible(log) == bodies(batch_id=1)


@pytest.mark.parametrize(("per", "nothing"), [(BATCH, None), (MESSAGE, UNKNOWN), (KEY, "UNKNOW")])
def test_an_unknown_verdict_leaves_the_messages_pending_for_the_check(log: CommitLog, per: str, nothing: Any) -> None:
    listener = Scripted(nothing, COMMIT)
    outcome = send(log, listener, header(per))
    assert outcome.messages == {RowState.PENDING: len(KEYS)}
    assert not listener.checked
    assert visible(log) == []
    check(log, listener)
    assert visible(log) == bodies()


def test_each_message_has_its_own_verdict(log: CommitLog) -> None:
    def every_other(batch: HalfBatch) -> list[Any]:
        texts = [b.decode() for b in batch.messages(["body"])["body"].to_pylist()]
        return [COMMIT if "-a-" in t else None if "-b-" in t else ROLLBACK for t in texts]

    outcome = send(log, Scripted(every_other), header(MESSAGE))
    assert visible(log) == bodies("a")
    assert outcome.messages == {RowState.COMMITTED: 2, RowState.ROLLED_BACK: 2, RowState.PENDING: 2}


def test_a_batch_without_messages_leaves_nothing_in_the_log(log: CommitLog) -> None:
    listener = Scripted()
    outcome = TwoPhase(log.engine, listener).send(header(), list)
    assert outcome.record is None
    assert log.engine.last_batch_id("app") is None
    assert not listener.executed


def test_without_a_listener_a_batch_commits_once_it_is_prepared(log: CommitLog) -> None:
    record = prepared(log)
    send(log, CommitOncePrepared(), record.header)
    send(log, CommitOncePrepared(), header(batch_id=1))
    assert visible(log) == sorted(bodies() + bodies(batch_id=1))


# ---------------------------------------------------------------- a listener that fails
RAISES = ValueError("no stock")
WRONG = [
    *((BATCH, [COMMIT] * number, "verdicts? for") for number in (0, 2)),
    *((MESSAGE, [COMMIT] * number, "verdicts? for") for number in (0, 1, 7)),
    *((KEY, [COMMIT] * number, "verdicts? for") for number in (0, 1, 7)),
    *((BATCH, answer, "verdict|expected") for answer in (42, "YES", ["YES"], pa.array(["YES"]), {"a": COMMIT})),
    (BATCH, RAISES, r"app:0.*attempt 1.*ValueError: no stock.*check or a restart"),
]


@MEMORY
@pytest.mark.parametrize(("per", "answer", "words"), WRONG)
def test_a_listener_that_gives_no_verdicts_fails_and_leaves_the_batch_pending(
    log: CommitLog, per: str, answer: Any, words: str
) -> None:
    with pytest.raises(LocalTransactionError, match=words):
        send(log, Scripted([answer]), header(per))
    assert log.pending()["messages"].to_pylist() == [len(KEYS)]


def test_a_listener_that_raises_counts_as_unknown_when_asked_for(log: CommitLog) -> None:
    outcome = send(log, Scripted(RAISES), on_listener_error="unknown")
    assert outcome.error is RAISES
    assert outcome.messages == {RowState.PENDING: len(KEYS)}


def test_another_way_to_treat_errors_is_refused(log: CommitLog) -> None:
    with pytest.raises(OptionError, match="fail, unknown"):
        TwoPhase(log.engine, Scripted(), on_listener_error="ignore")


# ---------------------------------------------------------------- replay of a prepared batch
def roll_back_by_a_check(log: CommitLog, record: HalfRecord) -> None:
    """And it is settled: its markers are no longer kept in memory."""
    roll_back(log, record, who=Who.CHECK)
    another(log).engine.ledger.mark()


REPLAYS: dict[str, tuple[Callable[[CommitLog, HalfRecord], object], Any, list[int], list[int]]] = {
    # How a prepared batch stands, and what a check says: which attempts are checked, and which executed.
    "it is pending, and done": (lambda log, record: None, COMMIT, [1], []),
    "it is pending, and never happened": (lambda log, record: None, ROLLBACK, [1], [2]),
    "it is committed": (commit, COMMIT, [], []),
    "it is rolled back for good": (roll_back, COMMIT, [], []),
    "a check has rolled it back": (roll_back_by_a_check, COMMIT, [], [2]),
    "it is quarantined": (quarantine, COMMIT, [1], []),
    "it is discarded": (lambda log, record: roll_back(log, record, who=Who.DISCARD), COMMIT, [1], []),
}


@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("how", REPLAYS)
def test_a_replay_checks_what_is_unknown_and_runs_once_what_never_happened(log: CommitLog, per: str, how: str) -> None:
    stand, answer, checked, executed = REPLAYS[how]
    record = prepared(log, per)
    stand(log, record)
    listener = Scripted(check=answer)
    outcome = send(another(log), listener, record.header)
    assert outcome.replayed
    assert attempts(listener.checked) == checked
    assert attempts(listener.executed) == executed
    assert outcome.attempt == max([1, *executed])
    if stand is roll_back:
        assert outcome.messages == {RowState.ROLLED_BACK: len(KEYS)}
        assert visible(log) == []
    else:
        assert outcome.messages == {RowState.COMMITTED: len(KEYS)}
        assert visible(log) == bodies()
    if not checked and not executed:
        assert outcome.placed == []
    if checked and executed:
        assert not set(ids(listener.checked[0])) & set(ids(listener.executed[0]))


def test_a_replay_checks_only_what_is_undecided(log: CommitLog) -> None:
    first = send(log, Scripted(lambda b: b.verdicts(rollback=["a"], unknown=["b", "c"])), header(KEY))
    assert first.messages == {RowState.COMMITTED: 1, RowState.ROLLED_BACK: 2, RowState.PENDING: 3}
    listener = Scripted(check=lambda b: b.verdicts(rollback=["b"]))
    outcome = send(another(log), listener, header(KEY))
    assert [ids(batch) for batch in listener.checked] == [["app:0:1:b", "app:0:1:c"]]
    assert [ids(batch) for batch in listener.executed] == [["app:0:2:b"]]
    assert visible(log) == bodies("b", "c", "d")
    assert outcome.messages == {RowState.COMMITTED: 4, RowState.ROLLED_BACK: 2}


def test_a_replay_of_a_batch_in_conflict_is_refused_until_a_person_resolves_it(log: CommitLog) -> None:
    record = prepared(log)
    rows = pending(log, record)
    roll_back(log, record, who=Who.CHECK)
    with pytest.raises(VerdictConflictError):
        decide_one(log.engine, record, 1, commit=rows, who=Who.EXECUTE)
    listener = Scripted()
    for _ in range(2):
        with pytest.raises(VerdictConflictError, match=r"log\.resolve"):
            send(another(log), listener, record.header)
    assert listener.executed == listener.checked == []
    another(log).resolve(record.half_id, COMMIT, reason="the order is in the database")
    send(another(log), listener, record.header)
    assert not listener.executed
    assert visible(log) == bodies()


def test_a_replay_asks_again_with_growing_pauses_and_then_gives_up_without_losing_anything(
    log: CommitLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once that it waits: it used to stand still for a minute without a line."""
    pauses = set_clock(monkeypatch).pauses
    record = prepared(log)
    listener = Scripted(check=UNKNOWN)
    sentence = r"app:0.*earlier run.*60 s.*Nothing is lost.*replayCheckTimeout"
    with pytest.raises(UnresolvedTransactionError, match=sentence):
        send(another(log), listener, record.header, timeout_s=60.0)
    assert pauses[0] < pauses[1] < pauses[2]
    assert max(pauses) == module.REPLAY_BACKOFF_S_MAX
    assert 60 <= sum(pauses) < 70
    assert len(listener.checked) == len(pauses) + 1
    assert not listener.executed
    assert states(another(log), record) == {RowState.PENDING: len(KEYS)}
    (told,) = [r.getMessage() for r in caplog.records if r.name == module.__name__]
    assert "half batch 'app:0' was prepared" in told
    assert "not know yet what became of 6 messages. Asking again for up to 60 s (replayCheckTimeout)" in told


@pytest.mark.parametrize(("query_id", "restarted"), [(QUERY, True), (None, False)])
def test_only_a_query_knows_that_its_earlier_run_is_over(log: CommitLog, query_id: str | None, restarted: bool) -> None:
    """A send may be repeated while the first one still runs."""
    head = header(query_id=query_id, naming=Naming.COUNTED if query_id else Naming.GIVEN)
    record = prepare_one(log.engine, head, stage(log, head))
    seen: list[bool] = []
    send(log, Scripted(check=lambda batch: seen.append(batch.restarted) or COMMIT), record.header)
    assert seen == [restarted]


def busy(batch: HalfBatch) -> Any:
    batch.reason = "another database transaction holds its fence rows"
    return UNKNOWN


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (OSError("the database is away"), "OSError: the database is away"),
        (busy, r"\(UNKNOWN: another database transaction holds its fence rows"),
    ],
)
def test_the_error_of_a_replay_says_why_the_listener_does_not_know(log: CommitLog, answer: Any, words: str) -> None:
    record = prepared(log)
    with pytest.raises(UnresolvedTransactionError, match=words):
        send(log, Scripted(check=answer), record.header)


def test_a_replay_goes_on_when_the_answer_comes_late(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = set_clock(monkeypatch).pauses
    record = prepared(log)
    send(log, Scripted(check=[UNKNOWN, OSError("away"), None, COMMIT]), record.header, timeout_s=DEADLINE_S)
    assert len(pauses) == 3
    assert visible(log) == bodies()


def test_a_query_whose_store_fails_after_the_prepare_is_told_to_start_again(log: CommitLog) -> None:
    with (
        seen_at("commit begins", raising(StorageError("no answer")), table="op"),
        pytest.raises(UnresolvedTransactionError, match=r"StorageError: no answer.*start the query again, or let a C"),
    ):
        send(log, Scripted())
    send(another(log), Scripted())
    assert visible(log) == bodies()


# ---------------------------------------------------------------- attempts
def test_a_fenced_attempt_whose_batch_was_quarantined_meanwhile_is_checked_and_not_left_behind(log: CommitLog) -> None:
    database = Database()

    class LateDriver(Fenced):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            if batch.attempt == 1:  # a checker put its tombstone down, and died; the next one gave up
                self.check_local_transaction(batch)
                quarantine(another(log), log.engine.get(batch.half_id))
            return super().execute_local_transaction(batch)

    send(log, LateDriver(database), header())
    assert visible(log) == bodies() == sorted(database.orders.elements())


def test_a_driver_that_wakes_after_its_batch_was_replayed_finds_it_done(log: CommitLog) -> None:
    database = Database()

    class Sleeper(Fenced):
        def execute_local_transaction(self, batch: HalfBatch) -> Any:
            check(log, Fenced(database))
            send(another(log), Fenced(database), header())  # the next driver, while this one sleeps
            return super().execute_local_transaction(batch)

    outcome = send(log, Sleeper(database), header())
    assert outcome.attempt == 2
    assert outcome.placed == []
    assert sorted(database.orders.elements()) == visible(log) == bodies()


def test_a_driver_whose_file_is_gone_since_others_settled_its_batch_takes_their_outcome(log: CommitLog) -> None:
    def slept(batch: HalfBatch) -> Any:
        check(log, Scripted(check=COMMIT))
        raise LostFileError("its messages were stripped")

    assert send(log, Scripted(slept)).messages == {RowState.COMMITTED: len(KEYS)}


def test_a_late_verdict_about_a_past_attempt_does_not_count(log: CommitLog) -> None:
    """A listener without a fence: a driver that wakes up late is told, and its verdict is not used."""

    def overtaken(batch: HalfBatch) -> Any:
        check(log, Scripted(check=ROLLBACK))
        send(another(log), Scripted(ROLLBACK))
        return COMMIT

    with pytest.raises(StaleAttemptError, match="attempt"):
        send(log, Scripted(overtaken))
    assert visible(log) == []


def test_a_late_opposite_verdict_is_a_conflict_and_nothing_becomes_visible(log: CommitLog) -> None:
    def overtaken(batch: HalfBatch) -> Any:
        check(log, Scripted(check=ROLLBACK))
        return COMMIT

    with pytest.raises(VerdictConflictError, match=r"COMMIT_MESSAGE.*rollback by check at .*log\.resolve"):
        send(log, Scripted(overtaken))
    assert visible(log) == []
    assert log.conflicts() == ["app:0"]


def test_a_late_equal_verdict_changes_nothing(log: CommitLog) -> None:
    def overtaken(batch: HalfBatch) -> Any:
        check(log, Scripted(check=COMMIT))
        return COMMIT

    outcome = send(log, Scripted(overtaken))
    assert outcome.messages == {RowState.COMMITTED: len(KEYS)}
    assert outcome.placed == []
    assert visible(log) == bodies()


@pytest.mark.parametrize("per", [KEY, MESSAGE])
def test_a_reopened_attempt_that_another_run_began_is_checked_and_not_run_blindly(log: CommitLog, per: str) -> None:
    """Some transactions were reopened by a driver that died; others are rolled back by a check only now.

    Both stand under attempt 2 then, but this run may execute only those that it reopened itself.
    """
    database = Database()
    record = prepared(log, per)
    check(log, Fenced(database, checks=lambda batch, position: position < 2))
    with dies_at("executed"):
        send(another(log), Fenced(database), record.header)
    first = sorted(database.orders.elements())
    assert first
    assert first != bodies()

    check(log, Fenced(database, checks=lambda batch, position: batch.attempt == 1))
    send(another(log), Fenced(database), record.header)
    assert sorted(database.orders.elements()) == visible(log) == bodies()


def test_a_check_during_a_replay_that_another_process_overtakes_starts_over(log: CommitLog) -> None:
    """The listener says COMMIT of what a checker quarantined in the meantime: asked again, not failed."""
    record = prepared(log)
    asked = []

    def overtaken(batch: HalfBatch) -> Any:
        asked.append(batch.attempt)
        if len(asked) == 1:
            quarantine(another(log), record)
        return COMMIT

    send(log, Scripted(check=overtaken), record.header)
    assert asked == [1, 1]
    assert visible(log) == bodies()


def test_an_attempt_that_is_always_fenced_ends_with_an_error(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, ATTEMPTS_MAX=4)
    listener = Scripted(FencedError("tombstone"))
    with pytest.raises(StaleAttemptError, match="rolled back by checks 4 times"):
        send(log, listener)
    assert attempts(listener.executed) == [1, 2, 3, 4]


# ---------------------------------------------------------------- is it really a replay?
REMEDY = "(Go on with the checkpoint.*|or set a )new appId"


def given(batch_id: int) -> HalfHeader:
    return header(batch_id=batch_id, query_id=None, input_hash=None, naming=Naming.GIVEN)


GIVEN = given(0)
UNKNOWN_QUERY, UNKNOWN_INPUT = header(query_id=None, input_hash=None), header(input_hash=None)
NO_REPLAYS = {
    "a new checkpoint": (
        header(batch_id=3), header(batch_id=3, query_id="query-2"), "batch 3 of app 'app'.*query-1.*query-2",
    ),
    "other offsets": (header(), header(input_hash="another"), "held something else.*older copy"),
    "no query is known": (UNKNOWN_QUERY, UNKNOWN_QUERY, "batch 0 of app 'app'.*not known"),
    "the new query is not known": (UNKNOWN_INPUT, UNKNOWN_QUERY, "batch 0 of app 'app'.*not known"),
    "the old query is not known": (UNKNOWN_QUERY, UNKNOWN_INPUT, "batch 0 of app 'app'.*not known"),
    "a batch write after a stream": (header(), GIVEN, "a batch write"),
    "a stream after a batch write": (GIVEN, header(), "a batch write"),
    "below the last batch": (header(batch_id=3), header(batch_id=1), "batch 1 of app 'app' is not above 3"),
    "below the last batch write": (
        given(3), given(1), "batch 1 of app 'app' is not above 3.* a new batch write needs a batchId above 3;",
    ),
    "above the last batch, after empty ones of a new checkpoint": (
        header(), header(batch_id=1, query_id="query-2", input_hash=None),
        "batch 0 of app 'app' was prepared by query query-1",
    ),
}  # fmt: skip


@MEMORY
@pytest.mark.parametrize(("before", "now", "words"), NO_REPLAYS.values(), ids=NO_REPLAYS)
def test_what_is_no_replay_is_refused_with_the_remedy(
    log: CommitLog, before: HalfHeader, now: HalfHeader, words: str
) -> None:
    """Taken for a replay of the old batch it would be dropped, and nobody told."""
    send(log, Scripted(), before)
    listener = Scripted()
    with pytest.raises(CheckpointMismatchError, match=f"{words}.*{REMEDY}"):
        send(another(log), listener, now)
    assert listener.executed == listener.checked == []
    assert visible(log) == bodies(batch_id=before.batch_id)


@MEMORY
@pytest.mark.parametrize(("before", "now"), [(UNKNOWN_INPUT, header()), (GIVEN, GIVEN)], ids=["stream", "batch write"])
def test_a_replay_whose_input_is_known_only_now_and_the_retry_of_a_batch_write_are_replays(
    log: CommitLog, before: HalfHeader, now: HalfHeader
) -> None:
    send(log, Scripted(), before)
    listener = Scripted()
    assert send(another(log), listener, now).replayed
    assert not listener.executed
    assert visible(log) == bodies()


# ---------------------------------------------------------------- does the checkpoint hold what was sent before?
def test_a_copy_of_a_checkpoint_is_refused_when_the_query_has_sent_under_a_later_number(log: CommitLog) -> None:
    """The copy was made after batch 0. The query's batch 1 is empty, and the copy's is not."""
    first = Checkpoint()
    send(log, Scripted(), first.header(0, "row 1"), first)
    second = first.copy()
    assert send_nothing(log, first.header(1, "row 2"), first).record is None
    send(log, Scripted(), first.header(2, "row 3"), first)
    with pytest.raises(CheckpointMismatchError, match=rf"batch 1 of app 'app' is not above.*{REMEDY}"):
        send(another(log), Scripted(), second.header(1, "row 3"), second)
    listener = Scripted()
    for batch_id in (2, 3):  # it goes on after batches that it had nothing to send of
        with pytest.raises(CheckpointMismatchError, match=REMEDY):
            send(another(log), listener, second.header(batch_id, "row 4"), second)
    assert not listener.executed
    assert visible(log) == sorted(bodies() + bodies(batch_id=2))
    assert not send(log, Scripted(), first.header(3, "row 4"), first).replayed


def test_a_query_is_refused_when_a_copy_of_its_checkpoint_has_sent_under_a_number_it_left_free(log: CommitLog) -> None:
    """The example of the issue: batch 1 of the copy is batch 2 of the query."""
    first = Checkpoint()
    send(log, Scripted(), first.header(0, "row 1"), first)
    second = first.copy()
    send_nothing(log, first.header(1, "row 2"), first)
    send(log, Scripted(), second.header(1, "row 3"), second)
    listener = Scripted()
    said = r"batch 2 of app 'app' does not follow batch 1.*offsets/1 is missing or holds something else"
    with pytest.raises(CheckpointMismatchError, match=rf"{said}.*{REMEDY}"):
        send(another(log), listener, first.header(2, "row 3"), first)
    assert not listener.executed
    assert visible(log) == sorted(bodies() + bodies(batch_id=1))


def test_an_empty_batch_of_a_fork_is_refused_too(log: CommitLog) -> None:
    first = Checkpoint()
    second = first.copy()
    send(log, Scripted(), first.header(0, "row 1"), first)
    with pytest.raises(CheckpointMismatchError, match="does not follow batch 0"):
        send_nothing(another(log), second.header(1, "row 2"), second)


def test_forks_that_run_at_once_do_not_both_prepare(log: CommitLog) -> None:
    """Each finds nothing in the log that it lacks, and the other one is faster."""
    first, second = Checkpoint(), Checkpoint()
    faster, head = first.header(1, "row 1"), second.header(2, "row 1")
    mismatch = pytest.raises(CheckpointMismatchError, match="does not follow batch 1")
    with at("staged", lambda: send(another(log), Scripted(), faster, first)), mismatch:
        send(log, Scripted(), head, second)
    assert visible(log) == bodies(batch_id=1)


def test_a_batch_that_a_slow_driver_of_the_same_checkpoint_prepared_meanwhile_is_no_fork(log: CommitLog) -> None:
    checkpoint = Checkpoint()
    slow, head = checkpoint.header(1, "row 1"), checkpoint.header(2, "row 2")
    with at("staged", lambda: send(another(log), Scripted(), slow, checkpoint)):
        assert not send(log, Scripted(), head, checkpoint).replayed
    assert visible(log) == sorted(bodies(batch_id=1) + bodies(batch_id=2))


def test_offsets_that_spark_has_cleaned_are_kept_by_the_first_empty_batch(log: CommitLog) -> None:
    checkpoint = Checkpoint()
    send(log, Scripted(), checkpoint.header(0, "row 1"), checkpoint)
    for batch_id in range(1, 4):
        send_nothing(log, checkpoint.header(batch_id, "nothing"), checkpoint)
        del checkpoint.files[f"offsets/{batch_id - 1}"]  # spark.sql.streaming.minBatchesToRetain=1
    send(log, Scripted(), checkpoint.header(4, "row 2"), checkpoint)
    assert visible(log) == sorted(bodies() + bodies(batch_id=4))


def test_who_has_lost_offsets_that_were_sent_goes_on_as_the_error_says(log: CommitLog) -> None:
    """A function called its sink for none of the last 100 batches, or the log is an older copy."""
    checkpoint = Checkpoint()
    send(log, Scripted(), checkpoint.header(0, "row 1"), checkpoint)
    del checkpoint.files["offsets/0"]
    with pytest.raises(CheckpointMismatchError, match=REMEDY) as problem:
        send(log, Scripted(), checkpoint.header(101, "row 2"), checkpoint)
    said = re.search(r"write (\{.*\}) into the checkpoint's file (\S+)", str(problem.value))
    assert said is not None
    checkpoint.write(said[2], said[1].encode())
    send(log, Scripted(), checkpoint.header(101, "row 2"), checkpoint)
    assert visible(log) == sorted(bodies() + bodies(batch_id=101))


@pytest.mark.parametrize(("before", "now"), [(None, "hash"), ("hash", None)])
def test_what_nobody_can_compare_goes_on(log: CommitLog, before: str | None, now: str | None) -> None:
    """A foreachBatch sink whose checkpoint Python does not find; it says so at each start."""
    send(log, Scripted(), header(input_hash=before), None if before is None else Checkpoint())
    send(log, Scripted(), header(batch_id=2, input_hash=now), None if now is None else Checkpoint())
    assert visible(log) == sorted(bodies() + bodies(batch_id=2))


def test_batch_writes_are_known_by_their_numbers_alone(log: CommitLog) -> None:
    for batch_id in (0, 2):
        send(log, Scripted(), given(batch_id))
    assert visible(log) == sorted(bodies() + bodies(batch_id=2))


def test_a_process_reads_the_header_of_the_last_batch_once(log: CommitLog) -> None:
    checkpoint = Checkpoint()
    send(log, Scripted(), checkpoint.header(0, "row"), checkpoint)
    handle = another(log)
    with seen_at("files read", table="half") as reads:
        for batch_id in range(1, 6):
            if batch_id % 2:
                send(handle, Scripted(), checkpoint.header(batch_id, "row"), checkpoint)
            else:
                send_nothing(handle, checkpoint.header(batch_id, "nothing"), checkpoint)
    files = [file.path for file in log.engine.get("app:0").files.values()]
    assert sorted(path for read in reads for path in read["paths"]) == sorted(files)
    last = [name for name in checkpoint.asked if name.startswith("offsets/")]
    assert last == ["offsets/0", "offsets/1", "offsets/1", "offsets/3", "offsets/3"]
    assert checkpoint.asked.count("txmq.last_batch") == 2  # for the empty ones


def test_a_batch_whose_predecessor_is_not_in_the_log_any_more_is_refused(log: CommitLog) -> None:
    send(log, Scripted())
    gone = Change(remove=[file.path for file in log.engine.get("app:0").files.values()], data_change=False)
    another(log).engine.half.table.compare_and_set(lambda _: gone, lambda _: True)
    with pytest.raises(CheckpointMismatchError, match=f"batch 0 of app 'app', the last .*not there any more.*{REMEDY}"):
        send(another(log), Scripted(), header(batch_id=1))


# ---------------------------------------------------------------- several drivers
def test_a_driver_that_loses_the_race_to_prepare_takes_the_batch_up_as_a_replay(log: CommitLog) -> None:
    first, second, head = Scripted(), Scripted(), header()
    with at("staged", lambda: send(another(log), first, head)):
        assert send(log, second, head).replayed
    assert len(first.executed) == 1
    assert not second.executed
    assert visible(log) == bodies()


def test_a_driver_that_loses_the_race_under_another_checkpoint_is_refused(log: CommitLog) -> None:
    head = header(query_id="query-2")
    with at("staged", lambda: send(another(log), Scripted())), pytest.raises(CheckpointMismatchError, match=REMEDY):
        send(log, Scripted(), head)
    assert visible(log) == bodies()


def test_drivers_that_run_one_batch_at_once_execute_it_once(log: CommitLog) -> None:
    database = Database()
    barrier = threading.Barrier(4)

    def drive(_: int) -> None:
        handle = another(log)
        files = stage(handle, header(KEY))
        barrier.wait(DEADLINE_S)
        TwoPhase(handle.engine, Fenced(database), replay_check_timeout_s=DEADLINE_S).send(header(KEY), lambda: files)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(drive, range(4)))
    assert sorted(database.orders.elements()) == visible(log) == bodies()


# ---------------------------------------------------------------- is it the listener that can speak for it?
class Bearing(Scripted):
    """A listener of a store with a name, or without one, that would commit whatever it is asked about."""

    def __init__(self, store_id: str | None) -> None:
        super().__init__()
        self.store_id = store_id


STORES = [("shop-db", "none"), ("shop-db", None), ("shop-db", "other-db"), (None, "shop-db"), (None, "none")]


@MEMORY
@pytest.mark.parametrize(("before", "now"), STORES)
def test_a_listener_of_another_store_is_not_asked(log: CommitLog, before: str | None, now: str | None) -> None:
    """A driver died within its local transaction, and the next one has another transactionListener."""
    record = prepared(log, fence_id=before)
    listener = Bearing(now)
    with pytest.raises(FenceError, match=r"app:0.*prepared with.*[Rr]estart with.*log\.resolve") as caught:
        send(another(log), listener, header(fence_id=now), timeout_s=DEADLINE_S)
    assert all(said in str(caught.value) for said in (before, now) if said)
    assert listener.executed == listener.checked == []
    assert states(another(log), record) == {RowState.PENDING: len(KEYS)}
    send(another(log), Bearing(before), header(fence_id=before))
    assert visible(log) == bodies()


@pytest.mark.parametrize("before", [RowState.ROLLED_BACK_BY_CHECK, RowState.QUARANTINED])
def test_a_batch_is_not_reopened_for_a_listener_of_another_store(log: CommitLog, before: RowState) -> None:
    record = prepared(log, fence_id="shop-db")
    if before is RowState.QUARANTINED:
        quarantine(log, record)
    else:
        roll_back(log, record, who=Who.CHECK)
    with pytest.raises(FenceError, match="shop-db"):
        send(another(log), CommitOncePrepared(), header(fence_id="none"))
    assert states(another(log), record) == {before: len(KEYS)}


def test_a_replay_that_asks_nobody_may_have_another_listener(log: CommitLog) -> None:
    send(log, Bearing("shop-db"), header(fence_id="shop-db"))
    assert send(another(log), CommitOncePrepared(), header(fence_id="none")).replayed
    send(another(log), CommitOncePrepared(), header(batch_id=1, fence_id="none"))
    assert visible(log) == sorted(bodies() + bodies(batch_id=1))


def test_what_was_sent_without_a_listener_commits_whichever_listener_comes_next(log: CommitLog) -> None:
    """It was prepared to be committed, as a check does it: no local transaction belongs to it."""
    prepared(log, fence_id="none")
    listener = Bearing("shop-db")
    send(another(log), listener, header(fence_id="shop-db"))
    assert visible(log) == bodies()
    assert listener.executed == listener.checked == []


# ---------------------------------------------------------------- leases
def test_a_slow_local_transaction_keeps_renewing_its_lease_and_a_quick_one_writes_none(log: CommitLog) -> None:
    seen: list[Any] = []

    def slow(batch: HalfBatch) -> Any:
        other = another(log)
        record = other.engine.get(batch.half_id)
        deadline = time.monotonic() + DEADLINE_S
        while len(set(seen)) < 4 and time.monotonic() < deadline:
            if (until := other.engine.state_of(record).lease_until) is not None:
                seen.append(until)
            time.sleep(0.01)
        return COMMIT

    with limited(LEASE_S=0.1):
        send(log, Scripted(slow), header())
    assert sorted(set(seen)) == list(dict.fromkeys(seen))
    assert len(set(seen)) == 4
    assert visible(log) == bodies()
    send(log, Scripted(), header(batch_id=1))
    assert another(log).engine.state_of(log.engine.get("app:1")).lease_until is None


def test_a_lease_that_cannot_be_written_does_not_disturb_the_local_transaction(log: CommitLog) -> None:
    tried = threading.Event()

    def refuse(**_: Any) -> None:
        if threading.current_thread().name == "txmq-lease":
            tried.set()
            raise OSError("the store is away")

    with seen_at("commit begins", refuse, table="op"), limited(LEASE_S=0.03):
        send(log, Scripted(lambda b: COMMIT if tried.wait(DEADLINE_S) else ROLLBACK), header())
    assert visible(log) == bodies()
