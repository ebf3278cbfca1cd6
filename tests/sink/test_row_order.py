"""Rows are written in an order that lets readers skip files: `maintenance.rewrite.sort`."""

import logging
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

from deltawriters import move
from sink.commands import inspection
from sink.commands.maintain import maintain
from sink.config import Config, load
from sink.errors import ConfigError
from tests.delta.harness import DeltaJob
from tests.rewrites import ALL_FILES, only_sink, rewriting, rewritten_files
from tests.sink.harness import Job, by_pyiceberg, merging_soon

KINDS = ("v2", "v3", "delta")
SORT = {"sort": ["region", "id"]}
EACH_ONCE = replace(ALL_FILES, min_file_size=1e9, least_gain=-(1 << 60))
"""Each file is rewritten."""
FILE_BYTES = {
    "v2": "write.target-file-size-bytes",
    "v3": "write.target-file-size-bytes",
    "delta": "delta.targetFileSize",
}


def new_job(
    spark: SparkSession, folder: Path, kind: str, order: Mapping[str, Any] | None, size: int, **arguments: Any
) -> Job:
    """:param size: of files, in bytes."""
    properties = {FILE_BYTES[kind]: str(size)} | ({} if kind == "delta" else {"format-version": kind[1:]})
    table = {"maintenance": {"rewrite": dict(order)}} if order else {}
    table |= arguments.pop("table", {})
    made = DeltaJob if kind == "delta" else Job
    return made(spark, folder, properties=properties, table=table, tasks=1, **arguments)


def data_files(job: Job) -> list[str]:
    """Paths of the live data files."""
    if isinstance(job, DeltaJob):
        return [f"{job.table_folder}/{path}" for path, _ in job.snapshot().files]
    return [file["file_path"] for file in job.files() if file["content"] == 0]


def rows_in_file(path: str) -> list[tuple[str | None, int]]:
    """Region and id of the rows, as they are in a data file."""
    return [(row["region"], row["id"]) for row in pq.read_table(path).to_pylist()]


def planned(job: Job, condition: str) -> int:
    """How many files a reader opens that wants some rows: PyIceberg, or Delta's own."""
    if isinstance(job, DeltaJob):
        return len(job.frame().where(condition).inputFiles())
    metadata = str(job.java_table().operations().current().metadataFileLocation())
    return len(list(StaticTable.from_metadata(metadata).scan(row_filter=condition).plan_files()))


