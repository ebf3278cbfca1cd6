"""`rowdelta verify` against a real Postgres and a real MariaDB, with a broker between them and the tables."""

import base64
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import yaml
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from sink.commands.verify import lines, verify
from sink.config import Config
from sink.errors import ConfigError, TemporaryError
from sink.run.pipeline import Pipeline
from tests.changelog.messages import sample
from tests.sink.test_submit import LOCAL, command, complaints, running
from tests.stack.kafka import Kafka
from tests.stack.mariadb import MariaDB, running_mariadb
from tests.stack.postgres import Postgres, running_postgres
from tests.stack.process import free_ports, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

SAMPLES = Path(__file__).parents[1] / "changelog" / "samples"


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with running_mariadb() as server:
        yield server


class Shop:
    """A sink of one topic, and the database behind it.

    :param section: what the configuration's section `verify` has beside url, user and password.
    """

    def __init__(
        self, spark: SparkSession, folder: Path, kafka: Kafka, database: Postgres | MariaDB, **section: Any
    ) -> None:
        self.spark = spark
        self.topic = f"t{uuid4().hex[:8]}.public.things"
        self.target = f"lake.n{uuid4().hex[:8]}.things"
        self.table: dict[str, Any] = {}
        self.source: dict[str, Any] = {"format": "debezium-json"}
        self.verify = {
            "url": database.jdbc_url,
            "user": database.user,
            "password": database.password,
            "settle": "100 milliseconds",
            **section,
        }
        self._folder = folder
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
        self._servers = kafka.bootstrap_servers
        kafka.create_topic(self.topic)

    def config(self) -> Config:
        return Config.model_validate(self.values())

    def values(self) -> dict[str, Any]:
        warehouse = str(self.spark.conf.get("spark.sql.catalog.lake.warehouse"))
        return {
            "sink": {"id": "shop", "checkpoint": str(self._folder / "state")},
            "source": {"type": "kafka", "options": {"kafka.bootstrap.servers": self._servers}, **self.source},
            "catalogs": {"lake": {"type": "hadoop", "warehouse": warehouse}},
            "tables": [{"source": self.topic, "target": self.target, **self.table}],
            "verify": self.verify,
        }

    def send(self, messages: Sequence[tuple[Any, Any]]) -> None:
        for key, value in messages:
            texts = [None if part is None else json.dumps(part).encode() for part in (key, value)]
            self._producer.produce(self.topic, key=texts[0], value=texts[1])
        assert self._producer.flush(60) == 0

    def run(self) -> None:
        Pipeline(self.spark, self.config()).run()

    def verified(self, timeout: float = 60) -> list[str]:
        (outcome,) = verify(self.spark, self.config(), (), 20, timeout)
        if outcome.error is not None:
            raise outcome.error
        return list(lines(outcome))


ALL_TYPES = r"""
CREATE EXTENSION IF NOT EXISTS hstore;
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TABLE alltypes (id int PRIMARY KEY, i2 smallint, i8 bigint, f4 real, f8 double precision, n_un numeric,
  n_12_2 numeric(12,2), n_38_0 numeric(38,0), b boolean, c char(5), vc varchar(20), t text, by bytea, d date,
  tm time(3), tm6 time(6), tmtz timetz, ts timestamp, ts3 timestamp(3), tstz timestamptz, iv interval, u uuid, js json,
  jb jsonb, x xml, ia int[], ta text[], na numeric(10,2)[], tsa timestamptz[], m mood, hs hstore, ip inet, mny money,
  bits bit(4), pt point, rng int4range);
INSERT INTO alltypes VALUES (1, 1, 9007199254740995, 1.5, 'NaN', 12345.678901234567890123, 1.10,
  99999999999999999999999999999999999999, true, 'ab', 'vc', 't''"\n', '\xdeadbeef', '2026-11-21', '23:59:59.123',
  '23:59:59.123456', '10:11:12+02', '2026-11-21 01:02:03.123456', '2026-11-21 01:02:03.123',
  '2026-11-21 01:02:03.123456+05', '1 year 2 mons 3 days 04:05:06.7', '11111111-2222-3333-4444-555555555555',
  '{"a": 1,  "b":[1,2]}', '{"a": 1,  "b":[1,2]}', '<a>1</a>', '{1,NULL,3}', '{"a",NULL,"b,c"}', '{1.10,2.20}',
  '{"2026-01-01 00:00:00+00"}', 'ok', 'a=>1,b=>NULL', '10.0.0.1/24', '12.34', '1010', '(1.5,2)', '[1,10)');
INSERT INTO alltypes (id, ts, tstz, d, n_un) VALUES
  (3, '0001-01-01 00:00:00', '0044-03-15 00:00:00 BC', '9999-12-31', 0);
INSERT INTO alltypes (id, i2, n_12_2, tstz, u, jb, ia) VALUES (4, 4, 0.00, '2026-11-21 07:13:28.325827+00',
  '5f982ccf-5564-48e2-acee-fa12da50d79e', '{"n":null}', '{}');
"""
"""What `schema.sql` of the real messages' database made, in the end."""

