"""Dotted paths into messages (`source.lsn`). `order_by` and metadata columns name fields by such paths."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from changelog.parse.json_records import Leaf, ListOf, Object


def with_path(fields: Mapping[str, Leaf | Object | ListOf], path: str, leaf: Leaf) -> dict[str, Leaf | Object | ListOf]:
    """The `fields` of an object, with a leaf added at `path`. A field that is already at `path` stays as it is."""
    name, _, rest = path.partition(".")
    result = dict(fields)
    if not rest:
        result.setdefault(name, leaf)
        return result
    inner = result.get(name, Object({}))
    if isinstance(inner, Object):
        result[name] = Object(with_path(inner.fields, rest, leaf), inner.watched)
    return result


def at_path(struct: pa.StructArray, path: str) -> pa.Array | None:
    """The values at `path`. A value is null if an object on the path is null. None if the struct has no such field."""
    dtype = struct.type
    names = path.split(".")
    for name in names:
        if not pa.types.is_struct(dtype) or dtype.get_field_index(name) < 0:
            return None
        dtype = dtype.field(name).type
    return pc.struct_field(struct, names)
