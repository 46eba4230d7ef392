"""The demo's settings, and the places of its files."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

TOPICS = ("logistics", "points", "cart")
PRODUCER_GROUP = "order-service"
ROWS_MIN = 500
"""With fewer lines there are too few baskets for a batch before, between and after the kills."""


class Settings(BaseSettings):
    """Settings that the demo and the processes it starts read from the environment.

    Attributes
    ----------
    rows : int or None
        ``DEMO_ROWS``: how many lines of the data set to take, rounded up to whole baskets; None takes all.
    dir : Path or None
        ``DEMO_DIR``: the folder to work in; None makes a temporary one.
    kill : str or None
        ``DEMO_KILL``: where the stream's driver dies (see :mod:`examples.grocer.kill`). The demo sets it for the
        process that it starts.
    """

    model_config = SettingsConfigDict(env_prefix="DEMO_", env_ignore_empty=True)

    rows: int | None = Field(default=None, ge=ROWS_MIN)
    dir: Path | None = None
    kill: str | None = None

    @cached_property
    def folder(self) -> Folder:
        """The folder of the run; reading it raises ValueError when DEMO_DIR is not set."""
        if self.dir is None:
            raise ValueError("DEMO_DIR is not set: this is started by python -m examples.grocer, which sets it")
        return Folder(self.dir)


class Folder:
    """The files of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.input = self.root / "input"
        self.log = self.root / "log"
        self.checkpoint = self.root / "checkpoint"
        self.database = self.root / "orders.db"
        self.journal = self.root / "local_transactions.jsonl"
        self.kills = self.root / "kills.jsonl"
        self.check_config = self.root / "txmq.toml"
        self.proof = self.root / "proof.json"
        self.temporary = self.root / "tmp"
        self.driver = self.root / "driver.pid"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.database}"

    def output(self, module: str) -> Path:
        """Return the file for the output of the processes that run a module."""
        return self.root / f"{module.removeprefix('examples.')}.out"

    def batches_done(self) -> int:
        """Return how many micro-batches the checkpoint has as committed."""
        commits = self.checkpoint / "commits"
        return sum(p.name.isdigit() for p in commits.iterdir()) if commits.is_dir() else 0