class RandomChanges:
    """Micro-batches that insert, update and delete rows of random keys."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job = job
        self._random = Random(seed)
        self._regions = [None, "eu", "us", "a-long-name-of-a-region"]
        if not (isinstance(job, DeltaJob) and job.partition_by):  # to which an empty text is NULL
            self._regions.append("")
        self._rows: dict[int, str | None] = {}

    def write(self, batches: int) -> None:
        for _ in range(batches):
            changes: list[tuple[str, dict[str, Any]]] = []
            for key in self._random.sample(range(-100, 100), 60):
                if key in self._rows and self._random.random() < 0.4:
                    changes.append(("-D", {"id": key, "region": self._rows.pop(key)}))
                else:
                    self._rows[key] = self._random.choice(self._regions)
                    changes.append(("+U", {"id": key, "region": self._rows[key]}))
            self._job.write(changes)

    def expected(self) -> list[dict[str, Any]]:
        return [{"id": key, "region": region} for key, region in sorted(self._rows.items())]


@pytest.mark.spark
@pytest.mark.parametrize(("kind", "partition_by"), [("v2", ()), ("v3", ("region",)), ("delta", ())])
def test_rows_change_while_they_are_sorted(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    partition_by: tuple[str, ...],
) -> None:
    """Their positions are others then. In small files, and in parts that are sorted each by itself; small files are
    merged meanwhile.
    """
    caplog.set_level(logging.INFO, "rowdelta")
    monkeypatch.setattr(move, "_SORTED_BYTES", 6000)
    job = new_job(spark, tmp_path, kind, SORT, 2500, partition_by=partition_by)
    changes = RandomChanges(job, 1)
    changes.write(13)
    with rewriting() as done, merging_soon(every=4):
        job.run()
    assert len(done) >= 2
    assert any(done), caplog.text  # a partition may lose its last row meanwhile
    assert "merged" in caplog.text
    assert "catching up" not in caplog.text, "the index knows where the rows are now"
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    if isinstance(job, DeltaJob):
        job.check()
    else:
        assert by_pyiceberg(job) == changes.expected()
    # another process goes on, and deletes rows by the places that the index has
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


@pytest.mark.spark
def test_row_ids_stay_with_their_rows(spark: SparkSession, tmp_path: Path) -> None:
    """Those that a file gives to its rows, and later those that are stored in it."""
    job = new_job(spark, tmp_path, "v3", SORT, 1500, configure_columns=False, table={"merge_small_files": False})
    changes = RandomChanges(job, 3)
    columns = "id, region, _row_id, _last_updated_sequence_number"
    for _ in range(2):
        changes.write(3)
        job.run()
        before = spark.sql(f"SELECT {columns} FROM {job.target} ORDER BY id").collect()
        assert len({row["_last_updated_sequence_number"] for row in before}) >= 3
        sink = only_sink(job)
        begun = rewritten_files(sink)
        assert sink.upkeep.end_rewrite(begun) is not None
        assert spark.sql(f"SELECT {columns} FROM {job.target} ORDER BY id").collect() == before
        ids = [row["id"] for path in data_files(job) for row in pq.read_table(path, columns=["id"]).to_pylist()]
        assert ids != sorted(ids), "or nothing was put in another order"
    assert [row["_row_id"] for row in before] != sorted(row["_row_id"] for row in before)


SIDE = 32
"""Of a square of rows: each x with each y."""
FILES = 17


def square(
    spark: SparkSession, folder: Path, kind: str, order: Mapping[str, Any] | None, size: int = 2500, **table: Any
) -> tuple[Job, list[dict[str, Any]]]:
    """A table whose rows come in no order, and the rows. With the usual size of files it has about `FILES`."""
    columns = {"id": "bigint", "x": "int", "y": "int", "more": "string"}
    job = new_job(spark, folder, kind, order, size, columns=columns, table={"merge_small_files": False} | table)
    random = Random(1)
    rows = [
        {"id": n, "x": n % SIDE, "y": n // SIDE, "more": b64encode(random.randbytes(48)).decode()}
        for n in range(SIDE * SIDE)
    ]
    random.shuffle(rows)
    for start in range(0, len(rows), 64):
        job.write([("+I", row) for row in rows[start : start + 64]])
    job.run()
    return job, sorted(rows, key=lambda row: row["id"])


WINDOWS = ("x >= 8 and x < 12", "y >= 8 and y < 12", "x >= 8 and x < 12 and y >= 8 and y < 12")
"""An eighth of the rows by x, an eighth by y, and the 64th that they have in common."""


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["v3", "delta"])
def test_a_filtered_scan_skips_files(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """By the statistics of files: how many it plans of all, with each order."""
    shares = {}
    orders: dict[str, dict[str, Any] | None] = {"none": None, "sort": {"sort": ["x"]}}
    for name, order in orders.items():
        job, rows = square(spark, tmp_path / name, kind, order)
        sink = only_sink(job)
        assert sink.upkeep.end_rewrite(rewritten_files(sink, EACH_ONCE)) is not None
        assert job.rows() == rows
        files = len(data_files(job))
        assert FILES / 2 <= files <= FILES * 2
        shares[name] = [planned(job, condition) / files for condition in WINDOWS]
    assert shares["none"][:2] == [1, 1]
    by_x, by_y, both = shares["sort"]
    assert by_x <= 0.25
    assert by_y == 1
    assert both == by_x


@pytest.mark.spark
@pytest.mark.parametrize("on_driver", [True, False])
def test_small_files_that_are_merged_are_sorted_together(spark: SparkSession, tmp_path: Path, on_driver: bool) -> None:
    """Not each group that makes a file by itself: then all files would have the same values."""
    with merging_soon(every=16, on_driver=on_driver):
        job, rows = square(spark, tmp_path, "v3", {"sort": ["x"]}, 14000, merge_small_files=True)
    files = len(data_files(job))
    assert 3 <= files <= 6
    assert planned(job, WINDOWS[0]) <= files / 2
    assert job.rows() == rows
    assert job.check_index() is not None


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["upsert", "append"])
@pytest.mark.parametrize("kind", KINDS)
def test_new_files_are_sorted(spark: SparkSession, tmp_path: Path, kind: str, mode: Any) -> None:
    job = new_job(spark, tmp_path, kind, SORT, 1 << 20, mode=mode, key=("id",) if mode == "upsert" else ())
    rows: list[tuple[str, int]] = [("us", 2), ("eu", 3), ("us", 1), ("eu", -3), ("eu", 0)]
    job.write([("+I", {"id": key, "region": region}) for region, key in rows])
    job.run()
    (path,) = data_files(job)
    assert rows_in_file(path) == sorted(rows)
    checked = "\n".join(inspection.check(spark, job.config()))
    assert "rows sorted by region, id" in checked
    assert "readers hardly skip any" not in checked


@pytest.mark.spark
@pytest.mark.parametrize("writes", [{"deletes": "position"}, {"deletes": "equality"}, {"mode": "append", "key": ()}])
def test_a_tables_own_sort_order_is_kept(spark: SparkSession, tmp_path: Path, writes: Mapping[str, Any]) -> None:
    """In new files, and in those that a rewrite makes of them, whichever it is."""
    job = new_job(spark, tmp_path, "v3", {"min-input-files": 2}, 1 << 20, **writes)
    job.run()
    iceberg = spark.sparkContext._jvm.org.apache.iceberg  # type: ignore[union-attr]
    ref, first = iceberg.expressions.Expressions.ref, iceberg.NullOrder.NULLS_FIRST
    job.java_table().replaceSortOrder().desc(ref("region"), first).asc(ref("id"), first).commit()
    in_order = [(None, 4), (None, 9), ("us", 1), ("us", 2), ("eu", -3), ("eu", 3)]
    for first_row in range(3):
        job.write([("+I", {"id": key, "region": region}) for region, key in in_order[first_row::3][::-1]])
        job.run()

    def ordered(files: list[list[tuple[str | None, int]]]) -> list[list[tuple[str | None, int]]]:
        return [sorted(rows, key=in_order.index) for rows in files]

    before = list(map(rows_in_file, data_files(job)))
    assert (len(before), before) == (3, ordered(before))
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    after = list(map(rows_in_file, data_files(job)))
    assert len(after) == (1 if writes.get("deletes") == "position" else 2), done  # Iceberg's procedure leaves one
    assert after == ordered(after)
    assert sorted((row["id"], row["region"]) for row in job.rows()) == sorted((key, region) for region, key in in_order)


@pytest.mark.spark
@pytest.mark.parametrize("new", [Job, DeltaJob])
def test_an_order_is_of_no_use_in_files_that_are_too_large(spark: SparkSession, tmp_path: Path, new: type[Job]) -> None:
    """Such as those of Iceberg's and Delta's default size: what is sorted together becomes a single file."""
    job = new(spark, tmp_path, table={"maintenance": {"rewrite": SORT}}, tasks=1)
    job.pipeline().run()
    (warning,) = (line for line in inspection.check(spark, job.config()) if "readers hardly skip any" in line)
    assert "sorts 256 MB of files together (max-file-group-size-bytes), and they become files of 512 MB" in warning


@pytest.mark.spark
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("new", [Job, DeltaJob])
def test_what_is_wrong_with_columns_that_the_table_tells(
    spark: SparkSession, tmp_path: Path, new: type[Job], exists: bool
) -> None:
    columns = {"id": "bigint", "region": "string", "tags": "array<string>"}
    job = new(spark, tmp_path, columns=columns, configure_columns=not exists)
    if exists:
        replace(job, configure_columns=True).pipeline().run()
    job.table = {"maintenance": {"rewrite": {"sort": ["region", "tags"]}}}
    with pytest.raises(ConfigError) as caught:
        list(inspection.check(spark, job.config()))
    assert str(caught.value) == (
        "tables[0].maintenance.rewrite.sort[1]: got tags of type array<string>, which has no order; expected a "
        "number, a string, a date or a timestamp. Name another column."
    )
    if exists:
        job.table = {"maintenance": {"rewrite": {"sort": ["regio"]}}}
        with pytest.raises(ConfigError) as caught:
            list(inspection.check(spark, job.config()))
        assert str(caught.value) == (
            "tables[0].maintenance.rewrite.sort[0]: there is no column 'regio' (did you mean 'region'?). The columns "
            "are: id, region, tags."
        )


CONFIG = """\
sink: {id: shop, checkpoint: ./state}
source: {type: kafka, format: debezium-json, options: {kafka.bootstrap.servers: "127.0.0.1:1"}}
catalogs: {lake: {type: hadoop, warehouse: ./warehouse}}
tables:
  - source: orders
    target: lake.shop.orders
    key: [id]
    columns: {id: bigint, day: date, customer: string}
