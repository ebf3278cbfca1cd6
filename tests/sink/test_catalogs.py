"""The same small job on every kind of catalog and in both table formats, read back by Iceberg's own Spark reader."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from deltawriters import DeltaOptions
from sink.commands import inspection
from sink.config import Config
from sink.errors import ConfigError, TableError, TemporaryError
from sink.run.pipeline import Pipeline
from sink.spark import writing
from sink.table import task_plans
from sink.targets.iceberg import catalog as iceberg_catalog
from sink.targets.iceberg.catalog import IcebergCatalogs
from tests.stack.hive_metastore import running_hive_metastore
from tests.stack.process import free_ports
from tests.stack.proxy import Fault, OAuth2
from tests.stack.rest_catalog import RestCatalog, running_rest_catalog

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def rest_catalog() -> Iterator[RestCatalog]:
    with running_rest_catalog() as catalog:
        yield catalog


@pytest.fixture(autouse=True)
def _active(spark: SparkSession) -> None:
    """Spark looks a catalog up in the settings of the active session, which may be the second driver's of another test.
    This makes the session the active one.
    """
    spark.createDataFrame([(0,)], "n int")


@pytest.fixture(scope="module", params=["hadoop", "rest", "jdbc"])
def catalog(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, str]]:
    """Name and properties of a catalog that the session has."""
    folder = tmp_path_factory.mktemp(f"{request.param}-catalog")
    properties = {"type": request.param, "warehouse": str(folder / "warehouse")}
    if request.param == "rest":
        rest = request.getfixturevalue("rest_catalog")
        properties = {"type": "rest", "uri": rest.uri}
    if request.param == "jdbc":
        properties["uri"] = f"jdbc:sqlite:{folder / 'catalog.db'}"
    name = f"{request.param}_catalog"
    add_catalog(spark, name, properties)
    return name, properties


def add_catalog(spark: SparkSession, name: str, properties: dict[str, str]) -> None:
    prefix = f"spark.sql.catalog.{name}"
    for key, value in properties.items():
        spark.conf.set(f"{prefix}.{key}", value)
    spark.conf.set(f"{prefix}.cache-enabled", "false")
    spark.conf.set(prefix, "org.apache.iceberg.spark.SparkCatalog")


def configuration(folder: Path, name: str, properties: dict[str, str], /, **table: Any) -> Config:
    return Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": str(folder / "state")},
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
            "maintenance": {"budget": 0},  # its commits would be counted too
            "catalogs": {name: properties},
            "tables": [
                {
                    "source": str(folder / "changes"),
                    "target": f"{name}.shop.orders",
                    "key": ["id"],
                    "columns": {"id": "bigint", "region": "string", "amount": "decimal(12,2)"},
                    "order_by": ["seq bigint"],
                    **table,
                }
            ],
        }
    )


def write(folder: Path, name: str, changes: list[tuple[str, int, str | None]], start: int) -> None:
    """A change file: kind, id, region of rows whose amount is the id."""
    records = [
        {"row_kind": kind, "id": number, "region": region, "amount": number, "seq": start + n}
        for n, (kind, number, region) in enumerate(changes)
    ]
    (folder / "changes").mkdir(exist_ok=True)
    (folder / "changes" / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def content(spark: SparkSession, table: str) -> dict[int, str | None]:
    rows = spark.sql(f"SELECT id, region, amount FROM {table}").collect()
    assert len({row.id for row in rows}) == len(rows)
    assert all(row.amount == row.id for row in rows)
    return {row.id: row.region for row in rows}


def delete_files(spark: SparkSession, table: str) -> list[tuple[int, str]]:
    found = spark.sql(f"SELECT content, file_format FROM {table}.delete_files").collect()
    return sorted({(row.content, row.file_format) for row in found})


@pytest.mark.parametrize(
    ("partition_by", "deletes", "version"),
    [([], "position", "2"), (["region"], "position", "3"), (["bucket(4, id)"], "equality", "2")],
    ids=["unpartitioned-position-2", "region-position-3", "bucket-equality-2"],
)
def test_table_equals_source(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    catalog: tuple[str, dict[str, str]],
    deletes: str,
    version: str,
    partition_by: list[str],
) -> None:
    """Keys changed again after their row was written need deletes within the commit: positions in v2, vectors in v3."""
    name, properties = catalog
    namespace = f"{deletes}{version}{len(partition_by)}{'r' if 'region' in partition_by else ''}"
    target = f"{name}.{namespace}.orders"
    config = configuration(
        tmp_path,
        name,
        properties,
        target=target,
        partition_by=partition_by,
        deletes=deletes,
        properties={"format-version": version},
    )
    # every batch of two rows is written at once, so that the commit meets its own rows again
    monkeypatch.setattr(task_plans, "DeltaOptions", functools.partial(DeltaOptions, flush_bytes=1))
    monkeypatch.setattr(writing, "BUFFER_BYTES", 1)
    monkeypatch.setattr(writing, "PART_ROWS", 1)
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "2")
    try:
        first: list[tuple[str, int, str | None]] = [("+I", n, "eu") for n in range(8)]
        write(tmp_path, "1.json", [*first, ("+U", 0, "us"), ("-D", 1, "eu"), ("+U", 2, None)], 0)
        Pipeline(spark, config).run()
        assert content(spark, target) == {0: "us", 2: None, 3: "eu", 4: "eu", 5: "eu", 6: "eu", 7: "eu"}
        position_deletes = (1, "PUFFIN" if version == "3" else "PARQUET")
        assert delete_files(spark, target) == [position_deletes]
        second: list[tuple[str, int, str | None]] = [("-U", 3, "eu"), ("+U", 3, "us"), ("-D", 4, "eu"), ("+I", 9, "eu")]
        write(tmp_path, "2.json", [*second, ("+U", 9, "us"), ("+U", 3, "ap"), ("+U", 9, "ap")], 100)
        Pipeline(spark, config).run()
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(before))
    assert content(spark, target) == {0: "us", 2: None, 3: "ap", 5: "eu", 6: "eu", 7: "eu", 9: "ap"}
    equality_deletes = [(2, "PARQUET")] if deletes == "equality" else []
    assert delete_files(spark, target) == [position_deletes, *equality_deletes]
    assert spark.sql(f"SELECT * FROM {target}.snapshots").count() == 2
    assert any("lag: 0 files behind" in line for line in inspection.status(spark, config))
    assert f"{tmp_path}/changes -> {target}: exists" in inspection.check(spark, config)


def test_table_of_a_hive_metastore_equals_source(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_hive_metastore() as metastore:
        properties = {"type": "hive", "uri": metastore.uri, "warehouse": str(metastore.warehouse)}
        add_catalog(spark, "hive_catalog", properties)
        test_table_equals_source(
            spark, tmp_path, monkeypatch, ("hive_catalog", properties), "position", "3", ["bucket(4, id)"]
        )


def test_rest_catalog_gone_and_back(spark: SparkSession, tmp_path: Path, rest_catalog: RestCatalog) -> None:
    """While it is gone the job says so and may be run again; then it goes on."""
    properties = {"type": "rest", "uri": rest_catalog.uri}
    add_catalog(spark, "flaky", properties)
    config = configuration(tmp_path, "flaky", properties, target="flaky.gone.orders")
    write(tmp_path, "1.json", [("+I", 1, "eu")], 0)
    Pipeline(spark, config).run()
    write(tmp_path, "2.json", [("+I", 2, "eu")], 10)
    table = IcebergCatalogs(spark).load("flaky.gone.orders")
    assert table is not None
    rest_catalog.stop()
    try:
        with pytest.raises(TemporaryError, match="catalog flaky"):
            Pipeline(spark, config).run()
        with pytest.raises(TemporaryError, match="catalog flaky"):
            table.set_property("owner", "ada")
    finally:
        rest_catalog.start()
    Pipeline(spark, config).run()
    assert content(spark, "flaky.gone.orders") == {1: "eu", 2: "eu"}


def test_unreachable_catalog(spark: SparkSession, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    properties = {"type": "rest", "uri": f"http://127.0.0.1:{port}"}
    add_catalog(spark, "nowhere", properties)
    (tmp_path / "changes").mkdir()
    with pytest.raises(TemporaryError, match=rf"catalog nowhere at http://127\.0\.0\.1:{port} can't be opened: "):
        Pipeline(spark, configuration(tmp_path, "nowhere", properties))


def test_a_catalog_that_can_not_be_right(spark: SparkSession, tmp_path: Path) -> None:
    wrong = {
        "nothing": ({"catalog-impl": "org.example.NoCatalog"}, "it can't be opened: .*NoCatalog"),
        "homeless": ({"type": "hadoop"}, "it can't be opened: .*warehouse"),
        "placeless": ({"type": "rest"}, "needs its address. Add uri"),
    }
    (tmp_path / "changes").mkdir()
    for name, (properties, message) in wrong.items():
        add_catalog(spark, name, properties)
        with pytest.raises(ConfigError, match=rf"catalogs\.{name}: .*{message}"):
            Pipeline(spark, configuration(tmp_path, name, properties))


def test_a_token_that_the_catalog_does_not_know_any_more(
    spark: SparkSession, tmp_path: Path, rest_catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was revoked, or the catalog was down when it was due. The sink logs in again, also for a commit."""
    pause = iceberg_catalog._LOGIN_PAUSE
    monkeypatch.setattr(iceberg_catalog, "_LOGIN_PAUSE", 0.0)
    with OAuth2(rest_catalog.uri, "rowdelta", "secret") as door:
        properties = {"type": "rest", "uri": door.url, "credential": "rowdelta:secret"}
        properties["oauth2-server-uri"] = door.token_url
        add_catalog(spark, "revoked", properties)
        catalogs = IcebergCatalogs(spark)
        catalogs.create_table("revoked.token.orders", spark.createDataFrame([], "id bigint").schema, [], {})
        tables = [catalogs.load("revoked.token.orders") for _ in range(2)]
        door.expire_tokens()
        for table in tables:
            assert table is not None
            table.refresh()
        logins = door.requests.count(("POST", door.TOKENS))
        door.expire_tokens()
        assert catalogs.load("revoked.token.orders") is not None
        assert door.requests.count(("POST", door.TOKENS)) == logins + 1

        config = configuration(tmp_path, "revoked", properties)
        write(tmp_path, "1.json", [("+I", 1, "eu")], 0)
        Pipeline(spark, config).run()
        write(tmp_path, "2.json", [("+I", 2, "eu")], 10)
        door.add(Fault("POST", "/tables/orders$", status=401))
        Pipeline(spark, config).run()
        assert content(spark, "revoked.shop.orders") == {1: "eu", 2: "eu"}
        assert door.waiting == []

        # a login doesn't help: it isn't tried again at once
        monkeypatch.setattr(iceberg_catalog, "_LOGIN_PAUSE", pause)
        logins = door.requests.count(("POST", door.TOKENS))
        door.add(Fault("GET", "/tables/orders", status=401, times=99))
        for _ in range(3):
            with pytest.raises(TableError):
                catalogs.load("revoked.token.orders")
        assert door.requests.count(("POST", door.TOKENS)) == logins + 1
        door.clear()

        # nobody is let in any more
        door.secret = "another"
        door.expire_tokens()
        with pytest.raises(TableError, match=r"revoked\.shop\.orders: Not authorized|client or secret is wrong"):
            catalogs.load("revoked.shop.orders")
