"""A job under test: its change files, its configuration, runs of it, and the table as Iceberg's own Spark reader sees
it.

    job = Job(spark, tmp_path, columns={"id": "bigint", "region": "string"})
    job.write([("+I", {"id": 1, "region": "eu"}), ("-D", {"id": 2, "region": None})])
    job.run()
    assert job.rows() == [{"id": 1, "region": "eu"}]

Nothing here reads a table with the project's code: a mistake shared by writer and reader would go unseen.
"""

import base64
import datetime as dt
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from urllib.parse import unquote, urlparse
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.java_gateway import GatewayClient, JavaObject
from py4j.protocol import Py4JJavaError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from deltawriters import DeltaOptions
from deltawriters.keyindex import DELETED_BEFORE, SUPERSEDES, TOMBSTONE, open_run
from deltawriters.keyindex.versions import IndexVersion
from sink import plans
from sink.config import Config, PartitionField
from sink.run.pipeline import Pipeline
from sink.spark import deletes, writing
from sink.spark.tasks import decode as decoding
from sink.spark.tasks import write
from sink.spark.versions import to_arrow
from sink.table import copy_on_write, keyindex, minor_compaction, task_plans
from sink.table.patterns import resolve_tables
from sink.table.plan import plan_table
from sink.table.table_plan import TablePlan
from sink.targets import merge_levels
from sink.targets.catalogs import Catalogs
from sink.targets.delta.commit import DeltaCommitter
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.values import ChangeSet, Done, Outcome, Rewrite

Row = Mapping[str, Any]
Change = tuple[str, Row]
"""A row kind (`+I`, `-U`, `+U`, `-D`) and the row."""

CATALOG = "lake"
CREATED_LONG_AGO = 1_700_000_000
"""Modification time of the first change file: fixed, and seconds apart, since files are ordered by it."""

_ARROW_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "array<string>": pa.list_(pa.string()),
    "uuid": pa.string(),  # in change files
}


def arrow_type(sql_type: str) -> pa.DataType:
    """The Arrow type of a column's values in Parquet change files. `fixed[n]` is binary."""
    decimal = re.fullmatch(r"decimal\((\d+), ?(\d+)\)", sql_type)
    if decimal:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    return pa.binary() if sql_type.startswith("fixed") else _ARROW_TYPES[sql_type]


