"""Makes the environment in which ``make test-spark`` runs: another Spark, and this project's wheel.

pyarrow is older, and everything else has the versions of ``requirements.lock``. The tests lie in a folder without the
package, so that they import the wheel's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.inside import STREAM_TELLS_START

ROOT = Path(__file__).parents[2]

DELTA_OF = {"4.0": ("4.0.5", "4.0.1"), "4.1": ("4.1.1", "4.3.1")}
"""By Spark: pyspark, and the delta-spark that fits it. With 4.1.0 of the latter, Spark 4.1.4 finds no DeltaTable."""
PYARROW_OF = {"4.0": "18.1.0", "4.1": "21.0.0"}
"""By Spark: an older pyarrow, as Databricks' runtimes have it."""
TREE = "tests conf docs notebooks benchmarks examples README.md pyproject.toml".split()
OTHER_SPARKS = "delta-spark|pyspark|py4j|importlib-metadata|pyarrow"
"""Packages whose version another Spark, or its runtime, decides."""

FROM_4_2 = pytest.mark.skipif(not STREAM_TELLS_START, reason="before Spark 4.2 an availableNow run is one micro-batch")


def make(spark: str) -> Path:
    """Make or renew the environment, and return the folder in which its tests run."""
    folder = ROOT / f".venv-spark-{spark}"
    python = folder / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", "--clear", str(folder))
    shutil.rmtree(folder / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").glob("*.whl")
    locked = re.findall(
        r"^([A-Za-z0-9._-]+==[^ \\\n]+(?: ; [^\\\n]+)?)", (ROOT / "requirements.lock").read_text(), re.M
    )
    others = [line for line in locked if not re.match(rf"(?:{OTHER_SPARKS})==", line)]
    (folder / "constraints.txt").write_text("\n".join(others) + "\n")
    pyspark, delta = DELTA_OF[spark]
    wanted = [f"{wheel}[dev]", f"pyspark=={pyspark}", f"delta-spark=={delta}", f"pyarrow=={PYARROW_OF[spark]}"]
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", str(folder / "constraints.txt"), *wanted)
    run(*pip, "--no-deps", "--force-reinstall", str(wheel))  # the same version as before, with this tree's code
    tree = folder / "tree"
    tree.mkdir(exist_ok=True)
    for name in TREE:
        link = tree / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    return tree


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    if sys.argv[1:2] not in [[spark] for spark in DELTA_OF]:
        sys.exit(f"say which Spark: SPARK={' or SPARK='.join(DELTA_OF)}")
    print(f"Spark {sys.argv[1]}: tests in {make(sys.argv[1])}")
