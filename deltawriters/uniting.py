"""New deletion vectors of data files that may have one already: old and newly deleted positions united. No Spark: this
runs on the driver or in tasks (`sink.spark.deletes`), and each format writes the vectors in its own container.
"""

from pyroaring import BitMap64

from deltawriters.content import DataFile
from deltawriters.old_rows import DeleteGroup
from deltawriters.table import TableSpec


def unite(table: TableSpec, group: DeleteGroup[DataFile]) -> list[tuple[DataFile, BitMap64]]:
    """All deleted positions of each data file of a group, in the order of paths. A file whose rows somebody else has
    deleted already is left out: its vector stays.

    :raises LostVectorError: an old vector is missing or damaged.
    :raises CorruptIndexError: see `DeletedRows.positions`.
    """
    files = sorted(group.facts.values(), key=lambda file: file.path)
    earlier = dict(zip((file.path for file in files), table.deleted_in(files), strict=True))
    united = list[tuple[DataFile, BitMap64]]()
    for file, positions in group.rows.positions():
        old = earlier.pop(file.path)
        positions |= old
        if len(positions) > len(old):
            united.append((group.facts[file.path], positions))
    return united
