"""What Arrow's types have in common: plain arrays, large types, the types of a table's files, dates as text."""

import numpy as np
import pyarrow as pa

MOST_TEXT = 2**31 - 1
"""An array of Arrow's usual string and binary types holds at most this many bytes, since its offsets have 32 bits."""


def storage(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """`column` as one plain array: chunks are combined, and an extension type (UUID) becomes its storage type. A column
    of more than `MOST_TEXT` bytes gets Arrow's large type.
    """
    if isinstance(column, pa.ChunkedArray):
        if column.nbytes > MOST_TEXT:
            column = column.cast(large_type(column.type))
        # `combine_chunks` copies a single chunk too
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def large_type(dtype: pa.DataType) -> pa.DataType:
    """The type with 64-bit offsets for a string or binary type. Other types stay as they are."""
    if pa.types.is_string(dtype):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(dtype) else dtype


def as_table_types(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """`rows` in the Arrow types and with the field ids of `schema`. Columns that already have the right type are not
    copied.
    """
    columns = [_cast(rows.column(field.name), field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def with_elements(values: pa.Array, dtype: pa.DataType, elements: pa.Array) -> pa.Array:
    """Lists or maps with other elements, as many as before.

    :param values: tell where each begins, and which are NULL.
    """
    nulls, offsets = values.buffers()[:2]
    return pa.Array.from_buffers(
        dtype, len(values), [nulls, offsets], values.null_count, values.offset, children=[elements]
    )


def date_text(days: int) -> str:
    """A date as Java writes it: years above 9999 have a sign."""
    moment = np.datetime64(days, "D")
    year = int(moment.astype("datetime64[Y]").astype(int)) + 1970
    # NumPy writes years above 9999 without a sign, and 44 BC with three digits: so we write the year ourselves
    _, month, day = str(moment).lstrip("-+").split("-")
    return f"{year:04d}-{month}-{day}" if 0 <= year <= 9999 else f"{year:+05d}-{month}-{day}"


def timestamp_text(micros: int, digits: int) -> str:
    """A time in UTC without its zone.

    :param micros: microseconds since 1970.
    :param digits: of the fraction of a second. What comes after them is cut off.
    """
    days, rest = divmod(micros, 86_400_000_000)
    seconds, fraction = divmod(rest, 1_000_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{date_text(days)}T{hours:02d}:{minutes:02d}:{seconds:02d}.{f'{fraction:06d}'[:digits]}"


def _cast(column: pa.ChunkedArray, dtype: pa.DataType) -> pa.ChunkedArray:
    if isinstance(dtype, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(dtype, storage(column).cast(dtype.storage_type))
    return column if column.type == dtype else column.cast(dtype)
