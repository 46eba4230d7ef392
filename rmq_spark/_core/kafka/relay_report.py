"""The report of a relay, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rmq_spark._core.vocabulary.text import count_of


@dataclass
class RelayReport:
    """A relay's work since its last report.

    Attributes
    ----------
    messages : int
        Messages that Kafka committed, without parked ones; ``by_topic`` has them by topic of the log.
    bytes : int
        Size of their bodies.
    parked : int
        Messages that Kafka refused, and that are now in the parking topic.
    skipped : int
        Offsets that expired before they were handed over. The positions topic names them.
    transactions, aborted : int
        Kafka transactions that were committed, and those that were aborted and repeated.
    seconds : float
    """

    messages: int = 0
    bytes: int = 0
    parked: int = 0
    skipped: int = 0
    transactions: int = 0
    aborted: int = 0
    seconds: float = 0.0
    by_topic: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True when messages were handed over, parked or skipped."""
        return bool(self.messages or self.parked or self.skipped)

    def __str__(self) -> str:
        topics = ", ".join(f"{topic} {count:,}" for topic, count in sorted(self.by_topic.items()))
        words = [f"{count_of(self.messages, 'message')} handed over{f' ({topics})' if topics else ''}"]
        words += [f"{count_of(self.parked, 'message')} parked"] if self.parked else []
        words += [f"{count_of(self.skipped, 'expired message')} skipped"] if self.skipped else []
        words.append(f"in {count_of(self.transactions, 'transaction')} and {self.seconds:.1f} s")
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return asdict(self)
