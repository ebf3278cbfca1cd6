"""Conditions on changelog rows as Spark columns. `changelog.rows` has those for Arrow."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from changelog.rows import BAD, TRUNCATE, UNAVAILABLE


def is_bad(changes: DataFrame) -> Column:
    """Whether a changelog row is a bad record, or a TRUNCATE. A partial row is neither."""
    bad = F.col(BAD).isNotNull()
    return bad & F.col(UNAVAILABLE).isNull() if UNAVAILABLE in changes.columns else bad


def is_truncate() -> Column:
    """Whether a changelog row's record says that the source emptied the table. Null of a good row."""
    return F.col(f"{BAD}.error_class") == TRUNCATE
