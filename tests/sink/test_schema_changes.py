"""The source's schema changes while the job runs: `schema_changes` evolve, ignore and fail. Also renamed, computed and
metadata columns.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from sink.commands import inspection
from sink.errors import ConfigError, DataError, TableError, TemporaryError
from sink.spark.versions import to_arrow
from sink.table import microbatch
from sink.table.microbatch import TableSink
from tests.sink.harness import CrashError, Job, before_commit, tiny_thresholds

pytestmark = pytest.mark.spark

BOTH = pytest.mark.parametrize(("deletes", "version"), [("position", "3"), ("equality", "2"), ("position", "2")])


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    """Plain JSON lines."""
    return Job(spark, tmp_path, columns={"id": "bigint", "name": "string"}, file_format="json")


def insert(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "+I", {"id": number, **fields}


def update(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "+U", {"id": number, **fields}


def delete(number: int) -> tuple[str, dict[str, Any]]:
    return "-D", {"id": number}


def types(job: Job) -> dict[str, str]:
    """Columns of the table as Iceberg has them."""
    return {str(f.name()): str(f.type()) for f in job.java_table().schema().columns()}


def letters(job: Job) -> list[dict[str, Any]]:
    if not job.spark.catalog.tableExists(job.dead_letters):
        return []
    rows: list[dict[str, Any]] = to_arrow(job.spark.table(job.dead_letters)).to_pylist()
    return rows


def sound(job: Job, batches: int) -> None:
    """Check that each micro-batch is one snapshot, that there are no bad records and no unused files, and that the
    index fits the table.
    """
    assert len([s for s in job.snapshots() if "rowdelta.minor-compaction" not in s["summary"]]) == batches
    assert letters(job) == []
    assert job.unreferenced_files() == []
    job.check_deletes()
    if job.deletes == "position":
        assert job.check_index() is not None


@contextmanager
def dying_after_evolving() -> Iterator[None]:
    """The process dies once the table has its new columns, before the micro-batch is written again."""
    original = TableSink._evolve

    def evolve(self: TableSink, observed: Mapping[str, str]) -> None:
        try:
            original(self, observed)
        except microbatch.SchemaEvolvedError:
            raise CrashError("crash after evolving") from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSink, "_evolve", evolve)
        yield


# Evolve


@BOTH
def test_a_new_column_in_the_middle_of_a_micro_batch(job: Job, deletes: Any, version: str) -> None:
    """The same keys change before and after the column appears, in the micro-batch and in earlier ones."""
    job.deletes, job.properties = deletes, {"format-version": version}
    job.write([insert(n, name="old") for n in range(1, 7)])
    job.run()
    job.write(
        [
            update(1, name="a"),
            insert(7, name="a"),
            update(2, name="a"),
            delete(3),
            update(1, name="b", note="new"),
            update(7, name="b", note="seven"),
            insert(3, name="b", note="back"),
            update(4, name="b", note="four"),
            delete(5),
            insert(8, name="c"),
        ]
    )
    job.run()
    expected = [
        {"id": 1, "name": "b", "note": "new"},
        {"id": 2, "name": "a", "note": None},
        {"id": 3, "name": "b", "note": "back"},
        {"id": 4, "name": "b", "note": "four"},
        {"id": 6, "name": "old", "note": None},
        {"id": 7, "name": "b", "note": "seven"},
        {"id": 8, "name": "c", "note": None},
    ]
    assert job.rows() == expected
    sound(job, 2)
    job.write([delete(4), update(6, name="d", note="six"), update(1, name="e")])
    job.run()
    left = {row["id"]: row for row in expected}
    del left[4]
    left[6] = {"id": 6, "name": "d", "note": "six"}
    left[1] = {"id": 1, "name": "e", "note": None}
    assert job.rows() == [row for _, row in sorted(left.items())]
    sound(job, 3)


def test_columns_that_several_tasks_see_with_several_types(job: Job) -> None:
    """The types that hold all values, whichever task saw which."""
    job.write([insert(0, name="x")])
    job.run()
    job.tasks = 2
    text = "".join(
        json.dumps(
            {"row_kind": "+I", "seq": n, "id": n}
            | ({"mixed": [n, n + 0.5, f"t{n}"][n % 3]} if n > 20 else {})
            | ({"number": [n, n + 0.5][n % 2]} if n > 30 else {})
            | ({f"only_{n}": True} if n in (50, 60) else {})
        )
        + "\n"
        for n in range(1, 100)
    )
    job.write_text(text)
    with tiny_thresholds(1, 7, job.spark):
        job.run()
    assert types(job) == {
        "id": "long",
        "name": "string",
        "mixed": "string",
        "number": "double",
        "only_50": "boolean",
        "only_60": "boolean",
    }
    rows = job.rows()
    assert [row["mixed"] for row in rows[20:25]] == [None, "21", "22.5", "t23", "24"]
    assert [row["number"] for row in rows[30:34]] == [None, 31.5, 32.0, 33.5]
    assert [row["id"] for row in rows if row["only_50"]] == [50]
    sound(job, 2)


@pytest.mark.parametrize(
    "kinds", [(1, "text"), ("text", 1), (1, 2.5), (2.5, 1), (2**70, 1), (True, 1), ({"a": 1}, 1), ([1], "x")]
)
def test_a_new_column_of_two_types_in_two_odd_records(job: Job, kinds: tuple[Any, Any]) -> None:
    job.write([insert(1, extra=kinds[0]), insert(2, extra=kinds[1])])
    job.run()
    expected = "double" if {type(kind) for kind in kinds} == {int, float} else "string"
    assert types(job)["extra"] == expected
    found = [row["extra"] for row in job.rows()]
    if expected == "double":
        assert found == [float(kind) for kind in kinds]
    else:
        texts = [kind if isinstance(kind, str) else json.dumps(kind, separators=(",", ":")) for kind in kinds]
        assert found == texts
    sound(job, 1)


@BOTH
def test_wider_values(job: Job, deletes: Any, version: str) -> None:
    job.deletes, job.properties = deletes, {"format-version": version}
    job.columns = {"id": "bigint", "i": "int", "f": "float", "d": "decimal(4,2)"}
    job.write([insert(1, i=1, f=0.5, d="1.50"), insert(2, i=2, f=1.5, d="2.50")])
    job.write(
        [
            update(1, i=3, f=0.5, d="1.00"),
            update(1, i=2**40, f=1e300, d="12345.67"),
            update(2, i=-(2**63), f=2.5, d="2.51"),
        ]
    )
    job.run()
    assert types(job) == {"id": "long", "i": "long", "f": "double", "d": "decimal(38, 2)"}
    assert job.rows() == [
        {"id": 1, "i": 2**40, "f": 1e300, "d": Decimal("12345.67")},
        {"id": 2, "i": -(2**63), "f": 2.5, "d": Decimal("2.51")},
    ]
    sound(job, 2)
    job.run()  # the configuration still says int


def test_a_partition_column_grows(job: Job) -> None:
    job.columns, job.partition_by = {"id": "bigint", "p": "int", "q": "int"}, ("p", "bucket(4, q)")
    job.write([insert(n, p=n % 2, q=n) for n in range(10)])
    job.write([update(1, p=2**40, q=2**41), update(2, p=1, q=7), delete(3)])
    job.run()
    job.write([update(1, p=0, q=0), delete(4)])
    job.run()
    expected = {n: {"id": n, "p": n % 2, "q": n} for n in range(10) if n not in (3, 4)}
    expected |= {1: {"id": 1, "p": 0, "q": 0}, 2: {"id": 2, "p": 1, "q": 7}}
    assert job.rows() == [expected[n] for n in sorted(expected)]
    sound(job, 3)


def test_a_required_column_that_gets_a_null_becomes_optional(job: Job) -> None:
    job.create_table(
        [
            {"id": 1, "name": "id", "required": True, "type": "long"},
            {"id": 2, "name": "name", "required": True, "type": "string"},
        ]
    )
    job.write([insert(1, name="a")])
    job.write([insert(2, name="b"), update(1, name=None), insert(3)])
    job.run()
    assert [row["name"] for row in job.rows()] == [None, "b", None]
    assert not job.java_table().schema().findField("name").isRequired()
    sound(job, 2)


def test_dropped_and_renamed_columns_stay(job: Job) -> None:
    job.write([insert(1, name="a"), insert(2, name="b")])
    job.write([update(1, title="A"), insert(3, title="C")])
    job.run()
    assert job.rows() == [
        {"id": 1, "name": None, "title": "A"},
        {"id": 2, "name": "b", "title": None},
        {"id": 3, "name": None, "title": "C"},
    ]
    sound(job, 2)


def test_a_type_that_the_column_cannot_become_is_a_bad_record(job: Job) -> None:
    job.columns = {"id": "bigint", "i": "int", "b": "boolean"}
    job.write([insert(1, i=1, b=True)])
    job.write([update(1, i="one"), insert(2, i=2, b="maybe"), insert(3, i=3, b=False), insert(4, i=1.5)])
    job.run()
    assert job.rows() == [{"id": 1, "i": 1, "b": True}, {"id": 3, "i": 3, "b": False}]
    reasons = sorted(letter["reason"] for letter in letters(job))
    assert reasons == [
        "column b: 'maybe' does not fit boolean",
        "column i: '1.5' does not fit int",
        "column i: 'one' does not fit int",
    ]
    assert types(job) == {"id": "long", "i": "int", "b": "boolean"}


def test_keys_do_not_change(job: Job) -> None:
    job.columns = {"id": "int", "name": "string"}
    job.write([insert(1, name="a"), insert(2**40, name="b"), insert(2, name="c")])
    job.run()
    assert [row["id"] for row in job.rows()] == [1, 2]
    assert [letter["reason"] for letter in letters(job)] == [f"column id: '{2**40}' does not fit int"]
    assert types(job)["id"] == "int"


def test_a_new_field_inside_a_struct(job: Job) -> None:
    """Not followed, and not lost in silence: the row is a bad record."""
    job.columns = {"id": "bigint", "at": "struct<x:int,y:int>"}
    job.write([insert(1, at={"x": 1, "y": 2})])
    job.write([insert(2, at={"x": 1, "y": 2, "z": 3}), insert(3, at={"x": 1})])
    job.run()
    assert job.rows() == [{"id": 1, "at": {"x": 1, "y": 2}}, {"id": 3, "at": {"x": 1, "y": None}}]
    (letter,) = letters(job)
    assert "column at" in letter["reason"]


def test_field_names_that_cannot_be_columns(job: Job) -> None:
    for number, name in enumerate(["a.b", "it's", "_rowdelta_x", "NAME", "_file"]):
        job.write([insert(number, **{name: 1})])
        with pytest.raises(TableError, match="exclude") as caught:
            job.run()
        assert name in str(caught.value)
        job.table = {"exclude": [*job.table.get("exclude", ()), name]}
        job.run()
    assert [row["id"] for row in job.rows()] == [0, 1, 2, 3, 4]
    sound(job, 5)


# Crashes and others


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_a_crash_after_evolving(job: Job, deletes: Any) -> None:
    job.deletes = deletes
    job.write([insert(1, name="a")])
    job.run()
    job.write([update(1, name="b", note="n"), insert(2, note="m")])
    with dying_after_evolving(), pytest.raises(TemporaryError, match="crash after"):
        job.run()
    assert job.rows() == [{"id": 1, "name": "a", "note": None}]
    job.run()
    assert job.rows() == [{"id": 1, "name": "b", "note": "n"}, {"id": 2, "name": None, "note": "m"}]
    assert len(job.snapshots()) == 2


@pytest.mark.parametrize("deletes", ["position", "equality"])
def test_others_commit_between_the_evolution_and_the_commit(job: Job, deletes: Any) -> None:
    job.deletes = deletes
    job.write([insert(1, name="a"), insert(2, name="b")])
    job.run()
    job.write([update(1, name="c", note="n"), delete(2)])

    def foreign() -> None:
        job.spark.sql(f"INSERT INTO {job.target} VALUES (9, 'foreign', NULL)")

    with before_commit(foreign):
        job.run()
    assert job.rows() == [{"id": 1, "name": "c", "note": "n"}, {"id": 9, "name": "foreign", "note": None}]


@pytest.mark.parametrize("dtype", ["string", "bigint"])
def test_others_add_the_same_column_first(job: Job, dtype: str) -> None:
    job.write([insert(1, name="a")])
    job.run()
    job.write([update(1, name="b", note="n"), insert(2, note="7")])
    original = TableSink._evolve

    def evolve(self: TableSink, observed: Mapping[str, str]) -> None:
        if "note" not in types(job):
            job.spark.sql(f"ALTER TABLE {job.target} ADD COLUMN note {dtype}")
        original(self, observed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableSink, "_evolve", evolve)
        job.run()
    if dtype == "string":
        assert [row["note"] for row in job.rows()] == ["n", "7"]
        sound(job, 2)
    else:
        assert job.rows() == [{"id": 1, "name": "a", "note": None}, {"id": 2, "name": None, "note": 7}]
        assert [letter["reason"] for letter in letters(job)] == ["column note: 'n' does not fit bigint"]


def after_first_commit(action: Callable[[], object]) -> Any:
    from tests.sink.test_commits import after_first_commit as wrapped

    return wrapped(action)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("ADD COLUMN note STRING", [{"id": 1, "name": "a", "note": None}, {"id": 2, "name": "b", "note": None}]),
        ("RENAME COLUMN name TO title", [{"id": 1, "title": "a", "name": None}, {"id": 2, "title": None, "name": "b"}]),
        ("DROP COLUMN name", [{"id": 1, "name": None}, {"id": 2, "name": "b"}]),
        ("ALTER COLUMN n TYPE bigint", None),
    ],
)
def test_others_alter_the_table_while_the_sink_runs(job: Job, change: str, expected: Any) -> None:
    """Without `columns` the table decides: columns are found by their names, and a field without a column gets one."""
    job.columns = {"id": "bigint", "name": "string"} | ({"n": "int"} if expected is None else {})
    job.configure_columns = True
    job.run()
    job.configure_columns = False
    job.write([insert(1, name="a")])
    job.write([insert(2, name="b", **({"n": 5} if expected is None else {}))])
    with after_first_commit(lambda: job.spark.sql(f"ALTER TABLE {job.target} {change}")):
        job.run()
    if expected is None:
        expected = [{"id": 1, "name": "a", "n": None}, {"id": 2, "name": "b", "n": 5}]
    assert job.rows() == expected
    sound(job, 2)


# Ignore and fail


def test_ignore(job: Job) -> None:
    job.columns, job.table = {"id": "bigint", "i": "int"}, {"schema_changes": "ignore"}
    job.write([insert(1, i=1)])
    job.write([insert(2, i=2, note="n"), insert(3, i=2**40), insert(4)])
    job.run()
    assert job.rows() == [{"id": 1, "i": 1}, {"id": 2, "i": 2}, {"id": 4, "i": None}]
    assert [letter["reason"] for letter in letters(job)] == [f"column i: '{2**40}' does not fit int"]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"name": "b", "i": 1, "note": "n", "more": 1.5}, "more double, note string"),
        ({"name": "b", "i": 2**40}, "i bigint"),
        ({"name": "b"}, "i is missing"),
    ],
)
def test_fail(job: Job, change: dict[str, Any], shown: str) -> None:
    job.columns, job.table = {"id": "bigint", "name": "string", "i": "int"}, {"schema_changes": "fail"}
    job.write([insert(1, name="a", i=None), delete(7)])
    job.run()
    job.write([insert(2, name="b", i=1), update(1, **change)])
    for _ in range(2):  # the position stays
        with pytest.raises(DataError, match=r"schema_changes is fail\. Nothing was applied") as caught:
            job.run()
        assert caught.value.exit_code == 3
        assert f"changed ({shown})" in str(caught.value)
    assert job.rows() == [{"id": 1, "name": "a", "i": None}]
    sound(job, 1)
    job.table = {"schema_changes": "evolve"}
    job.run()
    assert len(job.rows()) == 2


# Typed files


def parquet(job: Job, columns: Mapping[str, str]) -> Job:
    job.file_format, job.columns = "parquet", dict(columns)
    return job


@pytest.mark.parametrize("together", [pytest.param(False, marks=pytest.mark.versions), True])
@BOTH
def test_files_with_more_and_wider_columns(job: Job, deletes: Any, version: str, together: bool) -> None:
    first = {"id": "bigint", "name": "string", "i": "int", "d": "decimal(4,2)"}
    job = parquet(job, first)
    job.deletes, job.properties = deletes, {"format-version": version}
    if together:  # one micro-batch
        job.sections = {"source": {"options": {"path_format": "parquet"}}}
    job.write([insert(n, name="old", i=n, d=Decimal("1.50")) for n in range(1, 5)])
    job.columns = {"id": "bigint", "i": "bigint", "d": "decimal(10,2)", "note": "string", "at": "date"}
    job.write([update(1, i=2**40, d=Decimal("12345.67"), note="new"), delete(2), insert(5, i=5, note="five")])
    job.columns = {"id": "bigint", "name": "string", "i": "int"}
    job.write([update(3, name="b", i=33), delete(5), update(1, name="c", i=1)])
    job.columns = first
    job.run()
    assert types(job) == {
        "id": "long",
        "name": "string",
        "i": "long",
        "d": "decimal(10, 2)",
        "note": "string",
        "at": "date",
    }
    none = {"note": None, "at": None}
    assert job.rows() == [
        {"id": 1, "name": "c", "i": 1, "d": None, **none},
        {"id": 3, "name": "b", "i": 33, "d": None, **none},
        {"id": 4, "name": "old", "i": 4, "d": Decimal("1.50"), **none},
    ]
    sound(job, 1 if together else 3)


def test_files_with_a_new_field_inside_a_column(job: Job) -> None:
    job = parquet(job, {"id": "bigint", "at": "struct<x:int>"})
    fields = {"row_kind": pa.string(), "seq": pa.int64(), "id": pa.int64()}
    for number, inner in enumerate(({"x": pa.int32()}, {"x": pa.int32(), "y": pa.int32()})):
        at = pa.struct(list(inner.items()))
        record = {"row_kind": "+I", "seq": number, "id": number, "at": dict.fromkeys(inner, 1)}
        job.write_records([record], pa.schema({**fields, "at": at}))
    with pytest.raises(DataError, match=r"column at is struct<x:int,y:int>, with fields that the column .* lacks"):
        job.run()
    job.table = {"schema_changes": "ignore"}
    job.run()
    assert job.rows() == [{"id": 0, "at": {"x": 1}}, {"id": 1, "at": {"x": 1}}]


def test_files_ignore_and_fail(job: Job) -> None:
    first = {"id": "bigint", "i": "int"}
    job = parquet(job, first)
    job.write([insert(1, i=1)])
    job.table = {"schema_changes": "fail"}
    job.run()
    for columns, shown in (({**first, "note": "string"}, "note string"), ({"id": "bigint"}, "i is missing")):
        job.columns = columns
        path = job.write([insert(2, **dict.fromkeys(columns.keys() - {"id"}, None))])
        job.columns = first
        with pytest.raises(DataError, match=f"changed .{shown}., and schema_changes is fail"):
            job.run()
        assert job.rows() == [{"id": 1, "i": 1}]
        path.unlink()
        job.lose_checkpoint()
    job.table = {"schema_changes": "ignore"}
    job.columns = {**first, "note": "string"}
    job.write([insert(2, i=2, note="x")])
    job.columns = first
    job.run()
    assert job.rows() == [{"id": 1, "i": 1}, {"id": 2, "i": 2}]
    job.columns = {"id": "bigint", "i": "bigint"}
    job.write([insert(3, i=3)])
    job.columns = first
    with pytest.raises(DataError, match="column i is bigint, wider than int"):
        job.run()


# Columns that aren't fields as they come


def test_renamed_excluded_cast_and_computed_columns(job: Job) -> None:
    job.columns = {
        "id": "bigint",
        "customer": {"type": "string", "from": "name"},  # type: ignore[dict-item]
        "cents": {"type": "bigint", "stored": False},  # type: ignore[dict-item]
        "amount": {"type": "decimal(12,2)", "expression": "cast(cents / 100.00 as decimal(12,2))"},  # type: ignore[dict-item]
        "name": {"type": "string", "expression": "concat(customer, '!')"},  # type: ignore[dict-item]
        "code": "string",
    }
    job.table = {"exclude": ["secret"]}
    job.write([insert(1, name="a", cents=1234, secret="x", code=7), insert(2, name=None, cents=None, code="z")])
    job.run()
    first = {"id": 1, "customer": "a", "amount": Decimal("12.34"), "name": "a!", "code": "7"}
    second = {"id": 2, "customer": None, "amount": None, "name": None, "code": "z"}
    assert job.rows() == [first, second]
    job.write([update(1, name="b", cents=5, code="y", note="new")])
    job.run()
    assert job.rows() == [
        {"id": 1, "customer": "b", "amount": Decimal("0.05"), "name": "b!", "code": "y", "note": "new"},
        second | {"note": None},
    ]
    sound(job, 2)
    # a field that isn't stored has the type that the configuration gives it
    job.write([update(1, name="c", cents=2**70), update(2, name="d", cents=1)])
    job.run()
    assert [row["customer"] for row in job.rows()] == ["b", "d"]
    assert [letter["reason"] for letter in letters(job)] == [f"column cents: '{2**70}' does not fit bigint"]


@pytest.mark.parametrize("mode", ["upsert", "changelog"])
@BOTH
def test_a_computed_partition_column(job: Job, mode: Any, deletes: Any, version: str) -> None:
    """Rows move between partitions, and deletes find them, though no message says where they are."""
    job.mode, job.deletes, job.properties = mode, deletes, {"format-version": version}
    job.partition_by = ("initial", "_op")
    job.columns = {"id": "bigint", "name": "string", "initial": {"type": "string", "expression": "left(name, 1)"}}  # type: ignore[dict-item]
    job.table = {"metadata": ["_op"]}
    job.write([insert(1, name="ada"), insert(2, name="bob"), insert(3, name="cy"), insert(4, name="dan")])
    job.run()
    job.write(
        [
            ("-U", {"id": 1, "name": "ada"}),
            update(1, name="bea"),
            ("-D", {"id": 2, "name": "bob"}),
            insert(5, name="eve"),
        ]
    )
    job.run()
    job.write(
        [("-D", {"id": 1, "name": "bea"}), ("-D", {"id": 3, "name": None}), ("-U", {"id": 4}), update(4, name="zoe")]
    )
    job.run()
    assert job.rows() == [
        {"id": 4, "name": "zoe", "initial": "z", "_op": "+U"},
        {"id": 5, "name": "eve", "initial": "e", "_op": "+I"},
    ]
    sound(job, 3)


def test_metadata_columns_and_evolution(job: Job) -> None:
    job.table = {"metadata": ["_op", "_source", "_offset"]}
    job.write([insert(1, name="a")])
    path = job.write([update(1, name="b", note="n")])
    job.run()
    (row,) = job.rows()
    assert row.pop("_source").endswith(path.name.replace(" ", "%20"))
    assert row == {"id": 1, "name": "b", "_op": "+U", "_offset": None, "note": "n"}
    sound(job, 2)


@pytest.mark.parametrize(
    ("expression", "dtype", "message"),
    [
        ("upper(", "string", "yntax error"),
        ("upper(nobody)", "string", "`nobody` cannot be resolved"),
        ("name = 'x'", "int", "is boolean, and the column int"),
        ("length(name)", "string", "is int, and the column string"),
        ("explode(array(1, 2))", "int", "one value a row"),
        ("count(name)", "bigint", ""),
        ("rand()", "double", "not the same each time"),
        ("no_such_function(name)", "string", "no_such_function"),
    ],
)
def test_wrong_expressions_are_refused_before_anything_runs(
    job: Job, expression: str, dtype: str, message: str
) -> None:
    job.columns = {**job.columns, "made": {"type": dtype, "expression": expression}}  # type: ignore[dict-item]
    job.write([insert(1, name="a")])
    with pytest.raises(ConfigError, match=r"tables\[0\]\.columns\.made\.expression") as caught:
        job.run()
    assert message in str(caught.value)
    assert not job.spark.catalog.tableExists(job.target)
    with pytest.raises(ConfigError, match=r"tables\[0\]\.columns\.made\.expression"):
        list(inspection.check(job.spark, job.config()))


def test_an_expression_that_fails_on_a_value_stops_the_job(job: Job) -> None:
    """It must not be null in silence, even if the session is not in ANSI mode."""
    job.columns = {**job.columns, "number": {"type": "int", "expression": "cast(name as int)"}}  # type: ignore[dict-item]
    job.write([insert(1, name="7")])
    job.write([insert(2, name="seven")])
    job.spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        with pytest.raises(DataError, match=r"computed column failed on a value: .*'seven'.*Nothing was applied"):
            job.run()
    finally:
        job.spark.conf.unset("spark.sql.ansi.enabled")
    assert job.rows() == [{"id": 1, "name": "7", "number": 7}]
    job.columns = {**job.columns, "number": {"type": "int", "expression": "try_cast(name as int)"}}  # type: ignore[dict-item]
    job.run()
    assert job.rows()[1] == {"id": 2, "name": "seven", "number": None}


# Nobody says the columns


def test_columns_are_inferred_shown_and_created(job: Job) -> None:
    job.configure_columns = False
    job.table = {"exclude": ["secret"]}
    with pytest.raises(ConfigError, match=r"no messages to infer columns from\. Add columns"):
        list(inspection.check(job.spark, job.config()))
    with pytest.raises(ConfigError, match=r"no messages to infer columns from\. Add columns"):
        job.run()
    job.write([insert(1, name="a", n=1, secret=1), insert(2, name="b", n=1.5), insert(3, name=None, flag=True)])
    shown = "\n".join(inspection.check(job.spark, job.config()))
    assert "inferred from messages" in shown
    assert "id bigint (key)" in shown
    job.run()
    created = types(job)
    assert created == {"id": "long", "name": "string", "n": "double", "flag": "boolean", "seq": "long"}
    assert [row["n"] for row in job.rows()] == [1.0, 1.5, None]
