"""Minor compactions merge small files by themselves. The table's rows stay the same, and reads stay fast."""

import datetime as dt
import itertools
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from deltawriters import move
from deltawriters.keyindex import IndexSlice, Located
from deltawriters.keyindex.versions import IndexLostError
from sink.errors import FencedError, TemporaryError
from sink.table import keyindex
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.values import ChangeSet
from tests.sink.harness import Changes, Job, before_commit, before_rewrite, crashing, merging_soon

pytestmark = pytest.mark.spark

EVERY = 3
BOTH = pytest.mark.parametrize("version", [2, 3])


def new_job(spark: SparkSession, folder: Path, version: int, **arguments: Any) -> Job:
    return Job(spark, folder, properties={"format-version": str(version)}, **arguments)


def numbers(job: Job) -> list[int]:
    """The numbers of the minor compactions, in order."""
    found = [snapshot["summary"].get("rowdelta.minor-compaction") for snapshot in job.snapshots()]
    return [int(number) for number in found if number is not None]


def data_files(job: Job) -> list[str]:
    return [file["file_path"] for file in job.files() if file["content"] == 0]


@pytest.mark.parametrize(
    ("on_driver", "partition_by", "version"), [(True, (), 3), (True, ("bucket(2, id)",), 2), (False, (), 3)]
)
def test_small_files_are_merged(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    version: int,
    partition_by: tuple[str, ...],
    on_driver: bool,
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, version, partition_by=partition_by)
    changes = Changes(job)
    changes.write(EVERY)
    with merging_soon(EVERY, on_driver=on_driver):
        job.run()
        partitions = 2 if partition_by else 1
        assert numbers(job) == [1]
        assert len(data_files(job)) == partitions
        assert job.rows() == changes.expected()
        assert job.check_index() is not None
        assert re.search(r": merged [1-9]\d* small files?(, [1-9]\d* delete files?)? into [12] \| \d", caplog.text)
        # level by level: the third one also merges the files of the first two
        changes.write(2 * EVERY)
        job.run()
        assert numbers(job) == [1, 2, 3]
        assert len(data_files(job)) == partitions
        assert job.rows() == changes.expected()
        assert job.check_index() is not None
        # the ones before are left to the next of the second level
        changes.write(EVERY + 1)
        job.run()
        assert numbers(job) == [1, 2, 3, 4]
        assert len(data_files(job)) == 3 * partitions
    deletes = [file for file in job.files() if file["content"] == 1]
    assert len(deletes) <= 3 * partitions, "a v2 table's delete files are merged with them"
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    assert "catching up" not in caplog.text, "the index knows where the rows are now"
    assert "others" not in caplog.text


@pytest.mark.versions
def test_runs_of_one_micro_batch_have_them_too(spark: SparkSession, tmp_path: Path) -> None:
    """As a scheduler would start them: commits are counted across runs."""
    job = new_job(spark, tmp_path, 3)
    changes = Changes(job)
    with merging_soon(EVERY):
        for _ in range(2 * EVERY):
            changes.write(1)
            job.run()
    assert numbers(job) == [1, 2]
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


def test_what_does_not_pay_yet_is_looked_at_again_soon(spark: SparkSession, tmp_path: Path) -> None:
    """The first load is one of the commits, but its file is too large to be one of those to merge."""
    job = new_job(spark, tmp_path, 3, tasks=1)
    loaded = {key: f"{key * 7919}" for key in range(20_000)}
    job.write([("+I", {"id": key, "region": region}) for key, region in loaded.items()])
    with merging_soon(EVERY, fewest=EVERY):
        job.run()
        for number in range(EVERY):
            loaded[number] = "changed"
            job.write([("+U", {"id": number, "region": "changed"})])
        job.run()
    assert numbers(job) == [1]
    assert len(data_files(job)) == 2
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(loaded.items())]


