"""Data files, deletion vectors, partition values and statistics as PROTOCOL.md defines them: the part of the model that
reads what is beside the log. It shares no code with the sink, and none with Delta.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from tests.delta.violations import ProtocolViolation, require

Action = Mapping[str, Any]

_PRIMITIVES = {
    "string": pa.string(),
    "long": pa.int64(),
    "integer": pa.int32(),
    "short": pa.int16(),
    "byte": pa.int8(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
_DECIMAL = re.compile(r"decimal\((\d+), ?(\d+)\)")
_TIME = re.compile(
    r"(?P<date>[+-]?\d{4,}-\d\d-\d\d)([ T](?P<time>\d\d:\d\d:\d\d(\.\d{1,6})?)(?P<zone>Z|[+-]\d\d:\d\d)?)?"
)
_PATH = re.compile(r"(?:[A-Za-z0-9\-_.!~*'();/:@&=+$,]|[^\x00-\x9f]|%[0-9A-Fa-f]{2})+")
"""RFC 2396, plus characters beyond ASCII, which Java's URI leaves as they are, and Delta's own writer with it."""
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_MAGIC = 1681511377


@dataclass(frozen=True)
class TableSchema:
    """What of a `metaData` and `protocol` action decides how files are read.

    :param fields: struct fields of the schema, as in its JSON.
    :param mapping: `none`, `name` or `id`.
    """

    fields: Sequence[Action]
    partition_columns: Sequence[str]
    mapping: str
    may_widen: bool

    @property
    def arrow(self) -> pa.Schema:
        return pa.schema([(field["name"], arrow_type(field["type"])) for field in self.fields])

    def physical_name(self, field: Action) -> str:
        """The name in data files, partition values and statistics ("Column Mapping")."""
        name = field["name"] if self.mapping == "none" else field["metadata"]["delta.columnMapping.physicalName"]
        assert isinstance(name, str)
        return name

    @property
    def partition_fields(self) -> dict[str, Action]:
        """Physical name -> field."""
        return {self.physical_name(f): f for f in self.fields if f["name"] in self.partition_columns}


def arrow_type(type_: Any) -> pa.DataType:
    """The Arrow type of a type of the schema's JSON ("Schema Serialization Format")."""
    if isinstance(type_, str):
        if match := _DECIMAL.fullmatch(type_):
            return pa.decimal128(int(match[1]), int(match[2]))
        require(type_ in _PRIMITIVES, "known type", type_)
        return _PRIMITIVES[type_]
    if type_["type"] == "struct":
        return pa.struct([(field["name"], arrow_type(field["type"])) for field in type_["fields"]])
    if type_["type"] == "array":
        return pa.list_(arrow_type(type_["elementType"]))
    return pa.map_(arrow_type(type_["keyType"]), arrow_type(type_["valueType"]))


def decoded(path: str) -> str:
    """The file path that a URI of an action stands for: relative to the table, or absolute.

    :raises ProtocolViolation: it isn't a URI, or names a file outside of the table or in a hidden folder.
    """
    require(_PATH.fullmatch(path), "path is a URI", path)
    uri = urlsplit(path)
    if uri.scheme:
        require(path.startswith(f"{uri.scheme}:/"), "absolute path names its place", path)
        return unquote(uri.path)
    parts = unquote(path, errors="strict").split("/")
    require(all(parts) and not {".", ".."} & set(parts), "relative path stays below the table", path)
    return "/".join(parts)


def partition_value(text: str | None, type_: Any) -> pa.Scalar:
    """A partition value's text ("Partition Value Serialization").

    :raises ProtocolViolation: the text isn't a value of this type.
    """
    arrow = arrow_type(type_)
    if text is None or text == "":
        return pa.scalar(None, arrow)
    try:
        return _parsed(text, type_)
    except (ValueError, ArithmeticError, pa.ArrowInvalid) as error:
        raise ProtocolViolation("partition value is of its column's type", f"{text!r} as {type_}") from error


def _parsed(text: str, type_: str) -> pa.Scalar:
    arrow = arrow_type(type_)
    if pa.types.is_integer(arrow):
        if not re.fullmatch(r"-?\d+", text):
            raise ValueError(text)
        return pa.scalar(int(text), arrow)
    if pa.types.is_floating(arrow):
        return pa.scalar(float(text), arrow)
    if pa.types.is_decimal(arrow):
        return pa.scalar(Decimal(text), arrow)
    if pa.types.is_boolean(arrow):
        return pa.scalar(bool(("false", "true").index(text)))
    if pa.types.is_temporal(arrow):
        count = _temporal(text, type_)
        return pa.array([count], pa.int32() if type_ == "date" else pa.int64()).cast(arrow)[0]
    return pa.scalar(text.encode() if pa.types.is_binary(arrow) else text, arrow)


