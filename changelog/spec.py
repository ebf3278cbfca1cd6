"""What a format must know of the table that its changes are for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pyspark.sql import types as T

SchemaChanges = Literal["evolve", "ignore", "fail"]


@dataclass(frozen=True)
class ColumnSpec:
    """A column of the target table.

    :param is_uuid: text in messages, binary in Spark, 16 bytes in the table.
    :param source: the message's field that it is read from; the column's own name if None.
    """

    name: str
    type: T.DataType
    required: bool = False
    is_uuid: bool = False
    source: str | None = None

    @property
    def field(self) -> str:
        return self.source or self.name


@dataclass(frozen=True)
class ChangelogSpec:
    """What a format must know of the table that its changes are for.

    :param key: key columns, in the table's order.
    :param partition_sources: columns that partition values derive from; -U and -D rows keep them.
    :param order_by: (name or dotted path, type) of the user's order columns.
    :param source_order: records have a partition and an offset that order them (Kafka).
    :param trust_before: the stream is complete (`mode: changelog`), so -U rows matter.
    :param inserts_only: the table only grows (`mode: append`): it has no key, and what isn't an insert is a bad record.
    :param options: the format's own, checked against its `OPTIONS`.
    :param schema_changes: what to do about fields that are no columns, and values too wide for their column.
    :param metadata: further columns to decode: names of `Changes.metadata`, `_offset` and the like
        (`changelog.decoding.METADATA`).
    :param excluded: fields that are not to become columns.
    """

    columns: tuple[ColumnSpec, ...]
    key: tuple[str, ...]
    partition_sources: tuple[str, ...] = ()
    order_by: tuple[tuple[str, T.DataType], ...] = ()
    source_order: bool = True
    trust_before: bool = False
    inserts_only: bool = False
    options: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    schema_changes: SchemaChanges = "ignore"
    metadata: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()

    @property
    def tells_snapshots(self) -> bool:
        """Decoded rows say whether they come from a snapshot read of the source: a second one would duplicate them."""
        return self.trust_before or self.inserts_only

    @property
    def kept_by_removals(self) -> frozenset[str]:
        """Columns that are read of -U and -D rows; a decoder may leave the others null, as they would only cost shuffle
        bytes.
        """
        return frozenset(self.key) | frozenset(self.partition_sources)
