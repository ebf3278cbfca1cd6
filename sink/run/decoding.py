"""Decodes raw records of the source into changelog rows with a table's columns, by the configured format."""

import functools
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from changelog.changes import MOVED_AWAY, RAW_SCHEMA
from changelog.decoding import ChangelogDecoder, Stated, spark_schema
from changelog.moves import marked
from changelog.row_kind_columns import columns_decoder, completed
from changelog.row_kind_parquet import PlainRows
from changelog.rows import BLOCK, FILE
from changelog.spec import ChangelogSpec
from sink.config import Config
from sink.run.computed import compute
from sink.run.table_plan import TablePlan
from sink.spark import task
from sink.spark.exchange import Step, in_arrow


class RecordDecoder:
    """Decodes one table's records in Python. Only Parquet files that aren't plain are decoded by Spark's expressions.

    :param observe: is called with types that the table can't store (`changelog.decoding.Observed`).
    :param observe_stated: is called with what messages state of their table (`changelog.decoding.Stated`).
    :param batch_rows: most rows of the batches that tasks make.
    """

    plain: PlainRows | None
    """Decodes whole Parquet files. None if the table's files need Spark's reader."""

    def __init__(
        self,
        config: Config,
        plan: TablePlan,
        observe: Callable[[dict[str, str]], None],
        observe_stated: Callable[[Stated], None],
        batch_rows: int,
    ) -> None:
        self._plan = plan
        self._by_spark = self._in_python = self.plain = None
        if config.source.type == "files" and config.source.file_format == "parquet":
            self._by_spark = columns_decoder(plan.changelog)
            self.plain = PlainRows.of(plan.changelog, batch_rows) if plan.is_decoded_whole else None
        else:
            self._in_python = ChangelogDecoder(config.source.format, plan.changelog, observe, observe_stated)

    @property
    def ends_in_python(self) -> bool:
        """Whether Python does everything, so that `changes_into` can be used."""
        return self._in_python is not None and self._plan.is_decoded_whole

    def changes(self, records: DataFrame) -> DataFrame:
        """The changes as Spark rows."""
        spec = self._plan.changelog
        if self._by_spark is not None:
            decoded = self._by_spark(completed(records, spec))
        else:
            decoded = self.changes_into(None, spark_schema(spec), records)
        return compute(decoded, self._plan)

    def changes_into(self, step: Step | None, schema: str | T.StructType, records: DataFrame) -> DataFrame:
        """Decode records and run `step` on the changes, in the same Python tasks.

        :param schema: schema of the result.
        """
        assert self._in_python is not None
        names = [name for name in (*RAW_SCHEMA.names, MOVED_AWAY, FILE, BLOCK) if name in records.columns]
        return in_arrow(records.select(*names), functools.partial(task.decode, self._in_python, step), schema)

    def before(self, step: Step) -> Step:
        """The step, with what it needs before it on the rows of `changes`."""
        if self._by_spark is None or not self._plan.changelog.key:
            return step
        return functools.partial(_on_marked, self._plan.changelog, step)


def _on_marked(spec: ChangelogSpec, step: Step, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return step(marked(spec, changes))
