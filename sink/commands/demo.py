"""`rowdelta demo`: makes a small shop's changelog, runs the sink on it, and proves that the tables equal the shop.

Everything is in one folder. You can read it, and run the sink in it again by hand:

    demo/sink.yaml              the configuration: `rowdelta run demo/sink.yaml`
    demo/changes/<table>/       the changelog, one Parquet file a micro-batch
    demo/expected/              the shop's own rows in the end; the sink never reads them
    demo/warehouse/             the tables
    demo/state/                 Spark's checkpoint

The shop keeps its rows in numpy arrays, changes them, and writes each change as a database's changelog has it. So the
demo knows the right rows without reading the changelog again.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from string import Template

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from changelog.amounts import amount
from changelog.rows import RowKind
from sink import config as configuration
from sink.config import Config, TableSection
from sink.errors import ConfigError
from sink.run.pipeline import Pipeline, stops_on_signals
from sink.spark import session
from sink.targets.capabilities import CAPABILITIES, Format
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import property_prefix

SEED = 7
BATCHES = 8

MARKER = ".rowdelta-demo"
_MARKER_TEXT = "rowdelta demo made this folder, and starts over in it when it is run again.\n"
_GENERATED = ("changes", "expected", "warehouse", "state", "sink.yaml")
_SHOWN_ROWS = 5
_FIRST_FILE_TIME_S = 1_767_225_600  # 2026-01-01T00:00:00Z; each further file is one second younger
_ROUNDS = 3
"""Rounds of changes in a micro-batch. A row changes at most once in a round, so it may change several times in a
micro-batch.
"""

Rows = npt.NDArray[np.void]

_CONFIG = """\
# A whole configuration: what `rowdelta demo` ran. Run it again with: rowdelta run sink.yaml
# Paths are relative to this file. docs/configuration.md explains every key.

sink:
  id: demo                    # the tables store how far they got under this name
  checkpoint: ./state
  trigger: available-now      # apply what is there, then stop

source:
  type: files
  format: row-kind            # each row says what it does: +I, -U, +U or -D
  options:
    path_format: parquet
    maxFilesPerTrigger: 1     # one file a micro-batch, and so one commit a file

catalogs:
  lake: {type: $type, warehouse: ./warehouse}

tables:
  - source: ./changes/customers
    target: lake.shop.customers
    key: [email]              # customers move to new addresses: a change of the key
    columns: {email: string, customer_id: bigint, name: string, city: string, since: timestamp}
    order_by: [seq]

  - source: ./changes/orders
    target: lake.shop.orders
    key: [id]
    columns: {id: bigint, customer_id: bigint, status: string, amount: "decimal(12,2)", changed_at: timestamp}
$partitioned    order_by: [seq]

spark:
  spark.master: local[2]
  spark.sql.shuffle.partitions: "2"
  spark.ui.enabled: "false"
  spark.driver.host: localhost
"""


_PARTITIONED = '    partition_by: ["bucket(4, id)"]\n'
_FORMATS: Mapping[Format, Mapping[str, str]] = {
    "iceberg": {"type": "hadoop", "partitioned": _PARTITIONED, "download": "Iceberg (50 MB)"},
    "delta": {"type": "delta", "partitioned": "", "download": "Delta Lake (10 MB)"},
}
"""Parts of the configuration and of the output that depend on the table format."""


def config_text(table_format: Format) -> str:
    """The demo's configuration."""
    return Template(_CONFIG).substitute(_FORMATS[table_format])


@dataclass(frozen=True)
class Entity:
    """One table of the shop: how rows are created, how they change, and how they look in Arrow.

    :param name: name of the table.
    :param initial: number of rows at the beginning.
    :param sizes: inserts, updates and deletes of one round.
    :param create: (random, first number, how many, microseconds since 1970) -> new rows.
    :param change: (random, rows, microseconds since 1970) -> the same rows, changed.
    :param to_arrow: rows -> Arrow table.
    """

    name: str
    initial: int
    sizes: tuple[int, int, int]
    create: Callable[[np.random.Generator, int, int, int], Rows]
    change: Callable[[np.random.Generator, Rows, int], Rows]
    to_arrow: Callable[[Rows], pa.Table]


