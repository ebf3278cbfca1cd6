"""Records that can't be applied are kept with their reason, exactly once, or stop the job. None is dropped silently."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from sink.config import Config
from sink.errors import ConfigError, DataError, TemporaryError
from sink.results import TaskResult
from sink.sources import files as source_of_files
from sink.sources.files import FilesSource
from sink.sources.source import TableBatch, WholeFile
from sink.spark import exchange, writing
from sink.spark.tasks import decode, write
from sink.spark.versions import to_arrow
from sink.spark.writing import is_read_by_each
from sink.table import guards, task_plans
from sink.table.patterns import resolve_tables
from sink.table.plan import plan_table
from sink.table.written import sum_up
from sink.targets.catalogs import Catalogs
from tests.sink.harness import Job, crashing, decode_with, fill_disk_in_task

pytestmark = pytest.mark.spark

COLUMNS = {"id": "bigint", "region": "string", "amount": "decimal(12,2)", "created_at": "timestamp"}
GOOD = '{"row_kind": "+I", "seq": 1, "id": 1, "region": "eu", "amount": "1.50", "created_at": "2026-01-02T03:04:05Z"}'

BAD_RECORDS = [
    # a line of a JSON change file, its error class, and a part of the reason
    ("this is not JSON", "unparseable", "not a JSON object"),
    ("[1, 2]", "unparseable", "not a JSON object"),
    ("null", "unparseable", "not a JSON object"),
    ('{"row_kind": "+I", "seq": 2, "id": 2', "unparseable", "not a JSON object"),
    (GOOD.replace('"+I"', '"+X"'), "unknown_operation", "row_kind is '+X'; expected one of +I, -U, +U, -D"),
    (GOOD.replace('"row_kind": "+I", ', ""), "unknown_operation", "row_kind is missing"),
    (GOOD.replace('"id": 1', '"id": null'), "null_key", "key column id is null or missing"),
    (GOOD.replace('"id": 1, ', ""), "null_key", "key column id is null or missing"),
    (GOOD.replace('"seq": 1, ', ""), "missing_order", "order column seq is null or missing"),
    (GOOD.replace('"seq": 1', '"seq": "x"'), "missing_order", "order column seq"),
    (GOOD.replace('"id": 1', '"id": "one"'), "type_mismatch", "column id: 'one' does not fit bigint"),
    (GOOD.replace('"id": 1', '"id": 9223372036854775808'), "type_mismatch", "does not fit bigint"),
    (GOOD.replace('"1.50"', '"1.505"'), "type_mismatch", "column amount: '1.505' does not fit decimal(12,2)"),
    (GOOD.replace("1.50", "9" * 37 + ".00"), "type_mismatch", "does not fit decimal(12,2)"),
    (
        GOOD.replace("2026-01-02T03:04:05Z", "2026-13-02"),
        "type_mismatch",
        "column created_at: '2026-13-02' does not fit timestamp",
    ),
]


def good(number: int, kind: str = "+I", region: str = "eu") -> tuple[str, dict[str, Any]]:
    return kind, {"id": number, "region": region, "amount": None, "created_at": None}


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path, columns=COLUMNS)


@pytest.fixture
def json_job(job: Job) -> Job:
    job.file_format = "json"
    return job


def failing(job: Job) -> Job:
    job.sections = {"sink": {"on_bad_record": "fail"}}
    return job


def dead_letters(job: Job) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = to_arrow(job.spark.table(job.dead_letters)).to_pylist()
    return rows


def ids(job: Job) -> list[int]:
    return [row["id"] for row in job.rows()]


def test_each_bad_record_goes_to_the_dead_letters_with_its_reason(json_job: Job) -> None:
    json_job.table = {"schema_changes": "ignore"}  # or the column would grow
    path = json_job.write_text("\n".join([GOOD, *(line for line, _, _ in BAD_RECORDS)]) + "\n")
    json_job.write([good(7)])
    json_job.run()
    assert ids(json_job) == [1, 7], "the good records around them are applied"
    letters = {letter["value"].decode(): letter for letter in dead_letters(json_job)}
    assert len(letters) == len(dead_letters(json_job)) == len(BAD_RECORDS)
    for line, error_class, reason in BAD_RECORDS:
        letter = letters[line]
        assert (letter["error_class"], letter["table"]) == (error_class, json_job.target), line
        assert reason in letter["reason"]
        assert letter["source"].endswith("%20ä.json"), "as a URI"
        assert letter["time"] is not None
    assert path.name.endswith(" ä.json")


def test_a_line_that_is_no_text_is_kept_byte_by_byte(json_job: Job) -> None:
    path = json_job.write_text(GOOD + "\n")
    line = b'{"row_kind": "+I", "seq": 2, "id": 2, "region": "\xff\xc3"}'
    (path.parent / "bytes.json").write_bytes(line + b"\n")
    json_job.run()
    assert ids(json_job) == [1]
    assert [letter["value"] for letter in dead_letters(json_job)] == [line]


def test_only_key_and_partition_of_a_delete_must_fit(json_job: Job) -> None:
    """The other columns of a -D are not needed, and many sources don't send them."""
    json_job.write_text(GOOD + '\n{"row_kind": "-D", "seq": 2, "id": 1, "amount": "not a number"}\n')
    json_job.run()
    assert ids(json_job) == []
    assert dead_letters(json_job) == []


