"""Row kinds and the columns of a changelog row.

A *changelog row* is one change of one key. In Arrow (and, column by column, in Spark):

| column                 | type                | meaning                                                              |
|------------------------|---------------------|----------------------------------------------------------------------|
| `_rowdelta_kind`       | int8, not null      | a `RowKind`                                                          |
| `_rowdelta_order_<i>`  | any sortable type   | i-th order column; compared as a tuple, nulls first                  |
| `_rowdelta_hash`       | int64, optional     | first half of the key's hash; present if the table has a key index   |
| `_rowdelta_snapshot`   | bool, optional      | the row comes from a snapshot read of the source (Debezium `r`)      |
| `_rowdelta_bad`        | struct; null if good| the record (`BAD_FIELDS`), if it can't be applied or is a `TRUNCATE`  |
| the table's columns    | the table's types   | the row; for -U and -D only key and partition source columns are read |
"""

from enum import IntEnum

PREFIX = "_rowdelta_"
KIND = "_rowdelta_kind"
ORDER = "_rowdelta_order_"
HASH = "_rowdelta_hash"
SNAPSHOT = "_rowdelta_snapshot"
BAD = "_rowdelta_bad"

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
before it are void, and so are all rows that the table had. Each writing task gets it (`sink.spark.routing.to_all`).
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
    UNKNOWN_OPERATION = "unknown_operation"
    NULL_KEY = "null_key"
    MISSING_ORDER = "missing_order"
    TYPE_MISMATCH = "type_mismatch"
    MISSING_COLUMN = "missing_column"
    UNAVAILABLE_VALUE = "unavailable_value"
    UNSUPPORTED_EVENT = "unsupported_event"
    NOT_AN_INSERT = "not_an_insert"
    DECODER_FAILED = "decoder_failed"
    """The format raised an unexpected exception: either the format's code or the record is wrong."""


def order_column(index: int) -> str:
    """Name of the changelog row's `index`-th order column."""
    return f"{ORDER}{index}"
