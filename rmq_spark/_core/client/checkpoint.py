"""The checkpoint of a stopped streaming query: which batch runs when the query starts, and with which input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from rmq_spark._core.protocol.identity import ID_FILE, input_hash_of
from rmq_spark._core.storage.file_system import filesystem
from rmq_spark._core.vocabulary.redaction import cause_of, sentence_of
from rmq_spark.errors import OptionError


@dataclass(frozen=True)
class Stream:
    """The checkpoint of a stopped streaming query.

    ``next_batch`` is the batch that runs when the query starts. If ``planned``, its input is already fixed, because it
    ran or began to. The log has ``query_id`` with the checkpoint's batches. ``input_hashes`` are those of the batches
    whose input the checkpoint still has.
    """

    app_id: str
    place: str
    next_batch: int
    planned: bool
    query_id: str
    input_hashes: Mapping[int, str] = field(repr=False)

    @classmethod
    def read(cls, given: str, storage_options: Mapping[str, str] | None = None) -> Stream:
        """Read a checkpoint at a place, given as ``<place>``, or ``<appId>=<place>`` for a query with option ``appId``.
        One that cannot be read is an OptionError."""
        app_id, equals, place = given.partition("=")
        if not equals or "/" in app_id:
            app_id, place = "", given
        try:
            fs, root = filesystem(place, storage_options)

            def numbers(folder: str) -> list[int]:
                infos = fs.get_file_info(pafs.FileSelector(f"{root}/{folder}", allow_not_found=folder == "commits"))
                return [int(info.base_name) for info in infos if info.base_name.isdigit()]

            query_id = _id_of(fs, root)
            batches = numbers("offsets")
            planned, committed = max(batches, default=-1), max(numbers("commits"), default=-1)
            hashes = {batch_id: _input_hash(fs, f"{root}/offsets/{batch_id}") for batch_id in batches}
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise OptionError(
                f"checkpoint {place!r} cannot be read ({sentence_of(problem)}): the checkpointLocation of a query that "
                "is stopped is expected"
            ) from cause_of(problem)
        next_batch = planned if planned > committed else planned + 1
        return cls(app_id or query_id, place, next_batch, planned > committed, query_id, hashes)


def _id_of(fs: Any, root: str) -> str:
    try:
        stream = fs.open_input_stream(f"{root}/{ID_FILE}")
    except FileNotFoundError:
        stream = fs.open_input_stream(f"{root}/metadata")
    with stream:
        return str(json.loads(stream.readall())["id"])


def _input_hash(fs: Any, path: str) -> str:
    with fs.open_input_stream(path) as stream:
        return input_hash_of(stream.readall())
