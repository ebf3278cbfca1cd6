"""Any story about a table ends well, whatever happens in it: see `tests.memory.stories` and `tests.memory.hunting`."""

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyroaring import BitMap64
from pyspark import SparkContext

from changelog.rows import BAD
from deltawriters import DeltaOptions, DeltaWriter, partial, whole_changes
from deltawriters.content import DataFile, Locations
from deltawriters.keyindex import RunInfo
from deltawriters.resolve import NOWHERE
from deltawriters.scratch import Scratch
from deltawriters.superseded import SupersededRows
from sink.routing import to_all
from sink.sources.source import TableBatch
from sink.table import copy_on_write, keyindex, open_table, proposals
from sink.table.keyindex import KeyIndex, Meanwhile
from sink.table.microbatch import TableSink
from sink.table.observer import Committed, Event, RewriteDone, TableOpened
from sink.table.open_table import OpenTable
from sink.table.proposals import Proposals
from sink.table.run_merging import RunMerging
from sink.table.table_dead_letters import TableDeadLetters
from sink.targets.retries import Retries
from sink.targets.values import ChangeSet, IndexCommit, Outcome, Refused, TableChanges
from tests.memory import engine
from tests.memory.hunting import PARTS, STORIES, failure, hunt, is_found
from tests.memory.storage import Clock
from tests.memory.stories import KEYS, Operation, Player, Process, Story, Told, played, tiny_thresholds
from tests.memory.table import MemoryTable
from tests.memory.writers import MemoryTableSpec
from tests.rewrites import ALL_FILES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here starts a JVM."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a JVM would be started")

    monkeypatch.setattr(SparkContext, "_ensure_initialized", refuse)


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_snapshot_is_right(tmp_path: Path, part: int) -> None:
    hunt(Story.random, part, STORIES, tmp_path / "story")


def test_a_new_dead_letter_before_those_that_are_kept(tmp_path: Path) -> None:
    """After the crash smaller micro-batches make a dead letter of an update that the large one had superseded. The next
    update is a dead letter already.
    """
    updates = [(5, 3, 2), (2, 1, 3), (5, 4, 5), (1, 7, 5)]
    story = Story(
        operations=(*(Operation("update", *update) for update in updates), Operation("set", 5, 2, 1)),
        processes=(Process((2, 6), ((("send a commit", 4), "crash"),), ()), Process((1,), (), ())),
        key=("a",),
        partitioned_by=None,
        mode="upsert",
        is_strict=False,
        tasks=1,
        leaves_idle_out=False,
        file_size=1 << 20,
        flush_bytes=1 << 20,
        batch_rows=1000,
        merges="never",
        seed=320965450,
    )
    assert failure(story, tmp_path / "story") is None


