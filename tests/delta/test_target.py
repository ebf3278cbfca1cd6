"""A Delta table as the target of a job: what it holds is what the source has, by every reader."""

import datetime as dt
import json
import logging
import time
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.errors import TableError
from sink.spark import session
from sink.spark.session import MAINTENANCE_POOL
from sink.targets.delta import checkpoints
from sink.targets.delta.log import DeltaLog
from tests.delta.harness import DeltaJob
from tests.delta.readers import READERS
from tests.sink.harness import Change, merging_soon

pytestmark = pytest.mark.spark


def row(key: Any, region: str | None = "eu", **others: Any) -> dict[str, Any]:
    return {"id": key, "region": region, **others}


def inserts(*keys: Any, region: str | None = "eu") -> list[Change]:
    return [("+I", row(key, region)) for key in keys]


@pytest.mark.parametrize(("partition_by", "mode"), [((), "changelog"), (("region",), "upsert")])
def test_changes_over_several_micro_batches(
    spark: SparkSession, tmp_path: Path, partition_by: tuple[str, ...], mode: Any
) -> None:
    job = DeltaJob(spark, tmp_path, partition_by=partition_by, mode=mode)
    job.write([*inserts(*range(10)), ("+I", row(10, None)), ("+I", row(11, "a/b=c %"))])
    job.write(
        [
            ("-D", row(0)),
            *(("-U", row(1)), ("+U", row(1, "us"))),
            *(("+I", row(20)), ("-U", row(20)), ("+U", row(20, "us"))),
            *(("-U", row(10, None)), ("+U", row(10, "a/b=c %"))),
            *(("+I", row(21)), ("-D", row(21))),
        ]
    )
    job.run()
    job.write([("-U", row(1, "us")), ("+U", row(1, None)), ("-D", row(20, "us")), ("+I", row(0, "us"))])
    job.run()
    expected = dict.fromkeys(range(2, 10), "eu") | {0: "us", 1: None, 10: "a/b=c %", 11: "a/b=c %"}
    assert job.rows() == [row(key, region) for key, region in sorted(expected.items())]
    job.check(travel=(2,))
    assert job.check_index() is not None


def test_a_file_whose_rows_are_all_deleted_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2, 3))
    job.write(inserts(4))
    job.write([("-D", row(1)), ("-D", row(2))])
    job.run()
    assert len(job.vectors()) == 1
    job.write([("-D", row(3))])
    job.run()
    assert job.vectors() == {}
    assert len(job.snapshot().files) == 1
    assert job.rows() == [row(4)]
    job.check(travel=(2,))
    assert job.check_index() is not None
    job.write([("-D", row(4))])
    job.run()
    assert job.snapshot().files == {}
    assert job.rows() == []
    job.write(inserts(1))
    job.run()
    assert job.rows() == [row(1)]
    job.check()
    assert job.check_index() is not None


def test_a_vector_grows(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(3000)))
    deleted: set[int] = set()
    for step in (1000, 7, 2):
        gone = set(range(0, 3000, step)) - deleted
        job.write([("-D", row(key)) for key in sorted(gone)])
        job.run()
        deleted |= gone
        (vector,) = job.vectors().values()
        assert vector["storageType"] == "u", "Delta's VACUUM fails on inline vectors"
        assert vector["cardinality"] == len(deleted)
    assert [found["id"] for found in job.rows()] == [key for key in range(3000) if key not in deleted]
    job.check(travel=(2,))
    assert job.check_index() is not None


KEYS: dict[str, list[Any]] = {
    "bigint": [0, -(2**63), 2**63 - 1],
    "string": ["", "a/b=c %25 ä'\"\\\n", "x" * 50],
    "date": [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(9999, 12, 31)],
    "decimal(38,10)": [Decimal("0E-10"), Decimal("-1.0000000001"), Decimal("9999999999999999999999999999.9999999999")],
    "boolean": [True, False],
    "binary": [b"", b"\x00", b"\xff" * 20],
    "timestamp": [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
    ],
}