"""


def of_table(rewrite: str, *more: str) -> str:
    return CONFIG + "".join(f"    {line}\n" for line in (f"maintenance: {{rewrite: {{{rewrite}}}}}", *more))


def loaded(folder: Path, text: str) -> Config:
    path = folder / "sink.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (of_table("sort: []"), "9: tables[0].maintenance.rewrite.sort: got a list of 0, expected at least 1 in it."),
        (of_table("sort: day"), "9: tables[0].maintenance.rewrite.sort: got 'day', expected a list: [day]."),
        (of_table("sort: [day, day]"), "9: tables[0].maintenance.rewrite.sort: sort names 'day' twice. Name it once."),
        (
            of_table("sort: [custmer]"),
            "9: tables[0].maintenance.rewrite.sort: sort names 'custmer', which is not in columns (did you mean "
            "'customer'?).",
        ),
        (
            of_table("sort: [day]", "deletes: equality"),
            "9: tables[0].maintenance.rewrite.sort: table lake.shop.orders: got sort, but with deletes: equality "
            "Iceberg's procedure rewrites its files, which isn't told an order. Write deletes: position or "
            "copy-on-write, or leave sort out.",
        ),
        (
            CONFIG + "maintenance: {rewrite: {sort: [day, customer]}}\n",
            "9: maintenance.rewrite.sort: got [day, customer], but columns are those of one table, and here all tables "
            "are meant. Write it into the table's entry: maintenance: {rewrite: {sort: [day, customer]}}.",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert str(caught.value) == f"{tmp_path / 'sink.yaml'}:{expected}"


def test_an_order_leaves_the_limits_of_all_tables(tmp_path: Path) -> None:
    text = of_table("sort: [day], min-input-files: 3")
    limits = "maintenance: {rewrite: {min-input-files: 7, delete-ratio-threshold: 0.3}}\n"
    config = loaded(tmp_path, text + limits)
    found = config.maintenance_of(config.tables[0]).rewrite
    assert (found.sort, found.min_input_files, found.delete_ratio_threshold) == (["day"], 3, 0.3)
