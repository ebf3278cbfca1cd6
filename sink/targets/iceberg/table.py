"""One Iceberg table, by Iceberg's Java API: its metadata, and what the sink asks of it.

The sink uses Iceberg's Java library through py4j because this library is the reference. It makes retries, validation,
sequence numbers and manifests.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import JavaObject
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.row_kind_columns import quoted
from changelog.spec import ColumnSpec
from deltawriters.old_rows import DeletedRows
from sink.errors import TableError
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.spark.type_names import width_of_iceberg
from sink.targets.base import (
    OF_POSITION,
    Compacted,
    CompactionLimits,
    EqualityDeleted,
    LiveFile,
    MergeCandidates,
    MergedDeletes,
    Rewritable,
    TableChanges,
    Target,
    TouchedFiles,
    WrittenDeletes,
    no_condition,
)
from sink.targets.iceberg.changes import Changes, live_files, rows_of
from sink.targets.iceberg.commit import IcebergCommitter
from sink.targets.iceberg.compaction import compacted
from sink.targets.iceberg.dangling import dangling_deletes
from sink.targets.iceberg.deletes import written_deletes
from sink.targets.iceberg.errors import NOT_AUTHORIZED, replaced, table_error
from sink.targets.iceberg.history import IcebergHistory
from sink.targets.iceberg.housekeeping import expired, has_expired, orphans_removed, stored_at
from sink.targets.iceberg.rewritables import equality_deleted, handles, merged_deletes, rewritables
from sink.targets.iceberg.small_files import SmallFiles
from sink.targets.iceberg.state import IcebergState, Layout, Snapshot, stored, written_properties
from sink.targets.iceberg.storage_access import OWN_CLIENTS, StorageAccess, check_storage
from sink.targets.iceberg.touched_files import touched_files
from sink.targets.iceberg.writers import IcebergTableSpec
from sink.targets.locations import in_one_form

if TYPE_CHECKING:
    from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots

_FEW = 3
"""Up to so many files are described one by one, each by a few calls across the bridge."""
_ATTEMPTS = 5
"""To add a spec, while others commit."""
_DESCRIBED = 1000
"""Files that are described in one call to the JVM."""
_REMOVED = "rowdelta_removed"
"""A view with rows to remove."""
_STORAGE_CREDENTIALS = "org.apache.iceberg.io.SupportsStorageCredentials"


class _Java:
    """Java classes and methods that every table uses. Looking one up takes a round trip for each part of its name."""

    def __init__(self, jvm: Any) -> None:
        self.iceberg = iceberg = jvm.org.apache.iceberg
        self.schema_to_json = iceberg.SchemaParser.toJson
        self.spec_to_json = iceberg.PartitionSpecParser.toJson
        self.snapshot_to_json = iceberg.SnapshotParser.toJson
        self.content_from_json = iceberg.ContentFileParser.fromJson
        self.content_to_json = iceberg.ContentFileParser.toJson
        self.mapper = iceberg.util.JsonUtil.mapper()
        self.new_list = iceberg.relocated.com.google.common.collect.Lists.newArrayList
        self.list_class = jvm.java.lang.Class.forName("java.util.ArrayList")


_java = lru_cache(maxsize=1)(_Java)


@dataclass(frozen=True)
class _Stable:
    """The parts of a table's metadata that the sink's own commits don't change."""

    layout: Layout
    spec_ids: tuple[int, ...]
    location: str
    properties: tuple[tuple[str, str], ...]


class _View:
    """A table's metadata as the JVM has it at one moment, as far as it was asked for. `IcebergTable.look` replaces the
    whole of it: so no part of an earlier one stays, even if another thread was reading it meanwhile.
    """

    def __init__(self, table: "IcebergTable", metadata: JavaObject, location: str | None) -> None:
        self._table = table
        self._metadata = metadata
        self.location = location
        self.properties: dict[str, str] = table.as_json(metadata.properties())
        # Not a `cached_property`: Python 3.11 has one lock for all tables, whose threads would wait for each other.
        self._current: tuple[Snapshot | None] | None = None

    @property
    def current(self) -> Snapshot | None:
        if self._current is None:
            snapshot = self._metadata.currentSnapshot()
            self._current = (None if snapshot is None else self._table.snapshot_of(snapshot),)
        return self._current[0]


