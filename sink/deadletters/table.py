"""Dead letters: the records that can't be applied. The dead-letter table has each of them once, with its place in the
source and the reason.

All targets share one table. It can't be committed together with a target, so it is committed first, and stores
its own position for each target. While this position is ahead of the target's position, the sink looks bad records up
in the table, and leaves out those that it already has.

If there is a dead-letter topic too, the commit sets the mark `unpublished` in the same transaction. After that the
records are sent from the table (`sink.deadletters.topic`), and then the mark is removed. If the run crashes in between,
the mark stays, and the next run asks the topic which records it has.
"""

import json
import logging
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial, reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.amounts import amount
from changelog.rows import BAD
from deltawriters import TableSpec
from sink.config import Config
from sink.deadletters.topic import DeadLetterTopic
from sink.errors import RolledBackError, TableError, TableGoneError, TemporaryError, TooManyBadRecordsError
from sink.sources.source import Position
from sink.spark.java_errors import message_of
from sink.spark.versions import to_arrow
from sink.targets.catalogs import Catalogs
from sink.targets.notes import SINK_ID
from sink.targets.retries import Retries
from sink.targets.seam import Table, TableView
from sink.targets.values import ChangeSet, Done, Outcome, Refused, StoredPosition

log = logging.getLogger("rowdelta")

_SHOWN_TABLES = 20

