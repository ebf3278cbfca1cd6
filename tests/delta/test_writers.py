"""Files, descriptions and deletion vectors of the Delta writers: read back by PyArrow and by Delta, and compared with
what Delta's own writer makes of the same rows.
"""

import json
import math
import pickle
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from changelog.rows import KIND, RowKind, order_column
from deltawriters import ContentFile, DeltaOptions, DeltaWriter, TaskId
from deltawriters.arrow_types import as_table_types
from deltawriters.content import DataFile, DataFiles, Partition
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import indexed
from deltawriters.table import FileFactory
from sink.targets.delta.partitions import double_text, encoded_path
from sink.targets.delta.statistics import longer_maximum, with_wide_bounds
from sink.targets.delta.vectors import NewVectorFile, decode_z85, encode_z85, read_vectors, vector_file
from sink.targets.delta.writers import DeltaTableSpec
from tests.delta.test_log_model import inline

ORDER = order_column(0)
WITH_VECTORS = {"delta.enableDeletionVectors": "true"}


def field(name: str, dtype: Any, number: int | None = None, *, nullable: bool = True) -> dict[str, Any]:
    """:param number: id of the column, if columns are mapped."""
    metadata = {}
    if number is not None:
        metadata = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
    return {"name": name, "type": dtype, "nullable": nullable, "metadata": metadata}


def struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


def array(element: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": True}


def table_at(
    folder: Path, *fields: dict[str, Any], by: Sequence[str] = (), properties: Mapping[str, str] | None = None
) -> DeltaTableSpec:
    """A table of these columns, partitioned by some of them."""
    given = WITH_VECTORS | dict(properties or {})
    return DeltaTableSpec(str(folder), json.dumps(struct(*fields)), tuple(by), tuple(given.items()), True)


def write(table: DeltaTableSpec, rows: Mapping[str, Sequence[Any]]) -> list[ContentFile]:
    types = table.arrow_schema
    columns = [pa.array(rows[part.name], part.type) for part in types]
    writer = PartitionedWriter(table, FileFactory(table, TaskId(0, 1, "op")), DataFiles())
    writer.write(as_table_types(pa.Table.from_arrays(columns, schema=types), types), last=True)
    return writer.close()


def all_rows(table: DeltaTableSpec, path: str, partition: Partition) -> pa.Table:
    """Of a data file, as a rewrite moves them."""
    return pa.concat_tables(rows for _, rows in table.rows(DataFile(indexed(path, partition))))


def adds(files: Sequence[ContentFile]) -> list[dict[str, Any]]:
    return [file.description["add"] for file in files]


def stats(file: ContentFile) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.description["add"]["stats"])
    return found


def changes(*rows: tuple[RowKind, int, int, str | None]) -> pa.RecordBatch:
    """Changelog rows of (kind, order, id, text)."""
    kinds, orders, ids, texts = zip(*rows, strict=True)
    return pa.RecordBatch.from_pydict(
        {
            KIND: pa.array(list(map(int, kinds)), pa.int8()),
            ORDER: pa.array(orders, pa.int64()),
            "id": pa.array(ids, pa.int64()),
            "text": pa.array(texts, pa.string()),
        }
    )


def written(table: DeltaTableSpec, *batches: pa.RecordBatch) -> list[ContentFile]:
    """Write changes; each batch is flushed before the next one comes."""
    options = DeltaOptions(("id",), table_is_empty=True, flush_bytes=1)
    writer = DeltaWriter(table, options, TaskId(0, 1, "op"))
    for batch in batches:
        writer.write(batch)
    return writer.close().files


def live(table: DeltaTableSpec, files: Sequence[ContentFile]) -> list[dict[str, Any]]:
    """The live rows of files, by their vectors."""
    found = []
    for file in files:
        descriptor = file.description["add"].get("deletionVector")
        dead = set(read_vectors(table.io, table.location, [descriptor])[0]) if descriptor else set()
        found += [row for pos, row in enumerate(pq.read_table(file.path).to_pylist()) if pos not in dead]
    return found


