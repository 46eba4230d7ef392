"""Half batches whose rows lie in ``half`` twice: which copy stays, and how the other one leaves the table.

Before one lock owned the tables of a commit log, two processes that sent under one idempotency key could prepare a
half batch twice, when threads of one of them shared a log. Whatever looks at such a half batch raises CorruptLogError.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark.commitlog.half import HALF_SCHEMA, STATS_COLUMNS
from rmq_spark.commitlog.op import Kind
from rmq_spark.errors import CorruptLogError
from rmq_spark.storage.table import Change, Table, has_held

CONTENT = [name for name in HALF_SCHEMA.names if name not in ("born_timestamp", "store_timestamp")]
"""What two copies must share to be the same messages; the times are those of their staging."""
PLACING = (Kind.COMMIT.value, Kind.PLACE.value)


@dataclass(frozen=True)
class TwicePrepared:
    """A half batch whose rows lie twice.

    Attributes
    ----------
    half_id : str
    kept : tuple of str
        Files whose rows stay.
    removed : tuple of str
        Files that leave the table; they stay on disk until a vacuum. Empty when nothing can be done.
    rewritten : tuple of str
        Those of ``removed`` that hold other rows too, which are written anew without the second copy.
    why : str
        How the copy was chosen, or what a person has to do.
    done : bool
        True when the table has been put right.
    """

    half_id: str
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    rewritten: tuple[str, ...]
    why: str
    done: bool = False

    def __str__(self) -> str:
        if not self.removed:
            return f"half batch {self.half_id!r} lies twice, in {', '.join(self.kept)}, and stays so: {self.why}"
        what = "was put right" if self.done else "is to be put right"
        rewritten = f"; written anew: {', '.join(self.rewritten)}" if self.rewritten else ""
        return (
            f"half batch {self.half_id!r} lies twice and {what}: {self.why}; "
            f"kept: {', '.join(self.kept)}; removed: {', '.join(self.removed)}{rewritten}"
        )


@dataclass(frozen=True)
class RepairReport:
    """What a repair found, and what it did.

    Attributes
    ----------
    dry_run : bool
        True when nothing was changed.
    found : tuple of TwicePrepared
    """

    dry_run: bool
    found: tuple[TwicePrepared, ...] = ()

    @property
    def left(self) -> tuple[TwicePrepared, ...]:
        """Half batches that still lie twice."""
        return tuple(f for f in self.found if not f.done)

    def __str__(self) -> str:
        return "\n".join(map(str, self.found)) or "no half batch lies twice"


@dataclass(frozen=True)
class _Copy:
    """Rows of one half file, as they lie in one file of the table."""

    path: str
    file_no: int
    prepared_ms: int
    staged: Any
    positions: tuple[int, ...]  # in the file, by row_no
    content: pa.Table = field(repr=False)

    @property
    def order(self) -> tuple[object, ...]:
        return self.prepared_ms, self.staged, self.path


class _Untold(Exception):
    """Nothing says which copy is the right one."""


def repair(half: Table, op: Table, dry_run: bool) -> RepairReport:
    """Find the half batches that lie twice, and take the second copies out of ``half``. The caller holds the lock."""
    half.refresh()
    op.refresh()
    found = [_repair(half, op, half_id, paths, dry_run) for half_id, paths in sorted(_suspects(half).items())]
    return RepairReport(dry_run, tuple(f for f in found if f is not None))


def _suspects(half: Table) -> dict[str, list[str]]:
    """Half batches of which the rows of a half file lie in two files, or twice in one; and where they lie."""
    lies: dict[tuple[str, int], list[str]] = defaultdict(list)
    twice: set[str] = set()
    for path in sorted(half.actions()["path"].to_pylist()):
        rows = half.read([path], ["half_id", "file_no", "row_no"])
        counts = rows.group_by(["half_id", "file_no"], use_threads=False).aggregate(
            [("row_no", "count"), ("row_no", "count_distinct")]
        )
        for r in counts.to_pylist():
            lies[r["half_id"], r["file_no"]].append(path)
            if r["row_no_count"] > r["row_no_count_distinct"] or len(lies[r["half_id"], r["file_no"]]) > 1:
                twice.add(r["half_id"])
    return {h: sorted({p for (other, _), paths in lies.items() if other == h for p in paths}) for h in twice}


def _repair(half: Table, op: Table, half_id: str, paths: Sequence[str], dry_run: bool) -> TwicePrepared | None:
    files = {path: half.read([path]) for path in paths}
    copies = list(_copies(half, half_id, files))
    if not _overlap(copies):
        return None  # one half batch, whose rows somebody has spread over files
    try:
        kept, why = _choose(copies, _op_rows(op, half_id))
    except _Untold as problem:
        return TwicePrepared(half_id, tuple(paths), (), (), str(problem))
    lost: dict[str, set[int]] = defaultdict(set)
    for copy in copies:
        if copy not in kept:
            lost[copy.path].update(copy.positions)
    rewritten = {path: rows for path, rows in lost.items() if len(rows) < files[path].num_rows}
    found = TwicePrepared(
        half_id, tuple(sorted({c.path for c in kept})), tuple(sorted(lost)), tuple(sorted(rewritten)), why
    )
    if dry_run:
        return found
    done = _remove(half, sorted(set(lost) - set(rewritten)))
    for path, rows in sorted(rewritten.items()):
        done = done and _rewrite(half, path, files[path], rows)
    return replace(found, done=done)


# ---------------------------------------------------------------- what lies where
def _copies(half: Table, half_id: str, files: dict[str, pa.Table]) -> Iterator[_Copy]:
    """The rows of a half batch, as often as they are there: by half file, and by the time of their staging."""
    actions = half.actions().select(["path", "modification_time"]).to_pylist()
    prepared_ms = {a["path"]: a["modification_time"] for a in actions}
    for path, rows in files.items():
        columns = [rows[name].to_pylist() for name in ("half_id", "file_no", "row_no", "store_timestamp")]
        if any(None in values for values in columns):
            raise CorruptLogError(f"{path} has a row without a part of its address: table half was changed by hand")
        mine = [(f, r, at, i) for i, (h, f, r, at) in enumerate(zip(*columns, strict=True)) if h == half_id]
        seen: Counter[tuple[int, int]] = Counter()
        found: dict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
        for file_no, row_no, staged, position in sorted(mine):
            found[file_no, seen[file_no, row_no]].append((position, staged))
            seen[file_no, row_no] += 1
        for (file_no, _), part in sorted(found.items()):
            positions = tuple(position for position, _ in part)
            yield _Copy(
                path, file_no, prepared_ms[path], part[0][1], positions, rows.select(CONTENT).take(list(positions))
            )


def _overlap(copies: Iterable[_Copy]) -> bool:
    addresses = Counter((c.file_no, row_no) for c in copies for row_no in c.content["row_no"].to_pylist())
    return max(addresses.values()) > 1


def _op_rows(op: Table, half_id: str) -> pa.Table:
    """The op rows that gave messages of a half batch their place, or promised one."""
    rows = op.read(op.actions()["path"].to_pylist(), ["kind", "path"], pc.field("half_id") == half_id)
    return rows.filter(pc.is_in(rows["kind"], value_set=pa.array(PLACING)))


# ---------------------------------------------------------------- which copy stays
def _choose(copies: Sequence[_Copy], committed: pa.Table) -> tuple[list[_Copy], str]:
    """The copies that stay and why. Raises :class:`_Untold`."""
    named = set(committed["path"].to_pylist())
    by_file: dict[int, list[_Copy]] = defaultdict(list)
    for copy in sorted(copies, key=lambda c: c.order):
        by_file[copy.file_no].append(copy)
    if all(c.content.equals(some[0].content) for some in by_file.values() for c in some):
        kept = [next((c for c in some if c.path in named), some[0]) for some in by_file.values()]
        by_op = any(c.path in named for c in kept)
        return kept, "the copies are equal; " + ("op names the one kept" if by_op else "the first prepared is kept")
    prepares: dict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        prepares[copy.prepared_ms].append(copy)
    if len(prepares) < 2 or any(_overlap(some) for some in prepares.values()):
        raise _Untold(
            "its copies are different messages, and somebody's rewrite has mixed them. Find out which are right, "
            "and write the file without the others by hand"
        )
    if committed.num_rows == 0:
        return prepares[min(prepares)], "op names no copy; the first prepared is kept"
    seen = [some for some in prepares.values() if any(c.path in named for c in some)]
    if len(seen) == 1:
        return seen[0], "op names the one kept"
    raise _Untold(
        f"its copies are different messages, and op names {len(seen) or 'none'} of them: readers may have seen any. "
        "Find out which are right, and remove the files of the others by hand"
    )


# ---------------------------------------------------------------- the other one leaves
# Without dataChange, as an OPTIMIZE commits: Delta refuses any other removal from a table that is append-only.
def _remove(half: Table, paths: Sequence[str]) -> bool:
    """Take files out of the table in one commit; False when somebody has rewritten one meanwhile."""

    def propose(version: int) -> Change | None:
        return Change(remove=paths, data_change=False) if _live(half).issuperset(paths) else None

    if not paths:
        return True
    return half.compare_and_set(propose, lambda change: _live(half).isdisjoint(change.remove)) is not None


def _rewrite(half: Table, path: str, rows: pa.Table, lost: set[int]) -> bool:
    """Write a file anew without some of its rows. Its time stays: it says when its other rows were prepared."""
    actions = half.actions()
    at = actions.filter(pc.equal(actions["path"], path))["modification_time"].to_pylist()
    if not at:
        return False
    kept = rows.take([i for i in range(rows.num_rows) if i not in lost])
    file = half.write(kept, "rewritten", STATS_COLUMNS)
    change = Change(add=[file], remove=[path], modification_time_ms=at[0], data_change=False)

    def propose(version: int) -> Change | None:
        return change if path in _live(half) else None

    def landed(change: Change) -> bool:
        return all(has_held(half, file) for file in change.add)

    return half.compare_and_set(propose, landed) is not None


def _live(half: Table) -> set[str]:
    return set(half.actions()["path"].to_pylist())