def _temporal(text: str, type_: str) -> int:
    """Days or microseconds since 1970. Without a time zone, a timestamp is in UTC."""
    match = _TIME.fullmatch(text)
    if match is None or (type_ == "date" and match["time"]) or (type_ != "timestamp" and match["zone"]):
        raise ValueError(text)
    moment = match["date"] + (f"T{match['time']}" if match["time"] else "")
    value = int(np.array(moment, "datetime64[D]" if type_ == "date" else "datetime64[us]").astype(np.int64))
    if match["zone"] and match["zone"] != "Z":
        hours, minutes = match["zone"][1:].split(":")
        value -= int(match["zone"][0] + "1") * (int(hours) * 60 + int(minutes)) * 60_000_000
    return value


def z85_decoded(text: str) -> bytes:
    """ZeroMQ's RFC 32: five characters are four bytes.

    :raises ProtocolViolation: it isn't Z85.
    """
    require(len(text) % 5 == 0 and set(text) <= set(_Z85), "vector is Z85", text)
    digits = np.array([_Z85.index(character) for character in text], np.int64).reshape(-1, 5)
    values = digits @ np.array([85**4, 85**3, 85**2, 85, 1])
    require((values < 2**32).all(), "vector is Z85", text)
    return bytes(values.astype(">u4").tobytes())


def vector_id(action: Action) -> str | None:
    """`deletionVector.uniqueId` of an `add` or `remove` ("Derived Fields")."""
    vector = action.get("deletionVector")
    if vector is None:
        return None
    offset = vector.get("offset")
    return f"{vector['storageType']}{vector['pathOrInlineDv']}" + ("" if offset is None else f"@{offset}")


def vector_path(table: Path, vector: Action) -> Path:
    """The file of a vector with storage type `u` or `p` ("Derived Fields")."""
    text = vector["pathOrInlineDv"]
    if vector["storageType"] == "p":
        return Path(decoded(text))
    require(len(text) >= 20, "vector's uuid has 20 characters", text)
    return Path(table, text[:-20], f"deletion_vector_{UUID(bytes=z85_decoded(text[-20:]))}.bin")


def deleted_rows(table: Path, vector: Action) -> BitMap64:
    """The positions in a vector ("Deletion Vector Format").

    :raises ProtocolViolation: the file is missing or damaged, or isn't what the descriptor says.
    """
    size = vector["sizeInBytes"]
    if vector["storageType"] == "i":
        require(vector.get("offset") is None, "inline vector has no offset", vector)
        data = z85_decoded(vector["pathOrInlineDv"])
        require(0 <= len(data) - size < 4, "vector's size", f"{len(data)} bytes")
        data = data[:size]
    else:
        path, offset = vector_path(table, vector), vector.get("offset") or 0
        require(path.is_file(), "vector's file exists", path)
        blob = path.read_bytes()
        require(blob[:1] == b"\x01", "vector file's format version is 1", blob[:1])
        require(offset > 0 and offset + 8 + size <= len(blob), "vector lies in its file", f"{len(blob)} bytes")
        require(struct.unpack_from(">i", blob, offset)[0] == size, "vector's size", blob[offset : offset + 4])
        data = blob[offset + 4 : offset + 4 + size]
        (checksum,) = struct.unpack_from(">I", blob, offset + 4 + size)
        require(checksum == zlib.crc32(data), "vector's checksum", f"{checksum} and {zlib.crc32(data)}")
    require(len(data) > 4 and struct.unpack_from("<i", data)[0] == _MAGIC, "vector's magic number", data[:4])
    try:
        rows = BitMap64.deserialize(data[4:])
    except ValueError as error:
        raise ProtocolViolation("vector is a 64-bit Roaring bitmap", error) from error
    require(len(rows) == vector["cardinality"], "vector's cardinality", len(rows))
    require(not rows or rows.max() < 2**63, "vector's positions are positive", "key's first bit")
    return rows


@dataclass(frozen=True)
class LogicalFile:
    """The content of a data file and a vector.

    :param columns: all rows of the data file, with the table's columns.
    :param live: for each row, whether it is in the table.
    """

    columns: pa.Table
    live: Any

    @property
    def rows(self) -> pa.Table:
        return self.columns.filter(pa.array(self.live))


