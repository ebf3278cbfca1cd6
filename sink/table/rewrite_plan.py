"""Which data files a rewrite takes: those that cost a reader most for each byte that is written again."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from deltawriters.delete_files import RewriteGroup
from sink.table.open_table import OpenTable
from sink.table.rewriting import Chosen, paths_of
from sink.targets.notes import REWRITE
from sink.targets.scan_costs import ScanCosts
from sink.targets.upkeep_values import AppliedDeletes, Rewritable

_LEAST_SHARE = 0.03
"""Share of a full scan's cost that a commit must save, in a table of any size."""
_SOON = 10
"""A file from which nobody has deleted for so many commits stays clean with a chance of a half: the longer nobody has,
the longer nobody will.
"""
_APART = 4
"""Where bytes are scarce, files of which one gains so many times as much for each byte as another aren't rewritten
together. So small files are merged with others of about their size, and take no large one with them.
"""
_FAILED_SECONDS = 3600.0
_MOST_POSITIONS = 8_000_000
"""Positions that a task merges at once. It holds 16 bytes of each, and as much again to sort them."""


@dataclass(frozen=True)
class RewriteOptions:
    """Named as those of Iceberg's `rewrite_data_files` (`SizeBasedFileRewritePlanner`, `BinPackRewriteFilePlanner`).

    :param min_input_files: a partition needs so many small files to have them merged, and a data file so many position
        delete files (Iceberg v2) to have these merged.
    :param min_file_size: a file below this share of the target size is small.
    :param delete_ratio_threshold: a file is rewritten if a scan saves this share of it, by not reading deleted rows,
        and by not looking for any in a file from which nobody deletes any more.
    :param target_file_size: bytes of a new file. None: as the table wants them.
    :param max_file_group_size: bytes that a task rewrites.
    :param max_concurrent_groups: so many groups are rewritten at the same time, and committed together.
    :param least_gain: that a commit must be worth to a scan, in bytes. Each takes time, and makes a snapshot. In a
        table that is scanned quickly, a share of its scan is enough.
    """

    min_input_files: int = 5
    min_file_size: float = 0.75
    delete_ratio_threshold: float = 0.1
    target_file_size: int | None = None
    max_file_group_size: int = 512 * 1024 * 1024
    max_concurrent_groups: int = 1
    least_gain: int = 1


