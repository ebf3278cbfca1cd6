"""What other writers leave in a table, and what they do at the worst moment."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import pytest
from pyspark.sql import SparkSession

from sink.errors import TableError, TemporaryError
from sink.targets.delta import live_files
from sink.targets.delta.catalog import DeltaCatalogs
from sink.targets.delta.table import DeltaTable
from tests.delta.harness import DeltaJob, When, before_commit
from tests.delta.test_target import inserts, row
from tests.faults.plugin import Seen
from tests.rewrites import only_sink, rewritten_files

pytestmark = pytest.mark.spark


def opened(job: DeltaJob) -> DeltaTable:
    """The table as another process sees it."""
    table = DeltaCatalogs(job.spark, job.config()).load(job.target)
    assert table is not None
    return table


def test_files_without_statistics(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    spark.conf.set("spark.databricks.delta.stats.collect", "false")
    try:
        job.sql("INSERT INTO {t} SELECT /*+ COALESCE(1) */ * FROM VALUES (3, 'x'), (4, 'x'), (5, 'x')")
    finally:
        spark.conf.unset("spark.databricks.delta.stats.collect")
    job.write([("-D", row(3)), ("+U", row(4, "us"))])
    job.run()
    assert job.rows() == [row(1), row(2), row(4, "us"), row(5, "x")]
    job.check()
    job.write([("-D", row(5))])
    job.run()
    assert job.vectors() == {}
    assert job.rows() == [row(1), row(2), row(4, "us")]
    job.check()


def test_files_of_one_name_in_several_partitions(spark: SparkSession, tmp_path: Path) -> None:
    """Spark names files so in a folder of Parquet files that becomes a Delta table."""
    job = DeltaJob(spark, tmp_path)
    folder = str(job.table_folder)
    frame = spark.sql("SELECT id, IF(id < 3, 'a/b=c %', 'us') AS region FROM range(0, 6, 1, 1)")
    frame.write.partitionBy("region").parquet(folder)
    names = [path.name for path in job.table_folder.rglob("*.parquet")]
    assert len(names) == 2
    assert len(set(names)) == 1
    spark.sql(f"CONVERT TO DELTA parquet.`{folder}` PARTITIONED BY (region string)")
    job.sql(
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.feature.domainMetadata' = "
        "'supported')"
    )
    job.write([("-D", row(0)), ("+U", row(5, "eu")), ("+U", row(1, "us"))])
    job.run()
    expected = {1: "us", 2: "a/b=c %", 3: "us", 4: "us", 5: "eu"}
    assert job.rows() == [row(key, region) for key, region in expected.items()]
    job.check(readers=("delta-rs", "DuckDB"))  # polars takes the folder's name for the value
    assert job.check_index() is not None


def test_files_whose_names_are_encoded(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    folder = str(job.table_folder)
    spark.sql("SELECT id, 'x' AS region FROM range(0, 4, 1, 1)").write.parquet(folder)
    (file,) = job.table_folder.glob("*.parquet")
    file.rename(file.with_name("part 1%é.parquet"))
    for crc in job.table_folder.glob(".*.crc"):
        crc.unlink()
    spark.sql(f"CONVERT TO DELTA parquet.`{folder}`")
    job.sql(
        "ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.feature.domainMetadata' = "
        "'supported')"
    )
    job.write([("-D", row(0)), ("+U", row(1, "us"))])
    job.run()
    assert job.rows() == [row(1, "us"), row(2, "x"), row(3, "x")]
    assert job.check_index() is not None


@pytest.mark.parametrize("deletes", ["position", "copy-on-write"])
def test_files_whose_columns_differ_in_case(
    spark: SparkSession, tmp_path: Path, deletes: Literal["position", "copy-on-write"]
) -> None:
    """`CONVERT TO DELTA` takes the names of a metastore, which may be in lower case, and leaves those of the files."""
    job = DeltaJob(spark, tmp_path, deletes=deletes, tasks=1)
    spark.sql("SELECT id AS ID, 'x' AS Region FROM range(0, 4, 1, 1)").write.parquet(str(job.table_folder))
    spark.sql(f"CONVERT TO DELTA parquet.`{job.table_folder}` NO STATISTICS")
    first = job.table_folder / "_delta_log" / f"{0:020}.json"
    first.write_text(first.read_text().replace("ID", "id").replace("Region", "region"))
    for path in first.parent.rglob("*"):
        if path.is_file() and path != first:
            path.unlink()
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()  # type: ignore[union-attr]
    assert job.rows() == [row(n, "x") for n in range(4)]
    job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.feature.domainMetadata' = 'supported')")
    if deletes == "position":
        job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    job.write([("+U", row(0, "us")), ("-D", row(1))])
    job.run()
    expected = [row(0, "us"), row(2, "x"), row(3, "x")]
    assert job.rows() == expected
    sink = only_sink(job)
    assert sink.upkeep.end_rewrite(rewritten_files(sink)) is not None
    assert len(job.snapshot().files) == 1
    assert job.rows() == expected
    assert job.check_index() is not None


def test_a_file_that_the_log_names_by_two_names(spark: SparkSession, tmp_path: Path) -> None:
    """A commit adds it with a full path. OPTIMIZE removes it by a name with a scheme, and the sink reads both
    commits.
    """
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write(inserts(1, 2))
    job.run()
    sink = only_sink(job)
    (add,) = job.snapshot().files.values()
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": False}
    again = {**add, "path": str(job.table_folder / add["path"]), "dataChange": False}
    log_file = job.table_folder / "_delta_log" / f"{job.version() + 1:020}.json"
    log_file.write_text("\n".join(map(json.dumps, ({"remove": remove}, {"add": again}))))
    table = sink.table
    base = table.snapshot_id()
    assert len(list(table.live_files())) == 1
    table.refresh()
    assert [file.path for file in table.live_files()] == [again["path"]]
    assert table.changes_since(base, set()) is not None
    job.append([row(3, "x")])
    job.sql("OPTIMIZE {t}")
    table.refresh()
    (left,) = table.live_files()
    assert Path(left.path).parent == job.table_folder
    assert left.path != again["path"]


def test_times_without_a_zone_stay_where_they_are(spark: SparkSession, tmp_path: Path) -> None:
    """Each reader takes them for times of its own zone, so a rewrite, which names the zone, would change them."""
    job = DeltaJob(spark, tmp_path, tasks=1, columns={"id": "bigint", "at": "timestamp"}, partition_by=("at",))
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    job.write([("+I", {"id": n, "at": moment}) for n in range(2)])
    job.run()
    sink = only_sink(job)
    table = sink.table
    assert len(next(table.upkeep().rewritables())) == 1
    log_file = job.table_folder / "_delta_log" / f"{job.version() + 1:020}.json"
    (add,) = job.snapshot().files.values()
    (name,) = add["partitionValues"]
    again = {**add, "partitionValues": {name: "2026-01-02 03:04:05"}, "dataChange": False}
    log_file.write_text(json.dumps({"add": again}))
    table.refresh()
    assert len(list(table.live_files())) == 1
    assert list(table.upkeep().rewritables()) == [[]]


def test_copy_on_write_stops_at_times_without_a_zone(spark: SparkSession, tmp_path: Path) -> None:
    """It would write them as times of UTC. The message says how they get a zone."""
    columns = {"id": "bigint", "at": "timestamp"}
    job = DeltaJob(spark, tmp_path, tasks=1, columns=columns, partition_by=("at",), deletes="copy-on-write")
    moments = [datetime(2026, 1, day, 3, 4, 5, tzinfo=UTC) for day in (1, 2)]
    job.write(
        [("+I", {"id": n, "at": moment}) for moment in moments for n in range(10 * moment.day, 10 * moment.day + 2)]
    )
    job.run()
    log_file = job.table_folder / "_delta_log" / f"{job.version() + 1:020}.json"
    add = next(add for add in job.snapshot().files.values() if "2026-01-01T" in str(add["partitionValues"]))
    (name,) = add["partitionValues"]
    log_file.write_text(
        json.dumps({"add": {**add, "partitionValues": {name: "2026-01-01 03:04:05"}, "dataChange": False}})
    )
    job.write([("+U", {"id": 20, "at": moments[0]})])
    job.run()
    job.write([("-D", {"id": 10, "at": None})])
    with pytest.raises(TableError, match=r"in a partition \(at\) whose time has no zone.*UPDATE"):
        job.run()
    job.sql("UPDATE {t} SET at = at WHERE id IN (10, 11)")
    job.run()
    assert job.rows() == [{"id": 11, "at": moments[0]}, {"id": 20, "at": moments[0]}, {"id": 21, "at": moments[1]}]


def test_a_file_with_a_full_path_inside_the_table(spark: SparkSession, tmp_path: Path) -> None:
    """Delta's replay of the log gives it a scheme, and the commit doesn't."""
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    (add,) = job.snapshot().files.values()
    path = add["path"]
    remove = {"path": path, "deletionTimestamp": 1, "dataChange": False}
    again = {**add, "path": str(job.table_folder / path), "dataChange": False}
    log_file = job.table_folder / "_delta_log" / f"{job.version() + 1:020}.json"
    log_file.write_text("\n".join(map(json.dumps, ({"remove": remove}, {"add": again}))))
    job.write([("+U", row(1, "us"))])
    job.run()
    assert job.rows() == [row(1, "us"), row(2)]
    job.write([("+U", row(2, "us"))])
    job.run()
    assert job.rows() == [row(1, "us"), row(2, "us")]


def test_small_files_without_statistics_are_not_merged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints leave them out if `delta.checkpoint.writeStatsAsJson` is false. Delta 3.3 then doesn't know them."""
    job = DeltaJob(spark, tmp_path)
    for number in range(3):
        job.write(inserts(number))
    job.run()
    table = opened(job)
    found = table.upkeep().merge_candidates("rowdelta.shop", lambda commits, files: True)
    assert sum(map(len, found.partitions.values())) == 3
    bare = {path: {key: add[key] for key in add if key != "stats"} for path, add in table.live.items()}
    monkeypatch.setattr(DeltaTable, "live", bare)
    assert not table.upkeep().merge_candidates("rowdelta.shop", lambda commits, files: True).partitions


