"""Row kinds and the columns of a changelog row.

A *changelog row* is one change of one key. In Arrow (and, column by column, in Spark):

| column                 | type                | meaning                                                              |
|------------------------|---------------------|----------------------------------------------------------------------|
| `_rowdelta_kind`       | int8, not null      | a `RowKind`                                                          |
| `_rowdelta_order_<i>`  | any sortable type   | i-th order column; compared as a tuple, nulls first                  |
| `_rowdelta_hash`       | int64, optional     | first half of the key's hash; present if the table has a key index   |
| `_rowdelta_snapshot`   | bool, optional      | the row comes from a snapshot read of the source (Debezium `r`)      |
| `_rowdelta_bad`        | struct; null if good| the record (`BAD_FIELDS`), if it can't be applied or is a `TRUNCATE`  |
| `_rowdelta_unavailable`| binary, optional    | the row is partial: which columns it lacks (`unavailable_bits`); or  |
|                        |                     | it isn't (no bytes), and its record is kept                          |
| `_rowdelta_moved`      | string, optional    | a -U or -D of a row that went to another key (`changelog.moves`)     |
| the table's columns    | the table's types   | the row; for -U and -D only key and partition source columns are read |

A *partial* row lacks the values of some columns. It is completed from the row that its key has at that place in the
order of changes, in the table or by an earlier change, and sets that row. If the key has no row, the kind decides:

- +U: the source didn't send these values, since the update left them as they were. The change is a dead letter. So this
  kind has `_rowdelta_bad` too: whoever doesn't know partial rows takes it for a bad record, and nothing is lost or
  wrong.
- +I: the row is set, with NULL in the columns that it lacks.
- -U and -D: a soft delete, whose values mark the row as deleted. Nothing is set; it is a removal without values.

With `late: dead-letter` all rows have their records, since only the writer finds out which are late.

A -U or -D with `_rowdelta_moved` also has the row's other columns. It names the columns that tell which row it removes:
it leaves a row alone that differs in one of them. If the first name is empty, it does so only with rows that the same
commit has set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PREFIX = "_rowdelta_"
KIND = "_rowdelta_kind"
ORDER = "_rowdelta_order_"
HASH = "_rowdelta_hash"
SNAPSHOT = "_rowdelta_snapshot"
BAD = "_rowdelta_bad"
UNAVAILABLE = "_rowdelta_unavailable"
FILE, ROW = f"{PREFIX}file", f"{PREFIX}row"
"""Columns of raw records of files, besides `RAW_SCHEMA`: the file's number in the order in which files are applied, and
the record's number in the file. Both only grow; they may skip numbers.
"""
BLOCK = f"{PREFIX}block"
"""Column of raw records of text files, from which `ROW` is counted: the first byte of the part of the file that a task
reads.
"""

MOVED = "_rowdelta_moved"
MOVED_SEPARATOR = "\x1f"

BAD_FIELDS = {
    "source": "string",  # topic, or path of the change file
    "partition": "int",  # null for files
    "offset": "bigint",  # Kafka offset, or row number within the file where the file format has one
    "key": "binary",
    "value": "binary",
    "reason": "string",  # a sentence for people
    "error_class": "string",  # one of `BadRecord`, for counting
}
"""Fields of `_rowdelta_bad`, as Spark SQL types."""


TRUNCATE = "truncate"
"""The `error_class` of a row that isn't bad: its record says that the source emptied the table. Like a bad record, the
row has no key, so it takes the same way past everything that looks at keys. Its order columns have values. All changes
before it are void, and so are all rows that the table had. Each writing task gets it (`sink.routing.to_all`).
"""

EMPTY_PARTITION = "is an empty text, which the table's partitions can't tell from NULL"
"""What is wrong with an empty value in a column of `ChangelogSpec.empty_is_null`."""

LATE_REASON = "its order value is below what the table holds for its key"

KEPT = "kept"
"""The `error_class` of a partial row whose record is a dead letter already: of an earlier attempt, or of an earlier
configuration. It is applied if it can be completed now. If not, its record isn't kept again.
"""


class RowKind(IntEnum):
    """What a change does to its key, with Flink's meaning (`org.apache.flink.types.RowKind`).

    The numbers are our own encoding between Spark and the writers. They also say in which order changes of one key with
    equal order values are applied: -U first, then +I and +U, then -D. So the -U and +U of an update may have the same
    order value. So may a row and a later -D that carries the old row's order value.
    """

    UPDATE_BEFORE = 0
    INSERT = 1
    UPDATE_AFTER = 2
    DELETE = 3

    @property
    def short(self) -> str:
        """The two-character spelling: `-U`, `+I`, `+U` or `-D`."""
        return ("-U", "+I", "+U", "-D")[self]


class BadRecord:
    """Error classes of records that can't be applied. The dead-letter table stores them in `error_class`."""

    UNPARSEABLE = "unparseable"
    OTHER_TABLE = "other_table"
    UNKNOWN_OPERATION = "unknown_operation"
    NULL_KEY = "null_key"
    MISSING_ORDER = "missing_order"
    TYPE_MISMATCH = "type_mismatch"
    MISSING_COLUMN = "missing_column"
    UNAVAILABLE_VALUE = "unavailable_value"
    ROW_ABSENT = "row_absent"
    UNSUPPORTED_EVENT = "unsupported_event"
    NOT_AN_INSERT = "not_an_insert"
    LATE = "late"
    DECODER_FAILED = "decoder_failed"
    """The format raised an unexpected exception: either the format's code or the record is wrong."""


