"""The log of a Delta table. Foreign commits are made by Spark's SQL, in the moment before ours is sent."""

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from sink.errors import RolledBackError, TableError, TableGoneError, TemporaryError
from sink.targets.delta import log as module
from sink.targets.delta.actions import Commit, Proposal, check_removes, decoded
from sink.targets.delta.commands import create, evolve
from sink.targets.delta.log import CommitRefusedError, DeltaLog, LogGapError
from sink.targets.values import CommitUnknownError
from tests.delta.committer import ROUNDS

pytestmark = pytest.mark.spark

SCHEMA = T.StructType([T.StructField("id", T.LongType()), T.StructField("p", T.StringType())])
PROPERTIES = {"delta.enableDeletionVectors": "true", "delta.feature.domainMetadata": "supported"}


class Table:
    """A table, and what a test does to it.

    :param partitioned: by `p`.
    """

    def __init__(self, spark: SparkSession, path: Path, partitioned: bool = False) -> None:
        self.spark = spark
        self.path = path
        self.partitioned = partitioned
        self.log = Interrupted(spark, str(path))
        self._operation = 0

    def create(self, **properties: str) -> "Table":
        assert create(self.log, SCHEMA, ["p"] if self.partitioned else (), PROPERTIES | properties)
        return self

    def add(self, *ids: int, p: str = "a") -> dict[str, Any]:
        """A file with these rows, and its `add`."""
        folder = f"p={p}/" if self.partitioned else ""
        name = f"{folder}{uuid.uuid4()}.parquet"
        columns: dict[str, Any] = {"id": pa.array(ids, pa.int64())}
        if not self.partitioned:
            columns["p"] = pa.array([p] * len(ids), pa.string())
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), self.path / name)
        return {
            "path": name,
            "partitionValues": {"p": p} if self.partitioned else {},
            "size": (self.path / name).stat().st_size,
            "modificationTime": 1,
            "dataChange": True,
            "stats": json.dumps({"numRecords": len(ids)}),
        }

    def proposal(self, *actions: dict[str, Any], live: dict[str, Any] | None = None) -> Proposal:
        self._operation += 1
        txn = {"txn": {"appId": "app", "version": self._operation, "lastUpdated": 1}}
        domain = {"domainMetadata": {"domain": "rowdelta.x", "configuration": "{}", "removed": False}}
        return Proposal(
            [*actions, txn, domain],
            base_version=self.log.refresh().version,
            live=live or {},
            app_id="app",
            operation=f"operation-{self._operation}",
        )

    def commit(self, *actions: dict[str, Any], live: dict[str, Any] | None = None) -> int:
        return self.log.commit(self.proposal(*actions, live=live))

    def since(self, version: int) -> list[Commit] | None:
        return self.log.commits(version + 1, self.log.refresh().version)

    def live(self) -> dict[str, dict[str, Any]]:
        return {decoded(add["path"]): add for add in self.log.live_files(self.log.refresh().version)}

    def ids(self) -> list[int]:
        return sorted(row.id for row in self.spark.read.format("delta").load(str(self.path)).select("id").collect())

    def sql(self, statement: str) -> list[Any]:
        """The word TABLE stands for the table."""
        return self.spark.sql(statement.replace("TABLE_", f"delta.`{self.path}`")).collect()

    def write_version(self, version: int, *actions: dict[str, Any]) -> None:
        """A commit by somebody who knows only the protocol."""
        file = self.path / "_delta_log" / f"{version:020}.json"
        file.write_text("\n".join(json.dumps(action) for action in actions))

    def replace_version(self, version: int, *actions: dict[str, Any]) -> None:
        self.write_version(version, {"commitInfo": {"txnId": "theirs"}}, *actions)
        (self.path / "_delta_log" / f".{version:020}.json.crc").unlink(missing_ok=True)  # of Hadoop's file system
        (self.path / "_delta_log" / f"{version:020}.crc").unlink(missing_ok=True)  # Delta's


class Interrupted(DeltaLog):
    """A log in which something happens before a commit is sent, or in place of its answer."""

    before: Callable[[], object] = staticmethod(lambda: None)
    is_sent = True
    is_answered = True

    def _send(self, transaction: JavaObject, actions: JavaObject, operation: JavaObject) -> int:
        self.before()
        version = super()._send(transaction, actions, operation) if self.is_sent else -1
        if not self.is_answered:
            self.scala.jvm.java.nio.file.Files.readString(self.scala.jvm.java.nio.file.Path.of("/lost", None))
        return version


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> Table:
    return Table(spark, tmp_path / "table").create()


@pytest.fixture
def partitioned(spark: SparkSession, tmp_path: Path) -> Table:
    return Table(spark, tmp_path / "table", partitioned=True).create()


