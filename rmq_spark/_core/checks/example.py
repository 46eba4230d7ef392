"""The example configuration of the check job, ``conf/txmq.toml``. A wheel has it beside this file."""

from __future__ import annotations

from pathlib import Path

NAME = "txmq.toml"


def example_configuration() -> str:
    """Return the text of the example, with a comment for every setting."""
    here = Path(__file__).parent
    in_wheel = here / NAME
    return (in_wheel if in_wheel.exists() else here.parents[2] / "conf" / NAME).read_text(encoding="utf-8")