def test_types_of_columns(tmp_path: Path) -> None:
    table = table_at(
        tmp_path,
        field("at", "timestamp"),
        field("local", "timestamp_ntz"),
        field("day", "date", nullable=False),
        field("small", "byte"),
        field("price", "decimal(12,2)"),
        field("big", "decimal(38,10)"),
        field("parts", array(struct(field("x", "short")))),
        field("named", {"type": "map", "keyType": "string", "valueType": "float", "valueContainsNull": True}),
        field("nothing", "void"),
    )
    (file,) = write(
        table,
        {
            "at": [datetime(2024, 1, 2, tzinfo=UTC)],
            "local": [datetime(2024, 1, 2)],
            "day": [date(2024, 1, 2)],
            "small": [-3],
            "price": [Decimal("1.50")],
            "big": [Decimal("2.5")],
            "parts": [[{"x": 1}, None]],
            "named": [[("k", 0.5)]],
        },
    )
    schema = pq.ParquetFile(file.path).schema
    shown = {
        column.path: (column.physical_type, str(column.logical_type).partition("(")[0])
        for column in map(schema.column, range(len(schema.names)))
    }
    assert shown == {
        "at": ("INT64", "Timestamp"),
        "local": ("INT64", "Timestamp"),
        "day": ("INT32", "Date"),
        "small": ("INT32", "Int"),
        "price": ("INT64", "Decimal"),
        "big": ("FIXED_LEN_BYTE_ARRAY", "Decimal"),
        "parts.list.element.x": ("INT32", "Int"),
        "named.key_value.key": ("BYTE_ARRAY", "String"),
        "named.key_value.value": ("FLOAT", "None"),
    }
    assert "isAdjustedToUTC=true, timeUnit=microseconds" in str(schema.column(0).logical_type)
    assert "isAdjustedToUTC=false, timeUnit=microseconds" in str(schema.column(1).logical_type)
    assert schema.column(2).max_definition_level == 0
    assert pq.read_table(file.path).to_pylist()[0]["parts"] == [{"x": 1}, None]


@pytest.mark.parametrize("codec", ["snappy", "GZIP", "none", "lz4_raw", None])
def test_footers_and_codecs(tmp_path: Path, codec: str | None) -> None:
    """A file says that its dates are proleptic Gregorian: else Spark 3.5 refuses those before 1582."""
    given = {} if codec is None else {"delta.parquet.compression.codec": codec}
    (file,) = write(table_at(tmp_path, field("day", "date"), properties=given), {"day": [date(1, 1, 1)] * 9})
    found = pq.read_metadata(file.path)
    assert found.metadata == {b"org.apache.spark.version": b"4.0.0"}
    expected = {None: "ZSTD", "none": "UNCOMPRESSED", "lz4_raw": "LZ4"}.get(codec, str(codec).upper())
    assert found.row_group(0).column(0).compression == expected


def test_a_type_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("a", struct(field("v", "variant"))))
    with pytest.raises(ValueError, match=r"column a\.v is variant"):
        _ = table.arrow_schema


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_have_physical_names_and_ids(tmp_path: Path, mode: str) -> None:
    table = table_at(
        tmp_path,
        field("id", "long", 1),
        field("a", struct(field("b", array(struct(field("c", "string", 4))), 3), field("d", "double", 5)), 2),
        field("part", "string", 6),
        by=["part"],
        properties={"delta.columnMapping.mode": mode},
    )
    rows: dict[str, list[Any]] = {
        "id": [1, 2, 3],
        "a": [{"b": [{"c": "x"}, None], "d": math.nan}, None, {"b": None, "d": 2.0}],
        "part": ["p"] * 3,
    }
    (file,) = write(table, rows)
    (add,) = adds([file])
    assert pq.read_table(file.path).to_pylist()[0] == {
        "col-1": 1,
        "col-2": {"col-3": [{"col-4": "x"}, None], "col-5": pytest.approx(math.nan, nan_ok=True)},
    }
    found = pq.read_schema(file.path)
    inner = found.field("col-2").type
    ids = [found.field("col-1"), found.field("col-2"), inner.field("col-3"), inner.field("col-5")]
    ids.append(inner.field("col-3").type.value_type.field("col-4"))
    assert [int(part.metadata[b"PARQUET:field_id"]) for part in ids] == [1, 2, 3, 5, 4]
    assert add["partitionValues"] == {"col-6": "p"}
    folder, name = add["path"].split("/")
    assert (len(folder), folder.isalnum(), name) == (2, True, Path(file.path).name)
    assert stats(file) == {
        "numRecords": 3,
        "minValues": {"col-1": 1, "col-2": {"col-5": 2.0}},
        "maxValues": {"col-1": 3, "col-2": {"col-5": "NaN"}},
        "nullCount": {"col-1": 0, "col-2": {"col-3": 2, "col-5": 1}},
        "tightBounds": True,
    }
    (partition,) = [partition for partition, _ in table.split_by_partition(pa.table({"part": ["p"]}))]
    moved = all_rows(table, file.path, partition)
    assert moved.schema == table.of_moved_rows(data_change=False).arrow_schema
    assert [row["id"] for row in moved.to_pylist()] == [1, 2, 3]
    assert moved.column("a").to_pylist()[2] == {"b": None, "d": 2.0}
    assert moved.column("part").to_pylist() == ["p"] * 3


