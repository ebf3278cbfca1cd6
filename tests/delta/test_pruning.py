"""File pruning: an update whose keys match no file, some files or all files touches those and no other. This is seen in
the log, in its metrics, on disk, and in the files that readers open after it.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sink.spark.versions import to_arrow
from tests.delta.harness import DeltaJob
from tests.delta.readers import Rows, duckdb_with_delta, plain
from tests.sink.harness import Change

pytestmark = pytest.mark.spark


def row(key: int, region: str = "eu") -> dict[str, Any]:
    return {"id": key, "region": region}


def inserts(*keys: int) -> list[Change]:
    return [("+I", row(key)) for key in keys]


def updates(*keys: int, region: str) -> list[Change]:
    return [("+U", row(key, region)) for key in keys]


MICRO_BATCHES: Mapping[str, list[Change]] = {
    "low": inserts(*range(10)),
    "middle": inserts(*range(10, 20)),
    "high": inserts(*range(20, 30)),
    "no file": [*updates(*range(100, 105), region="new"), ("-D", row(999))],
    "some files": [*updates(3, 6, region="us"), ("-D", row(5)), ("-D", row(25))],
    "all files": updates(3, 4, 14, 24, 101, region="uk"),
    "a whole file": [("-D", row(key)) for key in range(10, 20) if key != 14],
}
"""Each is a commit, and writes one data file at most. The first three load the table."""

LOADED = dict.fromkeys(range(30), "eu")
NEW_KEYS = LOADED | dict.fromkeys(range(100, 105), "new")
SOME = {key: region for key, region in NEW_KEYS.items() if key not in (5, 25)} | {3: "us", 6: "us"}
ALL = SOME | dict.fromkeys((3, 4, 14, 24, 101), "uk")
WHOLE = {key: region for key, region in ALL.items() if key == 14 or not 10 <= key < 20}
ROWS_AFTER = {"no file": NEW_KEYS, "some files": SOME, "all files": ALL, "a whole file": WHOLE}
"""Key -> region after a micro-batch."""


@dataclass(frozen=True)
class Commit:
    """What the log says of a micro-batch.

    :param added: the name of the new data file, if there is one.
    :param changed: name -> cardinality of the new vector, for each file that was removed and added again.
    :param gone: names of the files that were removed for good.
    :param before: names of the files that were live before it.
    """

    version: int
    added: str | None
    changed: Mapping[str, int]
    gone: frozenset[str]
    before: frozenset[str]
    metrics: Mapping[str, str]
    time_ms: int


class Table:
    """A table after all micro-batches. Nobody may change it."""

    def __init__(self, job: DeltaJob, seconds: float) -> None:
        self.job = job
        self.seconds = seconds
        self.commits = dict(zip(MICRO_BATCHES, self._commits(), strict=True))

    def _commits(self) -> Iterator[Commit]:
        log = self.job.log
        for version, info in log.history().items():
            path = self.job.table_folder / "_delta_log" / f"{version:020}.json"
            actions = [json.loads(line) for line in path.read_text().splitlines()]
            adds = {unquote(a["add"]["path"]): a["add"] for a in actions if "add" in a}
            removed = {unquote(a["remove"]["path"]) for a in actions if "remove" in a}
            if info["operation"] != "STREAMING UPDATE":
                continue
            new = [Path(path).name for path in adds.keys() - removed]
            assert len(new) <= 1
            yield Commit(
                version,
                new[0] if new else None,
                {Path(p).name: adds[p]["deletionVector"]["cardinality"] for p in adds.keys() & removed},
                frozenset(Path(p).name for p in removed - adds.keys()),
                frozenset(Path(p).name for p, _ in log.snapshot(version - 1).files),
                info["operationMetrics"],
                path.stat().st_mtime_ns // 1_000_000,
            )

    def named(self, *names: str) -> set[str]:
        """The data files that these micro-batches wrote."""
        files = {self.commits[name].added for name in names}
        assert None not in files
        return {file for file in files if file is not None}


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Table:
    job = DeltaJob(spark, tmp_path_factory.mktemp("pruning"), table={"merge_small_files": False}, tasks=1)
    for changes in MICRO_BATCHES.values():
        job.write(changes)
    began = time.monotonic()
    job.run()
    return Table(job, time.monotonic() - began)


# -- the files that a commit touches


def test_no_file_matches(table: Table) -> None:
    """New keys, and deletes of keys that aren't there: nothing but a new file."""
    commit = table.commits["no file"]
    assert commit.before == table.named("low", "middle", "high")
    assert (commit.changed, commit.gone) == ({}, frozenset())
    assert commit.added is not None


def test_some_files_match(table: Table) -> None:
    commit = table.commits["some files"]
    low, high = table.named("low"), table.named("high")
    assert commit.changed == dict.fromkeys(low, 3) | dict.fromkeys(high, 1)
    assert commit.gone == frozenset()
    assert commit.before - commit.changed.keys() == table.named("middle", "no file")


def test_all_files_match(table: Table) -> None:
    commit = table.commits["all files"]
    assert commit.changed.keys() == commit.before == table.named("low", "middle", "high", "no file", "some files")
    cardinalities = {"low": 4, "middle": 1, "high": 2, "no file": 1, "some files": 1}
    assert commit.changed == {name: number for key, number in cardinalities.items() for name in table.named(key)}
    assert commit.gone == frozenset()


def test_a_whole_file_matches(table: Table) -> None:
    """It is removed, and has no vector."""
    commit = table.commits["a whole file"]
    assert commit.gone == table.named("middle")
    assert (commit.changed, commit.added) == ({}, None)