def run(folder: Path, table_format: Format = "iceberg") -> int:
    """Generate changes, apply them, show and compare the tables.

    :return: 0 if every table equals its source, or a signal stopped it; else 1.
    :raises ConfigError: `folder` has files that don't come from a demo.
    """
    prepare(folder)
    print(f"\nThe shop's changelog, in {folder / 'changes'}: {BATCHES} files a table, each one micro-batch")
    random = np.random.default_rng(SEED)
    for entity in (CUSTOMERS, ORDERS):
        counts = generate(entity, random, folder)
        print(f"  {entity.name:<10}{', '.join(f'{kind} {count:,}' for kind, count in counts.items())}")
    (folder / "sink.yaml").write_text(config_text(table_format), encoding="utf-8")
    config = configuration.load(folder / "sink.yaml")

    download = _FORMATS[table_format]["download"]
    print(f"\nStarting Spark. The first time, it downloads {download} ...", flush=True)
    with _log_on_stdout():
        spark = session.start(config)
    with session.stopping(spark):
        print(f"\nrowdelta run {folder / 'sink.yaml'}", flush=True)
        with _log_on_stdout():
            pipeline = Pipeline(spark, config)
            with stops_on_signals(spark, pipeline.stop) as is_told:
                pipeline.run()
        if is_told():
            print(f"\nStopped as asked. It goes on with: rowdelta run {folder}/sink.yaml")
            return 0
        results = [_show_and_compare(spark, config, section, folder) for section in config.tables]
    if not all(results):
        print("\nTables and source differ: see above.")
        return 1
    print(
        f"""
Tables and source are equal. What to try next:
  rowdelta status {folder}/sink.yaml   how far each table got
  rowdelta run {folder}/sink.yaml      nothing to do: every change has been applied, once
  rowdelta history {folder}/sink.yaml customers   what each commit did
  rm -r {folder}/state                 then run again: still nothing to do, the tables know their position"""
    )
    return 0


def generate(entity: Entity, random: np.random.Generator, folder: Path) -> dict[str, int]:
    """Write the entity's changelog, and the rows that it has in the end.

    The files are `changes/<name>/0001.parquet`, …, with rising modification times, and `expected/<name>.parquet`.

    :return: how many rows of each kind there are.
    """
    changes = folder / "changes" / entity.name
    changes.mkdir(parents=True)
    (folder / "expected").mkdir(exist_ok=True)
    source = _Source(entity, random)
    counts = {kind.short: 0 for kind in (RowKind.INSERT, RowKind.UPDATE_BEFORE, RowKind.UPDATE_AFTER, RowKind.DELETE)}
    for number in range(BATCHES):
        batch = source.load() if number == 0 else pa.concat_tables([source.next_round() for _ in range(_ROUNDS)])
        for value in pc.value_counts(batch.column("row_kind")).to_pylist():
            counts[value["values"]] += value["counts"]
        path = changes / f"{number + 1:04d}.parquet"
        pq.write_table(batch, path)
        os.utime(path, (_FIRST_FILE_TIME_S + number, _FIRST_FILE_TIME_S + number))
    pq.write_table(entity.to_arrow(source.rows), folder / "expected" / f"{entity.name}.parquet")
    return counts


class _Source:
    """The rows of an entity in the shop's own database, and the changes that the database publishes."""

    def __init__(self, entity: Entity, random: np.random.Generator) -> None:
        self._entity = entity
        self._random = random
        self._created = 0
        self._seq = 0
        self.rows = self._create(0)

    def load(self) -> pa.Table:
        self.rows = self._create(self._entity.initial)
        return self._changes(RowKind.INSERT, self.rows, self._sequence(len(self.rows)))

    def next_round(self) -> pa.Table:
        """Updates and deletes of different rows, then inserts. An update is a -U and a +U with one sequence number."""
        inserts, updates, deletes = self._entity.sizes
        chosen = self._random.choice(len(self.rows), updates + deletes, replace=False)
        updated, deleted = chosen[:updates], chosen[updates:]
        before = self.rows[updated]
        after = self._entity.change(self._random, before, self._now())
        update_seq = self._sequence(updates)
        tables = [
            self._changes(RowKind.UPDATE_BEFORE, before, update_seq),
            self._changes(RowKind.UPDATE_AFTER, after, update_seq),
            self._changes(RowKind.DELETE, self.rows[deleted], self._sequence(deletes)),
        ]
        created = self._create(inserts)
        tables.append(self._changes(RowKind.INSERT, created, self._sequence(inserts)))
        self.rows[updated] = after
        self.rows = np.concatenate([np.delete(self.rows, deleted), created])
        return pa.concat_tables(tables).sort_by("seq")

    def _create(self, count: int) -> Rows:
        rows = self._entity.create(self._random, self._created, count, self._now())
        self._created += count
        return rows

    def _sequence(self, count: int) -> npt.NDArray[np.int64]:
        self._seq += count
        return np.arange(self._seq - count, self._seq)

    def _now(self) -> int:
        return _FIRST_FILE_TIME_S * 1_000_000 + self._seq * 1_000

    def _changes(self, kind: RowKind, rows: Rows, seq: npt.NDArray[np.int64]) -> pa.Table:
        table = self._entity.to_arrow(rows).add_column(0, "seq", pa.array(seq))
        return table.add_column(0, "row_kind", pa.array(np.full(len(rows), kind.short)))