def test_paths_are_encoded_like_uris_of_escaped_folders(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("a b", "string"), by=["a b"])
    files = write(table, {"id": [1, 2, 3], "a b": ["50% off/é:[x]", "", None]})
    by_id = {stats(file)["minValues"]["id"]: file for file in files}
    assert len(files) == 2, "an empty text is null"
    (add,) = adds([by_id[1]])
    folder, _ = add["path"].split("/")
    assert folder == "a%20b=50%2525%20off%252Fé%253A%255Bx%255D"
    assert Path(by_id[1].path).parent == tmp_path / "a b=50%25 off%2Fé%3A%5Bx%5D"
    assert Path(by_id[1].path).exists()
    assert by_id[2].description["add"]["partitionValues"] == {"a b": None}
    assert "a b=__HIVE_DEFAULT_PARTITION__" in by_id[2].path
    assert encoded_path("a\u00a0b;c&d=e+f@g'h(i)!~*\"<>`^|") == "a%C2%A0b;c&d=e+f@g'h(i)!~*%22%3C%3E%60%5E%7C"


def test_numbers_are_written_as_java_does() -> None:
    values = [1.0, 0.1, 1e7, 12345678.9, 1e-3, 9.99e-4, -0.0, 1.5e300, math.inf, -math.inf, math.nan, 9999999.0]
    assert [double_text(value, single=False) for value in values] == [
        "1.0", "0.1", "1.0E7", "1.23456789E7", "0.001", "9.99E-4", "-0.0", "1.5E300", "Infinity", "-Infinity", "NaN",
        "9999999.0",
    ]  # fmt: skip
    assert [double_text(value, single=True) for value in (0.1, 1e10, 3.4e38)] == ["0.1", "1.0E10", "3.4E38"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a" * 32, "a" * 32),
        ("a" * 33, "a" * 32 + "\x7f"),
        ("a" * 32 + "\x7f" + "b", "a" * 32 + "\U0010ffff"),
        ("a" * 32 + "é", "a" * 32 + "\U0010ffff"),
        ("a" * 31 + "😀" * 3, "a" * 31 + "😀" + "\U0010ffff"),
        ("a" * 32 + "\U0010ffff" * 2 + "b" * 9, "a" * 32 + "\U0010ffff" * 2 + "\x7f"),
        ("a" * 32 + "\U0010ffff" * 2, "a" * 32 + "\U0010ffff" * 2),
        ("\U0010ffff" * 60, None),
    ],
)
def test_a_cut_maximum_is_not_less_than_what_it_was_cut_from(text: str, expected: str | None) -> None:
    assert longer_maximum(text, 32) == expected
    assert expected is None or expected.encode() >= text.encode()


def test_statistics_of_the_columns_that_the_table_names(tmp_path: Path) -> None:
    fields = [field(f"c{i}", "long") for i in range(3)]
    nested = field("S", struct(field("x.y", "long"), field("z", "boolean")))
    named = "c1, `S`.`x.y`, unknown"
    table = table_at(tmp_path / "named", *fields, nested, properties={"delta.dataSkippingStatsColumns": named})
    rows: dict[str, list[Any]] = {"c0": [1], "c1": [2], "c2": [3], "S": [{"x.y": 4, "z": True}]}
    (file,) = write(table, rows)
    assert stats(file)["minValues"] == {"c1": 2, "S": {"x.y": 4}}
    assert stats(file)["nullCount"] == {"c1": 0, "S": {"x.y": 0}}
    for count, expected in ((0, None), (2, {"c0": 0, "c1": 0}), (4, {"c0": 0, "c1": 0, "c2": 0, "S": {"x.y": 0}})):
        limited = {"delta.dataSkippingNumIndexedCols": str(count)}
        (file,) = write(table_at(tmp_path / str(count), *fields, nested, properties=limited), rows)
        assert stats(file).get("nullCount") == expected


def test_a_text_too_long_for_a_bound_has_none(tmp_path: Path) -> None:
    (file,) = write(table_at(tmp_path, field("text", "string")), {"text": ["x" * 100_000, "a", None]})
    assert stats(file)["nullCount"] == {"text": 1}
    assert "text" not in stats(file).get("maxValues", {})


