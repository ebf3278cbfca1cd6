"""Reads directories of change files, with one streaming query for each table.

Files are applied by modification time, then by path. Spark knows the order of times only, and where it ends a
micro-batch among files of one time, later ones may have lower paths. So each of its micro-batches has all files that
are listed and new, and this module takes parts of it, as large as the options say.

A position has the highest modification time so far, and the files that have this time, by their paths below the
directory:
`{"modified": 1767323045123, "files": ["b.parquet"], "generation": "5d2c…", "batch": 7, "directory": "9f86…"}`. While a
part of the micro-batch is still to come, `"applied": 3` says how many of its files the table has, in their order.

As long as a checkpoint generation continues, Spark's own log says which files are new, even late ones. If it doesn't
continue (it was deleted, or restored from a copy, or is ahead of a table that was rolled back, or is that of a
directory with another name), all files up to the position count as applied. While a new generation isn't beyond the
position's time, its position remembers the files of the position before: `"earlier": ["b.parquet"]`.
"""

import functools
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_type

from changelog.changes import RAW_SCHEMA
from changelog.formats.row_kind_parquet import MOST_BYTES, SOURCE, columns_to_read
from changelog.observed_types import is_wider
from changelog.rows import BLOCK, FILE, PREFIX, ROW
from changelog.spec import ChangelogSpec
from sink.config import Config, TableSection
from sink.errors import DataError, RowdeltaError, TemporaryError
from sink.sources.checkpoint import CheckpointFolder
from sink.sources.directories import ChangeFile, Directories, is_beyond
from sink.sources.source import Position, Range, Stream, TableBatch, WholeFile
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.spark.session import activate

log = logging.getLogger("rowdelta")

Found = TypeVar("Found")

_OWN_OPTIONS = {"path_format"}
_CHOOSING_OPTIONS = {"path_format", "maxFilesPerTrigger", "maxBytesPerTrigger", "maxFileAge"}
"""Options that don't change how a file is read."""
_LIMITS = {"maxfilespertrigger", "maxbytespertrigger"}
"""Options of a micro-batch's size. Spark doesn't get them."""
_SPECIAL = re.compile(r"[,{}\[\]*?\\]|^(?:[^/:]+:)?(?://[^/]*)?+/.*:|=[^/]*/|/[_.][^/]*$")
"""Fits paths that can't be in a list of paths: some characters have a meaning there, or are refused. Also fits folders
such as `day=1`, from which Spark takes column values.
"""
_ANY_AGE = "36500d"
"""By default Spark silently ignores a file whose modification time is a week older than the newest file's."""
_CALENDARS = ("spark.sql.parquet.datetimeRebaseModeInRead", "spark.sql.parquet.int96RebaseModeInRead")
_AS_WRITTEN = "CORRECTED"
_PLAIN_TEXT = re.compile(r"\.(json|jsonl|ndjson|txt)$", re.IGNORECASE)
_LEAST_BYTES = 32
"""Of a record in JSON: it names its kind, the key and the order."""
_LOCAL = "^file:/+"
_FOUND = f"{PREFIX}found"
_TEXT = {"source": "file_path", BLOCK: "file_block_start"}
_PARQUET = {SOURCE: "file_path", ROW: "row_index"}
_FEW = 4
_AT_ONCE = 16
"""This many footers are read at the same time, if there are more than a few."""
_FILE_SCHEMAS = 100
"""The schemas of this many files are remembered. Nearly always, all files have the same one."""


@dataclass(frozen=True)
class _Footer:
    """What the footer of a Parquet file says."""

    schema: T.StructType
    rows: int
    bytes: int


