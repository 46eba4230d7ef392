"""Damaged files: every file of a commit log, damaged in every way, gives the right answer or a clear failure.

A case is a seed: it chooses a file and a damage. Cases run in processes of their own, so that a crash of the
interpreter, a hang or a memory bomb is an outcome like any other.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import pickle
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rmq_spark.errors import TxmqError
from tests.support.inside import (
    HALF_SCHEMA,
    MESSAGES_SCHEMA,
    OP_SCHEMA,
    STORED_COLUMNS,
    TOPICS_SCHEMA,
    DeltaLogTable,
    RowRange,
    read_range,
)
from tests.torture.damage.damaged_log import TABLES, RoundHadProblems, answers, build, changes, questions, right_answers
from tests.torture.damage.ways import DAMAGES

CASE_SECONDS_MAX = 60.0
CASE_MEMORY_BYTES_MAX = 1024 * 1024 * 1024
"""What one case may add to the largest memory that its process has had."""
WORKERS = 2
BITS_STRIDE = 97
WORDS_OF_A_PLACE = ("half", "op", "messages", "topics", "commit log")


@dataclass(frozen=True)
class Result:
    """What became of one case.

    Attributes
    ----------
    kind : str
        Of the file, such as ``op parquet``.
    what : str
        The damage, in words that a person can repeat.
    silent : dict of str to str
        Questions that were answered wrongly without an error, and how.
    unclear : dict of str to str
        Errors that are not ours, or that name no place.
    errors : int
        Clear failures.
    limit : str or None
        Why wrong answers were to be expected: what no checksum can show.
    """

    seed: int
    kind: str
    damage: str
    what: str
    silent: dict[str, str] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)
    errors: int = 0
    limit: str | None = None

    @property
    def ok(self) -> bool:
        return not self.unclear and (self.limit is not None or not self.silent)

    def __str__(self) -> str:
        problems = [f"{name} SILENTLY {text}" for name, text in self.silent.items()]
        problems += [f"{name} UNCLEAR {text}" for name, text in self.unclear.items()]
        return f"seed {self.seed}: {self.damage} of {self.kind} {self.what}: {'; '.join(problems) or 'ok'}"


# ---------------------------------------------------------------- a case
def files_by_kind(log: Path) -> dict[str, list[Path]]:
    """The files of a log, by table and kind."""
    found: dict[str, list[Path]] = {}
    for table in TABLES:
        folder = log / table
        for kind, pattern in (
            ("parquet", "*.parquet"),
            ("entry", "_delta_log/*.json"),
            ("checkpoint", "_delta_log/*.parquet"),
            ("_last_checkpoint", "_delta_log/_last_checkpoint"),
        ):
            files = sorted(folder.glob(pattern))
            if files:
                found[f"{table} {kind}"] = files
    return found


def damage(log: Path, seed: int) -> Result:
    """Damage a file of the log, and say what was done."""
    rng = random.Random(seed)
    kinds = files_by_kind(log)
    # The kinds in turn, so that a short run has them all; then the damages.
    kind = sorted(kinds)[seed % len(kinds)]
    name = sorted(DAMAGES)[seed // len(kinds) % len(DAMAGES)]
    file = rng.choice(kinds[kind])
    others = [f for f in kinds[kind] if f != file]
    limit = None
    if file.suffix == ".json" and name != "empty":
        limit = "an entry of a Delta log has no checksum, and without its newest one the log is an older one"
    return Result(seed, kind, name, f"{file.name}: {DAMAGES[name](file, others, rng)}", limit=limit)


def run_case(folder: Path, right: dict[str, Any], seed: int) -> Result:
    """Damage a copy of the log, ask it everything, and compare."""
    copy = folder / f"case-{seed}"
    shutil.copytree(folder / "log", copy)
    try:
        result = damage(copy, seed)
        path = str(copy)
        asked = answers(questions(path))
        done = answers(changes(path))
    finally:
        shutil.rmtree(copy)
    return _judge(result, {**asked, **done}, right)


def _judge(result: Result, found: dict[str, Any], right: dict[str, Any]) -> Result:
    silent: dict[str, str] = {}
    unclear: dict[str, str] = {}
    errors = 0
    for name, answer in found.items():
        if isinstance(answer, BaseException):
            errors += 1
            if not _is_clear(answer):
                unclear[name] = f"{type(answer).__module__}.{type(answer).__name__}: {str(answer)[:300]}"
        elif name == "read after":
            wrong = _wrong_after(answer, found, right)
            if wrong:
                silent[name] = wrong
        elif answer != right[name]:
            silent[name] = _difference(answer, right[name])
    return replace(result, silent=silent, unclear=unclear, errors=errors)


def _is_clear(problem: BaseException) -> bool:
    text = str(problem)
    ours = isinstance(problem, (TxmqError, RoundHadProblems))
    return ours and len(text) > 30 and any(word in text for word in WORDS_OF_A_PLACE)


def _wrong_after(rows: list[Any], found: dict[str, Any], right: dict[str, Any]) -> str | None:
    """After the changes: exactly the right messages; or, when a change failed, those of before and some of the rest."""
    all_done = all(not isinstance(found[name], BaseException) for name in ("check", "send", "send again"))
    if all_done:
        return None if rows == right["read after"] else _difference(rows, right["read after"])
    # Offsets follow the order of commits, which a failure changes.
    before = Counter(_key(row) for row in right["read before"])
    allowed = Counter(_key(row) for row in right["read after"])
    seen = Counter(_key(row) for row in rows)
    if before - seen:
        return f"lacks {list(before - seen)[:3]}"
    if seen - allowed:
        return f"has {list(seen - allowed)[:3]}"
    return None


def _key(row: tuple[Any, ...]) -> str:
    topic, _, _, *rest = row
    return repr((topic, rest))


def _difference(found: Any, right: Any) -> str:
    if isinstance(found, list) and isinstance(right, list):
        missing = [r for r in right if r not in found]
        more = [r for r in found if r not in right]
        return f"{len(found)} instead of {len(right)} rows, lacks {str(missing[:2])[:300]}, has {str(more[:2])[:300]}"
    return f"{str(found)[:300]} instead of {str(right)[:300]}"


# ---------------------------------------------------------------- bits of one file
def flip_bits(file: Path, table: str, scratch: Path, step: int = 1, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Flip a bit in every ``step``-th byte of a Parquet file, and read it as the log does, in a scratch folder."""
    content = file.read_bytes()
    read = reader_of(file, table, scratch)
    right = read(content)
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for at in range(first, len(content), step):
        bit = at // step % 8
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        counts["cases"] += 1
        try:
            if read(bytes(damaged)) == right:
                counts["right"] += 1
            elif _has_a_column_elsewhere(content, bytes(damaged)):
                counts["columns elsewhere"] += 1  # docs/guarantees.md names it
            else:
                failures.append(f"bit {bit} of byte {at} of {file.name} is a wrong value")
        except TxmqError as problem:
            counts["clear failures"] += 1
            if file.name not in str(problem):
                failures.append(f"bit {bit} of byte {at}: {problem}")
        except BaseException as problem:
            failures.append(f"bit {bit} of byte {at} of {file.name}: {type(problem).__name__}: {problem}")
    return counts, failures


