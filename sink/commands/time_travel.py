"""`rowdelta history` and `rowdelta show`: a table's commits, and its rows as they were at some time.

The format's own Spark reader reads the rows. It applies all kinds of deletes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sink.config import Config
from sink.errors import ConfigError, TableError
from sink.sources.source import Position
from sink.spark.expressions import quoted
from sink.spark.java_errors import JAVA_ERRORS, java_message
from sink.spark.versions import to_arrow, try_cast
from sink.targets.catalogs import Catalogs
from sink.targets.history import History, shown_position, shown_time
from sink.targets.own_state import property_prefix
from sink.targets.seam import Table


@dataclass(frozen=True)
class When:
    """Which state of a table. At most one of these is given. If all are None, it is the current state.

    :param as_of: the time, in milliseconds since 1970.
    :param version: id of the snapshot, or the version.
    :param position: the sink's position.
    """

    as_of: int | None = None
    version: int | None = None
    position: Position | None = None


@dataclass(frozen=True)
class Shown:
    """Some rows of a state.

    :param heading: says which state it is.
    :param columns: names of the columns.
    :param rows: a JSON object for each row, in no order.
    :param cells: the same rows as text, with a cell for each column.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[str]]


def parse_time(text: str) -> int:
    """An ISO 8601 time as milliseconds since 1970. A time without a zone is UTC.

    :raises ValueError: `text` isn't such a time.
    """
    time = datetime.fromisoformat(text)
    return int((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1000)


def target(config: Config, name: str) -> str:
    """The full name of the table that the user means.

    :param name: the full name; or, for a table that isn't from a pattern, the end of its name, or its source.
    :raises ConfigError: no table fits, or several do.
    """
    if name.split(".")[0] in config.catalogs and name.count(".") >= 2:
        return name
    plain = [table for table in config.tables if not table.is_pattern]
    found = sorted({table.target for table in plain if name == table.source or table.target.endswith(f".{name}")})
    if len(found) == 1:
        return found[0]
    known = ", ".join(table.target for table in plain[:10]) or "none is named plainly"
    what = f"may be {' or '.join(found)}" if found else "is not the target, its end or the source of a plain entry"
    hint = " A table of a pattern needs its whole name." if len(plain) < len(config.tables) else ""
    raise ConfigError(f"{name} {what}. Give catalog.namespace.table, such as the targets: {known}.{hint}")


def history(spark: SparkSession, config: Config, name: str) -> History:
    """The table's commits.

    :raises TableError: there is no such table.
    """
    return Catalogs(spark, config).existing(name).reader().history(property_prefix(config))


def show(
    spark: SparkSession,
    config: Config,
    name: str,
    when: When,
    key: Sequence[str],
    limit: int,
    valid_at: str | None = None,
) -> Shown:
    """Rows of a state of the table.

    :param name: catalog.namespace.table.
    :param when: the state.
    :param key: texts `column=value`. Only rows with these values are shown. If the table's key is one column, the value
        alone is enough.
    :param limit: at most so many rows.
    :param valid_at: of a table with history, only the versions that held at this time: a value of the column `from`.
    :raises TableError: there is no such table, or the state isn't known any more.
    :raises ConfigError: `key` doesn't fit the table, or `when` doesn't fit its source.
    """
    table = Catalogs(spark, config).existing(name)
    found, word = table.reader().history(property_prefix(config)), table.snapshot_word
    later = ""
    if when.position is not None:
        commit, after = found.at_position(when.position)
        version: int | None = commit.snapshot_id
        if after is not None:
            later = f"; {word} {after.snapshot_id} after it has {shown_position(after.position or {})}"
    elif when.as_of is not None:
        version = found.at_time(when.as_of)
    elif when.version is not None:
        version = found.check_version(when.version)
    else:
        version = table.snapshot_id()
    if version is None:
        raise TableError(f"{name}: the table has no {word} yet. Run rowdelta run first.")
    heading = f"{name}: {word} {version} of {shown_time(found.time(version))}, {_position(found, version)}{later}"
    frame = table.reader().frame_at(version)
    if valid_at is not None:
        frame = _valid_at(frame, config, name, valid_at)
    wanted = _key_values(key, name, _key_columns(config, table))
    rows = _matching(frame, wanted, name).limit(limit)
    cells = [_text(field).alias(field.name) for field in frame.schema]
    as_json = F.to_json(F.struct("*"), {"ignoreNullFields": "false"})
    try:
        read = to_arrow(rows.select(as_json.alias("json"), F.array(*cells).alias("cells"))).to_pydict()
    except JAVA_ERRORS as error:
        raise TableError(
            f"{name}: the rows of {word} {version} can't be read; its files may have been removed since "
            f"({java_message(error)}). Give a later one."
        ) from None
    return Shown(heading, frame.columns, read["json"], read["cells"])


def _valid_at(frame: DataFrame, config: Config, name: str, time: str) -> DataFrame:
    """:raises ConfigError: the table has no history, or the time isn't one."""
    history = next((section.history for section in config.tables if section.target == name), None)
    if history is None:
        raise ConfigError(f"{name}: got --valid-at, which is for tables with history, and its entry has none.")
    start, end = (F.col(quoted(column)) for column in (history.start, history.end))
    at = try_cast(F.lit(time), frame.schema[history.start].dataType)
    if frame.sparkSession.range(1).select(at.isNull()).first()[0]:  # type: ignore[index]
        dtype = frame.schema[history.start].dataType.simpleString()
        raise ConfigError(f"{name}: --valid-at is {time!r}, expected a {dtype}, as in {history.start}.")
    return frame.where((start <= at) & (end.isNull() | (at < end)))


def _position(found: History, snapshot_id: int) -> str:
    """The position of a state, in words."""
    commit = found.commit(snapshot_id)
    if commit is None:
        return f"position unknown: the {found.word} isn't in the table's current history"
    return f"position {shown_position(commit.position)}" if commit.position is not None else "no position of this sink"


def _key_columns(config: Config, table: Table) -> Sequence[str]:
    """The key as the table says it, or else as the configuration does."""
    configured = [section.key for section in config.tables if section.target == table.name]
    return table.identifiers() or (configured[0] if configured else ())


def _key_values(pairs: Sequence[str], table: str, key: Sequence[str]) -> dict[str, str]:
    """Parse arguments such as `id=7` into values by column.

    :raises ConfigError: an argument names no column.
    """
    names = sorted(key)
    found = {}
    for pair in pairs:
        column, equals, value = pair.partition("=")
        if not equals and len(names) == 1:
            column, value = names[0], pair
        elif not equals:
            shown = f"the table's key is {', '.join(names)}" if names else "neither table nor configuration names a key"
            raise ConfigError(f"{table}: --key is {pair!r}, expected column=value; {shown}.")
        found[column] = value
    return found


def _matching(frame: DataFrame, key: Mapping[str, str], table: str) -> DataFrame:
    for column, value in key.items():
        if column not in frame.columns:
            raise ConfigError(
                f"{table}: --key names {column!r}, which isn't a column in this state. The columns are: "
                f"{', '.join(frame.columns)}."
            )
        dtype = frame.schema[column].dataType.simpleString()
        text = value.replace("\\", "\\\\").replace("'", "\\'")
        wanted = F.expr(f"try_cast('{text}' AS {dtype})")
        (fits,) = frame.sparkSession.range(1).select(wanted.isNotNull()).collect()[0]
        if not fits:
            raise ConfigError(f"{table}: --key {column}={value}: the value is not of type {dtype}.")
        frame = frame.where(F.col(quoted(column)) == wanted)
    return frame


def _text(field: T.StructField) -> Column:
    column = F.col(quoted(field.name))
    shown = F.hex(column) if isinstance(field.dataType, T.BinaryType) else column.cast("string")
    return F.coalesce(shown, F.lit("NULL"))
