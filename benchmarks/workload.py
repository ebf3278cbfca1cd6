"""The benchmarks' changelog: bank accounts, loaded once and then changed in micro-batches with a few hot keys.

A benchmark of a CDC sink is only worth something if the changelog is one that a database could have written, and if the
table can be checked afterwards. So the workload keeps the source table itself (numpy arrays indexed by account id) and
derives both from it: the change rows, where each -U and -D carries the row exactly as it was before, and the content
that the sink's table must have in the end. All of it follows from `rows`, `seed` and the sizes, none from the clock.

    workload = Workload(rows=2_000_000, seed=1)
    workload.initial()           # Arrow tables of +I rows
    workload.batch(100_000)      # one micro-batch: 100,000 events in 170,000 change rows
    workload.expected_table()    # the accounts that are left, by id

`write_dataset` writes all of it as Parquet files for Spark's file stream; `python -m benchmarks.workload` tries it out.

Every name and note is a function of (id, version), put together from a pool of words: the strings need not be stored
here, and yet compress no better than real text does (to about 50 bytes a row).
"""

import argparse
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

TABLE_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("region", pa.string()),
        ("balance", pa.decimal128(12, 2)),
        ("name", pa.string()),
        ("note", pa.string()),
        ("updated_at", pa.timestamp("us", "UTC")),
        ("version", pa.int64()),
    ]
)
"""The accounts table; `id` is its key."""

CHANGE_SCHEMA = pa.schema([pa.field("row_kind", pa.string()), pa.field("seq", pa.int64()), *TABLE_SCHEMA])
"""A change row: the kind, the number of the event (an update's -U and +U share it), and the account's row."""

SPARK_TABLE_SCHEMA = (
    "id BIGINT, region STRING, balance DECIMAL(12, 2), name STRING, note STRING, updated_at TIMESTAMP, version BIGINT"
)
SPARK_CHANGE_SCHEMA = f"row_kind STRING, seq BIGINT, {SPARK_TABLE_SCHEMA}"

ZIPF_EXPONENT = 1.1
UPDATE_SHARE, INSERT_SHARE, DELETE_SHARE = 0.7, 0.2, 0.1
Keys = Literal["zipf", "uniform", "newest"]
"""Which accounts are updated and deleted: a few hot ones mostly, all alike, or those of the newest `NEWEST_SHARE`."""
NEWEST_SHARE = 0.05
MOVE_SHARE = 0.1
"""Share of the updates that also move the account to another region, so that partition values change."""

REGIONS = pa.array(["af-south", "ap-east", "ap-south", "ca-central", "eu-north", "eu-west", "sa-east", "us-west"])
ROW_KINDS = pa.array(["+I", "-U", "+U", "-D"])

_PLUS_I, _MINUS_U, _PLUS_U, _MINUS_D = range(4)
_INSERT, _UPDATE, _DELETE = range(3)  # an account's life: in this order they may follow each other within a batch

_FIRST_CHANGE_US = 1_735_689_600_000_000  # 2025-01-01T00:00:00Z
_EVENT_INTERVAL_US = 1_250
_FIRST_FILE_TIME_S = 1_735_689_600
_POOL_BITS = 12


@dataclass(frozen=True)
class Totals:
    """The answer to the benchmarks' scan: `count(*), sum(balance), max(version)`."""

    count: int
    balance: Decimal
    version: int


@dataclass(frozen=True)
class Dataset:
    """A workload on disk. Index 0 of `changes` and `totals` is the initial load, index i the i-th micro-batch."""

    changes: tuple[tuple[Path, ...], ...]
    """Files of change rows, in order; their modification times rise in the same order."""
    totals: tuple[Totals, ...]
    """The table's right totals after each micro-batch."""
    expected: dict[int, Path]
    """Parquet files (`TABLE_SCHEMA`) of the whole table after some of the micro-batches."""

    @property
    def initial(self) -> tuple[Path, ...]:
        return self.changes[0]

    @property
    def batches(self) -> int:
        return len(self.changes) - 1


