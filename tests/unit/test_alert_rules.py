"""Alert rules and dashboard: judged by Prometheus' and Grafana's own tools, and held to what the exporter shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rmq_spark import COMMIT_MESSAGE, ROLLBACK_MESSAGE
from rmq_spark._core.inspect import limits
from rmq_spark._core.metrics.log_collector import samples_of
from rmq_spark._core.metrics.log_figures import LogFigures
from rmq_spark._core.metrics.metric_names import COMMON
from rmq_spark._core.vocabulary.options import TRANSACTION_CHECK_INTERVAL_S
from rmq_spark.cli import app
from rmq_spark.testing import InMemoryCommitLog
from tests.support.clocks import Ahead
from tests.support.half_batches import commit, in_conflict, prepare, quarantine
from tests.support.inside import BY_NAME, LOG, LogWatch, whole

CONF = Path(__file__).parents[2] / "conf"
RULES = CONF / "prometheus" / "txmq.rules.yml"
TESTS = CONF / "prometheus" / "txmq.rules.test.yml"
DASHBOARD = CONF / "grafana" / "txmq.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None and not os.environ.get("CI"), reason="promtool is not on the PATH (Debian: package prometheus)"
)
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
ASKED = [asked for test in yaml.safe_load(TESTS.read_text())["tests"] for asked in test["alert_rule_test"]]
TESTED = {asked["alertname"] for asked in ASKED if asked.get("exp_alerts")}
COMMAND: Any = whole(app)


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROMTOOL or "promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


# ---------------------------------------------------------------- Prometheus' own tool
@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    done = promtool("test", "rules", TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.turns(6)
@needs_promtool
@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_an_alert_that_never_fires_is_noticed(alert: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        if rule["alert"] == alert:
            rule["expr"] = "vector(0) > 1"
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules))
    shutil.copy(TESTS, tmp_path)
    assert promtool("test", "rules", tmp_path / TESTS.name).returncode != 0


# ---------------------------------------------------------------- what they ask for, and what they advise
def test_the_rules_have_the_limits_of_doctor_and_report() -> None:
    silent_s = limits.SILENT_INTERVALS * TRANSACTION_CHECK_INTERVAL_S
    expected = {
        "TxmqOldestPending": [limits.PENDING_S_MAX],
        "TxmqCheckerSilent": [silent_s, silent_s],
        "TxmqCheckJobSilent": [silent_s],
        "TxmqConsumerLag": [limits.LAG_S_MAX],
        "TxmqDrainStandsStill": [limits.UNDRAINED_S_MAX],
        "TxmqLiveFiles": [limits.FILES_MAX],
    }
    compared = {rule["alert"]: re.findall(r"[<>] (\d+)", rule["expr"]) for rule in ALERTS}
    assert {name: list(map(float, compared[name])) for name in expected} == expected


def metrics_in(expression: str) -> Iterator[tuple[str, str]]:
    """The metrics of an expression, each with what stands in its braces."""
    for name, labels in re.findall(r"\b((?:txmq|rocketmq)_[a-z_]+)(?:\{([^}]*)\})?", expression):
        base = re.sub(r"_(bucket|count|sum)$", "", name)
        yield (base if BY_NAME.get(base, BY_NAME["txmq_up"]).kind == "histogram" else name), labels


def require_known(expression: str) -> None:
    found = list(metrics_in(expression))
    assert found, expression
    for name, labels in found:
        assert name in BY_NAME, f"{name} is in no exporter: {expression}"
        used = set(re.findall(r"(\w+)\s*=~?", labels))
        assert used <= {*COMMON, *BY_NAME[name].labels}, expression
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression)))) - {"le"}
    assert grouped <= {*COMMON, *(label for name, _ in found for label in BY_NAME[name].labels)}, expression


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_uses_metrics_that_there_are_and_says_what_to_do(rule: dict[str, Any]) -> None:
    require_known(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    said = rule["annotations"]
    assert set(said) == {"summary", "description", "remedy"}
    assert rule["alert"] in TESTED
    for text in (said["remedy"], *re.findall(r"txmq (?:dlq |group )?\w+", said["description"])):
        command = COMMAND
        for word in text.removeprefix("txmq ").split():
            if not hasattr(command, "commands"):
                break
            assert word in command.commands, text
            command = command.commands[word]
        assert not hasattr(command, "commands"), f"{text} is no whole command"


@pytest.mark.parametrize("label", ["cluster", "node_id", "producer_group", "consumer_group", "topic", "table"])
def test_a_label_in_the_words_of_an_alert_is_one_that_it_has(label: str) -> None:
    for rule in ALERTS:
        if f"$labels.{label}" in " ".join(rule["annotations"].values()):
            assert label in "".join(re.findall(r"\bby \(([^)]*)\)", rule["expr"])[:1]), rule["alert"]


# ---------------------------------------------------------------- the dashboard
def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def lost(sent: Any, back: Any, at: str = "") -> Iterator[str]:
    """What a value has that did not come back."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            there = isinstance(back, dict) and name in back
            yield from lost(value, back[name], f"{at}/{name}") if there else [f"{at}/{name}"]
    elif isinstance(sent, list):
        if not isinstance(back, list) or len(back) != len(sent):
            yield at
        else:
            for number, (one, other) in enumerate(zip(sent, back, strict=True)):
                yield from lost(one, other, f"{at}[{number}]")
    elif sent != back:
        yield f"{at}: {sent!r} became {back!r}"


