"""Values that a source makes up for columns of an old row that its database didn't log.

Postgres logs only the key, or the columns of an index (`REPLICA IDENTITY USING INDEX`), of an old row, unless it is
told otherwise (`REPLICA IDENTITY FULL`). Debezium then writes null for the other columns, and for those that are NOT
NULL their default, or else 0, an empty text, false or 1970-01-01. A made-up value is the same in all rows.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)

_SAYS_NOTHING = (
    r"^(?:-?0+(?:\.0*)?(?:[Ee][+-]?\d+)?|00:00:00.*|1970-01-01T00:00:00.*|P0Y0M0DT0H0M0(?:\.0*)?S|\{\}|\[\])?$"
)
"""Texts of a decimal, a time, an interval and JSON that are made up."""

Mask = npt.NDArray[np.bool_]


def says_something(values: pa.Array | pa.ChunkedArray) -> Mask:
    """Whether each value is neither null nor 0, false, 1970-01-01 or an empty text, nor the text of such a
    value.
    """
    dtype = values.type
    if any(is_text(dtype) for is_text in _TEXTS):
        values = values.cast(pa.binary()) if pa.types.is_fixed_size_binary(dtype) else values
        said = pc.invert(pc.match_substring_regex(values, _SAYS_NOTHING))
    elif pa.types.is_boolean(dtype):
        said = values
    elif pa.types.is_temporal(dtype):
        said = pc.not_equal(values.cast(pa.int32() if pa.types.is_date32(dtype) else pa.int64()), 0)
    elif pa.types.is_integer(dtype):
        said = pc.not_equal(values, pa.scalar(0, dtype))  # as a float, a large one would raise an exception
    else:
        said = pc.not_equal(values.cast(pa.float64()), 0)
    return np.asarray(pc.fill_null(said, False))


def surely_logged(values: pa.Array) -> Mask:
    """Flags the values of old rows in a column that nobody made up: the column has several of them."""
    said = says_something(values)
    varies = pc.count_distinct(values.filter(pa.array(said))).as_py() > 1
    return said if varies else np.zeros(len(values), np.bool_)
