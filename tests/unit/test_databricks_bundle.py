"""The Databricks bundle under conf/databricks, checked without Databricks; and the functions that its jobs call."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml

from rmq_spark import CommitLog
from rmq_spark.cli import tasks
from rmq_spark.errors import ConfigError
from tests.support.half_batches import commit, prepare
from tests.support.inside import JobSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.log("delta", orders=1)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "conf" / "databricks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMA = yaml.safe_load((ROOT / "tests" / "databricks_bundle.yml").read_text())
WHOLE = "DATABRICKS_BUNDLE_SCHEMA"


def bundle() -> dict[str, Any]:
    """The bundle with what it includes."""
    whole: dict[str, Any] = yaml.safe_load((FOLDER / "databricks.yml").read_text())
    whole["resources"] = {}
    for pattern in whole["include"]:
        for file in sorted(FOLDER.glob(pattern)):
            for kind, named in yaml.safe_load(file.read_text())["resources"].items():
                whole["resources"].setdefault(kind, {}).update(named)
    return whole


def jobs() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = bundle()["resources"]["jobs"]
    return found


def test_the_bundle_follows_the_schema_of_bundles() -> None:
    jsonschema.validate(bundle(), SCHEMA)


def test_the_bundle_follows_databricks_own_schema() -> None:
    if WHOLE not in os.environ:
        pytest.skip(f"set {WHOLE} to bundle/schema/jsonschema.json of databricks/cli")
    text = Path(os.environ[WHOLE]).read_text()
    for theirs, ours in ((r"[\\p{L}\\p{N}]", r"[\\w]"), (r"\\p{L}", r"[^\\W\\d_]")):  # Python has no such classes
        text = text.replace(theirs, ours)
    jsonschema.validate(bundle(), json.loads(text))


def test_the_page_names_each_variable_and_sets_those_that_are_required() -> None:
    page = (ROOT / "docs" / "databricks.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| .* \| (.*) \|$", page.partition("| variable |")[2].partition("\n\n")[0], re.M)
    told = [(name, default) for names, defaults in rows for name, default in zip(
        names.split(", "), defaults.split(", ") if "," in names else [defaults], strict=True)]  # fmt: skip
    defaults = {name: variable.get("default", "required") for name, variable in bundle()["variables"].items()}
    assert {name.strip("`"): default.strip("`") for name, default in told} == defaults
    required = {name for name, default in defaults.items() if default == "required"}
    assert set(re.findall(r"^export BUNDLE_VAR_(\w+)=\S+$", page, re.M)) == required


@pytest.mark.parametrize(
    "mistake",
    [
        lambda jobs: jobs["txmq_check"].update(shedule=jobs["txmq_check"].pop("schedule")),
        lambda jobs: jobs["txmq_check"]["tasks"][0]["python_wheel_task"].pop("entry_point"),
        lambda jobs: jobs["txmq_orders"]["health"]["rules"][0].update(metric="BACKLOG"),
        lambda jobs: jobs["txmq_orders"]["health"]["rules"][0].update(value="600"),
    ],
    ids=["a misspelt key", "no entry point", "an unknown metric", "a number as text"],
)
def test_the_schema_finds_mistakes(mistake: Callable[[dict[str, Any]], object]) -> None:
    wrong = deepcopy(bundle())
    mistake(wrong["resources"]["jobs"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_variables_are_declared_and_used() -> None:
    text = "".join(file.read_text() for file in FOLDER.rglob("*.yml"))
    assert set(re.findall(r"\$\{var\.(\w+)\}", text)) == set(bundle()["variables"])
    for kind, name in re.findall(r"\$\{resources\.(\w+)\.(\w+)\.", text):
        assert name in bundle()["resources"][kind]


def test_the_environment_has_the_wheel_and_what_its_extras_need() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [d for extra in ("job", "sql") for d in extras[extra] if "python_version" not in d]
    for job in jobs().values():
        (environment,) = job["environments"]
        wheel, *others = environment["spec"]["dependencies"]
        assert (FOLDER / "resources" / wheel).parent.resolve() == ROOT / "dist"
        assert others == wanted
        assert all(task["environment_key"] == environment["environment_key"] for task in job["tasks"])


def test_a_job_calls_what_the_wheel_has() -> None:
    tasks = [task for job in jobs().values() for task in job["tasks"]]
    called = [task["python_wheel_task"] for task in tasks if "python_wheel_task" in task]
    assert len(called) == 2
    for task in called:
        assert task["package_name"].replace("_", "-") == PROJECT["name"]
        module, function = PROJECT["scripts"][task["entry_point"]].split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_files_of_the_jobs_are_there() -> None:
    for job in jobs().values():
        for task in job["tasks"]:
            if "spark_python_task" in task:
                assert (FOLDER / "resources" / task["spark_python_task"]["python_file"]).is_file()
    parameters = jobs()["txmq_check"]["tasks"][0]["python_wheel_task"]["parameters"]
    config = parameters[parameters.index("--config") + 1]
    assert JobSettings.load(config.replace("${workspace.file_path}", str(FOLDER))).maintenance.interval == 60


def test_no_job_runs_twice_at_once_and_each_says_when_it_runs() -> None:
    for job in jobs().values():
        assert job["max_concurrent_runs"] == 1
        assert len({"schedule", "continuous"} & set(job)) == 1
        assert job["health"]["rules"]


# ---------------------------------------------------------------- what the jobs call
def arguments_of(job: str, values: Mapping[str, str]) -> list[str]:
    """The parameters of a job's task with values for its variables, without the secret scope."""
    parameters = jobs()[job]["tasks"][0]["python_wheel_task"]["parameters"]
    at = parameters.index("--secret-scope")
    text = "\n".join(parameters[:at])
    for name, value in values.items():
        text = text.replace("${" + name + "}", value)
    assert "${" not in text
    return text.split("\n")


