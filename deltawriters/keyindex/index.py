"""Probes and merges the runs of an index. Each task does this for the range of key hashes that it owns."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io import FileIO

from deltawriters.collapse import Ints
from deltawriters.keyindex.hashing import BASE, Hashes, of_deletes, of_versions
from deltawriters.keyindex.runs import (
    RUN_ENTRIES,
    SUPERSEDES,
    TOMBSTONE,
    Entries,
    IndexedFile,
    Run,
    RunInfo,
    Words,
    open_run,
    write_run,
)
from deltawriters.order_values import UNKNOWN, OrderColumns, latest
from deltawriters.storage import file_io

Flags = npt.NDArray[np.bool_]

_TIER = 4
_MOST_ENTRIES_A_KEY = 2
_MAX_GROUPS = 16
_NEVER = 2**32
"""Seconds since 1970 after all that an entry can have."""
_NUMBER = ~SUPERSEDES
"""Mask of the bits of `file` that hold the file number."""


@dataclass(frozen=True)
class Located:
    """Live rows of probed keys: row `pos[i]` of the data file `files[file[i]]` has key number `query[i]`.

    The rows are in no particular order. A key may have no row. It may have several rows, if other writers write to the
    table. Each data file occurs in `files` once.

    :param latest: for each probed key, the highest order value of its rows, or that with which it was deleted;
        `UNKNOWN` if the index knows neither. None if the index has no order values.
    """

    query: Ints
    file: Ints
    pos: Ints
    files: Sequence[IndexedFile]
    latest: pa.BinaryArray | None = None


@dataclass(frozen=True)
class ClosedRows(Located):
    """Closed versions of keys, in a table with history.

    :param orders: the order value of each.
    :param low: the low hash under which the index has each.
    :param deletes: numbers of keys, and the order values with which they were deleted.
    """

    orders: pa.BinaryArray = field(default_factory=lambda: pa.array([], pa.binary()))
    low: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    deletes: tuple[Ints, pa.BinaryArray] = field(
        default_factory=lambda: (np.empty(0, np.int64), pa.array([], pa.binary()))
    )

    def of(self, numbers: Ints) -> "ClosedRows":
        """Likewise, of keys that have other numbers; all of these have one.

        :param numbers: the new number of each key.
        """
        gone, orders = self.deletes
        return replace(self, query=numbers[self.query], deletes=(numbers[gone], orders))

    def take(self, rows: Ints) -> "ClosedRows":
        """Some of the versions, and all deletes."""
        return ClosedRows(
            self.query[rows],
            self.file[rows],
            self.pos[rows],
            self.files,
            None,
            self.orders.take(pa.array(rows)),
            self.low[rows],
            self.deletes,
        )


@dataclass(frozen=True)
class IndexSlice:
    """One version of an index, as the tasks of a micro-batch need it. The object pickles small.

    `dead` maps the path of a data file to a sequence: entries of runs of a lower sequence that point to the file aren't
    live. This sequence must be higher than the sequence of every run that was written before the file was removed or
    read again. `merge` names the runs to merge in this micro-batch: all runs of some sequences that are adjacent in age
    (`plan_merge`). `drop_tombstones` is true if the oldest run is among the runs to merge: then a tombstone has nothing
    left to hide. `base` is the base of the low hashes.

    `order` names the columns of the order values, if the index has these. `truncates` has the order values with which
    the source emptied its table, ascending. Tombstones of keys that were deleted before `horizon`, in seconds since
    1970, say nothing of the order. In a table with history, `current` names the column that is true in current rows,
    and the index has closed versions under hashes of their own (`of_versions`).
    """

    location: str
    io_properties: tuple[tuple[str, str], ...] = field(repr=False)
    runs: tuple[RunInfo, ...]
    dead: Mapping[str, int]
    merge: tuple[str, ...] = ()
    drop_tombstones: bool = False
    base: int = BASE
    order: OrderColumns | None = None
    current: str | None = None
    truncates: tuple[bytes, ...] = ()
    horizon: int = _NEVER

    @cached_property
    def io(self) -> FileIO:
        return file_io(self.io_properties)

    @property
    def floor(self) -> bytes:
        """A change below it is late, whatever its key."""
        return self.truncates[-1] if self.truncates else UNKNOWN

    @property
    def columns_of_versions(self) -> tuple[str, ...]:
        """The columns that tell under which hash the index has a row, beside the key."""
        return () if self.current is None or self.order is None else (self.current, *self.order.columns)

    @property
    def entries(self) -> int:
        """How many entries the runs have."""
        return sum(run.entries for run in self.runs)

    @property
    def merged_entries(self) -> int:
        """How many entries `merge` reads."""
        return sum(run.entries for run in self.runs if run.name in self.merge)

    def probe(self, high: Hashes, low: Hashes, first: int, last: int) -> Located:
        """Find the live rows of the keys (high[i], low[i]).

        :param high: high hashes of n keys, in any order.
        :param low: low hashes of the n keys.
        :param first: the task owns the keys with first <= high < last.
        :param last: end of that range; it may be 2**64.
        :raises ValueError: a key is outside the range. Another task owns it, and the runs of both tasks would overlap.
        :raises CorruptIndexError: a run is damaged or missing.
        """
        if len(high) and not first <= int(high.min()) <= int(high.max()) < last:
            raise ValueError(f"key hashes {high.min()}..{high.max()} are outside the task's range {first}..{last - 1}")
        none = np.empty(0, np.int64)
        by_high = np.argsort(high, kind="stable")
        high, low = high[by_high], low[by_high]
        numbers: dict[str, int] = {}
        files: list[IndexedFile] = []
        found = [(none, none, none)]
        orders, ordered = list[pa.BinaryArray](), [none]
        pending = np.arange(len(high))
        for info in sorted(self.runs, key=lambda run: -run.sequence):
            start = int(np.searchsorted(high[pending], np.uint64(info.first)))
            stop = int(np.searchsorted(high[pending], np.uint64(info.last), side="right"))
            if start == stop:
                continue
            run = open_run(self.io, self.location, info)
            query, at = _matches(run, high, low, pending[start:stop])
            file = run.file[at]
            supersedes = file & SUPERSEDES != 0
            visible = _until_superseded(_changes(query), supersedes)
            row = np.flatnonzero(visible & _has_row(file))
            # a run may name very many files, and a few keys are in few of them
            local, inverse = np.unique(file[row] & _NUMBER, return_inverse=True)
            named = [run.files[number] for number in local.tolist()]
            known = np.array([-1 if self._is_dead(run, f) else _number(f, numbers, files) for f in named], np.int64)
            number = known[inverse]
            row, number = row[number >= 0], number[number >= 0]
            found.append((by_high[query[row]], number, run.pos[at[row]].astype(np.int64)))
            if run.order is not None:
                deleted = np.flatnonzero(visible & ~_has_row(file) & (run.pos[at] >= self.horizon))
                telling = np.concatenate([row, deleted])
                orders.append(run.order.take(pa.array(at[telling])))
                ordered.append(by_high[query[telling]])
            done = np.zeros(len(high), np.bool_)
            done[query[supersedes]] = True
            pending = pending[~done[pending]]
        query, number, pos = (np.concatenate(parts) for parts in zip(*found, strict=True))
        newest = None
        if self.order is not None:
            parts = [pa.array([], pa.binary()), *orders]
            newest = latest(pa.concat_arrays(parts), np.concatenate(ordered), len(high), self.floor)
        return Located(query, number, pos, files, newest)

    def closed_versions(self, high: Hashes, low: Hashes) -> ClosedRows:
        """Find all closed versions of the keys (high[i], low[i]), and the deletes that are remembered beside them.

        :raises CorruptIndexError: a run is damaged or missing.
        """
        by_high = np.argsort(high, kind="stable")
        in_order = high[by_high]
        numbers: dict[str, int] = {}
        files: list[IndexedFile] = []
        found = list[tuple[Ints, Ints]]()
        parts = list[Entries]()
        for info in sorted(self.runs, key=lambda run: -run.sequence):
            start = int(np.searchsorted(in_order, np.uint64(info.first)))
            stop = int(np.searchsorted(in_order, np.uint64(info.last), side="right"))
            if start == stop:
                continue
            run = open_run(self.io, self.location, info)
            query, at = _pairs(*_same_high(run, in_order, np.arange(start, stop)))
            part = Entries(run.high, run.low, run.file, run.pos, (), run.order).take(at)
            number, row = np.full(len(at), -1, np.int64), np.flatnonzero(_has_row(part.file))
            local, inverse = np.unique(part.file[row] & _NUMBER, return_inverse=True)
            named = [run.files[n] for n in local.tolist()]
            known = [-1 if self._is_dead(run, f) else _number(f, numbers, files) for f in named]
            number[row] = np.array(known, np.int64)[inverse]
            found.append((by_high[query], number))
            parts.append(part)
        nothing = np.empty(0, np.int64)
        if not found:
            return ClosedRows(nothing, nothing, nothing, files)
        query, number = (np.concatenate(each) for each in zip(*found, strict=True))
        entries = Entries.joined(parts, ())
        newest_first = np.lexsort((entries.low, query))
        entries, query, number = entries.take(newest_first), query[newest_first], number[newest_first]
        file, pos, entry_low, orders = entries.file, entries.pos, entries.low, entries.order
        assert orders is not None
        visible = _until_superseded(_changes(query) | _changes(entry_low), file & SUPERSEDES != 0)
        of_key = low[query]
        rows = np.flatnonzero(visible & (number >= 0) & (entry_low == of_versions(of_key, orders, self.base)))
        is_delete = ~_has_row(file) & (pos >= self.horizon) & (entry_low == of_deletes(of_key))
        gone = np.flatnonzero(visible & is_delete)
        return ClosedRows(
            query[rows],
            number[rows],
            pos[rows].astype(np.int64),
            files,
            None,
            orders.take(pa.array(rows)),
            entry_low[rows],
            (query[gone], orders.take(pa.array(gone))),
        )

    def superseded(self, high: Hashes, low: Hashes) -> Flags:
        """Whether entries of these runs take the place of all older entries of the keys (high[i], low[i]): the key was
        deleted, or has its only row elsewhere.

        :param high: high hashes of n keys, in any order.
        :param low: low hashes of the n keys.
        :raises CorruptIndexError: a run is damaged or missing.
        """
        by_high = np.argsort(high, kind="stable")
        high, low = high[by_high], low[by_high]
        found = np.zeros(len(high), np.bool_)
        for info in self.runs:
            start = int(np.searchsorted(high, np.uint64(info.first)))
            stop = int(np.searchsorted(high, np.uint64(info.last), side="right"))
            if start < stop:
                run = open_run(self.io, self.location, info)
                query, at = _matches(run, high, low, np.arange(start, stop))
                found[query[run.file[at] & SUPERSEDES != 0]] = True
        result = np.empty(len(high), np.bool_)
        result[by_high] = found
        return result

    def write_merged(self, name: str, first: int, last: int, max_entries: int = RUN_ENTRIES) -> list[RunInfo]:
        """Merge the entries of the runs `merge` with first <= high < last into new runs `{name}-{i}`. If no entry is
        left, no run is written.

        The new runs get the highest sequence of the merged runs. With that sequence, entries of dead files could become
        live again, so the merge leaves them out.

        :param max_entries: about this many entries are read at a time; it is also the largest size of a new run.
        :raises CorruptIndexError: a run is damaged or missing.
        """
        infos = [run for run in self.runs if run.name in self.merge]
        parts = self._merged(infos, first, last, max_entries, self.horizon if self.drop_tombstones else 0)
        sequence = max((run.sequence for run in infos), default=0)
        beside = self.entries - self.merged_entries
        return [
            write_run(self.io, self.location, f"{name}-{number}", sequence, part, beside)
            for number, part in enumerate(parts)
        ]

    def live_rows(self, first: int = 0, last: int = 2**64) -> Iterator[tuple[Hashes, Located]]:
        """The rows that the index knows with first <= high < last: parts of n rows, with their n high hashes. Row i is
        that of key number i.

        :raises CorruptIndexError: a run is damaged or missing.
        """
        for part in self._merged(self.runs, first, last, RUN_ENTRIES, _NEVER):
            file, pos = (part.file & _NUMBER).astype(np.int64), part.pos.astype(np.int64)
            yield part.high, Located(np.arange(len(file)), file, pos, part.files)

    def ranges(self, first: int, last: int, most: int) -> list[tuple[int, int]]:
        """[first, last) in parts of about `most` entries each.

        :raises CorruptIndexError: a run is damaged or missing.
        """
        runs = [open_run(self.io, self.location, run) for run in self.runs]
        return list(pairwise(_edges(runs, first, last, most))) or [(first, last)]

    def _merged(
        self, infos: Iterable[RunInfo], first: int, last: int, max_entries: int, horizon: int
    ) -> Iterator[Entries]:
        """The merged entries of runs with first <= high < last: parts that aren't empty, by `high`.

        :param horizon: tombstones of an earlier time are left out.
        """
        newest_first = sorted(infos, key=lambda run: -run.sequence)
        runs = [open_run(self.io, self.location, run) for run in newest_first if run.first < last and run.last >= first]
        numbers: dict[str, int] = {}
        files: list[IndexedFile] = []
        renumbered = [np.array([_number(f, numbers, files) for f in run.files], np.uint32) for run in runs]
        dead = [np.array([self._is_dead(run, f) for f in run.files], np.bool_) for run in runs]
        for low_edge, high_edge in pairwise(_edges(runs, first, last, max_entries)):
            parts = [
                _renumber(run, _between(run, low_edge, high_edge), new, gone)
                for run, new, gone in zip(runs, renumbered, dead, strict=True)
            ]
            entries = Entries.joined(parts, tuple(files)).sorted()
            keep = _until_superseded(_changes(entries.high) | _changes(entries.low), entries.file & SUPERSEDES != 0)
            keep &= _has_row(entries.file) | (entries.pos >= horizon)
            if keep.any():
                yield _only_used_files(entries.take(keep))

    def _is_dead(self, run: Run, file: IndexedFile) -> bool:
        """Whether the run's entries that point to the file are dead."""
        return self.dead.get(file.path, -1) > run.info.sequence


