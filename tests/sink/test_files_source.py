"""Which change files tasks read whole, and which files count as applied."""

import gc
import json
import os
import re
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.accumulators import _accumulatorRegistry
from pyspark.sql import SparkSession

from sink.errors import DataError, TableError
from sink.sources import files
from sink.sources.directories import ChangeFile
from tests.sink.harness import CREATED_LONG_AGO, Job
from tests.stack.process import wait_until


@pytest.mark.parametrize(
    ("path", "special"),
    [
        ("file:/a/b c%20é#1.parquet", False),
        ("s3a://bucket/x/y.parquet", False),
        ("hdfs://name:8020/x/y-2026.parquet", False),
        ("/plain/x.parquet", False),
        ("s3a://bucket/2026-01-02T10:30:00Z.parquet", True),
        ("hdfs://name:8020/x:y/z.parquet", True),
        ("file:/a/region=EU/x.parquet", True),
        ("file:/a/_day=1.parquet", True),
        ("file:/a,b/x.parquet", True),
        ("file:/a/{x}.parquet", True),
        ("file:/a/[x].parquet", True),
        ("file:/a/x*.parquet", True),
        ("file:/a/x?.parquet", True),
    ],
)
def test_paths_that_mean_more_than_a_file(path: str, special: bool) -> None:
    """To Hadoop, which takes a list of patterns, or to Spark, which takes columns from folders."""
    assert bool(files._SPECIAL.search(path)) == special


@pytest.mark.parametrize(
    ("names", "most"),
    [(["a.json"], 100), (["a.JSONL", "b.ndjson"], 200), (["a.json.gz"], None), (["a.json", "b"], None)],
)
def test_records_that_text_files_may_have(names: list[str], most: int | None) -> None:
    """What is compressed may have any number in few bytes."""
    found = [ChangeFile(f"file:/changes/{name}", 0, name) for name in names]
    assert files._most_records(found, [3_200] * len(names)) == most


def put(job: Job, name: str, key: int) -> None:
    """A change file that inserts `key`, with the same modification time as all others."""
    path = job.changes_folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"row_kind": "+I", "seq": key, "id": key, "region": "eu"}) + "\n")
    os.utime(path, (CREATED_LONG_AGO, CREATED_LONG_AGO))


@pytest.mark.spark
def test_files_of_one_name_in_several_folders_are_told_apart(spark: SparkSession, tmp_path: Path) -> None:
    """Files in sub-folders with the same time, also after the checkpoint was lost. If a file were read twice, its rows
    would be in the table twice.
    """
    options = {"path_format": "json", "recursiveFileLookup": "true"}
    job = Job(
        spark,
        tmp_path,
        file_format="json",
        mode="changelog",
        deletes="equality",
        sections={"source": {"options": options}},
    )
    put(job, "one/part ä%20+.json", 1)
    job.run()
    name = f"rowdelta.{job.sink_id}.position"
    stored = json.loads(str(job.java_table().properties().get(name)))
    assert stored["position"]["files"] == ["one/part ä%20+.json"]
    job.lose_checkpoint()
    put(job, "another.json", 2)
    put(job, "two/part ä%20+.json", 3)
    put(job, "part ä%20+.json", 4)
    job.sections = {"source": {"options": options | {"maxFilesPerTrigger": "9"}}}
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2, 3, 4]
    job.run()
    put(job, "three/another.json", 5)  # late, and of the mark's time
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2, 3, 4, 5]


@pytest.mark.spark
def test_a_directory_that_was_moved_is_refused_and_not_applied_again(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's checkpoint knows its files by their whole paths, so all of them are new to it."""
    job = Job(spark, tmp_path, file_format="json", mode="changelog", deletes="equality")
    put(job, "a.json", 1)
    put(job, "b.json", 2)
    job.run()
    moved = job.changes_folder.rename(tmp_path / "moved")
    job.changes_folder.mkdir()
    job.table = {"source": str(moved)}
    with pytest.raises(TableError, match="another directory") as refused:
        job.run()
    name, value = re.findall(r"set the table's property (\S+) to (\S+)\.", str(refused.value))[0]
    job.java_table().updateProperties().set(name, value).commit()
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2]
    put(job, "c.json", 3)
    (job.changes_folder / "c.json").rename(moved / "c.json")
    job.run()
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2, 3]


