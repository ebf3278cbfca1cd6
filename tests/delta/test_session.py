"""The session of a configuration with Delta tables: its packages and its settings."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from sink import cli, config
from sink.commands import training
from sink.config import Config
from sink.spark import jars as spark_jars
from sink.spark import session, versions
from sink.spark.versions import KNOWN, SparkVersion
from sink.targets.delta.table_properties import FEATURES, PROPERTIES
from tests.sink.test_submit import LOCAL, environment, write_config
from tests.stack.jars import delta_jars, ivy_to_itself, jars

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
DELTA = {"type": "delta", "warehouse": "./warehouse"}
PROD = {"type": "delta", "spark_catalog": "true"}
ICEBERG = {"type": "hadoop", "warehouse": "./iceberg"}


def loaded(folder: Path, *, spark: Mapping[str, str] = LOCAL, **catalogs: Mapping[str, str]) -> Config:
    table = {"source": "./changes", "target": "lake.shop.orders", "key": ["id"], "order_by": ["seq bigint"]}
    return config.load(write_config(folder, catalogs=catalogs, spark=dict(spark), tables=[table]))


def test_delta_alone_needs_no_iceberg(tmp_path: Path) -> None:
    made = session.settings(loaded(tmp_path, lake=DELTA, prod=PROD))
    assert not [name for name in made if name.startswith(("spark.sql.catalog.lake", "spark.sql.catalog.prod"))]
    assert "iceberg" not in made["spark.jars.packages"]
    assert made["spark.sql.extensions"] == EXTENSION
    assert made["spark.sql.catalog.spark_catalog"] == CATALOG
    assert made["spark.databricks.delta.snapshotPartitions"] == "4"
    assert "spark.databricks.delta.requiredSparkConfsCheck.enabled" not in made


def test_iceberg_alone_needs_no_delta(tmp_path: Path) -> None:
    made = session.settings(loaded(tmp_path, lake=ICEBERG))
    assert "delta" not in made["spark.jars.packages"] + "".join(made)
    assert not {"spark.sql.extensions", "spark.jars.excludes"} & made.keys()


def test_what_the_user_sets_stays(tmp_path: Path) -> None:
    own = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions, own.Extension",
        "spark.sql.catalog.spark_catalog": "io.unitycatalog.spark.UCSingleCatalog",
        "spark.databricks.delta.snapshotPartitions": "20",
        "spark.jars.excludes": "org.example:own",
    }
    made = session.settings(loaded(tmp_path, lake=DELTA, spark=own))
    assert made["spark.sql.extensions"].split(",") == [
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "own.Extension",
        EXTENSION,
    ]
    assert made["spark.sql.catalog.spark_catalog"] == "io.unitycatalog.spark.UCSingleCatalog"
    assert made["spark.databricks.delta.requiredSparkConfsCheck.enabled"] == "false"
    assert made["spark.databricks.delta.snapshotPartitions"] == "20"
    assert made["spark.jars.excludes"].startswith("org.example:own,")
    assert "iceberg-spark-runtime" in made["spark.jars.packages"]  # the user's extension needs it
    again = session.settings(loaded(tmp_path, lake=DELTA, spark={"spark.sql.extensions": EXTENSION}))
    assert again["spark.sql.extensions"] == EXTENSION


def test_an_iceberg_catalog_may_be_the_sessions_own(tmp_path: Path) -> None:
    made = session.settings(loaded(tmp_path, lake=DELTA, spark_catalog=ICEBERG))
    assert made["spark.sql.catalog.spark_catalog"] == "org.apache.iceberg.spark.SparkCatalog"
    assert made["spark.databricks.delta.requiredSparkConfsCheck.enabled"] == "false"


def test_what_the_users_packages_need_is_not_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sink.spark.versions.installed", lambda: SparkVersion("4.0.2", "2.13"))
    assert "io.unitycatalog:unitycatalog-client" in session.excludes(loaded(tmp_path, lake=DELTA))
    assert cli.main(["packages", "--excludes", str(tmp_path / "sink.yaml")]) == 0
    assert "io.unitycatalog:unitycatalog-client," in capsys.readouterr().out
    own = {"spark.jars.packages": "io.unitycatalog:unitycatalog-spark_2.13:0.3.0"}
    assert session.excludes(loaded(tmp_path, lake=DELTA, spark=own)) == []


@pytest.mark.parametrize("minor", KNOWN)
def test_only_two_jars_come_with_delta(tmp_path: Path, minor: str) -> None:
    """For each version of Spark. Ivy takes exclusions as Spark gives them to it: for all packages at once."""
    version = SparkVersion(KNOWN[minor].tested, "2.12" if minor == "3.5" else "2.13")
    coordinates = [coordinate.split(":") for coordinate in version.delta_packages]
    lines = [
        '<ivy-module version="2.0">',
        '<info organisation="rowdelta.tests" module="delta"/>',
        '<configurations><conf name="default"/></configurations>',
        '<dependencies defaultconfmapping="default->default">',
        *(f'<dependency org="{group}" name="{name}" rev="{number}"/>' for group, name, number in coordinates),
        # what Spark has itself
        '<exclude org="org.scala-lang" module="scala-library"/>',
        *('<exclude org="{}" module="{}"/>'.format(*name.split(":")) for name in version.known.delta_brings),
        "</dependencies></ivy-module>",
    ]
    module = tmp_path / "ivy-delta-packages.xml"
    module.write_text("\n".join(lines))
    assert [jar.name for jar in jars(module)] == [f"{name}-{number}.jar" for _, name, number in coordinates]


def test_classes_are_archived_for_the_jars_of_the_job(tmp_path: Path) -> None:
    """The job that makes the archive needs the same jars as the one that uses it."""
    for catalogs in ({"lake": DELTA}, {"lake": ICEBERG}, {"lake": DELTA, "old": ICEBERG}):
        job = loaded(tmp_path, **catalogs)
        with TemporaryDirectory() as made:
            trained = training._config(job, Path(made))
        assert trained.formats == job.formats
        for name in spark_jars.DECIDING:
            assert session.settings(trained).get(name) == session.settings(job).get(name)


JOB = """\
import json, sys
from py4j.java_gateway import JavaClass
from sink import config
from sink.spark import session
loaded = config.load(sys.argv[1])
spark = session.start(loaded, short=True)
jvm, context = spark._jvm, spark.sparkContext
table = f"delta.`{loaded.table_folder('lake.shop.orders')}`"
properties = "delta.enableDeletionVectors = true, delta.targetFileSize = '16mb'"
spark.sql(f"CREATE TABLE {table} (id BIGINT, v BIGINT) USING delta TBLPROPERTIES ({properties})")
spark.sql(f"INSERT INTO {table} SELECT id, id FROM range(10)")
spark.sql(f"DELETE FROM {table} WHERE id < 3")
result = {"rows": spark.table(table).count()}
spark.sql("CREATE SCHEMA IF NOT EXISTS shop")
spark.sql("CREATE TABLE spark_catalog.shop.prices (id BIGINT) USING delta")
result["provider"] = spark.sql("DESCRIBE DETAIL spark_catalog.shop.prices").first().format
if "iceberg" in loaded.formats:
    spark.sql("CREATE TABLE old.shop.orders (id BIGINT) USING iceberg")
    spark.sql(f"INSERT INTO old.shop.orders SELECT id FROM range(3)")
    result["iceberg"] = spark.table("old.shop.orders").count()
