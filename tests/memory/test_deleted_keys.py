"""Files of deleted keys: how many there are, and which can be read."""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io import FileIO

from changelog.rows import order_column
from deltawriters import tombstones
from deltawriters.keyindex.versions import IndexVersion
from deltawriters.late import deleted_at
from deltawriters.order_values import OrderColumns
from deltawriters.scratch import Scratch
from sink.table.deleted_keys import DeletedKeys
from sink.table.table_plan import LateOrder
from tests.memory.writers import MemoryTableSpec

SPEC = "value bigint"
FOLDER = tombstones.folder_of("/t")


class Sink:
    """A sink of a table with the key column `a`."""

    def __init__(self, key: pa.DataType) -> None:
        spec = MemoryTableSpec("/t/", pa.schema([("a", key)]))
        table: Any = SimpleNamespace(name="lake.t", spec=spec)
        self.io = spec.files
        self.deleted = DeletedKeys(table, ["a"], LateOrder(OrderColumns(("value",), SPEC), 3600), "rowdelta.s")

    def write(self, unique: str, keys: pa.Array, spec: str = SPEC) -> tuple[str, int]:
        now = pa.repeat(pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC")), len(keys))
        rows = pa.table({"a": keys, tombstones.ORDER_VALUE: [b"1"] * len(keys), tombstones.DELETED_AT: now})
        name = tombstones.name_of(rows, unique)
        tombstones.write_tombstones(self.io, FOLDER, name, spec, rows)
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

    def write_again(io: FileIO, folder: str, name: str, spec: str, rows: pa.Table) -> None:
        rewritten.append(len(rows))
        write(io, folder, name, spec, rows)

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
