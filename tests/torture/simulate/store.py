"""Tables of a commit log on a store that behaves as badly as an object store may.

It loses acknowledgements, reports races that were none, lets a commit land long after it was given up, and removes the
head of a table's log under a writer that sleeps. Its lists are consistent. Files are Arrow tables, unencoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rmq_spark._core.storage.compare_and_set import compare_and_set
from rmq_spark._core.storage.data_file import column_stats
from rmq_spark._core.storage.foreign_commits import OWN, Changed
from rmq_spark._core.storage.table import BOUNDS, Clock, actions_schema, bounds_of
from rmq_spark._core.vocabulary.options import CLOCK_SKEW_S_MAX
from rmq_spark.errors import ClockError, CorruptLogError, StrippedError
from tests.support.inside import PAYLOAD_COLUMNS, Change, DataFile, RowRange, Runtime, WriterLock
from tests.torture.judge.history import History, Kind, Phase
from tests.torture.simulate.scheduler import Scheduler


@dataclass
class Weather:
    """How often the store does what; each a chance per operation."""

    lost_ack: float = 0.0  # the commit landed, and an error says that nobody knows
    own_race: float = 0.0  # the commit landed, and the store says that somebody else was faster (412)
    false_race: float = 0.0  # the store says that somebody was faster (409), and nobody was
    failure: float = 0.0  # the commit did not land, and an error says that nobody knows
    delayed: float = 0.0  # an error, and the commit lands later when its version is still free
    unreadable: float = 0.0  # a refresh fails
    on_own_disk: bool = False  # whose clock is the writer's

    def calm(self) -> None:
        for name in self.chances():
            setattr(self, name, 0.0)

    @classmethod
    def chances(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name != "on_own_disk"]


class Unanswered(OSError):
    """The store did not answer in time."""


@dataclass
class State:
    """A version of a table."""

    version: int
    files: dict[str, dict[str, Any]]
    transactions: dict[str, int]
    name: str  # of the commit
    change: Change | None = None
    table: pa.Table | None = None


@dataclass
class Content:
    """What all handles of a table share."""

    versions: list[State]
    kept_from: int = 0  # log entries below are cleaned up
    below_head: list[tuple[int, Change]] = field(default_factory=list)
    on_the_way: list[tuple[int, Change]] = field(default_factory=list)
    removed: dict[str, float] = field(default_factory=dict)


_NO_ROWS: dict[int, tuple[pa.Schema, pa.Table]] = {}


def no_rows(schema: pa.Schema) -> pa.Table:
    """Of a schema: to make it takes longer than most reads, and so does a schema's hash."""
    if id(schema) not in _NO_ROWS:
        _NO_ROWS[id(schema)] = (schema, schema.empty_table())
    return _NO_ROWS[id(schema)][1]


class Files:
    """Data files, as Arrow tables; as much of a file system as the log needs.

    Files never change, so what was read once is kept: most processes read what others have read.
    """

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.ever: dict[str, pa.Table] = {}  # also those that were removed
        self.serial = 0
        self.readings: dict[tuple[object, ...], pa.Table] = {}
        self.addresses: dict[str, dict[tuple[str, int, int], int]] = {}

    def put(self, folder: str, rows: pa.Table, prefix: str, stats_columns: Sequence[str]) -> DataFile:
        self.serial += 1
        path = f"{prefix}-{self.serial:04}.parquet"
        self.tables[f"{folder}/{path}"] = self.ever[f"{folder}/{path}"] = rows
        return DataFile(path, 1, rows.num_rows, column_stats(rows, stats_columns))

    def get(self, path: str) -> pa.Table:
        if path not in self.tables:
            raise FileNotFoundError(path)
        return self.tables[path]

    def delete_file(self, path: str) -> None:
        """Delete a file, as a drainer that another one overtook does."""
        del self.tables[path]

    def read(self, paths: Sequence[str], columns: Sequence[str], where: pc.Expression | None) -> pa.Table:
        """Rows of some files, all of which are there."""
        tables = [self.get(path) for path in paths]
        known = (*paths, *columns, str(where))
        if known not in self.readings:
            rows = pa.concat_tables(tables)
            self.readings[known] = (rows if where is None else rows.filter(where)).select(list(columns))
        return self.readings[known]

    def positions(self, path: str) -> Mapping[tuple[str, int, int], int]:
        """Where the rows of a half file lie, by half id, file number and row number."""
        table = self.get(path)
        if path not in self.addresses:
            columns = [table[name].to_pylist() for name in ("half_id", "file_no", "row_no")]
            self.addresses[path] = {address: i for i, address in enumerate(zip(*columns, strict=True))}
        return self.addresses[path]


