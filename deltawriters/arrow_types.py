"""What Arrow's types have in common: plain arrays, large types, and the types of a table's files."""

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


def _cast(column: pa.ChunkedArray, dtype: pa.DataType) -> pa.ChunkedArray:
    if isinstance(dtype, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(dtype, storage(column).cast(dtype.storage_type))
    return column if column.type == dtype else column.cast(dtype)