result["jars"] = jvm.java.lang.System.getProperty("java.class.path").split(":")
result["jars"] += [jar for jar in context.getConf().get("spark.jars", "").split(",") if jar]
result["has_iceberg"] = isinstance(jvm.org.apache.iceberg.spark.SparkCatalog, JavaClass)
if "features" in sys.argv:
    delta = jvm.org.apache.spark.sql.delta
    for name, of in {
        "features": getattr(getattr(delta, "TableFeature$"), "MODULE$").allSupportedFeaturesMap().values(),
        "properties": getattr(getattr(delta, "DeltaConfigs$"), "MODULE$").getAllConfigs().values(),
    }.items():
        each = of.iterator()
        result[name] = []
        while each.hasNext():
            found = each.next()
            result[name].append(found.name() if name == "features" else found.key())
print(json.dumps(result))
session.stop(spark)
"""


def run(folder: Path, *more: str, job: str = JOB) -> Any:
    with ivy_to_itself():
        done = subprocess.run(
            [sys.executable, "-c", job, str(folder / "sink.yaml"), *more],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_delta(result: dict[str, Any]) -> list[str]:
    """Jars of the JVM with Delta or Unity Catalog in their names."""
    names = sorted({Path(path).name for path in result["jars"]})
    return [name for name in names if "delta" in name or "unity" in name]


@pytest.mark.spark
@pytest.mark.versions
def test_a_session_with_delta_alone(tmp_path: Path) -> None:
    warehouse = {"spark.sql.warehouse.dir": str(tmp_path / "spark")}
    loaded(tmp_path, lake=DELTA, spark=LOCAL | warehouse)
    result = run(tmp_path)
    assert (result["rows"], result["provider"], result["has_iceberg"]) == (7, "delta", False)
    expected = [coordinate.replace(":", "_", 1).replace(":", "-") for coordinate in versions.installed().delta_packages]
    assert of_delta(result) == [f"{name}.jar" for name in expected]


@pytest.mark.spark
def test_a_session_with_both_formats(tmp_path: Path) -> None:
    warehouse = {"spark.sql.warehouse.dir": str(tmp_path / "spark")}
    loaded(tmp_path, lake=DELTA, old=ICEBERG, spark=LOCAL | warehouse)
    result = run(tmp_path, "features")
    assert (result["rows"], result["provider"], result["iceberg"]) == (7, "delta", 3)
    assert result["has_iceberg"]
    # a new version of Delta Lake may have more: then say what the sink does about each
    assert len(result["features"]) > 20
    assert {name for name in result["features"] if not name.startswith("test")} - FEATURES.keys() == set()
    assert len(result["properties"]) > 40
    assert [name for name in result["properties"] if PROPERTIES.rule(name) is None] == []


STARTED_BY_OTHERS = """\
import json, sys
from pyspark.sql import SparkSession
from sink import config
from sink.errors import ConfigError
from sink.spark import session
spark = SparkSession.builder.config(map=json.loads(sys.argv[2])).getOrCreate()
before = dict(spark.sql("SET").collect())
try:
    session.start(config.load(sys.argv[1]))
    refused = ""
except ConfigError as error:
    refused = str(error)
print(json.dumps([refused, dict(spark.sql("SET").collect()) == before]))
session.stop(spark)
"""


@pytest.mark.spark
@pytest.mark.parametrize("lacks", ["Delta Lake", f"Delta Lake's extension, {EXTENSION}"])
def test_a_session_that_was_started_without_delta(tmp_path: Path, lacks: str) -> None:
    """It is refused, and stays as it is. In a process of its own: the tests' session has Delta Lake."""
    loaded(tmp_path, lake=DELTA)
    settings = dict(LOCAL)
    if lacks != "Delta Lake":
        settings["spark.driver.extraClassPath"] = ":".join(map(str, delta_jars()))
    refused, is_as_before = run(tmp_path, json.dumps(settings), job=STARTED_BY_OTHERS)
    assert f"Spark was started without {lacks}. " in refused
    for words in ("--packages io.delta:delta-spark", "--exclude-packages ", f"spark.sql.extensions={EXTENSION}"):
        assert words in refused
    assert is_as_before