def test_a_format_that_fails_on_everything_makes_no_dead_letters_of_a_topic(
    json_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few records that no format foresees may follow each other, however they are cut into micro-batches and runs.
    More are more likely a plug-in or a library that doesn't fit. Then the position stays where it is.
    """

    def more(lines: int) -> None:
        first = len(list(json_job.changes_folder.iterdir())) * 100
        json_job.write_text("".join(GOOD.replace('"id": 1', f'"id": {first + n}') + "\n" for n in range(lines)))

    with monkeypatch.context() as patch:
        patch.setattr(guards, "_MOST_UNDECODED", 3)
        patch.setattr(decode, "decode", decode_with(TypeError("unexpected keyword")))
        for _ in range(3):  # as a topic may begin
            more(1)
        json_job.run()
        assert [(d["error_class"], d["reason"]) for d in dead_letters(json_job)] == [
            ("decoder_failed", "the decoder failed: TypeError: unexpected keyword")
        ] * 3
        more(1)
        with pytest.raises(DataError, match=r"failed on all of the last 4 records.*TypeError.*Correct the format"):
            json_job.run()
        patch.setattr(decode, "decode", decode_with(NameError("no_such_name")))
        with pytest.raises(
            ConfigError, match=r"format row-kind fails in its own code: NameError.*No record is at fault"
        ):
            json_job.run()
    assert len(dead_letters(json_job)) == 3
    json_job.run()
    assert ids(json_job) == [300]
    with monkeypatch.context() as patch:
        patch.setattr(guards, "_MOST_UNDECODED", 3)
        patch.setattr(decode, "decode", decode_with(TypeError("unexpected keyword")))
        more(1)  # what was read in between counts
        json_job.run()
        more(4)
        with pytest.raises(DataError, match="failed on all of the last 5 records"):
            json_job.run()
    assert len(dead_letters(json_job)) == 4
    json_job.run()
    assert ids(json_job) == [300, 500, 501, 502, 503]


def test_a_format_that_fails_on_much_of_a_micro_batch(json_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade may break all deletes, and what else there is hides it."""
    json_job.write([good(number) for number in range(14)])
    json_job.write([*(good(n) for n in range(14, 26)), *(good(n, "-D") for n in range(12))])
    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode", decode_with(TypeError("unexpected keyword"), b'"-D"'))
        with pytest.raises(DataError, match=r"with TypeError on 12 of the 24 records .*Correct the format"):
            json_job.run()
    assert ids(json_job) == list(range(14))
    assert dead_letters(json_job) == []
    json_job.run()
    assert ids(json_job) == list(range(12, 26))


def test_a_small_file_of_bad_records_does_not_stop_the_table(json_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would repeat its micro-batch for ever: files can't be dealt out anew."""
    json_job.write([good(1)])
    json_job.run()
    json_job.write([good(2, region="bad"), good(3, region="bad")])
    json_job.write([good(4)])
    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode", decode_with(TypeError("unexpected keyword"), b"bad"))
        json_job.run()
    assert ids(json_job) == [1, 4]
    assert [letter["error_class"] for letter in dead_letters(json_job)] == ["decoder_failed"] * 2


@pytest.mark.parametrize(
    ("rows", "undecoded", "exception"),
    [
        ({"+I": 11}, {"KeyError": 11}, "KeyError"),
        ({"+I": 10}, {"KeyError": 10}, None),
        ({"+I": 12}, {"KeyError": 11}, None),
        ({"-U": 11, "+U": 11}, {"KeyError": 11}, "KeyError"),
        ({"+I": 1}, {"KeyError": 11, "ValueError": 11}, None),
        ({}, {"KeyError": 10}, None),
        ({}, {"KeyError": 1, "ValueError": 1}, None),
    ],
)
def test_how_many_failures_are_the_formats(
    rows: dict[str, int], undecoded: dict[str, int], exception: str | None
) -> None:
    bad = {"decoder_failed": sum(undecoded.values())}
    begun: Any = SimpleNamespace(started=0.0)
    written = sum_up(begun, 1, [TaskResult(rows=rows, bad=bad, undecoded=undecoded)], {}, {})
    assert written.failing_alike(10) == exception


def test_numbers_of_a_whole_file_of_garbage(json_job: Job) -> None:
    json_job.write_text("x\n" * 1000)
    json_job.run()
    assert ids(json_job) == []
    assert len(dead_letters(json_job)) == 1000


@pytest.mark.parametrize("line", [BAD_RECORDS[0], BAD_RECORDS[6], BAD_RECORDS[12]])
def test_a_bad_record_stops_the_job_if_so_configured(json_job: Job, line: tuple[str, str, str]) -> None:
    job = failing(json_job)
    job.write([good(1)])
    job.write_text(f"{GOOD.replace(': 1', ': 2')}\n{line[0]}\n")
    with pytest.raises(DataError, match="1 bad record, and on_bad_record is fail") as caught:
        job.run()
    assert caught.value.exit_code == 3
    assert line[2] in str(caught.value)
    assert ids(job) == [1], "nothing of the bad micro-batch is applied"
    assert job.unreferenced_files() == []
    with pytest.raises(DataError):
        job.run()  # and not skipped by the next run either
    assert not job.spark.catalog.tableExists(job.dead_letters)


def test_bad_rows_of_parquet_files(job: Job) -> None:
    job.write_records(
        [
            {"row_kind": "+I", "seq": 1, "id": 1},
            {"row_kind": "+I", "seq": 2, "id": None, "region": "lost"},
            {"row_kind": None, "seq": 3, "id": 3},
            {"row_kind": "upsert", "seq": 4, "id": 4},
            {"row_kind": "+I", "seq": None, "id": 5},
        ]
    )
    job.run()
    assert ids(job) == [1]
    letters = dead_letters(job)
    assert sorted(letter["error_class"] for letter in letters) == [
        "missing_order",
        "null_key",
        "unknown_operation",
        "unknown_operation",
    ]
    (null_key,) = [letter for letter in letters if letter["error_class"] == "null_key"]
    assert b'"region":"lost"' in null_key["value"]


@pytest.fixture(params=["one task", "every task reads all", "shuffle", "scan"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How Parquet files are read. Spark scans what is too large to be read whole."""
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 1000 if request.param == "one task" else 0)
    if request.param == "shuffle":
        monkeypatch.setattr(writing, "READ_AGAIN", -1)
    if request.param == "scan":
        monkeypatch.setattr(source_of_files, "MOST_BYTES", 0)


@pytest.mark.usefixtures("_way")
def test_narrower_types_missing_columns_and_bad_rows_of_several_files(job: Job) -> None:
    job.sections = {"source": {"options": {"path_format": "parquet", "maxFilesPerTrigger": 3}}}
    job.write([good(1), good(2)])
    job.write_records([{"row_kind": "+I", "seq": 5, "id": 5}, {"row_kind": "+I", "seq": 6, "id": None}])
    narrow = pa.schema({"row_kind": pa.string(), "seq": pa.int32(), "id": pa.int32(), "region": pa.string()})
    job.write_records([{"row_kind": "+I", "seq": 7, "id": 7, "region": "eu"}], narrow)
    job.run()
    assert ids(job) == [1, 2, 5, 7]
    (letter,) = dead_letters(job)
    assert (letter["error_class"], json.loads(letter["value"])["seq"]) == ("null_key", 6)
    assert re.fullmatch(r"file:/[^/].*/\S+%20ä\.parquet", letter["source"]), "as Spark spells it"
    assert job.unreferenced_files() == []


@pytest.mark.usefixtures("_way")
def test_the_partitions_of_a_table_get_each_row_once(job: Job) -> None:
    job.partition_by = ["region"]
    job.sections = {"source": {"options": {"path_format": "parquet", "maxFilesPerTrigger": 3}}}
    job.write([good(number, region="eu") for number in range(50)])
    job.write([good(number, region="us") for number in range(25, 100)])
    job.write_records([{"row_kind": "+I", "seq": 1000, "id": None, "region": region} for region in ("eu", "us")])
    job.run()
    rows = job.rows()
    assert sorted(row["id"] for row in rows) == list(range(100))
    assert {row["region"] for row in rows if row["id"] >= 25} == {"us"}
    assert len(dead_letters(job)) == 2


def test_a_file_of_the_julian_calendar_is_refused(job: Job) -> None:
    job.write([good(1)])
    path = job.write([good(2)])
    old = pq.read_table(path).replace_schema_metadata({"org.apache.spark.version": "2.4.8"})
    pq.write_table(old, path)
    with pytest.raises(DataError, match=r"may have dates and times of the Julian calendar.*InWrite set to CORRECTED"):
        job.run()
    assert ids(job) == [1]
    assert job.unreferenced_files() == []


@contextmanager
def before_reading(change: Callable[[], Any]) -> Iterator[None]:
    """Let somebody change a file when the micro-batch is planned, and no task has read it yet."""

    def changing(paths: Any, context: Any) -> Any:
        change()
        return exchange.files(paths, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "files", changing)
        yield


@pytest.mark.parametrize("small", [True, False])
def test_files_that_are_replaced_before_they_are_read_are_noticed(
    job: Job, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 1000 if small else 0)
    path = job.write([good(1), good(2)])
    other = job.write([good(3)])
    content = other.read_bytes()
    other.unlink()
    found = pytest.raises(TemporaryError, match=r"replaced while they were read: 2 rows were listed, and 1 read")
    with before_reading(lambda: path.write_bytes(content)), found:
        job.run()
    assert job.unreferenced_files() == []
    job.run()
    assert ids(job) == [3]


def test_tasks_that_read_different_files_of_one_name_are_noticed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task may have read the old file, and another the new one, which has as many rows of each task."""
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 0)
    job.write([good(number) for number in range(20)])
    other = job.write([good(number, region="us") for number in range(20)])
    content = other.read_bytes()
    other.unlink()
    original: Any = decode.decode_files

    def replaced(*args: Any) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        *rest, files = args
        yield from original(*rest, [(path, content if context.partitionId() else old) for path, old in files])

    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode_files", replaced)
        with pytest.raises(TemporaryError, match=r"replaced while they were read: 20 rows were listed, and 20 read"):
            job.run()
    assert job.unreferenced_files() == []
    job.run()
    assert {row["region"] for row in job.rows()} == {"eu"}


@pytest.mark.parametrize("small", [True, False])
def test_a_file_that_is_removed_before_it_is_read_is_no_loss(
    job: Job, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 1000 if small else 0)
    job.write([good(1)])
    path = job.write([good(2)])
    content = path.read_bytes()
    with before_reading(path.unlink), pytest.raises(DataError, match="is gone now"):
        job.run()
    assert ids(job) == [1]
    assert job.unreferenced_files() == []
    path.write_bytes(content)
    job.run()
    assert ids(job) == [1, 2]


@pytest.mark.usefixtures("_way")
def test_removals_of_one_key_that_tie_and_differ_in_what_they_carry(job: Job) -> None:
    job.write([good(1), good(2)])
    job.run()
    tie = {"seq": 9, "id": 1, "amount": None, "created_at": None}
    job.write_records([{"row_kind": "-D", "region": region} | tie for region in ("eu", "us", None)])
    job.write([good(3)])
    job.run()
    assert ids(job) == [2, 3]


@pytest.mark.parametrize(
    ("sizes", "rows", "tasks", "read_by_each"),
    [
        ([100 << 20], 3_000_000, 2, True),
        ([100 << 20], 3_000_000, 4, False),
        ([200 << 20], 3_000_000, 2, False),
        ([200 << 20], 50_000_000, 1, True),  # there is nobody to deal it out to
        ([20_000], 1_000_000, 200, False),  # few bytes of many rows
        ([2_000] * 40, 20_000, 200, False),  # to open them takes its time too
        ([2_000] * 40, 20_000, 8, True),
    ],
)
def test_what_every_task_reads(sizes: list[int], rows: int, tasks: int, read_by_each: bool) -> None:
    files = {str(number): WholeFile("", size) for number, size in enumerate(sizes)}
    batch = TableBatch(lambda: pytest.fail("not read here"), {}, rows, files=files)
    assert is_read_by_each(batch, tasks) == read_by_each


@pytest.mark.parametrize("missing", ["row_kind", "seq", "id"])
def test_a_parquet_file_without_a_column_that_every_change_needs_is_refused(job: Job, missing: str) -> None:
    job.write([good(1)])
    fields = {"row_kind": pa.string(), "seq": pa.int64(), "id": pa.int64(), "region": pa.string()}
    del fields[missing]
    job.write_records([{"region": "eu"}], pa.schema(fields))
    with pytest.raises(
        DataError,
        match=rf"has no column '{missing}'\. Its columns must be: row_kind, id, region, amount, created_at, seq",
    ):
        job.run()
    assert ids(job) == [1]


def test_a_parquet_file_with_a_column_of_another_type_is_refused(job: Job) -> None:
    job.write([good(1)])
    fields = {"row_kind": pa.string(), "seq": pa.int64(), "id": pa.string(), "region": pa.string()}
    schema = pa.schema(fields | {"amount": pa.decimal128(12, 2), "created_at": pa.timestamp("us", "UTC")})
    job.write_records([{"row_kind": "+I", "seq": 2, "id": "two"}], schema)
    with pytest.raises(DataError, match="a change file has a column of another type") as caught:
        job.run()
    assert "id" in str(caught.value)
    assert ids(job) == [1]


def test_a_decimal_of_another_scale_is_not_rounded(job: Job) -> None:
    job.write([good(1)])
    fields = {"row_kind": pa.string(), "seq": pa.int64(), "id": pa.int64(), "region": pa.string()}
    schema = pa.schema(fields | {"amount": pa.decimal128(12, 4), "created_at": pa.timestamp("us", "UTC")})
    job.write_records(
        [{"row_kind": "+I", "seq": 2, "id": 2, "amount": pa.scalar("1.2345").cast(pa.decimal128(12, 4)).as_py()}],
        schema,
    )
    with pytest.raises(DataError):
        job.run()
    assert ids(job) == [1]


def test_what_is_not_a_parquet_file_is_refused(job: Job) -> None:
    job.write([good(1)])
    job.write_text("garbage")
    with pytest.raises(DataError, match="can't be read as Parquet"):
        job.run()
    assert ids(job) == [1]


def test_a_truncated_parquet_file_is_refused_and_can_be_repaired(job: Job) -> None:
    job.write([good(1)])
    path = job.write([good(2)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError):
        job.run()
    assert ids(job) == [1]
    path.write_bytes(whole)
    job.run()
    assert ids(job) == [1, 2]


def test_dead_letters_are_kept_exactly_once_through_a_crash(json_job: Job) -> None:
    """The dead letters' table and the target can't be committed together; a crash in between must repeat neither."""
    json_job.mode = "changelog"
    json_job.write([good(1)])
    json_job.write_text(f"bad one\n{GOOD.replace(': 1', ': 2')}\n")
    with crashing("before the commit", after_commits=1), pytest.raises(TemporaryError):
        json_job.run()
    assert ids(json_job) == [1]
    assert [letter["value"] for letter in dead_letters(json_job)] == [b"bad one"]
    json_job.run()
    json_job.lose_checkpoint()
    json_job.write_text("bad two\n")
    json_job.run()
    json_job.run()
    assert ids(json_job) == [1, 2]
    assert sorted(letter["value"] for letter in dead_letters(json_job)) == [b"bad one", b"bad two"]


@pytest.mark.parametrize("table", ["dead_letters", "orders"])
@pytest.mark.parametrize("fault", ["before the commit", "after the commit"])
@pytest.mark.parametrize("lose_checkpoint", [False, True])
def test_dead_letters_and_rows_survive_a_crash_around_each_commit(
    json_job: Job, table: str, fault: Any, lose_checkpoint: bool
) -> None:
    json_job.mode = "changelog"
    json_job.write_text(f"bad one\n{GOOD}\n")
    with crashing(fault, table=table), pytest.raises(TemporaryError):
        json_job.run()
    if lose_checkpoint:
        json_job.lose_checkpoint()
    json_job.run()
    assert ids(json_job) == [1]
    assert [letter["value"] for letter in dead_letters(json_job)] == [b"bad one"]


def test_a_full_disk_is_temporary_and_leaves_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write([good(n) for n in range(20)])
    job.run()
    job.write([good(n, "+U", "us") for n in range(20)])
    with monkeypatch.context() as patch:
        patch.setattr(write, "run", fill_disk_in_task)
        with pytest.raises(
            TemporaryError, match=r"no space left on device while writing\. Free space and run again"
        ) as caught:
            job.run()
    assert caught.value.exit_code == 75
    assert {row["region"] for row in job.rows()} == {"eu"}
    assert job.unreferenced_files() == []
    job.run()
    assert {row["region"] for row in job.rows()} == {"us"}


@pytest.mark.parametrize("mode", ["changelog", "upsert"])
def test_of_one_order_value_the_last_change_of_a_file_wins(job: Job, mode: Literal["changelog", "upsert"]) -> None:
    job.mode = mode
    kinds = ("+I", "+I") if mode == "upsert" else ("+I", "-U", "+U")
    for regions in (("eu", "us"), ("us", "eu")):
        job.write_records([{"row_kind": "-D", "seq": 9, "id": 2, "region": "eu"}])
        values = regions if mode == "upsert" else (regions[0], *regions)
        records = zip(kinds, values, strict=True)
        job.write_records([{"row_kind": kind, "seq": 9, "id": 2, "region": region} for kind, region in records])
        job.run()
        assert [row["region"] for row in job.rows()] == [regions[1]]


@pytest.mark.parametrize("file_format", ["parquet", "json"])
@pytest.mark.parametrize("planned", [True, False], ids=["after its micro-batch was planned", "after it was listed"])
def test_a_file_that_vanished_is_no_silent_loss(
    job: Job, monkeypatch: pytest.MonkeyPatch, file_format: Literal["parquet", "json"], planned: bool
) -> None:
    """Spark itself leaves out files that are gone by the time that it plans to read them."""
    job.file_format = file_format
    job.write([good(1)])
    path = job.write([good(2)])
    job.write([good(3)])
    content = path.read_bytes(), path.stat().st_mtime
    original = FilesSource.batch

    def vanishing(*arguments: Any) -> Any:
        path.unlink(missing_ok=True)
        return original(*arguments)

    if planned:
        with crashing("before the commit", after_commits=1), pytest.raises(TemporaryError):
            job.run()
        path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(FilesSource, "batch", vanishing)
        with pytest.raises(DataError, match="was listed as a change file and is gone now") as caught:
            job.run()
    assert unquote(path.name) in str(caught.value)
    assert ids(job) == [1]
    with pytest.raises(DataError, match="is gone now"):
        job.run()
    if planned:
        path.write_bytes(content[0])
        os.utime(path, (content[1], content[1]))
        job.run()
        assert ids(job) == [1, 2, 3]
        return
    folder = re.search(r"delete the folder (\S+) and", str(caught.value))
    assert folder is not None
    shutil.rmtree(folder[1])
    job.run()
    assert ids(job) == [1, 3]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "debezium-json",
            {"unavailable.value.placeholder": "hex:x"},
            r"source\.format_options: unavailable\.value\.placeholder: expected hexadecimal digits after hex:",
        ),
        (
            "debezium-avro",
            {"schema.registry.url": "http://127.0.0.1:1", "schema.registry.timeout": "soon"},
            r"source\.format_options: schema\.registry\.timeout is 'soon', expected a number",
        ),
    ],
)
def test_malformed_format_options_are_refused_before_anything_runs(
    spark: SparkSession, name: str, options: dict[str, str], message: str
) -> None:
    config = Config.model_validate(
        {
            "sink": {"id": "s", "checkpoint": "unused"},
            "source": {
                "type": "kafka",
                "format": name,
                "format_options": options,
                "options": {"kafka.bootstrap.servers": "127.0.0.1:1"},
            },
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "unused"}},
            "tables": [{"source": "t", "target": "lake.db.t", "key": ["id"], "columns": {"id": "bigint"}}],
        }
    )
    (mapped,) = resolve_tables(config, ())
    with pytest.raises(ConfigError, match=message):
        plan_table(Catalogs(spark, config), config, mapped, None)
