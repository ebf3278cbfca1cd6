"""Which data files a rewrite takes: those that cost a reader most for each byte that is written again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltawriters.rewrite import RewriteGroup, SmallFile
from sink.targets.base import Rewritable

OPEN_COST = 4 * 1024 * 1024
"""Bytes that a reader could scan in the time in which it opens a file. Spark plans with the same
(`spark.sql.files.openCostInBytes`).
"""


@dataclass(frozen=True)
class RewriteOptions:
    """Named as those of Iceberg's `rewrite_data_files` (`SizeBasedFileRewritePlanner`, `BinPackRewriteFilePlanner`).

    :param min_input_files: a partition needs so many small files to have them merged.
    :param min_file_size: a file below this share of the target size is small.
    :param delete_ratio_threshold: a file with this share of deleted rows is rewritten.
    :param delete_file_threshold: likewise, with so many delete files.
    :param max_file_group_size: bytes that are rewritten by one commit.
    :param least_gain: that a commit must be worth to a scan, in bytes. Each takes time, and makes a snapshot.
    """

    min_input_files: int = 5
    min_file_size: float = 0.75
    delete_ratio_threshold: float = 0.1
    delete_file_threshold: int = 8
    max_file_group_size: int = 512 * 1024 * 1024
    least_gain: int = 1


def chosen(
    files: Sequence[Rewritable], options: RewriteOptions, target_file_size: int, most_bytes: int | None = None
) -> Iterator[RewriteGroup]:
    """Groups of files to rewrite, each of one partition; those that pay most come first.

    :param target_file_size: of the table, in bytes.
    :param most_bytes: of live rows that may be written. Groups with more are left out. None if it doesn't matter.
    """
    partitions: dict[tuple[int, str], list[Rewritable]] = {}
    for file in files:
        partitions.setdefault((file.spec_id, file.partition), []).append(file)
    size = options.max_file_group_size if most_bytes is None else min(most_bytes, options.max_file_group_size)
    groups = [group for found in partitions.values() for group in _packed(found, options, target_file_size, size)]
    groups = [group for group in groups if _gain(group, target_file_size) >= options.least_gain]
    groups.sort(key=lambda group: -_gain(group, target_file_size) / max(1, _cost(group)))
    for group in groups:
        if most_bytes is None or _cost(group) <= most_bytes:
            yield _as_group(group)


def _packed(
    files: Sequence[Rewritable], options: RewriteOptions, target_file_size: int, group_size: int
) -> Iterator[list[Rewritable]]:
    """A partition's files that pay, in groups of about `group_size` live bytes."""
    small = [file for file in files if _live_bytes(file) < options.min_file_size * target_file_size]
    if len(small) < options.min_input_files:
        small = []
    merged = {file.small.path for file in small}
    dear = [
        file
        for file in files
        if file.small.path in merged
        or file.deleted >= options.delete_ratio_threshold * max(1, file.rows)
        or file.deletes >= options.delete_file_threshold
    ]
    # the files with the largest share of deleted rows together, so that the first groups gain most
    dear.sort(key=lambda file: (-file.deleted / max(1, file.rows), file.small.size_in_bytes, file.small.path))
    group, size = list[Rewritable](), 0
    for file in dear:
        if group and size + _live_bytes(file) > group_size:
            yield group
            group, size = [], 0
        group.append(file)
        size += _live_bytes(file)
    if group:
        yield group


def _live_bytes(file: Rewritable) -> int:
    return file.small.size_in_bytes * (file.rows - file.deleted) // max(1, file.rows)


def _cost(group: Sequence[Rewritable]) -> int:
    """Bytes to write."""
    return sum(map(_live_bytes, group))


def _gain(group: Sequence[Rewritable], target_file_size: int) -> int:
    """Bytes that each scan of the table reads less, with the time to open a file as bytes."""
    live = _cost(group)
    dead = sum(file.small.size_in_bytes for file in group) - live
    opened = sum(1 + file.deletes for file in group) - (live // target_file_size + 1)
    return dead + OPEN_COST * opened


def _as_group(files: Sequence[Rewritable]) -> RewriteGroup:
    applying = dict[str, SmallFile]()
    for file in files:
        applying |= {delete.path: delete for delete in file.applying}
    return RewriteGroup(
        files[0].spec_id,
        files[0].partition,
        tuple(file.small for file in files),
        applying=tuple(applying.values()),
        any_columns=True,
    )
