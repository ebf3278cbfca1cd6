"""Which table of the database a topic is of."""

import re

from sink.config import Config
from sink.errors import ConfigError
from sink.table.patterns import ResolvedTable

_REFERENCE = re.compile(r"\$(?:(\d+)|\{(\d+)\})")


def database_table(resolved: ResolvedTable, configured: str | None) -> str:
    """The database's table.

    :param configured: `verify.table`.
    """
    if configured is not None and (resolved.from_pattern or not _REFERENCE.search(configured)):
        return expanded(resolved, configured)
    section, named = resolved.section, resolved.section.source_tables
    if section.many_topics and configured is None:
        raise ConfigError(
            f"{resolved.path}.verify: {section.target} takes several topics, and a database has the rows of one. Name "
            "a view of all that Spark reads (verify.spark_table); or verify.table, if one table has all rows."
        )
    # Debezium's topics are <prefix>.<schema or database>.<table>
    source = section.source.rpartition("/")[2]
    if len(named) == 1 and not {"*", "?"} & set(named[0]):
        source = named[0]
    return source.partition(".")[2] if source.count(".") > 1 else source


def source_table(config: Config, resolved: ResolvedTable) -> str:
    """The table of `source.database`, by the same rule as verify finds it."""
    verify = config.verify_of(resolved.section)
    return database_table(resolved, None if verify is None else verify.table)


def expanded(resolved: ResolvedTable, text: str) -> str:
    """Replace `$1` by the group of a pattern, as it is in the topic's name."""
    match = resolved.match
    if match is None:
        return text
    return _REFERENCE.sub(lambda reference: match[int(reference[1] or reference[2])] or "", text)
