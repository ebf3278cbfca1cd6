"""Runs: immutable sorted files of index entries, written once and mapped into memory.

A run is an Arrow IPC file of one uncompressed record batch, so its columns are numpy views into the file. The list of
data files that its entries point into is JSON in the schema's metadata.
"""

import hashlib
import json
import os
import stat
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.io import FileIO, OutputStream
from pyiceberg.io.pyarrow import PyArrowFileIO

from deltawriters.keyindex.hashing import Hashes

Words = npt.NDArray[np.uint32]

SUPERSEDES = np.uint32(1 << 31)
"""Flag in `file`: older entries of the same key are no longer live."""
TOMBSTONE = np.uint32(0xFFFFFFFF)
"""In `file`: `SUPERSEDES` and no row, the key was deleted. File number 2^31 - 1 is reserved for it."""

_FILES = b"files"
_CHUNK = 1 << 20
_OPEN_RUNS = 256
"""Runs a process keeps mapped. A mapped run that was deleted holds its disk space until it is replaced here."""
_CACHE_SECONDS = 3600
"""A cached copy of a remote run that nobody opened for this long is deleted, and a mark."""
_MARKED_BYTES = 16 << 20
"""A run of this size is verified once by the machine, a smaller one by each process: that takes less than 10 ms."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CorruptIndexError(Exception):
    """A run is missing, or isn't what was written. The index has to be built again from the table."""


@dataclass(frozen=True)
class IndexedFile:
    """A data file that entries point into. `partition`: partition field id -> JSON single value, as in
    `ContentFile.to_json`.
    """

    path: str
    spec_id: int
    partition: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Entries:
    """Index entries as columns of equal length. Entries of one key stand newest first, other order is free until
    `sorted`.

    `file[i]` is an index into `files`, possibly with `SUPERSEDES`, or `TOMBSTONE`.
    """

    high: Hashes
    low: Hashes
    file: Words
    pos: Words
    files: tuple[IndexedFile, ...]

    def sorted(self) -> "Entries":
        """By (high, low), entries of one key in the order they had. Linear for a concatenation of a few sorted parts
        (timsort).
        """
        order = np.argsort(self.high, kind="stable")
        high, low = self.high[order], self.low[order]
        # only then could two keys be interleaved; with 64-bit hashes this is rare
        if np.any((high[1:] == high[:-1]) & (low[1:] != low[:-1])):
            order = np.lexsort((self.low, self.high))
            high, low = self.high[order], self.low[order]
        return Entries(high, low, self.file[order], self.pos[order], self.files)