def test_refused_bad_records_use_up_their_own_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other jobs append to the dead-letter table, while nobody else commits to the target, which has no retries."""
    updates = [(5, 3, 2), (2, 1, 3), (5, 4, 5), (1, 7, 5)]
    story = replace(
        Story.random(320965450),
        operations=tuple(Operation("update", *update) for update in updates),
        processes=(Process((4,), (), ()),),
        mode="upsert",
    )
    commit, refused = MemoryTable.commit, list[str]()

    def busy(self: MemoryTable, request: Any) -> Outcome:
        if self.name.endswith("dead_letters") and len(refused) < 3:
            refused.append(self.name)
            return Refused("others append", again="send")
        return commit(self, request)

    monkeypatch.setattr(MemoryTable, "commit", busy)
    of_letters, of_target = Retries("letters", 20, 0, 0), Retries("target", 0, 0, 0)
    monkeypatch.setattr(MemoryTable, "retries", lambda self: of_letters if "dead" in self.name else of_target)
    assert failure(story, tmp_path / "story") is None
    assert len(refused) == 3


def test_stories_need_no_java(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tests.memory.stories import Story, played; from pyspark import SparkContext\n"
        "for seed in range(20): played(Story.random(seed), pathlib.Path(sys.argv[1]))\n"
        "assert SparkContext._gateway is None and SparkContext._jvm is None; print('played')"
    )
    nowhere = {"PATH": "/nowhere", "JAVA_HOME": "/nowhere", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path / "story")]
    result = subprocess.run(command, cwd=ROOT, env=nowhere, capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("played\n", 0), result.stderr


Patch = Callable[[pytest.MonkeyPatch], None]


def _look_up_nothing_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keyindex, "rows_written_meanwhile", lambda own, others: [])


def _keep_what_was_found_in_touched_files(patch: pytest.MonkeyPatch) -> None:
    original = keyindex.Meanwhile.followed_by

    def followed_by(self: Any, *args: Any) -> Any:
        return replace(original(self, *args), touched=frozenset())

    patch.setattr(keyindex.Meanwhile, "followed_by", followed_by)


def _send_again_without_a_look(patch: pytest.MonkeyPatch) -> None:
    def same_files(self: Proposals, request: ChangeSet, *_: object) -> ChangeSet:
        self._open.table.refresh()
        return replace(request, base_snapshot=self._open.table.snapshot_id())

    patch.setattr(Proposals, "_same_files", same_files)


def _trust_any_position(patch: pytest.MonkeyPatch) -> None:
    for module in (proposals, open_table):
        patch.setattr(module, "own_position", lambda table, prefix, operation: table.position(prefix))


def _begin_whoever_committed_last(patch: pytest.MonkeyPatch) -> None:
    original = OpenTable.catch_up

    def catch_up(self: OpenTable) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(open_table, "own_position", lambda *_: None)
            original(self)

    patch.setattr(OpenTable, "catch_up", catch_up)


def _see_nothing_of_others(patch: pytest.MonkeyPatch) -> None:
    def catch_up(self: KeyIndex) -> TableChanges:
        self._base, self._included = self._table.snapshot_id(), set()
        return TableChanges()

    patch.setattr(KeyIndex, "_catch_up", catch_up)


def _forget_where_rows_were_moved(patch: pytest.MonkeyPatch) -> None:
    original = KeyIndex.adopt

    def adopt(self: KeyIndex, pin: Any, operation: str, files: Any, gone: Any, runs: Any, scratch: Any) -> Any:
        return original(self, pin, operation, files, gone, (), scratch)

    patch.setattr(KeyIndex, "adopt", adopt)


def _keep_files_of_given_up_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scratch, "delete", lambda self: None)


def _delete_files_of_unknown_outcomes(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def deleting(self: TableSink) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.discard()
            raise

    patch.setattr(TableSink, "_deleting_after_errors", deleting)


def _commit_the_old_position(patch: pytest.MonkeyPatch) -> None:
    original = Proposals.make

    def make(self: Proposals, batch: TableBatch, written: Any) -> Any:
        return original(self, replace(batch, end=self._open.position or {"0": 0}), written)

    patch.setattr(Proposals, "make", make)


def _overlook_that_the_table_was_altered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OpenTable, "is_altered", lambda self: False)


def _trust_what_completed_partial_rows(patch: pytest.MonkeyPatch) -> None:
    original = KeyIndex.look_up_again

    def look_up_again(self: KeyIndex, slice_: Any, results: Any) -> Meanwhile | None:
        return original(self, slice_, [replace(result, completed_from=[]) for result in results])

    patch.setattr(KeyIndex, "look_up_again", look_up_again)


def _keep_dead_letters_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TableDeadLetters, "is_ahead", lambda self, position, or_there=False: False)


def _leave_out_updates_that_are_kept(patch: pytest.MonkeyPatch) -> None:
    def unkept(changes: pa.Table, kept: Collection[int]) -> pa.Table:
        offsets = pc.struct_field(changes.column(BAD), ["offset"])
        return changes.filter(pc.invert(pc.is_in(offsets, pa.array(kept, pa.int64()))))

    patch.setattr(engine, "_marked", unkept)


def _build_on_what_was_deleted(patch: pytest.MonkeyPatch) -> None:
    original = partial._standing

    def standing(*args: Any) -> Any:
        partials, numbers, found = original(*args)
        return partials, numbers, replace(found, base=np.full(len(found.base), NOWHERE))

    patch.setattr(partial, "_standing", standing)


def _tell_one_task_of_a_truncate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "to_all", lambda changes, _: to_all(changes, 1))


def _keep_what_was_written_before_a_truncate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(whole_changes.KeyMap, "filter", lambda self, stays: self)


def _look_up_rows_of_before_a_truncate(patch: pytest.MonkeyPatch) -> None:
    original = KeyIndex.prepare

    def prepare(self: KeyIndex, *args: Any, truncates: bool) -> IndexCommit:
        return original(self, *args)

    patch.setattr(KeyIndex, "prepare", prepare)


def _copy_rows_that_are_deleted(patch: pytest.MonkeyPatch) -> None:
    original = MemoryTableSpec.rows

    def rows(self: MemoryTableSpec, file: DataFile, *, left_out: Any = None, **others: Any) -> Any:
        return original(self, file, **others)

    patch.setattr(MemoryTableSpec, "rows", rows)


def _copy_rows_that_others_have_deleted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTableSpec, "deleted_in", lambda self, files: [BitMap64() for _ in files])


def _forget_where_rows_were_copied(patch: pytest.MonkeyPatch) -> None:
    original = copy_on_write.replace_files

    def replace_files(*args: Any) -> Any:
        return replace(original(*args), runs=[])

    patch.setattr(proposals, "replace_files", replace_files)


def _drop_runs_with_live_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keyindex, "run_files", lambda *_: [])


def _leave_superseded_rows_in_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SupersededRows, "removed", lambda self, data_files, places: data_files)


def _forget_where_superseding_rows_went(patch: pytest.MonkeyPatch) -> None:
    original = SupersededRows.removed

    def removed(self: SupersededRows, data_files: Any, places: Locations) -> Any:
        return original(self, data_files, Locations(places.file.copy(), places.pos.copy()))

    patch.setattr(SupersededRows, "removed", removed)


def _carry_nothing_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keyindex, "rows_superseded_meanwhile", lambda moved, newer: [])


def _merge_runs_across_a_pin(patch: pytest.MonkeyPatch) -> None:
    original = KeyIndex._next_merge

    def next_merge(self: KeyIndex) -> Any:
        pins, self._pins = self._pins, []
        try:
            return original(self)
        finally:
            self._pins = pins

    patch.setattr(KeyIndex, "_next_merge", next_merge)


def _take_in_runs_of_an_older_index(patch: pytest.MonkeyPatch) -> None:
    def taken_in(self: RunMerging, runs: Sequence[RunInfo]) -> list[RunInfo]:
        merge = self._merge
        if merge is None or not merge.written.done():
            return list(runs)
        return [*(run for run in runs if run.name not in merge.names), *merge.written.result()]

    patch.setattr(RunMerging, "taken_in", taken_in)
    patch.setattr(RunMerging, "see_committed", lambda self, runs: None)
    patch.setattr(RunMerging, "drop", lambda self, kept=(): None)


def _take_moved_rows_for_the_newest(patch: pytest.MonkeyPatch) -> None:
    original = KeyIndex.adopt

    def adopt(self: KeyIndex, pin: Any, operation: str, files: Any, gone: Any, runs: Any, new_paths: Any) -> Any:
        newest = [replace(run, sequence=self.next_sequence) for run in runs]
        return original(self, pin, operation, files, gone, newest, new_paths)

    patch.setattr(KeyIndex, "adopt", adopt)


def _move_rows_of_files_that_others_changed(patch: pytest.MonkeyPatch) -> None:
    original = KeyIndex._with_files

    def with_files(self: KeyIndex, version: Any, changed: Any, gone: Any) -> Any:
        found = original(self, version, changed, gone)
        dead = {path: min(number, self._pinned_at) for path, number in found.dead.items()}
        return replace(found, dead=dead)

    patch.setattr(KeyIndex, "_with_files", with_files)


@pytest.mark.parametrize(
    "mistake",
    [
        _copy_rows_that_are_deleted,
        _forget_where_rows_were_copied,
        _drop_runs_with_live_rows,
        _leave_superseded_rows_in_files,
        _forget_where_superseding_rows_went,
        _keep_dead_letters_again,
        _leave_out_updates_that_are_kept,
        _build_on_what_was_deleted,
        _look_up_nothing_again,
        _keep_what_was_found_in_touched_files,
        _send_again_without_a_look,
        _trust_any_position,
        _begin_whoever_committed_last,
        _see_nothing_of_others,
        _forget_where_rows_were_moved,
        _keep_files_of_given_up_attempts,
        _delete_files_of_unknown_outcomes,
        _commit_the_old_position,
        _overlook_that_the_table_was_altered,
        _tell_one_task_of_a_truncate,
        _keep_what_was_written_before_a_truncate,
        _look_up_rows_of_before_a_truncate,
        _take_in_runs_of_an_older_index,
    ],
)
def test_stories_find_a_mistake(mistake: Patch, tmp_path: Path) -> None:
    """A test that can't fail shows nothing."""
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        assert is_found(map(Story.random, range(1000)), tmp_path / "story")


