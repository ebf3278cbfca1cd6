"""Which tables of the source raw records name: a Spark job that does nothing else."""

import functools

from pyspark.sql import DataFrame

from changelog.changes import RAW_SCHEMA
from changelog.decoding import ChangelogDecoder
from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.errors import TemporaryError
from sink.spark.exchange import in_arrow
from sink.spark.job_errors import JOB_ERRORS, job_error
from sink.spark.tasks.decode import name_tables


def table_names(config: Config, topic: str, records: DataFrame) -> set[str]:
    """The names in raw records of a topic. Records that are ignored, such as DDL, don't count.

    :raises TemporaryError: the records couldn't be read or decoded.
    """
    source = config.source
    spec = ChangelogSpec((), (), source_order=False, options=source.format_options, show_values=config.sink.show_values)
    step = functools.partial(name_tables, ChangelogDecoder(source.format, spec))
    try:
        return {row.name for row in in_arrow(records.select(*RAW_SCHEMA.names), step, "name string").collect()}
    except JOB_ERRORS as error:
        raise TemporaryError(f"can't search for the tables in a topic. {job_error(topic, error)}") from error
