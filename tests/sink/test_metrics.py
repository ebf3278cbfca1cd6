"""What our files say about themselves, compared with what Iceberg's own writer says of the same rows.

Scans prune by these numbers, so a wrong bound loses rows and a missing one costs time.
"""

import datetime as dt
import io
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

import fastavro
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.sink.harness import Job

pytestmark = pytest.mark.spark

COLUMNS = {
    "id": "bigint",
    "flag": "boolean",
    "n": "int",
    "ratio": "double",
    "small": "decimal(9,2)",
    "medium": "decimal(18,4)",
    "wide": "decimal(38,10)",
    "name": "string",
    "data": "binary",
    "day": "date",
    "at": "timestamp",
    "wall": "timestamp_ntz",
    "empty": "string",
}


def row(number: int) -> dict[str, Any]:
    """Values on both sides of zero, longer than truncated bounds, with nulls and NaNs; `empty` is always null."""
    instant = dt.datetime(1969, 12, 31, 23, 59, 58, tzinfo=dt.UTC) + dt.timedelta(seconds=number, microseconds=number)
    if number % 7 == 3:
        return dict.fromkeys(COLUMNS) | {"id": number}
    return {
        "id": number,
        "flag": number % 2 == 0,
        "n": number * 1000 - 5000,
        "ratio": float("nan") if number % 5 == 1 else (number - 4) / 3,
        "small": Decimal(number - 3).scaleb(-2),
        "medium": Decimal(10**13 * (number - 6)).scaleb(-4),
        "wide": Decimal(10**36 * (number - 8)).scaleb(-10),
        "name": f"{'ÿ' if number == 12 else 'a'}{'x' * 30}{number:03d}",
        "data": bytes([number]) + b"\xfe" * 30,
        "day": dt.date(1969, 12, 25) + dt.timedelta(days=number),
        "at": instant,
        "wall": instant.replace(tzinfo=None),
        "empty": None,
    }


METRICS = "value_counts, null_value_counts, nan_value_counts, lower_bounds, upper_bounds, record_count"


def metrics(spark: SparkSession, table: str) -> list[dict[str, Any]]:
    """The metrics of a table's data files as its manifests store them."""
    frame = spark.sql(f"SELECT {METRICS} FROM {table}.data_files ORDER BY file_path")
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in found.asDict().items()}
        for found in frame.collect()
    ]


def twin(job: Job, rows: int) -> str:
    """A table like the job's with the same rows, written by Iceberg's Spark writer into one file."""
    name = f"{job.target}_twin"
    types = ", ".join(f"{column} {sql_type}" for column, sql_type in job.columns.items())
    properties = "".join(f", '{key}' = '{value}'" for key, value in job.properties.items())
    job.spark.sql(f"CREATE TABLE {name} ({types}) USING iceberg TBLPROPERTIES ('format-version' = '2'{properties})")
    path = next(job.changes_folder.glob("*.parquet"))
    frame = job.spark.read.parquet(str(path)).select(*job.columns)
    assert frame.count() == rows
    frame.coalesce(1).writeTo(name).append()
    return name


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"write.metadata.metrics.default": "full"},
        {"write.metadata.metrics.default": "counts", "write.metadata.metrics.column.name": "truncate(4)"},
        {"write.metadata.metrics.default": "none"},
    ],
    ids=["default", "full", "counts", "none"],
)
def test_column_metrics_equal_those_of_icebergs_writer(
    spark: SparkSession, tmp_path: Path, properties: dict[str, str]
) -> None:
    job = Job(spark, tmp_path, columns=COLUMNS, properties=properties, tasks=1)
    rows = [row(number) for number in range(14)]
    job.write([("+I", each) for each in rows])
    job.run()
    ours, theirs = metrics(spark, job.target), metrics(spark, twin(job, len(rows)))
    assert len(ours) == len(theirs) == 1
    names = {i + 1: name for i, name in enumerate(COLUMNS)}
    for metric, expected in theirs[0].items():
        if isinstance(expected, dict):
            got = {names[i]: value for i, value in (ours[0][metric] or {}).items()}
            assert got == {names[i]: value for i, value in expected.items()}, metric
        else:
            assert ours[0][metric] == expected, metric


def test_bounds_hold_every_value(spark: SparkSession, tmp_path: Path) -> None:
    """Read back as values by Iceberg, and checked against the rows: no comparison of two writers could be
    wrong twice.
    """
    job = Job(spark, tmp_path, columns=COLUMNS, tasks=1)
    rows = [row(number) for number in range(14)]
    job.write([("+I", each) for each in rows])
    job.run()
    (found,) = spark.sql(f"SELECT readable_metrics FROM {job.target}.data_files").collect()
    readable = found["readable_metrics"].asDict()
    for name in ("id", "n", "small", "medium", "wide", "day", "wall", "flag"):
        values = [each[name] for each in rows if each[name] is not None]
        assert (readable[name]["lower_bound"], readable[name]["upper_bound"]) == (min(values), max(values)), name
        assert readable[name]["null_value_count"] == len(rows) - len(values), name
    assert readable["name"]["lower_bound"] == "a" + "x" * 15
    assert readable["name"]["upper_bound"] == "ÿ" + "x" * 14 + "y"
    assert readable["ratio"]["nan_value_count"] == sum(each["ratio"] != each["ratio"] for each in rows if each["ratio"])
    assert (readable["empty"]["lower_bound"], readable["empty"]["upper_bound"]) == (None, None)