def test_a_commit_that_the_table_has_not_seen_yet(spark: SparkSession, tmp_path: Path) -> None:
    """The log is read up to its newest version, which may be newer than the one that the table was refreshed to."""
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    table = opened(job)
    base = table.snapshot_id()
    job.sql("INSERT INTO {t} VALUES (3, 'x')")
    table.refresh()
    job.sql("INSERT INTO {t} VALUES (4, 'x')")
    appended = table.changes_since(base, set())
    assert appended is not None
    assert len(appended.files) == 1
    job.sql("DELETE FROM {t}")
    changes = table.changes_since(base, set())
    assert changes is not None
    assert len(changes.files) == 1
    assert not changes.removed
    assert table.snapshot_id() == base + 1


def test_a_busy_writer_does_not_starve_the_sink(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it does: the keys are looked up in what it changed, and the micro-batch isn't written again. Else one
    that takes longer than the pauses between its commits would never be committed.
    """
    caplog.set_level(logging.INFO, "rowdelta")
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(1, 7)))
    job.run()
    job.write([("+U", row(1, "us")), ("-D", row(2)), ("+I", row(7)), ("-D", row(8))])
    statements = [
        "INSERT INTO {t} VALUES (1, 'x'), (8, 'x'), (100, 'x')",
        "MERGE INTO {t} USING (SELECT explode(array(1, 2, 3, 7)) AS id) s ON {t}.id = s.id "
        "WHEN MATCHED THEN UPDATE SET region = 'm' WHEN NOT MATCHED THEN INSERT (id, region) VALUES (s.id, 'm')",
        "DELETE FROM {t} WHERE id IN (1, 4)",
        "OPTIMIZE {t}",
        "UPDATE {t} SET region = 'o' WHERE id IN (5, 7, 8)",
    ]
    waiting = iter(statements)
    with before_commit(lambda: job.sql(next(waiting)), times=len(statements)) as ran:
        job.run()
    assert len(ran) == len(statements)
    assert "writing again" not in caplog.text
    expected = [row(1, "us"), row(3, "m"), row(5, "o"), row(6), row(7), row(100, "x")]
    assert job.rows() == expected
    job.check(since=job.version())
    assert job.check_index() is not None
    job.write([("+U", row(found["id"], "last")) for found in expected])
    job.run()
    assert job.rows() == [row(found["id"], "last") for found in expected]
    job.check(since=job.version())


def test_a_writer_that_never_stops_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sink.targets.delta.commit._RETRIES", 1)
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    job.write([("+U", row(1, "us"))])
    with (
        before_commit(lambda: job.sql("INSERT INTO {t} VALUES (9, 'x')"), times=9),
        pytest.raises(TemporaryError, match="other writers kept committing") as raised,
    ):
        job.run()
    assert "commit.retry" not in str(raised.value), "a Delta table has no such setting"
    job.run()
    assert row(1, "us") in job.rows()
    job.check()


Table = dict[int, str]
"""Key -> region."""


@dataclass(frozen=True)
class Meanwhile:
    """What others do to the keys from `k` on: `k` to `k + 5` are there.

    :param statement: `{t}` is the table.
    :param then: the table after it, from the table before it.
    """

    statement: Callable[[int], str]
    then: Callable[[int, Table], Table]


MEANWHILE = {
    "append of the same key": Meanwhile(
        lambda k: f"INSERT INTO {{t}} VALUES ({k + 1}, 'x'), ({k + 8}, 'x')",
        lambda k, rows: rows | {k + 1: "x", k + 8: "x"},
    ),
    "merge": Meanwhile(
        lambda k: (
            f"MERGE INTO {{t}} USING (SELECT id FROM range({k}, {k + 8})) s ON {{t}}.id = s.id "
            f"WHEN MATCHED AND s.id < {k + 3} THEN DELETE WHEN MATCHED THEN UPDATE SET region = 'merged' "
            "WHEN NOT MATCHED THEN INSERT (id, region) VALUES (s.id, 'new')"
        ),
        lambda k, rows: (
            without(rows, k, k + 1, k + 2)
            | dict.fromkeys(range(k + 3, k + 6), "merged")
            | dict.fromkeys(range(k + 6, k + 8), "new")
        ),
    ),
    "delete": Meanwhile(
        lambda k: f"DELETE FROM {{t}} WHERE id IN ({k + 1}, {k + 3})", lambda k, rows: without(rows, k + 1, k + 3)
    ),
    "update": Meanwhile(
        lambda k: f"UPDATE {{t}} SET region = 'o' WHERE id > {k} AND id < {k + 5}",
        lambda k, rows: rows | dict.fromkeys(range(k + 1, k + 5), "o"),
    ),
    "optimize": Meanwhile(lambda _: "OPTIMIZE {t}", lambda _, rows: rows),
    "vacuum": Meanwhile(lambda _: "VACUUM {t}", lambda _, rows: rows),
    "set property": Meanwhile(
        lambda _: "ALTER TABLE {t} SET TBLPROPERTIES ('delta.checkpointInterval' = '70')", lambda _, rows: rows
    ),
    "overwrite": Meanwhile(
        lambda k: f"INSERT OVERWRITE {{t}} SELECT id, 'o' FROM range({k + 1}, {k + 30})",
        lambda k, _: dict.fromkeys(range(k + 1, k + 30), "o"),
    ),
    "add column": Meanwhile(lambda _: "ALTER TABLE {t} ADD COLUMN more string", lambda _, rows: rows),
    "truncate": Meanwhile(lambda _: "TRUNCATE TABLE {t}", lambda _, __: {}),
}
"""In an order in which each finds its keys."""


def without(rows: Table, *keys: int) -> Table:
    return {key: region for key, region in rows.items() if key not in keys}


def content(job: DeltaJob) -> Table:
    rows = [(found["id"], found["region"]) for found in job.check(since=job.version())]
    assert len(dict(rows)) == len(rows), "a key twice"
    return dict(rows)


# all four pairs passed for each; two of them save minutes of each run
@pytest.mark.fault(
    "Other writers",
    "INSERT, MERGE, DELETE, UPDATE, OPTIMIZE, VACUUM, INSERT OVERWRITE, TRUNCATE and ALTER of a Delta table, between "
    "the look-up of keys and a commit",
    "Both commit. The later one decides about a key",
)
@pytest.mark.parametrize(("when", "partition_by"), list(zip(get_args(When), [(), ("region",)], strict=True)))
def test_others_commit_between_look_up_and_commit(
    spark: SparkSession, tmp_path: Path, when: When, partition_by: tuple[str, ...], seen: Seen
) -> None:
    """One after the other, each to keys of its own and to files of all."""
    job = DeltaJob(spark, tmp_path, partition_by=partition_by)
    rows = {10 * number + key: "eu" for number in range(len(MEANWHILE)) for key in range(6)}
    job.write(inserts(*rows))
    job.run()
    for number, (name, others) in enumerate(MEANWHILE.items()):
        k = 10 * number
        assert rows.keys() >= {*range(k + 1, k + 6)}, name
        # an insert right after a -D would make it look like half of a move, whose row others have changed
        job.write([("-D", row(k + 2)), ("-D", row(k)), ("+U", row(k + 1, "us")), ("+I", row(k + 9))])
        with before_commit(partial(job.sql, others.statement(k)), when) as ran:
            job.run()
        assert len(ran) == 1, name
        rows = without(others.then(k, rows), k, k + 2) | {k + 1: "us", k + 9: "eu"}
        assert content(job) == rows, name
        # VACUUM's own versions are in nobody's way, so the index was made for an earlier version than the last one
        assert job.check_index() is not None or name == "vacuum", name
    job.append([row(key, "x") for key in range(500, 503)])
    rows |= dict.fromkeys(range(500, 503), "x")
    job.write([("+U", row(key, "last")) for key in rows])
    job.run()
    assert content(job) == dict.fromkeys(rows, "last")
    assert job.check_index() is not None
    seen("Table = source, with what the other writer made of keys that the source didn't change since")


@pytest.mark.fault(
    "Other writers",
    "RESTORE of a Delta table between the look-up of keys and the commit, and between two runs",
    "What was taken back is read again",
)
@pytest.mark.parametrize(("when", "to"), list(zip(get_args(When), ["TIMESTAMP", "VERSION"], strict=True)))
def test_restore_takes_the_position_back(spark: SparkSession, tmp_path: Path, when: When, to: str, seen: Seen) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    early = job.version()
    (moment,) = (str(found["timestamp"]) for found in job.sql("DESCRIBE HISTORY {t} LIMIT 1"))
    job.write([("+U", row(1, "us")), ("+I", row(3))])
    job.run()
    job.write([("-D", row(2)), ("+I", row(4))])
    as_of = early if to == "VERSION" else f"'{moment}'"
    with before_commit(lambda: job.sql(f"RESTORE TABLE {{t}} TO {to} AS OF {as_of}"), when) as ran:
        job.run()  # it opens the table again, and reads again what followed
    assert len(ran) == 1
    job.run()
    assert job.rows() == [row(1, "us"), row(3), row(4)]
    assert "RESTORE" in job.operations()
    job.check()
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {early}")
    job.run()
    assert job.rows() == [row(1, "us"), row(3), row(4)], "what followed is read again"
    job.check()
    seen("The same run went on, and so did the next. Table = source")


def test_restore_to_before_the_sink(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.create("id bigint, region string")
    job.sql("INSERT INTO {t} VALUES (1, 'x')")
    before = job.version()
    job.write(inserts(1, 2))
    job.run()
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {before}")
    with pytest.raises(TableError, match="before this sink's first commit"):
        job.run()


def test_a_clone_over_the_table(spark: SparkSession, tmp_path: Path) -> None:
    """It keeps the table's id and its domains, so the position is not that of the rows."""
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1, 2))
    job.run()
    backup = f"delta.`{tmp_path / 'backup'}`"
    job.sql(f"CREATE TABLE {backup} SHALLOW CLONE {{t}}")
    job.write(inserts(3))
    job.run()
    job.sql("DELETE FROM {t}")
    job.sql(f"CREATE OR REPLACE TABLE {{t}} SHALLOW CLONE {backup}")
    job.write(inserts(4))
    with pytest.raises(TableError, match="CLONE"):
        job.run()


