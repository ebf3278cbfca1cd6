"""Decodes raw records of the source into changelog rows with a table's columns, by the configured format."""

import functools
from collections.abc import Callable

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from changelog.changes import MOVED_AWAY, RAW_SCHEMA
from changelog.decoding import ChangelogDecoder, Stated, spark_schema
from changelog.formats.row_kind_parquet import SOURCE, FileReader, columns_to_read
from changelog.rows import BLOCK, FILE, ROW
from sink.config import Config
from sink.spark.computed import compute
from sink.spark.exchange import Step, in_arrow
from sink.spark.expressions import quoted
from sink.spark.tasks import decode
from sink.table.table_plan import TablePlan


class RecordDecoder:
    """Decodes one table's records in Python.

    :param observe: is called with types that the table can't store (`changelog.observed_types.Observed`). Parquet files
        declare theirs.
    :param observe_stated: is called with what messages state of their table (`changelog.decoding.Stated`).
    :param batch_rows: most rows of the batches that tasks make.
    """

    reader: FileReader | None
    """Reads whole Parquet files. None if the table's changes need Spark too."""

    def __init__(
        self,
        config: Config,
        plan: TablePlan,
        observe: Callable[[dict[str, str]], None],
        observe_stated: Callable[[Stated], None],
        batch_rows: int,
    ) -> None:
        self._plan = plan
        self._is_parquet = config.source.type == "files" and config.source.file_format == "parquet"
        self.decoder = ChangelogDecoder(
            config.source.format, plan.changelog, None if self._is_parquet else observe, observe_stated
        )
        is_whole = self._is_parquet and plan.is_decoded_whole
        self.reader = FileReader(plan.changelog, batch_rows) if is_whole else None

    def changes(self, records: DataFrame) -> DataFrame:
        """The changes as Spark rows."""
        return compute(self.changes_into(None, spark_schema(self._plan.changelog), records), self._plan)

    def changes_into(self, step: Step | None, schema: str | T.StructType, records: DataFrame) -> DataFrame:
        """Decode records and run `step` on the changes, in the same Python tasks.

        :param schema: schema of the result.
        """
        step_of, names = decode.decode, [*RAW_SCHEMA.names, MOVED_AWAY, FILE, BLOCK]
        names += self._plan.changelog.headers
        if self._is_parquet:
            step_of, names = decode.decode_columns, [*columns_to_read(self._plan.changelog).names, SOURCE, FILE, ROW]
        found = [name for name in names if name in records.columns]
        if found != records.columns:  # a selection costs the plan a step
            records = records.select(*map(quoted, found))
        return in_arrow(records, functools.partial(step_of, self.decoder, step), schema)
