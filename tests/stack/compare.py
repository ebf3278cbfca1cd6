"""Source tables against the sink's, by other people's clients: psycopg, PyMySQL, PyIceberg and delta-rs.

Values are compared as Python has them. What has another form in the table by design (JSON, times of day) is brought
into it by the query of the source.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import StaticTable

from tests.stack.mysql import MySQL
from tests.stack.postgres import Postgres
from tests.stack.s3 import S3
from tests.stack.stack import Stack

SHOWN = 5

Row = tuple[Any, ...]


def rows_of_postgres(postgres: Postgres, query: str) -> list[Row]:
    with psycopg.connect(postgres.url, options="-c timezone=UTC") as connection:
        return [_plain_row(row) for row in connection.execute(query.encode())]


def rows_of_mysql(mysql: MySQL, query: str) -> list[Row]:
    with closing(mysql.connect()) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return [_plain_row(row) for row in cursor]


def rows_of_iceberg(stack: Stack, table: str, columns: Sequence[str]) -> list[Row]:
    """Of a table `namespace.table`; no rows if it does not exist yet."""
    door = stack.catalog_door
    properties = {
        "uri": door.url,
        "credential": f"{door.client}:{door.secret}",
        "oauth2-server-uri": door.token_url,
        "header.X-Iceberg-Access-Delegation": "vended-credentials",
        "s3.endpoint": stack.s3.endpoint,
        "s3.region": stack.s3.REGION,
    }
    return rows_by_catalog(properties, table, columns)


def rows_by_catalog(properties: Mapping[str, str], table: str, columns: Sequence[str]) -> list[Row]:
    """Of a table of a REST catalog, as PyIceberg reads it with these properties; no rows if it does not exist yet."""
    catalog = load_catalog("reader", type="rest", **properties)
    try:
        return _rows(catalog.load_table(table).scan().to_arrow(), columns)
    except NoSuchTableError:
        return []


def rows_of_delta(stack: Stack, table: str, columns: Sequence[str]) -> list[Row]:
    """Of a table `namespace.table`; no rows if it does not exist yet."""
    return rows_in_bucket(stack.s3, table, columns)


def rows_in_bucket(s3: S3, table: str, columns: Sequence[str]) -> list[Row]:
    """Of a Delta table `namespace.table`, as delta-rs reads it; no rows if it does not exist yet."""
    options = {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_ACCESS_KEY_ID": s3.KEY,
        "AWS_SECRET_ACCESS_KEY": s3.SECRET,
        "AWS_REGION": s3.REGION,
        "AWS_ALLOW_HTTP": "true",
    }
    location = f"s3://{s3.BUCKET}/delta/{table.replace('.', '/')}"
    if not DeltaTable.is_deltatable(location, options):
        return []
    return _rows(_all(DeltaTable(location, storage_options=options)), columns)


def rows_in_warehouse(folder: Path, target: str, columns: Sequence[str]) -> list[Row]:
    """Of a table whose catalog is a folder: Iceberg's of type `hadoop`, or one of Delta tables. No rows if it does not
    exist yet.

    :param folder: has a folder for each catalog.
    """
    table = folder.joinpath(*target.split("."))
    if (table / "_delta_log").exists():
        return _rows(_all(DeltaTable(str(table))), columns)
    versions = sorted((table / "metadata").glob("v*.metadata.json"), key=lambda path: int(path.name.split(".")[0][1:]))
    return _rows(StaticTable.from_metadata(str(versions[-1])).scan().to_arrow(), columns) if versions else []


def differences(source: Sequence[Row], table: Sequence[Row]) -> str:
    """What tells both apart, in words; nothing where each row is in both as often."""
    wanted, found = Counter(source), Counter(table)
    missing, extra = wanted - found, found - wanted
    if not missing and not extra:
        return ""
    text = f"{len(source)} rows in the source, {len(table)} in the table"
    for what, rows in (("only in the source", missing), ("only in the table", extra)):
        text += f"\n{rows.total()} {what}: {[_short(row) for row in sorted(rows, key=repr)[:SHOWN]]}"
    return text


def _all(table: DeltaTable) -> pa.Table:
    return pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())


def _rows(table: pa.Table, columns: Sequence[str]) -> list[Row]:
    """Of these columns; a column that the table lacks is an error that its differences show."""
    known = [table[name].to_pylist() if name in table.column_names else [f"no {name}"] * len(table) for name in columns]
    return [_plain_row(row) for row in zip(*known, strict=True)]


def _plain_row(row: Sequence[Any]) -> Row:
    return tuple(_plain(value) for value in row)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_plain(part) for part in value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Decimal):
        return value.normalize()
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None)  # PyMySQL gives instants without a zone
    return value


def _short(row: Row) -> Row:
    return tuple(value if len(repr(value)) < 60 else f"{value[:20]!r}… of {len(value)}" for value in row)