def test_wide_bounds_keep_all_digits() -> None:
    """Read as a float, a maximum could become less than a value, and readers would skip the file."""
    tight = """{
        "numRecords": 2, "minValues": {"a": -12345678901234567890.123456789, "b": 1.0E300, "text": "1.50, \\"x"},
        "maxValues": {"a": 12345678901234567890.123456789, "n": {"c": 9007199254740993}}, "nullCount": {"a": 0},
        "tightBounds": true}"""
    wide = with_wide_bounds(tight, 9)
    digits = "12345678901234567890.123456789"
    assert f'"minValues":{{"a":-{digits},"b":1.0E300,"text":"1.50, \\"x"}}' in wide
    assert f'"maxValues":{{"a":{digits},"n":{{"c":9007199254740993}}}}' in wide
    assert json.loads(wide) == json.loads(tight) | {"tightBounds": False}
    assert json.loads(with_wide_bounds('{"numRecords":1}', 9)) == {"numRecords": 1, "tightBounds": False}
    uncounted = with_wide_bounds(tight.replace('"numRecords": 2,', ""), 9)
    assert f'"maxValues":{{"a":{digits},"n"' in uncounted
    assert json.loads(uncounted)["numRecords"] == 9
    assert json.loads(with_wide_bounds('{"numRecords":null}', 9)) == {"numRecords": 9, "tightBounds": False}


def test_superseded_rows_are_in_the_vector_of_their_file(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("text", "string"))
    files = written(
        table,
        changes(*((RowKind.INSERT, 1, i, "old") for i in range(4))),
        changes((RowKind.UPDATE_AFTER, 2, 1, "new"), (RowKind.DELETE, 2, 2, None)),
    )
    assert [file.vector is not None for file in files] == [True]
    assert sorted((row["id"], row["text"]) for row in live(table, files)) == [(0, "old"), (1, "new"), (3, "old")]


def test_vectors_are_in_files(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("text", "string"))
    random = np.random.default_rng(1)
    for number, count in enumerate((3, 3000)):
        spec = replace(table, location=f"{tmp_path}/{number}")
        gone = random.choice(10_000, count, replace=False).tolist()
        files = written(
            spec,
            changes(*((RowKind.INSERT, 1, i, None) for i in range(10_000))),
            changes(*((RowKind.DELETE, 2, i, None) for i in gone)),
        )
        (add,) = adds(files)
        descriptor = add["deletionVector"]
        assert (descriptor["storageType"], descriptor["cardinality"]) == ("u", count)
        assert sorted(row["id"] for row in live(spec, files)) == sorted(set(range(10_000)) - set(gone))
        assert json.loads(add["stats"])["tightBounds"] is False
        assert json.loads(add["stats"])["numRecords"] == 10_000


def test_a_file_without_a_live_row_is_left_out_and_deleted(tmp_path: Path) -> None:
    small = {"delta.targetFileSize": "1"}
    table = table_at(tmp_path, field("id", "long"), field("text", "string"), properties=small)
    files = written(
        table,
        changes((RowKind.INSERT, 1, 1, "a"), (RowKind.INSERT, 1, 2, "a")),
        changes((RowKind.DELETE, 2, 1, None), (RowKind.DELETE, 2, 2, None), (RowKind.INSERT, 2, 3, "b")),
        changes((RowKind.UPDATE_AFTER, 3, 3, "c")),
    )
    assert [row["text"] for row in live(table, files)] == ["c"]
    assert [str(path) for path in tmp_path.rglob("*.parquet")] == [file.path for file in files]


@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["a", "b", "", None]), st.booleans()), max_size=60
    ),
    batch_rows=st.integers(1, 9),
    partitioned=st.booleans(),
    mapped=st.booleans(),
    target_size=st.sampled_from(["1", "2000", "1g"]),
    random=st.randoms(use_true_random=False),
)
def test_the_live_rows_are_the_last_of_each_key(
    operations: list[tuple[int, str | None, bool]],
    batch_rows: int,
    partitioned: bool,
    mapped: bool,
    target_size: str,
    random: Any,
) -> None:
    """Whatever the order, the flushes, the partitions and the sizes of files."""
    with tempfile.TemporaryDirectory() as folder:
        table = table_at(
            Path(folder),
            *(field(name, dtype, number if mapped else None) for number, (name, dtype) in enumerate(ID_AND_TEXT)),
            by=["text"] if partitioned else [],
            properties={"delta.targetFileSize": target_size, "delta.columnMapping.mode": "name" if mapped else "none"},
        )
        rows = [(RowKind.DELETE if gone else RowKind.UPDATE_AFTER, number, key, text)
                for number, (key, text, gone) in enumerate(operations)]  # fmt: skip
        expected = {key: text for kind, _, key, text in rows}
        expected = {key: text for key, text in expected.items() if not operations[_last(operations, key)][2]}
        random.shuffle(rows)
        files = written(table, *(changes(*rows[i : i + batch_rows]) for i in range(0, len(rows), batch_rows)))
        found = []
        for file in files:
            partition = Partition(0, json.dumps(file.description["add"]["partitionValues"]))
            every = all_rows(table, file.path, partition)
            assert len(every) == stats(file)["numRecords"] == file.record_count
            descriptor = file.description["add"].get("deletionVector")
            assert (file.vector is not None) is (descriptor is not None) is (stats(file)["tightBounds"] is False)
            dead = read_vectors(table.io, table.location, [descriptor])[0] if descriptor else BitMap64()
            found += [(row["id"], row["text"]) for pos, row in enumerate(every.to_pylist()) if pos not in dead]
        if partitioned:
            expected = {key: text or None for key, text in expected.items()}
        assert sorted(found, key=str) == sorted(expected.items(), key=str)
        assert {str(path) for path in Path(folder).rglob("*.parquet")} == {file.path for file in files}


