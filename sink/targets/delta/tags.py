"""The tags of the sink's data files in their `add`, by which it knows them again."""

import zlib

WRITER = "rowdelta.operation"
"""Tag of a data file: the commit of the sink that wrote it."""


VECTOR = "rowdelta.vector"
"""Tag of a data file: the commit of the sink that wrote its deletion vector."""


DELETED_AT = "rowdelta.deleted-at"
"""Tag of a data file: the version of the sink's last commit that deleted rows of it, and where its vector is. Others
who delete rows keep the tag, with a vector of their own.
"""


POSITION = "rowdelta.position"
"""Tag of a data file to which rows were moved: the commit whose position the table had then."""


SCHEMA = "rowdelta.schema"
"""Tag of a data file: for which columns it was written (`schema_tag`). Files of other columns are not merged."""


def schema_tag(schema: str) -> str:
    """:param schema: `schemaString` of the table's metadata."""
    return f"{zlib.crc32(schema.encode()):08x}"
