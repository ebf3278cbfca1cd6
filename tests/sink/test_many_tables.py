"""Many tables in one job: patterns, tables that come and go, failures of one of them, and what idle tables cost."""

import json
import os
import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sink.commands import inspection
from sink.config import Config
from sink.errors import ConfigError, DataError, TableError
from sink.run import supervisor
from sink.run.pipeline import Pipeline
from sink.sources.source import Range, SharedRead, TableBatch
from sink.spark import joint
from sink.spark.joint import JointWriter
from sink.spark.tasks import shares
from sink.spark.versions import to_arrow
from sink.table import task_plans
from sink.table.microbatch import TableSink
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.table import IcebergTable
from sink.targets.values import ChangeSet, Done, Outcome
from tests.sink.harness import merging_soon
from tests.sink.test_kafka import Running
from tests.stack.kafka import Kafka
from tests.stack.process import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

COLUMNS = {"id": "bigint", "name": "string"}
Row = dict[str, Any]


@dataclass
class Shop:
    """A database of many tables, its topics, and the job that mirrors them: one pattern entry, unless `entries` says
    otherwise.
    """

    spark: SparkSession
    folder: Path
    kafka: Kafka
    sink: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    columns: Mapping[str, str] | None = field(default_factory=lambda: COLUMNS)
    name: str = field(default_factory=lambda: f"m{uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        self.content: dict[str, dict[int, str]] = {}
        self._random = Random(7)
        self._partitions: dict[str, int] = {}
        # log_level 0: it may live longer than the broker, whose end is no news
        # idempotent: otherwise a request that is sent again (a new topic has no leader yet) lands after later ones
        self._producer = Producer(
            {"bootstrap.servers": self.kafka.bootstrap_servers, "log_level": 0, "enable.idempotence": True}
        )
        if not self.entries:
            self.entries = [{"source": rf"{self.name}\.(.*)", "target": f"lake.{self.name}.$1"}]

    def topic(self, table: str) -> str:
        return f"{self.name}.{table}"

    def target(self, table: str) -> str:
        return f"lake.{self.name}.{table}"

    def config(self) -> Config:
        # so that a column that somebody adds is a contradiction, which is what "bad" tables here have
        common: dict[str, Any] = {"key": ["id"], "schema_changes": "ignore"} | (
            {"columns": dict(self.columns)} if self.columns else {}
        )
        options = {"kafka.bootstrap.servers": self.kafka.bootstrap_servers, **self.options}
        return Config.model_validate(
            {
                "sink": {"id": "shop", "checkpoint": str(self.folder / "state"), **self.sink},
                "source": {"type": "kafka", "format": "row-kind", "options": options, **self.source},
                # these tests count jobs and commits
                "maintenance": {"budget": 0, "expire": None, "orphans": None},
                "catalogs": {
                    "lake": {
                        "type": "hadoop",
                        "warehouse": str(self.spark.conf.get("spark.sql.catalog.lake.warehouse")),
                    }
                },
                "tables": [common | entry for entry in self.entries],
            }
        )

    def create(self, *tables: str, partitions: int = 1) -> None:
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        topics = [NewTopic(self.topic(table), num_partitions=partitions, replication_factor=1) for table in tables]
        for future in admin.create_topics(topics).values():
            future.result(60)
        for table in tables:
            self._partitions[table] = partitions
            self.content[table] = {}

    def change(self, table: str, count: int) -> None:
        """Inserts, updates and deletes at random."""
        rows = self.content[table]
        for _ in range(count):
            number = self._random.randrange(50)
            if number not in rows:
                rows[number] = uuid4().hex[:6]
                self._send(table, "+I", number, rows[number])
            elif self._random.random() < 0.3:
                self._send(table, "-D", number, rows.pop(number))
            else:
                self._send(table, "-U", number, rows[number])
                rows[number] = uuid4().hex[:6]
                self._send(table, "+U", number, rows[number])
        assert self._producer.flush(60) == 0

    def send_raw(self, table: str, value: bytes) -> None:
        self._producer.produce(self.topic(table), value=value, partition=0)
        assert self._producer.flush(60) == 0

    def _send(self, table: str, kind: str, number: int, name: str) -> None:
        value = json.dumps({"row_kind": kind, "id": number, "name": name}).encode()
        self._producer.produce(self.topic(table), value=value, partition=number % self._partitions[table])

    def run(self) -> None:
        Pipeline(self.spark, self.config()).run()

    def pipeline(self) -> Pipeline:
        """So that `Running` takes it for a job."""
        return Pipeline(self.spark, self.config())

    def start(self) -> Running:
        self.sink["trigger"] = "200 milliseconds"
        return Running(self)  # type: ignore[arg-type]  # it needs `pipeline` only

    def rows(self, table: str) -> list[Row]:
        if not self.spark.catalog.tableExists(self.target(table)):
            return []
        rows: list[Row] = to_arrow(self.spark.table(self.target(table)).select("id", "name")).to_pylist()
        return sorted(rows, key=repr)

    def expected(self, table: str) -> list[Row]:
        return sorted(({"id": number, "name": name} for number, name in self.content[table].items()), key=repr)

    def is_exact(self, *tables: str) -> bool:
        for table in tables or self.content:
            rows, expected = self.rows(table), self.expected(table)
            if rows != expected:
                print(f"{self.target(table)} has {rows}, not {expected}")  # where an assertion fails, pytest shows it
                return False
        return True

    def read_until(self, table: str) -> dict[str, int]:
        """The offsets by partition up to which the query has read the table's topic, as Spark noted them last."""
        notes = [path for path in (self.folder / "state").rglob("offsets/*") if path.name.isdigit()]
        lines = max(notes, key=lambda path: path.stat().st_mtime_ns).read_text().splitlines() if notes else []
        offsets: dict[str, int] = json.loads(lines[-1]).get(self.topic(table), {}) if len(lines) > 2 else {}
        return offsets

    def snapshots(self, table: str) -> int:
        return self.spark.sql(f"SELECT * FROM {self.target(table)}.snapshots").count()


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path, kafka: Kafka) -> Shop:
    spark.conf.set("spark.sql.shuffle.partitions", "2")  # other tests set it in the same session
    return Shop(spark, tmp_path, kafka)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that failed are tried again after a second."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 1.0)


