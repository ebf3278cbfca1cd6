"""The key index against plain Python: a slow polynomial for the hash, a dict of live rows for runs, probes
and merges.
"""

import os
import pickle
import random
import sys
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from datetime import time as time_of_day
from decimal import Decimal
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from deltawriters.keyindex import (
    SUPERSEDES,
    TOMBSTONE,
    CorruptIndexError,
    Entries,
    IndexedFile,
    IndexSlice,
    RunInfo,
    distinct,
    hashing,
    high_hash,
    low_hash,
    open_run,
    plan_merge,
    random_base,
    run_files,
    runs,
    write_run,
)

EVERYTHING = (0, 2**64)
IO = PyArrowFileIO()


# ---------------------------------------------------------------- hashing


def polynomial(words: list[int], base: int = hashing.BASE) -> int:
    state = 1
    for word in words:
        state = (state * base + word) % hashing.PRIME
    return state


def words_of(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 4].ljust(4, b"\0"), "little") for i in range(0, len(data), 4)]


def encode(value: Any, dtype: pa.DataType) -> list[int]:
    """The words of one value, as the module's docstring says."""
    if isinstance(value, str | bytes) and dtype != pa.binary(16):
        data = value.encode() if isinstance(value, str) else value
        return [len(data), *words_of(data)]
    if isinstance(value, bytes):
        return words_of(value)
    if isinstance(value, Decimal):
        return words_of(int(str(value).replace(".", "")).to_bytes(16, "little", signed=True))  # all of `scale` digits
    number = pa.scalar(value, dtype).value if not isinstance(value, bool | int) else int(value)
    return words_of(number.to_bytes(max(dtype.bit_width // 8, 4), "little", signed=True))


MOMENT = datetime(2026, 2, 3, 4, 5, 6, 789, UTC)
SAMPLES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False, True]),
    (pa.int8(), [-1, 0, 127]),
    (pa.int32(), [-(2**31), -1, 2**31 - 1]),
    (pa.int64(), [-(2**63), -1, 2**63 - 1]),
    (pa.date32(), [date(1969, 12, 31), date(1970, 1, 1), date(2026, 1, 1)]),
    (pa.time64("us"), [time_of_day(0), time_of_day(1), time_of_day(23, 59, 59, 999999)]),
    (pa.timestamp("us"), [datetime(1950, 1, 1), datetime(1970, 1, 1), MOMENT.replace(tzinfo=None)]),
    (pa.timestamp("us", "UTC"), [datetime(1970, 1, 1, tzinfo=UTC), MOMENT, MOMENT.replace(year=1960)]),
    (pa.decimal128(38, 2), [Decimal("-1.25"), Decimal("0.00"), Decimal("9" * 36 + ".99")]),
    (pa.string(), ["", "abcd", "grüße, lang genug für mehrere Wörter"]),
    (pa.binary(), [b"\0", b"", b"\0\0\0\0\0"]),
    (pa.binary(16), [bytes(16), UUID(int=1).bytes, b"\xff" * 16]),
]
TYPES = [dtype for dtype, _ in SAMPLES]


@pytest.mark.parametrize(("dtype", "values"), SAMPLES, ids=[str(dtype) for dtype in TYPES])
def test_every_key_type_hashes_as_the_polynomial_of_its_words(dtype: pa.DataType, values: list[Any]) -> None:
    beside = pa.array([1, 2, 3], pa.int64())
    hashes = low_hash([pa.array(values, dtype), beside])
    expected = [polynomial(encode(v, dtype) + encode(b, pa.int64())) for v, b in zip(values, [1, 2, 3], strict=True)]
    assert hashes.tolist() == expected
    assert hashes.dtype == np.uint64


@pytest.mark.parametrize(("dtype", "values"), SAMPLES, ids=[str(dtype) for dtype in TYPES])
def test_hash_depends_on_the_value_only_not_on_slices_or_neighbours(dtype: pa.DataType, values: list[Any]) -> None:
    # offset 3 into a longer array, as a batch that was sliced; 3 isn't a multiple of the 8 bits of a bool byte
    column = pa.array([*values, *values, *reversed(values)], dtype)
    for columns in ([column], [column, column]):
        whole = low_hash(columns)
        for start, length in ((3, 3), (1, 5), (8, 1), (2, 0)):
            part = low_hash([c.slice(start, length) for c in columns])
            assert part.tolist() == whole[start : start + length].tolist()
        assert len(set(whole.tolist())) == len(set(values))


def test_blocks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [pa.array([str(i) * (i % 7) for i in range(100)]), pa.array(range(100), pa.int32())]
    whole = low_hash(columns)
    monkeypatch.setattr(hashing, "_BLOCK", 7)
    assert low_hash(columns).tolist() == whole.tolist()


