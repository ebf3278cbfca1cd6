"""What happens in the source databases while the sink runs: a bank, orders with their lines, and MySQL's types."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from decimal import Decimal

import psycopg
import pymysql

from tests.stack.mysql import MySQL
from tests.stack.postgres import Postgres

SEED = 21
TOASTED = 40_000
"""Characters of a text that PostgreSQL keeps outside of its row, and doesn't log again while it doesn't change."""

BANK = """
CREATE TABLE pgbench_branches (bid int PRIMARY KEY, bbalance int, filler char(88));
CREATE TABLE pgbench_tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84));
CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84));
CREATE TABLE pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
ALTER TABLE pgbench_history REPLICA IDENTITY FULL;
INSERT INTO pgbench_branches VALUES (1, 0);
INSERT INTO pgbench_tellers SELECT n, 1, 0 FROM generate_series(1, 10) n;
INSERT INTO pgbench_accounts SELECT n, 1, 0, '' FROM generate_series(1, 10000) n;
"""
"""The tables of pgbench, PostgreSQL's own benchmark."""
TPC_B = [
    "UPDATE pgbench_accounts SET abalance = abalance + %(delta)s WHERE aid = %(aid)s",
    "SELECT abalance FROM pgbench_accounts WHERE aid = %(aid)s",
    "UPDATE pgbench_tellers SET tbalance = tbalance + %(delta)s WHERE tid = %(tid)s",
    "UPDATE pgbench_branches SET bbalance = bbalance + %(delta)s WHERE bid = 1",
    "INSERT INTO pgbench_history VALUES (%(tid)s, 1, %(aid)s, %(delta)s, CURRENT_TIMESTAMP)",
]

ORDERS = """
CREATE TABLE orders (
    id bigint PRIMARY KEY, customer text NOT NULL, amount numeric(12,2), qty int, status varchar(20), note text,
    doc jsonb, tags text[], uid uuid, placed timestamptz, due date, changed timestamp, paid boolean, score float8);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE TABLE lines (
    order_id bigint, line int, item text, price numeric(10,2), PRIMARY KEY (order_id, line));
CREATE TABLE signals (id varchar(42) PRIMARY KEY, type varchar(32) NOT NULL, data varchar(2048));
INSERT INTO orders (id, customer, amount, qty) SELECT n, 'c' || n, n / 100.0, n FROM generate_series(1, 500) n;
INSERT INTO lines SELECT n, m, 'item ' || m, n + m FROM generate_series(1, 500) n, generate_series(1, 3) m;
"""
SNAPSHOT = """
INSERT INTO signals VALUES ('again', 'execute-snapshot',
    '{"type": "incremental", "data-collections": ["public.orders", "public.lines"]}');
"""
"""Debezium reads both tables again, in chunks between the changes."""

DDL = [
    "ALTER TABLE orders ADD COLUMN channel text",
    "ALTER TABLE orders DROP COLUMN paid",
    "ALTER TABLE orders ALTER COLUMN qty TYPE bigint",
    "ALTER TABLE orders ALTER COLUMN amount TYPE numeric(14,2)",
    "ALTER TABLE orders ADD COLUMN points int DEFAULT 7",
    "ALTER TABLE orders RENAME COLUMN status TO state",
]

LAST = """
UPDATE orders SET score = coalesce(score, 0) + 1, channel = CASE WHEN id % 3 = 0 THEN 'web' END,
    qty = CASE WHEN id % 11 = 0 THEN 5000000000 ELSE qty END,
    amount = CASE WHEN id % 7 = 0 THEN 999999999999.99 ELSE amount END
"""
"""Touches each order: so each has the columns that were added with a default, or renamed. Some values need the wider
types.
"""

TYPES = """
CREATE TABLE types (
    id int unsigned PRIMARY KEY, t tinyint, s smallint unsigned, m mediumint, b bigint, ub bigint unsigned,
    n decimal(20,4), f float, d double, bits bit(8), flag tinyint(1), c char(5), v varchar(40), txt mediumtext,
    bin varbinary(40), blb mediumblob, day date, dt datetime(6), dt0 datetime, ts timestamp(6) NULL, tm time(6), y year,
    e enum('new','paid','sent'), st set('a','b','c'), j json) CHARACTER SET utf8mb4;
INSERT INTO types (id, v) VALUES (0, 'first');
"""