def test_what_belongs_to_a_position_goes_back_with_it(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(1))
    job.run()
    table, name = opened(job), "rowdelta.shop.streamed"
    table.set_property(name, "[0]")
    early = job.version()
    job.write(inserts(2))
    job.run()
    table.refresh()
    table.set_property(name, "[0, 1]")
    assert table.property(name) == "[0, 1]"
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {early}")
    again = opened(job)
    assert again.position("rowdelta.shop") is not None
    assert again.property(name) == "[0]"
    job.run()
    assert json.loads(str(opened(job).property(name))) == [0]
    assert job.rows() == [row(1), row(2)]


def test_the_dead_letter_table_is_taken_back(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, file_format="json")
    job.sections = {"sink": {"on_bad_record": "dead-letter", "dead_letter_table": job.dead_letters}}
    bad = '{"row_kind": "+I", "seq": 99, "id": "no number", "region": "eu"}\n'
    letters = f"delta.`{job.warehouse / job.namespace / 'dead_letters'}`"
    job.write_text(bad)
    job.run()
    spark.sql(f"RESTORE TABLE {letters} TO VERSION AS OF 0")
    job.write_text(bad.replace("no number", "none"))
    job.run()
    assert [json.loads(found["value"])["id"] for found in spark.sql(f"SELECT value FROM {letters}").collect()] == [
        "none"
    ]


