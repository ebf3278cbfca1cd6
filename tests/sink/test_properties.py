"""The table is equal to the source, whatever the changelog is, and wherever the job dies.

One example is a whole story: a table, runs of the job over some files, a fault in each run, and other writers' commits
and accidents in between. Each run takes seconds because of Spark, so a few long examples find more than many small
ones. Most of what the driver can do wrong shows in `tests/memory` already, a thousand times as fast. Here is what only
Iceberg and Spark can show: commits, delete files and vectors, types, partitions, sources.

`ROWDELTA_STORIES=500 pytest …` goes hunting. A failing story is printed as `Story(…)`. Pin it with `@example(Story(…))`
above the test.
"""

import datetime as dt
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from deltawriters.keyindex import CorruptIndexError
from sink.errors import TemporaryError
from tests.rewrites import Step, rewriting
from tests.sink.harness import (
    Change,
    Fault,
    Job,
    Row,
    before_commit,
    before_rewrite,
    crashing,
    damage,
    merging_soon,
    tiny_thresholds,
)

pytestmark = pytest.mark.spark

# The last value of each type belongs to other writers. Long strings differ only past the length of truncated bounds.
KEY_VALUES: dict[str, list[Any]] = {
    "int": [0, -(2**31), 2**31 - 1, 7, -1],
    "bigint": [0, -(2**63), 2**63 - 1, 1, 42],
    "string": ["", "a", "a ", "ä'\"\\\n", "x" * 40 + "1", "x" * 40 + "2"],
    "decimal(12,2)": [Decimal(text) for text in ("0.00", "-0.01", "9999999999.99", "1.10", "7.00")],
    "decimal(38,10)": [
        Decimal(text) for text in ("0E-10", "-1.0000000001", "9999999999999999999999999999.9999999999", "1E-10")
    ],
    "date": [dt.date(1970, 1, 1), dt.date(1969, 12, 31), dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(2026, 1, 2)],
    "timestamp": [
        dt.datetime(1970, 1, 1, tzinfo=dt.UTC),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
        dt.datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
        dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    ],
    "timestamp_ntz": [
        dt.datetime(1970, 1, 1),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
        dt.datetime(2026, 3, 29, 1, 30, 0, 1),
        dt.datetime(1583, 1, 1),
        dt.datetime(2026, 1, 1),
    ],
    "boolean": [True, False],
    "binary": [b"", b"\x00", b"\x00\x00", b"\xff" * 20, b"foreign"],
    "uuid": [
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "80000000-0000-0000-0000-000000000001",
        "12345678-9abc-def0-1234-56789abcdef0",
    ],
}
BUCKETABLE = [name for name in KEY_VALUES if name != "boolean"]
NOT_IN_SQL = ("uuid",)
VALUES = {"region": "string", "at": "timestamp", "amount": "decimal(12,2)", "ratio": "double", "tags": "array<string>"}
REGIONS = [None, "eu", "us", "a/b=c %"]
TIMES = [
    None,
    dt.datetime(1969, 12, 31, 23, 0, tzinfo=dt.UTC),
    dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
]
AMOUNTS = [Decimal("1.50"), None, Decimal("-0.01"), Decimal("9999999999.99")]
RATIOS = [0.1, float("nan"), None, -0.0, float("inf")]
TAGS = [["a"], None, [], ["", None, "ä"]]

Disturbance = Literal[
    "none",
    "compaction",
    "deletes compacted",
    "foreign append",
    "foreign delete",
    "foreign merge",
    "branch write",
    "rollback",
    "expired snapshots",
    "upgrade to v3",
    "checkpoint lost",
    "checkpoint restored",
    "index lost",
    "index damaged",
    "stale index",
]
Meanwhile = Literal[
    "none", "compaction", "foreign append", "foreign delete", "foreign merge", "branch write", "index lost"
]
Deletes = Literal["position", "equality", "copy-on-write"]
REWRITES: dict[str, Sequence[tuple[Step, ...]]] = {
    "at once": [("begin", "write", "adopt")],
    "beside a micro-batch": [("begin",), ("write", "adopt")],
}
ON_DRIVER = [0, 100, 1 << 20]
"""Bytes of deletion vectors up to which the driver makes them: tasks always do, or for some commits, or never."""
REMOVED_BY_OTHERS = AMOUNTS[0]
"""What a foreign delete removes: all rows with this amount, to which the source returns."""


