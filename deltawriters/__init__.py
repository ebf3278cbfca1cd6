"""Arrow record batches of changes in, data and delete files out. This package knows no Spark, no catalog and no table
format, and commits nothing. A `TableSpec` stands for the table; `sink.targets` has one for each format.

The parts nest. A writer has `write` and `close`; what collects deletes has `delete` and `close`. Writers of partitions
and rolling writers return `list[ContentFile]`, a Parquet file its `ParquetFacts`, and the delta writer a `WriteResult`:

    DeltaWriter                     one per task: collapses changes, keeps key -> (file, pos) for the commit
    ├─ PartitionedWriter            splits rows by partition value: fanout while rows keep coming, clustered at the end
    │  └─ RollingFileWriter         starts a new data file at the target size; may sort rows (`ordering.py`)
    │     └─ ParquetFileWriter      one Parquet file and its column metrics
    ├─ Deletes                      rows of this commit that a later change superseded, in the format's way
    └─ KeyDeletes                   keys that the table may hold from earlier snapshots, if the format has such deletes

A table that only grows has an `AppendWriter` (`append.py`) instead of the `DeltaWriter`. It needs no key, and collapses
and deletes nothing.

    from deltawriters import DeltaWriter, DeltaOptions, TableSpec, TaskId

    writer = DeltaWriter(table, DeltaOptions(key=("id",)), TaskId(partition=0, attempt=7, operation="4f1c"))
    for batch in batches:           # changelog rows, see changelog.rows
        writer.write(batch)
    result = writer.close()         # result.files, ready for a row delta commit

A failed task calls `abort()` instead of `close()`. `abort()` deletes the files that the task wrote.
"""

from deltawriters.content import ContentFile, FileContent, Partition, TaskId
from deltawriters.delta import DeltaWriter, WriteResult
from deltawriters.table import TableSpec
from deltawriters.whole_changes import CardinalityError, DeltaOptions

__all__ = [
    "CardinalityError",
    "ContentFile",
    "DeltaOptions",
    "DeltaWriter",
    "FileContent",
    "Partition",
    "TableSpec",
    "TaskId",
    "WriteResult",
]
