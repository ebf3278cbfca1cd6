"""Changes of a Delta table beside commits: it is created, it gets columns, and Delta's own commands change it."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from sink.errors import TableError
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.targets.delta.log import CommitRefusedError, DeltaLog
from sink.targets.locations import in_pattern

_NESTED = (StructType, ArrayType, MapType)


def create(
    log: DeltaLog, schema: StructType, partition_by: Sequence[str] = (), properties: Mapping[str, str] | None = None
) -> bool:
    """Create the table, with the protocol that its properties need. `delta.feature.<name>: supported` asks for a
    feature without a property of its own.

    :return: False if there was a table already, perhaps of another process at the same moment.
    :raises TableError: Delta refuses the schema or properties, or the folder has other files.
    :raises CommitUnknownError: look whether it `exists`.
    """
    with log.translated():
        transaction = log.java.startTransaction(log.scala.none, log.scala.none)
        if int(transaction.readVersion()) >= 0:
            return False
        check_no_other_files(log)
        metadata = {
            "id": str(uuid.uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": schema.json(),
            "partitionColumns": list(partition_by),
            "configuration": dict(properties or {}),
            "createdTime": time.time_ns() // 1_000_000,
        }
        transaction.updateMetadata(log.scala.action({"metaData": metadata}), False)
        create_table = log.scala.type("DeltaOperations$CreateTable")
        operation = create_table(transaction.metadata(), False, False, log.scala.none)
    try:
        log.finish(transaction, -1, log.scala.array_list(), operation)
    except CommitRefusedError:
        return False
    return True


def check_no_other_files(log: DeltaLog) -> None:
    """:raises TableError: the folder has files that a new table would lie beside."""
    try:
        with log.translated(missing=True):
            folder, files = log.place(log.path)
            found = [str(status.getPath().getName()) for status in files.listStatus(folder)]
    except FileNotFoundError:
        return
    others = sorted(name for name in found if not name.startswith(("_", ".")))
    if others:
        raise TableError(
            f"{log.path}: there is no Delta table, but the folder has files ({', '.join(others[:3])}). Choose "
            "another folder, empty it, or use CONVERT TO DELTA."
        )


def evolve(log: DeltaLog, base_version: int, schema: StructType) -> int:
    """Change the table's columns, in a commit of its own. Delta doesn't check that the live files fit: columns may be
    added, made nullable, or widened.

    :param base_version: as of `Proposal`.
    :param schema: all columns. Column mapping's ids are given by Delta. Wider types need `delta.enableTypeWidening` in
        the table already.
    :return: the new version.
    :raises ValueError: types change, and the table doesn't allow it.
    :raises TableError: types change in a way that this Delta can't read.
    :raises RowdeltaError: as of `DeltaLog.commit`.
    :raises CommitRefusedError: as of `DeltaLog.commit`.
    """
    with log.translated():
        transaction = log.start(base_version)
        old = transaction.metadata()
        metadata = json.loads(old.json())["metaData"]
        metadata["schemaString"] = _evolved(log, transaction, metadata, schema)
        transaction.updateMetadata(log.scala.action({"metaData": metadata}), False)
        update = log.scala.type("DeltaOperations$UpdateSchema")
        operation = update(old.schema(), transaction.metadata().schema())
    return log.finish(transaction, base_version, log.scala.array_list(), operation)


def _evolved(log: DeltaLog, transaction: JavaObject, metadata: Mapping[str, Any], schema: StructType) -> str:
    """The new schema's JSON, with what type widening has to note in it (PROTOCOL.md, "Type Change Metadata")."""
    before = StructType.fromJson(json.loads(metadata["schemaString"]))
    changes = list(_type_changes(before, schema, ""))
    if not changes:
        return schema.json()
    described = ", ".join(f"{name}: {old.simpleString()} to {new.simpleString()}" for name, old, new in changes)
    if metadata.get("configuration", {}).get("delta.enableTypeWidening", "false").lower() != "true":
        raise ValueError(f"{log.path}: types change without delta.enableTypeWidening ({described})")
    parse = log.scala.jvm.org.apache.spark.sql.types.DataType.fromJson
    widening = log.scala.object("TypeWidening")
    for _, old, new in changes:
        nested = isinstance(old, _NESTED) or isinstance(new, _NESTED)
        if nested or not widening.isTypeChangeSupported(parse(old.json()), parse(new.json())):
            # Delta itself would write it down without a note, and not be able to read the files any more.
            raise TableError(f"{log.path}: this Delta Lake can't widen these types ({described})")
    noted = log.scala.object("TypeWideningMetadata").addTypeWideningMetadata(
        transaction, parse(schema.json()), parse(metadata["schemaString"])
    )
    return str(noted.json())