ID_AND_TEXT = (("id", "long"), ("text", "string"))


def _last(operations: Sequence[tuple[int, str | None, bool]], key: int) -> int:
    return max(number for number, (other, _, _) in enumerate(operations) if other == key)


def test_rows_cannot_be_deleted_where_the_table_has_no_vectors(tmp_path: Path) -> None:
    for supported, enabled in ((True, "false"), (False, "true")):
        schema = json.dumps(struct(field("id", "long"), field("text", "string")))
        properties = (("delta.enableDeletionVectors", enabled),)
        table = DeltaTableSpec(str(tmp_path), schema, (), properties, supported)
        with pytest.raises(ValueError, match=r"delta\.enableDeletionVectors"):
            written(table, changes((RowKind.INSERT, 1, 1, "a")), changes((RowKind.UPDATE_AFTER, 2, 1, "b")))
        (file,) = written(table, changes((RowKind.INSERT, 1, 1, "a")))
        assert ("tightBounds" in stats(file)) is supported


def test_an_aborted_task_leaves_no_files(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("text", "string"))
    writer = DeltaWriter(table, DeltaOptions(("id",), table_is_empty=True, flush_bytes=1), TaskId(0, 1, "op"))
    writer.write(changes((RowKind.INSERT, 1, 1, "a")))
    writer.abort()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_table_pickles_without_what_it_has_cached(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("text", "string"))
    size = len(pickle.dumps(table))
    write(table, {"id": [1], "text": ["a"]})
    assert len(pickle.dumps(table)) == size
    assert pickle.loads(pickle.dumps(table)) == table


def test_moved_rows_are_no_new_data(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"), field("day", "date"), by=["day"])
    (file,) = write(table, {"id": [1, 2, 3], "day": [date(2024, 1, 2)] * 3})
    ((partition, _),) = table.split_by_partition(pa.table({"day": pa.array([date(2024, 1, 2)], pa.date32())}))
    rows = all_rows(table, file.path, partition)
    moved = PartitionedWriter(
        table.of_moved_rows(data_change=False), FileFactory(table, TaskId(0, 2, "op")), DataFiles()
    )
    moved.write(rows.slice(1), last=True)
    (again,) = moved.close()
    (add,) = adds([again])
    assert add["dataChange"] is False
    assert pq.read_table(again.path).to_pylist() == [{"id": 2}, {"id": 3}]
    twice = all_rows(table, again.path, partition)
    assert twice.column("day").to_pylist() == [date(2024, 1, 2)] * 2
    wider = table_at(tmp_path, field("id", "long"), field("more", "long"))
    assert all_rows(wider, file.path, partition).column("more").to_pylist() == [None] * 3


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("string", ["a", None]),
        ("integer", [-1, None]),
        ("double", [1.5e300, -0.0]),
        ("boolean", [True, False]),
        ("binary", [b"\x01\x02", None]),
        ("date", [date(1, 1, 1), date(9999, 12, 31)]),
        ("timestamp", [datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), datetime(2024, 1, 2, tzinfo=UTC)]),
        ("timestamp_ntz", [datetime(1969, 12, 31, 23, 59, 59, 120000), datetime(2024, 1, 2)]),
        ("decimal(10,3)", [Decimal("-1.500"), Decimal("0.001")]),
    ],
)
def test_partition_values_are_read_back(tmp_path: Path, dtype: str, values: list[Any]) -> None:
    table = table_at(tmp_path, field("id", "long"), field("part", dtype), by=["part"])
    part = pa.array(values, table.arrow_schema.field("part").type)
    files = write(table, {"id": [0, 1], "part": values})
    for partition, numbers in table.split_by_partition(pa.table({"part": part})):
        (number,) = numbers.tolist()
        (file,) = [f for f in files if f.description["add"]["partitionValues"] == json.loads(partition.text)]
        rows = all_rows(table, file.path, partition)
        assert rows.column("part").to_pylist() == [values[number]]
        assert rows.column("id").to_pylist() == [number]