@dataclass(frozen=True)
class RunInfo:
    """What must be known of a run without opening it.

    `sequence` is its age, higher is newer. `first` and `last` are its lowest and highest `high`. `crc32` is of the
    whole file.
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
    """An opened run: the columns of `Entries`, sorted, as read-only views into the mapped file."""

    info: RunInfo
    high: Hashes
    low: Hashes
    file: Words
    pos: Words
    files: tuple[IndexedFile, ...]


def write_run(io: FileIO, location: str, name: str, sequence: int, entries: Entries) -> RunInfo:
    """Sort `entries`, at least one, and write them to `{location}/{name}`. The name must be new: others may have the
    file mapped.
    """
    if not len(entries.high):
        raise ValueError("a run has at least one entry")
    entries = entries.sorted()
    files = [{"path": f.path, "spec_id": f.spec_id, "partition": dict(f.partition)} for f in entries.files]
    batch = pa.record_batch(
        [entries.high, entries.low, entries.file, entries.pos],
        schema=pa.schema(
            [("high", pa.uint64()), ("low", pa.uint64()), ("file", pa.uint32()), ("pos", pa.uint32())],
            metadata={_FILES: json.dumps(files)},
        ),
    )
    with io.new_output(f"{location}/{name}").create(overwrite=True) as stream:
        sink = _ChecksumWriter(stream)
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
    first, last = int(entries.high[0]), int(entries.high[-1])
    return RunInfo(name, sequence, batch.num_rows, first, last, sink.size, sink.crc32)


_opened: OrderedDict[tuple[str, RunInfo], Run] = OrderedDict()


def open_run(io: FileIO, location: str, info: RunInfo) -> Run:
    """Map the run `{location}/{info.name}`. Verified, if large once by the machine; a remote run is copied to local
    disk first.

    :raises CorruptIndexError: the file is missing or isn't the one that `info` describes. Other failures to read are
        the storage's errors, and may pass.
    """
    key = (location, info)
    run = _opened.pop(key, None) or _open(io, location, info)
    _opened[key] = run
    if len(_opened) > _OPEN_RUNS:
        _opened.popitem(last=False)
    return run


def run_files(io: FileIO, location: str, info: RunInfo) -> list[str]:
    """Paths of the data files that entries of the run `{location}/{info.name}` point into. Reads no entries, and
    verifies nothing.

    :raises CorruptIndexError: the file is missing, or not a run.
    """
    path = f"{location}/{info.name}"
    try:
        with io.new_input(path).open() as stream, pa.ipc.open_file(stream) as reader:
            return [file["path"] for file in json.loads(reader.schema.metadata[_FILES])]
    except FileNotFoundError as e:
        raise CorruptIndexError(f"{path} is missing") from e
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as e:
        raise CorruptIndexError(f"{path} is not an index run") from e


def _open(io: FileIO, location: str, info: RunInfo) -> Run:
    path = f"{location}/{info.name}"
    scheme, _, local = PyArrowFileIO.parse_location(path, io.properties)
    try:
        if scheme == "file":
            _verify(local, info)
        else:
            local = _cached(io, path, info)
        batch = pa.ipc.open_file(pa.memory_map(local)).get_batch(0)
        high, low, file, pos = (column.to_numpy() for column in batch.columns)
        files = tuple(IndexedFile(**f) for f in json.loads(batch.schema.metadata[_FILES]))
    except FileNotFoundError as e:
        raise CorruptIndexError(f"{path} is missing") from e
    except (pa.ArrowInvalid, KeyError, TypeError, ValueError) as e:
        raise CorruptIndexError(f"{path} is not an index run") from e
    return Run(info, high, low, file, pos, files)


def _verify(path: str, info: RunInfo) -> None:
    with open(path, "rb") as stream:
        mark = None
        with suppress(OSError):  # there is none, or no folder for it
            mark = _mark(os.fstat(stream.fileno()), info)
            if mark is not None:
                os.utime(mark)
                return
        _copy(stream, None, path, info)
    with suppress(OSError):  # the next process verifies it too
        if mark is not None:
            _remove_unused()
            mark.touch()


def _mark(file: os.stat_result, info: RunInfo) -> Path | None:
    """An empty file that says that `file` was verified, and not written to since then; None for small files.

    Spark ends workers that were idle for a minute, and to read all of the index again in each new one would cost more
    than all else in a micro-batch. After a power failure a file may have lost content without a trace, so the mark is
    that of the boot.
    """
    if info.size_in_bytes < _MARKED_BYTES or not _BOOT_ID.exists():
        return None
    name = f"{_BOOT_ID.read_text()} {file.st_dev} {file.st_ino} {file.st_mtime_ns} {file.st_size} {info}"
    return _local_folder() / f"{_digest(name)}-verified"


def _cached(io: FileIO, path: str, info: RunInfo) -> str:
    """The path of a verified local copy of remote file `path`. Processes share the copies."""
    folder = _local_folder()
    copy = folder / f"{_digest(path)}-{info.crc32:08x}"
    with suppress(FileNotFoundError, CorruptIndexError):
        os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))  # first, so that it isn't removed as unused
        _verify(str(copy), info)
        return str(copy)
    _remove_unused()
    descriptor, partial = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as target, io.new_input(path).open(seekable=False) as source:
            _copy(source, target, path, info)
        os.replace(partial, copy)
    except BaseException:
        os.unlink(partial)
        raise
    return str(copy)


def _local_folder() -> Path:
    """The folder of copies and marks, which only this user can have written to.

    Anybody can make a folder of its usual name in the temporary folder before us, and what is found in it is believed.
    Then another one is used, which all processes of this user find by looking at its owner.
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
    """Whether it is a folder of this user's that nobody else may enter. A link to one is not: it can be turned."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _remove_unused() -> None:
    """Merged runs are never asked for again. A mapped copy stays readable after its removal."""
    horizon = time.time() - _CACHE_SECONDS
    for file in _local_folder().iterdir():
        with suppress(FileNotFoundError):  # another process removes too
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
        raise CorruptIndexError(f"{path} has {size} bytes, CRC {crc32:08x}; it was written with {expected}")


class _ChecksumWriter:
    """A file object for Arrow that passes on what is written, and sums it up."""

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
        """Arrow asks for it; the stream is flushed when it is closed."""
