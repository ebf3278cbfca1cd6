"""The delta writer against a model: whatever the changes, flushes and splits, the table equals last-write-wins."""

import itertools
import pickle
import tempfile
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from changelog.rows import HASH, KIND, RowKind, order_column
from deltawriters import (
    CardinalityError,
    ContentFile,
    DeltaOptions,
    DeltaWriter,
    FileContent,
    TaskId,
    arrow_types,
    resolve,
    whole_changes,
)
from deltawriters.content import DataFiles, Partition
from deltawriters.keyindex import IndexSlice, RunInfo, high_hash, low_hash
from deltawriters.ordering import RowOrder
from deltawriters.resolve import IndexTask
from deltawriters.table import FileFactory
from sink.targets.iceberg.writers import IcebergTableSpec
from tests.deltawriters.lake import Lake

SCHEMA = """{"type":"struct","schema-id":0,"identifier-field-ids":[1,2],"fields":[
  {"id":1,"name":"id","required":true,"type":"long"},
  {"id":2,"name":"shop","required":true,"type":"string"},
  {"id":3,"name":"region","required":false,"type":"string"},
  {"id":4,"name":"amount","required":false,"type":"decimal(12, 2)"}]}"""
UNPARTITIONED = '{"spec-id":0,"fields":[]}'
BY_KEY = '{"spec-id":1,"fields":[{"name":"id_bucket","transform":"bucket[3]","source-id":1,"field-id":1000}]}'
BY_REGION = '{"spec-id":1,"fields":[{"name":"region","transform":"identity","source-id":3,"field-id":1000}]}'

ORDER = order_column(0)


def table_at(
    folder: str | Path, spec: str = UNPARTITIONED, version: int = 2, properties: dict[str, str] | None = None
) -> IcebergTableSpec:
    specs = (UNPARTITIONED,) if spec == UNPARTITIONED else (UNPARTITIONED, spec)
    return IcebergTableSpec(str(folder), version, SCHEMA, specs, len(specs) - 1, tuple((properties or {}).items()))


def batch(changes: list[tuple[RowKind, int, dict[str, Any]]]) -> pa.RecordBatch:
    """Changelog rows of (kind, order, row)."""
    columns = {
        KIND: pa.array([int(kind) for kind, _, _ in changes], pa.int8()),
        ORDER: pa.array([order for _, order, _ in changes], pa.int64()),
        "id": pa.array([row["id"] for _, _, row in changes], pa.int64()),
        "shop": pa.array([row.get("shop", "s") for _, _, row in changes], pa.string()),
        "region": pa.array([row.get("region") for _, _, row in changes], pa.string()),
        "amount": pa.array([row.get("amount") for _, _, row in changes], pa.decimal128(12, 2)),
    }
    return pa.RecordBatch.from_pydict(columns)


def write(
    table: IcebergTableSpec, options: DeltaOptions, *batches: pa.RecordBatch, operation: str = "op"
) -> list[ContentFile]:
    writer = DeltaWriter(table, options, TaskId(0, 1, operation))
    for changes in batches:
        writer.write(changes)
    return writer.close().files


def contents(files: list[ContentFile]) -> dict[FileContent, int]:
    """Rows by file content."""
    return {
        c: sum(f.record_count for f in files if f.content is c)
        for c in FileContent
        if any(f.content is c for f in files)
    }


KEY = ("id", "shop")
EVERY_BATCH = 1  # flush_bytes so low that each written batch is flushed


