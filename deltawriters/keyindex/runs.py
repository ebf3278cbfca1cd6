"""Runs: immutable sorted files of index entries, written once.

A run is an Arrow IPC file of one record batch. The schema's metadata has, as JSON, the list of data files that the
entries point into. A run of a large index isn't compressed: it is mapped into memory, and its columns are numpy views
into the file. A small run, or any run of a small index, is packed to a fourth of the bytes, or two thirds if keys
aren't integers, and unpacked into memory when it is opened:

- each column has the first bytes of all its values, then the second bytes, and so on. What is left are bytes that tell
  something, and bytes that repeat, which Arrow compresses by zstd.
- `high` has differences, which are smaller. It is left out if it follows from `low`, as with a key of one integer.
"""

import hashlib
import json
import mmap
import os
import stat
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.io import FileIO, OutputStream
from pyiceberg.io.pyarrow import PyArrowFileIO

from deltawriters.keyindex.hashing import Hashes, mixed
from deltawriters.storage import whole_file

Words = npt.NDArray[np.uint32]
Columns = Mapping[str, npt.NDArray[Any]]
"""`Entries` by name, without order values."""

SUPERSEDES = np.uint32(1 << 31)
"""Flag in `file`: older entries of the same key are no longer live."""
TOMBSTONE = np.uint32(0xFFFFFFFF)
"""Value of `file` for a deleted key: it has the flag `SUPERSEDES` and no row. It uses up the file number 2^31 - 1."""
DELETED_BEFORE = np.uint32(0x7FFFFFFF)
"""Likewise, without the flag: it says with which order value the key was deleted once, and nothing of its rows."""

RUN_ENTRIES = 4_000_000
"""What builds or merges runs, and rewrites, hold this many entries (24 bytes each, and their order values) before they
write a run. A task of a micro-batch writes one run of all its keys."""
_PACKED_ENTRIES = 400_000
"""Runs are packed if those of all tasks have up to so many entries, by the share of hashes that a task has. A few keys
say nothing of it, and aren't worth it.
"""
_PACKED_INDEX = 4_000_000
"""So are larger ones, as long as the whole index has no more entries; one with an order value counts twice. A process
unpacks them once and keeps them; what it can't keep it would unpack again in each micro-batch, which takes it 20 to 45
ms for a million entries."""
_UNPACKED_BYTES = 144_000_000
"""A process keeps so many bytes of packed runs in memory: 6 million entries, fewer of an index with order values."""
_UNUSED_SECONDS = 60.0
"""A run that nobody has looked into for so long makes room for another one."""
_FILES = b"files"
_PACKED = b"packed"
"""Key in the metadata of packed runs."""
_CHUNK = 16 << 20
"""A remote run is read in parts of this many bytes, each by a request of its own."""
_NO_RUN = (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError, IndexError, TypeError, ValueError)
"""What reading a damaged file raises: one other byte may say that integers have more than 64 bits."""
_OPEN_RUNS = 256
"""A process keeps this many runs mapped. A deleted run still takes disk space while a process has it mapped."""
_CACHE_SECONDS = 3600
"""A cached copy of a remote run, or a mark, is deleted if no process used it for this long."""
_TOUCH_SECONDS = _CACHE_SECONDS / 6
"""A process says this often that it uses a copy or a mark. A worker may have runs mapped for days, and a new one would
read them all again."""
_MARKED_BYTES = 16 << 20
"""A run of at least this size is verified once on each machine. Each process verifies a smaller run itself, which takes
less than 10 ms.
"""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CorruptIndexError(Exception):
    """A run is missing or differs from what was written. The caller has to build the index again from the table."""


