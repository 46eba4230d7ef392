# `make` alone lists the targets. A fresh clone needs make, a Python (3.10 or newer) and a Java (17 or newer).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PY := $(CURDIR)/$(VENV)/bin/python
PYTEST_ARGS ?=
# Folders or files to run instead of all: make test-unit TESTS=tests/unit/test_offsets.py
TESTS ?=
# Three workers for two cores, since a third of the time one waits; tests/conftest.py says which tests stay together. PYTEST_ARGS="-n 0": one process.
PYTEST = $(PY) -m pytest -n 3

# Spark starts its workers with this interpreter, whatever `python3` is on the PATH.
export PYSPARK_PYTHON := $(PY)
export PYSPARK_DRIVER_PYTHON := $(PY)

# One stamp a step, inside the environment: a step runs again when its input is newer, or the environment is new.
HAVE_VENV := $(VENV)/.made
HAVE_PACKAGES := $(VENV)/.packages
HAVE_PROJECT := $(VENV)/.project
HAVE_JARS := $(VENV)/.jars

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: install
install: java $(HAVE_PROJECT) $(HAVE_JARS) ## .venv with the locked packages and this project, and Delta's jars

.PHONY: demo
demo: install ## a grocer's year of orders, a killed driver, and the proof that all agrees (DEMO_ROWS=n: smaller)
	@$(PY) -m examples.grocer

.PHONY: test
test: install ## what every change must pass, in 7 to 12 minutes (TESTS=file, PYTEST_ARGS="-k word", SEED=n to replay)
	@$(PYTEST) $(or $(TESTS),tests) --durations=10 $(PYTEST_ARGS)

.PHONY: test-all
test-all: install ## every test with the long counts of the proof, older Sparks, oldest packages, in some hours (SEED=n to replay)
	@TXMQ_TESTS=all $(PYTEST) $(or $(TESTS),tests) -m "" --durations=25 $(PYTEST_ARGS)
	@$(if $(TESTS),,for spark in 4.0 4.1; do $(MAKE) test-spark SPARK=$$spark; done; $(MAKE) test-oldest)

.PHONY: test-spark
test-spark: install ## tests/spark and a killed driver on another Spark and an older pyarrow, from the wheel (SPARK=4.0 or 4.1)
	@$(PY) -m tests.support.spark_environment $(SPARK)
	@cd $(VENV)-spark-$(SPARK)/tree && export PYSPARK_PYTHON="$$PWD/../bin/python" PYSPARK_DRIVER_PYTHON="$$PWD/../bin/python" && \
	  TXMQ_TESTS=every ../bin/python -m pytest -n 2 $(or $(TESTS),tests/spark tests/crash/test_spark_driver.py) $(PYTEST_ARGS)

# Spark's own oldest is for test-spark: some of these tests speak to classes of Spark 4.2.
.PHONY: test-oldest
test-oldest: install ## the tests that need no Java, with the oldest packages that pyproject.toml allows
	@$(PY) -m venv --clear $(VENV)-oldest
	@$(PY) -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
	@$(PY) -m uv pip install --quiet --python $(VENV)-oldest/bin/python --resolution lowest-direct '.[dev]' 'pyspark>=4.2'
	@TXMQ_TESTS=every $(VENV)-oldest/bin/python -m pytest -n 2 $(or $(TESTS),tests/unit) $(PYTEST_ARGS)

.PHONY: test-unit
test-unit: $(HAVE_PROJECT) ## the tests that need no Java, in a minute
	@$(PYTEST) $(or $(TESTS),tests/unit) $(PYTEST_ARGS)

.PHONY: lint
lint: $(HAVE_PROJECT) ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

.PHONY: typecheck
typecheck: $(HAVE_PROJECT) ## mypy --strict on rmq_spark, pyspark_txmq and the examples
	@$(PY) -m mypy --strict rmq_spark pyspark_txmq examples

.PHONY: torture
torture: install ## the long proof: kills, simulation, races, damage (MINUTES=120 SEED=n LEVELS="kills drivers")
	@$(PY) -m tests.torture $(LEVELS)

.PHONY: checker-selftest
checker-selftest: install ## seeded bugs in the protocol: does the anomaly checker catch every one of them? (SEED=n)
	@$(PY) -m tests.torture.judge.selftest $(SEED)

.PHONY: bench
bench: install ## sink and source beside Spark's own Delta sink and source
	@$(PY) -m benchmarks.throughput

.PHONY: bench-growth
bench-growth: install ## what a longer log costs the sink, the planning and a cold start
	@$(PY) -m benchmarks.growth

.PHONY: bench-drained
bench-drained: install ## what a drainer beside the sink, rolled back messages and topics cost
	@$(PY) -m benchmarks.drained

.PHONY: bench-programs
bench-programs: install ## what producers without Spark send, in threads and thousands in flight, beside RocketMQ 5.3.3
	@$(PY) -m benchmarks.programs

.PHONY: bench-push
bench-push: install ## how fast and how soon consumers without Spark are, and what they cost when idle
	@$(PY) -m benchmarks.push