def test_a_dozen_tables_are_exact(shop: Shop) -> None:
    """Several micro-batches, and a restart without the checkpoint. Each table has its own partitions and speed."""
    names = [f"t{number:02d}" for number in range(12)]
    for partitions in (1, 2, 3):
        shop.create(*names[partitions - 1 :: 3], partitions=partitions)
    for number, name in enumerate(names):
        shop.change(name, 5 + number)
    shop.options = {"maxOffsetsPerTrigger": 100}
    shop.run()
    assert shop.is_exact()
    assert all(shop.snapshots(name) >= 2 for name in names[-5:])
    for name in names[::8]:
        shop.change(name, 20)
    before = {name: shop.snapshots(name) for name in names}
    shutil.rmtree(shop.folder / "state")
    shop.run()
    assert shop.is_exact()
    assert {name for name in names if shop.snapshots(name) > before[name]} == set(names[::8])
    assert any("pattern" in line for line in inspection.check(shop.spark, shop.config()))
    lines = list(inspection.status(shop.spark, shop.config()))
    assert sum(line == "  lag: 0 messages behind" for line in lines) == 12


def test_new_topics_are_picked_up_while_running(shop: Shop) -> None:
    """From their first message, although the job's first start was from `latest`; nothing of the others is lost or
    applied twice.
    """
    shop.source = {"discovery_interval": "1 second"}
    shop.options = {"startingOffsets": "latest"}
    shop.create("old")
    shop.change("old", 10)
    shop.content["old"] = {}
    with shop.start() as running:
        assert wait_until(lambda: shop.spark.catalog.tableExists(shop.target("old")), 60)
        assert wait_until(lambda: any((shop.folder / "state").rglob("sources/0/0")), 60)  # the query knows its start
        for _ in range(5):
            shop.change("old", 10)
        shop.create("new", partitions=2)
        shop.change("new", 30)

        def is_found_meanwhile() -> bool:
            shop.change("old", 2)
            return shop.spark.catalog.tableExists(shop.target("new"))

        assert wait_until(is_found_meanwhile, 60)
        assert wait_until(lambda: shop.rows("new") == shop.expected("new"), 60)
        shop.change("new", 10)
        shop.change("old", 10)
        assert wait_until(lambda: shop.rows("new") == shop.expected("new"), 60)
    assert running.error is None
    # a topic that came while the job was down is read from its first message too
    shop.create("third")
    shop.change("third", 10)
    shop.sink = {}
    shop.run()
    # of `old`, all but what came before the first start
    assert shop.is_exact()


