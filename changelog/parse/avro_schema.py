"""Avro schemas: how a value is encoded, which Arrow type it is read as, and what it means in Kafka Connect's terms.

Values are read in their Avro encoding, and the `WireType` has their meaning. For example, a decimal is read as bytes,
with the name `org.apache.kafka.connect.data.Decimal` and a `scale`. Connect's converters write `connect.name`,
`connect.parameters` and `connect.type` into a schema. These count more than Avro's `logicalType`, which says less: a
`io.debezium.time.MicroTimestamp` has no logical type, like a plain long.

| Avro                      | Arrow                         | kind                  | name, without a `connect.name` |
|---------------------------|-------------------------------|-----------------------|---|
| boolean, int, long        | bool, int32, int64            | boolean, int32, int64 |  |
| float, double             | float, double                 | float, double         |  |
| string, enum              | string                        | string                |  |
| bytes, fixed              | binary                        | bytes                 |  |
| array, map, record        | list, map, struct             | array, map, struct    |  |
| [null, T]                 | T, with nulls                 | T's                   |  |
| decimal                   | binary: unscaled bytes        | bytes                 | `…connect.data.Decimal` |
| date                      | int32: days                   | int32                 | `…connect.data.Date` |
| time-millis               | int32                         | int32                 | `…connect.data.Time` |
| time-micros               | int64                         | int64                 | `io.debezium.time.MicroTime` |
| timestamp-millis, …       | int64: a point in time        | int64                 | `timestamp-millis`, … |
| local-timestamp-millis, … | int64: wall clock             | int64                 | `io.debezium.time.Timestamp`, … |
| uuid                      | string, or binary of 16 bytes | string, bytes         | `io.debezium.data.Uuid` |

Avro's timestamps keep Avro's names, since they are points in time. Debezium's timestamps are wall clock times, and
Connect's timestamps may be either.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
from fastavro.schema import SchemaParseException, UnknownType, parse_schema

from changelog.changes import WireType

_KINDS = {
    "boolean": ("boolean", pa.bool_()),
    "int": ("int32", pa.int32()),
    "long": ("int64", pa.int64()),
    "float": ("float", pa.float32()),
    "double": ("double", pa.float64()),
    "bytes": ("bytes", pa.binary()),
    "fixed": ("bytes", pa.binary()),
    "string": ("string", pa.string()),
    "enum": ("string", pa.string()),
    "null": ("", pa.null()),
}
_LOGICAL = {
    ("bytes", "decimal"): "org.apache.kafka.connect.data.Decimal",
    ("fixed", "decimal"): "org.apache.kafka.connect.data.Decimal",
    ("int", "date"): "org.apache.kafka.connect.data.Date",
    ("int", "time-millis"): "org.apache.kafka.connect.data.Time",
    ("long", "time-micros"): "io.debezium.time.MicroTime",
    ("long", "timestamp-millis"): "timestamp-millis",
    ("long", "timestamp-micros"): "timestamp-micros",
    ("long", "timestamp-nanos"): "timestamp-nanos",
    ("long", "local-timestamp-millis"): "io.debezium.time.Timestamp",
    ("long", "local-timestamp-micros"): "io.debezium.time.MicroTimestamp",
    ("long", "local-timestamp-nanos"): "io.debezium.time.NanoTimestamp",
    ("string", "uuid"): "io.debezium.data.Uuid",
    ("fixed", "uuid"): "io.debezium.data.Uuid",
}
_DEFAULT = "rowdelta.default"
_MAX_DEPTH = 60
_MOST_TYPES = 100_000
"""A schema may have at most this many types, where a named type counts each time. Each is a step of the reader."""


class SchemaError(ValueError):
    """The text is not an Avro schema, or the schema can't be found."""


class UnsupportedSchemaError(ValueError):
    """The schema is valid, but no column type fits it: it is a recursive record or a union of several types."""