def _has_a_column_elsewhere(content: bytes, damaged: bytes) -> bool:
    """Whether all that changed is where one column begins: there another one has its pages, whose checksums are right.
    It is asked about what pyarrow could read: of other damaged footers a look at a column may end the process."""
    before, after = (pq.read_metadata(io.BytesIO(bytes_)) for bytes_ in (content, damaged))
    moved = 0
    for group in range(before.num_row_groups):
        for at in range(before.num_columns):
            one, other = (f.row_group(group).column(at).to_dict() for f in (before, after))
            changed = {name for name in one if one[name] != other[name]}
            if not changed <= {"dictionary_page_offset", "data_page_offset"}:
                return False
            moved += len(changed)
    return moved == 1


def reader_of(file: Path, table: str, folder: Path) -> Callable[[bytes], Any]:
    """Writes a content to the file's place, and reads it: a half file as executors do, the others as the log does."""
    schema = {"half": HALF_SCHEMA, "op": OP_SCHEMA, "messages": MESSAGES_SCHEMA, "topics": TOPICS_SCHEMA}[table]
    DeltaLogTable.create(str(folder), table, schema, None, {})
    delta = DeltaLogTable(str(folder), table, schema, None)
    place = folder / file.name
    shutil.copy(file, place)
    rows = delta.read([file.name])

    def read(content: bytes) -> Any:
        place.write_bytes(content)
        found = [delta.read([file.name]).to_pylist()]
        if table == "half":
            half_id, file_no = rows["half_id"][0].as_py(), rows["file_no"][0].as_py()
            wanted = RowRange(file.name, half_id, file_no, rows.num_rows, ((0, rows.num_rows - 1),))
            found += [part.to_pylist() for _, part in read_range(delta.fs, str(folder), wanted, STORED_COLUMNS)]
        return found

    return read


