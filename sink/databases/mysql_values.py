"""What each type of MySQL and MariaDB is in Debezium's messages, and how it is read (`sink.databases.read_columns`)."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import WireType
from changelog.values import logical
from changelog.values.times import to_text
from sink.databases.conversion import Kind
from sink.databases.mysql_catalog import MySQLColumn, quoted, select
from sink.databases.read_columns import (
    ReadColumn,
    Spelling,
    bits,
    fixed_decimal,
    floats,
    instants,
    local_times,
    octets,
)

_NAMED = {"enum": "io.debezium.data.Enum", "set": logical.ENUM_SET}
_LOCAL_TIMES = {Kind.DATE: "date", Kind.TIME: "time", Kind.TIMESTAMP: "timestamp"}
_INTEGERS = {"tinyint": "int16", "smallint": "int16", "mediumint": "int32", "int": "int32", "bigint": "int64"}
_WIDER = {"smallint": "int32", "int": "int64"}
"""Of unsigned ones."""


def read_column(column: MySQLColumn, targets: Collection[pa.DataType], spelling: Spelling) -> ReadColumn | None:
    """How a column is read. None if nothing is known of its type.

    :param targets: Arrow types of the table's columns that take its values.
    """
    selected = select(column)
    if selected is None:
        return None
    sql, kind, name = selected.sql, selected.kind, quoted(column.name)
    if column.type == "bit" and column.bits == 1:
        return ReadColumn(sql, WireType("boolean"), lambda values: pc.not_equal(values, 0))
    if kind is Kind.INTEGER:
        wire = WireType("int32", logical.YEAR) if column.type == "year" else WireType(_integer(column))
        return ReadColumn(sql, wire, _integers)
    if kind is Kind.UNSIGNED:  # `bigint.unsigned.handling.mode: long`
        return ReadColumn(f"CAST({name} AS SIGNED)", WireType("int64"), _integers)
    if kind is Kind.DECIMAL:
        if spelling.decimals == "double":
            return floats(f"({name} + 0e0)", "double", targets, spelling)
        if spelling.decimals == "string":
            return ReadColumn(sql, WireType("string"))
        return fixed_decimal(sql, column.precision, column.scale)
    if kind in (Kind.FLOAT, Kind.DOUBLE):
        return floats(sql, "float" if kind is Kind.FLOAT else "double", targets, spelling)
    if kind is Kind.BYTES:
        base64 = f"REPLACE(REPLACE(REPLACE(TO_BASE64({name}), CHAR(10 USING ascii), ''), '+', '-'), '/', '_')"
        return octets(sql, f"LOWER(HEX({name}))", base64, targets, spelling)
    if kind is Kind.BITS:
        return bits(sql, column.bits, short=False)
    if kind is Kind.INSTANT:
        return instants(sql, column.digits, targets)
    if kind in _LOCAL_TIMES:
        # a time may be negative or longer than a day, so that the mode adaptive has microseconds of all
        times = "adaptive_time_microseconds" if spelling.times == "adaptive" else spelling.times
        if kind is Kind.TIME and times in ("connect", "isostring"):  # which have times of a day only
            sql = f"CASE WHEN {sql} BETWEEN 0 AND 86400000000 THEN {sql} END"
        iso = sql, partial(_iso_texts, _LOCAL_TIMES[kind])
        return local_times(sql, _LOCAL_TIMES[kind], column.digits, iso, targets, replace(spelling, times=times))
    return ReadColumn(sql, WireType("string", _NAMED.get(column.type)))


def _integer(column: MySQLColumn) -> str:
    return _WIDER.get(column.type, _INTEGERS[column.type]) if column.is_unsigned else _INTEGERS[column.type]


def _integers(values: pa.Array) -> pa.Array:
    """Expressions are integers of any width for the driver."""
    return values.cast(pa.int64())


def _iso_texts(kind: str, values: pa.Array) -> pa.Array:
    """As Java writes them: without zeros at the end of the seconds, and without 24:00:00."""
    texts = to_text(values.cast(pa.int64()), WireType("int64", _UNITS[kind]))
    assert texts is not None
    if kind == "time":
        texts = pc.replace_substring_regex(texts, "^24:", "00:")
    shorter = texts if kind == "date" else pc.replace_substring_regex(texts, r"\.?0+$", "")
    return pc.binary_join_element_wise(shorter, "Z", "")


_UNITS = {
    "date": "io.debezium.time.Date",
    "time": "io.debezium.time.MicroTime",
    "timestamp": "io.debezium.time.MicroTimestamp",
}
