"""What a format makes of raw records, before values are converted to the table's types.

A format groups the records of a batch by how they are spelled (one schema, one set of JSON types) and gives `Changes`
for each group: images of rows as Arrow arrays, each with its `WireType`. `changelog.decoding` does what all formats
share.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
"""A record as its source gave it. For files `source` is the file's path, and only `value` is not null besides."""

NUMERAL = pa.large_string()
"""Arrow type of numbers that no machine type holds exactly, as the text of the JSON number (`1.50`,
`12345678901234567890.12`).
"""


@dataclass(frozen=True)
class WireType:
    """What a message's schema says of a field, in Kafka Connect's terms.

    :param kind: int8, int16, int32, int64, float, double, boolean, string, bytes, array, map or struct; "" if nobody
        says.
    :param name: the logical type: `org.apache.kafka.connect.data.Decimal`, `io.debezium.time.MicroTimestamp`, …
    :param parameters: of the logical type, such as `scale`.
    :param children: `element` of an array, `key` and `value` of a map, the fields of a struct.
    """

    kind: str = ""
    name: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    children: Mapping[str, "WireType"] = field(default_factory=dict)
    optional: bool = True


@dataclass(frozen=True)
class Wire:
    """A field of n images: the values as the parser gave them (null: null or missing), and what they mean."""

    values: pa.Array
    type: WireType = WireType()


@dataclass(frozen=True)
class Changes:
    """n changes of one spelling, from a batch of raw records.

    :param record: int64; the row of the raw batch that each came from.
    :param kind: int8; a `RowKind`.
    :param fields: name -> values. May have fields that are no columns, and lack some that are.
    :param order: values of the spec's `order_by`, in its order.
    :param after: 0 for the first change that its record stands for (a -U), 1 for a later one, and so on: int64, or one
        number for all.
    :param snapshot: bool; the change comes from a snapshot read of the source. None: no format that knows.
    :param unknown: fields that the messages' rows have and the spec doesn't name, if the format noticed any.
    :param metadata: further columns that a user may ask for: `_op` (string), `_ts` (timestamp[us, UTC]).
    :param missing: fields that the spec names and the messages' schema hasn't, where records come with a schema. Of
        JSON the text says it.
    """

    record: pa.Array
    kind: pa.Array
    fields: Mapping[str, Wire]
    order: Sequence[Wire] = ()
    after: pa.Array | int = 1
    snapshot: pa.Array | None = None
    unknown: Mapping[str, WireType] = field(default_factory=dict)
    metadata: Mapping[str, pa.Array] = field(default_factory=dict)
    missing: Collection[str] = ()


@dataclass(frozen=True)
class Rejected:
    """Records that can't be understood: row numbers in the raw batch, a class of `BadRecord`, and a sentence each (or
    one for all).
    """

    record: pa.Array
    error_class: str
    reason: pa.Array | str


@dataclass(frozen=True)
class MessageKey:
    """Which fields are the table's key, as records of the batch say. A format that can tell gives one for each key that
    occurs, whatever the table's key is.

    :param fields: their names in messages; empty: the source's table has no key.
    :param record: the first row of the raw batch that says so.
    """

    fields: tuple[str, ...]
    record: int


class UnavailableError(Exception):
    """A service that a format needs doesn't answer. No record is at fault: the job stops, and may run again."""


class FormatError(Exception):
    """The format's code fails whatever a record says: a module or a name is missing. No record is at fault."""


class BadOptionError(ValueError):
    """An option of the format has a value that it can't take. No record is at fault."""


class Format(Protocol):
    """A wire format, made for one table: `changelog.formats` finds its class by name.

    It lives in a Spark task: what it learned of one batch may speed up the next.
    """

    def changes(self, records: pa.RecordBatch) -> Iterator[Changes | Rejected | MessageKey]:
        """The changes in raw records (`RAW_SCHEMA`). Records of which nothing is said are ignored, such as
        tombstones.
        """


class FormatType(Protocol):
    """What a format's module or entry point names: a class with these.

    `OPTIONS`: name -> allowed values, the first being the default; an empty tuple allows any.
    `REQUIRED`: names of options without which nothing can be decoded.
    `DELETES_CARRY_ROW`: a delete has the old row's values, also of columns that aren't in the key.
    `STATES_KEY`: `changes` gives `MessageKey`s. A class without this attribute doesn't: its tables need a `key`.
    """

    OPTIONS: Mapping[str, tuple[str, ...]]
    REQUIRED: tuple[str, ...]
    DELETES_CARRY_ROW: bool

    def __call__(self, spec: ChangelogSpec) -> Format: ...
