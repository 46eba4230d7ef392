"""What txmq doctor finds on a machine: versions of packages, Java, Spark's Python."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

FINE = {"pyarrow": "26.0.1", "deltalake": "1.6.6", "pyspark": "4.2.0", "delta-spark": "4.4.0"}


def have_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> None:
    """These packages are installed; None: one is not."""
    real = importlib.metadata.version

    def version(package: str) -> str:
        found = versions[package] if package in versions else real(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def be_fine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """There is nothing to warn of."""
    have_versions(monkeypatch, {**FINE})
    java = folder / "jdk"
    java.mkdir()
    (java / "release").write_text('JAVA_VERSION="17.0.9"\n')
    monkeypatch.setenv("JAVA_HOME", str(java))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
