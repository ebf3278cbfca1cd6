"""JSON records to Arrow arrays: whole batches at once where they are alike, one by one where they aren't."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from changelog.changes import Rejected, WireType


@dataclass(frozen=True)
class Leaf:
    """A field that isn't looked into.

    :param candidates: Arrow types that its JSON may be read as, the likeliest first: `values.json_candidates`.
    """

    candidates: tuple[pa.DataType, ...]


@dataclass(frozen=True)
class Object:
    """An object of which the named fields are wanted.

    :param watched: other fields of it are reported.
    """

    fields: Mapping[str, "Leaf | Object | ListOf"]
    watched: bool = False


@dataclass(frozen=True)
class ListOf:
    """An array of objects."""

    element: Object


@dataclass(frozen=True)
class Parsed:
    """Records that were read with one Arrow type for each field.

    :param record: int64; rows of the input.
    :param values: the wanted fields, a struct array as long as `record`. Missing fields are null. A leaf has one of its candidates'
        types, or, from records that none of them fits: string, int64, bool, `NUMERAL` (a number's text), or string with JSON text
        for an object or array.
    :param unknown: fields of watched objects that aren't in the shape, with a guess at their type.
    """

    record: pa.Array
    values: pa.StructArray
    unknown: Mapping[str, WireType] = field(default_factory=dict)


class JsonReader:
    """Reads records of one shape."""

    def __init__(self, shape: Object) -> None:
        self._shape = shape

    def read(self, values: pa.Array) -> Iterator[Parsed | Rejected]:
        """The records in `values` (binary or string, no nulls). Whatever isn't a JSON object is rejected."""
        raise NotImplementedError
