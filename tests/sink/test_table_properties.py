"""The sink treats Iceberg's table properties and features as docs/table-properties.md says."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from sink.commands.inspection import check
from sink.config import Config
from sink.errors import ConfigError, TableError
from sink.targets.iceberg.catalog import IcebergCatalogs
from sink.targets.iceberg.state import check_types
from sink.targets.iceberg.table_properties import FEATURES, PROPERTIES, RULES
from tests.sink.harness import Job, before_commit

DOCUMENT = (Path(__file__).parents[2] / "docs" / "table-properties.md").read_text(encoding="utf-8")
DEFAULTS = {
    "format-version": "2",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


def documented(title: str) -> dict[str, tuple[str, str]]:
    """The rows of the page's table whose first column has this title."""
    table = DOCUMENT.split(f"| {title} | treatment | what the sink does |")[1].split("\n\n")[0]
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")]
    return {name.strip("`"): (treatment, does) for name, treatment, does in cells}


@pytest.mark.parametrize(("title", "rules"), [("property", RULES), ("feature", FEATURES)])
def test_the_page_says_what_the_code_does(title: str, rules: dict[str, object]) -> None:
    shown = {}
    for name, found in {"property": RULES, "feature": FEATURES}[title].items():
        values = ", ".join(f"`{value}`" for value in found.unless)
        shown[name] = (found.treatment, found.does + (f" (no warning with {values})" if values else ""))
    assert documented(title) == shown
    assert list(documented(title)) == list(rules)


def test_the_longest_name_holds() -> None:
    def treatment(name: str) -> str | None:
        found = PROPERTIES.rule(name)
        return None if found is None else found.treatment

    assert treatment("write.metadata.metrics.column.id") == "followed"
    assert treatment("write.metadata.path") == "Iceberg's"
    assert treatment("commit.retry.num-retries") == "followed"
    assert treatment("write.delete.parquet.compression-codec") == "warning"
    assert treatment("encryption.key-id") == "refused"
    assert treatment("owner") is None


def test_a_property_that_asks_for_what_is_done_anyway_is_no_warning() -> None:
    fine = {"write.update.mode": "merge-on-read", "write.format.default": "PARQUET", "owner": "ada"}
    assert list(PROPERTIES.ignored(fine | {"write.target-file-size-bytes": "1000"})) == []
    (warning,) = PROPERTIES.ignored(fine | {"write.merge.mode": "copy-on-write"})
    assert warning == "the property write.merge.mode (copy-on-write) is not followed: the sink always adds delete files"
    assert PROPERTIES.refusal(fine) is None


