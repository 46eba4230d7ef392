"""Ways in which a disk, a copy or a person damages a file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path


def flip_a_bit(file: Path, others: list[Path], rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {len(content)}"


def flip_some_bits(file: Path, others: list[Path], rng: random.Random) -> str:
    return ", ".join(flip_a_bit(file, others, rng) for _ in range(rng.randint(2, 16)))


def empty(file: Path, others: list[Path], rng: random.Random) -> str:
    file.write_bytes(b"")
    return "to 0 bytes"


def truncate(file: Path, others: list[Path], rng: random.Random) -> str:
    content = file.read_bytes()
    kept = rng.randrange(1, len(content))
    file.write_bytes(content[:kept])
    return f"to {kept} of {len(content)} bytes"


def delete(file: Path, others: list[Path], rng: random.Random) -> str:
    file.unlink()
    return ""


def duplicate(file: Path, others: list[Path], rng: random.Random) -> str:
    """A copy under another name: of an entry of a Delta log, under the next free version."""
    if file.suffix == ".json":
        name = f"{max(int(o.stem) for o in [file, *others]) + 1:020d}.json"
    else:
        name = f"copy-{file.name}"
    shutil.copy(file, file.with_name(name))
    return f"as {name}"


def swap(file: Path, others: list[Path], rng: random.Random) -> str:
    if not others:
        return "with nothing"
    other = rng.choice(others)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"with {other.name}"


def overwrite(file: Path, others: list[Path], rng: random.Random) -> str:
    """Another file of the same kind in its place."""
    if not others:
        return "with nothing"
    other = rng.choice(others)
    shutil.copy(other, file)
    return f"with {other.name}"


def append_garbage(file: Path, others: list[Path], rng: random.Random) -> str:
    length = rng.choice([1, 7, 512, 70_000])
    with file.open("ab") as end:
        end.write(rng.randbytes(length))
    return f"{length} bytes"


def zero_a_block(file: Path, others: list[Path], rng: random.Random) -> str:
    """What a file system leaves of a block that it never wrote."""
    content = bytearray(file.read_bytes())
    at = rng.randrange(len(content))
    length = min(rng.choice([16, 512, 4096]), len(content) - at)
    content[at : at + length] = bytes(length)
    file.write_bytes(content)
    return f"{length} bytes at {at} of {len(content)}"


DAMAGES: Mapping[str, Callable[[Path, list[Path], random.Random], str]] = {
    f.__name__: f
    for f in (
        flip_a_bit,
        flip_some_bits,
        empty,
        truncate,
        delete,
        duplicate,
        swap,
        overwrite,
        append_garbage,
        zero_a_block,
    )
}
"""Each takes the file, the other files of its kind and a random generator, and says what it did."""