def test_vacuum_and_log_clean_up(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = DeltaJob(spark, tmp_path)
    job.write(inserts(*range(2000)))
    job.run()
    job.write([("-D", row(key)) for key in range(0, 2000, 3)])
    job.run()
    job.clean_log()  # which leaves the newest commit
    job.vacuum()
    job.write([("+U", row(1, "us")), ("-D", row(2))])
    job.run()
    assert "key index built" not in caplog.text.split("2000 keys")[-1]
    assert len(job.check(since=job.version())) == 1332
    assert job.check_index() is not None


def test_very_many_commits_of_others(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many to be held in memory. A RESTORE among them is found nevertheless."""
    monkeypatch.setattr(live_files, "_MOST_COMMITS", 2)
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write(inserts(1, 2))
    job.run()
    version = job.version()
    job.write([("+U", row(1, "us"))])
    job.run()
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {version}")
    for number in range(4):
        job.append([row(10 + number, "theirs")])
    job.sql("DELETE FROM {t} WHERE id = 10")
    job.write([("-D", row(2)), ("+U", row(11, "ours"))])
    job.run()
    expected = [row(1, "us"), row(11, "ours"), row(12, "theirs"), row(13, "theirs")]
    assert job.rows() == expected
    job.check()


def test_a_feature_that_somebody_adds_while_the_sink_runs(spark: SparkSession, tmp_path: Path) -> None:
    """A change of the protocol alone: no property is another one."""
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write(inserts(1))
    job.run()
    table = opened(job)
    layout = table.layout
    job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.feature.vacuumProtocolCheck' = 'supported')")
    table.refresh()
    assert table.layout != layout
    assert table.layout.properties == layout.properties


def test_row_ids_of_a_table_that_only_lists_the_feature(spark: SparkSession, tmp_path: Path) -> None:
    """A file keeps its first id, also if the sink has just written it (PROTOCOL.md, "Row Tracking")."""
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    job.create("id BIGINT, region STRING", properties={"delta.feature.rowTracking": "supported"})
    job.write(inserts(1, 2))
    job.write(inserts(3, 4))
    job.write([("-D", row(1)), ("-D", row(3))])
    job.run()
    first: dict[str, int] = {}
    for file in sorted((job.table_folder / "_delta_log").glob("*.json")):
        for action in map(json.loads, file.read_text().splitlines()):
            for kind in ("add", "remove"):
                if kind in action:
                    assert action[kind]["baseRowId"] == first.setdefault(
                        action[kind]["path"], action[kind]["baseRowId"]
                    )
    assert len(first) == 2
    assert job.rows() == [row(2), row(4)]


def test_another_driver_replaces_a_commit_of_the_sink(spark: SparkSession, tmp_path: Path) -> None:
    """Not all stores refuse the second writer of a version. The rows of the lost commit are read again."""
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write(inserts(1, 2))
    job.run()
    replaced = job.version() + 1

    def replace() -> None:
        add = next(iter(job.snapshot().files.values()))
        name = f"theirs-{Path(add['path']).name}"
        frame = spark.createDataFrame([(7, "theirs")], "id bigint, region string").coalesce(1)
        frame.write.parquet(str(tmp_path / "theirs"))
        (written,) = (tmp_path / "theirs").glob("*.parquet")
        size = written.rename(job.table_folder / name).stat().st_size
        theirs = {**add, "path": name, "size": size, "stats": json.dumps({"numRecords": 1}), "tags": {}}
        log_file = job.table_folder / "_delta_log" / f"{replaced:020}.json"
        log_file.write_text("\n".join(map(json.dumps, ({"commitInfo": {"txnId": "theirs"}}, {"add": theirs}))))
        for checksum in (log_file.with_name(f".{log_file.name}.crc"), log_file.with_suffix(".crc")):
            checksum.unlink(missing_ok=True)

    job.write([("+U", row(1, "us")), ("+I", row(3))])

    def later() -> None:
        if job.version() == replaced:
            replace()

    job.write([("-D", row(2)), ("+U", row(3, "us"))])
    with before_commit(later, times=2):
        job.run()
    assert job.rows() == [row(1, "us"), row(3, "us"), row(7, "theirs")]
    job.check()
