"""What a commit does when the catalog's answer is wrong or lost, on tables made by hand: no Spark job writes anything.

Iceberg doesn't look at the files that it commits, so there are none.
"""

import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal
from uuid import uuid4

import pytest
from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession

from sink.deadletters.table import DeadLetters
from sink.errors import FencedError, RolledBackError, RowdeltaError, TableError, TemporaryError
from sink.run import supervisor
from sink.run.supervisor import Member
from sink.table.patterns import ResolvedTable
from sink.targets import retries as retries_module
from sink.targets.iceberg import commit
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.snapshots import Snapshot
from sink.targets.iceberg.table import IcebergTable
from sink.targets.own_position import own_position
from sink.targets.retries import Retries
from sink.targets.values import ChangeSet, Done, IndexCommit, Outcome, Refused, Rewrite, Unknown
from tests.sink.harness import java_error

PREFIX = "rowdelta.shop"
UNKNOWN = "CommitStateUnknownException"

After = Literal["", "table unreadable once", "table unreadable", "another driver", "another driver, and all expired"]
AFTER: tuple[After, ...] = (
    "",
    "table unreadable once",
    "table unreadable",
    "another driver",
    "another driver, and all expired",
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (commit, retries_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: None))


class Table:
    """An Iceberg table in the JVM's memory, and commits of made-up files to it."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        jvm: Any = spark.sparkContext._jvm
        self._catalog = jvm.org.apache.iceberg.inmemory.InMemoryCatalog()
        self._catalog.initialize("memory", jvm.java.util.HashMap())
        catalog = jvm.org.apache.iceberg.catalog
        self._identifier = catalog.TableIdentifier.parse("n.t")
        self._catalog.createNamespace(self._identifier.namespace())
        types = jvm.org.apache.iceberg.types.Types
        fields = [
            types.NestedField.required(1, "id", types.LongType.get()),
            types.NestedField.optional(2, "table", types.StringType.get()),
        ]
        builder = self._catalog.buildTable(self._identifier, jvm.org.apache.iceberg.Schema(fields))
        for name, value in {"format-version": "2", "commit.retry.min-wait-ms": "1"}.items():
            builder = builder.withProperty(name, value)
        builder.create()
        self.ours = self.opened()

    def opened(self) -> IcebergTable:
        """The table as another process sees it."""
        return IcebergTable(self._spark, "memory.n.t", self._catalog.loadTable(self._identifier))

    def request(self, operation: str, previous: str | None = None, **others: Any) -> ChangeSet:
        """To commit one file, named as the operation is."""
        base = self.opened().snapshot_id()
        return ChangeSet(PREFIX, operation, {"0": operation}, [file(operation)], base, previous, **others)

    def commit(self, request: ChangeSet, table: IcebergTable | None = None) -> Outcome:
        """Commit, and send the same files again after a refusal that allows it, as a micro-batch does."""
        table = table or self.ours
        retries = table.retries()
        while isinstance(outcome := table.commit(request), Refused) and outcome.again == "send":
            retries.wait(outcome)
            table.refresh()
            own_position(table, request.prefix, request.previous_operation)
            request = replace(request, base_snapshot=table.snapshot_id())
        return outcome

    def other_driver(self, operation: str, previous: str | None) -> None:
        self.commit(self.request(operation, previous), self.opened())

    def nothing(self, branch: str = "main") -> int:
        """A foreign snapshot that changes no row."""
        table = self.opened()
        expressions = table.iceberg.expressions.Expressions
        table.java.newDelete().deleteFromRowFilter(expressions.alwaysFalse()).toBranch(branch).commit()
        return int(table.java.snapshot(branch).snapshotId())

    def rewrite(self, sequence_number: int | None = None) -> None:
        """Replace all data files by one, as a compaction does.

        :param sequence_number: that of the new file; None for the next one.
        """
        table = self.opened()
        rewrite = table.java.newRewrite()
        for task in table.elements(table.java.newScan().planFiles()):
            rewrite = rewrite.deleteFile(task.file())
        if sequence_number is not None:
            rewrite = rewrite.dataSequenceNumber(sequence_number)
        rewrite.addFile(table.content_file(file("rewritten"))).commit()

    def forget_metadata(self) -> None:
        """Let so many changes follow that the table doesn't know earlier metadata files any more."""
        for number in range(2):
            kept = "write.metadata.previous-versions-max"
            self.opened().java.updateProperties().set(kept, "1").set("changed", str(number)).commit()

    def position(self) -> str | None:
        """The operation whose position the table has."""
        stored = self.opened().position(PREFIX)
        return stored.operation if stored else None

    def expire(self) -> None:
        """All snapshots but the current one."""
        self.opened().java.expireSnapshots().expireOlderThan(2**62).retainLast(1).cleanExpiredFiles(False).commit()

    def rollback(self, snapshot: int) -> None:
        self.opened().java.manageSnapshots().rollbackTo(snapshot).commit()

    def files(self) -> list[str]:
        """Data files of the current snapshot, from its manifests."""
        table = self.opened()
        tasks = table.java.newScan().planFiles()
        return sorted(str(task.file().location()) for task in table.elements(tasks))