@dataclass(frozen=True)
class SoftDelete:
    """How a removal of a row is told by the row itself.

    :param column: says whether the row is deleted (bool).
    :param at: since when (timestamp[us, UTC]), if there is such a column.
    :param order: number in `ChangelogSpec.order_by` -> the row's column that holds the order value, by which late
        changes are told. It gets that of the removal.
    """

    column: str
    at: str | None = None
    order: Mapping[int, str] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """What no message has as a field."""
        return (self.column,) if self.at is None else (self.column, self.at)


def order_column(index: int) -> str:
    """Name of the changelog row's `index`-th order column."""
    return f"{ORDER}{index}"


Mask = npt.NDArray[np.bool_]


def sets_row(kinds: npt.NDArray[np.int8]) -> Mask:
    """Whether each change sets its key's row (+I, +U) rather than removing it (-U, -D)."""
    sets: Mask = (kinds == RowKind.INSERT) | (kinds == RowKind.UPDATE_AFTER)
    return sets


def is_bad(changes: pa.RecordBatch | pa.Table) -> pa.Array | pa.ChunkedArray | None:
    """Flags the changelog rows that stand for a record and not for a change: bad records and TRUNCATEs. None if there
    are none. A partial row is neither.
    """
    bad = changes.column(BAD)
    if bad.null_count == len(bad):
        return None
    flags = pc.is_valid(bad)
    if UNAVAILABLE in changes.schema.names:
        flags = pc.and_(flags, pc.is_null(changes.column(UNAVAILABLE)))
    return flags if pc.any(flags).as_py() else None


def known_columns(text: str) -> list[str]:
    """The columns that a value of `_rowdelta_moved` names. There may be none."""
    return [name for name in text.split(MOVED_SEPARATOR) if name]


def unavailable_bits(columns: Sequence[Mask | None], partial: Mask) -> pa.Array:
    """The column `_rowdelta_unavailable` of n changelog rows: bit i of a row's bytes, counted from the first byte's
    highest bit on, is set if the row lacks the value of the i-th of the batch's columns whose names don't begin with
    `PREFIX`.

    :param columns: for each such column n flags; None if no row lacks its value.
    :param partial: the rows that lack a value. The others get null.
    """
    rows = np.flatnonzero(partial)
    bits = np.zeros((len(rows), len(columns)), np.bool_)
    for number, flags in enumerate(columns):
        if flags is not None:
            bits[:, number] = flags[rows]
    packed = np.packbits(bits, axis=1)
    sizes = np.where(partial, packed.shape[1], 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    valid = pa.array(partial).buffers()[1]
    return pa.Array.from_buffers(
        pa.binary(), len(partial), [valid, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(packed))]
    )


def unavailable_columns(bits: pa.Array, columns: int) -> npt.NDArray[np.bool_]:
    """The reverse of `unavailable_bits`: for each of n partial rows and each of its `columns` columns a flag.

    :param bits: binary without nulls.
    """
    width = -(-columns // 8)
    offsets = np.frombuffer(bits.buffers()[1], np.int32)[bits.offset : bits.offset + len(bits) + 1]
    data = np.frombuffer(bits.buffers()[2] or b"", np.uint8)
    packed = data[offsets[0] : offsets[-1]].reshape(len(bits), width) if len(bits) else np.empty((0, width), np.uint8)
    return np.unpackbits(packed, axis=1, count=columns).astype(np.bool_)