class IcebergTable(IcebergState, Target):
    """One table as the sink sees it. Views of its metadata are cached until `refresh` or `look`.

    :param load: asks the catalog for the table again, and so for new credentials.
    """

    def __init__(
        self, spark: SparkSession, name: str, table: JavaObject, load: Callable[[], JavaObject] | None = None
    ) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self.spark = spark
        self.jvm = jvm
        self._calls = _java(jvm)
        self.iceberg = self._calls.iceberg
        self.name = name
        self.java = table
        self._load = load
        self._loaded_at = time.time()
        self._seen: JavaObject | None = None
        self._view: _View | None = None
        self._written: _Stable | None = None
        self._taken_back: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._small_files = SmallFiles(self)
        self._describing: dict[int, JavaObject] = {}
        self.look()

    def refresh(self) -> None:
        """Read the table's metadata again.

        :raises TableError: the table is gone or was replaced.
        :raises TemporaryError: the catalog did not answer.
        """
        try:
            if self.needs_credentials and self._load is not None:
                self._load_again(self._load)
            else:
                self._refresh()
            self.look()
        except JAVA_ERRORS as error:
            raise table_error(self.name, error) from None

    def _refresh(self) -> None:
        try:
            self.java.refresh()
        except JAVA_ERRORS as error:
            if self._load is None or java_class(error) != NOT_AUTHORIZED:
                raise
            self._load_again(self._load)  # which logs in again

    @property
    def needs_credentials(self) -> bool:
        """The catalog has vended credentials that are about to expire; `refresh` gets new ones."""
        return self._storage.is_running_out(time.time())

    def _load_again(self, load: Callable[[], JavaObject]) -> None:
        """Iceberg's own refresh keeps the credentials with which the table was loaded."""
        asked_at, loaded = time.time(), load()
        if str(loaded.uuid()) != self.table_id:
            raise replaced(self.name)
        self.java, self._loaded_at = loaded, asked_at
        self.__dict__.pop("_storage", None)

    @cached_property
    def _storage(self) -> StorageAccess:
        io, vended = self.java.io(), []
        loader = self.java.getClass().getClassLoader()
        supports = self.jvm.java.lang.Class.forName(_STORAGE_CREDENTIALS, True, loader)
        if supports.isInstance(io):
            vended = [(str(found.prefix()), self.as_json(found.config())) for found in self.elements(io.credentials())]
        return StorageAccess(self._loaded_at, self.as_json(io.properties()), vended)

    def look(self) -> None:
        """Take the metadata that the JVM has now, for instance after a commit of ours. The catalog isn't asked."""
        metadata = self.java.operations().current()
        location = metadata.metadataFileLocation()
        if self._seen is not self.java:
            self._seen, self._view, self._written = self.java, None, None
        elif self._view is not None and location is not None and location == self._view.location:
            return  # as is usual where nobody but the sink commits
        view = _View(self, metadata, location)
        layout = Layout(int(metadata.currentSchemaId()), int(metadata.defaultSpecId()), int(metadata.formatVersion()))
        written = _Stable(
            layout,
            tuple(sorted(self.as_json(metadata.specsById().keySet()))),
            str(metadata.location()),
            written_properties(view.properties),
        )
        if written != self._written:
            self._written = written
            for name in ("spec", "java_specs"):
                self.__dict__.pop(name, None)
            self._describing.clear()  # a spec's types follow the schema
        self._view = view

    def check_writable(self, *, appends: bool = False, copies: bool = False) -> None:
        super().check_writable(appends=appends, copies=copies)
        if str(self.java.io().getClass().getSimpleName()) in OWN_CLIENTS:
            check_storage(self.name, self.spec.location, self._storage.properties)

    @property
    def table_id(self) -> str:
        return str(self.java.uuid())

    @property
    def layout(self) -> Layout:
        return self._known().layout

    def _known(self) -> "_Stable":
        assert self._written is not None
        return self._written

    @cached_property
    def java_specs(self) -> JavaObject:
        """All partition specs by id, a Java map."""
        return self.java.specs()

    @cached_property
    def spec(self) -> IcebergTableSpec:
        """What the delta writers need, as plain values. The sink's own properties aren't among the table's."""
        by_id, written = self.java_specs, self._known()
        data = dict(written.properties).get("write.data.path", written.location)
        return IcebergTableSpec(
            location=written.location,
            format_version=written.layout.format_version,
            schema=str(self._calls.schema_to_json(self.java.schema())),
            specs=tuple(str(self._calls.spec_to_json(by_id.get(i))) for i in written.spec_ids),
            current_spec_id=written.layout.spec_id,
            properties=written.properties,
            io_properties=tuple(self._storage.at(data).items()),
        )

    def as_json(self, collection: JavaObject) -> Any:
        """Read a Java map or set in one call. Iterating over it from Python takes several calls for each entry."""
        return json.loads(self._calls.mapper.writeValueAsString(collection))

    def as_list(self, iterable: JavaObject) -> JavaObject:
        """A Java `Iterable` as a Java list."""
        return self._calls.new_list(iterable)

    def java_list(self, values: Sequence[str]) -> JavaObject:
        """A Java list of texts. Py4j would make one by a call for each."""
        return self._calls.mapper.readValue(json.dumps(list(values)), self._calls.list_class)

    def objects(self, values: Iterable[JavaObject]) -> JavaObject:
        """A Java list of Java objects."""
        found = self.jvm.java.util.ArrayList()
        for value in values:
            found.add(value)
        return found

    def content_file(self, text: str) -> JavaObject:
        """The Java data or delete file that a `ContentFileParser` JSON describes."""
        return self._calls.content_from_json(self._calls.mapper.readTree(text), self.java_specs)

    def described(self, file: JavaObject) -> dict[str, Any]:
        """The `ContentFileParser` JSON of a Java data or delete file."""
        spec_id = int(file.specId())
        spec = self.java_specs.get(spec_id)
        if self.spec.keeps_dropped_fields(spec_id):
            is_data = str(file.content()) == "DATA"
            builder = self.iceberg.DataFiles.builder if is_data else self.iceberg.FileMetadata.deleteFileBuilder
            file = builder(spec).copy(file).build()
        described: dict[str, Any] = json.loads(self._calls.content_to_json(file, spec))
        return described

    def described_files(self, files: JavaObject) -> list[dict[str, Any]]:
        """The same of each file in a Java list. Of many, it takes as many calls across the bridge as of a few."""
        if int(files.size()) <= _FEW:
            return [self.described(file) for file in self.elements(files)]
        spec_ids = set(self.as_json(files.stream().map(self._spec_id_of_file).toArray()))
        if len(spec_ids) != 1 or self.spec.keeps_dropped_fields(*spec_ids):
            return [self.described(file) for file in self.elements(files)]
        described = self._describing_files_of(*spec_ids)
        return list(map(json.loads, self.as_json(files.stream().map(described).toArray())))

    def paths(self, files: JavaObject) -> list[str]:
        """The path of each data or delete file in a Java `Iterable`."""
        found = self.as_list(files)
        paths: list[str] = self.as_json(found.stream().map(self._path_of_file).toArray()) if found.size() else []
        return paths

    def elements(self, iterable: JavaObject) -> list[JavaObject]:
        """The elements of a Java `Iterable`. Iterating over it from Python takes ten times as long, 2 ms an element."""
        elements = self.as_list(iterable)
        return [elements.get(i) for i in range(elements.size())]

    def scanned_paths(self, scans: JavaObject) -> list[str]:
        """The data file of each `FileScanTask` in a Java list: as many calls across the bridge for any number."""
        paths: list[str] = self.as_json(scans.stream().map(self._scanned_path).toArray())
        return paths

    def current_scans(self, condition: JavaObject | None = None) -> JavaObject:
        """A Java list with a `FileScanTask` for each data file of the current snapshot.

        :param condition: only for files that may have such rows.
        """
        if self.snapshot_id() is None:
            return self.java_list([])
        scan = self.java.newScan()
        return self.as_list((scan if condition is None else scan.filter(condition)).planFiles())

    def condition(self, text: str) -> JavaObject:
        """A condition in Spark SQL as Iceberg's expression, which the procedures' `where` becomes in the same way.

        :raises ConfigError: see `Target.files_where`.
        """
        try:
            self.frame(self.spark).where(text)  # which says best what is wrong
            converter = self.jvm.org.apache.spark.sql.execution.datasources.SparkExpressionConverter
            found = converter.collectResolvedSparkExpression(self.spark._jsparkSession, quoted_name(self.name), text)
            return converter.convertToIcebergExpression(found)
        except JAVA_ERRORS as error:
            raise no_condition(self.name, text, java_message(error)) from None

    def files_where(self, condition: str) -> frozenset[str]:
        return frozenset(self.scanned_paths(self.current_scans(self.condition(condition))))

    def described_scans(self, scans: JavaObject) -> list[dict[str, Any]]:
        """The `ScanTaskParser` JSON of each `FileScanTask` in a Java list, without the table's schema."""
        parser, task = self._iceberg_class("ScanTaskParser"), self._iceberg_class("FileScanTask")
        described = self._function(self._lookup.findStatic(parser, "toJson", self._method_type(self._text_class, task)))
        found = list[dict[str, Any]]()
        for start in range(0, int(scans.size()), _DESCRIBED):  # each text has the table's schema
            part = scans.subList(start, min(start + _DESCRIBED, int(scans.size())))
            try:
                texts = self.as_json(part.stream().map(described).toArray())
            except JAVA_ERRORS as error:
                if "Invalid partition spec id" not in java_message(error):
                    raise
                # Iceberg (1.11) refuses it where deletes of another spec apply, such as those of all partitions
                found += self._described_one_by_one(part)
                continue
            for text in texts:
                scan: dict[str, Any] = json.loads(text)
                found.append({name: scan[name] for name in ("data-file", "delete-files") if name in scan})
        return found

    def _described_one_by_one(self, scans: JavaObject) -> Iterator[dict[str, Any]]:
        known = dict[str, dict[str, Any]]()
        for scan in self.elements(scans):
            deletes = list[dict[str, Any]]()
            for delete in self.elements(scan.deletes()):
                key = str(delete.location())
                if key not in known or key.endswith(".puffin"):  # which has several vectors
                    known[key] = self.described(delete)
                deletes.append(known[key])
            yield {"data-file": self.described(scan.file()), "delete-files": deletes}

    def scanned_sequence_numbers(self, scans: JavaObject) -> list[int]:
        """The sequence number of the data file of each `FileScanTask` in a Java list."""
        number_of = self._function(self._of_scanned(self._fact_of_file("dataSequenceNumber", self._number_class)))
        numbers: list[int] = self.as_json(scans.stream().map(number_of).toArray())
        return numbers

    def applied_deletes(self, scans: JavaObject) -> dict[str, int]:
        """To how many data files each delete file applies, by path, of the `FileScanTask`s in a Java list. Counted in
        the JVM: each of the tasks may have hundreds.
        """
        counts = self._by_path(scans, self.jvm.java.util.stream.Collectors.counting())
        applied: dict[str, int] = self.as_json(counts)
        return applied

    def commits_since_deletes(self, scans: JavaObject) -> dict[str, int]:
        """How many commits ago each delete file was added, by path, of the `FileScanTask`s in a Java list. A Puffin
        file's vectors were added together.
        """
        collectors = self.jvm.java.util.stream.Collectors
        number_of = self._function(self._fact_of_file("dataSequenceNumber", self._number_class))
        found = self.as_json(self._by_path(scans, collectors.mapping(number_of, collectors.toSet())))
        newest = int(self.java.currentSnapshot().sequenceNumber())
        return {path: newest - max(numbers) for path, numbers in found.items()}

    def deletes_at(self, scans: JavaObject, paths: Iterable[str]) -> list[JavaObject]:
        """The delete files at some paths that apply to the `FileScanTask`s in a Java list."""
        found = self._by_path(scans, self.jvm.java.util.stream.Collectors.toList())
        return [found.get(path).get(0) for path in paths]

    def _by_path(self, scans: JavaObject, collector: JavaObject) -> JavaObject:
        """A Java map from each delete file's path to what a collector makes of it, given once for each data file."""
        lang = self.jvm.java.lang
        task, listed = self._iceberg_class("FileScanTask"), lang.Class.forName("java.util.List")
        stream = self._method_type(lang.Class.forName("java.util.stream.Stream"))
        of_task = self._lookup.findVirtual(task, "deletes", self._method_type(listed))
        each = lang.invoke.MethodHandles.filterReturnValue(of_task, self._lookup.findVirtual(listed, "stream", stream))
        path = self._function(self._fact_of_file("location", self._text_class))
        grouped = self.jvm.java.util.stream.Collectors.groupingBy(path, collector)
        return scans.stream().flatMap(self._function(each)).collect(grouped)

    def sequence_numbers(self, files: JavaObject) -> set[int]:
        """The sequence numbers of the data or delete files of a Java `Iterable`, which readers compare."""
        numbers = self._function(self._fact_of_file("dataSequenceNumber", self._number_class))
        return set(self.as_json(self.as_list(files).stream().map(numbers).distinct().toArray()))

    def places(self, files: JavaObject, spec_id: int) -> tuple[list[str], list[int], list[str]]:
        """Path, sequence number and partition of each data or delete file in a Java list. The partition is a text: all
        files of one have the same, and hardly any others.

        :param spec_id: of all these files.
        """
        path = self._fact_of_file("location", self._text_class)
        number = self._fact_of_file("dataSequenceNumber", self._number_class)
        spec, struct = self._iceberg_class("PartitionSpec"), self._iceberg_class("StructLike")
        shown = self._lookup.findVirtual(spec, "partitionToPath", self._method_type(self._text_class, struct)).bindTo(
            self.java_specs.get(spec_id)
        )
        filtered = self.jvm.java.lang.invoke.MethodHandles.filterReturnValue
        partition = filtered(self._fact_of_file("partition", struct), shown)
        paths, numbers, partitions = (self._each(files, fact) for fact in (path, number, partition))
        return paths, numbers, partitions

    def contents(self, files: JavaObject) -> tuple[list[str], list[str | None], list[str | None]]:
        """What each delete file in a Java list is (`FileContent`), the only data file that it is about, if it names
        one, and this one too if only the bounds of its column `file_path` say so.
        """
        text, deletes = self._method_type(self._text_class), self._iceberg_class("DeleteFile")
        utilities = self._iceberg_class("util.ContentFileUtil")
        by_bounds = self._lookup.findStatic(
            utilities, "referencedDataFileLocation", self._method_type(self._text_class, deletes)
        )
        content = self._fact_of_file("content", self._iceberg_class("FileContent"))
        named = self._lookup.findVirtual(deletes, "referencedDataFile", text)
        contents, by_name, known = (self._each(files, fact) for fact in (content, named, by_bounds))
        return contents, by_name, known

    def _each(self, files: JavaObject, fact: JavaObject) -> list[Any]:
        found: list[Any] = self.as_json(files.stream().map(self._function(fact)).toArray())
        return found

    def remove_all(self, snapshot: JavaObject | None, delta: JavaObject) -> None:
        """Have a `RowDelta` remove all data and delete files of a snapshot. All calls for a file stay in the JVM."""
        if snapshot is None:
            return
        io, specs = self.java.io(), self.java_specs
        removes = self._consumer(delta, "removeRows", "DataFile"), self._consumer(delta, "removeDeletes", "DeleteFile")
        reads = self.iceberg.ManifestFiles.read, self.iceberg.ManifestFiles.readDeleteManifest
        manifests = snapshot.dataManifests(io), snapshot.deleteManifests(io)
        for found, read, remove in zip(manifests, reads, removes, strict=True):
            for manifest in self.elements(found):
                with closing(read(manifest, io, specs)) as reader:
                    self.as_list(reader).forEach(remove)

    def delete_files(self) -> list[JavaObject]:
        """All delete files of the current snapshot, with those that apply to no data file."""
        snapshot = self.java.currentSnapshot()
        if snapshot is None:
            return []
        io, read = self.java.io(), self.iceberg.ManifestFiles.readDeleteManifest
        found: list[JavaObject] = []
        for manifest in self.elements(snapshot.deleteManifests(io)):
            with closing(read(manifest, io, self.java_specs)) as reader:
                found += self.elements(reader)
        return found

    @cached_property
    def _scanned_path(self) -> JavaObject:
        return self._function(self._of_scanned(self._fact_of_file("location", self._text_class)))

    @cached_property
    def _path_of_file(self) -> JavaObject:
        return self._function(self._fact_of_file("location", self._text_class))

    @cached_property
    def _spec_id_of_file(self) -> JavaObject:
        return self._function(self._fact_of_file("specId", self.jvm.java.lang.Integer.TYPE))

    def _describing_files_of(self, spec_id: int) -> JavaObject:
        """A function from a file to its `ContentFileParser` JSON."""
        if spec_id not in self._describing:
            parser, specs = self._iceberg_class("ContentFileParser"), self._iceberg_class("PartitionSpec")
            takes = self.objects([self._iceberg_class("ContentFile"), specs])
            to_json = self._lookup.findStatic(parser, "toJson", self._method_type(self._text_class, takes))
            handles = self.jvm.java.lang.invoke.MethodHandles
            of_spec = handles.constant(specs, self.java_specs.get(spec_id))
            self._describing[spec_id] = self._function(handles.collectArguments(to_json, 1, of_spec))
        return self._describing[spec_id]

    # Python can't write a function that the JVM calls without coming back for each element, but it can put one together

    def _iceberg_class(self, name: str) -> JavaObject:
        loader = self.java.getClass().getClassLoader()
        return self.jvm.java.lang.Class.forName(f"org.apache.iceberg.{name}", True, loader)

    @property
    def _lookup(self) -> JavaObject:
        return self.jvm.java.lang.invoke.MethodHandles.publicLookup()

    @property
    def _method_type(self) -> Any:
        return self.jvm.java.lang.invoke.MethodType.methodType

    def _fact_of_file(self, method: str, result: JavaObject) -> JavaObject:
        """A handle of a method of `ContentFile`.

        :param result: the class of what it returns.
        """
        return self._lookup.findVirtual(self._iceberg_class("ContentFile"), method, self._method_type(result))

    @property
    def _text_class(self) -> JavaObject:
        return self.jvm.java.lang.Class.forName("java.lang.String")

    @property
    def _number_class(self) -> JavaObject:
        return self.jvm.java.lang.Class.forName("java.lang.Long")

    def _of_scanned(self, fact: JavaObject) -> JavaObject:
        """A handle that takes a `FileScanTask`, from one that takes a file: it is asked of the scanned data file."""
        task, file = self._iceberg_class("FileScanTask"), self._iceberg_class("ContentFile")
        file_of = self._lookup.findVirtual(task, "file", self._method_type(file))
        return self.jvm.java.lang.invoke.MethodHandles.filterReturnValue(file_of, fact)

    def _consumer(self, delta: JavaObject, method: str, takes: str) -> JavaObject:
        """A method of a `RowDelta` as a Java `Consumer`."""
        owner = self._iceberg_class("RowDelta")
        handle = self._lookup.findVirtual(owner, method, self._method_type(owner, self._iceberg_class(takes)))
        return self.as_interface("java.util.function.Consumer", handle.bindTo(delta))

    def _function(self, handle: JavaObject) -> JavaObject:
        return self.as_interface("java.util.function.Function", handle)

    def as_interface(self, name: str, handle: JavaObject) -> JavaObject:
        """A handle of a method as an object of a Java interface with one method."""
        lang = self.jvm.java.lang
        return lang.invoke.MethodHandleProxies.asInterfaceInstance(lang.Class.forName(name), handle)

    def summary(self, snapshot: JavaObject) -> dict[str, str]:
        """A snapshot's summary, which counts what it added and removed."""
        summary: dict[str, str] = self.as_json(snapshot.summary())
        return summary

    def metadata(self) -> dict[str, Any]:
        """All metadata as JSON (Iceberg spec, Table Metadata Fields)."""
        text = str(self.iceberg.TableMetadataParser.toJson(self.java.operations().current()))
        metadata: dict[str, Any] = json.loads(text)
        return metadata

    def snapshot(self, snapshot_id: int | None) -> Snapshot | None:
        current = self.current_snapshot()
        if current is not None and current.snapshot_id == snapshot_id:
            return current
        found = None if snapshot_id is None else self.java.snapshot(snapshot_id)
        return None if found is None else self.snapshot_of(found)

    def snapshots(self) -> list[Snapshot]:
        return [self.snapshot_of(snapshot) for snapshot in self.elements(self.java.snapshots())]

    def snapshot_of(self, java: JavaObject) -> Snapshot:
        """Of Iceberg's object, in one call across the bridge."""
        return Snapshot.of_json(json.loads(self._calls.snapshot_to_json(java)))

    def is_ancestor(self, ancestor_id: int, snapshot_id: int) -> bool:
        return bool(self.iceberg.util.SnapshotUtil.isAncestorOf(self.java, snapshot_id, ancestor_id))

    def expired_snapshots(self) -> "ExpiredSnapshots":
        from sink.targets.iceberg.expired_snapshots import ExpiredSnapshots

        return ExpiredSnapshots(self)

    def is_sorted(self) -> bool:
        return not self.java.sortOrder().isUnsorted()

    def columns(self) -> tuple[ColumnSpec, ...]:
        try:
            converted = self.iceberg.spark.SparkSchemaUtil.convert(self.java.schema())
        except JAVA_ERRORS as error:
            raise TableError(f"{self.name}: {java_message(error)}") from None
        struct = T.StructType.fromJson(json.loads(converted.json()))
        fields = self.spec.iceberg_schema.fields
        return tuple(
            ColumnSpec(
                s.name,
                s.dataType,
                required=f.required,
                is_uuid=str(f.field_type) == "uuid",
                width=width_of_iceberg(str(f.field_type)),
                default=None if str(f.field_type) == "uuid" else f.write_default,
            )
            for s, f in zip(struct.fields, fields, strict=True)
        )

    def _known_view(self) -> _View:
        assert self._view is not None
        return self._view

    def current_snapshot(self) -> Snapshot | None:
        return self._known_view().current

    def snapshot_id(self) -> int | None:
        current = self.current_snapshot()
        return None if current is None else current.snapshot_id

    def parent_snapshot_id(self) -> int | None:
        current = self.current_snapshot()
        return None if current is None else current.parent_id

    def is_empty(self) -> bool:
        """Whether the current snapshot has no live data file."""
        current = self.current_snapshot()
        return current is None or current.summary.get("total-data-files") == "0"

    def needs_global_deletes(self) -> bool:
        """Whether a data manifest was written under another spec than the current one. Reads only the manifest list."""
        snapshot = self.java.currentSnapshot()
        if snapshot is None or len(self.spec.specs) == 1:
            return False
        manifests = self.elements(snapshot.dataManifests(self.java.io()))
        return any(int(m.partitionSpecId()) != self.spec.current_spec_id for m in manifests)

    def has_global_deletes(self) -> bool:
        """Whether the table has partitions, and also deletes under an unpartitioned spec, which apply to all of them.
        Reads only the manifest list.
        """
        snapshot, specs = self.java.currentSnapshot(), self.java.specs()
        if snapshot is None or int(specs.size()) == 1:
            return False
        manifests = self.elements(snapshot.deleteManifests(self.java.io()))
        return any(specs.get(manifest.partitionSpecId()).isUnpartitioned() for manifest in manifests)

    def property(self, name: str) -> str | None:
        properties = self._known_view().properties
        prefix, _, part = name.rpartition(".")
        if part in OF_POSITION and name in properties and prefix in self._taken_back:
            newest, state = self._taken_back[prefix]
            if newest == json.loads(properties.get(f"{prefix}.position", "{}")).get("operation"):
                return state.get(part)
        return properties.get(name)

    def stored(self, part: str) -> Mapping[str, str]:
        return stored(self._known_view().properties, part)

    def own_state(self, prefix: str) -> Mapping[str, str]:
        split = ((name.rpartition("."), value) for name, value in self._known_view().properties.items())
        return {part: value for (owner, _, part), value in split if owner == prefix}

    def taken_back(self, prefix: str) -> dict[str, str]:
        """The properties that a rollback has taken back, as they are now. One that says nothing isn't removed: only a
        user does that.
        """
        raw, names = self._known_view().properties, {f"{prefix}.{part}": part for part in OF_POSITION}
        now = {name: self.property(name) or OF_POSITION[part] for name, part in names.items() if name in raw}
        return {name: value for name, value in now.items() if value != raw[name]}

    def _take_back(self, prefix: str, newest: str, state: Mapping[str, str] | None) -> None:
        self._taken_back.pop(prefix, None)
        if state is not None:
            self._taken_back[prefix] = newest, state

    def set_property(self, name: str, value: str | None) -> None:
        update = self.java.updateProperties()
        try:
            (update.remove(name) if value is None else update.set(name, value)).commit()
        except JAVA_ERRORS as error:
            raise table_error(self.name, error) from None
        self.look()

    def keeps_default(self, dtype: T.DataType) -> bool:
        # Iceberg 1.11 can't read files with the column then: "Cannot cast default value to long"
        return self.spec.format_version >= 3 and not isinstance(dtype, T.DecimalType)

    def evolve(self, changes: Mapping[str, T.DataType | None], defaults: Mapping[str, Any]) -> None:
        """Add columns, widen columns, or (None) make them optional, in one commit without a snapshot.

        If others commit meanwhile, nothing changes. The next attempt at the micro-batch finds out what is still
        missing.

        :raises TableError: Iceberg refuses the change.
        """
        schema = self.java.schema()
        update = self.java.updateSchema()
        try:
            for name, dtype in changes.items():
                if dtype is None:
                    update = update.makeColumnOptional(name)
                    continue
                column = T.StructType([T.StructField(name, dtype)])
                wanted = self.iceberg.spark.SparkSchemaUtil.convert(
                    self.jvm.org.apache.spark.sql.types.DataType.fromJson(column.json())
                )
                iceberg_type = wanted.columns().get(0).type()
                if schema.findField(name) is None:
                    lit = self.iceberg.expressions.Expressions.lit
                    default = (None, lit(defaults[name])) if name in defaults else ()
                    update = update.addColumn(None, name, iceberg_type, *default)
                else:
                    update = update.updateColumn(name, iceberg_type)
            update.commit()
        except JAVA_ERRORS as error:
            if java_class(error) != "CommitFailedException":
                raise table_error(self.name, error) from None
        self.refresh()

    def prepare_global_deletes(self) -> None:
        """Add an unpartitioned spec to the history of a partitioned table. Equality deletes under it are global.

        The current spec stays the same: one transaction removes its fields and adds them again.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            if self.spec.unpartitioned_spec_id is not None:
                return
            try:
                self._add_unpartitioned_spec()
            except JAVA_ERRORS as error:  # another commit may have come in between
                if java_class(error) != "CommitFailedException" or attempt == _ATTEMPTS:
                    raise table_error(self.name, error) from None
            self.refresh()

    def _add_unpartitioned_spec(self) -> None:
        transaction = self.java.newTransaction()
        schema, fields = transaction.table().schema(), list(transaction.table().spec().fields())
        expressions = self.iceberg.expressions.Expressions
        removal = transaction.updateSpec()
        for field in fields:
            removal = removal.removeField(field.name())
        removal.commit()
        addition = transaction.updateSpec()
        for field in fields:
            term = expressions.transform(schema.findColumnName(field.sourceId()), field.transform())
            addition = addition.addField(field.name(), term)
        addition.commit()
        transaction.commitTransaction()

    def committer(self, *, newest_if_in_doubt: bool = False) -> IcebergCommitter:
        return IcebergCommitter(self, newest_if_in_doubt=newest_if_in_doubt)

    def key_encoding(self, key: Sequence[str], buckets: int | None) -> str:
        schema, spec = self.spec.iceberg_schema, self.spec
        keys = ", ".join(f"{schema.find_field(name).field_id} {schema.find_type(name)}" for name in key)
        shown = "" if buckets is None else f"; {buckets} buckets by {spec.current_spec}"
        return f"{keys}{shown}; v{spec.format_version}"

    def changes_since(self, base: int | None, included: set[int]) -> TableChanges | None:
        return Changes(self, base).since(included)

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.table(quoted_name(self.name))

    def frame_at(self, snapshot_id: int, columns: str = "*") -> DataFrame:
        # not Iceberg's option snapshot-id, which Spark 4.1 refuses
        return self.spark.sql(f"SELECT {columns} FROM {quoted_name(self.name)} VERSION AS OF {snapshot_id}")

    def current_frame(self, snapshot_id: int) -> DataFrame:
        return self.with_current_columns(self.frame_at(snapshot_id), snapshot_id)

    def with_current_columns(self, frame: DataFrame, snapshot_id: int) -> DataFrame:
        """Rows of a snapshot with the columns, names and types that the table has now. A read at a snapshot has those
        of that time (`SnapshotUtil.schemaFor`), and an ALTER makes no snapshot.

        :param frame: what `frame_at` returns. Columns that aren't the table's stay, behind the others.
        """
        now, number = self.java.schema(), self.java.snapshot(snapshot_id).schemaId()
        if number is None or int(number) == int(now.schemaId()):
            return frame
        earlier = {
            int(field.fieldId()): str(field.name())
            for field in self.elements(self.java.schemas().get(number).columns())
        }
        columns = []
        for field, column in zip(self.elements(now.columns()), self.columns(), strict=True):
            name = earlier.get(int(field.fieldId()))
            values = F.lit(None) if name is None else F.col(quoted(name))
            if name is None or frame.schema[name].dataType != column.type:
                values = values.cast(column.type)
            columns.append(values.alias(column.name))
        others = [name for name in frame.columns if name not in earlier.values()]
        return frame.select(*columns, *map(quoted, others))

    def history(self, prefix: str) -> IcebergHistory:
        sink_id = prefix.removeprefix("rowdelta.")
        return IcebergHistory(self.name, self.metadata(), sink_id, lambda number: self.position_in(number, prefix))

    def remove_rows(self, rows: DataFrame, columns: Sequence[str]) -> Exception | None:
        same = " AND ".join(f"kept.{quoted(name)} <=> removed.{quoted(name)}" for name in columns)
        rows.createOrReplaceTempView(_REMOVED)
        try:
            self.spark.sql(
                f"DELETE FROM {quoted_name(self.name)} AS kept "
                f"WHERE EXISTS (SELECT 1 FROM {_REMOVED} AS removed WHERE {same})"
            )
        except JAVA_ERRORS as error:
            if java_class(error) not in ("ValidationException", "CommitFailedException"):
                raise
            return error
        finally:
            self.spark.catalog.dropTempView(_REMOVED)
        return None

    def frame_of_commit(self, snapshot_id: int) -> DataFrame | None:
        snapshot = self.java.snapshot(snapshot_id)
        if snapshot is None:
            return None
        parent = snapshot.parentId()
        if parent is None:
            return self.frame_at(snapshot_id)
        reader = self.spark.read.option("start-snapshot-id", str(parent)).option("end-snapshot-id", str(snapshot_id))
        return reader.table(quoted_name(self.name))

    def live_files(self) -> Iterator[LiveFile]:
        return live_files(self)

    def rows_of(
        self, files: Sequence[LiveFile], columns: Sequence[str]
    ) -> AbstractContextManager[tuple[DataFrame, Column, Column, Sequence[str]]]:
        return rows_of(self, files)

    def delete_rows(
        self,
        name: str,
        rows: DeletedRows,
        known: Callable[[str], Mapping[str, Any] | None],
        parquet_deletes: Mapping[str, Sequence[str]],
        created: list[str],
    ) -> WrittenDeletes:
        return written_deletes(self.spark, self.name, self.spec, name, rows, known, parquet_deletes, created)

    def touched_files(self, paths: Collection[str]) -> TouchedFiles:
        return touched_files(self, paths)

    def index_forbidden_at(self, location: str) -> str | None:
        if not f"{in_one_form(location)}/".startswith(f"{in_one_form(self.spec.location).rstrip('/')}/"):
            return None
        return "inside the table's own folder, where Iceberg's remove_orphan_files deletes it"

    def merge_candidates(self, prefix: str, is_enough: Callable[[int, int], bool]) -> MergeCandidates:
        return self._small_files.search(self.spec, prefix, is_enough)

    def rewritables(self) -> Iterator[list[Rewritable]]:
        return rewritables(self)

    def handles(self, paths: Collection[str]) -> Sequence[JavaObject]:
        return handles(self, paths)

    def merged_deletes(
        self, paths: Collection[str], data_files: Collection[str], files: Sequence[str]
    ) -> MergedDeletes | None:
        return merged_deletes(self, paths, data_files, files)

    def delete_new_rows(
        self, name: str, files: Sequence[str], rows: DeletedRows, created: list[str]
    ) -> tuple[Sequence[str], WrittenDeletes]:
        written = written_deletes(
            self.spark, self.name, self.spec, f"{name}-carried", rows, lambda _: None, {}, created
        )
        return files, written

    def equality_deletes(self) -> EqualityDeleted | None:
        last = self.current_snapshot()
        has_any = last is not None and last.summary.get("total-equality-deletes", "0") != "0"
        return equality_deleted(self) if has_any else None

    def dangling_deletes(self) -> Sequence[JavaObject]:
        return dangling_deletes(self)

    def has_old_states(self, older_than: timedelta, retain_last: int, keep: int | None) -> bool:
        return has_expired(self, older_than, retain_last, keep)

    def expire(self, older_than: timedelta, retain_last: int, keep: int | None) -> int:
        return expired(self, older_than, retain_last, keep)

    def stored_at(self) -> int:
        return stored_at(self)

    def remove_orphans(self, older_than: timedelta, *, dry_run: bool = False) -> list[str]:
        return orphans_removed(self, older_than, dry_run=dry_run)

    def compact(self, limits: CompactionLimits, *, dry_run: bool = False) -> tuple[Compacted, int] | None:
        return compacted(self, limits, dry_run=dry_run)


def quoted_name(name: str) -> str:
    """A table's full name in SQL."""
    return ".".join(map(quoted, name.split(".")))