def run_bank(
    postgres: Postgres, transactions: int, clients: int = 2, rate: int | None = None, seed: int = SEED
) -> None:
    """TPC-B: each transaction changes an account, a teller and a branch, and adds a row to the history.

    :param rate: transactions a second; None for as many as there can be.
    """

    def client(number: int) -> None:
        chance = random.Random(clients * seed + number)
        started = time.monotonic()
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            for done in range(transactions // clients):
                if rate is not None:
                    time.sleep(max(0, started + done * clients / rate - time.monotonic()))
                ends = {"aid": 10_000, "tid": 10}
                values = {"delta": chance.randint(-5000, 5000)} | {key: chance.randint(1, ends[key]) for key in ends}
                with connection.transaction():
                    for statement in TPC_B:
                        connection.execute(statement.encode(), values)

    with ThreadPoolExecutor() as threads:
        list(threads.map(client, range(clients)))


def run_orders(postgres: Postgres, transactions: int) -> None:
    """Orders come, change, get other keys and go, several in a transaction, some of which are rolled back.

    Between the transactions, at equal distances, are the statements of `DDL`, in the middle Debezium's signal. Later
    the lines are truncated, and others come. In the end is `LAST`.
    """
    chance = random.Random(SEED)
    every = transactions // (len(DDL) + 1)
    waiting = list(DDL)
    status = "status"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for number in range(transactions):
            if number == transactions // 2:
                connection.execute(SNAPSHOT.encode())
            if number == transactions * 2 // 3:
                connection.execute("TRUNCATE lines")
            if waiting and number and number % every == 0:
                statement = waiting.pop(0)
                connection.execute(statement.encode())
                if "RENAME" in statement:
                    status = "state"
            with connection.transaction(force_rollback=chance.random() < 0.1):
                for statement, values in changes_of_orders(chance, 1000 + 10 * number, status):
                    connection.execute(statement.encode(), values)
        connection.execute(LAST.encode())


def changes_of_orders(chance: random.Random, new: int, status: str) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Statements of a transaction; ids from `new` on, ten of them, are its own."""
    for key in range(new, new + chance.randint(1, 4)):
        note = None if chance.random() < 0.3 else chance.choice("xyz") * TOASTED + str(key)
        doc = chance.choice([None, "{}", '{"a": [1, null], "ä": "😀"}'])
        amount = chance.choice([None, Decimal("-0.01"), Decimal(9_999_999_999) + Decimal("0.99")])
        tags = chance.choice([None, [], ["a", None, 'b"c']])
        yield (
            f"INSERT INTO orders (id, customer, amount, qty, {status}, note, doc, tags, uid, placed, due, changed, "
            "score) VALUES (%s, %s, %s, %s, 'new', %s, %s, %s, gen_random_uuid(), now(), current_date, localtimestamp, "
            "%s)",
            (key, f"k{key}\n'\"", amount, chance.randint(-5, 5), note, doc, tags, chance.choice([None, 0.1, 1e300])),
        )
        for line in range(chance.randint(0, 3)):
            values = (key, line, chance.choice(["pen", "ink", None]), Decimal(chance.randint(1, 999)) / 100)
            yield "INSERT INTO lines VALUES (%s, %s, %s, %s)", values
    some = chance.randint(1, 500 + new) // 10
    # the long text stays as it is
    yield f"UPDATE orders SET {status} = 'paid', qty = qty + 1 WHERE id %% 97 = %s", (some % 97,)
    yield "UPDATE lines SET price = price + 1 WHERE order_id %% 89 = %s", (some % 89,)
    if chance.random() < 0.3:
        # other keys: a delete and an insert for whoever reads the log
        yield "UPDATE orders SET id = id + 1000000 WHERE id = %s", (new,)
        yield "UPDATE lines SET order_id = order_id + 1000000, line = line + 10 WHERE order_id = %s", (new,)
        yield "UPDATE lines SET line = -line - 1 WHERE order_id = %s", (some,)
    if chance.random() < 0.4:
        yield "DELETE FROM lines WHERE order_id %% 101 = %s", (some % 101,)
        yield "DELETE FROM orders WHERE id %% 101 = %s", (some % 101,)
    if chance.random() < 0.3:
        # a row that comes, goes and comes again in one transaction
        yield "INSERT INTO lines VALUES (%s, 99, 'first', 1)", (new + 9,)
        yield "DELETE FROM lines WHERE order_id = %s AND line = 99", (new + 9,)
        yield "INSERT INTO lines VALUES (%s, 99, 'second', 2)", (new + 9,)


def run_types(mysql: MySQL, transactions: int) -> None:
    """Rows with the ends of each type's range and with NULLs; they change, get other keys and go.

    In the middle a column is added.
    """
    chance = random.Random(SEED)
    with closing(mysql.connect()) as connection, connection.cursor() as cursor:
        for number in range(transactions):
            if number == transactions // 2:
                cursor.execute("ALTER TABLE types ADD COLUMN later varchar(10)")
            change_types(connection, chance, number)
        cursor.execute("UPDATE types SET t = coalesce(t, 0) DIV 2 + 1, later = 'x'")


def change_types(
    connection: "pymysql.connections.Connection[pymysql.cursors.Cursor]", chance: random.Random, number: int
) -> None:
    """A transaction; ten ids are its own, by its number."""
    connection.begin()
    with connection.cursor() as cursor:
        for key in range(10 * number + 1, 10 * number + 1 + chance.randint(1, 4)):
            _insert_types(cursor, key, chance)
        some = chance.randint(1, 10 * number + 1)
        cursor.execute(
            "UPDATE types SET v = concat(coalesce(v, ''), 'é'), e = 'sent' WHERE id %% 31 = %s", (some % 31,)
        )
        if chance.random() < 0.3:
            cursor.execute("UPDATE types SET id = id + 1000000 WHERE id = %s", (10 * number + 1,))
        if chance.random() < 0.4:
            cursor.execute("DELETE FROM types WHERE id %% 37 = %s", (some % 37,))
    if chance.random() < 0.1:
        connection.rollback()
    else:
        connection.commit()


def _insert_types(cursor: pymysql.cursors.Cursor, key: int, chance: random.Random) -> None:
    values: dict[str, list[object]] = {
        "t": [-128, 127],
        "s": [0, 65535],
        "m": [-8388608, 8388607],
        "b": [-(2**63), 2**63 - 1],
        "ub": [0, 2**64 - 1],
        "n": [Decimal("-9999999999999999.9999"), Decimal("0.0001")],
        "f": [1.5, -0.25],
        "d": [0.1, 1e300],
        "bits": [b"\x00", b"\xa5"],
        "flag": [0, 1],
        "c": ["", "ab"],
        "v": ["Zoë 😀", "'\"\\\n"],
        "txt": ["", "x" * 70_000],
        "bin": [b"", b"\x00\xff"],
        "blb": [b"", bytes(range(256)) * 300],
        "day": ["1000-01-01", "9999-12-31"],
        "dt": ["2026-11-21 01:02:03.123456", "1000-01-01 00:00:00"],
        "dt0": ["2026-11-21 01:02:03", "9999-12-31 23:59:59"],
        "ts": ["2026-11-21 01:02:03.123456", "1970-01-02 00:00:01"],
        "tm": ["23:59:59.123456", "00:00:00"],
        "y": [1901, 2155],
        "e": ["new", "paid"],
        "st": ["", "a,c"],
        "j": ["{}", '{"a": [1, null], "b": "ü"}'],
    }
    row = {name: chance.choice([None, *choices]) for name, choices in values.items()}
    names, places = ", ".join(row), ", ".join(["%s"] * len(row))
    cursor.execute(f"INSERT INTO types (id, {names}) VALUES (%s, {places})", (key, *row.values()))
