"""Partial updates in the delta writer, against a plain model: whatever the changes, flushes and arrival."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.decoding import decoded_schema
from changelog.rows import BAD, HASH, KIND, UNAVAILABLE, RowKind, order_column, unavailable_bits
from deltawriters import DeltaOptions, DeltaWriter, TaskId, WriteResult
from deltawriters.arrow_types import as_table_types
from deltawriters.combine import combined
from deltawriters.content import DataFile, DataFiles
from deltawriters.keyindex import (
    SUPERSEDES,
    Entries,
    IndexedFile,
    IndexSlice,
    RunInfo,
    high_hash,
    open_run,
    write_run,
)
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import IndexTask, delete_rows
from deltawriters.scratch import Scratch
from deltawriters.table import FileFactory, UnreadableRowsError
from sink.targets.iceberg.projection import IcebergProjection
from sink.targets.iceberg.writers import IcebergTableSpec
from tests.changelog.messages import spec
from tests.deltawriters.lake import Lake

SCHEMA = """{"type":"struct","schema-id":0,"fields":[
  {"id":1,"name":"id","required":true,"type":"long"},
  {"id":2,"name":"region","required":false,"type":"string"},
  {"id":3,"name":"note","required":false,"type":"string"},
  {"id":4,"name":"tags","required":false,"type":{"type":"list","element-id":5,"element":"string","element-required":false}}]}"""
UNPARTITIONED = '{"spec-id":0,"fields":[]}'
BY_REGION = '{"spec-id":1,"fields":[{"name":"region","transform":"identity","source-id":2,"field-id":1000}]}'
COLUMNS = ("id", "region", "note", "tags")
ORDER = order_column(0)
TYPES = {"id": pa.int64(), "region": pa.string(), "note": pa.string(), "tags": pa.list_(pa.string())}
BAD_TYPE = decoded_schema(spec({"id": "bigint"})).field(BAD).type

Change = tuple[RowKind, int, dict[str, Any]]
"""Kind, order, row. A row without some columns is partial; one that is removed, only if it has more than its key."""


def table_at(
    folder: str | Path, spec: str = UNPARTITIONED, version: int = 3, properties: dict[str, str] | None = None
) -> IcebergTableSpec:
    specs = (UNPARTITIONED,) if spec == UNPARTITIONED else (UNPARTITIONED, spec)
    return IcebergTableSpec(str(folder), version, SCHEMA, specs, len(specs) - 1, tuple((properties or {}).items()))


def is_partial(change: Change) -> bool:
    return len(change[2]) < len(COLUMNS) and (change[0] is not RowKind.DELETE or len(change[2]) > 1)


def batch(changes: list[Change]) -> pa.RecordBatch:
    partial = np.array([is_partial(change) for change in changes])
    lacking = [np.array([p and name not in c[2] for c, p in zip(changes, partial, strict=True)]) for name in COLUMNS]
    letters = [
        {"source": "t", "partition": 0, "offset": order, "reason": "column x: not sent", "error_class": "unavailable"}
        if is_lacking and kind is RowKind.UPDATE_AFTER
        else None
        for (kind, order, _), is_lacking in zip(changes, partial, strict=True)
    ]
    columns = {
        KIND: pa.array([int(kind) for kind, _, _ in changes], pa.int8()),
        ORDER: pa.array([order for _, order, _ in changes], pa.int64()),
        BAD: pa.array(letters, BAD_TYPE),
        UNAVAILABLE: unavailable_bits(lacking, partial),
    }
    columns |= {name: pa.array([row.get(name) for _, _, row in changes], TYPES[name]) for name in COLUMNS}
    columns[HASH] = pa.array(high_hash([columns["id"]]).view(np.int64))
    fields = [pa.field(name, values.type, nullable=name != KIND) for name, values in columns.items()]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))


class Table:
    """A table, its key index, and the commits of one task."""

    def __init__(self, spec: IcebergTableSpec) -> None:
        self.spec = spec
        self.lake = Lake(spec)
        self.runs: tuple[RunInfo, ...] = ()

    def commit(self, *batches: pa.RecordBatch, **options: Any) -> WriteResult:
        number = len(self.lake.snapshots) + 1
        index = IndexTask(IndexSlice(self.spec.location, (), self.runs, {}), 0, 2**64, number, f"run{number}")
        task = TaskId(0, number, "op")
        writer = DeltaWriter(self.spec, DeltaOptions(("id",), **({"flush_bytes": 1 << 20} | options)), task, index)
        for changes in batches:
            writer.write(changes)
        result = writer.close()
        assert result.index is not None
        deletes = delete_rows(
            self.spec, TaskId(1, number, "old"), result.index.old_rows, Scratch("t", lambda _: self.spec.io)
        )
        self.lake.commit([*result.files, *deletes])
        self.runs += tuple(result.index.runs)
        return result

    def rows(self) -> dict[int, dict[str, Any]]:
        found = self.lake.rows()
        rows = {row["id"]: row for row in found}
        assert len(rows) == len(found), "two live rows of one key"
        return rows


def letters(result: WriteResult) -> dict[int, str]:
    """Reasons by offset."""
    found = [letter for part in result.completed.letters for letter in part.to_pylist()]
    assert len({letter["offset"] for letter in found}) == len(found)
    return {letter["offset"]: letter["reason"] for letter in found}


def row(number: int, **values: Any) -> dict[str, Any]:
    return {"id": number, "region": "eu", "note": "a", "tags": ["x"]} | values


def partial(order: int, number: int, **values: Any) -> Change:
    return RowKind.UPDATE_AFTER, order, {"id": number} | values


def soft_delete(order: int, number: int) -> Change:
    return RowKind.DELETE, order, {"id": number, "note": "deleted"}


ABSENT = "column x: not sent, and the table has no row with this key"
GONE = "column x: not sent, and the row was deleted before"


def test_a_partial_row_is_completed_from_the_table_s_row(tmp_path: Path) -> None:
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1)), (RowKind.INSERT, 2, row(2, tags=None))]))
    result = table.commit(batch([partial(3, 1, note="b"), partial(4, 2, region="us", note=None), partial(5, 3)]))
    assert table.rows() == {1: row(1, note="b"), 2: row(2, region="us", note=None, tags=None)}
    assert letters(result) == {5: ABSENT}
    (letter,) = result.completed.letters[0].to_pylist()
    assert (letter["error_class"], letter["source"], letter["partition"]) == ("row_absent", "t", 0)
    assert result.rows == {"-U": 0, "+I": 0, "+U": 2, "-D": 0}
    assert result.completed.rows == 2
    assert list(result.completed.files) == [table.lake.snapshots[0][0].path]


@pytest.mark.parametrize("flush_bytes", [1, 1 << 20])
def test_earlier_changes_of_the_commit_complete_too(tmp_path: Path, flush_bytes: int) -> None:
    """A chain of partial rows, after an insert, after a delete, before a delete, before a whole row."""
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, n, row(n)) for n in range(2, 7)]))
    changes = [
        (RowKind.INSERT, 11, row(1)), partial(12, 1, note="b"), partial(13, 1, region="us"),
        (RowKind.DELETE, 14, {"id": 2}), partial(15, 2, note="c"),
        partial(16, 3, note="d"), (RowKind.DELETE, 17, {"id": 3}),
        partial(18, 4, note="e"), (RowKind.UPDATE_AFTER, 19, row(4, tags=[])),
        (RowKind.DELETE, 20, {"id": 5}), (RowKind.INSERT, 21, row(5, region=None)), partial(22, 5, note="f"),
        partial(23, 6, note="g", tags=["y"]), partial(24, 6, region="ap"), partial(25, 6, tags=None),
    ]  # fmt: skip
    result = table.commit(*(batch([change]) for change in changes), flush_bytes=flush_bytes)
    assert table.rows() == {
        1: row(1, note="b", region="us"),
        4: row(4, tags=[]),
        5: row(5, region=None, note="f"),
        6: row(6, note="g", region="ap", tags=None),
    }
    assert letters(result) == {15: GONE}
    assert sum(result.rows.values()) == len(changes) - 1
    assert result.index is not None
    assert (result.index.inserted, result.index.updated, result.index.deleted) == (1, 3, 2)


def test_all_columns_of_several_partial_rows_need_no_file(tmp_path: Path) -> None:
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1))]))
    first, second = partial(2, 1, note="b", tags=[]), partial(3, 1, region="us", note="c")
    Path(table.lake.snapshots[0][0].path).rename(tmp_path / "elsewhere")
    table.commit(batch([first, second]))
    (path,) = [file.path for file in table.lake.snapshots[1] if file.content.value == "DATA"]
    assert pq.read_table(path).to_pylist() == [row(1, region="us", note="c", tags=[])]


def test_a_key_with_two_rows_is_not_completed(tmp_path: Path) -> None:
    """Only another writer can have written the second. Nothing tells which of them is right."""
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1))]))
    runs = table.runs
    table.runs = ()
    index = table.commit(batch([(RowKind.INSERT, 2, row(1, note="b"))])).index
    assert index is not None
    own = index.runs[0]
    run = open_run(IndexSlice(str(tmp_path), (), (), {}).io, str(tmp_path), own)
    additive = Entries(run.high, run.low, run.file & ~SUPERSEDES, run.pos, tuple(run.files))
    table.runs = (*runs, write_run(table.spec.io, str(tmp_path), "other", 9, additive))
    result = table.commit(batch([partial(3, 1, note="c")]))
    assert letters(result) == {3: "column x: not sent, and the table has several rows with this key"}
    assert [r["note"] for r in table.lake.rows()] == ["a", "b"]


def test_at_an_equal_order_value_a_partial_row_builds_on_the_whole_one(tmp_path: Path) -> None:
    """Whatever arrives first, and however the writer flushes. A delete of the same order value comes later."""
    ties = [
        (RowKind.UPDATE_AFTER, 7, row(1, note="w")),
        partial(7, 1, region="us"),
        partial(7, 1, region="ap", note="p"),
        (RowKind.DELETE, 7, {"id": 2}),
        partial(7, 2, note="x"),
    ]
    outcomes = set()
    for number, order in enumerate(itertools.permutations(ties)):
        table = Table(table_at(tmp_path / f"{number}"))
        (tmp_path / f"{number}").mkdir()
        flush_bytes = 1 if number % 2 else 1 << 20
        table.commit(batch([(RowKind.INSERT, 1, row(2))]))
        result = table.commit(*(batch([change]) for change in order), flush_bytes=flush_bytes)
        assert not letters(result)
        (found,) = table.rows().values()
        assert (found["note"], found["tags"]) == ("p", ["x"])
        outcomes.add(found["region"])
    assert len(outcomes) == 1


def test_only_the_row_groups_and_columns_that_are_needed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(table_at(tmp_path, properties={"write.parquet.row-group-size-bytes": "1000"}))
    table.commit(batch([(RowKind.INSERT, n, row(n)) for n in range(500)]))
    table.commit(batch([(RowKind.INSERT, n, row(n)) for n in range(500, 600)]))
    (big, *_), (small, *_) = table.lake.snapshots
    assert pq.ParquetFile(big.path).metadata.num_row_groups > 10
    read: list[tuple[int, list[str]]] = []
    original = pq.ParquetFile.read_row_group

    def read_row_group(self: Any, number: int, columns: list[str], **more: Any) -> Any:
        read.append((number, columns))
        return original(self, number, columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    changed = [3, 1, 499]
    Path(small.path).rename(tmp_path / "elsewhere")  # nothing may read it
    table.commit(batch([partial(1000 + n, n, note="b", region="us") for n in changed]))
    Path(tmp_path / "elsewhere").rename(small.path)
    last = pq.ParquetFile(big.path).metadata.num_row_groups - 1
    assert read == [(0, ["tags"]), (last, ["tags"])]
    assert {number: found for number, found in table.rows().items() if found["note"] == "b"} == {
        number: row(number, note="b", region="us") for number in changed
    }


def test_partial_rows_go_to_the_partition_of_the_row_that_completes_them(tmp_path: Path) -> None:
    table = Table(table_at(tmp_path, BY_REGION, 2))
    table.commit(batch([(RowKind.INSERT, 1, row(1)), (RowKind.INSERT, 2, row(2))]))
    table.commit(batch([partial(3, 1, note="b"), partial(4, 2, region="us")]))
    assert table.rows() == {1: row(1, note="b"), 2: row(2, region="us")}
    data = [file for file in table.lake.snapshots[1] if file.content.value == "DATA"]
    assert sorted(str(file.description["partition"]) for file in data) == ["{'1000': 'eu'}", "{'1000': 'us'}"]


def test_a_combiner_leaves_partial_rows_and_what_they_build_on() -> None:
    left_out: list[dict[str, int]] = []
    changes = [(RowKind.INSERT, n, row(1, note=str(n))) for n in range(5)]
    changes += [partial(5, 1, region="us"), partial(6, 1, note="p")]
    found = pa.Table.from_batches(combined([batch(changes)], ["id"], COLUMNS, left_out.append))
    assert sorted(found.column(ORDER).to_pylist()) == [4, 5, 6]
    assert left_out == [{"+I": 4}]


@pytest.mark.parametrize("flush_bytes", [1, 1 << 20])
def test_the_kind_decides_if_the_key_has_no_row(tmp_path: Path, flush_bytes: int) -> None:
    """In the table, in the commit, and after a delete of the commit."""
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, n, row(n)) for n in (1, 2, 3)]))
    changes = [
        (RowKind.INSERT, 11, {"id": 1, "note": "b"}), soft_delete(12, 2),
        (RowKind.INSERT, 13, {"id": 4, "note": "c"}), soft_delete(14, 5), partial(15, 6, note="d"),
        (RowKind.INSERT, 16, row(7)), soft_delete(17, 7),
        (RowKind.DELETE, 18, {"id": 3}), soft_delete(19, 3), partial(20, 3, note="e"),
        (RowKind.INSERT, 21, {"id": 3, "tags": ["y"]}), soft_delete(22, 3),
    ]  # fmt: skip
    result = table.commit(*(batch([change]) for change in changes), flush_bytes=flush_bytes)
    empty = dict.fromkeys(COLUMNS)
    assert table.rows() == {
        1: row(1, note="b"),
        2: row(2, note="deleted"),
        3: empty | {"id": 3, "note": "deleted", "tags": ["y"]},
        4: empty | {"id": 4, "note": "c"},
        7: row(7, note="deleted"),
    }
    assert letters(result) == {15: ABSENT, 20: GONE}
    assert result.rows == {"-U": 0, "+I": 4, "+U": 0, "-D": 6}
    assert result.index is not None
    assert (result.index.inserted, result.index.updated, result.index.absent) == (2, 3, 1)


def test_a_soft_delete_takes_its_place_in_the_order(tmp_path: Path) -> None:
    """Before whole and partial changes of its key, and after one with the same order value."""
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, n, row(n)) for n in (1, 2, 3)]))
    changes = [
        soft_delete(5, 1), (RowKind.UPDATE_AFTER, 6, row(1, region="us")),
        soft_delete(5, 2), partial(6, 2, region="us", note="back"), (RowKind.INSERT, 7, {"id": 2, "tags": []}),
        (RowKind.UPDATE_AFTER, 5, row(3, region="us")), soft_delete(5, 3), partial(5, 3, tags=[]),
    ]  # fmt: skip
    for arrival in (changes, changes[::-1]):
        result = table.commit(*(batch([change]) for change in arrival))
        assert not letters(result)
        assert table.rows() == {
            1: row(1, region="us"),
            2: row(2, region="us", note="back", tags=[]),
            3: row(3, region="us", note="deleted", tags=[]),
        }


def test_of_several_rows_of_a_key_one_is_marked_as_deleted(tmp_path: Path) -> None:
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1))]))
    runs, table.runs = table.runs, ()
    index = table.commit(batch([(RowKind.INSERT, 2, row(1, region="us"))])).index
    assert index is not None
    run = open_run(table.spec.io, str(tmp_path), index.runs[0])
    additive = Entries(run.high, run.low, run.file & ~SUPERSEDES, run.pos, tuple(run.files))
    table.runs = (*runs, write_run(table.spec.io, str(tmp_path), "other", 9, additive))
    result = table.commit(batch([soft_delete(3, 1)]))
    assert table.rows() == {1: row(1, region="us", note="deleted")}
    assert not letters(result)


def test_a_soft_delete_of_what_can_t_be_read_stops_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1))]))

    def rows(*_: Any, **__: Any) -> Any:
        raise UnreadableRowsError("nobody can read it")

    monkeypatch.setattr(IcebergTableSpec, "rows", rows)
    with pytest.raises(UnreadableRowsError, match="nobody can read it"):
        table.commit(batch([soft_delete(3, 1)]))


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["whole", "delete", "partial", "partial", "partial insert", "soft delete"]),
        st.sampled_from([None, "eu", "us"]),
        st.sampled_from(["a", "b", "c"]),
        st.sets(st.sampled_from(COLUMNS[1:]), min_size=1),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    operations=OPERATIONS,
    partitioned=st.booleans(),
    commits=st.integers(1, 4),
    batch_rows=st.integers(1, 9),
    flush_bytes=st.sampled_from([1, 700, 1 << 20]),
    combines=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_the_table_equals_the_model(
    operations: list[Any], partitioned: bool, commits: int, batch_rows: int, flush_bytes: int, combines: bool,
    random: Any,
) -> None:  # fmt: skip
    model: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = table_at(folder, BY_REGION, 2) if partitioned else table_at(folder)
        table = Table(made)
        size = -(-len(operations) // commits) or 1
        for start in range(0, len(operations), size):
            changes: list[Change] = []
            expected: dict[int, list[int]] = {}
            for order, (number, verb, region, note, lacking) in enumerate(operations[start : start + size], start):
                new = row(number, region=region, note=note, tags=[str(order)])
                if verb == "delete":
                    model.pop(number, None)
                    changes.append((RowKind.DELETE, order, {"id": number}))
                elif verb == "whole":
                    model[number] = new
                    changes.append((RowKind.UPDATE_AFTER, order, new))
                elif verb == "soft delete":
                    changes.append(soft_delete(order, number))
                    if number in model:
                        model[number] = model[number] | {"note": "deleted"}
                elif verb == "partial insert":
                    sent = {name: value for name, value in new.items() if name not in lacking}
                    changes.append((RowKind.INSERT, order, sent))
                    model[number] = model.get(number, dict.fromkeys(COLUMNS)) | sent
                else:
                    sent = {name: value for name, value in new.items() if name not in lacking}
                    changes.append((RowKind.UPDATE_AFTER, order, sent))
                    if number in model:
                        model[number] = model[number] | sent
                if verb in ("whole", "delete"):
                    expected.pop(number, None)
                elif verb == "partial" and number not in model:
                    expected.setdefault(number, []).append(order)
            random.shuffle(changes)
            batches = [batch(changes[at : at + batch_rows]) for at in range(0, len(changes), batch_rows)]
            if combines:
                batches = list(combined(batches, ["id"], COLUMNS, lambda _: None, 2000))
            result = table.commit(*batches, flush_bytes=flush_bytes)
            assert table.rows() == model
            assert sorted(letters(result)) == sorted(order for orders in expected.values() for order in orders)


OLDER = """{"type":"struct","schema-id":0,"fields":[
  {"id":1,"name":"key","required":true,"type":"int"},
  {"id":7,"name":"gone","required":false,"type":"string"},
  {"id":3,"name":"text","required":false,"type":"string"},
  {"id":5,"name":"place","required":false,"type":{"type":"struct","fields":[
    {"id":6,"name":"x","required":false,"type":"int"}]}}]}"""
NEWER = """{"type":"struct","schema-id":1,"fields":[
  {"id":5,"name":"point","required":false,"type":{"type":"struct","fields":[
    {"id":6,"name":"x","required":false,"type":"long"},{"id":8,"name":"text","required":false,"type":"string"}]}},
  {"id":1,"name":"id","required":true,"type":"long"},
  {"id":3,"name":"note","required":false,"type":"string"},
  {"id":9,"name":"gone","required":false,"type":"int","initial-default":5,"write-default":6},
  {"id":10,"name":"region","required":false,"type":"string"}]}"""


def test_rows_of_files_that_are_older_than_the_schema(tmp_path: Path) -> None:
    """Columns are found by field id: renamed, widened, moved, dropped and added again, inside of a struct too."""
    older = IcebergTableSpec(str(tmp_path), 3, OLDER, (UNPARTITIONED,), 0)
    writer = PartitionedWriter(older, FileFactory(older, TaskId(0, 1, "op")), DataFiles())
    old = [{"key": n, "gone": "x", "text": f"t{n}", "place": {"x": n} if n else None} for n in range(3)]
    writer.write(pa.Table.from_pylist(old, older.arrow_schema))
    (file,) = writer.close()
    by_region = '{"spec-id":0,"fields":[{"name":"r","transform":"identity","source-id":10,"field-id":1000}]}'
    newer = IcebergTableSpec(str(tmp_path), 3, NEWER, (by_region,), 0)
    names = ["id", "note", "gone", "point", "region"]
    indexed = IndexedFile(file.path, 0, {"1000": "eu"})
    ((part, rows),) = newer.rows(DataFile(indexed), at=np.array([0, 2]), columns=names)
    assert part.tolist() == [0, 2]
    assert rows.schema.equals(pa.schema([f for f in newer.arrow_schema if f.name in names]), check_metadata=False)
    assert rows.select(names).to_pylist() == [
        {"id": 0, "note": "t0", "gone": 5, "point": None, "region": "eu"},
        {"id": 2, "note": "t2", "gone": 5, "point": {"x": 2, "text": None}, "region": "eu"},
    ]
    ((_, rows),) = newer.rows(DataFile(indexed), at=np.array([1]), columns=["gone"])  # of which the file has nothing
    assert rows.to_pylist() == [{"gone": 5}]


def nested(*names: str, x: str) -> str:
    """A schema of lists and maps of structs. The fields inside have these names, and one of them this type."""
    one, two, three = (
        {"type": "struct", "fields": [{"id": number, "name": name, "required": False, "type": dtype}]}
        for number, name, dtype in zip((4, 8, 12), names, (x, "int", "int"), strict=True)
    )
    deep = {"type": "list", "element-id": 11, "element-required": False, "element": three}
    types: list[Any] = [
        "int",
        {"type": "list", "element-id": 3, "element-required": False, "element": one},
        {"type": "map", "key-id": 6, "key": "string", "value-id": 7, "value-required": False, "value": two},
        {"type": "list", "element-id": 10, "element-required": False, "element": deep},
    ]
    parts = zip((1, 2, 5, 9), ("id", "points", "places", "deep"), types, strict=True)
    fields = [{"id": n, "name": name, "required": name == "id", "type": dtype} for n, name, dtype in parts]
    return json.dumps({"type": "struct", "schema-id": 0, "fields": fields})


def test_what_is_inside_of_lists_and_maps_is_found_by_id(tmp_path: Path) -> None:
    """NULL stays NULL, and nothing is lost if a field inside was renamed: also if a rewrite moves the rows."""
    older = IcebergTableSpec(str(tmp_path), 3, nested("x", "y", "z", x="int"), (UNPARTITIONED,), 0)
    newer = IcebergTableSpec(str(tmp_path), 3, nested("px", "py", "pz", x="long"), (UNPARTITIONED,), 0)

    def rows(x: str, y: str, z: str) -> list[dict[str, Any]]:
        return [
            {"id": 0, "points": None, "places": None, "deep": None},
            {"id": 1, "points": [], "places": [], "deep": []},
            {"id": 2, "points": [None, {x: 1}], "places": [("a", None), ("b", {y: 2})], "deep": [None, [], [{z: 3}]]},
            {"id": 3, "points": [{x: None}], "places": [("c", {y: None})], "deep": [[None]]},
        ]

    writer = PartitionedWriter(older, FileFactory(older, TaskId(0, 1, "op")), DataFiles())
    writer.write(pa.Table.from_pylist(rows("x", "y", "z"), older.arrow_schema))
    (written,) = writer.close()
    file = IndexedFile(written.path, 0, {})
    names = ["id", "points", "places", "deep"]
    for chosen in ([0, 1, 2, 3], [1, 2], [3]):
        ((_, found),) = newer.rows(DataFile(file), at=np.array(chosen), columns=names)
        assert found.to_pylist() == [rows("px", "py", "pz")[number] for number in chosen]
    whole = DataFile(file, 1000, 0, 1)
    for table, fields in ((newer, ("px", "py", "pz")), (older, ("x", "y", "z"))):
        moving = table.of_moved_rows(data_change=False)
        ((places, found),) = moving.rows(whole, left_out=np.array([0]))
        assert found.select(names).to_pylist() == rows(*fields)[1:]
        assert found.column("_row_id").to_pylist() == places.tolist() == [1, 2, 3]


def test_more_text_than_one_array_holds(tmp_path: Path) -> None:
    """Of one row group of another writer. It comes in several chunks, which can't be united."""
    table = IcebergTableSpec(str(tmp_path), 2, OLDER, (UNPARTITIONED,), 0)
    wanted = table.iceberg_schema.select("key", "text")
    types = pa.schema([table.arrow_schema.field("key"), table.arrow_schema.field("text")])
    half = pa.array(["x" * 1_100_000_000])
    group = pa.table({"key": pa.array([1, 2], pa.int32()), "text": pa.chunked_array([half, half])}, types)

    projection = IcebergProjection(DataFile(IndexedFile("any.parquet", 0, {})), wanted, types, None, {})
    projection.choose(types)
    rows = as_table_types(projection.project(group, np.array([0, 1])), types)
    assert rows["key"].to_pylist() == [1, 2]
    assert pc.utf8_length(rows["text"]).to_pylist() == [1_100_000_000] * 2


