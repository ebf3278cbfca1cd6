"""After a load, and the changes that came meanwhile, the table is what the source is, whatever happens to the sink."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import Any, cast

import pytest

from deltawriters.partial import Completed
from sink.config import Config
from sink.databases import connector, reading
from sink.databases.connector import KafkaConnector
from sink.databases.reading import Delivered, Newest
from sink.errors import ConfigError, RowdeltaError, TemporaryError
from sink.run.loading import Loads
from sink.sources.kafka import KafkaSource
from sink.spark import session
from sink.table import loading
from sink.table.load_state import Load
from sink.table.loading import Loading
from sink.table.patterns import ResolvedTable
from tests.memory import loading as stories_of_loads
from tests.memory.hunting import PARTS, STORIES, hunt, is_found
from tests.memory.loading import LoadPlayer, _Table, load_story
from tests.memory.storage import Clock
from tests.memory.stories import PREFIX, Story


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(loading, "_LOOK_SECONDS", 0.0)


@pytest.mark.timeout(60 + STORIES)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_loaded_table_is_what_the_source_is(tmp_path: Path, part: int) -> None:
    hunt(load_story, part, STORIES // 3, tmp_path / "story", LoadPlayer)


def _note_too_late_where_the_topic_ends(patch: pytest.MonkeyPatch) -> None:
    real = Loading._divided

    def too_late(self: Any, load: Load) -> Load:
        end = min(load.begin["0"] + 1, len(self._source._player.messages))
        return real(self, replace(load, begin={"0": end}))

    patch.setattr(Loading, "_divided", too_late)


def _note_where_the_topic_ends_before_the_connector_has_caught_up(patch: pytest.MonkeyPatch) -> None:
    real = Loading._begin

    def begin(self: Any) -> Load | None:
        end, later = self._ends(), self._ends
        self._ends = lambda: end
        load = real(self)
        self._ends = later
        return load

    patch.setattr(Loading, "_begin", begin)


def _wait_for_nobody_who_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loading, "_outlast_writers", lambda self: True)


def _note_files_after_the_topics_end(patch: pytest.MonkeyPatch) -> None:
    real = Loading._divided

    def divided(self: Any, load: Load) -> Load:
        return real(self, replace(load, files=self._source.files()))

    patch.setattr(Loading, "_divided", divided)


def _leave_a_part_out(patch: pytest.MonkeyPatch) -> None:
    real = Loading._take_in

    def take_in(self: Loading, load: Any, parts: Sequence[str], done: int) -> None:
        real(self, load, parts[1:] if len(parts) > 1 else parts, done)

    patch.setattr(Loading, "_take_in", take_in)


def _refuse_updates_of_rows_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Completed, "without_absent", lambda self, before: (self, 0))


@pytest.mark.parametrize(
    "mistake",
    [
        _note_too_late_where_the_topic_ends,
        _note_where_the_topic_ends_before_the_connector_has_caught_up,
        _wait_for_nobody_who_writes,
        _note_files_after_the_topics_end,
        _leave_a_part_out,
        _refuse_updates_of_rows_that_are_gone,
    ],
)
def test_stories_of_loads_find_a_mistake(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert is_found(map(load_story, range(300)), tmp_path / "story", LoadPlayer)


def test_rows_of_a_load_are_older_than_changes_that_it_may_lack(tmp_path: Path) -> None:
    """Whatever the database's clock says, up to some minutes."""
    player = LoadPlayer(Story((), ()), tmp_path)
    sink = player.opened(Clock())
    assert sink.load is not None
    load, _ = sink.load
    before = (time.time() - 599) * 1000
    assert {name: value < before * (1000 if name.endswith("us") else 1) for name, value in load.order.items()} == (
        dict.fromkeys(("source.ts_ms", "ts_ms", "source.ts_us"), True)
    )


def test_another_run_that_began_anew_is_not_told_that_all_parts_are_there(tmp_path: Path) -> None:
    player = LoadPlayer(Story((), ()), tmp_path)
    sink = player.opened(Clock())
    assert sink.load is not None
    player.store.add({}, "append", {"prefix": PREFIX, "operation": "another", "position": {"0": 0}, "state": {}})
    with pytest.raises(RowdeltaError):
        sink.end_load(sink.load[0])


def test_a_table_that_gets_a_second_topic_after_its_load_goes_on(tmp_path: Path) -> None:
    player = LoadPlayer(Story((), ()), tmp_path)
    sink = player.opened(Clock())
    assert sink.load is not None
    sink.end_load(replace(sink.load[0], until={"topic-0": 7}))
    assert sink._caught_up_at == {}


