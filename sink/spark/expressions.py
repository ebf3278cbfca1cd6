"""Parts of Spark SQL's expressions."""

import re
from functools import reduce

from pyspark.errors import PySparkException
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


def sentence(error: PySparkException) -> str:
    """The first sentence of Spark's message. The rest is advice on Spark's settings, or the query plan."""
    text = str(error).strip().splitlines()[0]
    text = re.sub(r"^\[[A-Z_.]+\] ", "", text).split(" SQLSTATE: ")[0]
    return text if text.endswith(".") else text + "."
