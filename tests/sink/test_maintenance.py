"""What a job does for its tables beside its micro-batches, and `rowdelta maintain`."""

import functools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from pydantic import ValidationError
from pyspark.sql import SparkSession

from deltawriters import TaskId
from deltawriters.content import DataFile, DeleteFile
from deltawriters.keyindex import IndexedFile, IndexSlice
from deltawriters.partitioning import PartitionedWriter
from sink.commands import inspection
from sink.commands import maintain as maintain_command
from sink.commands.maintain import Maintained, as_json, exit_code, lines, maintain
from sink.config import Config
from sink.config.maintenance import ExpireSection, MaintenanceSection, OrphansSection
from sink.errors import ConfigError, FencedError, TableError, TableGoneError, TemporaryError
from sink.run import maintenance
from sink.run.maintenance import Maintenance, options_of
from sink.run.pipeline import Pipeline
from sink.run.supervisor import Member, Supervisor
from sink.spark.engine import SparkEngine
from sink.spark.session import MAINTENANCE_POOL
from sink.spark.tasks import move
from sink.table import rewrite_plan
from sink.table.observer import RewriteDone
from sink.table.rewrite_plan import RewriteOptions, chosen
from sink.table.rewriting import RunningRewrite
from sink.table.table_upkeep import TableUpkeep
from sink.targets.catalogs import Catalogs
from sink.targets.delta.upkeep import DeltaUpkeep
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.table import IcebergTable
from sink.targets.iceberg.upkeep import IcebergUpkeep
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.own_state import COUNTED
from sink.targets.scan_costs import ScanCosts
from sink.targets.upkeep_values import AppliedDeletes, CompactionFailedError, CompactionLimits, Rewritable
from sink.targets.values import Outcome, Rewrite, Unknown
from tests.delta.harness import DeltaJob
from tests.rewrites import ALL_FILES, only_sink, rewriting, rewritten_files
from tests.sink.harness import Changes, Job, before_commit, before_rewrite, by_pyiceberg, tiny_thresholds
from tests.sink.test_kafka import Running
from tests.stack.process import wait_until


@pytest.fixture(autouse=True)
def _tiny_tables_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "LEAST_GAIN", 1)


MB = 1024 * 1024
COSTS = ScanCosts(once=150 * MB, file=MB, with_deletes=0, filtered=0.3, delete_file=MB)
GREEDY = {"budget": 1000, "rewrite": {"min-input-files": 2}}
AT_THE_END = 600.0
"""Seconds until the first look at tables: never before a job ends that reads what there is."""


def rewritable(
    path: str, size: int, *, deleted: int = 0, deletes: int | None = None, partition: str = "{}", settled: int = 0
) -> Rewritable:
    """A file of 100 rows."""
    deletes = int(deleted > 0) if deletes is None else deletes
    return Rewritable(0, partition, 100, deleted, deletes, DataFile(IndexedFile(path, 0, {}), size), settled=settled)


def groups(files: list[Rewritable], most_bytes: int | None = None, **options: Any) -> list[list[str]]:
    found = chosen(files, RewriteOptions(**options), 100 * MB, COSTS, most_bytes)
    return [[small.path for small in group.files] for group in found]


def test_nothing_is_said_of_zero_files() -> None:
    assert (
        list(lines(Maintained("t", dry_run=True)))
        == list(lines(Maintained("t", dry_run=False)))
        == ["t: nothing to do"]
    )
    merged = Maintained("t", dry_run=True, merged_delete_files=1)
    assert list(lines(merged)) == ["t: would do", "  merge        1 position delete file"]


def test_what_pays_most_comes_first() -> None:
    large = 100 * MB
    files = [
        rewritable("clean", large),
        rewritable("few dead", large, deleted=5, deletes=1),
        rewritable("many dead", large, deleted=60, deletes=1, partition="b"),
        rewritable("some dead", large, deleted=20, deletes=1),
        rewritable("nothing lives", large, deleted=100, deletes=1, partition="c"),
        *(rewritable(f"small {n}", MB, partition="d") for n in range(5)),
        *(rewritable(f"lonely {n}", MB, partition="e") for n in range(4)),
        rewritable("many delete files", large, deletes=8, partition="f"),  # these are merged
    ]
    assert groups(files) == [
        ["nothing lives"],
        ["many dead"],
        [f"small {n}" for n in range(5)],
        ["some dead"],
    ]


def test_a_few_deleted_rows_are_removed_once_no_more_come() -> None:
    """A scan of a file with deletes takes longer, be they ever so few. While more come, a new file would not be clean
    for long.
    """
    size = 80 * MB
    files = [
        *(rewritable(f"settled {n}", size, deleted=1, settled=100 - n) for n in range(3)),
        rewritable("not yet", size, deleted=1, settled=5),
        rewritable("clean", size),
        rewritable("many dead", size, deleted=40, deletes=1, partition="b"),
    ]
    assert groups(files, 80 * MB) == [["many dead"], *([f"settled {n}"] for n in range(3))]


def test_a_full_group_of_settled_files_is_worth_a_commit_in_a_table_of_any_size() -> None:
    """It never gains as much as a group of files with many deleted rows, so it would wait for ever."""
    options = {"least_gain": 32 * MB, "max_file_group_size": 64 * MB}
    settled = [rewritable(f"settled {n}", 16 * MB, deleted=1, deletes=1, settled=1000) for n in range(5)]
    clean = [rewritable(f"clean {n}", 100 * MB) for n in range(100)]
    assert groups(settled + clean, **options) == [[f"settled {n}" for n in range(4)]]


def test_the_budget_is_kept() -> None:
    large = 100 * MB
    files = [rewritable(f"{n}", large, deleted=50 + n) for n in range(4)]
    assert groups(files, 100 * MB) == [["3", "2"], ["1", "0"]]
    assert groups(files, 49 * MB) == [["3"], ["2"], ["1"]]
    assert groups(files, 40 * MB) == []


def test_delete_files_are_merged_where_that_pays_more_than_to_rewrite() -> None:
    def deletes(path: str, data_files: int, rows: int = 10) -> AppliedDeletes:
        return AppliedDeletes(DeleteFile(path, 1000), rows, data_files)

    def file(path: str, applying: list[AppliedDeletes], partition: str = "{}") -> Rewritable:
        small = DataFile(IndexedFile(path, 0, {}), 100 * MB)
        return Rewritable(0, partition, 100, 1, len(applying), small, applying)

    shared, own = [deletes(f"s{n}", 3) for n in range(2)], [deletes(f"o{n}", 1) for n in range(5)]
    many = [deletes(f"m{n}", 20) for n in range(6)]
    files = [
        *(file(f"few {n}", shared) for n in range(2)),
        file("many", [*shared, *own]),
        *(file(f"wide {n}", many, "b") for n in range(20)),
        file("unknown", [deletes(f"u{n}", 2) for n in range(7)], "c"),  # the other data file can't be rewritten
        file("vectors", [deletes(f"v{n}", 0) for n in range(7)], "d"),
    ]
    wide, narrow = chosen(files, RewriteOptions(), 100 * MB, COSTS)
    assert {small.path for small in narrow.deletes} == {"s0", "s1", "o0", "o1", "o2", "o3", "o4"}
    assert narrow.live == frozenset(["few 0", "few 1", "many"])
    assert narrow.apart
    assert (len(wide.deletes), len(wide.live or ()), wide.apart) == (6, 20, False)
    (own_ones,) = chosen(files[1:3], RewriteOptions(), 100 * MB, COSTS)  # as if a data file with s0 had been left out
    assert {small.path for small in own_ones.deletes} == {"o0", "o1", "o2", "o3", "o4"}

    large = [file("large", [deletes(f"l{n}", 1, 1_200_000) for n in range(7)], "e")]
    large += [file("larger", [deletes(f"x{n}", 1, 1_000_000) for n in range(6)], "e")]
    (group,) = chosen(large, RewriteOptions(), 100 * MB, COSTS)
    assert group.live == frozenset(["large"]), "what a task must hold is bounded"
    assert len(group.deletes) == 6


@pytest.mark.parametrize("data_files", [1, 100])
def test_merges_of_many_positions_come_to_an_end(data_files: int) -> None:
    """Nobody writes meanwhile, and each merge makes one file of several, or one for each data file."""
    left = [AppliedDeletes(DeleteFile(f"{n}", 1000), 900_000, data_files) for n in range(50)]
    for merge in range(20):
        small = [DataFile(IndexedFile(f"data {n}", 0, {}), 100 * MB) for n in range(data_files)]
        files = [Rewritable(0, "{}", 10**9, 10**6, len(left), each, left) for each in small]
        found = list(chosen(files, RewriteOptions(), 100 * MB, COSTS))
        if not found:
            break
        (group,) = found
        gone = {each.path for each in group.deletes}
        assert len(gone) >= 5
        rows = sum(each.rows for each in left if each.file.path in gone)
        assert rows <= 8_000_000
        left = [each for each in left if each.file.path not in gone]
        left.append(AppliedDeletes(DeleteFile(f"merged {merge}", 1000), rows, data_files))
    assert merge == len([each for each in left if each.file.path.startswith("merged")]) == 6