def test_who_is_waited_for_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Nothing is loaded meanwhile. Nobody is waited for who has come later."""
    monkeypatch.setattr(loading, "_FIRST_NOTICE", 0.0)
    monkeypatch.setattr(loading, "_NOTICE_SECONDS", 0.0)
    answers = iter([{"1": "pid 7", "2": "pid 8"}, {"2": "pid 8"}, {"2": "pid 8", "3": "pid 9"}, {"3": "pid 9"}])
    monkeypatch.setattr(_Table, "writers", lambda _: next(answers))
    player = LoadPlayer(Story((), ()), tmp_path)
    sink = player.opened(Clock())
    told = [record.getMessage().partition("the source: ")[2] for record in caplog.records]
    assert [text for text in told if text] == ["pid 7; pid 8", "pid 8", "pid 8"]
    assert sink.load is not None

    monkeypatch.setattr(_Table, "writers", lambda _: {"1": "pid 7"})
    player = LoadPlayer(Story((), ()), tmp_path / "stopped")
    monkeypatch.setattr(stories_of_loads, "is_due", lambda sink, auto: False)
    sink, table = player.opened(Clock()), cast(Any, _Table(player, Clock()))
    assert not Loading(sink, table, table, table.ends, 1, 1, Lock(), lambda: True).run()
    assert sink.load is None


def test_a_load_that_waits_lets_others_and_one_reads_at_a_time(tmp_path: Path, monkeypatch: Any) -> None:
    """Until then nobody else may even note where the topic ends, since a long load may come before it."""
    monkeypatch.setattr(stories_of_loads, "is_due", lambda sink, auto: False)
    turn, told = Lock(), list[str]()

    class Table(_Table):
        def __init__(self, folder: str, writers: Callable[[], Mapping[str, str]]) -> None:
            player = LoadPlayer(Story((), ()), tmp_path / folder)
            super().__init__(player, Clock())
            self.name, self._look = folder, writers
            self._sink = player.opened(Clock())

        def load(self) -> bool:
            table: Any = self
            return Loading(self._sink, table, table, table.ends, 1, 1, turn).run()

        def writers(self) -> Mapping[str, str]:
            return self._look()

        def ends(self) -> Mapping[str, int]:
            told.append(f"{self.name} notes the end")
            return super().ends()

        def read(self, parts: Sequence[str]) -> Any:
            told.append(f"{self.name} reads")
            assert turn.locked()
            return super().read(parts)

    over = list[bool]()
    waiting = Table("waiting", lambda: {} if over else {"1": "pid 7"})
    other = Table("other", dict)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(waiting.load)
        while not (told or begun.done()):
            time.sleep(0.01)
        try:
            assert other.load()
        finally:
            over.append(True)
        assert begun.result(60)
    ends, reads = "{} notes the end", "{} reads"
    assert told == [
        ends.format("waiting"),
        *(text.format("other") for text in (ends, *[reads] * 3, ends)),
        *(text.format("waiting") for text in (*[reads] * 3, ends)),
    ]


def test_a_column_that_comes_while_a_load_begins_is_not_left_out(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(_Table, "is_as_opened", lambda _: False)
    with pytest.raises(TemporaryError, match=r"the source was altered while its load began\. Run again"):
        LoadPlayer(Story((), ()), tmp_path).opened(Clock())


def _kafka_connector(states: Iterable[Delivered], *, is_altered: bool) -> KafkaConnector:
    """:param states: what the database tells of it, one after the other."""
    answers = iter(states)

    class Database:
        name = "the source"

        def note_log_position(self) -> None: ...

        def is_altered(self) -> bool:
            return is_altered

        def delivered(self, newest: Newest) -> tuple[Delivered, str]:
            return next(answers), "no connector reads from the database"

    database: Any = Database()
    return KafkaConnector(database, lambda: lambda fields: [], is_named=False)


def test_a_topic_that_nobody_writes_does_not_have_all_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_SETTLE", 0.0)
    monkeypatch.setattr(connector, "_TIMEOUT", 1.0)
    with pytest.raises(TemporaryError, match="doesn't get on: no connector reads from the database"):
        _kafka_connector(repeat(Delivered.UNKNOWN), is_altered=False).wait(lambda: False)


def test_the_connector_of_a_table_that_was_emptied_lately_has_to_confirm_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it does so in bounded time, and only when the load begins."""
    monkeypatch.setattr(connector, "_SETTLE", 0.0)
    monkeypatch.setattr(reading, "_POLL_SECONDS", 0.0)
    got, confirmed = Delivered.TO_CONNECTOR, Delivered.YES
    for is_altered, looks in ((False, 1), (True, 4)):
        states = iter([got, got, got, confirmed, got, got, got])
        waiting = _kafka_connector(states, is_altered=is_altered)
        assert waiting.wait(lambda: False)
        assert len(list(states)) == 7 - looks
    states = iter([confirmed, got, got, got])
    waiting = _kafka_connector(states, is_altered=True)
    assert waiting.wait(lambda: False)
    assert waiting.wait(lambda: False)
    assert len(list(states)) == 2
    monkeypatch.setattr(connector, "_CONFIRMED", 0.1)
    assert _kafka_connector(repeat(got), is_altered=True).wait(lambda: False)


def test_a_table_with_all_it_needs_asks_no_database() -> None:
    """With `load.auto`, one of several topics may go on from its position, though it can't be loaded."""
    config = Config.model_validate(
        {
            "sink": {"id": "s", "checkpoint": "/nowhere"},
            "source": {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "nowhere:1"},
                       "database": {"url": "jdbc:postgresql://nowhere/db"}},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "/nowhere"}},
            "tables": [{"source": ["a.public.t", "b.public.t"], "target": "lake.n.t", "key": ["id"], "shard": "none",
                        "order_by": ["source.ts_ms"]}],
        }
    )  # fmt: skip
    spark: Any = None
    assert config.source.database is not None
    loads = Loads(spark, config, object.__new__(KafkaSource), config.source.database, lambda: False)
    sample = loads.sample(ResolvedTable(config.tables[0], "tables[0]"))
    with pytest.raises(ConfigError, match="takes several topics"):
        sample.columns()


def test_a_run_that_loads_brings_the_databases_driver() -> None:
    values = {
        "sink": {"id": "s", "checkpoint": "/nowhere"},
        "source": {"type": "kafka", "format": "debezium-json", "options": {"kafka.bootstrap.servers": "nowhere:1"},
                   "database": {"url": "jdbc:postgresql://nowhere/db"}},
        "catalogs": {"lake": {"type": "hadoop", "warehouse": "/nowhere"}},
        "tables": [{"source": "a.public.t", "target": "lake.n.t"}],
    }  # fmt: skip
    for load in ({"auto": True}, {}):
        found = session.packages(Config.model_validate(values | {"load": load}))
        assert any(name.startswith("org.postgresql:postgresql:") for name in found) == bool(load)