@dataclass(frozen=True)
class Shape:
    """What the changes of a micro-batch are. The rest of the shares are inserts.

    :param zipf: exponent of the distribution from which updates and deletes draw their accounts. 0 is uniform.
    :param event_interval_us: microseconds of `updated_at` between two events.
    """

    updates: float = UPDATE_SHARE
    deletes: float = DELETE_SHARE
    zipf: float = ZIPF_EXPONENT
    event_interval_us: int = _EVENT_INTERVAL_US


@dataclass
class _Rows:
    """Rows of the accounts table, one array per column that isn't derived from the others."""

    id: Ints
    region: Ints  # index into REGIONS
    cents: Ints
    changed: Ints  # number of the event that made the row so
    version: Ints

    def take(self, indices: Ints) -> "_Rows":
        return _Rows(
            self.id[indices],
            self.region[indices],
            self.cents[indices],
            self.changed[indices],
            self.version[indices],
        )

    def columns(self, event_interval_us: int) -> list[pa.Array]:
        """The columns of TABLE_SCHEMA."""
        return [
            pa.array(self.id),
            REGIONS.take(pa.array(self.region)),
            _decimals(self.cents),
            _text(_NAMES, _mix(self.id), 2),
            _text(_NOTES, _mix(_mix(self.id) + self.version.astype(np.uint64)), 10),
            pa.array(_FIRST_CHANGE_US + self.changed * event_interval_us).cast(TABLE_SCHEMA.field("updated_at").type),
            pa.array(self.version),
        ]


_EXPECTED_ROWS = 5_000_000