@pytest.mark.spark
@pytest.mark.parametrize(
    ("new_job", "properties"),
    [(Job, {"format-version": "2"}), (Job, {"format-version": "3"}), (DeltaJob, {})],
    ids=["v2", "v3", "delta"],
)
def test_a_file_becomes_clean_once_nobody_deletes_from_it(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    new_job: type[Job],
    properties: dict[str, str],
) -> None:
    monkeypatch.setattr(rewrite_plan, "_SOON", 3)
    for upkeep in (IcebergUpkeep, DeltaUpkeep):
        monkeypatch.setattr(upkeep, "scan_costs", replace(COSTS, filtered=9.0))
    many = RewriteOptions(min_input_files=100, delete_ratio_threshold=0.45)
    job = new_job(spark, tmp_path, tasks=1, properties=properties, table={"merge_small_files": False})
    job.write([("+I", {"id": key, "region": "new"}) for key in range(20)])
    job.run()
    sink = only_sink(job)
    (first,) = (file.file.path for part in sink.table.upkeep().rewritables() for file in part)
    job.write([("+I", {"id": key, "region": "new"}) for key in range(20, 40)])
    job.write([("-D", {"id": key, "region": "new"}) for key in (1, 21)])
    for key in (22, 23):
        job.write([("-D", {"id": key, "region": "new"})])
    job.run()
    assert only_sink(job).upkeep.begin_rewrite(many) is None, "more deletes may come"

    job.write([("-D", {"id": 24, "region": "new"})])
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink, many)
    assert begun.paths == {first}
    done = sink.upkeep.end_rewrite(begun, written=True)
    assert done is not None
    assert job.rows() == [{"id": key, "region": "new"} for key in range(40) if key not in (1, 21, 22, 23, 24)]
    assert job.check_index() is not None
    assert only_sink(job).upkeep.begin_rewrite(many) is None, "it is clean, and the other one has still deletes to come"


@pytest.mark.spark
def test_deletes_that_a_rewrite_carries_over_are_dated(spark: SparkSession, tmp_path: Path) -> None:
    """Delta Lake: a tag says when rows of a file were deleted, and a rewrite's file may have deletes from its first day
    on.
    """
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    for start in range(0, 40, 20):
        job.write([("+I", {"id": key, "region": "new"}) for key in range(start, start + 20)])
    for key in range(4):
        job.write([("-D", {"id": key, "region": "new"})])
    with rewriting(("begin", *3 * ("nothing",), ("write", "adopt"))) as done:
        job.run()
    assert len(done) == 1
    assert done[0] is not None
    for commits in (0, 3):
        for key in range(commits):
            job.write([("+I", {"id": 100 + key, "region": "new"})])
        job.run()
        (file,) = (file for part in only_sink(job).table.upkeep().rewritables() for file in part if file.deleted)
        assert file.settled == commits


