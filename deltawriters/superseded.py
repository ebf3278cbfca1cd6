"""Rows of a commit that a later change of the same commit superseded, where the table gets no deletes
(`deletes: copy-on-write`): their files are written again before the commit.

Only a task that flushed its rows, and then got a later change of one of their keys, has such rows.
"""

import numpy as np

from deltawriters.collapse import Ints, grouped
from deltawriters.content import ContentFile, DataFile, DataFiles, Locations
from deltawriters.deletes import Deletes
from deltawriters.parquet import ROW_GROUP_BYTES, joined
from deltawriters.partitioning import PartitionedWriter
from deltawriters.resolve import indexed
from deltawriters.table import FileFactory, TableSpec


class SupersededRows(Deletes):
    """Collects the superseded rows of a task.

    :param lasting: see `PartitionedWriter`.
    """

    def __init__(self, table: TableSpec, factory: FileFactory, files: DataFiles, *, lasting: bool) -> None:
        self._table = table
        self._factory = factory
        self._files = files
        self._lasting = lasting
        self._pending: list[tuple[Ints, Ints]] = []

    def delete(self, file: Ints, pos: Ints) -> None:
        if len(file):
            self._pending.append((file, pos))

    def close(self, data_files: list[ContentFile]) -> list[ContentFile]:
        return data_files

    def removed(self, data_files: list[ContentFile], places: Locations) -> list[ContentFile]:
        """Write the files that have such rows again without them, about a row group at a time.

        :param data_files: the data files that the task wrote.
        :param places: places of live rows. They are changed to where the rows are then.
        :return: the data files then.
        """
        if not self._pending:
            return data_files
        file, pos = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        self._pending = []
        writer = PartitionedWriter(self._table, self._factory, self._files, lasting=self._lasting)
        described = {described.path: described for described in data_files}
        # files that are written meanwhile have other numbers
        rows_of = dict(grouped(places.file))
        try:
            for number, chosen in grouped(file):
                old = described.pop(self._files.path(number))
                place = indexed(old.path, self._files.partition(number))
                new = Locations(np.full(old.record_count, -1), np.full(old.record_count, -1))
                left_out = np.unique(pos[chosen])
                parts = self._table.rows(DataFile(place), left_out=left_out)
                for kept, rows in joined(parts, ROW_GROUP_BYTES):
                    located = writer.write(rows)
                    new.file[kept], new.pos[kept] = located.file, located.pos
                here = rows_of.get(number, chosen[:0])
                places.file[here], places.pos[here] = new.file[places.pos[here]], new.pos[places.pos[here]]
                self._table.io.delete(old.path)
            return [*described.values(), *writer.close()]
        except BaseException:
            writer.abort()
            raise
