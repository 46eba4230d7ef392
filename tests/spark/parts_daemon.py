"""Spark's daemon of Python workers, which has loaded what their tasks import: a worker that takes the place of a dead
one starts at once."""

from __future__ import annotations

import pyspark.sql
import pyspark.worker
from pyspark.daemon import manager

from tests.spark import parts_shop

LOADED = pyspark.sql, pyspark.worker, parts_shop

if __name__ == "__main__":
    manager()
