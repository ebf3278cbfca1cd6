"""Shared code of the formats that send images of rows. Inserts, updates and deletes become changelog rows.

| operation | changelog rows |
|-----------|---|
| insert    | +I of the new image |
| update    | +U of the new image; before it -U of the old image, if needed (changelog mode, or the key changed) |
| delete    | -D of the removed image |

A format's class (`ImageFormat`) reads its messages, tells their operations (`Operations`), and passes the rows to
`ImageReader.changes` (as `Rows`).
"""

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from changelog.changes import Changes, Format, MessageKey, Rejected, Truncates, Wire, WireType
from changelog.parse.json_records import JsonReader, Leaf, ListOf, Object, Parsed, parse
from changelog.paths import at_path, with_path
from changelog.rows import PREFIX, BadRecord, RowKind
from changelog.shown_values import shown_texts
from changelog.source_tables import Found
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values import json_candidates
from changelog.values.nested import is_list, is_nested, json_text

Fields = Mapping[str, Leaf | Object | ListOf]
Ints = npt.NDArray[np.int64]

TEXT = Leaf((pa.string(), pa.int64()))
INTEGER = Leaf((pa.int64(), pa.string()))
NAMES = Leaf((pa.list_(pa.string()),))

MISSING_COLUMNS = "missing.columns"
"""Name of an option: what it means if an update lacks columns. `unavailable`: it left them unchanged, and the table's
row has their values. `null`: they are null. `reject`: the message is a bad record.
"""
MISSING_ARE_UNAVAILABLE = ("unavailable", "null", "reject")
MISSING_ARE_NULL = ("null", "unavailable", "reject")
"""Values of the option. The first one is the default: it fits what the tool sends by default."""

PARTITION_REMOVED = "a partition was dropped or truncated: no key says which rows that removed; remove them by hand"

_SEPARATOR = "\x1f"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_FLAT = rf'(?:[^{{}}"]|{_QUOTED})*'
_NESTED = rf'(?:[^{{}}"]|{_QUOTED}|\{{{_FLAT}\}})*'
"""JSON without unpaired braces, as a pattern: any number of texts, objects without objects in them, and the rest."""
_REMOVES_PARTITION = r"(?i)\b(?:drop|truncate)\s+partition\b"


@dataclass(frozen=True)
class Operations:
    """What a format's operations mean. Messages name an operation by a text.

    :param field: the field that names the operation. It is shown in the reasons of bad records.
    :param kinds: operation -> kind. UPDATE_AFTER means an update, with or without an old image.
    :param ignored: operations that change no rows.
    :param truncates: operations that say that the whole table was emptied.
    :param snapshot: operations of `kinds` that come from a snapshot read of the source.
    """

    field: str
    kinds: Mapping[str, RowKind]
    ignored: frozenset[str] = frozenset()
    truncates: frozenset[str] = frozenset()
    snapshot: frozenset[str] = frozenset()

    def kind(self, op: pa.Array) -> pa.Array:
        """The kind of each operation (int8). It is null where the operation isn't in `kinds`."""
        places = pc.index_in(op, value_set=pa.array(list(self.kinds), pa.string()))
        return pa.array([int(kind) for kind in self.kinds.values()], pa.int8()).take(places)

    def rejected(self, record: pa.Array, op: pa.Array, spec: ChangelogSpec) -> Iterator[Rejected]:
        """Reject the records whose operation is unknown."""
        known = [*self.kinds, *self.ignored, *self.truncates]
        rest = pc.invert(pc.is_in(op, value_set=pa.array(known, pa.string())))
        if not pc.any(rest).as_py():
            return
        record, op = record.filter(rest), op.filter(rest)
        yield from rejected(record, op.is_null(), BadRecord.UNKNOWN_OPERATION, f"{self.field} is missing")
        named, expected = shown_texts(op, visible=spec.show_values), f"; expected one of {', '.join(self.kinds)}"
        reasons = pc.binary_join_element_wise(f"{self.field} is ", named, expected, "")
        yield from rejected(record, op.is_valid(), BadRecord.UNKNOWN_OPERATION, reasons)

    def truncating(self, op: pa.Array) -> pa.Array:
        """Whether each operation empties the table (bool)."""
        return pc.is_in(op, value_set=pa.array(list(self.truncates), pa.string()))


