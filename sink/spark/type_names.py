"""Makes Spark's types without Spark, from names in the configuration, and from a table's Iceberg schema.

It knows only types that mean the same in all versions of Spark and with all settings. Spark must make all others.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import types as T

from sink.errors import NeedsSparkError

_NAMES: Mapping[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "tinyint": T.ByteType(),
    "byte": T.ByteType(),
    "smallint": T.ShortType(),
    "short": T.ShortType(),
    "int": T.IntegerType(),
    "integer": T.IntegerType(),
    "bigint": T.LongType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "real": T.FloatType(),
    "double": T.DoubleType(),
    "date": T.DateType(),
    "timestamp": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "string": T.StringType(),
    "binary": T.BinaryType(),
}
"""Of Spark SQL."""

_ICEBERG: Mapping[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "double": T.DoubleType(),
    "date": T.DateType(),
    "timestamptz": T.TimestampType(),
    "timestamp": T.TimestampNTZType(),
    "string": T.StringType(),
    "uuid": T.StringType(),
    "binary": T.BinaryType(),
}
"""As Iceberg's Spark module converts them. Iceberg spec, Appendix C."""

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|(\w+)|([<>(),:]))")
_MOST_DIGITS = 38


def parse(text: str) -> T.DataType:
    """The type of a Spark SQL name such as `decimal(12,2)` or `array<struct<a: int>>`.

    :raises NeedsSparkError: the name is unknown here, or isn't a type.
    """
    return _Parser(text).whole()


def of_iceberg(dtype: str | Mapping[str, Any]) -> T.DataType:
    """The Spark type for a type in a table's metadata.

    :raises NeedsSparkError: Spark may use another type, or none.
    """
    if isinstance(dtype, str):
        if dtype in _ICEBERG:
            return _ICEBERG[dtype]
        if decimal := re.fullmatch(r"decimal\((\d+), ?(\d+)\)", dtype):
            return T.DecimalType(int(decimal[1]), int(decimal[2]))
        if dtype.startswith("fixed["):
            return T.BinaryType()
        raise NeedsSparkError(f"type {dtype}")
    if dtype["type"] == "struct":
        return T.StructType([_field(field) for field in dtype["fields"]])
    if dtype["type"] == "list":
        return T.ArrayType(of_iceberg(dtype["element"]), not dtype["element-required"])
    if dtype["type"] == "map":
        return T.MapType(of_iceberg(dtype["key"]), of_iceberg(dtype["value"]), not dtype["value-required"])
    raise NeedsSparkError(f"type {dtype['type']}")


def _field(field: Mapping[str, Any]) -> T.StructField:
    if field.keys() & {"initial-default", "write-default"}:
        raise NeedsSparkError("a default inside of a column")
    metadata = {"comment": field["doc"]} if "doc" in field else None
    return T.StructField(field["name"], of_iceberg(field["type"]), not field["required"], metadata)


class _Parser:
    """Reads one type from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0

    def whole(self) -> T.DataType:
        found = self._type()
        if self._at < len(self._text):
            raise self._unknown()
        return found

    def _type(self) -> T.DataType:
        name = self._word().lower()
        if name in ("decimal", "dec", "numeric"):
            return self._decimal()
        inside: dict[str, Callable[[], T.DataType]] = {"array": self._array, "map": self._map, "struct": self._struct}
        if name in inside:
            self._expect("<")
            found = inside[name]()
            self._expect(">")
            return found
        if name not in _NAMES:
            raise self._unknown()
        return _NAMES[name]

    def _array(self) -> T.DataType:
        return T.ArrayType(self._type())

    def _map(self) -> T.DataType:
        key = self._type()
        self._expect(",")
        return T.MapType(key, self._type())

    def _struct(self) -> T.DataType:
        fields = []
        while True:
            name = self._word(quoted=True)
            self._takes(":")
            fields.append(T.StructField(name, self._type()))
            if not self._takes(","):
                return T.StructType(fields)

    def _decimal(self) -> T.DataType:
        precision, scale = 10, 0
        if self._takes("("):
            precision = self._number()
            if self._takes(","):
                scale = self._number()
            self._expect(")")
        if not 0 < precision <= _MOST_DIGITS or scale > precision:
            raise self._unknown()
        return T.DecimalType(precision, scale)

    def _number(self) -> int:
        text = self._word()
        if not re.fullmatch(r"\d{1,3}", text):
            raise self._unknown()
        return int(text)

    def _word(self, *, quoted: bool = False) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match[3] is not None or (match[1] is not None and not quoted):
            raise self._unknown()
        if quoted and match[2] is not None and not re.fullmatch(r"[A-Za-z_]\w*", match[2], re.ASCII):
            raise self._unknown()
        self._at = match.end()
        return str(match[2] or match[1][1:-1].replace("``", "`"))

    def _takes(self, mark: str) -> bool:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match[3] != mark:
            return False
        self._at = match.end()
        return True

    def _expect(self, mark: str) -> None:
        if not self._takes(mark):
            raise self._unknown()

    def _unknown(self) -> NeedsSparkError:
        return NeedsSparkError(f"type {self._text!r}")


def width_of_iceberg(text: str) -> int | None:
    """How many bytes each value of Iceberg's type has. None if it isn't `fixed`."""
    found = re.fullmatch(r"fixed\[(\d+)\]", text)
    return int(found[1]) if found else None
