"""`rowdelta load`: copies tables of a database, and goes on with their changes until they are equal to it."""

import time
from collections.abc import Iterator, Sequence

from pyspark.sql import SparkSession

from changelog.amounts import amount
from sink.config import Config
from sink.errors import ConfigError, TableError
from sink.run.pipeline import Pipeline, open_source
from sink.table.load_state import load_of, stage_of
from sink.table.patterns import ResolvedTable, chosen_tables, find_tables
from sink.table.sink_state import position_in
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import property_prefix


class Load:
    """A run that loads some tables first, and ends when they are up to date.

    :param names: targets, or ends of their names. Without any it is all tables.
    :raises ConfigError: there is no such table, the configuration names no database, or a table can't be loaded.
    :raises TableError: a table has rows, or a position in its source, and no load has begun.
    """

    def __init__(self, spark: SparkSession, config: Config, names: Sequence[str]) -> None:
        if not config.source.has_topics:
            raise ConfigError(
                f"source.type: got {config.source.type}, expected kafka or debezium for a load, which goes on with "
                "changes of a topic. Of files, write the first copy into a change file."
            )
        if config.source.type == "debezium" and not (
            config.load.auto or config.source.connector.get("snapshot.mode") == "no_data"
        ):
            raise ConfigError(
                "source.connector: the connector's snapshot is the first copy of all tables, so that none can be "
                "loaded. Write load: {auto: true}, or snapshot.mode: no_data into source.connector."
            )
        if config.source.database is None:
            raise ConfigError(
                "source.database says from where tables are loaded, and it isn't there: {url: "
                "'jdbc:postgresql://host:5432/db', user: …, password: '${…}'} (see docs/load.md)."
            )
        config = config.model_copy(update={"load": config.load.model_copy(update={"auto": True})})
        self._source, self._catalogs = open_source(spark, config, {}), Catalogs(spark, config)
        self._prefix = property_prefix(config)
        self._tables = chosen_tables(find_tables(config, self._source), names)
        for table in self._tables:
            self._refuse(table)
        changed = {
            "sink": config.sink.model_copy(update={"trigger": "available-now"}),
            "tables": [table.section for table in self._tables],
        }
        self._started = time.monotonic()
        self._pipeline = Pipeline(spark, config.model_copy(update=changed))

    def stop(self) -> None:
        """Finish the parts or the micro-batch in progress, then stop. A signal handler may call this."""
        self._pipeline.stop()

    def run(self) -> Iterator[str]:
        """Load, and apply what has changed meanwhile. Yields a line for each table.

        :raises RowdeltaError: what is loaded stays. Another load goes on from there.
        """
        self._pipeline.run()
        for table in self._tables:
            yield self._outcome(table)

    def _refuse(self, resolved: ResolvedTable) -> None:
        section = resolved.section
        if section.mode != "upsert":
            raise ConfigError(
                f"{section.target}: got mode {section.mode}, expected upsert for a load. What changes while it is read "
                "comes in its rows and in the topic: it would be in the table twice."
            )
        table = self._catalogs.load(section.target)
        if table is None or load_of(table, self._prefix) is not None:
            return
        if not table.is_empty() or position_in(table, self._prefix, section, table.position(self._prefix)) is not None:
            raise TableError(
                f"{section.target} has rows, or a position in its source, already: a load is for a table that has "
                "neither. Start over with rowdelta reset and an empty table."
            )

    def _outcome(self, resolved: ResolvedTable) -> str:
        section, seconds = resolved.section, time.monotonic() - self._started
        table = self._catalogs.load(section.target)
        found = None if table is None else load_of(table, self._prefix)
        if table is None or found is None:
            return f"{section.target}: not loaded"
        load, loaded = found
        position = position_in(table, self._prefix, section, table.position(self._prefix))
        stage = stage_of(load, loaded, position, self._source.is_ahead)
        if stage == "equal":
            stage = "equal to the database as it was when the load ended"
        return f"{section.target}: {stage}; loaded {amount(loaded.rows, 'row')}, {seconds:,.0f} s"
