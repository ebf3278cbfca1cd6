"""The writer of tables that only grow."""

from pathlib import Path
from typing import Any

import pytest

from changelog.rows import RowKind
from deltawriters import FileContent, TaskId, append
from deltawriters.append import AppendWriter
from tests.deltawriters.lake import Lake
from tests.deltawriters.test_delta import BY_REGION, batch, table_at


@pytest.mark.parametrize("flush_bytes", [1, append.FLUSH_BYTES])
def test_every_insert_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_bytes: int) -> None:
    """The result is the same whether rows are written at once or all at the end: equal rows stay several rows."""
    monkeypatch.setattr(append, "FLUSH_BYTES", flush_bytes)
    table = table_at(tmp_path, BY_REGION)
    writer = AppendWriter(table, TaskId(0, 1, "op"))
    places = [(1, "eu"), (1, "eu"), (1, "us"), (2, None)]
    rows: list[dict[str, Any]] = [{"id": number, "region": region} for number, region in places]
    for start in (0, 2):
        writer.write(batch([(RowKind.INSERT, 1, row) for row in rows[start : start + 2]]))
    result = writer.close()
    assert result.rows == {"+I": 4, "-U": 0, "+U": 0, "-D": 0}
    assert {file.content for file in result.files} == {FileContent.DATA}
    assert len(result.files) == 3
    found = sorted((row["id"], row["region"] or "") for row in Lake(table, [result.files]).rows())
    assert found == [(1, "eu"), (1, "eu"), (1, "us"), (2, "")]


def test_nothing_came(tmp_path: Path) -> None:
    result = AppendWriter(table_at(tmp_path), TaskId(0, 1, "op")).close()
    assert (result.files, result.rows["+I"]) == ([], 0)


def test_an_aborted_task_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "FLUSH_BYTES", 1)
    writer = AppendWriter(table_at(tmp_path), TaskId(0, 1, "op"))
    writer.write(batch([(RowKind.INSERT, 1, {"id": 1})]))
    assert writer.created_paths
    writer.abort()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
