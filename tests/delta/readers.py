"""Readers of Delta tables that share no code with delta-spark: delta-rs, DuckDB and polars.

They are imported when they read: beside other versions of Spark (`make versions`) they aren't installed.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Rows = list[dict[str, Any]]


def by_delta_rs(table: Path) -> Rows:
    """By its query engine: `to_pyarrow_table` refuses tables with deletion vectors."""
    from deltalake import DeltaTable, QueryBuilder

    rows = QueryBuilder().register("t", DeltaTable(str(table))).execute("SELECT * FROM t").read_all()
    return plain(pa.table(rows))


def by_duckdb(table: Path) -> Rows:
    with duckdb_with_delta() as connection:
        return plain(connection.execute("SELECT * FROM delta_scan(?)", [str(table)]).to_arrow_table())


@contextmanager
def duckdb_with_delta() -> Iterator["DuckDBPyConnection"]:
    """Its extension is a package: nothing is downloaded."""
    import duckdb

    with duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    ) as connection:
        package = importlib.import_module("duckdb_extension_delta")
        (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
        connection.execute("SET TimeZone = 'UTC'")
        yield connection


def by_polars(table: Path) -> Rows:
    import polars as pl

    return plain(pl.scan_delta(str(table)).collect().to_arrow())


NAMES = ("delta-rs", "DuckDB", "polars")
READERS: dict[str, Callable[[Path], Rows]] = {
    name: read
    for name, package, read in zip(
        NAMES, ("deltalake", "duckdb", "polars"), (by_delta_rs, by_duckdb, by_polars), strict=True
    )
    if importlib.util.find_spec(package)
}
"""Those that are installed."""


def plain(rows: pa.Table) -> Rows:
    """Rows in an order of their own, such that two tables with the same rows are equal.

    :return: column -> value. Dates are days and timestamps microseconds since 1970, since Python's end with the year
        9999; NaN is the text `NaN`, to equal itself.
    """
    for convert in (_of_one_kind, _counted):
        rows = rows.cast(pa.schema([(field.name, convert(field.type)) for field in rows.schema]))
    return sorted((_comparable(row) for row in rows.to_pylist()), key=repr)


def _of_one_kind(type_: pa.DataType) -> pa.DataType:
    """Engines differ in how large a string may be, and in units."""
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", type_.tz)
    return _inside(type_, _of_one_kind)


def _counted(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_):
        return pa.int64()
    return pa.int32() if pa.types.is_date(type_) else _inside(type_, _counted)


def _inside(type_: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, convert(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(convert(type_.key_type), convert(type_.item_type))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(convert(type_.value_type))
    return type_


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _comparable(value[name]) for name in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_comparable(inner) for inner in value]
    return "NaN" if value != value else value
