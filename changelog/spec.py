"""What a format must know about the table that its changes go to."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import types as T

from changelog.rows import SoftDelete
from changelog.versions import VersionColumns
from changelog.wanted import Where

METADATA: Mapping[str, pa.DataType] = {
    "_op": pa.string(),
    "_ts": pa.timestamp("us", "UTC"),
    "_source": pa.string(),
    "_source_partition": pa.int32(),
    "_offset": pa.int64(),
    "_timestamp": pa.timestamp("us", "UTC"),
}
"""Metadata columns that a table may have: the operation as the format spells it, the time of its commit at the source,
and the record's topic or file, partition, offset and Kafka timestamp.
"""

OF_THE_RECORD = {"_source": "source", "_source_partition": "partition", "_offset": "offset", "_timestamp": "timestamp"}
"""Those of the record, by their columns in raw records. Every record has them."""

HEADERS = "headers."
"""What begins the name of a Kafka header in `order_by`."""


def header_column(name: str) -> str:
    """The column of raw records (binary) that has a header. PySpark takes no dot in the names of Arrow's columns.

    :param name: with `HEADERS` before it.
    """
    return f"header_{name.removeprefix(HEADERS).encode().hex()}"


SchemaChanges = Literal["evolve", "ignore", "fail"]


@dataclass(frozen=True)
class ColumnSpec:
    """A column of the target table.

    :param name: the column's name in the table.
    :param type: the column's Spark type.
    :param required: the table requires a value.
    :param is_uuid: the value is text in messages, binary in Spark, and 16 bytes in the table.
    :param source: the message's field that has the value. None: the field has the column's name.
    :param default: what a row has whose message has a schema without the field. None: null.
    :param width: number of bytes that each value must have (`fixed`). None: any.
    """

    name: str
    type: T.DataType
    required: bool = False
    is_uuid: bool = False
    source: str | None = None
    width: int | None = None
    default: Any = None

    @property
    def field(self) -> str:
        return self.source or self.name

    @property
    def of_record(self) -> bool:
        """Whether the value is one of `OF_THE_RECORD`, such as its topic, and not in the message."""
        return self.source in OF_THE_RECORD


@dataclass(frozen=True)
class ChangelogSpec:
    """What a format must know about the table that its changes go to.

    :param columns: the table's columns, in the table's order.
    :param key: names of the key columns, in the table's order.
    :param partition_sources: columns that partition values derive from; -U and -D rows keep their values.
    :param order_by: (name or dotted path, type) of the user's order columns. A name may be one of `METADATA`, or begin
        with `HEADERS`.
    :param descending: those of them whose smaller values are the later ones.
    :param stored_order: number in `order_by` -> the table's column that holds the order value.
    :param source_order: records have a place that orders them last: a partition and an offset, or a file and a row.
    :param trust_before: the stream is complete (`mode: changelog`), so -U rows matter.
    :param inserts_only: the table only grows (`mode: append`). It has no key, and every change except an insert is a
        is a bad record.
    :param options: the format's own options, already checked against its `OPTIONS`.
    :param schema_changes: what to do about fields that are no columns, and about values too wide for their column.
    :param metadata: further columns to decode: names of `Changes.metadata`, `_offset` and the like
        (`METADATA`).
    :param excluded: fields that must not become columns.
    :param empty_is_null: text columns in which the table can't tell an empty text from null. A row with such a value
        is a bad record.
    :param keeps_unavailable: an update may lack the values of some columns: they are taken from the table's row.
    :param keeps_late: late changes become dead letters, so rows have their records.
    :param soft_delete: removals mark rows as deleted.
    :param source_tables: patterns of the source's tables whose messages are taken (`changelog.source_tables`). Empty if
        no message has named a table yet: then all are.
    :param is_mixed: the topic has messages of other tables too, so a tombstone alone doesn't say of which table it is.
    :param ignores_other_tables: messages of other tables are left out. Else they are bad records.
    :param taken_elsewhere: patterns, or regular expressions, of tables whose messages other entries with the topic
        take: here they are left out.
    :param many_topics: records are of several topics, so a partition's number alone doesn't say where they are.
    :param history: the columns of versions, if the table has history. `start` has the first order value.
    :param show_values: texts for people may quote values of rows. Else they have types and lengths
        (`changelog.shown_values`).
    :param truncate_refused: why a TRUNCATE of the source can't be applied: the reason of the bad record. Empty if the
        table is emptied.
    :param ignored_nulls: columns in which the NULL of a change says nothing.
    :param finds_snapshots: where snapshots of the source's table begin and end is told (`SnapshotMarks`).
    :param where: which rows the table wants. None: all.
    """

    columns: tuple[ColumnSpec, ...]
    key: tuple[str, ...]
    partition_sources: tuple[str, ...] = ()
    order_by: tuple[tuple[str, T.DataType], ...] = ()
    descending: frozenset[str] = frozenset()
    stored_order: Mapping[int, str] = field(default_factory=dict)
    source_order: bool = True
    trust_before: bool = False
    inserts_only: bool = False
    options: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    schema_changes: SchemaChanges = "ignore"
    metadata: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()
    empty_is_null: frozenset[str] = frozenset()
    keeps_unavailable: bool = False
    keeps_late: bool = False
    soft_delete: SoftDelete | None = None
    truncate_refused: str = ""
    source_tables: tuple[str, ...] = ()
    is_mixed: bool = False
    ignores_other_tables: bool = False
    taken_elsewhere: tuple[str | re.Pattern[str], ...] = ()
    many_topics: bool = False
    history: VersionColumns | None = None
    show_values: bool = True
    ignored_nulls: frozenset[str] = frozenset()
    finds_snapshots: bool = False
    where: Where | None = None

    @property
    def of_messages(self) -> "ChangelogSpec":
        """All that a format may look at. It has no columns that the record has (`ColumnSpec.of_record`). Tables that
        have this in common have the same `Changes`.
        """
        columns = [column for column in self.columns if not column.of_record]
        others = {column.name for column in self.columns if column.of_record}
        return ChangelogSpec(
            tuple(ColumnSpec(c.name, c.type, is_uuid=c.is_uuid, source=c.source) for c in columns),
            tuple(name for name in self.key if name not in others),
            tuple(sorted(self.kept_by_removals.difference(self.key))),
            self.order_by,
            trust_before=self.trust_before,
            inserts_only=self.inserts_only,
            options=self.options,
            schema_changes=self.schema_changes,
            metadata=tuple(sorted(self.read_metadata)),
            keeps_unavailable=self.keeps_unavailable,
            is_mixed=self.is_mixed,
            show_values=self.show_values,
            finds_snapshots=self.finds_snapshots,
        )

    @property
    def of_names(self) -> "ChangelogSpec":
        """What a format may look at to tell only which tables messages are of, and which of them change rows."""
        return ChangelogSpec((), (), options=self.options, is_mixed=True, show_values=self.show_values)

    @property
    def tells_partial(self) -> bool:
        """Decoded rows tell which of them are partial."""
        return self.keeps_unavailable or self.keeps_late or bool(self.ignored_nulls)

    @property
    def order_fields(self) -> tuple[tuple[str, T.DataType], ...]:
        """Those of `order_by` that are in messages, and not of their records."""
        return tuple((name, dtype) for name, dtype in self.order_by if self.is_field(name))

    @property
    def headers(self) -> tuple[str, ...]:
        """The columns of raw records that have headers."""
        names = (name for name, _ in self.order_by if name.startswith(HEADERS) and not self.is_field(name))
        return tuple(map(header_column, names))

    def is_field(self, name: str) -> bool:
        """Whether a name in `order_by` is that of a message's field. A field of the row goes before metadata."""
        is_other = name in METADATA or name.startswith(HEADERS)
        return not is_other or any(column.field == name and not column.of_record for column in self.columns)

    @property
    def stated_order(self) -> tuple[int, ...]:
        """Numbers in `order_by` of what messages state, and not each record has."""
        names = [name for name, _ in self.order_by]
        return tuple(number for number, name in enumerate(names) if self.is_field(name) or name not in OF_THE_RECORD)

    @property
    def read_metadata(self) -> frozenset[str]:
        """Which metadata a format has to read: those that become columns, order the changes, tell which rows the table
        wants, or say when a row was deleted.
        """
        read = {name for name, _ in self.order_by if name in METADATA and not self.is_field(name)}
        read |= {*self.metadata, *(self.where.metadata if self.where else ())}
        if self.soft_delete is not None and self.soft_delete.at is not None:
            read.add("_ts")
        return frozenset(read)

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The messages' fields of the key columns."""
        return tuple(column.field for column in self.columns if column.name in self.key)

    def other_table(self, name: str) -> str:
        """Why messages of another table are bad records."""
        both = json.dumps([*self.source_tables, name], ensure_ascii=False)
        return (
            f"the message is of table {name}, and this entry takes those of {', '.join(self.source_tables)}. Write "
            f"source_tables: {both} in the entry if they belong together, or "
            "other_tables: ignore to leave others out"
        )

    @property
    def tells_snapshots(self) -> bool:
        """Decoded rows tell whether they come from a snapshot read of the source. In these modes a second snapshot
        would write the rows twice.
        """
        return self.trust_before or self.inserts_only

    @property
    def kept_by_removals(self) -> frozenset[str]:
        """The only columns of -U and -D rows that the writers read. A decoder may set the others to null, which saves
        shuffle bytes.
        """
        order = self.soft_delete.order.values() if self.soft_delete is not None else ()
        return frozenset(self.key) | frozenset(self.partition_sources) | frozenset(order)
