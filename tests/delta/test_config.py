"""Delta Lake in the configuration: its catalogs. What a Delta table can't do is refused, with what to do instead."""

from pathlib import Path

import pytest

from sink.config import Config, load
from sink.config.folders import check_folders
from sink.errors import ConfigError

CONFIG = """\
sink: {id: shop, checkpoint: ./state}
source: {type: kafka, format: debezium-json, options: {kafka.bootstrap.servers: "127.0.0.1:1"}}
catalogs:
  lake: {type: delta, warehouse: ./warehouse}
  prod: {type: delta, spark_catalog: true}
  old: {type: hadoop, warehouse: ./old}
tables:
  - source: orders
    target: lake.shop.orders
    key: [id]
    columns: {id: bigint, region: string, ts: timestamp, a: int, b: int}
"""


def load_text(folder: Path, text: str) -> Config:
    path = folder / "sink.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def refusal(folder: Path, *changes: tuple[str, str]) -> str:
    """The message with which the configuration is refused after these changes, without the file's name."""
    text = CONFIG
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'sink.yaml'}:")
    return message.removeprefix(f"{folder / 'sink.yaml'}:")


def test_both_formats_in_one_configuration(tmp_path: Path) -> None:
    config = load_text(tmp_path, CONFIG)
    assert {name: config.format_of(name) for name in config.catalogs} == {
        "lake": "delta",
        "prod": "delta",
        "old": "iceberg",
    }
    assert config.formats == {"delta", "iceberg"}
    assert config.format_of("lake.shop.orders") == "delta"
    assert config.capabilities("lake.shop.orders").name == "Delta"
    assert config.capabilities(config.dead_letter_table).name == "Delta"
    assert config.capabilities("old.shop.orders").name == "Iceberg"
    assert config.tables[0].deletes == "position"
    assert config.table_folder("lake.shop.orders") == f"{tmp_path}/warehouse/shop/orders"
    assert config.table_folder("old.shop.orders") == f"{tmp_path}/old/shop/orders"
    assert config.table_folder("prod.shop.orders") is None


def test_a_folder_elsewhere_stays_as_it_is(tmp_path: Path) -> None:
    config = load_text(tmp_path, CONFIG.replace("./warehouse", '"s3a://lake/tables/"'))
    assert config.table_folder("lake.shop.orders") == "s3a://lake/tables/shop/orders"


CATALOG = "{type: delta, warehouse: ./warehouse}"


@pytest.mark.parametrize(
    ("catalog", "expected"),
    [
        (
            "{type: delta, warehous: ./warehouse}",
            "4: catalogs.lake.warehous: unknown key (did you mean 'warehouse'?). A catalog of type delta has: type, "
            "warehouse, spark_catalog; settings of file systems belong into the section spark",
        ),
        (
            "{type: Delta, warehouse: x, io-impl: org.apache.iceberg.aws.s3.S3FileIO}",
            "4: catalogs.lake.io-impl: unknown key",
        ),
        ("{type: delta}", "4: catalogs.lake: got neither, expected either warehouse (a folder, whose tables are"),
        ("{type: delta, warehouse: x, spark_catalog: true}", "4: catalogs.lake: got both, expected either warehouse"),
        ("{type: delta, spark_catalog: false}", "4: catalogs.lake.spark_catalog: got 'false', expected true"),
        ("{type: delta, warehouse: ''}", "4: catalogs.lake.warehouse: got '', expected a folder"),
        ("{type: detla, warehouse: x}", "4: catalogs.lake.type: got 'detla' (did you mean 'delta'?), expected one of "),
    ],
)
def test_a_wrong_catalog(tmp_path: Path, catalog: str, expected: str) -> None:
    assert refusal(tmp_path, (CATALOG, catalog)).startswith(expected)


def table(target: str, *lines: str) -> tuple[str, str]:
    """A change of the configuration: the table's target, and lines after it, which begin on line 10."""
    return "    target: lake.shop.orders\n", "\n    ".join([f"    target: {target}", *lines]) + "\n"


