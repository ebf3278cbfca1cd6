"""The second stage of a commit with `deletes: copy-on-write`, by file: the first one is by key.

The tasks of the first stage have written the micro-batch's rows to new files, and have found the keys' old rows. Now
each data file that has such rows is replaced by files with its other rows. So the table never gets a delete file, and a
file that has deletes of another mode or writer loses them.

A task takes whole files, small ones together, and large ones are shared out by row groups.
"""

import json
import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltawriters.content import DataFile
from deltawriters.keyindex import RunInfo
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.move import CopyGroup
from deltawriters.old_rows import DeletedRows
from deltawriters.scratch import Scratch
from sink.plans import RewritePlan
from sink.spark.failures import failure_of
from sink.table.engine import Engine
from sink.table.moving import dealt, move_rows
from sink.targets.seam import Table
from sink.targets.values import Copied, WrittenDeletes

_ON_DRIVER = 8 * 1024 * 1024
"""Up to this many bytes of files, the driver copies them itself: a Spark job would take longer."""
_LEAST = 16 * 1024 * 1024
"""Files of a partition that together are smaller become one file, even if some core has nothing to do then."""
_WORTH_A_TASK = 1024 * 1024
"""Small files of several partitions are a task together, up to this many bytes."""


@dataclass(frozen=True)
class Replacement:
    """What replaces data files.

    :param files: the new files, as JSON in the format's terms.
    :param runs: where the copied rows are now.
    :param replaced: see `IndexCommit`.
    :param removed: see `IndexCommit`.
    :param gone: paths of the old data files.
    """

    files: list[str]
    runs: list[RunInfo]
    replaced: Sequence[Any]
    removed: Sequence[str]
    copied: Copied
    gone: Collection[str]

    @property
    def deletes(self) -> WrittenDeletes:
        """As deletes: the old files have no vector any more."""
        return WrittenDeletes(self.files, self.removed, dict.fromkeys(self.gone), self.copied.bytes_written)


def replace_files(
    table: Table, engine: Engine, plan: RewritePlan, deleted: DeletedRows, scratch: Scratch
) -> Replacement:
    """Write the files that replace those from which rows are deleted.

    :param scratch: gets the new files, also after an error.
    :raises IndexLostError: the index isn't of the table's state, or a part of it is missing or damaged.
    :raises LostVectorError: a deletion vector of the table can't be read.
    :raises UnreadableRowsError: a file can't be read as one of the table.
    """
    started = time.monotonic()
    touched = table.touched_files(deleted.found.keys())
    scanned = time.monotonic()
    groups = _groups(touched.files, deleted, plan.table.target_file_size, engine.parallelism)
    total = sum(file.size_in_bytes for file in touched.files)
    try:
        new = move_rows(engine, plan, groups, scratch, on_driver=total <= _ON_DRIVER, threads=os.cpu_count() or 1)
    except Exception as error:
        failure = failure_of(error)
        if failure is not None and failure.kind == "corrupt index":
            raise IndexLostError(failure.message) from error
        raise
    return Replacement(
        new.files,
        new.runs,
        touched.handles,
        touched.deletes,
        Copied(
            total=touched.total,
            touched=len(touched.files),
            written=len(new.files),
            rows=new.rows,
            bytes_read=total,
            bytes_written=new.bytes,
            scan_seconds=scanned - started,
            rewrite_seconds=time.monotonic() - scanned,
        ),
        deleted.found.keys(),
    )


def _groups(
    files: Collection[DataFile], deleted: DeletedRows, target_file_size: int, parallelism: int
) -> list[CopyGroup]:
    """Share files out. Each core gets about the same to do, if there is enough. The files of a partition become files
    of at most about the target size.
    """
    total = sum(file.size_in_bytes for file in files)
    share = min(target_file_size, max(total / parallelism, _LEAST))
    by_partition: dict[str, list[DataFile]] = {}
    for file in files:
        partition = f"{file.file.spec_id} {json.dumps(file.file.partition, default=str)}"
        by_partition.setdefault(partition, []).append(file)
    groups = list[CopyGroup]()
    for _, members in sorted(by_partition.items()):
        parts = [part for file in members for part in _parts(file, max(1, round(file.size_in_bytes / share)))]
        in_all = sum(file.size_in_bytes for file in members)
        groups += (_group(each, deleted) for each in dealt(parts, max(1, round(in_all / share)), _size))
    most = max(1, math.ceil(total / _WORTH_A_TASK))
    if len(groups) <= most:
        return groups
    together = dealt(groups, most, lambda group: group.size_in_bytes)
    return [_group([file for group in each for file in group.files], deleted) for each in together]


def _parts(file: DataFile, count: int) -> Iterator[DataFile]:
    for number in range(count):
        yield replace(file, part=(number, count))


def _size(file: DataFile) -> int:
    return file.part_bytes


def _group(files: Sequence[DataFile], deleted: DeletedRows) -> CopyGroup:
    return CopyGroup(tuple(files), _of(files, deleted))


def _of(files: Collection[DataFile], deleted: DeletedRows) -> DeletedRows:
    """Without credentials: what Spark shares out goes through a file."""
    return replace(deleted.of(file.path for file in files), io_properties=())
