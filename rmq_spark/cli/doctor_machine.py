"""Checks of ``txmq doctor`` on this machine: versions, Java, Spark's jars and Python. They start no program."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rmq_spark._core.spark.workers import is_this_python
from rmq_spark.report import Finding, Level

PYTHON_TESTED = (3, 13)
JAVA_MIN = 17
TESTED: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "pyarrow": ((18, 0), (99, 0)),
    "deltalake": ((1, 6), (1, 99)),
    "pyspark": ((4, 0), (4, 2)),
    "delta-spark": ((4, 0), (4, 99)),
}
"""The oldest and the newest version (major, minor) of each package that rmq_spark was tested with."""
NEEDED = ("pyarrow", "deltalake")
IVY = (".ivy2.5.2/jars", ".ivy2/jars")
"""Folders below the home folder where Spark keeps downloaded jars."""


def look_at_machine() -> Iterator[Finding]:
    """Yield findings about this machine."""
    yield _python()
    versions = {name: _version(name) for name in TESTED}
    for name, version in versions.items():
        yield from _package(name, version, has_spark=versions["pyspark"] is not None)
    has_spark = versions["pyspark"] is not None
    yield _java(has_spark)
    if has_spark:
        yield _jars(versions["delta-spark"])
        yield _workers()


def _python() -> Finding:
    text = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info[:2] > PYTHON_TESTED:
        return Finding("python", Level.NOTE, f"{text} is newer than what was tried: {_dotted(PYTHON_TESTED)}")
    return Finding("python", Level.OK, text)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, version: str | None, has_spark: bool) -> Iterator[Finding]:
    first, last = TESTED[name]
    if version is None:
        if name in NEEDED:
            yield Finding(name, Level.CRITICAL, "is not installed", f"pip install '{name}>={_dotted(first)}'")
        elif name == "pyspark":
            yield Finding(name, Level.NOTE, "is not installed: this machine works without Spark")
        elif has_spark:
            yield Finding(
                name,
                Level.NOTE,
                "is not installed: a cluster that has Delta's jars does not need it",
                "pip install 'rmq-spark[spark]'",
            )
        return
    installed = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if installed < first:
        remedy = f"pip install --upgrade '{name}>={_dotted(first)}'"
        yield Finding(name, Level.CRITICAL, f"{version} is older than {_dotted(first)}, which is needed", remedy)
    elif installed > last:
        yield Finding(name, Level.WARNING, f"{version} is newer than what was tried: {_dotted(last)}")
    else:
        yield Finding(name, Level.OK, version)


def _java(has_spark: bool) -> Finding:
    home = java_home()
    version = None if home is None else java_version(home)
    bad = Level.WARNING if has_spark else Level.NOTE
    if home is None:
        return Finding("java", bad, "none is found: JAVA_HOME is not set, and no java is on the PATH; Spark needs one",
                       f"install Java {JAVA_MIN}, and export JAVA_HOME=<its folder>")  # fmt: skip
    if version is None:
        return Finding("java", Level.NOTE, f"{home} has no file 'release', so its version is not known")
    if version < JAVA_MIN:
        remedy = f"install Java {JAVA_MIN}, and export JAVA_HOME=<its folder>"
        return Finding("java", bad, f"version {version} in {home} is older than {JAVA_MIN}", remedy)
    return Finding("java", Level.OK, f"{version} ({home})")


def java_home() -> Path | None:
    """Return the folder of the Java that Spark would start; None when there is none."""
    if (configured := os.environ.get("JAVA_HOME")) and Path(configured).is_dir():
        return Path(configured)
    java = shutil.which("java")
    return None if java is None else Path(os.path.realpath(java)).parent.parent


def java_version(home: Path) -> int | None:
    """Return the major version in a Java's file ``release``, if it has one."""
    try:
        match = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', (home / "release").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


def _jars(delta_spark: str | None) -> Finding:
    folders: list[Path] = []
    with suppress(RuntimeError):  # a container's user may have neither HOME nor an entry in /etc/passwd
        folders += [Path.home() / folder for folder in IVY]
    if home := os.environ.get("SPARK_HOME"):
        folders.insert(0, Path(home) / "jars")
    spec = importlib.util.find_spec("pyspark")  # does not import it
    if spec is not None and spec.submodule_search_locations:
        folders.insert(0, Path(next(iter(spec.submodule_search_locations))) / "jars")
    jars = sorted(jar.name for folder in folders if folder.is_dir() for jar in folder.glob("*delta-spark_*.jar"))
    matching = jars if delta_spark is None else [jar for jar in jars if jar.endswith(f"-{delta_spark}.jar")]
    if matching:
        return Finding("jars", Level.OK, ", ".join(dict.fromkeys(matching)))
    if jars:
        names = ", ".join(dict.fromkeys(jars))
        what = f"no jar of Delta {delta_spark} is here yet ({names}): configure_spark_with_delta_pip fetches it once"
        return Finding("jars", Level.NOTE, what)
    return Finding("jars", Level.NOTE, "no jar of Delta is here yet: configure_spark_with_delta_pip fetches it once")


def _workers() -> Finding:
    python = os.environ.get("PYSPARK_PYTHON") or "python3"
    path = shutil.which(python)
    remedy = f"export PYSPARK_PYTHON={sys.executable}"
    if path is None:
        return Finding(
            "workers", Level.WARNING, f"Spark's Python workers would run {python!r}, which is not there", remedy
        )
    if not is_this_python(path):
        return Finding(
            "workers",
            Level.NOTE,
            f"Spark's Python workers on this machine would run {path}, which is another Python and may lack rmq_spark",
            remedy,
        )
    return Finding("workers", Level.OK, path)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
