"""What a load wants of the engine's connector before it begins, of a real Postgres: without Spark or the engine."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from sink.config import Config
from sink.databases import own_connector
from sink.databases.captured import captured_topics
from sink.databases.own_connector import OwnConnector
from sink.databases.slots import shown_slots, slots_of
from sink.errors import ConfigError, TemporaryError
from sink.sources.source import Slot
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import wait_until


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        server.execute(
            "CREATE SCHEMA more;\n"
            'CREATE TABLE public.orders (id int PRIMARY KEY); CREATE TABLE public."Order Lines" (id int PRIMARY KEY);\n'
            "CREATE TABLE more.orders (id int PRIMARY KEY); CREATE VIEW more.seen AS SELECT 1;\n"
            "CREATE TABLE public.days (day date PRIMARY KEY) PARTITION BY RANGE (day);\n"
            "CREATE TABLE public.days_1 PARTITION OF public.days FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')"
        )
        yield server


NO_SPARK: Any = None
"""Postgres is asked without it."""


class Engine:
    """Counts what it is asked for."""

    def __init__(self, restarted: Callable[[], None] = lambda: None) -> None:
        self.asked = list[str]()
        self._restarted = restarted

    def restart(self) -> None:
        self.asked.append("restart")
        self._restarted()

    def catch_up(self, stopping: Callable[[], bool]) -> bool:
        self.asked.append("catch up")
        return not stopping()


def config(postgres: Postgres, **properties: str) -> Config:
    connector = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": postgres.host,
        "database.port": str(postgres.port),
        "database.user": postgres.user,
        "database.password": postgres.password,
        "database.dbname": postgres.database,
        "topic.prefix": "s",
        **properties,
    }
    return Config.model_validate(
        {
            "sink": {"id": "s", "checkpoint": "/nowhere"},
            "source": {"type": "debezium", "connector": connector, "buffer": "/nowhere/buffer"},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": "/elsewhere"}},
            "tables": [{"source": "s.public.orders", "target": "lake.s.orders"}],
        }
    )


def connector(
    of: Config,
    engine: Engine,
    table: str = "public.orders",
    remembered: set[str] | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> OwnConnector:
    taken: Any = engine
    assert of.source.database is not None
    known = set() if remembered is None else remembered
    return OwnConnector(NO_SPARK, taken, of, of.source.database, of.tables[0], table, known, stopping)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, {"s.public.orders", "s.public.Order_Lines", "s.more.orders", "s.public.days_1"}),
        ({"table.include.list": r"public\.orders, PUBLIC\.days.*"}, {"s.public.orders", "s.public.days_1"}),
        ({"schema.exclude.list": "public"}, {"s.more.orders"}),
        (
            {
                "schema.include.list": "pub.ic",
                "table.exclude.list": r".*\.Order.*",
                "publish.via.partition.root": "true",
            },
            {"s.public.days"},
        ),
        ({"transforms": "route"}, None),
    ],
)
def test_the_connectors_own_lists_say_which_tables_it_takes(
    postgres: Postgres, properties: dict[str, str], expected: set[str] | None
) -> None:
    assert captured_topics(NO_SPARK, config(postgres, **properties)) == expected


def test_a_table_whose_changes_would_not_come_is_not_loaded(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_connector, "_REMEMBERS_SINCE", {})
    with pytest.raises(ConfigError, match=r"no table whose topic is s\.public\.orders, so that changes of public\.ord"):
        connector(config(postgres, **{"table.include.list": "more.*"}), Engine()).check()
    of, engine = config(postgres, **{"publication.name": "mine"}), Engine()
    postgres.execute("CREATE PUBLICATION mine FOR TABLE more.orders")
    with pytest.raises(ConfigError, match=r"the publication mine doesn't have public\.orders"):
        connector(of, engine).check()
    assert engine.asked == ["restart", "catch up"]
    engine = Engine(lambda: postgres.execute("ALTER PUBLICATION mine ADD TABLE public.orders"))
    connector(of, engine).check()
    connector(of, engine).check()
    assert engine.asked == ["restart", "catch up"], "once it has the table, nothing is needed"
    postgres.execute("DROP PUBLICATION mine")


def test_a_server_that_forgets_a_publications_new_tables_is_read_anew_when_older_transactions_have_ended(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_connector, "_REMEMBERS_SINCE", dict.fromkeys(range(14, 99), 9_999))
    monkeypatch.setattr(own_connector, "_PATIENT_LOOKS", 0)
    postgres.execute("CREATE PUBLICATION mine FOR TABLE public.orders, more.orders")
    of, engine, remembered = config(postgres, **{"publication.name": "mine"}), Engine(), set[str]()
    with ThreadPoolExecutor(1) as pool, psycopg.connect(postgres.url) as writer:
        writer.execute("INSERT INTO public.orders VALUES (1)")
        checked = pool.submit(connector(of, engine, remembered=remembered).check)
        assert wait_until(lambda: "may forget that a publication has got a table" in caplog.text or checked.done())
        assert engine.asked == []
        with pytest.raises(TemporaryError, match="stopped before its load began"):
            connector(of, engine, stopping=lambda: True).check()
        writer.commit()
        checked.result(60)
    assert engine.asked == ["catch up", "catch up", "restart", "catch up"]
    connector(of, engine, "more.orders", remembered).check()
    assert len(engine.asked) == 4, "that was for all tables that the publication has"
    postgres.execute("DROP PUBLICATION mine")


def test_slots_that_nobody_reads_are_named_with_what_the_database_keeps(postgres: Postgres) -> None:
    postgres.execute(
        "SELECT pg_create_logical_replication_slot('left_over', 'pgoutput');\n"
        "SELECT pg_create_physical_replication_slot('a_replica', true);\n"
        "INSERT INTO public.orders SELECT generate_series(10001, 11000)"
    )
    try:
        of = config(postgres)
        replicas, slot = slots_of(of)
        assert (replicas.name, replicas.is_active, replicas.state) == ("a_replica", False, "reserved")
        assert (replicas.retained or 0) > 50_000
        assert (slot.name, slot.is_active, slot.state, slot.idle_since) == ("left_over", False, "reserved", None)
        assert (slot.retained or 0) >= (slot.unread or 0) > 50_000
        assert [line.partition(":")[0] for line in shown_slots(of, [slot])] == ["slot left_over", "slot debezium"]
    finally:
        postgres.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        (
            Slot("s", False, 5_200_000_000, 1, "extended", "2026-11-29T22:00:00"),
            "it since 2026-11-29 22:00:00 UTC.* 5.2 GB",
        ),
        (Slot("s", True, 5_000, 12, "unreserved", None), "12 bytes to read, .* 5.0 kB .* about to remove"),
        (Slot("s", False, None, None, "lost", None), r"has removed the log .* pg_drop_replication_slot\('s'\)"),
    ],
)
def test_what_is_said_of_a_slot(postgres: Postgres, slot: Slot, words: str) -> None:
    (line,) = shown_slots(config(postgres, **{"slot.name": "s"}), [slot])
    assert re.search(words, line), line