def test_the_arithmetic_holds_at_its_limits() -> None:
    # the largest base, -1, overflows first, and reaches 0, which intermediate results may hold as the prime
    base = hashing.PRIME - 1
    keys = list(product((0, 1, 2, 3, -1, -2), repeat=4))
    hashes = low_hash([pa.array(column, pa.int32()) for column in zip(*keys, strict=True)], base)
    assert hashes.tolist() == [polynomial([word % 2**32 for word in key], base) for key in keys]
    assert 0 in hashes


def test_keys_made_to_collide_at_one_base_do_not_at_another() -> None:
    """Anybody can make such keys for a base that they know: base * factor = rest modulo the prime, both of 31 bits."""
    (before, _), (rest, factor) = (hashing.PRIME, 0), (hashing.BASE, 1)
    previous = 0
    while rest >= 2**31:  # Euclid's algorithm, extended
        quotient = before // rest
        before, rest, previous, factor = rest, before % rest, factor, previous - quotient * factor
    keys = [(max(0, -factor), rest), (max(0, factor), 0)]
    columns = [pa.array(column, pa.int32()) for column in zip(*keys, strict=True)]
    one, other = low_hash(columns)
    assert one == other, "what it is about"
    bases = {random_base() for _ in range(20)}
    assert len(bases) == 20
    for base in bases:
        one, other = low_hash(columns, base)
        assert one != other


def test_a_single_column_of_64_bits_is_its_own_hash() -> None:
    assert low_hash([pa.array([-1, 5], pa.int64())]).tolist() == [2**64 - 1, 5]
    assert low_hash([pa.array([-1, 5], pa.int32())]).tolist() == [2**64 - 1, 5]
    assert low_hash([pa.array([date(1970, 1, 2)])]).tolist() == [1]
    assert low_hash([pa.array([], pa.int64())]).tolist() == []
    assert low_hash([pa.array([], pa.string())]).tolist() == []


def test_large_strings_hash_as_strings() -> None:
    values = ["a", "", "long enough for several words"]
    for hashed in (low_hash, high_hash):
        assert hashed([pa.array(values, pa.large_string())]).tolist() == hashed([pa.array(values)]).tolist()
        assert hashed([pa.array(values, pa.large_binary())[1:]]).tolist() == hashed([pa.array(values)[1:]]).tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=30), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=9)), min_size=1))
def test_tuples_hash_as_the_polynomial(keys: list[tuple[str, int, bytes]]) -> None:
    types = (pa.string(), pa.int64(), pa.binary())
    columns = [pa.array(values, t) for values, t in zip(zip(*keys, strict=True), types, strict=True)]
    expected = [polynomial([w for v, t in zip(key, types, strict=True) for w in encode(v, t)]) for key in keys]
    assert low_hash(columns).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(st.sets(st.tuples(*[st.text("a\0b", max_size=9)] * 3), min_size=2, max_size=20))
def test_different_keys_hash_differently(keys: set[tuple[str, str, str]]) -> None:
    assert len(set(low_hash([pa.array(c) for c in zip(*keys, strict=True)]).tolist())) == len(keys)


def test_the_boundary_between_columns_counts() -> None:
    hashes = low_hash([pa.array(["a", "ab", "", "abc"]), pa.array(["bc", "c", "abc", ""])])
    assert len(set(hashes.tolist())) == 4


def test_the_hash_never_changes() -> None:
    # stored in every index: if this fails, the encoding id must change
    assert low_hash([pa.array(["rowdelta", ""]), pa.array([7, -7])]).tolist() == [
        polynomial([8, *words_of(b"rowdelta"), 7, 0]),
        polynomial([0, 0xFFFFFFF9, 0xFFFFFFFF]),
    ]
    assert low_hash([pa.array(["rowdelta"])]).tolist() == [1202786783508992867]
    assert high_hash([pa.array(["rowdelta"])]).tolist() == [835667550292435334]
    # splitmix64's second number from seed 0: its state is then twice the golden ratio's bits
    assert high_hash([pa.array([0x3C6EF372FE94F82A])]).tolist() == [0x6E789E6AA1B965F4]


def test_nulls_and_floats_are_refused() -> None:
    with pytest.raises(ValueError, match="nulls"):
        low_hash([pa.array([1, None])])
    with pytest.raises(TypeError, match="double"):
        low_hash([pa.array([1.0])])


# ------------------------------------------------------------------- runs


def data_file(path: str) -> IndexedFile:
    return IndexedFile(path, 1, {"1000": "eu", "1001": None})


def entries(*rows: tuple[int, int, int, int], files: tuple[str, ...] = ("a.parquet",)) -> Entries:
    """Entries of (high, low, file, pos)."""
    high, low, file, pos = zip(*rows, strict=True)
    return Entries(
        np.array(high, np.uint64),
        np.array(low, np.uint64),
        np.array(file, np.uint32),
        np.array(pos, np.uint32),
        tuple(data_file(path) for path in files),
    )


def rows_of(e: Any) -> list[tuple[int, int, int, int]]:
    return list(zip(e.high.tolist(), e.low.tolist(), e.file.tolist(), e.pos.tolist(), strict=True))


