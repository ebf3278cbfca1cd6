"""Rows to delete, as tasks tell the driver of them, and as other tasks get them."""

import json
import pickle
from pathlib import Path
from random import Random

import numpy as np
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from deltawriters import old_rows
from deltawriters.content import OldRows
from deltawriters.keyindex import CorruptIndexError, IndexedFile
from deltawriters.old_rows import DeletedRows, read_spans, tell

IO = PyArrowFileIO()


def old(path: str, *positions: int) -> OldRows:
    return OldRows(IndexedFile(path, 3, {"region": path}), np.array(positions, np.int64))


def found(rows: DeletedRows) -> dict[str, list[int]]:
    return {file.path: list(positions) for file, positions in rows.positions()}


@pytest.mark.parametrize("limits", [(0, 0), (1000, 1000), (0, 1000)])
def test_what_tasks_tell_is_united_by_data_file(tmp_path: Path, limits: tuple[int, int]) -> None:
    tasks = [[old("b", 7, 1), old("a", 2**33)], [old("c", 0), old("b", 1, 9)]]
    told = []
    for number, (task, limit) in enumerate(zip(tasks, limits, strict=True)):
        path = f"{tmp_path}/{number} ä"
        objects, file = tell(task, limit, path, IO)
        assert file == (None if limit else path)
        assert Path(path).exists() == (not limit)
        told.append(json.loads(json.dumps(objects)))
    rows = DeletedRows.told(told, ())
    assert rows.files == {f"{tmp_path}/{number} ä" for number, limit in enumerate(limits) if not limit}
    assert found(rows) == {"a": [2**33], "b": [1, 7, 9], "c": [0]}
    assert list(found(rows)) == ["a", "b", "c"], "in the order of their paths"
    assert rows.found["b"].file == IndexedFile("b", 3, {"region": "b"})
    assert found(pickle.loads(pickle.dumps(rows.of(["c", "b"])))) == {"b": [1, 7, 9], "c": [0]}
    more = rows.with_rows([old("d", 4, 5)])
    assert found(more) == found(rows) | {"d": [4, 5]}
    assert more.files == rows.files


def test_positions_in_files_take_no_room_on_the_driver(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    rows = [old(f"data/{n}", *random.choice(2**24, 20_000, replace=False)) for n in range(10)]
    objects, _ = tell(rows, 100_000, f"{tmp_path}/positions", IO)
    told = DeletedRows.told([objects], ())
    sizes = [part.size for part in told.found.values()]
    assert sum(sizes) == Path(f"{tmp_path}/positions").stat().st_size
    assert min(sizes) > 20_000
    assert len(json.dumps(objects)) < 3000
    assert len(pickle.dumps(told)) < 3000


@pytest.mark.parametrize("damage", ["lost", "short", "byte"])
def test_positions_that_can_t_be_read(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "positions"
    told, _ = tell([old("a", 1, 2), old("b", 5)], 0, str(path), IO)
    content = bytearray(path.read_bytes())
    if damage == "lost":
        path.unlink()
    else:
        content[-6] ^= 1
        path.write_bytes(content if damage == "byte" else content[:-3])
    with pytest.raises(CorruptIndexError, match="rows that a task found"):
        found(DeletedRows.told([told], ()))


def test_parts_of_a_file_that_lie_together_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_rows, "_GAP", 10)
    random = Random(5)
    content = random.randbytes(1000)
    (tmp_path / "file").write_bytes(content)
    spans = [(random.randrange(1000), random.randrange(60)) for _ in range(20)] + [(0, 5), (5, 5), (0, 5)]
    expected = [content[offset : offset + length] for offset, length in spans]
    assert read_spans(IO, str(tmp_path / "file"), spans) == expected
    assert read_spans(IO, str(tmp_path / "file"), [(998, 20)]) == [content[998:]]
    monkeypatch.setattr(old_rows, "_GAP", -1)
    assert read_spans(IO, str(tmp_path / "file"), spans) == expected


def test_nothing_to_delete(tmp_path: Path) -> None:
    told, file = tell([], 0, f"{tmp_path}/x", IO)
    assert (told, file) == ([], None)
    assert found(DeletedRows.told([told], ())) == {}
    assert DeletedRows().files == set()
