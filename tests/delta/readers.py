"""Readers of Delta tables that share no code with delta-spark: delta-rs, DuckDB and polars. All three stand on Rust
libraries: `deltalake`'s own, and the Delta kernel.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def by_delta_rs(table: Path) -> pa.Table:
    """By its query engine: `to_pyarrow_table` refuses tables with deletion vectors."""
    rows = QueryBuilder().register("t", DeltaTable(str(table))).execute("SELECT * FROM t").read_all()
    return pa.table(rows)


def by_duckdb(table: Path) -> pa.Table:
    """Its extension is a package: nothing is downloaded."""
    with duckdb.connect(config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}) as connection:
        package = importlib.import_module("duckdb_extension_delta")
        (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
        connection.execute("SET TimeZone = 'UTC'")
        return connection.execute("SELECT * FROM delta_scan(?)", [str(table)]).to_arrow_table()


def by_polars(table: Path) -> pa.Table:
    return pl.scan_delta(str(table)).collect().to_arrow()


READERS: dict[str, Callable[[Path], pa.Table]] = {"delta-rs": by_delta_rs, "DuckDB": by_duckdb, "polars": by_polars}
