"""What the processes of a race do: send, contend, check, merge and read, all on one log. They are spawned, because
delta-rs must not be forked. A crew is a process whose threads do so with one handle of the log.

A folder holds the history and the files by which local transactions are known; the log lies there or on an object
store.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import rmq_spark as txmq
from rmq_spark.errors import AlreadyPreparedError, FencedError, StaleAttemptError, VerdictConflictError
from tests.support.half_batches import decide_one, prepare
from tests.support.inside import Change, Planner, Subscription, Who, admit, op_merge, read_ranges
from tests.torture.judge.history import History, Kind, Phase, payload_hash
from tests.torture.judge.observation import READ_COLUMNS, note_messages

GROUP = "racers"
TOPIC = "orders"
QUEUES = 2
FIFO_TOPIC = "orders-in-order"
CONTESTED = "contested"
"""The application whose batches two processes prepare and decide, with opposite verdicts."""
CONTESTED_ROWS = 2
RIVALS = "rivals"
"""Whose messages all rivals send, under the same idempotency keys."""
PERSON = "person"
"""The application whose batches somebody resolves by hand."""
OP_FILES_MAX = 8
SWITCH_S = 1e-5
"""Threads of a crew take turns so often; Python's default is 500 times as long."""
WHOLE_READ_EVERY_S = 20.0
MERGED, APPENDED = "merged", "appended"
"""What a commit did to its table: the ``op`` of a version."""
SENDING_THREADS = 3
RETRIED, UNSURE, DELAYED, IMMEDIATE_CHECK_S = 0.1, 0.15, 0.2, 0.3


@dataclass(frozen=True)
class Track:
    """Where a race takes place.

    Attributes
    ----------
    root : Path
        Of the history and the local transactions.
    uri : str
        The commit log.
    files : Path
        The folder where its files can be looked at (of an object store: what the server serves).
    storage_options : mapping, optional
    """

    root: Path
    uri: str
    files: Path
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)

    def open(self) -> txmq.CommitLog:
        return txmq.CommitLog.open(self.uri, self.storage_options)

    def history(self) -> History:
        return History(self.root / "history.jsonl")

    @property
    def stop(self) -> Path:
        """While it is not there, programs go on."""
        return self.root / "stop"

    @property
    def local(self) -> Path:
        """A file an attempt: ``done`` by its local transaction, or a check's tombstone, whichever came first."""
        return self.root / "local"


def commit_name(paths: Iterable[str]) -> str:
    """The name of a commit: no two commits add the same files."""
    return payload_hash(" ".join(sorted(paths)))


@dataclass(frozen=True)
class SharedTrack(Track):
    """A track whose log is open already: threads of one process share the handle."""

    log: txmq.CommitLog | None = None

    def open(self) -> txmq.CommitLog:
        assert self.log is not None
        return self.log


def note_versions(log: txmq.CommitLog, history: History, process: str) -> None:
    """From now on, note at which version each acknowledged commit of this handle is, and whether it merged files."""
    for table in (log.engine.half.table, log.engine.op_table):
        if "try_commit" in vars(table):  # another thread has seen to it
            continue
        real: Callable[[Change], bool] = table.try_commit  # type: ignore[attr-defined]

        def noting(change: Change, table: Any = table, real: Callable[[Change], bool] = real) -> bool:
            version = table.version + 1
            acknowledged = real(change)
            if acknowledged:
                name = commit_name(f.path for f in change.add)
                op = MERGED if change.remove else APPENDED
                thread = threading.current_thread()
                who = process if thread is threading.main_thread() else thread.name
                history.note(Kind.VERSION, Phase.OK, who, table=table.name, version=version, payload=name, op=op)
            return acknowledged

        table.try_commit = noting  # type: ignore[attr-defined]


