"""Which table of the source a message is about. A topic may have messages of several tables, whose keys and columns say
nothing of each other.

Formats say the names (`changelog.changes.TableNames`), as `shop.orders`: the parts that the messages have, of database,
schema and table. A pattern has `*` for any text and `?` for a character; case counts. It fits a name of three parts
also without the first: `public.orders` fits `shop.public.orders`.
"""

import functools
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from changelog.changes import Changes, MessageKey, Rejected, SnapshotMarks, TableNames
from changelog.rows import FILE, ROW

Rows = npt.NDArray[np.int64]
Found = Changes | Rejected | MessageKey | TableNames | SnapshotMarks


def table_names(record: pa.Array, *parts: pa.Array) -> TableNames:
    """The names of messages' tables.

    :param record: int64; row numbers in the raw batch.
    :param parts: the names' parts, the table last: string, or another type where a message has no name. A message
        without the last part names no table; other parts may be missing.
    """
    texts = [part if pa.types.is_string(part.type) else pa.nulls(len(record), pa.string()) for part in parts]
    present = [pc.if_else(pc.greater(pc.binary_length(text), 0), text, pa.scalar(None, pa.string())) for text in texts]
    # Arrow's own joining without nulls loses rows where all parts are null
    dotted = [pc.coalesce(pc.binary_join_element_wise(part, "", "."), "") for part in present[:-1]]
    return TableNames(record, pc.binary_join_element_wise(*dotted, present[-1], ""))


def takes(patterns: Sequence[str | re.Pattern[str]], name: str) -> bool:
    """Whether an entry with these `source_tables`, or regular expressions for them, takes the messages of a table."""
    return any(
        matched(pattern, name) is not None
        if isinstance(pattern, re.Pattern)
        else any(fnmatchcase(each, pattern.replace("[", "[[]")) for each in _spellings(name))
        for pattern in patterns
    )


def matched(pattern: re.Pattern[str], name: str) -> re.Match[str] | None:
    """How a regular expression matches the whole name of a table."""
    return next((match for each in _spellings(name) if (match := pattern.fullmatch(each)) is not None), None)


def _spellings(name: str) -> list[str]:
    return [name, name.partition(".")[2]] if name.count(".") > 1 else [name]


class Named:
    """Which of the source's tables messages are of.

    :param found: what a format made of the messages.
    """

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found

    @cached_property
    def changing(self) -> dict[str, Rows]:
        """Row numbers of the messages that change rows, or can't be applied, by the table that they name. Ignored ones,
        such as those of DDL, say nothing of which tables a topic has: Canal and DMS send them to each.
        """
        count = 1 + max((rows.max(initial=-1) for rows in self._all.values()), default=-1)
        is_changing = np.isin(np.arange(count), self.effective)
        rows = {name: rows[is_changing[rows]] for name, rows in self._all.items()}
        return {name: some for name, some in rows.items() if len(some)}

    @cached_property
    def effective(self) -> Rows:
        """Row numbers of the messages that change rows, or can't be applied, whatever they name."""
        parts = [part.record.to_numpy() for part in self._found if isinstance(part, Changes | Rejected)]
        return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))

    def strangers(self, patterns: Sequence[str]) -> dict[str, Rows]:
        """Row numbers of all messages of the tables that no pattern takes, by table."""
        return {name: rows for name, rows in self._all.items() if not takes(patterns, name)}

    @cached_property
    def _all(self) -> dict[str, Rows]:
        by_name: dict[str, Rows] = {}
        for part in self._found:
            if isinstance(part, TableNames):
                names = part.name.dictionary_encode()
                numbers = names.indices.fill_null(-1).to_numpy()
                rows = part.record.to_numpy()[np.argsort(numbers, kind="stable")]
                ends = np.cumsum(np.bincount(numbers + 1, minlength=len(names.dictionary) + 1))
                for name, of_name in zip(names.dictionary.to_pylist(), np.split(rows, ends)[1:-1], strict=True):
                    by_name[name] = np.concatenate([by_name.get(name, np.empty(0, np.int64)), of_name])
        return by_name


def place_columns(records: pa.RecordBatch) -> tuple[str, str]:
    """The columns of raw records that say where each one is in the source."""
    return (FILE, ROW) if ROW in records.schema.names else ("partition", "offset")


def first_place(records: pa.RecordBatch, rows: Rows) -> tuple[int, int]:
    """Partition and offset of the first of some records, in the lowest partition; or file and row, in the first file. A
    batch may have several, in any order.
    """
    partition, offset = (
        pc.fill_null(records.column(name).take(pa.array(rows)), -1).to_numpy() for name in place_columns(records)
    )
    first = np.lexsort([offset, partition])[0]
    return int(partition[first]), int(offset[first])


def with_tombstones(records: pa.RecordBatch, rows: Rows) -> Rows:
    """Messages, and the tombstones of the same key that come right after one of them."""
    if not records.column("value").null_count:
        return rows
    after = np.intersect1d(rows + 1, np.flatnonzero(records.column("value").is_null()))
    at, before = pa.array(after), pa.array(after - 1)
    columns = [records.column(name) for name in ("key", "partition", "source")]
    same = functools.reduce(pc.and_, [pc.equal(column.take(at), column.take(before)) for column in columns])
    return np.union1d(rows, after[pc.fill_null(same, False).to_numpy(zero_copy_only=False)])
