"""What comes of a rewrite beside the stream if something goes wrong, and of two processes that look after a table."""

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest

from deltawriters.keyindex import CorruptIndexError, RunInfo
from deltawriters.keyindex import runs as index_runs
from sink.errors import TemporaryError
from sink.run.supervisor import Member, Turn, is_harmless
from sink.table import keyindex, rewriting, table_upkeep
from sink.table.keyindex import KeyIndex
from sink.table.microbatch import TableSink
from sink.table.minor_compaction import SmallFiles
from sink.table.patterns import ResolvedTable
from sink.table.rewriting import Chosen, RunningRewrite
from sink.targets.values import CommitUnknownError, Outcome, Refused, Unknown
from tests.memory.engine import MemoryEngine
from tests.memory.storage import Clock
from tests.memory.stories import KEYS, Operation, Player, Story, tiny_thresholds
from tests.memory.table import MemoryCommitter, MemoryUpkeep
from tests.memory.writers import MemoryTableSpec
from tests.rewrites import ALL_FILES

BATCH = 3


@pytest.fixture
def player(tmp_path: Path) -> Iterator[Player]:
    """Its source sets each key several times, in no order."""
    random = Random(1)
    story = Story(tuple(Operation("set", random.randrange(KEYS), value=value) for value in range(30)), ())
    with tiny_thresholds(story):
        yield Player(story, tmp_path)


@pytest.fixture
def sink(player: Player) -> TableSink:
    """It has applied two micro-batches."""
    opened = player.opened(Clock())
    for _ in range(2):
        apply(player, opened)
    return opened


def apply(player: Player, sink: TableSink) -> None:
    assert player._apply(sink, BATCH)


def apply_all(player: Player, sink: TableSink) -> None:
    while player._apply(sink, BATCH):
        pass


def rewrite(sink: TableSink) -> bool:
    """Whether the table's files were rewritten."""
    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    return sink.upkeep.end_rewrite(begun, written=sink.upkeep.write_rewrite(begun)) is not None


def check(player: Player, sink: TableSink) -> None:
    """Check that all is right, and that the sink goes on."""
    assert sink._open.key_index is not None
    sink.upkeep.end_merge(wait=True)
    assert not sink._open.key_index._pins
    assert not sink.upkeep._rewriting.moving
    player._check_no_orphans()
    apply(player, sink)
    assert rewrite(sink)
    player._drain()
    player.check()
    player._check_no_orphans()


def damage_index(player: Player) -> None:
    for path in (player.index / "runs").iterdir():
        path.unlink()  # who has it mapped still sees the old content
        path.write_bytes(b"damaged")
    index_runs._opened.clear()


