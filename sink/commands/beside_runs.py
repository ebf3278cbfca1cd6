"""Opens tables for commands that work beside runs of the sink."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from sink.config import Config
from sink.sources.engine import Engine, is_running
from sink.sources.source import Source
from sink.spark.engine import SparkEngine
from sink.spark.sample import SparkSample
from sink.table.keys import table_key, with_key
from sink.table.microbatch import TableSink
from sink.table.patterns import ResolvedTable
from sink.table.plan import plan_table
from sink.targets.catalogs import Catalogs


def open_beside_runs(spark: SparkSession, config: Config, resolved: ResolvedTable, source: Source) -> TableSink:
    """Open a table that runs of the sink may write at the same time.

    :raises RowdeltaError: it doesn't exist, or doesn't fit the configuration.
    """
    catalogs = Catalogs(spark, config)
    if resolved.error is not None:
        raise resolved.error
    table = catalogs.existing(resolved.section.target)
    key = table_key(config, resolved, table, SparkSample(spark, config, resolved.section, source))
    plan = plan_table(catalogs, config, with_key(resolved, key), table)
    return TableSink(config, resolved, table, plan, key, source, None, SparkEngine(config, table, None), is_guest=True)


@contextmanager
def delivering(spark: SparkSession, config: Config) -> Iterator[None]:
    """Inside this context topics get what is in the database's log: if no run does it, Debezium's engine is started.
    Before the first run nothing is: the connector's snapshot is for a run to begin.

    :raises RowdeltaError: the engine can't run.
    """
    buffer = None if config.source.buffer is None else Path(config.source.buffer)
    if buffer is None or not (buffer / "state.json").exists() or is_running(buffer):
        yield
        return
    once = config.sink.model_copy(update={"trigger": "available-now"})  # it gives up if the database doesn't answer
    engine = Engine(spark, config.model_copy(update={"sink": once}))
    engine.start()
    try:
        engine.catch_up()
        yield
    finally:
        engine.stop()
