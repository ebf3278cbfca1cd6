"""Several tables in one job."""

import gc
import json
import os
import shutil
import weakref
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.config import Config
from sink.config.folders import check_folders
from sink.errors import ConfigError, DataError, RowdeltaError, TemporaryError
from sink.run.pipeline import Pipeline, StartedQuery, open_source
from sink.run.supervisor import Supervisor
from sink.sources.files import FilesSource
from sink.table.microbatch import TableSink
from sink.table.patterns import find_tables
from tests.sink.harness import Job, crashing, java_error
from tests.stack.process import wait_until

pytestmark = pytest.mark.spark


@pytest.mark.timeout(120)
@pytest.mark.parametrize("broken", ["first", "second"])
def test_a_failure_of_one_table_ends_the_job(spark: SparkSession, tmp_path: Path, broken: str) -> None:
    """Files are one query a table. The job must not run on with one of them dead, whichever it is."""
    names = ("first", "second")
    for name in names:
        (tmp_path / name).mkdir()
        record = {"row_kind": "+I", "id": 1, "seq": 1} if name != broken else {"row_kind": "?"}
        path = tmp_path / name / "1.json"
        path.write_text(json.dumps(record) + "\n")
        os.utime(path, (1_700_000_000, 1_700_000_000))
    namespace = f"lake.pipeline_{broken}"
    config = Config.model_validate(
        {
            "sink": {
                "id": "s",
                "checkpoint": str(tmp_path / "s"),
                "trigger": "1 second",
                "on_bad_record": "fail",
                "on_table_error": "stop",
            },
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "unused"}},
            "tables": [
                {
                    "source": str(tmp_path / name),
                    "target": f"{namespace}.{name}",
                    "key": ["id"],
                    "columns": {"id": "bigint"},
                    "order_by": ["seq bigint"],
                }
                for name in names
            ],
        }
    )
    with pytest.raises(DataError, match=rf"{namespace}\.{broken}: 1 bad record"):
        Pipeline(spark, config).run()


def test_tables_may_be_taken_in_while_others_are_looked_at(spark: SparkSession, tmp_path: Path) -> None:
    """The streams' threads go through all tables, without a lock."""
    config = files_config(tmp_path, "pipeline_taken_in", **{"$1": f"{tmp_path}/cdc/(.*)"})
    source = open_source(spark, config, {})
    supervisor = Supervisor(spark, config, source, {})
    (tmp_path / "cdc" / "first").mkdir(parents=True)
    assert len(supervisor.enter(find_tables(config, source))) == 1
    looking = iter(supervisor.members.values())
    (tmp_path / "cdc" / "second").mkdir()
    assert len(supervisor.enter(find_tables(config, source))) == 1
    assert len(list(looking)) == 1
    assert len(supervisor.members) == 2
    supervisor.close()


def files_config(folder: Path, namespace: str, **sources: str) -> Config:
    """Table name -> directory."""
    return Config.model_validate(
        {
            "sink": {"id": "s", "checkpoint": str(folder / "s")},
            "source": {"type": "files", "format": "row-kind", "options": {"path_format": "json"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "unused"}},
            "tables": [
                {
                    "source": source,
                    "target": f"lake.{namespace}.{name}",
                    "key": ["id"],
                    "columns": {"id": "bigint"},
                    "order_by": ["seq bigint"],
                }
                for name, source in sources.items()
            ],
        }
    )


def write_one(folder: Path) -> str:
    folder.mkdir()
    (folder / "1.json").write_text(json.dumps({"row_kind": "+I", "id": 1, "seq": 1}) + "\n")
    return str(folder)


def test_a_file_system_that_does_not_answer(spark: SparkSession, tmp_path: Path) -> None:
    """It is the error of its table, and one to run again for."""
    away = "hdfs://nowhere.invalid:8020/cdc"
    config = files_config(tmp_path, "pipeline_away", here=write_one(tmp_path / "here"), away=away)
    with pytest.raises(TemporaryError, match=rf"directory {away} can't be listed: .*nowhere\.invalid"):
        Pipeline(spark, config).run()
    assert [row.id for row in spark.table("lake.pipeline_away.here").collect()] == [1]
    with pytest.raises(TemporaryError, match=rf"directory {away} can't be listed"):
        Pipeline(spark, files_config(tmp_path, "pipeline_away", **{"$1": f"{away}/(.*)"}))