@dataclass
class Job:
    """One sink with one table. Each has its own namespace, so that tests can share a catalog.

    :param columns: name -> type, also of tables created beforehand (`configure_columns=False` leaves them out of the
        config).
    :param table: overrides of the table's entry.
    :param sections: overrides by section, for example `{"sink": {"on_bad_record": "fail"}}`.
    """

    catalog: ClassVar[str] = CATALOG

    spark: SparkSession
    folder: Path
    columns: Mapping[str, str] = field(default_factory=lambda: {"id": "bigint", "region": "string"})
    key: Sequence[str] = ("id",)
    mode: Literal["upsert", "changelog", "append"] = "upsert"
    deletes: Literal["position", "equality", "copy-on-write"] = "position"
    partition_by: Sequence[str] = ()
    file_format: Literal["parquet", "json"] = "parquet"
    properties: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    configure_columns: bool = True
    tasks: int = 2
    namespace: str = field(default_factory=lambda: f"n{uuid4().hex[:12]}")
    sink_id: str = "shop"
    checkpoint: Path = Path()
    index_location: str | None = None

    def __post_init__(self) -> None:
        self._sequence = itertools.count()
        self._files = itertools.count()
        self.encoding = ""
        """Of the index that `check_index` looked at last: how keys are hashed."""
        if self.checkpoint == Path():
            self.checkpoint = self.folder / "state"
        self.changes_folder.mkdir(parents=True, exist_ok=True)

    @property
    def target(self) -> str:
        return f"{self.catalog}.{self.namespace}.orders"

    @property
    def dead_letters(self) -> str:
        return f"{self.catalog}.{self.namespace}.dead_letters"

    @property
    def changes_folder(self) -> Path:
        return self.folder / "changes"

    @property
    def index_folder(self) -> Path:
        """The table's key index: `runs` and `versions`."""
        return Path(self.index_location or self.checkpoint / "index") / self.sink_id / self.target

    @property
    def warehouse(self) -> Path:
        return Path(str(self.spark.conf.get(f"spark.sql.catalog.{CATALOG}.warehouse")))

    @property
    def catalog_options(self) -> dict[str, str]:
        """The catalog's entry in the configuration."""
        return {"type": "hadoop", "warehouse": str(self.warehouse)}

    @property
    def table_folder(self) -> Path:
        return self.warehouse / self.namespace / "orders"

    def second_driver(self) -> "Job":
        """The same job started by somebody else: a session and a checkpoint of its own."""
        return replace(self, spark=self.spark.newSession(), checkpoint=self.folder / "second state")

    def config(self) -> Config:
        """The job's configuration as `sink.config.load` would return it."""
        return Config.model_validate(self.config_values())

    def config_values(self) -> dict[str, Any]:
        """What is written in the job's configuration."""
        table: dict[str, Any] = {
            "source": str(self.changes_folder),
            "target": self.target,
            **({"key": list(self.key)} if self.key else {}),
            "partition_by": list(self.partition_by),
            "order_by": ["seq bigint"],
            "mode": self.mode,
            "deletes": self.deletes,
            "properties": dict(self.properties),
        }
        if self.configure_columns:
            table["columns"] = dict(self.columns)
        table["shared_with"] = [name for name in ("shop", "other", "another", "flink") if name != self.sink_id]
        table |= self.table
        values: dict[str, Any] = {
            "sink": {"id": self.sink_id, "checkpoint": str(self.checkpoint)},
            "source": {
                "type": "files",
                "format": "row-kind",
                "options": {"path_format": self.file_format, "maxFilesPerTrigger": 1},
            },
            "catalogs": {self.catalog: self.catalog_options},
            # or a run would end with commits that most tests aren't about
            "maintenance": {"budget": 0, "expire": None, "orphans": None},
            "tables": [table],
        }
        if self.index_location is not None:
            values["index"] = {"location": self.index_location}
        for section, entries in self.sections.items():
            values[section].update(entries)
        return values

    def write(self, changes: Sequence[Change], *, shuffle: Callable[[list[Any]], None] | None = None) -> Path:
        """One change file, which is one micro-batch. Changes are numbered in the given order, then written in
        `shuffle`d order.
        """
        records = [{"row_kind": kind, "seq": next(self._sequence), **row} for kind, row in changes]
        if shuffle:
            shuffle(records)
        return self.write_records(records)

    def write_records(self, records: Sequence[Row], schema: pa.Schema | None = None) -> Path:
        """One change file of records that say their own `row_kind` and `seq`.

        :param schema: of a Parquet file; by default the job's columns.
        """
        if self.file_format == "json":
            return self.write_text("".join(_json_line(record) for record in records))
        if schema is None:
            fields = {name: arrow_type(sql_type) for name, sql_type in self.columns.items()}
            schema = pa.schema({"row_kind": pa.string(), "seq": pa.int64()} | fields)
        return self.write_table(pa.Table.from_pylist(list(records), schema=schema))

    def write_table(self, records: pa.Table) -> Path:
        """One Parquet change file, also of values that Python has no objects for."""
        path = self._hidden_file()
        pq.write_table(records, path)
        return self._publish(path)

    def write_text(self, text: str) -> Path:
        """One change file with any content."""
        path = self._hidden_file()
        path.write_text(text, encoding="utf-8")
        return self._publish(path)

    def _hidden_file(self) -> Path:
        return self.folder / f"unfinished {uuid4().hex}"

    def _publish(self, path: Path) -> Path:
        """Move a finished file into the directory, with a modification time of its own."""
        number = next(self._files)
        os.utime(path, (CREATED_LONG_AGO + number, CREATED_LONG_AGO + number))
        # names that sort against the order of arrival, and need quoting in URIs
        return path.rename(self.changes_folder / f"{999 - number:03d} ä.{self.file_format}")

    def plan(self) -> TablePlan:
        """The plan of its table as it is now."""
        config = self.config()
        (resolved,) = resolve_tables(config, [])
        catalogs = Catalogs(self.spark, config)
        return plan_table(catalogs, config, resolved, catalogs.load(self.target))

    def pipeline(self) -> Pipeline:
        """What a process started now would run."""
        self.spark.conf.set("spark.sql.shuffle.partitions", str(self.tasks))
        return Pipeline(self.spark, self.config())

    def run(self) -> None:
        """Start the job anew and run it until its files are used up."""
        self.pipeline().run()

    def rows(self, table: str | None = None) -> list[dict[str, Any]]:
        """The table's rows in the order of their keys, read by Iceberg. Readers must accept the current snapshot."""
        rows: list[dict[str, Any]] = to_arrow(self.spark.table(table or self.target)).to_pylist()
        return sorted(rows, key=lambda row: [row[name] for name in self.key])

    def append(self, rows: Sequence[Row]) -> None:
        """What another writer would do: append through Spark."""
        path = self._hidden_file()
        schema = pa.schema([(name, arrow_type(sql_type)) for name, sql_type in self.columns.items()])
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
        self.spark.read.parquet(str(path)).writeTo(self.target).append()
        path.unlink()

    def call(self, procedure: str, arguments: str = "") -> None:
        """Call one of Iceberg's maintenance procedures on the table."""
        table = f"table => '{self.namespace}.orders'"
        self.spark.sql(f"CALL {CATALOG}.system.{procedure}({', '.join(filter(None, [table, arguments]))})").collect()

    def compact(self) -> None:
        self.call("rewrite_data_files", "options => map('rewrite-all', 'true')")

    def expire_snapshots(self) -> None:
        self.call("expire_snapshots", "older_than => TIMESTAMP '2999-01-01 00:00:00', retain_last => 1")

    def snapshots(self) -> list[dict[str, Any]]:
        """Snapshots in the order of their commit: `snapshot_id`, `operation`, `summary`."""
        frame = self.spark.sql(
            f"SELECT snapshot_id, operation, summary FROM {self.target}.snapshots ORDER BY committed_at"
        )
        return [row.asDict() for row in frame.collect()]

    def current_snapshot(self) -> int | None:
        """Id of the main branch's current snapshot. None if the table has no snapshot."""
        snapshot = self.java_table().currentSnapshot()
        return None if snapshot is None else int(snapshot.snapshotId())

    def own_ancestors(self) -> list[int]:
        """Ancestors of the current snapshot that the sink committed and that are still known, newest first."""
        found = []
        table = self.java_table()
        snapshot = table.currentSnapshot()
        while snapshot is not None and snapshot.parentId() is not None:
            snapshot = table.snapshot(snapshot.parentId())
            if snapshot is not None and snapshot.summary().get("rowdelta.sink-id") == self.sink_id:
                found.append(int(snapshot.snapshotId()))
        return found

    def replace_branch(self, name: str) -> None:
        """Make the branch `name` point to the current snapshot, which must exist."""
        table = self.java_table()
        references = table.manageSnapshots()
        if name in table.refs():
            references = references.removeBranch(name)
        references.createBranch(name, table.currentSnapshot().snapshotId()).commit()

    def rollback(self, snapshot: int) -> None:
        self.call("rollback_to_snapshot", f"snapshot_id => {snapshot}")

    def files(self) -> list[dict[str, Any]]:
        """Live data and delete files: `content` (0 data, 1 position deletes, 2 equality deletes), `file_path`,
        `record_count`.
        """
        frame = self.spark.sql(f"SELECT content, file_path, record_count FROM {self.target}.files")
        return [row.asDict() for row in frame.collect()]

    def planned_files(self) -> list[tuple[str, list[str]]]:
        """What a reader of the whole table opens: each data file with its delete files."""
        planned = self.java_table().newScan().planFiles()
        tasks, found = planned.iterator(), []
        while tasks.hasNext():
            task = tasks.next()
            found.append((str(task.file().location()), [str(delete.location()) for delete in task.deletes()]))
        planned.close()
        return found

    def unreferenced_files(self) -> list[str]:
        """Data and delete files in the table's folder that no snapshot knows: garbage of failed attempts."""
        known = {row[0] for row in self.spark.sql(f"SELECT file_path FROM {self.target}.all_files").collect()}
        known_names = {Path(unquote(urlparse(path).path)).name for path in known}
        present = [p for p in (self.table_folder / "data").rglob("*") if p.suffix in (".parquet", ".puffin")]
        return sorted(p.name for p in present if p.name not in known_names)

    def check_deletes(self) -> None:
        """Check that no commit with a key index added an equality delete, and none with `deletes: copy-on-write` any
        delete, and that no data file has two deletion vectors.
        """
        for snapshot in self.snapshots():
            if "index" in json.loads(snapshot["summary"].get(f"rowdelta.{self.sink_id}.position", "{}")):
                assert "added-equality-deletes" not in snapshot["summary"]
                is_copy = self.deletes == "copy-on-write" and snapshot["operation"] == "overwrite"
                if is_copy and "deleted-data-files" in snapshot["summary"]:
                    assert "added-delete-files" not in snapshot["summary"]
        vectors = self.spark.sql(
            f"SELECT referenced_data_file FROM {self.target}.delete_files WHERE lower(file_format) = 'puffin'"
        ).collect()
        assert len(vectors) == len({row[0] for row in vectors}), "two live vectors make the table unreadable"

    def check_index(self) -> dict[tuple[Any, ...], set[tuple[int, int]]] | None:
        """Check that the live entries of the key index are the table's rows, each once.

        :return: each key's hashes. None if the index doesn't belong to the table's last commit, for example because
            another writer made it.
        """
        table = self.java_table()
        current = table.currentSnapshot()
        stored = json.loads(str(table.properties().get(f"rowdelta.{self.sink_id}.position") or "{}"))
        newer = json.loads(str(table.properties().get(f"rowdelta.{self.sink_id}.index") or "{}"))
        if newer.get("operation", "none") == stored.get("operation"):
            stored |= newer
        if "index" not in stored or current is None or stored["snapshot-id"] != int(current.snapshotId()):
            return None
        if current.parentId() != stored["index"]["base"]:
            return None
        manifest = self.index_folder / "versions" / f"{stored['index']['version']}.json"
        version = self.index_version(manifest)
        self.encoding = version.encoding
        entries = live_entries(version, self.index_folder / "runs")
        key = ", ".join(f"`{name}`" for name in self.key)
        rows = to_arrow(self.spark.sql(f"SELECT {key}, _file, _pos FROM {self.target}")).to_pylist()
        places = [(row["_file"], row["_pos"]) for row in rows]
        assert sorted(place for place, _ in entries) == sorted(places), "index entries and live rows differ"
        hashes = dict(entries)
        found: dict[tuple[Any, ...], set[tuple[int, int]]] = {}
        for row, place in zip(rows, places, strict=True):
            found.setdefault(tuple(row[name] for name in self.key), set()).add(hashes[place])
        return found

    def index_version(self, manifest: Path) -> IndexVersion:
        """A version of the key index."""
        return IndexVersion.from_json(
            manifest.read_bytes(), lambda name: (self.index_folder / "vectors" / name).read_bytes()
        )

    def lose_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint, ignore_errors=True)

    def java_table(self) -> JavaObject:
        """Iceberg's table object, loaded now."""
        return java_table(self.spark, self.target)

    def create_table(self, fields: Sequence[Mapping[str, Any]]) -> None:
        """Create the table beforehand through Iceberg's API, with types that Spark's SQL has no name for.

        :param fields: of the schema, as in the Iceberg spec's JSON; the job's key becomes the identifier fields.
        """
        iceberg = _jvm(self.spark).org.apache.iceberg
        ids = [f["id"] for f in fields if f["name"] in self.key]
        schema = {"type": "struct", "schema-id": 0, "identifier-field-ids": ids, "fields": list(fields)}
        builder = java_catalog(self.spark).buildTable(
            _identifier(self.spark, self.target), iceberg.SchemaParser.fromJson(json.dumps(schema))
        )
        for name, value in ({"format-version": "2"} | dict(self.properties)).items():
            builder = builder.withProperty(name, value)
        update = builder.create().updateSpec()
        expressions = iceberg.expressions.Expressions
        for text in self.partition_by:
            partition = PartitionField.parse(text)
            parameters = [] if partition.parameter is None else [partition.parameter]
            transform = "ref" if partition.transform == "identity" else partition.transform
            update = update.addField(getattr(expressions, transform)(partition.column, *parameters))
        update.commit()

    def drop(self) -> None:
        self.spark.sql(f"DROP TABLE {self.target} PURGE")


