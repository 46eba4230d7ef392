"""Processes of one machine that send to a log share commits: one of them makes those of the others with its own.

::

    process 1   sends ──────────────────┐
    process 2   sends ── its requests ──┼─ one commit to half ── answers ─ … ─ one commit to op ── answers
    process 3   sends ── its requests ──┘

A commit costs milliseconds of processor time, however many sends are in it, and each process must read what the others
have committed. So four processes with 16 threads each sent less than a third of what one process with 64 threads did.

Processes begin with it once they have lost a race. The tables alone decide, here as everywhere, and any process may
take any step. So nothing depends on who commits, or on an answer:

- A prepare has a deadline. Whoever commits for others looks at it with the table refreshed, and afterwards the version
  that comes next is still to be won. So from the deadline on the process that sends can look for its half batch in the
  table: either it is there, or it never will be, and then this process prepares it itself.
- A decision may be repeated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace

from rmq_spark.commitlog.carried import (
    Answer,
    pack_decided,
    pack_decisions,
    pack_prepared,
    pack_prepares,
    unpack_decided,
    unpack_decisions,
    unpack_prepared,
    unpack_prepares,
)
from rmq_spark.commitlog.group_commit import AT_ONCE_MAX, GroupCommit
from rmq_spark.commitlog.half import HalfRows
from rmq_spark.commitlog.half_store import HalfRecord, Staged
from rmq_spark.commitlog.ledger import Decided, Decision, Placed
from rmq_spark.commitlog.steps import ProtocolSteps
from rmq_spark.errors import AlreadyPreparedError, TxmqError
from rmq_spark.meeting import Meeting, NoAnswerError

logger = logging.getLogger(__name__)

ANSWER_S_MAX = 5.0
"""Another process has so long for a commit. It is less than the time for which one that closes waits."""
SLOW_S_MIN = 0.25
"""An answer that takes no longer than this is not slow."""
SLOW_TIMES = 8
"""A slow answer takes longer than so many commits of this process. The other one computes then: its threads wait."""
SLOW_ANSWERS_MAX = 3
"""After so many in a row this process asks nobody for a while: twice as long each time, up to PARTS_S_MAX."""
PARTS_S, PARTS_S_MAX = 10.0, 640.0
SHARED_MAX = 256
"""A process that has so many half batches for one commit makes it itself. A share in another commit would spare it
little, and a process that commits for all uses one core only."""
PREPARES, DECISIONS = b"p", b"d"
FORMAT = 1
"""Of requests and answers: one more with each change of :mod:`rmq_spark.commitlog.carried`."""


class SharedCommits(GroupCommit):
    """As :class:`GroupCommit`, for the sends of all processes of this user and machine.

    Parameters
    ----------
    log : ProtocolSteps
    linger_s, at_once_max
        As for :class:`GroupCommit`.
    version : str or None
        Of rmq_spark. Processes of one version share commits; None: this one does not.
    """

    def __init__(
        self, log: ProtocolSteps, linger_s: float = 0.0, at_once_max: int = AT_ONCE_MAX, *, version: str | None
    ) -> None:
        super().__init__(log, linger_s, at_once_max)
        self._version = None if version is None else f"{version} {FORMAT}"
        self._meeting: Meeting | None = None
        self._own_s = math.inf  # the quickest of the prepares that this process made by itself
        self._slow_answers = 0
        self._parts_s = PARTS_S
        self._is_open = True
        self._opening = log.machine.lock()

    def open(self) -> None:
        """Share commits, from now on or again."""
        with self._opening:
            self._is_open = True
            if self._meeting is not None:
                self._meeting.open()

    def close(self) -> None:
        """Commit for no other process any more, and ask none."""
        with self._opening:
            self._is_open = False
        if self._meeting is not None:
            self._meeting.close()

    def _met(self, wanted: int) -> Meeting | None:
        """Where the process is asked that commits for others, if there is one, and so few are wanted."""
        if wanted >= SHARED_MAX:
            return None
        if self._version is not None and self._is_contended():
            with self._opening, suppress(OSError):  # when the log has gone: whoever commits hears of it
                if self._is_open:
                    self._meeting = self._meeting or self._log.machine.meeting(
                        self._log.place, self._version, self._serve
                    )
                    self._meeting.join()
        return self._meeting if self._meeting is not None and self._meeting.follows else None

    def _is_contended(self) -> bool:
        return self._log.op.is_contended or self._log.half.table.is_contended

    # ------------------------------------------------------------------ asking
    def _prepared(self, staged: Sequence[Staged]) -> Sequence[HalfRecord | TxmqError]:
        found: dict[str, HalfRecord | TxmqError] = {}
        doubtful: set[str] = set()
        if (meeting := self._met(len(staged))) is not None:
            asked = [batch for batch in staged if _can_be_carried(batch)]
            if asked:
                answers = self._prepared_by(meeting, asked)
                found = {half_id: record for half_id, record in answers.items() if record is not None}
                doubtful = answers.keys() - found.keys()
        left = [batch for batch in staged if batch.header.half_id not in found]
        if doubtful:
            left = [replace(b, may_be_there=True) if b.header.half_id in doubtful else b for b in left]
        if left:
            began_s = self._log.machine.monotonic()
            for batch, one in zip(left, super()._prepared(left), strict=True):
                found[batch.header.half_id] = self._own(batch, one)
            self._own_s = min(self._own_s, self._log.machine.monotonic() - began_s)
        return [found[batch.header.half_id] for batch in staged]

    def _prepared_by(self, meeting: Meeting, asked: Sequence[Staged]) -> dict[str, HalfRecord | None]:
        """What another process has prepared; None where nobody knows. Nothing when nobody was asked."""
        log = self._log
        half_ids = [batch.header.half_id for batch in asked]
        log.expect([batch.header for batch in asked])
        began_s = log.machine.monotonic()
        until_s = began_s + ANSWER_S_MAX
        answers: Sequence[Answer | None] = [None] * len(asked)
        try:
            data = meeting.ask(PREPARES + pack_prepares(asked, until_s), until_s)
            if data is None:
                log.forget(half_ids)
                return {}
            answers = unpack_prepared(data, asked)
            self._judge(meeting, log.machine.monotonic() - began_s)
        except Exception as problem:  # no answer, or one that cannot be read
            if not (isinstance(problem, NoAnswerError) and problem.has_ended):
                log.machine.sleep(max(0.0, until_s - log.machine.monotonic()))
        log.forget([half_id for half_id, answer in zip(half_ids, answers, strict=True) if answer is None])
        prepared = [answer for answer in answers if answer is not None]
        if not all(answer.untouched for answer in prepared):
            log.refresh()  # a check was faster, or may have been
        return {h: None if answer is None else answer.record for h, answer in zip(half_ids, answers, strict=True)}

    def _judge(self, meeting: Meeting, answer_s: float) -> None:
        """Part from a process that is slow."""
        is_slow = answer_s > max(SLOW_S_MIN, SLOW_TIMES * self._own_s)
        self._slow_answers = self._slow_answers + 1 if is_slow else 0
        if self._slow_answers >= SLOW_ANSWERS_MAX:
            logger.info("the process that commits for this one is slow: this one commits for %g s", self._parts_s)
            meeting.part(self._parts_s)
            self._slow_answers, self._parts_s = 0, min(2 * self._parts_s, PARTS_S_MAX)

    def _own(self, batch: Staged, found: HalfRecord | TxmqError) -> HalfRecord | TxmqError:
        """Of a half batch that is there already because the other process has prepared it: the record."""
        if not (batch.may_be_there and isinstance(found, AlreadyPreparedError)):
            return found
        record = self._log.find(batch.header.app_id, batch.header.batch_id)
        if record is None or record.left is not None or record.half_id != batch.header.half_id:
            return found  # another one has sent the same key
        return record

    def _decide_many(self, decisions: Sequence[Decision]) -> list[Decided]:
        meeting = self._met(len(decisions))
        if meeting is None:
            return super()._decide_many(decisions)
        found = self._decided_by(meeting, decisions)
        left = [d for d in decisions if d.record.half_id not in found]
        for decision, decided in zip(left, super()._decide_many(left) if left else (), strict=True):
            is_told = decided.problem is not None or decided.placed or not decision.commit
            found[decision.record.half_id] = decided if is_told else self._placed(decision)
        return [found[d.record.half_id] for d in decisions]

    def _placed(self, decision: Decision) -> Decided:
        """What a decision made visible that the other process may have made."""
        rows = self._log.ledger.rows_of(decision.record)
        places = rows.filter(rows["queue_offset"].is_valid()).select([f.name for f in fields(Placed)]).to_pylist()
        return Decided([Placed(**place) for place in places])

    def _decided_by(self, meeting: Meeting, decisions: Sequence[Decision]) -> dict[str, Decided]:
        """What another process has decided."""
        try:
            until_s = self._log.machine.monotonic() + ANSWER_S_MAX
            data = meeting.ask(DECISIONS + pack_decisions(decisions), until_s)
            answers = [] if data is None else [*zip(decisions, unpack_decided(data), strict=True)]
        except Exception:  # no answer, or one that cannot be read
            return {}
        found = {d.record.half_id: (d, placed) for d, placed in answers if placed is not None}
        if any(sum(p.count for p in placed) < d.record.rows for d, placed in found.values()):
            self._log.refresh()  # who looks at their state looks at what was read last
        return {half_id: Decided(placed) for half_id, (_, placed) in found.items()}

    # ------------------------------------------------------------------ serving
    def _serve(self, request: bytes) -> bytes:
        kind, body = request[:1], request[1:]
        if kind == PREPARES:
            staged = {batch.header.name: batch for batch in unpack_prepares(body, self._log.with_machine)}
            prepared = self._prepares.ask_all(staged)
            return pack_prepared(
                [Answer(one, self._log.is_untouched(one)) if isinstance(one, HalfRecord) else None for one in prepared]
            )
        if kind == DECISIONS:
            decisions = {d.record.half_id: d for d in unpack_decisions(body)}
            decided = self._decides.ask_all(decisions)
            return pack_decided(
                [one.placed if isinstance(one, Decided) and one.problem is None else None for one in decided]
            )
        raise ValueError(f"a request of the unknown kind {kind!r} came")


def _can_be_carried(batch: Staged) -> bool:
    """Whether another process can prepare a half batch: its rows are in memory, and nobody asked this one for it."""
    return batch.until_s is None and all(isinstance(file, HalfRows) for file in batch.files)