def test_no_data_file_is_rewritten(table: Table) -> None:
    """Each file on disk is the one that its commit added, and is as old."""
    written = {commit.added: commit for commit in table.commits.values() if commit.added is not None}
    on_disk = {path.name: path for path in table.job.table_folder.rglob("*.parquet") if "_delta_log" not in path.parts}
    assert on_disk.keys() == written.keys()
    for name, path in on_disk.items():
        assert path.stat().st_mtime_ns // 1_000_000 <= written[name].time_ms
    for (relative, _), add in table.job.snapshot().files.items():
        assert add["modificationTime"] <= written[Path(relative).name].time_ms
        assert (add.get("deletionVector") is not None) == (json.loads(add["stats"])["tightBounds"] is False)


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_metrics_say_what_the_log_says(table: Table, name: str) -> None:
    commit = table.commits[name]
    said = {key: int(value) for key, value in commit.metrics.items()}
    assert said["numFilesTotal"] == len(commit.before)
    assert said["numTouchedFiles"] == len(commit.changed) + len(commit.gone)
    assert said["numRewrittenFiles"] == len(commit.gone)
    assert said["numAddedFiles"] == (commit.added is not None)
    assert said["numDeletionVectorsUpdated"] == len(commit.changed)
    assert 0 <= said["scanTimeMs"] + said["rewriteTimeMs"] < table.seconds * 1000
    assert min(said["scanTimeMs"], said["rewriteTimeMs"]) >= 0


def test_history_shows_the_metrics(table: Table) -> None:
    assert max(int(commit.metrics["rewriteTimeMs"]) for commit in table.commits.values()) > 0
    shown = {found["version"]: found["operationMetrics"] for found in table.job.sql("DESCRIBE HISTORY {t}")}
    for commit in table.commits.values():
        assert shown[commit.version] == commit.metrics


# -- the files that readers open after it

FILES_READ: list[tuple[str, str, tuple[str, ...]]] = [
    ("no file", "id = 102", ("no file",)),
    ("no file", "id = 12", ("middle",)),
    ("no file", "id = 500", ()),
    ("some files", "id = 3", ("low", "some files")),  # the bounds of the first one still have the old row
    ("some files", "id = 12", ("middle",)),
    ("some files", "region = 'us'", ("some files",)),
    ("some files", "id > 24", ("high", "no file")),
    ("some files", "region IS NULL", ()),
    ("all files", "id = 101", ("no file", "all files")),
    ("all files", "id BETWEEN 7 AND 9", ("low", "all files")),
    ("all files", "id = 29 OR id > 104", ("high", "all files")),
    ("all files", "id > 104", ()),
    ("a whole file", "id = 14", ("all files",)),
    ("a whole file", "id = 12", ("all files",)),
]
"""After which micro-batch, for which rows, the files that have to be read by their bounds."""


def matching(name: str, predicate: str) -> Rows:
    """The rows after a micro-batch for which a predicate is true, by an engine that knows no files."""
    import polars as pl

    rows = pl.DataFrame({"id": ROWS_AFTER[name].keys(), "region": ROWS_AFTER[name].values()})
    return plain(pl.SQLContext(t=rows).execute(f"SELECT * FROM t WHERE {predicate}", eager=True).to_arrow())


def test_spark_reads_the_files_that_may_match(table: Table) -> None:
    for name, predicate, expected in FILES_READ:
        frame = table.job.frame(table.commits[name].version).where(predicate)
        assert plain(to_arrow(frame)) == matching(name, predicate), (name, predicate)
        files = {unquote(Path(urlparse(path).path).name) for path in frame.inputFiles()}
        assert files == table.named(*expected), (name, predicate)
        scan = frame._jdf.queryExecution().executedPlan().collectLeaves().apply(0)
        assert scan.metrics().apply("numFiles").value() == len(expected), (name, predicate)


def test_duckdb_reads_the_files_that_may_match(table: Table) -> None:
    """At the newest version."""
    path = str(table.job.table_folder)
    with duckdb_with_delta() as connection:
        for name, predicate, expected in FILES_READ:
            if name == "a whole file":
                query = f"SELECT * FROM delta_scan('{path}') WHERE {predicate}"
                assert plain(connection.execute(query).to_arrow_table()) == matching(name, predicate)
                _, plan = connection.execute(f"EXPLAIN ANALYZE {query}").fetchall()[0]
                read = re.search(r"Scanning Files:\s+(\d+)/(\d+)", plan)
                assert read is not None, plan
                assert int(read[1]) == len(expected), predicate


# -- VACUUM


def test_vacuum_keeps_what_earlier_versions_need(table: Table, tmp_path: Path) -> None:
    """It refuses to keep less than a week's files. What a crash left, it deletes after that time."""
    folder = shutil.copytree(table.job.table_folder, tmp_path / "t")
    spark, name = table.job.spark, f"delta.`{folder}`"
    with pytest.raises(PySparkException, match=r"(?s)retention.*168 hours"):
        spark.sql(f"VACUUM {name} RETAIN 0 HOURS")
    present = {path for path in folder.rglob("*") if path.suffix in (".parquet", ".bin")}
    left = {folder / "left.parquet", folder / f"deletion_vector_{'0' * 8}-0000-0000-0000-{'0' * 12}.bin"}
    for path in (*left, folder / "new.parquet"):
        path.touch()
    for path in left:
        os.utime(path, (time.time() - 8 * 24 * 3600,) * 2)
    spark.sql(f"VACUUM {name}")
    after = {path for path in folder.rglob("*") if path.suffix in (".parquet", ".bin")}
    assert after == present | {folder / "new.parquet"}
    for micro_batch, rows in ROWS_AFTER.items():
        frame = spark.read.format("delta").option("versionAsOf", table.commits[micro_batch].version).load(str(folder))
        assert {found["id"]: found["region"] for found in to_arrow(frame).to_pylist()} == rows