def read(table: Path, add: Action, schema: TableSchema) -> LogicalFile:
    """Read the file of an `add`.

    :raises ProtocolViolation: file and action, or file and schema, contradict each other.
    """
    path = Path(table, decoded(add["path"]))
    require(path.is_file(), "data file exists", path)
    require(path.stat().st_size == add["size"], "data file's size", path.stat().st_size)
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        read_ = file.read()
        columns = _Columns(schema, any(file.schema.column(i).physical_type == "INT96" for i in range(len(file.schema))))
    arrays = []
    children = [column.combine_chunks() for column in read_.columns]
    for field in schema.fields:
        if field["name"] in schema.partition_columns:
            value = partition_value(add["partitionValues"][schema.physical_name(field)], field["type"])
            arrays.append(pa.repeat(value, read_.num_rows))
        else:
            found = columns.child(list(read_.schema), children, field)
            arrays.append(columns.conformed(found, field["type"], read_.num_rows))
    live = np.ones(read_.num_rows, bool)
    if (vector := add.get("deletionVector")) is not None:
        dead = np.fromiter(deleted_rows(table, vector), np.int64)
        require(dead.max(initial=-1) < read_.num_rows, "vector's positions are in the data file", dead.max(initial=-1))
        live[dead] = False
    file_ = LogicalFile(pa.Table.from_arrays(arrays, schema=schema.arrow), live)
    for field in schema.fields:
        if not field["nullable"]:
            require(file_.rows[field["name"]].null_count == 0, "no null in a column that isn't nullable", field["name"])
    return file_


@dataclass(frozen=True)
class _Columns:
    """Finds a file's columns, and converts them to the table's types."""

    schema: TableSchema
    has_int96: bool

    def child(self, fields: Sequence[pa.Field], arrays: Sequence[pa.Array], field: Action) -> pa.Array | None:
        """The column of a schema's field: by its id or name; None if the file lacks it."""
        if self.schema.mapping == "id":
            wanted: Any = str(field["metadata"]["delta.columnMapping.id"]).encode()
            names: list[Any] = [(f.metadata or {}).get(b"PARQUET:field_id") for f in fields]
        else:
            wanted, names = self.schema.physical_name(field), [f.name for f in fields]
        return arrays[names.index(wanted)] if wanted in names else None

    def conformed(self, array: pa.Array | None, type_: Any, length: int) -> pa.Array:
        if array is None:
            return pa.nulls(length, arrow_type(type_))
        if isinstance(type_, str):
            return self._widened(array, arrow_type(type_))
        if type_["type"] == "struct":
            require(pa.types.is_struct(array.type), "data file's types", f"{array.type} is no struct")
            fields, inner = list(array.type), array.flatten()
            children = [
                self.conformed(self.child(fields, inner, field), field["type"], length) for field in type_["fields"]
            ]
            return pa.StructArray.from_arrays(children, [f["name"] for f in type_["fields"]], mask=array.is_null())
        if type_["type"] == "array":
            require(pa.types.is_list(array.type), "data file's types", f"{array.type} is no list")
            values = self.conformed(array.values, type_["elementType"], len(array.values))
            return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
        require(pa.types.is_map(array.type), "data file's types", f"{array.type} is no map")
        keys = self.conformed(array.keys, type_["keyType"], len(array.keys))
        items = self.conformed(array.items, type_["valueType"], len(array.items))
        return pa.MapArray.from_arrays(array.offsets, keys, items, mask=array.is_null())

    def _widened(self, array: pa.Array, to: pa.DataType) -> pa.Array:
        """The values in the table's type, if "Type Widening" allows it."""
        is_same = array.type == to or (pa.types.is_timestamp(to) and self._is_timestamp(array.type, to))
        require(is_same or _is_wider(array.type, to), "data file's types", f"{array.type} for {to}")
        require(is_same or self.schema.may_widen, "types are widened with the feature only", f"{array.type} for {to}")
        if pa.types.is_integer(array.type) and pa.types.is_decimal(to):
            array = array.cast(pa.decimal128(20, 0))
        return array.cast(to)

    def _is_timestamp(self, found: pa.DataType, to: pa.DataType) -> bool:
        """INT96 says nothing of a time zone; with INT64 `isAdjustedToUTC` must be as the type demands."""
        return bool(pa.types.is_timestamp(found)) and (self.has_int96 or (found.tz is None) == (to.tz is None))


def _is_wider(found: pa.DataType, to: pa.DataType) -> bool:
    width = found.bit_width if pa.types.is_signed_integer(found) else None
    if width and pa.types.is_signed_integer(to):
        return bool(width < to.bit_width)
    if to == pa.float64():
        return bool(found == pa.float32() or width in (8, 16, 32))
    if to == pa.timestamp("us"):
        return bool(found == pa.date32())
    if pa.types.is_decimal(to):
        digits = {None: (0, 0), 64: (20, 0)}.get(width, (10, 0))
        precision, scale = (found.precision, found.scale) if pa.types.is_decimal(found) else digits
        return bool(precision > 0 and 0 <= to.scale - scale <= to.precision - precision)
    return False