@dataclass(frozen=True)
class Operation:
    """What the source did: to which key (a number within `KEY_VALUES`), and what its row became."""

    verb: Literal["set", "delete", "change key"]
    key: int
    row: int = 0
    new_key: int = 0


@dataclass(frozen=True)
class Run:
    """Files that the job finds when it starts, faults and events during the run (also between writing and the commit of
    a micro-batch or a minor compaction), and events before the next run.
    """

    files: tuple[tuple[Operation, ...], ...]
    fault: Fault | None = None
    fault_after: int = 0
    meanwhile: Meanwhile = "none"
    meanwhile_at: Literal["commit", "rewrite"] = "commit"
    then: Disturbance = "none"
    deletes: Deletes = "position"


@dataclass(frozen=True)
class Story:
    """A table and everything that happens to it."""

    key: tuple[str, ...]
    runs: tuple[Run, ...]
    partition_by: tuple[str, ...] = ()
    mode: Literal["upsert", "changelog"] = "upsert"
    version: int = 2
    foreign_writes: Literal["copy-on-write", "merge-on-read"] = "merge-on-read"
    file_format: Literal["parquet", "json"] = "parquet"
    merges: Literal["never", "on the driver", "in tasks"] = "never"
    rewrites: Literal["never", "at once", "beside a micro-batch"] = "never"
    tasks: int = 1
    shuffles: bool = True
    flush_bytes: int = 1
    batch_rows: int = 3
    on_driver: int = 0
    seed: int = 0


@st.composite
def stories(draw: st.DrawFn) -> Story:
    key = tuple(draw(st.lists(st.sampled_from(list(KEY_VALUES)), min_size=1, max_size=2)))
    partitions = [(), ("region",), ("day(at)",), ("truncate(2, region)", "at")]
    if key[0] in BUCKETABLE:
        partitions += [("bucket(2, k0)",), ("bucket(2, k0)", "region")]
    if key[0] not in NOT_IN_SQL:
        partitions += [("k0",)]
    operations = st.builds(
        Operation,
        st.sampled_from(["set", "set", "set", "delete", "change key"]),
        st.integers(0, 4),
        st.integers(0, 19),
        st.integers(0, 4),
    )
    files = st.lists(st.lists(operations, max_size=14).map(tuple), min_size=1, max_size=2).map(tuple)
    runs = st.builds(
        Run,
        files,
        st.sampled_from([None, *get_args(Fault)]),
        st.integers(0, 1),
        st.sampled_from(get_args(Meanwhile)),
        st.sampled_from(["commit", "commit", "rewrite"]),
        st.sampled_from(get_args(Disturbance)),
        st.sampled_from(["position", "position", "equality", "copy-on-write", "copy-on-write"]),
    )
    return Story(
        key=key,
        runs=tuple(draw(st.lists(runs, min_size=1, max_size=3))),
        partition_by=draw(st.sampled_from(partitions)),
        mode=draw(st.sampled_from(["upsert", "changelog"])),
        version=draw(st.sampled_from([2, 3])),
        foreign_writes=draw(st.sampled_from(["copy-on-write", "merge-on-read"])),
        file_format=draw(st.sampled_from(["parquet", "json"])),
        merges=draw(st.sampled_from(["never", "on the driver", "in tasks"])),
        rewrites=draw(st.sampled_from(["never", "at once", "beside a micro-batch"])),
        tasks=draw(st.integers(1, 3)),
        shuffles=draw(st.booleans()),
        flush_bytes=draw(st.sampled_from([1, 2000, 1 << 20])),
        batch_rows=draw(st.integers(1, 5)),
        on_driver=draw(st.sampled_from(ON_DRIVER)),
        seed=draw(st.integers(0, 99)),
    )