@pytest.mark.parametrize("partition_by", [(), ("region",)])
def test_deletes_alone_are_merged_too(spark: SparkSession, tmp_path: Path, partition_by: tuple[str, ...]) -> None:
    """The driver writes them (v2), and tasks write nothing."""
    job = new_job(spark, tmp_path, 2, tasks=1, partition_by=partition_by)
    job.write([("+I", {"id": key, "region": "eu"}) for key in range(20)])
    for key in range(8):
        job.write([("-D", {"id": key, "region": "eu"})])
    with merging_soon(2, enough=4):
        job.run()
    assert len(numbers(job)) >= 2
    assert sum(file["content"] == 1 for file in job.files()) < 4
    assert [row["id"] for row in job.rows()] == list(range(8, 20))


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize(("version", "commits"), [(2, 4), (3, 7)])
def test_not_before_there_are_enough_files(
    spark: SparkSession, tmp_path: Path, version: int, commits: int, runs: bool
) -> None:
    """In v2 a file of deletes comes with each but the first.

    :param runs: one for each commit.
    """
    job = new_job(spark, tmp_path, version, tasks=1)
    changes = Changes(job)
    with merging_soon(2, enough=7):
        for number in range(1, commits + 1):
            changes.write(1)
            if runs or number >= commits - 1:
                job.run()
                assert numbers(job) == ([1] if number == commits else [])
    assert job.rows() == changes.expected()


def test_large_files_are_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    """A first load's file isn't written again because of a few small files, even if some of its rows are deleted."""
    job = new_job(spark, tmp_path, 3, tasks=1)
    loaded = {key: f"{key * 7919}" for key in range(20_000)}
    job.write([("+I", {"id": key, "region": region}) for key, region in loaded.items()])
    with merging_soon(4):
        job.run()
        (large,) = data_files(job)
        for number in range(4):
            loaded |= {number: "changed", 20_000 + number: "new"}
            job.write([("+U", {"id": key, "region": loaded[key]}) for key in (number, 20_000 + number)])
            job.run()
    assert numbers(job) == [1]
    assert len(data_files(job)) == 3, "the large one, the merged ones, and the one after"
    assert large in data_files(job)
    assert job.rows() == [{"id": key, "region": region} for key, region in sorted(loaded.items())]


def test_rows_keep_their_identity(spark: SparkSession, tmp_path: Path) -> None:
    """Format version 3: a row that is only moved keeps its row id, and the sequence number of its last change (spec,
    "Row Lineage").
    """
    job = new_job(spark, tmp_path, 3)
    changes = Changes(job)

    def lineage() -> list[tuple[Any, ...]]:
        frame = spark.sql(f"SELECT id, _row_id, _last_updated_sequence_number FROM {job.target}")
        return sorted(tuple(row) for row in frame.collect())

    seen: list[list[tuple[Any, ...]]] = []
    with merging_soon(EVERY):
        for number in range(1, 4):  # the third minor compaction moves rows a second time
            changes.write(EVERY)
            with before_rewrite(lambda: seen.append(lineage())):
                job.run()
            assert numbers(job)[-1] == len(seen) == number
            assert lineage() == seen[-1]
    assert len({row_id for _, row_id, _ in lineage()}) == len(lineage())


