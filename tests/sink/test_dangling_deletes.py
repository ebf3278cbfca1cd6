"""Delete files that no longer apply to any data file are removed, and no others."""

import json
import logging
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.commands.maintain import as_json, lines, maintain
from sink.config.maintenance import ExpireSection
from sink.run import maintenance
from sink.targets.iceberg import dangling
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.dangling import dangling_deletes
from sink.targets.iceberg.java_table import JavaTable
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.own_state import expiring
from sink.targets.upkeep_values import UpkeepFacts
from tests.rewrites import only_sink
from tests.sink.harness import CrashError, Job, before_rewrite, by_pyiceberg, crashing

pytestmark = pytest.mark.spark

NOTHING_ELSE = {"min-input-files": 1000, "delete-ratio-threshold": 1.0, "delete-file-threshold": 1000}
"""No file is worth a rewrite."""
REGIONS = ("eu", "us")
LAST = {"id": 500, "region": "us"}


def new_job(spark: SparkSession, folder: Path, *, version: int = 2, **arguments: Any) -> Job:
    job = Job(spark, folder, tasks=1, properties={"format-version": str(version)}, **arguments)
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0, "rewrite": NOTHING_ELSE}}
    return job


def write_rows(job: Job) -> None:
    """Two data files in each region, a delete of a row of each, and a commit after it: a compaction gives its files the
    number of the last one that it has read, and position deletes with this number may apply to them.
    """
    for start in (0, 100):
        job.write([("+I", {"id": start + key, "region": region}) for region in REGIONS for key in ids_of(region)])
    job.write([("-D", {"id": start + ids_of(region)[0], "region": region}) for region in REGIONS for start in (0, 100)])
    job.write([("+I", LAST)])
    job.run()


def ids_of(region: str) -> range:
    return range(20) if region == "eu" else range(50, 70)


def left() -> list[dict[str, Any]]:
    rows = [{"id": start + key, "region": region} for region in REGIONS for start in (0, 100) for key in ids_of(region)]
    deleted = {start + ids_of(region)[0] for region in REGIONS for start in (0, 100)}
    return [*sorted((row for row in rows if row["id"] not in deleted), key=lambda row: int(str(row["id"]))), LAST]


def compact_eu(job: Job) -> None:
    job.call("rewrite_data_files", "where => 'region = \"eu\"', options => map('rewrite-all', 'true')")


def delete_files(job: Job, region: str | None = None) -> list[str]:
    """Paths of all delete files, or of those of a region."""
    found = spark_rows(job, "SELECT * FROM {}.delete_files")
    return [row["file_path"] for row in found if region is None or row["partition"]["region"] == region]


