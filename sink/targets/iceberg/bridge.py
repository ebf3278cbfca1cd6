"""The bridge to Iceberg's Java library: what one of its tables, files and scans is, in as few calls as possible.

It knows nothing of the sink. Each call from Python into the JVM takes its time, so what is asked of many files is asked
in the JVM.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from typing import Any

from py4j.java_gateway import JavaObject

from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.targets.iceberg.writers import IcebergTableSpec

_FEW = 3
"""Up to so many files are described one by one, each by a few calls across the bridge."""
_DESCRIBED = 1000
"""Files that are described in one call to the JVM."""


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


class Bridge(ABC):
    """One table's Java object, and Iceberg's classes.

    :param name: catalog.namespace.table.
    :param java: Iceberg's `Table`.
    """

    def __init__(self, jvm: Any, name: str, java: JavaObject) -> None:
        self.jvm = jvm
        self._calls = _java(jvm)
        self.iceberg = self._calls.iceberg
        self.name = name
        self.java = java
        self._describing: dict[int, JavaObject] = {}

    @property
    @abstractmethod
    def spec(self) -> IcebergTableSpec:
        """The table as the writers know it."""

    @property
    @abstractmethod
    def java_specs(self) -> JavaObject:
        """All partition specs by id, a Java map."""

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
