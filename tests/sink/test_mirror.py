"""One command mirrors a database of a real Postgres: tables are loaded, then followed by Debezium's own engine, whoever
is killed meanwhile.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from sink import config
from sink.cli import main
from sink.commands import inspection
from sink.commands.beside_runs import delivering
from sink.commands.load import Load
from sink.commands.reconcile import reconcile
from sink.config import Config
from sink.errors import ConfigError, TableError
from sink.run.pipeline import Pipeline
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
    file = written(tmp_path / "config", values)
    sink = SinkProcess(file, tmp_path)
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
                waits = re.compile(f"which have changed {later} of|may forget that a publication has got a table")
                assert wait_until(lambda: bool(waits.search(sink.text())), 300), sink.text()
                connection.execute(f"UPDATE {later} SET what = 'newer'".encode())
                sink.kill()
                sink.start()
            assert wait_until(lambda: mirror.equals("later"), 300), sink.text()
            mirror.postgres.execute(f"INSERT INTO {later} VALUES (2, 'last')")
            assert wait_until(lambda: mirror.equals("later"), 120), sink.text()
        assert wait_until(lambda: mirror.equals("things", "quiet", "later"), 120), sink.text()
        mirror.spark.sql(f"DELETE FROM lake.{mirror.name}.things WHERE id % 10 = 3")
        command = [sys.executable, "-m", "sink", "load", str(file), "--table", "things", "--again"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"things against .*: EQUAL\n(.*\n)*.*corrected: [\d,]+ keys", said), said
        assert mirror.equals("things", "quiet", "later")
        sink.stop()
    finally:
        sink.kill()
    assert mirror.postgres.password not in sink.text()
    loads = [row for row in sink.text().splitlines() if "loading about" in row]
    assert len(loads) == 3, "what is loaded isn't loaded again"


def test_what_init_writes_of_a_database_mirrors_it(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of, name, file = mirror.postgres, mirror.name, tmp_path / "sink.yaml"
    of.execute(
        f"CREATE TABLE {name}.keyless (what text);\n"
        f"CREATE TABLE {name}.odd (id int PRIMARY KEY, place box, area path);\n"
        f"INSERT INTO {name}.odd VALUES (1, '(0,0),(1,1)', '[(0,0)]');\n"
        f"CREATE TABLE {name}.days (id int, day date, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);\n"
        f"CREATE TABLE {name}.days_1 PARTITION OF {name}.days FOR VALUES FROM ('2026-01-01') TO ('2027-01-01');\n"
        f"INSERT INTO {name}.days VALUES (1, '2026-11-29')"
    )
    url = f"postgresql://{of.user}@{of.host}:{of.port}/{of.database}"
    monkeypatch.setenv("PGPASSWORD", of.password)
    assert main(["init", "--database", url, "--tables", rf"{name}\..*", "--output", str(file)]) == 0
    said, text = capsys.readouterr().out, file.read_text()
    assert f"postgres.{name}.keyless: left out, it has no primary key" in said
    assert f"postgres.{name}.things: debezium-json, key id" in said
    assert of.password not in said + text
    assert "database.password: ${PGPASSWORD}" in text
    loaded = config.load(file)
    lines = list(inspection.check(mirror.spark, loaded))
    assert lines[-1] == "ok"
    assert any("id bigint (key), name string, amount decimal(12,2)" in line for line in lines), lines
    once = loaded.model_copy(update={"sink": loaded.sink.model_copy(update={"trigger": "available-now"})})
    try:
        Pipeline(mirror.spark, once).run()
        of.execute(f"INSERT INTO {name}.days VALUES (2, '2026-11-30');\nDELETE FROM {name}.things WHERE id > 9")
        Pipeline(mirror.spark, once).run()
        assert mirror.equals("things", "quiet", "days")
        assert mirror.in_lake("odd") == [(1,)]
    finally:
        of.execute("SELECT pg_drop_replication_slot('rowdelta_postgres')")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--database", "oracle://u:secret@h/d"],
            "got oracle://****@h/d, expected the scheme postgresql, postgres, mysql, mariadb, a user, a host",
        ),
        (["--database", "postgresql://u@h/d?application_name=x"], "Parameters may be sslmode"),
        (["--database", "postgresql://u:${NOBODY}@h/d"], "the environment has no NOBODY"),
        (["--database", "postgresql://u@h/d", "--tables", "("], "is not a regular expression"),
        (["--database", "postgresql://u@h/d", "--key", "id"], "--key: only with --bootstrap-servers or --files"),
    ],
)
def test_init_refuses_what_it_can_not_mirror(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["init", *arguments, "--output", str(tmp_path / "sink.yaml")]) == 2
    assert words in capsys.readouterr().err


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
    # no run goes on, and the engine has not seen all of the log
    made = Config.model_validate(mirror.values("1 second"))
    mirror.postgres.execute(f"CREATE TABLE {mirror.name}.unseen (id int)")
    mirror.spark.sql(f"DELETE FROM lake.{mirror.name}.quiet WHERE id < 4")
    with delivering(mirror.spark, made):
        (outcome,) = reconcile(mirror.spark, made, ["quiet"], 5, 120)
    assert (outcome.healed, outcome.is_equal) == (3, True), outcome
    (mirror.buffer / "state.json").unlink()  # another buffer lacks what came before it, also of a table without events
    with pytest.raises(TableError, match=r"quiet.* was created again"):
        mirror.run()
