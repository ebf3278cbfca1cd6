"""Values as messages spell them, to a table's types: exactly, or not at all."""

import pyarrow as pa
from pyspark.sql import types as T

from changelog.changes import Wire, WireType


def convert(wire: Wire, target: pa.DataType, is_uuid: bool = False) -> tuple[pa.Array, pa.Array | None]:
    """`wire`'s values as `target`, and a mask of those that are there but don't fit (null in the result); None if all do.

    Nothing is rounded, truncated or wrapped around.
    """
    raise NotImplementedError


def json_candidates(wire: WireType, target: pa.DataType, is_uuid: bool = False) -> tuple[pa.DataType, ...]:
    """Arrow types that `pyarrow.json` may read a field as, likeliest first, so that `convert` can make `target` of it."""
    raise NotImplementedError


def spark_type(wire: WireType) -> T.DataType:
    """The column type that holds every value of a field, to create or evolve a table. `T.StringType` if nothing is known."""
    raise NotImplementedError