def by_pyiceberg(job: Job) -> list[dict[str, Any]]:
    """The rows as PyIceberg reads them, which shares no code with the sink's commits."""
    operations = job.java_table().operations()
    table = StaticTable.from_metadata(str(operations.current().metadataFileLocation()))
    rows: list[dict[str, Any]] = table.scan().to_arrow().to_pylist()
    return sorted(rows, key=lambda row: [row[name] for name in job.key])


class Changes:
    """Micro-batches that update rows of all earlier ones, each with two rows of its own."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows: dict[int, str] = {}

    def write(self, batches: int) -> None:
        for _ in range(batches):
            number = len(self._rows)
            changed = {number: f"r{number}", number + 1: "new"} | dict.fromkeys(range(0, number, 3), f"r{number}")
            self._rows |= changed
            self._job.write([("+U", {"id": key, "region": region}) for key, region in changed.items()])

    def expected(self) -> list[dict[str, Any]]:
        return [{"id": key, "region": region} for key, region in sorted(self._rows.items())]


def live_entries(version: IndexVersion, runs: Path) -> list[tuple[tuple[str, int], tuple[int, int]]]:
    """((data file, position), hashes of the key) by the rules of `deltawriters.keyindex`, the slow and plain way."""
    io = PyArrowFileIO({})
    found = []
    superseded: set[tuple[int, int]] = set()
    for info in sorted(version.runs, key=lambda run: -run.sequence):
        run = open_run(io, str(runs), info)
        columns = zip(run.high.tolist(), run.low.tolist(), run.file.tolist(), run.pos.tolist(), strict=True)
        for high, low, file, pos in columns:
            hashes = high, low
            if hashes in superseded:
                continue
            if file & SUPERSEDES:
                superseded.add(hashes)
            if file not in (TOMBSTONE, DELETED_BEFORE):
                path = run.files[file & ~int(SUPERSEDES)].path
                if version.dead.get(path, -1) <= info.sequence:
                    found.append(((path, pos), hashes))
    return found


def damage(path: Path, random: Random) -> None:
    """Replace a file by a copy that has a flipped bit, or is cut short. Processes that have mapped the old file still
    see the old content.
    """
    content = bytearray(path.read_bytes())
    at = random.randrange(len(content))
    if random.random() < 0.5:
        content[at] ^= 1 << random.randrange(8)
    else:
        del content[at:]
    damaged = path.with_name("damaged")
    damaged.write_bytes(content)
    damaged.rename(path)


def java_catalog(spark: SparkSession, name: str = CATALOG) -> JavaObject:
    """A catalog of the session as Iceberg's Java object."""
    manager = spark._jsparkSession.sessionState().catalogManager()
    return manager.catalog(name).icebergCatalog()


