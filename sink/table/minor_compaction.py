"""Chooses the small files of the last commits that minor compactions merge into larger ones (`sink.table.rewriting`).
These cost little and keep reads fast.

They work like a log-structured merge tree. When at least `EVERY` commits have written so many files that a reader
notices it, a minor compaction merges these files. After `EVERY` minor compactions, the next one merges their files too,
and so on. So a row is written again only once for each level. Large files stay as they are, even if many of their rows
are deleted: `sink.table.rewrite_plan` chooses those.

A minor compaction merges only files of this sink from the last commits. Each format finds them
(`Upkeep.merge_candidates`), without a plan over the whole table. A level whose files aren't small any more is the last.
"""

import logging
from collections.abc import Collection, Iterator, Sequence

from deltawriters.content import DataFile, DeleteFile
from deltawriters.delete_files import RewriteGroup
from sink.errors import TemporaryError
from sink.table.open_table import OpenTable
from sink.table.rewriting import Chosen
from sink.targets import merge_levels
from sink.targets.notes import MERGED_FROM, MINOR
from sink.targets.scan_costs import ScanCosts
from sink.targets.upkeep_values import Mergeable, MergeCandidates

log = logging.getLogger("rowdelta")

_ENOUGH = 26 * 1024 * 1024
"""A minor compaction needs files in the last commits whose opening costs a scan as much as to read so many bytes, or
`_MANY`. A read hardly notices fewer files, and so a table that gets one file a commit is compacted less often.
"""
_MANY = 16
_PATIENCE = 4
"""If so many times `EVERY` commits and `_MANY` files have come since a merge began, the stream waits for it."""
_FEWEST = 4
"""With fewer files in a partition, merging doesn't pay."""
_OTHER_LEVEL = 8
"""A file isn't merged with smaller ones if it is this many times larger than they are on average."""
_SMALL = 16 * 1024 * 1024
"""To open a larger file takes a reader hardly any time beside reading it. Such files are merged within the budget of
rewrites (`sink.table.rewrite_plan`), or not at all.
"""
_SORTED_TOGETHER = 256 * 1024 * 1024
"""Bytes of files whose rows are sorted together. If each group made one file, all files would have the same values."""
_ON_DRIVER = 4 * 1024 * 1024
"""Up to this many bytes of files, the driver merges them itself: a Spark job would cost more than it saves."""


def _chosen(files: Sequence[Mergeable], small: int) -> list[Mergeable]:
    """The files to merge among a partition's `files`. Empty if merging doesn't pay.

    Files that are much larger than the others are left out: they belong to a higher level, like those of a first load.

    :param small: larger files are left out too.
    """
    data = sorted((file for file in files if isinstance(file.file, DataFile)), key=lambda file: file.file.size_in_bytes)
    deletes = [file for file in files if isinstance(file.file, DeleteFile)]
    count, total = 0, 0
    for file in data:
        size = file.file.size_in_bytes
        if size > small or (count and size * count > _OTHER_LEVEL * total):
            break
        count += 1
        total += size
    data = data[:count] if count >= _FEWEST else []
    return data + (deletes if (data and len(deletes) > 1) or len(deletes) >= _FEWEST else [])


def _groups(chosen: Sequence[Mergeable], found: MergeCandidates, group_size: int) -> Iterator[RewriteGroup]:
    """Groups of a partition's files, so that tasks can share the work. The delete files are a group of their own.

    :param chosen: the files to merge.
    :param found: of which they are.
    :param group_size: bytes of data of each group, about.
    """
    partition, spec_id = chosen[0].partition, found.spec_id
    applying = found.deletes.get(partition, ())
    all_deletes = tuple(file.file for file in applying if isinstance(file.file, DeleteFile))
    data = [file.file for file in chosen if isinstance(file.file, DataFile)]
    waiting, size = list[DataFile](), 0
    for small in data:
        waiting.append(small)
        size += small.size_in_bytes
        if size >= group_size:
            yield RewriteGroup(spec_id, partition, tuple(waiting), applying=all_deletes)
            waiting, size = [], 0
    if waiting:
        yield RewriteGroup(spec_id, partition, tuple(waiting), applying=all_deletes)
    deletes = tuple(file.file for file in chosen if isinstance(file.file, DeleteFile))
    if deletes:
        yield RewriteGroup(spec_id, partition, (), deletes, frozenset(small.path for small in data).union(found.gone))


class SmallFiles:
    """Chooses the files of one table's minor compactions. Only this sink's files are merged."""

    def __init__(self, opened: OpenTable) -> None:
        self._open = opened
        # so the first commit looks for the small files of earlier runs
        self._commits, self._files = merge_levels.EVERY, _enough(opened.table.upkeep().scan_costs)

    def count(self, files: int) -> None:
        """Call this after each commit, with the number of files that the commit wrote."""
        self._commits += 1
        self._files += files

    def are_due(self) -> bool:
        return self._are_enough(self._commits, self._files)

    @property
    def are_too_many(self) -> bool:
        """Whether so many have come while others are being merged that the stream should wait for it."""
        return self._commits >= _PATIENCE * merge_levels.EVERY and self._files >= _PATIENCE * _MANY

    def start_over(self) -> None:
        """Call this when what was chosen is being merged: only later commits count."""
        self._commits = self._files = 0

    def choose(self, but: Collection[str]) -> Chosen | None:
        """Choose the small files to merge. None if there aren't enough of them, or nothing tells now.

        :param but: paths of files that a rewrite is moving rows from.
        """
        opened = self._open
        try:
            found = opened.table.upkeep().merge_candidates(opened.prefix, self._are_enough)
        except TemporaryError as error:
            log.warning("%s: small files not merged, tried again later: %s", opened.name, str(error).split("\n", 1)[0])
            return None
        self._commits, self._files = found.commits, found.files
        if not self.are_due():
            return None
        staying = ([file for file in files if file.file.path not in but] for files in found.partitions.values())
        size, small = opened.spec.target_file_size, _SMALL
        if opened.plan.order is not None:
            size = small = max(size, _SORTED_TOGETHER)
        by_partition = [chosen for files in staying if (chosen := _chosen(files, small))]
        if not by_partition:
            return None  # the next commit makes it look again
        groups = tuple(group for chosen in by_partition for group in _groups(chosen, found, size))
        handles = [file.handle for chosen in by_partition for file in chosen]
        return Chosen(
            "minor compaction",
            opened.spec,
            groups,
            {MINOR: str(found.number), MERGED_FROM: str(opened.base)},
            None if None in handles else handles,
            on_driver=sum(group.size_in_bytes for group in groups) <= _ON_DRIVER,
        )

    def _are_enough(self, commits: int, files: int) -> bool:
        return commits >= merge_levels.EVERY and files >= _enough(self._open.table.upkeep().scan_costs)


def _enough(costs: ScanCosts) -> int:
    """Number of files of the last commits."""
    return min(_MANY, _ENOUGH // (costs.file + costs.with_deletes))
