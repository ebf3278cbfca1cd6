"""Dead letters: the records that can't be applied, with their place in the source and the reason, each in the table
once.

All targets share one Iceberg table. It can't be committed together with a target, so it is committed first, and holds a
position of its own for each target. While that is ahead of the target's, bad records are looked up in the table, and
those it has are left out.

If there is a topic too, a commit leaves the mark `unpublished` in its own transaction, and the records are sent from
the table afterwards (`sink.dead_letter_topic`). The mark goes when the topic has them. A crash in between leaves the
mark, and the next run asks the topic.
"""

import json
import logging
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from changelog.row_kind_columns import quoted
from changelog.rows import BAD
from deltawriters import TableSpec
from sink.commit import IcebergCommitter, RowDeltaCommit, TableChangedError
from sink.config import Config
from sink.dead_letter_topic import DeadLetterTopic
from sink.errors import TableError, TableGoneError, TemporaryError, TooManyBadRecordsError
from sink.iceberg import Catalogs, IcebergTable
from sink.java_errors import JAVA_ERRORS, java_class, java_message
from sink.sources.source import Position
from sink.spark_versions import to_arrow
from sink.table_properties import check_properties

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
"""Columns that tell a record from others. Its place alone doesn't: a topic may be created anew."""

_REMOVALS = 5


@dataclass(frozen=True)
class DeadLetter:
    """A row of the table. `source` is the topic, or the path of the change file, which has no partition,
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
    """Which dead letters: all that fit each of these, as far as given. `reason` is a part of the reason."""

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
    """The dead-letter table of a run. Targets may commit at the same time: they take turns.

    `opening` counts how often the table was opened. If it was dropped it is made again and opened again, and files that
    were written for the one before aren't for it.
    """

    def __init__(self, config: Config, table: IcebergTable) -> None:
        self.opening = 0
        self._config = config
        self._table = table
        name = config.sink.dead_letter_topic
        self._topic = DeadLetterTopic(table.spark, config, name) if name else None
        self._turn = threading.Lock()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @property
    def name(self) -> str:
        return self._table.name

    @property
    def spec(self) -> TableSpec:
        """What the tasks need to write to it."""
        with self._turn:
            if self._table.needs_credentials:
                self._refresh()
            return self._table.spec

    def position(self, target: str) -> Position | None:
        """Up to where in its source the target's bad records are in the table."""
        with self._turn:
            stored = self._table.position(self._prefix(target))
        return stored.position if stored else None

    def without_kept(self, target: str, bad: DataFrame, spark: SparkSession) -> DataFrame:
        """Of changelog rows that are all bad those that the table doesn't have.

        By place, key and value: in a topic that was created anew the place is another record's. In `spark`, the session
        of `bad`.
        """
        with self._turn:
            self._refresh()
        kept = spark.table(_quoted(self.name)).where(F.col("table") == target).select(*RECORD).alias("kept")
        return bad.join(kept, same_record(BAD, "kept"), "left_anti")

    def check_limit(self, target: str, bad: Mapping[str, int], samples: Sequence[str]) -> None:
        """Before a micro-batch with `bad` records (by error class) is committed.

        :raises TooManyBadRecordsError: with them the target would have more bad records in this run than
            `max_bad_records`.
        """
        limit = self._config.sink.max_bad_records
        total = self._counts[target] + Counter(bad)
        if limit is None or not bad or total.total() <= limit:
            return
        classes = ", ".join(f"{count:,} {error_class}" for error_class, count in total.most_common())
        raise TooManyBadRecordsError(
            f"{target}: {total.total():,} bad records in this run, and max_bad_records is {limit:,} ({classes}). The "
            "micro-batch "
            f"that has the last {sum(bad.values()):,} of them was not applied: {'; '.join(samples)}. Correct the "
            "source or the "
            "configuration and run again, or raise max_bad_records; `rowdelta dead-letters counts` shows what was "
            "kept before."
        )

    def commit(
        self, target: str, operation: str, end: Position, files: Sequence[str], bad: Mapping[str, int], opening: int
    ) -> None:
        """Add a micro-batch's bad records, and note that they still have to be sent to the topic.

        :param files: `ContentFileParser` JSON of the data files.
        :param end: the position after the micro-batch.
        :param bad: how many records, by error class.
        :param opening: what `opening` was when the files were written.
        :raises TableChangedError: the table was dropped meanwhile, and is there again: the files must be written again.
        :raises RowdeltaError: as `IcebergCommitter.commit` does.
        """
        prefix = self._prefix(target)
        self.publish(target)  # or the mark of records that are still to be sent would be overwritten
        with self._turn:
            self._refresh()
            if self.opening != opening:
                raise TableChangedError(f"the dead-letter table {self.name} was dropped")
            stored = self._table.position(prefix)
            committer = IcebergCommitter(self._table)
            committer.commit(
                RowDeltaCommit(
                    prefix=prefix,
                    operation=operation,
                    position=end,
                    files=files,
                    base_snapshot=self._table.snapshot_id(),
                    previous_operation=stored.operation if stored else None,
                    summary={"rowdelta.sink-id": self._config.sink.id},
                    properties={f"{prefix}.unpublished": operation} if self._topic else {},
                    # other targets' bad records are in nobody's way, whichever job they come from
                    conflicts_with=("table", target),
                ),
                committer.retries(),
            )
            self._counts[target] += Counter(bad)

    def publish(self, target: str) -> None:
        """Send the target's last bad records to the topic, if that is still to be done: after `commit`, and when a run
        starts.

        :raises TemporaryError: Kafka did not take them. Another call sends them, if they aren't there.
        """
        topic, prefix = self._topic, self._prefix(target)
        if topic is None or self._table.property(f"{prefix}.unpublished") is None:
            return
        with self._turn:
            self._refresh()
        operation = self._table.property(f"{prefix}.unpublished")
        if operation is None:
            return  # the table was dropped
        stored = self._table.position(prefix)
        snapshot = stored.snapshot_id if stored and stored.operation == operation else None
        if snapshot is None or self._table.java.snapshot(snapshot) is None:
            log.warning(
                "%s: the last bad records of %s can't be sent to topic %s: their snapshot is gone. They are in the "
                "table.",
                self.name,
                target,
                topic.name,
            )
        else:
            topic.send(target, operation, self._added(snapshot))
        with self._turn:
            self._table.java.updateProperties().remove(f"{prefix}.unpublished").commit()
            self._table.refresh()

    def _refresh(self) -> None:
        """Read the table's metadata again; make the table again if it was dropped."""
        try:
            self._table.refresh()
        except TableGoneError as error:
            log.warning("%s It is opened again.", error)
            self._table = _open_table(self._table.spark, self._config)
            self.opening += 1

    def _added(self, snapshot: int) -> DataFrame:
        """The rows that a snapshot added."""
        parent = self._table.java.snapshot(snapshot).parentId()
        spark = self._table.spark
        if parent is None:
            return spark.sql(f"SELECT * FROM {_quoted(self.name)} VERSION AS OF {snapshot}")
        reader = spark.read.option("start-snapshot-id", str(parent)).option("end-snapshot-id", str(snapshot))
        return reader.table(_quoted(self.name))

    def _prefix(self, target: str) -> str:
        return f"rowdelta.{self._config.sink.id}.{target}"


