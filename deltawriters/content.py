"""Descriptors of written files: what every table format has in common, and the format's own description."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FileContent(Enum):
    """What a file holds. The names are those of Iceberg's `FileContent`."""

    DATA = "DATA"
    POSITION_DELETES = "POSITION_DELETES"
    EQUALITY_DELETES = "EQUALITY_DELETES"


@dataclass(frozen=True)
class Partition:
    """A partition value as JSON text in the table format's own terms. The key index stores it so, and nobody but the
    format looks into it. So a partition stays usable even if a column that it derives from was dropped.

    :param spec_id: id of the layout under which the values count: Iceberg's partition spec. Always 0 if a table has
        only one layout.
    """

    spec_id: int
    text: str


@dataclass(frozen=True)
class ContentFile:
    """One written data or delete file.

    :param record_count: rows of a data file, or deletes of a delete file.
    :param description: the JSON object from which the commit adds the file to the table, with everything that the
        commit needs, since it doesn't open the file. For Iceberg, it is what `ContentFileParser` reads.
    :param vector: path of a data file and its deletion vector in the format's own terms, with `record-count`, if the
        description has one.
    """

    content: FileContent
    path: str
    record_count: int
    size_in_bytes: int
    description: Mapping[str, Any] = field(hash=False)
    vector: tuple[str, Mapping[str, Any]] | None = field(default=None, hash=False)