def test_buffered_changes_of_a_key_collapse_in_memory(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    files = write(
        table,
        DeltaOptions(KEY, table_is_empty=True),
        batch([(RowKind.INSERT, 1, {"id": 1}), (RowKind.UPDATE_AFTER, 2, {"id": 1, "region": "eu"})]),
        batch([(RowKind.INSERT, 3, {"id": 2}), (RowKind.DELETE, 4, {"id": 2})]),
    )
    assert contents(files) == {FileContent.DATA: 1}
    lake = Lake(table, [files])
    assert lake.rows() == [{"id": 1, "shop": "s", "region": "eu", "amount": None}]


@pytest.mark.parametrize("version", [2, 3])
def test_a_written_row_that_changes_again_gets_a_position_delete(tmp_path: Path, version: int) -> None:
    table = table_at(tmp_path, version=version)
    files = write(
        table,
        DeltaOptions(KEY, flush_bytes=EVERY_BATCH),
        batch([(RowKind.INSERT, 1, {"id": 1}), (RowKind.INSERT, 2, {"id": 2})]),
        batch([(RowKind.UPDATE_AFTER, 3, {"id": 1, "region": "eu"}), (RowKind.DELETE, 4, {"id": 2})]),
    )
    assert contents(files) == {FileContent.DATA: 3, FileContent.POSITION_DELETES: 2, FileContent.EQUALITY_DELETES: 2}
    lake = Lake(table, [files])
    assert lake.rows() == [{"id": 1, "shop": "s", "region": "eu", "amount": None}]
    deletes = [file for file in files if file.content is FileContent.POSITION_DELETES]
    assert {file.description["file-format"] for file in deletes} == {"PARQUET" if version == 2 else "PUFFIN"}


def test_late_arrival_of_an_earlier_change_changes_nothing(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    files = write(
        table,
        DeltaOptions(KEY, flush_bytes=EVERY_BATCH),
        batch([(RowKind.UPDATE_AFTER, 9, {"id": 1, "region": "new"})]),
        batch([(RowKind.INSERT, 1, {"id": 1, "region": "old"})]),
    )
    assert [row["region"] for row in Lake(table, [files]).rows()] == ["new"]
    assert contents(files) == {FileContent.DATA: 1, FileContent.EQUALITY_DELETES: 1}


def test_changelog_mode_trusts_a_first_insert(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    changes = batch(
        [
            (RowKind.INSERT, 1, {"id": 1}),
            (RowKind.UPDATE_BEFORE, 2, {"id": 2}),
            (RowKind.UPDATE_AFTER, 3, {"id": 2}),
            (RowKind.INSERT, 4, {"id": 3}),
            (RowKind.DELETE, 5, {"id": 3}),
        ]
    )
    files = write(table, DeltaOptions(KEY, mode="changelog"), changes)
    assert contents(files) == {FileContent.DATA: 2, FileContent.EQUALITY_DELETES: 1}


def test_changelog_mode_finds_the_first_change_across_flushes_in_any_order(tmp_path: Path) -> None:
    table = table_at(tmp_path, BY_REGION)
    first = batch([(RowKind.UPDATE_BEFORE, 1, {"id": 1, "region": "eu"})])
    second = batch([(RowKind.UPDATE_AFTER, 2, {"id": 1, "region": "us"})])
    for number, order in enumerate(itertools.permutations([first, second])):
        files = write(
            table, DeltaOptions(KEY, mode="changelog", flush_bytes=EVERY_BATCH), *order, operation=str(number)
        )
        (delete,) = [file for file in files if file.content is FileContent.EQUALITY_DELETES]
        assert list(delete.description["partition"].values()) == ["eu"]


def test_an_update_moves_the_row_to_its_new_partition(tmp_path: Path) -> None:
    table = table_at(tmp_path, BY_REGION)
    lake = Lake(table)
    lake.commit(write(table, DeltaOptions(KEY), batch([(RowKind.INSERT, 1, {"id": 1, "region": "eu"})]), operation="a"))
    moved = batch(
        [(RowKind.UPDATE_BEFORE, 2, {"id": 1, "region": "eu"}), (RowKind.UPDATE_AFTER, 3, {"id": 1, "region": "us"})]
    )
    lake.commit(write(table, DeltaOptions(KEY, mode="changelog"), moved, operation="b"))
    assert [row["region"] for row in lake.rows()] == ["us"]


def test_an_unknown_old_partition_is_deleted_from_globally(tmp_path: Path) -> None:
    table = table_at(tmp_path, BY_REGION)
    lake = Lake(table)
    lake.commit(write(table, DeltaOptions(KEY), batch([(RowKind.INSERT, 1, {"id": 1, "region": "eu"})]), operation="a"))
    moved = batch([(RowKind.UPDATE_AFTER, 3, {"id": 1, "region": "us"})])
    files = write(table, DeltaOptions(KEY, mode="upsert"), moved, operation="b")
    lake.commit(files)
    assert [row["region"] for row in lake.rows()] == ["us"]
    (delete,) = [file for file in files if file.content is FileContent.EQUALITY_DELETES]
    assert table.specs_by_id[delete.description["spec-id"]].is_unpartitioned()


@pytest.mark.parametrize(
    ("regions", "known"),
    [
        (["eu"], []),  # nothing shows that it isn't the column's default
        (["eu", "eu"], []),
        (["eu", "us"], ["eu", "us"]),
        (["eu", ""], []),
        (["eu", "us", "", None], ["eu", "us"]),
    ],
)
def test_an_old_partition_that_may_be_made_up_is_unknown(
    tmp_path: Path, regions: list[str | None], known: list[str]
) -> None:
    """Postgres may have logged only the columns of an index. Then Debezium writes '' or the column's default."""
    table = table_at(tmp_path, BY_REGION)
    lake = Lake(table)
    homes = ["eu", "us", "asia", "asia"][: len(regions)]  # where the rows are
    rows = [(RowKind.INSERT, 1, {"id": i, "region": home}) for i, home in enumerate(homes)]
    lake.commit(write(table, DeltaOptions(KEY), batch(rows), operation="a"))
    changes = [(RowKind.UPDATE_BEFORE, 2, {"id": i, "region": region}) for i, region in enumerate(regions)]
    changes += [(RowKind.UPDATE_AFTER, 3, {"id": i, "region": "new"}) for i in range(len(regions))]
    files = write(table, DeltaOptions(KEY, mode="changelog", deletes_carry_row=False), batch(changes), operation="b")
    lake.commit(files)
    assert [row["region"] for row in lake.rows()] == ["new"] * len(regions)
    deletes = [file for file in files if file.content is FileContent.EQUALITY_DELETES]
    globally = sum(f.record_count for f in deletes if table.specs_by_id[f.description["spec-id"]].is_unpartitioned())
    inside = [f for f in deletes if not table.specs_by_id[f.description["spec-id"]].is_unpartitioned()]
    assert sorted(str(*f.description["partition"].values()) for f in inside) == known
    assert globally == len(regions) - len(known)


def test_data_files_roll_at_the_target_size(tmp_path: Path) -> None:
    table = table_at(tmp_path, properties={"write.target-file-size-bytes": "2000"})
    rows = [(RowKind.INSERT, i, {"id": i, "region": f"region {i * 7919 % 1000}"}) for i in range(1000)]
    files = write(table, DeltaOptions(KEY, table_is_empty=True), batch(rows))
    assert len(files) > 5
    assert sorted(row["id"] for row in Lake(table, [files]).rows()) == list(range(1000))


def test_a_position_delete_file_is_flushed_at_its_threshold(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    batches = [batch([(RowKind.UPDATE_AFTER, n, {"id": i}) for i in range(10)]) for n in range(5)]
    files = write(table, DeltaOptions(KEY, flush_bytes=EVERY_BATCH, position_delete_threshold=10), *batches)
    deletes = [file for file in files if file.content is FileContent.POSITION_DELETES]
    assert [file.record_count for file in deletes] == [10, 10, 10, 10]
    assert len(Lake(table, [files]).rows()) == 10


def test_no_delete_file_is_larger_whoever_deletes(tmp_path: Path) -> None:
    """The text of paths must fit into Arrow's 32-bit offsets, and a commit may delete all rows of a large file."""
    table, files = table_at(tmp_path), DataFiles()
    number = files.add(f"{tmp_path}/a.parquet", Partition(0, "{}"))
    deletes = table.deletes(FileFactory(table, TaskId(0, 1, "op")), files, 10)
    deletes.delete(np.full(4, number), np.arange(4))
    deletes.delete(np.full(21, number), np.arange(4, 25))
    written = deletes.close([])
    assert [file.record_count for file in written] == [10, 10, 5]
    rows = pa.concat_tables(pq.read_table(file.path) for file in written)
    assert rows.column("pos").to_pylist() == list(range(25))


def test_files_are_named_by_partition_task_operation_and_sequence(tmp_path: Path) -> None:
    files = write(table_at(tmp_path), DeltaOptions(KEY), batch([(RowKind.INSERT, 1, {"id": 1})]))
    assert [Path(file.path).name for file in files] == ["00000-1-op-00001.parquet", "00000-1-op-00002.parquet"]


def test_abort_deletes_everything_written(tmp_path: Path) -> None:
    writer = DeltaWriter(table_at(tmp_path, BY_KEY), DeltaOptions(KEY, flush_bytes=EVERY_BATCH), TaskId(0, 1, "op"))
    for number in range(3):
        writer.write(batch([(RowKind.UPDATE_AFTER, number, {"id": i}) for i in range(10)]))
    assert list(tmp_path.rglob("*.parquet"))
    writer.abort()
    assert not list(tmp_path.rglob("*.parquet"))


def test_ties_are_settled_by_content_whatever_the_arrival(tmp_path: Path) -> None:
    changes = [(RowKind.INSERT, 7, {"id": 1, "region": r}) for r in ("a", "b", "c")]
    outcomes = set()
    for number, order in enumerate(itertools.permutations(changes)):
        batches = [batch([change]) for change in order]
        for flush_bytes in (EVERY_BATCH, 1 << 20):
            table = table_at(tmp_path / f"{number}-{flush_bytes}")
            files = write(table, DeltaOptions(KEY, flush_bytes=flush_bytes), *batches)
            outcomes.add(tuple(row["region"] for row in Lake(table, [files]).rows()))
    assert len(outcomes) == 1


def test_a_delete_that_carries_its_rows_order_value_removes_it(tmp_path: Path) -> None:
    changes: list[tuple[RowKind, int, dict[str, Any]]] = [
        (RowKind.DELETE, 7, {"id": 1}),
        (RowKind.UPDATE_AFTER, 7, {"id": 1}),
        (RowKind.UPDATE_BEFORE, 7, {"id": 1}),
    ]
    assert not write(table_at(tmp_path), DeltaOptions(KEY, table_is_empty=True), batch(changes))


def test_an_update_may_share_one_order_value(tmp_path: Path) -> None:
    changes: list[tuple[RowKind, int, dict[str, Any]]] = [
        (RowKind.UPDATE_AFTER, 7, {"id": 1, "region": "new"}),
        (RowKind.UPDATE_BEFORE, 7, {"id": 1}),
    ]
    files = write(table_at(tmp_path), DeltaOptions(KEY, mode="changelog"), batch(changes))
    assert [row["region"] for row in Lake(table_at(tmp_path), [files]).rows()] == ["new"]


def test_contradicting_ties_are_refused_in_changelog_mode(tmp_path: Path) -> None:
    changes = [(RowKind.INSERT, 7, {"id": 1, "region": "a"}), (RowKind.INSERT, 7, {"id": 1, "region": "b"})]
    with pytest.raises(CardinalityError, match=r"'id': 1.*at order \(7,\)"):
        write(table_at(tmp_path), DeltaOptions(KEY, mode="changelog"), batch(changes))
    options = DeltaOptions(KEY, mode="changelog", flush_bytes=EVERY_BATCH)
    with pytest.raises(CardinalityError):
        # the first of them is written by then
        write(table_at(tmp_path), options, *(batch([change]) for change in changes))
    same: list[tuple[RowKind, int, dict[str, Any]]] = [(RowKind.INSERT, 7, {"id": 1, "region": "a"})] * 2
    write(table_at(tmp_path), DeltaOptions(KEY, mode="changelog"), batch(same))
    write(table_at(tmp_path), options, *(batch([change]) for change in same))


def test_values_are_not_shown_unless_they_may_be(tmp_path: Path) -> None:
    changes = [(RowKind.INSERT, 73519, {"id": 41_234, "region": region}) for region in ("a", "b")]
    with pytest.raises(
        CardinalityError, match=r"id \(integer of 5 digits\), .* order \(integer of 5 digits\)"
    ) as error:
        write(table_at(tmp_path), DeltaOptions(KEY, mode="changelog", show_values=False), batch(changes))
    assert not any(value in str(error.value) for value in ("73519", "41234"))


def test_only_content_columns_contradict(tmp_path: Path) -> None:
    """A difference in other columns, such as the file of a row, doesn't make it another row."""
    changes: list[tuple[RowKind, int, dict[str, Any]]] = [
        (RowKind.INSERT, 7, {"id": 1, "region": "a", "amount": amount}) for amount in (Decimal(1), Decimal(2))
    ]
    with pytest.raises(CardinalityError):
        write(table_at(tmp_path), DeltaOptions(KEY, mode="changelog"), batch(changes))
    options = DeltaOptions(KEY, mode="changelog", content=("id", "shop", "region"))
    assert contents(write(table_at(tmp_path), options, batch(changes))) == {FileContent.DATA: 1}


@pytest.mark.parametrize("mode", ["upsert", "changelog"])
def test_more_text_of_keys_than_32_bit_offsets_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """The commit's keys are held in Arrow's large types then, and no array of the usual ones has more than it can."""
    monkeypatch.setattr(arrow_types, "MOST_TEXT", 1000)
    joined: list[pa.Table] = []
    concat = whole_changes.concat

    def joining(known: pa.Table | None, more: pa.Table) -> pa.Table:
        joined.append(concat(known, more))
        return joined[-1]

    monkeypatch.setattr(whole_changes, "concat", joining)
    names = [f"shop {n:094d}" for n in range(40)]
    batches = [
        batch(
            [
                (RowKind.UPDATE_BEFORE, 2 * n, {"id": 1, "shop": name}),
                (RowKind.UPDATE_AFTER, 2 * n + 1, {"id": 1, "shop": name}),
            ]
        )
        for n, name in enumerate([*names, *names])
    ]
    table = table_at(tmp_path)
    files = write(table, DeltaOptions(KEY, mode=mode, flush_bytes=EVERY_BATCH), *batches)
    types = {
        table.schema.field("shop").type for table in joined if "shop" in table.column_names and table.nbytes > 1000
    }
    assert types == {pa.large_string()}
    assert sorted(row["shop"] for row in Lake(table, [files]).rows()) == names
    keys = [file for file in files if file.content is FileContent.EQUALITY_DELETES]
    assert len(keys) > 1
    found = [row for file in keys for row in pq.read_table(file.path).to_pylist()]
    assert sorted(row["shop"] for row in found) == names


def test_more_text_of_keys_than_32_bit_offsets_reach_with_a_key_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys of the commit are hashed at once, and those of the commit before are found."""
    monkeypatch.setattr(arrow_types, "MOST_TEXT", 1000)
    hashed: set[pa.DataType] = set()

    def hashing(columns: list[pa.Array], base: int) -> Any:
        hashed.update(column.type for column in columns)
        return low_hash(columns, base)

    monkeypatch.setattr(resolve, "low_hash", hashing)
    table = table_at(tmp_path)
    names = [f"shop {n:094d}" for n in range(40)]
    runs: tuple[RunInfo, ...] = ()
    results = []
    for sequence, (kind, changed) in enumerate([(RowKind.INSERT, names[:30]), (RowKind.DELETE, names[10:])]):
        index = IndexTask(IndexSlice(str(tmp_path), (), runs, {}), 0, 2**64, sequence, f"run{sequence}")
        options = DeltaOptions(KEY, flush_bytes=EVERY_BATCH)
        writer = DeltaWriter(table, options, TaskId(0, sequence, "op"), index)
        for order, name in enumerate(changed):
            changes = batch([(kind, order, {"id": 1, "shop": name})])
            keys = [changes.column(key) for key in KEY]
            writer.write(changes.append_column(HASH, pa.array(high_hash(keys).view(np.int64))))
        result = writer.close().index
        assert result is not None
        runs += tuple(result.runs)
        results.append(result)
    assert pa.large_string() in hashed
    assert pa.string() not in hashed
    assert [(r.inserted, r.updated, r.deleted, r.absent) for r in results] == [(30, 0, 0, 0), (0, 0, 20, 10)]
    deleted = [(old.file.path, position) for old in results[1].old_rows for position in old.positions.tolist()]
    found = [pq.read_table(path).column("shop")[position].as_py() for path, position in deleted]
    assert sorted(found) == names[10:30]


def test_a_table_pickles_without_what_it_has_cached(tmp_path: Path) -> None:
    table = table_at(tmp_path)
    size = len(pickle.dumps(table))
    assert table.iceberg_schema.fields
    assert table.arrow_schema.names
    assert len(pickle.dumps(table)) == size
    assert pickle.loads(pickle.dumps(table)) == table


class Source:
    """A database that emits a faithful changelog of random operations."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], dict[str, Any]] = {}
        self.order = 0

    def apply(self, operation: tuple[int, str, str | None, bool]) -> list[tuple[RowKind, int, dict[str, Any]]]:
        number, shop, region, delete = operation
        key = (number, shop)
        row = {"id": number, "shop": shop, "region": region, "amount": None}
        old = self.rows.get(key)
        self.order += 2
        if delete:
            if old is None:
                return []
            del self.rows[key]
            return [(RowKind.DELETE, self.order, old)]
        self.rows[key] = row
        if old is None:
            return [(RowKind.INSERT, self.order, row)]
        return [(RowKind.UPDATE_BEFORE, self.order, old), (RowKind.UPDATE_AFTER, self.order + 1, row)]


OPERATIONS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["a", "b"]), st.sampled_from([None, "eu", "us", "ap"]), st.booleans()),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(
    operations=OPERATIONS,
    spec=st.sampled_from([UNPARTITIONED, BY_KEY, BY_REGION]),
    version=st.sampled_from([2, 3]),
    mode=st.sampled_from(["upsert", "changelog"]),
    commits=st.integers(1, 4),
    tasks=st.integers(1, 2),
    batch_rows=st.integers(1, 9),
    flush_bytes=st.sampled_from([1, 300, 1 << 20]),
    most_text=st.sampled_from([arrow_types.MOST_TEXT, 200, 10]),
    order=st.sampled_from([None, RowOrder(("region", "amount")), RowOrder(("amount", "shop"))]),
    random=st.randoms(use_true_random=False),
)
def test_the_table_equals_the_source(
    operations: list[Any], spec: str, version: int, mode: Any, commits: int, tasks: int,
    batch_rows: int, flush_bytes: int, most_text: int, order: RowOrder | None, random: Any,
) -> None:  # fmt: skip
    """:param most_text: of a commit's keys, from which on 32-bit offsets don't do."""
    source = Source()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_types, "MOST_TEXT", most_text)
        table = table_at(folder, spec, version, {"write.target-file-size-bytes": "900"})
        lake = Lake(table)
        per_commit = -(-len(operations) // commits) or 1
        for commit, start in enumerate(range(0, len(operations), per_commit)):
            changes = [c for o in operations[start : start + per_commit] for c in source.apply(o)]
            files = []
            for task in range(tasks):
                mine = [c for c in changes if (c[2]["id"] + ord(c[2]["shop"])) % tasks == task]
                random.shuffle(mine)
                options = DeltaOptions(KEY, mode, table_is_empty=not lake.snapshots, flush_bytes=flush_bytes,
                                       position_delete_threshold=3)  # fmt: skip
                writer = DeltaWriter(table, options, TaskId(task, commit * 10 + task, "op"), order=order)
                for offset in range(0, len(mine), batch_rows):
                    writer.write(batch(mine[offset : offset + batch_rows]))
                files += writer.close().files
            lake.commit(files)
            live = {(row["id"], row["shop"]): row for row in lake.rows()}
            assert len(live) == len(lake.rows()), "two live rows of one key"
            assert live == source.rows


def test_a_key_map_filters_every_field() -> None:
    """One of another type than those that it has must not stay as it is in silence."""
    table, numbers = pa.table({"id": [1, 2]}), np.arange(2)
    known: Any = whole_changes.KeyMap(table, None, numbers.astype(np.int8), numbers, numbers, table, numbers)
    rest = known.filter(np.array([False, True]))
    assert (rest.keys, rest.last_order, rest.first, rest.content) == (table.slice(1), None, table.slice(1), None)
    assert [list(field) for field in (rest.last_kinds, rest.file, rest.pos, rest.hash)] == [[1]] * 4
    with pytest.raises(AttributeError):
        replace(known, content=[1, 2]).filter(np.array([False, True]))