# ---------------------------------------------------------------- local transactions
class Orders(txmq.TransactionListener):
    """A local transaction is a file that is made once, so a check's answer binds a late execute."""

    def __init__(self, track: Track, history: History, process: str, chance: random.Random) -> None:
        self._track, self._history, self._process, self._chance = track, history, process, chance

    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        if not self._claim(batch, "done"):
            raise FencedError(f"attempt {batch.attempt} of {batch.half_id} was rolled back by a check")
        rows = batch.messages(["transaction_id", "body"]).to_pylist()
        refused = _refused(rows)
        for transaction_id in refused:
            self._history.note(
                Kind.REFUSED, half_id=batch.half_id, transaction_id=transaction_id, attempt=batch.attempt
            )
        for row in rows:
            if row["transaction_id"] not in refused:
                self._history.note(
                    Kind.LOCAL, half_id=batch.half_id, transaction_id=row["transaction_id"], attempt=batch.attempt,
                    payload=payload_hash(row["body"]),
                )  # fmt: skip
        unsure = self._chance.random() < UNSURE
        self._note(Kind.EXECUTE, Phase.OK, batch, None if unsure else refused)
        return txmq.UNKNOWN if unsure else batch.verdicts(rollback=refused)

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        self._note(Kind.CHECK, Phase.BEGIN, batch, None)
        if self._claim(batch, "tombstone"):
            self._note(Kind.CHECK, Phase.OK, batch, set(batch.transactions["transaction_id"].to_pylist()))
            return txmq.ROLLBACK_MESSAGE
        refused = _refused(batch.messages(["transaction_id", "body"]).to_pylist())
        self._note(Kind.CHECK, Phase.OK, batch, refused)
        return batch.verdicts(refused=refused)

    def _claim(self, batch: txmq.HalfBatch, what: str) -> bool:
        """True when the attempt's file says so now; False when it said something else before."""
        file = self._track.local / f"{batch.half_id}.{batch.attempt}"
        beside = file.with_name(f"{file.name}.{self._process}")
        beside.write_text(what)
        try:
            os.link(beside, file)
        except FileExistsError:
            pass
        finally:
            beside.unlink()
        return file.read_text() == what

    def _note(self, kind: Kind, phase: Phase, batch: txmq.HalfBatch, refused: set[str] | None) -> None:
        for transaction_id in batch.transactions["transaction_id"].to_pylist():
            verdict = None if phase is Phase.BEGIN else str(txmq.UNKNOWN)
            if refused is not None:
                verdict = str(txmq.ROLLBACK_MESSAGE if transaction_id in refused else txmq.COMMIT_MESSAGE)
            self._history.note(
                kind, phase, self._process, half_id=batch.half_id, attempt=batch.attempt,
                transaction_id=transaction_id, verdict=verdict,
            )  # fmt: skip


def _refused(rows: list[dict[str, Any]]) -> set[str]:
    """The transactions of which the first message is one of every five."""
    first: dict[str, bytes] = {}
    for row in rows:
        first.setdefault(row["transaction_id"], row["body"])
    return {t for t, body in first.items() if zlib.crc32(body) % 5 == 0}


# ---------------------------------------------------------------- programs
def send(track: Track, history: History, process: str, chance: random.Random) -> None:
    """Send small batches, in threads that share a producer and its commits; now and then one comes twice, under an
    idempotency key."""
    log = track.open()
    note_versions(log, history, process)
    listener = Orders(track, history, process, chance)
    with txmq.TransactionMQProducer(log, GROUP, listener, check_interval=None) as producer:

        def run(thread: str) -> None:
            sequence = 0
            while not track.stop.exists():
                messages = [
                    txmq.Message(TOPIC, f"{thread}.{sequence}.{n}".encode(), sharding_key=thread)
                    for n in range(chance.choice([1, 2, 3]))
                ]
                per = chance.choice(["batch", "message"])
                key = f"{thread}-{sequence}" if chance.random() < RETRIED else None
                for _ in range(1 if key is None else 2):
                    _send(producer, history, thread, sequence, messages, per, key)
                sequence += 1

        with ThreadPoolExecutor(SENDING_THREADS) as pool:
            list(pool.map(run, (f"{process}-{i}" for i in range(SENDING_THREADS))))


def _send(
    producer: txmq.TransactionMQProducer,
    history: History,
    process: str,
    sequence: int,
    messages: list[txmq.Message],
    per: str,
    key: str | None,
) -> None:
    def note(phase: Phase, verdict: str | None = None) -> None:
        for n, message in enumerate(messages):
            history.note(
                Kind.SEND, phase, process, payload=payload_hash(message.body), key=message.sharding_key,
                sequence=sequence * 10 + n, topic=message.topic, verdict=verdict, operation=f"{process}.{sequence}",
            )  # fmt: skip

    note(Phase.BEGIN)
    result = producer.send_messages_in_transaction(messages, transaction_per=per, idempotency_key=key)
    decided = per == "batch" and result.local_transaction_state is not txmq.UNKNOWN
    note(Phase.OK, str(result.local_transaction_state) if decided else None)