def test_grafana_s_own_types_know_all_of_the_dashboard() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    sent = json.loads(DASHBOARD.read_text())
    back = json.loads(JSONEncoder().encode(models.Dashboard.from_json(sent)))
    assert list(lost(sent, back)) == []
    sent["panels"][1]["options"]["colour"] = "red"
    back = json.loads(JSONEncoder().encode(models.Dashboard.from_json(sent)))
    assert list(lost(sent, back)) == ["/panels[1]/options/colour"], "what Grafana does not know is found"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_shows_metrics_that_there_are(panel: dict[str, Any]) -> None:
    assert panel["description"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        require_known(target["expr"])
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        grouped = set(re.findall(r"\w+", re.findall(r"\bby \(([^)]*)\)", target["expr"])[0])) if shown else set()
        assert shown <= grouped, f"{panel['title']}: its legend names a label that is summed away"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_log_that_two_programs_show_is_counted_once(panel: dict[str, Any]) -> None:
    """The exporter and the check job were both scraped, and every sum was twice what it should be."""
    for target in panel["targets"]:
        for name, _ in metrics_in(target["expr"]):
            if BY_NAME[name].origin == LOG:
                assert not re.search(rf"sum( by \([^)]*\) )?\(((rate|increase)\()?{name}\b", target["expr"])
                assert re.search(rf"max( by \([^)]*\) )?\(((rate|increase)\()?{name}\b", target["expr"])


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for panel in panels() for target in panel["targets"] for name, _ in metrics_in(target["expr"])}
    left_out = {
        "rocketmq_topic_number", "rocketmq_messages_in_total",  # the others of their kind say more
        "txmq_pending_not_looked_at", "txmq_check_round_seconds", "txmq_process_commits_total",
    }  # fmt: skip
    assert shown == BY_NAME.keys() - left_out


def test_the_dashboard_s_variables_and_its_places_fit() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "cluster", "log", "topic", "group"]
    for name, variable in variables.items():
        if name != "datasource":
            require_known(variable["query"]["query"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert used <= variables.keys()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(at["x"] + x, at["y"] + y) for at in places for x in range(at["w"]) for y in range(at["h"])]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert max(x for x, _ in cells) == 23


# ---------------------------------------------------------------- a drill
def as_series(figures: LogFigures, log: str, now_s: float) -> list[dict[str, str]]:
    """What Prometheus scrapes again and again while these figures stay. promtool's clock begins at 0."""
    found = []
    for name, labels, value in [("txmq_up", {}, 1), *samples_of(figures)]:
        text = ", ".join(f'{k}="{v}"' for k, v in {"cluster": "c", "node_id": log, **labels}.items())
        shown = value - now_s if name.endswith("timestamp_seconds") else value
        found.append({"series": f"{name}{{{text}}}", "values": f"{shown:f}+0x40"})
    return found


@needs_promtool
def test_what_goes_wrong_in_a_log_fires_its_alert_and_the_remedy_shows_it(tmp_path: Path) -> None:
    clock = Ahead(-20 * 60.0)
    log = InMemoryCommitLog(topics={"orders": 1}, runtime=clock)
    prepare(log, 0, 2, group="shop")
    hidden, late = prepare(log, 1, 3, group="shop"), prepare(log, 2, 1, group="shop")
    quarantine(log, hidden)
    in_conflict(log, late)
    commit(log, prepare(log, 3, 2))
    clock.seconds = 0.0
    fired = "TxmqOldestPending TxmqCheckerSilent TxmqQuarantined TxmqConflict TxmqDrainStandsStill".split()
    expected = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": "20m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fired],
    }
    series = as_series(LogWatch(log).look(), log.path, clock.time())
    shutil.copy(RULES, tmp_path)
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [expected]}]
    drill = {"rule_files": [RULES.name], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "drill.yml").write_text(yaml.safe_dump(drill))
    done = promtool("test", "rules", tmp_path / "drill.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    for half_id, verdict in (("app:0", COMMIT_MESSAGE), ("app:1", ROLLBACK_MESSAGE), ("app:2", ROLLBACK_MESSAGE)):
        log.resolve(half_id, verdict, "the drill")
    log.drain()
    found = LogWatch(log).look()
    assert (dict(found.pending), found.quarantined, found.conflicts, found.publish_lag_s) == ({}, {}, 0, 0.0)


# ---------------------------------------------------------------- docs/monitoring.md
def test_the_page_lists_every_alert() -> None:
    page = (CONF.parent / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^\| `(Txmq\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