@pytest.mark.parametrize("mistake", [_carry_nothing_over, _take_moved_rows_for_the_newest])
def test_stories_find_a_mistake_of_rewrites(mistake: Patch, tmp_path: Path) -> None:
    """Of those beside the stream, in stories that have some."""
    stories = (replace(Story.random(seed), rewrites=True, deletes="position") for seed in range(1000))
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        assert is_found(stories, tmp_path / "story")


VALUES = 9
"""Others delete the rows of one of so many values: one row of a file that has a row of each."""


def copied_after_a_delete(folder: Path) -> None:
    """A file that is copied has a row that others have deleted, which may be one of those that the source sets."""
    operations = (Operation("set", key, value=key % VALUES) for key in (*range(VALUES), 0, 1))
    processes = (Process((VALUES,), then=("delete",)), Process((2,)))
    played(Story(tuple(operations), processes, deletes="copy-on-write"), folder)


def rewritten_during_a_delete(folder: Path) -> None:
    """Others delete a row of two files whose rows were moved, and the sink hears of it by its next micro-batch."""
    operations = (Operation("set", key, value=key % VALUES) for key in (*range(VALUES), VALUES))
    player = Player(Story(tuple(operations), ()), folder)
    sink = player.opened(Clock())
    for size in (VALUES - 1, 1):
        player._apply(sink, size)
    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.upkeep.write_rewrite(begun)
    player._others("delete")
    player._apply(sink, 1)
    sink.upkeep.end_rewrite(begun)
    player.check()


