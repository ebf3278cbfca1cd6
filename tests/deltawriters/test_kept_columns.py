"""Columns that were decoded stay on the local disk."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deltawriters import kept_columns
from deltawriters.parquet import rows_at
from deltawriters.storage import file_io

IO = file_io(())
ROWS = 1000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where columns are kept, in tests also small ones."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/local,{tmp_path}/other")
    monkeypatch.setenv(kept_columns.ALLOWED, "true")
    monkeypatch.setattr(kept_columns, "_LEAST_BYTES", 0)
    (tmp_path / "local").mkdir()
    return tmp_path / "local" / "rowdelta-columns"


@pytest.fixture
def table(tmp_path: Path) -> pa.Table:
    """Written to t.parquet, in two row groups."""
    columns = {
        "id": pa.array(range(ROWS), pa.int64()),
        "name": pa.array([None if n % 7 == 0 else f"n{n}" * (n % 50) for n in range(ROWS)]),
        "price": pa.array([Decimal(n) / 100 for n in range(ROWS)], pa.decimal128(12, 2)),
        "at": pa.array(range(ROWS), pa.timestamp("us", "UTC")),
        "tags": pa.array([[str(n)] * (n % 3) for n in range(ROWS)]),
        "place": pa.array(
            [{"x": n, "y": None} for n in range(ROWS)], pa.struct([("x", pa.int32()), ("y", pa.string())])
        ),
        "uid": pa.array([UUID(int=n).bytes for n in range(ROWS)], pa.uuid()),
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=600)
    return table


def read(tmp_path: Path, table: pa.Table, positions: list[int], names: list[str] | None = None) -> None:
    """Read rows, and compare them with the table's."""
    names = names or table.column_names
    parts = rows_at(IO, f"{tmp_path}/t.parquet", np.array(positions), lambda _: names)
    rows = pa.concat_tables(rows for _, rows in parts)
    assert rows.to_pylist() == table.select(names).take(positions).to_pylist()
    assert rows.schema.types == table.select(names).schema.types


@contextmanager
def decoding(monkeypatch: pytest.MonkeyPatch, *expected: tuple[int, list[str]]) -> Iterator[None]:
    """The row groups and columns that are decoded."""
    decoded, original = list[Any](), pq.ParquetFile.read_row_group

    def read_row_group(file: pq.ParquetFile, group: int, names: list[str], **options: Any) -> pa.Table:
        decoded.append((group, names))
        return original(file, group, names, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
        yield
    assert decoded == list(expected)


def test_a_column_is_decoded_once(tmp_path: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    every = table.column_names
    with decoding(monkeypatch, (0, ["id", "name"])):
        read(tmp_path, table, [3, 5, 599], ["id", "name"])
    with decoding(monkeypatch, (0, every[2:]), (1, every)):
        read(tmp_path, table, [0, 598, 600, 999])
    with decoding(monkeypatch):
        read(tmp_path, table, [*range(0, ROWS, 3)])
        read(tmp_path, table, [7], ["uid", "id"])
    with decoding(monkeypatch, (0, ["id"])):
        os.rename(tmp_path / "t.parquet", tmp_path / "u.parquet")
        (_, rows), *_ = rows_at(IO, f"{tmp_path}/u.parquet", np.array([1]), lambda _: ["id"])
        assert rows.to_pylist() == [{"id": 1}]


def test_what_has_no_room_is_read_all_the_same(
    tmp_path: Path, folder: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_columns, "_MOST_BYTES", 3 * 600 * 8)
    read(tmp_path, table, [1], ["id", "at", "price"])
    kept = list(folder.iterdir())
    assert len(kept) == 2
    with decoding(monkeypatch, (0, ["price"])):
        read(tmp_path, table, [1], ["id", "at", "price"])

    for file in kept:
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - kept_columns._UNUSED_SECONDS - 1))
    read(tmp_path, table, [1], ["price"])
    (only,) = folder.iterdir()
    assert only not in kept, "what nobody uses makes room"


def test_half_of_what_is_free_is_left(
    tmp_path: Path, folder: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used() -> int:
        return sum(file.stat().st_size for file in folder.iterdir())

    space = 60_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=space - used()))
    for name in table.column_names * 2:
        read(tmp_path, table, [1, 700], [name])
    assert space / 4 < used() <= space / 2


@pytest.mark.parametrize("content", [b"", b"ARROW1"])
def test_a_broken_file_is_decoded_again(tmp_path: Path, folder: Path, table: pa.Table, content: bytes) -> None:
    read(tmp_path, table, [1], ["id"])
    (file,) = folder.iterdir()
    file.write_bytes(content)
    read(tmp_path, table, [1], ["id"])
    assert file.stat().st_size > 600 * 8


@pytest.mark.parametrize("disk", ["full", "has no room", "is gone", "is read-only", "not of Spark", "to be encrypted"])
def test_disks(tmp_path: Path, folder: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch, disk: str) -> None:
    if disk == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    elif disk == "has no room":

        def replace(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", replace)
    elif disk == "is gone":

        def disk_usage(_: Path) -> None:
            raise FileNotFoundError

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    elif disk == "is read-only":
        folder.parent.rmdir()
        folder.parent.write_bytes(b"")  # no folder can be made there
    else:
        monkeypatch.delenv("SPARK_LOCAL_DIRS" if disk == "not of Spark" else kept_columns.ALLOWED)
    read(tmp_path, table, [1, 700])
    assert not folder.is_dir() or list(folder.iterdir()) == []