class FilesSource(Directories):
    """Reads each table's directory, Parquet or JSON lines."""

    one_stream = False

    def __init__(self, spark: SparkSession, config: Config, specs: Mapping[str, ChangelogSpec]) -> None:
        self._hadoop = HadoopFolders(spark)
        super().__init__(config, self._hadoop)
        self._spark = spark
        self._specs = specs
        self._folders: dict[str, CheckpointFolder] = {}
        self._generations: dict[str, str] = {}
        self._fingerprints: dict[str, str] = {}
        self._positions: dict[str, Position | None] = {}
        self._in_batch: dict[str, tuple[int, list[ChangeFile]]] = {}
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        # looked up only once, because py4j makes a round trip for each part of a class's name
        self._hadoop_path = jvm.org.apache.hadoop.fs.Path
        self._uri = jvm.java.net.URI
        self._parquet_reader = jvm.org.apache.parquet.hadoop.ParquetFileReader
        self._parquet_input = jvm.org.apache.parquet.hadoop.util.HadoopInputFile
        # made only once, because this takes longer than reading a footer
        self._parquet_options = jvm.org.apache.parquet.ParquetReadOptions.builder().build()
        self._bytes_of = jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes
        self._to_spark = jvm.org.apache.spark.sql.execution.datasources.parquet.ParquetToSparkSchemaConverter
        self._hadoop_conf = spark._jsc.hadoopConfiguration()
        self._file_schemas: dict[str, T.StructType] = {}
        self._dates_as_written = all(spark.conf.get(name) == _AS_WRITTEN for name in _CALENDARS)

    def search(self, topics: Sequence[str], *, remember: bool) -> Mapping[str, Collection[str]]:
        return {}

    def note(self, ranges: Sequence[Range], names: Collection[str]) -> None:
        pass

    def locate(
        self, tables: Sequence[tuple[TableSection, Position | None]], from_start: Collection[str]
    ) -> Mapping[str, RowdeltaError]:
        failures: dict[str, RowdeltaError] = {}
        for table, position in tables:
            self._positions[table.id] = position
            try:
                self.look(table)
            except RowdeltaError as error:
                failures[table.id] = error
        return failures

    def streams(self, tables: Sequence[TableSection]) -> Sequence[Stream]:
        return [self._stream(table, self._positions[table.id]) for table in tables]

    def touched(self, stream: Stream, batch_id: int) -> Sequence[str]:
        return [table.id for table in stream.tables]

    def lacks_topics(self) -> bool:
        return False

    def _stream(self, table: TableSection, position: Position | None) -> Stream:
        folder = CheckpointFolder(self._spark, self._checkpoint(table))
        directory = self._hadoop.fingerprint(table.source)
        if position is not None and _continues(folder, position, directory):
            generation = str(position["generation"])
        else:
            generation = folder.new_generation()
            if position is not None:
                log.warning(
                    "%s: the checkpoint doesn't continue the table's position, so a new one begins: files that were "
                    "modified before %s count as applied",
                    table.target,
                    datetime.fromtimestamp(position["modified"] / 1000, UTC).isoformat(timespec="milliseconds"),
                )
        self._folders[table.target] = folder
        self._fingerprints[table.target] = directory
        self._generations[table.target] = generation
        self._in_batch.pop(table.target, None)
        return Stream(table.target, self._read(table), folder.location(generation), (table,))

    def _read(self, table: TableSection) -> DataFrame:
        options = self._options()
        if not any(name.lower() == "maxfileage" for name in options):
            options["maxFileAge"] = _ANY_AGE
        reader = self._spark.readStream.options(**options)
        if self._config.source.file_format == "parquet":
            schema = columns_to_read(self._specs[table.target])
            return reader.schema(schema).parquet(table.source).select("*", *_places(_PARQUET))
        return reader.format("text").load(table.source).select("value", *_places(_TEXT))

    def _options(self) -> dict[str, str]:
        """Options of Spark's reader."""
        options = self._config.source.options.items()
        return {name: value for name, value in options if name not in _OWN_OPTIONS and name.lower() not in _LIMITS}

    def batch(
        self, stream: Stream, batch_id: int, frame: DataFrame, table: TableSection, position: Position | None
    ) -> TableBatch | None:
        generation = self._generations[table.target]
        if position is not None and position["generation"] == generation and _batches(position) > batch_id:
            return None
        files = self._files(table, batch_id)
        waiting = _waiting(files, position, generation, batch_id)
        if not waiting:
            return None
        fresh = self._part(table, waiting)
        more = len(fresh) < len(waiting)
        is_parquet = self._config.source.file_format == "parquet"
        footers = self._footers(table, fresh) if is_parquet else {}
        if is_parquet:
            rows: int | None = sum(footer.rows for footer in footers.values())
        else:
            rows = _most_records(fresh, self._each(functools.partial(self._size, table), fresh))
        declared = {path: footer.schema for path, footer in footers.items()} if is_parquet else None
        schema = self._schema(table, declared.values()) if declared is not None else None

        @functools.cache
        def records() -> DataFrame:  # it takes a hundred calls, and tasks that read whole files don't need it
            found = frame
            # some files, or columns that the query doesn't know, so the files are read without it
            if schema is not None or len(fresh) < len(files):
                found = self._read_files(frame.sparkSession, table, fresh, schema)
            return _numbered(found, SOURCE if is_parquet else "source", fresh)

        whole = self._read_whole(footers) if is_parquet else None
        mark = {**_mark(fresh, position, generation, batch_id), "directory": self._fingerprints[table.target]}
        if more:
            mark["applied"] = files.index(fresh[-1]) + 1
        return TableBatch(records, mark, rows, declared=declared, files=whole, more=more)

    def _read_files(
        self, spark: SparkSession, table: TableSection, files: Sequence[ChangeFile], schema: T.StructType | None
    ) -> DataFrame:
        """:param schema: of Parquet files, if it isn't that of the table's query."""
        paths = [self._decoded(file.path) for file in files]
        reader = spark.read.options(**self._options()).option("__globPaths__", "false")
        if self._config.source.file_format != "parquet":
            return reader.format("text").load(paths).select("value", *_places(_TEXT))
        # from the names of folders below the base Spark takes values of columns, as in the stream
        reader = reader.option("basePath", table.source).schema(schema or columns_to_read(self._specs[table.target]))
        return reader.parquet(*paths).select("*", *_places(_PARQUET))

    def _part(self, table: TableSection, files: list[ChangeFile]) -> list[ChangeFile]:
        """The first files, as many as the options let a micro-batch have. It has at least one."""
        options = {name.lower(): value for name, value in self._config.source.options.items()}
        if "maxfilespertrigger" in options:
            return files[: int(options["maxfilespertrigger"])]
        if "maxbytespertrigger" not in options:
            return files
        left, count = self._bytes_of(options["maxbytespertrigger"]), 0
        while left > 0 and count < len(files):
            for size in self._each(functools.partial(self._size, table), files[count : count + _AT_ONCE]):
                left -= size
                count += left >= 0
        return files[: max(count, 1)]

    def _read_whole(self, footers: Mapping[str, "_Footer"]) -> dict[str, WholeFile] | None:
        """The files by their paths, if tasks can read them whole. None if an option, a path or a size needs Spark's
        reader.
        """
        files = {
            self._decoded(path): WholeFile(re.sub(_LOCAL, "file:/", path), footer.bytes)
            for path, footer in footers.items()
        }
        is_simple = (
            self._dates_as_written
            and set(self._config.source.options) <= _CHOOSING_OPTIONS
            and not any(_SPECIAL.search(path) for path in files)
            and all(file.bytes <= MOST_BYTES for file in files.values())
        )
        return files if is_simple else None

    def is_ahead(self, other: Position, position: Position) -> bool:
        if other["generation"] == position["generation"]:
            return _progress(other) > _progress(position)
        newest, passed = int(other["modified"]), int(position["modified"])
        return newest > passed or (newest == passed and not set(other["files"]) <= set(position["files"]))

    def furthest(self, one: Position, other: Position) -> Position:
        return other if self.is_ahead(other, one) else one

    def start_position(self, table: TableSection) -> Position | None:
        return None

    def identities(self, table: TableSection) -> Mapping[str, str]:
        return {table.source: self._hadoop.fingerprint(table.source)}

    def partitions(self, table: TableSection) -> int:
        return 1

    def with_messages(self, tables: Sequence[TableSection]) -> Collection[str]:
        return [table.id for table in tables]

    def records(self, table: TableSection) -> DataFrame:
        absent = [F.lit(None).cast(from_arrow_type(field.type)).alias(field.name) for field in RAW_SCHEMA]
        value = F.col("value").cast("binary").alias("value")
        columns = [value if field.name == "value" else column for field, column in zip(RAW_SCHEMA, absent, strict=True)]
        return self._spark.read.text(table.source).select(*columns)

    def last_records(self, table: TableSection, count: int) -> DataFrame | None:
        return None

    def _files(self, table: TableSection, batch_id: int) -> list[ChangeFile]:
        """The files of a micro-batch in their order, from Spark's `FileStreamSourceLog`."""
        last, files = self._in_batch.get(table.target, (-1, []))
        if last != batch_id:
            files = sorted(self._logged(table, batch_id), key=lambda file: (file.modified, file.name))
            self._in_batch[table.target] = batch_id, files
        return files

    def _logged(self, table: TableSection, batch_id: int) -> list[ChangeFile]:
        folder, generation = self._folders[table.target], self._generations[table.target]
        end = folder.offsets(generation, batch_id)["logOffset"]
        before = folder.offsets(generation, batch_id - 1)
        begin = before["logOffset"] + 1 if before else 0
        files = []
        for number in range(begin, end + 1):
            log = f"{folder.location(generation)}/sources/0/{number}"
            lines = folder.read_lines(log if folder.exists(log) else f"{log}.compact")[1:]
            entries = [json.loads(line) for line in lines]
            ours = (entry for entry in entries if entry["batchId"] == number)
            files += [self.change_file(table, entry["path"], int(entry["timestamp"])) for entry in ours]
        return files

    def _footers(self, table: TableSection, files: Sequence[ChangeFile]) -> dict[str, "_Footer"]:
        found = self._each(functools.partial(self._footer, table), files)
        return {file.path: footer for file, footer in zip(files, found, strict=True)}

    def _each(self, look: Callable[[ChangeFile], Found], files: Sequence[ChangeFile]) -> list[Found]:
        if len(files) <= _FEW:
            return [look(file) for file in files]
        # in an object store, each file takes several round trips
        with ThreadPoolExecutor(_AT_ONCE, initializer=activate, initargs=(self._spark,)) as pool:
            return list(pool.map(look, files))

    def _size(self, table: TableSection, file: ChangeFile) -> int:
        """In bytes. Spark lists a micro-batch's files once more before it reads them, and leaves out in silence what is
        gone by then.

        :raises DataError: it is gone.
        """
        path = self._hadoop_path(self._uri(file.path))
        with _translated(str(path)):
            try:
                return int(path.getFileSystem(self._hadoop_conf).getFileStatus(path).getLen())
            except JAVA_ERRORS as error:
                if java_class(error) != "FileNotFoundException":
                    raise
        raise DataError(
            f"{table.target}: {self._decoded(file.path)} was listed as a change file and is gone now. Nothing of its "
            "micro-batch was applied. Put it back and run again; or, to go on without its changes, stop the sink, "
            f"delete the folder {self._checkpoint(table)} and run again."
        )

    def _checkpoint(self, table: TableSection) -> str:
        return f"{self._config.sink.checkpoint.rstrip('/')}/files/{table.target}"

    def _footer(self, table: TableSection, file: ChangeFile) -> "_Footer":
        path = self._hadoop_path(self._uri(file.path))
        try:
            content = self._parquet_input.fromPath(path, self._hadoop_conf)
            reader = self._parquet_reader.open(content, self._parquet_options)
        except Py4JJavaError as error:
            self._size(table, file)  # or it is gone
            raise DataError(f"{table.target}: {file.path} can't be read as Parquet: {error.java_exception}") from None
        message, rows = reader.getFooter().getFileMetaData().getSchema(), int(reader.getRecordCount())
        reader.close()
        text = str(message)
        schema = self._file_schemas.get(text)  # other threads may clear them
        if schema is None:
            try:
                converted = self._to_spark(self._spark._jsparkSession.sessionState().conf()).convert(message)
            except CapturedException as error:
                raise DataError(f"{table.target}: {file.path} has a column that can't be read: {error}") from None
            schema = T.StructType.fromJson(json.loads(converted.json()))
            if len(self._file_schemas) >= _FILE_SCHEMAS:
                self._file_schemas.clear()
            self._file_schemas[text] = schema
        return _Footer(schema, rows, int(content.getLength()))

    def _schema(self, table: TableSection, files: Iterable[T.StructType]) -> T.StructType | None:
        """The schema for files that have more or wider columns than the table's query reads. None if no file does."""
        spec = self._specs[table.target]
        query = columns_to_read(spec)
        types = {field.name: field.dataType for field in query}
        for field in itertools.chain.from_iterable(files):
            known = types.setdefault(field.name, field.dataType)
            if is_wider(field.dataType, known):
                types[field.name] = field.dataType
        for name in spec.excluded:
            if name not in query.names:
                types.pop(name, None)
        schema = T.StructType([T.StructField(name, dtype) for name, dtype in types.items()])
        return None if schema == query else schema

    def _decoded(self, path: str) -> str:
        """A file's URI without escapes, as Spark's reader expects it."""
        return str(self._hadoop_path(self._uri(path)))


