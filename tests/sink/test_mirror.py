"""One command mirrors a database of a real Postgres: tables are loaded, then followed by Debezium's own engine, whoever
is killed meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from sink.commands.load import Load
from sink.config import Config
from sink.errors import ConfigError, TableError
from tests.sink.test_debezium_source import Shop
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import wait_until
from tests.stack.sink_process import SinkProcess, written

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


class Mirror(Shop):
    """A schema of Postgres whose tables are all loaded: `things` is large, and nobody writes into `quiet`."""

    def __init__(self, spark: SparkSession, folder: Path, postgres: Postgres) -> None:
        super().__init__(spark, folder, postgres)
        postgres.execute(
            f"DROP TABLE {self.name}.events;\n"
            f"INSERT INTO {self.name}.things SELECT n, 'name ' || n, n / 7.0 FROM generate_series(1, 12000) n;\n"
            f"ANALYZE {self.name}.things;\n"
            f"CREATE TABLE {self.name}.quiet AS SELECT n AS id, 'q' AS what FROM generate_series(1, 10) n;\n"
            f"ALTER TABLE {self.name}.quiet ADD PRIMARY KEY (id)"
        )

    def values(self, trigger: str) -> dict[str, Any]:
        return super().values(trigger) | {
            "load": {"auto": True, "connections": 1, "part_rows": 500},
            "maintenance": {"budget": 0, "expire": None, "orphans": None},
            "tables": [{"source": rf"{self.name}\.{self.name}\.(\w+)", "target": f"lake.{self.name}.$1"}],
        }

    def load(self, **changes: Any) -> list[str]:
        return list(Load(self.spark, Config.model_validate(self.values("1 second") | changes), ()).run())

    def count(self, table: str) -> int:
        return len(self.in_lake(table))

    def equals(self, *tables: str) -> bool:
        return all(self.in_database(table) == self.in_lake(table) for table in tables)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Rows are inserted, updated, deleted, and get other keys all the time."""
        over, random, things = threading.Event(), Random(7), f"{self.name}.things"

        def work() -> None:
            with psycopg.connect(self.postgres.url, autocommit=True) as connection:
                while not over.wait(0.002):
                    key, other = random.randint(1, 12_000), random.randint(1, 12_000)
                    statement = random.choice(
                        [
                            f"UPDATE {things} SET name = 'new ' || {other} WHERE id = {key}",
                            f"DELETE FROM {things} WHERE id = {key}",
                            f"INSERT INTO {things} VALUES ({key}, 'in', {other}) ON CONFLICT DO NOTHING",
                            f"UPDATE {things} SET id = {20_000 + other} WHERE id = {key} AND NOT EXISTS "
                            f"(SELECT FROM {things} WHERE id = {20_000 + other})",
                        ]
                    )
                    connection.execute(statement.encode())

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture
def mirror(spark: SparkSession, tmp_path: Path, postgres: Postgres) -> Iterator[Mirror]:
    made = Mirror(spark, tmp_path, postgres)
    yield made
    made.close()


def test_a_database_is_mirrored_while_it_changes_and_both_are_killed(mirror: Mirror, tmp_path: Path) -> None:
    values = mirror.values("1 second") | {"spark": {"spark.master": "local[2]"}}
    sink = SinkProcess(written(tmp_path / "config", values), tmp_path)
    later = f"{mirror.name}.later"
    try:
        with mirror.changing():
            sink.start()
            assert wait_until(lambda: mirror.count("things") > 1000, 300), sink.text()
            sink.kill()
            assert mirror.count("things") < 11_000, "it was killed while it loaded"
            sink.start()
            assert wait_until(mirror.kill_engine)
            # the publication comes too late for a transaction that has changed the table before
            mirror.postgres.execute(
                f"CREATE TABLE {later} (id int PRIMARY KEY, what text);\nINSERT INTO {later} VALUES (1, 'old')"
            )
            with psycopg.connect(mirror.postgres.url) as connection:
                connection.execute(f"UPDATE {later} SET what = 'new'".encode())
                assert wait_until(lambda: f"transactions that have changed {later}" in sink.text(), 300), sink.text()
                sink.kill()
                sink.start()
            assert wait_until(lambda: mirror.equals("later"), 300), sink.text()
        assert wait_until(lambda: mirror.equals("things", "quiet", "later"), 120), sink.text()
        sink.stop()
    finally:
        sink.kill()
    assert mirror.postgres.password not in sink.text()
    loads = [row for row in sink.text().splitlines() if "loading about" in row]
    assert len(loads) == 3, "what is loaded isn't loaded again"


def test_load_ends_when_the_tables_are_equal(mirror: Mirror) -> None:
    with pytest.raises(ConfigError, match="the connector's snapshot is the first copy of all tables"):
        mirror.load(load={})
    with mirror.changing():
        told = mirror.load()
    assert [line.split(": ")[1].split(";")[0] for line in told] == 2 * [
        "equal to the database as it was when the load ended"
    ]
    mirror.run()
    assert mirror.equals("things", "quiet")
    (mirror.buffer / "state.json").unlink()  # another buffer lacks what came before it, also of a table without events
    with pytest.raises(TableError, match=r"quiet.* was created again"):
        mirror.run()
