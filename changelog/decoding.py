"""The work that all wire formats share: raw records in, changelog rows out. No record is lost.

A `changelog.changes.Format` makes changes of records. This module converts the values to the table's types, checks keys
and order, and packs records that can't be applied into `_rowdelta_bad`. A record is applied as a whole or not at all:
if one of its changes is bad, the record is bad.

The code runs in Spark tasks (`mapInArrow`) on Arrow record batches, and needs no JVM.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type

from changelog import formats
from changelog.changes import (
    COLUMNS,
    RAW_SCHEMA,
    BadOptionError,
    Changes,
    FormatError,
    MessageKey,
    Rejected,
    SnapshotMarks,
    Truncates,
    UnavailableError,
    Wire,
    WireType,
)
from changelog.ignored_nulls import ignore_nulls
from changelog.message_keys import of_changes
from changelog.moves import bared, moved_away, with_moves
from changelog.observed_types import MISSING, Observed, merged_types, observed_type, wider_type
from changelog.order_values import encoded
from changelog.rows import (
    BAD,
    BAD_FIELDS,
    EMPTY_PARTITION,
    KIND,
    LATE_REASON,
    MOVED,
    SNAPSHOT,
    TRUNCATE,
    UNAVAILABLE,
    BadRecord,
    RowKind,
    SoftDelete,
    order_column,
    sets_row,
    unavailable_bits,
)
from changelog.shown_values import shown, told
from changelog.source_tables import Found, Named, first_place, place_columns, takes
from changelog.spec import METADATA, OF_THE_RECORD, ChangelogSpec, ColumnSpec, header_column
from changelog.topics import partition_numbers
from changelog.values import convert, readings
from changelog.values.encoded import is_utf8
from changelog.values.nested import has_more, is_nested, json_text, more, python_values

CHANGES_PER_RECORD = 1 << 16
"""The order value of a change is its record's offset times this number, plus the place of the change in the record."""

_OF_THE_CODE = (ImportError, NameError, SyntaxError, NotImplementedError)

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Place = tuple[int, int]
"""Partition and offset of a record, or file and row."""


@dataclass(frozen=True)
class SnapshotMark:
    """That a snapshot of the source's table begins or ends (`changelog.changes.SnapshotMarks`).

    :param is_last: it ends.
    :param time: of the record, in milliseconds since 1970.
    """

    is_last: bool
    time: int


Fact = tuple[str, ...] | str | SnapshotMark
Stated = Mapping[Fact, Place]
"""What messages state of their table, with the place of the first record that states it: the names of the key's fields
(`MessageKey.fields`), as a tuple, the name of the source's table (`TableNames`), as a text, or a mark.
"""
StatedKeys = Mapping[tuple[str, ...], Place]
"""The keys of `Stated`."""


def decoded_schema(spec: ChangelogSpec) -> pa.Schema:
    """Arrow schema of decoded rows: the columns kind, order, snapshot (only if `tells_snapshots`), bad, unavailable
    (only if `tells_partial`), moved (only if there is a key), then the table's columns, the metadata columns, those
    that only hold order values, those of `SoftDelete`, those of versions, and those that only Spark needs for `where`.
    """
    schema, where = _read_schema(spec), spec.where
    if where is None or where.condition is None:
        return schema
    return pa.schema([field for field in schema if field.name not in where.only])


def _read_schema(spec: ChangelogSpec) -> pa.Schema:
    """`decoded_schema` with all columns that `where` needs."""
    order = [pa.binary() if name in spec.descending else to_arrow_type(dtype) for name, dtype in spec.order_by]
    if spec.source_order:
        order += [pa.int64() if spec.many_topics else pa.int32(), pa.int64()]
    fields = [pa.field(KIND, pa.int8(), nullable=False)]
    fields += [pa.field(order_column(i), dtype) for i, dtype in enumerate(order)]
    fields += [pa.field(SNAPSHOT, pa.bool_())] if spec.tells_snapshots else []
    fields += [pa.field(BAD, _BAD)]
    fields += [pa.field(UNAVAILABLE, pa.binary())] if spec.tells_partial else []
    fields += [pa.field(MOVED, pa.string())] if spec.key else []
    fields += [pa.field(column.name, _target(column)) for column in spec.columns]
    fields += [pa.field(name, METADATA[name]) for name in spec.metadata]
    fields += [pa.field(name, to_arrow_type(spec.order_by[number][1])) for number, name in spec.stored_order.items()]
    if spec.soft_delete is not None:
        fields += map(pa.field, spec.soft_delete.columns, (pa.bool_(), METADATA["_ts"]))
    if spec.history is not None:
        time = to_arrow_type(spec.order_by[0][1])
        fields += map(pa.field, spec.history.names, (time, time, pa.bool_()))
    fields += [pa.field(name, METADATA[name]) for name in (spec.where.metadata if spec.where else ())]
    return pa.schema(fields)


