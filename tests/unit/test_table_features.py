"""A table that another writer made one with which delta-rs cannot write: the refusal is told at once, with a remedy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from rmq_spark import CommitLog
from rmq_spark.errors import CommitError, ForeignChangeError
from tests.support.foreign_writers import cut_back, raise_protocol
from tests.support.half_batches import another, commit, prepare, send
from tests.support.meanwhile import seen_at, unhooked

pytestmark = pytest.mark.log("delta", orders=1)

CANNOT = 'docs/maintenance.md says under "When another writer changed a table": Spark cannot$'
FEATURES: dict[str, tuple[list[str], list[str], dict[str, str], str]] = {
    "inCommitTimestamp": (
        ["inCommitTimestamp"], [], {"delta.enableInCommitTimestamps": "true"},
        r"in Spark by ALTER TABLE … DROP FEATURE inCommitTimestamp$",
    ),
    "rowTracking": (
        ["domainMetadata", "rowTracking"], [], {"delta.enableRowTracking": "true"},
        r"DROP FEATURE rowTracking, then ALTER TABLE … DROP FEATURE domainMetadata$",
    ),
    "typeWidening": (
        ["typeWidening"], ["typeWidening"], {"delta.enableTypeWidening": "true"},
        CANNOT,
    ),
    "clustering": (["clustering", "domainMetadata"], [], {}, CANNOT),
}  # fmt: skip


def work_of(log: CommitLog, name: str) -> Callable[[], object]:
    if name == "half":
        return lambda: prepare(log, 1, 3)
    if name == "op":
        record = prepare(log, 2, 3)
        return lambda: commit(log, record)
    if name == "topics":
        return lambda: log.create_topic("points", 1)
    if name == "groups":
        log.engine.groups.progress("readers", {("orders", 0): 1}, "batch 0")
        return lambda: log.engine.groups.progress("readers", {("orders", 0): 2}, "batch 1")
    return log.drain


TABLES = ("half", "op", "topics", "groups", "messages")
ALWAYS = {("inCommitTimestamp", "half"), ("rowTracking", "op"), ("typeWidening", "topics"), ("clustering", "groups"),
          ("inCommitTimestamp", "messages")}  # fmt: skip
"""What is tried in each run. All tables have the one class that notices a feature."""


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        pytest.param(feature, name, marks=() if (feature, name) in ALWAYS else pytest.mark.long)
        for feature in FEATURES
        for name in TABLES
    ],
)
def test_a_feature_that_delta_rs_cannot_write_with_is_told_at_once(log: CommitLog, name: str, feature: str) -> None:
    """Each commit was tried for 24 s, and then "too many writers" was said."""
    commit(log, prepare(log, 0, 3))
    work = work_of(log, name)
    version = DeltaTable(f"{log.path}/{name}").version()
    writer, reader, properties, remedy = FEATURES[feature]
    raise_protocol(f"{log.path}/{name}", writer, reader, **properties)
    began_s = time.monotonic()
    with pytest.raises(ForeignChangeError) as caught:
        work()
    assert time.monotonic() - began_s < 5
    assert f"table {name}" in str(caught.value)
    assert "SET TBLPROPERTIES by bob, Apache-Spark/4.2.0 Delta-Lake/4.4.0" in str(caught.value)
    caught.match(remedy)
    cut_back(f"{log.path}/{name}", version)  # what always helps
    again = another(log)
    commit(again, send(again, "later", 3))
    again.maintain()
    assert again.read("orders").num_rows >= 6


@pytest.mark.parametrize("name", TABLES)
def test_a_new_log_says_no_to_what_platforms_switch_on_and_has_the_first_protocol(log: CommitLog, name: str) -> None:
    log.engine.groups.progress("readers", {("orders", 0): 1}, "batch 0")
    table = DeltaTable(f"{log.path}/{name}")
    protocol = table.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version, protocol.writer_features) == (1, 2, None)
    said = table.metadata().configuration
    for feature in ("DeletionVectors", "RowTracking", "InCommitTimestamps", "TypeWidening", "ChangeDataFeed"):
        assert said[f"delta.enable{feature}"] == "false"
    assert (said["delta.columnMapping.mode"], said["delta.checkpointPolicy"]) == ("none", "classic")


def test_a_refusal_that_is_no_lost_race_is_not_tried_for_long(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def refuse(self: DeltaTable, *arguments: Any, **more: Any) -> None:
        tries.append(self)
        raise CommitFailedError("The transaction includes Remove action with data change but table is append-only")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", refuse)
    with pytest.raises(CommitError, match=r"a commit to table half failed 3 times, .* but table is append-only"):
        prepare(log, 0, 3)
    assert len(tries) == 3


def test_a_lost_race_is_still_tried_again(log: CommitLog) -> None:
    rival = another(log)

    def loses(**_: Any) -> None:
        if len(tries) <= 5:
            with unhooked():
                prepare(rival, len(tries), 1, app="rival")

    with seen_at("commit begins", loses, table="half") as tries:
        prepare(log, 0, 3)
    assert len(tries) == 6
