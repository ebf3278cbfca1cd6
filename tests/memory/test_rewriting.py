"""What comes of a rewrite beside the stream if something goes wrong, and of two processes that look after a table."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deltawriters.keyindex import runs as index_runs
from sink.run.microbatch import TableSink
from tests.memory.storage import Clock
from tests.memory.stories import KEYS, Operation, Player, Story, tiny_thresholds
from tests.memory.table import MemoryCommitter, MemoryTable
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


def rewrite(sink: TableSink) -> bool:
    """Whether the table's files were rewritten."""
    begun = sink.begin_rewrite(ALL_FILES)
    assert begun is not None
    return sink.end_rewrite(begun, written=sink.write_rewrite(begun)) is not None


def check(player: Player, sink: TableSink) -> None:
    """Check that all is right, and that the sink goes on."""
    assert sink._key_index is not None
    assert sink._key_index._pin is None
    assert not sink._rewriting.moving
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


def test_an_index_that_is_damaged_is_built_again(player: Player, sink: TableSink) -> None:
    """Else each rewrite would fail in the same way, for ever."""
    damage_index(player)
    assert not rewrite(sink)
    assert rewrite(sink)
    check(player, sink)


def test_an_error_before_the_commit(player: Player, sink: TableSink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the new files are deleted, and the index's state isn't held any longer."""
    with monkeypatch.context() as patch:
        patch.setattr(MemoryTable, "handles", raising)
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
        pending = sink.prepare_batch(0, player._batch(number * BATCH, (number + 1) * BATCH))
        guest = player.opened(Clock(), is_guest=True)
        rewritten.append(0)
        while (begun := guest.begin_rewrite(replace(ALL_FILES, max_file_group_size=1))) is not None:
            assert guest.end_rewrite(begun, written=guest.write_rewrite(begun)) is not None
            rewritten[-1] += 1
        sink.commit(pending)
    assert max(rewritten) > 1
    apply(player, sink)
    check(player, sink)
    built = [record.getMessage() for record in caplog.records if "key index" in record.getMessage()]
    assert not built
