"""Tasks that make deletion vectors: what they are given, and what is left of them. What they write is in
`test_key_index` and `tests/delta/test_large_vectors.py`.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyspark import SparkContext
from pyspark.accumulators import _accumulatorRegistry
from pyspark.sql import SparkSession

from deltawriters.content import OldRows
from deltawriters.keyindex import CorruptIndexError, IndexedFile
from deltawriters.old_rows import DeletedRows, DeleteGroup, tell
from deltawriters.scratch import Scratch
from deltawriters.vectors import LostVectorError
from sink import plans
from sink.errors import TableError
from sink.spark import deletes as delete_tasks
from sink.spark.deletes import unite_deletes

pytestmark = pytest.mark.spark

IO = PyArrowFileIO()
DATA_FILES = ("a", "b")


@pytest.fixture(autouse=True)
def _a_task_for_each_data_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "ON_DRIVER", 0)
    monkeypatch.setattr(delete_tasks, "_LEAST", 1)


@dataclass(frozen=True)
class Table:
    """As much of a table as tasks need to delete files."""

    io: PyArrowFileIO = IO


def found_rows(folder: Path, properties: tuple[tuple[str, str], ...] = ()) -> DeletedRows:
    old = [OldRows(IndexedFile(name, 0, {}), np.array([1, 5], np.int64)) for name in DATA_FILES]
    told, file = tell(old, 0, f"{folder}/positions", IO)
    assert file is not None
    return DeletedRows.told([told], properties)


def made(
    spark: SparkSession,
    rows: DeletedRows,
    unite: Callable[[Any, DeleteGroup[int], Scratch], list[Any]],
    scratch: Scratch,
) -> list[Any]:
    table: Any = Table()
    return unite_deletes(
        spark, "t", table, rows, dict.fromkeys(DATA_FILES, 0), lambda found, fact: found.size + fact, unite, scratch
    )


def test_what_is_shared_out_has_no_credentials(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark puts it into a file."""
    shared: list[bytes] = []
    original = SparkContext.parallelize

    def parallelize(self: SparkContext, items: Sequence[Any], slices: int | None = None) -> Any:
        shared.append(pickle.dumps(items))
        return original(self, items, slices)

    def unite(_: Any, group: DeleteGroup[int], scratch: Scratch) -> list[Any]:
        return [(group.rows.io_properties, [(file.path, list(old)) for file, old in group.rows.positions()])]

    monkeypatch.setattr(SparkContext, "parallelize", parallelize)
    secret = ("s3.secret-access-key", "planted")
    results = made(spark, found_rows(tmp_path, (secret,)), unite, Scratch("t", lambda _: IO))
    assert results == [((secret,), [(name, [1, 5])]) for name in DATA_FILES], "tasks have it nevertheless"
    (content,) = shared
    assert b"/positions" in content
    assert b"planted" not in content
    assert b"secret" not in content


def test_nothing_of_a_commit_is_kept_for_ever(spark: SparkSession, tmp_path: Path) -> None:
    """A job commits millions of times."""
    known = set(_accumulatorRegistry)
    scratch = Scratch("t", lambda _: IO)

    def unite(_: Any, group: DeleteGroup[int], scratch: Scratch) -> list[Any]:
        scratch.add("a file")
        return []

    made(spark, found_rows(tmp_path), unite, scratch)
    assert scratch.paths == ["a file"] * len(DATA_FILES)
    assert known.issuperset(_accumulatorRegistry)


@pytest.mark.parametrize(
    ("sizes", "cores", "expected"),
    [
        ([5, 5], 2, ["ab"]),
        ([10, 10], 2, ["a", "b"]),
        ([10, 10, 10, 10], 2, ["ab", "cd"]),
        ([10, 10, 10, 10], 3, ["a", "bc", "d"]),
        ([1, 1, 1, 37], 4, ["abc", "d"]),
        ([37, 1, 1, 1], 4, ["a", "bcd"]),
        ([30, 30, 30], 1, ["a", "bc"]),
        ([10] * 26, 1, ["abcdef", "ghijklm", "nopqrs", "tuvwxyz"]),
    ],
)
def test_tasks_get_about_the_same(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], cores: int, expected: list[str]
) -> None:
    monkeypatch.setattr(delete_tasks, "_LEAST", 10)
    monkeypatch.setattr(delete_tasks, "_MOST", 75)
    by_path = dict(zip(ascii_lowercase, sizes, strict=False))
    assert ["".join(paths) for paths in delete_tasks._shared_out(by_path, cores)] == expected


@pytest.mark.parametrize(("error", "told"), [(LostVectorError, TableError), (CorruptIndexError, CorruptIndexError)])
def test_a_task_that_can_t_read_something_waits_for_the_others(
    spark: SparkSession, tmp_path: Path, error: type[Exception], told: type[Exception]
) -> None:
    """Otherwise these would go on, and nobody would delete what they write."""

    def unite(_: Any, group: DeleteGroup[int], scratch: Scratch) -> list[Any]:
        (name,) = group.facts
        path = tmp_path / name
        scratch.add(str(path))
        path.touch()
        if name == DATA_FILES[0]:
            raise error("its bytes are gone")
        time.sleep(1)
        return [name]

    scratch = Scratch("t", lambda _: IO)
    with pytest.raises(told, match="its bytes are gone"):
        made(spark, found_rows(tmp_path), unite, scratch)
    assert scratch.paths == [str(tmp_path / DATA_FILES[1])], "what the caller deletes"
    assert not (tmp_path / DATA_FILES[0]).exists()