@dataclass(frozen=True)
class Rows:
    """n rows of messages, each with its operation.

    :param record: int64; row numbers in the raw batch.
    :param op: string; the operation as the message names it.
    :param kind: int8; INSERT, UPDATE_AFTER or DELETE.
    :param after: struct; new images of inserts and updates.
    :param before: struct; old images of updates. Null where a message has no old image.
    :param removed: struct; the images of removed rows.
    :param order: values of the spec's `order_by` columns.
    :param place: int64; number of the row in its message, if messages have several rows.
    :param states_null: takes the name of a column's field and returns where an old image may have null for it (bool).
        None: old images don't only have the changed fields, so the value of a missing field is unknown.
    :param time: timestamp[us, UTC]; when the source committed.
    :param snapshot: bool; the row comes from a snapshot read of the source.
    :param unknown: as in `Changes`.
    :param unavailable: as in `Changes`.
    """

    record: pa.Array
    op: pa.Array
    kind: pa.Array
    after: pa.StructArray
    before: pa.StructArray
    removed: pa.StructArray
    order: list[pa.Array]
    place: pa.Array | None = None
    states_null: Callable[[str], pa.Array] | None = None
    time: pa.Array | None = None
    snapshot: pa.Array | None = None
    unknown: Mapping[str, WireType] = dataclass_field(default_factory=dict)
    unavailable: Mapping[str, pa.Array] = dataclass_field(default_factory=dict)

    def filter(self, mask: pa.Array) -> "Rows":
        """The rows where `mask` is true."""
        states_null = self.states_null
        parts: dict[str, Any] = {name: v.filter(mask) for name, v in vars(self).items() if isinstance(v, pa.Array)}
        parts["order"] = [values.filter(mask) for values in self.order]
        parts["unavailable"] = {name: flags.filter(mask) for name, flags in self.unavailable.items()}
        parts["states_null"] = None if states_null is None else lambda name: states_null(name).filter(mask)
        return Rows(**(vars(self) | parts))


Spelled = tuple[Wire, pa.Array | None, str]
"""A field, a mask of its values that are wrong (bool; None: no value was checked), and a phrase that says what is
wrong.
"""