@BOTH
def test_values_of_all_types(spark: SparkSession, tmp_path: Path, version: int) -> None:
    fields: list[dict[str, Any]] = [
        {"id": 1, "name": "id", "required": True, "type": "uuid"},
        {"id": 2, "name": "amount", "required": False, "type": "decimal(38, 10)"},
        {"id": 3, "name": "at", "required": False, "type": "timestamptz"},
        {"id": 4, "name": "local", "required": False, "type": "timestamp"},
        {"id": 5, "name": "day", "required": False, "type": "date"},
        {"id": 6, "name": "raw", "required": False, "type": "binary"},
        {"id": 7, "name": "ratio", "required": False, "type": "double"},
        {
            "id": 8,
            "name": "tags",
            "required": False,
            "type": {"type": "list", "element-id": 9, "element": "string", "element-required": False},
        },
    ]
    columns = {
        "id": "uuid",
        "amount": "decimal(38,10)",
        "at": "timestamp",
        "local": "timestamp_ntz",
        "day": "date",
        "raw": "binary",
        "ratio": "double",
        "tags": "array<string>",
    }
    job = new_job(spark, tmp_path, version, columns=columns, configure_columns=False, partition_by=("bucket(2, id)",))
    job.create_table(fields)
    rows = {
        n: {
            "id": f"{n:08x}-9abc-def0-8234-56789abcdef0",
            "amount": None if n % 3 else Decimal("9999999999999999999999999999.9999999999"),
            "at": dt.datetime(1969, 12, 31, 23, 59, 59, n, tzinfo=dt.UTC),
            "local": dt.datetime(2026, 3, 29, 1, 30, 0, n),
            "day": dt.date(1, 1, 1 + n),
            "raw": bytes([0xFF, n]),
            "ratio": float("inf") if n % 2 else -0.0,
            "tags": [None, [], ["", None, "ä"]][n % 3],
        }
        for n in range(12)
    }
    with merging_soon(EVERY):
        for number in range(EVERY):
            job.write([("+U", row) for n, row in rows.items() if n % EVERY <= number])
            job.run()
    assert numbers(job) == [1]
    assert len(data_files(job)) == 2

    def shown(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"at": row["at"].astimezone(dt.UTC), "ratio": str(row["ratio"])}

    assert [shown(row) for row in job.rows()] == [shown(row) for row in rows.values()]
    assert job.check_index() is not None


def test_files_of_an_earlier_schema_are_left(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, 3, table={"schema_changes": "evolve"}, file_format="json", configure_columns=False)
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "long"},
            {"id": 2, "name": "region", "required": False, "type": "string"},
        ]
    )
    changes = Changes(job)
    with merging_soon(EVERY):
        changes.write(2)
        job.run()
        spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note string")
        changes.write(2)
        job.run()
        assert numbers(job) == []
        changes.write(1)
        job.run()
    assert numbers(job) == [1]
    expected = [row | {"note": None} for row in changes.expected()]
    assert job.rows() == expected