def _target(column: ColumnSpec) -> pa.DataType:
    # Spark's type for Iceberg's uuid is string, but decoded rows have the 16 bytes
    return pa.binary() if column.is_uuid else to_arrow_type(column.type)


def spark_schema(spec: ChangelogSpec) -> T.StructType:
    """`decoded_schema` as Spark's type, for `mapInArrow`."""
    return from_arrow_schema(decoded_schema(spec))


_ARROW = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "binary": pa.binary()}
_BAD = pa.struct([(name, _ARROW[dtype]) for name, dtype in BAD_FIELDS.items()])


@dataclass(frozen=True)
class ChangelogDecoder:
    """Decodes raw records (`RAW_SCHEMA`) into changelog rows (`decoded_schema`), for Spark tasks. The object pickles
    small.

    :param format: name of the format.
    :param observe: is called at most once a task, with fields that are no columns and columns that are too narrow for a
        value (name -> type).
    :param observe_stated: is called at most once a task, with the keys and tables that the messages state.
    """

    format: str
    spec: ChangelogSpec
    observe: Callable[[dict[str, str]], None] | None = None
    observe_stated: Callable[[Stated], None] | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for (changes,) in decoded_together([self], batches):
            yield from changes

    def amended(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """The changes, as far as the table wants them."""
        where, ignored = self.spec.where, self.spec.ignored_nulls
        if where is not None:
            changes = where.applied(changes)
        return ignore_nulls(changes, ignored, where.metadata if where else ()) if ignored else changes


def decoded_together(
    decoders: Sequence[ChangelogDecoder], batches: Iterable[pa.RecordBatch]
) -> Iterator[list[list[pa.RecordBatch]]]:
    """Decode the same raw records for several tables. For each batch, each decoder's changelog rows. Tables whose
    messages a format reads alike (`ChangelogSpec.of_messages`) have one format, which reads them once.
    """
    readers = dict[str, _Reader]()

    def find_reader(name: str, spec: ChangelogSpec) -> _Reader:
        if repr(spec) not in readers:
            readers[repr(spec)] = _Reader(name, spec)
        return readers[repr(spec)]

    tasks = [_TaskDecoder(decoder.format, decoder.spec, find_reader) for decoder in decoders]
    for batch in batches:
        if batch.num_rows:
            made = [
                list(map(decoder.amended, task.decode(batch))) for decoder, task in zip(decoders, tasks, strict=True)
            ]
            for reader in readers.values():
                reader.forget()
            yield made
    for decoder, task in zip(decoders, tasks, strict=True):
        if decoder.observe is not None and task.observed:
            decoder.observe(dict(task.observed))
        if decoder.observe_stated is not None and task.stated:
            decoder.observe_stated(task.stated)


_DECODER_FAILED = "the decoder failed: "


def failed_with(reason: str) -> str:
    """The exception that the format raised, by the reason of a `BadRecord.DECODER_FAILED`."""
    return reason.removeprefix(_DECODER_FAILED).partition(":")[0]


@dataclass
class _Bad:
    """Bad records of a batch: row number in the batch -> (error class, reason). The first reason of a record counts."""

    errors: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, records: pa.Array, error_class: str, reasons: Sequence[str] | str) -> None:
        for i, row in enumerate(records.to_pylist()):
            self.errors.setdefault(row, (error_class, reasons if isinstance(reasons, str) else reasons[i]))


class _Reader:
    """Reads messages by a format. Tables that have it in common decode one batch after the other, each of which is read
    once.

    :param spec: what the format may look at (`ChangelogSpec.of_messages`).
    """

    def __init__(self, name: str, spec: ChangelogSpec) -> None:
        self._make = functools.partial(formats.find(name), spec)
        self.format = self._make()
        self._has_failed = False
        self._read: tuple[pa.RecordBatch, list[Found], Named] | None = None

    def read(self, records: pa.RecordBatch) -> list[Found]:
        """See `Format.changes`."""
        return self._reading(records)[1]

    def named(self, records: pa.RecordBatch) -> Named:
        return self._reading(records)[2]

    def _reading(self, records: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Found], Named]:
        if self._read is None or self._read[0] is not records:
            if self._has_failed:  # it may have learned only half of something
                self.format = self._make()
            self._has_failed = True
            found = list(self.format.changes(records))
            self._read = records, found, Named(found)
            self._has_failed = False
        return self._read

    def forget(self) -> None:
        """Free the memory."""
        self._read = None


