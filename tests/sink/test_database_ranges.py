"""Parts of a Postgres table, and the connection that reads them: without Spark."""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import psycopg
import pyarrow as pa
import pytest

from sink.config import DatabaseSection
from sink.databases.postgres_catalog import quoted_table
from sink.databases.postgres_connection import PostgresConnection, libpq_url
from sink.databases.postgres_ranges import estimated_rows, files, own_rows, ranges
from sink.databases.postgres_table import PostgresTable, Queries, begun_now
from sink.errors import ConfigError, TemporaryError
from tests.stack.container import has
from tests.stack.postgres import Postgres, running_postgres, running_replica
from tests.stack.process import free_ports


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


def section(postgres: Postgres, **changes: str) -> DatabaseSection:
    given = {"url": postgres.jdbc_url, "user": postgres.user, "password": postgres.password}
    return DatabaseSection.model_validate(given | changes)


_VALUES = "generate_series(1, 5000) n"
TABLES = {
    # nine of ten rows in a small part of the numbers
    "skewed": (
        f"(id bigint PRIMARY KEY, t text); INSERT INTO skewed SELECT CASE WHEN n % 10 = 0 THEN n * 1000000000000000 "
        f"ELSE n - 2500 END, repeat('x', 100) FROM {_VALUES} ORDER BY 1"
    ),
    "texts": (
        r"(k text PRIMARY KEY); INSERT INTO texts SELECT chr(65 + n % 50) || E'\\''"
        "é😀' || n FROM "
        f"{_VALUES} ORDER BY 1"
    ),
    "padded": (f"(k char(12) PRIMARY KEY); INSERT INTO padded SELECT lpad(n::text, 7, '0') FROM {_VALUES}"),
    "moments": (
        "(k timestamptz PRIMARY KEY); INSERT INTO moments SELECT timestamptz '2026-01-01 00:00+00' + n * interval "
        f"'1 second' FROM {_VALUES}"
    ),
    "sequence_first": (
        f"(a int, b text, PRIMARY KEY (a, b)); INSERT INTO sequence_first SELECT n / 2, n::text FROM {_VALUES}"
    ),
    "tenant_first": (
        f"(tenant int, n int, PRIMARY KEY (tenant, n)); INSERT INTO tenant_first SELECT n / 2000, n FROM {_VALUES}"
    ),
    "random": f"(u uuid PRIMARY KEY); INSERT INTO random SELECT gen_random_uuid() FROM {_VALUES}",
    "ordered": f"(u uuid PRIMARY KEY); INSERT INTO ordered SELECT lpad(n::text, 32, '0')::uuid FROM {_VALUES}",
    "large": (
        "(u uuid PRIMARY KEY, t text STORAGE EXTERNAL); INSERT INTO large SELECT gen_random_uuid(), repeat('x', 3000) "
        f"FROM {_VALUES}"
    ),
    "large_in_full": (
        "(u uuid PRIMARY KEY, t text STORAGE EXTERNAL); ALTER TABLE large_in_full REPLICA IDENTITY FULL; INSERT INTO "
        f"large_in_full SELECT gen_random_uuid(), repeat('x', 3000) FROM {_VALUES}"
    ),
    "keyless": f"(n int); INSERT INTO keyless SELECT n FROM {_VALUES}",
    'Quoted"Name': f'("I d" int PRIMARY KEY); INSERT INTO "Quoted""Name" SELECT n FROM {_VALUES}',
    "parted": (
        "(id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) "
        "TO (4000); CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (4000) TO (9000); "
        f"INSERT INTO parted SELECT n FROM {_VALUES}"
    ),
    "parted_keyless": (
        "(id int) PARTITION BY RANGE (id); CREATE TABLE keyless_1 PARTITION OF parted_keyless FOR VALUES FROM (0) TO "
        "(4000); CREATE TABLE keyless_2 PARTITION OF parted_keyless FOR VALUES FROM (4000) TO (9000); "
        f"INSERT INTO parted_keyless SELECT n FROM {_VALUES}"
    ),
}
"""Table -> its definition, and its rows."""
BY = {
    "skewed": '"id"', "texts": '"k"', "padded": '"k"', "moments": '"k"', "sequence_first": '"a"',
    "large": '"u"', "large_in_full": "ctid",
    "tenant_first": "ctid", "random": "ctid", "ordered": '"u"', "keyless": "ctid", 'Quoted"Name': '"I d"',
    "parted": '"id"', "parted_keyless": "ctid",
}  # fmt: skip
"""Table -> by what it is parted."""