@pytest.mark.spark
def test_new_deletes_are_not_settled(spark: SparkSession, tmp_path: Path) -> None:
    """Delta Lake: those in a file of the same commit, and those of others, who keep a file's tags."""
    job = DeltaJob(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    for key in range(10, 20):
        job.write([("+I", {"id": key, "region": "new"})])
    job.run()
    job.write([("+U", {"id": key % 5, "region": str(key)}) for key in range(20)])
    with tiny_thresholds(1, 3, spark):
        job.run()
    ages = [file.settled for part in only_sink(job).table.upkeep().rewritables() for file in part if file.deleted]
    assert ages
    assert max(ages) < 3

    job.write([("-D", {"id": 3, "region": ""})])
    job.run()
    job.sql("DELETE FROM {t} WHERE id = 4")
    for key in range(20, 25):
        job.write([("+I", {"id": key, "region": "new"})])
    job.run()
    ages = [file.settled for part in only_sink(job).table.upkeep().rewritables() for file in part if file.deleted]
    assert ages.count(0) == 1, "of others"
    assert all(age >= 5 for age in ages if age), "of the sink"


def test_a_window_opens_and_closes() -> None:
    at_night = MaintenanceSection(window="* 1-5 * * *")
    assert at_night.is_open(datetime(2026, 1, 31, 5, 59, 59, tzinfo=UTC))
    assert not at_night.is_open(datetime(2026, 1, 31, 6, 0, tzinfo=UTC))
    assert MaintenanceSection().is_open(datetime(2026, 1, 31, 6, 0, 30, tzinfo=UTC))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"window": "at night"}, "not a cron expression"),
        ({"expire": {"older_than": "soon"}}, 'write a time such as "5 days"'),
        ({"orphans": {"older_than": "3 hours"}}, 'write at least "1 day"'),
    ],
)
def test_mistakes_are_explained(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        MaintenanceSection.model_validate(values)


def maintenance_of_a_table(folder: Path, of_all: dict[str, Any], own: dict[str, Any]) -> MaintenanceSection:
    config = Config.model_validate(
        {
            "sink": {"id": "shop", "checkpoint": str(folder)},
            "source": {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "b:9092"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": str(folder)}},
            "maintenance": of_all,
            "tables": [{"source": "t", "target": "lake.n.t", "key": ["id"], "maintenance": own}],
        }
    )
    return config.maintenance_of(config.tables[0])


def test_a_table_has_values_of_its_own(tmp_path: Path) -> None:
    found = maintenance_of_a_table(tmp_path, {"window": "* 1 * * *", "expire": None}, {"budget": 2})
    assert (found.budget, found.window, found.expire) == (2, "* 1 * * *", None)


def test_a_tables_own_value_leaves_the_others_of_its_section(tmp_path: Path) -> None:
    """Or a table that only asks for another age would lose the snapshots that the global section keeps."""
    of_all = {
        "expire": {"older_than": "9 days", "retain_last": 500},
        "orphans": {"every": "1 day"},
        "rewrite": {"delete-ratio-threshold": 0.3},
    }
    own = {"expire": {"older_than": "1 day"}, "orphans": None, "rewrite": {"min-input-files": 9}}
    found = maintenance_of_a_table(tmp_path, of_all, own)
    assert found.expire == ExpireSection(older_than="1 day", retain_last=500)
    assert found.orphans is None
    assert (found.rewrite.min_input_files, found.rewrite.delete_ratio_threshold) == (9, 0.3)


def test_a_table_that_the_sink_created_looks_after_itself() -> None:
    """Unless the configuration says otherwise, also by `null`."""
    assert (MaintenanceSection().expire, MaintenanceSection().orphans) == (None, None)
    own = MaintenanceSection().of_own_table()
    assert (own.expire, own.orphans) == (ExpireSection(), OrphansSection())
    explicit = MaintenanceSection.model_validate({"expire": None, "orphans": {"every": "1 day"}}).of_own_table()
    assert (explicit.expire, explicit.orphans) == (None, OrphansSection(every="1 day"))
    assert own.shown == (
        "rewrites within 0.5 of what is written, snapshots go after 5 days (not the last 20), orphans go after 3 days"
    )


def test_a_rewrite_that_is_worth_it_in_a_small_table_may_not_be_in_a_large_one() -> None:
    """The smaller the scan, the less must be gained: but a part of what it costs to scan anything."""
    least_gain, size = 32 * MB, 80 * MB
    dear = [rewritable("dear", size, deleted=20)]
    assert groups(dear, least_gain=least_gain) == [["dear"]]
    assert groups([rewritable("tiny", 25 * MB, deleted=10)], least_gain=least_gain) == []
    others = [rewritable(str(number), size) for number in range(100)]
    assert groups(dear + others, least_gain=least_gain) == []
    assert groups([rewritable("dear", size, deleted=50), *others], least_gain=least_gain) == [["dear"]]


def test_the_budget_is_saved_for_what_pays_most() -> None:
    """Large files would never have their turn, if smaller ones that pay less used it up."""
    files = [rewritable("large", 40 * MB, deleted=50), rewritable("small", 6 * MB, deleted=20)]
    assert groups(files, 10 * MB, least_gain=1) == []
    assert groups(files, 20 * MB, least_gain=1) == [["large"], ["small"]]


def test_small_files_take_no_large_one_with_them() -> None:
    """Where bytes are scarce."""
    sizes = {"large": 70 * MB, "medium": 9 * MB, **{f"small {n}": MB for n in range(6)}}
    files = [rewritable(name, size, deleted=1) for name, size in sizes.items()]
    assert groups(files, 200 * MB)[0] == [f"small {n}" for n in range(6)]
    (all_files,) = groups(files)
    assert sorted(all_files) == sorted(sizes)


def test_nothing_waits_for_a_file_that_is_larger_than_a_group() -> None:
    files = [rewritable("large", 40 * MB, deleted=50), rewritable("small", 6 * MB, deleted=20)]
    found = groups(files, 10 * MB, least_gain=1, max_file_group_size=15 * MB)
    assert found == [["small"]]


def test_maintenance_has_its_turn_while_a_micro_batch_is_applied_in_parts() -> None:
    """As after a time in which the job was down: a table would not be rewritten before all of that is applied."""
    done = list[str]()
    member = Member(Mock())

    def maintain() -> None:
        with member.turn:
            done.append("maintenance")

    def apply(_: int, batch: Mock) -> Mock:
        done.append(batch.name)
        if batch.name == "first":
            other.start()
            assert wait_until(member.turn._next.locked)
        return Mock(read=1, bad=0)

    other = threading.Thread(target=maintain)
    member.sink = Mock()
    parts = [Mock(share=None, more=name != "third") for name in ("first", "second", "third")]
    for part, name in zip(parts, ("first", "second", "third"), strict=True):
        part.name = name
    member.sink.batch.side_effect = parts
    member.sink.apply_batch = apply
    supervisor = Mock(_is_cut=Mock(return_value=False))
    supervisor._next_part = functools.partial(Supervisor._next_part, supervisor)
    with member.turn:
        Supervisor._apply_alone(supervisor, Mock(), 1, Mock(), member)
    other.join()
    assert done == ["first", "maintenance", "second", "third"]


def test_a_look_that_waited_for_a_micro_batch_did_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a table with long micro-batches, which needs rewrites most, would hardly be looked at."""
    clock = [0.0]

    class Turn:
        def __enter__(self) -> None:
            clock[0] += 600.0

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    sink = Mock(written_bytes=0)
    sink.upkeep.credit.return_value = 1000
    sink.upkeep.begin_rewrite.return_value = None
    member = Mock(sink=sink, works=True, turn=Turn())
    thread = Maintenance(Mock(), Mock(), Mock())
    known = maintenance._Table(sink)
    assert thread._rewrite(member, known, MaintenanceSection()) is None
    assert (known.look_seconds, known.looked_at) == (0.0, 600.0)
    assert thread._credit(known, MaintenanceSection()) == 0, "nothing was written since"
    thread._finishing.set()
    assert thread._credit(known, MaintenanceSection()) == 1000, "the last look is always due"


@pytest.mark.parametrize(("size", "rests"), [(1000, True), (20_000_000, False)])
def test_small_rewrites_take_half_of_the_time(monkeypatch: pytest.MonkeyPatch, size: int, rests: bool) -> None:
    """After each one maintenance rests as long as it took, unless the job ends."""
    done = RewriteDone("lake.n.t", "rewrite", 2, 1, size)
    results = [done, done, None]
    rested = list[float]()
    thread = Maintenance(Mock(), Mock(), Mock())
    monkeypatch.setattr(thread, "_rewrite", lambda *_: results.pop(0))
    monkeypatch.setattr(thread, "_convert", lambda *_: None)
    monkeypatch.setattr(thread._finishing, "wait", rested.append)
    known = Mock()
    known.sink.plan.section.deletes = "position"
    thread._move(Mock(), known, MaintenanceSection())
    assert results == []
    assert len(rested) == (2 if rests else 0)


@pytest.mark.parametrize("ends", ["the window", "its turn", "the job"])
def test_a_table_whose_rewrites_never_end_is_left(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """When the window closes, and after a while, since other tables and other steps wait. A job that ends waits."""
    clock = [0.0]
    done = RewriteDone("lake.n.t", "rewrite", 2, 1, 20_000_000)
    thread = Maintenance(Mock(), Mock(), Mock())
    settings = Mock(budget=1)

    def rewrite(*_: object) -> RewriteDone | None:
        clock[0] += 10
        settings.is_open.return_value = ends != "the window" or clock[0] < 30
        return done if clock[0] < 1000 else None

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(thread, "_rewrite", rewrite)
    monkeypatch.setattr(thread, "_convert", lambda *_: None)
    known = Mock()
    known.sink.plan.section.deletes = "position"
    if ends == "the job":
        thread._finishing.set()
    thread._move(Mock(), known, settings)
    assert clock[0] == {"the window": 30, "its turn": 70, "the job": 1000}[ends]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_merge_that_has_just_begun_is_waited_for_only_at_the_end(is_last: bool) -> None:
    """Before it is the thread's turn, the stream may have ended the one that is ready and begun another. In that turn
    it waits.
    """
    sink, thread = Mock(), Maintenance(Mock(), Mock(), Mock())
    if is_last:
        thread._finishing.set()
    thread._merge(Mock(sink=sink, works=True, turn=threading.Lock()), maintenance._Table(sink), MaintenanceSection())
    sink.upkeep.end_merge.assert_called_once_with(wait=is_last)


def test_each_table_and_each_step_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a window that is short: what may take until it closes comes last, and the next time others come first."""
    supervisor = Mock()
    supervisor.working.return_value = [Mock(target="a"), Mock(target="b"), Mock(target="c")]
    thread = Maintenance(Mock(), Mock(), supervisor)
    seen = list[str]()
    steps = ("merge", "move", "purge", "reconcile", "drop", "expire", "clean")
    for name in (f"_{step}" for step in steps):
        monkeypatch.setattr(thread, name, lambda member, *_, name=name: seen.append(f"{member.target}{name}"))
    clock = [0.0]

    def later() -> float:
        clock[0] += 1
        return clock[0]

    monkeypatch.setattr("time.monotonic", later)
    thread._look_around()
    assert [each for each in seen if each.startswith("a")][-1] == "a_move"
    assert sorted(seen) == sorted(f"{table}_{step}" for table in "abc" for step in steps)
    seen.clear()

    def end(member: Any, *_: Any) -> None:
        seen.append(member.target)
        thread._ending.set()

    monkeypatch.setattr(thread, "_move", end)
    for _ in range(4):
        thread._ending.clear()
        thread._look_around()
    assert [each for each in seen if len(each) == 1] == ["a", "b", "c", "a"]


@contextmanager
def looking_often(seconds: float = 0.05) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "SECONDS", seconds)
        patch.setattr(maintenance, "PAUSE", 0.2)
        yield


def rewrites(caplog: pytest.LogCaptureFixture) -> int:
    return sum("rewrote" in record.getMessage() for record in caplog.records)


def running(job: Job, **maintenance_of_table: Any) -> Job:
    job.sections = {"sink": {"trigger": "100 milliseconds"}}
    job.table = {"merge_small_files": False, "maintenance": GREEDY | maintenance_of_table}
    return job


@pytest.mark.spark
def test_a_running_job_rewrites_files(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the stream, again and again, and what the table has stays right. Micro-batches have most of the cores."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = running(Job(spark, tmp_path, tasks=1, properties={"format-version": "3"}))
    changes = Changes(job)
    changes.write(6)
    context, original, pools = spark.sparkContext, SparkEngine.rewrite, set[str | None]()

    def noted(self: SparkEngine, *arguments: Any) -> Any:
        pools.add(context.getLocalProperty("spark.scheduler.pool"))
        return original(self, *arguments)

    monkeypatch.setattr(SparkEngine, "rewrite", noted)
    with looking_often():
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            for number in range(1, 4):
                assert wait_until(lambda number=number: rewrites(caplog) >= number)  # type: ignore[misc]
                changes.write(6)
            assert wait_until(lambda: caplog.text.count(f"{job.target} batch ") >= 24)
        finally:
            pipeline.stop()
            thread.join(60)
    assert not thread.is_alive()
    assert pools == {MAINTENANCE_POOL}
    weights = [context._jsc.sc().getPoolForName(name).get().weight() for name in ("default", MAINTENANCE_POOL)]
    assert weights == [1000, 1]
    told = [record for record in caplog.records if record.name == "rowdelta"]  # py4j tells of the stream's end
    assert not [record for record in told if record.levelno >= logging.WARNING], caplog.text
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None
    # a task that has just ended when it is cancelled can't say what it wrote
    assert "JOB_CANCELLED" in caplog.text or job.unreferenced_files() == []


@pytest.mark.spark
def test_two_drivers_look_after_one_table(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both rewrite its files, and have one folder of the key index. One of them is stopped, and nothing is lost."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = running(Job(spark, tmp_path, tasks=1, properties={"format-version": "3"}))
    job.index_location = str(tmp_path / "index")
    changes, fenced = Changes(job), list[FencedError]()
    changes.write(6)

    def run(pipeline: Pipeline) -> None:
        try:
            pipeline.run()
        except FencedError as error:
            fenced.append(error)

    with looking_often():
        pipelines = [job.pipeline()]
        threads = [threading.Thread(target=run, args=pipelines)]
        threads[0].start()
        try:
            assert wait_until(lambda: rewrites(caplog) > 0)
            pipelines.append(job.second_driver().pipeline())
            threads.append(threading.Thread(target=run, args=pipelines[1:]))
            threads[1].start()
            changes.write(6)
            assert wait_until(lambda: len(fenced) > 0)
            assert wait_until(lambda: job.rows() == changes.expected())
        finally:
            for pipeline in pipelines:
                pipeline.stop()
            for thread in threads:
                thread.join(60)
    assert len(fenced) == 1
    job.sections = {}  # it ends when it has read all there is
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()
    job.check_deletes()
    assert job.check_index() is not None


@pytest.mark.spark
def test_a_job_that_ends_does_what_is_due(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that a scheduler starts each minute."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": GREEDY | {"budget": 0}})
    changes = Changes(job)
    changes.write(3)
    job.run()
    job.table = {"merge_small_files": False, "maintenance": GREEDY}
    changes.write(1)
    with looking_often(AT_THE_END):
        job.run()
    assert rewrites(caplog) == 1
    assert job.rows() == changes.expected()


@pytest.mark.spark
def test_a_rewrite_of_unknown_outcome_fails_no_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the same rows either way, and all changes are applied."""
    commit = IcebergCommitter.rewrite

    def lose_answer(self: IcebergCommitter, request: Rewrite) -> Outcome:
        commit(self, request)
        return Unknown("no answer")

    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": GREEDY | {"budget": 0}})
    changes = Changes(job)
    changes.write(3)
    job.run()
    job.table = {"merge_small_files": False, "maintenance": GREEDY}
    changes.write(1)
    with monkeypatch.context() as patch:
        patch.setattr(IcebergCommitter, "rewrite", lose_answer)
        with looking_often(AT_THE_END):
            job.run()
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()
    assert job.unreferenced_files() == []


@pytest.mark.spark
def test_a_rewrite_of_unknown_outcome_ends_no_running_job(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query of the table's directory still runs when the table is opened again."""
    commit, lost = IcebergCommitter.rewrite, list[None]()

    def lose_answer(self: IcebergCommitter, request: Rewrite) -> Outcome:
        outcome = commit(self, request)
        if not lost:
            lost.append(None)
            return Unknown("no answer")
        return outcome

    job = running(Job(spark, tmp_path, tasks=1))
    changes = Changes(job)
    changes.write(6)
    monkeypatch.setattr(IcebergCommitter, "rewrite", lose_answer)
    with looking_often(), Running(job) as thread:  # type: ignore[arg-type]  # it needs `pipeline` only
        assert wait_until(lambda: bool(lost) or not thread.alive, 60)
        changes.write(1)
        assert wait_until(lambda: job.rows() == changes.expected() or not thread.alive, 60)
        assert thread.alive
    assert thread.error is None
    assert job.rows() == changes.expected()


@pytest.mark.spark
@pytest.mark.parametrize("off", [{"budget": 0}, {"window": "0 0 29 2 *"}])
def test_it_can_be_switched_off(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, off: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": GREEDY | off})
    Changes(job).write(2)
    job.run()
    assert rewrites(caplog) == 0


@pytest.mark.spark
def test_what_is_old_waits_for_the_window(spark: SparkSession, tmp_path: Path) -> None:
    """Snapshots and orphans, as rewrites do."""
    settings = {"budget": 0, "expire": {"older_than": "0 minutes", "retain_last": 1}, "orphans": {"every": "1 day"}}
    job = Job(spark, tmp_path, tasks=1)
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0}}
    changes = Changes(job)
    changes.write(3)
    job.run()
    orphan, week = job.table_folder / "data" / "orphan.parquet", time.time() - 7 * 86400
    orphan.write_bytes(b"x")
    os.utime(orphan, (week, week))
    only_sink(job).table.set_property("rowdelta.shop.cleaned", str(int(week * 1000)))
    for window, left in (("0 0 29 2 *", 3), ("* * * * *", 2)):
        job.table = {"merge_small_files": False, "maintenance": settings | {"window": window}}
        (would,) = maintain(spark, job.config(), ["orders"], dry_run=True)
        assert (would.expiring_snapshots, len(job.snapshots())) == (2, 3)
        assert "  expire       2 snapshots or fewer" in "\n".join(lines(would))
        with looking_often(AT_THE_END):
            job.run()
        assert len(job.snapshots()) == left
        assert orphan.exists() == (left == 3)
    assert job.rows() == changes.expected()


@pytest.mark.spark
@pytest.mark.parametrize("trigger", ["100 milliseconds", "available-now"])
def test_a_job_that_is_stopped_does_not_wait_for_a_rewrite(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trigger: str
) -> None:
    """The task is cancelled, and the table has nothing of it. The same while a job finishes that has read all there
    is.
    """
    started = tmp_path / "started"
    rewrite, close = move.rewrite, PartitionedWriter.close

    def slow(*arguments: Any) -> Iterator[Any]:
        """All files are written, and it isn't done yet."""

        def wait(self: PartitionedWriter) -> Any:
            written = close(self)
            started.touch()
            time.sleep(600)
            return written

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartitionedWriter, "close", wait)
            yield from rewrite(*arguments)

    monkeypatch.setattr("sink.spark.tasks.move.rewrite", slow)
    job = running(Job(spark, tmp_path, tasks=1))
    job.sections = {"sink": {"trigger": trigger}}
    seconds = AT_THE_END if trigger == "available-now" else 0.05
    changes = Changes(job)
    changes.write(3)
    with looking_often(seconds):
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        assert wait_until(started.exists)
        if trigger != "available-now":
            changes.write(1)
            assert wait_until(lambda: job.rows() == changes.expected())  # micro-batches go on beside it
        pipeline.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert job.rows() == changes.expected()
    assert len(job.unreferenced_files()) <= 1, "Spark kills a worker that is at work, so its file is an orphan"
    assert job.check_index() is not None