class DearFiles:
    """Chooses the files of one table's rewrites beside the stream."""

    def __init__(self, opened: OpenTable) -> None:
        self._open = opened
        self._failed: dict[str, float] = {}
        """When files could not be rewritten, by path. Others come first then."""
        self._alone: dict[str, float] = {}
        """When files of several groups failed together, or gave way. They are tried group by group, so that one bad
        file stops no other.
        """

    def choose(
        self,
        options: RewriteOptions,
        most_bytes: int | None = None,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> Chosen | None:
        """Choose what pays most. None if nothing pays.

        :param most_bytes: don't rewrite more than this. None if it doesn't matter.
        :param only: paths of the data files that may be rewritten. None for all.
        :param but: paths of files that may not be rewritten.
        :raises TemporaryError: see `Upkeep.rewritables`.
        """
        oldest, spec = time.monotonic() - _FAILED_SECONDS, self._open.spec
        self._failed = {path: at for path, at in self._failed.items() if at > oldest}
        self._alone = {path: at for path, at in self._alone.items() if at > oldest}
        left_out = self._failed.keys() | but
        if options.target_file_size is not None:
            spec = spec.with_target_file_size(options.target_file_size)
        most = None if self._open.is_guest else 1  # no micro-batch waits for a guest, so it may take long
        for part in islice(self._open.table.upkeep().rewritables(), most):
            files = [
                file for file in part if file.file.path not in left_out and (only is None or file.file.path in only)
            ]
            found = chosen(files, options, spec.target_file_size, self._open.table.upkeep().scan_costs, most_bytes)
            groups = self._together(
                (group for group in found if not left_out & paths_of(group)), options.max_concurrent_groups, most_bytes
            )
            if groups:
                return Chosen(
                    "rewrite",
                    spec,
                    groups,
                    {REWRITE: str(sum(len(paths_of(group)) for group in groups))},
                    is_counted=most_bytes is not None,
                    set_aside=partial(self._set_aside, groups),
                )
        return None

    def _together(self, groups: Iterator[RewriteGroup], most: int, most_bytes: int | None) -> tuple[RewriteGroup, ...]:
        """The first groups, as many as may be rewritten at the same time. Delete files are merged by themselves."""
        found, size = list[RewriteGroup](), 0
        for group in groups:
            is_alone = not group.files or not self._alone.keys().isdisjoint(paths_of(group))
            size += group.size_in_bytes
            if found and (is_alone or (most_bytes is not None and size > most_bytes)):
                break
            found.append(group)
            if is_alone or len(found) == most:
                break
        return tuple(found)

    def _set_aside(self, groups: Sequence[RewriteGroup]) -> None:
        """Don't try the same again at once."""
        into = self._alone if len(groups) > 1 else self._failed
        into |= dict.fromkeys((path for group in groups for path in paths_of(group)), time.monotonic())


@dataclass(frozen=True)
class _Candidate:
    """:param gain: what each scan of the table saves, in bytes that it could read in the time.
    :param cost: bytes to write.
    :param settled: whether nobody has deleted from one of its files for a while.
    """

    group: RewriteGroup
    gain: int
    cost: int
    settled: bool = False


def chosen(
    files: Sequence[Rewritable],
    options: RewriteOptions,
    target_file_size: int,
    costs: ScanCosts,
    most_bytes: int | None = None,
) -> Iterator[RewriteGroup]:
    """Groups of files to rewrite, each of one partition; those that pay most come first.

    :param target_file_size: of new files, in bytes.
    :param most_bytes: of live rows that may be written. A group with more isn't due yet, nor are those that pay less;
        but nothing waits for a file that is larger than a group. None if it doesn't matter.
    """
    partitions: dict[tuple[int, str], list[Rewritable]] = {}
    for file in files:
        partitions.setdefault((file.spec_id, file.partition), []).append(file)
    candidates = list[_Candidate]()
    for found in partitions.values():
        packed = _packed(found, options, target_file_size, costs, most_bytes)
        candidates += [_moving(group, target_file_size, costs) for group in packed]
        candidates += _merging_deletes(found, options, costs)
    least = min(options.least_gain, int(_LEAST_SHARE * sum(map(costs.of, files), costs.once)))
    # settled files hardly gain more, however long one waits
    least_settled = min(least, int(costs.filtered * options.max_file_group_size / 2))
    candidates = [
        candidate for candidate in candidates if candidate.gain >= (least_settled if candidate.settled else least)
    ]
    candidates.sort(key=lambda candidate: -candidate.gain / max(1, candidate.cost))
    for candidate in candidates:
        if most_bytes is None or candidate.cost <= most_bytes:
            yield candidate.group
        elif candidate.cost <= options.max_file_group_size:
            return  # what pays less would use up what this one needs


def _packed(
    files: Sequence[Rewritable],
    options: RewriteOptions,
    target_file_size: int,
    costs: ScanCosts,
    most_bytes: int | None,
) -> Iterator[list[Rewritable]]:
    """A partition's files that pay, in groups: those that gain most for each byte come first, and are together."""
    group_size = options.max_file_group_size if most_bytes is None else min(most_bytes, options.max_file_group_size)
    small = {file.file.path for file in files if _live_bytes(file) < options.min_file_size * target_file_size}
    if len(small) < options.min_input_files:
        small = set()
    dear = [file for file in files if file.file.path in small or _saved(file, costs) >= options.delete_ratio_threshold]

    def gain(file: Rewritable) -> float:
        live = _live_bytes(file)
        return (costs.of(file) - _cost_then([file], live / target_file_size, costs)) / max(1, live)

    dear.sort(key=lambda file: (-gain(file), file.file.path))
    group, size = list[Rewritable](), 0
    for file in dear:
        is_small = _live_bytes(file) < costs.file  # another commit for it would cost more
        is_apart = group and most_bytes is not None and not is_small and gain(group[0]) > _APART * gain(file)
        if group and (is_apart or size + _live_bytes(file) > group_size):
            yield group
            group, size = [], 0
        group.append(file)
        size += _live_bytes(file)
    if group:
        yield group


def _saved(file: Rewritable, costs: ScanCosts) -> float:
    """What a scan saves by reading no deleted rows, nor looking for them, as a share of reading the file."""
    if not file.deletes:
        return 0.0
    lives = 1 - file.deleted / max(1, file.rows)
    return (1 + costs.filtered - lives * (1 + costs.filtered * _deleted_again(file))) / (1 + costs.filtered)


def _deleted_again(file: Rewritable) -> float:
    """The chance that somebody soon deletes a row that is live in the file."""
    return _SOON / (_SOON + file.settled) if file.deletes else 0.0


def _cost_then(files: Sequence[Rewritable], new_files: float, costs: ScanCosts) -> float:
    """What a scan will pay for the files' live rows in so many new files."""
    live = sum(map(_live_bytes, files))
    again = sum(_live_bytes(file) * _deleted_again(file) for file in files) / max(1, live)
    return live * (1 + costs.filtered * again) + new_files * (costs.file + costs.with_deletes * again)


def _live_bytes(file: Rewritable) -> int:
    return file.file.size_in_bytes * (file.rows - file.deleted) // max(1, file.rows)


def _moving(files: Sequence[Rewritable], target_file_size: int, costs: ScanCosts) -> _Candidate:
    """Moves the live rows of files of a partition."""
    live = sum(map(_live_bytes, files))
    gain = sum(map(costs.of, files)) - _cost_then(files, live // target_file_size + 1, costs)
    applying = {deletes.file.path: deletes.file for file in files for deletes in file.applying}
    group = RewriteGroup(
        files[0].spec_id,
        files[0].partition,
        tuple(file.file for file in files),
        applying=tuple(applying.values()),
    )
    is_settled = any(file.deletes and file.settled >= _SOON for file in files)
    return _Candidate(group, int(gain), live, is_settled)


def _merging_deletes(files: Sequence[Rewritable], options: RewriteOptions, costs: ScanCosts) -> Iterator[_Candidate]:
    """Merges position delete files of a partition (Iceberg v2), and leaves the data files as they are.

    A delete file may be about many data files. So each data file gets a delete file of its own only if there are not
    more delete files than before. Else the partition gets one for all of its data files.
    """
    of_path = {deletes.file.path: deletes for file in files for deletes in file.applying}
    applies_to: dict[str, list[str]] = {path: [] for path in of_path}
    for file in files:
        for deletes in file.applying:
            applies_to[deletes.file.path].append(file.file.path)
    # all data files with such deletes must be known, or deletes would be lost
    known = {path for path, deletes in of_path.items() if deletes.data_files == len(applies_to[path])}
    dear = [file for file in files if _count(file, known) >= options.min_input_files]
    dear.sort(key=lambda file: (-_count(file, known), file.file.path))
    merged, rows = dict[str, AppliedDeletes](), 0
    for file in dear:
        new = [deletes for deletes in file.applying if deletes.file.path in known - merged.keys()]
        fitting = _fitting(new, _MOST_POSITIONS - rows)
        if len(fitting) == len(new) or (not merged and len(fitting) >= options.min_input_files):
            merged |= {deletes.file.path: deletes for deletes in fitting}
            rows += sum(deletes.rows for deletes in fitting)
        if merged and len(fitting) < len(new):
            break  # the next ones come when these are merged
    if not merged:
        return
    live = frozenset(path for deletes in merged for path in applies_to[deletes])
    group = RewriteGroup(
        dear[0].spec_id,
        dear[0].partition,
        (),
        tuple(deletes.file for deletes in merged.values()),
        live=live,
        apart=len(live) <= len(merged),
    )
    opened = sum(len(applies_to[path]) for path in merged) - len(live)
    yield _Candidate(group, costs.delete_file * opened, group.size_in_bytes)


def _fitting(deletes: Iterable[AppliedDeletes], most: int) -> list[AppliedDeletes]:
    """Those of the fewest positions, at most so many together."""
    found = list[AppliedDeletes]()
    for each in sorted(deletes, key=lambda each: (each.rows, each.file.path)):
        most -= each.rows
        if most < 0:
            break
        found.append(each)
    return found


def _count(file: Rewritable, known: Collection[str]) -> int:
    return sum(deletes.file.path in known for deletes in file.applying)