@dataclass(frozen=True)
class IndexedFile:
    """A data file that entries point into. `spec_id` and `partition` are those of its `Partition`, read from JSON."""

    path: str
    spec_id: int
    partition: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Entries:
    """Index entries as columns of equal length. Among the entries of one key, newer entries come first. Otherwise
    entries may be in any order; `sorted` sorts them.

    `file[i]` is `TOMBSTONE`, `DELETED_BEFORE`, or an index into `files`, possibly with the flag `SUPERSEDES`. `pos[i]`
    is the position of the row, or, without a row, when the key was deleted, in seconds since 1970, in an index with
    order values.

    :param order: order values (`deltawriters.order_values`); None in an index that has none.
    """

    high: Hashes
    low: Hashes
    file: Words
    pos: Words
    files: tuple[IndexedFile, ...]
    order: pa.BinaryArray | None = None

    @classmethod
    def joined(cls, parts: Sequence["Entries"], files: tuple[IndexedFile, ...]) -> Self:
        """The entries of all parts, one part after the other.

        :param files: the data files, by the numbers that all parts have for them.
        """
        orders = [part.order for part in parts if part.order is not None]
        return cls(
            high=np.concatenate([part.high for part in parts]),
            low=np.concatenate([part.low for part in parts]),
            file=np.concatenate([part.file for part in parts]),
            pos=np.concatenate([part.pos for part in parts]),
            files=files,
            order=pa.concat_arrays(orders) if orders else None,
        )

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Entries":
        """Some of the entries, by their numbers or by flags."""
        order = self.order
        if order is not None:
            order = order.filter(pa.array(rows)) if rows.dtype == np.bool_ else order.take(pa.array(rows))
        return Entries(self.high[rows], self.low[rows], self.file[rows], self.pos[rows], self.files, order)

    def sorted(self) -> "Entries":
        """The entries sorted by (high, low). Entries of one key keep their order. The sort takes linear time if the
        entries are a concatenation of a few sorted parts (timsort).
        """
        order = np.argsort(self.high, kind="stable")
        high, low = self.high[order], self.low[order]
        # Two keys have the same `high`, so their entries may be interleaved. With 64-bit hashes this is rare.
        if np.any((high[1:] == high[:-1]) & (low[1:] != low[:-1])):
            order = np.lexsort((self.low, self.high))
        return self.take(order)


@dataclass(frozen=True)
class RunInfo:
    """What is known about a run without opening it.

    `sequence` is the age of the run; a higher sequence is newer. `first` and `last` are the lowest and highest `high`
    of its entries. `crc32` is the checksum of the whole file.
    """

    name: str
    sequence: int
    entries: int
    first: int
    last: int
    size_in_bytes: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Self:
        return cls(**json)


@dataclass(frozen=True, eq=False)
class Run:
    """An opened run: the columns of `Entries`, sorted. Unless it `is_packed`, they are views into the mapped file."""

    info: RunInfo
    high: Hashes
    low: Hashes
    file: Words
    pos: Words
    files: tuple[IndexedFile, ...]
    order: pa.BinaryArray | None
    is_packed: bool

    @property
    def unpacked_bytes(self) -> int:
        """That it takes in memory, beside its file."""
        columns = (self.high, self.low, self.file, self.pos, *([] if self.order is None else [self.order]))
        return sum(column.nbytes for column in columns) if self.is_packed else 0