.PHONY: bench-consumers
bench-consumers: install ## what it costs that a result counts once, beside at least once
	@$(PY) -m benchmarks.consumers

.PHONY: bench-store
bench-store: install ## sends, micro-batches, checks and drains on an object store whose answers come 30 and 100 ms later
	@$(PY) -m benchmarks.far_store

.PHONY: bench-orders
bench-orders: install ## orders into PostgreSQL with their messages, beside COPY and a Delta append (BENCH_ONLY=key,batch)
	@$(PY) -m benchmarks.orders

.PHONY: lock
lock: $(HAVE_VENV) ## requirements.lock anew from pyproject.toml (UPGRADE=1: newest versions)
	@$(PY) -m pip install --quiet 'uv>=0.5'
	@$(PY) -m uv pip compile pyproject.toml --all-extras --universal --python $(PY) --python-version 3.10 \
	  --no-python-downloads --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
	  --quiet $(if $(UPGRADE),--upgrade) --output-file requirements.lock >/dev/null
	@{ echo '# Every package of every extra, for Python 3.10 and newer. Made by `make lock`; not to be edited.'; \
	  cat requirements.lock; } >requirements.lock.new && mv requirements.lock.new requirements.lock
	@echo "requirements.lock: $$(grep -c '==' requirements.lock) packages"

# It fetches nothing, and opens from the folder.
.PHONY: docs
docs: $(HAVE_PROJECT) ## the documentation as a site: open site/index.html (a dead link ends it)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file conf/mkdocs.yml
	@echo "the documentation: site/index.html"

.PHONY: wheel
wheel: $(HAVE_PROJECT) ## dist/*.whl, with rmq_spark and pyspark_txmq
	@$(PY) -m build --wheel --no-isolation --outdir dist .

.PHONY: clean
clean: ## remove .venv, caches and what was built
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis \
	  artifacts metastore_db spark-warehouse derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first of these that is new enough, and really starts, makes the environment.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10

$(HAVE_VENV):
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHONS) none; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi; \
	  done; \
	  if [ "$$python" = none ]; then \
	    echo "No Python 3.10 or newer on the PATH. Install one, for example: apt-get install python3 python3-venv"; exit 1; \
	  fi; \
	  echo "$(VENV): made with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV) >/dev/null 2>&1 \
	  || { "$$python" -m venv --clear --without-pip $(VENV) && "$$python" -m pip --python $(PY) install --quiet pip; } \
	  || { echo "$$python cannot make a virtual environment. Install its venv module: apt-get install python3-venv"; exit 1; }; \
	fi
	@touch $@

# Hashes guard every downloaded file. The progress is one line, unless something goes wrong.
$(HAVE_PACKAGES): requirements.lock | $(HAVE_VENV)
	@echo "$(VENV): installing the locked packages (some minutes the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

# Editable by a path entry, so that Spark's look-up of modules named pyspark_* finds pyspark_txmq.
$(HAVE_PROJECT): pyproject.toml $(HAVE_PACKAGES)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)
NEED_JAVA := Spark 4.2 needs Java 17 or newer. Install one (apt-get install openjdk-17-jre-headless) or set JAVA_HOME

.PHONY: java
java:
	@version=$$("$(JAVA)" -version 2>&1 | sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' | head -1) || true; \
	if [ -z "$$version" ]; then echo "$(NEED_JAVA): $(JAVA) does not start."; exit 1; fi; \
	if [ "$$version" -lt 17 ]; then echo "$(NEED_JAVA): $(JAVA) is Java $$version."; exit 1; fi

# A session started once leaves the jars in ivy's cache, where every later session finds them. A table proves it. Its
# classes are kept for the JVMs of tests (tests/support/jvm.py).
define FETCH_JARS
import tempfile
from delta import configure_spark_with_delta_pip
from pyspark import SparkContext
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
builder = builder.config("spark.databricks.delta.snapshotPartitions", "2")
builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
spark = configure_spark_with_delta_pip(builder).getOrCreate()
with tempfile.TemporaryDirectory() as folder:
    spark.range(1).write.format("delta").save(folder + "/table")
    spark.read.format("delta").load(folder + "/table").count()
spark.stop()
gateway = SparkContext._gateway
gateway.proc.stdin.close()
gateway.proc.wait()  # it writes the classes when it ends
endef
export FETCH_JARS

$(HAVE_JARS): $(HAVE_PACKAGES) | java
	@echo "Delta's jars: fetching them once"
	@rm -f $(VENV)/spark.jsa*
	@SPARK_SUBMIT_OPTS="-XX:+IgnoreUnrecognizedVMOptions -XX:+UseSerialGC -XX:TieredStopAtLevel=1 \
	    -XX:ArchiveClassesAtExit=$(VENV)/spark.jsa.new" \
	  $(PY) -c "$$FETCH_JARS" >$(VENV)/jars.log 2>&1 || { cat $(VENV)/jars.log; exit 1; }
	@if [ -f $(VENV)/spark.jsa.new ]; then mv $(VENV)/spark.jsa.new $(VENV)/spark.jsa; fi # half of one ends the JVM
	@touch $@