def test_a_column_of_the_partitioning_may_be_widened(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Iceberg's partition specs have the columns' types."""
    job = new_job(spark, tmp_path, 3, tasks=1, partition_by=("tenant",), file_format="json", configure_columns=False)
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "long"},
            {"id": 2, "name": "tenant", "required": True, "type": "int"},
        ]
    )
    for number in range(16):
        job.write([("+I", {"id": number * 5 + tenant, "tenant": tenant}) for tenant in range(5)])
    commits = itertools.count(1)

    def widen() -> None:
        if next(commits) == 9:
            spark.sql(f"ALTER TABLE {job.target} ALTER COLUMN tenant TYPE bigint")

    with merging_soon(4, enough=4), before_commit(widen, times=16):
        job.run()
    assert next(commits) > 16
    assert [row["id"] for row in job.rows()] == list(range(80))
    assert len(data_files(job)) < 40
    assert "small files not merged" not in caplog.text


def test_it_can_be_switched_off(spark: SparkSession, tmp_path: Path) -> None:
    job = new_job(spark, tmp_path, 2, table={"merge_small_files": False})
    Changes(job).write(EVERY)
    with merging_soon(EVERY):
        job.run()
    assert numbers(job) == []


@pytest.mark.parametrize(
    ("disturbance", "version"), [("append", 3), ("delete", 2), ("delete", 3), ("compaction", 3), ("rollback", 3)]
)
def test_others_commit_meanwhile(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, disturbance: str
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, version)
    changes = Changes(job)
    changes.write(EVERY)
    expected = changes.expected
    actions: dict[str, Callable[[], object]] = {
        "append": lambda: job.append([{"id": -1, "region": "theirs"}]),
        "delete": lambda: spark.sql(f"DELETE FROM {job.target} WHERE id = 1"),
        "compaction": job.compact,
        "rollback": lambda: job.rollback(job.own_ancestors()[-1]),
    }
    with merging_soon(EVERY):
        with before_rewrite(actions[disturbance]):
            job.run()
        changes.write(2)
        job.run()
    theirs = {
        "append": [{"id": -1, "region": "theirs"}, *expected()],
        "delete": [row for row in expected() if row["id"] != 1],
    }
    assert job.rows() == theirs.get(disturbance, expected())
    if disturbance != "append":
        assert f"{job.target}: small files not merged, tried again later: " in caplog.text
    assert job.unreferenced_files() == []
    job.check_deletes()


@pytest.mark.parametrize("error", [TemporaryError("the store is away"), IndexLostError("other files are live")])
def test_an_error_before_the_commit_leaves_no_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As of a Delta table. Iceberg's committer has none of them."""
    job = new_job(spark, tmp_path, 3)
    changes = Changes(job)
    changes.write(EVERY)

    refused: list[object] = []

    def fails(*_: object) -> None:
        refused.append(error)
        raise error

    with merging_soon(EVERY), monkeypatch.context() as patch:
        patch.setattr(IcebergCommitter, "rewrite", fails)
        with suppress(TemporaryError):
            job.run()
    assert refused
    changes.write(1)
    job.run()
    assert job.rows() == changes.expected()
    assert job.unreferenced_files() == []


@pytest.mark.parametrize("touches", [True, False])
def test_another_run_commits_meanwhile(spark: SparkSession, tmp_path: Path, touches: bool) -> None:
    """The position that the other one stored stays, and the one that is late stops.

    :param touches: the other one deletes rows of the files that are merged, so they stay too.
    """
    job = new_job(spark, tmp_path, 3)
    changes = Changes(job)
    changes.write(EVERY if touches else EVERY + 1)  # the last one meets the merge of the others
    more: list[dict[str, Any]] = []
    other = job.second_driver()

    def run_other() -> None:
        if touches:
            changes.write(1)
        else:
            more.append({"id": 1000, "region": "theirs"})
            job.write([("+I", more[0])])
        with merging_soon(100):
            other.run()

    with merging_soon(EVERY):
        with before_rewrite(run_other):
            if touches:
                job.run()
            else:
                with pytest.raises(FencedError):
                    job.run()
        assert numbers(job) == ([] if touches else [1])
        assert job.rows() == [*changes.expected(), *more]
        before = job.current_snapshot()
        other.run()
        assert job.current_snapshot() == before, "nothing is applied twice"
        changes.write(1)
        other.run()
    assert job.rows() == [*changes.expected(), *more]
    assert job.unreferenced_files() == []


@pytest.mark.parametrize(("fault", "version"), [("before a rewrite", 3), ("after a rewrite", 2)])
def test_a_crash(spark: SparkSession, tmp_path: Path, version: int, fault: Any) -> None:
    job = new_job(spark, tmp_path, version)
    changes = Changes(job)
    changes.write(EVERY + 1)  # the last one meets the merge of the others
    with merging_soon(EVERY):
        with crashing(fault), pytest.raises(TemporaryError, match="crash"):
            job.run()
        assert numbers(job) == ([1] if fault == "after a rewrite" else [])
        assert job.rows() == changes.expected()
        changes.write(1)
        job.run()
        assert job.rows() == changes.expected()
        assert job.check_index() is not None
        changes.write(EVERY)
        job.run()
    assert numbers(job) == [1, 2]
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    job.check_deletes()


def test_dead_files_are_not_listed_for_ever(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit writes the list, and each merge makes it longer."""
    monkeypatch.setattr(keyindex, "_DEAD_UNTIL_LOOKED", 4)
    job = new_job(spark, tmp_path, 3)
    changes = Changes(job)
    listed = []
    with merging_soon(2):
        for _ in range(12):
            changes.write(2)
            job.run()
            manifest = newest(job)
            listed.append(len(job.index_version(manifest).dead))
            assert job.check_index() is not None
    assert numbers(job) == list(range(1, 13))
    assert max(listed) <= 10, "of some 30 files that are gone"
    assert job.rows() == changes.expected()


def newest(job: Job) -> Path:
    """The index version that was written last."""
    return max((job.index_folder / "versions").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("change", ["partitions", "SET TBLPROPERTIES ('format-version' = '3')"])
def test_the_table_changes_meanwhile(spark: SparkSession, tmp_path: Path, change: str) -> None:
    """Facts about the files from before are not true any more."""
    job = new_job(spark, tmp_path, 2)
    job.properties = {"format-version": "2", "write.delete.mode": "merge-on-read"}
    changes = Changes(job)
    changes.write(4 * EVERY)

    def disturb() -> None:
        if change == "partitions":
            jvm = spark.sparkContext._jvm
            assert jvm is not None
            job.java_table().updateSpec().addField(
                jvm.org.apache.iceberg.expressions.Expressions.bucket("id", 2)
            ).commit()
        else:
            spark.sql(f"ALTER TABLE {job.target} {change}")
        spark.sql(f"DELETE FROM {job.target} WHERE id = 1")  # so the files stay as they are until the next time

    with merging_soon(EVERY), before_rewrite(disturb):
        job.run()
        changes.write(EVERY)
        job.run()
    assert numbers(job), "there were some afterwards"
    expected = [row for row in changes.expected() if row["id"] != 1]
    assert [(row["id"], row["region"]) for row in job.rows()] == [(row["id"], row["region"]) for row in expected]
    job.check_deletes()
    assert job.check_index() is not None


def columns_of(job: Job) -> list[tuple[Any, ...]]:
    return [(row["id"], row["region"]) for row in job.rows()]


@pytest.mark.parametrize(("when", "version"), [(before_commit, 2), (before_rewrite, 3)])
def test_a_column_is_added_while_files_are_written(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int, when: Any
) -> None:
    """The snapshot would say that the files have it, and later minor compactions look for it in them."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, version)
    changes = Changes(job)
    changes.write(EVERY)
    with merging_soon(EVERY):
        with when(lambda: spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note string")):
            job.run()
        assert ("small files not merged" in caplog.text) == (when is before_rewrite)
        caplog.clear()
        for _ in range(3):
            changes.write(EVERY)
            job.run()
    assert "small files not merged" not in caplog.text
    assert len(numbers(job)) >= 3
    assert columns_of(job) == [(row["id"], row["region"]) for row in changes.expected()]
    assert job.check_index() is not None


def test_files_of_other_columns_are_merged_too(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Iceberg's own retry of a commit came upon a new schema, only the files themselves tell which columns they
    have.
    """
    job = new_job(spark, tmp_path, 2)
    changes = Changes(job)
    changes.write(EVERY - 1)
    original = IcebergCommitter._stage

    def alter() -> None:
        spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note string")

    def late(self: IcebergCommitter, request: ChangeSet) -> Any:
        return original(self, replace(request, written_for=None))

    monkeypatch.setattr(IcebergCommitter, "_stage", late)
    with merging_soon(EVERY):
        job.run()
        changes.write(1)
        with before_commit(alter):
            job.run()
        changes.write(EVERY)
        job.run()
    assert "small files not merged" not in caplog.text
    assert numbers(job)
    assert columns_of(job) == [(row["id"], row["region"]) for row in changes.expected()]
    assert job.unreferenced_files() == []


def test_commits_from_before_are_looked_at_as_far_as_needed(spark: SparkSession, tmp_path: Path) -> None:
    """A table may have thousands that were never merged."""
    job = new_job(spark, tmp_path, 3, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(8)
    job.run()
    old = data_files(job)
    job.table = {}
    with merging_soon(2):
        changes.write(3)
        job.run()
    assert numbers(job) == [1, 2]
    left = set(data_files(job)) & set(old)
    assert len(left) == 5, "the last four commits were merged, and nothing older"
    assert job.rows() == changes.expected()


@pytest.mark.parametrize("on_driver", [True, False])
def test_rows_of_a_partition_become_files_of_the_usual_size(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_driver: bool
) -> None:
    """The result doesn't depend on how files are read and dealt out to tasks."""
    monkeypatch.setattr(move, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(move, "RUN_ENTRIES", 2)
    job = new_job(spark, tmp_path, 3, tasks=1)
    changes = Changes(job)
    changes.write(2 * EVERY)
    with merging_soon(2 * EVERY, on_driver=on_driver):
        job.run()
        assert numbers(job) == [1]
        assert len(data_files(job)) == 1
        (merged,) = spark.table(f"{job.target}.files").where("content = 0").collect()
        target = 2 * merged["file_size_in_bytes"]
        spark.sql(f"ALTER TABLE {job.target} SET TBLPROPERTIES ('write.target-file-size-bytes' = '{target}')")
        changes.write(2 * EVERY)
        job.run()
    assert numbers(job) == [1, 2]
    sizes = [row["file_size_in_bytes"] for row in spark.table(f"{job.target}.files").where("content = 0").collect()]
    assert len(sizes) > 1
    assert max(sizes) < 2 * target, sizes
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    job.check_deletes()


def test_deletes_that_iceberg_dropped_by_itself(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It drops delete files that are older than all data, and doesn't say so in the commit that replaces the data."""
    job = new_job(spark, tmp_path, 2, tasks=1)
    kept = dict.fromkeys(range(1, 6), "new")
    job.write([("+I", {"id": number, "region": "new"}) for number in range(2)])
    job.write(
        [("+I", {"id": 2, "region": "new"}), ("+I", {"id": 3, "region": "new"}), ("-D", {"id": 0, "region": "new"})]
    )
    job.write([("+I", {"id": number, "region": "new"}) for number in range(4, 6)])
    with merging_soon(EVERY):
        job.run()
        assert numbers(job) == [1]
        assert [file["content"] for file in job.files()] == [0], "what it is about"
        for number in range(2 * EVERY):
            kept[1] = f"changed {number}"
            job.write([("+U", {"id": 1, "region": kept[1]})])
        job.run()
    assert numbers(job) == [1, 2, 3], "of which the last looks at what the first did"
    assert "small files not merged" not in caplog.text
    assert job.rows() == [{"id": number, "region": region} for number, region in sorted(kept.items())]


def test_snapshots_expire_before_a_restart(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit that stored the position is gone then, and what the minor compaction after it said of the index still
    counts.
    """
    caplog.set_level(logging.INFO, "rowdelta")
    job = new_job(spark, tmp_path, 3)
    changes = Changes(job)
    changes.write(EVERY)
    with merging_soon(EVERY):
        job.run()
        assert numbers(job) == [1]
        job.expire_snapshots()
        assert len(job.snapshots()) == 1
        caplog.clear()
        changes.write(1)
        job.run()
    assert "index" not in caplog.text
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


@BOTH
def test_an_index_that_lacks_rows_is_found_out(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
) -> None:
    """Rows that it doesn't know would be lost. Format version 3 says how many there are, in version 2 the delete files
    say it.
    """
    job = new_job(spark, tmp_path, version)
    changes = Changes(job)
    changes.write(EVERY)
    probe = IndexSlice.probe

    def lossy(*arguments: Any) -> Located:
        found = probe(*arguments)
        # several versions of a row ask for the same live one
        others = (found.file != found.file[0]) | (found.pos != found.pos[0])
        return Located(found.query[others], found.file[others], found.pos[others], found.files)

    with merging_soon(EVERY), monkeypatch.context() as patch:
        patch.setattr(IndexSlice, "probe", lossy)  # on the driver, so in minor compactions only
        job.run()
    assert "building the key index again" in caplog.text
    assert numbers(job) == []
    assert job.rows() == changes.expected()
    with merging_soon(EVERY):
        changes.write(EVERY)
        job.run()
    assert numbers(job) == [1]
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