def write_run(
    io: FileIO, location: str, name: str, sequence: int, entries: Entries, beside: int = _PACKED_INDEX
) -> RunInfo:
    """Sort `entries` and write them to `{location}/{name}`.

    :param name: a new name; other processes may have an existing file mapped.
    :param entries: at least one entry.
    :param beside: number of entries that the index has beside those that all tasks write with these. By default only a
        small run is packed.
    :raises ValueError: there is no entry.
    """
    if not len(entries.high):
        raise ValueError("a run has at least one entry")
    entries = entries.sorted()
    files = [{"path": f.path, "spec_id": f.spec_id, "partition": dict(f.partition)} for f in entries.files]
    columns: Columns = {"high": entries.high, "low": entries.low, "file": entries.file, "pos": entries.pos}
    first, last, count = int(entries.high[0]), int(entries.high[-1]), len(entries.high)
    with_other_tasks = count * 2**64 // (last - first + 1)
    in_all = (with_other_tasks + beside) * (1 if entries.order is None else 2)
    is_packed = with_other_tasks <= _PACKED_ENTRIES or in_all <= _PACKED_INDEX
    orders = {} if entries.order is None else {"order": entries.order}
    batch = pa.record_batch({**(_packed(columns) if is_packed else columns), **orders})
    batch = batch.replace_schema_metadata({_FILES: json.dumps(files)} | ({_PACKED: ""} if is_packed else {}))
    path = f"{location}/{name}"
    with io.new_output(path).create(overwrite=True) as stream:
        sink = _ChecksumWriter(stream)
        _write_batch(sink, batch)
    info = RunInfo(name, sequence, count, first, last, sink.size, sink.crc32)
    if PyArrowFileIO.parse_location(path, io.properties)[0] != "file":
        with suppress(OSError):  # without a copy here, the run is read from where it is
            _keep_copy(path, info, batch)
    return info


def _write_batch(sink: Any, batch: pa.RecordBatch) -> None:
    codec = pa.Codec("zstd", 1) if _PACKED in batch.schema.metadata else None
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)


def _packed(columns: Columns) -> Columns:
    """The columns as a packed run has them."""
    high, rest = columns["high"], {name: column for name, column in columns.items() if name != "high"}
    if not np.array_equal(mixed(columns["low"]), high):
        rest["high"] = np.diff(high, prepend=np.uint64(0))
    return {name: _bytes_of(column).T.reshape(-1).view(column.dtype) for name, column in rest.items()}


def _unpacked(columns: Columns) -> Columns:
    """The reverse of `_packed`."""
    found: dict[str, npt.NDArray[Any]] = {}
    for name, column in columns.items():
        found[name] = _outside_of_the_heap(column)
        for number, part in enumerate(column.view(np.uint8).reshape(column.itemsize, -1)):
            _bytes_of(found[name])[:, number] = part  # faster than a transposed copy
    if "high" in found:
        np.cumsum(found["high"], out=found["high"])
    else:
        found["high"] = _outside_of_the_heap(found["low"])
        found["high"][:] = mixed(found["low"])
    return found