@contextmanager
def all_cores_busy(spark: SparkSession, folder: Path) -> Iterator[None]:
    """No task of another job can begin."""
    started, tasks = folder / "busy", spark.sparkContext.defaultParallelism
    started.mkdir()

    def be_busy(numbers: Iterable[int]) -> Iterable[int]:
        for number in numbers:
            (started / str(number)).touch()
            time.sleep(600)
        return ()

    def run() -> None:
        spark.sparkContext.setJobGroup("busy", "busy", interruptOnCancel=True)
        with suppress(Exception):  # it is cancelled
            spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(be_busy).collect()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert wait_until(lambda: len(list(started.iterdir())) == tasks)
        yield
    finally:
        spark.sparkContext.cancelJobGroup("busy")
        thread.join(60)


def is_looking_after_tables() -> bool:
    return any(thread.name == "rowdelta-maintenance" for thread in threading.enumerate())


@pytest.mark.spark
def test_nothing_waits_until_old_snapshots_are_removed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches go on beside it. When the job ends, the procedure's jobs are cancelled, though they are in a group
    of their own.
    """
    begun, may_go_on, expire = threading.Event(), threading.Event(), IcebergUpkeep.expire

    def waiting(*arguments: Any) -> int:
        begun.set()
        assert may_go_on.wait(300)
        return expire(*arguments)

    monkeypatch.setattr(IcebergUpkeep, "expire", waiting)
    monkeypatch.setattr(maintenance, "_LOOK_EVERY", 0.0)
    job = running(Job(spark, tmp_path, tasks=1), budget=0, expire={"older_than": "0 minutes", "retain_last": 1})
    changes = Changes(job)
    changes.write(3)
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    with looking_often():
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            assert wait_until(begun.is_set)
            changes.write(1)
            assert wait_until(lambda: job.rows() == changes.expected())
            with all_cores_busy(spark, tmp_path):
                may_go_on.set()
                assert wait_until(lambda: len(tracker.getActiveJobIds()) > 1)
                pipeline.stop()
                assert wait_until(lambda: not thread.is_alive())
                assert not is_looking_after_tables()
        finally:
            may_go_on.set()
            pipeline.stop()
            thread.join(60)
    assert len(job.snapshots()) < 4, "the commit comes before the jobs that look for files"
    assert job.rows() == changes.expected()


@pytest.mark.spark
def test_files_of_others_newest_commits_are_no_orphans(spark: SparkSession, tmp_path: Path) -> None:
    """Such as files that somebody wrote long ago, and has added to the table since the sink has looked at it."""
    job = Job(spark, tmp_path, tasks=1, table={"maintenance": {"budget": 0, "orphans": {"every": "0 minutes"}}})
    job.write([("+I", {"id": 1, "region": "ours"})])
    job.run()
    pipeline = job.pipeline()
    (member,) = pipeline._supervisor.members.values()
    job.append([{"id": 2, "region": "theirs"}])
    orphan = job.table_folder / "data" / "orphan.parquet"
    orphan.write_bytes(b"x")
    week = time.time() - 7 * 86400
    for path in (job.table_folder / "data").iterdir():
        os.utime(path, (week, week))
    Maintenance(spark, pipeline._config, pipeline._supervisor)._attend(member)
    assert not orphan.exists()
    assert job.rows() == [{"id": 1, "region": "ours"}, {"id": 2, "region": "theirs"}]


@pytest.mark.spark
@pytest.mark.parametrize(("new_job", "commits"), [(Job, False), (Job, True), (DeltaJob, False)])
def test_a_clock_that_is_days_ahead(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_job: type[Job], commits: bool
) -> None:
    """As on the machine of somebody who runs `rowdelta maintain`, or on the one that commits. The storage has a clock
    of its own. A micro-batch that takes days is as safe.
    """
    job = new_job(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    sink = only_sink(job)
    waiting = next(job.table_folder.rglob("*.parquet")).with_name("waiting.parquet")
    waiting.write_bytes(b"x")
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 30 * 86400)
        last = sink.upkeep.newest_table().last_commit()
        assert last is not None
        if commits:
            ahead = replace(last, timestamp_ms=last.timestamp_ms + 30 * 86400 * 1000)
            patch.setattr(type(sink.upkeep.newest_table()), "last_commit", lambda _: ahead)
        assert sink.upkeep.newest_table().upkeep().remove_orphans(timedelta(days=3)) == []
        sink.upkeep.note_cleaning()
    assert waiting.exists()
    assert sink.upkeep.is_cleaning_due(timedelta(days=7))


@pytest.mark.spark
@pytest.mark.parametrize("place", ["metadata", "data/items/metadata", "metadata/metadata"])
def test_orphans_stay_if_the_folder_is_another_tables_too(spark: SparkSession, tmp_path: Path, place: str) -> None:
    """A renamed table keeps its folder, and a new one of the old name may get the same."""
    job = Job(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    metadata = job.table_folder / place / "00007-of-the-other-one.metadata.json"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    (newest,) = (job.table_folder / "metadata").glob("v2.metadata.json")
    metadata.write_text(json.dumps({**json.loads(newest.read_text()), "table-uuid": str(uuid4())}))
    # there may be hundreds of thousands of the table's own, and of each the beginning tells
    newest.with_name("00001-old.metadata.json").write_text(newest.read_text()[:500])
    orphan = job.table_folder / "data" / "orphan.parquet"
    orphan.write_bytes(b"x")
    os.utime(orphan, (0, 0))
    table = only_sink(job).upkeep.newest_table()
    with pytest.raises(TableError, match=f"metadata of another table, .*{place}/00007-of-the-other-one"):
        table.upkeep().remove_orphans(timedelta(days=3))
    assert orphan.exists()
    metadata.unlink()
    assert [Path(path).name for path in table.upkeep().remove_orphans(timedelta(days=3))] == ["orphan.parquet"]


def test_only_what_a_compaction_may_have_written_is_lost_with_it() -> None:
    """If it fails before it begins, the whole budget is still there."""
    sink = Mock(written_bytes=0)
    sink.upkeep.credit.return_value = 1000
    sink.upkeep.newest_table.side_effect = TemporaryError("no answer")
    thread, known = Maintenance(Mock(), Mock(), Mock()), maintenance._Table(sink)
    thread._finishing.set()
    with pytest.raises(TemporaryError, match="no answer"):
        thread._compact(Mock(), known, MaintenanceSection())
    assert known.wasted == 0
    sink.upkeep.newest_table.side_effect = None
    sink.upkeep.newest_table.return_value.upkeep.return_value.compact.side_effect = CompactionFailedError("failed", 300)
    with pytest.raises(TemporaryError, match="failed"):
        thread._compact(Mock(), known, MaintenanceSection())
    assert known.wasted == 300


@pytest.mark.parametrize("came", ["commit", "refusal", "error"])
def test_what_a_rewrite_has_written_for_nothing_counts(came: str) -> None:
    """Also if its end fails: else each attempt would write as much again as the budget allows."""
    sink = Mock(written_bytes=0)
    sink.upkeep.credit.return_value = 1000
    sink.upkeep.begin_rewrite.return_value.written_bytes = 300
    sink.upkeep.end_rewrite.return_value = None if came == "refusal" else RewriteDone("lake.n.t", "rewrite", 2, 1, 400)
    sink.upkeep.end_rewrite.side_effect = TemporaryError("no answer") if came == "error" else None
    thread, known = Maintenance(Mock(), Mock(), Mock()), maintenance._Table(sink)
    with suppress(TemporaryError):
        thread._rewrite(Mock(sink=sink, turn=threading.Lock()), known, MaintenanceSection())
    sink.upkeep.end_rewrite.assert_called_once()
    assert known.wasted == (0 if came == "commit" else 300)


def test_nothing_is_deleted_of_a_table_that_may_be_another_one() -> None:
    sink = Mock()
    sink.upkeep.drop_dangling_deletes.side_effect = TableGoneError("it was dropped and created again")
    sink.upkeep.settings = MaintenanceSection()
    with pytest.raises(TableGoneError):
        Maintenance(Mock(), Mock(), Mock())._attend(Mock(sink=sink, turn=threading.Lock()))
    sink.upkeep.newest_table.assert_not_called()


@pytest.mark.spark
@pytest.mark.parametrize("create", [False, True])
def test_another_table_of_the_same_name_is_not_the_sink_s(spark: SparkSession, tmp_path: Path, create: bool) -> None:
    job = Job(spark, tmp_path, tasks=1)
    job.write([("+I", {"id": 1, "region": "eu"})])
    job.run()
    sink = only_sink(job)
    assert sink.upkeep.newest_table().name == job.target
    spark.sql(f"DROP TABLE {job.target}")
    if create:
        spark.sql(f"CREATE TABLE {job.target} (id bigint, region string) USING iceberg")
    with pytest.raises(TableGoneError, match="dropped"):
        sink.upkeep.newest_table()


@pytest.mark.spark
def test_expiry_goes_on_after_others_removed_the_index_s_base(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(3)
    job.run()
    ours = job.current_snapshot()
    job.call("expire_snapshots", "older_than => TIMESTAMP '2100-01-01', retain_last => 1")
    assert [snapshot["snapshot_id"] for snapshot in job.snapshots()] == [ours]
    assert only_sink(job).upkeep.oldest_needed(timedelta(0), 1) is None, "nothing is older"
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert done.error is None
    changes.write(1)
    job.run()
    assert job.check_index() is not None


@pytest.mark.spark
def test_expiry_keeps_the_snapshot_of_the_position_beside_other_clocks(spark: SparkSession, tmp_path: Path) -> None:
    """Another writer's clock was behind, so its snapshot seems to be older than its parent."""
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(2)
    job.run()
    ours = job.current_snapshot()
    job.append([{"id": 100, "region": "theirs"}])
    newest = max(
        (job.table_folder / "metadata").glob("v*.metadata.json"), key=lambda path: int(path.name[1:].split(".")[0])
    )
    metadata = json.loads(newest.read_text())
    behind = next(each["timestamp-ms"] for each in metadata["snapshots"] if each["snapshot-id"] == ours) - 30_000
    for entry in (metadata["snapshots"][-1], metadata["snapshot-log"][-1]):
        entry["timestamp-ms"] = behind
    metadata["last-updated-ms"] = behind
    newest.write_text(json.dumps(metadata))
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    spark.sql(f"REFRESH TABLE {job.target}")
    job.append([{"id": 101, "region": "theirs"}])
    sink = only_sink(job)
    assert job.snapshots()[0]["snapshot_id"] != ours
    sink.upkeep.newest_table().upkeep().expire(timedelta(0), 1, ours)
    assert ours in {snapshot["snapshot_id"] for snapshot in job.snapshots()}
    changes.write(1)
    job.run()
    assert job.check_index() is not None