def rewritten_while_runs_merge(folder: Path) -> None:
    """Each micro-batch makes a run of the key index, and so many runs are merged."""
    player = Player(Story(tuple(Operation("set", key, value=1) for key in range(KEYS)), (), tasks=1), folder)
    sink = player.opened(Clock())
    with tiny_thresholds(replace(player.story, seed=1)):
        for size in (1, 1, 1):
            player._apply(sink, size)
        begun = sink.upkeep.begin_rewrite(ALL_FILES)
        assert begun is not None
        assert sink.upkeep.write_rewrite(begun)
        for size in (1, 1, 1):
            player._apply(sink, size)
        sink.upkeep.end_rewrite(begun)
        player._drain()
    player.check()


@pytest.mark.parametrize(
    ("mistake", "play"),
    [
        (_merge_runs_across_a_pin, rewritten_while_runs_merge),
        (_copy_rows_that_others_have_deleted, copied_after_a_delete),
        (_move_rows_of_files_that_others_changed, rewritten_during_a_delete),
    ],
)
def test_a_mistake_that_chance_seldom_finds(mistake: Patch, play: Callable[[Path], None], tmp_path: Path) -> None:
    play(tmp_path / "right")
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError, match=r"(too much|missing) after"):
            play(tmp_path / "wrong")


@pytest.mark.parametrize("what", ["append again", "delete"])
def test_what_others_change_meanwhile_completes_no_row(what: Any, tmp_path: Path) -> None:
    """The commit is refused. New deletes of old rows aren't enough then: the micro-batch is written again."""
    operations = [Operation(verb, key, value=1) for verb in ("set", "update") for key in range(KEYS)]
    process = Process((KEYS, KEYS), ((("send a commit", 2), what),))
    stories = [Story(tuple(operations), (process,), seed=seed) for seed in range(1 if what == "append again" else 20)]
    assert all(failure(story, tmp_path / "story") is None for story in stories)
    with pytest.MonkeyPatch.context() as patch:
        _trust_what_completed_partial_rows(patch)
        assert is_found(stories, tmp_path / "story")


def test_files_that_can_not_be_counted_are_told_as_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who watches wants to know them, so the table goes on."""
    told: list[Event] = []
    hear = Told.__call__

    def heard(self: Told, event: Event, /) -> None:
        told.append(event)
        hear(self, event)

    def fail(_: object) -> None:
        raise ValueError("invalid literal for int()")

    monkeypatch.setattr(Told, "__call__", heard)
    monkeypatch.setattr(MemoryTable, "last_commit", fail)
    for seed in range(40):
        played(Story.random(seed), tmp_path / "story")
    known = (TableOpened, Committed, RewriteDone)
    assert {type(event) for event in told if isinstance(event, known) and event.live is None} == set(known)
    assert any(isinstance(event, RewriteDone) and event.touched for event in told)
    assert all(event.live is None for event in told if isinstance(event, known))


def test_the_setting_of_values_reaches_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player, found = Player(Story.random(1), tmp_path), list[bool]()
    config, resolved = player.config
    hidden = config.sink.model_copy(update={"show_values": False})
    player.config = config.model_copy(update={"sink": hidden}), resolved

    original = DeltaWriter.__init__

    def init(self: DeltaWriter, table: Any, options: DeltaOptions, *rest: Any, **more: Any) -> None:
        found.append(options.show_values)
        original(self, table, options, *rest, **more)

    monkeypatch.setattr(DeltaWriter, "__init__", init)
    sink = player.opened(Clock({}))
    player.play()
    assert not sink.plan.changelog.show_values
    assert found
    assert not any(found)