def remove(add: dict[str, Any]) -> dict[str, Any]:
    kept = {key: add[key] for key in ("path", "partitionValues", "size", "deletionVector") if key in add}
    return {"remove": {**kept, "deletionTimestamp": 1, "dataChange": True, "extendedFileMetadata": True}}


# -- create, look


def test_a_table_is_created_as_delta_creates_one(spark: SparkSession, tmp_path: Path) -> None:
    ours, deltas = Table(spark, tmp_path / "ours"), Table(spark, tmp_path / "deltas")
    assert not ours.log.exists()
    ours.create()
    text = ", ".join(f"'{name}' = '{value}'" for name, value in PROPERTIES.items())
    deltas.sql(f"CREATE TABLE TABLE_ (id BIGINT, p STRING) USING delta TBLPROPERTIES ({text})")
    assert ours.log.exists()
    one, other = ours.log.refresh(), deltas.log.refresh()
    assert one.protocol == other.protocol
    assert replace(one.metadata, table_id="") == replace(other.metadata, table_id="")
    assert one.metadata.table_id != other.metadata.table_id
    assert create(ours.log, SCHEMA) is False
    assert ours.log.refresh() is one


def test_a_table_isnt_created_among_other_files(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").touch()
    log = DeltaLog(spark, str(tmp_path))
    with pytest.raises(TableError, match=r"has files \(orders\.csv\)"):
        create(log, SCHEMA)
    with pytest.raises(TableError, match="there is no Delta table"):
        log.refresh()
    assert not (tmp_path / "_delta_log").exists()


def test_a_schema_that_delta_refuses(spark: SparkSession, tmp_path: Path) -> None:
    log = DeltaLog(spark, str(tmp_path))
    with pytest.raises(TableError, match="Delta refuses it"):
        create(log, T.StructType([T.StructField("a b", T.LongType())]))
    assert not log.exists()


@pytest.mark.parametrize("kind", ["table", "partitioned"])
def test_a_commit_is_read_back(kind: str, request: pytest.FixtureRequest) -> None:
    table: Table = request.getfixturevalue(kind)
    one, two = table.add(1, 2), table.add(3, p="b")
    proposal = replace(
        table.proposal({"add": one}, {"add": two}), metrics={"numTouchedFiles": 2, "scanTimeMs": 7}, epoch=5
    )
    assert table.log.commit(proposal) == 1
    snapshot = table.log.refresh()
    assert (snapshot.version, table.ids()) == (1, [1, 2, 3])
    assert dict(snapshot.domains) == {"rowdelta.x": "{}"}
    assert dict(snapshot.transactions) == {"app": 1}
    assert table.live() == {one["path"]: {**one, "dataChange": False}, two["path"]: {**two, "dataChange": False}}
    (commit,) = table.since(0) or []
    assert commit.operation_id == proposal.operation
    read = [action["add"] for action in commit.actions if "add" in action]
    # on Spark 4.1 every file has tags
    assert [{key: value for key, value in add.items() if key != "tags" or value} for add in read] == [one, two]
    (row,) = table.sql("DESCRIBE HISTORY TABLE_ LIMIT 1")
    assert row.operation == "STREAMING UPDATE"
    assert row.operationParameters["epochId"] == "5"
    assert row.operationMetrics == {"numTouchedFiles": "2", "scanTimeMs": "7"}


def test_live_files_keep_null_and_text_that_looks_encoded(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, tmp_path / "table", partitioned=True).create()
    table.spark.sql("SELECT 1L AS id, CAST(NULL AS STRING) AS p UNION ALL SELECT 2L, 'a b%20/ü'").write.format(
        "delta"
    ).mode("append").partitionBy("p").save(str(table.path))
    found = {add["partitionValues"]["p"]: path for path, add in table.live().items()}
    assert found.keys() == {None, "a b%20/ü"}
    assert all((table.path / path).exists() for path in found.values())


def test_domains_and_transactions_follow_every_commit(table: Table) -> None:
    assert table.log.refresh().domains == {}
    table.commit()
    earlier = table.log.refresh()
    other = DeltaLog(table.spark, str(table.path))
    gone = {"domainMetadata": {"domain": "rowdelta.x", "configuration": "", "removed": True}}
    new = {"domainMetadata": {"domain": "other", "configuration": "text", "removed": False}}
    other.commit(Proposal([gone, new], base_version=1, live={}, app_id="app", operation="o"))
    assert dict(table.log.refresh().domains) == {"other": "text"}
    assert dict(earlier.domains) == {"rowdelta.x": "{}"}, "asked later than of the newest version"
    # what was followed is what Delta finds
    afresh = DeltaLog(table.spark, str(table.path)).refresh()
    assert (afresh.domains, afresh.transactions) == ({"other": "text"}, {"app": 1})


def test_history_and_time_travel(table: Table) -> None:
    times = [table.log.refresh().timestamp_ms]
    for number in range(2):
        table.commit({"add": table.add(number)})
        times.append(table.log.refresh().timestamp_ms)
    assert [commit.version for commit in table.log.history(2)] == [2, 1]
    assert [commit.version for commit in table.log.history(9)] == [2, 1, 0]
    assert [commit.info["operation"] for commit in table.log.history(9)][-1] == "CREATE TABLE"
    assert [table.log.version_at(time) for time in times] == [0, 1, 2]
    assert table.log.version_at(times[1] - 1) == 0
    assert table.log.version_at(times[2] + 1_000_000) == 2
    with pytest.raises(TableError):
        table.log.version_at(times[0] - 1)


# -- refused


def _second_driver(kind: str) -> Callable[[Table], object]:
    actions = {
        "domain": {"domainMetadata": {"domain": "rowdelta.x", "configuration": "2", "removed": False}},
        "other domain": {"domainMetadata": {"domain": "rowdelta.y", "configuration": "2", "removed": False}},
        "txn": {"txn": {"appId": "app", "version": 77, "lastUpdated": 1}},
        "other txn": {"txn": {"appId": "another", "version": 77, "lastUpdated": 1}},
    }

    def commit(table: Table) -> None:
        log = DeltaLog(table.spark, str(table.path))
        log.commit(
            Proposal([actions[kind]], base_version=log.refresh().version, live={}, app_id="another", operation="o")
        )

    return commit


FOREIGN: dict[str, tuple[Callable[[Table], object], set[str]]] = {
    "append": (lambda t: t.sql("INSERT INTO TABLE_ VALUES (9, 'a')"), {"ConcurrentAppendException"}),
    "merge with vectors": (
        lambda t: t.sql(
            "MERGE INTO TABLE_ t USING (SELECT 2L AS id) s ON t.id = s.id WHEN MATCHED THEN UPDATE SET t.id = 20"
        ),
        {"ConcurrentAppendException", "ConcurrentDeleteReadException"},
    ),
    "delete": (
        lambda t: t.sql("DELETE FROM TABLE_ WHERE id = 2"),
        {"ConcurrentAppendException", "ConcurrentDeleteReadException", "ConcurrentDeleteDeleteException"},
    ),
    "delete of all": (
        lambda t: t.sql("DELETE FROM TABLE_"),
        {"ConcurrentDeleteReadException", "ConcurrentDeleteDeleteException"},
    ),
    "truncate": (
        lambda t: t.sql("TRUNCATE TABLE TABLE_"),
        {"ConcurrentDeleteReadException", "ConcurrentDeleteDeleteException"},
    ),
    "overwrite": (
        lambda t: t.sql("INSERT OVERWRITE TABLE_ VALUES (9, 'a')"),
        {"ConcurrentAppendException", "ConcurrentDeleteReadException"},
    ),
    "optimize": (
        lambda t: t.sql("OPTIMIZE TABLE_"),
        {"ConcurrentDeleteReadException", "ConcurrentAppendException", "ConcurrentDeleteDeleteException"},
    ),
    "restore": (
        lambda t: t.sql("RESTORE TABLE TABLE_ TO VERSION AS OF 1"),
        {"ConcurrentDeleteReadException", "MetadataChangedException", "ConcurrentAppendException"},
    ),
    "alter": (lambda t: t.sql("ALTER TABLE TABLE_ ADD COLUMNS (n INT)"), {"MetadataChangedException"}),
    "property": (lambda t: t.sql("ALTER TABLE TABLE_ SET TBLPROPERTIES ('a' = 'b')"), {"MetadataChangedException"}),
    "feature": (
        lambda t: t.sql("ALTER TABLE TABLE_ SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')"),
        {"MetadataChangedException", "ProtocolChangedException"},
    ),
    "same domain": (_second_driver("domain"), {"ConcurrentTransactionException"}),
    "same txn": (_second_driver("txn"), {"ConcurrentTransactionException"}),
}
HARMLESS: dict[str, Callable[[Table], object]] = {
    "vacuum": lambda t: t.sql("VACUUM TABLE_"),
    "other txn": _second_driver("other txn"),
    "other domain": _second_driver("other domain"),
    "feature without use": lambda t: t.sql(
        "ALTER TABLE TABLE_ SET TBLPROPERTIES ('delta.feature.changeDataFeed' = 'supported')"
    ),
    "nothing deleted": lambda t: t.sql("DELETE FROM TABLE_ WHERE id = 99"),
}


def _two_files(table: Table) -> dict[str, Any]:
    """Two more files in partition a; the second one is returned."""
    table.commit({"add": table.add(1, 2)})
    second = table.add(3, 4)
    table.commit({"add": second})
    return second


def test_foreign_changes_refuse_ours(table: Table) -> None:
    for foreign in FOREIGN:
        _refused(table, foreign)


def test_foreign_changes_in_another_partition_refuse_ours(partitioned: Table) -> None:
    partitioned.commit({"add": partitioned.add(8, p="b")})
    for foreign in ("append", "merge with vectors", "truncate", "overwrite", "restore"):
        _refused(partitioned, foreign, p="b")


def _refused(table: Table, foreign: str, p: str = "a") -> None:
    change, expected = FOREIGN[foreign]
    _two_files(table)
    proposal = table.proposal({"add": table.add(5, p=p)})
    changed: list[list[int]] = []

    def before() -> None:
        change(table)
        changed.append(table.ids())

    table.log.before = before
    with pytest.raises(CommitRefusedError) as refused:
        table.log.commit(proposal)
    assert refused.value.conflict in expected, foreign
    assert table.ids() == changed[0], foreign
    table.log.before = lambda: None
    with pytest.raises(CommitRefusedError) as stale:
        table.log.commit(proposal)
    assert stale.value.conflict == "StaleVersion", foreign


def test_a_table_that_was_replaced(table: Table) -> None:
    """`REPLACE` goes on with the old table's versions, but under another id."""
    _two_files(table)
    proposal = table.proposal({"add": table.add(5)})
    table.log.before = lambda: table.sql("REPLACE TABLE TABLE_ (id BIGINT, p STRING, n INT) USING delta")
    with pytest.raises(TableGoneError, match="another Delta table is in its place"):
        table.log.commit(proposal)
    table.log.before = lambda: None
    with pytest.raises(TableGoneError, match="another Delta table is in its place"):
        table.log.commit(proposal)
    assert table.ids() == []


def test_foreign_commits_that_change_nothing_of_ours(table: Table) -> None:
    for number, (foreign, change) in enumerate(HARMLESS.items(), start=1):
        second = _two_files(table)
        table.log.before = partial(change, table)
        table.commit({"add": table.add(5)}, remove(second), live=table.live())
        table.log.before = lambda: None
        assert table.ids() == sorted([1, 2, 5] * number), foreign


def test_two_processes_at_once(spark: SparkSession, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.delta.committer", str(tmp_path / "table"), str(tmp_path)]
    processes = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    try:
        # one waits for the other, which may have failed: so what each says is read at the same time
        with ThreadPoolExecutor() as threads:
            said = list(threads.map(partial(_said, processes), processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], said[0][1][-4000:] + said[1][1][-4000:]
    outcomes = [[json.loads(line) for line in output.splitlines()] for output, _ in said]
    assert sorted(outcome[0]["created"] for outcome in outcomes) == [False, True]
    assert outcomes[0][0]["table"] == outcomes[1][0]["table"]
    lost = {"txn": "ConcurrentTransactionException", "domain": "ConcurrentTransactionException"}
    for number, (one, two) in enumerate(zip(outcomes[0][1:], outcomes[1][1:], strict=True)):
        expected = {str(one["base"] + 1), lost.get(ROUNDS[number], "ConcurrentAppendException")}
        # the second one may also have come after the first one was done
        assert {one["outcome"], two["outcome"]} in (expected, {str(one["base"] + 1), "StaleVersion"}), (one, two)
    log = DeltaLog(spark, str(tmp_path / "table"))
    assert log.refresh().version == len(ROUNDS)


def _said(all_of_them: Sequence[subprocess.Popen[str]], one: subprocess.Popen[str]) -> tuple[str, str]:
    """What one process prints until it ends. If it fails, the others are killed."""
    said = one.communicate(timeout=300)
    if one.returncode:
        for other in all_of_them:
            other.kill()
    return said


# -- unknown


def test_an_answer_that_is_lost(table: Table) -> None:
    table.log.is_answered = False
    assert table.commit({"add": table.add(1)}) == 1
    assert table.ids() == [1]


def test_a_commit_that_never_arrived_is_unknown(table: Table) -> None:
    table.log.is_sent = table.log.is_answered = False
    proposal = table.proposal({"add": table.add(1)})
    with pytest.raises(CommitUnknownError, match="unknown whether the commit on version 0 went through"):
        table.log.commit(proposal)
    assert table.since(0) == []
    table.log.is_sent = table.log.is_answered = True
    assert table.log.commit(proposal) == 1
    assert [(made.version, made.operation_id) for made in table.since(0) or []] == [(1, proposal.operation)]


def test_an_answer_is_lost_and_others_commit_on_top(table: Table) -> None:
    """The first look fails too."""
    proposal = table.proposal({"add": table.add(1)})
    look, failures = table.log._find, iter([TemporaryError("no answer")])

    def find(since_version: int, is_it: Any) -> int | None:
        for error in failures:
            table.sql("INSERT INTO TABLE_ VALUES (9, 'a')")
            raise error
        return look(since_version, is_it)

    table.log._find = find  # type: ignore[method-assign]
    table.log.is_answered = False
    assert table.log.commit(proposal) == 1
    assert table.ids() == [1, 9]


def test_nothing_is_known_while_the_log_cant_be_read(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(since_version: int, is_it: Any) -> int | None:
        raise TemporaryError("no answer")

    monkeypatch.setattr(module, "_LOOKS", 2)
    table.log._find = find  # type: ignore[method-assign]
    table.log.before = lambda: table.sql("INSERT INTO TABLE_ VALUES (9, 'a')")
    with pytest.raises(CommitUnknownError, match="ConcurrentAppendException"):
        table.commit({"add": table.add(1)})


def test_a_store_that_says_twice_what_it_did_once(table: Table) -> None:
    """Some stores send a request again when its answer is lost, and then find their own file there."""
    proposal = table.proposal({"add": table.add(1)})

    def before() -> None:
        # the first request has arrived
        info = {"commitInfo": {"timestamp": 1, "operation": "STREAMING UPDATE", "txnId": identity[0]}}
        table.write_version(1, info, *[dict(action) for action in proposal.actions])

    identity: list[str] = []
    start = table.log.start

    def started(base_version: int) -> JavaObject:
        transaction = start(base_version)
        identity.append(str(transaction.txnId()))
        return transaction

    table.log.start = started  # type: ignore[method-assign]
    table.log.before = before
    assert table.log.commit(proposal) == 1
    assert table.ids() == [1]


# -- bad logs


def test_commits_that_log_cleanup_deleted(table: Table) -> None:
    for number in range(4):
        table.commit({"add": table.add(number)})
    table.log.refresh()
    table.log.checkpoint()
    for version in range(3):
        (table.path / "_delta_log" / f"{version:020}.json").unlink()
    assert table.since(1) is None
    assert [commit.version for commit in table.since(2) or []] == [3, 4]
    assert table.since(4) == []
    with pytest.raises(TemporaryError, match="deleted by log clean-up"):
        table.log._find(0, lambda commit: commit.operation_id == "operation-1")


def test_the_log_is_not_listed_while_nobody_else_writes(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list takes longer with each version that is kept."""
    lists = 0

    def counted(log: DeltaLog) -> JavaObject:
        nonlocal lists
        lists += 1
        return update(log)

    update = DeltaLog._update
    table.commit({"add": table.add(0)})
    monkeypatch.setattr(DeltaLog, "_update", counted)
    for number in range(1, 4):
        version = table.commit({"add": table.add(number)})
        snapshot = table.log.committed(version)
        assert (snapshot.version, table.log.refresh()) == (version, snapshot)
    assert lists == 0
    assert table.ids() == [0, 1, 2, 3]
    table.write_version(5, {"add": table.add(5)})
    assert (table.log.refresh().version, lists) == (5, 1)


@pytest.mark.parametrize("versions", [1, 2, 4])
def test_a_table_that_is_dropped_while_a_commit_is_sent(spark: SparkSession, tmp_path: Path, versions: int) -> None:
    """The commit's own file is there, and hides that nothing else is."""
    table = Table(spark, tmp_path / "table").create()
    for number in range(1, versions):
        table.log.committed(table.commit({"add": table.add(number)}))
    folder = table.path / "_delta_log"

    def drop() -> None:
        for file in (*folder.glob("*.json"), *folder.glob(".*.crc")):
            file.unlink()

    table.log.before = drop
    version = table.commit({"add": table.add(9)})
    assert [file.name for file in folder.glob("*.json")] == [f"{version:020}.json"]
    table.log.committed(version)
    with pytest.raises(TableError):
        table.log.refresh()


def test_a_table_that_was_created_again_with_as_many_versions(table: Table) -> None:
    table.commit({"add": table.add(1)})
    proposal = table.proposal({"add": table.add(2)})
    shutil.rmtree(table.path)
    other = Table(table.spark, table.path).create()
    for number in (7, 8, 9):
        other.sql(f"INSERT INTO TABLE_ VALUES ({number}, 'a')")
    (table.path / "_delta_log" / f"{3:020}.json").unlink()  # as many as before, though of another table
    (table.path / "_delta_log" / f"{2:020}.json").unlink()
    with pytest.raises(TableGoneError, match="another Delta table is in its place"):
        table.log.commit(proposal)
    assert not (table.path / "_delta_log" / f"{2:020}.json").exists()


@pytest.mark.parametrize("then", ["look", "commit", "others commit"])
def test_a_commit_that_another_driver_replaced(table: Table, then: str) -> None:
    """As in S3, where the later of two writers of a version wins. Both have the table in memory."""
    table.commit({"add": table.add(1)})
    version = table.commit({"add": table.add(2)})
    proposal = table.proposal({"add": table.add(4)})
    table.replace_version(version, {"add": table.add(3)})
    if then == "others commit":
        table.write_version(version + 1, {"commitInfo": {"txnId": "theirs too"}}, {"add": table.add(5)})
    with pytest.raises(RolledBackError, match=f"version {version} .*replaced it"):
        table.log.refresh() if then == "look" else table.log.commit(proposal)
    for use in (table.log.refresh, lambda: table.log.commit(proposal), lambda: table.log.committed(version)):
        with pytest.raises(RolledBackError):  # also if another thread met it first
            use()
    again = Table(table.spark, table.path)
    assert again.ids() == [1, 3] + [5] * (then == "others commit")
    assert len(again.live()) == len(again.ids())


def test_a_foreign_commit_that_was_read_and_then_replaced(table: Table) -> None:
    table.sql("INSERT INTO TABLE_ VALUES (1, 'a')")
    assert table.since(0) is not None
    table.replace_version(1, {"add": table.add(3)})
    with pytest.raises(RolledBackError, match="version 1"):
        table.log.refresh()
    assert Table(table.spark, table.path).ids() == [3]


def test_a_gap_in_the_log(table: Table) -> None:
    for number in range(4):
        table.commit({"add": table.add(number)})
    (table.path / "_delta_log" / f"{2:020}.json").unlink()
    table.write_version(5, {"add": table.add(5)})
    with pytest.raises(LogGapError, match=r"_delta_log is damaged.*DELTA_VERSIONS_NOT_CONTIGUOUS"):
        table.log.refresh()


def test_a_gap_before_a_checkpoint(table: Table) -> None:
    """Delta doesn't see it, but what the commit changed is unknown."""
    for number in range(4):
        table.commit({"add": table.add(number)})
    table.log.refresh()
    assert table.log.checkpoint()
    (table.path / "_delta_log" / f"{2:020}.json").unlink()
    assert table.log.refresh().version == 4
    with pytest.raises(LogGapError, match=r"version 2 is missing in _delta_log, between 1 and 4"):
        table.since(0)
    assert table.since(1) is None


def test_a_commit_that_isnt_json(table: Table) -> None:
    table.commit({"add": table.add(1)})
    (table.path / "_delta_log" / f"{1:020}.json").write_text('{"add": ')
    (table.path / "_delta_log" / f".{1:020}.json.crc").unlink()  # of Hadoop's local file system
    with pytest.raises(TableError, match="version 1 in _delta_log isn't valid JSON"):
        table.since(0)


@pytest.mark.parametrize("reader", [True, False], ids=["reader", "writer"])
def test_a_newer_protocol(table: Table, reader: bool) -> None:
    proposal = table.proposal({"add": table.add(1)})
    protocol = json.loads(table.log.refresh().java.protocol().json())
    protocol["protocol"]["writerFeatures"].append("newThing")
    if reader:
        protocol["protocol"]["readerFeatures"].append("newThing")
    table.write_version(1, protocol)
    if not reader:
        assert "newThing" in table.log.refresh().protocol.writer_features
    with pytest.raises(TableError, match=r"newer protocol or a feature than this Delta Lake.*newThing"):
        table.log.commit(replace(proposal, base_version=1))


def test_a_table_that_is_gone(table: Table) -> None:
    proposal = table.proposal({"add": table.add(1)})
    shutil.rmtree(table.path)
    with pytest.raises(TableGoneError, match=r"is gone; its last version was 0"):
        table.log.commit(proposal)
    with pytest.raises(TableGoneError):
        table.log.refresh()
    assert Table(table.spark, table.path).create().ids() == []
    with pytest.raises(TableGoneError, match="another Delta table is in its place"):
        table.log.refresh()
    with pytest.raises(TableGoneError, match="another Delta table is in its place"):
        table.log.commit(proposal)
    assert not list(table.log.spark.read.format("delta").load(str(table.path)).collect())


def test_a_table_to_which_rows_are_only_added(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, tmp_path / "table").create(**{"delta.appendOnly": "true"})
    add = table.add(1)
    table.commit({"add": add})
    with pytest.raises(TableError, match="DELTA_CANNOT_MODIFY_APPEND_ONLY"):
        table.commit(remove(add), live=table.live())
    assert table.ids() == [1]


# -- removes


def _with_vector(table: Table) -> dict[str, Any]:
    """A file with a deletion vector, made by Spark."""
    table.commit({"add": table.add(*range(100))})
    table.sql("DELETE FROM TABLE_ WHERE id = 2")
    (add,) = table.live().values()
    assert add["deletionVector"]["cardinality"] == 1
    return add


def test_delta_doubles_rows_if_a_remove_doesnt_name_the_vector(table: Table) -> None:
    """Why the check is there. Without it the same commit goes through."""
    add = _with_vector(table)
    bare = {key: value for key, value in add.items() if key != "deletionVector"}
    new = {"add": table.add(*range(100))}
    with pytest.raises(ValueError, match="with the deletion vector None, but the live one is"):
        table.commit(remove(bare), new, live=table.live())
    assert len(table.ids()) == 99
    table.commit(remove(bare), new, live={add["path"]: bare})
    assert len(table.ids()) == 199
    table.commit(remove(add), live=table.live())
    assert len(table.ids()) == 100


def test_a_file_gets_another_vector(table: Table) -> None:
    add = _with_vector(table)
    table.sql("DELETE FROM TABLE_ WHERE id = 3")
    (newer,) = table.live().values()
    assert len(table.ids()) == 98
    again = {"add": {**add, "dataChange": True}}
    with pytest.raises(ValueError, match="which is live, without its remove"):
        table.commit(again, live=table.live())
    table.commit(remove(newer), again, live=table.live())
    assert len(table.ids()) == 99


VECTOR: dict[str, Any] = {"storageType": "i", "pathOrInlineDv": "x"}
LIVE: dict[str, dict[str, Any]] = {"a b": {"path": "a%20b"}, "c": {"path": "c", "deletionVector": VECTOR}}


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([{"remove": {"path": "z"}}], "remove of z, which isn't live"),
        ([{"remove": {"path": "a%20b"}}, {"remove": {"path": "a b"}}], "two removes of a b"),
        ([{"remove": {"path": "c"}}], "with the deletion vector None, but the live one is"),
        ([{"remove": {"path": "a b", "deletionVector": VECTOR}}], "but the live one is None"),
        (
            [{"remove": {"path": "c", "deletionVector": {**VECTOR, "offset": 1}}}],
            r"with the deletion vector \('i', 'x', 1\)",
        ),
        ([{"add": {"path": "c"}}], "add of c, which is live, without its remove"),
        ([{"remove": {"path": "a%20b"}}, {"add": {"path": "a b"}}], "with the same deletion vector None"),
        ([{"add": {"path": "n"}}, {"add": {"path": "n"}}], "two adds of n"),
        ([{"metaData": {}}], "not an action that a commit may have"),
        ([{}], "not an action that a commit may have"),
    ],
)
def test_actions_that_contradict_the_live_files(actions: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_removes(actions, LIVE)


def test_actions_that_fit_the_live_files() -> None:
    moved = {"add": {"path": "c"}}, {"remove": {"path": "c", "deletionVector": {**VECTOR, "sizeInBytes": 3}}}
    check_removes([*moved, {"remove": {"path": "a b"}}, {"add": {"path": "n"}}, {"txn": {}}], LIVE)


# -- checkpoints, evolution


def _checkpoints(table: Table) -> list[int]:
    return sorted(int(file.name[:20]) for file in (table.path / "_delta_log").glob("[0-9]*.checkpoint*"))


@pytest.mark.parametrize("policy", ["classic", "v2"])
def test_a_checkpoint_is_written_when_asked_for(spark: SparkSession, tmp_path: Path, policy: str) -> None:
    properties = {"delta.checkpointInterval": "2", "delta.checkpointPolicy": policy}
    table = Table(spark, tmp_path / "table").create(**properties)
    due = []
    for number in range(4):
        table.commit({"add": table.add(number)})
        table.log.refresh()
        due.append(table.log.is_checkpoint_due(100))
    assert due == [False, True, True, True]
    assert _checkpoints(table) == []
    assert table.log.checkpoint()
    assert _checkpoints(table) == [4]
    assert not table.log.is_checkpoint_due(100)
    table.sql("INSERT INTO TABLE_ VALUES (4, 'a')")
    table.sql("INSERT INTO TABLE_ VALUES (5, 'a')")
    assert _checkpoints(table) == [4, 6], "others write theirs as ever"
    table.log.refresh()
    assert not table.log.is_checkpoint_due(100)
    assert table.ids() == [0, 1, 2, 3, 4, 5]
    assert (table.path / "_delta_log" / "_sidecars").exists() == (policy == "v2")


def test_a_checkpoint_removes_old_commits(spark: SparkSession, tmp_path: Path) -> None:
    """Those that the table's retention no longer keeps."""
    table = Table(spark, tmp_path / "table").create(**{"delta.logRetentionDuration": "interval 1 day"})
    folder = table.path / "_delta_log"
    for number in range(3):
        table.commit({"add": table.add(number)})
    table.log.refresh()
    assert table.log.checkpoint()
    month = time.time() - 30 * 86400
    for path in folder.iterdir():
        os.utime(path, (month, month))
    _forget(spark)
    table.log.refresh()
    table.commit({"add": table.add(3)})
    table.log.refresh()
    assert table.log.checkpoint()
    left = sorted(int(path.name[:20]) for path in folder.glob("*.json"))
    assert left[-1] == 4
    assert 0 not in left
    assert table.ids() == [0, 1, 2, 3]


def _forget(spark: SparkSession) -> None:
    """Delta reads the logs anew, with the times that their files have now."""
    assert spark.sparkContext._jvm is not None
    spark.sparkContext._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()


def _columns(table: Table) -> dict[str, str]:
    read = table.spark.read.format("delta").load(str(table.path)).schema
    return {column.name: column.dataType.simpleString() for column in read}


def test_columns_are_added_and_widened(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, tmp_path / "table")
    before = T.StructType([T.StructField("id", T.LongType(), False), T.StructField("n", T.ArrayType(T.ShortType()))])
    create(table.log, before)
    table.sql("INSERT INTO TABLE_ VALUES (1, array(7))")
    schema = T.StructType([T.StructField("id", T.LongType()), T.StructField("n", T.ArrayType(T.IntegerType()))])
    schema = schema.add("s", "string")
    widening = "'delta.enableTypeWidening' = 'true', 'delta.feature.typeWidening' = 'supported'"
    with pytest.raises(ValueError, match=r"without delta\.enableTypeWidening \(n\.element: smallint to int\)"):
        evolve(table.log, 1, schema)
    table.sql(f"ALTER TABLE TABLE_ SET TBLPROPERTIES ({widening})")
    assert "typeWidening" in table.log.refresh().protocol.writer_features
    assert evolve(table.log, 2, schema) == 3
    (widened,) = [c for c in json.loads(table.log.refresh().metadata.schema)["fields"] if c["name"] == "n"]
    change = {"fromType": "short", "toType": "integer", "fieldPath": "element"}
    assert widened["metadata"]["delta.typeChanges"] == [change]
    assert _columns(table) == {"id": "bigint", "n": "array<int>", "s": "string"}
    table.sql("INSERT INTO TABLE_ VALUES (NULL, array(500000), 'x')")
    assert table.sql("SELECT sum(n[0]) AS n FROM TABLE_")[0].n == 500007
    assert [commit.info["operation"] for commit in table.log.history(3)][1:] == ["UPDATE SCHEMA", "SET TBLPROPERTIES"]
    with pytest.raises(TableError, match=r"can't widen these types \(n: array<int> to string\)"):
        evolve(table.log, 4, T.StructType([schema["id"], T.StructField("n", T.StringType()), schema["s"]]))
    with pytest.raises(TableError, match=r"can't widen these types \(s: string to int\)"):
        evolve(table.log, 4, T.StructType([schema["id"], schema["n"], T.StructField("s", T.IntegerType())]))
    assert table.log.refresh().version == 4


def test_column_mapping_gives_new_columns_their_ids(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, tmp_path / "table").create(**{"delta.columnMapping.mode": "name"})
    before = json.loads(table.log.refresh().metadata.schema)
    schema = T.StructType.fromJson(before).add("n", "integer")
    evolve(table.log, 0, schema)
    fields = json.loads(table.log.refresh().metadata.schema)["fields"]
    assert fields[:2] == before["fields"]
    assert fields[2]["metadata"].keys() == {"delta.columnMapping.id", "delta.columnMapping.physicalName"}
    table.sql("INSERT INTO TABLE_ VALUES (1, 'a', 3)")
    assert table.ids() == [1]


def test_evolution_is_refused_if_others_altered_the_table(table: Table) -> None:
    table.log.before = lambda: table.sql("ALTER TABLE TABLE_ ADD COLUMNS (theirs INT)")
    with pytest.raises(CommitRefusedError) as refused:
        evolve(table.log, 0, T.StructType([*SCHEMA, T.StructField("ours", T.IntegerType())]))
    assert refused.value.conflict == "MetadataChangedException"
    assert _columns(table) == {"id": "bigint", "p": "string", "theirs": "int"}
    with pytest.raises(CommitRefusedError):
        evolve(table.log, 0, SCHEMA)


def test_writers_at_work_refuse_no_evolution_but_their_commits(table: Table) -> None:
    table.log.before = lambda: table.sql("INSERT INTO TABLE_ VALUES (1, 'a')")
    assert evolve(table.log, 0, T.StructType([*SCHEMA, T.StructField("n", T.IntegerType())])) == 2
    assert table.ids() == [1]
