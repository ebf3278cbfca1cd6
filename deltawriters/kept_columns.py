"""Decoded columns of row groups, kept on the local disk of who reads old rows.

The rows that changes build on lie scattered over the table, and Parquet gives a row only with its whole row group.
Which row groups these are hardly changes from one micro-batch to the next. So a column that was decoded stays for a
while as an Arrow file, which is mapped into memory: the next micro-batch pays for its rows, not for row groups.

The files are where Spark spills and shuffles, in the first of `SPARK_LOCAL_DIRS`; Spark removes them with the
application. Who starts the process says by `ALLOWED` that values may lie there.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deltawriters.storage import whole_file

ALLOWED = "ROWDELTA_KEEPS_COLUMNS"
"""An environment variable that isn't empty."""
_MOST_BYTES = 8 << 30
"""So much an executor may keep, and no more than what it leaves free. What doesn't fit isn't kept: to drop others for
it would lose all of them, if micro-batches go round more row groups than there is room for.
"""
_LEAST_BYTES = 1 << 20
"""A column of fewer bytes is decoded about as fast as a file is opened."""
_UNUSED_SECONDS = 600
"""What wasn't used for so long goes when there is no room. Data files that were rewritten are never read again."""


def read_columns(file: pq.ParquetFile, path: str, group: int, names: Sequence[str]) -> pa.Table:
    """Columns of a row group.

    :param path: of the file; no other file ever has it.
    :param names: of top-level columns.
    """
    folder = _folder()
    if folder is None:
        return file.read_row_group(group, names, use_threads=False)
    places = {name: folder / hashlib.sha256(f"{path}\n{group}\n{name}".encode()).hexdigest() for name in names}
    columns = {name: column for name, place in places.items() if (column := _kept(place)) is not None}
    missing = [name for name in names if name not in columns]
    if missing:
        rows = file.read_row_group(group, missing, use_threads=False)
        columns |= {name: rows.select([name]) for name in missing}
        large = {name: size for name in missing if (size := columns[name].nbytes) >= _LEAST_BYTES}
        with suppress(OSError):  # the disk is full, or Spark has removed the folder
            room = _room(folder, sum(large.values())) if large else 0
            for name, size in large.items():
                room -= size
                if room >= 0:
                    with whole_file(places[name]) as target, pa.ipc.new_file(target, columns[name].schema) as writer:
                        writer.write_table(columns[name])
    found = [columns[name] for name in names]
    return pa.table([part.column(0) for part in found], pa.schema([part.field(0) for part in found]))


def _folder() -> Path | None:
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    if not local or not os.environ.get(ALLOWED):
        return None
    folder = Path(local) / "rowdelta-columns"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    return None


def _kept(place: Path) -> pa.Table | None:
    try:
        os.utime(place)
        return pa.ipc.open_file(pa.memory_map(str(place))).read_all()
    except (OSError, pa.ArrowException):  # it was never kept, or is no longer
        return None


def _room(folder: Path, wanted: int) -> int:
    """Bytes that may still be kept.

    :param wanted: bytes; if there is no room for so many, what nobody uses goes.
    """

    def files() -> Iterator[tuple[Path, os.stat_result]]:
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # another process has just removed it
                yield file, file.stat()

    def room() -> int:
        used = sum(status.st_size for _, status in files())
        return min(_MOST_BYTES, (used + shutil.disk_usage(folder).free) // 2) - used

    found = room()
    if found >= wanted:
        return found
    for file, status in files():
        if status.st_mtime < time.time() - _UNUSED_SECONDS:
            file.unlink(missing_ok=True)
    return room()
