"""A table in memory: a third target, without Spark and without a JVM.

`Store` is what a catalog is elsewhere: the table's snapshots and properties, as everybody sees them. `MemoryTable` is
what one process knows of it. Snapshot ids are in no order. The sink's state is in properties. Its position, and what
holds with it (`OF_POSITION`), are in the snapshots too, so that they come back with them.

A store is strict, and refuses a commit if anybody has changed rows since its base, as Delta Lake does; or it is lenient
about commits that only move rows which the commit doesn't touch, as Iceberg is.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pyspark.sql import types as T

from changelog.spec import ColumnSpec
from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from deltawriters.keyindex.versions import IndexLostError
from deltawriters.old_rows import DeletedRows
from deltawriters.scratch import Scratch
from deltawriters.vectors import positions_of
from sink.targets import merge_levels
from sink.targets.notes import MINOR, SINK_ID
from sink.targets.own_position import check_idle
from sink.targets.retries import Retries
from sink.targets.scan_costs import V3
from sink.targets.seam import Reader, Table, Upkeep
from sink.targets.upkeep_values import CompactionLimits, Mergeable, MergeCandidates, Rewritable, UpkeepFacts
from sink.targets.values import (
    OF_POSITION,
    ChangeSet,
    CommitUnknownError,
    Done,
    FileCounts,
    LastCommit,
    LiveFile,
    Outcome,
    Refused,
    Rewrite,
    StoredPosition,
    TableChanges,
    TouchedFiles,
    Unknown,
    WrittenDeletes,
)
from tests.memory.storage import Clock, MemoryFiles
from tests.memory.writers import MemoryTableSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sink.config import TableSection

Vector = Mapping[str, Any]


@dataclass(frozen=True)
class MemoryFile:
    """A data file of a snapshot.

    :param partition: JSON text.
    :param columns: names of its columns.
    :param vector: its deleted positions, and how many there are (`record-count`).
    :param writer: the sink whose commit wrote it, and that commit's operation.
    :param minor: number of the minor compaction that wrote it; 0 if none did.
    """

    path: str
    partition: str
    rows: int
    size: int
    columns: tuple[str, ...]
    vector: Vector | None = None
    writer: tuple[str, str] | None = None
    minor: int = 0

    @property
    def deleted(self) -> Sequence[int]:
        return self.vector["positions"] if self.vector is not None else ()

    @property
    def indexed(self) -> IndexedFile:
        return IndexedFile(self.path, 0, json.loads(self.partition))


@dataclass(frozen=True)
class Snapshot:
    """:param kind: `append` adds files, `overwrite` also deletes rows, `replace` only moves rows.
    :param sink: what a sink stored with it.
    """

    id: int
    parent: int | None
    files: Mapping[str, MemoryFile]
    kind: Literal["append", "overwrite", "replace"]
    sink: Mapping[str, Any] = field(default_factory=dict)


class Store:
    """The table as its catalog has it.

    :param schema: its columns.
    :param partitioned_by: a column, or nothing.
    :param file_size: bytes at which a data file is finished.
    """

    def __init__(self, schema: pa.Schema, partitioned_by: str | None, *, is_strict: bool, file_size: int) -> None:
        self.contents: dict[str, bytes] = {}
        self.schema = schema
        self.partitioned_by = partitioned_by
        self.is_strict = is_strict
        self.file_size = file_size
        self.snapshots: dict[int, Snapshot] = {}
        self.current: int | None = None
        self.properties: dict[str, str] = {}
        self.forgotten: set[int] = set()
        """Expired snapshots. Their files may still be those of others."""
        self.on_add: Callable[[Snapshot], None] = lambda snapshot: None
        self._numbers = itertools.count(1)

    @property
    def live(self) -> Mapping[str, MemoryFile]:
        return self.snapshots[self.current].files if self.current is not None else {}

    def add(
        self,
        files: Mapping[str, MemoryFile],
        kind: Literal["append", "overwrite", "replace"],
        sink: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Make a snapshot of `files` the current one."""
        number = next(self._numbers) * 2654435761 % (1 << 32)
        made = Snapshot(number, self.current, files, kind, sink or {})
        self.snapshots[number] = made
        self.current = number
        self.on_add(made)
        return made

    def ancestors(self) -> Iterator[Snapshot]:
        """The current snapshot and those before it, as far as they are known."""
        number = self.current
        while number is not None and number not in self.forgotten:
            yield self.snapshots[number]
            number = self.snapshots[number].parent

    def since(self, base: int | None) -> list[Snapshot] | None:
        """Snapshots after `base`, the newest first. None if the history doesn't reach it."""
        found: list[Snapshot] = []
        if self.current == base:
            return found
        for snapshot in self.ancestors():
            found.append(snapshot)
            if snapshot.parent == base:
                return found
        return None

    def touched(self, snapshot: Snapshot) -> set[str]:
        """Paths of the files that it added, removed, or gave another vector."""
        before = self.snapshots[snapshot.parent].files if snapshot.parent is not None else {}
        both = before.keys() & snapshot.files.keys()
        return set(before.keys() ^ snapshot.files.keys()) | {p for p in both if before[p] != snapshot.files[p]}