class Database:
    """The source of truth: applies operations and emits the changelog of what they did."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.rows: dict[tuple[Any, ...], Row] = {}

    def key(self, number: int) -> tuple[Any, ...]:
        """The `number`-th of the keys that this source writes. Composite ones have either part in common
        with others.
        """
        pools = [_own_values(sql_type) for sql_type in self._story.key]
        places = (number,) if len(pools) == 1 else (number % 2, number // 2)
        return tuple(pool[place % len(pool)] for pool, place in zip(pools, places, strict=True))

    def row(self, key: tuple[Any, ...], number: int) -> Row:
        values = {f"k{i}": value for i, value in enumerate(key)}
        columns: list[list[Any]] = [REGIONS, TIMES, AMOUNTS, RATIOS, TAGS]
        for name, choices in zip(VALUES, columns, strict=True):
            values[name] = choices[number % len(choices)]
        return values

    def apply(self, operation: Operation) -> Iterator[Change]:
        key = self.key(operation.key)
        old = self.rows.get(key)
        if operation.verb == "set":
            self.rows[key] = self.row(key, operation.row)
            if old is not None:
                yield "-U", old
            yield ("+I" if old is None else "+U"), self.rows[key]
        elif operation.verb == "delete":
            self.rows.pop(key, None)
            if old is not None:
                yield "-D", old
            elif self._story.mode == "upsert":
                yield "-D", self.row(key, operation.row)  # doesn't trust the stream, so must bear with this
        elif old is not None:
            new_key = self.key(operation.new_key)
            replaced = self.rows.pop(new_key, None) if new_key != key else None
            if replaced is not None:
                yield "-D", replaced
            del self.rows[key]
            self.rows[new_key] = self.row(new_key, operation.row)
            yield "-U", old
            yield "+U", self.rows[new_key]

    def foreign_row(self, number: int) -> Row | None:
        """A row with a key that this source never writes, if there is such a key."""
        if self._story.key[0] == "boolean" or number:
            return None
        return self.row(tuple(KEY_VALUES[sql_type][-1] for sql_type in self._story.key), 6)


def _own_values(sql_type: str) -> list[Any]:
    return KEY_VALUES[sql_type] if sql_type == "boolean" else KEY_VALUES[sql_type][:-1]


def _comparable(rows: Sequence[Row], names: list[str]) -> list[str]:
    """A row as text. In text, NaN equals NaN, and 0.0 differs from -0.0."""
    return sorted(repr([_in_utc(row[name]) for name in names]) for row in rows)


def _in_utc(value: Any) -> Any:
    return value.astimezone(dt.UTC) if isinstance(value, dt.datetime) and value.tzinfo else value


@pytest.mark.timeout(1500)
@settings(
    max_examples=int(os.environ.get("ROWDELTA_STORIES", "6")),
    deadline=None,
    print_blob=True,
    # stories are printed as they are: shrinking one takes minutes. Add Phase.shrink to hunt.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(story=stories())
# UUIDs on both sides of the sign bit: bounds must not make readers skip their deletes
@example(
    Story(
        key=("uuid",),
        runs=(
            Run(((Operation("set", 0), Operation("set", 1), Operation("set", 2)),), deletes="equality"),
            Run(((Operation("set", 0, 5), Operation("delete", 1)),), deletes="equality"),
        ),
    )
)
# UUIDs whose bytes are no text, in change files of JSON
@example(
    Story(
        key=("uuid",),
        runs=(Run(((Operation("set", 0), Operation("set", 2), Operation("set", 4)),)),),
        file_format="json",
    )
)
def test_the_table_equals_the_source(spark: SparkSession, story: Story) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rowdelta-story-"))
    try:
        Player(spark, story, folder).play()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Player:
    """Plays a story and compares table and source after each run."""

    def __init__(self, spark: SparkSession, story: Story, folder: Path) -> None:
        self.story = story
        self.database = Database(story)
        self.foreign: list[Row] = []
        self.removed = self.rolled_back = self.damaged = False
        self.hashes: dict[str, dict[tuple[Any, ...], set[tuple[int, int]]]] = {}
        self.random = Random(story.seed)
        self.spark = spark
        columns = {f"k{i}": sql_type for i, sql_type in enumerate(story.key)} | VALUES
        self.job = Job(
            spark,
            folder,
            columns=columns,
            key=[f"k{i}" for i in range(len(story.key))],
            mode=story.mode,
            partition_by=story.partition_by,
            file_format=story.file_format,
            properties={
                "format-version": str(story.version),
                # either tasks write several files of a partition, or these are small enough to be merged
                "write.target-file-size-bytes": "1500" if story.merges == "never" else "20000",
                "write.delete.mode": story.foreign_writes,
                "write.merge.mode": story.foreign_writes,
            },
            table={"merge_small_files": story.merges != "never"},
            tasks=story.tasks,
        )
        if set(story.key) & set(NOT_IN_SQL):
            self._create_beforehand()

    def _create_beforehand(self) -> None:
        fields = [
            {"id": i, "name": name, "required": name in self.job.key, "type": ICEBERG_TYPES.get(sql_type, sql_type)}
            for i, (name, sql_type) in enumerate(self.job.columns.items(), start=1)
        ]
        self.job.configure_columns = False
        self.job.create_table(fields)

    def play(self) -> None:
        for number, run in enumerate(self.story.runs):
            self.job.deletes = run.deletes
            self._return_to_removed()
            for operations in run.files:
                changes = [change for operation in operations for change in self.database.apply(operation)]
                self.job.write(changes, shuffle=self.random.shuffle)
            with self._small_writers():
                self._run(run)
            self._settle()
            self._compare(f"after run {number}")
            if run.deletes != "equality":
                self.job.check_deletes()
                if run.meanwhile != "index lost":  # the version that the commit names may be among it
                    is_last = run.meanwhile == "none" and run.fault is None and any(map(any, run.files))
                    self._check_index(must_be_there=is_last)
            self._disturb(run.then)
        self._settle()
        self._compare("at the end")

    @contextmanager
    def _small_writers(self) -> Iterator[None]:
        story = self.story
        with (
            tiny_thresholds(
                story.flush_bytes,
                story.batch_rows,
                self.spark,
                shuffles=story.shuffles,
                on_driver=story.on_driver,
            ),
            merging_soon(on_driver=story.merges == "on the driver"),
            nullcontext() if story.rewrites == "never" else rewriting(REWRITES[story.rewrites], may_fail=True),
        ):
            yield

    def _run(self, run: Run) -> None:
        """Run until the job dies of the fault, and then start it again, like a scheduler."""
        if run.fault is not None:
            with crashing(run.fault, after_commits=run.fault_after):
                try:
                    self.job.run()
                except TemporaryError as error:
                    if "crash " not in str(error):
                        raise
        before = before_commit if run.meanwhile_at == "commit" else before_rewrite
        with before(lambda: self._disturb(run.meanwhile)):
            self.job.run()
        self.rolled_back = False

    def _return_to_removed(self) -> bool:
        """The source sets the rows that others removed, if they did."""
        if self.removed:
            rows = [row for row in self.database.rows.values() if row["amount"] == REMOVED_BY_OTHERS]
            self.job.write([change for row in rows for change in (("-U", row), ("+U", row))])
        returned, self.removed = self.removed, False
        return returned

    def _settle(self) -> None:
        if self._return_to_removed() or self.rolled_back:
            with self._small_writers():
                self.job.run()

    def _compare(self, when: str) -> None:
        names = list(self.job.columns)
        expected = [*self.database.rows.values(), *self.foreign]
        assert _comparable(self.job.rows(), names) == _comparable(expected, names), when

    def _check_index(self, *, must_be_there: bool) -> None:
        """Check that entries are the rows, that a key's hash in an index never changes, and that all hashes differ."""
        try:
            found = self.job.check_index()
        except CorruptIndexError:
            # a worker that had the run mapped before it was damaged goes on with what it has mapped, and is right
            assert self.damaged
            return
        assert found is not None or not must_be_there
        known = self.hashes.setdefault(self.job.encoding, {})  # each index that is built anew has its own
        for key, hashes in (found or {}).items():
            assert hashes == known.setdefault(key, hashes)
            assert len(hashes) == 1
        assert len(set().union(*known.values())) == len(known)

    def _disturb(self, disturbance: Disturbance) -> None:
        job, target = self.job, self.job.target
        old = job.folder / "old state"
        if disturbance == "compaction":
            job.compact()
        elif disturbance == "deletes compacted":
            job.call("rewrite_position_delete_files", "options => map('rewrite-all', 'true')")
        elif disturbance == "foreign append":
            row = self.database.foreign_row(len(self.foreign))
            if row is not None:
                job.append([row])
                self.foreign.append(row)
        elif disturbance == "foreign delete":
            self.spark.sql(f"DELETE FROM {target} WHERE amount = {REMOVED_BY_OTHERS}")
            self.removed = True
        elif disturbance == "foreign merge":
            self._merge()
        elif disturbance == "branch write":
            if job.current_snapshot() is not None:
                job.replace_branch("side")
                self.spark.sql(f"DELETE FROM {target}.branch_side WHERE amount = {REMOVED_BY_OTHERS}")
        elif disturbance == "rollback":
            self._roll_back()
        elif disturbance == "expired snapshots":
            job.expire_snapshots()
        elif disturbance == "upgrade to v3":
            self.spark.sql(f"ALTER TABLE {target} SET TBLPROPERTIES ('format-version' = '3')")
        elif disturbance == "checkpoint lost":
            job.lose_checkpoint()
        elif disturbance == "checkpoint restored" and old.exists():
            job.lose_checkpoint()
            shutil.copytree(old, job.checkpoint)
        elif disturbance == "index lost":
            shutil.rmtree(job.index_folder, ignore_errors=True)
        elif disturbance == "index damaged":
            self.damaged = True
            self._damage_index()
        elif disturbance == "stale index" and (old / "index").exists():
            shutil.rmtree(job.checkpoint / "index", ignore_errors=True)
            shutil.copytree(old / "index", job.checkpoint / "index")
        if not old.exists() and job.checkpoint.exists():
            shutil.copytree(job.checkpoint, old)

    def _merge(self) -> None:
        """Write rows again as they are, at other places."""
        self.spark.sql(
            f"MERGE INTO {self.job.target} t USING (SELECT DISTINCT amount AS same FROM {self.job.target}) s "
            "ON t.amount = s.same AND t.amount < 1000 WHEN MATCHED THEN UPDATE SET t.amount = s.same"
        )

    def _roll_back(self) -> None:
        """To a commit of the sink's before the last."""
        earlier = self.job.own_ancestors()
        if earlier:
            self.rolled_back = True
            self.job.rollback(self.random.choice(earlier))
            left = _comparable(self.job.rows(), list(self.job.columns))
            self.foreign = [row for row in self.foreign if _comparable([row], list(self.job.columns))[0] in left]

    def _damage_index(self) -> None:
        files = sorted(path for path in self.job.index_folder.rglob("*") if path.is_file())
        if files:
            damage(self.random.choice(files), self.random)


ICEBERG_TYPES: dict[str, Any] = {
    "bigint": "long",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "decimal(12,2)": "decimal(12, 2)",
    "decimal(38,10)": "decimal(38, 10)",
    "array<string>": {"type": "list", "element-id": 100, "element": "string", "element-required": False},
}