def optimize(log: DeltaLog, below: int, target: int, where: str | None) -> tuple[int, int, int]:
    """Merge small files by Delta's own OPTIMIZE.

    :param below: size below which a file is small, in bytes.
    :param target: size that no new file exceeds.
    :param where: condition on partition columns. None for all files.
    :return: numbers of files that it removed and added, and bytes of the removed ones.
    :raises RowdeltaError: Delta couldn't.
    """
    # of a session apart, since other threads may optimize other tables
    own = SparkSession(log.spark.sparkContext, log.spark._jsparkSession.cloneSession())
    for name, value in (("minFileSize", below), ("maxFileSize", target), ("maxDeletedRowsRatio", 1.0)):
        own.conf.set(f"spark.databricks.delta.optimize.{name}", str(value))
    with log.translated():
        table = log.scala.jvm.io.delta.tables.DeltaTable.forPath(own._jsparkSession, log.path)
        optimizing = table.optimize() if where is None else table.optimize().where(where)
        metrics = DataFrame(optimizing.executeCompaction(), own).collect()[0]["metrics"]
    return int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]), int(metrics["filesRemoved"]["totalSize"])


def delete_equal(log: DeltaLog, rows: DataFrame, columns: Sequence[str]) -> CommitRefusedError | None:
    """Delete the rows that are equal to one of `rows` in some columns, by Delta's own MERGE: its DELETE takes no
    subquery. NULL equals NULL.

    :return: why nothing was deleted, if others committed meanwhile.
    :raises RowdeltaError: Delta couldn't.
    """
    same = " AND ".join(f"kept.{quoted(name)} <=> removed.{quoted(name)}" for name in columns)
    removed = rows.select(*map(quoted, columns)).distinct().alias("removed")
    try:
        table = log.scala.jvm.io.delta.tables.DeltaTable.forPath(log.spark._jsparkSession, log.path)
        getattr(table, "as")("kept").merge(removed._jdf, same).whenMatched().delete().execute()
    except JAVA_ERRORS as error:
        if log.scala.is_a(error, "java.util.ConcurrentModificationException"):
            return CommitRefusedError(java_class(error), java_message(error))
        raise log.error_of(error) from None
    return None


def table_inside(log: DeltaLog) -> str | None:
    """A folder in the table's folder that seems to be another table's, if there is one. An Iceberg table may have
    the same root, as XTable and Iceberg's `snapshotDeltaLakeTable` make it.
    """
    with log.translated():
        root = in_pattern(log.path)
        own_place, files = log.place(f"{root}/metadata/{{*.metadata.json,version-hint.text}}")
        below, _ = log.place(f"{root}/{{*,*/*,*/*/*}}/{{_delta_log,metadata}}")
        found = [*(files.globStatus(own_place) or ()), *(files.globStatus(below) or ())]
        return str(found[0].getPath().getParent().toString()) if found else None


def kept_after_deletion(log: DeltaLog) -> timedelta:
    """How long VACUUM has to keep files that the newest version doesn't have (`delta.deletedFileRetentionDuration`)."""
    snapshot = log.refresh()
    with log.translated():
        deltalog = log.scala.type("DeltaLog")
        return timedelta(milliseconds=int(deltalog.tombstoneRetentionMillis(snapshot.java.metadata())))


def _type_changes(old: DataType, new: DataType, name: str) -> Iterator[tuple[str, DataType, DataType]]:
    """Columns of both types, nested ones too, that have another type than before: name, old type, new type."""
    if isinstance(old, StructType) and isinstance(new, StructType):
        before = {column.name: column.dataType for column in old}
        for column in new:
            if column.name in before:
                path = f"{name}.{column.name}" if name else column.name
                yield from _type_changes(before[column.name], column.dataType, path)
    elif isinstance(old, ArrayType) and isinstance(new, ArrayType):
        yield from _type_changes(old.elementType, new.elementType, f"{name}.element")
    elif isinstance(old, MapType) and isinstance(new, MapType):
        yield from _type_changes(old.keyType, new.keyType, f"{name}.key")
        yield from _type_changes(old.valueType, new.valueType, f"{name}.value")
    elif old != new:
        yield name, old, new