def plan_merge(runs: Sequence[RunInfo]) -> tuple[str, ...]:
    """Names of the runs to merge now; empty if a merge doesn't pay yet.

    The runs of one sequence form a group: a micro-batch or a merge wrote them. A group has about one entry a key, so
    the largest one says how many keys there are at least. Once four or more groups have more than twice as many
    entries, they become one: so an index has about two entries a key at most, three if each group has all keys.

    Below that the merge is size-tiered. If four or more groups are adjacent in age and their sizes differ by less than
    a factor of 4, they become one group that is about four times as large. So an entry is written again once a tier,
    log4(all entries / entries of a micro-batch) times, and about twice with the largest group, and a probe looks into
    about 3 groups a tier. If the sizes vary too much for that and there are more than 16 groups, the four adjacent
    groups with the fewest entries are merged.
    """
    by_age = sorted(runs, key=lambda run: -run.sequence)
    groups = [list(group) for _, group in groupby(by_age, key=lambda run: run.sequence)]
    sizes = [sum(run.entries for run in group) for group in groups]
    if len(groups) >= _TIER and sum(sizes) > _MOST_ENTRIES_A_KEY * max(sizes):
        return _names(groups)
    for start in range(len(groups)):
        stop = start + 1
        while stop < len(groups) and max(sizes[start : stop + 1]) < _TIER * min(sizes[start : stop + 1]):
            stop += 1
        if stop - start >= _TIER:
            return _names(groups[start:stop])
    if len(groups) <= _MAX_GROUPS:
        return ()
    cheapest = min(range(len(groups) - _TIER + 1), key=lambda start: sum(sizes[start : start + _TIER]))
    return _names(groups[cheapest : cheapest + _TIER])


