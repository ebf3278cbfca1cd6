"""Changes of a real MariaDB reach tables by Debezium's own engine, whoever is killed and whatever is altered meanwhile.
MySQL has the same code, and no package to test it with.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink import config
from sink.commands.beside_runs import delivering
from sink.commands.reconcile import reconcile
from sink.config import Config
from sink.databases.captured import captured_topics
from sink.errors import ConfigError
from sink.run.pipeline import Pipeline
from sink.sources.engine import Engine
from tests.sink.test_debezium_source import Source, running
from tests.stack.mariadb import MariaDB, running_mariadb
from tests.stack.process import wait_until
from tests.stack.sink_process import SinkProcess, written

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with running_mariadb() as server:
        yield server


class Mirror(Source):
    """A database of MariaDB whose tables are all loaded: `things` is large, and nobody writes into `quiet`."""

    is_loaded = True

    def __init__(self, spark: SparkSession, folder: Path, mariadb: MariaDB) -> None:
        super().__init__(spark, folder, mariadb.password)
        self.mariadb = mariadb
        self.connector = {
            "connector.class": MariaDB.CONNECTOR,
            "database.hostname": mariadb.host,
            "database.port": str(mariadb.port),
            "database.user": mariadb.user,
            "database.password": mariadb.password,
            "database.include.list": self.name,
            "topic.prefix": self.name,
            "poll.interval.ms": "100",
        }
        mariadb.execute(
            f"CREATE DATABASE {self.name} CHARACTER SET utf8mb4;\n"
            f"CREATE TABLE {self.name}.things (id bigint PRIMARY KEY, name varchar(40), amount decimal(12,2));\n"
            f"INSERT INTO {self.name}.things SELECT seq, CONCAT('zoë ', seq), seq / 7.0 FROM seq_1_to_12000;\n"
            f"ANALYZE TABLE {self.name}.things;\n"
            f"CREATE TABLE {self.name}.quiet (id int PRIMARY KEY, what text);\n"
            f"INSERT INTO {self.name}.quiet SELECT seq, 'q' FROM seq_1_to_10"
        )

    def values(self, trigger: str) -> dict[str, Any]:
        return super().values(trigger) | {
            "load": {"auto": self.is_loaded, "connections": 1, "part_rows": 500},
            "maintenance": {"budget": 0, "expire": None, "orphans": None},
            "tables": [{"source": rf"{self.name}\.{self.name}\.(\w+)", "target": f"lake.{self.name}.$1"}],
        }

    def execute(self, script: str) -> None:
        self.mariadb.execute(script.format(db=self.name))

    def in_database(self, table: str) -> list[tuple[Any, ...]]:
        with closing(self.mariadb.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {self.name}.{table} ORDER BY 1")
            return list(cursor.fetchall())

    def difference(self, table: str) -> list[tuple[Any, ...]]:
        """Some rows that are only in one of both."""
        return sorted({*self.in_database(table)} ^ {*self.in_lake(table)})[:10]

    @contextmanager
    def changing(self, seed: int = 7) -> Iterator[None]:
        """Rows are inserted, updated, deleted, and get other keys all the time, also many in one transaction."""
        over, random, things = threading.Event(), Random(seed), f"{self.name}.things"

        def work() -> None:
            with closing(self.mariadb.connect()) as connection, connection.cursor() as cursor:
                while not over.wait(0.01):
                    key, other = random.randint(1, 12_000), random.randint(1, 12_000)
                    statements = [
                        f"UPDATE {things} SET name = 'new {other}' WHERE id = {key}",
                        f"UPDATE {things} SET amount = amount + 1 WHERE id BETWEEN {key} AND {key + 20}",
                        f"DELETE FROM {things} WHERE id = {key}",
                        f"INSERT IGNORE INTO {things} (id, name, amount) VALUES ({key}, 'in', {other})",
                        f"UPDATE IGNORE {things} SET id = {20_000 + other} WHERE id = {key}",
                    ]
                    cursor.execute("BEGIN")
                    for statement in random.choices(statements, k=random.choice((1, 1, 5))):
                        cursor.execute(statement)
                    cursor.execute("COMMIT")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.fixture
def mirror(spark: SparkSession, tmp_path: Path, mariadb: MariaDB) -> Iterator[Mirror]:
    made = Mirror(spark, tmp_path, mariadb)
    yield made
    mariadb.execute(f"DROP DATABASE {made.name}")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [1, 6])
def test_a_database_is_mirrored_while_it_changes_and_is_altered_and_both_are_killed(
    mirror: Mirror, tmp_path: Path, kills: int
) -> None:
    values, random = mirror.values("1 second") | {"spark": {"spark.master": "local[2]"}}, Random(kills)
    sink = SinkProcess(written(tmp_path / "config", values), tmp_path)
    try:
        with mirror.changing(kills):
            sink.start()
            assert wait_until(lambda: mirror.count("things") > 1000, 300), sink.text()
            sink.kill()
            assert mirror.count("things") < 11_000, "it was killed while it loaded"
            mirror.execute("ALTER TABLE {db}.things ADD COLUMN a0 int")
            sink.start()
            mirror.execute("CREATE TABLE {db}.later (id int PRIMARY KEY, what text)")
            mirror.execute("INSERT INTO {db}.later VALUES (1, 'new')")
            assert wait_until(lambda: mirror.equals("later", "quiet"), 300), sink.text()
            for number in range(1, 1 + kills):
                mirror.execute(f"ALTER TABLE {{db}}.things ADD COLUMN a{number} int")
                mirror.execute(f"UPDATE {{db}}.things SET a{number} = id WHERE id % 10 = {number % 10}")
                had = mirror.end()
                assert wait_until(lambda: mirror.end() > had, 120), sink.text()  # noqa: B023 - it is called at once
                time.sleep(random.uniform(0, 2))
                if number % 3 == 0:
                    sink.kill()
                    sink.start()
                else:
                    assert wait_until(mirror.kill_engine, 60), sink.text()
        ended = time.monotonic()
        while not mirror.equals("things", "quiet", "later"):
            assert time.monotonic() - ended < 300, (mirror.difference("things"), sink.text())
            time.sleep(3)  # to look takes time from the sink
        sink.stop()
    finally:
        sink.kill()
    assert mirror.password not in sink.text()
    assert not any(mirror.password in file.read_text() for file in mirror.buffer.rglob("*") if file.is_file())
    loads = [row for row in sink.text().splitlines() if "loading about" in row]
    assert len(loads) == 3, "what is loaded isn't loaded again"


def test_what_init_writes_of_a_database_mirrors_it(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, name, file = mirror.mariadb, mirror.name, tmp_path / "sink.yaml"
    mirror.execute(
        "CREATE TABLE {db}.keyless (what text);\n"
        "CREATE TABLE {db}.odd (id int PRIMARY KEY, place point);\nINSERT INTO {db}.odd VALUES (1, POINT(1, 2));\n"
        "CREATE USER mirror@'127.0.0.1' IDENTIFIED BY 'of-mirror';\n"
        "GRANT SELECT, RELOAD, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO mirror@'127.0.0.1'"
    )
    monkeypatch.setenv("MYSQL_PWD", "of-mirror")
    url = f"mariadb://mirror@{of.host}:{of.port}/{name}"
    command = [sys.executable, "-m", "sink", "init", "--database", url, "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # its session is one of its own
    assert done.returncode == 0, done.stderr
    said, text = done.stdout + done.stderr, file.read_text()
    assert f"{name}.{name}.keyless: left out, it has no primary key" in said
    assert f"{name}.{name}.things: debezium-json, key id" in said
    assert "of-mirror" not in said + text
    assert "GRANT PROCESS ON *.* TO" in text
    of.execute("GRANT PROCESS ON *.* TO mirror@'127.0.0.1'")
    loaded = config.load(file)
    once = loaded.model_copy(update={"sink": loaded.sink.model_copy(update={"trigger": "available-now"})})
    Pipeline(mirror.spark, once).run()
    assert mirror.equals("things", "quiet")
    assert mirror.in_lake("odd") == [(1,)]
    mirror.execute("DELETE FROM {db}.things WHERE id > 9;\nALTER TABLE {db}.quiet CHANGE what why text")
    Pipeline(mirror.spark, once).run()
    assert mirror.equals("things")
    with monkeypatch.context() as more:
        more.setitem(mirror.connector, "table.include.list", rf"{name}\.(q|later).*")
        assert captured_topics(mirror.spark, Config.model_validate(mirror.values("1 second"))) == {
            f"{name}.{name}.quiet"
        }


def test_reconcile_starts_the_engine_if_no_run_goes_on(mirror: Mirror) -> None:
    mirror.run()
    mirror.execute("CREATE TABLE {db}.unseen (id int PRIMARY KEY)")
    mirror.spark.sql(f"DELETE FROM lake.{mirror.name}.quiet WHERE id < 4")
    made = Config.model_validate(mirror.values("1 second"))
    with delivering(mirror.spark, made):
        (outcome,) = reconcile(mirror.spark, made, ["quiet"], 2, 120)
    assert (outcome.healed, outcome.is_equal) == (3, True), outcome


def test_the_engine_goes_on_within_a_transaction_and_after_statements_that_alter_tables(mirror: Mirror) -> None:
    """An idle server's heartbeats count as events of a statement for MariaDB's connector, which would leave out what
    comes after a restart. A column that was renamed can't be renamed again. A server that ends says nothing.
    """
    mirror.is_loaded = False
    with running(mirror, **{"max.batch.size": "100", "max.queue.size": "300"}) as engine:
        assert engine.catch_up()
        mirror.execute("INSERT INTO {db}.things (id) SELECT seq + 20000 FROM seq_1_to_3000")
        for least in (12_200, 13_500):
            assert wait_until(lambda: mirror.end() > least)  # noqa: B023 - it is called at once
            assert wait_until(mirror.kill_engine)
        assert engine.catch_up()
        assert mirror.end() == 15_000, "the connector's snapshot, and what came then"
        mirror.execute("ALTER TABLE {db}.things CHANGE name title varchar(50)")
        assert engine.catch_up()
        time.sleep(5)
        assert wait_until(mirror.kill_engine)
        for key in range(5):
            mirror.execute(f"UPDATE {{db}}.things SET id = {30_000 + key} WHERE id = {1 + key}")
        assert engine.catch_up()
        mirror.mariadb.stop()
        time.sleep(1)
        mirror.mariadb.start()
        mirror.execute("INSERT INTO {db}.things (id) VALUES (1)")
        assert engine.catch_up()
    assert mirror.end() == 15_016
    keys = [1, *range(6, 12_001), *range(20_001, 23_001), *range(30_000, 30_005)]
    assert mirror.net() == dict.fromkeys(range(2, 6), 0) | dict.fromkeys(keys, 1)
    assert '"title":"zoë 1"' in "".join(path.read_text() for path in mirror.paths())


def test_a_log_or_a_buffer_that_has_lost_something_ends_the_run(mirror: Mirror, tmp_path: Path) -> None:
    mirror.connector["snapshot.mode"] = "no_data"
    made = Config.model_validate(mirror.values("available-now"))

    def catch_up() -> None:
        engine = Engine(mirror.spark, made)
        engine.start()
        try:
            engine.catch_up()
        finally:
            engine.stop()

    catch_up()
    shutil.copytree(mirror.buffer, tmp_path / "older")
    mirror.execute("UPDATE {db}.things SET id = 50000 WHERE id = 1")
    catch_up()
    events = [line.split("\t")[2] for path in mirror.paths() for line in path.read_text().splitlines()]
    # an older copy gets the same events at the same offsets
    shutil.rmtree(mirror.buffer)
    shutil.copytree(tmp_path / "older", mirror.buffer)
    catch_up()
    assert [line.split("\t")[2] for path in mirror.paths() for line in path.read_text().splitlines()] == events
    history = (mirror.buffer / "history.jsonl").read_bytes()
    (mirror.buffer / "history.jsonl").write_bytes(history[:-10])
    with pytest.raises(ConfigError, match=r"has lost .*history\.jsonl, or a part of it"):
        catch_up()
    (mirror.buffer / "history.jsonl").write_bytes(history + b'{"begun": and not finished')
    mirror.execute("FLUSH BINARY LOGS;\nINSERT INTO {db}.quiet VALUES (77, 'lost');\nFLUSH BINARY LOGS")
    with closing(mirror.mariadb.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW BINARY LOGS")
        last = cursor.fetchall()[-1][0]

        def is_purged() -> bool:  # the server keeps what somebody still reads
            cursor.execute(f"PURGE BINARY LOGS TO '{last}'")
            cursor.execute("SHOW BINARY LOGS")
            return bool(cursor.fetchall()[0][0] == last)

        assert wait_until(is_purged)
    with pytest.raises(ConfigError, match=r"purged.* Changes are lost. Take a new snapshot"):
        catch_up()
    mirror.connector["database.password"] = "another-secret"
    made = Config.model_validate(mirror.values("available-now"))
    with pytest.raises(ConfigError, match="Access denied") as raised:
        catch_up()
    assert "another-secret" not in str(raised.value)
