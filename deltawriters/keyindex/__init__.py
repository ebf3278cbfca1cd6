"""Where the row of each key is: a persistent map key -> (data file, position) that grows with the table. No Spark.

It is a log-structured index over the space of key hashes, so that a micro-batch costs what it changes, not what the
table holds.

Key     128 bits, `high` and `low`. `high` is Spark's xxhash64 of the key columns, which the shuffle needs anyway; `low`
        is an independent polynomial hash (`low_hash`). Two keys share xxhash64 by 2^-64 and the polynomial by at most
        n/2^61 (n 32-bit words a key), so 10^8 keys and 10^9 probes confuse two keys with a chance of about 10^-20. If
        the table has buckets, 10 bits of `high` are the bucket's number and 54 xxhash64's: below 10^-17. The keys
        aren't stored.
Run     an immutable file of entries (high, low, file, pos), 24 bytes each, sorted by key. Mapped into memory, never
        loaded. It names its data files itself, so there is no global registry to rewrite.
Age     runs have a `sequence`, higher is newer. Runs that share one were written by the tasks of one micro-batch, each
        for its own range of `high`, and hold different keys. Ranges may be cut differently in each micro-batch.
Entry   an own change *supersedes*: no older entry of its key is live. A tombstone supersedes and has no row. What was
        read from files that others wrote is *additive*: older rows of the key stay, a table that isn't ours may hold
        duplicates.
Dead    a removed data file isn't looked for in the runs: it is listed with a sequence, and entries that point to it
        from older runs count as no row. They still hide what they superseded. A file that is read anew (someone deleted
        from it) is listed with the sequence of the run that holds the new reading.
Probe   newest run first; a key leaves once an entry supersedes, so most keys never reach the old runs.
Merge   runs adjacent in age become one, of the newest one's sequence: per key the live entries up to the first that
        supersedes. Tombstones stay while older runs exist. `plan_merge` is size-tiered: an entry is rewritten about
        log4(n) times.

    slice = IndexSlice(location, io_properties, runs, dead, merge, drop_tombstones)   # per micro-batch, for the tasks
    located = slice.probe(high, low, first, last)                                     # what the task's keys replace
    written = [write_run(io, location, "4f1c-0", sequence, entries), *slice.write_merged("4f1c-0-m", first, last)]

Which runs and dead files belong to which table snapshot is for the committer to record. A broken file raises
`CorruptIndexError`: then the index can be built again from the table.
"""

from deltawriters.keyindex.hashing import BASE, low_hash, random_base
from deltawriters.keyindex.index import IndexSlice, Located, plan_merge
from deltawriters.keyindex.runs import (
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
from deltawriters.keyindex.xxhash64 import xxhash64

__all__ = [
    "BASE",
    "SUPERSEDES",
    "TOMBSTONE",
    "CorruptIndexError",
    "Entries",
    "IndexSlice",
    "IndexedFile",
    "Located",
    "Run",
    "RunInfo",
    "low_hash",
    "open_run",
    "plan_merge",
    "random_base",
    "run_files",
    "write_run",
    "xxhash64",
]