def rival(track: Track, history: History, process: str, chance: random.Random) -> None:
    """Send what all rivals send, to a FIFO topic and a plain one; each under a key that they share."""
    log = track.open()
    note_versions(log, history, process)
    with txmq.TransactionMQProducer(
        log, GROUP, Orders(track, history, process, chance), check_interval=None
    ) as producer:
        sequence = 0
        while not track.stop.exists():
            messages, per = _shared_send(sequence)
            # Another one may have reopened what was refused, before this one could say so: it asks again.
            with suppress(StaleAttemptError):
                _send(producer, history, process, sequence, messages, per, f"{RIVALS}-{sequence}")
                sequence += 1


def _shared_send(sequence: int) -> tuple[list[txmq.Message], str]:
    """The messages of a number: the same for every rival. Some are delayed, and those have no order."""
    chance = random.Random(sequence)
    topic = chance.choice([FIFO_TOPIC, FIFO_TOPIC, TOPIC])
    delayed = topic == TOPIC and chance.random() < DELAYED
    messages = [
        txmq.Message(
            topic,
            f"{RIVALS}.{sequence}.{n}".encode(),
            sharding_key=None if delayed else f"{RIVALS}-{n % 2}",
            delay_level=1 if delayed else None,
        )
        for n in range(chance.choice([1, 2, 3]))
    ]
    return messages, chance.choice(["batch", "message"])


def contend(track: Track, history: History, process: str, chance: random.Random, commits: bool) -> None:
    """Prepare and decide the same half batches as somebody else, with the opposite verdict."""
    log = track.open()
    note_versions(log, history, process)
    number = 0
    while not track.stop.exists():
        bodies = [f"{CONTESTED}.{number}.{n}" for n in range(CONTESTED_ROWS)]
        try:
            record = prepare(log, number, {"body": bodies}, app=CONTESTED, topic=TOPIC)
        except AlreadyPreparedError:
            record = log.engine.get(f"{CONTESTED}:{number}")
        mask = {n: b"\x01" * f.rows for n, f in record.files.items()}
        try:
            decide_one(
                log.engine, record, 1, commit=mask if commits else {}, rollback={} if commits else mask, who=Who.EXECUTE
            )
        except VerdictConflictError:
            told = Phase.FAIL
        else:
            told = Phase.OK
        history.note(
            Kind.DECIDE, told, process, half_id=record.half_id, transaction_id=f"{record.half_id}:1", attempt=1,
            verdict=str(txmq.COMMIT_MESSAGE if commits else txmq.ROLLBACK_MESSAGE), who="execute",
        )  # fmt: skip
        number += 1
    log.close()


def check(track: Track, history: History, process: str, chance: random.Random) -> None:
    """Rounds of checks, many more and earlier than anybody would run: some overtake the sender."""
    log = track.open()
    note_versions(log, history, process)
    service = checks(log, Orders(track, history, process, chance), IMMEDIATE_CHECK_S)
    while not track.stop.exists():
        service.run_once()
        time.sleep(chance.uniform(0.1, 0.5))


def checks(log: txmq.CommitLog, orders: Orders, timeout_s: float) -> txmq.CheckService:
    return txmq.CheckService(log, {GROUP: orders}, transaction_timeout=timeout_s, only_groups=True)


def keep_up(track: Track, history: History, process: str, chance: random.Random) -> None:
    """Merge op files, move the mark and drain all the time."""
    op_merge.OP_FILES_MAX = OP_FILES_MAX
    log = track.open()
    note_versions(log, history, process)
    while not track.stop.exists():
        log.engine.ledger.mark()
        op_merge.compact_op(log.engine.op_table)
        log.drain()
        time.sleep(chance.uniform(0.1, 0.5))