DELTA, ICEBERG = "lake.shop.orders", "old.shop.orders"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            table(DELTA, "deletes: equality"),
            "10: tables[0].deletes: got 'equality', expected position or copy-on-write: lake is a catalog of Delta, "
            "which has no equality deletes. Write deletes: position, or leave it out.",
        ),
        (
            table(DELTA, 'partition_by: [region, "bucket(16, id)"]'),
            "10: tables[0].partition_by[1]: got 'bucket(16, id)', expected a plain column: lake is a catalog of Delta, "
            "which has no bucket(…). Write a column whose values are the partitions, or cluster_by: [id] instead of "
            "partition_by.",
        ),
        (
            table(DELTA, "partition_by: [day(ts)]"),
            "10: tables[0].partition_by[0]: got 'day(ts)', expected a plain column: lake is a catalog of Delta, "
            "which has no day(…). Write a column whose values are the partitions, or cluster_by: [ts] instead of "
            "partition_by.",
        ),
        (
            table(ICEBERG, "cluster_by: [region, id]"),
            "10: tables[0].cluster_by: got [region, id], but old is a catalog of Iceberg, which has no clustering. "
            "Write partition_by.",
        ),
        (
            table(DELTA, "cluster_by: [id, region, ts, a, b]"),
            "10: tables[0].cluster_by: got 5 columns, expected at most 4 in Delta.",
        ),
        (
            table(DELTA, "cluster_by: [id]", "partition_by: [region]"),
            "10: tables[0].cluster_by: a table of Delta can't have both cluster_by and partition_by. Leave out one of "
            "them.",
        ),
        (
            table(DELTA, "cluster_by: [regio]"),
            "10: tables[0].cluster_by: cluster_by names 'regio', which is not in columns (did you mean 'region'?).",
        ),
        (table(DELTA, "cluster_by: [id, id]"), "10: tables[0].cluster_by: cluster_by names 'id' twice. Name it once."),
        (
            table(DELTA, 'properties: {format-version: "3"}'),
            "10: tables[0].properties.format-version: this is a property of Iceberg, and the table is a Delta table, "
            "whose properties begin with delta.; leave it out.",
        ),
        (
            table(ICEBERG, "properties: {delta.appendOnly: true}"),
            "10: tables[0].properties.delta.appendOnly: this is a property of Delta Lake, and the table is an Iceberg "
            "table; leave it out.",
        ),
        (
            table(DELTA, "properties: {delta.apendOnly: true}"),
            "10: tables[0].properties.delta.apendOnly: Delta has no such property (did you mean 'delta.appendOnly'?).",
        ),
        (
            table(DELTA, "properties: {delta.appendonly: TRUE}"),
            "10: tables[0].properties.delta.appendonly: rowdelta does not follow this property: rows are updated and "
            "deleted; set it to false, or use mode: append.",
        ),
        (
            table(DELTA, "properties: {delta.enableDeletionVectors: false}"),
            "10: tables[0].properties.delta.enableDeletionVectors: rowdelta does not follow this property: rows are "
            "deleted with deletion vectors",
        ),
        (
            table(DELTA, "properties: {delta.feature.catalogManaged: supported}"),
            "10: tables[0].properties.delta.feature.catalogManaged: rowdelta does not follow this property: a catalog",
        ),
        (
            table(DELTA, "properties: {delta.feature.nothing: supported}"),
            "10: tables[0].properties.delta.feature.nothing: rowdelta does not follow this property: rowdelta does not "
            "know this table feature; leave it out.",
        ),
        (
            table("prod.eu.shop.orders"),
            "9: tables[0].target: got 'prod.eu.shop.orders', expected prod.namespace.table: Spark's session catalog "
            "has no namespaces in namespaces.",
        ),
    ],
)
def test_what_a_format_cannot_do(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert refusal(tmp_path, change).startswith(expected)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("_commit_version", DELTA),
        ("_metadata", DELTA),
        ("_spec_id", ICEBERG),
    ],
)
def test_names_that_a_format_has_taken(tmp_path: Path, name: str, target: str) -> None:
    change = table(target), ("{id: bigint,", f"{{id: bigint, {name}: string,")
    assert f"tables[0].columns: {name}: " in refusal(tmp_path, *change)
    other = {DELTA: ICEBERG, ICEBERG: DELTA}[target]
    text = CONFIG.replace(*table(other)).replace("{id: bigint,", f"{{id: bigint, {name}: string,")
    assert name in (load_text(tmp_path, text).tables[0].columns or {})


def test_what_delta_can_do(tmp_path: Path) -> None:
    for lines in (
        ["partition_by: [region]"],
        ["cluster_by: [id, region, ts, a]"],
        ["mode: append", "properties: {delta.appendOnly: true, delta.enableDeletionVectors: false}"],
        ["properties: {delta.columnMapping.mode: name, delta.feature.clustering: supported, owner: ada}"],
        ["properties: {delta.enableRowTracking: false, delta.setTransactionRetentionDuration: interval 1 day}"],
    ):
        text = CONFIG.replace(*table(DELTA, *lines))
        if "mode: append" in lines:
            text = text.replace("    key: [id]\n", "")
        assert load_text(tmp_path, text).tables[0].target == DELTA


def test_a_delta_tables_folder_is_its_own(tmp_path: Path) -> None:
    """VACUUM removes everything in it that the log doesn't name."""
    items = "  - {source: items, target: lake.shop.orders.items, key: [id], columns: {id: bigint}}\n"
    with pytest.raises(ConfigError, match=r"tables\[1\]\.target: .*/orders/items, .*: VACUUM of that table would"):
        load_text(tmp_path, CONFIG + items)
    same = CONFIG.replace("./old}", "./warehouse}") + items.replace("lake.shop.orders.items", "old.shop.orders")
    with pytest.raises(ConfigError, match=r"tables\[1\]\.target: .*/shop/orders, .* is inside .*/shop/orders, "):
        load_text(tmp_path, same)
    state = CONFIG.replace("./state", "./warehouse/shop/orders/state")
    with pytest.raises(ConfigError, match=r"sink\.checkpoint: .* is inside .*, which is for table lake\.shop\.orders"):
        load_text(tmp_path, state)


def test_a_warehouse_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "warehouse").write_text("a file")
    with pytest.raises(ConfigError, match=r"catalogs\.lake\.warehouse: .* is a file"):
        check_folders(None, load_text(tmp_path, CONFIG))