@pytest.mark.long
def test_each_row_is_in_one_range(postgres: Postgres) -> None:
    for name, rest in TABLES.items():
        postgres.execute(f"CREATE TABLE {quoted_table(name)} {rest}".replace("; ", ";\n") + ";\nANALYZE")
    postgres.execute("CREATE VIEW seen AS SELECT * FROM skewed;\nCREATE TABLE empty (id int PRIMARY KEY)")
    connection = PostgresConnection(section(postgres))
    for name in TABLES:
        table = quoted_table(f"public.{name}")
        assert estimated_rows(connection, table) == pytest.approx(5000, rel=0.1), name
        parts = ranges(connection, table, 500)
        assert all(part.startswith(f"{BY[name]} ") for part in parts), (name, parts[:2])
        assert ">=" not in parts[0], "the first has no lower bound"
        assert "<" not in parts[-1], "the last has no upper bound"
        counts = [connection.rows(f"SELECT count(*) FROM {table} WHERE {part}")[0][0] for part in parts]
        assert sum(counts) == 5000, name
        times = " + ".join(f"({part})::int" for part in parts)
        assert connection.rows(f"SELECT count(*) FROM {table} WHERE {times} <> 1") == [(0,)], name
        if BY[name] != "ctid":  # a page has more rows than a range
            assert 9 <= len(parts) <= 11
            assert max(counts) <= 1000, (name, counts)
        assert ranges(connection, table, 10_000) == ["true"]
    assert ranges(connection, '"seen"', 500) == ["true"]
    assert ranges(connection, '"empty"', 500) == ["true"]

    before = files(connection, '"parted_keyless"'), files(connection, '"keyless"')
    postgres.execute("UPDATE keyless SET n = n + 1")
    assert files(connection, '"keyless"') == before[1]
    postgres.execute("VACUUM FULL keyless_2;\nVACUUM FULL keyless")
    assert files(connection, '"parted_keyless"') != before[0]
    assert files(connection, '"keyless"') != before[1]
    connection.close()


def test_what_alters_rows_without_a_message_is_told(postgres: Postgres) -> None:
    postgres.execute("CREATE TABLE altered (id int PRIMARY KEY, a int, b int);\nINSERT INTO altered VALUES (1, 2, 3)")
    connection = PostgresConnection(section(postgres))

    def goes_on(statement: str) -> bool:
        before = files(connection, '"altered"')
        postgres.execute(f"ALTER TABLE altered {statement}")
        return files(connection, '"altered"').startswith(before)

    assert goes_on("ADD COLUMN c int")
    assert not goes_on("ADD COLUMN d int DEFAULT 7")
    assert not goes_on("RENAME COLUMN a TO other")
    assert not goes_on("ALTER COLUMN b TYPE bigint")
    assert not goes_on("DROP COLUMN b")
    assert not goes_on("REPLICA IDENTITY FULL")
    connection.close()


def test_a_tables_own_rows_are_read_and_none_that_no_log_has(postgres: Postgres) -> None:
    """The log has changes of inheriting tables under their own names."""
    postgres.execute(
        "CREATE TABLE parent (id int PRIMARY KEY);\nCREATE TABLE child () INHERITS (parent);\n"
        "INSERT INTO parent SELECT generate_series(1, 100);\nINSERT INTO child SELECT generate_series(1001, 3000);\n"
        "ANALYZE;\nCREATE VIEW viewed AS SELECT * FROM parent;\nCREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);\n"
        "CREATE FOREIGN DATA WRAPPER nothing;\nCREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing;\n"
        "CREATE TABLE half (id int) PARTITION BY RANGE (id);\n"
        "CREATE FOREIGN TABLE far PARTITION OF half FOR VALUES FROM (0) TO (9) SERVER elsewhere"
    )
    with closing(PostgresConnection(section(postgres))) as connection:
        assert connection.rows(f"SELECT count(*) FROM {own_rows(connection, quoted_table('parent'))}") == [(100,)]
        assert estimated_rows(connection, '"parent"') == 100
        assert ranges(connection, '"parent"', 100) == ["true"]
        bounds = [int(text) for part in ranges(connection, '"parent"', 30) for text in re.findall("'([0-9]+)'", part)]
        assert len(bounds) > 2
        assert max(bounds) <= 100
        assert own_rows(connection, '"half"') == '"half"'
        for table, named in (
            ("viewed", "viewed is a view"),
            ("unlogged", "unlogged is unlogged"),
            ("far", "far is a foreign table"),
            ("half", "far is a foreign table"),
        ):
            with pytest.raises(ConfigError, match=f"{named}: the log has no changes of it"):
                files(connection, quoted_table(table))


