"""Rows that are read from MariaDB, against what Debezium's stream of the same rows becomes."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sink.config import DatabaseSection
from sink.databases.mysql import MySQL, refuse_missing
from sink.databases.mysql_catalog import missing_in_log, quoted
from sink.databases.mysql_table import MySQLTable
from sink.databases.reading import Delivered
from sink.errors import ConfigError
from sink.table.load_state import MARGIN
from tests.sink.test_database_rows import CONNECTORS, Edge, check_each_type
from tests.stack import mariadb as mariadb_server
from tests.stack.connect import mysql_connector
from tests.stack.kafka import Kafka
from tests.stack.mariadb import MariaDB, running_mariadb

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with running_mariadb() as server:
        yield server


COLUMNS = {
    "i1": "tinyint", "i1u": "tinyint unsigned", "t1": "tinyint(1)", "bo": "boolean", "i2": "smallint",
    "i2u": "smallint unsigned", "i3": "mediumint", "i3u": "mediumint unsigned", "i4": "int", "i4u": "int unsigned",
    "i4z": "int(8) zerofill", "i8": "bigint", "i8u": "bigint unsigned", "de": "decimal(12,2)",
    "dz": "decimal(8,2) zerofill",
    "dw": "decimal(65,30)", "d0": "decimal(20,0)", "f4": "float", "f8": "double", "c": "char(5)", "vc": "varchar(20)",
    "vl": "varchar(20) CHARACTER SET latin1", "vu": "varchar(20) CHARACTER SET ucs2", "tt": "tinytext", "tx": "text",
    "mt": "mediumtext", "lt": "longtext", "bi": "binary(4)", "vb": "varbinary(10)", "tb": "tinyblob", "bl": "blob",
    "mb": "mediumblob", "lb": "longblob", "e": "enum('sad','ok','zoë')", "el": "enum('sad','zoë') CHARACTER SET latin1",
    "st": "set('a','b','c')", "b1": "bit(1)", "b12": "bit(12)", "b64": "bit(64)", "d": "date", "dn": "date NOT NULL",
    "tm": "time", "tm3": "time(3)", "tm6": "time(6)", "dt": "datetime", "dt3": "datetime(3)", "dt6": "datetime(6)",
    "dtn": "datetime(6) NOT NULL", "ts": "timestamp NULL", "ts3": "timestamp(3) NULL", "ts6": "timestamp(6) NULL",
    "tsn": "timestamp NOT NULL", "y": "year", "js": "json",
    "gs": "int GENERATED ALWAYS AS (id * 2) STORED", "gv": "int GENERATED ALWAYS AS (id * 3) VIRTUAL",
}  # fmt: skip
"""Column -> its type in MariaDB."""
ROWS = r"""
INSERT INTO edge (id, i1, i1u, t1, bo, i2, i2u, i3, i3u, i4, i4u, i4z, i8, i8u, de, dz, dw, d0, f4, f8, c, vc, vl, vu,
  tt, tx, mt, lt, bi, vb, tb, bl, mb, lb, e, el, st, b1, b12, b64, d, dn, tm, tm3, tm6, dt, dt3, dt6, dtn, ts, ts3, ts6,
  tsn, y, js)
VALUES (1, -128, 255, 1, true, -32768, 65535, -8388608, 16777215, -2147483648, 4294967295, 42, -9223372036854775808,
  18446744073709551615, 1.10, 1.5, 12345678901234567890.123456789012345678901234567890, 18446744073709551615, 0.1, 0.1,
  'ab ', 'vc ', 'zoë', 'zoë', 'tt', 'zoë 😀 ''"\\\n\t', 'mt', 'lt', x'00ff', x'00ff00', x'dead', x'deadbeef00', x'',
  x'00', 'zoë', 'zoë', 'c,a', b'1', b'000000000001', x'8000000000000001', '2026-11-20', '2026-11-21', '23:59:50',
  '23:59:59.120', '23:59:59.123456', '2026-11-21 01:02:00', '2026-11-21 01:02:03.123', '2026-11-21 01:02:03.123456',
  '2026-11-21 01:02:03.100000', '2026-11-21 01:02:03', '2026-11-21 01:02:03.120', '2026-11-21 01:02:03.123450',
  '2026-11-21 01:02:03', 2026, '{"a":  1, "b": [1.50, null]}');
