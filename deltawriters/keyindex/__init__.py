"""Where the row of each key is: a persistent map key -> (data file, position) that grows with the table. This package
knows no Spark.

The map is a log-structured index over the space of key hashes. So the cost of a micro-batch depends on the size of its
changes, not on the size of the table.

Key     128 bits, `high` and `low`: two polynomials of the key (`high_hash`, `low_hash`), each at a random base of its
        own. Tasks own ranges of `high`. Two keys have the same half with a chance of at most n/2^61 (n 32-bit words a
        key), so 10^8 keys and 10^9 probes confuse two keys with a chance below 10^-18. If the table has buckets, `high`
        is 10 bits of the bucket's number and 54 bits of the hash: then the chance is below 10^-16. The index doesn't
        store the keys.
Run     an immutable file of entries (high, low, file, pos), 24 bytes each, sorted by key. It is mapped into memory,
        never loaded. Each run names its data files itself, so there is no global registry to rewrite.
Age     each run has a `sequence`; a higher sequence is newer. The tasks of one micro-batch write runs of the same
        sequence, each task for its own range of `high`, so these runs hold different keys. Each micro-batch may cut the
        ranges in another way.
Entry   an entry that the sink writes for a change *supersedes*: no older entry of its key is live. A tombstone
        supersedes too, and has no row. An entry that was read from another writer's file is *additive*: older rows of
        the key stay live, since other writers may write a key twice.
Order   where late changes are told, each entry has the order value of its row or delete (`deltawriters.order_values`),
        for a 64-bit number 13 bytes. A tombstone stays until its time is over, and an index that is built again reads
        those of earlier deletes from the table's folder (`deltawriters.tombstones`): they say nothing of rows.
Dead    the runs keep their entries of a data file that was removed. Instead, the index lists the file with a sequence,
        and entries of older runs that point to the file have no row any more. They still hide the entries that they
        superseded. A file that is read again (someone deleted rows from it) is listed with the sequence of the run that
        holds the new reading.
Probe   a look-up reads the newest run first. When an entry supersedes, the look-up of its key ends, so most keys never
        reach the old runs.
Merge   a merge makes one run of runs that are adjacent in age, with the sequence of the newest. For each key it keeps
        the live entries up to the first that supersedes. Tombstones stay while older runs exist. `plan_merge` is
        size-tiered, and keeps an index at two to three entries a key: an entry is rewritten about log4(n) + 2 times.

    slice = IndexSlice(location, io_properties, runs, dead, merge, drop_tombstones)   # per micro-batch, for the tasks
    located = slice.probe(high, low, first, last)                                     # what the task's keys replace
    written = [write_run(io, location, "4f1c-0", sequence, entries), *slice.write_merged("4f1c-0-m", first, last)]

The committer records which runs and dead files belong to which table snapshot. A damaged file raises
`CorruptIndexError`; then the caller builds the index again from the table.
"""

from deltawriters.keyindex.hashing import BASE, distinct, high_hash, low_hash, of_deletes, of_versions, random_base
from deltawriters.keyindex.index import ClosedRows, IndexSlice, Located, plan_merge
from deltawriters.keyindex.runs import (
    DELETED_BEFORE,
    RUN_ENTRIES,
    SUPERSEDES,
    TOMBSTONE,
    CorruptIndexError,
    Entries,
    IndexedFile,
    Run,
    RunInfo,
    open_run,
    run_files,
    write_run,
)

__all__ = [
    "BASE",
    "DELETED_BEFORE",
    "RUN_ENTRIES",
    "SUPERSEDES",
    "TOMBSTONE",
    "ClosedRows",
    "CorruptIndexError",
    "Entries",
    "IndexSlice",
    "IndexedFile",
    "Located",
    "Run",
    "RunInfo",
    "distinct",
    "high_hash",
    "low_hash",
    "of_deletes",
    "of_versions",
    "open_run",
    "plan_merge",
    "random_base",
    "run_files",
    "write_run",
]
