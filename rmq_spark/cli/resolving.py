"""What ``txmq resolve`` asks, does and says."""

from __future__ import annotations

from rmq_spark._core.client.commit_log import CommitLog
from rmq_spark._core.log.op import BatchState, RowState
from rmq_spark._core.log.op_table import COMMITTED_STATES, OPEN_STATES, ROLLED_BACK_STATES, Placed
from rmq_spark._core.vocabulary.text import count_of
from rmq_spark._core.vocabulary.verdicts import COMMIT_MESSAGE, ROLLBACK_MESSAGE
from rmq_spark.cli.bodies import peek
from rmq_spark.cli.command import path_to_type, sentence_of
from rmq_spark.cli.text import age_in_words, escaped, one_line, short_text, short_time
from rmq_spark.errors import TxmqError

SHOWN = 3
"""Messages that a person sees before the question."""
_RUNS_AGAIN = (
    "a restart of its query, or the same send under its idempotency key, runs it again. Resolve it when that has made "
    "it pending"
)


class Resolving:
    """A person's verdict on one half batch.

    Parameters
    ----------
    log : CommitLog
    half_id : str
    verdict : str
        ``COMMIT`` or ``ROLLBACK``.
    """

    def __init__(self, log: CommitLog, half_id: str, verdict: str) -> None:
        self._log = log
        self._commits = verdict == "COMMIT"
        self._record = log.engine.get(half_id)
        self._state = log.engine.state_of(self._record)
        self._open = self._state.count(*OPEN_STATES)
        self._in_conflict = self._state.conflicting().count
        self.acts = bool(self._open or self._in_conflict)
        """False when nothing is left to be decided."""

    def description(self) -> str:
        """Return whose half batch it is, how old, and what of it waits, a line for each."""
        header, now = self._record.header, self._log.engine.runtime.now()
        prepared_at = self._record.prepared_at
        age = age_in_words((now - prepared_at).total_seconds())
        lines = {
            "half_id": self._record.half_id,
            "producer_group": header.producer_group,
            "app_id": header.app_id,
            "batch_id": str(header.batch_id),
            "topics": ", ".join(sorted({s.topic for f in self._record.files.values() for s in f.segments})),
            "prepared_at": f"{short_time(prepared_at)}, {age} ago",
            "pending": count_of(self._state.count(RowState.PENDING), "message"),
            "quarantined": count_of(self._state.count(RowState.QUARANTINED), "message"),
            "in conflict": count_of(self._in_conflict, "message"),
        }
        if self._state.leased(now):
            lines["lease_until"] = f"{short_time(self._state.lease_until or now)}: its local transaction may be running"
        if not self._in_conflict:
            del lines["in conflict"]
        return "\n".join(f"{name:<16}{one_line(value)}" for name, value in lines.items())

    def messages(self) -> str:
        """Return the first messages that the verdict is about, a line for each: topic, keys, the body's beginning."""
        chosen = self._state.rows_in(OPEN_STATES) or self._state.conflicting()
        try:
            found = self._log.engine.half.read(self._record, chosen.first(SHOWN), ["topic", "keys", "body"])
        except TxmqError as problem:  # a person may still decide
            return f"its messages cannot be shown: {sentence_of(problem)}"
        rows = [
            (one_line(row["topic"]), escaped(short_text(row["keys"] or "")), peek(row["body"]))
            for row in found.to_pylist()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        more = chosen.count - len(rows)
        if more:
            at = path_to_type()
            lines.append(f"and {count_of(more, 'more message')}: txmq query {at}--half-id {self._record.half_id}")
        return "\n".join(f"  {line.rstrip()}" for line in lines)

    def question(self) -> str:
        """Return what a person has to say yes to."""
        if self._commits:
            return "Commit them? Messages that became visible cannot be taken back."
        return "Roll them back? Nobody will see these messages."

    def run(self, reason: str) -> str:
        """Decide, and return what became of the messages.

        Raises
        ------
        VerdictConflictError
            When visible messages would have to be taken back.
        """
        placed = self._log.resolve(self._record.half_id, COMMIT_MESSAGE if self._commits else ROLLBACK_MESSAGE, reason)
        after = self._log.engine.state_of(self._record)
        return (self._committed(placed, after) if self._commits else self._rolled_back(after)) or self._as_before(after)

    def _committed(self, placed: list[Placed], after: BatchState) -> str:
        mine = sum(p.count for p in placed if p.half_id in ("", self._record.half_id))
        waiting = after.count(RowState.DECIDED) - self._state.count(RowState.DECIDED)
        said = [f"{count_of(mine, 'message')} became visible"] if mine else []
        if waiting > 0:
            said.append(
                f"{count_of(waiting, 'message')} {'is' if waiting == 1 else 'are'} committed, and wait"
                f"{'s' if waiting == 1 else ''} for a time or for an earlier message"
            )
        return "; ".join(said)

    def _rolled_back(self, after: BatchState) -> str:
        count = after.count(*ROLLED_BACK_STATES) - self._state.count(*ROLLED_BACK_STATES)
        return f"{count_of(count, 'message')} {'was' if count == 1 else 'were'} rolled back" if count > 0 else ""

    def _as_before(self, after: BatchState) -> str:
        """What to say when every message has the verdict that it had."""
        committed, rolled_back = after.count(*COMMITTED_STATES), after.count(*ROLLED_BACK_STATES)
        by_check = after.count(RowState.ROLLED_BACK_BY_CHECK)
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