def test_z85() -> None:
    """The example of the ZeroMQ RFC 32, and those of PROTOCOL.md."""
    assert encode_z85(bytes.fromhex("864FD26FB559F75B")) == "HelloWorld"
    assert decode_z85("HelloWorld", 8).hex() == "864fd26fb559f75b"
    inline = {"storageType": "i", "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
              "sizeInBytes": 40, "cardinality": 6}  # fmt: skip
    file = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"}
    assert vector_file("s3://mytable/", file) == (
        "s3://mytable/ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    )
    assert vector_file("s3://t", {"storageType": "p", "pathOrInlineDv": "s3://o/a%20b.bin"}) == "s3://o/a b.bin"
    assert vector_file("s3://t", inline) is None
    with pytest.raises(ValueError, match=r"storage type 'r', and known are i, p and u.*REORG TABLE"):
        vector_file("s3://t", {"storageType": "r", "pathOrInlineDv": "ab/vectors.bin"})
    for wrong in ("HelloWorl", "HelloWorl\x00", "HelloWorlé", "#####"):
        with pytest.raises(ValueError, match="no Z85"):
            decode_z85(wrong, 8)


def test_vectors_of_one_file_are_read_by_their_descriptors(tmp_path: Path) -> None:
    table = table_at(tmp_path, field("id", "long"))
    random = np.random.default_rng(3)
    vectors = [BitMap64(random.integers(0, 2**40, size).tolist()) for size in (1, 5000, 17)]
    vectors.append(BitMap64(range(100_000)))
    new = NewVectorFile(str(tmp_path))
    descriptors = new.write(table.io, vectors)
    assert vector_file(str(tmp_path), descriptors[0]) == new.path
    UUID(Path(new.path).stem.removeprefix("deletion_vector_"))
    assert Path(new.path).read_bytes()[0] == 1
    assert descriptors[0]["offset"] == 1
    chosen = [descriptors[i] for i in (3, 1)] + [inline([5])]
    assert read_vectors(table.io, table.location, chosen) == [vectors[3], vectors[1], BitMap64([5])]


@pytest.mark.parametrize("damage", ["byte", "size", "cardinality", "short", "magic"])
def test_a_damaged_vector_is_refused_with_the_name_of_its_file(tmp_path: Path, damage: str) -> None:
    table = table_at(tmp_path, field("id", "long"))
    new = NewVectorFile(str(tmp_path))
    _, descriptor = new.write(table.io, [BitMap64([1]), BitMap64([3, 4])])
    path = Path(new.path)
    content = bytearray(path.read_bytes())
    if damage == "byte":
        content[-6] ^= 1
    elif damage == "size":
        descriptor["sizeInBytes"] -= 1
    elif damage == "cardinality":
        descriptor["cardinality"] = 3
    elif damage == "short":
        del content[-3:]
    else:
        content[descriptor["offset"] + 4] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=path.name):
        read_vectors(table.io, table.location, [descriptor])


def own_spec(folder: Path) -> DeltaTableSpec:
    """The table that Delta made at a folder, as the newest metadata and protocol in its log say."""
    actions = [json.loads(line) for version in sorted((folder / "_delta_log").glob("*.json"))
               for line in version.read_text().splitlines()]  # fmt: skip
    (*_, metadata) = (action["metaData"] for action in actions if "metaData" in action)
    (*_, protocol) = (action["protocol"] for action in actions if "protocol" in action)
    return DeltaTableSpec(
        str(folder),
        metadata["schemaString"],
        tuple(metadata["partitionColumns"]),
        tuple(metadata["configuration"].items()),
        "deletionVectors" in protocol.get("writerFeatures", ()),
    )