def java_table(spark: SparkSession, target: str) -> JavaObject:
    """Iceberg's object of a table, loaded now."""
    return java_catalog(spark, target.partition(".")[0]).loadTable(_identifier(spark, target))


def _identifier(spark: SparkSession, target: str) -> JavaObject:
    return _jvm(spark).org.apache.iceberg.catalog.TableIdentifier.parse(target.partition(".")[2])


def java_error(spark: SparkSession, class_name: str, message: str) -> Py4JJavaError:
    """An exception as py4j would raise it, of a Java class whose constructor is (String, Object...) or (Throwable,
    String).
    """
    jvm = _jvm(spark)
    constructor: Any = jvm
    for part in class_name.split("."):
        constructor = getattr(constructor, part)
    exception = constructor(jvm.java.lang.RuntimeException(message))
    return Py4JJavaError(message, exception)


def _jvm(spark: SparkSession) -> Any:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return jvm


def _json_line(record: Row) -> str:
    """NaN, infinity and -0.0 are texts: JSON has no numbers for them."""
    fields = {
        name: str(value) if isinstance(value, float) and (not math.isfinite(value) or str(value) == "-0.0") else value
        for name, value in record.items()
    }
    return json.dumps(fields, default=_json_value, ensure_ascii=False) + "\n"


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.datetime):
        return value.isoformat()
    assert isinstance(value, Decimal), value
    return str(value)