def open_dead_letters(spark: SparkSession, config: Config) -> DeadLetters:
    """The dead-letter table, created if it is missing."""
    return DeadLetters(config, _open_table(spark, config))


def _open_table(spark: SparkSession, config: Config) -> IcebergTable:
    catalogs = Catalogs(spark)
    name = config.dead_letter_table
    existing = catalogs.load(name)
    # whole names in the files' bounds tell targets apart when they commit at the same time; by default only the first
    # 16 characters are there
    table = existing or catalogs.create(name, COLUMNS, [], {"write.metadata.metrics.column.table": "full"})
    check_properties(name, table.spec.properties_by_name)
    _check_columns(table)
    return table


def find(spark: SparkSession, config: Config, selection: Selection) -> DataFrame:
    """The selected dead letters, as rows of the table.

    :raises TableError: there is no dead-letter table.
    """
    name = config.dead_letter_table
    table = Catalogs(spark).load(name)
    if table is None:
        raise TableError(
            f"there is no dead-letter table {name}. The first run with on_bad_record: dead-letter creates it; if it "
            "has another name, set sink.dead_letter_table."
        )
    _check_columns(table)
    return spark.table(_quoted(name)).where(selection.condition())


def same_record(left: str, right: str) -> Column:
    """Whether two structs, or rows of frames with these aliases, are of the same record."""
    return reduce(operator.and_, [F.col(f"{left}.{name}").eqNullSafe(F.col(f"{right}.{name}")) for name in RECORD])