def _outside_of_the_heap(like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A new array. In the heap it would stay for minutes between blocks that come and go, of which the process could
    give none back.
    """
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, like.dtype)


def _bytes_of(column: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of each value, shape (n, bytes of a value)."""
    return column.view(np.uint8).reshape(-1, column.itemsize)


@dataclass
class _Opened:
    """A mapped run, its file, the copy or mark in the cache folder that it needs, and when that was touched."""

    run: Run
    path: Path
    used: Sequence[Path]
    touched: float = field(default_factory=time.monotonic)
    looked_into: float = 0.0

    def touch(self) -> None:
        self.looked_into = time.monotonic()
        if self.looked_into - self.touched < _TOUCH_SECONDS:
            return
        self.touched = self.looked_into
        for path in self.used:
            with suppress(OSError):
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


_opened: OrderedDict[tuple[str, RunInfo], _Opened] = OrderedDict()
_lock = threading.Lock()
"""Of `_opened`: on the driver, several threads look into runs."""


def open_run(io: FileIO, location: str, info: RunInfo) -> Run:
    """Verify the run `{location}/{info.name}` and map it into memory, or unpack it. Each machine verifies a large run
    only once. A remote run is first copied to local disk.

    :raises CorruptIndexError: the file is missing or isn't the file that `info` describes. The storage raises errors of
        its own if it can't be read; those errors may be temporary.
    """
    key = (location, info)
    with _lock:
        opened = _opened.pop(key, None)
    is_new = opened is None
    opened = opened or _open(io, location, info)
    opened.touch()
    with _lock:
        _opened[key] = opened
        if is_new:
            _close_some()
    return opened.run


def _close_some() -> None:
    """Close runs that nobody has looked into for some time and that take memory, or disk space though they are gone. If
    too many are in use, the last one isn't kept: who looks into all runs in turn would find none of them if the oldest
    had to go.
    """
    unused = time.monotonic() - _UNUSED_SECONDS
    for key, each in list(_opened.items()):
        if each.looked_into < unused and (each.run.is_packed or not each.path.exists()):
            del _opened[key]
    unpacked = sum(each.run.unpacked_bytes for each in _opened.values())
    while len(_opened) > _OPEN_RUNS or unpacked > _UNPACKED_BYTES:
        is_unused = next(iter(_opened.values())).looked_into < unused
        _, closed = _opened.popitem(last=not is_unused)
        unpacked -= closed.run.unpacked_bytes


def run_files(io: FileIO, location: str, info: RunInfo) -> list[str]:
    """Paths of the data files that entries of the run `{location}/{info.name}` point into. This function reads no
    entries and verifies no checksum.

    :raises CorruptIndexError: the file is missing or isn't a run.
    """
    path = f"{location}/{info.name}"
    try:
        with io.new_input(path).open() as stream, pa.ipc.open_file(stream) as reader:
            return [file["path"] for file in json.loads(reader.schema.metadata[_FILES])]
    except FileNotFoundError as e:
        raise CorruptIndexError(f"{path} is missing") from e
    except OSError as e:
        if "flatbuffer" not in str(e):  # so Arrow says it; all else is of the storage
            raise
        raise CorruptIndexError(f"{path} is not an index run") from e
    except _NO_RUN as e:
        raise CorruptIndexError(f"{path} is not an index run") from e


def _open(io: FileIO, location: str, info: RunInfo) -> _Opened:
    path = f"{location}/{info.name}"
    scheme, _, local = PyArrowFileIO.parse_location(path, io.properties)
    try:
        used = []
        if scheme != "file":
            local = _cached(io, path, info)
            used.append(Path(local))
        if (mark := _verified(local, info)) is not None:
            used.append(mark)
        batch = pa.ipc.open_file(pa.memory_map(local)).get_batch(0)
        notes = batch.schema.metadata
        names = [name for name in batch.schema.names if name != "order"]
        columns: Columns = {name: batch.column(name).to_numpy() for name in names}
        if _PACKED in notes:
            columns = _unpacked(columns)
        high, low, file, pos = (columns[name] for name in ("high", "low", "file", "pos"))
        order = batch.column("order") if "order" in batch.schema.names else None
        files = tuple(_shared(IndexedFile(**f)) for f in json.loads(notes[_FILES]))
    except FileNotFoundError as e:
        raise CorruptIndexError(f"{path} is missing") from e
    except _NO_RUN as e:
        raise CorruptIndexError(f"{path} is not an index run") from e
    return _Opened(Run(info, high, low, file, pos, files, order, _PACKED in notes), Path(local), used)


_files = WeakValueDictionary[str, IndexedFile]()


def _shared(file: IndexedFile) -> IndexedFile:
    """One object for all runs that name the file: each of hundreds of runs may name all files of the table."""
    known = _files.setdefault(file.path, file)
    return known if known == file else file


def _verified(path: str, info: RunInfo) -> Path | None:
    """Verify a file, unless it has a mark. Returns the path of the mark, if it has one."""
    with open(path, "rb") as stream:
        mark = None
        with suppress(OSError):  # there is no mark yet, or the folder for marks can't be made
            mark = _mark(os.fstat(stream.fileno()), info)
            if mark is not None:
                os.utime(mark)
                return mark
        _copy(stream, None, path, info)
    with suppress(OSError):  # without the mark, the next process verifies the run again
        if mark is not None:
            _remove_unused()
            mark.touch()
    return mark


def _mark(file: os.stat_result, info: RunInfo) -> Path | None:
    """The path of a mark. A mark is an empty file; if it exists, `file` was verified and hasn't changed since then.
    None for small files, which have no mark.

    Spark ends workers that were idle for a minute. If each new worker read the whole index again, that would cost more
    than everything else in a micro-batch. After a power failure a file may have lost content without a trace, so a mark
    is valid only for the current boot of the machine.
    """
    if info.size_in_bytes < _MARKED_BYTES or not _BOOT_ID.exists():
        return None
    name = f"{_BOOT_ID.read_text()} {file.st_dev} {file.st_ino} {file.st_mtime_ns} {file.st_size} {info}"
    return _local_folder() / f"{_digest(name)}-verified"


def _cached(io: FileIO, path: str, info: RunInfo) -> str:
    """The path of a verified local copy of the remote file `path`. All processes of the user share the copies."""
    copy = _copy_of(path, info)
    with suppress(FileNotFoundError, CorruptIndexError):
        # touch the copy first, so that no other process removes it as unused
        os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))
        _verified(str(copy), info)
        return str(copy)
    _remove_unused()
    with whole_file(copy) as target, io.new_input(path).open(seekable=False) as source:
        _copy(source, target, path, info)
    return str(copy)