def test_a_new_topic_that_fails_at_first_is_read_from_its_start(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """What arrives while it is set aside isn't skipped, although the job starts from `latest`."""
    shop.columns = None  # so a table has to be there

    def create_table(name: str, columns: str) -> None:
        shop.spark.sql(f"CREATE TABLE {shop.target(name)} ({columns}) USING iceberg")

    shop.source = {"discovery_interval": "500 milliseconds"}
    shop.options = {"startingOffsets": "latest"}
    shop.create("old")
    create_table("old", "id bigint NOT NULL, name string")
    create_table("new", "name string")  # the key's column is missing
    with shop.start() as running:
        shop.create("new")
        assert wait_until(lambda: f"{shop.target('new')} set aside" in caplog.text, 60)
        shop.change("new", 20)
        shop.spark.sql(f"DROP TABLE {shop.target('new')}")
        create_table("new", "id bigint NOT NULL, name string")
        assert wait_until(lambda: shop.is_exact("new"), 60)
    assert running.error is None


def test_no_topic_yet(shop: Shop) -> None:
    """A pattern that matches nothing isn't an error, and the first topic starts the stream."""
    shop.run()
    shop.source = {"discovery_interval": "500 milliseconds"}
    with shop.start() as running:
        pipeline, began = running.pipeline, time.monotonic()
        assert wait_until(lambda: pipeline._looked_at > began, 60)
        shop.create("a")
        shop.change("a", 10)
        assert wait_until(lambda: shop.is_exact(), 60)
    assert running.error is None


def test_one_bad_table_does_not_stop_the_others(shop: Shop) -> None:
    """A table that contradicts the configuration is set aside, the run ends with its error, and it catches up once
    repaired.
    """
    shop.create("a", "b", "c")
    for name in "abc":
        shop.change(name, 20)
    shop.run()
    shop.spark.sql(f"ALTER TABLE {shop.target('b')} ADD COLUMN extra string")
    for name in "abc":
        shop.change(name, 20)
    with pytest.raises(TableError, match=rf"{shop.target('b')} has a column 'extra' that columns doesn't name"):
        shop.run()
    assert shop.is_exact("a", "c")
    assert not shop.is_exact("b")
    shop.spark.sql(f"ALTER TABLE {shop.target('b')} DROP COLUMN extra")
    shop.change("a", 5)
    shop.run()
    assert shop.is_exact()


def test_a_table_that_is_rolled_back_is_read_again(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """All share one stream, which goes back for this one alone."""
    shop.create("a", "b", "c")
    with shop.start() as running:
        for _ in range(2):
            for name in ("a", "b", "c"):
                shop.change(name, 10)
            assert wait_until(lambda: shop.is_exact(), 120)
        first = shop.spark.sql(f"SELECT snapshot_id FROM {shop.target('b')}.snapshots ORDER BY committed_at").first()
        assert first is not None
        table = f"{shop.name}.b"
        shop.spark.sql(f"CALL lake.system.rollback_to_snapshot('{table}', {first.snapshot_id})").collect()
        assert not shop.is_exact("b")
        before = {name: shop.snapshots(name) for name in ("a", "c")}
        for name in ("a", "b", "c"):
            shop.change(name, 10)
        assert wait_until(lambda: shop.is_exact(), 120)
    assert running.error is None
    assert f"{shop.target('b')} was rolled back to an earlier snapshot while the sink ran" in caplog.text
    assert "another run" not in caplog.text
    assert all(shop.snapshots(name) > before[name] for name in before)


def test_a_table_that_comes_back_gets_nothing_of_the_query_that_went_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The query has read past the table's position. A new partition isn't even in the position."""
    shop.create("a", "b")
    with shop.start() as running:
        shop.change("a", 10)
        shop.change("b", 10)
        assert wait_until(lambda: shop.is_exact(), 60)

        def add_to_new_partition(first: int) -> None:
            # one that knows the partition
            producer = Producer({"bootstrap.servers": shop.kafka.bootstrap_servers, "enable.idempotence": True})
            for number in range(first, first + 10):
                shop.content["b"][number] = "new"
                value = json.dumps({"row_kind": "+I", "id": number, "name": "new"}).encode()
                producer.produce(shop.topic("b"), value=value, partition=1)
            assert producer.flush(60) == 0

        shop.spark.sql(f"ALTER TABLE {shop.target('b')} ADD COLUMN extra string")
        shop.change("b", 5)
        assert wait_until(lambda: f"{shop.target('b')} set aside" in caplog.text, 60)
        admin = AdminClient({"bootstrap.servers": shop.kafka.bootstrap_servers})
        topic = shop.topic("b")
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(60)
        add_to_new_partition(100)
        assert wait_until(lambda: shop.read_until("b").get("1") == 10, 60)
        shop.change("a", 10)
        assert wait_until(lambda: shop.is_exact("a"), 60)
        end = Pipeline._end

        def slow_end(self: Pipeline, run: Any) -> None:
            add_to_new_partition(200)
            # which it may still read, or not
            wait_until(lambda: shop.read_until("b").get("1") == 20, 3)
            monkeypatch.setattr(Pipeline, "_end", end)
            end(self, run)

        monkeypatch.setattr(Pipeline, "_end", slow_end)
        shop.spark.sql(f"ALTER TABLE {shop.target('b')} DROP COLUMN extra")
        assert wait_until(lambda: len(shop.rows("b")) >= len(shop.content["b"]) > 20 or not running.alive, 60)
    assert running.error is None
    assert shop.is_exact()


def test_a_table_dropped_underneath_is_made_again(shop: Shop) -> None:
    shop.create("a", "b")
    with shop.start() as running:
        shop.change("a", 10)
        shop.change("b", 10)
        assert wait_until(lambda: shop.is_exact(), 60)
        shop.spark.sql(f"DROP TABLE {shop.target('b')} PURGE")
        shop.change("a", 10)
        shop.change("b", 10)
        assert wait_until(lambda: shop.is_exact(), 60)
    assert running.error is None


def test_a_deleted_topic_does_not_stop_the_others(shop: Shop) -> None:
    shop.create("a", "b")
    with shop.start() as running:
        shop.change("a", 10)
        shop.change("b", 10)
        assert wait_until(lambda: shop.is_exact(), 60)
        admin = AdminClient({"bootstrap.servers": shop.kafka.bootstrap_servers})
        admin.delete_topics([shop.topic("b")])[shop.topic("b")].result(30)
        for _ in range(3):
            shop.change("a", 10)
            assert wait_until(lambda: shop.is_exact("a"), 60)
        assert running.alive
    assert running.error is None or isinstance(running.error, ConfigError)


def test_what_was_merged_stays_when_the_next_micro_batch_fails(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of a minor compaction belong to the table. A micro-batch that fails later must not delete them."""
    shop.sink = {"on_bad_record": "fail"}
    shop.create("a", "b")
    shared = list[set[str]]()
    original = JointWriter.write

    def write(self: JointWriter, spark: Any, sinks: Mapping[str, TableSink], shares: Any) -> Any:
        shared.append({sink.table.name for sink in sinks.values()})
        return original(self, spark, sinks, shares)

    monkeypatch.setattr(JointWriter, "write", write)
    with merging_soon(2), shop.start():
        for _ in range(4):
            for name in "ab":
                shop.change(name, 10)
            assert wait_until(lambda: shop.is_exact(), 60)
        before = shop.expected("a")
        merged = "summary['rowdelta.minor-compaction'] IS NOT NULL"
        snapshots = f"{shop.target('a')}.snapshots"
        assert wait_until(lambda: shop.spark.table(snapshots).where(merged).count() > 0, 60)
        shared.clear()
        shop._producer.produce(shop.topic("a"), value=b"not JSON", partition=0)
        shop.change("b", 10)
        assert wait_until(lambda: shop.is_exact("b"), 60)
        assert wait_until(lambda: f"{shop.target('a')} set aside" in caplog.text, 60)
        assert shop.rows("a") == before
    assert {shop.target("a"), shop.target("b")} in shared


def test_on_table_error_stop(shop: Shop) -> None:
    shop.sink = {"on_bad_record": "fail", "on_table_error": "stop", "trigger": "200 milliseconds"}
    shop.create("a", "b")
    shop.send_raw("b", b"no JSON")
    with pytest.raises(DataError, match="1 bad record"):
        shop.run()


def test_all_tables_failing_ends_the_job(shop: Shop) -> None:
    """All tables have failed, so the job ends. The error names them all."""
    shop.sink = {"on_bad_record": "fail", "trigger": "200 milliseconds"}
    shop.create("a", "b")
    for name in "ab":
        shop.send_raw(name, b"no JSON")
    with pytest.raises(DataError, match=r"(?s)2 of 2 tables failed; .*\.a: 1 bad record.*\.b: 1 bad record"):
        shop.run()


def test_columns_come_from_the_table_or_from_messages(shop: Shop) -> None:
    """The job waits for a topic that has neither. This isn't a failure."""
    shop.columns = None
    shop.create("a", "b", "c")
    shop.spark.sql(f"CREATE TABLE {shop.target('a')} (id bigint NOT NULL, name string) USING iceberg")
    shop.change("a", 10)
    shop.change("b", 10)
    shop.run()
    assert shop.is_exact("a", "b")
    assert not shop.spark.catalog.tableExists(shop.target("c"))
    shop.change("c", 10)
    shop.run()
    assert shop.is_exact()


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Iterator[Counter[str]]:
    """How often a method of tables is called, by the table's name."""
    calls: Counter[str] = Counter()
    original = getattr(owner, name)

    def counted(self: Any, *args: Any) -> Any:
        calls[self.name] += 1
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counted)
        yield calls


def test_idle_tables_cost_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at the catalog in micro-batches in which 1 of 12 tables has something."""
    names = [f"t{number:02d}" for number in range(12)]
    shop.create(*names)
    for name in names:
        shop.change(name, 3)
    with shop.start() as running:
        assert wait_until(lambda: shop.is_exact(), 90)
        running.finish_micro_batch()
        with counting(monkeypatch, IcebergTable, "refresh") as refreshed:
            for _ in range(3):
                snapshots = shop.snapshots("t05")
                shop.change("t05", 5)
                assert wait_until(lambda snapshots=snapshots: shop.snapshots("t05") > snapshots, 60)  # type: ignore[misc]
            running.finish_micro_batch()
    assert set(refreshed) == {shop.target("t05")}
    assert shop.is_exact()


def _jobs_of(scheduler: Any, work: Callable[[], object]) -> int:
    before = int(scheduler.numTotalJobs())
    work()
    return int(scheduler.numTotalJobs()) - before


def test_a_micro_batch_runs_one_job_for_all_small_tables(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Available-now, so that nothing else runs: the jobs of a run don't depend on the number of tables, but for large
    ones.
    """
    scheduler = shop.spark._jsc.sc().dagScheduler()
    names = [f"t{number}" for number in range(10)]
    shop.create(*names)
    for name in names:
        shop.change(name, 3)
    shop.run()
    assert shop.is_exact()
    assert _jobs_of(scheduler, shop.run) == 0
    shop.change("t1", 3)
    one = _jobs_of(scheduler, shop.run)
    shop.change("t1", 3)
    shop.change("t2", 3)
    shop.change("t3", 3)
    assert one >= 1
    assert _jobs_of(scheduler, shop.run) == one
    assert shop.is_exact()
    monkeypatch.setattr(task_plans, "SMALL_BATCH", 100)
    shop.change("t2", 300)
    large = _jobs_of(scheduler, shop.run)
    shop.change("t1", 3)
    shop.change("t2", 300)
    shop.change("t3", 300)
    shop.change("t4", 3)
    assert _jobs_of(scheduler, shop.run) == one + 2 * large
    assert shop.is_exact()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[str], set[str]]]:
    """For each joint job: the tables that it was asked to write, and those that it wrote."""
    found: list[tuple[set[str], set[str]]] = []
    write = JointWriter.write

    def recorded_write(self: JointWriter, spark: SparkSession, sinks: Any, shares: Any) -> Any:
        done = write(self, spark, sinks, shares)
        found.append(({name.split(".")[-1] for name in shares}, {name.split(".")[-1] for name in done}))
        return done

    monkeypatch.setattr(JointWriter, "write", recorded_write)
    return found