@pytest.mark.spark
def test_every_property_of_iceberg_has_its_rule(spark: SparkSession) -> None:
    """A new version of Iceberg may have more properties. Then add a rule for each."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    loader = jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader()
    fields = jvm.java.lang.Class.forName("org.apache.iceberg.TableProperties", True, loader).getFields()
    values = [field.get(None) for field in fields if field.getType().getSimpleName() == "String"]
    names = {name for name in values if re.fullmatch(r"[a-z-]+(\.[a-z-]+)+\.?", str(name))}
    assert len(names) > 80
    assert {name for name in names if PROPERTIES.rule(f"{name}x" if name.endswith(".") else name) is None} == set()


@pytest.mark.spark
@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"write.data.path": "{folder}/elsewhere"},
        {"write.object-storage.enabled": "true"},
        {"write.object-storage.enabled": "true", "write.object-storage.partitioned-paths": "false"},
    ],
)
def test_files_go_where_icebergs_own_writers_put_them(
    spark: SparkSession, tmp_path: Path, properties: dict[str, str]
) -> None:
    properties = {name: value.format(folder=tmp_path) for name, value in properties.items()}
    job = Job(spark, tmp_path, properties=properties | {"write.parquet.compression-codec": "gzip"})
    job.write([("+I", {"id": 1, "region": "eu"}), ("+I", {"id": 2, "region": "eu"})])
    job.write([("-D", {"id": 1, "region": "eu"})])
    job.run()
    assert job.rows() == [{"id": 2, "region": "eu"}]
    provider = job.java_table().locationProvider()
    assert {file["content"] for file in job.files()} == {0, 1}
    for file in job.files():
        path = unquote(urlparse(file["file_path"]).path)
        name = re.sub(r"^.*?/data/|^.*?/elsewhere/", "", path)
        name = re.sub(r"^([01]{4}/){3}[01]{8}[/-]", "", name)
        assert unquote(urlparse(str(provider.newDataLocation(name))).path) == path
        footer = pq.ParquetFile(path).metadata
        assert footer.row_group(0).column(0).compression == "GZIP"


@pytest.mark.spark
def test_old_metadata_files_of_a_new_table_are_deleted(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, properties={"write.metadata.previous-versions-max": "3"})
    for number in range(6):
        job.write([("+I", {"id": number, "region": "eu"})])
    job.write_records([{"row_kind": "+I", "seq": 99, "id": None, "region": "a bad record"}])
    job.run()
    assert len(job.rows()) == 6
    assert len(list((job.table_folder / "metadata").glob("*.metadata.json"))) == 4
    properties = dict(job.java_table().properties())
    assert {name: properties.get(name) for name in DEFAULTS if name != "format-version"} == {
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "3",
    }
    dead_letters = IcebergCatalogs(spark).load(job.dead_letters)
    assert dead_letters is not None
    assert dead_letters.spec.properties_by_name.items() >= (DEFAULTS.items() - {("format-version", "2")})


@pytest.mark.spark
def test_the_catalogs_defaults_win_over_ours(spark: SparkSession, tmp_path: Path) -> None:
    name = f"defaults{id(tmp_path)}"
    prefix = f"spark.sql.catalog.{name}"
    mine = {"table-default.format-version": "3", "table-default.write.metadata.delete-after-commit.enabled": "false"}
    settings = {"type": "hadoop", "warehouse": str(tmp_path / "warehouse")} | mine
    spark.conf.set(prefix, "org.apache.iceberg.spark.SparkCatalog")
    for key, value in settings.items():
        spark.conf.set(f"{prefix}.{key}", value)
    columns = spark.createDataFrame([], "id bigint").schema
    table = IcebergCatalogs(spark).create_table(f"{name}.shop.orders", columns, [], {})
    assert table.spec.format_version == 3
    assert table.property("write.metadata.delete-after-commit.enabled") == "false"
    assert table.property("write.metadata.previous-versions-max") == "100"


REFUSED = [name.replace("*", "key-id") for name, found in RULES.items() if found.treatment == "refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_property_in_the_configuration(name: str) -> None:
    table = {"source": "x", "target": "lake.shop.x", "key": ["id"], "order_by": ["seq"], "properties": {name: "x"}}
    with pytest.raises(ValueError, match="rowdelta does not follow this property: "):
        Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": "state"},
                "source": {"type": "files", "format": "row-kind"},
                "catalogs": {"lake": {"type": "hadoop", "warehouse": "warehouse"}},
                "tables": [table],
            }
        )


@pytest.mark.spark
def test_tables_that_exist(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused properties, warnings in `check` and at the start, and a branch as target."""
    job = Job(spark, tmp_path, properties={"format-version": "3"})
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    for name in REFUSED:
        spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('{name}' = 'x')")
        for refused in (lambda: list(check(spark, job.config())), job.run):
            with pytest.raises(TableError, match=rf"has the property {name}, which rowdelta does not follow: "):
                refused()
        spark.sql(f"ALTER TABLE {job.target} UNSET TBLPROPERTIES ('{name}')")

    java = job.java_table()
    iceberg = spark.sparkContext._jvm.org.apache.iceberg  # type: ignore[union-attr]
    expressions = iceberg.expressions.Expressions
    java.replaceSortOrder().asc(expressions.bucket("region", 8), iceberg.NullOrder.NULLS_FIRST).commit()
    java.updateSchema().updateColumnDefault("region", expressions.lit("nowhere")).commit()
    spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('write.update.mode' = 'copy-on-write')")
    warnings = [
        "the property write.update.mode (copy-on-write) is not followed: the sink always adds delete files",
        "the table's sort order is not followed: rows are not sorted by it; maintenance.rewrite.sort sorts them "
        "by columns",
        "the write default of column region is not followed: a field that messages lack becomes null",
    ]
    checked = list(check(spark, job.config()))
    assert [line for line in checked if "WARNING" in line] == [f"  WARNING: {warning}" for warning in warnings]
    monkeypatch.setattr(logging.getLogger("rowdelta"), "propagate", True)
    job.write([("+I", {"id": 2, "region": "us"})])
    job.run()
    logged = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in logged if "not followed" in line] == [f"{job.target}: {warning}" for warning in warnings]

    job.table = {"target": f"{job.target}.branch_audit"}
    for refused in (lambda: list(check(spark, job.config())), job.run):
        with pytest.raises(ConfigError, match=rf"target: {job.target} is a table, and rowdelta does not write to its"):
            refused()
    assert len(job.rows(job.target)) == 2