def file(name: str, table: str = "t") -> str:
    bounds = {"keys": [2], "values": [table.encode().hex().upper()]}
    described = {
        "spec-id": 0,
        "content": "DATA",
        "file-path": name,
        "file-format": "PARQUET",
        "partition": {},
        "file-size-in-bytes": 10,
        "record-count": 1,
        "value-counts": {"keys": [2], "values": [1]},
        "null-value-counts": {"keys": [2], "values": [0]},
        "lower-bounds": bounds,
        "upper-bounds": bounds,
    }
    return json.dumps(described)


@pytest.fixture
def table(spark: SparkSession) -> Table:
    return Table(spark)


def failing_once(
    monkeypatch: pytest.MonkeyPatch,
    spark: SparkSession,
    java_type: str,
    landed: bool,
    then: Callable[[IcebergCommitter], object],
) -> None:
    """Let the next commit fail: before it succeeded, or (`landed`) after that, with something else in between."""
    original, failed = IcebergCommitter._send, itertools.count()

    def send(self: IcebergCommitter, staged: Any) -> None:
        if next(failed):
            return original(self, staged)
        if landed:
            original(self, staged)
        then(self)
        name = java_type if "." in java_type else f"org.apache.iceberg.exceptions.{java_type}"
        raise java_error(spark, name, "so it says")

    monkeypatch.setattr(IcebergCommitter, "_send", send)


def unreadable(monkeypatch: pytest.MonkeyPatch, times: int) -> Callable[[IcebergCommitter], None]:
    original = IcebergTable.refresh

    def begin(committer: IcebergCommitter) -> None:
        remaining = iter(range(times))

        def refresh(self: IcebergTable) -> None:
            if self is committer._table and next(remaining, None) is not None:
                raise TemporaryError("the catalog does not answer")
            original(self)

        monkeypatch.setattr(IcebergTable, "refresh", refresh)

    return begin


def outcome(work: Callable[[], Outcome]) -> RowdeltaError | Outcome:
    try:
        return work()
    except RowdeltaError as error:
        return error


