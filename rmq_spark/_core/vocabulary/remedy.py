"""The action that mends an error, worded for a Python program and for the command ``txmq``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

LOG = "{log}"
"""Stands in a command for the commit log's path."""


@dataclass(frozen=True)
class Remedy:
    """The end of an error's sentence: ``text`` for a Python program, ``command`` for a person at a terminal. In a
    command ``{log}`` stands for the commit log's path."""

    text: str
    command: str

    def __str__(self) -> str:
        return self.text

    def typed(self, path: str | None) -> str:
        """Return the command with the commit log's path; without one when the configuration names the log."""
        if path is None:
            return self.command.replace(f"{LOG} ", "").replace(f" {LOG}", "")
        return self.command.replace(LOG, shlex.quote(path))


def decide_by_hand(half_id: str, lead: str) -> Remedy:
    """Return the advice to settle a half batch by hand, after the words ``lead``."""
    return Remedy(
        f"{lead}log.resolve({half_id!r}, verdict, reason=…)",
        f"{lead}txmq resolve {LOG} {shlex.quote(half_id)} COMMIT --reason '…', or the same with ROLLBACK",
    )


LIST_PENDING = Remedy("log.pending() lists the open ones", f"txmq pending {LOG} lists the open ones")
