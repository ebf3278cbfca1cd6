"""What a format makes of raw records, before `changelog.decoding` converts the values to the table's types.

A format groups the records of a batch by their spelling (one schema, one set of JSON types). For each group it gives
`Changes`: images of rows as Arrow arrays, each with its `WireType`. `changelog.decoding` does the work that all formats
share.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from changelog.spec import ChangelogSpec

RAW_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
    ]
)
"""A record as its source gave it. For files, `source` is the file's path, and of the other columns only `value` has a
value.
"""
COLUMNS = "columns"
"""A further column that raw records may have (struct): the row's typed columns, in the place of `value`."""
MOVED_AWAY = "moved_away"
"""A further column that raw records may have (bool): a header of the message says that its row goes to another key."""

NUMERAL = pa.large_string()
"""Arrow type for numbers that no machine type holds exactly. A value is the text of the JSON number (`1.50`,
`12345678901234567890.12`).
"""


@dataclass(frozen=True)
class WireType:
    """What a message's schema says about a field, in Kafka Connect's terms.

    :param kind: int8, int16, int32, int64, float, double, boolean, string, bytes, array, map or struct. Empty if the
        message has no schema.
    :param name: the logical type: `org.apache.kafka.connect.data.Decimal`, `io.debezium.time.MicroTimestamp`, …
    :param parameters: parameters of the logical type, such as `scale`.
    :param children: `element` of an array, `key` and `value` of a map, or the fields of a struct.
    :param setting: the option of the format that says all this in place of a schema. Empty if a schema says it.
    :param doubtful: nobody has set the option, or it leaves the unit open. Then a value that has a meaning by another
        setting too doesn't fit.
    :param default: what the field has in rows that the source wrote before it had the field, as the message's schema
        spells it. None if the schema says nothing.
    """

    kind: str = ""
    name: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    children: Mapping[str, "WireType"] = field(default_factory=dict)
    setting: str = ""
    doubtful: bool = False
    default: Any = None


@dataclass(frozen=True)
class Wire:
    """A field of n images: the values as the parser gave them, and what they mean. A value is null if the message has
    null or lacks the field.
    """

    values: pa.Array
    type: WireType = WireType()


@dataclass(frozen=True)
class Changes:
    """n changes of one spelling, from a batch of raw records.

    :param record: int64; for each change, the row number of its record in the raw batch.
    :param kind: int8; a `RowKind`.
    :param fields: name -> values. The mapping may have fields that are no columns, and may lack columns.
    :param order: values of the spec's `order_by` columns, in the order of the spec.
    :param place: the place of the change among those of its record: 0 for a -U, 1 for the change after it, and so on.
        One number for all changes, or an int64 array.
    :param snapshot: bool; the change comes from a snapshot read of the source. None if the format can't tell.
    :param unknown: fields that the messages' rows have and the spec doesn't name, if the format noticed any.
    :param metadata: further columns that a user may ask for: `_op` (string), `_ts` (timestamp[us, UTC]).
    :param missing: fields that the spec names and the messages' schema lacks. Formats without schemas leave it empty:
        the decoder looks into the JSON text instead.
    :param unavailable: field -> flags (bool) of the +U whose values the source didn't send, since the update left them
        unchanged. In `fields` these values are null. A format gives it only if the spec `keeps_unavailable`, and never
        for a key column, nor for an update that changes the key: its other values are in the row of the old key.
    """

    record: pa.Array
    kind: pa.Array
    fields: Mapping[str, Wire]
    order: Sequence[Wire] = ()
    place: pa.Array | int = 1
    snapshot: pa.Array | None = None
    unknown: Mapping[str, WireType] = field(default_factory=dict)
    metadata: Mapping[str, pa.Array] = field(default_factory=dict)
    missing: Collection[str] = ()
    unavailable: Mapping[str, pa.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejected:
    """Records that can't be understood.

    :param record: int64; row numbers in the raw batch.
    :param error_class: one of `BadRecord`.
    :param reason: a sentence for each record (string), or one sentence for all.
    """

    record: pa.Array
    error_class: str
    reason: pa.Array | str


@dataclass(frozen=True)
class Truncates(Rejected):
    """Records that say that the source emptied its table. No row and no key is in them, so a table that can't be
    emptied rejects them; else they are a barrier: what came before is gone (`changelog.rows.TRUNCATE`).

    :param order: as in `Changes`.
    """

    order: Sequence[Wire] = ()


@dataclass(frozen=True)
class MessageKey:
    """A key of the source's table, as records of the batch state it. A format whose messages state the key gives one
    `MessageKey` for each key that occurs, whatever key the target table has.

    :param fields: names of the key's fields in the messages. Empty if the source's table has no key.
    :param record: row number, in the raw batch, of the first record that states this key.
    """

    fields: tuple[str, ...]
    record: int


@dataclass(frozen=True)
class SnapshotMarks:
    """Records that have the first row of a snapshot of the source's table, or the last one.

    :param first: int64; row numbers in the raw batch.
    :param last: likewise.
    """

    first: pa.Array
    last: pa.Array


@dataclass(frozen=True)
class TableNames:
    """The source's tables that records name (`changelog.source_tables`).

    :param record: int64; row numbers in the raw batch.
    :param name: string; null where a record names no table.
    """

    record: pa.Array
    name: pa.Array


class UnavailableError(Exception):
    """A service that a format needs doesn't answer. The records are right: the job stops, and may be started again."""


class FormatError(Exception):
    """The format's code fails for every record: for example, a module or a name is missing. The records are right."""


class BadOptionError(ValueError):
    """An option of the format has an invalid value. The records are right."""


class Format:
    """A wire format, made for one table: `changelog.formats` finds its class by name.

    A Spark task keeps the object for all its batches, so the object may use what it learned from earlier batches.
    """

    OPTIONS: Mapping[str, tuple[str, ...]] = {}
    """Name -> allowed values. The first value is the default; an empty tuple allows any value."""
    REQUIRED: tuple[str, ...] = ()
    """Names of the options that a user must set."""
    DELETES_CARRY_ROW = False
    """A delete has the old row's values, also those of columns that aren't in the key. If not, an update's old row may
    have made-up values too (`changelog.made_up`).
    """
    STATES_KEY = False
    """`changes` gives `MessageKey`s. If not, the format's tables need a configured `key`."""
    NAMES_TABLE = False
    """`changes` gives `TableNames`."""
    MARKS_SNAPSHOTS = False
    """Messages may say where a snapshot of the source's table begins and ends (`SnapshotMarks`)."""
    MAY_LACK_VALUES = False
    """`changes` gives `Changes.unavailable`."""

    def __init__(self, spec: ChangelogSpec) -> None:
        self._spec = spec

    def changes(
        self, records: pa.RecordBatch
    ) -> Iterator[Changes | Rejected | MessageKey | TableNames | SnapshotMarks]:
        """The changes in raw records (`RAW_SCHEMA`). A record that occurs in no `Changes` and no `Rejected` is ignored,
        such as a tombstone.
        """
        raise NotImplementedError