@pytest.mark.parametrize("most_packed", [0, 4])
def test_a_run_is_read_back_sorted_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_packed: int
) -> None:
    monkeypatch.setattr(runs, "_PACKED_ENTRIES", most_packed)
    written = entries(
        (2**64 - 1, 1, 0, 5), (7, 9, int(TOMBSTONE), 0), (7, 3, 1, 2**32 - 1), (7, 9, 0, 1), files=("a", "b")
    )
    info = write_run(IO, str(tmp_path), "r", 4, written)
    assert (info.sequence, info.entries, info.first, info.last) == (4, 4, 7, 2**64 - 1)
    assert info.size_in_bytes == (tmp_path / "r").stat().st_size
    assert RunInfo.from_json(info.to_json()) == info
    run = open_run(IO, str(tmp_path), info)
    # entries of one key keep their order, newest first
    assert rows_of(run) == [(7, 3, 1, 2**32 - 1), (7, 9, TOMBSTONE, 0), (7, 9, 0, 1), (2**64 - 1, 1, 0, 5)]
    assert run.files == written.files
    assert run.is_packed == run.high.flags.writeable == bool(most_packed)
    assert open_run(PyArrowFileIO(), str(tmp_path), info) is run
    assert open_run(IO, f"file:{tmp_path}", info).high.tolist() == run.high.tolist()


@pytest.mark.parametrize(
    ("is_integer", "most_bytes"), [(True, 6.5), (False, 17.5)], ids=["an integer", "other keys, and history"]
)
def test_a_packed_run_is_small_and_loses_nothing(tmp_path: Path, is_integer: bool, most_bytes: float) -> None:
    numbers = np.random.default_rng(1)
    low = numbers.permutation(2_000_000)[:50_000].astype(np.uint64)
    high = hashing.mixed(low) if is_integer else numbers.integers(0, 2**64, len(low), np.uint64)
    low = low if is_integer else numbers.integers(0, hashing.PRIME, len(low), np.uint64)
    file, pos = numbers.integers(0, 2, len(low), np.uint32) | SUPERSEDES, np.arange(len(low), dtype=np.uint32)
    order = pa.array([number.to_bytes(8, "big") for number in range(len(low))], pa.binary())
    written = Entries(high, low, file, pos, (data_file("a"), data_file("b")))
    for each in (written, replace(written, order=order)):
        info = write_run(IO, str(tmp_path), "r", 1, each)
        run, expected = open_run(IO, str(tmp_path), info), each.sorted()
        assert rows_of(run) == rows_of(expected)
        assert run.order == expected.order
        runs._opened.clear()
        if each.order is None:
            assert info.size_in_bytes / info.entries < most_bytes