@pytest.mark.spark
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
@pytest.mark.parametrize("java_type", ["CommitFailedException", UNKNOWN, "java.lang.RuntimeException"])
def test_a_commit_whose_answer_is_wrong_or_lost(
    spark: SparkSession,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
    java_type: str,
    landed: bool,
    after: After,
) -> None:
    """After any outcome but `Unknown` the caller deletes the files, so they must not belong to the table."""
    table.commit(table.request("first"))

    def others(_: IcebergCommitter) -> None:
        previous = "first"
        if landed:
            previous = "ours"
        table.other_driver("theirs", previous)
        if after.endswith("expired"):
            table.expire()

    actions: dict[After, Callable[[IcebergCommitter], object]] = {
        "": lambda _: None,
        "table unreadable once": unreadable(monkeypatch, 1),
        "table unreadable": unreadable(monkeypatch, 99),
    }
    request = table.request("ours", "first")
    failing_once(monkeypatch, spark, java_type, landed, actions.get(after, others))
    end = outcome(lambda: table.commit(request))
    monkeypatch.undo()
    committed = "ours" in table.files()
    if end == Done():
        assert committed
    elif not isinstance(end, Unknown):
        assert not committed
    is_refusal = java_type == "CommitFailedException"
    if landed and after in ("", "table unreadable once", "another driver"):
        assert end == Done(), "the table says so"
    if not landed and is_refusal and after in ("", "table unreadable once"):
        assert end == Done(), "tried again"
    if not landed and is_refusal and after == "another driver":
        assert isinstance(end, FencedError)
    if not landed and java_type != "CommitFailedException" and after in ("", "table unreadable once"):
        assert isinstance(end, Unknown)
        assert "it is unknown whether the commit went through" in end.why
    assert table.files().count("ours") == committed
    # whatever was reported, what comes next neither loses nor repeats it
    stored = table.opened().position(PREFIX)
    assert stored is not None
    assert (stored.operation in ("ours", "theirs")) == (committed or after.startswith("another"))