_FIRST_NAMES = pa.array(
    ["Alma", "Bo", "Chidi", "Dara", "Edith", "Femi", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Liv"]
)
_CITIES = pa.array(["Lagos", "Lima", "Lisbon", "Oslo", "Osaka", "Quito", "Riga", None])
_STATUSES = pa.array(["placed", "paid", "packed", "shipped", "delivered"])

_CUSTOMER = np.dtype([("number", "i8"), ("name", "i8"), ("city", "i8"), ("moves", "i8"), ("since", "i8")])
_ORDER = np.dtype([("id", "i8"), ("customer", "i8"), ("status", "i8"), ("cents", "i8"), ("changed", "i8")])


def _new_customers(random: np.random.Generator, first: int, count: int, now: int) -> Rows:
    rows = np.zeros(count, _CUSTOMER)
    rows["number"] = np.arange(first, first + count)
    rows["name"] = random.integers(len(_FIRST_NAMES), size=count)
    rows["city"] = random.integers(len(_CITIES), size=count)
    rows["since"] = now
    return rows


def _changed_customers(random: np.random.Generator, rows: Rows, now: int) -> Rows:
    """A third of the customers get a new e-mail address, which is the key. The others move to another city, which may
    be unknown (null).
    """
    rows = rows.copy()
    rekeyed = random.random(len(rows)) < 1 / 3
    rows["moves"] += rekeyed
    rows["city"] = np.where(rekeyed, rows["city"], random.integers(len(_CITIES), size=len(rows)))
    return rows


def _customers_to_arrow(rows: Rows) -> pa.Table:
    name = _FIRST_NAMES.take(pa.array(rows["name"]))
    numbers = [pa.array(rows[field]).cast(pa.string()) for field in ("number", "moves")]
    email = pc.binary_join_element_wise(pc.utf8_lower(name), *numbers, ".")
    return pa.table(
        {
            "email": pc.binary_join_element_wise(email, "shop.example", "@"),
            "customer_id": pa.array(rows["number"]),
            "name": name,
            "city": _CITIES.take(pa.array(rows["city"])),
            "since": pa.array(rows["since"]).cast(pa.timestamp("us", "UTC")),
        }
    )


def _new_orders(random: np.random.Generator, first: int, count: int, now: int) -> Rows:
    rows = np.zeros(count, _ORDER)
    rows["id"] = np.arange(first, first + count)
    rows["customer"] = random.integers(CUSTOMERS.initial, size=count)
    rows["cents"] = random.integers(100, 100_000, size=count)
    rows["changed"] = now
    return rows


def _changed_orders(random: np.random.Generator, rows: Rows, now: int) -> Rows:
    """Orders get their next status. A few get another amount."""
    rows = rows.copy()
    rows["status"] = np.minimum(rows["status"] + 1, len(_STATUSES) - 1)
    rows["cents"] += np.where(random.random(len(rows)) < 0.1, random.integers(-50, 500, size=len(rows)), 0)
    rows["changed"] = now
    return rows


def _orders_to_arrow(rows: Rows) -> pa.Table:
    cents = pa.array(rows["cents"]).cast(pa.decimal128(19, 0))
    return pa.table(
        {
            "id": pa.array(rows["id"]),
            "customer_id": pa.array(rows["customer"]),
            "status": _STATUSES.take(pa.array(rows["status"])),
            "amount": pc.multiply(cents, pa.scalar(Decimal("0.01"))).cast(pa.decimal128(12, 2)),
            "changed_at": pa.array(rows["changed"]).cast(pa.timestamp("us", "UTC")),
        }
    )


CUSTOMERS = Entity("customers", 2_000, (60, 300, 40), _new_customers, _changed_customers, _customers_to_arrow)
ORDERS = Entity("orders", 10_000, (400, 700, 80), _new_orders, _changed_orders, _orders_to_arrow)


def prepare(folder: Path) -> None:
    """Create the demo's folder, or remove what an earlier demo made in it.

    :raises ConfigError: the folder can't be created, or it has files that don't come from a demo.
    """
    try:
        _empty(folder)
    except OSError as error:
        raise ConfigError(
            f"--folder: got {str(folder)!r}, expected a folder to write into: {error.strerror}. Name another folder."
        ) from None


def _empty(folder: Path) -> None:
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is a file. Name another folder.")
    if folder.is_dir() and any(folder.iterdir()) and not marker.is_file():
        raise ConfigError(
            f"--folder: {folder} is not empty, and no demo made it (it has no {MARKER}). It was left alone. "
            "Name another folder."
        )
    removed = [name for name in _GENERATED if _remove(folder / name)]
    if removed:
        print(f"Starting over in {folder}: removed the last demo's {', '.join(removed)}.")
    else:
        print(f"Making the folder {folder}.")
        folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(_MARKER_TEXT, encoding="utf-8")


def _remove(path: Path) -> bool:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        return False
    return True


@contextmanager
def _log_on_stdout() -> Iterator[None]:
    """Print the sink's own log lines between the demo's lines."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    log = logging.getLogger("rowdelta")
    propagate, level = log.propagate, log.level
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
        log.setLevel(level)


def _show_and_compare(spark: SparkSession, config: Config, section: TableSection, folder: Path) -> bool:
    """Print a table's first rows, its commits, and a comparison with the source. Returns whether both are equal."""
    target = Catalogs(spark, config).load(section.target)
    assert target is not None
    table = target.reader().frame(spark)
    print(f"\nTable {section.target}, first rows by {', '.join(section.key)}")
    _print_rows(table.orderBy(*section.key).limit(_SHOWN_ROWS))

    print(f"\nIts {target.snapshot_word}s, one a micro-batch (rowdelta history)")
    for commit in reversed(target.reader().history(property_prefix(config)).commits):
        print(f"  {commit.utc}  {commit.operation} by {commit.by}: {commit.files}")

    expected = spark.read.parquet(str(folder.resolve() / "expected" / f"{Path(section.source).name}.parquet"))
    expected = expected.select(*table.columns)
    missing, surplus = expected.exceptAll(table).count(), table.exceptAll(expected).count()
    rows, wanted = table.count(), expected.count()
    equal = missing == surplus == 0 and rows == wanted
    reader = f"{CAPABILITIES[config.format_of(section.target)].name}'s reader"
    print(
        f"\nThe proof: what {reader} returns against the shop's own rows: {'EQUAL' if equal else 'DIFFERENT'}\n"
        f"  {amount(rows, 'row')} in the table, {wanted:,} in the shop. Compared with exceptAll, both ways: "
        f"{missing:,} missing, {surplus:,} that should not be there"
    )
    return equal


def _print_rows(frame: DataFrame) -> None:
    """Print a small frame as text. Spark formats the values, so timestamps are in the session's zone (UTC)."""
    names = frame.columns
    is_number = [dtype.startswith(("bigint", "decimal")) for _, dtype in frame.dtypes]
    shown = frame.select(*(F.coalesce(F.col(f"`{name}`").cast("string"), F.lit("NULL")).alias(name) for name in names))
    rows = [list(row) for row in shown.collect()]
    widths = [max(len(text) for text in column) for column in zip(names, *rows, strict=True)]
    for line in [names, ["-" * width for width in widths], *rows]:
        columns = zip(line, widths, is_number, strict=True)
        cells = [text.rjust(width) if number else text.ljust(width) for text, width, number in columns]
        print("  " + "  ".join(cells).rstrip())