Jobs = list[tuple[set[str], set[str]]]


def no_file_is_left_over(shop: Shop, *tables: str) -> bool:
    """Whether all files in the tables' folders belong to a snapshot."""
    for table in tables or shop.content:
        rows = shop.spark.sql(f"SELECT file_path FROM {shop.target(table)}.all_files").collect()
        named = {row["file_path"].rsplit("/", 1)[-1] for row in rows}
        present = {path.name for path in _files(shop, table) if path.suffix in (".parquet", ".puffin")}
        if not present <= named:
            return False
    return True


@pytest.mark.parametrize(("version", "partition_by"), [("2", ["truncate(1, name)"]), ("3", ["bucket(8, id)"])])
def test_shared_jobs_and_own_jobs_keep_one_index(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, jobs: Jobs, partition_by: list[str], version: str
) -> None:
    """A joint job finds rows that a table's own job wrote, and the other way round: both hash keys in the same way."""
    shop.entries[0] |= {"partition_by": partition_by, "properties": {"format-version": version}}
    shop.create("a", "b", "c", partitions=2)
    for small in (10_000, 0, 10_000, 0, 10_000):
        monkeypatch.setattr(task_plans, "SMALL_BATCH", small)
        for name in shop.content:
            shop.change(name, 60)
        shop.run()
        assert shop.is_exact()
        assert no_file_is_left_over(shop)
    assert jobs == [({"a", "b", "c"}, {"a", "b", "c"})] * 3


