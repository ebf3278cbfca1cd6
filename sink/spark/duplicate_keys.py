"""Looks for rows of a table that share a key."""

import logging

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sink.config import Config, TableSection
from sink.errors import TableError
from sink.spark.expressions import quoted
from sink.table.keys import TableKey, property_name, shown
from sink.targets.seam import Table

log = logging.getLogger("rowdelta")


def check_tells_rows_apart(
    config: Config, section: TableSection, key: TableKey, table: Table, spark: SparkSession
) -> None:
    """Look for rows that share a key, where nothing else says that there are none: in a table that others have filled,
    and in one whose key is new. A row with a NULL in its key is never found by it, so it doesn't count.

    :raises TableError: one change of such a key would remove all these rows.
    """
    text = table.property(property_name(config))
    known = () if text is None else TableKey.from_json(text).columns
    if not key.columns or table.is_empty() or set(key.columns) in (set(known), set(table.identifiers())):
        return
    log.info("%s: looking whether %s tells its rows apart", table.name, shown(key.columns))
    frame = table.reader().frame(spark)
    if section.history is not None:
        frame = frame.where(quoted(section.history.current))
    rows = frame.select(*map(quoted, key.columns)).na.drop()
    several = rows.groupBy(*(quoted(name) for name in key.columns)).count().where("count > 1")
    found = several.agg(F.count("*"), F.max("count")).collect()[0]
    if found[0]:
        raise TableError(
            f"{table.name}: {found[0]:,} keys ({shown(key.columns)}) have several rows, at most {found[1]:,}. One "
            "change of such a key would remove all of them. Nothing was applied. Name the columns that tell the rows "
            "apart in key, or remove the rows that are too many."
        )