INSERT INTO edge (id, dn, dtn, tsn) VALUES (2, '0100-01-01', '0100-01-01', '2026-01-01');
INSERT INTO edge (id, i1, t1, f4, f8, de, dw, c, vc, tx, bi, bl, e, st, b1, b12, b64, d, dn, tm, tm6, dt, dt6, dtn, ts,
  ts6, tsn, y)
VALUES (3, 0, 2, -0.0, -1.7e308, -0.01, -0.000000000000000000000000000001, '', '', '', '', '', '', '', b'0', 0, 0,
  '9999-12-31', '1582-10-10', '-838:59:59', '-00:00:01.5', '9999-12-31 23:59:59', '1969-12-31 23:59:59.999999',
  '9999-12-31 23:59:59.999999', '1970-01-01 00:00:01', '2038-01-19 03:14:07.999999', '2038-01-19 03:14:07', 1901);
INSERT INTO edge (id, t1, f4, f8, d, dn, tm, tm3, dt, dt3, dt6, dtn, ts, ts6, tsn, y, b12)
VALUES (4, -1, 3.4e38, 4e-300, '0000-00-00', '0000-00-00', '838:59:59', '00:00:00.001', '0000-00-00', '0000-00-00',
  '0000-00-00', '0000-00-00', '0000-00-00', '0000-00-00', '0000-00-00', 0, b'111111111111');
INSERT INTO edge (id, f4, f8, d, dn, tm, dt, dt6, dtn, tsn, i8u) VALUES
  (5, 1e10, 1e7, '2026-00-00', '2026-02-00', '00:00:00', '2026-00-00 00:00:00', '2026-02-00 01:02:03.5',
   '2026-02-00 01:02:03', '2026-01-01', 9223372036854775808),
  (6, 1e-30, 0.001, NULL, '1000-01-01', '24:00:00', '1000-01-01 00:00:00', NULL, '1000-01-01', '2026-07-01',
   9223372036854775807)