def logged_adds(folder: Path) -> list[dict[str, Any]]:
    versions = sorted((folder / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in versions[-1].read_text().splitlines()]
    return [action["add"] for action in actions if "add" in action]


def commit(folder: Path, files: Sequence[ContentFile]) -> None:
    """Add files to a table, without Delta."""
    version = len(list((folder / "_delta_log").glob("*.json")))
    lines = [json.dumps(file.description) for file in files]
    (folder / "_delta_log" / f"{version:020d}.json").write_text("\n".join(lines))


def by_partition(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics by partition values."""
    return {json.dumps(add["partitionValues"], sort_keys=True): json.loads(add["stats"]) for add in found}


ROWS: dict[str, tuple[str, list[Any]]] = {
    "flag": ("boolean", [True, None, False, True]),
    "tiny": ("tinyint", [-128, 127, None, 0]),
    "small": ("smallint", [None, 5, -5, 0]),
    "id": ("bigint", [2**62, 1, -(2**62), 7]),
    "single": ("float", [0.1, -3.4e38, None, 1e10]),
    "double": ("double", [0.1, 1e300, None, 123456789.125]),
    "nan": ("double", [math.nan, 1.0, None, -1.0]),
    "nans": ("float", [math.nan, None, math.nan, math.nan]),
    "infinite": ("double", [-math.inf, 1.0, math.inf, 0.0]),
    "price": ("decimal(9,2)", [Decimal("1.50"), Decimal("-9999999.99"), None, Decimal("0.01")]),
    "middle": ("decimal(18,4)", [Decimal("1.5"), Decimal("-99999999999999.9999"), None, Decimal(0)]),
    "big": ("decimal(38,10)", [Decimal("1.5"), Decimal("-9999999999999999999999999999.9999999999"), None, Decimal(0)]),
    "text": ("string", ["a" * 40, "b" * 31 + "😀" * 3, None, "é" * 33]),
    "high": ("string", ["\U0010ffff" * 40, "", None, "a"]),
    "raw": ("binary", [b"\x00\xff", None, b"", b"a"]),
    "day": ("date", [date(1, 1, 1), date(9999, 12, 31), None, date(1969, 12, 31)]),
    "at": (
        "timestamp",
        [datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), datetime(2024, 2, 29, 1, 2, 3, 456789, UTC), None,
         datetime(1, 1, 1, tzinfo=UTC)],
    ),
    "local": ("timestamp_ntz", [datetime(2024, 2, 29, 1, 2, 3, 999999), None, datetime(1900, 1, 1), None]),
    "nothing": ("string", [None] * 4),
    "list": ("array<int>", [[1, None], None, [], [2]]),
    "map": ("map<string,double>", [[("k", 1.0)], None, [], [("k", None)]]),
    "nested": (
        "struct<x: bigint, y: struct<z: string, when: date, f: float>, l: array<int>, none: int>",
        [
            {"x": 1, "y": {"z": "c" * 33, "when": date(2024, 1, 1), "f": math.nan}, "l": [1], "none": None},
            None,
            {"x": None, "y": None, "l": None, "none": None},
            {"x": -5, "y": {"z": None, "when": None, "f": 1.5}, "l": [], "none": None},
        ],
    ),
}  # fmt: skip
"""Columns: the type, and the values of four rows."""


def created(
    spark: SparkSession, folder: Path, columns: Mapping[str, str], by: str = "", **properties: str
) -> DeltaTableSpec:
    """A new table of Delta's at a folder."""
    listed = ", ".join(f"`{name}` {dtype}" for name, dtype in columns.items())
    given = "".join(f", '{name.replace('_', '.', 1)}' = '{value}'" for name, value in properties.items())
    partitioned = f"PARTITIONED BY ({by})" if by else ""
    spark.sql(
        f"CREATE TABLE delta.`{folder}` ({listed}) USING delta {partitioned} "
        f"TBLPROPERTIES ('delta.enableDeletionVectors' = 'true'{given})"
    )
    return own_spec(folder)


def both(
    spark: SparkSession, tmp_path: Path, rows: Mapping[str, tuple[str, list[Any]]], by: str = "", **properties: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Path]:
    """The adds of Delta's own writer and ours for the same rows, and the folder of a table that has ours."""
    types = {name: dtype for name, (dtype, _) in rows.items()}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    table = replace(created(spark, theirs, types, by, **properties), location=str(ours))
    shutil.copytree(theirs / "_delta_log", ours / "_delta_log")
    files = write(table, {name: values for name, (_, values) in rows.items()})
    commit(ours, files)
    plain = table.arrow_schema
    columns = [pa.array(values, plain.field(name).type) for name, (_, values) in rows.items()]
    pq.write_table(pa.Table.from_arrays(columns, schema=plain), tmp_path / "rows.parquet")
    frame = spark.read.parquet(str(tmp_path / "rows.parquet")).coalesce(1)
    frame.write.format("delta").mode("append").save(str(theirs))
    return logged_adds(theirs), adds(files), ours


def shown(spark: SparkSession, folder: Path) -> list[str]:
    """The rows of a table, as JSON: Python has no times before the year 1, which other time zones need."""
    return sorted(spark.read.format("delta").load(str(folder)).toJSON().collect())


@pytest.mark.spark
def test_statistics_are_those_of_deltas_own_writer(spark: SparkSession, tmp_path: Path) -> None:
    theirs, ours, folder = both(spark, tmp_path, ROWS)
    assert by_partition(ours) == by_partition(theirs)
    assert shown(spark, folder) == shown(spark, tmp_path / "theirs")
    # files are skipped by statistics: the greatest value is still found
    for name in ("text", "high", "at", "local", "day", "big", "single"):
        dtype, values = ROWS[name]
        greatest = str(max(value for value in values if value is not None)).replace("+00:00", "Z")
        is_it = F.col(name) == F.lit(greatest).cast(dtype)
        assert spark.read.format("delta").load(str(folder)).where(is_it).count() == 1, name


@pytest.mark.spark
@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_columns_are_those_of_deltas_own_writer(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    rows = {name: ROWS[name] for name in ("id", "text", "nested", "list", "map")} | {
        "part": ("string", ["a", "b", "a", "b"])
    }
    mapped = {"delta_columnMapping.mode": mode}
    theirs, ours, folder = both(spark, tmp_path, rows, "part", **mapped)

    assert by_partition(ours) == by_partition(theirs)
    assert shown(spark, folder) == shown(spark, tmp_path / "theirs")


@pytest.mark.spark
@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"delta_dataSkippingNumIndexedCols": "5"},
        {"delta_dataSkippingNumIndexedCols": "-1"},
        {"delta_dataSkippingStatsColumns": "s.b, c7"},
    ],
    ids=["default", "five", "all", "named"],
)
def test_as_many_columns_have_statistics_as_by_deltas_own_writer(
    spark: SparkSession, tmp_path: Path, properties: dict[str, str]
) -> None:
    value: dict[str, tuple[str, list[Any]]] = {
        "s": ("struct<a: int, b: struct<c: int, d: int>>", [{"a": 1, "b": {"c": 2, "d": 3}}])
    }
    rows = value | {f"c{i}": ("int", [i]) for i in range(28)} | {"t": value["s"]}
    theirs, ours, _ = both(spark, tmp_path, rows, **properties)
    assert by_partition(ours) == by_partition(theirs)