@pytest.mark.spark
@pytest.mark.parametrize("log", ["offsets", "sources/0"])
def test_a_checkpoint_with_an_empty_file_begins_anew(spark: SparkSession, tmp_path: Path, log: str) -> None:
    """As after the machine has lost its power."""
    job = Job(spark, tmp_path, file_format="json")
    put(job, "a.json", 1)
    job.run()
    (newest,) = (file for file in job.checkpoint.rglob(f"{log}/*") if file.name.isdigit())
    (newest.parent / f".{newest.name}.0a1b.tmp").write_text("")  # which Spark leaves after a crash
    newest.write_text("")
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    put(job, "b.json", 2)
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2]


@pytest.mark.spark
def test_what_a_crash_left_in_a_checkpoint_does_not_matter(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new generation would leave out late files."""
    job = Job(spark, tmp_path, file_format="json")
    put(job, "b.json", 1)
    job.run()
    (folder,) = job.checkpoint.rglob("sources/0")
    (folder / ".1.0a1b2c3d.tmp").write_text("")
    late = job.changes_folder / "a.json"
    put(job, late.name, 2)
    os.utime(late, (CREATED_LONG_AGO - 60, CREATED_LONG_AGO - 60))
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2]
    assert "the checkpoint doesn't continue" not in caplog.text


@pytest.mark.spark
@pytest.mark.parametrize(
    ("lost", "file_format"), [(True, "json"), (False, "parquet")], ids=["checkpoint lost-json", "continues-parquet"]
)
def test_files_of_one_time_are_applied_by_their_paths(
    spark: SparkSession, tmp_path: Path, file_format: Literal["json", "parquet"], lost: bool
) -> None:
    """Also where a micro-batch ends among them, and where the job does."""
    job = Job(spark, tmp_path, file_format=file_format, sections={"sink": {"on_bad_record": "fail"}})
    paths = {}
    for number in (7, 3, 6, 9, 2, 8, 12, 1, 11, 5, 4, 10):
        written = job.write_records([{"row_kind": "+U", "seq": 1, "id": 1, "region": str(number)}])
        paths[number] = written.rename(written.with_name(f"{number:03}.{file_format}"))
        os.utime(paths[number], (1_700_000_000, 1_700_000_000))
    good = paths[6].read_bytes()
    paths[6].write_bytes(b"PAR1, and no more\n")
    os.utime(paths[6], (1_700_000_000, 1_700_000_000))
    with pytest.raises(DataError):
        job.run()
    assert job.rows() == [{"id": 1, "region": "5"}]
    paths[6].write_bytes(good)
    os.utime(paths[6], (1_700_000_000, 1_700_000_000))
    if lost:
        job.lose_checkpoint()
    job.run()
    assert job.rows() == [{"id": 1, "region": "12"}]
    job.run()
    assert job.rows() == [{"id": 1, "region": "12"}]


@pytest.mark.spark
def test_what_is_opened_leaves_no_accumulator(spark: SparkSession, tmp_path: Path) -> None:
    """PySpark keeps each one for ever."""
    job = Job(spark, tmp_path)
    kept = []
    for number in range(3):
        job.write([("+I", {"id": number, "region": "eu"})])
        job.run()
        kept.append(len(_accumulatorRegistry))

    def is_clean() -> bool:
        spark._jvm.System.gc()  # type: ignore[union-attr]  # Java refers to a query's function until then
        gc.collect()
        return len(_accumulatorRegistry) <= kept[0]

    assert kept[0] < kept[2]
    assert wait_until(is_clean)


@pytest.mark.spark
@pytest.mark.parametrize("deletes", ["position", "equality"])
@pytest.mark.parametrize(("file_format", "reader"), [("json", "python"), ("parquet", "arrow"), ("parquet", "spark")])
def test_rows_of_one_order_value_are_applied_as_they_are_in_files(
    spark: SparkSession,
    tmp_path: Path,
    file_format: Literal["json", "parquet"],
    reader: str,
    deletes: Literal["position", "equality"],
) -> None:
    """In one file, and in several of a micro-batch."""
    options = {"path_format": file_format, "maxFilesPerTrigger": "100"}
    if reader == "spark":
        options["mergeSchema"] = "false"  # an option that the other reader doesn't know
    job = Job(spark, tmp_path, file_format=file_format, mode="changelog", deletes=deletes, key=("id",))
    job.sections = {"source": {"options": options}}

    def put(name: str, *changes: tuple[str, int, str]) -> None:
        rows = [{"row_kind": kind, "seq": 1, "id": key, "region": text} for kind, key, text in changes]
        path = job.write_records(rows)
        path = path.rename(path.with_name(f"{name}.{file_format}"))
        os.utime(path, (1_700_000_000, 1_700_000_000))

    put("2", ("-D", 1, "b"), ("+I", 1, "c"), ("+I", 2, "a"), ("-D", 2, "a"), ("+I", 4, "a"))
    put("3", ("-D", 3, "a"), ("+I", 3, "b"), ("-D", 4, "a"))
    put("1", ("+I", 1, "a"), ("-D", 1, "a"), ("+I", 1, "b"), ("+I", 3, "a"))
    job.run()
    assert job.rows() == [{"id": 1, "region": "c"}, {"id": 3, "region": "b"}]


@pytest.mark.spark
@pytest.mark.parametrize("file_format", ["json", "parquet"])
def test_rows_of_one_order_value_that_several_tasks_read(
    spark: SparkSession, tmp_path: Path, file_format: Literal["json", "parquet"]
) -> None:
    """Each part of a large file is read by another task."""
    # with the last option, no task reads Parquet files whole
    options = {"path_format": file_format, "maxFilesPerTrigger": "100", "mergeSchema": "false"}
    job = Job(spark, tmp_path, file_format=file_format, mode="changelog", key=("id",))
    job.sections = {"source": {"options": options}}
    between = [("+I", key, "x" * 20) for key in range(100, 400)]
    changes = [
        *[("+I", 1, "a"), ("+I", 2, "a")],
        *between[:100],
        ("-D", 1, "a"),
        *between[100:200],
        *[("+I", 1, "b"), ("-U", 1, "b")],
        *between[200:],
        *[("-D", 2, "a"), ("+U", 1, "c")],
    ]
    records = [{"row_kind": kind, "seq": 1, "id": key, "region": text} for kind, key, text in changes]
    if file_format == "json":
        path = job.write_records(records)
    else:
        path = job._hidden_file()
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=20, use_dictionary=False)
        path = job._publish(path)
    job.write_records([{"row_kind": "+I", "seq": 1, "id": 2, "region": "b"}])
    size = "spark.sql.files.maxPartitionBytes"
    spark.conf.set(size, "2k")
    try:
        tasks = spark.read.format("text" if file_format == "json" else "parquet").load(str(path)).rdd.getNumPartitions()
        assert tasks > 5
        job.run()
    finally:
        spark.conf.unset(size)
    assert [row["region"] for row in job.rows()[:2]] == ["c", "b"]
    assert len(job.rows()) == 2 + len(between)


@pytest.mark.spark
def test_the_order_of_files_when_their_bytes_end_a_micro_batch(spark: SparkSession, tmp_path: Path) -> None:
    """First the modification times count, then the paths, as with `maxFilesPerTrigger`."""
    job = Job(spark, tmp_path, file_format="json")
    times = {"5": 1, "9": 1, "1": 2, "2": 2, "3": 2, "4": 3, "0": 4}
    size = 0
    for name in ("3", "0", "9", "2", "5", "4", "1"):
        put = job.write_records([{"row_kind": "+U", "seq": 1, "id": 1, "region": name}])
        size = put.stat().st_size
        os.utime(put.rename(put.with_name(f"{name}.json")), (CREATED_LONG_AGO, CREATED_LONG_AGO + times[name]))
    job.sections = {"source": {"options": {"path_format": "json", "maxBytesPerTrigger": str(2 * size + 1)}}}
    job.run()
    own = [each["snapshot_id"] for each in job.snapshots() if each["operation"] != "replace"]
    shown = [job.rows(f"{job.target}.snapshot_id_{each}") for each in own]
    assert [row["region"] for rows in shown for row in rows] == ["9", "2", "4", "0"]


@pytest.mark.spark
def test_columns_from_the_names_of_folders_in_a_part_of_a_micro_batch(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, file_format="parquet", key=("id",))
    job.sections = {"source": {"options": {"maxFilesPerTrigger": "1"}}}
    for key, region in enumerate(("eu", "us")):
        path = job.write_records(
            [{"row_kind": "+I", "seq": 1, "id": key}],
            pa.schema({"row_kind": pa.string(), "seq": pa.int64(), "id": pa.int64()}),
        )
        folder = path.parent / f"region={region}"
        folder.mkdir()
        path.rename(folder / path.name)
    job.run()
    assert job.rows() == [{"id": 0, "region": "eu"}, {"id": 1, "region": "us"}]
