"""A commit log on the real S3 server."""

from __future__ import annotations

import pytest

import rmq_spark as txmq
from tests.torture.s3.server import S3Server


@pytest.fixture
def uri(s3: S3Server, request: pytest.FixtureRequest) -> str:
    """Where a commit log may be made; nothing is there yet."""
    return f"{s3.bucket('shop')}/{request.node.name.split('[')[0]}/log"


@pytest.fixture
def log(s3: S3Server, uri: str) -> txmq.CommitLog:
    made = txmq.CommitLog.create(uri, storage_options=s3.storage_options())
    made.create_topic("orders", 2)
    return made
