"""The report of a round of checks, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from rmq_spark._core.vocabulary.text import count_of

LEASED = "leased"
YOUNG = "young"
IMMUNE = "immune"
CHECKED = "checked"
NO_LISTENER = "no_listener"
LEFT_OVER = "left_over"
SKIP_REASONS: Mapping[str, str] = {
    LEASED: "whose local transaction is running",
    YOUNG: "younger than transactionTimeout",
    IMMUNE: "with messages under CHECK_IMMUNITY_TIME_IN_SECONDS",
    CHECKED: "about which another process has asked lately",
    NO_LISTENER: "of a group without a listener here",
    LEFT_OVER: "left for the next round",
}
"""Why a half batch was not checked, in words."""


@dataclass
class Tally:
    """A number of transactions, and of the messages in them."""

    transactions: int = 0
    messages: int = 0

    def add(self, transactions: int, messages: int) -> None:
        self.transactions += transactions
        self.messages += messages

    def __bool__(self) -> bool:
        return self.messages > 0


@dataclass
class CheckReport:
    """The result of one round of checks.

    Attributes
    ----------
    started_at : datetime
        UTC, by the checker's clock.
    seconds : float
    checked : Tally
        Transactions for which a listener gave an answer. The next three count the answers.
    committed, rolled_back, unknown : Tally
        They also count transactions that another checker settled in the same way at the same time.
    discarded : Tally
        Transactions that were checked too often, and that the discard policy committed or rolled back.
    quarantined : Tally
        Transactions that were hidden, because they were checked too often or are older than ``file_reserved_time``.
    skipped : dict of str to int
        Half batches that were not checked, by :data:`SKIP_REASONS`; under ``immune`` also those checked in part.
    without_listener : dict of str to int
        Producer groups without a listener here, and how many of their half batches are open.
    problems : list of (half_id or None, str)
        What went wrong, a sentence for each problem. None: it concerns no single half batch.
    placed : int
        Delayed messages that became visible at the end of the round, because their time had come.
    pending : int
        Half batches that are open after the round.
    """

    started_at: datetime
    seconds: float = 0.0
    checked: Tally = field(default_factory=Tally)
    committed: Tally = field(default_factory=Tally)
    rolled_back: Tally = field(default_factory=Tally)
    unknown: Tally = field(default_factory=Tally)
    discarded: Tally = field(default_factory=Tally)
    quarantined: Tally = field(default_factory=Tally)
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    without_listener: dict[str, int] = field(default_factory=dict)
    problems: list[tuple[str | None, str]] = field(default_factory=list)
    placed: int = 0
    pending: int = 0

    @property
    def ok(self) -> bool:
        """True when nothing went wrong."""
        return not self.problems

    def skip(self, reason: str, half_batches: int = 1) -> None:
        self.skipped[reason] += half_batches

    def problem(self, half_id: str | None, sentence: str) -> None:
        self.problems.append((half_id, sentence))

    def __str__(self) -> str:
        clauses = [f"checked {_words(self.checked)} in {self.seconds:.1f} s" if self.checked else "nothing was checked"]
        for name in ("committed", "rolled_back", "unknown"):
            tally: Tally = getattr(self, name)
            if tally:
                clauses[-1] += (
                    f"{':' if name == self._first_answer() else ','} {_words(tally)} {name.replace('_', ' ')}"
                )
        for name in ("discarded", "quarantined"):
            if getattr(self, name):
                clauses.append(f"{_words(getattr(self, name))} {name}")
        skipped = [f"{count} {SKIP_REASONS[reason]}" for reason, count in self.skipped.items() if count]
        if skipped:
            clauses.append("skipped half batches: " + ", ".join(skipped))
        if self.without_listener:
            clauses.append("groups without a listener: " + ", ".join(sorted(self.without_listener)))
        if self.placed:
            clauses.append(f"{count_of(self.placed, 'delayed message')} became visible")
        clauses.append(f"{self.pending} half {'batch is' if self.pending == 1 else 'batches are'} pending")
        for half_id, sentence in self.problems:
            clauses.append(f"problem with {half_id}: {sentence}" if half_id else f"problem: {sentence}")
        return "; ".join(clauses)

    def _first_answer(self) -> str | None:
        return next((n for n in ("committed", "rolled_back", "unknown") if getattr(self, n)), None)

    def to_dict(self) -> dict[str, object]:
        """Return the report as numbers, strings, lists and dicts, ready for JSON."""
        tallies = ("checked", "committed", "rolled_back", "unknown", "discarded", "quarantined")
        return {
            "started_at": self.started_at.isoformat(),
            "seconds": round(self.seconds, 3),
            **{name: dict(vars(getattr(self, name))) for name in tallies},
            "skipped": dict(self.skipped),
            "without_listener": dict(self.without_listener),
            "problems": [{"half_id": half_id, "problem": sentence} for half_id, sentence in self.problems],
            "placed": self.placed,
            "pending": self.pending,
        }


def _words(tally: Tally) -> str:
    return f"{count_of(tally.transactions, 'transaction')} ({count_of(tally.messages, 'message')})"
