"""Is it the same batch? A table of what every door does when it is started again, and how a cell of it is played.

A cell: something was sent or consumed, in two batches. Then the same program starts again, with the checkpoint and the
appId that the cell says, and with one more message to come. ``python -m tests.spark.identity_table ROOT DOOR…`` plays
the cells of some doors over Spark Connect, which cannot share a process with another Spark.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

import rmq_spark as txmq
from tests.support.inside import FAILURE, dlq_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOES_ON = "goes on"  # what was done is known, and is not done again
AGAIN = "again"  # it is another application's batch: it is sent, or consumed, again
REFUSED = "refused"  # an error that names the remedy, and nothing is done
NO_SUCH = "no such cell"

SAME, UNNAMED, UNKNOWN, NEW = "same", "unnamed", "unknown", "new"
RESTORED, FORKED, DELETED = "restored", "forked", "deleted"
CHECKPOINTS = {
    SAME: "the batch that was under way runs again",
    UNNAMED: "the same, and Spark's file metadata is gone: Spark makes the query another id",
    UNKNOWN: "the same, and our file beside it is gone, too",
    NEW: "another checkpointLocation; a consumer group was reset",
    RESTORED: "an older copy: the last batch is planned anew",
    FORKED: "its copy has sent the message to come, as a batch of which this one had nothing to send",
    DELETED: "the folder is gone; a consumer group was reset",
}
APP_IDS = ("same", "other", "none")


class Cell(NamedTuple):
    door: str
    checkpoint: str
    app_id: str


_OF_A_STREAM = {
    SAME: (GOES_ON, AGAIN, GOES_ON),
    UNNAMED: (GOES_ON, AGAIN, GOES_ON),
    UNKNOWN: (REFUSED, AGAIN, REFUSED),
    NEW: (REFUSED, AGAIN, AGAIN),
    RESTORED: (REFUSED, AGAIN, REFUSED),
    FORKED: (REFUSED, AGAIN, REFUSED),
    DELETED: (REFUSED, AGAIN, AGAIN),
}
_HIDDEN = dict.fromkeys(CHECKPOINTS, (REFUSED, REFUSED, REFUSED))
_WITHOUT_CHECKPOINT = {SAME: (GOES_ON, AGAIN, AGAIN), **dict.fromkeys(set(CHECKPOINTS) - {SAME}, (NO_SUCH,) * 3)}

ROWS: dict[str, dict[str, tuple[str, str, str]]] = {
    # door: {checkpoint: (same appId, another appId, none)}
    "stream": _OF_A_STREAM,
    "foreachBatch": _OF_A_STREAM,
    "foreachBatch, checkpoint_location": _OF_A_STREAM,
    "foreachBatch over Connect": _HIDDEN,
    "foreachBatch over Connect, checkpoint_location": _OF_A_STREAM,
    # What is sent again is named by the query: a group that was reset is consumed anew.
    "consume": {
        **_OF_A_STREAM, UNKNOWN: (REFUSED,) * 3, NEW: (AGAIN,) * 3, FORKED: (NO_SUCH,) * 3, DELETED: (AGAIN,) * 3,
    },
    "consume over Connect": _HIDDEN,
    # The group's own positions say what was done.
    "orderly": {
        SAME: (GOES_ON,) * 3, UNNAMED: (GOES_ON,) * 3, UNKNOWN: (REFUSED,) * 3,
        NEW: (AGAIN,) * 3, RESTORED: (GOES_ON,) * 3, FORKED: (NO_SUCH,) * 3, DELETED: (AGAIN,) * 3,
    },
    # The positions in the database say it, and there is no appId.
    "inbox": {**dict.fromkeys(CHECKPOINTS, (NO_SUCH, NO_SUCH, GOES_ON)), FORKED: (NO_SUCH,) * 3},
    # Numbers and keys of the user's own say it, and there is no checkpoint.
    "batch write": _WITHOUT_CHECKPOINT,
    "producer": _WITHOUT_CHECKPOINT,
}  # fmt: skip

TABLE: dict[Cell, str] = {
    Cell(door, checkpoint, app_id): outcome
    for door, rows in ROWS.items()
    for checkpoint, outcomes in rows.items()
    for app_id, outcome in zip(APP_IDS, outcomes, strict=True)
}
OVER_CONNECT = tuple(door for door in ROWS if "over Connect" in door)

REMEDIES = ("Go on with the checkpoint that this app last used", "checkpoint_location=...", "Restore txmq.query_id")
GROUP = "points"

WORKER_IS_LATE = "Timed out while waiting for the Python worker to connect back"
"""Spark Connect gives the process of a foreachBatch function ten seconds, before the query starts: a busy machine needs
more."""
STARTS_MAX = 10


def expected(cell: Cell, outcome: str) -> list[str]:
    """The messages that are there at the end, or were consumed."""
    if cell.door in OVER_CONNECT and ROWS[cell.door] is _HIDDEN:
        return []
    before, after = ["0", "1"], ["2"]
    if cell.checkpoint == FORKED:  # its copy has sent the last one
        return [*before, *after, *(after if outcome == AGAIN else ())]
    if outcome == AGAIN:
        after = ["0", "1", "2"] if cell.checkpoint in (NEW, DELETED) else ["1", "2"]
    return sorted([*before, *([] if outcome == REFUSED else after)])


# ---------------------------------------------------------------- playing a cell
@dataclass
class Diary:
    """Who was consumed, by executors, in a file."""

    path: Path

    def listen(self, messages: pa.Table, answer: Any) -> list[Any]:
        with self.path.open("a") as file:
            file.writelines(f"{bytes(body).decode()}\n" for body in messages["body"].to_pylist())
        return [answer] * messages.num_rows


class Play:
    """Plays the cells of a door. What comes before a cell is played once for each appId, and copied."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.root = spark, root
        # Spark 4.2 refuses a checkpoint without its file metadata, unless it is told not to. 4.0 does not look.
        spark.conf.set("spark.sql.streaming.checkpoint.verifyMetadataExists.enabled", "false")
        self.cells = itertools.count()

    def play(self, cell: Cell) -> tuple[str, list[str]]:
        """What became of it, and which messages are there; for consumers: were consumed, and died."""
        base = self.root / "bases" / f"{cell.door}, {cell.app_id == 'none'}"
        app_id = None if cell.app_id == "none" else "app"
        before = REFUSED if ROWS[cell.door] is _HIDDEN else GOES_ON
        if not base.exists():
            self.begin(base, cell.door)
            found = self.run(cell.door, base, "checkpoint", app_id)
            assert found == before, found
            self.one_more(base, cell.door)
        if before == REFUSED:
            return before, self.done(cell.door, base)
        place = self.root / f"cell{next(self.cells)}"
        shutil.copytree(base, place, ignore=shutil.ignore_patterns("in"))
        (place / "in").symlink_to(base / "in")  # the checkpoint has the paths of the files
        checkpoint = place / "checkpoint"
        if cell.checkpoint in (SAME, UNNAMED, UNKNOWN):
            _forget(checkpoint / "commits", "1")
            if cell.checkpoint != SAME:
                _forget(checkpoint, "metadata")
            if cell.checkpoint == UNKNOWN:
                (checkpoint / "txmq.query_id").unlink(missing_ok=True)
        elif cell.checkpoint == RESTORED:
            _forget(checkpoint, "1")
        elif cell.checkpoint == FORKED:
            self.fork(cell.door, base, place, app_id)
        elif cell.checkpoint == DELETED:
            shutil.rmtree(checkpoint)
        if cell.checkpoint in (NEW, DELETED) and cell.door in ("consume", "orderly", "inbox"):
            txmq.ConsumerGroup(str(place / "log"), GROUP).reset("earliest", ["orders"])
        again = "other" if cell.app_id == "other" else app_id
        outcome = self.run(cell.door, place, "new checkpoint" if cell.checkpoint == NEW else "checkpoint", again)
        done = self.done(cell.door, place)
        if outcome == GOES_ON and len(done) > len(expected(cell, GOES_ON)):
            outcome = AGAIN
        return outcome, done

    def fork(self, door: str, base: Path, place: Path, app_id: str | None) -> None:
        """Run a batch without messages; then a copy of the checkpoint before it sends the message that comes next."""
        to_come, nothing = base / "in" / "2.json", base / "in" / "nothing.json"
        shutil.copytree(place / "checkpoint", place / "copy")
        to_come.rename(base / "2.json")
        nothing.write_text("\n")
        os.utime(nothing, (1_700_000_001,) * 2)
        found = self.run(door, place, "checkpoint", app_id)
        (base / "2.json").rename(to_come)
        assert (found, self.run(door, place, "copy", app_id, 2)) == (GOES_ON, GOES_ON)
        assert self.done(door, place) == ["0", "1", "2"]
        nothing.unlink()

    # ------------------------------------------------------------------ what is there to be sent
    def begin(self, base: Path, door: str) -> None:
        (base / "in").mkdir(parents=True)
        log = txmq.CommitLog.create(base / "log")
        log.create_topic("orders", queues=1)
        if _consumes(door):
            for body in ("0", "1"):
                _send(log, body)
        else:
            for body in ("0", "1"):
                _write(base, body)
        if door == "inbox":
            self.inbox(base).create()

    def one_more(self, base: Path, door: str) -> None:
        if _consumes(door):
            _send(txmq.CommitLog.open(base / "log"), "2")
        else:
            _write(base, "2")

    def done(self, door: str, place: Path) -> list[str]:
        log = txmq.CommitLog.open(place / "log")
        if door == "inbox":
            with self.inbox(place).transaction(write=False) as connection:
                rows = connection.exec_driver_sql("select body from points").all()
            return sorted(row[0] for row in rows)
        if not _consumes(door):
            return _bodies(log, "orders")
        diary = place / "diary"
        consumed = sorted(diary.read_text().split()) if diary.exists() else []
        died = _bodies(log, dlq_topic(GROUP)) if consumed else []
        assert consumed == died, f"consumed {consumed}, died {died}"
        return consumed

    # ------------------------------------------------------------------ the doors
    def run(self, door: str, place: Path, checkpoint: str, app_id: str | None, at_once: int = 1) -> str:
        """What became of a program; a stream takes so many files at once."""
        for _ in range(STARTS_MAX):
            try:
                self._run(door, place, place / checkpoint, app_id, at_once)
            except Exception as problem:
                if any(remedy in str(problem) for remedy in REMEDIES):
                    return REFUSED
                if WORKER_IS_LATE not in str(problem):
                    raise
            else:
                return GOES_ON
        raise TimeoutError(f"a Python worker came too late {STARTS_MAX} times")

    def _run(self, door: str, place: Path, checkpoint: Path, app_id: str | None, at_once: int) -> None:
        path = str(place / "log")
        if door in ("batch write", "producer"):
            (self._write_batches if door == "batch write" else self._send_by_key)(place, app_id)
            return
        location = {"checkpoint_location": str(checkpoint)} if "checkpoint_location" in door else {}
        if door == "stream":
            options = {"path": path, "topic": "orders", "producerGroup": "g", "transactionListener": "none"}
            writer = self._files(place, at_once).writeStream.format("txmq").options(**options)
            writer = writer if app_id is None else writer.option("appId", app_id)
        elif door.startswith("foreachBatch"):
            sink = txmq.TransactionalSink(
                path, producer_group="g", listener=None, topic="orders", app_id=app_id, **location
            )
            writer = self._files(place, at_once).writeStream.foreachBatch(sink)
        elif door == "inbox":
            writer = self._messages(path).writeStream.foreachBatch(self.inbox(place))
        else:
            mode = "orderly" if door == "orderly" else "concurrently"
            answer = FAILURE
            diary = Diary(place / "diary")
            writer = txmq.consume(
                self._messages(path), GROUP, lambda messages: diary.listen(messages, answer), mode,
                app_id=app_id, max_reconsume_times=0, suspend_s=0.0,
            )  # fmt: skip
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination(120)
        assert not query.isActive

    def _files(self, place: Path, at_once: int) -> Any:
        stream = self.spark.readStream.schema("body string").option("maxFilesPerTrigger", at_once)
        return stream.json(str((place / "in").resolve()))

    def _messages(self, path: str) -> Any:
        options = {"path": path, "subscribe": "orders", "consumerGroup": GROUP, "startingOffsets": "earliest"}
        return self.spark.readStream.format("txmq").options(**options, ordered="true", maxOffsetsPerTrigger="1").load()

    def inbox(self, place: Path) -> txmq.SqlInbox:
        def work(connection: Any, messages: pa.Table) -> None:
            connection.exec_driver_sql("create table if not exists points (body text)")
            for body in messages["body"].to_pylist():
                connection.exec_driver_sql("insert into points values (?)", (body.decode(),))

        return txmq.SqlInbox(f"sqlite:///{place / 'inbox.db'}", GROUP, work)

    def _write_batches(self, place: Path, app_id: str | None) -> None:
        options = {"path": str(place / "log"), "topic": "orders", "producerGroup": "g", "transactionListener": "none"}
        for batch_id, body in self._left(place):
            name = {} if app_id is None else {"appId": app_id, "batchId": str(batch_id)}
            frame = self.spark.createDataFrame([(body,)], "body string")
            frame.write.format("txmq").mode("append").options(**options, **name).save()

    def _send_by_key(self, place: Path, app_id: str | None) -> None:
        listener = _Commits()
        with txmq.TransactionMQProducer(str(place / "log"), "g", listener, check_interval=None) as producer:
            for batch_id, body in self._left(place):
                key = None if app_id is None else f"{app_id}-{batch_id}"
                producer.send_message_in_transaction(txmq.Message("orders", body.encode()), idempotency_key=key)

    def _left(self, place: Path) -> Iterator[tuple[int, str]]:
        """A program without a checkpoint begins at its last batch, of which it does not know what became."""
        bodies = [json.loads(file.read_text())["body"] for file in sorted((place / "in").iterdir())]
        return iter([(int(body), body) for body in bodies[len(bodies) - 2 :]])