class HadoopFolders:
    """Folders of the file systems that Hadoop's clients in the JVM know."""

    def __init__(self, spark: SparkSession) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        self._path = jvm.org.apache.hadoop.fs.Path
        self._conf = spark._jsc.hadoopConfiguration()

    def exists(self, place: str) -> bool:
        with _translated(place):
            path = self._path(place)
            return bool(path.getFileSystem(self._conf).exists(path))

    def is_file(self, place: str) -> bool:
        with _translated(place):
            path = self._path(place)
            return bool(path.getFileSystem(self._conf).getFileStatus(path).isFile())

    def folders(self, place: str) -> list[str]:
        with _translated(place):
            path = self._path(place)
            statuses = path.getFileSystem(self._conf).listStatus(path)
            return [str(status.getPath().getName()) for status in statuses if status.isDirectory()]

    def files(self, place: str) -> list[tuple[str, int]]:
        with _translated(place):
            path = self._path(place)
            statuses = [status for status in path.getFileSystem(self._conf).listStatus(path) if status.isFile()]
            return [(str(s.getPath().toUri().toString()), int(s.getModificationTime())) for s in statuses]

    def fingerprint(self, place: str) -> str:
        """Another one for each spelling of a directory, and without a secret that its URI may have."""
        with _translated(place):
            uri = str(self._uri(place).toString())
        return hashlib.sha256(_same_spelling(uri).encode()).hexdigest()[:12]

    def qualified(self, place: str) -> str:
        return str(self._uri(place).getPath())

    def _uri(self, place: str) -> JavaObject:
        """Its whole URI."""
        path = self._path(place)
        return path.getFileSystem(self._conf).makeQualified(path).toUri()