def nothing(spark: SparkSession, config: Config, selection: Selection) -> str:
    """What to say where nothing was selected: a name may be misspelled, so which there are."""
    wanted = {"table": selection.table, "class": selection.error_class, "reason": selection.reason}
    shown = ", ".join(f"{what} {value!r}" for what, value in wanted.items() if value is not None)
    if not shown:
        return "no dead letters"
    rows = find(spark, config, Selection()).select("table", "error_class").distinct().orderBy("table", "error_class")
    classes: dict[str, list[str]] = {}
    for table, error_class in rows.collect():
        classes.setdefault(table, []).append(error_class)
    if not classes:
        return "no dead letters, of whatever table and class"
    there = [f"{table} ({', '.join(names)})" for table, names in classes.items()]
    more = f" and {len(there) - _SHOWN_TABLES} more tables" if len(there) > _SHOWN_TABLES else ""
    return f"no dead letters of {shown}. There are some of {', '.join(there[:_SHOWN_TABLES])}{more}"


def newest(letters: DataFrame, limit: int) -> Iterator[DeadLetter]:
    """The last `limit` dead letters, newest first; those of one micro-batch from its end."""
    order = [F.desc("time"), F.desc("table"), F.desc("source"), F.desc("partition"), F.desc("offset")]
    for row in to_arrow(letters.orderBy(*order).limit(limit).select(*COLUMNS.fieldNames())).to_pylist():
        yield DeadLetter(**row)


def counts(letters: DataFrame) -> Iterator[dict[str, Any]]:
    """How many by `table`, `error_class` and `reason`, the most frequent first, with the time of the `last`."""
    grouped = letters.groupBy("table", "error_class", "reason").agg(
        F.count("*").alias("count"), F.max("time").alias("last")
    )
    yield from to_arrow(grouped.orderBy(F.desc("count"), "table", "error_class", "reason")).to_pylist()


def remove(spark: SparkSession, config: Config, letters: DataFrame) -> None:
    """Delete `letters` from the table, by target, place, key and value.

    :raises TemporaryError: others kept changing the table; nothing was removed.
    """
    identity = ("table", *RECORD)
    letters.select(*identity).createOrReplaceTempView("rowdelta_removed")
    same = " AND ".join(f"kept.`{name}` <=> removed.`{name}`" for name in identity)
    statement = (
        f"DELETE FROM {_quoted(config.dead_letter_table)} AS kept "
        f"WHERE EXISTS (SELECT 1 FROM rowdelta_removed AS removed WHERE {same})"
    )
    try:
        for attempt in range(1, _REMOVALS + 1):
            try:
                spark.sql(statement)
                return
            except JAVA_ERRORS as error:
                if java_class(error) not in ("ValidationException", "CommitFailedException"):
                    raise
                reason = java_message(error)
                log.info("%s: changed by others meanwhile (attempt %d)", config.dead_letter_table, attempt)
    finally:
        spark.catalog.dropTempView("rowdelta_removed")
    raise TemporaryError(
        f"{config.dead_letter_table}: could not remove dead letters, others kept changing it: {reason}"
    )


def _check_columns(table: IcebergTable) -> None:
    missing = [name for name in COLUMNS.fieldNames() if name not in table.spec.arrow_schema.names]
    if missing:
        raise TableError(
            f"{table.name} has no column {missing[0]!r}, so it can't be the dead-letter table. Its columns must be: "
            f"{', '.join(COLUMNS.fieldNames())}. Drop it, or give sink.dead_letter_table another name."
        )
    for field in table.spec.iceberg_schema.fields:
        if field.required and field.name not in COLUMNS.fieldNames():
            raise TableError(
                f"{table.name} is the dead-letter table, and its column {field.name!r}, which the sink doesn't know, "
                "is required. "
                f"Make it optional: ALTER TABLE {table.name} ALTER COLUMN {field.name} DROP NOT NULL."
            )


def _quoted(name: str) -> str:
    return ".".join(quoted(part) for part in name.split("."))


def excerpt(value: bytes | None, length: int = 60) -> str:
    """The beginning of a value on one line; bytes that are not UTF-8 as \\xNN."""
    if value is None:
        return ""
    text = value[: 4 * length].decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def as_json(row: dict[str, Any]) -> str:
    """A line of JSON. Bytes are text where they are UTF-8, else base64 under the name `…_base64`; times are
    ISO 8601.
    """
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
