"""Arrow record batches of changes in, Iceberg data and delete files out. This package knows no Spark and no catalog,
and commits nothing.

The parts nest, and all have the same two verbs, `write` and `close() -> list[ContentFile]`:

    DeltaWriter                     one per task: collapses changes, keeps key -> (file, pos) for the commit
    ├─ PartitionedWriter            splits rows by partition value: fanout while rows keep coming, clustered at the end
    │  └─ RollingFileWriter         starts a new data file at the target size
    │     └─ ParquetFileWriter      one Parquet file and its column metrics
    ├─ PositionDeletes              rows of this commit that a later change superseded: Parquet (v2), vectors (v3)
    └─ EqualityDeletes              keys that the table may hold from earlier snapshots

A table that only grows has an `AppendWriter` (`append.py`) instead of the `DeltaWriter`. It needs no key, and collapses
and deletes nothing.

    from deltawriters import DeltaWriter, DeltaOptions, TableSpec, TaskId

    writer = DeltaWriter(table, DeltaOptions(key=("id",)), TaskId(partition=0, attempt=7, operation="4f1c"))
    for batch in batches:           # changelog rows, see changelog.rows
        writer.write(batch)
    result = writer.close()         # result.files, ready for a row delta commit

A failed task calls `abort()` instead of `close()`. `abort()` deletes the files that the task wrote.
"""

from deltawriters.content import ContentFile, FileContent
from deltawriters.delta import CardinalityError, DeltaOptions, DeltaWriter, WriteResult
from deltawriters.table import TableSpec, TaskId

__all__ = [
    "CardinalityError",
    "ContentFile",
    "DeltaOptions",
    "DeltaWriter",
    "FileContent",
    "TableSpec",
    "TaskId",
    "WriteResult",
]