def test_a_file_that_can_t_be_read_makes_dead_letters(tmp_path: Path) -> None:
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1))]))
    path = table.lake.snapshots[0][0].path
    pq.write_table(pq.read_table(path).replace_schema_metadata().cast(
        pa.schema([pa.field(name, dtype) for name, dtype in TYPES.items()])), path)  # fmt: skip
    result = table.commit(batch([partial(2, 1, note="b")]))
    (reason,) = letters(result).values()
    assert reason.startswith(f"column x: not sent, and {path} has columns that can't be read")
    (reason,) = letters(table.commit(batch([partial(3, 1, note="b")]), show_values=False)).values()
    assert reason == "column x: not sent, and the file of the table's row can't be read"
    assert table.rows() == {1: row(1)}


@pytest.mark.parametrize("flush_bytes", [1, 1 << 20])
def test_what_can_t_be_read_again_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_bytes: int) -> None:
    """A file of the commit itself, and the second row group of a file: what was read before is no dead letter."""
    table = Table(table_at(tmp_path, properties={"write.parquet.row-group-size-bytes": "1"}))
    table.commit(*(batch([(RowKind.INSERT, n, row(n))]) for n in (1, 2)), flush_bytes=1)
    original = IcebergTableSpec.rows

    def rows(self: Any, file: DataFile, **others: Any) -> Any:
        yield next(original(self, file, **others))
        raise UnreadableRowsError("nobody can read it")

    monkeypatch.setattr(IcebergTableSpec, "rows", rows)
    changes = [
        (RowKind.INSERT, 3, row(3)),
        (RowKind.INSERT, 4, row(4)),
        partial(5, 3, note="b"),
        partial(6, 4, note="b"),
    ]
    changes += [partial(7, 1, note="b"), partial(8, 2, note="b")]
    result = table.commit(*(batch([change]) for change in changes), flush_bytes=flush_bytes)
    found = {number: found["note"] for number, found in table.rows().items()}
    refused = letters(result)
    assert len(found) == 4
    assert {number for number, note in found.items() if note == "a"} == {{5: 3, 6: 4, 7: 1, 8: 2}[n] for n in refused}
    assert len(refused) == (2 if flush_bytes == 1 else 1)


