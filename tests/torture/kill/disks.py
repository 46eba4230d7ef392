"""Disks that are full, broken or slow under a commit log: what could not be written is an error, and nothing else.

``failing_disk.c`` stands between a process and its C library, so that pyarrow's files and delta-rs's commits meet the
same disk. It is compiled with the machine's ``cc``, and loaded by a process of its own (:func:`run_preloaded`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.torture.kill import programs
from tests.torture.kill.kills import forkserver, judge, settle
from tests.torture.kill.programs import Shop

SOURCE = Path(__file__).with_name("failing_disk.c")
CASES_A_LOG = 20
BATCHES_A_CASE = 3
BYTES_MAX = 90_000
"""Where the disk fails, at most: about what a case writes."""
CASE_S_MAX = 120.0


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def run_preloaded(seconds: float, seed: int, cases: int = 200) -> dict[str, int | str | list[str]]:
    """Cases on failing disks until their number or the time is used up; a failed log's folder stays."""
    cc = compiler()
    if cc is None:
        return {"cases": 0, "failures": ["there is no C compiler, which makes the failing disk"]}
    with tempfile.TemporaryDirectory(prefix="txmq_disk_") as folder:
        library = Path(folder, "failing_disk.so")
        subprocess.run([cc, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        done = subprocess.run(
            [sys.executable, "-m", "tests.torture.kill.disks", str(seconds), str(seed), str(cases)],
            env={**os.environ, "LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            cwd=SOURCE.parents[3],
        )
    if done.returncode != 0:
        return {"cases": 0, "failures": [f"exit code {done.returncode}:\n{done.stderr[-4000:]}"]}
    result: dict[str, int | str | list[str]] = json.loads(done.stdout.splitlines()[-1])
    return result


def _produce(root: str, process: str, seed: int, disk: dict[str, str], batches: list[int]) -> None:
    os.environ.update(disk)
    programs.run("producer", root, process, seed, None, batches)


def _one_log(root: Path, chance: random.Random, cases: int, end: float, counts: Counter[str]) -> list[str]:
    shop = Shop(root)
    shop.open()
    context = forkserver()
    batches = range(0)
    for case in range(cases):
        if time.monotonic() > end:
            break
        batches = range(batches.stop, batches.stop + BATCHES_A_CASE)
        kind = chance.choice(["full", "full", "broken", "broken", "slow"])
        disk = {
            "DISK_FOLDER": shop.log,
            "DISK_FAULT": kind,
            "DISK_BYTES": str(chance.randrange(BYTES_MAX)),
            "DISK_TIMES": str(chance.choice([1, 1, 2, 5])),
            "DISK_MS": str(chance.choice([5, 20, 60])),
        }
        name = f"producer{case}"
        arguments = (str(root), name, chance.randrange(2**32), disk, list(batches))
        process = context.Process(target=_produce, args=arguments)
        process.start()
        process.join(CASE_S_MAX)
        said = (root / f"{name}.out").read_text(errors="replace")
        if process.exitcode is None:
            process.kill()
            return [f"{name} hung on a disk that is {kind}:\n{said[-2000:]}"]
        if process.exitcode < 0 or "panicked" in said:
            return [f"{name} ended with {process.exitcode} on a disk that is {kind}:\n{said[-3000:]}"]
        if kind == "slow" and process.exitcode:
            return [f"{name} failed on a slow disk:\n{said[-3000:]}"]
        counts["cases"] += 1
        counts[f"{kind} disk"] += 1
        counts["ended with an error"] += process.exitcode != 0
    settle(shop, [b for b in range(batches.stop) if chance.random() < 0.7])
    messages, failures = judge(shop)
    counts["messages"] += messages
    return failures


def main(seconds: float, seed: int, cases: int) -> None:
    end = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    failures: list[str] = []
    at = seed
    while time.monotonic() < end and counts["cases"] < cases and not failures:
        root = Path(tempfile.mkdtemp(prefix=f"txmq_disks_{at}_"))
        wanted = min(CASES_A_LOG, cases - counts["cases"])
        found = _one_log(root / "shop", random.Random(at), wanted, end, counts)
        failures += [f"seed {at}, folder {root}: {f}" for f in found]
        if not found:
            shutil.rmtree(root)
        at += 1
    print(json.dumps({**counts, "failures": failures}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