class _TaskDecoder:
    """:param reader: returns the reader of a format for what it may look at. Tasks may have it in common."""

    def __init__(self, format_name: str, spec: ChangelogSpec, reader: Callable[[str, ChangelogSpec], _Reader]) -> None:
        self._format_name = format_name
        self._find_reader = reader
        self._follow(spec)
        self._schema = _read_schema(spec)
        self._targets = {column.name: _target(column) for column in spec.columns}
        self._evolves = spec.schema_changes != "ignore"
        self.observed: Observed = {}
        self.stated: Stated = {}

    def _follow(self, spec: ChangelogSpec) -> None:
        self._spec = spec
        self._reader = self._find_reader(self._format_name, spec.of_messages)
        # of a topic with several tables, the names are read once for all of them, and then each reads its own messages
        self._names = self._find_reader(self._format_name, spec.of_names) if spec.is_mixed else self._reader

    def decode(self, raw: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The changes of a batch, and its bad records.

        If the format raises an exception for a record, the record is a bad record: otherwise it would stop the job for
        ever. The decoder finds such a record by halving the batch. The job checks whether the format fails for all
        records, since it knows the other batches.

        :raises FormatError: the format's code fails, whatever the records contain.
        """
        try:
            decoded = self._decoded(raw)
        except (BadOptionError, UnavailableError, MemoryError, OSError):
            raise  # the records are right
        except Exception as error:
            if self._is_of_the_code(error):
                what = told(error, visible=self._spec.show_values)
                failure = FormatError(f"format {self._format_name} fails in its own code: {what}")
                if not self._spec.show_values:
                    raise failure from None  # the log would have the cause, with its message
                raise failure from error
            if raw.num_rows == 1:
                bad = _Bad()
                reason = f"{_DECODER_FAILED}{told(error, visible=self._spec.show_values)}"
                bad.add(pa.array([0], pa.int64()), BadRecord.DECODER_FAILED, reason)
                yield from self._bad_rows(raw, bad).to_batches()
                return
            half = raw.num_rows // 2
            yield from self.decode(raw.slice(0, half))
            yield from self.decode(raw.slice(half))
        else:
            yield from decoded.to_batches() or [_empty(self._schema)]

    def _is_of_the_code(self, error: Exception) -> bool:
        """Whether the cause of an exception is the format's code, not the content of a record."""
        if isinstance(error, AttributeError):
            return isinstance(error.obj, ModuleType | type) or error.obj is self._reader.format
        return isinstance(error, _OF_THE_CODE) and not isinstance(error, pa.ArrowException)

    def _decoded(self, raw: pa.RecordBatch) -> pa.Table:
        named = self._names.named(raw)
        places: Stated = {name: first_place(raw, rows) for name, rows in named.changing.items()}
        self.stated = merged_facts(self.stated, places)
        others = named.strangers(self._spec.source_tables) if self._spec.source_tables else {}
        if others or self._spec.is_mixed:
            return self._decoded_without(raw, named, others)
        return self._rows(raw, self._reader.read(raw))

    def _rows(self, raw: pa.RecordBatch, parsed: Sequence[Found]) -> pa.Table:
        """The changes in records that are all of the table, and the bad ones among them."""
        bad = _Bad()
        parts: list[tuple[npt.NDArray[np.int64], dict[str, pa.Array]]] = []
        places: list[Ints] = []
        has_images = False
        keys: list[MessageKey] = []
        keyless: list[Rejected] = []
        for found in parsed:
            if isinstance(found, Rejected):
                keyless.append(found)
            if isinstance(found, Truncates) and not self._spec.truncate_refused:
                parts.append((found.record.to_numpy(), self._truncate_columns(raw, found, bad)))
                places.append(np.zeros(len(found.record), np.int64))
            elif isinstance(found, Rejected):
                refused = self._spec.truncate_refused if isinstance(found, Truncates) else _reasons(found)
                bad.add(found.record, found.error_class, refused)
            elif isinstance(found, MessageKey):
                keys.append(found)
            elif isinstance(found, SnapshotMarks):
                self.stated = merged_facts(self.stated, _marks_of_snapshots(raw, found))
            elif isinstance(found, Changes) and len(found.record):
                self._check_places(found, bad)
                if self._spec.inserts_only:
                    self._check_inserts(found, bad)
                if self._evolves and found.unknown:
                    self._observe_fields(found)
                if self._spec.schema_changes == "fail" and COLUMNS not in raw.schema.names:
                    self._observe_missing(raw, found)
                has_images |= self._has_images(found)
                parts.append((found.record.to_numpy(), self._row_columns(raw, found, bad)))
                place = found.place
                places.append(np.full(len(found.record), place) if isinstance(place, int) else place.to_numpy())
        for key in of_changes(raw, keys, keyless):
            self.stated = merged_facts(self.stated, {key.fields: _place(raw, key.record)})
        self._explain(raw, bad)
        rejected = np.fromiter(bad.errors, np.int64, len(bad.errors))
        tables, stays = [], list[Mask]()
        for records, columns in parts:
            table = pa.Table.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)
            good = ~np.isin(records, rejected) if len(rejected) else np.ones(len(records), np.bool_)
            stays.append(good)
            tables.append(table if good.all() else table.filter(pa.array(good)))
        rows = pa.concat_tables(tables).combine_chunks() if tables else self._schema.empty_table()
        if has_images:
            good = np.concatenate(stays)
            record = np.concatenate([records for records, _ in parts])
            rows = self._with_moves(raw, rows, record[good], np.concatenate(places)[good])
        if bad.errors:
            rows = pa.concat_tables([rows, self._bad_rows(raw, bad)]).combine_chunks()
        return rows

    def _has_images(self, changes: Changes) -> bool:
        """Whether a -U or a -D may come with more columns than those that all removals have."""
        spec = self._spec
        columns = spec.of_messages.columns
        others = {c.field for c in columns if c.name not in spec.kept_by_removals}
        others = others or {c.field for c in columns if c.name not in spec.key}
        has_more = bool(spec.key) and not others.isdisjoint(changes.fields)
        return has_more and not sets_row(changes.kind.to_numpy()).all()

    def _with_moves(self, raw: pa.RecordBatch, rows: pa.Table, record: Ints, place: Ints) -> pa.Table:
        partition = self._partitions(raw, "partition").fill_null(-1).to_numpy()
        return bared(with_moves(rows, self._spec, record, place, partition, moved_away(raw)), self._spec)

    def _partitions(self, raw: pa.RecordBatch, column: str) -> pa.Array:
        """A number for each record's partition, or file.

        :param column: the one that has it, if all records are of one topic.
        """
        numbers = raw.column(column)
        return partition_numbers(raw.column("source"), numbers) if self._spec.many_topics else numbers

    def _decoded_without(self, raw: pa.RecordBatch, named: Named, others: Mapping[str, Any]) -> pa.Table:
        """Decode a batch without the messages of other tables. Those that would have changed rows are bad records."""
        bad, strange = _Bad(), np.concatenate([np.empty(0, np.int64), *others.values()])
        elsewhere = self._spec.taken_elsewhere
        for name, rows in named.changing.items():
            if name in others and not takes(elsewhere, name):
                bad.add(pa.array(rows, pa.int64()), BadRecord.OTHER_TABLE, self._spec.other_table(name))
        # without what is ignored: a tombstone after a delete, of which only both together tell the table
        rest = np.setdiff1d(named.effective, strange)
        if not self._spec.is_mixed:  # nobody knew until now
            self._follow(replace(self._spec, is_mixed=True))
        tables = []
        if len(rest):
            own = raw.take(pa.array(rest))
            tables = [self._rows(own, self._reader.read(own))]
        if bad.errors and not self._spec.ignores_other_tables:
            tables.append(self._bad_rows(raw, bad))
        return pa.concat_tables(tables).combine_chunks() if tables else self._schema.empty_table()

    def _explain(self, raw: pa.RecordBatch, bad: _Bad) -> None:
        """Add what the bad records are, if they are none of the format's messages."""
        if not bad.errors or self._format_name not in formats.OURS or COLUMNS in raw.schema.names:
            return
        from changelog.recognition import mistaken  # this loads much, and most tasks have no bad record

        rows = pa.array(list(bad.errors), pa.int64())
        records = zip(*(raw.column(name).take(rows).to_pylist() for name in ("key", "value")), strict=True)
        for (row, (error_class, reason)), record in zip(list(bad.errors.items()), records, strict=True):
            what = mistaken(self._format_name, self._spec.options, record)
            if what:
                bad.errors[row] = error_class, f"{reason}; such messages are {what}"

    def _row_columns(self, raw: pa.RecordBatch, changes: Changes, bad: _Bad) -> dict[str, pa.Array]:
        spec, count = self._spec, len(changes.record)
        sets = sets_row(changes.kind.to_numpy(zero_copy_only=False))
        columns: dict[str, pa.Array] = {KIND: changes.kind, BAD: pa.nulls(count, _BAD)}
        if spec.tells_snapshots:
            columns[SNAPSHOT] = changes.snapshot if changes.snapshot is not None else pa.repeat(False, count)
        if spec.tells_partial:
            columns[UNAVAILABLE] = pa.nulls(count, pa.binary())
        if spec.keeps_unavailable:
            columns |= self._partial(raw, changes)
        if spec.keeps_late:
            columns |= _with_records(raw, changes, columns)
        if spec.key:
            columns[MOVED] = pa.nulls(count, pa.string())
        all_set = bool(sets.all())
        for column in spec.columns:
            applies = None if all_set or column.name in spec.kept_by_removals else sets
            columns[column.name] = self._column(raw, column, changes, applies, bad)
        ordered, missing = self._order_columns(raw, changes, changes.place, bad, changes.metadata)
        self._check_order([missing[number] for number in spec.stated_order], changes.record, sets, bad)
        columns |= ordered
        for name in (*spec.metadata, *(spec.where.metadata if spec.where else ())):
            columns[name] = _metadata(name, raw, changes, changes.metadata)
        if spec.soft_delete is not None:
            columns |= _marks(spec.soft_delete, raw, changes, sets)
        return columns

    def _partial(self, raw: pa.RecordBatch, changes: Changes) -> dict[str, pa.Array]:
        """What makes rows partial: which columns they lack, and the record in case that nothing completes them."""
        count = len(changes.record)
        lacking = [_flags(changes.unavailable.get(column.field)) for column in self._spec.columns]
        soft = self._spec.soft_delete
        history = self._spec.history
        derived = (*self._spec.metadata, *self._spec.stored_order, *(() if soft is None else soft.columns))
        derived += () if history is None else history.names
        partial = np.zeros(count, np.bool_)
        for flags in lacking:
            if flags is not None:
                partial |= flags
        rows = np.flatnonzero(partial)
        if not len(rows):
            return {UNAVAILABLE: pa.nulls(count, pa.binary())}
        first = np.full(count, len(lacking))
        for number, flags in reversed(list(enumerate(lacking))):
            if flags is not None:
                first[flags] = number
        names = pa.array([column.name for column in self._spec.columns], pa.string())
        reasons = pc.binary_join_element_wise(
            "column ", names.take(pa.array(first[rows])), ": the source didn't send the unchanged value", ""
        )
        classes = pa.repeat(BadRecord.UNAVAILABLE_VALUE, len(rows))
        letters = _packed(raw, changes.record.take(pa.array(rows)), classes, reasons)
        places = np.full(count, len(rows))
        places[rows] = np.arange(len(rows))
        return {
            UNAVAILABLE: unavailable_bits([*lacking, *(None for _ in derived)], partial),
            BAD: letters.take(pa.array(places, mask=~partial)),
        }

    def _order_columns(
        self,
        raw: pa.RecordBatch,
        changes: Changes | Truncates,
        place: pa.Array | int,
        bad: _Bad,
        metadata: Mapping[str, pa.Array],
    ) -> tuple[dict[str, pa.Array], list[pa.Array]]:
        """The order columns, and for each of `order_by` which values are null."""
        spec, record = self._spec, changes.record
        columns, missing, stated = dict[str, pa.Array](), list[pa.Array](), iter(changes.order)
        held = {**spec.stored_order, **(spec.soft_delete.order if spec.soft_delete is not None else {})}
        for i, (name, _) in enumerate(spec.order_by):
            if name in METADATA and not spec.is_field(name):
                values = _metadata(name, raw, changes, metadata)
            else:
                wire = next(stated) if spec.is_field(name) else _header(raw, name, record)
                values = self._order_value(i, name, wire, record, bad)
            if i in held:
                columns[held[i]] = values
            if i == 0 and spec.history is not None:
                # a row is the current one since its first order value
                columns[spec.history.start] = values
                columns[spec.history.end] = pa.nulls(len(values), values.type)
                columns[spec.history.current] = pa.repeat(True, len(values))
            columns[order_column(i)] = encoded(values, descending=True) if name in spec.descending else values
            missing.append(values.is_null())
        if spec.source_order:
            group, number = place_columns(raw)
            # an offset from 2^47 on makes its record a bad one
            first = pc.multiply_checked(raw.column(number).take(record), CHANGES_PER_RECORD)
            columns[order_column(len(spec.order_by))] = self._partitions(raw, group).take(record)
            columns[order_column(len(spec.order_by) + 1)] = pc.add(first, place)
        return columns, missing

    def _check_order(self, missing: Sequence[pa.Array], record: pa.Array, sets: Mask, bad: _Bad) -> None:
        """Reject changes that don't say their order. A row may lack one of several values: NULL comes first. A removal
        may not: the row that it is about would go before it.

        :param missing: which values are null, for each of `ChangelogSpec.stated_order`.
        """
        if not missing:
            return
        none, some = functools.reduce(pc.and_, missing), functools.reduce(pc.or_, missing)
        refused = pc.if_else(pa.array(sets), none, some)
        if pc.any(refused).as_py():
            names = " or ".join(self._spec.order_by[number][0] for number in self._spec.stated_order)
            bad.add(record.filter(refused), BadRecord.MISSING_ORDER, f"order column {names} is null or missing")

    def _truncate_columns(self, raw: pa.RecordBatch, truncates: Truncates, bad: _Bad) -> dict[str, pa.Array]:
        """Rows that stand for a TRUNCATE (`changelog.rows.TRUNCATE`)."""
        marked = _Bad()
        marked.add(truncates.record, TRUNCATE, _reasons(truncates))
        rows = self._bad_rows(raw, marked)
        columns = {name: rows.column(name) for name in rows.column_names}
        ordered, missing = self._order_columns(raw, truncates, 1, bad, {})
        for (name, _), none in zip(self._spec.order_by, missing, strict=True):
            reason = (
                f"TRUNCATE: order column {name} is null or missing, so nothing says which rows it removed. Name a "
                "field in order_by that these messages have too, or empty the table by hand"
            )
            bad.add(truncates.record.filter(none), BadRecord.MISSING_ORDER, reason)
        return columns | ordered

    def _check_places(self, changes: Changes, bad: _Bad) -> None:
        """Reject records with too many changes. The order value of a place beyond `CHANGES_PER_RECORD` would belong to
        the next record.
        """
        if isinstance(changes.place, int):
            return
        beyond = pc.greater_equal(changes.place, CHANGES_PER_RECORD)
        if pc.any(beyond).as_py():
            reason = f"the record stands for more than {CHANGES_PER_RECORD:,} changes"
            bad.add(changes.record.filter(beyond), BadRecord.UNSUPPORTED_EVENT, reason)

    def _check_inserts(self, changes: Changes, bad: _Bad) -> None:
        others = pc.not_equal(changes.kind, int(RowKind.INSERT))
        if pc.any(others).as_py():
            kinds = changes.kind.filter(others).to_pylist()
            reasons = [f"{RowKind(kind).short}: a table in mode append takes inserts (+I) only" for kind in kinds]
            bad.add(changes.record.filter(others), BadRecord.NOT_AN_INSERT, reasons)

    def _column(
        self, raw: pa.RecordBatch, column: ColumnSpec, changes: Changes, applies: Mask | None, bad: _Bad
    ) -> pa.Array:
        """The column's values in the table's type. Where `applies` is false, a value that doesn't fit is null."""
        target = self._targets[column.name]
        wire = changes.fields.get(column.field)
        if column.of_record:
            wire = Wire(raw.column(OF_THE_RECORD[column.field]).take(changes.record))
        is_key = column.name in self._spec.key
        if column.default is not None and column.field in changes.missing:
            array, misfit = pa.repeat(pa.scalar(column.default, target), len(changes.record)), None
        elif wire is None or wire.values.null_count == len(wire.values):
            array, misfit = pa.nulls(len(changes.record), target), None
        else:
            array, misfit = convert(wire, target, column.is_uuid)
            if self._evolves and is_nested(target):
                # the table gets no new fields inside a column, and their values must not be lost: the record is bad
                extra = pa.array(has_more(wire.values, target))
                misfit = extra if misfit is None else pc.or_(misfit, extra)
            if column.width is not None:
                other = pc.fill_null(pc.not_equal(pc.binary_length(array), column.width), False)
                misfit = other if misfit is None else pc.or_(misfit, other)
        if applies is not None and misfit is not None:
            array = pc.if_else(pc.and_not(misfit, pa.array(applies)), pa.scalar(None, target), array)
            misfit = pc.and_(misfit, pa.array(applies))
        if misfit is not None and pc.any(misfit).as_py():
            assert wire is not None
            reasons = self._misfits(column, wire.type, wire.values.filter(misfit))
            bad.add(changes.record.filter(misfit), BadRecord.TYPE_MISMATCH, reasons)
            self._observe_width(column, wire, misfit)
        why = "null or missing"
        if column.name in self._spec.empty_is_null:
            emptied, why = with_empty_as_null(array), "null, missing or empty"
            if not is_key and emptied.null_count > array.null_count:
                # of a removed row, it only means that the old partition is unknown
                empty = pc.and_(array.is_valid(), emptied.is_null())
                empty = pc.and_(empty, pa.array(sets_row(changes.kind.to_numpy(zero_copy_only=False))))
                bad.add(
                    changes.record.filter(empty), BadRecord.TYPE_MISMATCH, f"column {column.name} {EMPTY_PARTITION}"
                )
            array = emptied
        if is_key and array.null_count:
            bad.add(changes.record.filter(array.is_null()), BadRecord.NULL_KEY, f"key column {column.name} is {why}")
        elif column.required and array.null_count:
            # -U and -D need no value: a null in a partition source column means that the old partition is unknown
            missing = pc.and_(array.is_null(), pa.array(sets_row(changes.kind.to_numpy(zero_copy_only=False))))
            if column.field in changes.unavailable:
                missing = pc.and_not(missing, changes.unavailable[column.field])
            if misfit is not None:
                missing = pc.and_not(missing, pc.fill_null(misfit, False))
            if self._evolves and pc.any(missing).as_py():
                self.observed = merged_types({column.name: ""}, self.observed)
            reason = f"column {column.name} is null or missing, and the table requires a value"
            bad.add(changes.record.filter(missing), BadRecord.TYPE_MISMATCH, reason)
        return array

    def _misfits(self, column: ColumnSpec, wire: WireType, values: pa.Array) -> list[str]:
        dtype = "uuid" if column.is_uuid else column.type.simpleString()
        dtype = dtype if column.width is None else f"{dtype} of {column.width} bytes"
        target = self._targets[column.name]
        looked_into, visible = self._evolves and is_nested(target), self._spec.show_values

        def misfit(value: Any) -> str:
            if field := more(value, target) if looked_into else "":
                return f"has a field {field!r} which the table's column lacks"
            contradiction = readings.contradiction(wire, value, column.field, visible=visible)
            return contradiction or f"{shown(value, visible=visible)} does not fit {dtype}"

        return [f"column {column.name}: {misfit(value)}" for value in python_values(values)]

    def _observe_fields(self, changes: Changes) -> None:
        known = {column.field for column in self._spec.columns} | self._spec.excluded
        new = {name: observed_type(wire) for name, wire in changes.unknown.items() if name not in known}
        self.observed = merged_types(self.observed, new)

    def _observe_missing(self, raw: pa.RecordBatch, changes: Changes) -> None:
        """Observe columns that the messages lack. Either the messages' schema lacks the field, or a JSON message where
        the value is null doesn't contain the field's name.
        """
        sets = sets_row(changes.kind.to_numpy(zero_copy_only=False))
        if not sets.any():
            return
        gone = set(changes.missing)
        # a message may have thousands of rows: its text is taken and searched once
        records = changes.record.filter(pa.array(sets))
        distinct = pc.unique(records)
        texts, text_of = raw.column("value").take(distinct), pc.index_in(records, distinct)
        if pc.all(pc.starts_with(texts, b"{")).as_py():
            for column in self._spec.of_messages.columns:
                wire = changes.fields.get(column.field)
                nulls = pa.repeat(True, len(records)) if wire is None else wire.values.filter(pa.array(sets)).is_null()
                if column.field in changes.unavailable:
                    nulls = pc.and_not(nulls, changes.unavailable[column.field].filter(pa.array(sets)))
                # a name with escapes can be spelled in several ways in JSON, so we can't search for it
                plain = json.dumps(column.field) == f'"{column.field}"'
                if not plain or not pc.any(nulls).as_py():
                    continue
                named = pc.match_substring(texts.take(pc.unique(text_of.filter(nulls))), f'"{column.field}"')
                if not pc.all(named).as_py():
                    gone.add(column.field)
        # key columns are left out: a record that lacks its key is a bad record anyway
        names = {column.field: column.name for column in self._spec.columns if column.name not in self._spec.key}
        self.observed = merged_types(self.observed, {names[name]: MISSING for name in gone if name in names})

    def _observe_width(self, column: ColumnSpec, wire: Wire, misfit: pa.Array) -> None:
        """Observe the wider type that would hold some of the values that don't fit, if there is such a type."""
        if not self._evolves or column.is_uuid or column.name in self._spec.key:
            return  # keys may not change
        wider = wider_type(column.type, wire.type)
        if wider is None:
            return
        _, still = convert(Wire(wire.values.filter(misfit), wire.type), to_arrow_type(wider))
        if still is None or not pc.all(still).as_py():
            self.observed = merged_types(self.observed, {column.name: wider.simpleString()})

    def _order_value(self, index: int, name: str, wire: Wire, record: pa.Array, bad: _Bad) -> pa.Array:
        target = to_arrow_type(self._spec.order_by[index][1])
        array, misfit = (
            (pa.nulls(len(record), target), None)
            if wire.values.null_count == len(wire.values)
            else convert(wire, target)
        )
        if misfit is not None and pc.any(misfit).as_py():
            reason = f"order column {name} does not fit {self._spec.order_by[index][1].simpleString()}"
            bad.add(record.filter(misfit), BadRecord.MISSING_ORDER, reason)
        return array

    def _bad_rows(self, raw: pa.RecordBatch, bad: _Bad) -> pa.Table:
        """One row for each bad record, with the reason and the whole record."""
        rows = pa.array(list(bad.errors), pa.int64())
        classes = pa.array([error_class for error_class, _ in bad.errors.values()], pa.string())
        packed = _packed(raw, rows, classes, pa.array([reason for _, reason in bad.errors.values()], pa.string()))
        columns: dict[str, Any] = {f.name: pa.nulls(len(rows), f.type) for f in self._schema}
        columns |= {KIND: pa.repeat(pa.scalar(int(RowKind.DELETE), pa.int8()), len(rows)), BAD: packed}
        return pa.Table.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)


