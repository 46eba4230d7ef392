"""The question, the decision and the answer of ``txmq resolve``."""

from __future__ import annotations

import shlex

from rmq_spark._core.log.batch_state import COMMITTED_STATES, OPEN_STATES, ROLLED_BACK_STATES, BatchState
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark.cli.bodies import peek
from rmq_spark.cli.command import path_to_type, sentence_of
from rmq_spark.cli.output import hanging, shortened
from rmq_spark.cli.text import escaped, one_line, short_age, short_text, short_time
from rmq_spark.errors import TxmqError
from rmq_spark.listeners import COMMIT_MESSAGE, ROLLBACK_MESSAGE
from rmq_spark.log import CommitLog, Placed, RowState
from rmq_spark.report import Standing

SHOWN = 3
"""Messages shown before the question."""
_RUNS_AGAIN = (
    "a restart of its query, or the same send under its idempotency key, runs it again. Resolve it when that has made "
    "it pending"
)


class Resolving:
    """A person's verdict, ``COMMIT`` or ``ROLLBACK``, on one half batch."""

    def __init__(self, log: CommitLog, half_id: str, verdict: str) -> None:
        self._log = log
        self._commits = verdict == "COMMIT"
        self._record = log.engine.get(half_id)
        self._state = log.engine.state_of(self._record)
        self._open = self._state.count(*OPEN_STATES)
        self._in_conflict = self._state.conflicting().count
        self.acts = bool(self._open or self._in_conflict)
        """False when nothing is left to decide."""

    def description(self, width: int | None) -> str:
        """Return the half batch's ids, groups, topics, age and undecided messages, for a terminal of this width."""
        header, now = self._record.header, self._log.engine.runtime.now()
        prepared_at = self._record.prepared_at
        age = short_age((now - prepared_at).total_seconds())
        lines = {
            "half_id": self._record.half_id,
            "producer_group": header.producer_group,
            "app_id": header.app_id,
            "batch_id": str(header.batch_id),
            "topics": ", ".join(sorted({s.topic for f in self._record.files.values() for s in f.segments})),
            "prepared_at": f"{short_time(prepared_at)}, {age} ago",
            "pending": count_of(self._state.count(RowState.PENDING), "message"),
            "quarantined": count_of(self._state.count(RowState.QUARANTINED), "message"),
            "in conflict": f"{count_of(self._in_conflict, 'message')}: {self._verdicts()}",
        }
        if self._state.leased(now):
            lines["lease_until"] = f"{short_time(self._state.lease_until or now)}: its local transaction may be running"
        if not self._in_conflict:
            del lines["in conflict"]
        return "\n".join(hanging(name, one_line(value), 16, False, width) for name, value in lines.items())

    def _verdicts(self) -> str:
        """Return both verdicts of a half batch in conflict: by whom, why, and which came too late."""
        standing = Standing(self._log.engine)
        (rows,) = standing.with_reasons([r for r in standing.conflicts if r["half_id"] == self._record.half_id])
        return ", ".join(str(row["reason"]) for row in rows)

    def messages(self, width: int | None = None) -> str:
        """Return the first messages to decide on, one line each: topic, keys, the beginning of the body."""
        chosen = self._state.rows_in(OPEN_STATES) or self._state.conflicting()
        try:
            table = self._log.engine.half.read(self._record, chosen.first(SHOWN), ["topic", "keys", "body"])
        except TxmqError as problem:  # a person may still decide
            return f"its messages cannot be shown: {sentence_of(problem)}"
        rows = [
            (one_line(row["topic"]), escaped(short_text(row["keys"] or "")), peek(row["body"]))
            for row in table.to_pylist()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(chars) for cell, chars in zip(row, widths, strict=True)) for row in rows]
        lines = [f"  {line if width is None else shortened(line, width - 2, 1.0)}".rstrip() for line in lines]
        more = chosen.count - len(rows)
        if more:
            path = path_to_type()
            query = f"txmq query {path}--half-id {shlex.quote(one_line(self._record.half_id))}"
            lines.append(hanging("", f"and {count_of(more, 'more message')}: {query}", 2, False, width))
        return "\n".join(lines)

    def question(self) -> str:
        if self._commits:
            return "Commit them? Messages that became visible cannot be taken back."
        return "Roll them back? Nobody will see these messages."

    def run(self, reason: str) -> str:
        """Decide, and return what became of the messages. When visible ones would have to be taken back, that is a
        VerdictConflictError."""
        placed = self._log.resolve(self._record.half_id, COMMIT_MESSAGE if self._commits else ROLLBACK_MESSAGE, reason)
        state = self._log.engine.state_of(self._record)
        return (self._committed(placed, state) if self._commits else self._rolled_back(state)) or self._as_before(state)

    def _committed(self, placed: list[Placed], state: BatchState) -> str:
        own_count = sum(p.count for p in placed if p.half_id in ("", self._record.half_id))
        waiting = state.count(RowState.WAITING) - self._state.count(RowState.WAITING)
        clauses = [f"{count_of(own_count, 'message')} became visible"] if own_count else []
        if waiting > 0:
            clauses.append(
                f"{count_of(waiting, 'message')} {'is' if waiting == 1 else 'are'} committed, and wait"
                f"{'s' if waiting == 1 else ''} for a time or for an earlier message"
            )
        return "; ".join(clauses)

    def _rolled_back(self, state: BatchState) -> str:
        count = state.count(*ROLLED_BACK_STATES) - self._state.count(*ROLLED_BACK_STATES)
        return f"{count_of(count, 'message')} {'was' if count == 1 else 'were'} rolled back" if count > 0 else ""

    def _as_before(self, state: BatchState) -> str:
        """Return the answer for a half batch whose messages all keep their verdicts."""
        committed, rolled_back = state.count(*COMMITTED_STATES), state.count(*ROLLED_BACK_STATES)
        by_check = state.count(RowState.ROLLED_BACK_BY_CHECK)
        if committed and rolled_back:
            changed = "the conflict is over, and no message was changed" if self._in_conflict else "nothing was changed"
            counts = " and ".join(
                f"{count_of(count, 'message')} {'is' if count == 1 else 'are'} {what}"
                for count, what in ((committed, "committed"), (rolled_back, "rolled back already"))
            )
            not_final = f". What a check rolled back is not final: {_RUNS_AGAIN}" if by_check else ""
            return f"{changed}: {counts}{not_final}"
        if committed:
            return "its messages were committed already, and stay so"
        if by_check:
            return f"nothing was changed. A check has rolled it back already, which is not final: {_RUNS_AGAIN}"
        return "its messages were rolled back already, and stay so"
