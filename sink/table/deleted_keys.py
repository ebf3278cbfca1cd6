"""The order values of deleted keys: which files have them (`deltawriters.tombstones`), and how many there are.

The files are beside the table's own. A commit stores their names together with its source position, so they go back
with a rollback, and an index that is built again finds them. Each sink of a table reads those of all others.
"""

import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pyarrow as pa

from deltawriters import tombstones
from deltawriters.keyindex.versions import IndexVersion
from deltawriters.resolve import key_columns
from deltawriters.scratch import Scratch
from sink.table.engine import StoredFolder
from sink.table.table_plan import LateOrder
from sink.targets.own_position import others_positions
from sink.targets.seam import Table

log = logging.getLogger("rowdelta")

_MOST_SMALL = 16
"""So many small files are left as they are. One more, and they become one."""
_LARGE = 1_000_000
"""A file with more keys isn't small."""
_LARGER = 4
"""A file with so many times the keys of all smaller ones isn't merged with these: each key is written again only a few
times."""
_MOST_MERGED = 256
"""So many merged files are kept for a rollback, and the names are in each version."""

_MOST_TRUNCATES = 100
"""So many TRUNCATEs are known. Of a table with history, a change from before them is closed by the first that is known.
"""

STORED = "deleted"
"""What a commit stores of it, by this name, beside the name of the key index's version."""


class DeletedKeys:
    """What is known of a table's deleted keys.

    :param key: names of the key columns.
    :param prefix: of the sink's properties in the table.
    """

    def __init__(self, table: Table, key: Sequence[str], late: LateOrder, prefix: str) -> None:
        self._table = table
        self._key = key
        self._spec = late.columns.spec
        self._late = late
        self._prefix = prefix
        self._left_out = set[str]()
        """Names of files that were left out, of which the log tells."""

    @property
    def horizon(self) -> int:
        """Deletes before this time, in seconds since 1970, say nothing any more."""
        return int(time.time()) - self._late.tombstone_seconds

    @property
    def _others(self) -> list[Mapping[str, Any]]:
        """What other sinks have stored."""
        return _told_by_others(self._table, self._prefix)

    @property
    def files_of_others(self) -> set[str]:
        """The names of other sinks' files."""
        return {name for told in self._others for name, _ in told["files"]}

    def truncates(self, version: IndexVersion) -> tuple[bytes, ...]:
        """The order values of the source's TRUNCATEs, whichever sink has applied them, ascending."""
        others = (told["truncates"] for told in self._others if told["order"] == self._spec)
        return tuple(map(bytes.fromhex, sorted({*version.truncates}.union(*others))))

    def told(self, version: IndexVersion) -> Mapping[str, Any]:
        """What a commit stores of a version."""
        kept = {"files": version.deleted, "seconds": self._late.tombstone_seconds}
        return {STORED: {"order": self._spec, "truncates": version.truncates, **kept}}

    def restored(self, version: IndexVersion, stored: Mapping[str, Any]) -> IndexVersion:
        """A version with what the table's position has of its last one.

        :param stored: what was stored of the index.
        """
        told = stored.get(STORED)
        if told is None:
            return version
        truncates = tuple(told["truncates"]) if told["order"] == self._spec else ()
        return replace(version, truncates=truncates, deleted=tuple((name, rows) for name, rows in told["files"]))

    def read(self, names: Iterable[str]) -> list[pa.Table]:
        """The rows of files that have one which still says something. Those of another key or order are left out."""
        found = []
        for name in sorted(names):
            if tombstones.last_delete(name) < self.horizon:
                continue
            try:
                rows = tombstones.read_tombstones(self._table.spec, name, self._spec, self._key)
            except FileNotFoundError:
                log.warning(
                    "%s: %s is gone, and with it the order of keys that were deleted: a late change may bring their "
                    "rows back. Leave this folder to rowdelta",
                    *(self._table.name, tombstones.path_of(self._table.spec, name)),
                )
                continue
            if rows is None:
                self._tell_left_out(name)
                continue
            keys = rows.select(self._key)
            for number, column in enumerate(key_columns(self._table.spec, keys)):  # the table's may be wider by now
                rows = rows.set_column(number, self._key[number], column)
            found.append(rows)
        return found

    def _tell_left_out(self, name: str) -> None:
        if name in self._left_out:
            return
        self._left_out.add(name)
        log.warning(
            "%s: %s is left out: its keys were deleted when the table's key or order_by was another one, so the "
            "order of their deletes says nothing now, and a late change may bring their rows back",
            *(self._table.name, tombstones.path_of(self._table.spec, name)),
        )

    def followed_by(self, version: IndexVersion, new: Collection[tuple[str, int]], scratch: Scratch) -> IndexVersion:
        """A version with more files, or with one in the place of many small ones.

        :param scratch: gets the file that is written.
        """
        horizon = self.horizon
        files = [(name, rows) for name, rows in version.deleted if tombstones.last_delete(name) >= horizon]
        merged = tuple(name for name in version.merged if tombstones.last_delete(name) >= horizon)
        taken = _to_merge(files)
        if taken:
            files = [(name, rows) for name, rows in files if name not in taken]
            merged += taken
        if parts := self.read(taken):
            rows, table = tombstones.since(parts, horizon), self._table.spec
            name = tombstones.name_of(table, rows, uuid4().hex)
            scratch.add(tombstones.path_of(table, name))
            tombstones.write_tombstones(table, name, self._spec, rows)
            files.append((name, len(rows)))
        return replace(version, deleted=(*files, *new), merged=merged[-_MOST_MERGED:])

    def delete_unneeded(self, old: IndexVersion, new: IndexVersion) -> None:
        """Delete the files that a version no longer has: their time is over, or they were merged long ago."""
        for name in _names(old) - _names(new):
            with suppress(OSError):  # it costs nobody anything but its place
                self._table.spec.io.delete(tombstones.path_of(self._table.spec, name))


