"""Files are rewritten beside the stream. The table's rows stay the same, whatever micro-batches do meanwhile."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.commands import maintain as maintain_command
from sink.commands.maintain import maintain
from sink.errors import RolledBackError
from sink.table.rewrite_plan import RewriteOptions
from sink.targets.iceberg import rewritables
from sink.targets.iceberg.commit import IcebergCommitter
from tests.rewrites import ALL_FILES, only_sink, rewriting, rewritten_files, with_null_keys
from tests.sink.harness import Changes, CrashError, Job, before_rewrite, by_pyiceberg, crashing

pytestmark = pytest.mark.spark

BOTH = pytest.mark.parametrize("version", [2, 3])


def new_job(spark: SparkSession, folder: Path, version: int, **arguments: Any) -> Job:
    return Job(spark, folder, properties={"format-version": str(version)}, **arguments)


@pytest.mark.parametrize(("partition_by", "version"), [((), 3), (("bucket(2, id)",), 2)])
def test_rows_change_while_their_files_are_rewritten(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, partition_by: tuple[str, ...]
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, version, partition_by=partition_by, tasks=1)
    changes = Changes(job)
    changes.write(16)
    with rewriting() as done:
        job.run()
    assert len(done) == 3
    assert all(done), caplog.text
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    assert "catching up" not in caplog.text, "the index knows where the rows are now"
    assert "rewrote" in caplog.text
    # another process goes on
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


def test_every_micro_batch_deletes_from_every_file_while_all_are_rewritten(spark: SparkSession, tmp_path: Path) -> None:
    """Neither gives way: the new files get the deletes that were made meanwhile."""
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    rows = dict.fromkeys(range(60), "new")
    for start in range(0, 60, 20):  # three files
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 20)])
    for number in range(8):
        for key in range(number, 60, 10):  # rows of all files, old and new
            rows[key] = f"r{number}"
        job.write([("+U", {"id": key, "region": f"r{number}"}) for key in range(number, 60, 10)])
    with rewriting(("nothing", "nothing", "begin", "nothing", "write", "nothing", "adopt")) as done:
        job.run()
    assert len(done) == 1
    assert done[0] is not None
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    job.check_deletes()
    assert job.check_index() is not None


def test_row_ids_stay(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    for start in range(0, 30, 10):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 10)])
    job.run()
    columns = "id, _row_id, _last_updated_sequence_number"
    before = spark.sql(f"SELECT {columns} FROM {job.target} ORDER BY id").collect()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    assert sink.upkeep.end_rewrite(begun) is not None
    assert len(job.files()) == 1
    assert spark.sql(f"SELECT {columns} FROM {job.target} ORDER BY id").collect() == before


@BOTH
def test_rows_whose_key_is_null_that_others_deleted(spark: SparkSession, tmp_path: Path, version: int) -> None:
    """The key index has none of them, and only the deletes know which of them are deleted."""
    job = new_job(spark, tmp_path, version, tasks=1, configure_columns=False)
    with_null_keys(job, f"'format-version' = '{version}', 'write.delete.mode' = 'merge-on-read'")
    spark.sql(f"DELETE FROM {job.target} WHERE id IS NULL AND region IN ('3', '9')").collect()
    job.write([("+U", {"id": 1, "region": "new"}), ("-D", {"id": 4, "region": None})])
    job.run()
    sink = only_sink(job)
    assert sink.upkeep.end_rewrite(rewritten_files(sink)) is not None
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    left = {(n, str(n)) for n in (2, 5, 7, 8, 10, 11)} | {(None, "0"), (None, "6"), (1, "new")}
    assert set(map(tuple, spark.table(job.target).collect())) == left


@BOTH
def test_files_of_an_older_schema(spark: SparkSession, tmp_path: Path, version: int) -> None:
    job = new_job(spark, tmp_path, version, tasks=1, table={"merge_small_files": False}, configure_columns=False)
    changes = Changes(job)
    changes.write(2)
    job.run()
    spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note string")
    changes.write(1)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    assert sink.upkeep.end_rewrite(begun) is not None
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    found = [{name: value for name, value in row.items() if name != "seq"} for row in job.rows()]
    assert found == [row | {"note": None} for row in changes.expected()]
    assert job.check_index() is not None


def test_files_of_an_older_schema_of_structs(spark: SparkSession, tmp_path: Path) -> None:
    """A field was renamed, another dropped and added again, inside of a struct and of a list of structs."""
    inside = "struct<x: int, y: int>"
    columns = {"id": "bigint", "place": inside, "places": f"array<{inside}>"}
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False}, columns=columns, file_format="json")
    pair = {"x": 1, "y": 2}
    for key in range(2):
        job.write([("+I", {"id": key, "place": pair, "places": [None, pair]})])
    job.write([("+I", {"id": 2, "place": None, "places": None})])
    job.run()
    for place in ("place", "places.element"):
        spark.sql(f"ALTER TABLE {job.target} RENAME COLUMN {place}.x TO z")
        spark.sql(f"ALTER TABLE {job.target} DROP COLUMN {place}.y")
        spark.sql(f"ALTER TABLE {job.target} ADD COLUMN {place}.y int")
    sink = only_sink(replace(job, columns={}, configure_columns=False))
    begun = rewritten_files(sink)
    assert sink.upkeep.end_rewrite(begun) is not None
    assert len(job.files()) == 1
    new = {"z": 1, "y": None}
    rows = [row.asDict(recursive=True) for row in spark.table(job.target).orderBy("id").collect()]
    expected = [{"id": key, "place": new, "places": [None, new]} for key in range(2)]
    assert rows == [*expected, {"id": 2, "place": None, "places": None}]


@pytest.mark.parametrize("what", ["compaction", "compaction at the commit", "append", "delete"])
def test_others_change_the_table_meanwhile(
    spark: SparkSession, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A rewrite whose files others changed gives way; one whose files are as they were is done."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    rows = dict.fromkeys(range(30), "new")
    for start in range(0, 30, 10):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 10)])
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    if what == "compaction":
        job.compact()
    elif what == "append":
        job.append([{"id": 99, "region": "theirs"}])
        rows[99] = "theirs"
    elif what == "delete":
        spark.sql(f"DELETE FROM {job.target} WHERE id = 3")
        del rows[3]
    with before_rewrite(job.compact) if what == "compaction at the commit" else nullcontext():
        done = sink.upkeep.end_rewrite(begun)
    assert (done is not None) == (what == "append"), caplog.text
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    assert job.unreferenced_files() == []
    job.write([("+U", {"id": 3, "region": "changed"})])
    job.run()
    rows[3] = "changed"
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(rows.items())]
    assert job.check_index() is not None


@BOTH
def test_an_append_at_the_same_moment_only_delays_a_rewrite(spark: SparkSession, tmp_path: Path, version: int) -> None:
    """In version 2 its commit also has deletes of what micro-batches have deleted, and so Iceberg validates it against
    all new files.
    """
    job = new_job(spark, tmp_path, version, tasks=1, table={"merge_small_files": False})
    rows = [{"id": key, "region": "ours"} for key in range(10)]
    theirs = {"id": 10_000, "region": "theirs"}
    for half in (rows[:5], rows[5:]):
        job.write([("+I", row) for row in half])
    for one, other in zip(rows[:4], rows[5:9], strict=True):
        job.write([("-D", one), ("-D", other)])
    with rewriting() as done, before_rewrite(lambda: job.append([theirs])):
        job.run()
    assert [each is not None for each in done] == [True]
    assert job.rows() == [rows[4], rows[9], theirs]
    assert job.unreferenced_files() == []


MERGING_DELETES = RewriteOptions(min_input_files=2, min_file_size=0.0)
"""No data file is small, and they have so few deleted rows that only their delete files are merged."""


def with_many_delete_files(spark: SparkSession, folder: Path, *, data_files: int, deletes: int) -> tuple[Job, set[int]]:
    """A table of 100 rows a data file, and the keys that are left. Each delete file is about all data files."""
    job = new_job(spark, folder, 2, tasks=1, table={"merge_small_files": False})
    rows = data_files * 100
    for start in range(0, rows, 100):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 100)])
    for number in range(deletes):
        job.write([("-D", {"id": key, "region": "new"}) for key in range(number, rows, 100)])
    return job, {key for key in range(rows) if key % 100 >= deletes}


def keys(rows: list[dict[str, Any]]) -> set[int]:
    assert len(rows) == len({row["id"] for row in rows})
    return {row["id"] for row in rows}


@pytest.mark.parametrize("data_files", [2, 5])
def test_delete_files_are_merged_and_data_files_stay(spark: SparkSession, tmp_path: Path, data_files: int) -> None:
    """While micro-batches delete more rows of the same data files. With fewer delete files than data files, those of a
    partition become one.
    """
    job, left = with_many_delete_files(spark, tmp_path, data_files=data_files, deletes=3)
    job.run()
    data = {path for path, _ in job.planned_files()}
    for key in (150, 151, 152):  # the first step is after the first of these
        job.write([("-D", {"id": key, "region": "new"})])
    with rewriting(("begin", "write", "adopt"), MERGING_DELETES) as done:
        job.run()
    (merged,) = done
    assert merged is not None
    assert (merged.touched, merged.written) == (4, 2 if data_files == 2 else 1)
    left -= {150, 151, 152}
    planned = job.planned_files()
    assert {path for path, _ in planned} == data
    assert max(len(deletes) for _, deletes in planned) == 3, "that of the rewrite, and two of later micro-batches"
    assert keys(job.rows()) == keys(by_pyiceberg(job)) == left
    assert job.check_index() is not None
    job.write([("-D", {"id": 60, "region": "new"})])
    job.run()
    assert keys(job.rows()) == left - {60}
    assert job.check_index() is not None


def test_delete_files_of_a_large_table_are_merged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only two of three data files are looked at at once: deletes of all three stay."""
    job, left = with_many_delete_files(spark, tmp_path, data_files=3, deletes=1)
    for key in (10, 11, 110, 111, 210, 211):
        job.write([("-D", {"id": key, "region": "new"})])
        left.discard(key)
    job.run()
    (shared,) = set.intersection(*(set(deletes) for _, deletes in job.planned_files()))
    assert [len(deletes) for _, deletes in job.planned_files()] == [3, 3, 3]
    monkeypatch.setattr(rewritables, "_MOST_FILES", 2)
    sink = only_sink(job)
    for _ in range(40):  # which two files are looked at is drawn by lot
        if (begun := sink.upkeep.begin_rewrite(MERGING_DELETES)) is not None:
            assert sink.upkeep.write_rewrite(begun)
            assert sink.upkeep.end_rewrite(begun) is not None
    assert [(len(deletes), shared in deletes) for _, deletes in job.planned_files()] == [(2, True)] * 3
    assert keys(job.rows()) == keys(by_pyiceberg(job)) == left
    assert job.check_index() is not None