def statistics(add: Action) -> Action | None:
    """The statistics of an `add`.

    :raises ProtocolViolation: they aren't JSON, or lack the number of records where a vector needs it.
    """
    text = add.get("stats")
    try:
        stats = add.get("stats_parsed") if text is None else json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise ProtocolViolation("statistics are JSON", text) from error
    count = (stats or {}).get("numRecords")
    require(count is not None or "deletionVector" not in add, "numRecords beside a vector", stats)
    require(count is None or (type(count) is int and count >= 0), "numRecords is a number", count)
    return stats


def check_statistics(add: Action, file: LogicalFile, schema: TableSchema) -> None:
    """Compare an `add`'s statistics with the rows ("Per-file Statistics").

    :raises ProtocolViolation: they don't fit the file's live rows.
    """
    stats = statistics(add)
    if stats is None:
        return
    records, is_tight = stats.get("numRecords"), stats.get("tightBounds", True) is not False
    require(records in (None, len(file.live)), "numRecords", f"{records}, the file has {len(file.live)}")
    rows = file.rows
    for path, type_, column in _leaves(schema, schema.fields, [c.combine_chunks() for c in rows.columns]):
        if path[0] in schema.partition_fields:
            continue
        nulls, low, high = (_at(stats.get(kind), path) for kind in ("nullCount", "minValues", "maxValues"))
        name = ".".join(path)
        if nulls is not None and is_tight:
            require(nulls == column.null_count, "nullCount", f"{name}: {nulls}, not {column.null_count}")
        elif nulls is not None:
            fits = (nulls != 0 or column.null_count == 0) and (nulls != records or column.null_count == len(column))
            require(fits, "nullCount", f"{name}: {nulls}, with {column.null_count} of {len(column)} null")
        if column.null_count < len(column) and isinstance(type_, str) and (low, high) != (None, None):
            _check_bounds(name, type_, column, low, high, is_tight)


def _leaves(
    schema: TableSchema, fields: Sequence[Action], arrays: Sequence[pa.Array], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, pa.Array]]:
    """Physical path, type and values of all columns and fields of structs. A null struct's fields are null."""
    for field, array in zip(fields, arrays, strict=True):
        path, type_ = (*prefix, schema.physical_name(field)), field["type"]
        if not isinstance(type_, str) and type_["type"] == "struct":
            yield from _leaves(schema, type_["fields"], array.flatten(), path)
        else:
            yield path, type_, array


def _at(values: Any, path: Sequence[str]) -> Any:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _check_bounds(name: str, type_: str, column: pa.Array, low: Any, high: Any, is_tight: bool) -> None:
    values = column.drop_null()
    arrow, has_nan = arrow_type(type_), False
    if pa.types.is_floating(arrow):
        # NaN is the greatest value, as in Spark, and 0.0 equals -0.0
        has_nan = bool(pc.any(pc.is_nan(values)).as_py())
        values = values.filter(pc.invert(pc.is_nan(values)))
    elif pa.types.is_temporal(arrow):
        values = values.cast(pa.int32() if type_ == "date" else pa.int64())
    found = pc.min_max(values).as_py()
    least = _NAN if found["min"] is None else found["min"]
    greatest = _NAN if has_nan else found["max"]
    for kind, stat, exact in (("min", low, least), ("max", high, greatest)):
        if stat is None:
            continue
        try:
            value = _stat(stat, type_)
        except (TypeError, ValueError, InvalidOperation, pa.ArrowException) as error:
            raise ProtocolViolation("statistics are of their column's type", f"{name}: {stat!r}") from error
        is_time = type_ in ("timestamp", "timestamp_ntz")
        truncated = exact - exact % 1000 if is_time else exact
        bounds = _key(value) <= _key(exact) if kind == "min" else _key(value) >= _key(truncated)
        require(bounds, "bounds hold the live rows", f"{name}: {kind} is {stat!r}, a row has {exact!r}")
        if is_tight and _key(value) != _key(exact) and _key(value) != _key(truncated):
            prefix = value if kind == "min" else str(value)[:-1]
            is_prefix = isinstance(exact, str) and len(prefix) < len(exact) and exact.startswith(prefix)
            require(is_prefix, "tight bounds are a row's", f"{name}: {kind} is {stat!r}, not {exact!r}")


_NAN = float("nan")


def _key(value: Any) -> Any:
    return (value != value, 0.0 if value != value else value) if isinstance(value, float) else value


def _stat(stat: Any, type_: str) -> Any:
    """A minimum or maximum of JSON, as a value that Arrow's of the column compare with."""
    arrow = arrow_type(type_)
    if isinstance(stat, str) and pa.types.is_temporal(arrow):
        return _temporal(stat, type_)
    if pa.types.is_floating(arrow):
        return pa.scalar(float(stat), arrow).as_py()
    if pa.types.is_decimal(arrow):
        return pa.scalar(Decimal(stat), arrow).as_py()
    value = pa.scalar(stat, arrow)
    return value.value if pa.types.is_temporal(arrow) else value.as_py()
