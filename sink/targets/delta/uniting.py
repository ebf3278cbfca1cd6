"""New deletion vectors of data files that may have one already: old and newly deleted positions united. No Spark: this
runs on the driver or in tasks (`sink.spark.deletes`).
"""

from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
from pyroaring import BitMap64

from deltawriters.old_rows import DeleteGroup
from deltawriters.vectors import LostVectorError
from sink.targets.delta.deletes import write_vectors
from sink.targets.delta.vectors import Descriptor, read_vectors
from sink.targets.delta.writers import DeltaTableSpec


@dataclass(frozen=True)
class Before:
    """A data file as the log has it.

    :param rows: rows in the file, live or not. None if the log doesn't say.
    :param vector: its live vector.
    """

    rows: int | None
    vector: Descriptor | None


@dataclass(frozen=True)
class After:
    """A data file from which rows are deleted that were live.

    :param rows: rows in the file, live or not.
    :param vector: its new vector. None if no row is live any more.
    """

    path: str
    rows: int
    vector: dict[str, Any] | None


def unite(table: DeltaTableSpec, group: DeleteGroup[Before], created: list[str]) -> list[After]:
    """Write the new vectors of a group into one file. A file whose rows somebody else has deleted already gets none.

    :param created: the path of the file is added to it before the file is written.
    :raises LostVectorError: a live vector is missing or damaged.
    :raises CorruptIndexError: see `DeletedRows.positions`.
    """
    before = _live_vectors(table, group)
    after = list[After]()
    changed = dict[str, tuple[int, BitMap64]]()
    for file, positions in group.rows.positions():
        path, old = file.path, before.pop(file.path, None)
        if old is not None:
            positions |= old
            if len(positions) == len(old):
                continue
        rows = group.facts[path].rows
        if rows is None:
            rows = _counted(table, path)
        if len(positions) < rows:
            changed[path] = rows, positions
        else:
            after.append(After(path, rows, None))
    vectors = write_vectors(table, [positions for _, positions in changed.values()], created)
    after += [After(path, rows, vector) for (path, (rows, _)), vector in zip(changed.items(), vectors, strict=True)]
    return after


def _live_vectors(table: DeltaTableSpec, group: DeleteGroup[Before]) -> dict[str, BitMap64]:
    known = {path: fact.vector for path, fact in sorted(group.facts.items()) if fact.vector is not None}
    try:
        return dict(zip(known, read_vectors(table.io, table.location, list(known.values())), strict=True))
    except (FileNotFoundError, ValueError) as error:  # after others, the storage may answer the next time
        raise LostVectorError(str(error)) from error


def _counted(table: DeltaTableSpec, path: str) -> int:
    with table.io.new_input(path).open() as stream:
        return int(pq.ParquetFile(stream).metadata.num_rows)