class MemoryTable(Table):
    """What one process knows of the table."""

    snapshot_word = "snapshot"
    spark: Any = None

    def __init__(self, store: Store, name: str, clock: Clock) -> None:
        self.name = name
        self.store = store
        self.clock = clock
        self._files = MemoryFiles(store.contents, clock)
        self._see()

    def _see(self) -> None:
        self.seen = self.store.current
        self.schema = self.store.schema
        self._properties = dict(self.store.properties)

    def refresh(self) -> None:
        self.clock.step("look at the table")
        self._see()

    @property
    def files(self) -> Mapping[str, MemoryFile]:
        return self.store.snapshots[self.seen].files if self.seen is not None else {}

    @property
    def spec(self) -> MemoryTableSpec:
        size = self.store.file_size
        return MemoryTableSpec("memory", self.schema, self.store.partitioned_by, self._files, size)

    @property
    def table_id(self) -> str:
        return "one and the same"

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    def property(self, name: str) -> str | None:
        prefix, _, part = name.rpartition(".")
        stored = self.position(prefix) if part in OF_POSITION else None
        if stored is not None and stored.operation != json.loads(self._properties[f"{prefix}.position"])["operation"]:
            return (stored.state or {}).get(part)
        return self._properties.get(name)

    def stored(self, part: str) -> Mapping[str, str]:
        split = ((name.rpartition("."), value) for name, value in self._properties.items())
        return {prefix: value for (prefix, _, last), value in split if last == part}

    def own_state(self, prefix: str) -> Mapping[str, str]:
        split = ((name.rpartition("."), value) for name, value in self._properties.items())
        return {part: value for (owner, _, part), value in split if owner == prefix}

    def set_property(self, name: str, value: str | None) -> None:
        self.clock.step("set a property")
        if value is None:
            self.store.properties.pop(name, None)
        else:
            self.store.properties[name] = value
        self._see()

    def snapshot_id(self) -> int | None:
        return self.seen

    def is_empty(self) -> bool:
        return not self.files

    def columns(self) -> tuple[ColumnSpec, ...]:
        types = {"int64": T.LongType(), "string": T.StringType(), "bool": T.BooleanType()}
        types["timestamp[us, tz=UTC]"] = T.TimestampType()
        return tuple(ColumnSpec(part.name, types[str(part.type)], required=not part.nullable) for part in self.schema)

    def identifiers(self) -> tuple[str, ...]:
        return ()

    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None: ...

    def check_fits(self, section: "TableSection") -> None: ...

    def not_followed(self) -> Iterator[str]:
        return iter(())

    def last_commit(self) -> LastCommit | None:
        if self.seen is None:
            return None
        counts = FileCounts(len(self.files), sum(file.vector is not None for file in self.files.values()))
        return LastCommit(self.seen, 0, f"{counts.data} data files", counts)

    def index_forbidden_at(self, location: str) -> str | None:
        return None

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        return json.dumps([list(key), [str(self.schema.field(name).type) for name in key], buckets])

    def commit(self, request: ChangeSet | Rewrite) -> Outcome:
        commits = MemoryCommitter(self)
        try:
            return commits.rewrite(request) if isinstance(request, Rewrite) else commits.commit(request)
        except CommitUnknownError as error:  # from a step at which the answer gets lost
            return Unknown(str(error))

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        check_idle(self, prefix, state)
        self.store.add({} if empty else self.store.live, "overwrite", {"prefix": prefix, "reset": True})
        for part in state.keys() - set(kept):
            del self.store.properties[f"{prefix}.{part}"]
        self._see()
        return Done()

    def retries(self) -> Retries:
        return Retries(self.name, 20, 0, 0)

    def position(self, prefix: str, *, newest_if_in_doubt: bool = False) -> StoredPosition | None:
        """That of the newest snapshot of the sink which is left, and the newest index of the same commit."""
        newer: tuple[Mapping[str, Any], int] | None = None
        for snapshot in self.known_ancestors():
            sink = snapshot.sink
            if sink.get("prefix") != prefix:
                continue
            if "reset" in sink:
                return None
            if "position" not in sink:
                newer = newer or (sink, snapshot.id)
                continue
            index, last = sink.get("index"), snapshot.id
            if newer is not None and newer[0]["operation"] == sink["operation"]:
                index, last = newer[0]["index"], newer[1]
            return StoredPosition(sink["position"], sink["operation"], snapshot.id, index, last, sink["state"])
        return None

    def known_ancestors(self) -> Iterator[Snapshot]:
        """Those of the snapshot that this process has seen. The sink's own newest one never expires here."""
        number = self.seen
        while number is not None:
            yield self.store.snapshots[number]
            number = self.store.snapshots[number].parent

    # -- what others changed

    def _since(self, base: int | None) -> list[Snapshot] | None:
        found: list[Snapshot] = []
        if self.seen == base:
            return found
        for snapshot in self.known_ancestors():
            if snapshot.id in self.store.forgotten:
                return None
            found.append(snapshot)
            if snapshot.parent == base:
                return found
        return None

    def changes_since(self, base: int | None, included: set[int]) -> TableChanges | None:
        snapshots = self._since(base)
        if snapshots is None or not included <= {snapshot.id for snapshot in snapshots}:
            return None
        touched = set[str]()
        for snapshot in snapshots:
            if snapshot.id not in included:
                touched |= self.store.touched(snapshot)
        files = [_live(self.files[path]) for path in sorted(touched & self.files.keys())]
        return TableChanges(files, frozenset(touched - self.files.keys()))

    def live_files(self) -> Iterator[LiveFile]:
        return map(_live, self.files.values())

    def delete_rows(
        self,
        name: str,
        rows: DeletedRows,
        known: Callable[[str], Vector | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        scratch: Scratch,
    ) -> WrittenDeletes:
        self.clock.step("delete rows")
        files, removed, vectors = list[str](), list[str](), dict[str, Vector | None]()
        for file, deleted in rows.positions():
            path = file.path
            if path not in self.files:
                raise IndexLostError(f"the index has rows in {path}, which is no file of the table")
            before = known(path)
            positions = set(before["positions"] if before else ()) | set(positions_of(deleted).tolist())
            vector = {"positions": sorted(positions), "record-count": len(positions)}
            is_gone = len(positions) == self.files[path].rows
            vectors[path] = None if is_gone else vector
            removed.append(json.dumps({"path": path, "vector": before, "gone": is_gone}))
            if not is_gone:
                files.append(json.dumps({"path": path, "vector": vector}))
        return WrittenDeletes(files, removed, vectors)

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        self.clock.step("look for touched files")
        if not set(paths) <= self.files.keys():
            raise IndexLostError(f"the index has rows in {set(paths) - self.files.keys()}, which the table hasn't")
        files = [self.files[path] for path in paths]
        touched = [DataFile(file.indexed, file.size, vector=file.vector) for file in files]
        handles = [{"path": file.path, "vector": file.vector} for file in files]
        return TouchedFiles(touched, handles, (), len(self.files))

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: DeletedRows, scratch: Scratch
    ) -> tuple[list[str], WrittenDeletes]:
        self.clock.step("delete rows")
        new = {found["path"]: found for found in map(json.loads, files)}
        vectors = dict[str, Vector | None]()
        for file, deleted in rows.positions():
            positions = positions_of(deleted).tolist()
            if len(positions) == new[file.path]["rows"]:
                del new[file.path]
                vectors[file.path] = None
            else:
                vectors[file.path] = {"positions": sorted(positions), "record-count": len(positions)}
                new[file.path]["vector"] = vectors[file.path]
        return list(map(json.dumps, new.values())), WrittenDeletes(vectors=vectors)

    def upkeep(self) -> "MemoryUpkeep":
        return MemoryUpkeep(self)

    # -- what only Spark does

    def reader(self) -> Reader:
        raise NotImplementedError

    def evolve(self, changes: "Mapping[str, T.DataType | None]", defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError


class MemoryUpkeep(Upkeep):
    """What the stories do of a table's maintenance."""

    def __init__(self, table: MemoryTable) -> None:
        self._table = table

    def facts(self) -> UpkeepFacts | None:
        raise NotImplementedError

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        self._table.clock.step("look for small files")
        number = max((int(s.sink["minor"]) for s in self._table.known_ancestors() if "minor" in s.sink), default=0) + 1
        small: list[MemoryFile] = []
        fresh = set[str]()
        for file in self._table.files.values():
            if file.writer is None or file.writer[0] != prefix or file.columns != tuple(self._table.schema.names):
                continue
            if not file.minor:
                fresh.add(file.writer[1])
            if not file.minor or not merge_levels.is_below(file.minor, number):
                small.append(file)
        count = sum(not file.minor for file in small)
        partitions: dict[str, list[Mergeable]] = {}
        if is_enough(len(fresh), count):
            for file in small:
                merged = DataFile(file.indexed, file.size, rows=file.rows)
                partitions.setdefault(file.partition, []).append(Mergeable(file.partition, merged))
        return MergeCandidates(number, len(fresh), count, 0, partitions, {})

    scan_costs = V3

    def rewritables(self) -> Iterator[list[Rewritable]]:
        self._table.clock.step("look for files to rewrite")
        found = []
        for file in self._table.files.values():
            if file.columns == tuple(self._table.schema.names):
                deleted = len(file.deleted)
                small = DataFile(file.indexed, file.size, live_rows=file.rows - deleted)
                found.append(Rewritable(0, file.partition, file.rows, deleted, int(deleted > 0), small))
        yield found

    def handles(self, paths: Collection[str]) -> list[str]:
        live = [path for path in paths if path in self._table.files]
        return [json.dumps({"path": path, "vector": self._table.files[path].vector}) for path in live]

    def files_where(self, condition: str) -> frozenset[str]:
        raise NotImplementedError

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> None:
        raise NotImplementedError

    def remove_rows(self, rows: "DataFrame", columns: Sequence[str]) -> Exception | None:
        raise NotImplementedError

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> Sequence[str]:
        raise NotImplementedError


class MemoryCommitter:
    """Commits to the store. The step before it and the step after it are those at which its answer may get lost."""

    def __init__(self, table: MemoryTable) -> None:
        self._table = table

    def commit(self, request: ChangeSet) -> Done | Refused:
        store = self._table.store
        self._table.clock.step("send a commit")
        if request.written_for not in (None, tuple(store.schema.names)):
            return Refused("the table was altered")
        referenced = request.index.referenced if request.index is not None else ()
        if self._is_in_conflict(request.base_snapshot, referenced):
            return Refused("others changed the table", again="send")
        files = {} if request.truncates else dict(store.live)
        if request.index is not None and request.index.replaced:
            for found in request.index.replaced:
                if files.pop(found["path"]).vector != found["vector"]:
                    raise IndexLostError(f"the index and the table differ in the vector of {found['path']}")
            add_files(files, request.index.files, (request.prefix, request.operation))
        elif request.index is not None:
            apply_vectors(files, request.index.files, request.index.removed)
        add_files(files, request.files, (request.prefix, request.operation))
        kind: Literal["append", "overwrite"] = "overwrite" if referenced or request.truncates else "append"
        stored = {"prefix": request.prefix, "operation": request.operation, "position": request.position}
        if request.amends:
            stored["amends"] = request.amends
        if request.index is not None:
            stored["index"] = request.index.stored
        properties = {**store.properties, **request.properties}
        parts = {part: properties.get(f"{request.prefix}.{part}") for part in OF_POSITION}
        stored["state"] = {part: value for part, value in parts.items() if value is not None}
        store.properties |= {**request.properties, f"{request.prefix}.position": json.dumps(stored)}
        store.add(files, kind, stored)
        self._table.clock.step("hear of a commit")
        self._table._see()
        return Done()

    def _is_in_conflict(self, base: int | None, referenced: Collection[str]) -> bool:
        store = self._table.store
        others = store.since(base)
        if others is None or (store.is_strict and others):
            return True
        # the index can't be of another state than the one in which the rows were looked up
        return any(s.kind != "replace" for s in others) or not set(referenced) <= store.live.keys()

    def rewrite(self, request: Rewrite) -> Done | Refused:
        store = self._table.store
        self._table.clock.step("send a rewrite")
        replaced = [json.loads(handle) for handle in request.replaced]
        others = store.since(request.index.base)
        are_live = all(
            found["path"] in store.live and store.live[found["path"]].vector == found["vector"] for found in replaced
        )
        if others is None or (store.is_strict and others) or not are_live:
            return Refused("rows of the files were deleted meanwhile")
        if request.written_for != tuple(store.schema.names):
            return Refused("the table was altered")
        files = {path: file for path, file in store.live.items() if path not in {f["path"] for f in replaced}}
        number = int(request.summary.get(MINOR, 0))
        operation = str(request.index.stored["version"])
        # files of a rewrite beside the stream are nobody's, so that minor compactions leave them alone
        writer = (f"rowdelta.{request.summary[SINK_ID]}", operation) if number else None
        add_files(files, request.files, writer, number)
        stored = {
            "prefix": request.prefix,
            "operation": request.position_operation,
            "index": request.index.stored,
        } | ({"minor": number} if number else {})
        store.add(files, "replace", stored)
        store.properties |= request.properties
        self._table.clock.step("hear of a rewrite")
        self._table._see()
        return Done()


def add_files(
    files: dict[str, MemoryFile], descriptions: Iterable[str], writer: tuple[str, str] | None, minor: int = 0
) -> None:
    """Add new data files, as JSON in the terms of this format."""
    for text in descriptions:
        found = json.loads(text)
        found["columns"] = tuple(found["columns"])
        assert found["path"] not in files
        files[found["path"]] = MemoryFile(**found, writer=writer, minor=minor)


def apply_vectors(files: dict[str, MemoryFile], changed: Iterable[str], removed: Iterable[str]) -> None:
    """Give data files other vectors, and remove those without a live row.

    :raises IndexLostError: the one who asks doesn't know the live vector.
    """
    for text in removed:
        found = json.loads(text)
        live = files.get(found["path"])
        if live is None or live.vector != found["vector"]:
            raise IndexLostError(f"the index and the table differ in the vector of {found['path']}")
        if found["gone"]:
            del files[found["path"]]
    for text in changed:
        found = json.loads(text)
        files[found["path"]] = replace(files[found["path"]], vector=found["vector"])


def _live(file: MemoryFile) -> LiveFile:
    return LiveFile(file.indexed, file.vector, handle=file)
