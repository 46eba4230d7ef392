"""txmq doctor finds what is wrong, says what to do, and ends with a code for monitoring."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from rmq_spark import CommitLog, ConsumerGroup
from rmq_spark._core.inspect.finding import Finding, worst
from rmq_spark.cli import app, doctor, serve
from rmq_spark.cli.doctor_machine import java_home, java_version, look_at_machine
from rmq_spark.cli.doctor_store import look_at_store
from tests.support.clocks import set_clock
from tests.support.commands import objects, txmq, words
from tests.support.half_batches import (
    commit,
    copied_log,
    count_check,
    header_of,
    in_conflict,
    pending,
    prepare,
    prepare_one,
    quarantine,
)
from tests.support.inside import Change, Diagnosis, HalfWriter, Level, Members, Standing
from tests.support.limits import Limit
from tests.support.machines import FINE, be_fine, have_versions


@pytest.fixture
def log(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> CommitLog:
    """A commit log that the environment names, on a machine with nothing to warn of."""
    made = copied_log(tmp_path / "log", orders=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TXMQ_PATH", made.path)
    monkeypatch.delenv("TXMQ_CONFIG", raising=False)
    be_fine(monkeypatch, tmp_path_factory.mktemp("runtime"))
    return made


def look_at(log: CommitLog, interval: float = 60.0, answered: list[str] | None = None) -> Iterator[Finding]:
    """What doctor finds on a log."""
    yield from look_at_store(log.another())
    yield from Diagnosis(Standing(log.another().engine), "", interval, answered).findings()


def found(log: CommitLog, interval: float = 60.0, answered: list[str] | None = None) -> Mapping[str, Finding]:
    """The worst finding of each check."""
    findings: dict[str, Finding] = {}
    for finding in look_at(log, interval, answered):
        known = findings.get(finding.check)
        findings[finding.check] = finding if known is None or worst([known, finding]) is not known.level else known
    return findings


def of_the_machine() -> Mapping[str, Finding]:
    """What there is to say about the machine, by check."""
    return {finding.check: finding for finding in look_at_machine()}


def bad(log: CommitLog, interval: float = 60.0, answered: list[str] | None = None) -> dict[str, str]:
    """The checks that found something, and how bad it is."""
    findings = found(log, interval, answered)
    return {name: str(f.level) for name, f in findings.items() if f.level in (Level.WARNING, Level.CRITICAL)}


MINUTE_S, HOUR_S = 60, 3600


# ---------------------------------------------------------------- as a command
def test_all_is_well_and_the_exit_code_says_so(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    rows = objects("doctor")
    assert {row["level"] for row in rows} == {"ok", "note"}
    looked_at = "log permissions store clock tables pending checker drain files".split()
    assert set(looked_at) <= {row["check"] for row in rows}
    assert txmq("doctor")[0].splitlines()[-1] == "0 critical, 0 warnings"
    assert txmq("doctor", "--quiet")[0] == ""
    assert [p.name for p in Path(log.path).iterdir() if p.name.startswith("_probe")] == [], "the trial left nothing"


def test_warnings_and_what_is_critical_have_exit_codes_and_remedies(log: CommitLog) -> None:
    record = prepare(log, 0)
    quarantine(log, record)
    (row,) = objects("doctor", "--quiet", code=doctor.WARNINGS)
    assert (row["check"], row["level"]) == ("quarantined", "warning")
    assert row["remedy"].startswith("txmq resume app:0 ")
    again = prepare(log, 0, app="later")
    count_check(log.engine, again, 1, pending(log, again), "UNKNOWN from Bank: the API answers 503")
    quarantine(log, again)
    (row,) = objects("doctor", "--quiet", code=doctor.WARNINGS)
    assert row["remedy"].startswith("txmq resume all (asks again); or txmq trace app:0 ")
    assert "last check" not in row["what"], "of the first one no check was answered"
    txmq("resume", "app:0")
    (row,) = objects("doctor", "--quiet", code=doctor.WARNINGS)
    assert row["what"].endswith("later:0 (the last check: UNKNOWN from Bank: the API answers 503)")
    assert objects("quarantined")[0]["last_check"] == "UNKNOWN from Bank: the API answers 503"
    in_conflict(log, prepare(log, 1))
    out, _ = txmq("doctor", log.path, code=doctor.CRITICAL)
    assert f"→ txmq trace {log.path} app:1" in out
    assert out.splitlines()[-1] == "1 critical, 1 warning"


def test_a_log_that_cannot_be_opened_is_a_finding(log: CommitLog, tmp_path: Path) -> None:
    rows = objects("doctor", tmp_path, code=doctor.CRITICAL)
    assert (rows[0]["check"], rows[0]["level"]) == ("log", "critical")
    assert f"make one with txmq create {tmp_path}" in rows[0]["what"]


def test_the_configuration_says_how_often_is_checked_and_who_answers(log: CommitLog, tmp_path: Path) -> None:
    file = tmp_path / "txmq.toml"
    listener = 'listener_modules = ["rmq_spark"]\n[listeners]\nbank = "rmq_spark:PerMessageListener"\n'
    file.write_text(f'path = "x"\n{listener}[check]\ntransactionCheckInterval = "5s"\n')
    prepare(log, 0, group="shop")
    rows = {row["check"]: row for row in objects("doctor", code=doctor.WARNINGS)}
    assert "1 listener (looked for, not run), checks every 5 s" in rows["configuration"]["what"]
    assert "no listener in the configuration for pending half batches of shop" in rows["listeners"]["what"]
    file.write_text("[chek]\n")
    rows = {row["check"]: row for row in objects("doctor", code=doctor.WARNINGS)}
    assert "did you mean 'check'?" in rows["configuration"]["what"]


# ---------------------------------------------------------------- the check job's configuration
MODULES = {
    "shop/__init__.py": "",
    "shop/orders.py": "from rmq_spark import PerMessageListener, TransactionListener\n\n"
    "class Base(TransactionListener):\n    def execute_local_transaction(self, batch): ...\n"
    "    def check_local_transaction(self, batch): ...\n\nclass Answers(Base):\n"
    "    answer: str = ''\n\n    class Inner(Base):\n        pass\n\nlistener = Answers()\n",
    "plain.py": "listener = 1\n",
}


def job(path: str, *, allowed: str = "", group: str = "shop", policy: str = "quarantine") -> str:
    """A configuration with one listener."""
    return (
        f'path = "log"\nlistener_modules = ["{allowed or path.partition(":")[0].partition(".")[0]}"]\n'
        f'[listeners]\n"{group}" = "{path}"\n[check]\ndiscardPolicy = "{policy}"\n'
        '[drain]\nevery = "0s"\n[maintenance]\ninterval = "0s"\n'
    )


@pytest.fixture
def shop(log: CommitLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a commit log and modules, each of which leaves a trace when it is run."""
    for name, text in MODULES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open('ran', 'a').write({name!r})\n{text}")
    monkeypatch.delenv("TXMQ_PATH")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shop", "plain")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def said_of(text: str) -> dict[str, str]:
    """What doctor says of a configuration, by level."""
    Path("txmq.toml").write_text(text)
    result = CliRunner().invoke(app, ["doctor", "log", "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert not Path("ran").exists(), "nothing is run"
    return {row["level"]: row["what"] for row in rows if row["check"] == "configuration"}


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (job("nowhere:listener"), "[listeners] 'shop': listener 'nowhere:listener': module 'nowhere' cannot be "),
        (job("shop.nowhere:listener"), "module 'shop.nowhere' cannot be imported here"),
        (job("plain.nowhere:listener"), "module 'plain.nowhere' cannot be imported here"),
        (job("shop.orders:listener", allowed="other"), "is outside the allowed modules (other)"),
        (job("shop.orders:listener()"), "is not 'module:attribute'"),
        (job("shop.orders:listener", group="a shop"), "[listeners] 'a shop': "),
        (job("shop.orders:listener", policy="quarantin"), "did you mean 'quarantine'?"),
        (job("shop.orders:listener", policy="shop.nowhere:policy"), "[check] discardPolicy: "),
        ("", "path is missing"),
    ],
)
def test_what_the_check_job_refuses_of_its_configuration_doctor_tells_and_runs_nothing(
    shop: Path, text: str, expected: str
) -> None:
    """It said ok where the job ended with 2, as a listener could not be imported."""
    said = said_of(text)
    assert expected in said.get("warning", "")
    assert "ok" not in said
    assert expected in words(txmq("check", "--once", code=2)[1])