@pytest.mark.parametrize("dtype", ["variant", "geometry(srid:4326)"])
def test_a_column_of_a_type_that_the_writers_do_not_know(dtype: str) -> None:
    fields = [{"id": 1, "name": "place", "type": dtype, "required": False}]
    table: Any = SimpleNamespace(name="lake.shop.orders", spec=SimpleNamespace(schema=json.dumps({"fields": fields})))
    with pytest.raises(TableError, match=rf"lake\.shop\.orders has the column place of type {re.escape(dtype)}"):
        check_types(table)


@pytest.mark.spark
@pytest.mark.parametrize("late", ["apply", "drop"])
def test_a_table_with_a_variant(spark: SparkSession, tmp_path: Path, late: str) -> None:
    job = Job(spark, tmp_path, table={"late": late})
    job.write([("+I", {"id": 1, "region": "eu"})])
    spark.sql(
        f"CREATE TABLE {job.target} (id bigint, region string, v variant) USING iceberg "
        "TBLPROPERTIES ('format-version' = '3')"
    )
    for refused in (lambda: list(check(spark, job.config())), job.run):
        with pytest.raises(TableError, match=r"has the column v of type variant"):
            refused()


@pytest.mark.spark
def test_a_refused_property_that_is_set_while_the_job_runs(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing is written to the table from then on: its files would be unencrypted, for one."""
    job = Job(spark, tmp_path)
    for number in range(2):
        job.write([("+I", {"id": number, "region": "eu"})])

    def encrypt() -> None:
        spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('encryption.key-id' = 'x')")

    with before_commit(encrypt), pytest.raises(TableError, match=r"has the property encryption\.key-id"):
        job.run()
    assert [row["id"] for row in job.rows()] == [0], "the micro-batch that was already written"
    assert job.unreferenced_files() == []


def test_a_refused_property_that_is_set_while_others_change_the_table(spark: SparkSession, tmp_path: Path) -> None:
    """The keys would be looked up again, and the micro-batch committed."""
    job = Job(spark, tmp_path, properties={"format-version": "3"})
    job.write([("+I", {"id": number, "region": "eu"}) for number in range(3)])
    job.run()
    job.write([("+U", {"id": 1, "region": "us"})])

    def encrypt() -> None:
        spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('encryption.key-id' = 'x')")
        spark.sql(f"DELETE FROM {job.target} WHERE id = 2")

    with before_commit(encrypt), pytest.raises(TableError, match=r"has the property encryption\.key-id"):
        job.run()
    assert {row["region"] for row in job.rows()} == {"eu"}
    assert job.unreferenced_files() == []