def test_split_offsets_and_sizes(spark: SparkSession, tmp_path: Path) -> None:
    """A split offset for each row group, so that a reader can divide the file."""
    job = Job(spark, tmp_path, tasks=1, properties={"write.parquet.row-group-size-bytes": "20000"})
    job.write([("+I", {"id": n, "region": f"region {n}"}) for n in range(5000)])
    job.run()
    (found,) = spark.sql(f"SELECT split_offsets, file_path, file_size_in_bytes FROM {job.target}.data_files").collect()
    path = Path(unquote(urlparse(found.file_path).path))
    assert path.stat().st_size == found.file_size_in_bytes
    groups = pq.read_metadata(path)
    assert len(found.split_offsets) == groups.num_row_groups > 2
    assert found.split_offsets == sorted(found.split_offsets)
    assert found.split_offsets[0] == 4


def test_a_filter_prunes_files(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    for start in (0, 100, 200, 300):
        job.write([("+I", {"id": n, "region": f"r{n:03d}"}) for n in range(start, start + 100)])
    job.run()
    assert len([f for f in job.files() if f["content"] == 0]) == 4
    assert len(scanned_files(job, ("equal", "id", 150))) == 1
    assert len(scanned_files(job, ("greaterThan", "id", 120), ("lessThan", "id", 180))) == 1
    assert len(scanned_files(job, ("equal", "region", "r150"))) == 1
    assert len(scanned_files(job, ("startsWith", "region", "r15"))) == 1
    assert len(scanned_files(job, ("equal", "id", 1000))) == 0
    assert len(scanned_files(job, ("greaterThanOrEqual", "id", 150))) == 3
    assert len(scanned_files(job, ("isNull", "region"))) == 0
    rows = spark.sql(f"SELECT id FROM {job.target} WHERE region LIKE 'r15%'").collect()
    assert sorted(each.id for each in rows) == list(range(150, 160))


def scanned_files(job: Job, *filters: tuple[Any, ...]) -> set[str]:
    """Data files that Iceberg plans to read where all of `filters` (predicate, column, value) hold."""
    jvm = job.spark.sparkContext._jvm
    assert jvm is not None
    scan = job.java_table().newScan()
    for predicate, *arguments in filters:
        scan = scan.filter(getattr(jvm.org.apache.iceberg.expressions.Expressions, predicate)(*arguments))
    files = scan.planFiles()
    tasks = files.iterator()
    found = set()
    while tasks.hasNext():
        found.add(str(tasks.next().file().location()))
    files.close()
    return found


def test_a_filter_finds_rows_beside_very_long_values(spark: SparkSession, tmp_path: Path) -> None:
    """Arrow gives a row group no bounds if one of them is longer than 4096 bytes, and other row groups have some."""
    columns = {"id": "bigint", "doc": "string", "data": "binary", "ratio": "double"}
    job = Job(spark, tmp_path, columns=columns, tasks=1, properties={"write.parquet.row-group-size-bytes": "20000"})
    nan = float("nan")
    texts = {0: "z" * 5000, 1: "y needle"}
    rows = [
        {"id": n, "doc": (text := texts.get(n, f"doc {n:04}")), "data": text.encode(), "ratio": nan if n < 1500 else n}
        for n in range(2000)
    ]
    job.write([("+I", each) for each in rows])
    job.run()
    (found,) = job.files()
    footer = pq.read_metadata(unquote(urlparse(found["file_path"]).path))
    bounds = [footer.row_group(n).column(1).statistics.has_min_max for n in range(footer.num_row_groups)]
    assert set(bounds) == {True, False}
    for condition in ("doc = 'y needle'", "doc LIKE 'y nee%'", "doc > 'e'", "data = X'79206E6565646C65'"):
        assert 1 in [row.id for row in spark.sql(f"SELECT id FROM {job.target} WHERE {condition}").collect()], condition
    assert scanned_files(job, ("greaterThan", "ratio", 5000.0)) == set(), "row groups of NaNs leave the others' bounds"
    assert len(scanned_files(job, ("greaterThan", "id", 1000))) == 1
    assert scanned_files(job, ("greaterThan", "id", 5000)) == set()


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_a_filter_finds_uuids_on_both_sides_of_the_sign(
    spark: SparkSession, tmp_path: Path, deletes: Literal["position", "equality"]
) -> None:
    """Iceberg's Java reader compares UUIDs as signed numbers, also with the bounds of a file's row groups."""
    columns = {"id": "uuid", "n": "int", "other": "uuid", "tags": "array<string>"}
    job = Job(spark, tmp_path, columns=columns, configure_columns=False, tasks=1, deletes=deletes)
    strings = {"type": "list", "element-id": 5, "element": "string", "element-required": False}
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "uuid"},
            {"id": 2, "name": "n", "required": False, "type": "int"},
            {"id": 3, "name": "other", "required": False, "type": "uuid"},
            {"id": 4, "name": "tags", "required": False, "type": strings},
        ]
    )
    ids = [f"{digit}0000000-0000-4000-8000-00000000000{digit}" for digit in "07f"]
    job.write([("+I", {"id": key, "n": n, "other": key if n else None, "tags": None}) for n, key in enumerate(ids)])
    job.run()
    job.write([("+U", {"id": ids[1], "n": 9, "other": None, "tags": ["a"]})])
    job.run()
    for key, expected in zip(ids, (0, 9, 2), strict=True):
        assert [row.n for row in spark.sql(f"SELECT n FROM {job.target} WHERE id = '{key}'").collect()] == [expected]
    assert spark.sql(f"SELECT * FROM {job.target} WHERE other IS NULL").count() == 2
    first = next(found for found in metrics(spark, job.target) if found["record_count"] == 3)
    assert first["value_counts"] == {1: 3, 2: 3, 3: 3, 5: 3}
    assert first["null_value_counts"] == {1: 0, 2: 0, 3: 1, 5: 3}
    assert first["lower_bounds"].keys() == first["upper_bounds"].keys() == {2}