@pytest.mark.parametrize("path", ["shop.orders:listener", "shop.orders:Answers", "shop.orders:Answers.Inner"])
def test_a_listener_that_is_there_is_found(shop: Path, path: str) -> None:
    said = said_of(job(path))
    assert set(said) == {"ok"}
    assert "1 listener (looked for, not run), checks every 60 s" in said["ok"]
    txmq("check", "--once")


def test_listeners_that_the_environment_names_are_looked_for(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXMQ_PATH", "log")
    monkeypatch.setenv("TXMQ_LISTENERS", '{"shop": "shop.nowhere:listener"}')
    monkeypatch.setenv("TXMQ_LISTENER_MODULES", '["shop"]')
    (row,) = [row for row in objects("doctor", code=doctor.WARNINGS) if row["check"] == "configuration"]
    assert row["what"].startswith("the environment: [listeners] 'shop': listener 'shop.nowhere:listener'")


def test_a_package_that_a_setting_needs_is_looked_for(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'path = "log"\n[metrics]\nport = 5557\n'
    assert set(said_of(text)) == {"ok"}
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "with its extra metrics" in said_of(text)["warning"]


# ---------------------------------------------------------------- the store
def test_a_store_a_clock_and_rights_that_are_wrong_are_told(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeltaTable, "create", lambda *_, **__: None)  # each of several writers has made the table
    for ahead_s, level in ((90, "critical"), (-90, "critical"), (20, "warning")):
        with monkeypatch.context() as patch:
            set_clock(patch, ahead_s, and_the_stores=False)
            assert bad(log) == {"store": "critical", "clock": level}
            assert f"{'ahead of' if ahead_s > 0 else 'behind'} the store's" in found(log)["clock"].what
    access = os.access
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
        assert bad(log) == {"store": "critical", "permissions": "warning"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert bad(log) == {"store": "critical", "permissions": "critical", "tables": "critical"}
    assert "is on a store without put-if-absent" in found(log)["store"].what

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(DeltaTable, "create", deny)
    assert bad(log) == {"store": "warning"}
    assert "enough for a reader" in found(log)["store"].what


def test_tables_that_somebody_wrote_to_are_told(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    log.drain()
    table = log.engine.messages_table
    table.refresh()
    (path,) = table.actions()["path"].to_pylist()
    again = Change(add=[table.write(table.read([path]))])
    assert table.compare_and_set(lambda _: again, lambda _: True) is not None  # as after a lost race
    assert "table messages has 10 rows, and op placed 5" in found(log)["tables"].what
    shutil.copy(f"{log.path}/messages/{path}", f"{log.path}/messages/again.parquet")
    write_deltalake(f"{log.path}/messages", pa.table(table.read([path])), mode="append")
    assert bad(log)["tables"] == "critical"
    op = DeltaTable(f"{log.path}/op")
    op.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 minutes"})
    told = [finding for finding in look_at(log) if finding.level is Level.CRITICAL]
    assert [finding.check for finding in told] == ["tables", "tables"], "each check would say it again"
    assert "table op is not what rmq_spark left in version" in told[0].what


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(log: CommitLog) -> None:
    ConsumerGroup(log, "points").reset("latest", ["orders"])
    (file,) = Path(log.path, "groups").glob("*.parquet")
    file.write_bytes(b"damaged")
    findings = found(log)
    assert findings["groups"].level is Level.CRITICAL
    assert file.name in findings["groups"].what
    assert findings["conflicts"].level is Level.OK


def test_a_conflict_is_told_whose_file_cannot_be_read(log: CommitLog) -> None:
    in_conflict(log, prepare(log, 0))
    (file,) = Path(log.path, "half").glob("*.parquet")
    file.write_bytes(b"damaged")
    assert found(log)["conflicts"].level is Level.CRITICAL
    ((listed,),) = [objects("conflicts", log.path)]
    assert listed["messages"] is None
    assert file.name in listed["history"][0]


# ---------------------------------------------------------------- transactions
def test_a_silent_checker_is_told_when_something_waits_for_it(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = set_clock(monkeypatch)
    assert found(log)["checker"].level is Level.OK
    record = prepare(log, 0)
    assert bad(log) == {}, "it is young"
    clock.ahead_s += 15 * MINUTE_S
    assert bad(log) == {"pending": "warning", "checker": "critical"}
    assert "no checker has said a word on that (it is due" in found(log)["checker"].what
    assert found(log)["pending"].remedy == "txmq trace app:0"
    check = "txmq check --config txmq.toml --once"
    assert str(found(log)["checker"].remedy).startswith(f"{check} (where the check job's txmq.toml is; its output")
    assert f"where the check job's txmq.toml is: {check}\n" in txmq("trace", "app:0")[0], "trace says the same"
    monkeypatch.setenv("TXMQ_CONFIG", "of the shop.toml")
    remedy = str(found(log)["checker"].remedy)
    monkeypatch.delenv("TXMQ_CONFIG")
    assert shlex.split(remedy.partition(" (")[0])[2:] == ["--config", "of the shop.toml", "--once"]
    count_check(log.engine, record, 1, pending(log, record), "UNKNOWN")
    assert bad(log, interval=100.0) == {"pending": "warning"}, "it has checked within three intervals"
    clock.ahead_s += 20 * MINUTE_S
    assert "a word on that for " in found(log, interval=100.0)["checker"].what
    log.engine.ledger.lease([record], 60)
    assert bad(log, interval=100.0) == {}, "its local transaction runs"


def test_what_is_old_is_critical(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(log, 0)
    set_clock(monkeypatch, ahead_s=2 * HOUR_S)
    assert bad(log) == {"pending": "critical", "checker": "critical"}
    assert "the oldest for 2h" in found(log)["pending"].what


def test_a_group_without_a_listener_is_named_but_not_for_plain_sending(log: CommitLog) -> None:
    prepare(log, 0, group="shop")
    prepare(log, 1, group="plain", fence_id="none")
    assert bad(log, answered=["bank"]) == {"listeners": "warning"}
    assert "pending half batches of shop" in found(log, answered=["bank"])["listeners"].what
    assert bad(log, answered=["shop"]) == {}


def test_delayed_messages_that_nobody_places_are_told(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"body": ["x"], "delay_level": pa.array([1], pa.int32())}
    commit(log, prepare(log, 0, columns))
    assert bad(log) == {}
    set_clock(monkeypatch, ahead_s=30 * MINUTE_S)
    assert bad(log) == {"delayed": "critical"}


# ---------------------------------------------------------------- upkeep and consumers
def test_upkeep_that_is_behind_is_told(log: CommitLog, monkeypatch: pytest.MonkeyPatch, limit: Limit) -> None:
    commit(log, prepare(log, 0))
    assert "5 messages" in found(log)["drain"].what
    with monkeypatch.context() as patch:
        set_clock(patch, ahead_s=30 * MINUTE_S)
        assert bad(log) == {"drain": "warning"}
    log.drain()
    assert found(log)["drain"].what == "every committed message is in the table messages"
    limit(FILES_MAX=0)
    assert bad(log) == {"files": "warning"}
    assert found(log)["files"].remedy == "txmq maintain"


def claim(log: CommitLog, member: str) -> None:
    """Let a member of the group ``points`` have queue 0 of orders."""
    generation = log.engine.groups.positions("points")[("orders", 0)].generation
    assert log.engine.groups.claim("points", member, {("orders", 0): generation}, {}, "test", take_over=True)


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("lease_s", "age_s", "is_dead"),
    [(120.0, 0.0, False), (120.0, 60.0, False), (120.0, 130.0, True), (20.0, 0.0, False), (20.0, 25.0, True)],
)
def test_a_member_is_dead_by_its_own_lease(log: CommitLog, lease_s: float, age_s: float, is_dead: bool) -> None:
    """It was 30 s for all, and a heartbeat of this moment was taken for none."""
    commit(log, prepare(log, 0))
    group = ConsumerGroup(log, "points")
    group.reset("earliest", ["orders"])
    claim(log, "host@1.a")
    Members(log.engine.groups.table, "points", "host@1.a", ["orders"], lease_s, 0.1).beat()
    (beat,) = Path(log.path).rglob("groups/_members/points/host@1.a")
    at_s = beat.stat().st_mtime - age_s
    os.utime(beat, (at_s, at_s))
    assert group.members()["host@1.a"] == (pytest.approx(age_s, abs=20), lease_s)
    assert group.members()["host@1.a"].is_alive is not is_dead
    assert found(log)["groups"].level is (Level.WARNING if is_dead else Level.OK)
    assert objects("group", "list")[0]["members"] == (0 if is_dead else 1)
    (row,) = objects("group", "members", "points")
    assert (row["lease_seconds"], row["alive"]) == (lease_s, not is_dead)
    (queue,) = [row for row in group.lag().to_pylist() if row["owner"]]
    assert queue["lease_seconds"] == lease_s


def test_queues_of_a_dead_member_and_dead_letters_are_told(log: CommitLog) -> None:
    commit(log, prepare(log, 0))
    group = ConsumerGroup(log, "points")
    group.reset("earliest", ["orders"])
    assert bad(log) == {}
    claim(log, "host@1.dead")
    assert bad(log) == {"groups": "warning"}
    assert found(log)["groups"].remedy == (
        "start a member of points (it takes over when the lease of a dead one is over); "
        "txmq group members points (who read for it)"
    )
    assert "none for long" in txmq("group", "members", "points")[0]
    log.engine.create_own_topic("%DLQ%points")
    header = header_of(0, "dead")
    writer = HalfWriter(header, log.topics(), "%DLQ%points", None, own=True)
    staged = log.engine.stage(writer, pa.table({"body": ["x"]}).to_batches())
    commit(log, prepare_one(log.engine, header, staged))
    assert found(log)["dead letters"].what == "points: 1 dead letter"


def test_a_group_that_stands_still_comes_before_upkeep(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(log, prepare(log, 0))
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    set_clock(monkeypatch, ahead_s=2 * HOUR_S)
    rows = objects("doctor", "--quiet", code=doctor.WARNINGS)
    assert [row["check"] for row in rows] == ["groups", "drain"]
    assert "behind, the oldest committed" in rows[0]["what"]
    assert rows[0]["what"].endswith("ago, last moved 2h ago (reset to earliest), and no member lives")
    assert rows[0]["remedy"].startswith("start a member of points (it takes over")


OF_BOTH = ("conflicts", "pending", "checker", "quarantined", "groups", "drain")


def test_doctor_report_and_live_page_say_the_same(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(log, prepare(log, 0))
    quarantine(log, prepare(log, 1))
    in_conflict(log, prepare(log, 2))
    prepare(log, 3)
    ConsumerGroup(log, "points").reset("earliest", ["orders"])
    set_clock(monkeypatch, ahead_s=2 * HOUR_S)
    by_doctor = [row for row in objects("doctor", code=doctor.CRITICAL) if row["check"] in OF_BOTH]
    by_report = objects("report")[0]["findings"]
    assert sorted(row["check"] for row in by_report) == sorted(OF_BOTH)
    assert sorted(by_report, key=str) == sorted(by_doctor, key=str)
    levels = [row["level"] for row in by_report]
    assert levels == sorted(levels), "critical before warning"
    levels = [line.split()[0] for line in txmq("doctor", code=doctor.CRITICAL)[0].splitlines() if line[:1].strip()][:-1]
    assert levels == sorted(levels, key=["critical", "warning", "note", "ok"].index), "worst first"
    page = re.sub(r"</?a\b[^>]*>", "", serve.Looker(log).home({}))  # ids are links
    assert all(escape(row["what"]) in page for row in by_report)


# ---------------------------------------------------------------- the machine
def test_versions_are_found_without_starting_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    findings = of_the_machine()
    assert findings["python"].what.startswith(sys.version.split()[0])
    assert {"pyarrow", "deltalake", "pyspark", "java"} <= set(findings)
    have_versions(monkeypatch, {"pyarrow": "17.0.0", "deltalake": None, "pyspark": "5.0.0", "delta-spark": None})
    findings = of_the_machine()
    assert findings["pyarrow"].level is findings["deltalake"].level is Level.CRITICAL
    assert findings["deltalake"].remedy == "pip install 'deltalake>=1.6'"
    assert (findings["pyspark"].level, findings["delta-spark"].level) == (Level.WARNING, Level.NOTE)
    have_versions(monkeypatch, {"pyspark": None})
    monkeypatch.setattr("rmq_spark.cli.doctor_machine.PYTHON_TESTED", (3, 9))
    findings = of_the_machine()
    assert findings["pyspark"].what == "is not installed: this machine works without Spark"
    assert findings["python"].what.endswith(" is newer than what was tried: 3.9")


def test_a_jar_of_another_delta_than_the_package_is_no_jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jars = tmp_path / ".ivy2" / "jars"
    jars.mkdir(parents=True)
    (jars / "io.delta_delta-spark_4.2_2.13-4.4.0.jar").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    for version, level in (("4.4.0", Level.OK), ("4.4.1", Level.NOTE), (None, Level.OK)):
        have_versions(monkeypatch, {**FINE, "delta-spark": version})
        found = of_the_machine()["jars"]
        assert (found.level, "4.4.0.jar" in found.what) == (level, True)
    (jars / "io.delta_delta-spark_4.2_2.13-4.4.1.jar").touch()
    have_versions(monkeypatch, {**FINE, "delta-spark": "4.4.1"})
    found = of_the_machine()["jars"]
    assert (found.level, found.what) == (Level.OK, "io.delta_delta-spark_4.2_2.13-4.4.1.jar")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "nowhere")
    jars.rename(tmp_path / "jars")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert of_the_machine()["jars"].level is Level.OK


@pytest.mark.parametrize(
    ("release", "version"),
    [('JAVA_VERSION="17.0.9"\n', 17), ('A="1"\nJAVA_VERSION="1.8.0_392"\n', 8), ('JAVA_VERSION="21"', 21), ("", None)],
)
def test_a_java_says_its_version_in_a_file(tmp_path: Path, release: str, version: int | None) -> None:
    assert java_version(tmp_path) is None
    (tmp_path / "release").write_text(release)
    assert java_version(tmp_path) == version


def test_java_and_workers_python_are_sought_where_spark_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/false\n")
    java.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(java)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert java_home() == tmp_path / "jdk"
    assert of_the_machine()["java"].what.endswith("jdk has no file 'release', so its version is not known")
    (tmp_path / "jdk" / "release").write_text('JAVA_VERSION="11.0.2"')
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    findings = of_the_machine()
    assert "version 11 in" in findings["java"].what
    assert findings["workers"].remedy == f"export PYSPARK_PYTHON={sys.executable}"
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = of_the_machine()
    assert findings["workers"].level is Level.OK
    assert "no java is on the PATH" in findings["java"].what


def test_the_python3_of_a_virtual_environment_is_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor took it for another Python, on every machine where the environment is first on the PATH."""
    base = Path(sys.executable).resolve()
    (tmp_path / "env").mkdir()
    python = tmp_path / "env" / "python"
    python.symlink_to(base)
    (tmp_path / "env" / "python3").symlink_to("python")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    for path, level in ((python.parent, Level.OK), (base.parent, Level.NOTE)):
        monkeypatch.setenv("PATH", str(path))
        assert of_the_machine()["workers"].level is level


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_lost_or_cut_file_is_critical_and_named(log: CommitLog, harm: str) -> None:
    commit(log, prepare(log, 0))
    assert "all files are there" in found(log)["tables"].what
    (file,) = Path(log.path, "half").glob("*.parquet")
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    finding = found(log)["tables"]
    assert (finding.level, finding.remedy) == (Level.CRITICAL, "docs/backup.md says how to put files back")
    assert f"half/{file.name}" in finding.what


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("clock", Level.CRITICAL, "wrong")
    assert "\x1b" in doctor._told(finding)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in doctor._told(finding)
