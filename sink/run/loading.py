"""Loads tables of a job from their database, before their streams begin."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from sink.config import Config, DatabaseSection
from sink.databases.connector import KafkaConnector
from sink.databases.kinds import database_of
from sink.databases.own_connector import OwnConnector
from sink.databases.rows import PATH, TableRows
from sink.databases.sample import DatabaseSample
from sink.databases.tables import source_table
from sink.sources.engine import Engine
from sink.sources.kafka import KafkaSource
from sink.sources.source import Source
from sink.table.inference import Sample
from sink.table.loading import Connector, Loading
from sink.table.microbatch import TableSink
from sink.table.patterns import ResolvedTable
from sink.table.table_plan import TablePlan
from sink.verify.topic import Topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Loads:
    """:param database: from which tables are loaded.
    :param stopping: whether loads are to end after the parts in progress.
    :param engine: the connector, unless it is one of Kafka Connect. It must have started.
    """

    def __init__(
        self,
        spark: "SparkSession",
        config: Config,
        source: Source,
        database: DatabaseSection,
        stopping: Callable[[], bool],
        engine: Engine | None = None,
    ) -> None:
        assert isinstance(source, KafkaSource)
        self._spark = spark
        self._config = config
        self._source = source
        self._database = database
        self._engine = engine
        self._stopping = stopping
        self._turn = Lock()
        self._remembered = set[str]()

    def sample(self, resolved: ResolvedTable) -> Sample:
        """What the database tells of a table."""
        named = partial(source_table, self._config, resolved)
        return DatabaseSample(self._spark, self._config, self._database, named, resolved.section)

    def load(self, resolved: ResolvedTable, sink: TableSink) -> None:
        """Load a table, or what is left of it.

        :raises RowdeltaError: see `Loading.run`.
        """
        section, name = sink.plan.section, source_table(self._config, resolved)
        settings = self._config.load
        replica = self._database.model_copy(update={"url": settings.replica}) if settings.replica else None
        if self._engine is not None and not self._engine.catch_up(self._stopping):
            return
        self._source.identify(section)
        sink.check_source()
        with (
            self._connector(sink.plan, name) as connector,
            closing(TableRows(self._spark, self._config, self._database, name, section, replica)) as rows,
        ):
            if section.schema_changes != "ignore":  # as the stream does it, whose messages come later
                sink.follow_schema(rows.unknown(sink.plan.changelog))
            numbers, ends = (settings.connections, settings.part_rows), partial(self._source.ends, section)
            Loading(sink, rows, connector, ends, *numbers, self._turn, self._stopping).run()
        sink.upkeep.abandon_merge()  # the table is opened again for its stream

    @contextmanager
    def _connector(self, plan: TablePlan, name: str) -> Iterator[Connector]:
        if self._engine is not None:
            yield OwnConnector(
                *(self._spark, self._engine, self._config, self._database, plan.section, name),
                self._remembered,
                self._stopping,
            )
            return
        database = database_of(self._database.url)
        with closing(database(self._spark, self._database, name, PATH)) as connection:
            verify = self._config.verify_of(plan.section)
            is_named = verify is not None and verify.table is not None
            yield KafkaConnector(connection, Topic(self._spark, self._config, plan).since_now, is_named=is_named)