def test_transactions_that_have_changed_a_table_are_named_until_others_see_it(postgres: Postgres) -> None:
    """Also a prepared one, and those of partitions."""
    postgres.execute(
        "CREATE TABLE held (id int PRIMARY KEY) PARTITION BY RANGE (id);\n"
        "CREATE TABLE held_1 PARTITION OF held FOR VALUES FROM (0) TO (9);\nCREATE ROLE looker LOGIN PASSWORD 'looker'"
    )
    spark: Any = None
    few_rights = section(postgres, user="looker", password="looker")
    with (
        closing(PostgresTable(spark, section(postgres), "public.held", "source.database")) as table,
        closing(PostgresTable(spark, few_rights, "public.held", "source.database")) as of_others,
        psycopg.connect(postgres.url) as reader,
        psycopg.connect(postgres.url, application_name="shop") as writer,
    ):
        reader.execute("SELECT * FROM held")
        writer.execute("INSERT INTO held_1 VALUES (1)")
        ((number, who),) = table.writers().items()
        pid = writer.info.backend_pid
        assert who.startswith(f"pid {pid}, postgres, shop, idle in transaction, since 20")
        assert of_others.writers() == {number: f"pid {pid}, postgres, shop"}
        writer.execute("PREPARE TRANSACTION 'it''s'")
        assert table.writers()[number].startswith("the prepared transaction 'it''s' since 20")
        assert of_others.writers() == table.writers()
        postgres.execute("COMMIT PREPARED 'it''s'")
        assert table.writers() == {}


@pytest.mark.skipif(has("postgres"), reason="the server's files are in a container")
def test_a_replica_is_read_when_it_has_what_the_primary_had(postgres: Postgres) -> None:
    postgres.execute("CREATE TABLE copied (id int PRIMARY KEY)")
    numbers = pa.record_batch({"id": [0]})
    with running_replica(postgres) as replica, ThreadPoolExecutor(1) as pool:
        of_replica = section(replica)
        with psycopg.connect(replica.url, autocommit=True) as connection:
            connection.execute("SELECT pg_wal_replay_pause()")
            postgres.execute("INSERT INTO copied VALUES (7)")
            with closing(PostgresConnection(section(postgres))) as primary:
                begun = begun_now(primary)
            read = Queries(of_replica, "load.replica", ["SELECT id FROM copied"], begun)
            found = pool.submit(lambda: [row for batch in read([numbers]) for row in batch.to_pylist()])
            with pytest.raises(TimeoutError):
                found.result(2)
            connection.execute("SELECT pg_wal_replay_resume()")
        assert found.result(60) == [{"id": 7}]
        refused = pytest.raises(ConfigError, match=r"load\.replica: the server is no replica of that of source\.data")
        for other in (replace(read, section=section(postgres)), replace(read, begun=replace(begun, system="7"))):
            with refused:
                list(other([numbers]))


def test_a_replica_must_have_what_others_see_though_the_log_is_written_later(postgres: Postgres) -> None:
    postgres.execute("ALTER SYSTEM SET wal_writer_delay = '1s';\nSELECT pg_reload_conf();\nCREATE TABLE later (id int)")
    with (
        psycopg.connect(postgres.url, autocommit=True) as writer,
        closing(PostgresConnection(section(postgres))) as primary,
    ):
        writer.execute("SET synchronous_commit = off")
        ((before,),) = writer.execute("SELECT pg_current_wal_lsn()::text").fetchall()
        writer.execute("INSERT INTO later VALUES (1)")
        begun = begun_now(primary)
        assert primary.rows(f"SELECT '{begun.lsn}'::pg_lsn > '{before}'::pg_lsn") == [(True,)]
    postgres.execute("ALTER SYSTEM RESET wal_writer_delay;\nSELECT pg_reload_conf()")


def test_rows_that_a_policy_hides_are_not_left_out(postgres: Postgres) -> None:
    postgres.execute(
        "CREATE TABLE hidden (id int PRIMARY KEY);\nINSERT INTO hidden VALUES (1), (2);\n"
        "ALTER TABLE hidden ENABLE ROW LEVEL SECURITY;\nCREATE POLICY one ON hidden USING (id = 1);\n"
        "CREATE ROLE reader LOGIN PASSWORD 'reader';\nGRANT SELECT ON hidden TO reader"
    )
    connection = PostgresConnection(section(postgres, user="reader", password="reader"))
    with pytest.raises(ConfigError, match="affected by row-level security policy"):
        list(connection.batches("SELECT id FROM hidden"))
    connection.close()