@dataclass(eq=False)
class Node:
    """A type of an Avro schema. A named type is one node, even if the schema uses it twice, so nodes may form loops.

    :param kind: Avro's name of the type: int, string, record, union, …
    :param properties: the type's JSON object in the schema.
    :param branches: types of a union, in order.
    :param fields: fields of a record, in order.
    :param defaults: defaults of a record's fields that have one which isn't null.
    :param element: type of the elements of an array, or of the values of a map.
    :param symbols: symbols of an enum.
    :param size: size of a fixed, in bytes.
    """

    kind: str
    properties: Mapping[str, Any] = field(default_factory=dict)
    branches: list["Node"] = field(default_factory=list)
    fields: dict[str, "Node"] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    element: "Node | None" = None
    symbols: list[str] = field(default_factory=list)
    size: int = 0

    @cached_property
    def value(self) -> "Node":
        """The other type if the node is a union of null and one other type, else the node itself."""
        others = [branch for branch in self.branches if branch.kind != "null"]
        return others[0] if self.kind == "union" and len(others) == 1 else self

    @property
    def item(self) -> "Node":
        assert self.element is not None
        return self.element

    @cached_property
    def is_entries(self) -> bool:
        """Whether the array is a map: Connect writes maps whose keys aren't strings as arrays of key-value records.
        Keys that may be null don't count, since Arrow's maps can't have null keys.
        """
        if self.kind != "array" or self.item.properties.get("connect.internal.type") != "MapEntry":
            return False
        return set(self.item.fields) == {"key", "value"} and self.item.fields["key"].kind not in ("union", "null")

    def arrow(self) -> pa.DataType:
        """The Arrow type that values are read as.

        :raises UnsupportedSchemaError: no Arrow type fits the schema.
        """
        return self._arrow(())

    def _arrow(self, above: tuple["Node", ...]) -> pa.DataType:
        node = self._supported(above)
        above = (*above, node)
        if node.kind == "record":
            return pa.struct([(name, child._arrow(above)) for name, child in node.fields.items()])
        if node.is_entries:
            key, value = node.item.fields["key"], node.item.fields["value"]
            return pa.map_(key._arrow(above), value._arrow(above))
        if node.kind == "array":
            return pa.list_(node.item._arrow(above))
        if node.kind == "map":
            return pa.map_(pa.string(), node.item._arrow(above))
        return _KINDS[node.kind][1]

    def wire_type(self) -> WireType:
        """The meaning of the values in Kafka Connect's terms.

        :raises UnsupportedSchemaError: no column type fits the schema.
        """
        return self._wire_type(())

    def _wire_type(self, above: tuple["Node", ...]) -> WireType:
        node = self._supported(above)
        above = (*above, node)
        children: dict[str, WireType] = {}
        if node.kind == "record":
            kind = "struct"
            children = {name: child._wire_type(above) for name, child in node.fields.items()}
        elif node.is_entries:
            kind = "map"
            children = {name: node.item.fields[name]._wire_type(above) for name in ("key", "value")}
        elif node.kind == "array":
            kind, children = "array", {"element": node.item._wire_type(above)}
        elif node.kind == "map":
            kind = "map"
            children = {"key": WireType("string"), "value": node.item._wire_type(above)}
        else:
            kind = _KINDS[node.kind][0]
            if node.kind == "int" and node.properties.get("connect.type") in ("int8", "int16"):
                kind = node.properties["connect.type"]
        name, parameters = _meaning(node)
        return WireType(kind, name, parameters, children)

    def _supported(self, above: tuple["Node", ...]) -> "Node":
        node = self.value
        if node.kind == "union":
            raise UnsupportedSchemaError(
                f"a union of {', '.join(branch.kind for branch in node.branches) or 'nothing'}"
            )
        if node in above:
            raise UnsupportedSchemaError("a record that contains itself")
        return node

    @property
    def children(self) -> list["Node"]:
        """The types in it."""
        return [*self.branches, *self.fields.values(), *([] if self.element is None else [self.element])]

    @cached_property
    def is_empty(self) -> bool:
        """Whether values of this type take no bytes."""
        if self.kind == "record":
            return all(child.is_empty for child in self.fields.values())
        return self.kind == "null" or (self.kind == "fixed" and self.size == 0)