def test_a_text_whose_upper_bound_would_be_a_surrogate(spark: SparkSession, tmp_path: Path) -> None:
    """The next character after U+D7FF is none that a text may have."""
    job = Job(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": 1, "region": "a" * 15 + "\ud7ff" + "b"})])
    job.run()
    (found,) = metrics(spark, job.target)
    assert 2 not in found["upper_bounds"]
    assert bytes(found["lower_bounds"][2]).decode() == "a" * 15 + "\ud7ff"


def test_upper_bounds_of_bytes_that_can_not_grow(spark: SparkSession, tmp_path: Path) -> None:
    """0xff carries into the byte before; nothing but 0xff has no bound at all."""
    job = Job(spark, tmp_path, columns={"id": "bigint", "data": "binary", "top": "binary"}, tasks=1)
    job.write([("+I", {"id": 1, "data": b"\x05" + b"\xff" * 30, "top": b"\xff" * 30})])
    job.run()
    (found,) = metrics(spark, job.target)
    assert bytes(found["upper_bounds"][2]) > b"\x05" + b"\xff" * 30
    assert bytes(found["upper_bounds"][2]) < b"\x07"
    assert 3 not in found["upper_bounds"]
    assert bytes(found["lower_bounds"][3]) == b"\xff" * 16


def test_manifests_read_by_another_reader(spark: SparkSession, tmp_path: Path) -> None:
    """fastavro, by the spec: content, sequence numbers, equality ids, and which data file a position delete is for."""
    job = Job(spark, tmp_path, tasks=1, deletes="equality")
    job.write([("+I", {"id": n, "region": "eu"}) for n in range(3)])
    job.run()
    job.write([("+U", {"id": 1, "region": "us"}), ("+I", {"id": 7, "region": "us"})])
    job.run()
    snapshot = job.java_table().currentSnapshot()
    manifests = read_avro(str(snapshot.manifestListLocation()))
    assert {m["content"] for m in manifests} == {0, 1}
    by_content: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for manifest in manifests:
        for entry in read_avro(manifest["manifest_path"]):
            by_content.setdefault(entry["data_file"]["content"], []).append((manifest, entry))
    assert {content: len(entries) for content, entries in by_content.items()} == {0: 2, 2: 1}
    sequences = sorted(data_sequence(manifest, entry) for manifest, entry in by_content[0])
    ((manifest, deletes),) = by_content[2]
    assert sequences == [1, 2]
    # an equality delete applies to strictly lower sequence numbers: to the first file and not to the second
    assert data_sequence(manifest, deletes) == 2
    assert deletes["data_file"]["equality_ids"] == [1]
    assert deletes["data_file"]["record_count"] == 2
    assert all(entry["data_file"]["file_format"].upper() == "PARQUET" for _, entry in [*by_content[0], *by_content[2]])
    assert all(entry["data_file"]["equality_ids"] is None for _, entry in by_content[0])


def data_sequence(manifest: dict[str, Any], entry: dict[str, Any]) -> int:
    """The spec's inheritance: an added file without a number of its own has its manifest's."""
    own = entry["sequence_number"]
    return int(manifest["sequence_number"] if own is None else own)


def read_avro(location: str) -> list[dict[str, Any]]:
    data = Path(unquote(urlparse(location).path)).read_bytes()
    records: list[Any] = list(fastavro.reader(io.BytesIO(data)))
    return records
