"""Parts of Spark SQL's expressions."""

from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F


def quoted(name: str) -> str:
    """`name` as a quoted identifier of Spark SQL. It may have any characters."""
    return "`" + name.replace("`", "``") + "`"


def any_of(conditions: list[Column]) -> Column:
    """True if any of `conditions` is true; false if the list is empty."""
    return reduce(lambda a, b: a | b, conditions, F.lit(False))


def binary_uuid(name: str) -> Column:
    """The 16 bytes of the UUID in the text column `name`; null if the text isn't a UUID."""
    found = F.expr(f"try_to_binary(replace({quoted(name)}, '-', ''), 'hex')")
    return F.when(F.length(found) == 16, found).alias(name)
