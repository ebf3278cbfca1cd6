"""Tables, key indexes and a checkpoint of an earlier rowdelta go on.

`data/upgrade.tar.gz` was written by `rowdelta run` of commit 1516e49: its `sink.yaml`, three change files for each of
five tables, and what came of them. Iceberg's metadata has full paths, so all of it belongs in one fixed folder.
"""

import fcntl
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink import config
from sink.run.pipeline import Pipeline
from sink.spark.versions import to_arrow
from tests.delta.readers import by_delta_rs

pytestmark = pytest.mark.spark

ARCHIVE = Path(__file__).parent / "data" / "upgrade.tar.gz"
FOLDER = Path("/tmp/rowdelta-upgrade")
TABLES = ("v2", "v3", "equality", "delta", "append")


@pytest.fixture
def earlier() -> Iterator[Path]:
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FOLDER, ignore_errors=True)
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(FOLDER.parent, filter="data")
        yield FOLDER
        shutil.rmtree(FOLDER)


def source_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """What the change files say, by their order."""
    rows: dict[int, dict[str, Any]] = {}
    for change in lines_of(folder, "v2"):
        if not isinstance(change["id"], int):
            continue  # a dead letter
        rows.pop(change["id"], None)
        if change["row_kind"] in ("+I", "+U"):
            rows[change["id"]] = {name: change[name] for name in ("id", "region", "name", "amount")}
    return rows


def lines_of(folder: Path, table: str) -> list[dict[str, Any]]:
    files = sorted((folder / "changes" / table).iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def write(folder: Path, number: int, changes: list[tuple[str, int, str, str]]) -> None:
    lines = [
        {"row_kind": kind, "seq": 1000 * number + n, "id": id_, "region": region, "name": name, "amount": "9.75"}
        for n, (kind, id_, region, name) in enumerate(changes)
    ]
    for table in TABLES:
        file = folder / "changes" / table / f"{number:03d}.json"
        chosen = [line for line in lines if table != "append" or line["row_kind"] == "+I"]
        file.write_text("".join(json.dumps(line) + "\n" for line in chosen))
        os.utime(file, (1_700_000_000 + number,) * 2)


@pytest.mark.parametrize("is_checkpoint_kept", [True, False])
def test_they_go_on(spark: SparkSession, earlier: Path, is_checkpoint_kept: bool) -> None:
    """From the checkpoint, or from the position in the tables; the key index may be built again."""
    settings = config.load(earlier / "sink.yaml")
    for key, value in settings.catalogs["upgraded"].items():
        spark.conf.set(f"spark.sql.catalog.upgraded.{key}", value)
    spark.conf.set("spark.sql.catalog.upgraded.cache-enabled", "false")  # each test begins with the same files
    spark.conf.set("spark.sql.catalog.upgraded", "org.apache.iceberg.spark.SparkCatalog")
    if not is_checkpoint_kept:
        shutil.rmtree(earlier / "state" / "files")
    before = source_rows(earlier)
    assert len(before) == 39
    changes = [("+U", 0, "eu", "after"), ("-D", 5, "eu", ""), ("+I", 200, "us", "new"), ("+U", 7, "eu", "moved")]
    write(earlier, 4, changes)
    Pipeline(spark, settings).run()
    write(earlier, 5, [("-D", 200, "us", ""), ("+U", 0, "us", "last")])
    Pipeline(spark, settings).run()
    expected = source_rows(earlier)
    assert expected[0]["name"] == "last"
    for name in TABLES[:3]:
        table = f"upgraded.shop.{name}"
        found = [row | {"amount": str(row["amount"])} for row in to_arrow(spark.table(table)).to_pylist()]
        assert sorted(found, key=lambda row: row["id"]) == [expected[n] for n in sorted(expected)], name
    found = [row | {"amount": str(row["amount"])} for row in by_delta_rs(earlier / "delta" / "shop" / "delta")]
    assert sorted(found, key=lambda row: row["id"]) == [expected[n] for n in sorted(expected)]
    # what is applied again would be there twice
    inserts = [line for line in lines_of(earlier, "append") if line["row_kind"] == "+I"]
    assert spark.table("upgraded.shop.append").count() == len(inserts) == 43
    assert spark.table("upgraded.shop.dead_letters").count() == 4