def test_positions_in_data_files_that_are_gone_are_left_out(spark: SparkSession, tmp_path: Path) -> None:
    """Another writer has removed one of the data files of which a delete file has rows."""
    job, left = with_many_delete_files(spark, tmp_path, data_files=3, deletes=3)
    job.run()
    spark.sql(f"DELETE FROM {job.target} WHERE id < 100")
    sink = only_sink(job)
    while (begun := sink.upkeep.begin_rewrite(MERGING_DELETES)) is not None:
        assert sink.upkeep.write_rewrite(begun)
        assert sink.upkeep.end_rewrite(begun) is not None
    positions = job.spark.sql(f"SELECT DISTINCT file_path FROM {job.target}.position_deletes").collect()
    assert {row[0] for row in positions} == {path for path, _ in job.planned_files()}
    assert keys(job.rows()) == keys(by_pyiceberg(job)) == {key for key in left if key >= 100}
    assert job.check_index() is not None


@pytest.mark.parametrize("what", ["compaction", "rollback"])
def test_a_merge_of_delete_files_gives_way(spark: SparkSession, tmp_path: Path, what: str) -> None:
    job, left = with_many_delete_files(spark, tmp_path, data_files=2, deletes=4)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink, MERGING_DELETES)
    if what == "compaction":
        job.compact()
    else:
        # between the look at the table and the commit
        last = job.snapshots()[-1]["snapshot_id"]
        original = IcebergCommitter._send

        def send(self: IcebergCommitter, staged: Any) -> None:
            job.rollback(job.own_ancestors()[0])
            original(self, staged)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IcebergCommitter, "_send", send)
            with pytest.raises(RolledBackError):  # it looks whether it may be sent again
                sink.upkeep.end_rewrite(begun)
        job.call("set_current_snapshot", f"snapshot_id => {last}")
    if what == "compaction":
        assert sink.upkeep.end_rewrite(begun) is None
    assert keys(job.rows()) == left
    assert job.unreferenced_files() == []
    job.write([("-D", {"id": 60, "region": "new"})])
    job.run()
    assert keys(job.rows()) == left - {60}
    assert job.check_index() is not None