def call(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None], *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["task", *arguments])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    function()


def test_the_check_job_settles_what_is_open_and_returns(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(log, 1, 3, fence_id="none")
    monkeypatch.setenv("TXMQ_CHECK__TRANSACTION_TIMEOUT", "0s")
    arguments = arguments_of("txmq_check", {"workspace.file_path": str(FOLDER), "var.log": log.path})
    call(monkeypatch, tasks.check, *arguments)
    assert log.read("orders").num_rows == 3


def test_a_round_that_leaves_work_to_a_person_fails_the_run(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(log, 1, 3)  # of a group that no listener answers for
    monkeypatch.setenv("TXMQ_CHECK__TRANSACTION_TIMEOUT", "0s")
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, tasks.check, "--config", str(FOLDER / "src" / "txmq.toml"), "--path", log.path)
    assert ended.value.code == 1


def test_the_maintainer_drains(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(log, prepare(log, 1, 3))
    call(monkeypatch, tasks.maintain, *arguments_of("txmq_maintain", {"var.log": log.path}))
    log.engine.messages_table.refresh()
    assert log.engine.messages_table.actions()["num_records"].to_pylist() == [3]


def test_storage_options_come_from_a_secret_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tasks.storage_of(None) == {}
    monkeypatch.setitem(sys.modules, "databricks", None)
    with pytest.raises(ConfigError, match="is there on Databricks only"):
        tasks.storage_of("txmq")
    kept = {"AWS_REGION": "eu-central-1", "AWS_SECRET_ACCESS_KEY": "hidden"}
    listed = [SimpleNamespace(key=key) for key in kept]
    secrets = SimpleNamespace(list=lambda scope: listed, get=lambda scope, key: kept[key])
    for name in ("databricks", "databricks.sdk", "databricks.sdk.runtime"):  # what Databricks' Python has
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["databricks.sdk.runtime"].dbutils = SimpleNamespace(secrets=secrets)  # type: ignore[attr-defined]
    assert tasks.storage_of("txmq") == kept