def remove_outdated(table: Table, prefix: str, folder: StoredFolder, older_than: float, *, dry_run: bool) -> list[str]:
    """Delete (`dry_run`: find) files in the table's folder that say nothing any more, whoever wrote them: they stay
    after a reset, or a crash before a commit. Returns their paths.

    :param prefix: of the sink's properties in the table.
    :param folder: the table's.
    :param older_than: seconds since the last delete, if no other sink of the table needs it for longer.
    """
    kept = max([older_than, *(told["seconds"] for told in _told_by_others(table, prefix))])
    location, found = table.spec.location.rstrip("/"), list[str]()
    for place in {tombstones.folder_of(root) for root in (location, table.spec.data_root)}:
        inside = place.removeprefix(f"{location}/")
        names = folder.names(inside) if inside != place else ()  # what is elsewhere may be another table's
        found += [f"{inside}/{name}" for name in names if 0 < tombstones.last_delete(name) < time.time() - kept]
    if not dry_run:
        folder.delete(found)
    return [f"{location}/{path}" for path in found]


def _told_by_others(table: Table, prefix: str) -> list[Mapping[str, Any]]:
    indexes = (json.loads(text).get("index") or {} for text in others_positions(table, prefix).values())
    return [index[STORED] for index in indexes if STORED in index]


def _to_merge(files: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Names of the files that become one: the smallest ones, without those that are much larger than the rest. Empty if
    there are few small ones.

    :param files: name and number of keys.
    """
    small = sorted((rows, name) for name, rows in files if rows <= _LARGE)
    if len(small) <= _MOST_SMALL:
        return ()
    total, taken = small[0][0], [small[0][1]]
    for rows, name in small[1:]:
        if rows > _LARGER * total:
            break
        total += rows
        taken.append(name)
    return tuple(taken) if len(taken) > 1 else ()


def emptied(version: IndexVersion, truncates: Iterable[str]) -> IndexVersion:
    """The version after a TRUNCATE of the source. What other sinks have deleted is read again.

    :param truncates: its order value.
    """
    merged = (*version.merged, *(name for name, _ in version.deleted))
    known = with_truncates(version, truncates).truncates[-1:]
    return IndexVersion(version.encoding, version.sequence, truncates=known, merged=merged)


def with_truncates(version: IndexVersion, truncates: Iterable[str]) -> IndexVersion:
    """The version with the order values of further TRUNCATEs."""
    return replace(version, truncates=tuple(sorted({*version.truncates, *truncates}))[-_MOST_TRUNCATES:])


def _names(version: IndexVersion) -> set[str]:
    return {*version.merged, *(name for name, _ in version.deleted)}