def test_a_damaged_index_in_a_shared_job(shop: Shop, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    """The table is written again by itself, with an index that was built anew."""
    shop.create("a", "b", "c")
    for name in shop.content:
        shop.change(name, 40)
    shop.run()
    runs = [path for path in (shop.folder / "state").rglob("*") if path.is_file() and "runs" in path.parts]
    damaged = [path for path in runs if shop.target("b") in str(path)]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-5] + b"wrong")
    for name in shop.content:
        shop.change(name, 40)
    caplog.set_level("INFO", "rowdelta")
    shop.run()
    assert shop.is_exact()
    assert jobs[-1] == ({"a", "b", "c"}, {"a", "c"})
    assert f"{shop.target('b')}: to be written by itself: CorruptIndexError" in caplog.text
    assert no_file_is_left_over(shop)


@pytest.mark.parametrize("failing", [None, 1])
def test_a_shared_job_that_fails_is_made_good_table_by_table(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, jobs: Jobs, failing: int | None
) -> None:
    """Also when one of its two tasks was done: nothing that was written stays."""
    run_shares = shares.run_shares
    written, heard = shop.folder / "written", shop.folder / "heard"

    def failing_task(*args: Any) -> Iterator[Any]:
        context = TaskContext.get()
        if context is not None and context.partitionId() != failing:
            results = list(run_shares(*args))
            written.touch()
            return iter(results)
        while not heard.exists():
            time.sleep(0.1)
        raise RuntimeError("no luck")

    def tell_when_heard() -> None:
        tracker = shop.spark.sparkContext.statusTracker()

        def is_heard() -> bool:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            return written.exists() and any(stage is not None and stage.numCompletedTasks for stage in stages)

        if wait_until(is_heard, 60):
            heard.touch()

    # topics' names are random: each of both tasks gets some of twelve, nearly always
    names = [f"t{number}" for number in range(6 if failing is None else 12)]
    shop.create(*names)
    for name in names:
        shop.change(name, 20)
    with monkeypatch.context() as patch:
        if failing is None:
            patch.setattr(joint, "run_shares", lambda *args: iter([1 / 0]))
        else:
            patch.setattr(joint, "run_shares", failing_task)
            Thread(target=tell_when_heard, daemon=True).start()
        shop.run()
    assert failing is None or heard.exists()
    assert jobs == [(set(names), set())]
    assert shop.is_exact()
    assert no_file_is_left_over(shop)