ALTERED = {
    "i2": "2",
    "i8": "9007199254740994",
    "f4": "1.25",
    "f8": "'Infinity'",
    "n_un": "12345.678901234567890124",
    "n_12_2": "1.11",
    "n_38_0": "99999999999999999999999999999999999998",
    "b": "false",
    "c": "'aB'",
    "vc": "'vc '",
    "t": "'t'",
    "by": r"'\xdeadbeee'",
    "d": "'2026-11-22'",
    "tm": "'23:59:59.124'",
    "tm6": "'23:59:59.123457'",
    "tmtz": "'10:11:12+01'",
    "ts": "'2026-11-21 01:02:03.123457'",
    "ts3": "'2026-11-21 01:02:03.124'",
    "tstz": "'2026-11-21 01:02:03.123457+05'",
    "iv": "'1 year 2 mons 3 days 04:05:06.8'",
    "u": "'11111111-2222-3333-4444-555555555556'",
    "js": """'{"a": 1, "b":[1,2]}'""",
    "jb": """'{"a": 1, "b":[1,3]}'""",
    "x": "'<a>2</a>'",
    "ia": "'{1,3}'",
    "ta": """'{"a",NULL,"b","c"}'""",
    "na": "'{1.10,2.21}'",
    "tsa": """'{"2026-01-01 00:00:00.000001+00"}'""",
    "m": "'sad'",
    "hs": "'a=>1'",
    "ip": "'10.0.0.1'",
    "mny": "'12.35'",
    "bits": "'1011'",
    "rng": "'[1,11)'",
}
"""A column of Postgres -> a value that is another one than in row 1, in SQL."""


def test_a_row_of_every_type_of_postgres(spark: SparkSession, tmp_path: Path, kafka: Kafka, postgres: Postgres) -> None:
    """What Debezium sent of this database, against the same database. Then each value differs in a row of its own."""
    shop = Shop(spark, tmp_path, kafka, postgres, table="public.alltypes")
    messages = [m for m in sample("pgenv", "alltypes") if m.value is not None]
    shop.send([(m.key, m.value) for m in messages])
    shop.run()
    postgres.execute(ALL_TYPES)
    equal = shop.verified()
    assert equal[0].endswith(": EQUAL"), equal
    assert "source at LSN " in equal[1]
    assert equal[1].endswith("; 3 and 3 rows, 1 round")
    assert equal[2:] == ["  not compared: pt (of type point in the source)"]

    (first,) = (m for m in messages if m.value["payload"]["op"] == "u")
    first.value["payload"] |= {"op": "c", "before": None}
    for number, (column, other) in enumerate(ALTERED.items(), 100):
        first.key["payload"]["id"] = first.value["payload"]["after"]["id"] = number
        shop.send([(first.key, first.value)])
        columns = ", ".join(other if name == column else name for name in [*ALTERED, "pt"])
        names = ", ".join([*ALTERED, "pt"])
        postgres.execute(f"INSERT INTO alltypes (id, {names}) SELECT {number}, {columns} FROM alltypes WHERE id = 1")
    nothing = len(ALTERED) + 100
    first.key["payload"]["id"] = first.value["payload"]["after"]["id"] = nothing
    shop.send([(first.key, first.value)])
    postgres.execute(f"INSERT INTO alltypes (id) VALUES ({nothing})")
    shop.run()
    (outcome,) = verify(spark, shop.config(), (), 100, 60)
    found = {d.key["id"]: [c.column for c in d.columns] for d in outcome.differences}
    expected = {str(number): [column] for number, column in enumerate(ALTERED, 100)}
    assert found == expected | {str(nothing): list(ALTERED)}
    texts = {c.column: (c.source, c.table) for d in outcome.differences if len(d.columns) == 1 for c in d.columns}
    assert texts["n_12_2"] == ("1.11", "1.10")
    assert texts["by"] == ("DEADBEEE", "DEADBEEF")
    assert texts["tstz"] == ("2026-11-20 20:02:03.123457", "2026-11-20 20:02:03.123456")
    assert texts["ta"] == ('["a",null,"b","c"]', '["a",null,"b,c"]')