@pytest.mark.parametrize(
    ("partition_by", "readers"),
    [
        ((), ("delta-rs", "DuckDB", "polars")),
        # but binary, which is refused; polars has other values of such partition columns
        (tuple(name for name in KEYS if name != "binary"), ("delta-rs", "DuckDB")),
    ],
    ids=["not partitioned", "by all types"],
)
def test_key_types(
    spark: SparkSession, tmp_path: Path, partition_by: tuple[str, ...], readers: tuple[str, ...]
) -> None:
    """A key of all types. For each value there are keys that differ from others by it alone."""
    names = {name: f"k{number}" for number, name in enumerate(KEYS)}
    # Delta knows no empty text as a partition value, so such a key is a bad record
    values = {name: [key for key in found if key != "" or name not in partition_by] for name, found in KEYS.items()}
    base = {names[name]: found[0] for name, found in values.items()}
    keys = [base | {names[name]: key} for name, found in values.items() for key in found[1:]]
    job = DeltaJob(
        spark, tmp_path, columns={column: name for name, column in names.items()} | {"region": "string"},
        key=tuple(base), partition_by=tuple(names[name] for name in partition_by),
    )  # fmt: skip
    job.write([("+I", key | {"region": "eu"}) for key in (base, *keys)])
    job.run()
    # of each type with three values, one is updated and one deleted
    untouched, deleted, updated = keys[:2], keys[2::2], [base, *keys[3::2]]
    job.write(
        [*(("-D", key | {"region": "eu"}) for key in deleted), *(("+U", key | {"region": "us"}) for key in updated)]
    )
    job.run()
    expected = [key | {"region": "eu"} for key in untouched] + [key | {"region": "us"} for key in updated]

    def shown(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(repr(found).replace("zoneinfo.ZoneInfo(key='UTC')", "datetime.timezone.utc") for found in rows)

    assert shown(job.rows()) == shown(expected)
    job.check(readers=readers)
    assert job.check_index() is not None


@pytest.mark.parametrize("partition_by", ["", "PARTITIONED BY (region)"])
def test_column_mapping_and_not_null(spark: SparkSession, tmp_path: Path, partition_by: str) -> None:
    job = DeltaJob(spark, tmp_path, configure_columns=False)
    properties = {"delta.columnMapping.mode": "name", "delta.minReaderVersion": "3", "delta.minWriterVersion": "7"}
    job.create("id bigint NOT NULL, region string, old string", more=partition_by, properties=properties)
    job.sql("ALTER TABLE {t} DROP COLUMN old")
    job.sql("ALTER TABLE {t} RENAME COLUMN region TO `the region, ä`")
    job.columns = {"id": "bigint", "the region, ä": "string"}

    def named(key: int, region: str) -> dict[str, Any]:
        return {"id": key, "the region, ä": region}

    job.write([("+I", named(key, "eu")) for key in range(4)])
    job.run()
    job.sql("INSERT INTO {t} VALUES (9, 'us')")
    job.write([("+U", named(1, "us")), ("-D", named(0, "eu")), ("+U", named(9, "x"))])
    job.run()
    assert job.rows() == [named(1, "us"), named(2, "eu"), named(3, "eu"), named(9, "x")]
    seen = job.check(readers=("delta-rs",))
    if partition_by:  # see docs/delta.md
        seen = sorted((found | {"the region, ä": None} for found in seen), key=repr)
    assert READERS["DuckDB"](job.table_folder) == seen
    assert job.check_index() is not None


def test_the_name_of_a_key_column_passes_to_another_column(spark: SparkSession, tmp_path: Path) -> None:
    """The key index has hashes of the old one's values."""
    job = DeltaJob(spark, tmp_path, configure_columns=False)
    job.create("id bigint, other bigint", properties={"delta.columnMapping.mode": "name"})
    job.columns = {"id": "bigint", "other": "bigint"}
    job.write([("+I", {"id": 1, "other": 2}), ("+I", {"id": 2, "other": 1})])
    job.run()
    for old, new in (("id", "x"), ("other", "id"), ("x", "other")):
        job.sql(f"ALTER TABLE {{t}} RENAME COLUMN {old} TO {new}")
    job.write([("+U", {"id": 1, "other": 7})])
    job.run()
    assert job.rows() == [{"id": 1, "other": 7}, {"id": 2, "other": 1}]
    assert job.check_index() is not None


def test_a_micro_batch_without_effect(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write([("-D", row(1))])
    job.write(inserts(1))
    job.write([("-D", row(7)), ("+I", row(8)), ("-D", row(8))])
    job.run()
    assert job.rows() == [row(1)]
    assert len(job.snapshot().files) == 1
    job.run()
    job.check(travel=(2,))


def test_mode_append(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, mode="append", key=())
    job.columns = {"id": "bigint", "region": "string"}
    job.create("id bigint, region string", properties={"delta.appendOnly": "true"})
    job.write(inserts(1, 2, 1))
    job.run()
    job.write(inserts(1))
    job.run()
    assert [found["id"] for found in job.check()] == [1, 1, 1, 2]


def test_lost_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.write([("+U", row(1, "us"))])
    job.run()
    version = job.version()
    job.lose_checkpoint()
    job.run()
    assert job.version() == version
    job.write([("-D", row(1, "us"))])
    job.run()
    assert job.rows() == [row(2)]
    job.check()


def test_a_run_ends_with_the_checkpoint_of_the_log_that_it_began(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else jobs of a few micro-batches would never write one."""
    write = checkpoints._write_checkpoint

    def slowly(*args: Any) -> None:
        time.sleep(1)
        write(*args)

    monkeypatch.setattr(checkpoints, "_EVERY", 2)
    monkeypatch.setattr(checkpoints, "_write_checkpoint", slowly)
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1))
    job.write(inserts(2))
    job.run()
    assert list((job.table_folder / "_delta_log").glob("*.checkpoint*.parquet"))


def test_checkpoints_that_take_long_are_written_less_often(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a table with many removed files would do nothing else."""
    monkeypatch.setattr(checkpoints, "_EVERY", 2)
    monkeypatch.setattr(checkpoints, "_EVERY_AT_MOST", 6)
    monkeypatch.setattr(checkpoints, "_PAUSE", 1000)
    job = DeltaJob(spark, tmp_path)
    for number in range(18):
        job.write(inserts(number))
    job.run()
    written = sorted(int(path.name[:20]) for path in (job.table_folder / "_delta_log").glob("*.checkpoint*.parquet"))
    assert len(written) > 1
    assert min(later - earlier for earlier, later in pairwise(written)) >= 6
    job.check()


def test_a_checkpoint_leaves_micro_batches_alone(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta shares a table's state among threads, and a commit once waited for the checkpoint's thread to make it. Its
    tasks took all cores, too.
    """
    seen: list[tuple[str, str | None, bool]] = []
    write = DeltaLog.checkpoint

    def checkpoint(log: DeltaLog) -> bool:
        partitions = str(log.spark.conf.get("spark.databricks.delta.snapshotPartitions"))
        pool = log.spark.sparkContext.getLocalProperty("spark.scheduler.pool")
        seen.append((partitions, pool, log.java == DeltaLog(spark, log.path).java))
        return write(log)

    monkeypatch.setattr(checkpoints, "_EVERY", 2)
    monkeypatch.setattr(checkpoints, "_PAUSE", 0)
    monkeypatch.setattr(checkpoints, "_OF_A_TASK", 2)
    monkeypatch.setattr(DeltaLog, "checkpoint", checkpoint)
    job = DeltaJob(spark, tmp_path)
    before = spark.conf.get("spark.databricks.delta.snapshotPartitions")
    for number in range(12):
        job.write(inserts(number))
    job.run()
    assert len(seen) > 1
    assert {pool for _, pool, _ in seen} == {MAINTENANCE_POOL}
    assert not any(shared for _, _, shared in seen)
    assert seen[0][0] == before, "nothing tells yet how many files were removed"
    assert int(seen[-1][0]) > 5
    assert spark.conf.get("spark.databricks.delta.snapshotPartitions") == before
    assert job.rows() == [row(number) for number in range(12)]
    job.check()


def test_checksums_name_no_files(spark: SparkSession, tmp_path: Path) -> None:
    """Else each commit after which a table has 50 files, and before which it had more, makes its state from the log."""
    name, own = "spark.databricks.delta.allFilesInCrc.enabled", spark.newSession()
    job = DeltaJob(own, tmp_path)
    own.conf.set(name, session.settings(job.config())[name])  # as a session of the sink has it
    job.write(inserts(1, 2))
    job.run()
    newest = json.loads((job.table_folder / "_delta_log" / f"{job.version():020}.crc").read_text())
    assert newest["numFiles"] == 1
    assert "allFiles" not in newest


def test_small_files_are_merged(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = DeltaJob(spark, tmp_path, partition_by=("region",))
    for key in range(6):
        job.write([*inserts(key, key + 100), ("-D", row(key + 99))])
    with merging_soon(3):
        job.run()
    assert [found["id"] for found in job.rows()] == [0, 1, 2, 3, 4, 5, 105]
    rewrites = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for version, info in job.log.history().items()
        if "rowdelta.minor-compaction" in (info.get("userMetadata") or "")
        for path in [job.table_folder / "_delta_log" / f"{version:020}.json"]
    ]
    assert rewrites
    moved = [action for actions in rewrites for action in actions if {"add", "remove"} & action.keys()]
    assert {content["dataChange"] for action in moved for content in action.values()} == {False}
    job.check(travel=(2,))
    assert job.check_index() is not None
    job.write([("+U", row(key, "us")) for key in range(6)])
    job.run()
    assert [found["region"] for found in job.rows()] == ["us"] * 6 + ["eu"]
    job.check()
    assert job.check_index() is not None
    assert "catching up" not in caplog.text


def test_a_table_is_clustered_as_the_configuration_says(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, table={"cluster_by": ["region"]})
    job.write(inserts(1, 2))
    job.run()
    (detail,) = job.sql("DESCRIBE DETAIL {t}")
    assert detail["clusteringColumns"] == ["region"]
    job.write([("+U", row(1, region="us"))])
    job.run()
    assert len(job.check()) == 2
    job.sql("ALTER TABLE {t} CLUSTER BY NONE")
    job.write(inserts(3))
    with pytest.raises(TableError, match="clustering"):
        job.run()