@pytest.mark.parametrize(("last", "in_all"), [(2**64 - 1, 10), (2**63 - 1, 20)], ids=["all keys", "half of the keys"])
def test_larger_runs_are_packed_in_a_small_index_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, in_all: int
) -> None:
    """Or what a process can't keep would be unpacked in each micro-batch."""
    monkeypatch.setattr(runs, "_PACKED_ENTRIES", 4)
    monkeypatch.setattr(runs, "_PACKED_INDEX", 100)
    written = entries(*[(last // 9 * number, number, 0, 0) for number in range(10)])
    for number, (beside, packed) in enumerate({100 - in_all: True, 101 - in_all: False}.items()):
        info = write_run(IO, str(tmp_path), f"r{number}", 1, written, beside)
        assert open_run(IO, str(tmp_path), info).is_packed == packed
    assert not open_run(IO, str(tmp_path), write_run(IO, str(tmp_path), "unknown", 1, written)).is_packed
    ordered = replace(written, order=pa.array([b"12345678"] * 10))
    for number, (beside, packed) in enumerate({50 - in_all: True, 51 - in_all: False}.items()):
        info = write_run(IO, str(tmp_path), f"o{number}", 1, ordered, beside)
        assert open_run(IO, str(tmp_path), info).is_packed == packed, "it takes more memory"
    small = write_run(IO, str(tmp_path), "small", 1, entries((1, 1, 0, 0), (2**63 + 1, 2, 0, 0)), 10_000)
    assert open_run(IO, str(tmp_path), small).is_packed


def test_runs_that_name_the_same_files_share_what_is_known_of_them(tmp_path: Path) -> None:
    """An index of a billion keys has 250 runs that are never merged, and each names all data files of the table."""
    infos = [write_run(IO, str(tmp_path), f"r{n}", n, entries((1, n, 0, 0), files=("shared",))) for n in range(2)]
    one, other = (open_run(IO, str(tmp_path), info) for info in infos)
    assert one.files[0] is other.files[0]
    changed = replace(entries((1, 1, 0, 0)), files=(replace(data_file("shared"), spec_id=7),))
    assert open_run(IO, str(tmp_path), write_run(IO, str(tmp_path), "c", 3, changed)).files[0].spec_id == 7


def test_a_process_holds_few_entries_of_packed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks into more runs than that, in turn, finds those that are kept."""
    monkeypatch.setattr(runs, "_UNPACKED_BYTES", 5 * 24)
    monkeypatch.setattr(runs, "_opened", OrderedDict())
    infos = [
        write_run(IO, str(tmp_path), f"r{n}", 1, entries(*[(i * 2**63, n, 0, 0) for i in range(2)])) for n in range(4)
    ]
    for info in infos * 2:
        assert open_run(IO, str(tmp_path), info).is_packed
    assert [opened.run.info for opened in runs._opened.values()] == infos[:2]
    for opened in runs._opened.values():
        opened.looked_into -= 100
    for info in infos[2:]:
        open_run(IO, str(tmp_path), info)
    assert [opened.run.info for opened in runs._opened.values()] == infos[2:], "the others are used no more"
    large = write_run(IO, str(tmp_path), "large", 1, entries(*[(i * 2**61, i, 0, 0) for i in range(7)]))
    assert open_run(IO, str(tmp_path), large).info == large, "it is larger than all that may be held"
    assert [opened.run.info for opened in runs._opened.values()] == infos[2:]


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_run_that_nobody_uses_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool) -> None:
    """The driver looks into each run for some seconds only, until it is merged. One that is mapped takes no memory, and
    would have to be verified again, but for one that was merged away.
    """
    monkeypatch.setattr(runs, "_opened", OrderedDict())
    if not is_packed:
        monkeypatch.setattr(runs, "_PACKED_ENTRIES", 0)
    infos = [write_run(IO, str(tmp_path), f"r{n}", 1, entries((0, n, 0, 0), (2**63, n, 0, 0))) for n in range(5)]
    for info in infos[:4]:
        assert open_run(IO, str(tmp_path), info).is_packed == is_packed
    for gone in ("r0", "r2"):
        (tmp_path / gone).unlink()
    for info in (infos[0], infos[1]):
        runs._opened[str(tmp_path), info].looked_into -= 100
    open_run(IO, str(tmp_path), infos[4])
    kept = [opened.run.info for opened in runs._opened.values()]
    assert kept == infos[2 if is_packed else 1 :], "r2 was looked into just now, as by a micro-batch before its merge"


def test_order_values_of_packed_runs_take_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_UNPACKED_BYTES", 1000)
    monkeypatch.setattr(runs, "_opened", OrderedDict())
    for number in range(3):
        written = replace(entries((0, 1, 0, 0), (2**63, 2, 0, 0)), order=pa.array([b"x" * 200] * 2))
        open_run(IO, str(tmp_path), write_run(IO, str(tmp_path), f"r{number}", 1, written))
    assert len(runs._opened) == 2


def test_threads_may_open_runs_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_UNPACKED_BYTES", 20 * 24)
    monkeypatch.setattr(runs, "_UNUSED_SECONDS", -1.0)
    monkeypatch.setattr(runs, "_opened", OrderedDict())
    infos = [write_run(IO, str(tmp_path), f"r{n}", 1, entries((0, n, 0, 0), (2**63, n, 0, 0))) for n in range(30)]

    def look(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(infos), 500).tolist():
            assert open_run(IO, str(tmp_path), infos[number]).low.tolist() == [number, number]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(look, range(8))) == [None] * 8
    finally:
        sys.setswitchinterval(before)


def test_an_empty_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_run(IO, str(tmp_path), "r", 1, replace(entries((1, 1, 0, 0)), high=np.empty(0, np.uint64)))


def test_damaged_runs_are_corrupt(tmp_path: Path) -> None:
    info = write_run(IO, str(tmp_path), "r", 1, entries(*[(i, i, 0, i) for i in range(1000)]))
    path = tmp_path / "r"
    good = path.read_bytes()
    for damage in (good[:-1], good[:100], b"", good + b"\0", good[:700] + bytes([good[700] ^ 1]) + good[701:]):
        path.write_bytes(damage)
        with pytest.raises(CorruptIndexError, match="CRC"):
            open_run(IO, str(tmp_path), info)
    path.unlink()
    with pytest.raises(CorruptIndexError, match="missing"):
        open_run(IO, str(tmp_path), info)


@pytest.mark.parametrize("change", [0x01, 0x40, 0xFF])
def test_a_damaged_byte_is_corrupt_or_does_not_matter(tmp_path: Path, change: int) -> None:
    """The files of a run are read without its checksum. Arrow has many words for what it finds then."""
    info = write_run(IO, str(tmp_path), "r", 1, entries((1, 2, 0, 3)))
    path = tmp_path / "r"
    good = path.read_bytes()
    corrupt = 0
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ change]) + good[place + 1 :])
        try:
            run_files(IO, str(tmp_path), info)
        except CorruptIndexError:
            corrupt += 1
    assert corrupt > 100


def test_a_whole_file_that_is_no_run_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(b"")
    with pytest.raises(CorruptIndexError, match="not an index run"):
        open_run(IO, str(tmp_path), RunInfo("r", 1, 0, 0, 0, 0, 0))


class RemoteIO(PyArrowFileIO):
    """Storage that isn't local: `s3://` paths, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.reads = 0

    def new_output(self, location: str) -> PyArrowFile:
        return super().new_output(self._local(location))

    def new_input(self, location: str) -> PyArrowFile:
        self.reads += 1
        return super().new_input(self._local(location))

    def _local(self, location: str) -> str:
        return f"{self.folder}/{location.removeprefix('s3://bucket/')}"


def test_a_remote_run_is_copied_once_and_its_copy_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def forget() -> None:
        runs._opened.clear()

    io = RemoteIO(tmp_path)
    info = write_run(io, "s3://bucket/index", "r", 1, entries((1, 2, 0, 3)))
    forget()
    assert rows_of(open_run(io, "s3://bucket/index", info)) == [(1, 2, 0, 3)]
    assert io.reads == 0  # this machine has written it

    (copy,) = (tmp_path / "tmp").glob("rowdelta-index-*/*")
    copy.unlink()  # another machine
    forget()
    assert rows_of(open_run(io, "s3://bucket/index", info)) == [(1, 2, 0, 3)]
    forget()  # another process
    assert rows_of(open_run(io, "s3://bucket/index", info)) == [(1, 2, 0, 3)]
    assert io.reads == 1

    copy.unlink()
    copy.write_bytes(b"half a cop")
    forget()
    assert rows_of(open_run(io, "s3://bucket/index", info)) == [(1, 2, 0, 3)]
    assert io.reads == 2

    copy.unlink()
    (tmp_path / "index" / "r").write_bytes(b"damaged")
    forget()
    with pytest.raises(CorruptIndexError):
        open_run(io, "s3://bucket/index", info)
    assert list(copy.parent.iterdir()) == []


def test_a_copy_in_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has a run mapped for hours. When it ends, the next one finds the copy, and reads no gigabytes again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runs, "_MARKED_BYTES", 0)
    io = RemoteIO(tmp_path)
    used, unused = (write_run(io, "s3://bucket/index", name, 1, entries((1, 2, 0, 3))) for name in ("used", "unused"))
    open_run(io, "s3://bucket/index", used)
    open_run(io, "s3://bucket/index", unused)
    elapsed = runs._CACHE_SECONDS + 1
    for path in tmp_path.glob("rowdelta-index-*/*"):
        os.utime(path, (path.stat().st_atime - elapsed, path.stat().st_mtime - elapsed))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + elapsed)
    open_run(io, "s3://bucket/index", used)
    runs._remove_unused()
    runs._opened.clear()
    left = list(tmp_path.glob("rowdelta-index-*/*"))
    assert len(left) == (2 if runs._BOOT_ID.exists() else 1), "its copy and mark"
    open_run(io, "s3://bucket/index", used)
    assert io.reads == 0


@pytest.mark.parametrize("found", ["open to all", "a link", "a file", "of somebody else"])
def test_a_local_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """Copies and marks of verified runs are trusted, and any user can create a folder of that name."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if found == "of somebody else":
        somebody_else = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: somebody_else)
    usual = temporary / f"rowdelta-index-{os.getuid()}"
    if found == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        usual.symlink_to(tmp_path / "theirs")
    elif found == "a file":
        usual.write_bytes(b"")
    else:
        usual.mkdir(mode=0o700)
        usual.chmod(0o777 if found == "open to all" else 0o700)
    io = RemoteIO(tmp_path)
    info = write_run(io, "s3://bucket/index", "r", 1, entries((1, 2, 0, 3)))
    for _ in range(2):
        runs._opened.clear()  # another process
        assert rows_of(open_run(io, "s3://bucket/index", info)) == [(1, 2, 0, 3)]
    assert found == "a file" or list(usual.iterdir()) == []
    if found != "of somebody else":  # whose user can't be played to the end
        assert io.reads == 0, "the processes of a user share the other folder"
        (other,) = (folder for folder in temporary.iterdir() if folder != usual)
        assert other.stat().st_mode & 0o777 == 0o700


def test_a_large_run_is_verified_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes with the old modification time are not noticed until the machine starts again. This shows that the
    checksum isn't computed anew.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(runs, "_MARKED_BYTES", 0)
    monkeypatch.setattr(runs, "_BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "tmp").mkdir()
    runs._BOOT_ID.write_text("one")
    info = write_run(IO, str(tmp_path), "r", 1, entries((1, 2, 0, 3)))
    file = tmp_path / "r"

    def opened_by_another_process() -> list[tuple[int, int, int, int]]:
        runs._opened.clear()
        return rows_of(open_run(IO, str(tmp_path), info))

    assert opened_by_another_process() == [(1, 2, 0, 3)]
    written, modified = file.read_bytes(), file.stat().st_mtime_ns
    damaged = bytearray(written)
    damaged[written.index((3).to_bytes(4, "little"), written.index((2).to_bytes(8, "little")))] = 4
    file.write_bytes(damaged)
    os.utime(file, ns=(modified, modified))
    assert opened_by_another_process() != [(1, 2, 0, 3)]

    runs._BOOT_ID.write_text("two")
    with pytest.raises(CorruptIndexError):
        opened_by_another_process()
    runs._BOOT_ID.write_text("one")
    file.write_bytes(damaged)
    with pytest.raises(CorruptIndexError):
        opened_by_another_process()

    file.write_bytes(written)
    long_ago = time.time() - 2 * runs._CACHE_SECONDS
    for mark in (tmp_path / "tmp").glob("rowdelta-index-*/*"):
        os.utime(mark, (long_ago, long_ago))
    assert opened_by_another_process() == [(1, 2, 0, 3)]
    assert len(list((tmp_path / "tmp").glob("rowdelta-index-*/*"))) == 1  # those of the earlier files are gone


# ------------------------------------------------------- probes and merges

HIGHS = (0, 1, 2**62, 2**63, 2**64 - 1)
KEYS = 12
"""Key k hashes to (HIGHS[k % 5], k): several keys share `high`, at the ends of the range too."""
EDGES = (0, 1, 2, 2**62, 2**62 + 1, 2**63 + 5, 2**64 - 1, 2**64)
Row = tuple[str, int]


def high_of(key: int) -> int:
    return HIGHS[key % len(HIGHS)]


@dataclass
class Model:
    """An index, and the rows that it must find. Steps take random choices from `rng`."""

    location: str
    rng: random.Random
    live: dict[int, set[Row]] = field(default_factory=dict)
    runs: list[RunInfo] = field(default_factory=list)
    dead: dict[str, int] = field(default_factory=dict)
    sequence: int = 0
    names: int = 0

    def own_batch(self) -> None:
        """Upserts and deletes, one entry a key; also a run of tombstones only."""
        file = self._new_name("own")
        changes = []
        for pos, key in enumerate(self._some_keys()):
            if self.rng.random() < 0.4:
                self.live[key] = set()
                changes.append((high_of(key), key, int(TOMBSTONE), 0))
            else:
                self.live[key] = {(file, pos)}
                changes.append((high_of(key), key, int(SUPERSEDES), pos))
        self._write(changes, file)

    def foreign_files(self) -> None:
        """Another writer's rows, duplicates included."""
        file = self._new_name("foreign")
        keys = self.rng.choices(range(KEYS), k=self.rng.randint(1, 8))
        for pos, key in enumerate(keys):
            self.live.setdefault(key, set()).add((file, pos))
        self._write([(high_of(key), key, 0, pos) for pos, key in enumerate(keys)], file)

    def remove_file(self) -> None:
        for file in self._some_file():
            self._kill(file)
            self.sequence += 1
            self.dead[file] = self.sequence

    def read_anew(self) -> None:
        """Another writer deleted rows from a file: what is left of it comes with a newer run."""
        for file in self._some_file():
            rows = sorted((key, pos) for key, rows in self.live.items() for path, pos in rows if path == file)
            self._kill(file)
            kept = [row for row in rows if self.rng.random() < 0.6]
            for key, pos in kept:
                self.live[key].add((file, pos))
            self._write([(high_of(key), key, 0, pos) for key, pos in kept], file)
            self.dead[file] = self.sequence

    def merge(self) -> None:
        sequences = sorted({run.sequence for run in self.runs})
        if not sequences:
            return
        chosen = plan_merge(self.runs)
        if not chosen or self.rng.random() < 0.5:
            start, stop = sorted(self.rng.choices(range(len(sequences) + 1), k=2))
            chosen = tuple(run.name for run in self.runs if run.sequence in sequences[start:stop])
        oldest = any(run.name in chosen and run.sequence == sequences[0] for run in self.runs)
        self._merge(chosen, oldest)

    def merge_all(self) -> None:
        self._merge(tuple(run.name for run in self.runs), True)
        self.dead.clear()

    def _merge(self, chosen: tuple[str, ...], drop_tombstones: bool) -> None:
        index = IndexSlice(self.location, (), self._shuffled(), self.dead, chosen, drop_tombstones)
        written = []
        for first, last in self._ranges():
            written += index.write_merged(self._new_name("merged"), first, last, self.rng.choice([1, 3, 100]))
        self.runs = [run for run in self.runs if run.name not in chosen] + written

    def check(self) -> None:
        index = IndexSlice(self.location, (), self._shuffled(), self.dead)
        found: list[tuple[int, Row]] = []
        for first, last in self._ranges():
            keys = [key for key in range(KEYS + 3) if first <= high_of(key) < last]
            self.rng.shuffle(keys)
            keys += keys[:1]  # a key asked for twice is found twice
            located = index.probe(*hashes(keys), first, last)
            assert len({f.path for f in located.files}) == len(located.files)
            rows = list(zip(located.query.tolist(), located.file.tolist(), located.pos.tolist(), strict=True))
            again = [row for row in rows if row[0] == len(keys) - 1]
            assert sorted(r[1:] for r in again) == sorted(r[1:] for r in rows if r[0] == 0)
            for query, file, pos in rows:
                if query < len(keys) - 1:
                    assert located.files[file] == data_file(located.files[file].path)
                    found.append((keys[query], (located.files[file].path, pos)))
        assert sorted(found) == sorted((key, row) for key, rows in self.live.items() for row in rows)

    def _write(self, changes: list[tuple[int, int, int, int]], file: str) -> None:
        """One run a task that has changes."""
        self.sequence += 1
        for first, last in self._ranges():
            mine = [change for change in changes if first <= change[0] < last]
            self.rng.shuffle(mine)
            if mine:
                name = self._new_name("run")
                # file 1 is in the list, but no entry's
                files = (file, "unused")
                self.runs.append(write_run(IO, self.location, name, self.sequence, entries(*mine, files=files)))

    def _kill(self, file: str) -> None:
        for key, rows in self.live.items():
            self.live[key] = {row for row in rows if row[0] != file}

    def _some_keys(self) -> list[int]:
        keys: list[int] = self.rng.sample(range(KEYS), self.rng.randint(1, KEYS))
        return keys

    def _some_file(self) -> list[str]:
        files = sorted({path for rows in self.live.values() for path, _ in rows})
        return [self.rng.choice(files)] if files else []

    def _ranges(self) -> list[tuple[int, int]]:
        """The whole space, cut anew for each step."""
        inner = self.rng.sample(EDGES[1:-1], self.rng.randint(0, 3))
        edges = [0, *sorted(inner), 2**64]
        return list(pairwise(edges))

    def _shuffled(self) -> tuple[RunInfo, ...]:
        return tuple(self.rng.sample(self.runs, len(self.runs)))

    def _new_name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}-{self.names}"


