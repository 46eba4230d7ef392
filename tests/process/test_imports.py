"""What an import may bring along: Spark's workers fork, and Delta's engine must not run in a process that forks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support.inside import parse_selector

LIGHT = (
    "import rmq_spark",
    "import rmq_spark; dir(rmq_spark); rmq_spark.Message; rmq_spark.COMMIT_MESSAGE; rmq_spark.TransactionListener",
    "import rmq_spark._core.vocabulary.options",
    "import rmq_spark._core.storage.data_file",
    "import rmq_spark._core.storage.row_range",
    "import rmq_spark._core.log.half",
    "import rmq_spark._core.log.half_writer",
    "import rmq_spark._core.log.op",
    "import rmq_spark._core.log.batch_state",
    "import rmq_spark._core.messages.message_reader",
    "import rmq_spark._core.messages.message_files",
    "import rmq_spark.listeners",
    "import rmq_spark._core.selector",
    "import rmq_spark.metrics; dir(rmq_spark.metrics)",
    "import rmq_spark._core.consumers.in_order, rmq_spark._core.consumers.message_listener",
    "import rmq_spark._core.consumers.retry",
)
WORKERS = (
    *((statement, ("deltalake", "lark", "pyspark", "sqlalchemy", "prometheus_client")) for statement in LIGHT),
    # Spark itself imports pyspark_txmq, for every look-up of a Python data source.
    ("import pyspark_txmq", ("deltalake", "lark", "sqlalchemy")),
    # What Spark's workers load to run a task of the source or the sink.
    ("import rmq_spark._core.spark.reader", ("deltalake", "sqlalchemy")),
    ("import rmq_spark._core.spark.writers", ("deltalake", "sqlalchemy")),
)
DRIVERS = (
    ("import rmq_spark.listeners; rmq_spark.listeners.DeltaTransactionListener", ("pyspark", "sqlalchemy", "typer")),
    ("import rmq_spark._core.checks.service", ("pyspark", "sqlalchemy", "typer", "prometheus_client")),
    (
        "import rmq_spark._core.consumers.push, rmq_spark._core.consumers.pull, rmq_spark._core.producer.producer",
        ("pyspark", "sqlalchemy", "typer", "lark", "prometheus_client"),
    ),
    (
        "import sys, rmq_spark as txmq; txmq.SqlTransactionListener; assert 'sqlalchemy' in sys.modules",
        ("pyspark",),
    ),
)
HEAVY = ("pyarrow", "deltalake", "pandas", "numpy", "pyspark", "sqlalchemy", "lark", "prometheus_client", "altair")
COMMAND = (("import rmq_spark.cli", HEAVY),)
"""``txmq --help`` answers before anything is loaded that takes long."""

RUN = """
import sys, threading

def run(statement, unwanted):
    for name in [m for m in sys.modules if m.split(".")[0] in ("rmq_spark", "pyspark_txmq")]:
        del sys.modules[name]
    exec(statement, {})
    heavy = sorted({m.split(".")[0] for m in sys.modules}.intersection(unwanted))
    assert not heavy, f"{statement!r} loads {heavy}"
    assert threading.active_count() == 1, f"{statement!r} starts a thread"
"""
"""Runs a statement with nothing of this project loaded. What earlier ones loaded of other packages is still there."""


def python(program: str) -> str:
    """What a program prints in an interpreter of its own; it must end well."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.turns(3)
@pytest.mark.parametrize("statements", [WORKERS, DRIVERS, COMMAND], ids=["workers", "drivers", "command"])
def test_importing_loads_no_engine_and_starts_no_thread(statements: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    python(RUN + "\n".join(f"run({statement!r}, {unwanted!r})" for statement, unwanted in statements))


def test_an_executor_needs_no_parser() -> None:
    said = python(
        "import pickle, sys; sys.modules['lark'] = None\n"
        f"selector = pickle.loads({pickle.dumps(parse_selector('a > 5'))!r})\n"
        "import pyarrow as pa\n"
        "rows = pa.table({'properties': pa.array([[('a', '6')]], pa.map_(pa.string(), pa.string()))})\n"
        "assert selector.at(0).keeps(rows).to_pylist() == [True]\n"
        "from rmq_spark._core.selector import parse_selector\n"
        "try:\n    parse_selector('a > 5')\n"
        "except Exception as problem:\n    print(type(problem).__name__, problem)\n"
    )
    assert said.startswith("OptionError selectors need the package lark on the driver: install rmq_spark")


def test_the_public_names_are_listed_and_each_of_them_is_there() -> None:
    said = python(
        "import rmq_spark\n"
        "assert sorted(rmq_spark.__dir__()) == rmq_spark.__dir__()\n"
        "print(*[name for name in dir(rmq_spark) if hasattr(rmq_spark, name)])\n"
        "assert set(rmq_spark.__all__) < set(dir(rmq_spark)), 'errors are public, too'\n"
        "assert all(isinstance(getattr(rmq_spark, n), type) for n in dir(rmq_spark) if n.endswith('Error'))\n"
    )
    assert {"CommitLog", "TransactionalSink", "COMMIT_MESSAGE", "TxmqError", "VerdictConflictError"} <= set(
        said.split()
    )
    assert not {"importlib", "Any", "TYPE_CHECKING", "_WHERE"} & set(said.split())


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("register", "pyspark", "spark"), ("SqlInbox", "sqlalchemy", "sql")]
)
def test_a_name_whose_package_is_missing_says_which_extra_has_it(name: str, package: str, extra: str) -> None:
    said = python(
        f"import sys; sys.modules[{package!r}] = None\n"
        "import rmq_spark\n"
        f"try:\n    rmq_spark.{name}\n"
        "except ImportError as problem:\n    print(problem)\n"
    )
    assert said.strip() == f"rmq_spark.{name} needs {package}: install rmq_spark with its extra {extra}"


def test_without_sqlalchemy_the_extra_is_named() -> None:
    said = python(
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import rmq_spark.listeners\n"
        "try:\n    rmq_spark.listeners.SqlTransactionListener\n"
        "except Exception as problem:\n    print(problem)\n"
    )
    assert "SqlTransactionListener needs sqlalchemy: install rmq_spark with its extra sql" in said
