"""The commands `history`, `show`, `status` and `check` on Delta tables."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from sink import cli
from sink.commands import inspection, time_travel
from sink.commands.time_travel import When
from sink.errors import ConfigError, RowdeltaError, TableError
from sink.spark import session
from sink.targets.delta import history
from sink.targets.delta.log import DeltaLog
from sink.targets.history import Commit
from tests.delta.harness import DeltaJob
from tests.sink.harness import merging_soon

pytestmark = pytest.mark.spark

REQUIRED = "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'delta.feature.domainMetadata' = 'supported')"


def row(key: int, region: str = "eu") -> dict[str, Any]:
    return {"id": key, "region": region}


def position(number: int) -> dict[str, Any]:
    """That after change file `number`, from 0 on; of any files with this time."""
    return {"modified": (1_700_000_000 + number) * 1000}


def commits(job: DeltaJob) -> list[Commit]:
    return list(reversed(time_travel.history(job.spark, job.config(), job.target).commits))


def shown(job: DeltaJob, when: When, *key: str) -> list[dict[str, Any]]:
    found = time_travel.show(job.spark, job.config(), job.target, when, key, 100)
    return sorted(map(json.loads, found.rows), key=lambda row: row["id"])


# history and time travel


def test_rows_as_they_were_and_what_each_commit_did(spark: SparkSession, tmp_path: Path) -> None:
    """Two commits of the sink, one of another program, a RESTORE, and one of the sink after it."""
    job = DeltaJob(spark, tmp_path)
    with pytest.raises(TableError, match="does not exist"):
        shown(job, When())
    job.write([("+I", row(1)), ("+I", row(2))])
    job.run()
    job.write([("-D", row(2)), ("-U", row(1)), ("+U", row(1, "us")), ("+I", row(3))])
    job.run()
    job.sql("DELETE FROM {t} WHERE id = 3")
    found = commits(job)
    first, second = [commit for commit in found if commit.end is not None]
    (deletion,) = [commit for commit in found if commit.operation == "DELETE"]
    old, new = [row(1), row(2)], [row(1, "us"), row(3)]
    job.sql(f"RESTORE TABLE {{t}} TO VERSION AS OF {first.snapshot_id}")
    job.run()  # the second file again
    restored, again = commits(job)[-2:]

    assert (first.by, first.begin, first.rows["+I"]) == ("sink shop", {}, 2)
    assert (first.end or {})["modified"] == position(0)["modified"]
    assert (second.by, second.begin, second.position) == ("sink shop", first.end, second.end)
    assert {kind: count for kind, count in second.rows.items() if count} == {"+I": 1, "-U": 1, "+U": 1, "-D": 1}
    assert deletion.by.startswith("Apache-Spark/")
    assert (deletion.begin, deletion.end, deletion.position) == (None, None, second.end)
    assert (restored.operation, restored.end, restored.position) == ("RESTORE", None, first.end)
    assert (again.by, again.begin) == ("sink shop", first.end)
    assert (again.end or {})["modified"] == position(1)["modified"]
    assert [commit.snapshot_id for commit in commits(job)] == list(range(job.version() + 1))
    assert [commit.time for commit in commits(job)] == sorted(commit.time for commit in commits(job))

    assert shown(job, When()) == new
    for commit, rows in ((first, old), (second, new), (deletion, new[:1]), (restored, old)):
        assert shown(job, When(version=commit.snapshot_id)) == rows
        assert shown(job, When(as_of=commit.time)) == rows
    assert shown(job, When(position=position(0))) == old
    assert shown(job, When(position=position(1))) == new
    before = time_travel.show(spark, job.config(), job.target, When(position=position(0)), (), 10).heading
    assert f"version {restored.snapshot_id} of" in before
    assert f"version {again.snapshot_id} after it has" in before
    with pytest.raises(TableError, match=r"before the first one that is known, .* of version 1 "):
        shown(job, When(position={"modified": 5}))
    with pytest.raises(TableError, match="there is no version 99; it has expired, or never existed"):
        shown(job, When(version=99))
    with pytest.raises(TableError, match="before the earliest version"):
        shown(job, When(as_of=1_000))
    # the key isn't in the table, but in the configuration
    assert shown(job, When(), "3") == new[1:]
    assert shown(job, When(version=first.snapshot_id), "region=eu", "id=2") == old[1:]
    with pytest.raises(ConfigError, match="is not of type bigint"):
        shown(job, When(), "one")


def test_files_and_vectors_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path, tasks=1)
    job.write([("+I", row(key)) for key in range(5)])
    job.write([("-D", row(1)), ("+I", row(9))])
    job.run()
    loaded, changed = [commit for commit in commits(job) if commit.end is not None]
    assert (loaded.files, loaded.counts) == ("+1 data file with 5 rows", {"added-data-files": 1, "added-records": 5})
    assert changed.files == "+1 data file, ~1 deletion vector with 1 row"
    job.sql("OPTIMIZE {t}")
    assert commits(job)[-1].files == "+1 data file, -2 data files with 5 rows"
    assert commits(job)[-1].position == changed.end


def test_a_minor_compaction_is_told_from_a_commit(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    for number in range(4):
        job.write([("+I", row(number))])
    with merging_soon():
        job.run()
    merged = [commit for commit in commits(job) if commit.by == "sink shop, small files merged"]
    assert merged
    for commit in merged:
        before = commits(job)[commit.snapshot_id - 1]
        assert (commit.end, commit.position) == (None, before.position)


def test_versions_that_log_clean_up_has_taken(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    for number in range(3):
        job.write([("+I", row(number))])
        job.run()
    end = commits(job)[-1].end
    job.clean_log()
    job.sql("INSERT INTO {t} VALUES (7, 'eu')")
    newest = job.version()
    found = time_travel.history(spark, job.config(), job.target)
    assert [commit.snapshot_id for commit in found.commits] == [newest, newest - 1]
    assert [commit.position for commit in found.commits] == [end, end]
    last = found.commits[-1]
    assert (last.begin, last.end) == (None, end)
    lines = list(found.lines(9, as_json=False))
    assert lines[-1] == "older versions have expired"
    assert "unknown, the commit before has expired" in "\n".join(lines)
    assert list(found.lines(1, as_json=False))[-1] != lines[-1]
    with pytest.raises(TableError, match="older versions have expired"):
        shown(job, When(position=position(0)))
    with pytest.raises(TableError, match="there is no version 1;"):
        shown(job, When(version=1))


def test_a_long_history_is_read_only_as_far_as_needed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = DeltaJob(spark, tmp_path)
    for number, others in enumerate((10, 5)):
        job.write([("+I", row(number))])
        job.run()
        for _ in range(others):
            job.sql("ALTER TABLE {t} SET TBLPROPERTIES ('delta.logRetentionDuration' = 'interval 40 days')")
    whole = commits(job)
    monkeypatch.setattr(history, "_FIRST_READ", 2)
    read: list[int] = []
    original = DeltaLog._commit_at

    def commit_at(log: DeltaLog, version: int) -> object:
        read.append(version)
        return original(log, version)

    monkeypatch.setattr(DeltaLog, "_commit_at", commit_at)
    found = time_travel.history(spark, job.config(), job.target)
    assert len(list(found.lines(1, as_json=True))) == 1
    assert min(read) > 10
    assert list(reversed(found.commits)) == whole  # in parts, which fit together
    assert min(read) == 0


def test_rows_whose_files_vacuum_has_removed(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write([("+I", row(key)) for key in range(3)])
    job.run()
    old = job.version()
    job.sql("DELETE FROM {t}")
    for file in job.table_folder.glob("*.parquet"):
        file.unlink()
    with pytest.raises(TableError, match=f"the rows of version {old} can't be read; its files may have been removed"):
        shown(job, When(version=old))


def test_on_the_command_line(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "start", lambda _, **how: spark)
    monkeypatch.setattr(session, "stop", lambda _: None)
    job = DeltaJob(spark, tmp_path)
    file = tmp_path / "sink.yaml"
    file.write_text(yaml.safe_dump(job.config().model_dump(exclude_none=True)))

    def command(name: str, *options: str) -> list[str]:
        capsys.readouterr()
        table = () if name == "status" else ("orders",)
        assert cli.main([name, str(file), *table, *options]) == 0
        return capsys.readouterr().out.splitlines()

    assert command("status") == [f"{job.target}: does not exist yet; rowdelta run creates it"]
    job.write([("+I", row(1)), ("+I", row(2))])
    job.run()
    version = job.version()
    first, second, third, orphans, files = command("status")
    assert re.fullmatch(rf"{job.target}: version {version} of [\d: -]+ UTC, \d data files?", first)
    assert json.loads(second.removeprefix("  position: "))["modified"] == position(0)["modified"]
    assert third.startswith("  lag: ")
    assert re.fullmatch(r"  orphans: looked for at [\d: -]+ UTC, again after 7 days", orphans)
    assert re.fullmatch(r"  files: [\d.]+ \w+ on average, at most 0\.0% of their rows are deleted", files)
    heads = [line for line in command("history") if not line.startswith(" ")]
    assert re.fullmatch(rf"[\d: -]+ UTC  version {version}  STREAMING UPDATE by sink shop", heads[0])
    assert re.search(r"version 0  CREATE TABLE by ", heads[-1])
    newest = json.loads(command("history", "--json", "--limit", "1")[0])
    assert (newest["snapshot_id"], newest["rows"]["+I"]) == (version, 2)
    assert [line.split() for line in command("show", "--key", "2")] == [["id", "region"], ["2", "eu"]]
    assert command("show", "--version", "0") == ["no rows"]
    assert cli.main(["show", str(file), "orders", "--at-position", '{"modified": 5}']) == TableError.exit_code


# check


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda job: _file_in(job.table_folder), TableError, "there is no Delta table, but the folder has files"),
        (
            lambda job: job.sql("CREATE TABLE {t} (id BIGINT, region STRING) USING delta"),
            TableError,
            r"ALTER TABLE … SET TBLPROPERTIES \('delta.feature.domainMetadata' = 'supported', "
            r"'delta.enableDeletionVectors' = 'true'\)",
        ),
        (
            lambda job: job.sql(
                "CREATE TABLE {t} (id BIGINT, region STRING) USING delta "
                + REQUIRED.replace(")", ", 'delta.enableChangeDataFeed' = 'true')")
            ),
            TableError,
            "delta.enableChangeDataFeed",
        ),
        (lambda job: _newer(job), TableError, r"newer protocol|protocol has"),
        (lambda job: _icy(job), TableError, "there is no Delta table, but the folder has files"),
    ],
    ids=["not a table", "features", "refused property", "newer protocol", "an Iceberg table"],
)
def test_check_says_what_is_wrong_with_a_table(
    spark: SparkSession, tmp_path: Path, make: Callable[[DeltaJob], Any], error: type[RowdeltaError], text: str
) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write([("+I", row(1))])
    make(job)
    lines: list[str] = []
    with pytest.raises(error, match=text) as raised:
        lines.extend(inspection.check(spark, job.config()))
    assert job.namespace in str(raised.value)
    with pytest.raises(error, match=text):
        job.run()


def _file_in(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "some.parquet").touch()


def _icy(job: DeltaJob) -> None:
    (job.table_folder / "metadata").mkdir(parents=True)
    (job.table_folder / "metadata" / "v1.metadata.json").touch()


def _newer(job: DeltaJob) -> None:
    """Whose protocol no Delta Lake knows."""
    job.sql(f"CREATE TABLE {{t}} (id BIGINT, region STRING) USING delta {REQUIRED}")
    file = job.table_folder / "_delta_log" / f"{1:020}.json"
    protocol = {"minReaderVersion": 4, "minWriterVersion": 8, "readerFeatures": [], "writerFeatures": []}
    file.write_text(json.dumps({"protocol": protocol}) + "\n")


def test_status_of_a_table_that_can_not_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """It doesn't hide the others."""
    job = DeltaJob(spark, tmp_path)
    _newer(job)
    config = job.config()
    other = config.tables[0].model_copy(update={"target": f"{job.catalog}.{job.namespace}.other"})
    lines = list(inspection.status(spark, config.model_copy(update={"tables": [config.tables[0], other]})))
    assert lines[0].startswith(f"{job.changes_folder} -> {job.target}: ")
    assert "protocol" in lines[0]
    assert lines[1:] == [f"{other.target}: does not exist yet; rowdelta run creates it"]


def test_check_of_a_table_that_is_still_to_be_created(spark: SparkSession, tmp_path: Path) -> None:
    job = DeltaJob(spark, tmp_path)
    job.write([("+I", row(1))])
    lines = list(inspection.check(spark, job.config()))
    assert f"{job.changes_folder} -> {job.target}: will be created" in lines
    assert lines[-1] == "ok"
    job.run()
    assert f"{job.changes_folder} -> {job.target}: exists" in list(inspection.check(spark, job.config()))