class ImageReader:
    """Reads images of a table's rows.

    :param spell: interprets the values that messages have for a column.
    :param types: the type that messages have for a column.
    :param likely: Arrow types that the format's JSON values usually have. They are tried before the types that fit the
        column's type.
    :param missing: values of the option `MISSING_COLUMNS`, the default first.
    :param log_whole_rows: what makes the source send all columns of an updated row. It is shown in the reasons of bad
        records.
    """

    def __init__(
        self,
        spec: ChangelogSpec,
        spell: Callable[[ColumnSpec, pa.Array], Spelled],
        types: Callable[[ColumnSpec], WireType] = lambda column: WireType(),
        likely: tuple[pa.DataType, ...] = (),
        missing: tuple[str, ...] = MISSING_ARE_UNAVAILABLE,
        log_whole_rows: str = "",
    ) -> None:
        self._spec = spec
        self._missing = spec.options.get(MISSING_COLUMNS, missing[0])
        self._completes = spec.keeps_unavailable and self._missing == "unavailable"
        self._log_whole_rows = log_whole_rows
        self._spell = spell
        self._order = {
            name: Leaf(json_candidates(WireType(), to_arrow_type(dtype))) for name, dtype in spec.order_fields
        }
        self._leaves = {}
        for column in spec.columns:
            found = json_candidates(types(column), to_arrow_type(column.type), column.is_uuid)
            if isinstance(column.type, T.BooleanType):
                found += (pa.int64(),)  # MySQL has 1 and 0
            self._leaves[column.field] = Leaf(tuple(dict.fromkeys((*likely, *found))))
        self._kept = {c.field: c for c in spec.columns if c.name in spec.kept_by_removals}

    def whole(self, further: Fields | None = None) -> Object:
        """The shape of an image with all columns. Other fields are reported, unless the spec ignores schema changes."""
        fields = self._ordered({**(further or {}), **self._leaves})
        return Object(fields, watched=self._spec.schema_changes != "ignore")

    def before(self) -> Object:
        """The shape of an image of a row before its change."""
        return Object(self._ordered(self._leaves))

    @property
    def may_be_partial(self) -> bool:
        """Whether a column that an update lacks isn't just null."""
        return self._missing != "null" and not self._spec.inserts_only

    def _ordered(self, fields: Fields) -> Fields:
        for name, leaf in self._order.items():
            fields = with_path(fields, name, leaf)
        # When a table's columns are inferred, there are no fields to read. Arrow can't keep the length of a struct
        # without fields, so read one that never exists.
        return fields or {f"{PREFIX}nothing": TEXT}

    def message(self, fields: Fields) -> Object:
        """The shape of a message with `fields`, and with the order columns that are outside its images."""
        shape = dict(fields)
        for name, leaf in self._order.items():
            if not isinstance(fields.get(name.split(".")[0]), Object | ListOf) or "." in name:
                shape = with_path(shape, name, leaf)
        return Object(shape)

    def order(self, *places: pa.StructArray) -> list[pa.Array]:
        """Values of the order columns. For each row, the first of `places` that has a value counts."""
        found = []
        for name in self._order:
            parts = [at_path(place, name) for place in places]
            leaves = [part for part in parts if part is not None and not pa.types.is_nested(part.type)]
            found.append(first(*leaves) if leaves else pa.nulls(len(places[0])))
        return found

    def truncates(self, record: pa.Array, messages: pa.StructArray, mask: pa.Array) -> Iterator[Truncates]:
        """The messages that empty the table: those where `mask` is true."""
        if pc.any(mask).as_py():
            order = [Wire(values.filter(mask)) for values in self.order(messages)]
            yield truncated(record.filter(mask), order)

    def changes(self, rows: Rows, lacks: "Lacks | None" = None) -> Iterator[Changes | Rejected]:
        """The changes that `rows` make to the table.

        :param lacks: tells which rows lack a column. None: it was null then.
        """
        if lacks is not None and self.may_be_partial:
            rows = yield from self._without_partial(rows, lacks)
        updates = pc.equal(rows.kind, int(RowKind.UPDATE_AFTER))
        deletes = pc.equal(rows.kind, int(RowKind.DELETE))
        sets = pc.invert(deletes)
        for mask, image in ((sets, rows.after), (deletes, rows.removed)):
            reasons = pc.binary_join_element_wise("operation '", rows.op, "' has no row", "")
            absent = pc.and_(mask, image.is_null())
            yield from rejected(rows.record, absent, BadRecord.MISSING_COLUMN, reasons)
        sets = pc.and_(sets, rows.after.is_valid())
        after = {column.field: at_field(rows.after, column.field) for column in self._spec.columns}
        yield from self._changes(rows, sets, after, rows.kind, 1, rows.unavailable)

        replaced = pc.and_(updates, pc.and_(rows.after.is_valid(), rows.before.is_valid()))
        if pc.any(replaced).as_py():
            before = self._replaced(rows, self._kept)
            moved = pc.and_(replaced, self._key_changed(before, after))
            if self._spec.trust_before:
                yield from self._changes(rows, pc.and_not(replaced, moved), before, int(RowKind.UPDATE_BEFORE), 0)
            if pc.any(moved).as_py():
                columns = {column.field: column for column in self._spec.columns}
                yield from self._changes(rows, moved, self._replaced(rows, columns), int(RowKind.UPDATE_BEFORE), 0)
        deletes = pc.and_(deletes, rows.removed.is_valid())
        # one that comes before another key's row may be half of a key change (`changelog.moves`)
        last = pc.and_(deletes, pa.array(np.append(sets.to_numpy(zero_copy_only=False)[1:], True)[: len(sets)]))
        for mask, names in ((pc.and_not(deletes, last), self._kept), (last, after)):
            if pc.any(mask).as_py():
                removed = {name: at_field(rows.removed, name) for name in names}
                yield from self._changes(rows, mask, removed, int(RowKind.DELETE), 1)

    def _without_partial(self, rows: Rows, lacks: "Lacks") -> Generator[Rejected, None, Rows]:
        """Reject the updates that lack columns, or note in `Rows.unavailable` which columns they lack, if the table's
        row can complete them. Returns the other rows.

        Other changes may lack columns. A delete needs only its key. An insert lacks the columns that its table didn't
        have yet, so they are null.
        """
        updates = pc.fill_null(pc.equal(rows.kind, int(RowKind.UPDATE_AFTER)), False)
        may_lack = pa.repeat(False, len(rows.op))
        if self._completes:
            old, new = ({f: at_field(image, f) for f in self._spec.key_fields} for image in (rows.before, rows.after))
            may_lack = pc.invert(self._key_changed(old, new))
        rest, unavailable = pa.repeat(True, len(rows.op)), dict[str, pa.Array]()
        lacking = lacks([column.field for column in self._spec.columns], updates)
        for column in self._spec.columns:
            refused = pc.and_(lacking[column.field], rest)
            if column.name in self._spec.key:
                reason = f"key column {column.name} is missing"
            elif self._completes:
                unavailable[column.field] = pc.and_(refused, may_lack)
                refused = pc.and_not(refused, may_lack)
                reason = f"column {column.name} is missing, and the key changed: the value is in the old key's row"
            else:
                reason = (
                    f"column {column.name} is missing, and no update of this table is completed from the table's row. "
                    f"{self._log_whole_rows}, or set {MISSING_COLUMNS}: null in format_options if missing columns are "
                    "null"
                )
            yield from rejected(rows.record, refused, BadRecord.MISSING_COLUMN, reason)
            rest = pc.and_not(rest, refused)
        yield from lacks.rejected(rows.record)
        kept = {name: flags for name, flags in unavailable.items() if pc.any(flags).as_py()}
        return replace(rows, unavailable=kept) if pc.all(rest).as_py() else replace(rows, unavailable=kept).filter(rest)

    def _key_changed(self, before: Mapping[str, pa.Array], after: Mapping[str, pa.Array]) -> pa.Array:
        changed = pa.scalar(False)
        for name in self._spec.key_fields:
            changed = pc.or_(changed, differ(before[name], after[name]))
        return changed

    def _replaced(self, rows: Rows, columns: Mapping[str, ColumnSpec]) -> dict[str, pa.Array]:
        """The old rows of updates.

        :param columns: those that are wanted, by their fields.
        """
        found = {}
        for name, column in columns.items():
            old, new = at_field(rows.before, name), at_field(rows.after, name)
            if column.name in self._spec.key:
                found[name] = first(old, new)  # a key is never null
            elif rows.states_null is None or not self.may_be_partial:
                found[name] = old  # where nulls are left out, a column that `before` lacks may have been null
            else:
                # a null here only means that the old row's partition is unknown
                unchanged = pc.if_else(rows.states_null(name), pa.scalar(None, new.type), new)
                found[name] = first(old, unchanged)
        return found

    def _changes(
        self,
        rows: Rows,
        mask: pa.Array,
        image: Mapping[str, pa.Array],
        kind: pa.Array | int,
        half: int,
        unavailable: Mapping[str, pa.Array] | None = None,
    ) -> Iterator[Changes | Rejected]:
        fields = {}
        for column in self._spec.columns:
            if column.field not in image:
                continue
            values = image[column.field]
            if unavailable and column.field in unavailable:
                values = pc.if_else(unavailable[column.field], pa.scalar(None, values.type), values)
            wire, misfits, phrase = self._spell(column, values)
            fields[column.field] = wire
            is_needed = not isinstance(kind, int) or column.field in self._kept
            if is_needed and misfits is not None and pc.any(misfits := pc.and_(mask, misfits)).as_py():
                reason = f"column {column.name}: {phrase}"
                yield from rejected(rows.record, misfits, BadRecord.TYPE_MISMATCH, reason)
                mask = pc.and_not(mask, misfits)
        count = pc.sum(mask).as_py() or 0
        if not count:
            return

        def where(values: pa.Array) -> pa.Array:
            return values if count == len(mask) else values.filter(mask)

        kinds = pa.repeat(pa.scalar(kind, pa.int8()), len(mask)) if isinstance(kind, int) else kind
        metadata = {"_op": where(rows.op)}
        if rows.time is not None:
            metadata["_ts"] = where(rows.time)
        yield Changes(
            record=where(rows.record),
            kind=where(kinds),
            fields={name: Wire(where(wire.values), wire.type) for name, wire in fields.items()},
            order=[Wire(where(values)) for values in rows.order],
            place=half if rows.place is None else pc.add(pc.multiply(where(rows.place), 2), half),
            snapshot=None if rows.snapshot is None else where(rows.snapshot),
            unknown=rows.unknown,
            metadata=metadata,
            unavailable={name: where(flags) for name, flags in (unavailable or {}).items()},
        )