# ---------------------------------------------------------------- processes
def _work(folder: Path, pipe: Connection) -> None:
    """A worker: seeds come in, results go out."""
    logging.disable(logging.CRITICAL)
    right = pickle.loads((folder / "right").read_bytes())
    while True:
        seed = pipe.recv()
        if seed is None:
            return
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = run_case(folder, right, seed)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if grown > CASE_MEMORY_BYTES_MAX:
            result.unclear["memory"] = f"{grown} bytes more"
        pipe.send(result)


class _Worker:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(folder, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.seed: int | None = None
        self.deadline = 0.0

    def give(self, seed: int) -> None:
        self.seed, self.deadline = seed, time.monotonic() + CASE_SECONDS_MAX
        self.pipe.send(seed)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def run_seeds(folder: Path, seeds: Iterable[int]) -> Iterator[Result]:
    """The results of cases, as they come; a process that crashes or hangs is a result too.

    ``folder`` holds the log and the right answers, as :func:`prepare_log` leaves them.
    """
    todo = iter(seeds)
    workers: list[_Worker] = []
    try:
        while True:
            workers += [_Worker(folder) for _ in range(WORKERS - len(workers))]
            for worker in workers:
                if worker.seed is None and (seed := next(todo, None)) is not None:
                    worker.give(seed)
            busy = [w for w in workers if w.seed is not None]
            if not busy:
                return
            ready = wait([w.pipe for w in busy], timeout=1.0)
            for worker in busy:
                result = _result_of(worker, worker.pipe in ready)
                if result is not None:
                    yield result
                    if not worker.process.is_alive():
                        workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def _result_of(worker: _Worker, ready: bool) -> Result | None:
    seed = worker.seed
    assert seed is not None
    if ready:
        try:
            result: Result = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            ended = f"the interpreter ended with {worker.process.exitcode}"
            return Result(seed, "?", "?", "", unclear={"process": ended})
        worker.seed = None
        return result
    if time.monotonic() > worker.deadline:
        worker.end()
        return Result(seed, "?", "?", "", unclear={"process": f"no answer in {CASE_SECONDS_MAX:g} s"})
    return None


def prepare_log(folder: Path) -> None:
    """Make the log and its right answers."""
    build(folder / "log")
    right = right_answers(folder)
    (folder / "right").write_bytes(pickle.dumps(right))


def run(seconds: float, seed: int) -> dict[str, int | str | list[str]]:
    """Cases until the time is over; a case is replayed with :func:`run_seeds` and its seed.

    A quarter of the time is for single bits of single files.
    """
    until = time.monotonic() + seconds * 3 / 4
    counts: Counter[str] = Counter()
    failures: list[str] = []

    def seeds() -> Iterator[int]:
        at = seed
        while time.monotonic() < until:
            yield at
            at += 1

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_log(folder)
        for result in run_seeds(folder, seeds()):
            counts["cases"] += 1
            outcome = "limit" if result.limit else "clear failures" if result.errors else "right"
            counts[outcome if result.ok else "wrong"] += 1
            if not result.ok:
                failures.append(str(result))
            if counts["cases"] % 100 == 0:
                print(f"corruption: {counts['cases']} cases, {len(failures)} failures", flush=True)
        bits, wrong = _run_bits(folder, until + seconds / 4, seed)
    failures += wrong
    return {**counts, **{f"bits: {name}": n for name, n in bits.items()}, "seed": seed, "failures": failures}


def _run_bits(folder: Path, until: float, seed: int) -> tuple[Counter[str], list[str]]:
    """Bits of the first file of every table, in strides, until the time is over or all bytes were tried."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for first in range(BITS_STRIDE):
        for table in TABLES:
            if time.monotonic() > until:
                return counts, failures
            scratch = folder / f"bits-{first}-{table}"
            file = files_by_kind(folder / "log")[f"{table} parquet"][0]
            more, wrong = flip_bits(file, table, scratch, BITS_STRIDE, (first + seed) % BITS_STRIDE)
            counts += more
            failures += wrong
            shutil.rmtree(scratch)
    return counts, failures
