"""What every test may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Spark's workers must be this interpreter, also when pytest is started without make.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    """Where a test's commit log may be made; nothing is there yet."""
    return str(tmp_path / "log")