class ImageFormat(Format):
    """Decodes messages with images of rows.

    :param images: reads the images.
    :param fields: the fields of a message.
    """

    OPTIONS: Mapping[str, tuple[str, ...]] = {MISSING_COLUMNS: MISSING_ARE_UNAVAILABLE}
    DELETES_CARRY_ROW = True
    STATES_KEY = True
    NAMES_TABLE = True
    MAY_LACK_VALUES = True

    def __init__(self, spec: ChangelogSpec, images: ImageReader, fields: Fields) -> None:
        super().__init__(spec)
        self._images = images
        self._reader = JsonReader(images.message(fields))

    def changes(self, records: pa.RecordBatch) -> Iterator[Found]:
        return each(self._reader, records, self._changes)

    def _changes(self, records: pa.RecordBatch, found: Parsed) -> Iterator[Found]:
        """The changes of messages of one spelling."""
        raise NotImplementedError


def truncated(record: pa.Array, order: Sequence[Wire]) -> Truncates:
    """:param record: row numbers of the records that empty the table."""
    return Truncates(record, BadRecord.UNSUPPORTED_EVENT, "the source emptied its table", order)


def each(
    reader: JsonReader,
    records: pa.RecordBatch,
    translate: Callable[[pa.RecordBatch, Parsed], Iterator[Found]],
) -> Iterator[Found]:
    """The results of `translate` for each group of messages, and the messages that `reader` rejects. Null values are
    ignored.
    """
    values = records.column("value")
    rows = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    for found in reader.read(values.drop_null()):
        record = pa.array(rows[found.record.to_numpy()], pa.int64())
        if isinstance(found, Rejected):
            yield Rejected(record, found.error_class, found.reason)
        else:
            yield from translate(records, Parsed(record, found.values, found.unknown))


