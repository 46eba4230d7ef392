"""Each kind of object store, on a server that runs here."""

from __future__ import annotations

import re
from typing import Any

import pytest

import rmq_spark as txmq

STORES = ["s3", pytest.param("azure", marks=pytest.mark.long), pytest.param("google", marks=pytest.mark.long)]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Any:
    """A running server: ``bucket(name)`` makes a bucket, ``storage_options()`` is what delta-rs must be told."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def uri(store: Any, request: pytest.FixtureRequest) -> str:
    """Where a commit log may be made; nothing is there yet."""
    return f"{store.bucket('stores')}/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}/log"


@pytest.fixture
def log(store: Any, uri: str) -> txmq.CommitLog:
    made = txmq.CommitLog.create(uri, storage_options=store.storage_options())
    made.create_topic("orders", 2)
    return made
