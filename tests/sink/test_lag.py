"""How far a position is behind its source, in messages, files and seconds."""

import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from sink.config import Config
from sink.config.table_parts import TableSource
from sink.sources.files import FilesSource
from sink.sources.kafka import Part, _ages
from sink.sources.source import Behind

NOW = 1_769_860_800.0


def ages_of(messages: Mapping[Part, list[float]], reached: Mapping[Part, int]) -> tuple[dict[Part, float], int]:
    """What a broker with messages of such ages (seconds, oldest first) leads to, and how often it is asked."""
    asked = 0

    def first_since(times: Mapping[Part, int]) -> dict[Part, tuple[int, int]]:
        nonlocal asked
        asked += 1
        found = {}
        for part, at in times.items():
            stamps = [int((NOW - age) * 1000) for age in messages[part]]
            offset = bisect_left(stamps, at)
            if offset < len(stamps):
                found[part] = offset, stamps[offset]
        return found

    return _ages(reached, first_since, NOW), asked


def test_the_age_is_that_of_the_first_message_that_is_not_applied() -> None:
    random = Random(3)
    messages, reached, expected = {}, {}, {}
    for number in range(100):
        part = "orders", str(number)
        messages[part] = sorted((10 ** random.uniform(-1, 6) for _ in range(random.randint(1, 40))), reverse=True)
        reached[part] = random.randrange(len(messages[part]))
        expected[part] = messages[part][reached[part]]
    found, asked = ages_of(messages, reached)
    assert asked <= 8, "for all partitions together"
    for part, age in expected.items():
        assert age - 0.01 <= found[part] <= max(1.0, 1.26 * age), part
    # where few messages came about then, the broker tells the time of just this one
    few = {("lines", "0"): [5_000.0, 3_000.0, 1.0]}
    assert ages_of(few, {("lines", "0"): 1})[0]["lines", "0"] == pytest.approx(3_000, abs=0.01)


def test_ages_that_nobody_can_tell_end_the_search() -> None:
    assert ages_of({("t", "0"): [1e9]}, {("t", "0"): 0})[0]["t", "0"] == pytest.approx(1.25**70)
    assert ages_of({("t", "0"): []}, {("t", "0"): 0})[0]["t", "0"] == pytest.approx(1.25**70)
    assert ages_of({}, {}) == ({}, 0)


@pytest.mark.spark
def test_files_are_counted_by_their_position(spark: SparkSession, tmp_path: Path) -> None:
    changes = tmp_path / "changes"
    changes.mkdir()
    for number in range(4):
        (changes / f"{number}.json").write_text("{}")
        os.utime(changes / f"{number}.json", (1_000 + number, 1_000 + number))
    (changes / "_unfinished").write_text("")
    config = Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": str(tmp_path / "state")},
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(tmp_path / "lake")}},
            "tables": [{"source": str(changes), "target": "lake.n.t", "key": ["id"], "order_by": ["seq bigint"]}],
        }
    )
    (table,) = config.tables
    source = FilesSource(spark, config, {})

    def behind(position: dict[str, object] | None) -> Behind:
        return source.behind([(table, position)])[table.id][""]

    assert behind(None).count == 4
    waiting = behind({"modified": 1_001_000, "files": ["1.json"], "generation": "g", "batch": 1})
    assert waiting.count == 2
    assert waiting.seconds is not None
    assert waiting.seconds > 1e9
    last = {"modified": 1_003_000, "files": ["3.json"], "generation": "g", "batch": 3}
    assert behind(last) == Behind(0, 0.0)
    gone = table.model_copy(update={"feed": TableSource(topic=str(tmp_path / "gone"))})
    assert source.behind([(gone, None)]) == {}