COLUMNS = T.StructType(
    [
        T.StructField("table", T.StringType()),
        T.StructField("source", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("offset", T.LongType()),
        T.StructField("key", T.BinaryType()),
        T.StructField("value", T.BinaryType()),
        T.StructField("reason", T.StringType()),
        T.StructField("error_class", T.StringType()),
        T.StructField("time", T.TimestampType()),
    ]
)

RECORD = ("source", "partition", "offset", "key", "value")
"""Columns that identify a record. Its place alone doesn't, since a topic may be created anew."""

UNPUBLISHED = "unpublished"
"""Last part of the property that marks the last commit of a target whose bad records aren't sent to the topic yet."""
_REMOVALS = 5


@dataclass(frozen=True)
class DeadLetter:
    """A row of the table. `source` is the topic, or the path of the change file. Records of files have no partition,
    offset or key.
    """

    table: str
    source: str
    partition: int | None
    offset: int | None
    key: bytes | None
    value: bytes | None
    reason: str
    error_class: str
    time: datetime

    @property
    def place(self) -> str:
        return self.source if self.partition is None else f"{self.source}-{self.partition} offset {self.offset}"


@dataclass(frozen=True)
class Selection:
    """Selects the dead letters that fit all the given conditions. `reason` is a part of the reason's text."""

    table: str | None = None
    error_class: str | None = None
    reason: str | None = None

    def condition(self) -> Column:
        wanted = F.lit(True)
        if self.table is not None:
            wanted &= F.col("table") == self.table
        if self.error_class is not None:
            wanted &= F.col("error_class") == self.error_class
        if self.reason is not None:
            wanted &= F.contains(F.col("reason"), F.lit(self.reason))
        return wanted


class DeadLetters:
    """The dead-letter table of a run. If several targets commit at the same time, they take turns. `commits` counts
    them. Targets that don't commit wait for no commit.

    If somebody drops the table, it is created and opened again, and `opening` goes up by one. Files that were written
    for the dropped table don't belong to the new one.

    :param open_: opens the table, and creates it if it is missing. Each call makes an object of its own.
    """

    def __init__(self, config: Config, open_: Callable[[], Table]) -> None:
        self.opening = 0
        self.commits = 0
        self._config = config
        self._open = open_
        self._table = open_()
        name = config.sink.dead_letter_topic
        self._topic = DeadLetterTopic(self._table.spark, config, name) if name else None
        self._turn = threading.Lock()  # to commit; it is taken before the other lock
        self._lock = threading.Lock()  # for `_table` and `opening`
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @property
    def name(self) -> str:
        return self._table.name

    @property
    def spec(self) -> TableSpec:
        """What the tasks need to write to it."""
        with self._lock:
            if self._table.needs_credentials:
                self._refresh()
            return self._table.spec

    def position(self, target: str) -> Position | None:
        """The source position up to which the table has the target's bad records."""
        with self._lock:
            stored = _stored(self._table, self._prefix(target))
        return stored.position if stored else None

    def operation(self, target: str) -> str | None:
        """The last commit of the target's bad records that is known here."""
        with self._lock:
            stored = _stored(self._table, self._prefix(target))
        return stored.operation if stored else None

    def divided(self, target: str, bad: DataFrame, spark: SparkSession) -> tuple[DataFrame, DataFrame]:
        """The bad records that the table doesn't have yet, and those that it has.

        Records are compared by place, key and value: if the topic was created anew, the same place holds another
        record.

        :param bad: changelog rows that all have `_rowdelta_bad`.
        :param spark: the session of `bad`.
        """
        with self._lock:
            self._refresh()
            letters = self._table.reader().frame(spark)
        kept = letters.where(F.col("table") == target).select(*RECORD).alias("kept")
        same = same_record(BAD, "kept")
        return bad.join(kept, same, "left_anti"), bad.join(kept, same, "left_semi")

    def check_limit(self, target: str, bad: Mapping[str, int], samples: Sequence[str]) -> None:
        """Call this before a micro-batch with bad records is committed.

        :param bad: how many bad records, by error class.
        :param samples: texts about some of them, for the message.
        :raises TooManyBadRecordsError: with these, the target has more bad records in this run than `max_bad_records`.
        """
        limit = self._config.sink.max_bad_records
        total = self._counts[target] + Counter(bad)
        if limit is None or not bad or total.total() <= limit:
            return
        classes = ", ".join(f"{count:,} {error_class}" for error_class, count in total.most_common())
        raise TooManyBadRecordsError(
            f"{target}: {amount(total.total(), 'bad record')} in this run, and max_bad_records is {limit:,} "
            f"({classes}). The micro-batch that has the last {sum(bad.values()):,} of them was not applied: "
            f"{'; '.join(samples)}. Correct the source or the configuration and run again, or raise max_bad_records; "
            "`rowdelta dead-letters counts` shows what was kept before."
        )

    def commit(
        self,
        target: str,
        operation: str,
        end: Position,
        files: Sequence[str],
        bad: Mapping[str, int],
        opening: int,
        previous: str | None,
    ) -> Outcome:
        """Try to add a micro-batch's bad records, and mark them as not yet sent to the topic.

        :param target: the target table.
        :param operation: id of this commit.
        :param end: the position after the micro-batch.
        :param files: the data files, as in `ChangeSet`.
        :param bad: how many records, by error class.
        :param opening: the value of `opening` when the files were written.
        :param previous: the last commit of the target's bad records that was known when it was decided which bad
            records the table has already.
        :return: `Refused`, with the files to be written again, if somebody dropped the table meanwhile, and it was
            created again; or if there is another commit of the target's bad records, as from an attempt whose outcome
            was unknown, or by another run.
        :raises RowdeltaError: see `Table.commit`.
        """
        prefix = self._prefix(target)
        self.publish(target)  # first, since this commit overwrites the mark of records that are still unsent
        with self._changing() as table:
            if self.opening != opening:
                return Refused(f"the dead-letter table {self.name} was dropped")
            stored = _stored(table, prefix)
            if (stored.operation if stored else None) != previous:
                return Refused(f"bad records of {target} were added to {self.name} meanwhile")
            outcome = table.commit(
                ChangeSet(
                    prefix=prefix,
                    operation=operation,
                    position=end,
                    files=files,
                    base_snapshot=table.snapshot_id(),
                    previous_operation=previous,
                    summary={SINK_ID: self._config.sink.id},
                    properties={f"{prefix}.{UNPUBLISHED}": operation} if self._topic else {},
                    # bad records of other targets don't conflict, even if another job commits them
                    conflicts_with=("table", target),
                    newest_if_in_doubt=True,
                )
            )
            if isinstance(outcome, Refused):
                return replace(outcome, why=f"{self.name}: {outcome.why}")
            if isinstance(outcome, Done):
                self._counts[target] += Counter(bad)
                self.commits += 1
            return outcome

    def retries(self) -> Retries:
        """Those of one micro-batch's bad records."""
        with self._lock:
            return self._table.retries()

    def publish(self, target: str) -> None:
        """Send the target's last bad records to the topic, if they are still unsent. Call this after `commit`, and when
        a run starts. Without a topic, forget that they should have been sent.

        :raises TemporaryError: Kafka did not accept them. The next call sends those that the topic doesn't have.
        """
        topic, prefix = self._topic, self._prefix(target)
        with self._lock:
            if self._table.property(f"{prefix}.{UNPUBLISHED}") is None:
                return
            self._refresh()
            operation = self._table.property(f"{prefix}.{UNPUBLISHED}")
            if operation is None:
                return  # the table was dropped
            stored = _stored(self._table, prefix)
            snapshot = stored.snapshot_id if stored and stored.operation == operation else None
            added = None if topic is None or snapshot is None else self._table.reader().frame_of_commit(snapshot)
        if topic is None:
            log.warning(
                "%s: the last bad records of %s weren't sent to the topic that there was. They are in the table.",
                self.name,
                target,
            )
        elif added is None:
            log.warning(
                "%s: the last bad records of %s can't be sent to topic %s: their snapshot is gone. They are in the "
                "table.",
                self.name,
                target,
                topic.name,
            )
        else:
            topic.send(target, operation, added)
        with self._changing() as table:
            if table.property(f"{prefix}.{UNPUBLISHED}") == operation:  # another run sends its own
                table.set_property(f"{prefix}.{UNPUBLISHED}", None)
                table.refresh()

    @contextmanager
    def _changing(self) -> Iterator[Table]:
        """The newest state of the table, for the caller alone to commit to: targets whose commits come in turn don't
        refuse each other. A commit with its retries may take minutes. Meanwhile the others look at another object of
        the table.
        """
        with self._turn:
            with self._lock:
                self._refresh()
                table, self._table = self._table, self._open()
                self.opening += self._table.table_id != table.table_id
            try:
                yield table
            finally:  # also after an error, since it knows best what became of the commit
                with self._lock:
                    if self._table.table_id == table.table_id:
                        self._table = table

    def _refresh(self) -> None:
        """Read the table's metadata again. Create the table again if it was dropped. If another driver has replaced a
        commit, nothing that is known of it holds.
        """
        try:
            self._table.refresh()
        except (TableGoneError, RolledBackError) as error:
            log.warning("%s It is opened again.", error)
            self._table = self._open()
            self.opening += 1

    def _prefix(self, target: str) -> str:
        return f"rowdelta.{self._config.sink.id}.{target}"


def open_dead_letters(spark: SparkSession, config: Config) -> DeadLetters:
    """The dead-letter table, created if it is missing."""
    return DeadLetters(config, partial(_open_table, spark, config))


def _stored(table: Table, prefix: str) -> StoredPosition | None:
    """The newest position will do if snapshots that could tell have expired, as is usual after months without a bad
    record: before a record is left out, the table's rows are compared.
    """
    return table.position(prefix, newest_if_in_doubt=True)


def _open_table(spark: SparkSession, config: Config) -> Table:
    catalogs = Catalogs(spark, config)
    name = config.dead_letter_table
    existing = catalogs.load(name)
    table = existing or catalogs.create_log(name, COLUMNS, "table")
    check_table(table)
    return table


def check_table(table: TableView) -> None:
    """:raises TableError: the table can't be the dead-letter table."""
    table.check_writable(appends=True)
    _check_columns(table)


def find(spark: SparkSession, config: Config, selection: Selection) -> DataFrame:
    """The selected dead letters, as rows of the table.

    :raises TableError: there is no dead-letter table.
    """
    table = _existing(spark, config)
    _check_columns(table)
    return table.reader().frame(spark).where(selection.condition())


def _existing(spark: SparkSession, config: Config) -> Table:
    """:raises TableError: there is no dead-letter table."""
    name = config.dead_letter_table
    table = Catalogs(spark, config).load(name)
    if table is None:
        raise TableError(
            f"there is no dead-letter table {name}. The first run with on_bad_record: dead-letter creates it; if it "
            "has another name, set sink.dead_letter_table."
        )
    return table


def same_record(left: str, right: str) -> Column:
    """Whether two structs, or rows of frames with these aliases, stand for the same record."""
    return reduce(operator.and_, [F.col(f"{left}.{name}").eqNullSafe(F.col(f"{right}.{name}")) for name in RECORD])


def nothing(spark: SparkSession, config: Config, selection: Selection) -> str:
    """The message if nothing was selected. It lists tables and classes, since a given name may be misspelled."""
    wanted = {"table": selection.table, "class": selection.error_class, "reason": selection.reason}
    shown = ", ".join(f"{what} {value!r}" for what, value in wanted.items() if value is not None)
    if not shown:
        return "no dead letters"
    rows = find(spark, config, Selection()).select("table", "error_class").distinct().orderBy("table", "error_class")
    classes: dict[str, list[str]] = {}
    for table, error_class in rows.collect():
        classes.setdefault(table, []).append(error_class)
    if not classes:
        return "no dead letters of any table or class"
    there = [f"{table} ({', '.join(names)})" for table, names in classes.items()]
    more = f" and {len(there) - _SHOWN_TABLES} more tables" if len(there) > _SHOWN_TABLES else ""
    return f"no dead letters of {shown}. There are some of {', '.join(there[:_SHOWN_TABLES])}{more}"


def newest(letters: DataFrame, limit: int) -> Iterator[DeadLetter]:
    """The last `limit` dead letters, newest first. Those of one micro-batch begin with its last record."""
    order = [F.desc("time"), F.desc("table"), F.desc("source"), F.desc("partition"), F.desc("offset")]
    for row in to_arrow(letters.orderBy(*order).limit(limit).select(*COLUMNS.fieldNames())).to_pylist():
        yield DeadLetter(**row)


def counts(letters: DataFrame) -> Iterator[dict[str, Any]]:
    """Counts by `table`, `error_class` and `reason`, the most frequent first, with the time of the `last`."""
    grouped = letters.groupBy("table", "error_class", "reason").agg(
        F.count("*").alias("count"), F.max("time").alias("last")
    )
    yield from to_arrow(grouped.orderBy(F.desc("count"), "table", "error_class", "reason")).to_pylist()


def remove(spark: SparkSession, config: Config, letters: DataFrame) -> None:
    """Delete `letters` from the table. Target, place, key and value identify them.

    :raises TemporaryError: others kept changing the table. Nothing was removed.
    """
    table = _existing(spark, config)
    for attempt in range(1, _REMOVALS + 1):
        refusal = table.upkeep().remove_rows(letters, ("table", *RECORD))
        if refusal is None:
            return
        reason = message_of(refusal)
        log.info("%s: changed by others meanwhile (attempt %d)", table.name, attempt)
    raise TemporaryError(f"{table.name}: could not remove dead letters, others kept changing it: {reason}")


def _check_columns(table: TableView) -> None:
    missing = [name for name in COLUMNS.fieldNames() if name not in table.spec.arrow_schema.names]
    if missing:
        raise TableError(
            f"{table.name} has no column {missing[0]!r}, so it can't be the dead-letter table. Its columns must be: "
            f"{', '.join(COLUMNS.fieldNames())}. Drop it, or give sink.dead_letter_table another name."
        )
    for field in table.spec.arrow_schema:
        if not field.nullable and field.name not in COLUMNS.fieldNames():
            raise TableError(
                f"{table.name} is the dead-letter table, and its column {field.name!r}, which the sink doesn't know, "
                f"is required. Make it optional: ALTER TABLE {table.name} ALTER COLUMN {field.name} DROP NOT NULL."
            )


def excerpt(value: bytes | None, length: int = 60) -> str:
    """The beginning of a value, on one line. Bytes that aren't UTF-8 are shown as \\xNN."""
    if value is None:
        return ""
    text = value[: 4 * length].decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def as_json(row: dict[str, Any]) -> str:
    """A line of JSON. Bytes become text if they are UTF-8, else base64 named `…_base64`. Times are ISO 8601."""
    from base64 import b64encode

    shown: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                shown[name] = value.decode()
            except UnicodeDecodeError:
                shown[f"{name}_base64"] = b64encode(value).decode()
        else:
            shown[name] = value.isoformat() if isinstance(value, datetime) else value
    return json.dumps(shown, ensure_ascii=False)
