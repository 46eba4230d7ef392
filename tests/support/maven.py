"""Jars of the Maven registry, and what starts them: for the servers that tests and benchmarks run beside ours.

Ivy, which pyspark brings, fetches jars once into the user's cache folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FETCH_S_MAX = 900
MODULE = """<ivy-module version="2.0">
  <info organisation="rmq_spark" module="{name}"/>
  <dependencies>{all}</dependencies>
</ivy-module>
"""
DEPENDENCY = '<dependency org="{organisation}" name="{name}" rev="{revision}"/>'


class NoJarsError(Exception):
    """Java or pyspark's ivy is missing, or the registry does not answer."""


class Jar(NamedTuple):
    """A jar, which brings those that it needs."""

    organisation: str
    name: str
    revision: str


def java() -> str:
    """The Java of ``JAVA_HOME``, or on the PATH.

    Raises
    ------
    NoJarsError
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(f"{home}/bin/java" if home else "java")
    if found is None:
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise NoJarsError(f"Java is missing: none was found {where}. Install it, or set JAVA_HOME")
    return found


def fetched(name: str, jars: Sequence[Jar]) -> Path:
    """The folder ``name`` of the cache with these jars, fetched when it is not there yet.

    Raises
    ------
    NoJarsError
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmq_spark"
    folder = cache / name
    if folder.exists():
        return folder
    ivy = sorted(Path(sysconfig.get_path("purelib"), "pyspark", "jars").glob("ivy-*.jar"))
    if not ivy:
        raise NoJarsError(f"pyspark is missing, whose ivy fetches {name}: install rmq_spark with its extra spark")
    cache.mkdir(parents=True, exist_ok=True)
    # Fetched beside its place and moved there, so that two runs at once never meet half of them.
    with tempfile.TemporaryDirectory(dir=cache) as beside:
        wanted = "".join(DEPENDENCY.format(**jar._asdict()) for jar in jars)
        Path(beside, "ivy.xml").write_text(MODULE.format(name=name, all=wanted))
        command = [java(), "-jar", str(ivy[-1]), "-cache", f"{beside}/ivy", "-ivy", f"{beside}/ivy.xml"]
        command += ["-retrieve", f"{beside}/jars/[artifact]-[revision](-[classifier]).[ext]"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=FETCH_S_MAX)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
            last = (problem.stdout or b"").decode(errors="replace").strip().splitlines()[-5:]
            raise NoJarsError(f"{name} could not be fetched: {' / '.join(last) or problem}") from None
        try:
            os.rename(f"{beside}/jars", folder)
        except OSError:
            if not folder.exists():
                raise
    return folder


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; all are held until the last is found, so no two are alike."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()
