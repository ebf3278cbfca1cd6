"""`rowdelta dead-letters replay`: applies records that were refused, after the user has corrected the configuration.

A dead letter may be old. Its key may have changed since, and an old change must not undo a newer one. The table should
hold for a key what the *last* of the key's records in the topic says. So a replay doesn't apply the letters themselves.
It

1. decodes the letters with the current configuration, to find their keys. Letters that still can't be decoded stay.
2. reads the topic again, from the first letter up to the table's position, and keeps the changes of those keys. It
   reads partitions without letters too, from the time of the first letter, less a margin for clocks that differ.
3. writes and commits these changes like a micro-batch in upsert mode: the last change of each key wins. If a key is in
   several partitions and there is no `order_by`, Kafka's timestamps decide. Changes before a TRUNCATE that the
   configuration applies are left out, unless the table has history. The position doesn't change. A letter that is a
   TRUNCATE itself stays: it would empty the table of what came after it.
4. removes the letters from the dead-letter table.

Steps 3 and 4 are two commits. After a crash between them the letters are still there, and another replay makes the same
rows, because they depend only on the topic and the position. The replay commits with the sink's id. So if a run with
this id commits at the same time, one of both commits is refused.

If the topic no longer has a letter's record (retention, compaction), nobody can tell which records came after it. The
replay leaves such a letter alone, unless the user asks to apply it as if the key had not changed since.

Changes that are late are left out, also with `late: dead-letter`: only the key's last change counts. Letters of class
`late` stay. Their changes were left out since the table has newer ones, which the topic may have before them.

A partial update builds on the row that the table has, like in a micro-batch: of the key's later changes, the values
that it lacks are in this row already, and those that it has are applied again after it.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from changelog.amounts import amount
from changelog.decoding import CHANGES_PER_RECORD
from changelog.rows import BAD, BadRecord, order_column
from sink.config import Config, TableSection
from sink.deadletters import table as dead_letters
from sink.deadletters.table import RECORD, Selection, same_record
from sink.errors import ConfigError, DataError
from sink.run.pipeline import open_source
from sink.sources.kafka import KafkaSource
from sink.sources.source import Position, TableBatch
from sink.sources.topics import Offsets, part_name, places_of
from sink.spark.changes import is_bad, is_truncate
from sink.spark.duplicate_keys import check_tells_rows_apart
from sink.spark.engine import SparkEngine
from sink.spark.expressions import any_of, quoted
from sink.spark.sample import SparkSample
from sink.table.keys import table_key, with_key
from sink.table.microbatch import TableSink
from sink.table.patterns import ResolvedTable, find_tables
from sink.table.plan import plan_table
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import CLOCK_SECONDS

log = logging.getLogger("rowdelta")

_CONCERNED = "_rowdelta_concerned"


@dataclass(frozen=True)
class Replayed:
    """The outcome for a table's dead letters. All but the applied ones are still in the dead-letter table.

    :param applied: letters that were applied and removed.
    :param refused: letters that still can't be decoded, by error class.
    :param ahead: letters that the table's position hasn't passed.
    :param gone: letters whose records the topic no longer has.
    :param late: letters of late changes, which nothing is done with.
    """

    table: str
    applied: int
    refused: Mapping[str, int]
    ahead: int
    gone: int
    late: int = 0

    @property
    def left(self) -> int:
        """Letters that another replay may apply."""
        return sum(self.refused.values()) + self.ahead + self.gone

    def __str__(self) -> str:
        text = f"{self.table}: {self.applied:,} replayed"
        if self.refused:
            classes = ", ".join(f"{count:,} {error_class}" for error_class, count in self.refused.items())
            text += f"; {sum(self.refused.values()):,} still refused ({classes})"
        if self.ahead:
            text += f"; {self.ahead:,} not passed yet: rowdelta run comes first"
        if self.gone:
            text += f"; {self.gone:,} gone from the topic: --force applies them as they are stored"
        if self.late:
            text += f"; {self.late:,} late, which replay leaves alone (to remove: DELETE FROM)"
        return text


def replay(spark: SparkSession, config: Config, selection: Selection, force: bool = False) -> Iterator[Replayed]:
    """Replay the selected dead letters of the configured topics, table by table.

    :param force: also apply letters whose record the topic no longer has, and go on if the configuration now refuses
        records that were applied when they arrived.
    :raises RowdeltaError: nothing of that table was changed, unless the message says otherwise.
    """
    if not config.source.has_topics:
        raise ConfigError(
            "replay reads what came after a bad record from Kafka, and source.type is files. Write the corrected "
            "records into a new change file instead; then delete the dead letters by SQL."
        )
    # a replay repeats changes that the table already has; only mode upsert allows that, and they aren't letters
    tables = [
        table
        if table.mode == "append"
        else table.model_copy(update={"mode": "upsert", "late": "apply" if table.late == "apply" else "drop"})
        for table in config.tables
    ]
    config = config.model_copy(update={"tables": tables})
    source = open_source(spark, config, {})
    assert isinstance(source, KafkaSource)
    resolved = [table for table in find_tables(config, source) if table.error is None]
    targets = [table.section.target for table in resolved]
    if selection.table is not None and selection.table not in targets:
        raise ConfigError(f"--table {selection.table}: no table has this target. Targets: {', '.join(targets)}.")
    found = dead_letters.find(spark, config, selection)
    with_letters = {(row[0], row[1]) for row in found.select("table", "source").distinct().collect()}
    for table in resolved:
        section = table.section
        # other sinks may write to the same two tables
        if any((section.target, topic) in with_letters for topic in section.topics):
            if section.mode == "append":
                raise ConfigError(
                    f"{section.target} is in mode append, in which a replayed record could be inserted twice. Insert "
                    "the rows by SQL, and delete the dead letters by SQL."
                )
            own = (F.col("table") == section.target) & F.col("source").isin(*section.topics)
            yield _Replay(spark, config, table, source).run(found.where(own), force)


class _Replay:
    """The replay of one table."""

    def __init__(self, spark: SparkSession, config: Config, resolved: ResolvedTable, source: KafkaSource) -> None:
        self._spark = spark
        self._config = config
        self._section = resolved.section
        catalogs = Catalogs(spark, config)
        table = catalogs.existing(self._section.target)
        self._source = source
        key = table_key(config, resolved, table, SparkSample(spark, config, resolved.section, source))
        plan = plan_table(catalogs, config, with_key(resolved, key), table)
        check_tells_rows_apart(config, plan.section, key, table, spark)
        self._section = plan.section
        engine = SparkEngine(config, table, None)
        self._sink = TableSink(config, resolved, table, plan, key, source, None, engine)

    def run(self, letters: DataFrame, force: bool) -> Replayed:
        """Replay `letters`, this table's rows of the dead-letter table."""
        self._sink.check_source()
        target, position = self._section.target, self._sink.position or {}
        # Spark must not read the dead-letter table again after the letters are removed from it
        letters = letters.withColumn("passed", _passed(self._section, position)).localCheckpoint()
        is_late = F.col("error_class") == BadRecord.LATE
        late, letters = letters.where(is_late).count(), letters.where(~is_late)
        log.info("%s: decoding %s", target, amount(letters.count(), "dead letter"))
        changes = self._sink.decoded(_as_records(letters.where("passed")))
        refused = changes.where(is_bad(changes)).select(f"{BAD}.*").select(*RECORD).distinct().localCheckpoint()
        passed = letters.where("passed")
        understood = _records_in(passed, refused, "left_anti").localCheckpoint()
        first = self._first(understood)
        again = self._source.read_again(self._section, first, position) if first else None
        if again is None:
            found = understood.limit(0).withColumn("timestamp", F.lit(None).cast("timestamp"))
        else:
            # the timestamp comes from the topic, since a dead letter has none
            found = _records_in(understood, again, "inner").select("letter.*", "other.timestamp")
        found = found.localCheckpoint()
        gone = _records_in(understood, found, "left_anti").localCheckpoint()
        chosen = understood if force else found.select(*understood.columns)
        if not chosen.isEmpty():
            self._apply(chosen, found, gone if force else gone.limit(0), position, force)
            dead_letters.remove(self._spark, self._config, chosen)
        still_refused = _records_in(passed, refused, "left_semi").groupBy("error_class").count()
        return Replayed(
            target,
            applied=chosen.count(),
            refused={row[0]: row[1] for row in still_refused.orderBy("error_class").collect()},
            ahead=letters.where("not passed").count(),
            gone=0 if force else gone.count(),
            late=late,
        )

    def _first(self, letters: DataFrame) -> Offsets:
        """The position before the first of `letters` in each partition."""
        first = letters.groupBy("source", "partition").agg(F.min("offset")).collect()
        return {part_name(self._section, row[0], row[1]): row[2] for row in first}

    def _since(self, letters: DataFrame, found: DataFrame, stored: DataFrame) -> Offsets:
        """The offset to begin with in each partition, so that no record after the first letter is missed.

        A key's records may be in other partitions than its letters: the topic may have got more partitions, or the key
        of the messages may differ from the table's key. Their timestamps may be of machines whose clocks differ. If
        timestamps order the changes too, what is older than the letters would lose anyway.
        """
        oldest = None if not stored.isEmpty() else found.agg(F.unix_millis(F.min("timestamp"))).collect()[0][0]
        margin = CLOCK_SECONDS * 1000 if self._section.order_by else 0
        # -1 means that a message has no timestamp
        time = max(0, oldest - margin) if oldest is not None and oldest >= 0 else None
        others = self._source.offsets_since(self._section, time)
        first = self._first(letters)
        return others | {partition: min(offset, others.get(partition, offset)) for partition, offset in first.items()}

    def _apply(self, letters: DataFrame, found: DataFrame, stored: DataFrame, position: Position, force: bool) -> None:
        """Apply what the topic says about the keys of `letters`.

        :param found: letters whose records the topic has, with the topic's `timestamp`.
        :param stored: letters whose records it no longer has. They are applied with the topic's records.
        """
        target, key = self._section.target, list(self._section.key)
        since = self._since(letters, found, stored)
        again = self._source.read_again(self._section, since, position)
        records = _as_records(stored)
        records = records if again is None else again.unionByName(records, allowMissingColumns=True)
        concerned = self._sink.decoded(_as_records(letters)).select(*map(quoted, key)).distinct().localCheckpoint()
        concerned = concerned.withColumn(_CONCERNED, F.lit(True))
        log.info("%s: reading what the topic has of %s since", target, amount(concerned.count(), "key"))

        def keep(changes: DataFrame) -> DataFrame:
            rows = changes.join(concerned, key, "left").where(is_bad(changes) | F.col(_CONCERNED))
            return rows.select(*(quoted(name) for name in changes.columns))

        changes = self._sink.decoded(records, keep)
        bad, truncate = is_bad(changes), is_truncate()
        self._check_refused(changes.where(bad & ~truncate), force)
        good = changes.where(~bad)
        # what a TRUNCATE has closed is still in the history
        has_history = self._section.history is not None
        changes = good.localCheckpoint() if has_history else self._since_truncate(good, changes.where(truncate))
        if not self._section.order_by:
            changes = self._by_time(changes, records)
        count = changes.count()
        if count:
            log.info("%s: applying %s", target, amount(count, "change"))
            batch = TableBatch(None, position, count, changes, work="replay")
            self._sink.apply_batch(None, batch)

    def _since_truncate(self, changes: DataFrame, truncates: DataFrame) -> DataFrame:
        """Leave out changes that a later TRUNCATE of the source has made void. The replay itself empties no table."""
        order = F.struct(*(order_column(i) for i in range(len(self._section.order_by) + 2)))
        last = truncates.select(F.max(order).alias("_truncate"))
        counts = F.col("_truncate").isNull() | (order > F.col("_truncate"))
        return changes.crossJoin(F.broadcast(last)).where(counts).drop("_truncate").localCheckpoint()

    def _by_time(self, changes: DataFrame, records: DataFrame) -> DataFrame:
        """Order the changes of keys that are in several partitions by Kafka's timestamps. Within a partition, the
        offset still decides.

        The usual order columns (partition, offset) would let the higher partition win.
        """
        partition, offset = order_column(0), order_column(1)
        key = [quoted(name) for name in self._section.key]
        spread = changes.groupBy(*key).agg(F.countDistinct(partition).alias("partitions")).where("partitions > 1")
        if spread.isEmpty():
            return changes
        number = F.col("partition")
        if self._section.many_topics:
            number = _partition_number(F.col("source"), number)
        times = records.select(number.alias("_p"), F.col("offset").alias("_o"), F.col("timestamp").alias("_t"))
        place = (F.col(partition) == F.col("_p")) & (F.expr(f"{offset} div {CHANGES_PER_RECORD}") == F.col("_o"))
        # A message's timestamp may be lower than that of an earlier message. A stored letter has no timestamp, and is
        # older than all records in the topic.
        so_far = Window.partitionBy(*key, partition).orderBy(offset).rowsBetween(Window.unboundedPreceding, 0)
        by_time = Window.partitionBy(*key).orderBy(F.col("_so_far").asc_nulls_first(), partition, offset)
        timed = changes.join(times, place, "left").withColumn("_so_far", F.max("_t").over(so_far))
        ranked = timed.withColumn("_rank", F.row_number().over(by_time).cast("bigint"))
        ordered = {partition: F.lit(0), offset: F.col("_rank")}
        columns = [ordered.get(name, F.col(quoted(name))).alias(name) for name in changes.columns]
        return ranked.select(*columns).localCheckpoint()

    def _check_refused(self, bad: DataFrame, force: bool) -> None:
        """:raises DataError: the configuration now refuses records that were applied when they arrived."""
        known = dead_letters.find(self._spark, self._config, Selection(table=self._section.target))
        refused = _records_in(bad.select(f"{BAD}.*"), known, "left_anti")
        examples = refused.limit(3).collect()
        if examples and not force:
            shown = "; ".join(
                f"{row['source']}-{row['partition']} offset {row['offset']}: {row['reason']}" for row in examples
            )
            raise DataError(
                f"{self._section.target}: the configuration refuses {refused.count():,} later records of the topic "
                f"that are not dead letters: they were applied when they arrived. {shown}. Nothing was changed. "
                "Correct the configuration, or, if you deleted these dead letters, use --force."
            )


def _passed(section: TableSection, position: Position) -> Column:
    """Whether the position has passed a letter."""
    ends = [
        (F.col("source") == topic) & (F.col("partition") == int(number)) & (F.col("offset") < end)
        for topic, offsets in places_of(section, position).items()
        for number, end in offsets.items()
    ]
    return any_of(ends)


def _partition_number(topic: Column, partition: Column) -> Column:
    """`changelog.topics.partition_number`."""
    return F.shiftleft(F.crc32(topic.cast("binary")).bitwiseAND(0x7FFFFFFF), 32) + partition


def _records_in(letters: DataFrame, others: DataFrame, how: str) -> DataFrame:
    """`letters` joined with `others` by record. Null keys and values count as equal."""
    return letters.alias("letter").join(others.alias("other"), same_record("letter", "other"), how)


def _as_records(letters: DataFrame) -> DataFrame:
    """Turn dead letters back into raw records."""
    return letters.select(
        "source", "partition", "offset", F.lit(None).cast("timestamp").alias("timestamp"), "key", "value"
    )