def write_table(
    fs: Files, folder: str, table: pa.Table, *, prefix: str, stats_columns: Sequence[str], **_: object
) -> DataFile:
    """Stands in for ``data_file.write_table`` where half files are staged."""
    return fs.put(folder, table, prefix, stats_columns)


def read_range(fs: Files, folder: str, wanted: RowRange, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
    """Stands in for ``row_range.read_range``: rows of ``half`` by address, those of ``messages`` by place."""
    if wanted.table != "half":
        rows = fs.get(f"{folder}/{wanted.path}").select(list(columns))
        yield 0, pa.concat_tables([rows.slice(first, last - first + 1) for first, last in wanted.ranges])
        return
    positions = fs.positions(f"{folder}/{wanted.path}")
    asked = [(w.half_id, w.file_no, n) for w in wanted.each for a, b in w.ranges for n in range(a, b + 1)]
    at = [positions[address] for address in asked if address in positions]
    if len(at) != wanted.rows:
        raise CorruptLogError(f"{wanted.path} holds {len(at)} of {wanted.rows} rows of {wanted.half_id}")
    table = fs.get(f"{folder}/{wanted.path}")
    if has_stripped_rows(table, at, columns):
        raise StrippedError(f"{wanted.path} has no payload of rows of {wanted.half_id}")
    rows = table.select(list(columns))
    yield 0, rows.slice(at[0], len(at)) if at == list(range(at[0], at[0] + len(at))) else rows.take(at)


def has_stripped_rows(table: pa.Table, at: Sequence[int], columns: Sequence[str]) -> bool:
    """Whether some rows have no payload, of which columns are wanted."""
    born = table["born_timestamp"]
    wanted = bool(born.null_count) and not set(PAYLOAD_COLUMNS).isdisjoint(columns)
    return wanted and born.take(list(at)).null_count > 0


class SimulatedClock:
    """The store's clock is right. A disk of the machine's own goes wrong with it, and notices nothing."""

    def __init__(self, scheduler: Scheduler, on_own_disk: bool = False) -> None:
        self._scheduler, self.on_own_disk = scheduler, on_own_disk

    def require_near(self) -> None:
        ahead_s = self._scheduler.machine_s() - self._scheduler.wall_s()
        if abs(ahead_s) > CLOCK_SKEW_S_MAX and not self.on_own_disk:
            raise ClockError(f"the clock is {ahead_s:g} s ahead")


class SimulatedTable:
    """A ``rmq_spark._core.storage.table.Table`` on a store with weather: one handle of one process."""

    def __init__(
        self,
        name: str,
        schema: pa.Schema,
        scheduler: Scheduler,
        weather: Weather,
        history: History,
        runtime: Runtime,
        files: Files,
        content: Content | None = None,
    ) -> None:
        self.name, self.schema, self.uri, self.folder = name, schema, f"simulated:{name}", name
        self.history_s = 0.0
        self.fs: Any = files
        self.runtime = runtime
        self.lock = runtime.lock()
        self.clock: Clock = SimulatedClock(scheduler, weather.on_own_disk)
        self.content = content or Content([State(0, {}, {}, f"{name} is made")])
        self._scheduler, self._weather, self._history = scheduler, weather, history
        self._state = self.content.versions[-1]
        self._acknowledged: int | None = None
        self._tried: list[Change] = []
        self._turns = WriterLock(None, runtime)

    def another(self) -> SimulatedTable:
        """The handle of another process."""
        parts = (self._scheduler, self._weather, self._history, self.runtime, self.fs, self.content)
        return SimulatedTable(self.name, self.schema, *parts)

    # ------------------------------------------------------------------ reading
    @property
    def id(self) -> str:
        return self.name

    @property
    def version(self) -> int:
        self._scheduler.interleave()
        return self._state.version

    def refresh(self) -> int:
        with self.lock:
            return self._refresh()

    def _refresh(self) -> int:
        self._scheduler.step()
        self._let_land()
        if self._scheduler.chance.random() < self._weather.unreadable:
            raise Unanswered(f"the log of {self.name} cannot be listed")
        self._state = self.content.versions[-1]
        return self._state.version

    def actions(self) -> pa.Table:
        self._scheduler.interleave()
        state = self._state
        if state.table is None:
            state.table = pa.Table.from_pylist(list(state.files.values()), schema=actions_schema(self.name))
        return state.table

    def removed_since(self, age_s: float | None = None) -> set[str]:
        now = self._scheduler.wall_s()
        return {path for path, at in self.content.removed.items() if age_s is None or now - at < age_s}

    def changed_by_others(self, since: int) -> Changed | None:
        before, now = self.content.versions[since], self._state
        return None if before.files == now.files else Changed(f"changed files ({now.name})", restorable=True)

    def transaction_version(self, app_id: str) -> int | None:
        self._scheduler.interleave()
        return self._state.transactions.get(app_id)

    def read(
        self, paths: Sequence[str], columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        self._scheduler.interleave()
        names = list(columns) if columns is not None else self.schema.names
        if not paths:
            return no_rows(self.schema).select(names)
        return self.fs.read([f"{self.folder}/{path}" for path in paths], names, where)

    def read_range(
        self, wanted: RowRange, columns: Sequence[str], where: None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        self._scheduler.interleave()
        return read_range(self.fs, self.folder, wanted, columns)

    # ------------------------------------------------------------------ writing
    def write(self, rows: pa.Table) -> DataFile:
        began_s = self._scheduler.now
        file = self.fs.put(self.folder, rows, self.name, tuple(BOUNDS.get(self.name, ())))
        self._scheduler.step()
        return replace(file, written_s=began_s)

    def missing(self, files: Sequence[DataFile]) -> list[DataFile]:
        return [f for f in files if f"{self.folder}/{f.path}" not in self.fs.tables]

    def compare_and_set(
        self, propose: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        with self.lock:
            return self._compare_and_set(propose, landed)

    def _compare_and_set(
        self, propose: Callable[[int], Change | None], landed: Callable[[Change], bool]
    ) -> Change | None:
        self._acknowledged, self._tried = None, []
        change = compare_and_set(self, propose, landed, self.try_commit, self._turns)
        # A merge is content when somebody else has merged the same files: nobody is told whose commit it was. And one
        # that went below the head is no version, but an earlier try with the same rows may have landed.
        if change is not None and self._acknowledged is not None and not change.remove and not self._landed_before():
            self._history.note(
                Kind.VERSION, Phase.OK, self._process(), table=self.name, version=self._acknowledged,
                payload=name_of(change),
            )  # fmt: skip
        return change

    def _landed_before(self) -> bool:
        """Whether an earlier try is in the table's state, and the last one below its head."""
        *earlier, last = self._tried
        lost = any(change is last for _, change in self.content.below_head)
        return lost and any(state.change is change for state in self.content.versions for change in earlier)

    def try_commit(self, change: Change) -> bool:
        """Put the entry of the next version, and say what the store says."""
        self._acknowledged = None
        if change.is_stale(self._state.version):  # a call within the proposal has moved the table
            return False
        self._tried.append(change)
        version = self._state.version + 1
        self._scheduler.step()
        self._let_land()
        lands, answer = self._fate()
        if lands is None:
            self.content.on_the_way.append((version, change))
        done = bool(lands) and self.put(version, change)
        self._scheduler.step()  # the process may die between the commit and its acknowledgement
        if answer is None:
            raise Unanswered(f"version {version} of {self.name} timed out")
        if not (done and answer):
            return False
        self._acknowledged = version
        return True

    def _fate(self) -> tuple[bool | None, bool | None]:
        """Whether a commit lands (None: later), and what the store says of it (None: nothing)."""
        weather, chance = self._weather, self._scheduler.chance.random()
        for rate, lands, answer in (
            (weather.false_race, False, False),
            (weather.failure, False, None),
            (weather.delayed, None, None),
            (weather.own_race, True, False),
            (weather.lost_ack, True, None),
        ):
            chance -= rate
            if chance < 0:
                return lands, answer
        return True, True

    def put(self, version: int, change: Change) -> bool:
        """Put-if-absent of a log entry. True also when it went below the head, where nobody looks."""
        content = self.content
        head = content.versions[-1]
        if version <= head.version:
            if version >= content.kept_from:
                return False
            content.below_head.append((version, change))
            return True
        content.versions.append(self.next_state(head, change))
        content.removed.update(dict.fromkeys(change.remove, self._scheduler.wall_s() - change.removed_earlier_s))
        return True

    def next_state(self, head: State, change: Change) -> State:
        removed = set(change.remove)
        # A removal that names no deletion vector leaves a file in the table that has one.
        files = {path: a for path, a in head.files.items() if path not in removed or "deletion_vector" in a}
        for f in change.add:
            files[f.path] = {
                "path": f.path,
                "modification_time": change.modification_time_ms or int(self._scheduler.machine_s() * 1000),
                "num_records": f.rows,
                "size_bytes": f.size_bytes,
                **bounds_of(self.name, f.stats),
            }
        transactions = {**head.transactions, **change.transactions}
        return State(head.version + 1, files, transactions, name_of(change), change)

    # ------------------------------------------------------------------ another writer
    def delete_a_row(self) -> int | None:
        """Somebody's DELETE with a deletion vector: the newest file stays, and readers of Delta pass over a row of it.
        Returns the version before; None for an empty table."""
        head = self.content.versions[-1]
        if not head.files:
            return None
        path = max(head.files)
        files = {**head.files, path: {**head.files[path], "deletion_vector": self._scheduler.now}}
        self.content.versions.append(State(head.version + 1, files, head.transactions, f"a row of {path} is deleted"))
        return head.version

    def restore(self, version: int) -> None:
        """Somebody's RESTORE: the files of an older version. What applications have noted stays."""
        head = self.content.versions[-1]
        files = dict(self.content.versions[version].files)
        self.content.versions.append(State(head.version + 1, files, head.transactions, f"version {version} is back"))

    def _let_land(self) -> None:
        """What was given up may arrive now, when its version is still free."""
        while self.content.on_the_way and self._scheduler.chance.random() < 0.5:
            version, change = self.content.on_the_way.pop(0)
            self.put(version, change)

    def land_all(self) -> None:
        """What was given up arrives at last, when its version is still free."""
        for version, change in self.content.on_the_way:
            self.put(version, change)
        self.content.on_the_way.clear()

    def clean_up(self, kept: int) -> None:
        """Remove the entries of the table's log but for the newest so many."""
        self.content.kept_from = max(self.content.kept_from, self.content.versions[-1].version - kept)

    # ------------------------------------------------------------------ afterwards
    def rows(self) -> pa.Table:
        """What the newest version holds, whatever the weather; files that are gone hold nothing."""
        files = [self.fs.tables.get(f"{self.folder}/{path}") for path in self.content.versions[-1].files]
        return pa.concat_tables([no_rows(self.schema), *(f for f in files if f is not None)])

    def ever(self) -> pa.Table:
        """All rows that were ever committed, also those that have left since."""
        commits = [state.change for state in self.content.versions if state.change and state.change.data_change]
        files = [self.fs.ever[f"{self.folder}/{f.path}"] for change in commits for f in change.add]
        return pa.concat_tables([no_rows(self.schema), *files])

    def note_versions(self) -> None:
        for state in self.content.versions:
            self._history.note(Kind.LISTED, table=self.name, version=state.version, payload=state.name)

    def _process(self) -> str:
        current = self._scheduler.current
        return current.name if current is not None else "main"


def name_of(change: Change) -> str:
    """What a commit is known by: the first file that it adds, or removes; else what it notes."""
    if change.add:
        return change.add[0].path
    noted = sorted((name, n) for name, n in change.transactions.items() if name != OWN)  # which the loop adds
    return f"without {change.remove[0]}" if change.remove else f"noting {noted}"


def prepared_s(half: SimulatedTable) -> Mapping[str, float]:
    """When each half batch was prepared: the time of its first file, whatever has become of that."""
    found: dict[str, float] = {}
    for state in half.content.versions:
        for file in state.change.add if state.change else ():
            action = state.files[file.path]
            found.setdefault(action["min.half_id"], action["modification_time"] / 1000)
    return found