class CrashError(OSError):
    """The process dies here: no error that the sink could handle, and nothing is cleaned up."""


Fault = Literal["in a task", "before the commit", "after the commit", "before a rewrite", "after a rewrite"]


@contextmanager
def crashing(
    fault: Fault,
    *,
    after_commits: int = 0,
    table: str = "orders",
    of: type[IcebergCommitter] | type[DeltaCommitter] = IcebergCommitter,
) -> Iterator[None]:
    """Code inside this context dies at `fault`, after `after_commits` commits to the table named `table`.

    :param of: what commits to tables of the format.
    """
    commits = itertools.count(1)
    original, original_rewrite = of.commit, of.rewrite

    with pytest.MonkeyPatch.context() as patch:

        def commit(self: Any, request: ChangeSet) -> Outcome:
            number = next(commits) if self._table.name.endswith(f".{table}") else 0
            if fault == "before the commit" and number > after_commits:
                raise CrashError(f"crash {fault}")
            outcome = original(self, request)
            if outcome != Done():
                return outcome
            if fault == "after the commit" and number > after_commits:
                raise CrashError(f"crash {fault}")
            if fault == "in a task" and number >= after_commits:
                patch.setattr(write, "run", die_in_task)
            return outcome

        def rewrite(self: Any, request: Rewrite) -> Outcome:
            if fault == "before a rewrite":
                raise CrashError(f"crash {fault}")
            outcome = original_rewrite(self, request)
            if fault == "after a rewrite":
                raise CrashError(f"crash {fault}")
            return outcome

        patch.setattr(of, "commit", commit)
        patch.setattr(of, "rewrite", rewrite)
        if fault == "in a task" and after_commits == 0:
            patch.setattr(write, "run", die_in_task)
        yield