@pytest.mark.spark
def test_a_catalog_that_goes_away_right_after_a_commit(
    spark: SparkSession, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller must not delete the files."""

    def away(_: IcebergTable) -> None:
        raise java_error(spark, "java.lang.RuntimeException", "connection refused")

    request, send = table.request("ours"), IcebergCommitter._send
    with monkeypatch.context() as patch:

        def send_last(*args: Any) -> None:
            send(*args)
            patch.setattr(IcebergTable, "look", away)

        patch.setattr(IcebergCommitter, "_send", send_last)
        end = table.commit(request)
    assert isinstance(end, Unknown)
    assert re.search(r"the commit went through, but .*connection refused", end.why)
    assert table.files() == ["ours"]


@pytest.mark.spark
def test_what_another_thread_was_reading_does_not_stay(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead-letter table has one object for all tables' threads."""
    read = table.opened()
    table.commit(table.request("first"))
    begun, go_on = threading.Event(), threading.Event()
    snapshot_of = IcebergTable.snapshot_of

    def slow(self: IcebergTable, java: JavaObject) -> Snapshot:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
        return snapshot_of(self, java)

    read.refresh()
    monkeypatch.setattr(IcebergTable, "snapshot_of", slow)
    with ThreadPoolExecutor(1) as pool:
        earlier = pool.submit(read.snapshot_id)
        assert begun.wait(60)
        table.commit(table.request("second", "first"))
        read.refresh()
        go_on.set()
        assert earlier.result() != table.opened().snapshot_id()
    assert read.snapshot_id() == table.opened().snapshot_id()


@pytest.mark.spark
@pytest.mark.parametrize("after", AFTER[:3])
@pytest.mark.parametrize("landed", [True, False], ids=["landed", "lost"])
@pytest.mark.parametrize("java_type", ["CommitFailedException", UNKNOWN])
def test_a_rewrite_whose_answer_is_wrong_or_lost(
    spark: SparkSession,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
    java_type: str,
    landed: bool,
    after: After,
) -> None:
    table.commit(table.request("small"))
    now = table.opened()
    replaced = now.elements(now.java.currentSnapshot().addedDataFiles(now.java.io()))
    index = IndexCommit(now.snapshot_id(), {"version": "v", "base": now.snapshot_id()}, (), (), ())
    request = Rewrite(PREFIX, "small", [file("merged")], replaced, index, {}, now.layout)
    actions: dict[After, Callable[[IcebergCommitter], object]] = {
        "": lambda _: None,
        "table unreadable once": unreadable(monkeypatch, 1),
        "table unreadable": unreadable(monkeypatch, 99),
    }
    failing_once(monkeypatch, spark, java_type, landed, actions[after])
    end = outcome(lambda: table.ours.commit(request))
    monkeypatch.undo()
    assert table.files() == (["merged"] if landed else ["small"])
    if landed and after != "table unreadable":
        assert end == Done()
    elif after == "table unreadable" or java_type == UNKNOWN:
        assert isinstance(end, Unknown), "the files may be the table's"
    else:
        assert isinstance(end, Refused)


@pytest.mark.spark
def test_another_version_between_write_and_commit(table: Table) -> None:
    request = table.request("ours", written_for=table.opened().layout)
    table.opened().java.updateProperties().set("format-version", "3").commit()
    assert table.commit(request) == Refused("the table has another format version")


@pytest.mark.spark
def test_another_version_between_staging_and_sending(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iceberg's own retry then refuses the position deletes, and there is nothing wrong with the table."""
    original = IcebergCommitter._send

    def send(self: IcebergCommitter, staged: Any) -> None:
        if table.opened().property("upgraded") is None:
            table.opened().java.updateProperties().set("format-version", "3").set("upgraded", "yes").commit()
        original(self, staged)

    monkeypatch.setattr(IcebergCommitter, "_send", send)
    deletes = json.loads(file("deletes")) | {"content": "POSITION_DELETES"}
    request = replace(
        table.request("ours", written_for=table.opened().layout), files=[file("ours"), json.dumps(deletes)]
    )
    assert table.commit(request) == Refused("the table has another format version")
    assert table.files() == []


@pytest.mark.spark
@pytest.mark.parametrize("heals", ["at once", "at the next start"])
def test_a_position_whose_snapshot_was_rolled_back_and_has_expired(
    table: Table, monkeypatch: pytest.MonkeyPatch, heals: str
) -> None:
    """Another writer's commit came in between, so Iceberg gave the snapshot another sequence number. With the stored
    number, the other writer's snapshot would look like a descendant.
    """
    table.commit(table.request("first"))
    original = IcebergCommitter._send
    foreign: list[int] = []

    def send(self: IcebergCommitter, staged: Any) -> None:
        foreign.append(table.nothing())
        original(self, staged)

    monkeypatch.setattr(IcebergCommitter, "_send", send)
    if heals == "at the next start":
        monkeypatch.setattr(IcebergCommitter, "settle", lambda *_: None)
    table.commit(table.request("second", "first"))
    monkeypatch.undo()
    if heals == "at the next start":
        table.opened().settle(PREFIX)
    table.rollback(foreign[0])
    table.expire()
    assert table.files() == ["first"]
    assert table.position() == "first"
    table.forget_metadata()
    with pytest.raises(TableError, match="was rolled back to a snapshot before"):
        table.position()


GAPS = [0, 1, 3]
"""Other writers' commits before and after what happens."""


@pytest.mark.spark
@pytest.mark.parametrize("after", GAPS[1:])
@pytest.mark.parametrize("before", GAPS)
def test_a_rollback_and_another_writers_commits_and_all_before_expired(table: Table, before: int, after: int) -> None:
    """The current snapshot is then newer than the sink's last commit, but doesn't descend from it."""
    table.commit(table.request("first"))
    first = [table.opened().snapshot_id(), *(table.nothing() for _ in range(before))][-1]
    table.commit(table.request("second", "first"))
    assert first is not None
    table.rollback(first)
    for _ in range(after):
        table.nothing()
    table.expire()
    assert table.position() == "first", "as previous metadata files tell"
    assert table.opened().position_in(table.opened().snapshot_id() or 0, PREFIX) == {"0": "first"}
    table.forget_metadata()
    if after == 1:
        with pytest.raises(TableError, match="was rolled back to a snapshot before"):
            table.position()
    else:
        with pytest.raises(TableError, match=r"'rowdelta\.shop\.not-rolled-back' to '\d+'"):
            table.position()
    assert table.opened().position_in(table.opened().snapshot_id() or 0, PREFIX) is None


@pytest.mark.spark
@pytest.mark.parametrize("known", ["", "no metadata", "no metadata, files rewritten"])
@pytest.mark.parametrize("after", GAPS[1:])
def test_no_rollback_but_all_snapshots_before_other_writers_expired(table: Table, known: str, after: int) -> None:
    """As usual where a table is compacted, and old snapshots expire, while the source has no changes."""
    table.commit(table.request("first"))
    table.commit(table.request("second", "first"))
    committed = table.opened().snapshot_id()
    for _ in range(after):
        table.nothing()
    if known.endswith("rewritten"):
        table.rewrite()
    table.expire()
    if known:
        table.forget_metadata()
    if known.endswith("rewritten"):
        with pytest.raises(TableError, match=f"'rowdelta.shop.not-rolled-back' to '{committed}'"):
            table.position()
        stored = table.opened().position(PREFIX, newest_if_in_doubt=True)
        assert stored is not None
        assert stored.operation == "second", "as dead letters need it"
        table.opened().set_property(f"{PREFIX}.not-rolled-back", str(committed))
    assert table.position() == "second"
    assert table.opened().position_in(table.opened().snapshot_id() or 0, PREFIX) == {"0": "second"}
    table.commit(table.request("third", "second"))
    assert table.position() == "third"


@pytest.mark.spark
def test_files_compacted_from_the_sinks_last_commit_on_tell_that_it_is_there(table: Table) -> None:
    """Iceberg's compaction gives its files the sequence number of the snapshot that it read."""
    table.commit(table.request("first"))
    table.commit(table.request("second", "first"))
    stored = table.opened().current_snapshot()
    assert stored is not None
    table.nothing()
    table.rewrite(stored.sequence_number)
    table.nothing()
    table.expire()
    table.forget_metadata()
    assert table.files() == ["rewritten"]
    assert table.position() == "second"


@pytest.mark.spark
def test_delete_files_tell_it_too(table: Table) -> None:
    table.commit(table.request("first"))
    deletes = json.dumps(json.loads(file("deletes")) | {"content": "POSITION_DELETES"})
    table.commit(replace(table.request("second", "first"), files=[deletes]))
    for _ in range(2):
        table.nothing()
    table.expire()
    table.forget_metadata()
    assert table.position() == "second"


@pytest.mark.spark
def test_a_branch_that_was_fast_forwarded_and_its_snapshots_expired(table: Table) -> None:
    """Its snapshots descend from the sink's last commit, or from the one before."""
    for from_last in (True, False):
        table.commit(table.request(f"first {from_last}", None if from_last else "second True"))
        first = table.opened().snapshot_id()
        table.commit(table.request(f"second {from_last}", f"first {from_last}"))
        start = table.opened().snapshot_id() if from_last else first
        references = table.opened().java.manageSnapshots()
        references.createBranch("audit", start).commit()
        for _ in range(2):
            table.nothing("audit")
        java = table.opened().java
        java.manageSnapshots().setCurrentSnapshot(java.snapshot("audit").snapshotId()).removeBranch("audit").commit()
        table.expire()
        assert len(table.opened().metadata()["snapshots"]) == 1
        assert table.position() == ("second True" if from_last else "first False")


@pytest.mark.spark
def test_a_rollback_is_not_taken_for_another_run(table: Table) -> None:
    table.commit(table.request("first"))
    first = table.opened().snapshot_id()
    table.commit(table.request("second", "first"))
    assert first is not None
    request = table.request("third", "second")
    table.rollback(first)
    with pytest.raises(RolledBackError):
        table.commit(request)
    with pytest.raises(FencedError):
        own_position(table.ours, PREFIX, "zeroth")


@pytest.mark.spark
def test_appends_that_do_not_conflict(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that share a table of bad records don't hinder each other; two of one target do."""
    attempts: list[str] = []
    original, others = IcebergCommitter._stage, iter(["t2", "t1"])

    def stage(self: IcebergCommitter, request: ChangeSet) -> Any:
        attempts.append(request.operation)
        if (target := next(others, None)) is not None:
            append = table.opened().java.newAppend()
            append.appendFile(self._table.content_file(file(uuid4().hex, target))).commit()
        return original(self, request)

    monkeypatch.setattr(IcebergCommitter, "_stage", stage)
    table.commit(table.request("first", conflicts_with=("table", "t1")))
    assert attempts == ["first"]
    attempts.clear()
    table.commit(table.request("second", "first", conflicts_with=("table", "t1")))
    assert attempts == ["second", "second"]
    assert len(table.files()) == 4


@pytest.mark.spark
def test_dead_letters_of_jobs_that_share_their_table(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commits its bad records at once, however often the other one does."""
    letters = {name: dead_letters(table, name) for name in ("crm", "shop")}
    attempts: list[str] = []
    original = IcebergCommitter._stage

    def stage(self: IcebergCommitter, request: ChangeSet) -> Any:
        attempts.append(request.operation)
        if request.operation == "of shop":
            letters["crm"].commit("lake.crm.t1", "of crm", {"0": 1}, [file("of crm", "lake.crm.t1")], {}, 0, None)
        return original(self, request)

    monkeypatch.setattr(IcebergCommitter, "_stage", stage)
    letters["shop"].commit("lake.shop.t1", "of shop", {"0": 1}, [file("of shop", "lake.shop.t1")], {}, 0, None)
    assert attempts == ["of shop", "of crm"]
    assert table.files() == ["of crm", "of shop"]


@pytest.mark.spark
def test_dead_letters_that_the_run_does_not_know_are_not_written_again(table: Table) -> None:
    """They may be those of an attempt whose outcome was unknown, or of another run with the same id."""
    late, again = dead_letters(table, "shop"), dead_letters(table, "shop")
    known = again.operation("lake.shop.t1")
    late.commit("lake.shop.t1", "first", {"0": 1}, [file("first", "lake.shop.t1")], {}, 0, known)
    end = again.commit("lake.shop.t1", "second", {"0": 1}, [file("second", "lake.shop.t1")], {}, 0, known)
    assert isinstance(end, Refused)
    assert (end.again, "bad records of lake.shop.t1 were added" in end.why) == ("write", True)
    assert again.position("lake.shop.t1") == {"0": 1}, "so that they are looked up now"
    assert table.files() == ["first"]


def dead_letters(table: Table, sink_id: str) -> DeadLetters:
    section = SimpleNamespace(id=sink_id, dead_letter_topic=None)
    return DeadLetters(SimpleNamespace(sink=section), table.opened)  # type: ignore[arg-type]


def test_pauses_stay_numbers_however_many_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken table fails more than a thousand times in a week, and `num-retries` may be any number."""
    pauses: list[float] = []
    monkeypatch.setattr(retries_module, "time", SimpleNamespace(sleep=pauses.append))
    retries = Retries("t", 3000, 0.1, 60.0)
    for number in range(3000):
        retries.wait(Refused(str(number)))
    with pytest.raises(TemporaryError, match="used up"):
        retries.wait(Refused("one more"))
    assert pauses[0] < pauses[3] < pauses[-1] <= 66.0
    member = Member(ResolvedTable.__new__(ResolvedTable), failures=5000)
    member.fail(ValueError("again"))
    assert member.failures == 5001
    assert 0 < member.retry_at - time.monotonic() <= supervisor.LONGEST_PAUSE


def test_one_refusal_counts_once() -> None:
    retries = Retries("t", 1, 0.1, 1.0)
    refusal = Refused("moved")
    retries.wait(refusal)
    retries.wait(refusal)
    with contextlib.suppress(TemporaryError):
        retries.wait(Refused("moved"))
        pytest.fail("a second one isn't allowed")