def hashes(keys: list[int]) -> tuple[Any, Any]:
    return np.array([high_of(key) for key in keys], np.uint64), np.array(keys, np.uint64)


STEPS = (Model.own_batch, Model.foreign_files, Model.remove_file, Model.read_anew, Model.merge)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(STEPS), min_size=1, max_size=20))
def test_any_history_finds_the_live_rows(rng: random.Random, steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(folder, rng)
        for step in steps:
            step(model)
            model.check()
        model.merge_all()
        model.check()
        # nothing is kept that can't be found
        assert sum(run.entries for run in model.runs) == sum(map(len, model.live.values()))
        for run in model.runs:
            paths = [f.path for f in open_run(IO, folder, run).files]
            assert set(paths) <= {path for rows in model.live.values() for path, _ in rows}
        runs._opened.clear()


def test_within_a_run_the_first_that_supersedes_hides_the_rest(tmp_path: Path) -> None:
    supersedes = int(SUPERSEDES)
    run = entries(
        (5, 1, 0, 10), (5, 1, 0, 11), (5, 1, supersedes, 12), (5, 1, 0, 13), (5, 1, supersedes, 14),
        (5, 2, int(TOMBSTONE), 0), (5, 2, 0, 20), (5, 3, 0, 30),
    )  # fmt: skip
    info = write_run(IO, str(tmp_path), "r", 1, run)
    index = IndexSlice(str(tmp_path), (), (info,), {}, ("r",), True)
    for either in (index, replace(index, runs=tuple(index.write_merged("m", *EVERYTHING)))):
        located = either.probe(np.full(3, 5, np.uint64), np.array([3, 2, 1], np.uint64), *EVERYTHING)
        assert sorted(zip(located.query.tolist(), located.pos.tolist(), strict=True)) == [
            (0, 30),
            (2, 10),
            (2, 11),
            (2, 12),
        ]


def test_the_many_versions_of_a_hot_key_are_told_apart_one_by_one(tmp_path: Path) -> None:
    """Pairs of them all would need 20 GB."""
    count = 50_000
    low = np.random.default_rng(1).permutation(count).astype(np.uint64)
    zeros = np.zeros(count, np.uint32)
    versions = Entries(np.full(count, 5, np.uint64), low, zeros, low.astype(np.uint32), (data_file("a.parquet"),))
    info = write_run(IO, str(tmp_path), "r", 1, versions)
    located = IndexSlice(str(tmp_path), (), (info,), {}).probe(versions.high, low, *EVERYTHING)
    assert sorted(located.query.tolist()) == list(range(count))
    assert (located.pos == low[located.query]).all()


def test_a_slice_survives_pickling_after_use(tmp_path: Path) -> None:
    info = write_run(IO, str(tmp_path), "r", 1, entries((1, 2, 0, 3)))
    index = IndexSlice(str(tmp_path), (), (info,), {"b.parquet": 4})
    keys = np.array([1], np.uint64), np.array([2], np.uint64)
    assert index.probe(*keys, *EVERYTHING).pos.tolist() == [3]
    copy = pickle.loads(pickle.dumps(index))
    assert copy == index
    assert copy.probe(*keys, *EVERYTHING).pos.tolist() == [3]


def test_keys_outside_the_range_are_refused(tmp_path: Path) -> None:
    index = IndexSlice(str(tmp_path), (), (), {})
    for key in (0, 3):
        with pytest.raises(ValueError, match="outside"):
            index.probe(*hashes([2, key]), 5, 2**63)
    assert len(index.probe(*hashes([2]), 5, 2**63).query) == 0
    assert len(index.probe(*hashes([]), *EVERYTHING).query) == 0


def test_merged_runs_hold_about_max_entries_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    infos = []
    for sequence in range(4):
        high = rng.integers(0, 2**64, 1000, np.uint64)
        file = np.full(1000, SUPERSEDES)
        run = Entries(high, high, file, np.arange(1000, dtype=np.uint32), (data_file(f"f{sequence}"),))
        infos.append(write_run(IO, str(tmp_path), f"r{sequence}", sequence, run))
    index = IndexSlice(str(tmp_path), (), tuple(infos), {}, tuple(i.name for i in infos), True)
    merged = index.write_merged("m", 0, 2**63, max_entries=500)
    assert [run.name for run in merged] == [f"m-{i}" for i in range(len(merged))]
    assert 4 <= len(merged) <= 5
    assert {run.sequence for run in merged} == {3}
    assert max(run.entries for run in merged) < 600
    assert all(a.last < b.first for a, b in pairwise(merged))
    assert 1900 < sum(run.entries for run in merged) < 2100


def test_credentials_are_not_shown() -> None:
    assert "hush" not in repr(IndexSlice("here", (("s3.secret-access-key", "hush"),), (), {}))


# ------------------------------------------------------------ merge policy


def groups(*sizes: int) -> list[RunInfo]:
    """Groups of two runs, oldest first."""
    return [
        RunInfo(f"{sequence}{half}", sequence, size // 2, 0, 0, 0, 0)
        for sequence, size in enumerate(sizes)
        for half in "ab"
    ]


def planned(*sizes: int) -> set[int]:
    """Sequences of the groups to merge; always all runs of a group."""
    names = plan_merge(groups(*sizes))
    sequences = {int(name[:-1]) for name in names}
    assert sorted(names) == sorted(f"{s}{half}" for s in sequences for half in "ab")
    return sequences


def test_groups_become_one_once_they_have_two_entries_a_key() -> None:
    """Sizes of a table of 910,000 rows after 10,000 micro-batches, from a time when nothing else bounded them."""
    old = (1000, 554, 630, 6, 626, 631, 139, 971, 22, 991, 247, 125, 669, 463, 6, 1, 8)
    assert planned(*(2000 * size for size in old)) == set(range(len(old)))
    assert planned(1000, 220, 600, 180) == set()
    assert planned(1000, 220, 600, 182) == set(range(4))
    assert planned(800, 800, 800, 800, 100) == set(range(5)), "their four would be written again with the rest soon"


def test_four_groups_of_similar_size_are_merged() -> None:
    assert planned() == set()
    assert planned(100, 100, 100) == set()
    assert planned(100, 100, 100, 100) == {0, 1, 2, 3}
    assert planned(1000, 100, 200, 300, 150) == {1, 2, 3, 4}
    assert planned(400, 100, 100, 100) == set()
    assert planned(4000, 800, 800, 800, 800, 100) == {1, 2, 3, 4}
    # the youngest that qualify, not the large old ones
    assert planned(5000, 800, 800, 800, 800, 100, 100, 100, 100) == {5, 6, 7, 8}


def test_groups_of_any_size_stay_few() -> None:
    sizes = [100_000, *(10 if i % 2 else 1000 for i in range(16))]
    assert len(planned(*sizes)) == 4
    assert planned(*sizes[:16]) == set()


@pytest.mark.parametrize(("keys", "most"), [(None, 7), (100 * 200, 8)], ids=["new keys", "the same keys"])
def test_an_entry_is_rewritten_once_a_tier_and_twice_with_the_largest(keys: int | None, most: int) -> None:
    """:param keys: number of keys that the table has; None: each entry has another one."""
    sizes: list[int] = [] if keys is None else [keys]
    rewritten = 0
    for _ in range(1024):
        sizes.append(100)
        while merge := planned(*sizes):
            total = min(sum(sizes[s] for s in merge), keys or 2**63)
            rewritten += total
            sizes[min(merge) : max(merge) + 1] = [total]
        assert len(sizes) <= 16
        assert keys is None or sum(sizes) <= 2 * keys
    assert rewritten < most * 1024 * 100


def test_distinct_keys_with_their_numbers() -> None:
    """Also where two keys have the same high hash, and their repeats take turns."""
    high, low = (np.array(part, np.uint64) for part in ([9, 4, 9, 4, 9, 4], [1, 2, 1, 3, 1, 2]))
    number, *keys = distinct(high, low)
    assert [part[number].tolist() for part in keys] == [high.tolist(), low.tolist()]
    assert len(keys[0]) == 4, "4 is there for 2, 3 and again for 2"
    assert np.all(np.diff(keys[0].astype(np.int64)) >= 0)