MARIADB_COLUMNS = {
    "id": "varchar(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci PRIMARY KEY",
    "ti": "tinyint",
    "t1": "tinyint(1)",
    "ui": "int unsigned",
    "bu": "bigint unsigned",
    "bp": "bigint unsigned",
    "de": "decimal(12,2)",
    "f": "float",
    "d": "double",
    "c": "char(5)",
    "tx": "text",
    "bi": "binary(4)",
    "bl": "blob",
    "e": "enum('sad','ok')",
    "st": "set('a','b','c')",
    "b1": "bit(1)",
    "bt": "bit(12)",
    "dt": "date",
    "dm": "datetime",
    "du": "datetime(6)",
    "ts": "timestamp(6) NULL",
    "tm": "time(6)",
    "y": "year",
    "j": "json",
    "g": "point",
}
MARIADB_ROW: dict[str, tuple[str, str, Any, str]] = {
    "ti": ("int", "-128", -128, "-127"),
    "t1": ("boolean", "1", True, "0"),
    "ui": ("bigint", "4294967295", 4294967295, "4294967294"),
    "bu": ("bigint", "18446744073709551615", -1, "18446744073709551614"),
    "bp": ("decimal(20,0)", "18446744073709551615", "18446744073709551615", "0"),
    "de": ("decimal(12,2)", "1.10", "1.10", "1.11"),
    "f": ("float", "0.1", 0.1, "0.2"),
    "d": ("double", "0.1", 0.1, "0.2"),
    "c": ("string", "'ab '", "ab", "'aB'"),
    "tx": ("string", "'zoë 😀\\\\'", "zoë 😀\\", "'zoe 😀\\\\'"),
    "bi": ("binary", "x'00ff'", b"\x00\xff\x00\x00", "x'00fe'"),
    "bl": ("binary", "x'deadbeef'", b"\xde\xad\xbe\xef", "x'deadbeee'"),
    "e": ("string", "'ok'", "ok", "'sad'"),
    "st": ("string", "'c,a'", "a,c", "'a'"),
    "b1": ("boolean", "b'1'", True, "b'0'"),
    "bt": ("binary", "b'000000000001'", b"\x01\x00", "b'101000000000'"),
    "dt": ("date", "'2026-11-21'", "2026-11-21", "'0001-01-01'"),
    "dm": ("timestamp_ntz", "'2026-11-21 01:02:03'", "2026-11-21T01:02:03", "'1026-11-21 01:02:04'"),
    "du": ("timestamp_ntz", "'1969-12-31 23:59:59.123456'", "1969-12-31T23:59:59.123456", "'1970-01-01'"),
    "ts": ("timestamp", "'2026-11-21 01:02:03.123456'", "2026-11-21T01:02:03.123456Z", "'2026-11-21 01:02:03.123457'"),
    "tm": ("bigint", "'-00:00:01.5'", -1_500_000, "'838:59:59'"),
    "y": ("int", "2026", 2026, "2027"),
    "j": ("string", """'{"a":  1}'""", '{"a":  1}', """'{"a": 1}'"""),
}
"""Column -> its type in the table, its value in SQL and in messages, and another value in SQL."""