@contextmanager
def _translated(directory: str) -> Iterator[None]:
    """Turn errors of the file system's client into errors for people."""
    try:
        yield
    except JAVA_ERRORS as error:
        raise TemporaryError(
            f"directory {directory} can't be listed: {java_class(error)}: {java_message(error)}. If the path is "
            "right, run again."
        ) from None


def _most_records(files: Sequence[ChangeFile], sizes: Iterable[int]) -> int | None:
    """How many records text files have at most; None if nothing is known, since they may be compressed."""
    plain = all(_PLAIN_TEXT.search(file.path) for file in files)
    return sum(sizes) // _LEAST_BYTES if plain else None


def _continues(folder: CheckpointFolder, position: Position, directory: str) -> bool:
    """Whether Spark's checkpoint continues the table's position. It may be behind it (a restored copy), or ahead of it
    (the table was rolled back), or damaged. Or it is of a directory of another name: for Spark all its files are new.

    :param directory: see `HadoopFolders.fingerprint`.
    """
    if position.get("directory", directory) != directory:
        return False
    generation, batch = str(position["generation"]), int(position["batch"])
    if generation not in folder.generations():
        return False
    # of a micro-batch that Spark has done, it brings no further part
    done = folder.last_committed_batch(generation)
    if not done <= batch - ("applied" in position) or batch > folder.last_batch(generation):
        return False
    return folder.is_whole(generation)


