"""Reads messages in Confluent's wire format into Arrow. It groups messages by schema, and reads each group at once.

Two messages of one batch may have different schemas. A plan for each schema says which fields to read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Rejected, Wire, WireType
from changelog.parse.avro_body import Want, arrow_type, read_bodies
from changelog.parse.avro_schema import Node, SchemaError, UnsupportedSchemaError
from changelog.parse.schema_registry import HEADER_BYTES, Schemas, by_schema, client_settings, connect
from changelog.rows import BadRecord
from changelog.spec import ChangelogSpec

Path = tuple[str, ...]


class RefusedError(ValueError):
    """Messages of a schema can't be used.

    :param error_class: one of `BadRecord`.
    """

    def __init__(self, error_class: str, reason: str) -> None:
        super().__init__(reason)
        self.error_class = error_class


@dataclass(frozen=True)
class Read:
    """Messages of one schema.

    :param record: int64; row numbers in the raw batch.
    :param schema: the messages' schema.
    :param values: the part of each message that the plan wants, in the Arrow type of the schema.
    """

    record: pa.Array
    schema: Node
    values: pa.Array

    def array(self, path: Path) -> pa.Array | None:
        """The values at `path`; None if the schema or the plan has no such field."""
        dtype = self.values.type
        for name in path:
            if not pa.types.is_struct(dtype) or dtype.get_field_index(name) < 0:
                return None
            dtype = dtype.field(name).type
        return pc.struct_field(self.values, list(path))

    def wire(self, path: Path) -> Wire | None:
        """The values at `path`, with their meaning. The plan must want the whole field."""
        values = self.array(path)
        if values is None:
            return None
        node = self.schema
        for name in path:
            node = node.value.fields[name]
        return Wire(values, node.wire_type())


class AvroReader:
    """Reads messages.

    :param schemas: returns the source of schemas.
    :param plan: takes a schema and returns what to read of its messages. It raises `RefusedError` if messages of this
        schema can't be used.
    """

    def __init__(self, schemas: Callable[[], Schemas], plan: Callable[[Node], Want]) -> None:
        self._connect = schemas
        self._plan = plan
        self._plans: dict[int, tuple[Node, Want]] = {}

    @cached_property
    def _schemas(self) -> Schemas:
        return self._connect()

    def read(self, values: pa.BinaryArray) -> Iterator[Read | Rejected]:
        """Read the messages in `values`, except nulls."""
        rows = np.flatnonzero(values.is_valid())
        present = values if len(rows) == len(values) else values.drop_null()
        for schema_id, chosen in by_schema(present):
            record = pa.array(rows[chosen.to_numpy()])
            try:
                schema, want = self._schema(schema_id)
            except RefusedError as refused:
                yield Rejected(record, refused.error_class, str(refused))
                continue
            bodies = present if len(chosen) == len(present) else present.take(chosen)
            read, good = read_bodies(schema, bodies, HEADER_BYTES, want)
            if not good.all():
                reason = f"the body doesn't fit its schema, id {schema_id}"
                yield Rejected(record.filter(pa.array(~good)), BadRecord.UNPARSEABLE, reason)
                record, read = record.filter(pa.array(good)), read.filter(pa.array(good))
            if len(record):
                yield Read(record, schema, read)

    def _schema(self, schema_id: int | None) -> tuple[Node, Want]:
        if schema_id is None:
            raise RefusedError(BadRecord.UNPARSEABLE, "not in Confluent's wire format: a zero byte, a schema id, Avro")
        if schema_id not in self._plans:
            try:
                schema = self._schemas.get(schema_id)
            except SchemaError as error:
                raise RefusedError(BadRecord.UNPARSEABLE, str(error)) from None
            self._plans[schema_id] = schema, self._plan(schema)
        return self._plans[schema_id]


def registry(spec: ChangelogSpec) -> Callable[[], Schemas]:
    """A function that connects to the registry of the table's options. A task calls it when it has messages, so the
    driver never connects.

    :raises BadOptionError: an option is malformed.
    """
    client_settings(spec.options)
    return lambda: connect(spec.options)


def wanted(schema: Node, paths: Iterable[Path]) -> dict[str, Want]:
    """What to read of a record for the fields at `paths`. Fields that the schema lacks are left out.

    :raises RefusedError: the type of a field can't be read.
    """
    result: dict[str, Want] = {}
    for path in paths:
        name, rest = path[0], path[1:]
        child = schema.value.fields.get(name)
        if child is None or result.get(name) is True:
            continue
        if not rest:
            result[name] = check(child, True, f"column {name}")
            continue
        inner = wanted(child, [rest])
        if inner:
            result[name] = _merged(result.get(name, {}), inner)
    return result


def unknown(row: Node, known: Sequence[str]) -> dict[str, WireType]:
    """The fields of a row that aren't in `known`. Fields whose type can't be a column's are left out."""
    found = {}
    for name, child in row.value.fields.items():
        if name not in known:
            try:
                wire = child.wire_type()
            except UnsupportedSchemaError:
                continue
            default = row.value.defaults.get(name)
            if wire.kind == "bytes" and isinstance(default, str):
                default = default.encode("latin-1", "replace")  # Avro's specification, "Complex Types"
            found[name] = replace(wire, default=default)
    return found


def missing(row: Node, known: Sequence[str]) -> list[str]:
    """The names in `known` that aren't fields of the row."""
    return [name for name in known if name not in row.value.fields]


def order_paths(spec: ChangelogSpec) -> list[Path]:
    return [tuple(name.split(".")) for name, _ in spec.order_fields]


def check(schema: Node, want: Want, what: str) -> Want:
    """`want`, if values of this schema can be read.

    :param what: names them in the message of the error.
    :raises RefusedError: the type can't be read.
    """
    try:
        arrow_type(schema, want)
    except UnsupportedSchemaError as error:
        raise RefusedError(BadRecord.TYPE_MISMATCH, f"{what}: its schema is {error}") from None
    return want


def _merged(one: Want, other: Want) -> Want:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one is True or other is True
    return {name: _merged(one.get(name, {}), other.get(name, {})) for name in {**one, **other}}


def prefixed(prefix: str, reason: pa.Array | str) -> pa.Array | str:
    """One reason, or an array of them, after `prefix`."""
    return prefix + reason if isinstance(reason, str) else pc.binary_join_element_wise(prefix, reason, "")