def test_a_row_of_every_type_of_mariadb(spark: SparkSession, tmp_path: Path, kafka: Kafka, mariadb: MariaDB) -> None:
    """Likewise. The key's collation ignores case, and the table doesn't."""
    shop = Shop(spark, tmp_path, kafka, mariadb, table="shop.alltypes")
    shop.source = {"format": "row-kind"}
    types = {column: dtype for column, (dtype, *_) in MARIADB_ROW.items()}
    shop.table = {"key": ["id"], "columns": {"id": "string", **types, "g": "binary"}}
    mariadb.execute(
        f"CREATE TABLE alltypes ({', '.join(f'{name} {dtype}' for name, dtype in MARIADB_COLUMNS.items())})"
    )

    def add(key: str, other: str | None = None) -> None:
        values = [other_value if name == other else value for name, (_, value, _, other_value) in MARIADB_ROW.items()]
        mariadb.execute(
            f"INSERT INTO alltypes ({', '.join(['id', *MARIADB_ROW])}) VALUES ('{key}', {', '.join(values)})"
        )
        fields = {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, (_, _, value, _) in MARIADB_ROW.items()
        }
        shop.send([(None, {"row_kind": "+I", "id": key, **fields, "g": None})])

    add("Same")
    mariadb.execute("INSERT INTO alltypes (id) VALUES ('nothing')")
    shop.send([(None, {"row_kind": "+I", "id": "nothing", **dict.fromkeys(MARIADB_ROW), "g": None})])
    shop.run()
    equal = shop.verified()
    assert equal[0].endswith(": EQUAL"), equal
    assert "source at GTID 0-1-" in equal[1]
    assert equal[1].endswith("; 2 and 2 rows, 1 round")
    assert equal[2:] == ["  not compared: g (of type point in the source)"]

    for column in MARIADB_ROW:
        add(f"k-{column}", column)
    mariadb.execute("UPDATE alltypes SET id = 'sAME' WHERE id = 'same'")
    shop.run()
    (outcome,) = verify(spark, shop.config(), (), 100, 60)
    found = {d.key["id"]: (d.kind, [c.column for c in d.columns]) for d in outcome.differences}
    assert found == {f"k-{column}": ("differs", [column]) for column in MARIADB_ROW} | {
        "Same": ("missing in source", []),
        "sAME": ("missing in table", []),
    }


def event(op: str, row: dict[str, Any]) -> tuple[Any, Any]:
    return {"id": row["id"]}, {"before": None, "after": row, "op": op}


def orders(shop: Shop, postgres: Postgres, table: str, count: int) -> None:
    """A table in the database, and the messages of its rows."""
    shop.table = {"key": ["id"], "columns": {"id": "bigint", "name": "string"}}
    shop.verify["table"] = f"public.{table}"
    postgres.execute(
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, name text);\n"
        f"INSERT INTO {table} SELECT n, 'n' || n FROM generate_series(1, {count}) n"
    )
    shop.send([event("c", {"id": n, "name": f"n{n}"}) for n in range(1, count + 1)])


def test_it_waits_for_the_slot_and_for_the_sink(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, postgres: Postgres
) -> None:
    shop = Shop(spark, tmp_path, kafka, postgres)
    orders(shop, postgres, "waiting", 10)
    shop.run()
    shop.send([event("u", {"id": 1, "name": "new"})])
    postgres.execute("UPDATE waiting SET name = 'new' WHERE id = 1")
    with pytest.raises(TemporaryError, match=r"the sink has 1 message of \S+ before it, .* Start the sink"):
        shop.verified(timeout=2)

    postgres.execute("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')")
    shop.verify["slot"] = "debezium"
    try:
        shop.run()
        postgres.execute("INSERT INTO waiting VALUES (11, 'n11')")
        with pytest.raises(TemporaryError, match=r"slot debezium is .* behind, and no connector reads slot debezium"):
            shop.verified(timeout=2)
        ended = threading.Event()
        late = threading.Thread(target=deliver_late, args=(shop, postgres, ended))
        late.start()
        try:
            found = shop.verified()
        finally:
            ended.set()
            late.join()
        assert found[0].endswith(": EQUAL"), found
        shop.verify["slot"] = "other"
        with pytest.raises(ConfigError, match=r"verify.slot: .* has no logical replication slot 'other'"):
            shop.verified()
    finally:
        postgres.execute("SELECT pg_drop_replication_slot('debezium')")


def deliver_late(shop: Shop, postgres: Postgres, ended: threading.Event) -> None:
    """What connector and sink do, after a while."""
    time.sleep(1)
    shop.send([event("c", {"id": 11, "name": "n11"})])
    while not ended.wait(1):
        postgres.execute("SELECT pg_replication_slot_advance('debezium', pg_current_wal_lsn())")
        shop.run()