def parse(text: str, references: Iterable[str] = ()) -> Node:
    """The type that a schema describes.

    :param text: the schema as JSON.
    :param references: schemas whose named types `text` uses. Each comes after the schemas that it uses itself.
    :raises SchemaError: the text isn't an Avro schema.
    """
    named: dict[str, Any] = {}
    try:
        for other in references:
            parse_schema(_without_defaults(json.loads(other)), named)
        parsed = parse_schema(_without_defaults(json.loads(text)), named)
        node = _node(parsed, named, {}, 0)
        _check_unfolded(node)
        return node
    except SchemaError:
        raise  # while the references were fetched
    except (
        SchemaParseException,
        UnknownType,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise SchemaError(f"{type(error).__name__}: {error}") from None


def _check_unfolded(node: Node) -> None:
    """Refuse a short schema that unfolds to very many types, such as records that each contain the next one twice.

    :raises ValueError: it unfolds to too many types, a record contains itself in every value, or an array has values
        that take no bytes.
    """
    sizes: dict[int, int] = {}
    unfolding: set[int] = set()

    def size(node: Node) -> int:
        if id(node) not in sizes:
            if id(node) in unfolding:
                return 1  # behind a union, an array or a map, so each step takes a byte of the message
            unfolding.add(id(node))
            sizes[id(node)] = found = 1 + sum(map(size, node.children))
            unfolding.discard(id(node))
            if found > _MOST_TYPES:
                raise ValueError(f"it unfolds to more than {_MOST_TYPES:,} types")
        return sizes[id(node)]

    ended: set[int] = set()

    def descend(record: Node, above: frozenset[int]) -> None:
        if id(record) in above:
            raise ValueError("a record that contains itself in every value")
        if id(record) not in ended:
            for child in record.fields.values():
                if child.kind == "record":
                    descend(child, above | {id(record)})
            ended.add(id(record))

    def walk(node: Node, seen: dict[int, Node]) -> None:
        if id(node) not in seen:
            seen[id(node)] = node
            if node.kind == "record":
                descend(node, frozenset())
            for child in node.children:
                walk(child, seen)

    size(node)
    nodes: dict[int, Node] = {}
    walk(node, nodes)
    if any(one.kind == "array" and one.item.is_empty for one in nodes.values()):
        # such an array could have any number of elements in a short message
        raise ValueError("an array of values that take no bytes")


def _without_defaults(schema: Any) -> Any:
    """The schema with default values under another name, since fastavro refuses some that other libraries accept."""
    if isinstance(schema, list):
        return [_without_defaults(item) for item in schema]
    if isinstance(schema, dict):
        left_out = {"default"} if _is_valid(schema) else {"default", "logicalType"}
        kept = {_DEFAULT: schema["default"]} if schema.get("default") is not None and "name" in schema else {}
        return kept | {
            name: _without_defaults(value) if name in ("type", "fields", "items", "values") else value
            for name, value in schema.items()
            if name not in left_out
        }
    return schema


def _is_valid(schema: Mapping[str, Any]) -> bool:
    """Whether the logical type isn't that of decimals, or is valid. Readers ignore an invalid one (Avro's
    specification, "Logical Types"), and fastavro refuses it. Kafka Connect says the scale too: Postgres has
    `numeric(5,-2)`.
    """
    if schema.get("logicalType") != "decimal":
        return True
    scale, precision = schema.get("scale", 0), schema.get("precision")
    return isinstance(scale, int) and isinstance(precision, int) and 0 <= scale <= precision


def _node(schema: Any, named: Mapping[str, Any], built: dict[str, Node], depth: int) -> Node:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(schema, list):
        return Node("union", branches=[_node(branch, named, built, depth + 1) for branch in schema])
    if isinstance(schema, str):
        if schema in _KINDS:
            return Node(schema)
        return built[schema] if schema in built else _node(named[schema], named, built, depth + 1)
    kind = schema["type"]
    if not isinstance(kind, str):
        return _node(kind, named, built, depth + 1)
    if kind in ("record", "error"):
        # register the record before its fields, because the fields may refer to it
        node = built[schema["name"]] = Node("record", schema)
        node.fields = {one["name"]: _node(one["type"], named, built, depth + 1) for one in schema["fields"]}
        node.defaults = {one["name"]: one[_DEFAULT] for one in schema["fields"] if _DEFAULT in one}
    elif kind == "enum":
        node = built[schema["name"]] = Node(kind, schema, symbols=list(schema["symbols"]))
    elif kind == "fixed":
        node = built[schema["name"]] = Node(kind, schema, size=int(schema["size"]))
        if node.size < 0:
            raise ValueError("a fixed of negative size")
    elif kind == "array":
        node = Node(kind, schema, element=_node(schema["items"], named, built, depth + 1))
    elif kind == "map":
        node = Node(kind, schema, element=_node(schema["values"], named, built, depth + 1))
    elif kind in _KINDS:
        node = Node(kind, schema)
    else:
        return _node(kind, named, built, depth + 1)
    return node


def _meaning(node: Node) -> tuple[str | None, dict[str, str]]:
    """Name and parameters of the logical type."""
    properties = node.properties
    parameters = {str(k): str(v) for k, v in (properties.get("connect.parameters") or {}).items()}
    name = properties.get("connect.name")
    if name is None:
        name = _LOGICAL.get((node.kind, str(properties.get("logicalType"))))
        if (node.kind, properties.get("logicalType")) == ("fixed", "uuid") and node.size != 16:
            name = None
    if name == "org.apache.kafka.connect.data.Decimal":
        # the scale is 0 unless it is given
        parameters.setdefault("scale", str(properties.get("scale", 0)))
        if "precision" in properties:
            parameters.setdefault("connect.decimal.precision", str(properties["precision"]))
    return name, parameters
