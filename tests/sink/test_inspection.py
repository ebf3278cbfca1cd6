"""`rowdelta check` and `status`. Other files look by them at what they have anyway: kinds of catalogs
(`test_catalogs`), Kafka (`test_kafka`, `test_keys`), maintenance (`test_maintenance`), both formats (`tests/delta`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink import cli
from sink.commands import inspection
from sink.config import Config
from sink.errors import ConfigError
from sink.sources.files import FilesSource
from sink.table.patterns import NO_TABLE
from tests.sink.harness import Job


@pytest.mark.spark
def test_a_table_that_was_rolled_back(spark: SparkSession, tmp_path: Path) -> None:
    """The position is that of the data."""
    job = Job(spark, tmp_path, columns={"id": "bigint"})
    assert "does not exist yet" in next(iter(inspection.status(spark, job.config())))
    for number in range(3):
        job.write([("+I", {"id": number})])
        job.run()
    name = job.target
    ids = [row[0] for row in spark.sql(f"SELECT snapshot_id FROM {name}.snapshots ORDER BY committed_at").collect()]
    assert "lag: 0 files" in list(inspection.status(spark, job.config()))[2]
    catalog, _, table = name.partition(".")
    spark.sql(f"CALL {catalog}.system.rollback_to_snapshot('{table}', {ids[0]})")
    spark.catalog.refreshTable(name)
    assert "lag: 2 files" in list(inspection.status(spark, job.config()))[2]
    assert list(inspection.check(spark, job.config()))[-1] == "ok"


@pytest.mark.spark
def test_what_check_finds_wrong_comes_last(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir()
    values = configuration(tmp_path)
    assert list(inspection.check(spark, Config.model_validate(values)))[-1] == "ok"
    absent = tmp_path / "absent"
    values["tables"][0]["source"] = str(absent)
    lines = inspection.check(spark, Config.model_validate(values))
    assert next(lines).startswith("sink shop: files")
    with pytest.raises(ConfigError, match=f"there is no directory {absent}. Create it, or correct the path."):
        list(lines)


@pytest.mark.spark
def test_the_state_of_no_table(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir()
    values = configuration(tmp_path)
    pattern = {"source": str(tmp_path / "changes" / "(.*)"), "target": "lake.shop.$1"}
    values["sink"]["dead_letter_table"] = "lake.shop.bad"
    values["tables"] = [values["tables"][0] | pattern]
    assert list(inspection.status(spark, Config.model_validate(values))) == [NO_TABLE]


@pytest.mark.spark
def test_what_the_lag_of_files_leaves_out(spark: SparkSession, tmp_path: Path) -> None:
    """It says so: only Spark's log knows of a file with an older time than the position's whether it is applied."""
    (tmp_path / "changes").mkdir()
    loaded = Config.model_validate(configuration(tmp_path, pathGlobFilter="*.json"))
    for name, seconds in {"late.json": 1, "last.json": 2, "new.json": 3}.items():
        (tmp_path / "changes" / name).touch()
        os.utime(tmp_path / "changes" / name, (seconds, seconds))
    position = {"modified": 2000, "files": ["last.json"]}
    (table,) = loaded.tables
    assert FilesSource(spark, loaded, {}).lag([(table, None), (table, position)]) == [
        "3 files behind, regardless of pathGlobFilter",
        "1 file behind, not counting late ones, regardless of pathGlobFilter",
    ]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"cleanSource": "OFF"}, []),
        ({"cleanSource": "delete"}, ["nothing tells that they are gone. Leave the option out"]),
        ({"CLEANSOURCE": "Archive", "sourceArchiveDir": "/x"}, ["Before that, move the files back"]),
    ],
)
def test_files_that_spark_takes_away_are_warned_of(
    spark: SparkSession, tmp_path: Path, options: Mapping[str, str], expected: list[str]
) -> None:
    (tmp_path / "changes").mkdir()
    lines = list(inspection.check(spark, Config.model_validate(configuration(tmp_path, **options))))
    warnings = [line for line in lines if line.startswith("WARNING: source.options.cleanSource")]
    assert lines[-1] == "ok"
    assert len(warnings) == len(expected)
    assert all(text in warning for text, warning in zip(expected, warnings, strict=True))


@pytest.mark.parametrize("command", ["check", "status", "run"])
def test_a_wrong_configuration_is_refused_without_java(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark's scripts take no other Java than that of JAVA_HOME, even if one is on the PATH."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    path, values = tmp_path / "sink.yaml", configuration(tmp_path)
    path.write_text(json.dumps(values))
    assert cli.main([command, str(path)]) == ConfigError.exit_code
    assert f"no Java found: JAVA_HOME is {tmp_path}, and there is no bin/java in it." in capsys.readouterr().err
    values["tables"][0]["kye"] = values["tables"][0].pop("key")
    path.write_text(json.dumps(values))
    assert cli.main([command, str(path)]) == ConfigError.exit_code
    assert "kye" in capsys.readouterr().err


def configuration(folder: Path, **options: str) -> dict[str, Any]:
    return {
        "sink": {"id": "shop", "checkpoint": str(folder / "state")},
        "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json", **options}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder / "warehouse")}},
        "tables": [
            {
                "source": str(folder / "changes"),
                "target": "lake.shop.orders",
                "key": ["id"],
                "columns": {"id": "bigint", "v": "string"},
                "order_by": ["seq bigint"],
            }
        ],
    }
