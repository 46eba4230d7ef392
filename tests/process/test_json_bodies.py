"""Bodies that once ended the process in which they were decoded."""

from __future__ import annotations

import subprocess
import sys

NO_OBJECTS = [b"null", b" null ", b'{"a": 1}\nnull', b"{} null {}", b"", b" ", b"[]", b"1", b'"x"', b"\xff"]


def test_bodies_that_are_no_json_objects_do_not_end_the_process() -> None:
    # pyarrow's reader of JSON ends it with a segmentation fault where a null stands in the place of an object.
    program = f"""
import pyarrow as pa
from rmq_spark.errors import MessageError
from rmq_spark.listeners import decode_json
for body in {NO_OBJECTS!r}:
    try:
        decode_json(pa.chunked_array([pa.array([body])]), "a long")
    except MessageError:
        print("refused")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.split()) == (0, ["refused"] * len(NO_OBJECTS)), ended.stderr
