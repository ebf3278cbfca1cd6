"""Equality deletes: keys whose rows in earlier snapshots must be deleted (spec, "Equality Delete Files")."""

import pyarrow as pa
from pyiceberg.schema import Schema

from deltawriters.content import ContentFile, FileContent, Partition
from deltawriters.files import FileFactory
from deltawriters.parquet import ParquetFileWriter
from deltawriters.partitioning import split_by_partition
from deltawriters.table import TableSpec


class EqualityDeletes:
    """Writes equality delete files of the key columns.

    Under a partitioned spec, an equality delete applies only to data files of the same spec and partition value. Under
    an unpartitioned spec it applies to all data files (spec, "Scan Planning").
    """

    def __init__(self, table: TableSpec, factory: FileFactory, key: tuple[str, ...]) -> None:
        self._table = table
        self._factory = factory
        fields = [table.iceberg_schema.find_field(name) for name in key]
        self._schema = Schema(*fields)
        self._equality_ids = tuple(field.field_id for field in fields)
        self._arrow_schema = pa.schema([table.arrow_schema.field(name) for name in key])
        self._done: list[ContentFile] = []

    def delete(self, keys: pa.Table, partition_sources: pa.Table) -> None:
        """Delete `keys` from their partitions.

        :param keys: key columns, n rows.
        :param partition_sources: the partition source columns, n rows; row i tells the partition of key i.
        """
        for partition, numbers in split_by_partition(
            self._table.current_spec, self._table.iceberg_schema, partition_sources
        ):
            everything = len(numbers) == keys.num_rows
            self._write(keys if everything else keys.take(pa.array(numbers)), partition)

    def delete_globally(self, keys: pa.Table) -> None:
        """Delete `keys` from all partitions.

        :raises ValueError: the table has no unpartitioned spec.
        """
        spec_id = self._table.unpartitioned_spec_id
        if spec_id is None:
            raise ValueError(
                f"the table at {self._table.location} has no unpartitioned spec, which global equality deletes need"
            )
        self._write(keys, Partition(self._table.specs_by_id[spec_id], ()))

    def close(self) -> list[ContentFile]:
        """All equality delete files written."""
        return self._done

    def _write(self, keys: pa.Table, partition: Partition) -> None:
        if not keys.num_rows:
            return
        writer = ParquetFileWriter(self._table, self._factory.new_path(partition), self._schema, self._arrow_schema)
        writer.write(keys.select(self._arrow_schema.names))
        size, metrics = writer.close()
        self._done.append(
            ContentFile(
                FileContent.EQUALITY_DELETES,
                writer.path,
                partition,
                keys.num_rows,
                size,
                metrics=metrics,
                equality_ids=self._equality_ids,
            )
        )