def _edges(runs: Sequence[Run], first: int, last: int, max_entries: int) -> list[int]:
    """Cut [first, last) into parts with at most about `max_entries` entries each. The largest run tells where to cut.

    The hashes need not be uniform: if the table has buckets, its hashes begin with the bucket's number.
    """
    parts = [run.high[_between(run, first, last)] for run in runs]
    total = sum(len(part) for part in parts)
    if not total:
        return []
    largest = max(parts, key=len)
    count = math.ceil(total / max_entries)
    inner = {int(largest[len(largest) * n // count]) for n in range(1, count)}
    return [first, *sorted(inner - {first}), last]


def _names(groups: list[list[RunInfo]]) -> tuple[str, ...]:
    return tuple(run.name for group in groups for run in group)


def _matches(run: Run, high: Hashes, low: Hashes, queries: Ints) -> tuple[Ints, Ints]:
    """Pairs (query, index of an entry of the same key), ascending in both. `queries` are indexes into `high` and `low`,
    of which `high` is sorted.
    """
    queries, start, stop = _same_high(run, high, queries)
    # a key with many versions has as many entries with the same high hash
    start, stop = (_bisected(run.low, low[queries], start, stop, right=right) for right in (False, True))
    return _pairs(queries, start, stop)


def _same_high(run: Run, high: Hashes, queries: Ints) -> tuple[Ints, Ints, Ints]:
    """The queries whose high hash the run has, and for each of them the range of the entries that have it."""
    start = np.searchsorted(run.high, high[queries])
    hit = run.high[np.minimum(start, len(run.high) - 1)] == high[queries]
    queries, start = queries[hit], start[hit]
    return queries, start, np.searchsorted(run.high, high[queries], side="right")


def _bisected(values: Hashes, wanted: Hashes, start: Ints, stop: Ints, *, right: bool) -> Ints:
    """`np.searchsorted` of each wanted value in a range of its own, in which the values are sorted."""
    for _ in range(int(np.max(stop - start, initial=0)).bit_length()):
        middle = (start + stop) // 2
        value = values[np.minimum(middle, len(values) - 1)]
        above = (start < stop) & (value <= wanted if right else value < wanted)
        start, stop = np.where(above, middle + 1, start), np.where(above, stop, middle)
    return start


def _pairs(queries: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Each query with each entry of its range."""
    count = stop - start
    query = np.repeat(queries, count)
    return query, np.arange(len(query)) + np.repeat(start - (np.cumsum(count) - count), count)


def _has_row(file: Words) -> Flags:
    """Whether each entry has a row: it is no tombstone."""
    flags: Flags = file & _NUMBER != _NUMBER
    return flags


def _changes(values: npt.NDArray[np.generic]) -> Flags:
    """Whether each value differs from the one before."""
    changes = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def _until_superseded(new_key: Flags, supersedes: Flags) -> Flags:
    """Flags the entries of each key up to and including the first entry that supersedes. In the input, entries of one
    key are adjacent, and newer entries come first.
    """
    newer: Ints = np.cumsum(supersedes) - supersedes
    # `newer` never falls, so the maximum over the key starts so far is the value at the start of the current key
    visible: Flags = newer == np.maximum.accumulate(np.where(new_key, newer, 0))
    return visible


def _between(run: Run, first: int, last: int) -> slice:
    """Entries of `run` with first <= high < last."""
    stop = len(run.high) if last > run.info.last else int(np.searchsorted(run.high, np.uint64(last)))
    return slice(int(np.searchsorted(run.high, np.uint64(first))), stop)


def _renumber(run: Run, part: slice, numbers: Words, dead: Flags) -> Entries:
    """A part of a run without its dead entries and with new file numbers. A dead entry that supersedes becomes a
    tombstone that says nothing of the order: whoever removed the row needn't have known of one.

    :param numbers: new number of each of the run's files.
    :param dead: for each of the run's files, whether entries that point to it are dead.
    """
    file, pos, order = run.file[part].copy(), run.pos[part].copy(), run.order
    is_row = _has_row(file)
    local = file[is_row] & _NUMBER
    superseding = file[is_row] & SUPERSEDES
    gone = dead[local]
    file[is_row] = np.where(gone & (superseding != 0), TOMBSTONE, numbers[local] | superseding)
    keep = np.ones(len(file), np.bool_)
    keep[is_row] = ~gone | (superseding != 0)
    untold = is_row & (file == TOMBSTONE)
    pos[untold] = 0
    if order is not None:
        order = order.slice(part.start, part.stop - part.start)
        if untold.any():
            order = pc.if_else(pa.array(untold), pa.scalar(UNKNOWN, pa.binary()), order)
    return Entries(run.high[part], run.low[part], file, pos, (), order).take(keep)


def _only_used_files(entries: Entries) -> Entries:
    file = entries.file.copy()
    is_row = _has_row(file)
    used = np.zeros(len(entries.files), np.bool_)
    used[file[is_row] & _NUMBER] = True
    numbers = (np.cumsum(used) - 1).astype(np.uint32)
    file[is_row] = numbers[file[is_row] & _NUMBER] | (file[is_row] & SUPERSEDES)
    files = tuple(entries.files[i] for i in np.flatnonzero(used).tolist())
    return replace(entries, file=file, files=files)


def _number(file: IndexedFile, numbers: dict[str, int], files: list[IndexedFile]) -> int:
    """The number of `file` in `files`. A new file is added to `files`. `numbers` maps each path to its number."""
    number = numbers.setdefault(file.path, len(files))
    if number == len(files):
        files.append(file)
    return number