class _Commits(txmq.TransactionListener):
    def execute_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return txmq.COMMIT_MESSAGE

    def check_local_transaction(self, batch: txmq.HalfBatch) -> Any:
        return txmq.UNKNOWN


def _consumes(door: str) -> bool:
    return door in ("consume", "consume over Connect", "orderly", "inbox")


def _write(base: Path, body: str) -> None:
    file = base / "in" / f"{body}.json"
    file.write_text(json.dumps({"body": body}))
    os.utime(file, (1_700_000_000 + int(body),) * 2)  # Spark takes the oldest first


def _send(log: txmq.CommitLog, body: str) -> None:
    with txmq.TransactionMQProducer(log, "g", _Commits(), check_interval=None) as producer:
        producer.send_message_in_transaction(txmq.Message("orders", body.encode()))


def _bodies(log: txmq.CommitLog, topic: str) -> list[str]:
    return sorted(body.decode() for body in log.read(topic, columns=["body"])["body"].to_pylist())


def _forget(folder: Path, batch_id: str) -> None:
    """Remove what Spark wrote for a batch: the folder is then as it was before it."""
    for file in [p for p in folder.rglob("*") if p.name in (batch_id, f".{batch_id}.crc")]:
        file.unlink()


def main(arguments: list[str]) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    spark = builder.getOrCreate()
    player = Play(spark, Path(arguments[0]))
    for cell in TABLE:
        if cell.door in arguments[1:]:
            print("cell", json.dumps([*cell, *player.play(cell)]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
