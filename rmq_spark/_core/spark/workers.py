"""Requires that Spark's Python workers can import the package, before a job fails with a less clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rmq_spark.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IMPORT_S_MAX = 60.0


def require_importable(spark: SparkSession) -> None:
    """Raise OptionError when the workers of a local session run a Python without the package.

    Spark starts them with ``PYSPARK_PYTHON``, or else with the ``python3`` of the PATH, which need not be the Python of
    this program. Only local sessions are checked: the workers of a cluster, or of Spark Connect, run elsewhere.
    """
    context = getattr(spark, "_sc", None)
    if context is not None and context.master.startswith("local"):
        _require_importable_by(context.pythonExec)


def is_this_python(program: str) -> bool:
    """Return True when a program is the running Python.

    In a virtual environment ``python3`` links to ``python`` beside it. Both link to a Python outside, which lacks the
    environment's packages.
    """
    here, there = Path(sys.executable), Path(os.path.abspath(program))
    return there == here or (there.parent == here.parent and there.samefile(here))


@lru_cache(maxsize=8)
def _require_importable_by(python: str) -> None:
    program = shutil.which(python)
    if program is not None and is_this_python(program):
        return
    reason = "it is not there"
    if program is not None:
        try:
            trial = subprocess.run(
                [program, "-c", "import rmq_spark._core.spark.datasource"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=IMPORT_S_MAX,
            )
        except (OSError, subprocess.SubprocessError) as problem:
            reason = f"it does not start: {type(problem).__name__}"
        else:
            if trial.returncode == 0:
                return
            reason = (trial.stderr.strip().splitlines() or ["it ends with an error"])[-1]
    raise OptionError(
        f"Spark's Python workers run {program or python!r}, which cannot import rmq_spark ({reason}). Set "
        f"PYSPARK_PYTHON={sys.executable} (this program's Python, which can) before the program starts; or, before it "
        'makes its SparkSession: os.environ["PYSPARK_PYTHON"] = sys.executable'
    )
