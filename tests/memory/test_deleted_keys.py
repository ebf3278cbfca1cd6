"""Files of deleted keys: how many there are, and which can be read."""

import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from changelog.rows import order_column
from deltawriters import tombstones
from deltawriters.keyindex.versions import IndexVersion
from deltawriters.late import deleted_at
from deltawriters.order_values import OrderColumns
from deltawriters.scratch import Scratch
from deltawriters.table import TableSpec
from sink.table.deleted_keys import DeletedKeys, remove_outdated
from sink.table.table_plan import LateOrder
from tests.memory.writers import MemoryTableSpec

SPEC = "value bigint"
FOLDER = tombstones.folder_of("/t")


class Sink:
    """A sink of a table with the key column `a`."""

    def __init__(self, key: pa.DataType) -> None:
        self.spec = MemoryTableSpec("/t/", pa.schema([("a", key)]))
        table: Any = SimpleNamespace(name="lake.t", spec=self.spec)
        self.io = self.spec.files
        self.deleted = DeletedKeys(table, ["a"], LateOrder(OrderColumns(("value",), SPEC), 3600), "rowdelta.s")

    def write(self, unique: str, keys: pa.Array, spec: str = SPEC) -> tuple[str, int]:
        now = pa.repeat(pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC")), len(keys))
        rows = pa.table({"a": keys, tombstones.ORDER_VALUE: [b"1"] * len(keys), tombstones.DELETED_AT: now})
        name = tombstones.name_of(self.spec, rows, unique)
        tombstones.write_tombstones(self.spec, name, spec, rows)
        return name, len(keys)

    def commit(self, version: IndexVersion, new: Sequence[tuple[str, int]]) -> IndexVersion:
        scratch = Scratch("lake.t", lambda _: self.io)
        following = self.deleted.followed_by(version, new, scratch)
        self.deleted.delete_unneeded(version, following)
        return following


def test_neither_files_nor_their_names_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tasks delete keys in each micro-batch, and there was a large delete before."""
    sink, rewritten = Sink(pa.int64()), list[int]()
    write = tombstones.write_tombstones

    def write_again(table: TableSpec, name: str, spec: str, rows: pa.Table) -> None:
        rewritten.append(len(rows))
        write(table, name, spec, rows)

    version = sink.commit(IndexVersion(""), [sink.write("large", pa.array(range(20_000)))])
    for number in range(150):
        new = [sink.write(f"{number}-{task}", pa.array([number * 8 + task])) for task in range(8)]
        with monkeypatch.context() as patch:
            patch.setattr(tombstones, "write_tombstones", write_again)
            version = sink.commit(version, new)
        assert len(version.deleted) <= 16 + 8 + 4
        named = [name for name, _ in version.deleted]
        assert {f"{FOLDER}/{name}" for name in (*named, *version.merged)} == set(sink.io.contents)
    assert len(version.merged) == 256
    assert sum(rewritten) < 8 * 8 * 150  # each key a few times, and the large file not at all
    rows = pa.concat_tables(sink.deleted.read(named))
    assert set(rows.column("a").to_pylist()) == set(range(20_000))
    assert len(rows) == 20_000 + 8 * 150


def test_the_owner_widens_a_key_column() -> None:
    sink = Sink(pa.int64())
    files = [sink.write(f"{key}", pa.array([key], pa.int32() if key < 9 else pa.int64())) for key in range(18)]
    version = sink.commit(IndexVersion("", deleted=tuple(files)), [])
    (rows,) = sink.deleted.read([name for name, _ in version.deleted])
    assert (rows.column("a").type, sorted(rows.column("a").to_pylist())) == (pa.int64(), [*range(18)])


def test_a_file_of_another_key_or_order_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(pa.int64())
    (name, _), (other, _) = sink.write("a", pa.array([1])), sink.write("b", pa.array([2]), "other bigint")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (rows,) = sink.deleted.read([name, other])
            assert rows.column("a").to_pylist() == [1]
    (message,) = caplog.messages
    assert message.startswith(f"lake.t: {FOLDER}/{other} is left out: its keys were deleted when")
    assert "a late change may bring their rows back" in message


def test_how_long_a_key_is_deleted_counts_from_its_time_or_from_now() -> None:
    now = datetime.now(UTC).replace(tzinfo=None)
    soon, long_ago = now + timedelta(hours=1), datetime(2020, 1, 1)
    times = [soon, long_ago, None]
    for column in (pa.array(times, pa.timestamp("us")), pa.array(times, pa.timestamp("us", "UTC"))):
        found = [time.replace(tzinfo=None) for time in deleted_at(pa.table({order_column(0): column})).to_pylist()]
        assert found[0] == soon
        assert all(now <= time < soon for time in found[1:])
    (found,) = deleted_at(pa.table({order_column(0): pa.array([long_ago.date()])})).to_pylist()
    assert found.replace(tzinfo=None) >= now


class Listed:
    """A table's folder, with names of files in its folders."""

    def __init__(self, folders: Mapping[str, Sequence[str]]) -> None:
        self._folders = folders
        self.deleted = list[str]()

    def names(self, folder: str) -> Sequence[str]:
        return self._folders.get(folder, ())

    def delete(self, paths: Collection[str]) -> None:
        self.deleted += paths


@pytest.mark.parametrize(
    ("data_root", "seconds", "gone"),
    [
        ("/t/", 0, ["_rowdelta/deleted/2h.parquet", "_rowdelta/deleted/5h.parquet"]),
        ("/t/", 4 * 3600, ["_rowdelta/deleted/5h.parquet"]),  # another sink keeps them for longer
        ("/t/data", 4 * 3600, ["_rowdelta/deleted/5h.parquet", "data/_rowdelta/deleted/5h.parquet"]),
        ("/others", 9 * 3600, []),
    ],
)
def test_files_of_which_all_deletes_are_long_ago_are_removed(data_root: str, seconds: int, gone: list[str]) -> None:
    now = time.time()
    names = [*(f"{int(now - age * 3600)}-{age}h.parquet" for age in (0, 2, 5)), "theirs.parquet"]
    folder = Listed({"_rowdelta/deleted": names, "data/_rowdelta/deleted": names})
    other = {"index": {"deleted": {"seconds": seconds}}}
    positions = {"rowdelta.a": "{}", "rowdelta.s": "{}"} | ({"rowdelta.b": json.dumps(other)} if seconds else {})
    spec = SimpleNamespace(location="/t/", data_root=data_root)
    table: Any = SimpleNamespace(spec=spec, stored=lambda _: positions)

    def short(paths: Sequence[str]) -> list[str]:
        return sorted(re.sub(r"\d+-", "", path) for path in paths)

    assert short(remove_outdated(table, "rowdelta.s", folder, 3600, dry_run=True)) == [f"/t/{path}" for path in gone]
    assert folder.deleted == []
    remove_outdated(table, "rowdelta.s", folder, 3600, dry_run=False)
    assert short(folder.deleted) == gone