def spark_rows(job: Job, query: str) -> list[Any]:
    return list(job.spark.sql(query.format(job.target)).collect())


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_deletes_of_files_that_were_all_rewritten_are_removed(
    spark: SparkSession, tmp_path: Path, deletes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By another program, in one of two partitions. The other one's deletes stay."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, deletes=deletes, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    compact_eu(job)
    before, dangling_ones = delete_files(job), delete_files(job, "eu")
    assert dangling_ones
    assert delete_files(job, "us")
    (would,) = maintain(spark, job.config(), ["orders"], dry_run=True)
    assert would.error is None
    assert delete_files(job) == before
    (found,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert (found.error, found.rewritten_data_files) == (None, 0)
    assert would.dangling_delete_files == found.dangling_delete_files == len(dangling_ones)
    assert re.search(r"\n  drop {9}\d+ delete files?, applied to nothing", "\n".join(lines(would)))
    assert re.search(r"\n  dropped {6}\d+ delete files?, applied to nothing", "\n".join(lines(found)))
    assert '"dangling_delete_files": ' in as_json(found)
    assert sorted(delete_files(job)) == sorted(set(before) - set(dangling_ones))
    assert job.rows() == left()
    if deletes == "position":
        assert by_pyiceberg(job) == left()
        assert job.check_index() is not None
    (again,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert again.dangling_delete_files == 0
    caplog.clear()
    job.write([("-D", row) for row in left()[:3]])
    job.run()
    assert job.rows() == left()[3:]
    assert "key index built" not in caplog.text
    assert deletes == "equality" or job.check_index() is not None


def test_the_newest_deletes_of_a_table_without_partitions_are_removed(spark: SparkSession, tmp_path: Path) -> None:
    """Iceberg itself drops those that are older than all data files. The last ones are just as old."""
    job = new_job(spark, tmp_path, deletes="equality")
    write_rows(job)
    job.compact()
    job.append([{"id": 1000, "region": "theirs"}])
    left_over = delete_files(job)
    assert left_over
    assert only_sink(job).upkeep.drop_dangling_deletes() == len(left_over)
    assert delete_files(job) == []
    assert by_pyiceberg(job) == job.rows() == [*left(), {"id": 1000, "region": "theirs"}]


def test_deletes_for_all_partitions_stay(spark: SparkSession, tmp_path: Path) -> None:
    """As long as any partition has an older file: Iceberg's own procedure would drop them."""
    job = new_job(spark, tmp_path, deletes="equality", partition_by=("region",))
    write_rows(job)
    compact_eu(job)
    before = delete_files(job)
    assert before
    assert only_sink(job).upkeep.drop_dangling_deletes() == 0
    assert delete_files(job) == before
    assert job.rows() == left()
    job.write([("-D", left()[0])])
    job.run()
    job.compact()
    job.append([{"id": 1000, "region": "theirs"}])
    left_over = delete_files(job)
    assert left_over
    assert only_sink(job).upkeep.drop_dangling_deletes() == len(left_over)
    assert delete_files(job) == []
    assert by_pyiceberg(job) == job.rows() == [*left()[1:], {"id": 1000, "region": "theirs"}]


def test_deletes_of_one_file_that_is_left_stay(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    spark.sql(f"DELETE FROM {job.target} WHERE id < 50")  # all of the first file of a partition
    rows = [row for row in left() if row["id"] >= 50]
    sink = only_sink(job)
    gone = sink.upkeep.drop_dangling_deletes()
    assert delete_files(job, "eu")
    applied = {path for _, deletes in job.planned_files() for path in deletes}
    assert set(delete_files(job)) == applied, f"{gone} were removed"
    assert job.rows() == by_pyiceberg(job) == rows
    job.write([("-D", row) for row in rows[:3]])
    job.run()
    assert job.rows() == rows[3:]
    assert job.check_index() is not None


def test_position_deletes_as_old_as_a_data_file_stay(spark: SparkSession, tmp_path: Path) -> None:
    """They may be of the same commit, if they aren't of one data file only."""
    job = new_job(spark, tmp_path, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    earlier = delete_files(job, "eu")
    deleted = [row for row in left() if row["id"] in (1, 101)]
    job.write([("-D", row) for row in deleted])
    job.run()
    newest = set(delete_files(job, "eu")) - set(earlier)
    assert newest
    compact_eu(job)
    assert only_sink(job).upkeep.drop_dangling_deletes() == len(earlier)
    assert set(delete_files(job, "eu")) == newest
    assert job.rows() == by_pyiceberg(job) == [row for row in left() if row not in deleted]


def add_delete_of(job: Job, region: str) -> str:
    """A position delete of another program for a row of a file of "us": it is listed in the partition of a region, and
    only its bounds tell the data file.

    :return: its path.
    """
    table = only_sink(job).table
    java, spec = job.java_table(), cast("IcebergTableSpec", table.spec)
    condition = "content = 0 AND partition.region = 'us' AND record_count > 1"
    data = spark_rows(job, f"SELECT file_path FROM {{}}.files WHERE {condition}")[0][0]
    path = f"{data.rpartition('/')[0]}/misplaced.parquet"
    ids = {"file_path": 2147483546, "pos": 2147483545}  # reserved for these columns
    types = {"file_path": pa.string(), "pos": pa.int64()}
    fields = [pa.field(name, types[name], False, {"PARQUET:field_id": str(number)}) for name, number in ids.items()]
    pq.write_table(pa.table([[data], [1]], schema=pa.schema(fields)), path.removeprefix("file:"))
    bounds = {"keys": [ids["file_path"]], "values": [data.encode().hex()]}
    described = {
        "spec-id": spec.current_spec_id,
        "content": "POSITION_DELETES",
        "file-path": path,
        "file-format": "PARQUET",
        "partition": {str(spec.specs_by_id[spec.current_spec_id].fields[0].field_id): region},
        "file-size-in-bytes": Path(path.removeprefix("file:")).stat().st_size,
        "record-count": 1,
        "lower-bounds": bounds,
        "upper-bounds": bounds,
    }
    java.newRowDelta().addDeletes(table.content_file(json.dumps(described))).commit()  # type: ignore[attr-defined]
    return path


def test_a_delete_in_the_wrong_partition_stays(spark: SparkSession, tmp_path: Path) -> None:
    """Before 1.12 Iceberg applies it if it is about one data file: without it the row would be back. Now it refuses to
    read the table.
    """
    job = new_job(spark, tmp_path, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    job.write([("-D", row) for row in left() if row["region"] == "eu"])
    job.run()
    compact_eu(job)
    sink = only_sink(job)
    sink.upkeep.drop_dangling_deletes()
    path = add_delete_of(job, "eu")
    sink.table.refresh()
    assert delete_files(job, "eu") == [path]
    assert list(sink.table.upkeep().dangling_deletes()) == []


def add_dangling_vector(job: Job) -> None:
    """As a program leaves it that removes a data file and forgets its vector."""
    table = only_sink(job).table
    (described, *_) = (table.described(file) for file in table.delete_files())  # type: ignore[attr-defined]
    java = job.java_table()
    gone = described["referenced-data-file"].replace(".parquet", "-gone.parquet")
    text = described | {"referenced-data-file": gone}
    java.newRowDelta().addDeletes(table.content_file(json.dumps(text))).commit()  # type: ignore[attr-defined]


def test_a_vector_of_a_file_that_is_gone_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    """Its Puffin file has the vectors of other files too. These stay."""
    job = new_job(spark, tmp_path, version=3)
    write_rows(job)
    before = len(delete_files(job))
    add_dangling_vector(job)
    assert len(delete_files(job)) == before + 1
    assert only_sink(job).upkeep.drop_dangling_deletes() == 1
    assert len(delete_files(job)) == before
    job.check_deletes()
    assert job.rows() == by_pyiceberg(job) == left()
    assert job.check_index() is not None
    job.write([("-D", row) for row in left()[:3]])
    job.run()
    assert job.rows() == left()[3:]
    assert job.check_index() is not None


def rewrite_with_old_number(job: Job) -> None:
    """What a compaction commits that has begun before the newest deletes: a file of the state that it has read."""
    java = job.java_table()
    table = only_sink(job).table
    scans = table.elements(java.newScan().planFiles())  # type: ignore[attr-defined]
    file = min((scan.file() for scan in scans), key=lambda file: int(file.dataSequenceNumber()))
    described = table.described(file)  # type: ignore[attr-defined]
    path = str(file.location()).removeprefix("file:")
    copy = path.replace(".parquet", "-compacted.parquet")
    shutil.copy(path, copy)
    new = table.content_file(json.dumps(described | {"file-path": str(file.location()).replace(path, copy)}))  # type: ignore[attr-defined]
    number = int(file.dataSequenceNumber())
    java.newRewrite().deleteFile(file).addFile(new).dataSequenceNumber(number).commit()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_deletes_of_a_file_that_was_rewritten_with_its_old_number_stay(
    spark: SparkSession, tmp_path: Path, when: str
) -> None:
    """It is younger than the deletes, and they apply to it."""
    job = new_job(spark, tmp_path, deletes="equality", key=("id", "region"), partition_by=("region",))
    write_rows(job)
    compact_eu(job)
    assert job.rows() == left()
    dangling_ones = delete_files(job, "eu")
    if when == "before":
        rewrite_with_old_number(job)
    sink = only_sink(job)
    with before_rewrite(lambda: rewrite_with_old_number(job)) if when == "meanwhile" else nullcontext():
        assert sink.upkeep.drop_dangling_deletes() == len(dangling_ones)
    assert delete_files(job, "us")
    assert not delete_files(job, "eu")
    assert job.rows() == left()


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_a_rollback_meanwhile_keeps_them(spark: SparkSession, tmp_path: Path, deletes: Any) -> None:
    """They apply again to what it brings back."""
    job = new_job(spark, tmp_path, deletes=deletes, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    before, deletes_before = job.current_snapshot(), delete_files(job)
    assert before is not None
    compact_eu(job)
    sink = only_sink(job)
    original = IcebergCommitter._send

    def send(self: IcebergCommitter, staged: Any) -> None:
        job.rollback(before)
        original(self, staged)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IcebergCommitter, "_send", send)
        assert sink.upkeep.drop_dangling_deletes() == 0
    assert sorted(delete_files(job)) == sorted(deletes_before)
    assert job.rows() == left()
    assert job.unreferenced_files() == []


@pytest.mark.parametrize(("fault", "deletes"), [("before a rewrite", "position"), ("after a rewrite", "equality")])
def test_a_crash_around_the_commit(spark: SparkSession, tmp_path: Path, deletes: Any, fault: Any) -> None:
    job = new_job(spark, tmp_path, deletes=deletes, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    compact_eu(job)
    sink = only_sink(job)
    with crashing(fault), pytest.raises(CrashError):
        sink.upkeep.drop_dangling_deletes()
    assert bool(delete_files(job, "eu")) == (fault == "before a rewrite")
    job.write([("-D", row) for row in left()[:3]])
    job.run()
    assert job.rows() == left()[3:]
    assert deletes == "equality" or job.check_index() is not None


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_a_job_removes_them(spark: SparkSession, tmp_path: Path, deletes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the table has more files than are looked at."""
    monkeypatch.setattr(maintenance, "SECONDS", 600.0)  # when it ends
    job = new_job(spark, tmp_path, deletes=deletes, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    compact_eu(job)
    job.table = {"merge_small_files": False, "maintenance": {"budget": 1000, "rewrite": NOTHING_ELSE}}
    with monkeypatch.context() as patch:
        patch.setattr(dangling, "_MOST_FILES", 3)
        job.run()
    assert delete_files(job, "eu")
    job.run()
    assert not delete_files(job, "eu")
    assert delete_files(job, "us")
    assert job.rows() == left()


def test_status_counts_no_deletes_that_apply_to_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iceberg drops deletes that are older than all data files. In one partition they may stay. Only what shows the
    number looks at each delete file.
    """
    job = new_job(spark, tmp_path, partition_by=["region"])
    job.write([("+I", {"id": 1, "region": "us"})])
    job.write([("+I", {"id": key, "region": "eu"}) for key in range(10, 18)])
    job.write([("-D", {"id": key, "region": "eu"}) for key in range(10, 16)])
    job.write([("+I", LAST)])  # or the deletes would have the number of the rewrite's files
    job.run()

    def shown() -> str:
        return "\n".join(inspection.status(spark, job.config()))

    assert "at most 60.0% of their rows are deleted" in shown()
    compact_eu(job)
    assert " 1 delete file" in shown()
    counted = list[str]()

    def noted(table: JavaTable) -> list[JavaObject]:
        counted.append(table.name)
        return dangling_deletes(table)

    monkeypatch.setattr("sink.targets.iceberg.upkeep.dangling_deletes", noted)
    assert expiring(only_sink(job)._open.table, ExpireSection()) == 0
    assert not counted
    assert "at most 0.0% of their rows are deleted" in shown()
    assert len(counted) == 1
    too_many = UpkeepFacts(data_files=1, size_in_bytes=1, rows=4, count_deleted=lambda: 5)
    assert inspection._shown_deletes(too_many) == "5 deletes by position, some of rows that are gone"


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_the_sinks_own_rewrites_leave_such_deletes(spark: SparkSession, tmp_path: Path, deletes: Any) -> None:
    """A partition's delete files stay listed while another partition has an older data file."""
    job = new_job(spark, tmp_path, deletes=deletes, key=("id", "region"), partition_by=("region",))
    write_rows(job)
    job.table = {"maintenance": {"rewrite": {"min-input-files": 2}}}
    (found,) = maintain(spark, job.config(), ["orders"], dry_run=False, where="region = 'eu'")
    assert (found.error, found.rewritten_data_files) == (None, 2)
    assert found.dangling_delete_files > 0
    assert job.rows() == left()
