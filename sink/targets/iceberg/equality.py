"""Equality deletes: keys whose rows in earlier snapshots must be deleted (spec, "Equality Delete Files")."""

from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.schema import Schema

from deltawriters.content import ContentFile, FileContent, Partition
from deltawriters.deletes import KeyDeletes
from deltawriters.parquet import ParquetFileWriter
from deltawriters.table import FileFactory
from sink.targets.iceberg.column_metrics import metrics_of
from sink.targets.iceberg.content_files import content_file

if TYPE_CHECKING:
    from sink.targets.iceberg.writers import IcebergTableSpec


class EqualityDeletes(KeyDeletes):
    """Writes equality delete files of the key columns.

    Under a partitioned spec, an equality delete applies only to data files of the same spec and partition value. Under
    an unpartitioned spec it applies to all data files (spec, "Scan Planning").
    """

    def __init__(self, table: "IcebergTableSpec", factory: FileFactory, key: tuple[str, ...]) -> None:
        self._table = table
        self._factory = factory
        fields = [table.iceberg_schema.find_field(name) for name in key]
        self._schema = Schema(*fields)
        self._equality_ids = [field.field_id for field in fields]
        self._arrow_schema = pa.schema([table.arrow_schema.field(name) for name in key])
        self._done: list[ContentFile] = []

    def delete(self, keys: pa.Table, partition_sources: pa.Table) -> None:
        for partition, numbers in self._table.split_by_partition(partition_sources):
            everything = len(numbers) == keys.num_rows
            self._write(keys if everything else keys.take(pa.array(numbers)), partition)

    def delete_globally(self, keys: pa.Table) -> None:
        spec_id = self._table.unpartitioned_spec_id
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
        metrics = metrics_of(facts, self._schema, self._table.properties_by_name)
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