def test_shares_are_dealt_out_to_jobs_by_records_partitions_and_size() -> None:
    def share(records: int, size: int, partitions: int = 1) -> tuple[TableBatch, Any]:
        offsets = dict.fromkeys(map(str, range(partitions)), 0)
        read = SharedRead([Range("t", offsets, offsets)], lambda *_: pytest.fail("is not to be read"))
        batch = TableBatch(lambda: pytest.fail("is not to be read"), {}, records, share=read)
        return batch, SimpleNamespace(begin={"t": offsets}, content=os.urandom(size))

    def jobs(*shares: tuple[TableBatch, Any]) -> list[list[str]]:
        by_source = {str(i): share for i, share in enumerate(shares)}
        parts = list(joint._jobs(by_source, {"t": "t"}, 100))
        for part, packed in parts:
            unpacked = pickle.loads(pickle.dumps(packed)).unpacked()
            assert unpacked == {"t": {source: by_source[source][1] for source in part}}
        return [list(part) for part, _ in parts]

    assert jobs() == []
    assert jobs(share(50, 1), share(50, 1), share(1, 1)) == [["0", "1"], ["2"]]
    assert jobs(share(1000, 1), share(1, 1), share(1, 1)) == [["0"], ["1", "2"]]
    assert jobs(share(1, joint.MOST_BYTES), share(1, 1), share(1, 1)) == [["0"], ["1", "2"]]
    most = joint.MOST_PARTITIONS
    assert jobs(share(1, 1), share(1, 1, most - 1), share(1, 1), share(1, 1, 2 * most)) == [["0", "1"], ["2"], ["3"]]
    same = joint.MOST_BYTES // 20
    assert len(jobs(*(share(1, same) for _ in range(40)))) > 1
    common = SimpleNamespace(begin={"t": {}}, content="x" * same)
    tables = [(share(1, 1)[0], common) for _ in range(40)]
    assert len(jobs(*tables)) == 1, "what tables have in common hardly counts"