def test_what_changes_meanwhile_is_compared_in_further_rounds(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, postgres: Postgres
) -> None:
    """One row changes all the time, others at random. A row that really differs is found among them."""
    shop = Shop(spark, tmp_path, kafka, postgres)
    orders(shop, postgres, "busy", 200)
    largest = 2**63 - 1
    shop.send([event("c", {"id": largest, "name": "old"})])
    shop.run()
    postgres.execute(f"INSERT INTO busy VALUES ({largest}, 'lost')")  # and no message says so
    ended = threading.Event()

    def traffic() -> None:
        for n in range(10_000):
            if ended.is_set():
                return
            ids = [1, 2 + n % 100]
            for number in ids:
                postgres.execute(f"UPDATE busy SET name = 'v{n}' WHERE id = {number}")
            shop.send([event("u", {"id": number, "name": f"v{n}"}) for number in ids])

    def sink() -> None:
        while not ended.is_set():
            shop.run()

    threads = [threading.Thread(target=work) for work in (traffic, sink)]
    for thread in threads:
        thread.start()
    try:
        found = shop.verified()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert found[0].endswith(": DIFFERENT in 1 key"), found
    assert "rounds" in found[1]
    assert found[2].startswith("  changed all the time: ")
    assert found[3:] == [f"  id={largest}: differs in name", "    name: source lost, table old"]

    shop.send([event("u", {"id": largest, "name": "lost"})])
    shop.run()
    quiet = shop.verified()
    assert quiet[0].endswith(": EQUAL"), quiet
    assert quiet[1].endswith("; 201 and 201 rows, 1 round")


def test_a_database_that_cannot_be_read_is_named_without_its_password(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, postgres: Postgres, mariadb: MariaDB
) -> None:
    shop = Shop(spark, tmp_path, kafka, postgres)
    orders(shop, postgres, "closed", 1)
    shop.run()
    (port,) = free_ports(1)
    right = dict(shop.verify)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"password": "planted-wrong"}, ConfigError, "password authentication failed for user"),
        ({"url": f"{postgres.jdbc_url}?password=planted-in-url", "password": None}, ConfigError, "on failed for user"),
        ({"url": f"jdbc:postgresql://127.0.0.1:{port}/x"}, TemporaryError, "127.0.0.1:.*refused"),
        ({"table": "public.nothing"}, ConfigError, "there is no table public.nothing of jdbc:postgresql:"),
        ({"url": mariadb.jdbc_url, "user": "debezium", "password": "planted-wrong"}, ConfigError, "Access denied for"),
        ({"url": f"jdbc:mariadb://127.0.0.1:{port}/x"}, TemporaryError, "127.0.0.1.*refused"),
        ({"url": mariadb.jdbc_url, "user": "debezium", "password": mariadb.password, "table": "shop.nothing"},
         ConfigError, "there is no table shop.nothing of jdbc:mariadb:"),
    ]  # fmt: skip
    for changes, error, text in cases:
        shop.verify = {name: value for name, value in (right | changes).items() if value is not None}
        with pytest.raises(error, match=text) as raised:
            shop.verified()
        assert "planted" not in str(raised.value)
        assert postgres.password not in str(raised.value)


def test_ctrl_c_ends_the_transaction_and_the_jvm(
    spark: SparkSession, tmp_path: Path, kafka: Kafka, postgres: Postgres
) -> None:
    shop = Shop(spark, tmp_path, kafka, postgres)
    orders(shop, postgres, "locked", 10)
    shop.run()
    config = tmp_path / "sink.yaml"
    config.write_text(yaml.safe_dump({**shop.values(), "spark": LOCAL}))
    of_verify = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'PostgreSQL JDBC Driver'"
    with psycopg.connect(postgres.url) as lock, psycopg.connect(postgres.url, autocommit=True) as observer:

        def sessions(condition: str) -> int:
            found = observer.execute(f"{of_verify} AND {condition}".encode()).fetchone()
            assert found is not None
            return int(found[0])

        assert wait_until(lambda: sessions("true") == 0, 60)
        lock.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
        with running(command("verify", config), tmp_path / "log") as job:
            assert wait_until(lambda: sessions("wait_event_type = 'Lock'") == 1, 120), job.log
            assert sessions("state = 'idle in transaction'") == 1, "the snapshot that is being read"
            job.signal(signal.SIGINT, group=True)
            assert job.wait() == 130, job.log
            assert "rowdelta: interrupted by SIGINT" in job.log
            assert not complaints(job.log), job.log
            assert postgres.password not in job.log
            assert wait_until(lambda: not job.descendants(), 15), job.descendants()
        assert wait_until(lambda: sessions("state = 'idle in transaction'") == 0, 30)
        lock.rollback()  # a session that waits for a lock sees only then that its client is gone
        assert wait_until(lambda: sessions("true") == 0, 30)