def _with_records(raw: pa.RecordBatch, changes: Changes, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """The records of all rows, in case that they are late. Partial rows have them already.

    :param columns: those of the rows, so far.
    """
    count = len(changes.record)
    classes, reasons = pa.repeat(BadRecord.LATE, count), pa.repeat(LATE_REASON, count)
    records = _packed(raw, changes.record, classes, reasons)
    lacking = columns.get(UNAVAILABLE, pa.nulls(count, pa.binary()))
    return {BAD: pc.coalesce(columns[BAD], records), UNAVAILABLE: pc.fill_null(lacking, b"")}


def _marks(soft: SoftDelete, raw: pa.RecordBatch, changes: Changes, sets: Mask) -> dict[str, pa.Array]:
    """Which rows are deleted, and when: at the time that the message says, or else that of its record, or else now."""
    marks: dict[str, pa.Array] = {soft.column: pa.array(~sets)}
    if soft.at is not None:
        now = pa.scalar(datetime.now(UTC), METADATA["_ts"])
        times = [_metadata(name, raw, changes, changes.metadata) for name in ("_ts", "_timestamp")]
        marks[soft.at] = pc.if_else(pa.array(sets), pa.scalar(None, now.type), pc.coalesce(*times, now))
    return marks


def _header(raw: pa.RecordBatch, name: str, record: pa.Array) -> Wire:
    """The texts of a header. It has none where it isn't UTF-8."""
    column = header_column(name)
    if column not in raw.schema.names:
        return Wire(pa.nulls(len(record), pa.string()))
    values = raw.column(column).take(record)
    if not all(map(is_utf8, values.drop_null().unique().to_pylist())):
        values = pa.array([value if value is not None and is_utf8(value) else None for value in values.to_pylist()])
    return Wire(values.cast(pa.string()))


def _metadata(
    name: str, raw: pa.RecordBatch, changes: Changes | Truncates, of_messages: Mapping[str, pa.Array]
) -> pa.Array:
    """The values of a metadata column.

    :param of_messages: those that a format has read.
    """
    if name in OF_THE_RECORD:
        return raw.column(OF_THE_RECORD[name]).take(changes.record)
    return of_messages.get(name, pa.nulls(len(changes.record), METADATA[name]))


def _packed(raw: pa.RecordBatch, rows: pa.Array, classes: pa.Array, reasons: pa.Array) -> pa.StructArray:
    """Records as `_rowdelta_bad` has them.

    :param rows: int64; row numbers in `raw`.
    """
    parts: dict[str, pa.Array] = {name: raw.column(name).take(rows) for name in RAW_SCHEMA.names}
    if COLUMNS in raw.schema.names:
        parts["value"] = _as_json(raw.column(COLUMNS).take(rows))
    parts |= {"error_class": classes, "reason": reasons}
    fields = list(_BAD)
    return pa.StructArray.from_arrays([parts[f.name].cast(f.type) for f in fields], fields=fields)


def _as_json(columns: pa.StructArray) -> pa.Array:
    """Typed columns of rows as JSON objects, with times as texts."""
    names = [field.name for field in columns.type]
    shown = pa.StructArray.from_arrays([_with_texts(column) for column in columns.flatten()], names=names)
    return pa.array([json_text(row, shown.type) for row in python_values(shown)], pa.string())


def _with_texts(column: pa.Array) -> pa.Array:
    """The column, with texts if it has times that texts can tell."""
    if not pa.types.is_temporal(column.type):
        return column
    texts, lost = convert(Wire(column), pa.string())
    return texts if lost is None else column


def _flags(values: pa.Array | None) -> Mask | None:
    return None if values is None else values.to_numpy(zero_copy_only=False)


def merged_facts(first: Stated, second: Stated) -> Stated:
    """All that both state, each with the place where it occurs first."""
    return {
        fact: min(place for place in (first.get(fact), second.get(fact)) if place is not None)
        for fact in {**first, **second}
    }


def _marks_of_snapshots(raw: pa.RecordBatch, marks: SnapshotMarks) -> Stated:
    return {
        SnapshotMark(is_last, int(raw.column("timestamp")[row].as_py().timestamp() * 1000)): _place(raw, row)
        for is_last, records in ((False, marks.first), (True, marks.last))
        for row in records.to_pylist()
    }


def _reasons(found: Rejected) -> Sequence[str] | str:
    reasons: list[str] | str = found.reason if isinstance(found.reason, str) else found.reason.to_pylist()
    return reasons


def _place(raw: pa.RecordBatch, row: int) -> tuple[int, int]:
    partition, offset = (raw.column(name)[row].as_py() for name in ("partition", "offset"))
    return (-1 if partition is None else partition, -1 if offset is None else offset)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


def with_empty_as_null(texts: pa.Array) -> pa.Array:
    """Texts or bytes, with null in place of empty ones."""
    return pc.if_else(pc.greater(pc.binary_length(texts), 0), texts, pa.scalar(None, texts.type))