@pytest.mark.spark
def test_expiry_keeps_the_snapshot_of_the_position(spark: SparkSession, tmp_path: Path) -> None:
    """The index may have caught up with others since."""
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(2)
    job.run()
    ours = job.current_snapshot()
    job.append([{"id": 100, "region": "theirs"}])
    sink = only_sink(job)
    begun = rewritten_files(sink)
    assert sink.upkeep.end_rewrite(begun) is not None
    job.append([{"id": 101, "region": "theirs"}])
    assert sink.upkeep.oldest_needed(timedelta(0), 1) == ours
    sink.upkeep.newest_table().upkeep().expire(timedelta(0), 1, ours)
    changes.write(1)
    job.run()
    assert job.check_index() is not None


@pytest.mark.spark
def test_the_command_does_it_once(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "3"})
    job.table = {
        "merge_small_files": False,
        "maintenance": {"budget": 0, "expire": {"older_than": "0 minutes", "retain_last": 1}, "orphans": {}},
    }
    changes = Changes(job)
    changes.write(6)
    job.run()
    orphan, young = job.table_folder / "data" / "orphan.parquet", job.table_folder / "data" / "young.parquet"
    for path in (orphan, young):
        path.write_bytes(b"x")
    week = time.time() - 7 * 86400
    os.utime(orphan, (week, week))

    status = "\n".join(inspection.status(spark, job.config()))
    assert re.search(
        r"\n  files: [\d.]+ \w+ on average, at most [1-9]\d\.\d% of their rows are deleted\n  [2-6] snapshots since",
        status,
    )
    assert re.search(r" UTC; due to expire: [1-5]$", status)
    assert re.search(r"\n  orphans: looked for at .+ UTC, again after 7 days\n", status)
    assert "budget" not in status, "it is 0"
    assert "rewritten last" not in status

    (found,) = maintain(spark, job.config(), ["orders"], dry_run=True)
    assert found.error is None
    assert found.expiring_snapshots == 0, "the sink may need those that are left"
    assert [Path(path).name for path in found.orphans] == ["orphan.parquet"]
    assert orphan.exists()
    assert "  rewrite      6 data files" in "\n".join(lines(found))

    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert done.error is None
    assert (done.rewritten_data_files, done.added_data_files, done.failed_groups) == (6, 1, 0)
    assert done.expired_files > 0
    assert json.loads(as_json(done))["orphans"] == done.orphans
    status = "\n".join(inspection.status(spark, job.config()))
    assert re.search(r"\n  files: .+, at most 0\.0% of their rows are deleted\n  rewritten last: 6 files at ", status)
    assert status.endswith(" UTC; due to expire: 1")  # it stays, since it stored the position
    assert not orphan.exists()
    assert young.exists()
    young.unlink()
    assert len([file for file in job.files() if file["content"] == 0]) == 1
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    changes.write(2)  # the index needs none of the snapshots that are gone
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    for _ in range(2):
        (again,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert again.rewritten_data_files == 0


def job_of_three_regions(spark: SparkSession, folder: Path, *, files: int, together: int) -> Job:
    """Three partitions, each with so many files of ten rows. So many partitions are rewritten at the same time."""
    job = Job(spark, folder, tasks=1, partition_by=["region"], properties={"format-version": "3"})
    rewrite = {"min-input-files": 2, "max-concurrent-file-group-rewrites": together}
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0, "rewrite": rewrite}}
    for number in range(3 * files):
        rows = [{"id": key, "region": "abc"[number // files]} for key in range(10 * number, 10 * number + 10)]
        job.write([("+I", row) for row in rows])
    job.run()
    return job


@pytest.mark.spark
def test_a_group_that_fails_stops_no_other(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others change the files of a partition, or a file can't be read."""
    job = job_of_three_regions(spark, tmp_path, files=3, together=2)
    before = job.rows()
    write, attempts = TableUpkeep.write_rewrite, list[list[str]]()

    def failing(self: TableUpkeep, begun: RunningRewrite) -> bool:
        attempts.append([group.partition for group in begun.groups])
        if attempts[0][0] in attempts[-1]:
            with monkeypatch.context() as patch:
                patch.setattr(IcebergTableSpec, "rows", unreadable)
                patch.setattr(SparkEngine, "rewrite", on_driver)
                return write(self, begun)
        return write(self, begun)

    monkeypatch.setattr(TableUpkeep, "write_rewrite", failing)
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert done.error is None
    assert (done.rewritten_data_files, done.added_data_files, done.failed_groups) == (6, 2, 1)
    assert exit_code(done) == TemporaryError.exit_code
    assert "failed       1 group of files" in "\n".join(lines(done))
    # the two that were tried together come again, one by one
    assert sorted(map(len, attempts)) == [1, 1, 1, 2]
    assert job.rows() == before
    assert job.unreferenced_files() == []
    monkeypatch.setattr(TableUpkeep, "write_rewrite", write)
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert (done.rewritten_data_files, done.failed_groups, exit_code(done)) == (3, 0, 0)
    assert job.rows() == before
    assert job.check_index() is not None


@pytest.mark.spark
def test_others_change_one_of_several_groups(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are rewritten in the same run, and then this one."""
    job = job_of_three_regions(spark, tmp_path, files=2, together=3)
    write, groups = TableUpkeep.write_rewrite, list[int]()

    def interrupted(self: TableUpkeep, begun: RunningRewrite) -> bool:
        groups.append(len(begun.groups))
        found = write(self, begun)
        if len(groups) == 1:
            spark.sql(f"DELETE FROM {job.target} WHERE id = 3").collect()
        return found

    monkeypatch.setattr(TableUpkeep, "write_rewrite", interrupted)
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert (done.error, done.added_data_files, done.failed_groups) == (None, 3, 0)
    assert groups == [3, 1, 1, 1]
    assert job.rows() == [{"id": key, "region": "abc"[key // 20]} for key in range(60) if key != 3]
    assert job.unreferenced_files() == []
    assert job.check_index() is not None


@pytest.mark.spark
def test_maintain_ends_if_everything_fails(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when a disk is full."""
    job = Job(spark, tmp_path, tasks=1, partition_by=["id"])
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0}}
    for number in range(2):
        job.write([("+I", {"id": key, "region": f"r{number}"}) for key in range(number, 20 + number)])
    job.write([("+I", {"id": key, "region": "r2"}) for key in range(20)])
    job.run()
    attempts = list[int]()

    def full(self: SparkEngine, plan: Any, groups: Any, written: Any) -> Any:
        attempts.append(len(groups))
        raise OSError("no space left on device")

    monkeypatch.setattr(SparkEngine, "rewrite", full)
    options = replace(ALL_FILES, max_concurrent_groups=3)
    monkeypatch.setattr(maintain_command, "options_of", lambda *_, **__: options)
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert len(attempts) == 5
    assert exit_code(done) == TemporaryError.exit_code


def unreadable(*_: Any, **__: Any) -> Any:
    raise OSError("the disk has a bad sector")


def on_driver(self: SparkEngine, plan: Any, groups: Any, written: list[str]) -> Any:
    """`SparkEngine.rewrite`, where a test's patches are."""
    return [plan.move(TaskId(0, 0, plan.operation), groups, written.extend)]


@pytest.mark.spark
def test_groups_are_rewritten_at_the_same_time(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a task, and with one commit. Files are as large as the configuration wants them, not the table."""

    def small(*arguments: Any, **options: Any) -> RewriteOptions:
        found = options_of(*arguments, **options)
        assert found.target_file_size == 1 << 20
        return replace(found, target_file_size=6_000)

    monkeypatch.setattr(maintain_command, "options_of", small)
    job = Job(spark, tmp_path, tasks=2, partition_by=["region"])
    rewrite = {"min-input-files": 2, "max-concurrent-file-group-rewrites": 2, "target-file-size-bytes": 1 << 20}
    maintenance = {"budget": 0, "rewrite": rewrite, "expire": None, "orphans": None}
    job.table = {"merge_small_files": False, "maintenance": maintenance}
    for start in range(9):
        # hardly to be compressed
        keys = (key * 2654435761 % 2**32 for key in range(600 * start, 600 * (start + 1)))
        job.write([("+I", {"id": key, "region": "abc"[start // 3]}) for key in keys])
    job.tasks = 1
    job.run()
    job.tasks = 2
    before = job.rows()
    commits = len(job.snapshots())
    (would,) = maintain(spark, job.config(), ["orders"], dry_run=True)
    assert would.rewritten_data_files == 9
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert (done.error, done.failed_groups) == (None, 0)
    assert (done.rewritten_data_files, done.added_data_files) == (9, 6)
    assert len(job.snapshots()) - commits == 2, "two partitions, and then the last one"
    assert job.rows() == before
    assert job.check_index() is not None
    for dry_run in (True, False):
        (again,) = maintain(spark, job.config(), ["orders"], dry_run=dry_run)
        assert again.rewritten_data_files == 0, "they are as large as they are to be"


@pytest.mark.spark
def test_expiry_keeps_what_tags_and_live_vectors_need(spark: SparkSession, tmp_path: Path) -> None:
    """Several deletion vectors are in one Puffin file, and one of them is live after the others were replaced."""
    job = Job(spark, tmp_path, tasks=1, partition_by=["region"], properties={"format-version": "3"})
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0}}
    rows = {key: "abc"[key % 3] for key in range(30)}
    job.write([("+I", {"id": key, "region": region}) for key, region in rows.items()])
    job.write([("-D", {"id": key, "region": "abc"[key % 3]}) for key in (0, 1, 2)])
    job.run()
    tagged = job.current_snapshot()
    at_tag = job.rows()
    job.java_table().manageSnapshots().createTag("kept", tagged).commit()
    job.write([("-D", {"id": 3, "region": "a"})])
    job.write([("-D", {"id": 6, "region": "a"})])
    job.write([("-D", {"id": 9, "region": "a"})])
    job.run()
    sink = only_sink(job)
    keep = sink.upkeep.oldest_needed(timedelta(0), 1)
    assert keep is not None
    assert sink.upkeep.newest_table().upkeep().expire(timedelta(0), 1, keep) > 0
    left = {snapshot["snapshot_id"] for snapshot in job.snapshots()}
    assert tagged in left
    assert len(left) == 3, "it, and those of the index and of the position"
    expected = [{"id": key, "region": region} for key, region in rows.items() if key not in (0, 1, 2, 3, 6, 9)]
    assert job.rows() == by_pyiceberg(job) == expected
    old = spark.read.option("versionAsOf", "kept").table(job.target).orderBy("id").collect()
    assert [{"id": row["id"], "region": row["region"]} for row in old] == at_tag
    job.java_table().manageSnapshots().removeTag("kept").commit()
    sink = only_sink(job)
    assert sink.upkeep.newest_table().upkeep().expire(timedelta(0), 1, sink.upkeep.oldest_needed(timedelta(0), 1)) > 0
    assert job.rows() == by_pyiceberg(job) == expected
    assert job.unreferenced_files() == []


@pytest.mark.spark
def test_files_of_a_commit_that_is_still_to_come_are_no_orphans(spark: SparkSession, tmp_path: Path) -> None:
    """Of a rewrite, and of a micro-batch of this sink. A clean-up in between, also of another sink, keeps them."""
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False})
    changes = Changes(job)
    changes.write(3)
    job.run()
    sink = only_sink(job)
    begun = rewritten_files(sink)
    assert len(job.unreferenced_files()) > 0
    config = replace(job, sink_id="other", index_location=str(tmp_path / "other")).config()
    other = Catalogs(spark, config).load(job.target)
    assert isinstance(other, IcebergTable)
    assert other.upkeep().remove_orphans(timedelta(days=1)) == []
    assert sink.upkeep.end_rewrite(begun) is not None
    changes.write(1)
    removed = list[str]()
    with before_commit(lambda: removed.extend(other.upkeep().remove_orphans(timedelta(days=1)))):
        job.run()
    assert removed == []
    assert job.rows() == by_pyiceberg(job) == changes.expected()
    assert job.check_index() is not None


@pytest.mark.spark
def test_files_outside_of_the_table_are_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    """Such as those that `add_files` has added: they may be another table's too."""
    job = Job(spark, tmp_path, tasks=1)
    job.table = {
        "merge_small_files": False,
        "maintenance": {"budget": 0, "expire": {"older_than": "0 minutes", "retain_last": 1}},
    }
    changes = Changes(job)
    changes.write(2)
    job.run()
    elsewhere = tmp_path / "elsewhere"
    theirs = [{"id": number, "region": "theirs"} for number in (1000, 1001)]
    spark.createDataFrame(theirs, "id bigint, region string").coalesce(1).write.parquet(str(elsewhere))
    job.call("add_files", f"source_table => '`parquet`.`{elsewhere}`'")
    (imported,) = elsewhere.glob("*.parquet")
    changes.write(2)
    job.run()
    begun = only_sink(job).upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert len(begun.groups[0].files) == 4
    assert not any(file.path.endswith(imported.name) for file in begun.groups[0].files)

    job.compact()  # now only old snapshots have the file
    changes.write(1)
    job.run()
    (done,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert done.error is None
    assert done.expired_files > 0
    assert imported.exists()
    assert job.unreferenced_files() == []
    assert job.rows() == [*changes.expected(), *theirs]


def by_default(job: Job, **of_sink: Any) -> Config:
    """The job's configuration without anything about maintenance."""
    values = job.config_values()
    del values["maintenance"]
    values["tables"][0].pop("maintenance", None)
    values["sink"] |= of_sink
    values["tables"][0]["shared_with"] = ["shop"]
    return Config.model_validate(values)


@pytest.mark.spark
def test_a_table_knows_what_was_done_for_it(spark: SparkSession, tmp_path: Path) -> None:
    """So jobs that end soon save up for a rewrite too, and look for orphans in time. A sink that only found the table
    deletes nothing unasked.
    """
    job = Job(spark, tmp_path, tasks=1, table={"merge_small_files": False, "maintenance": {"window": "0 0 29 2 *"}})
    job.sections = {"maintenance": {"budget": 1000}}
    changes, credits = Changes(job), [0]
    for _ in range(2):
        changes.write(2)
        job.run()
        credits.append(only_sink(job).upkeep.credit(1))
    assert 0 < credits[1] < credits[2]
    assert credits[2] > 2 * 256 * 1024, "metadata count too"
    assert only_sink(job).upkeep.credit(2) == 2 * credits[2]
    job.table = {"merge_small_files": False, "maintenance": GREEDY}
    with looking_often(AT_THE_END):
        job.run()
    sink = only_sink(job)
    assert 0 <= sink.upkeep.credit(1) < credits[2]
    assert len([file for file in job.files() if file["content"] == 0]) == 1

    assert not sink.upkeep.is_cleaning_due(timedelta(days=7)), "the table is new"
    assert f"maintenance: {MaintenanceSection().of_own_table().shown}" in checked(spark, by_default(job))
    assert "snapshots stay, orphans stay" in checked(spark, by_default(job, id="another"))
    orphan = job.table_folder / "data" / "orphan.parquet"
    orphan.write_bytes(b"x")
    week = time.time() - 7 * 86400
    os.utime(orphan, (week, week))
    job.run()
    assert orphan.exists()
    sink.table.set_property("rowdelta.shop.cleaned", str(int(week * 1000)))
    Pipeline(spark, by_default(job)).run()
    assert not orphan.exists()
    assert not only_sink(job).upkeep.is_cleaning_due(timedelta(days=7))
    assert job.rows() == changes.expected()
    assert job.check_index() is not None


def checked(spark: SparkSession, config: Config) -> str:
    return "\n".join(inspection.check(spark, config))


@pytest.mark.spark
@pytest.mark.parametrize(("partition_by", "version"), [((), 2), (("bucket(2, id)",), 3), (("region",), 2)])
def test_equality_deletes_become_deletes_by_position(
    spark: SparkSession, tmp_path: Path, version: int, partition_by: tuple[str, ...]
) -> None:
    """Of another mode here. Then engines read the table that don't know equality deletes, such as PyIceberg."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": str(version)}, partition_by=partition_by)
    job.deletes = "equality"
    changes = Changes(job)
    changes.write(5)
    job.run()
    due = r"\n  due: [1-9]\d* equality deletes; "
    assert not re.search(due, "\n".join(inspection.status(spark, job.config()))), "that is how it deletes"
    equality_deletes = len([file for file in job.files() if file["content"] == 2])
    assert equality_deletes > 0

    job.deletes = "position"
    assert re.search(due, "\n".join(inspection.status(spark, job.config())))
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0}}
    before = job.rows()
    (would,) = maintain(spark, job.config(), ["orders"], dry_run=True, only_convert=True)
    (found,) = maintain(spark, job.config(), ["orders"], dry_run=False, only_convert=True)
    assert (would.error, found.error, found.skipped) == (None, None, "")
    assert would.converted_equality_deletes == found.converted_equality_deletes == equality_deletes
    assert found.rewritten_data_files == 0
    assert not [file for file in job.files() if file["content"] == 2]
    assert job.rows() == before == changes.expected()
    assert job.check_index() is not None
    assert by_pyiceberg(job) == before

    changes.write(3)
    job.run()
    assert job.rows() == changes.expected()
    assert job.check_index() is not None
    (again,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert again.converted_equality_deletes == 0


@pytest.mark.spark
def test_a_running_job_converts_equality_deletes(spark: SparkSession, tmp_path: Path) -> None:
    """Those that it finds, and those that another writer leaves while it runs, as Flink would."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "3"})
    rows = dict.fromkeys(range(20), "new")
    job.write([("+I", {"id": key, "region": "new"}) for key in rows])
    job.run()
    flink = replace(job.second_driver(), deletes="equality", sink_id="flink", folder=tmp_path / "flink")

    def changes(region: str, keys: range) -> None:
        rows.update(dict.fromkeys(keys, region))
        flink.write([("+U", {"id": key, "region": region}) for key in keys])
        flink.run()

    def equality_deletes() -> list[dict[str, Any]]:
        return [file for file in job.files() if file["content"] == 2]

    changes("before", range(5))
    assert equality_deletes()
    with looking_often():
        pipeline = running(replace(job)).pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            assert wait_until(lambda: not equality_deletes())
            changes("meanwhile", range(3, 8))
            assert wait_until(lambda: not equality_deletes())
        finally:
            pipeline.stop()
            thread.join(60)
    expected = [{"id": key, "region": region} for key, region in rows.items()]
    assert job.rows() == by_pyiceberg(job) == expected
    job.write([("-D", {"id": key, "region": None}) for key in range(10)])
    job.run()
    assert job.rows() == expected[10:]
    assert job.check_index() is not None


@pytest.mark.spark
@pytest.mark.parametrize(("partition_by", "version"), [((), 3), (("region",), 2)])
def test_a_table_with_equality_deletes_is_compacted_beside_the_stream(
    spark: SparkSession, tmp_path: Path, version: int, partition_by: tuple[str, ...]
) -> None:
    """Micro-batches delete rows of its files after the compaction has planned, and before it commits."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": str(version)}, partition_by=partition_by)
    job.deletes = "equality"
    changes = Changes(job)
    changes.write(6)
    job.run()
    table = only_sink(job).upkeep.newest_table()
    sizes = sorted(
        int(row[0]) for row in spark.sql(f"SELECT file_size_in_bytes FROM {job.target}.data_files").collect()
    )
    limits = CompactionLimits(2, 0.1, 2, 1 << 40)
    would = table.upkeep().compact(limits, dry_run=True)
    assert would is not None
    assert would[0].touched > 2
    assert table.upkeep().compact(replace(limits, most_bytes=sizes[0] - 1)) is None
    assert table.upkeep().compact(replace(limits, fewest_opened=1000)) is None
    assert table.upkeep().compact(replace(limits, where="id < 0")) is None

    changes.write(2)
    job.run()
    done = table.upkeep().compact(replace(limits, most_bytes=sizes[-1] + sizes[-2]))  # it knows nothing of the last two
    assert done is not None
    assert done[0].touched == 2, "the budget is kept, whichever files these are"
    assert done[1] == 0
    assert job.rows() == changes.expected()

    changes.write(1)
    job.run()
    (found,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert (found.error, found.skipped, found.failed_groups) == (None, "", 0)
    assert found.rewritten_data_files > found.added_data_files > 0
    assert job.rows() == changes.expected()
    changes.write(2)
    job.run()
    assert job.rows() == changes.expected()


@pytest.mark.spark
def test_a_compaction_of_all_files_keeps_deletes_that_came_meanwhile(spark: SparkSession, tmp_path: Path) -> None:
    """Iceberg drops delete files that are older than all data files that it leaves alone."""
    job = Job(spark, tmp_path, tasks=1, properties={"format-version": "2"})
    job.deletes = "equality"
    for key in range(6):
        job.write([("+I", {"id": key, "region": "eu"})])
    job.run()
    table = only_sink(job).upkeep.newest_table()
    job.write([("-D", {"id": 1, "region": "eu"}), ("-D", {"id": 4, "region": "eu"})])
    job.write([("+I", {"id": 9, "region": "us"})])
    job.run()
    done = table.upkeep().compact(
        CompactionLimits(2, 0.1, 2, 1 << 40, 0)
    )  # it knows nothing of the last two micro-batches
    assert done is not None
    assert done[0].touched > 2
    assert [row["id"] for row in job.rows()] == [0, 2, 3, 5, 9]


@pytest.mark.spark
def test_a_running_job_compacts_a_table_with_equality_deletes(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rowdelta")
    job = running(Job(spark, tmp_path, tasks=1, deletes="equality"))
    changes = Changes(job)
    changes.write(6)
    with looking_often():
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            for number in range(1, 3):
                assert wait_until(lambda number=number: caplog.text.count(": compacted ") >= number)  # type: ignore[misc]
                changes.write(6)
            assert wait_until(lambda: caplog.text.count(f"{job.target} batch ") >= 18)
        finally:
            pipeline.stop()
            thread.join(60)
    assert not thread.is_alive()
    assert job.rows() == changes.expected()


@pytest.mark.spark
def test_a_running_job_merges_small_files_of_a_table_that_only_grows(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the budget, which counts what it has read."""
    caplog.set_level(logging.INFO, "rowdelta")
    job = Job(spark, tmp_path, tasks=1, key=(), mode="append")
    job.sections = {"sink": {"trigger": "100 milliseconds"}}
    job.table = {"maintenance": {"budget": 2, "rewrite": {"min-input-files": 2}}}
    expected = []
    with looking_often(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "LEAST_GAIN", 1)
        pipeline = job.pipeline()
        thread = threading.Thread(target=pipeline.run)
        thread.start()
        try:
            for number in range(1, 3):
                for key in range(10 * number, 10 * number + 6):
                    job.write([("+I", {"id": key, "region": "eu"})])
                    expected.append(key)
                assert wait_until(lambda number=number: caplog.text.count(": compacted ") >= number)  # type: ignore[misc]
            assert wait_until(lambda: sorted(row["id"] for row in job.rows()) == expected)
        finally:
            pipeline.stop()
            thread.join(60)
    assert not thread.is_alive()
    assert sorted(row["id"] for row in job.rows()) == expected
    table = Catalogs(spark, job.config()).load(job.target)
    assert table is not None
    written, rewritten = (int(table.property(f"rowdelta.{job.sink_id}.{name}") or 0) for name in COUNTED)
    assert 0 < rewritten <= 2 * written


@pytest.mark.spark
@pytest.mark.parametrize("new_job", [Job, DeltaJob])
def test_the_command_merges_small_files_of_a_table_that_only_grows(
    spark: SparkSession, tmp_path: Path, new_job: type[Job | DeltaJob]
) -> None:
    """As many as the budget has bytes for, or all."""
    job = new_job(spark, tmp_path, tasks=1, key=(), mode="append", partition_by=["region"])
    for key in range(6):
        job.write([("+I", {"id": key, "region": "eu"})])
    job.write([("+I", {"id": 6, "region": "us"})])
    job.run()
    table = Catalogs(spark, job.config()).load(job.target)
    assert table is not None
    limits = CompactionLimits(2, 0.1, 2, 1 << 40)
    size = max(path.stat().st_size for path in job.table_folder.rglob("region*/*.parquet"))
    for none in (
        replace(limits, most_bytes=1),
        replace(limits, fewest_opened=10),
        replace(limits, where="region = 'x'"),
    ):
        assert table.upkeep().compact(none) is None
    done = table.upkeep().compact(replace(limits, most_bytes=2 * size))
    assert done is None or (done[0].touched, done[1]) == (2, 0)
    (would,) = maintain(spark, job.config(), ["orders"], dry_run=True)
    job.table = {"maintenance": {"rewrite": {"min-input-files": 2}}}
    (found,) = maintain(spark, job.config(), ["orders"], dry_run=False)
    assert (would.error, found.error, found.skipped) == (None, None, "")
    assert found.rewritten_data_files > found.added_data_files > 0
    assert sorted(row["id"] for row in job.rows()) == list(range(7))
    job.write([("+I", {"id": 7, "region": "eu"})])
    job.run()
    assert sorted(row["id"] for row in job.rows()) == list(range(8))


@pytest.mark.spark
@pytest.mark.parametrize("new_job", [Job, DeltaJob])
def test_only_files_that_may_have_some_rows_are_rewritten(
    spark: SparkSession, tmp_path: Path, new_job: type[Job]
) -> None:
    """By the partition, and by the statistics of a column."""
    job = new_job(spark, tmp_path, tasks=1, partition_by=["region"])
    job.table = {"merge_small_files": False, "maintenance": {"budget": 0, "rewrite": {"min-input-files": 2}}}
    for start in range(0, 60, 10):
        region = "a region" if start < 30 else "us"
        job.write([("+I", {"id": key, "region": region}) for key in range(start, start + 10)])
    job.run()
    before = job.rows()
    condition = "region = 'a region' AND id < 15"
    for dry_run in (True, False):
        (found,) = maintain(spark, job.config(), ["orders"], dry_run=dry_run, where=condition)
        assert (found.error, found.rewritten_data_files, found.added_data_files) == (None, 2, 0 if dry_run else 1)
    assert job.rows() == before
    (rest,) = maintain(spark, job.config(), ["orders"], dry_run=True)
    assert rest.rewritten_data_files == 2 + 3

    mistakes = {"region >": "Syntax error", "day = 1": "day", "id + 1": "BOOLEAN"}
    mistakes |= {"upper(region) = 'US'": "Cannot convert"} if new_job is Job else {}
    for text, reason in mistakes.items():
        (found,) = maintain(spark, job.config(), ["orders"], dry_run=False, where=text)
        assert isinstance(found.error, ConfigError)
        assert f"{text!r} is not a condition by which its files can be told apart" in str(found.error)
        assert reason in str(found.error)


@pytest.mark.spark
def test_equality_deletes_stay_if_anything_is_in_doubt(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key index has other rows than the table, or others change the files meanwhile."""
    properties = {"format-version": "3", "write.delete.mode": "merge-on-read"}
    job = Job(spark, tmp_path, tasks=1, properties=properties, deletes="equality")
    changes = Changes(job)
    changes.write(4)
    job.run()
    job.deletes, job.table = "position", {"merge_small_files": False, "maintenance": {"budget": 0}}
    rows = {row["id"]: row for row in changes.expected()}

    def converted() -> int:
        (member,) = job.pipeline()._supervisor.members.values()
        assert member.sink is not None
        number = member.sink.upkeep.convert_equality_deletes()
        assert job.rows() == list(rows.values())
        assert job.unreferenced_files() == []
        return number

    live_rows = IndexSlice.live_rows

    def a_few(self: IndexSlice) -> Iterator[Any]:
        return ((high, replace(rows, file=rows.file[:2], pos=rows.pos[:2])) for high, rows in live_rows(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexSlice, "live_rows", a_few)
        assert converted() == 0
    assert "building the key index again" in caplog.text
    with before_rewrite(lambda: spark.sql(f"DELETE FROM {job.target} WHERE id = 3")):
        del rows[3]
        assert converted() == 0
    with before_rewrite(job.compact):
        assert converted() == 0
    assert caplog.text.count("equality deletes not converted") == 2
    changes.write(2)
    job.run()
    assert [row for row in job.rows() if row["id"] != 3] == [row for row in changes.expected() if row["id"] != 3]
    assert job.check_index() is not None