@pytest.mark.spark
def test_partition_values_are_those_of_deltas_own_writer(spark: SparkSession, tmp_path: Path) -> None:
    """By columns of all types, so that four rows are four partitions."""
    names = ["flag", "small", "id", "double", "price", "text", "day", "at", "local"]
    rows = {"number": ("int", [1, 2, 3, 4])} | {name: ROWS[name] for name in names}
    rows["text"] = ("string", ["a/b c%20=:?#'\"[]{}^*\\é", "", None, "x"])
    theirs, ours, folder = both(spark, tmp_path, rows, ", ".join(names))
    assert len(by_partition(ours)) == 4
    assert by_partition(ours) == by_partition(theirs)
    assert sorted(add["path"].rpartition("/")[0] for add in ours) == sorted(
        add["path"].rpartition("/")[0] for add in theirs
    )
    assert shown(spark, folder) == shown(spark, tmp_path / "theirs")


@pytest.mark.spark
def test_delta_reads_the_vectors(spark: SparkSession, tmp_path: Path) -> None:
    """Several of one file, in one commit."""
    folder = tmp_path / "table"
    table = created(spark, folder, {"id": "bigint", "text": "string"}, "text")
    random = np.random.default_rng(1)
    gone = [*range(5), *(random.choice(10_000, 3000, replace=False) + 10_000).tolist()]
    files = written(
        table,
        changes(*((RowKind.INSERT, 1, i, "few") for i in range(10))),
        changes(*((RowKind.INSERT, 1, i, "many") for i in range(10_000, 20_000))),
        changes(*((RowKind.DELETE, 2, i, None) for i in gone), (RowKind.UPDATE_AFTER, 3, 7, "new")),
    )
    kinds = {add["partitionValues"]["text"]: add.get("deletionVector", {}).get("storageType") for add in adds(files)}
    assert kinds == {"few": "u", "many": "u", "new": None}
    commit(folder, files)
    found = {row.id: row.text for row in spark.read.format("delta").load(str(folder)).collect()}
    assert sorted(found) == sorted({*range(10), *range(10_000, 20_000)} - set(gone))
    assert {number for number, text in found.items() if text == "new"} == {7}


@pytest.mark.spark
def test_vectors_of_deltas_own_writer_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """Also those that replace vectors of ours."""
    folder = tmp_path / "table"
    table = created(spark, folder, {"id": "bigint", "text": "string"})
    rows = changes(*((RowKind.INSERT, 1, i, None) for i in range(1000)))
    files = written(table, rows, changes(*((RowKind.DELETE, 2, i, None) for i in range(3))))
    commit(folder, files)
    spark.sql(f"DELETE FROM delta.`{folder}` WHERE id % 7 = 5")
    (add,) = logged_adds(folder)
    assert add["path"] == Path(files[0].path).name
    (positions,) = read_vectors(table.io, table.location, [add["deletionVector"]])
    assert positions == BitMap64([*range(3), *range(5, 1000, 7)])
