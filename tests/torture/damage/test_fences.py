"""Damaged fences and checkpoints, in short."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from rmq_spark import SqlTransactionListener
from rmq_spark.errors import FenceError, OptionError
from tests.support.inside import read_checkpoint
from tests.support.seeds import first_seed
from tests.torture.damage import fences
from tests.torture.damage.ways import DAMAGES

DAMAGES_TO_TRY = [d for d in sorted(DAMAGES) if d not in fences.CHANGES_VALUES]


@pytest.mark.parametrize("damage", DAMAGES_TO_TRY)
def test_a_damaged_fence_gives_the_right_answer_or_none(tmp_path: Path, damage: str) -> None:
    batches = fences.build(tmp_path)
    every = len(DAMAGES)
    at = first_seed() // every * every + sorted(DAMAGES).index(damage)  # a seed of this damage
    counts: Counter[str] = Counter()
    for seed in range(at, at + 3 * every, every):
        counts += fences.try_damage(tmp_path, batches, seed)
    assert counts.total() == 3 * fences.BATCHES
    assert not [answer for answer in counts if answer.startswith("wrong")]


def test_a_word_that_no_fence_writes_is_named(tmp_path: Path) -> None:
    batches = fences.build(tmp_path)
    url = sa.make_url(f"sqlite:///{tmp_path / 'fence.db'}")
    with sa.create_engine(url).begin() as connection:
        (table,) = [t for t in sa.inspect(connection).get_table_names() if not t.endswith("_id")]
        columns = {c["name"]: c for c in sa.inspect(connection).get_columns(table)}
        (outcome,) = [
            name
            for name in columns
            if connection.exec_driver_sql(f"SELECT count(*) FROM {table} WHERE {name} = 'executed'").scalar()
        ]
        connection.exec_driver_sql(f"UPDATE {table} SET {outcome} = 'executee' WHERE {outcome} = 'executed'")
    with pytest.raises(FenceError, match=r"'executee', which is not one of started, executed"):
        SqlTransactionListener(url, fences.work).check_local_transaction(batches[0])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_another_checkpoint(tmp_path: Path, damage: str) -> None:
    """Whatever becomes of ``offsets/<batch>``, a replay from it is not taken for the same batch."""
    (tmp_path / "metadata").write_text('{"id": "query"}')
    (tmp_path / "offsets").mkdir()
    file = tmp_path / "offsets" / "7"
    file.write_text('v1\n{"batchWatermarkMs":0}\n{"orders":{"0":23,"1":7}}\n')
    before = read_checkpoint(str(tmp_path))
    DAMAGES[damage](file, [], random.Random(1))
    if damage == "delete":
        with pytest.raises(OptionError, match=r"checkpointLocation=.* cannot be read from Python"):
            read_checkpoint(str(tmp_path))
    elif damage in ("duplicate", "swap", "overwrite"):  # with nothing beside it, the file is as it was
        assert read_checkpoint(str(tmp_path)) == before
    else:
        assert read_checkpoint(str(tmp_path)).input_hash != before.input_hash


@pytest.mark.parametrize("content", ["", "[]", "1", "null", "{}", '{"id"', "\x00" * 40])
def test_a_damaged_metadata_file_of_a_checkpoint_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text("v1")
    (tmp_path / "metadata").write_text(content)
    with pytest.raises(OptionError, match=r"checkpointLocation=.* cannot be read from Python"):
        read_checkpoint(str(tmp_path))