class Workload:
    """The source table, and the changes that led to its current state.

    Call `initial` first, then `batch` any number of times. Each call changes the table.
    """

    def __init__(
        self,
        rows: int = 2_000_000,
        seed: int = 1,
        inserts_from: int | None = None,
        keys: Keys = "zipf",
        shape: Shape | None = None,
        late: float = 0.0,
    ) -> None:
        """Create the source table with `rows` accounts, at version 1.

        :param inserts_from: from this micro-batch on (the first is 1), all events are inserts. None for never.
        :param late: share of the events that come one micro-batch late. All are updates of accounts with a later event
            that comes in time. So each of them has a lower number than a change of its account that came before it.
        """
        self._late = late
        self._held_back = CHANGE_SCHEMA.empty_table()
        self._keys = keys
        self._seed = seed
        self._shape = shape or Shape()
        self._inserts_from = inserts_from
        self._initial_rows = rows
        self._batches = 0
        self._next_seq = rows
        rng = np.random.default_rng((seed, 0))
        ids = np.arange(rows, dtype=np.int64)
        self._rows = _Rows(
            id=ids,
            region=rng.integers(len(REGIONS), size=rows),
            cents=rng.integers(1_000_000, size=rows),
            changed=ids.copy(),
            version=np.ones(rows, np.int64),
        )
        self._alive: Flags = np.ones(rows, np.bool_)
        # One fixed permutation of all ids, those of later inserts included: the order of a seeded hash. The live ids in
        # that order are what the Zipf ranks index, so hot keys are spread over the table and no dead key is drawn.
        self._ranked: Ints = ids[np.argsort(self._priority(ids), kind="stable")]

    def initial(self, chunk_rows: int = 500_000) -> Iterator[pa.Table]:
        """Yield the first load: +I rows (CHANGE_SCHEMA) by id, in tables of at most `chunk_rows` rows."""
        if self._batches:
            raise RuntimeError("initial() after batch(): the source table has moved on; create a new Workload")
        for start in range(0, self._initial_rows, chunk_rows):
            rows = self._rows.take(np.arange(start, min(start + chunk_rows, self._initial_rows)))
            yield self._change_table(np.full(len(rows.id), _PLUS_I), rows.changed, rows)

    def batch(self, events: int = 100_000) -> pa.Table:
        """Return the change rows (CHANGE_SCHEMA) of the next `events` events, in order, and apply them to the source.

        Updates draw their account from the shape's Zipf distribution over the live accounts, deletes from the same
        weights without replacement. An account may be changed many times, also in the batch that inserts it; a delete
        is the last event of its account within the batch. Accounts are never born again.

        With a share of late events, some events are held back, and those of the batch before come first.
        """
        self._batches += 1
        if self._batches == self._inserts_from:
            self._shape = replace(self._shape, updates=0.0, deletes=0.0)
        rng = np.random.default_rng((self._seed, self._batches))
        updates, deletes = (round(events * share) for share in (self._shape.updates, self._shape.deletes))
        new = self._insert_ids(events - updates - deletes)
        weights = self._weights()
        updated = self._ranked[_draw(rng, weights, updates)]
        late = round(events * self._late)
        if late:  # enough accounts must have several events
            updated[-late:] = rng.choice(updated[:-late], late)
        deleted = self._ranked[_draw_distinct(rng, weights, deletes)]

        # Each event gets a random place in the batch. The places of one account are then handed to its events in the
        # order insert, updates, delete: two sorts by account line them up, as both give each account the same slice.
        accounts = np.concatenate([new, updated, deleted])
        operations = np.repeat([_INSERT, _UPDATE, _DELETE], [len(new), updates, deletes])
        places = rng.permutation(events)
        by_place = np.lexsort((places, accounts))
        account, place = accounts[by_place], places[by_place]
        operation = operations[np.lexsort((operations, accounts))]

        before, after = self._replay(rng, account, operation, self._next_seq + place)
        self._next_seq += events
        self._ranked = self._ranked[self._alive[self._ranked]]

        in_order, held_back = np.argsort(place), np.zeros(events, np.bool_)
        if late:
            goes_on = np.r_[account[1:] == account[:-1], False]
            held_back[rng.choice(np.flatnonzero((operation == _UPDATE) & goes_on), late, replace=False)] = True
        in_time, later = (
            self._events_table(operation[chosen], before.take(chosen), after.take(chosen))
            for chosen in (in_order[~held_back[in_order]], in_order[held_back[in_order]])
        )
        changes = pa.concat_tables([self._held_back, in_time])
        self._held_back = later
        return changes

    def _weights(self) -> npt.NDArray[np.float64]:
        """How often an account is drawn, of those in `_ranked`."""
        if self._keys == "zipf":
            return np.arange(1, len(self._ranked) + 1, dtype=np.float64) ** -self._shape.zipf
        if self._keys == "uniform":
            return np.ones(len(self._ranked))
        oldest = np.sort(self._ranked)[-int(NEWEST_SHARE * len(self._ranked))]
        return np.where(self._ranked >= oldest, 1.0, 1e-300)

    def totals(self) -> Totals:
        """Add up the source table as it is now."""
        return Totals(
            count=int(self._alive.sum()),
            balance=Decimal(int(self._rows.cents[self._alive].sum())).scaleb(-2),
            version=int(self._rows.version[self._alive].max(initial=0)),
        )

    def expected_table(self) -> pa.Table:
        """Return the source table as it is now (TABLE_SCHEMA), by id."""
        alive = np.flatnonzero(self._alive)
        # in parts: one array can't hold the text of 50M rows
        parts = np.array_split(alive, len(alive) // _EXPECTED_ROWS + 1)
        return pa.concat_tables(
            pa.Table.from_arrays(self._rows.take(part).columns(self._shape.event_interval_us), schema=TABLE_SCHEMA)
            for part in parts
        )

    def live_ids(self) -> Ints:
        """The accounts that the source table has now."""
        return np.flatnonzero(self._alive)

    def _priority(self, ids: Ints) -> Hashes:
        return _mix(ids.astype(np.uint64) ^ _mix(np.array([self._seed])))

    def _insert_ids(self, count: int) -> Ints:
        """Make room for `count` new accounts, at version 0 until their insert is replayed, and rank them."""
        new = np.arange(len(self._alive), len(self._alive) + count, dtype=np.int64)
        nothing = np.zeros(count, np.int64)
        rows = self._rows
        self._rows = _Rows(
            id=np.concatenate([rows.id, new]),
            region=np.concatenate([rows.region, nothing]),
            cents=np.concatenate([rows.cents, nothing]),
            changed=np.concatenate([rows.changed, nothing]),
            version=np.concatenate([rows.version, nothing]),
        )
        self._alive = np.concatenate([self._alive, np.ones(count, np.bool_)])
        ordered = new[np.argsort(self._priority(new), kind="stable")]
        ranks = np.searchsorted(self._priority(self._ranked), self._priority(ordered))
        self._ranked = np.insert(self._ranked, ranks, ordered)
        return new

    def _replay(self, rng: np.random.Generator, account: Ints, operation: Ints, seq: Ints) -> tuple[_Rows, _Rows]:
        """Apply events, sorted by account and then by time; return each event's row before and after it.

        The row before an insert and the row after a delete mean nothing.
        """
        index = np.arange(len(account))
        first = np.r_[True, account[1:] != account[:-1]]
        last = np.r_[first[1:], True]
        start = np.maximum.accumulate(np.where(first, index, 0))
        at_start = self._rows.take(account)

        opening = rng.integers(1_000_000, size=len(index))
        movement = rng.integers(-50_000, 50_001, size=len(index))
        change = np.select([operation == _INSERT, operation == _UPDATE], [opening, movement], 0)
        running = np.cumsum(change)
        cents = at_start.cents + running - (running - change)[start]

        moves = (operation == _INSERT) | ((operation == _UPDATE) & (rng.random(len(index)) < MOVE_SHARE))
        destination = rng.integers(len(REGIONS), size=len(index))
        last_move = np.maximum.accumulate(np.where(moves, index, -1))
        region = np.where(last_move >= start, destination[last_move], at_start.region)

        after = _Rows(account, region, cents, seq, at_start.version + (index - start) + 1)
        before = _Rows(
            id=account,
            region=np.where(first, at_start.region, np.roll(after.region, 1)),
            cents=np.where(first, at_start.cents, np.roll(after.cents, 1)),
            changed=np.where(first, at_start.changed, np.roll(after.changed, 1)),
            version=after.version - 1,
        )

        ended = account[last]
        self._rows.region[ended] = after.region[last]
        self._rows.cents[ended] = after.cents[last]
        self._rows.changed[ended] = after.changed[last]
        self._rows.version[ended] = after.version[last]
        self._alive[ended] = operation[last] != _DELETE
        return before, after

    def _change_table(self, kinds: Ints, seq: Ints, rows: _Rows) -> pa.Table:
        columns = [ROW_KINDS.take(pa.array(kinds)), pa.array(seq), *rows.columns(self._shape.event_interval_us)]
        return pa.Table.from_arrays(columns, schema=CHANGE_SCHEMA)

    def _events_table(self, operation: Ints, before: _Rows, after: _Rows) -> pa.Table:
        """Turn events, in order, into change rows. An update becomes two rows, other events one."""
        counts = np.where(operation == _UPDATE, 2, 1)
        event = np.repeat(np.arange(len(operation)), counts)
        second = np.r_[False, event[1:] == event[:-1]]
        of_event = operation[event]
        kinds = np.select([of_event == _INSERT, of_event == _DELETE, second], [_PLUS_I, _MINUS_D, _PLUS_U], _MINUS_U)

        old = (kinds == _MINUS_U) | (kinds == _MINUS_D)
        rows = _Rows(
            id=after.id[event],
            region=np.where(old, before.region[event], after.region[event]),
            cents=np.where(old, before.cents[event], after.cents[event]),
            changed=np.where(old, before.changed[event], after.changed[event]),
            version=np.where(old, before.version[event], after.version[event]),
        )
        return self._change_table(kinds, after.changed[event], rows)


def write_dataset(
    workload: Workload,
    directory: Path,
    batches: int = 20,
    events: int = 100_000,
    files_per_batch: int = 2,
    initial_file_rows: int = 500_000,
    expected_after: Collection[int] = (),
) -> Dataset:
    """Write the initial load and `batches` micro-batches of a fresh workload below `directory`, which must not exist.

    A micro-batch is split into `files_per_batch` files between events, so an update's -U and +U stay together. Spark's
    file stream takes files by modification time; these rise by one second from file to file. The expected content is
    written after the micro-batches in `expected_after` (0 is the initial load).
    """
    if unknown := sorted(set(expected_after) - set(range(batches + 1))):
        raise ValueError(f"expected_after has batches {unknown}, but there are 0 to {batches}")
    directory.mkdir(parents=True)
    for folder in ("initial", "changes", "expected"):
        (directory / folder).mkdir()

    changes: list[tuple[Path, ...]] = []
    totals: list[Totals] = []
    expected: dict[int, Path] = {}
    files = 0

    def write(tables: Iterator[pa.Table], prefix: Path) -> None:
        nonlocal files
        paths: list[Path] = []
        for table in tables:
            paths.append(prefix.with_name(f"{prefix.name}-{len(paths):02d}.parquet"))
            _write_parquet(table, paths[-1])
            os.utime(paths[-1], (_FIRST_FILE_TIME_S + files, _FIRST_FILE_TIME_S + files))
            files += 1
        changes.append(tuple(paths))
        totals.append(workload.totals())
        batch = len(changes) - 1
        if batch in expected_after:
            expected[batch] = directory / "expected" / f"after-{batch:05d}.parquet"
            _write_parquet(workload.expected_table(), expected[batch])

    write(workload.initial(initial_file_rows), directory / "initial" / "part")
    for batch in range(1, batches + 1):
        write(_split(workload.batch(events), files_per_batch), directory / "changes" / f"batch-{batch:05d}")
    return Dataset(tuple(changes), tuple(totals), expected)


def publish(files: Sequence[Path], source: Path) -> None:
    """Make files appear in the folder that a stream watches: as hard links, which keep their modification times."""
    source.mkdir(parents=True, exist_ok=True)
    for file in files:
        os.link(file, source / file.name)


def totals(accounts: DataFrame) -> Totals:
    """Run the benchmarks' scan over a Spark table of accounts."""
    row = accounts.agg(F.count("*"), F.sum("balance"), F.max("version")).first()
    assert row is not None, "an aggregate without keys has one row"
    return Totals(count=row[0], balance=row[1] or Decimal(0), version=row[2] or 0)


def checksum(accounts: DataFrame, columns: Sequence[str] = TABLE_SCHEMA.names) -> int:
    """Return a checksum of these columns of all rows, whatever their order; a repeated row counts as often as it
    occurs.

    It is the sum of a 64-bit hash per row, so it can be compared only with the same function's result, over a table or
    over a Dataset's `expected` file.
    """
    row_hash = F.xxhash64(*columns).cast("decimal(38,0)")
    row = accounts.agg(F.sum(row_hash)).first()
    assert row is not None, "an aggregate without keys has one row"
    return int(row[0] or 0)


def _draw(rng: np.random.Generator, weights: npt.NDArray[np.float64], count: int) -> Ints:
    """Draw `count` indices, each with a chance in proportion to its weight."""
    cumulated = np.cumsum(weights)
    drawn: Ints = np.searchsorted(cumulated, rng.random(count) * cumulated[-1], side="right")
    return drawn


def _draw_distinct(rng: np.random.Generator, weights: npt.NDArray[np.float64], count: int) -> Ints:
    """Draw `count` indices by weight, each at most once. Each index gets an exponentially distributed time with its
    weight as the rate, and the earliest ones are drawn (Efraimidis 2006).
    """
    if count >= len(weights):
        raise ValueError(f"{count} deletes in a batch, but only {len(weights)} accounts: use fewer events or more rows")
    rings = rng.standard_exponential(len(weights)) / weights
    return np.argpartition(rings, count)[:count]


def _mix(values: npt.NDArray[np.int64] | Hashes) -> Hashes:
    """Hash 64-bit integers one by one; a bijection (the finaliser of SplitMix64)."""
    mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _pool(salt: int, shortest: int, longest: int) -> pa.Array:
    """Return 2**_POOL_BITS made-up words of `shortest` to `longest` letters."""
    rng = np.random.default_rng(salt)
    letters = rng.integers(ord("a"), ord("z") + 1, size=(1 << _POOL_BITS, longest), dtype=np.uint8)
    lengths = rng.integers(shortest, longest + 1, size=1 << _POOL_BITS)
    return pa.array([row[:length].tobytes().decode() for row, length in zip(letters, lengths, strict=True)])


_NAMES = _pool(1, 6, 13)
_NOTES = _pool(2, 4, 10)


def _text(pool: pa.Array, hashes: Hashes, count: int) -> pa.Array:
    """Return strings of `count` words each, chosen by the hash and by its own hashes."""
    words = []
    for _ in range(count):
        words.append(pool.take(pa.array(hashes >> np.uint64(64 - _POOL_BITS))))
        hashes = _mix(hashes)
    return pc.binary_join_element_wise(*words, " ")


def _decimals(cents: Ints) -> pa.Array:
    """Return cents as decimal(12, 2), by laying out Arrow's 128-bit little-endian integers."""
    words = np.empty((len(cents), 2), np.int64)
    words[:, 0] = cents
    words[:, 1] = cents >> 63
    return pa.Array.from_buffers(TABLE_SCHEMA.field("balance").type, len(cents), [None, pa.py_buffer(words)])


def _split(changes: pa.Table, parts: int) -> Iterator[pa.Table]:
    """Yield `changes` in `parts` slices with about as many rows each, cut between events."""
    seq = changes["seq"].to_numpy()
    cuts = [len(seq) * part // parts for part in range(parts)]
    edges = [int(np.searchsorted(seq, seq[cut])) for cut in cuts] + [len(seq)]
    for start, end in pairwise(edges):
        yield changes.slice(start, end - start)


def _write_parquet(table: pa.Table, path: Path) -> None:
    # Decimals as integers, as Spark itself writes them: its vectorised reader is faster with them.
    pq.write_table(table, path, compression="zstd", compression_level=1, store_decimal_as_integer=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workload", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to write; must not exist")
    parser.add_argument("--rows", type=int, default=2_000_000, help="accounts in the initial load")
    parser.add_argument("--batches", type=int, default=20, help="micro-batches")
    parser.add_argument("--events", type=int, default=100_000, help="events per micro-batch")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    started = perf_counter()
    dataset = write_dataset(
        Workload(options.rows, options.seed),
        options.directory,
        batches=options.batches,
        events=options.events,
        expected_after=(options.batches,),
    )
    for batch, (files, total) in enumerate(zip(dataset.changes, dataset.totals, strict=True)):
        changes = pa.concat_tables([pq.read_table(file) for file in files])
        kinds = {entry["values"]: entry["counts"] for entry in changes["row_kind"].value_counts().to_pylist()}
        size = sum(file.stat().st_size for file in files)
        distinct = pc.count_distinct(changes["id"]).as_py()
        print(f"batch {batch}: {len(files)} files, {size:,} B, {changes.num_rows:,} rows, {distinct:,} keys, {kinds}")
        print(f"  expected: {total.count:,} rows, balance {total.balance:,}, highest version {total.version:,}")
    print(f"expected content: {dataset.expected[options.batches]}; {perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
