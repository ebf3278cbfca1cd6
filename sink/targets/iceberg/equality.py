"""Equality deletes: keys whose rows in earlier snapshots must be deleted (spec, "Equality Delete Files")."""

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from deltawriters.content import ContentFile, FileContent, Partition
from deltawriters.deletes import KeyDeletes
from deltawriters.parquet import ParquetFileWriter
from deltawriters.table import FileFactory, TableSpec
from sink.targets.iceberg.column_metrics import metrics_of
from sink.targets.iceberg.content_files import content_file


class EqualityDeletes(KeyDeletes):
    """Writes equality delete files of the key columns.

    Under a partitioned spec, an equality delete applies only to data files of the same spec and partition value. Under
    an unpartitioned spec it applies to all data files (spec, "Scan Planning").

    :param key: the key's fields of the table's schema.
    :param unpartitioned_spec_id: None if the table has no such spec.
    :param properties: of the table, by name.
    """

    def __init__(
        self,
        table: TableSpec,
        factory: FileFactory,
        key: Sequence[NestedField],
        unpartitioned_spec_id: int | None,
        properties: Mapping[str, str],
    ) -> None:
        self._table = table
        self._factory = factory
        self._unpartitioned_spec_id = unpartitioned_spec_id
        self._properties = properties
        self._schema = Schema(*key)
        self._equality_ids = [field.field_id for field in key]
        self._arrow_schema = pa.schema([table.arrow_schema.field(field.name) for field in key])
        self._done: list[ContentFile] = []

    def delete(self, keys: pa.Table, partition_sources: pa.Table) -> None:
        for partition, numbers in self._table.split_by_partition(partition_sources):
            everything = len(numbers) == keys.num_rows
            self._write(keys if everything else keys.take(pa.array(numbers)), partition)

    def delete_globally(self, keys: pa.Table) -> None:
        spec_id = self._unpartitioned_spec_id
        if spec_id is None:
            raise ValueError(
                f"the table at {self._table.location} has no unpartitioned spec, which global equality deletes need"
            )
        self._write(keys, Partition(spec_id, "{}"))

    def close(self) -> list[ContentFile]:
        return self._done

    def _write(self, keys: pa.Table, partition: Partition) -> None:
        if not keys.num_rows:
            return
        path = self._factory.new_path(partition)
        writer = ParquetFileWriter(self._table.io, path, self._arrow_schema, self._table.compression)
        writer.write(keys.select(self._arrow_schema.names))
        facts = writer.close()
        metrics = metrics_of(facts, self._schema, self._properties)
        self._done.append(
            content_file(
                FileContent.EQUALITY_DELETES,
                path,
                partition,
                facts.rows,
                facts.size_in_bytes,
                metrics,
                equality_ids=self._equality_ids,
            )
        )