@pytest.mark.parametrize(("owner", "method"), [(TableSink, "apply_batch"), (FilesSource, "touched")])
def test_our_own_mistakes_are_no_reason_to_run_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """Whether in a table's work or in a micro-batch around it."""

    def mistaken(*_: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(owner, method, mistaken)
    config = files_config(tmp_path, f"pipeline_{method}", a=write_one(tmp_path / "a"))
    with pytest.raises(RowdeltaError, match="an unexpected error: KeyError: 'no such thing'") as caught:
        Pipeline(spark, config).run()
    assert caught.value.exit_code == 1


def test_spark_is_not_told_what_java_said(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would search the text with a regular expression that overflows its stack, and the query's thread would end."""
    long = "\n".join(f"\tat org.apache.Something.method(Something.java:{number})" for number in range(5_000))
    mistake = java_error(spark, "java.lang.RuntimeException", long)

    def mistaken(*_: object) -> None:
        raise mistake

    has_ended, told = Pipeline._has_ended, list[str]()

    def noted(self: Pipeline, run: StartedQuery) -> bool:
        query = run.query
        try:
            return has_ended(self, run)
        finally:
            if query is not None and query.exception() is not None:
                told.append(str(query.exception()))

    monkeypatch.setattr(TableSink, "apply_batch", mistaken)
    monkeypatch.setattr(Pipeline, "_has_ended", noted)
    with pytest.raises(RowdeltaError):
        Pipeline(spark, files_config(tmp_path, "pipeline_java", a=write_one(tmp_path / "a"))).run()
    (text,) = told
    assert "_FailedError: Py4JJavaError" in text
    assert "Something.java" not in text


def test_mistakes_are_told_also_when_the_job_stops(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: object) -> None:
        pipeline.stop()
        raise KeyError("no such thing")

    monkeypatch.setattr(FilesSource, "touched", mistaken)
    pipeline = Pipeline(spark, files_config(tmp_path, "pipeline_stopping", a=write_one(tmp_path / "a")))
    with pytest.raises(RowdeltaError, match="an unexpected error: KeyError: 'no such thing'"):
        pipeline.run()


def test_a_micro_batch_that_the_end_overtakes_is_not_done(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has is read again, even if Spark looks only at what it has noted."""
    config = files_config(tmp_path, "pipeline_overtaken", a=write_one(tmp_path / "a"))
    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "apply", lambda supervisor, *_: supervisor.close())
        with pytest.raises(RowdeltaError):
            Pipeline(spark, config).run()
    assert list(tmp_path.rglob("offsets/0")) != []
    assert list(tmp_path.rglob("commits/0")) == []
    Pipeline(spark, config).run()
    assert spark.table("lake.pipeline_overtaken.a").count() == 1


def test_hundreds_of_queries_are_looked_at_in_turn(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for so short a time that Spark, which counts milliseconds, would refuse it."""
    monkeypatch.setattr("sink.run.pipeline._POLL_SECONDS", 0.2 / 300)
    Pipeline(spark, files_config(tmp_path, "pipeline_many", a=write_one(tmp_path / "a"))).run()
    assert spark.table("lake.pipeline_many.a").count() == 1


def test_the_log_line_counts_all_changes(spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also those that never reach the delta writer, because a later one of their key made them superfluous."""
    source = Path(write_one(tmp_path / "a"))
    changes = [{"row_kind": "+U" if seq % 3 else "-U", "id": seq % 7, "seq": seq} for seq in range(2, 902)]
    (source / "1.json").write_text("".join(json.dumps(change) + "\n" for change in changes))
    caplog.set_level("INFO", "rowdelta")
    Pipeline(spark, files_config(tmp_path, "pipeline_counts", a=str(source))).run()
    assert "batch 0: -U 300 +U 600 |" in caplog.text
    left = {change["id"]: change["row_kind"] for change in changes}
    assert sorted(row.id for row in spark.table("lake.pipeline_counts.a").collect()) == sorted(
        number for number, kind in left.items() if kind == "+U"
    )


def test_columns_may_be_named_like_what_is_known_of_their_file(spark: SparkSession, tmp_path: Path) -> None:
    names = {"id": "bigint", "source": "string", "_name": "string", "_modified": "bigint"}
    job = Job(spark, tmp_path, columns=names)
    row = {"id": 1, "source": "a", "_name": "b", "_modified": 3}
    job.write([("+I", row)])
    job.run()
    assert job.rows() == [row]
    # a new checkpoint reads them again: what is before the mark is left out
    shutil.rmtree(job.checkpoint)
    job.write([("+U", {**row, "source": "c"}), ("+I", {**row, "id": 2})])
    job.run()
    assert job.rows() == [{**row, "source": "c"}, {**row, "id": 2}]


@pytest.mark.parametrize("tasks", ["1", "2"])
def test_what_failed_in_a_task_is_said(spark: SparkSession, tmp_path: Path, tasks: str) -> None:
    """One task, and two that exchange rows."""
    config = files_config(tmp_path, f"pipeline_crash_{tasks}", a=write_one(tmp_path / "a"))
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    assert before is not None
    spark.conf.set(name, tasks)
    try:
        with crashing("in a task"), pytest.raises(TemporaryError, match=r"nothing was applied\. .*crash in a task$"):
            Pipeline(spark, config).run()
    finally:
        spark.conf.set(name, before)


def test_a_pipeline_that_has_ended_leaves_nothing_behind(spark: SparkSession, tmp_path: Path) -> None:
    """No ended query stays in the JVM or in Python. A process may run many queries, since they begin anew when tables
    are found or come back.
    """
    job = Job(spark, tmp_path)
    job.write([("+I", {"id": 1, "region": "eu"})])
    pipeline = job.pipeline()
    pipeline.run()
    ended = weakref.ref(pipeline)
    del pipeline
    job.run()  # some references go to the newest query, whichever that is

    def is_gone() -> bool:
        assert spark._jvm is not None
        spark._jvm.System.gc()
        gc.collect()
        return ended() is None

    assert wait_until(is_gone, 60)


# mistakes that come out when files, catalogs and folders are looked at: `check` names them, and a run ends with the
# same


def refusal(spark: SparkSession, config: Config) -> str:
    """What `check` ends with; a run must refuse the same."""
    with pytest.raises(ConfigError) as checked:
        list(inspection.check(spark, config))
    with pytest.raises(ConfigError) as ran:
        Pipeline(spark, config).run()
    assert str(ran.value) == str(checked.value)
    return str(checked.value)


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "inferred"])
def test_a_source_that_is_a_file(spark: SparkSession, tmp_path: Path, columns: bool) -> None:
    job = Job(spark, tmp_path, configure_columns=columns)
    file = job.write([("+I", {"id": 1, "region": "eu"})])
    job.table = {"source": str(file)}
    if columns:
        assert f"{file} is a file, expected a directory of change files" in refusal(spark, job.config())
    else:
        # a run may infer columns before it looks for changes
        with pytest.raises(ConfigError, match="is a file, expected a directory"):
            list(inspection.check(spark, job.config()))


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "inferred"])
def test_json_files_where_parquet_is_assumed(spark: SparkSession, tmp_path: Path, columns: bool) -> None:
    job = Job(spark, tmp_path, file_format="json", configure_columns=columns)
    job.write([("+I", {"id": 1, "region": "eu"})])
    config = job.config()
    config.source.options.pop("path_format")
    if columns:
        assert "has only JSON files (999 ä.json, …). Set path_format: json." in refusal(spark, config)
    else:
        with pytest.raises(ConfigError, match=r"source\.options\.path_format"):
            list(inspection.check(spark, config))
        with pytest.raises(ConfigError, match=r"source\.options\.path_format"):
            Pipeline(spark, config).run()


@pytest.mark.parametrize("place", ["sink", "index", "catalog"])
def test_folders_that_can_not_be_made(spark: SparkSession, tmp_path: Path, place: str) -> None:
    job = Job(spark, tmp_path)
    (tmp_path / "taken").touch()
    folder = tmp_path / "taken" / "below"
    if place == "sink":
        job.checkpoint = folder
    elif place == "index":
        job.index_location = str(folder)
    config = job.config()
    if place == "catalog":
        config.catalogs["lake"]["warehouse"] = folder.as_uri()
    key = {"sink": "sink.checkpoint", "index": "index.location", "catalog": "catalogs.lake.warehouse"}[place]
    message = refusal(spark, config)
    assert message.startswith(f"{key}: got ")
    assert f"{tmp_path / 'taken'} is a file. Name another." in message


def test_looking_at_folders_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check_folders(spark, job.config())
    assert sorted(tmp_path.rglob("*")) == before


def test_workers_are_started_ahead_unless_there_may_be_nothing_to_do(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    trigger = "available-now"
    monkeypatch.setattr("sink.run.pipeline.start_workers", lambda _: started.append(trigger))
    job = Job(spark, tmp_path, deletes="equality")
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    assert started == ["available-now"]  # the table is new
    job.run()
    assert started == ["available-now"]
    trigger = "1 minute"
    job.sections = {"sink": {"trigger": trigger}}
    job.pipeline()
    assert started == ["available-now", "1 minute"]


@pytest.mark.parametrize("dtype", ["array<int>", "map<string,int>", "struct<a:int>", "variant"])
def test_order_columns_need_an_order(spark: SparkSession, tmp_path: Path, dtype: str) -> None:
    job = Job(spark, tmp_path, table={"order_by": [f"seq {dtype}"]})
    message = refusal(spark, job.config())
    assert message.startswith(f"tables[0].order_by[0]: got seq of type {dtype}, which has no order; expected a number")


def test_a_pattern_whose_folder_is_missing(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path)
    job.table = {"source": str(tmp_path / "nowhere" / "(.*)"), "target": f"lake.{job.namespace}.$1"}
    job.sections = {"sink": {"dead_letter_table": job.dead_letters}}
    with pytest.raises(ConfigError, match=rf"tables\[0\]\.source: there is no folder {tmp_path}/nowhere\. Create it"):
        list(inspection.check(spark, job.config()))