"""
"""Without years before 100: the connector takes them for years of two digits (`enable.time.adjuster`)."""
SETTINGS = {
    f"{name}_of_mysql": {key: value for key, value in settings.items() if "interval" not in key}
    for name, settings in CONNECTORS.items()
}
"""The names differ from those of Postgres: what Connect knows of a connector stays in the broker."""


def test_rows_are_what_the_stream_makes_of_them(spark: SparkSession, kafka: Kafka, mariadb: MariaDB) -> None:
    """Each type in each type of column, with three ways of spelling values."""
    columns = ", ".join(f"{name} {dtype}" for name, dtype in COLUMNS.items())
    mariadb.execute("SET GLOBAL sql_mode = ''")
    mariadb.execute(f"CREATE TABLE edge (id int PRIMARY KEY, touched int, {columns}) CHARACTER SET utf8mb4")
    mariadb.execute(ROWS)
    edge = Edge(mariadb, "shop", COLUMNS, "UPDATE edge SET touched = 1 - COALESCE(touched, 0)", range(1, 7), {})

    def connector(name: str) -> dict[str, str]:
        # a snapshot fails at times that Java doesn't have
        more = {"snapshot.mode": "no_data", "database.server.id": str(4711 + list(SETTINGS).index(name))}
        return {**mysql_connector(mariadb, name, r"shop\.edge", kafka), **more}

    check_each_type(spark, kafka, edge, SETTINGS, connector, {})


TABLES = {
    "skewed": "(id bigint PRIMARY KEY); INSERT INTO skewed "
    "SELECT IF(seq % 10 = 0, seq * 1000000000000000, CAST(seq AS SIGNED) - 2500)",
    "large": "(id bigint unsigned PRIMARY KEY); INSERT INTO large SELECT 18446744073709551615 - seq",
    "texts": (
        "(k varchar(30) COLLATE utf8mb4_general_ci PRIMARY KEY); INSERT INTO texts "
        "SELECT CONCAT('é😀''\\\\', seq % 7, seq)"
    ),
    "latin": "(k char(9) CHARACTER SET latin1 PRIMARY KEY); INSERT INTO latin SELECT CONCAT('é', seq)",
    "octets": "(k varbinary(16) PRIMARY KEY); INSERT INTO octets SELECT UNHEX(MD5(seq))",
    "moments": (
        "(k timestamp(3) PRIMARY KEY); INSERT INTO moments SELECT TIMESTAMP'2026-10-25 00:00:00' + INTERVAL seq SECOND"
    ),
    "amounts": "(k decimal(20,3), d date, PRIMARY KEY (d, k)); INSERT INTO amounts SELECT seq / 7, '2026-01-01'",
    "tenants": (
        "(n int, tenant int, place datetime(6), PRIMARY KEY (tenant, place, n)); INSERT INTO tenants "
        "SELECT seq, seq DIV 2000, '2026-01-01' + INTERVAL seq DIV 3 MICROSECOND"
    ),
    "moods": "(m enum('sad','ok'), n int, PRIMARY KEY (m, n)); INSERT INTO moods SELECT seq % 2 + 1, seq",
    "keyless": "(n int); INSERT INTO keyless SELECT seq",
    "Quoted`Name": "(`I d` int PRIMARY KEY); INSERT INTO `Quoted``Name` SELECT seq",
    "parted": "(id int PRIMARY KEY) PARTITION BY HASH (id) PARTITIONS 3; INSERT INTO parted SELECT seq",
}
"""Table -> its definition, and its 5,000 rows."""


def test_each_row_is_in_one_part(spark: SparkSession, mariadb: MariaDB) -> None:
    section = DatabaseSection(url=mariadb.jdbc_url, user=mariadb.user, password=mariadb.password)
    mariadb.execute("SET GLOBAL time_zone = '+05:00'")
    for name, rest in TABLES.items():
        definition, _, rows = rest.partition("; ")
        mariadb.execute(f"CREATE TABLE {quoted(name)} {definition} CHARACTER SET utf8mb4" if "PARTITION" not in rest
                        else f"CREATE TABLE {quoted(name)} {definition}")  # fmt: skip
        mariadb.execute(f"{rows} FROM seq_1_to_5000;\nANALYZE TABLE {quoted(name)}")
    mariadb.execute("CREATE VIEW seen AS SELECT * FROM skewed;\nCREATE TABLE nothing (id int PRIMARY KEY)")
    for name in [*TABLES, "seen"]:
        with closing(MySQLTable(spark, section, f"shop.{name}", "source.database")) as table:
            parts = table.ranges(500)
            whole = name in ("moods", "keyless", "seen")
            assert len(parts) == (1 if whole else 10), (name, parts)
            assert table.ranges(6000) == ["1 = 1"]
            if not whole:
                assert table.estimated_rows() == pytest.approx(5000, rel=0.1), name
            frame, _ = table.read(["'x'"], parts, 2)
            assert frame.rdd.getNumPartitions() <= 2
            assert frame.count() == 5000, name
            queries = [f"SELECT count(*) FROM {quoted(name)} WHERE {part}" for part in parts]
            counts = [int(str(table._connection.rows(query)[0][0])) for query in queries]
            assert sum(counts) == 5000, (name, counts)
            assert whole or max(counts) <= 501, (name, counts)
            plan = frame._jdf.queryExecution().toString()
            assert mariadb.password not in plan
            assert whole or parts[0] not in plan, "a condition has values of rows"
    mariadb.execute("SET GLOBAL TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
    with (
        closing(mariadb.connect()) as connection,
        connection.cursor() as cursor,
        closing(MySQLTable(spark, section, "nothing", "source.database")) as table,
    ):
        cursor.execute("BEGIN")
        cursor.execute("INSERT INTO nothing VALUES (1)")  # which may be rolled back
        assert (table.key(), table.ranges(500)) == (("id",), ["1 = 1"])
        frame, _ = table.read(["id"], ["1 = 1"], 1)
        assert frame.count() == 0


def test_what_alters_rows_without_a_message_is_told(spark: SparkSession, mariadb: MariaDB) -> None:
    section = DatabaseSection(url=mariadb.jdbc_url, user=mariadb.user, password=mariadb.password)
    mariadb.execute("CREATE TABLE `alt-ered` (id int PRIMARY KEY, a int, b int)")
    mariadb.execute("INSERT INTO `alt-ered` VALUES (1, 2, 3)")

    with closing(MySQLTable(spark, section, "shop.alt-ered", "source.database")) as table:

        def goes_on(statement: str) -> bool:
            before = table.files()
            mariadb.execute(statement)
            return table.files().startswith(before)

        assert goes_on("UPDATE `alt-ered` SET a = 7")
        assert goes_on("ALTER TABLE `alt-ered` ADD COLUMN c int")
        assert not goes_on("TRUNCATE TABLE `alt-ered`")
        assert not goes_on("ALTER TABLE `alt-ered` ADD COLUMN d int DEFAULT 7")
        assert not goes_on("ALTER TABLE `alt-ered` ADD COLUMN e int NOT NULL")
        assert not goes_on("ALTER TABLE `alt-ered` ADD COLUMN f int AS (id + 1)")
        assert not goes_on("ALTER TABLE `alt-ered` CHANGE a other int")
        assert not goes_on("ALTER TABLE `alt-ered` MODIFY b bigint")
        assert not goes_on("ALTER TABLE `alt-ered` DROP COLUMN b")

        # changes have the time of their statement
        with closing(mariadb.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("INSERT INTO `alt-ered` (id, e) VALUES (1, 1)")
            time.sleep(3)
            ((_, who),) = table.writers().items()
            cursor.execute("SELECT CONNECTION_ID()")
            assert who.startswith(f"connection {cursor.fetchall()[0][0]} since 20")
            order = table.order()
            assert order["source.ts_ms"] <= (time.time() - MARGIN - 2) * 1000
            cursor.execute("SHOW MASTER STATUS")
            assert (order["source.file"], order["source.pos"]) == cursor.fetchall()[0][:2]
            cursor.execute("COMMIT")
            cursor.execute("BEGIN")
            cursor.execute("SELECT * FROM `alt-ered`")
            assert table.writers() == {}


def test_messages_tell_whether_the_topic_has_all(spark: SparkSession, mariadb: MariaDB) -> None:
    mariadb.execute("CREATE TABLE told (id int PRIMARY KEY)")
    section = DatabaseSection(url=mariadb.jdbc_url, user=mariadb.user, password=mariadb.password)
    with closing(MySQL(spark, section, "told")) as database:
        assert database.delivered(lambda _: [("binlog.999999", 1)])[0] is Delivered.UNKNOWN, "nothing was read"
        database.note_log_position()
        with closing(mariadb.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW MASTER STATUS")
            file, place = cursor.fetchall()[0][:2]
        number = int(file.rpartition(".")[2])
        for newest, expected in (
            ([(file, place), (file, place + 1)], Delivered.YES),
            ([(f"binlog.{number + 1:06}", 4)], Delivered.YES),
            ([(file, place), None], Delivered.TO_CONNECTOR),
            ([(file, place), (file, place - 1)], Delivered.TO_CONNECTOR),
            ([(file, place - 1), (f"binlog.{number - 1:06}", place + 1)], Delivered.UNKNOWN),
            ([None], Delivered.UNKNOWN),
        ):
            told: Any = newest
            assert database.delivered(lambda _, told=told: told)[0] is expected, newest  # type: ignore[misc]


@pytest.mark.parametrize(
    ("taken", "ignored", "case", "database", "expected"),
    [
        ("", "", "0", "", []),
        ("shop,other", "shop", "0", "shop", []),
        ("other,shops", "", "0", "shop", ["binlog_do_db has other,shops only. Add shop"]),
        ("Shop", "", "0", "shop", ["binlog_do_db has Shop only. Add shop"]),
        ("Shop", "", "1", "", []),
        (None, "other,shop", "0", "", ["binlog_ignore_db has shop. Remove it"]),
    ],
)
def test_a_database_that_the_binlog_leaves_out(
    taken: str | None, ignored: str, case: str, database: str, expected: list[str]
) -> None:
    class Connection:
        def rows(self, sql: str) -> list[tuple[Any, ...]]:
            if sql.startswith("SHOW BINARY LOG"):
                return [("binlog.000001", "4", taken, ignored, "")]
            return [("1", "ROW", "FULL", case, "shop")] if "@@log_bin" in sql else []

    connection: Any = Connection()
    assert list(missing_in_log(connection, database)) == expected


def test_a_table_is_known_where_names_are_stored_in_small_letters(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is it that its changes are in no binlog: by a setting, and since they come from another server."""
    monkeypatch.setitem(mariadb_server._SETTINGS, "lower-case-table-names", "1")
    monkeypatch.setitem(mariadb_server._SETTINGS, "binlog-ignore-db", "SHOP")
    with running_mariadb() as server:
        section = DatabaseSection(url=server.jdbc_url, user=server.user, password=server.password)
        server.execute("CREATE TABLE `Large-É` (id int PRIMARY KEY)")
        for name in ("Large-É", "Shop.Large-É"):
            with closing(MySQLTable(spark, section, name, "source.database")) as table:
                before = table.files()
                server.execute("TRUNCATE TABLE `Large-É`")
                assert not table.files().startswith(before)
        server.execute("CHANGE MASTER TO master_host = '127.0.0.1', master_port = 1, master_user = 'x';\nSTART SLAVE")
        with closing(MySQL(spark, section, "Shop.Large-É")) as database:
            first, second = missing_in_log(database._connection, "Shop")
            assert (first, second.split(".")[0]) == (
                "binlog_ignore_db has Shop. Remove it",
                "it is a replica without log_slave_updates",
            )
            with pytest.raises(ConfigError, match=f"lacks changes of Shop.Large-É, which would be lost: {first}"):
                refuse_missing(database._connection, "Shop.Large-É")


def test_rights_are_named(spark: SparkSession, mariadb: MariaDB) -> None:
    mariadb.execute(
        "CREATE USER reader@'127.0.0.1' IDENTIFIED BY 'of-reader';\nGRANT SELECT ON shop.* TO reader@'127.0.0.1';\n"
        "CREATE TABLE mine (id int PRIMARY KEY)"
    )
    section = DatabaseSection(url=mariadb.jdbc_url, user="reader", password="of-reader")
    refused = pytest.raises(ConfigError, match=r"nobody is seen to read the binlog of mine .* GRANT PROCESS ON \*\.\*")
    with closing(MySQL(spark, section, "mine")) as database, refused:
        database.check_reader(is_named=False)
    mariadb.execute("GRANT PROCESS ON *.* TO reader@'127.0.0.1'")
    with closing(MySQLTable(spark, section, "shop.mine", "source.database")) as table:
        assert set(table.order()) == {"source.ts_ms", "source.ts_us", "ts_ms"}
        assert table.files()
        assert table.columns()[0].name == "id"