def test_more_messages_of_partial_rows_than_an_array_can_have(tmp_path: Path) -> None:
    """The messages are 3 GB of virtual memory, of which nothing is copied."""
    table = Table(table_at(tmp_path))
    table.commit(batch([(RowKind.INSERT, 1, row(1))]))
    small = [batch([partial(n, 1, note=str(n))]) for n in range(2, 5)] + [batch([partial(5, 9)])]
    message = pa.py_buffer(np.zeros(1 << 30, np.uint8))
    batches = []
    for number, changes in enumerate(small):
        bad = changes.column(BAD)
        fields = {part.name: bad.field(part.name) for part in bad.type}
        if number < 3:
            fields["value"] = pa.Array.from_buffers(
                pa.binary(), 1, [None, pa.py_buffer(np.array([0, 1 << 30], np.int32)), message]
            )
        large = pa.StructArray.from_arrays(list(fields.values()), fields=list(bad.type))
        batches.append(changes.set_column(changes.schema.names.index(BAD), changes.schema.field(BAD), large))
    result = table.commit(*batches)
    assert letters(result) == {5: ABSENT}
    assert table.rows() == {1: row(1, note="4")}


@pytest.mark.parametrize("flush_bytes", [1, 1 << 20])
def test_nothing_of_before_a_truncate_completes_a_row(tmp_path: Path, flush_bytes: int) -> None:
    """Whether the TRUNCATE arrives first or last. A partial row of before it is void, and no dead letter."""
    changes = [
        partial(2, 1, note="void"), (RowKind.INSERT, 3, row(2)), partial(6, 2, note="b"),
        partial(7, 1, note="c"), (RowKind.INSERT, 8, row(3)), partial(9, 3, note="d"),
    ]  # fmt: skip
    for number, arrival in enumerate((0, 3, 6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        table = Table(table_at(folder))
        table.commit(batch([(RowKind.INSERT, 1, row(1))]))
        index = IndexTask(IndexSlice(str(folder), (), table.runs, {}), 0, 2**64, 2, "run2")
        writer = DeltaWriter(table.spec, DeltaOptions(("id",), flush_bytes=flush_bytes), TaskId(0, 2, "op"), index)
        for place, change in enumerate([*changes, None]):
            if place == arrival:
                writer.truncate(batch([(RowKind.DELETE, 5, {"id": 0})]))
            if change is not None:
                writer.write(batch([change]))
        result = writer.close()
        assert letters(result) == {6: ABSENT, 7: ABSENT}
        assert Lake(table.spec, [result.files]).rows() == [row(3, note="d")]
