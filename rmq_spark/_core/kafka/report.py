"""What a relay did, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rmq_spark._core.vocabulary.text import count_of


@dataclass
class RelayReport:
    """What a relay did since its last report.

    Attributes
    ----------
    messages : int
        Messages that Kafka committed, by topic of the log in ``by_topic``; without those that were parked.
    bytes : int
        Of their bodies.
    parked : int
        Messages that Kafka refused, and that stand in the parking topic now.
    skipped : int
        Offsets that had expired before they were handed over. The positions topic says which.
    transactions, aborted : int
        Kafka transactions that were committed, and that were aborted and done again.
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
        """True when it handed over, parked or skipped something."""
        return bool(self.messages or self.parked or self.skipped)

    def __str__(self) -> str:
        topics = ", ".join(f"{topic} {count:,}" for topic, count in sorted(self.by_topic.items()))
        words = [f"{count_of(self.messages, 'message')} handed over{f' ({topics})' if topics else ''}"]
        words += [f"{count_of(self.parked, 'message')} parked"] if self.parked else []
        words += [f"{count_of(self.skipped, 'expired message')} skipped"] if self.skipped else []
        words.append(f"in {count_of(self.transactions, 'transaction')} and {self.seconds:.1f} s")
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)