@pytest.mark.parametrize("fault", ["before a rewrite", "after a rewrite"])
def test_a_crash_around_the_commit(spark: SparkSession, tmp_path: Path, fault: Any) -> None:
    """The next process goes on with whichever files the table has."""
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(4)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    with crashing(fault), pytest.raises(CrashError):
        sink.upkeep.end_rewrite(begun)
    changes.write(3)
    job.run()
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None


def test_each_file_of_a_large_table_has_its_turn(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    for key in range(3):
        job.write([("+I", {"id": key, "region": "new"})])
    job.run()
    monkeypatch.setattr(rewritables, "_MOST_FILES", 2)
    table = only_sink(job).table
    looks = [[file.file.path for file in next(table.upkeep().rewritables())] for _ in range(40)]
    assert {len(found) for found in looks} == {1, 2}
    assert len({path for found in looks for path in found}) == 3


def test_parts_of_a_list_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewritables, "_MOST_FILES", 3)
    for size in range(12):
        for _ in range(20):
            parts = sorted(rewritables._parts(size))
            assert [number for start, end in parts for number in range(start, end)] == list(range(size))
            assert all(0 < end - start <= 3 for start, end in parts)


def test_the_command_takes_all_parts_of_a_large_table(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    for key in range(5):
        job.write([("+I", {"id": key, "region": "new"})])
    job.run()
    monkeypatch.setattr(rewritables, "_MOST_FILES", 1)
    options = replace(ALL_FILES, least_gain=-(1 << 60))
    monkeypatch.setattr(maintain_command, "options_of", lambda *_, **__: options)
    (planned,) = maintain(spark, job.config(), ["orders"], dry_run=True, where="id >= 0")
    assert planned.rewritten_data_files == 5
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False, where="id >= 0")
    assert (done.error, done.rewritten_data_files) == (None, 5)
    assert job.check_index() is not None