def test_a_shared_job_reads_many_topics_in_few_tasks(shop: Shop) -> None:
    """A task for each topic would cost more than to read the topic."""
    names = [f"t{number}" for number in range(9)]
    shop.create(*names)
    for name in names:
        shop.change(name, 3)
    context = shop.spark.sparkContext
    scheduler = shop.spark._jsc.sc().dagScheduler()
    before = int(scheduler.numTotalJobs())
    shop.run()
    assert shop.is_exact()
    jobs = [context.statusTracker().getJobInfo(job) for job in range(before, int(scheduler.numTotalJobs()))]
    stages = [context.statusTracker().getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    assert stages
    assert max(stage.numTasks for stage in stages if stage) <= 2


def test_bad_records_and_new_columns_in_a_shared_job(shop: Shop, jobs: Jobs) -> None:
    """Each table gets its own dead letters, and evolves by itself."""
    shop.columns = None
    shop.entries[0]["schema_changes"] = "evolve"
    shop.create("a", "b", "c")
    for name in shop.content:
        shop.change(name, 10)
    shop.run()
    shop.send_raw("a", b"nonsense")
    shop.send_raw("c", b"[]")
    shop.send_raw("b", json.dumps({"row_kind": "+I", "id": 100, "name": "x", "more": 7}).encode())
    for name in shop.content:
        shop.change(name, 5)
    shop.content["b"][100] = "x"
    shop.run()
    assert shop.is_exact()
    assert shop.spark.table(shop.target("b")).where("more = 7").count() == 1
    assert "more" not in shop.spark.table(shop.target("a")).columns
    letters = shop.spark.table(shop.config().dead_letter_table).where(F.col("source").startswith(shop.name))
    assert {(row["table"], bytes(row["value"])) for row in letters.collect()} == {
        (shop.target("a"), b"nonsense"),
        (shop.target("c"), b"[]"),
    }
    assert jobs[-1] == ({"a", "b", "c"}, {"a", "b", "c"})


def test_computed_columns_take_a_job_of_their_own(shop: Shop, jobs: Jobs) -> None:
    columns = {"id": "bigint", "name": "string", "upper": {"type": "string", "expression": "upper(name)"}}
    shop.entries = [
        {"source": shop.topic("computed"), "target": shop.target("computed"), "columns": columns},
        *shop.entries,
    ]
    shop.create("computed", "a", "b")
    for name in shop.content:
        shop.change(name, 10)
    shop.run()
    assert shop.is_exact()
    assert shop.spark.table(shop.target("computed")).where("upper != upper(name)").count() == 0
    assert jobs == [({"a", "b"}, {"a", "b"})]


def recorded(monkeypatch: pytest.MonkeyPatch, slow: str) -> list[tuple[str, str]]:
    """("written" or "committed", table) in the order in which it happens. Table `slow` is written only when another
    has been committed.
    """
    events: list[tuple[str, str]] = []
    lock = Lock()
    finish, commit = TableSink._finish, IcebergCommitter.commit

    def writes(self: TableSink, *args: Any) -> Any:
        name = self.table.name.split(".")[-1]
        if name == slow:
            wait_until(lambda: any(what == "committed" for what, _ in events), 10)
        result = finish(self, *args)
        with lock:
            events.append(("written", name))
        return result

    def commits(self: IcebergCommitter, request: ChangeSet) -> Outcome:
        outcome = commit(self, request)
        if outcome == Done():
            with lock:
                events.append(("committed", self._table.name.split(".")[-1]))
        return outcome

    monkeypatch.setattr(TableSink, "_finish", writes)
    monkeypatch.setattr(IcebergCommitter, "commit", commits)
    return events


def test_no_table_waits_for_a_slow_one(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.create("orders", "order_items", "other")
    for name in shop.content:
        shop.change(name, 10)
    events = recorded(monkeypatch, slow="orders")
    shop.run()
    assert shop.is_exact()
    assert ("committed", "other") in events[: events.index(("written", "orders"))]
    lines = list(inspection.status(shop.spark, shop.config()))
    assert sum(line.startswith("  position: {") for line in lines) == 3


def _files(shop: Shop, table: str) -> Sequence[Path]:
    warehouse = Path(str(shop.spark.conf.get("spark.sql.catalog.lake.warehouse")))
    return list((warehouse / shop.name / table / "data").rglob("*"))


def test_plans_and_refusals_are_shown(shop: Shop) -> None:
    """`check` shows every table's state and ends with the first error; `status` shows what a refused table is about."""
    shop.create("a-b", "a_b", "c")
    lines: list[str] = []
    with pytest.raises(ConfigError, match="would share the table"):
        lines.extend(inspection.check(shop.spark, shop.config()))
    assert f"{shop.topic('c')} -> {shop.target('c')}: will be created" in lines
    assert sum("would share the table" in line for line in lines) == 1
    assert sum("see the error below" in line for line in lines) == 1
    assert sum("would share the table" in line for line in inspection.status(shop.spark, shop.config())) == 2
    shop.change("c", 5)
    with pytest.raises(ConfigError, match="would share the table"):
        shop.run()
    assert shop.is_exact("c")


def test_directories_by_pattern(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each matching directory is a table; one that appears while the job runs too; a bad one stops itself only."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 600.0)  # or the job may be stopped while the bad one is tried again
    name = f"m{uuid4().hex[:12]}"

    def write(folder: str, *records: Mapping[str, Any]) -> None:
        path = tmp_path / "cdc" / folder
        path.mkdir(parents=True, exist_ok=True)
        hidden = path / f".{uuid4().hex}.json"
        hidden.write_text("".join(json.dumps(record) + "\n" for record in records))
        hidden.rename(path / hidden.name[1:])

    def config(trigger: str) -> Config:
        return Config.model_validate(
            {
                "sink": {"id": "s", "checkpoint": str(tmp_path / "s"), "trigger": trigger, "on_bad_record": "fail"},
                "source": {
                    "type": "files",
                    "format": "row-kind",
                    "options": {"path_format": "json"},
                    "discovery_interval": "500 milliseconds",
                },
                "catalogs": {"lake": {"type": "hadoop", "warehouse": "unused"}},
                "tables": [
                    {
                        "source": str(tmp_path / "cdc" / "shop_(.*)"),
                        "target": f"lake.{name}.$1",
                        "key": ["id"],
                        "columns": {"id": "bigint"},
                        "order_by": ["seq bigint"],
                    }
                ],
            }
        )

    def ids(table: str) -> list[int]:
        if not spark.catalog.tableExists(f"lake.{name}.{table}"):
            return []
        return sorted(row.id for row in spark.table(f"lake.{name}.{table}").collect())

    write("shop_a", {"row_kind": "+I", "id": 1, "seq": 1})
    write("shop_bad", {"row_kind": "?"})
    write("other", {"row_kind": "+I", "id": 9, "seq": 1})
    with pytest.raises(DataError, match=rf"lake\.{name}\.bad: 1 bad record"):
        Pipeline(spark, config("available-now")).run()
    assert ids("a") == [1]

    class Job:
        def pipeline(self) -> Pipeline:
            return Pipeline(spark, config("200 milliseconds"))

    with Running(Job()) as running:  # type: ignore[arg-type]
        write("shop_new", {"row_kind": "+I", "id": 5, "seq": 1})
        assert wait_until(lambda: ids("new") == [5], 60)
        write("shop_a", {"row_kind": "+I", "id": 2, "seq": 2})
        assert wait_until(lambda: ids("a") == [1, 2], 60)
        assert wait_until(lambda: f"lake.{name}.bad set aside" in caplog.text, 60)
        assert running.alive
    assert isinstance(running.error, DataError)
    assert not spark.catalog.tableExists(f"lake.{name}.other")


def test_tables_that_are_being_opened_hold_up_no_micro_batch_and_no_end(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their catalog doesn't answer for minutes. There are more of them than threads."""
    names = [f"t{number}" for number in range(6)]
    shop.create(*names)
    shop.sink["parallel_tables"] = 2
    pipeline = shop.pipeline()
    supervised, members = pipeline._supervisor, list(pipeline._supervisor.members.values())
    answers, opening = threading.Event(), threading.Event()

    def hang(_: Any) -> None:
        opening.set()
        answers.wait(60)

    monkeypatch.setattr(supervised, "_open", hang)
    reopening = threading.Thread(target=supervised.open, args=(members,))
    reopening.start()
    try:
        assert opening.wait(30)
        submit = supervised._submitter(supervised._pool)
        assert submit(lambda: None).result(10) is None
        assert reopening.is_alive()
        pipeline.stop()
        reopening.join(10)
        assert not reopening.is_alive()
    finally:
        answers.set()
        supervised.close()