def rejected(record: pa.Array, mask: pa.Array, error_class: str, reason: pa.Array | str) -> Iterator[Rejected]:
    """Reject the records where `mask` is true, each record once. Yields nothing if `mask` is nowhere true."""
    rows = np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False))
    if len(rows):
        found, places = np.unique(record.to_numpy()[rows], return_index=True)
        reason = reason if isinstance(reason, str) else reason.take(pa.array(rows[places]))
        yield Rejected(pa.array(found, pa.int64()), error_class, reason)


def stated_keys(record: pa.Array, names: pa.Array) -> Iterator[MessageKey]:
    """The keys that messages state for their table.

    :param record: int64; row numbers in the raw batch.
    :param names: names of the key's fields (`NAMES`). Where a value is null, the message states no key. An array of
        another type than list of string states no key either.
    """
    if not is_list(names.type) or not pa.types.is_string(names.type.value_type):
        return
    spelled = pc.binary_join(names, _SEPARATOR).dictionary_encode()
    for number, text_ in enumerate(spelled.dictionary.to_pylist()):
        first_ = pc.min(record.filter(pc.fill_null(pc.equal(spelled.indices, number), False))).as_py()
        yield MessageKey(tuple(text_.split(_SEPARATOR)) if text_ else (), first_)


def removes_partition(sql: pa.Array) -> pa.Array:
    """Flags the statements that drop or empty a partition, and so remove rows."""
    return pc.fill_null(pc.match_substring_regex(text(sql), _REMOVES_PARTITION), False)


def at_field(struct: pa.StructArray, name: str) -> pa.Array:
    """A field's values. A value is null where the struct is null."""
    if not pa.types.is_struct(struct.type):
        return pa.nulls(len(struct))
    return pc.struct_field(struct, [struct.type.get_field_index(name)])


def text(values: pa.Array) -> pa.Array:
    """The values of a leaf as strings. Lists, maps and structs become JSON text."""
    if is_nested(values.type):
        return pa.array([None if v is None else json_text(v, values.type) for v in values.to_pylist()], pa.string())
    return values if pa.types.is_string(values.type) else values.cast(pa.string())


