"""The second stage of a commit with `deletes: copy-on-write`, by file: the first one is by key.

The tasks of the first stage have written the micro-batch's rows to new files, and have found the keys' old rows. Now
each data file that has such rows is replaced by files with its other rows. So the table never gets a delete file, and a
file that has deletes of another mode or writer loses them.

A task takes whole files, small ones together, and a large one is shared out by row groups.
"""

import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltawriters.keyindex import RunInfo
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.old_rows import DeletedRows
from deltawriters.rewrite import CopyGroup, TouchedFile
from sink.run.engine import Engine
from sink.run.moving import moved
from sink.spark import task
from sink.spark.failures import failure_of
from sink.targets.base import Copied, Target

_ON_DRIVER = 4 * 1024 * 1024
"""Up to this many bytes of files, the driver copies them itself: a Spark job would take longer."""
_LEAST = 32 * 1024 * 1024
"""Files that are smaller than this together become one file, even if some task has nothing to do then."""
_PART = 128 * 1024 * 1024
"""A file is shared out in parts of at least this size."""


@dataclass(frozen=True)
class Replacement:
    """What replaces data files.

    :param files: the new files, as JSON in the format's terms.
    :param runs: where the copied rows are now.
    :param replaced: see `IndexCommit`.
    :param removed: see `IndexCommit`.
    """

    files: list[str]
    runs: list[RunInfo]
    replaced: Sequence[Any]
    removed: Sequence[str]
    copied: Copied


def replacement(
    table: Target, engine: Engine, plan: task.RewritePlan, deleted: DeletedRows, created: list[str]
) -> Replacement:
    """Write the files that replace those from which rows are deleted.

    :param created: the paths of new files are added to it, also after an error.
    :raises IndexLostError: the index isn't of the table's state, or a part of it is missing or damaged.
    :raises LostVectorError: a deletion vector of the table can't be read.
    :raises OtherColumnsError: a file can't be read as one of the table.
    """
    started = time.monotonic()
    touched = table.touched_files(deleted.found.keys())
    scanned = time.monotonic()
    groups = list(_groups(touched.files, deleted, plan.table.target_file_size, engine.parallelism))
    total = sum(file.size_in_bytes for file in touched.files)
    try:
        new = moved(engine, plan, groups, created, on_driver=total <= _ON_DRIVER)
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
    )


def _groups(
    files: Collection[TouchedFile], deleted: DeletedRows, target_file_size: int, parallelism: int
) -> Iterator[CopyGroup]:
    """Share files out. The files of a group become files of about the target size, but each core gets a group if there
    is enough.
    """
    total = sum(file.size_in_bytes for file in files)
    size_of_group = min(target_file_size, max(_LEAST, total // parallelism))
    waiting, size = list[TouchedFile](), 0
    for file in sorted(files, key=lambda file: (json.dumps(file.file.partition, default=str), file.size_in_bytes)):
        parts = min(file.size_in_bytes // _PART, parallelism) if file.size_in_bytes > size_of_group else 1
        if parts > 1:
            for number in range(parts):
                yield CopyGroup((replace(file, part=(number, parts)),), _of([file], deleted))
            continue
        waiting.append(file)
        size += file.size_in_bytes
        if size >= size_of_group:
            yield CopyGroup(tuple(waiting), _of(waiting, deleted))
            waiting, size = [], 0
    if waiting:
        yield CopyGroup(tuple(waiting), _of(waiting, deleted))


def _of(files: Collection[TouchedFile], deleted: DeletedRows) -> DeletedRows:
    """Without credentials: what Spark shares out goes through a file."""
    return replace(deleted.of(file.path for file in files), io_properties=())
