"""Dotted paths into messages (`source.lsn`): what `order_by` and metadata columns name."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from changelog.json_records import Leaf, ListOf, Object


def with_path(fields: Mapping[str, Leaf | Object | ListOf], path: str, leaf: Leaf) -> dict[str, Leaf | Object | ListOf]:
    """`fields` of an object, and a leaf at `path`. What is there already stays."""
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
    """The values at `path`, null where an object on the way is; None if the struct has no such field."""
    dtype = struct.type
    names = path.split(".")
    for name in names:
        if not pa.types.is_struct(dtype) or dtype.get_field_index(name) < 0:
            return None
        dtype = dtype.field(name).type
    return pc.struct_field(struct, names)