def first(*arrays: pa.Array) -> pa.Array:
    """For each row, the first value that isn't null. If the arrays have different types, the result is text."""
    known = [array for array in arrays if array.null_count < len(array)]
    if not known:
        return arrays[0]
    if len({array.type for array in known}) > 1:
        known = [text(array) for array in known]
    return pc.coalesce(*known)


def differ(before: pa.Array, after: pa.Array) -> pa.Array:
    """Flags the rows where both values exist and their spellings differ. Two spellings may mean the same key; the
    needless -U of such a key does no harm.
    """
    if pa.types.is_null(before.type) or pa.types.is_null(after.type):
        return pa.repeat(False, len(before))
    if pa.types.is_struct(before.type) and before.type == after.type:  # a decimal with a scale of its own
        result = pa.repeat(False, len(before))
        for old, new in zip(before.flatten(), after.flatten(), strict=True):
            result = pc.or_(result, differ(old, new))
        return result
    if before.type != after.type or is_nested(before.type):
        try:
            before, after = text(before), text(after)
        except pa.ArrowInvalid:  # bytes that aren't valid UTF-8
            return pc.and_(before.is_valid(), after.is_valid())
    return pc.fill_null(pc.not_equal(before, after), False)


def says_null(values: pa.Array, name: str) -> pa.Array:
    """Flags the messages (binary) that may have null in a field `name` anywhere. False means that the message surely
    has no such field.
    """
    quoted = re.escape(json.dumps(name, ensure_ascii=False))
    return pc.match_substring_regex(values, rf'(?:{quoted}|\\u[0-9A-Fa-f]{{4}}[^"]*")\s*:\s*null')


class Lacks:
    """Tells which rows have no value for a field, not even null.

    :param values: messages, binary.
    :param side: the field of a message that has the image of its row, or the list of images of its rows.
    :param images: the images of n rows, as read from the messages.
    :param message: for each row, the number of its message in `values`. None: row i is in message i.
    :param place: for each row, its place in the list. None: there is no list.
    :param marked: takes the name of a field and returns which rows are marked as lacking it (bool).
    :param changed: old values of changed fields. A field with one isn't missing: it has become null.
    """

    def __init__(
        self,
        values: pa.Array,
        side: str,
        images: pa.StructArray,
        message: Ints | None = None,
        place: Ints | None = None,
        marked: Callable[[str], pa.Array] | None = None,
        changed: pa.StructArray | None = None,
    ) -> None:
        self._changed = changed
        self._values = values
        self._side = side
        self._images = images
        self._message = np.arange(len(values)) if message is None else message
        self._place = place
        self._marked = marked
        self._parsed: dict[int, Any] = {}
        self._too_deep: set[int] = set()

    def __call__(self, names: Sequence[str], among: pa.Array) -> dict[str, pa.Array]:
        """For each field, flags of the rows whose image lacks it. A field with null isn't missing.

        :param among: flags the rows that matter; the others get false.
        """
        found, open_ = dict[str, npt.NDArray[np.bool_]](), dict[str, Ints]()
        among = pc.and_(among, self._images.is_valid())
        for name in names:
            marked = pc.and_(among, self._marked(name) if self._marked is not None else pa.scalar(False))
            found[name] = marked.to_numpy(zero_copy_only=False).copy()
            absent = pc.and_not(pc.and_(among, at_field(self._images, name).is_null()), marked)
            if self._changed is not None:
                absent = pc.and_not(absent, at_field(self._changed, name).is_valid())
            if len(nulls := np.flatnonzero(absent)) and len(unstated := self._unstated(name, nulls)):
                open_[name] = unstated
        if open_:
            unread = self._unread(np.unique(np.concatenate(list(open_.values()))))
            for name, rows in open_.items():
                found[name][rows] = True
                for row in np.intersect1d(rows, unread).tolist():
                    image = self._image(row)
                    found[name][row] = image is not None and name not in image
        return {name: pa.array(flags) for name, flags in found.items()}

    def rejected(self, record: pa.Array) -> Iterator[Rejected]:
        """Reject the rows of which it couldn't be told.

        :param record: int64; the rows' messages, by row number in the raw batch.
        """
        if self._too_deep:
            deep = pa.array(np.isin(self._message, list(self._too_deep)))
            yield from rejected(record, deep, BadRecord.UNPARSEABLE, "the value is nested too deeply")

    def _unstated(self, name: str, rows: Ints) -> Ints:
        """The rows, of those whose value is null, whose image isn't seen to have the field. Most rows state their
        nulls.
        """
        field = rf"{_NESTED}{_name(name)}{_NESTED}"
        unstated: Ints = rows[~self._matches(self._pattern(field), rows)]
        return unstated

    def _unread(self, rows: Ints) -> Ints:
        """The rows whose image `_unstated` can't see, or may have names with escapes: their messages must be parsed."""
        plain = self._matches(self._pattern(_NESTED), rows) & ~self._matches(r"\\[u/]", rows)
        unread: Ints = rows[~plain]
        return unread

    def _matches(self, pattern: str, rows: Ints) -> npt.NDArray[np.bool_]:
        texts = self._values.take(pa.array(self._message[rows]))
        matches: npt.NDArray[np.bool_] = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
        return matches

    def _pattern(self, content: str) -> str:
        """Matches a message by what is between the braces of its image. In a list, the image must be the only one."""
        image = rf"\{{{content}\}}" if self._place is None else rf"\[\s*\{{{content}\}}\s*\]"
        return rf"^\s*\{{{_NESTED}{_name(self._side)}{image}"

    def _image(self, row: int) -> Any:
        """The image of a row as Python has it. None if its message is nested too deeply."""
        message = int(self._message[row])
        if message not in self._parsed:
            try:
                self._parsed[message] = parse(self._values[message].as_py())[self._side]
            except RecursionError:
                self._parsed[message] = None
                self._too_deep.add(message)
        images = self._parsed[message]
        return images if images is None or self._place is None else images[int(self._place[row])]