@pytest.mark.long
def test_what_fails_is_told_without_secrets_and_values(postgres: Postgres) -> None:
    (port,) = free_ports(1)
    cases = [
        ({"password": "planted-wrong"}, ConfigError, "password authentication failed .* Correct source.database.url"),
        ({"url": f"{postgres.jdbc_url}?user=nobody&password=planted-in-url", "user": "nobody"}, ConfigError, "failed"),
        ({"url": postgres.jdbc_url.rsplit("/", 1)[0] + "/nothing"}, ConfigError, 'database "nothing" does not exist'),
        ({"url": f"jdbc:postgresql://127.0.0.1:{port}/x"}, TemporaryError, "refused.* Run again when it answers"),
        ({"url": "jdbc:mysql://db/shop?password=planted"}, ConfigError, "source.database.url: .* only Postgres"),
        ({"password": "planted%zz wrong&x=y"}, ConfigError, "password authentication failed"),
    ]
    for changes, error, text in cases:
        with pytest.raises(error, match=text) as raised:
            PostgresConnection(section(postgres, **changes))
        assert "planted" not in str(raised.value)
        assert postgres.password not in str(raised.value)
    connection = PostgresConnection(section(postgres, url=f"{postgres.jdbc_url}?currentSchema=other"))
    assert connection.rows("SHOW search_path", is_copied=False) == [("other",)]
    for query, error, text in (
        ("SELECT * FROM nothing WHERE name = 'Ada'", ConfigError, 'relation "nothing" does not exist'),
        ("SELECT 1 / (n - 3) FROM generate_series(1, 5) n WHERE 'Ada' <> ''", TemporaryError, "division by zero"),
    ):
        with pytest.raises(error, match=text) as raised:
            list(connection.batches(query))
        assert "Ada" not in str(raised.value)
    with pytest.raises(TemporaryError, match="read-only transaction"):
        connection.run("CREATE TABLE written (id int)")
    connection.close()


@pytest.mark.parametrize(
    ("url", "place", "parameters"),
    [
        ("jdbc:postgresql://db:5433/shop", "//db:5433/shop", {}),
        ("jdbc:postgresql:shop", "//localhost/shop", {}),
        (
            "jdbc:postgresql://a:1,b:2/shop?targetServerType=secondary",
            "//a:1,b:2/shop",
            {"target_session_attrs": "standby"},
        ),
        ("jdbc:postgresql://[::1]/shop?ssl=true", "//[::1]/shop", {"sslmode": "verify-full"}),
        ("jdbc:postgresql://db/shop?ssl=true&sslmode=require&socketTimeout=5", "//db/shop", {"sslmode": "require"}),
        (
            "jdbc:postgresql://db/shop?sslmode=verify-ca&sslrootcert=/etc/ca%20x.pem&connectTimeout=3",
            "//db/shop",
            {"sslmode": "verify-ca", "sslrootcert": "/etc/ca x.pem", "connect_timeout": "3"},
        ),
        ("jdbc:postgresql://db/shop?user=a&password=b%26", "//db/shop", {"user": "a", "password": "b&"}),
    ],
)  # fmt: skip
def test_a_jdbc_url_is_one_of_libpq(url: str, place: str, parameters: dict[str, str]) -> None:
    found = libpq_url(DatabaseSection(url=url))
    assert found.partition("?")[0] == f"postgresql:{place}"
    usual = {"connect_timeout": "10", "keepalives_idle": "60", "keepalives_interval": "10", "keepalives_count": "6",
             "application_name": "rowdelta"}  # fmt: skip
    assert dict(parse_qsl(urlsplit(found).query)) == usual | parameters


def test_user_and_password_may_have_any_characters() -> None:
    given = DatabaseSection(url="jdbc:postgresql://db/shop?user=other", user="a b@c", password="p:/?#&=%'ä +")
    found = dict(parse_qsl(libpq_url(given).partition("?")[2]))
    assert (found["user"], found["password"]) == ("a b@c", "p:/?#&=%'ä +")


def test_a_driver_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)
    with pytest.raises(ConfigError, match=r"pip install 'rowdelta\[postgres\]'"):
        PostgresConnection(DatabaseSection(url="jdbc:postgresql://nowhere/shop"))
