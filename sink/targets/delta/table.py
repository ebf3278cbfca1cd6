"""A Delta table as its micro-batches need it: what others changed, and the deletes of earlier rows."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from pyspark.sql import types as T

from changelog.amounts import amount, amounts
from deltawriters.content import DataFile
from deltawriters.keyindex import IndexedFile
from deltawriters.old_rows import DeletedRows
from deltawriters.scratch import Scratch
from sink.errors import TableError
from sink.targets.delta.actions import Commit
from sink.targets.delta.commands import evolve
from sink.targets.delta.commit import DeltaCommitter
from sink.targets.delta.live_files import file_actions
from sink.targets.delta.log import CommitRefusedError
from sink.targets.delta.new_vectors import live_adds, remove_of, write_deletes
from sink.targets.delta.partitions import is_clear
from sink.targets.delta.reader import DeltaReader
from sink.targets.delta.state import DeltaState
from sink.targets.delta.upkeep import DeltaUpkeep
from sink.targets.locations import in_one_form
from sink.targets.retries import Retries
from sink.targets.values import ChangeSet, LiveFile, Outcome, Rewrite, TableChanges, TouchedFiles, WrittenDeletes

log = logging.getLogger("rowdelta")


class DeltaTable(DeltaState):
    """One Delta table as the sink sees it."""

    @cached_property
    def _upkeep(self) -> DeltaUpkeep:
        return DeltaUpkeep(self)

    @cached_property
    def _reader(self) -> DeltaReader:
        return DeltaReader(self)

    def upkeep(self) -> DeltaUpkeep:
        return self._upkeep

    def reader(self) -> DeltaReader:
        return self._reader

    def set_property(self, name: str, value: str | None) -> None:
        prefix, _, key = name.rpartition(".")
        self._committer.store(prefix, key, value)

    def evolve(self, changes: Mapping[str, T.DataType | None], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        struct = T.StructType.fromJson(json.loads(self._snapshot.metadata.schema))
        fields = {field.name: field for field in struct}
        for name, dtype in changes.items():
            old = fields.get(name)
            if dtype is None and old is not None:
                fields[name] = T.StructField(name, old.dataType, True, old.metadata)
            elif dtype is not None:
                nullable, metadata = (True, {}) if old is None else (old.nullable, old.metadata)
                fields[name] = T.StructField(name, dtype, nullable, metadata)
        try:
            evolve(self.log, self._snapshot.version, T.StructType(list(fields.values())))
        except ValueError as error:
            raise TableError(
                f"{self.name}: {error}. Allow it: ALTER TABLE … SET TBLPROPERTIES ('delta.enableTypeWidening' = "
                "'true'), which needs readers that know the feature typeWidening; or set schema_changes: fail."
            ) from None
        except CommitRefusedError as error:
            log.info("%s: others committed while its columns were changed: %s", self.name, error)
        self.refresh()
        return {}

    @cached_property
    def _committer(self) -> DeltaCommitter:
        return DeltaCommitter(self)

    def commit(self, request: ChangeSet | Rewrite) -> Outcome:
        return self._committer.rewrite(request) if isinstance(request, Rewrite) else self._committer.commit(request)

    def reset(self, prefix: str, state: Mapping[str, str], kept: Collection[str], *, empty: bool) -> Outcome:
        return self._committer.reset(prefix, state, kept, empty=empty)

    def retries(self) -> Retries:
        return self._committer.retries()

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        types = {column.name: column.type.simpleString() for column in self.columns()}
        # another column may get the name of one that was dropped or renamed
        physical = {column.name: column.physical_name for column in self.spec.columns}
        # the index has full paths of files
        place = f"{self._snapshot.metadata.table_id} at {self.log.path}"
        return f"{', '.join(f'{physical[name]} {types[name]}' for name in key)}; delta {place}"

    def changes_since(self, base: int | None, included: set[int]) -> TableChanges | None:
        current = self._snapshot.version
        if base == current:
            return None if included else TableChanges()
        if base is None or base > current:
            return None
        commits = self._commits_since(base)
        if commits is None or not included <= {commit.version for commit in commits}:
            return None
        foreign = [commit for commit in commits if commit.version not in included and any(file_actions(commit))]
        if not foreign:
            return TableChanges()
        touched = {unquote(content["path"]) for commit in foreign for _, content in file_actions(commit)}
        live = self.live
        if any((kind == "add") != (path in live) for path, kind in _last_actions(commits).items()):
            return None  # Delta's replay of the log names a file otherwise than a commit does, such as with a scheme
        files = [self._live_file(path, live[path]) for path in touched if path in live]
        gone = frozenset(self.full_path(path) for path in touched if path not in live)
        counts = amounts({"added or changed file": len(files), "removed file": len(gone)})
        log.info("%s: %s by others: %s; catching up", self.name, amount(len(foreign), "commit"), counts)
        return TableChanges(files, gone)

    def live_files(self) -> Iterator[LiveFile]:
        return (self._live_file(path, add) for path, add in self.live.items())

    def _live_file(self, path: str, add: Mapping[str, Any]) -> LiveFile:
        vector = add.get("deletionVector")
        known = None if vector is None else {**vector, "record-count": vector["cardinality"]}
        return LiveFile(IndexedFile(self.full_path(path), 0, dict(add["partitionValues"])), known, handle=add)

    def delete_rows(
        self,
        name: str,
        rows: DeletedRows,
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        scratch: Scratch,
    ) -> WrittenDeletes:
        return write_deletes(self.spark, self.name, self.spec, rows, self.live, scratch)

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        files, handles = list[DataFile](), list[Mapping[str, Any]]()
        adds = live_adds(self.spec.location, self.live, paths)
        for path, add in adds.items():
            file = IndexedFile(path, 0, dict(add["partitionValues"]))
            if not is_clear(self.spec.partitioning, add["partitionValues"]):
                names = ", ".join(column.name for column in self.spec.partitioning)
                raise TableError(
                    f"{self.name}: a row to replace is in a partition ({names}) whose time has no zone. "
                    "Each reader takes it for a time of its own zone, so deletes: copy-on-write can't tell which time "
                    "it is. Write these partitions again in Spark, with spark.sql.session.timeZone set to the zone of "
                    "their writer (UPDATE … SET column = column). Or set deletes: position, which leaves the files "
                    "where they are."
                )
            files.append(DataFile(file, int(add["size"]), vector=add.get("deletionVector")))
            handles.append(remove_of(add))
        return TouchedFiles(files, handles, (), len(self.live))

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: DeletedRows, scratch: Scratch
    ) -> tuple[Sequence[str], WrittenDeletes]:
        new = {unquote(action["add"]["path"]): action["add"] for action in map(json.loads, files)}
        written = write_deletes(self.spark, self.name, self.spec, rows, new, scratch)
        for text in written.removed:
            del new[unquote(json.loads(text)["remove"]["path"])]
        kept = [json.dumps({"add": add}) for add in new.values()]
        with_vectors = [json.dumps({"add": json.loads(text)["add"] | {"dataChange": False}}) for text in written.files]
        return [*kept, *with_vectors], WrittenDeletes(vectors=written.vectors, bytes=written.bytes)

    def index_forbidden_at(self, location: str) -> str | None:
        location = in_one_form(location)
        folder = location.removeprefix(f"{in_one_form(self.log.path).rstrip('/')}/")
        if folder == location or folder.startswith("_"):
            return None
        return "inside the table's own folder, where Delta's VACUUM deletes it"


def _last_actions(commits: Sequence[Commit]) -> dict[str, str]:
    """Decoded path -> the kind of the last action that names it, of each file that the commits add or remove."""
    last: dict[str, str] = {}
    for commit in commits:
        kinds: dict[str, str] = {}
        for kind, content in file_actions(commit):
            path = unquote(content["path"])
            kinds[path] = "add" if "add" in (kind, kinds.get(path)) else kind
        last |= kinds
    return last