def _name(field: str) -> str:
    """A pattern for the name of a field of an object."""
    return rf"{re.escape(json.dumps(field, ensure_ascii=False))}\s*:\s*"


# Spellings that several tools have in common.


def is_binary(column: ColumnSpec) -> bool:
    return isinstance(column.type, T.BinaryType) and not column.is_uuid


def spell_plain(column: ColumnSpec, values: pa.Array) -> Spelled:
    """Values without conversion; bytes are base64."""
    return Wire(values, bytes_type(column)), None, ""


def bytes_type(column: ColumnSpec) -> WireType:
    """Bytes are base64. The messages don't tell the types of other values."""
    return WireType("bytes") if is_binary(column) else WireType()


def timestamps(values: pa.Array) -> pa.Array:
    """ISO 8601 texts as timestamp[us, UTC]. A text without a zone is in UTC. Null where a text isn't a timestamp or
    names another zone.
    """
    if not pa.types.is_string(values.type):
        return pa.nulls(len(values), pa.timestamp("us", "UTC"))
    plain = pc.replace_substring_regex(values, r"(?:Z|\+00:?00)$", "")
    plain = pc.replace_substring_regex(plain, r"^(\d{4}-\d\d-\d\d)[T: ]", r"\1T")
    wanted = pc.match_substring_regex(
        plain, r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?$"
    )
    plain = pc.if_else(wanted, plain, pa.scalar(None, pa.string()))
    try:
        return plain.cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))
    except pa.ArrowInvalid:  # 30 February
        return pa.array([_timestamp(value) for value in plain.to_pylist()], pa.timestamp("us", "UTC"))


def _timestamp(value: str | None) -> Any:
    try:
        return None if value is None else pa.scalar(value).cast(pa.timestamp("us")).as_py()
    except pa.ArrowInvalid:
        return None


def epoch(values: pa.Array, unit_micros: int) -> pa.Array:
    """Integers since 1970-01-01 as timestamp[us, UTC]. Null where a value isn't an integer, or is too large.

    :param unit_micros: microseconds in a unit of the integers.
    """
    if not pa.types.is_int64(values.type):
        return pa.nulls(len(values), pa.timestamp("us", "UTC"))
    limit = (2**63 - 1) // unit_micros
    fits = pc.and_(pc.less_equal(values, limit), pc.greater_equal(values, -limit))
    values = pc.if_else(fits, values, pa.scalar(None, pa.int64()))
    return pc.multiply(values, unit_micros).cast(pa.timestamp("us", "UTC"))