def _keep_copy(path: str, info: RunInfo, batch: pa.RecordBatch) -> None:
    """Keep a copy of the remote run that this machine has just written: its next micro-batch looks into it."""
    _remove_unused()
    with whole_file(_copy_of(path, info)) as target:
        _write_batch(target, batch)


def _copy_of(path: str, info: RunInfo) -> Path:
    return _local_folder() / f"{_digest(path)}-{info.crc32:08x}"


def _local_folder() -> Path:
    """The folder of copies and marks. Only this user can write to it, since its content is trusted.

    Another user may already have made a folder of the usual name in the temporary folder. Then the processes of this
    user share another folder, and recognise it by its owner.
    """
    temporary = Path(tempfile.gettempdir())
    usual = temporary / f"rowdelta-index-{os.getuid()}"
    with suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    if _is_private(usual):
        return usual
    others = sorted(temporary.glob(f"{usual.name}-*"))
    return next(filter(_is_private, others), None) or Path(tempfile.mkdtemp(prefix=f"{usual.name}-"))


def _is_private(folder: Path) -> bool:
    """Whether `folder` is a folder that this user owns and nobody else may enter. A link to such a folder is not
    private: somebody could point it elsewhere.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _remove_unused() -> None:
    """Delete copies and marks that no process used for `_CACHE_SECONDS`, such as copies of runs that were merged. A
    mapped copy stays readable after its removal.
    """
    horizon = time.time() - _CACHE_SECONDS
    for file in _local_folder().iterdir():
        with suppress(FileNotFoundError):  # another process may have removed it at the same time
            status = file.stat()
            if max(status.st_atime, status.st_mtime) < horizon:
                file.unlink()


def _copy(source: Any, target: BinaryIO | None, path: str, info: RunInfo) -> None:
    """Read `source` to its end, write it to `target`, and compare size and checksum with `info`."""
    size = crc32 = 0
    while chunk := source.read(_CHUNK):
        crc32 = zlib.crc32(chunk, crc32)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    if (size, crc32) != (info.size_in_bytes, info.crc32):
        expected = f"{info.size_in_bytes} bytes, CRC {info.crc32:08x}"
        raise CorruptIndexError(f"{path} has {size} bytes, CRC {crc32:08x}, but it was written with {expected}")


class _ChecksumWriter:
    """A file object for Arrow that writes to another stream, and computes size and checksum of what it wrote."""

    closed = False

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream
        self.size = 0
        self.crc32 = 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return self._stream.write(data)

    def flush(self) -> None:
        """Arrow needs this method. It does nothing, since closing the stream flushes it."""
