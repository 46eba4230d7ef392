"""A driver without Spark whose local transactions run in parts, each in a process of its own:
``parts_driver <folder> <seed>``.

It does what Spark does: a task whose process dies or fails runs again, four times in all; some tasks run twice at once,
and the first answer counts. Tasks outlive their driver.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import time
import uuid
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rmq_spark import CommitLog, HalfBatch
from tests.spark import parts_shop
from tests.support.inside import HalfHeader, HalfWriter, Naming, PartAnswer, PartRows, PartRunner, TwoPhase, run_part

PARTS = 4
TRIES = 4
SPECULATION = 0.2
"""The share of tasks that run twice at once."""


class Executor:
    """A process that forks one for each task. It is forked itself before the driver has threads.

    Parameters
    ----------
    folder : Path
        Each task has a file with its part, and leaves one with its answer, or one that says that there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        reader, self._tell = os.pipe()
        if os.fork() == 0:
            os.close(self._tell)
            os.setsid()
            self._serve(reader)

    def start(self, listener: Any, part: HalfBatch) -> str:
        """Start a task, and return its name."""
        name = uuid.uuid4().hex
        (self.folder / f"{name}.part").write_bytes(pickle.dumps((listener, part)))
        os.write(self._tell, name.encode())
        return name

    def answer(self, name: str) -> PartAnswer | Exception | None:
        """What the task answered, or why it has not; None while it runs."""
        if (self.folder / f"{name}.answer").exists():
            return pickle.loads((self.folder / f"{name}.answer").read_bytes())
        if (self.folder / f"{name}.lost").exists():
            return RuntimeError(f"task lost: {(self.folder / f'{name}.lost').read_text()}")
        return None

    def _serve(self, reader: int) -> None:
        children: dict[int, str] = {}
        os.set_blocking(reader, False)
        while True:
            try:
                name = os.read(reader, 32).decode()
            except BlockingIOError:
                name = ""
            else:
                if not name:
                    os._exit(0)  # the driver is dead
            if name:
                child = os.fork()
                if child == 0:
                    os.close(reader)
                    self._run(name)
                children[child] = name
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                name = children.pop(pid)
                if not (self.folder / f"{name}.answer").exists():
                    (self.folder / f"{name}.lost").write_text(f"status {status}")
            time.sleep(0.005)

    def _run(self, name: str) -> None:
        try:
            listener, part = pickle.loads((self.folder / f"{name}.part").read_bytes())
            answer = pickle.dumps(run_part(listener, part))
        except BaseException as problem:
            (self.folder / f"{name}.lost").write_text(f"{type(problem).__name__}: {problem}")
            os._exit(1)
        (self.folder / f"{name}.draft").write_bytes(answer)
        (self.folder / f"{name}.draft").replace(self.folder / f"{name}.answer")
        os._exit(0)


class Tasks:
    """Runs parts as Spark runs tasks."""

    def __init__(self, executor: Executor, log: CommitLog, seed: int) -> None:
        self._executor = executor
        self._read_by = partial(PartRows, log.path, {})
        self._random = random.Random(seed)

    def __call__(self, listener: Any, parts: Sequence[HalfBatch]) -> list[PartAnswer]:
        answers: dict[int, PartAnswer] = {}
        failures = [0] * len(parts)
        running: dict[str, int] = {}
        sent = [part.read_by(self._read_by) for part in parts]
        for at, part in enumerate(sent):
            for _ in range(1 + (self._random.random() < SPECULATION)):
                running[self._executor.start(listener, part)] = at
        while len(answers) < len(parts):
            for name, at in list(running.items()):
                answer = self._executor.answer(name)
                if answer is None:
                    continue
                del running[name]
                if isinstance(answer, PartAnswer):
                    answers.setdefault(at, answer)
                elif at not in answers:
                    failures[at] += 1
                    if failures[at] == TRIES:
                        raise RuntimeError(f"Job aborted due to stage failure: {answer}")
                    if at not in running.values():
                        running[self._executor.start(listener, sent[at])] = at
            time.sleep(0.005)
        return [answers[at] for at in range(len(parts))]


def send(log: CommitLog, tasks: Tasks, batch_id: int, file: Path) -> None:
    """Send a micro-batch: a file of orders, dealt out by key."""
    listener = parts_shop.listener()
    engine = log.engine
    header = HalfHeader.of(
        Naming.COUNTED, "app", batch_id,
        query_id="query", input_hash=file.name, fence_id=listener.store_id,
        transaction_per="key", producer_group=parts_shop.GROUP,
    )  # fmt: skip
    runner = PartRunner(tasks)

    def stage() -> list[Any]:
        writer = HalfWriter(header, engine.topics(), "orders", "n")
        keys, files = file.read_text().split(), []
        for part in range(PARTS):
            chosen = [key for key in keys if zlib.crc32(key.encode()) % PARTS == part]
            files += engine.stage(writer, pa.table({"body": chosen, "n": chosen}).to_batches(), part)
        runner.staged_here = header.half_id
        return files

    TwoPhase(engine, listener, run=runner).send(header, stage)


def main(folder: Path, seed: int) -> None:
    executor = Executor(folder / "tasks")
    parts_shop.arm(is_task=False)
    done = folder / "done"
    done.mkdir(exist_ok=True)
    log = CommitLog.open(folder / "log")
    tasks = Tasks(executor, log, seed)
    for batch_id, file in enumerate(sorted((folder / "in").iterdir())):
        if not (done / str(batch_id)).exists():
            send(log, tasks, batch_id, file)
            (done / str(batch_id)).touch()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(Path(sys.argv[1]), int(sys.argv[2]))