def _places(names: Mapping[str, str]) -> list[Column]:
    """The records' places, as Spark's reader tells them."""
    return [F.col(f"_metadata.{field}").alias(name) for name, field in names.items()]


def _numbered(records: DataFrame, source: str, files: Sequence[ChangeFile]) -> DataFrame:
    """Records with the column `FILE`.

    :param source: the column with the file's path.
    :param files: in their order.
    """
    if len(files) == 1:
        return records.withColumn(FILE, F.lit(0))
    numbers = [(_same_spelling(file.path), number) for number, file in enumerate(files)]
    order = records.sparkSession.createDataFrame(numbers, f"`{_FOUND}` string, `{FILE}` int")
    found = F.regexp_replace(source, _LOCAL, "/").alias(_FOUND)
    return records.select("*", found).join(F.broadcast(order), _FOUND, "left").drop(_FOUND)


def _progress(position: Position) -> tuple[int, float]:
    """The micro-batch of a position, and how many of its files are applied."""
    return int(position["batch"]), float(position.get("applied", "inf"))


def _batches(position: Position) -> int:
    """How many micro-batches of its generation a position has passed."""
    return int(position["batch"]) + ("applied" not in position)


def _waiting(files: list[ChangeFile], position: Position | None, generation: str, batch_id: int) -> list[ChangeFile]:
    """The files of a micro-batch that a position hasn't passed."""
    if position is None:
        return files
    if position["generation"] != generation:
        return [file for file in files if is_beyond(file, position)]
    earlier = position.get("earlier", [])
    rest = files[position.get("applied", 0) :] if batch_id == position["batch"] else files
    return [file for file in rest if file.modified != position["modified"] or file.name not in earlier]


def _same_spelling(uri: str) -> str:
    """A URI with only one slash after `file:`. Spark's log and its rows differ in these slashes for local files."""
    return re.sub(_LOCAL, "/", uri)


def _mark(files: list[ChangeFile], position: Position | None, generation: str, batch_id: int) -> Position:
    newest = max(file.modified for file in files)
    names = {file.name for file in files if file.modified == newest}
    mark = {"modified": newest, "files": sorted(names), "generation": generation, "batch": batch_id}
    if position is None or position["modified"] < newest:
        return mark
    if position["modified"] > newest:
        names = set()
    mark |= {"modified": position["modified"], "files": sorted(names | set(position["files"]))}
    earlier = position.get("earlier", []) if position["generation"] == generation else position["files"]
    return mark | ({"earlier": earlier} if earlier else {})