def test_a_lost_index_is_not_built_for_nothing(
    player: Player, sink: TableSink, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler may start many runs that have nothing to do, and no commit would keep what each of them built."""
    shutil.rmtree(player.index)
    caplog.set_level(logging.INFO, "rowdelta")
    reopened = player.opened(Clock())
    assert reopened.upkeep.begin_rewrite(ALL_FILES, only=()) is None
    assert "key index built" not in caplog.text
    assert rewrite(reopened)
    assert caplog.text.count("key index built") == 1
    check(player, reopened)


def test_an_index_that_is_damaged_is_built_again(player: Player, sink: TableSink) -> None:
    """Else each rewrite would fail in the same way, for ever."""
    damage_index(player)
    assert not rewrite(sink)
    assert rewrite(sink)
    check(player, sink)


def test_files_in_which_each_index_misses_rows_are_left_alone(
    player: Player, sink: TableSink, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the index would be built again for each attempt, for ever."""
    damage_index(player)
    assert not rewrite(sink)
    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    damage_index(player)
    caplog.clear()
    assert not sink.upkeep.write_rewrite(begun)
    assert sink.upkeep.end_rewrite(begun, written=False) is None
    assert "building the key index again" not in caplog.text
    assert sink.upkeep.begin_rewrite(ALL_FILES) is None
    player._drain()
    player.check()


def test_a_minor_compaction_suspects_no_file(player: Player, sink: TableSink, caplog: pytest.LogCaptureFixture) -> None:
    """It runs in the stream's thread. What rewrites suspect is known to theirs alone."""
    upkeep = sink.upkeep

    def small_files() -> Chosen:
        chosen = upkeep._dear_files.choose(ALL_FILES, None, None, ())
        assert chosen is not None
        return replace(chosen, kind="minor compaction")

    damage_index(player)
    begun = upkeep._rewriting.begin(small_files)
    assert begun is not None
    assert not upkeep.write_rewrite(begun)
    assert upkeep.end_rewrite(begun, written=False) is None
    begun = upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    damage_index(player)
    caplog.clear()
    assert not upkeep.write_rewrite(begun)
    assert upkeep.end_rewrite(begun, written=False) is None
    assert "building the key index again" in caplog.text
    check(player, sink)


@pytest.mark.parametrize("verb", [(KeyIndex, "synchronize"), (MemoryUpkeep, "merge_candidates")])
def test_a_merge_that_can_not_begin_is_tried_again_soon(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verb: tuple[type, str],
) -> None:
    """Not only after as many commits as from one merge to the next. The log has one line of the error."""
    caplog.set_level(logging.INFO, "rowdelta")
    operations = (Operation("set", number % KEYS, value=number) for number in range(30))
    story = Story(tuple(operations), (), merges="on the driver")

    def away(*_: Any) -> None:
        raise TemporaryError("the store is away\nat its stack")

    with tiny_thresholds(story):
        player = Player(story, tmp_path)
        sink = player.opened(Clock())
        for start in (0, BATCH):
            sink.apply_batch(0, player._batch(start, start + BATCH))
        with monkeypatch.context() as patch, suppress(TemporaryError):
            patch.setattr(*verb, away)
            sink.upkeep.tend()
        assert ": merged " not in caplog.text
        assert "at its stack" not in caplog.text
        sink.upkeep.tend()
        sink.upkeep.end_merge(wait=True)
        assert ": merged " in caplog.text
        check(player, sink)


def test_merges_let_maintenance_go_first_unless_small_files_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch waits for the commit of one of them, not of both."""
    begun = list[str]()
    monkeypatch.setattr(rewriting.Rewriting, "begin", lambda *_: begun.append("merge"))
    operations = (Operation("set", number % KEYS, value=number) for number in range(30))
    story = Story(tuple(operations), (), merges="on the driver")
    with tiny_thresholds(story):
        player = Player(story, tmp_path)
        sink = player.opened(Clock())
        for start in (0, BATCH):
            sink.apply_batch(0, player._batch(start, start + BATCH))
        sink.upkeep.tend(may_wait=True)
        assert not begun
        monkeypatch.setattr(SmallFiles, "are_too_many", True)
        sink.upkeep.tend(may_wait=True)
        assert len(begun) == 1
        monkeypatch.setattr(SmallFiles, "are_too_many", False)
        sink.upkeep.tend()
        assert len(begun) == 2


def test_a_turn_knows_whether_it_is_awaited() -> None:
    turn = Turn()

    def take() -> None:
        with turn:
            pass

    with ThreadPoolExecutor(1) as pool, turn:
        seen = [turn.is_awaited]
        waiting = pool.submit(take)
        while not turn.is_awaited:
            assert not waiting.done()
            time.sleep(0.001)
        turn.pass_on()
        waiting.result(5)
        seen.append(turn.is_awaited)
    assert seen == [False, False]


def test_a_bad_file_stops_no_other_group(player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed together is tried group by group."""
    for _ in range(2):
        apply(player, sink)
    options = replace(ALL_FILES, max_file_group_size=1, max_concurrent_groups=5)
    begun = sink.upkeep.begin_rewrite(options)
    assert begun is not None
    count = len(begun.groups)
    assert count > 1
    bad, read = begun.groups[0].files[0].path, MemoryTableSpec.rows

    def rows(self: MemoryTableSpec, file: Any, **others: Any) -> Any:
        if file.path == bad:
            raise OSError("the disk has a bad sector")
        return read(self, file, **others)

    monkeypatch.setattr(MemoryTableSpec, "rows", rows)
    assert not sink.upkeep.write_rewrite(begun)
    assert sink.upkeep.end_rewrite(begun, written=False) is None
    written = list[bool]()
    for _ in range(count):
        alone = sink.upkeep.begin_rewrite(options)
        assert alone is not None
        assert len(alone.groups) == 1
        written.append(sink.upkeep.write_rewrite(alone))
        assert written[-1] == (bad not in alone.paths)
        assert (sink.upkeep.end_rewrite(alone, written=written[-1]) is not None) == written[-1]
    assert sorted(written) == [False] + [True] * (count - 1)
    monkeypatch.undo()
    player._drain()
    player.check()


def test_what_others_removed_is_known_though_the_index_has_no_run_left(sink: TableSink) -> None:
    """The state's runs may have been merged away, and others may bring the file back."""
    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    index = sink._open.key_index
    assert index is not None
    version = index._with_files(replace(index._synchronized(), runs=()), [], {"removed"})
    assert version.dead["removed"] > begun.pin.sequence
    sink.upkeep.end_rewrite(begun, written=False)


def test_an_error_before_the_commit(player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the new files are deleted, and the index's state isn't held any longer."""
    with monkeypatch.context() as patch:
        patch.setattr(MemoryUpkeep, "handles", raising)
        with pytest.raises(ValueError, match="unexpected"):
            rewrite(sink)
    check(player, sink)


def raising(*_: Any) -> None:
    raise ValueError("unexpected")


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_error_that_says_nothing_of_the_commit(
    player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """Such as a connection to the JVM that breaks. The new files stay, since the table may have them."""
    send = MemoryCommitter.rewrite

    def lose_answer(self: MemoryCommitter, request: Any) -> None:
        if is_committed:
            send(self, request)
        raise ValueError("unexpected")

    files = set(player.store.contents)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryCommitter, "rewrite", lose_answer)
        with pytest.raises(ValueError, match="unexpected"):
            rewrite(sink)
    left = set(player.store.contents) - files
    assert left
    if not is_committed:
        for path in left:
            del player.store.contents[path]
    check(player, sink)


def test_a_second_process_looks_after_the_table_of_a_running_sink(
    player: Player, sink: TableSink, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as `rowdelta maintain`. It deletes nothing of the key index that the sink needs, which is at work on a
    micro-batch.
    """
    caplog.set_level(logging.INFO, "rowdelta")
    rewritten = []
    for number in range(2, 6):
        batch = player._batch(number * BATCH, (number + 1) * BATCH)
        written = sink.prepare_batch(batch)
        guest = player.opened(Clock(), is_guest=True)
        rewritten.append(0)
        while (begun := guest.upkeep.begin_rewrite(replace(ALL_FILES, max_file_group_size=1))) is not None:
            assert guest.upkeep.end_rewrite(begun, written=guest.upkeep.write_rewrite(begun)) is not None
            rewritten[-1] += 1
        sink.commit(0, batch, written)
    assert max(rewritten) > 1
    apply(player, sink)
    check(player, sink)
    built = [record.getMessage() for record in caplog.records if "key index" in record.getMessage()]
    assert not built


@pytest.mark.parametrize("is_guest", [False, True])
def test_a_second_process_merges_no_runs(
    player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch, is_guest: bool
) -> None:
    """Such as `rowdelta reconcile`. The sink at work doesn't wait long for it, and has a merge of its own."""
    apply(player, sink)
    monkeypatch.setattr(keyindex, "_MERGED_BY_TASKS", 1000)
    monkeypatch.setattr(keyindex, "plan_merge", lambda runs: tuple(run.name for run in runs))
    index = player.opened(Clock(), is_guest=is_guest)._open.key_index
    assert index is not None
    index.synchronize(sink._open.stored)
    assert bool(index.slice().merge) is not is_guest


def test_merged_runs_stay_until_a_micro_batch_takes_them_in(
    player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be long after: no look for orphans takes them for some."""
    monkeypatch.setattr(KeyIndex, "_is_merged_beside", lambda *_: True)
    monkeypatch.setattr(keyindex, "plan_merge", lambda runs: tuple(run.name for run in runs))
    apply(player, sink)
    index = sink._open.key_index
    assert index is not None
    merge = index._merging._merge
    assert merge is not None
    assert merge.written.result()
    for _ in range(2):
        sink.upkeep.note_cleaning()
    apply(player, sink)
    assert any(run.name.startswith(merge.name) for run in index.slice().runs)
    assert {run.name for run in index.slice().runs} <= {path.name for path in (player.index / "runs").iterdir()}
    check(player, sink)


def test_what_a_second_process_left_in_the_folder_of_the_index_goes(player: Player, sink: TableSink) -> None:
    """The sink may run for months beside a nightly `rowdelta maintain`. What is new may be in use."""
    guest = player.opened(Clock(), is_guest=True)
    assert rewrite(guest)
    apply(player, sink)
    folder = player.index / "runs"
    before = set(folder.iterdir())
    sink.upkeep.note_cleaning()
    (folder / "new").touch()
    assert set(folder.iterdir()) == before | {folder / "new"}
    sink.upkeep.note_cleaning()
    left = set(folder.iterdir())
    assert folder / "new" in left
    assert left < before | {folder / "new"}
    assert sink._open.key_index is not None
    assert {path.name for path in left} - {"new"} == {run.name for run in sink._open.key_index.slice().runs}
    check(player, sink)


@pytest.fixture
def long_player(tmp_path: Path) -> Iterator[Player]:
    """Its source sets and deletes each key many times."""
    random = Random(2)
    kinds: list[Literal["set", "delete"]] = ["set", "set", "delete"]
    operations = (Operation(random.choice(kinds), random.randrange(KEYS), value=value) for value in range(200))
    story = Story(tuple(operations), ())
    with tiny_thresholds(story):
        yield Player(story, tmp_path)


def runs(sink: TableSink) -> int:
    """Of the key index."""
    assert sink._open.key_index is not None
    return len(sink._open.key_index.slice().runs)


def test_runs_are_merged_though_rewrites_follow_one_another(long_player: Player) -> None:
    sink = long_player.opened(Clock())
    apply(long_player, sink)
    most = 0
    for _ in range(40):
        begun = sink.upkeep.begin_rewrite(ALL_FILES)
        if begun is None:
            apply(long_player, sink)
            continue
        written = sink.upkeep.write_rewrite(begun)
        assert written
        apply(long_player, sink)
        assert sink.upkeep.end_rewrite(begun, written=written) is not None
        most = max(most, runs(sink))
    assert most < 30, "each micro-batch and each rewrite writes a run or two"
    long_player._drain()
    long_player.check()
    long_player._check_no_orphans()


def test_runs_are_merged_though_each_process_ends_soon(long_player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that a scheduler starts for each micro-batch. It doesn't wait for a merge beside it."""
    monkeypatch.setattr(keyindex, "_MERGED_BY_TASKS", 0)
    monkeypatch.setattr(keyindex, "_MOST_AGES", 8)
    monkeypatch.setattr(long_player, "_beside", Beside(is_ready=False))
    most = 0
    for _ in range(30):
        sink = long_player.opened(Clock())
        apply(long_player, sink)
        sink.upkeep.abandon_merge()
        most = max(most, runs(sink))
    assert most < 12
    long_player._drain()
    long_player.check()


def merging_beside(player: Player, monkeypatch: pytest.MonkeyPatch, *, micro_batches: int, is_ready: bool) -> TableSink:
    """A table that has applied micro-batches, and merges any runs of its key index beside them."""
    monkeypatch.setattr(keyindex, "_MERGED_BY_TASKS", 0)
    monkeypatch.setattr(keyindex, "_MOST_AGES", 48)
    monkeypatch.setattr(player, "_beside", Beside(is_ready=is_ready))
    sink = player.opened(Clock())
    for _ in range(micro_batches):
        apply(player, sink)
    return sink


def test_a_merge_of_runs_that_fails_leaves_no_file(long_player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again after each micro-batch. If the disk is full, each attempt would take more of it."""
    merge = MemoryEngine.merge_runs

    def fail(self: MemoryEngine, *args: Any) -> list[RunInfo]:
        assert merge(self, *args)
        raise OSError("no space left on device")

    monkeypatch.setattr(MemoryEngine, "merge_runs", fail)
    sink = merging_beside(long_player, monkeypatch, micro_batches=12, is_ready=True)
    assert sink._open.key_index is not None
    named = {run.name for run in sink._open.key_index.slice().runs}
    assert {path.name for path in (long_player.index / "runs").iterdir()} == named


@pytest.mark.parametrize("by", ["another process's object", "an altered table"])
def test_what_a_merge_of_runs_writes_for_nobody_is_deleted(
    long_player: Player, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A process may go on for months after a table was opened again."""
    sink = merging_beside(long_player, monkeypatch, micro_batches=8, is_ready=False)
    before = sink._open.key_index
    assert before is not None
    merge = before._merging._merge
    assert merge is not None
    if by == "an altered table":
        long_player._alter()
    else:
        sink.upkeep.abandon_merge()
        sink = long_player.opened(Clock())
    apply(long_player, sink)
    assert sink._open.key_index is not None
    assert sink._open.key_index is not before
    index_runs._opened.clear()
    with suppress(OSError, CorruptIndexError):  # its runs may be gone
        merge.written.result()
    named = {run.name for run in sink._open.key_index.slice().runs}
    assert {path.name for path in (long_player.index / "runs").iterdir()} == named


def test_a_look_at_the_last_commit_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges of all tables wait in the same queue."""
    story = Story(tuple(Operation("set", number % KEYS) for number in range(30)), (), merges="on the driver")
    beside, begun = MemoryEngine.beside, list[object]()

    def noted(self: MemoryEngine, work: Any) -> Any:
        begun.append(work)
        return beside(self, work)

    with tiny_thresholds(story):
        monkeypatch.setattr(MemoryEngine, "beside", noted)
        monkeypatch.setattr(keyindex, "_MERGED_BY_TASKS", 1000)
        player = Player(story, tmp_path)
        monkeypatch.setattr(player, "_beside", Beside(is_ready=False))
        sink = player.opened(Clock())
        for _ in range(7):
            apply(player, sink)
        assert len(begun) == 2, "a look at the last commit, and a merge of small files"
        player._drain()
        player.check()


class Beside(Random):
    """Tells whether work beside micro-batches is ready when somebody looks."""

    def __init__(self, *, is_ready: bool) -> None:
        super().__init__()
        self._is_ready = is_ready

    def random(self) -> float:
        return 0.0 if self._is_ready else 1.0


def one_row_each(folder: Path, *later: Operation) -> tuple[Player, TableSink]:
    """A table with a file for each key, whose source says more then."""
    player = Player(Story((*(Operation("set", key, value=1) for key in range(KEYS)), *later), ()), folder)
    sink = player.opened(Clock())
    for _ in range(KEYS):
        player._apply(sink, 1)
    return player, sink


def begin(sink: TableSink, merged: str, monkeypatch: pytest.MonkeyPatch) -> RunningRewrite:
    """Move all rows. From now on each micro-batch merges these runs of the key index."""
    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert len(begun.groups[0].files) > 1
    assert sink.upkeep.write_rewrite(begun)
    pinned_at = begun.pin.sequence

    def plan(runs: Sequence[RunInfo]) -> tuple[str, ...]:
        return tuple(run.name for run in runs if (run.sequence <= pinned_at) is (merged == "of the state"))

    monkeypatch.setattr(keyindex, "plan_merge", plan)
    assert sink._open.key_index is not None
    sink._open.key_index._dead_until_looked = 0
    return begun


@pytest.mark.parametrize("merged", ["of the state", "later ones"])
def test_a_row_that_is_deleted_meanwhile_though_runs_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: str
) -> None:
    later = (Operation("set", KEYS - 1, value=value) for value in range(5))
    player, sink = one_row_each(tmp_path, Operation("delete", 1), *later)
    begun = begin(sink, merged, monkeypatch)
    for _ in range(5):
        player._apply(sink, 1)
    assert sink.upkeep.end_rewrite(begun) is not None
    player._drain()
    player.check()
    player._check_no_orphans()


@pytest.mark.parametrize("merged", ["of the state", "later ones"])
def test_a_rewrite_gives_way_to_others_though_runs_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: str
) -> None:
    """It has moved a row that they delete."""
    player, sink = one_row_each(tmp_path, *(Operation("set", KEYS - 1, value=value) for value in range(8)))
    begun = begin(sink, merged, monkeypatch)
    player._rewrite("overwrite", lambda row: row[0] == 0, lambda row: None)
    for _ in range(7):
        player._apply(sink, 1)
    assert sink.upkeep.end_rewrite(begun) is None
    player._drain()
    player.check()
    player._check_no_orphans()


def test_a_rewrite_gives_way_to_a_truncate(tmp_path: Path) -> None:
    player, sink = one_row_each(tmp_path, Operation("truncate", 0), *(Operation("set", key) for key in range(KEYS)))
    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.upkeep.write_rewrite(begun)
    for _ in range(3):
        player._apply(sink, 2)
    assert sink.upkeep.end_rewrite(begun) is None
    player._drain()
    player.check()
    player._check_no_orphans()


def test_a_rewrite_is_sent_again_if_others_commit_at_the_same_moment(
    player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would hardly ever be committed beside a writer who commits each second. Its rows needn't move again."""
    send, refused = MemoryCommitter.rewrite, list[None]()

    def rewrite_late(self: MemoryCommitter, request: Any) -> Outcome:
        if len(refused) < 2:
            refused.append(None)
            player._append()
            player._delete()
            return Refused("others committed", again="send")
        return send(self, request)

    begun = sink.upkeep.begin_rewrite(ALL_FILES)
    assert begun is not None
    assert sink.upkeep.write_rewrite(begun)
    apply(player, sink)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryCommitter, "rewrite", rewrite_late)
        patch.setattr(player.random, "randrange", lambda *_: 100)  # they delete no row
        assert sink.upkeep.end_rewrite(begun) is not None
    assert len(refused) == 2
    check(player, sink)


def test_files_whose_rewrite_gave_way_leave_the_budget_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may delete from a file again and again, each time before it is rewritten."""
    new = (Operation("set", key, value=key) for key in range(2 * BATCH))
    player = Player(Story((*new, Operation("delete", 0), Operation("delete", BATCH)), ()), tmp_path)
    sink = player.opened(Clock())
    apply_all(player, sink)
    options = replace(ALL_FILES, max_file_group_size=1)
    begun = sink.upkeep.begin_rewrite(options)
    assert begun is not None
    assert sink.upkeep.write_rewrite(begun)
    [path] = begun.paths
    with monkeypatch.context() as patch:
        patch.setattr(player.random, "randrange", lambda _: player._live_rows(player.store.live[path])[0][3])
        player._delete()
    assert sink.upkeep.end_rewrite(begun) is None
    rewritten = set[str]()
    while (following := sink.upkeep.begin_rewrite(options)) is not None:
        rewritten |= following.paths
        assert sink.upkeep.end_rewrite(following, written=sink.upkeep.write_rewrite(following)) is not None
    assert rewritten
    assert path not in rewritten
    player._drain()
    player.check()


def test_the_stream_goes_on_though_a_merge_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stuck, or waits itself for merges of other tables."""
    story = Story(tuple(Operation("set", n % KEYS, value=n) for n in range(60)), (), merges="on the driver")
    with tiny_thresholds(story):
        monkeypatch.setattr(table_upkeep, "_MOST_WAITED", 0.01)
        monkeypatch.setattr(SmallFiles, "are_too_many", True)
        monkeypatch.setattr(MemoryEngine, "beside", lambda *_, **__: Future[Any]())
        player = Player(story, tmp_path)
        sink = player.opened(Clock())
        for _ in range(20):
            apply(player, sink)
        assert sink.upkeep._merge is not None
        sink.upkeep.abandon_merge()
        player.check()


def test_a_merge_of_unknown_outcome_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the same rows either way, so a job of one table isn't ended by it."""
    story = Story(tuple(Operation("set", n % KEYS, value=n) for n in range(60)), (), merges="on the driver")
    with tiny_thresholds(story):
        player = Player(story, tmp_path)
        monkeypatch.setattr(MemoryCommitter, "rewrite", lambda *_: Unknown("no answer"))
        sink = player.opened(Clock())
        with pytest.raises(CommitUnknownError) as raised:
            apply_all(player, sink)
        assert is_harmless(raised.value)


def test_a_table_that_is_not_open_any_more_leaves_no_file_of_a_merge(tmp_path: Path) -> None:
    """Its topic has gone, say, or somebody else has the table now."""
    story = Story(tuple(Operation("set", n % KEYS, value=n) for n in range(30)), (), merges="on the driver")
    with tiny_thresholds(story):
        player = Player(story, tmp_path)
        sink = player.opened(Clock())
        while sink.upkeep._merge is None:
            apply(player, sink)
        assert sink.upkeep._merge[1].result(), "it is written"
        member = Member(ResolvedTable.__new__(ResolvedTable), sink=sink)
        member.leave()
        assert member.sink is None
        player._check_no_orphans()


def test_nothing_is_told_of_a_merge_that_the_end_of_a_run_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run's own words are the last ones."""
    story = Story(tuple(Operation("set", n % KEYS, value=n) for n in range(30)), (), merges="on the driver")
    with tiny_thresholds(story):
        player = Player(story, tmp_path)
        monkeypatch.setattr(player._beside, "random", lambda: 1.0)  # nothing is done before somebody waits for it
        sink = player.opened(Clock())
        while sink.upkeep._merge is None:
            apply(player, sink)
        written = sink.upkeep._merge[1]
        sink.upkeep.abandon_merge()
        monkeypatch.setattr(rewriting, "move_rows", MagicMock(side_effect=RuntimeError("Job 7 cancelled")))
        caplog.clear()
        caplog.set_level(logging.INFO, "rowdelta")
        assert not written.result()
        assert not caplog.text