@contextmanager
def before_commit(action: Callable[[], None], *, times: int = 1) -> Iterator[None]:
    """Run `action` between the writing of files and each of the next `times` attempts to commit them."""
    remaining = iter(range(times))
    original = IcebergCommitter._stage

    def stage(self: IcebergCommitter, request: ChangeSet) -> Any:
        if next(remaining, None) is not None:
            action()
        return original(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IcebergCommitter, "_stage", stage)
        yield


@contextmanager
def jvm_calls(owner: type, name: str) -> Iterator[list[str]]:
    """What a thread tells the JVM to do while it is in a method, command by command."""
    original, original_send = getattr(owner, name), GatewayClient.send_command
    inside = threading.local()
    commands: list[str] = []

    def method(self: Any, *args: Any) -> Any:
        inside.now = True
        try:
            return original(self, *args)
        finally:
            inside.now = False

    def send(self: GatewayClient, command: str, *args: Any, **options: Any) -> Any:
        if getattr(inside, "now", False):
            commands.append(command)
        return original_send(self, command, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        patch.setattr(GatewayClient, "send_command", send)
        yield commands


@contextmanager
def before_rewrite(
    action: Callable[[], object], *, of: type[IcebergCommitter] | type[DeltaCommitter] = IcebergCommitter
) -> Iterator[None]:
    """Run `action` between the writing of the next minor compaction's files and their commit.

    :param of: what commits to tables of the format.
    """
    remaining = iter(range(1))
    original = of.rewrite

    def rewrite(self: Any, request: Rewrite) -> Outcome:
        if next(remaining, None) is not None:
            action()
        return original(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, "rewrite", rewrite)
        yield


@contextmanager
def merging_soon(every: int = 2, *, enough: int = 1, fewest: int = 2, on_driver: bool = True) -> Iterator[None]:
    """Let minor compactions begin after few commits and few files, so that a short test has some. Each is committed
    after the next micro-batch, or at the run's end.

    :param on_driver: run them on the driver and not in Spark tasks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_levels, "EVERY", every)
        patch.setattr(minor_compaction, "_enough", lambda _: enough)
        patch.setattr(minor_compaction, "_FEWEST", fewest)
        patch.setattr(minor_compaction.SmallFiles, "are_too_many", True)
        patch.setattr(keyindex, "_FEWEST_BUCKETS", 2)
        if not on_driver:
            patch.setattr(minor_compaction, "_ON_DRIVER", -1)
        yield


def die_in_task(plan: Any, written: Any, batches: Any, first: int = 0) -> Iterator[pa.RecordBatch]:
    """`sink.spark.tasks.write.run`, but the first task fails with some of its rows written."""
    yield from write.run(plan, written, _first_then(CrashError("crash in a task"), batches), first)


def decode_with(failure: Exception, where: bytes = b"") -> Callable[..., Iterator[pa.RecordBatch]]:
    """`sink.spark.tasks.decode.decode` in place of which the format fails on every record that has `where` in it."""

    def decode(decoder: Any, then: Any, batches: Any) -> Iterator[pa.RecordBatch]:
        from changelog import formats

        find = formats.find

        def failing(name: str) -> Any:
            def open_format(spec: Any) -> Any:
                original = find(name)(spec)

                def changes(records: pa.RecordBatch) -> Iterator[Any]:
                    if any(where in value for value in records.column("value").to_pylist()):
                        raise failure
                    yield from original.changes(records)

                return SimpleNamespace(changes=changes)

            return open_format

        formats.find = failing
        try:
            yield from decoding.decode(decoder, then, batches)
        finally:
            formats.find = find

    return decode


def fill_disk_in_task(plan: Any, written: Any, batches: Any, first: int = 0) -> Iterator[pa.RecordBatch]:
    """`sink.spark.tasks.write.run`, but the first task finds the disk full."""
    yield from write.run(plan, written, _first_then(OSError(28, "No space left on device"), batches), first)


def _first_then(error: Exception, batches: Any) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    yield from itertools.islice(batches, 1)
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == 0:
        raise error
    yield from batches


@contextmanager
def tiny_thresholds(
    flush_bytes: int, batch_rows: int, spark: SparkSession, *, shuffles: bool = True, on_driver: int = 0
) -> Iterator[None]:
    """Let writers flush every few rows, so that a few dozen rows take the same paths as millions.

    :param shuffles: shuffle also the rows of few files, which every task would read otherwise.
    :param on_driver: most bytes of deletion vectors that the driver makes.
    """

    def options(**arguments: Any) -> DeltaOptions:
        return DeltaOptions(**arguments, flush_bytes=flush_bytes, position_delete_threshold=2)

    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_plans, "DeltaOptions", options)
        patch.setattr(keyindex, "_FEWEST_BUCKETS", 2)
        patch.setattr(writing, "BUFFER_BYTES", flush_bytes)
        patch.setattr(writing, "PART_ROWS", 1)
        patch.setattr(plans, "ON_DRIVER", on_driver)
        patch.setattr(deletes, "_LEAST", 1)
        patch.setattr(copy_on_write, "_ON_DRIVER", on_driver)
        patch.setattr(copy_on_write, "_LEAST", 1)
        patch.setattr(copy_on_write, "_WORTH_A_TASK", 1)
        patch.setattr(task_plans, "SMALL_BATCH", -1)  # otherwise one task would do everything
        if shuffles:
            patch.setattr(writing, "READ_AGAIN", -1)
        spark.conf.set(name, str(batch_rows))
        try:
            yield
        finally:
            spark.conf.set(name, str(before))


# tasks can't import the tests
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