def read_on(track: Track, history: History, process: str, chance: random.Random) -> None:
    """A consumer that goes on from where it was, and now and then reads everything."""
    log = track.open()
    at = dict.fromkeys(range(QUEUES), 0)
    polls, whole_at = 0, time.monotonic() + WHOLE_READ_EVERY_S / 4
    while not track.stop.exists():
        operation = f"{process}.{polls}"
        polls += 1
        if time.monotonic() > whole_at:
            whole_at = time.monotonic() + WHOLE_READ_EVERY_S
            note_messages(history, Kind.READ, process, operation, log.read(TOPIC, columns=READ_COLUMNS))
        found = log.read(TOPIC, start=at, columns=READ_COLUMNS)
        note_messages(history, Kind.POLL, process, operation, found)
        for queue_id in range(QUEUES):
            count = found["queue_id"].to_pylist().count(queue_id)
            history.note(
                Kind.POLLED, Phase.OK, process, operation=operation, topic=TOPIC, queue_id=queue_id,
                queue_offset=at[queue_id], next_offset=at[queue_id] + count,
            )  # fmt: skip
            at[queue_id] += count
        time.sleep(chance.uniform(0.2, 0.8))


def look(track: Track, history: History, process: str, chance: random.Random) -> None:
    """What else a program may ask of its log, one after the other: to plan and read, to list, to make a topic, to
    resolve a batch, to publish a group's progress."""
    log = track.open()
    note_versions(log, history, process)
    planner = Planner(log.engine, Subscription((TOPIC, FIFO_TOPIC)))
    at: dict[tuple[str, int], int] = {}
    for number in count():
        if track.stop.exists():
            return
        at = _poll(log, planner, history, process, number, at, chance.choice((None, 5)))
        log.engine.groups.publish(process, at)
        published = log.engine.groups.next_offsets(process)
        assert published == at, f"published {at}, and found {published}"
        log.create_topic(f"made-{int(time.time() * 2)}", 1, exist_ok=True)
        bodies = [f"{PERSON}.{number}.{n}" for n in range(2)]
        with suppress(AlreadyPreparedError):
            prepare(log, number, {"body": bodies}, app=PERSON, topic=TOPIC)
        log.resolve(f"{PERSON}:{number}", txmq.COMMIT_MESSAGE, "somebody knows")
        listing = chance.choice((log.engine.open_half_ids, log.pending, log.open_messages, log.conflicts, log.topics))
        listing()
        time.sleep(chance.uniform(0.0, 0.05))


def _poll(
    log: txmq.CommitLog,
    planner: Planner,
    history: History,
    process: str,
    number: int,
    start: dict[tuple[str, int], int],
    limit: int | None,
) -> dict[tuple[str, int], int]:
    """Read on as the streaming source does; returns how far."""
    end = admit(start, planner.latest(), limit)
    operation = f"{process}.{number}"
    for messages in read_ranges(planner.ranges(start, end), log.engine.read_range, log.engine.find_again, READ_COLUMNS):
        note_messages(history, Kind.POLL, process, operation, messages)
    planner.forget(start)
    for (topic, queue_id), offset in end.items():
        history.note(
            Kind.POLLED, Phase.OK, process, operation=operation, topic=topic, queue_id=queue_id,
            queue_offset=start.get((topic, queue_id), 0), next_offset=offset,
        )  # fmt: skip
    return end


def work_together(track: Track, history: History, process: str, chance: random.Random, roles: str) -> None:
    """A crew: these programs as threads that share one handle. The first that fails ends the process."""
    sys.setswitchinterval(SWITCH_S)
    log = track.open()
    note_versions(log, history, process)
    shared = SharedTrack(track.root, track.uri, track.files, track.storage_options, log)
    failed = threading.Event()

    def live(role: str, name: str, seed: int) -> None:
        try:
            PROGRAMS[role](shared, history, name, random.Random(seed))
        except BaseException:
            traceback.print_exc()
            failed.set()

    threads = []
    for number, role in enumerate(roles.split("+")):
        name = f"{role}-{process}-{number}"
        threads.append(
            threading.Thread(target=live, args=(role, name, chance.randrange(2**32)), name=name, daemon=True)
        )
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failed.wait(0.1):
        pass
    if failed.is_set():
        sys.stderr.flush()
        os._exit(1)  # whatever the others are at


PROGRAMS: Mapping[str, Callable[..., None]] = {
    "sender": send,
    "rival": rival,
    "looker": look,
    "crew": work_together,
    "contender": contend,
    "checker": check,
    "upkeep": keep_up,
    "reader": read_on,
}


def main(role: str, track: Track, process: str, seed: int, *arguments: Any) -> None:
    """The body of a process. What it prints is kept beside the history."""
    out = os.open(track.root / f"{process}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    PROGRAMS[role](track, track.history(), process, random.Random(seed), *arguments)
