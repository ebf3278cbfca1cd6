"""The usual alternative to rowdelta: `foreachBatch` + `MERGE INTO`, into a merge-on-read Iceberg table.

Each micro-batch is reduced to the last change of each key, then merged into the target with one MERGE. The code is
written and tuned as a user would do it, because a slow baseline would prove nothing. The variants were compared with
1,000,000 accounts and 14 or 20 micro-batches of 50,000 events on two cores. They took turns, and the last 7 or 8
micro-batches count:

- Kept: `preferSortMergeJoin=false`. Hashing the few changed keys saves sorting the target (6 % ± 2 %). A `SHUFFLE_HASH`
  hint does not reach the join that Spark makes of a MERGE, and a broadcast can't serve its outer join.
- Kept: `write.delete.granularity=partition`. With `file`, Iceberg's default, each MERGE rewrites the delete file of
  every data file that it changes, and these files grow with each commit. `partition` saves 19-24 %, and 39 % with
  `bucket(8, id)`. But scans after 20 micro-batches took 0.44 s instead of 0.38 s, so a comparison of scans must show
  both.
- Rejected: `write.*.distribution-mode=none`. It saves a shuffle, writes twice as many files, and is 8-17 % slower.
- No clear difference: `max_by` or `row_number`; a storage-partitioned join for `bucket(8, id)`.
- `bucket(8, id)` takes about twice as long as no partitioning, since MERGE opens and writes eight times as many files.
  It is here for tables that are partitioned for other reasons. The fair opponent is the unpartitioned table.

`merge_versions` is the usual way to a slowly changing dimension of type 2. Of a key's changes in a micro-batch it keeps
the last one. Neither MERGE knows late changes: each applies them as if they were the newest.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.streams import read_changes, run_available
from benchmarks.workload import SPARK_TABLE_SCHEMA, TABLE_SCHEMA

COLUMNS = TABLE_SCHEMA.names

PROPERTIES = {
    "format-version": "2",
    "write.merge.mode": "merge-on-read",
    "write.update.mode": "merge-on-read",
    "write.delete.mode": "merge-on-read",
    "write.delete.granularity": "partition",
}


COPY_ON_WRITE = dict.fromkeys(("write.merge.mode", "write.update.mode", "write.delete.mode"), "copy-on-write")


def create_table(
    spark: SparkSession,
    table: str,
    buckets: int | None = None,
    properties: dict[str, str] | None = None,
    partition: str | None = None,
) -> None:
    """Create the accounts table, unpartitioned or partitioned by `bucket(buckets, id)`, or by `partition`."""
    partition = f"bucket({buckets}, id)" if buckets else partition
    partitioning = f"PARTITIONED BY ({partition})" if partition else ""
    _create(spark, table, SPARK_TABLE_SCHEMA, partitioning, properties)


def create_history_table(spark: SparkSession, table: str, properties: dict[str, str] | None = None) -> None:
    """Create the table of the accounts' versions. A MERGE reads only the files of current rows then."""
    schema = f"{SPARK_TABLE_SCHEMA}, valid_from BIGINT, valid_to BIGINT, is_current BOOLEAN"
    _create(spark, table, schema, "PARTITIONED BY (is_current)", properties)


def _create(spark: SparkSession, table: str, schema: str, partitioning: str, properties: dict[str, str] | None) -> None:
    rendered = ", ".join(f"'{key}' = '{value}'" for key, value in (PROPERTIES | (properties or {})).items())
    spark.sql(f"CREATE TABLE {table} ({schema}) USING iceberg {partitioning} TBLPROPERTIES ({rendered})")


def create_delta_table(spark: SparkSession, folder: Path) -> str:
    """Create the accounts table of Delta Lake, with deletion vectors. Returns its name in SQL."""
    table = f"delta.`{folder}`"
    spark.sql(
        f"CREATE TABLE {table} ({SPARK_TABLE_SCHEMA}) USING delta "
        "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    )
    return table


def load(spark: SparkSession, table: str, files: Sequence[Path], columns: Sequence[str] = COLUMNS) -> float:
    """Append the initial load's files to the table; return the seconds it took."""
    started = perf_counter()
    changes = spark.read.parquet(*map(str, files))
    if table.startswith("delta."):
        changes.select(*columns).write.format("delta").mode("append").save(table.removeprefix("delta.").strip("`"))
    else:
        changes.select(*columns).writeTo(table).append()
    return perf_counter() - started


def load_history(spark: SparkSession, table: str, files: Sequence[Path]) -> float:
    """Append the initial load's files as current rows; return the seconds it took."""
    started = perf_counter()
    rows = spark.read.parquet(*map(str, files))
    versions = rows.selectExpr(*COLUMNS, "seq AS valid_from", "CAST(NULL AS BIGINT) AS valid_to", "TRUE AS is_current")
    versions.writeTo(table).append()
    return perf_counter() - started


def merge_changes(changes: DataFrame, table: str, columns: Sequence[str] = COLUMNS) -> None:
    """Apply one micro-batch of change rows to the table."""
    _last_changes(changes, columns[1:])
    assignments = ", ".join(f"t.{column} = s.{column}" for column in columns)
    changes.sparkSession.sql(f"""
        MERGE INTO {table} t USING last_changes s ON t.id = s.id
        WHEN MATCHED AND s.row_kind = '-D' THEN DELETE
        WHEN MATCHED THEN UPDATE SET {assignments}
        WHEN NOT MATCHED AND s.row_kind <> '-D' THEN
            INSERT ({", ".join(columns)}) VALUES ({", ".join(f"s.{column}" for column in columns)})
    """)


def merge_versions(changes: DataFrame, table: str) -> None:
    """Apply one micro-batch of change rows to the table of versions: each change closes its key's current row by its
    key, and opens another one under no key. Each change changes a column, so no join tells which ones do.
    """
    _last_changes(changes, [*COLUMNS[1:], "seq"])
    # explode is the union of both, but doesn't group the micro-batch twice
    changes.sparkSession.sql(f"""
        MERGE INTO {table} t USING (
            SELECT explode(if(row_kind = '-D', array(id), array(id, NULL))) AS closed_id, * FROM last_changes
        ) s ON t.id = s.closed_id AND t.is_current
        WHEN MATCHED THEN UPDATE SET t.valid_to = s.seq, t.is_current = FALSE
        WHEN NOT MATCHED AND s.closed_id IS NULL THEN
            INSERT ({", ".join(COLUMNS)}, valid_from, valid_to, is_current)
            VALUES ({", ".join(f"s.{column}" for column in COLUMNS)}, s.seq, NULL, TRUE)
    """)


def _last_changes(changes: DataFrame, columns: Sequence[str]) -> None:
    """Make the view `last_changes`, with `id`, `row_kind` and these columns."""
    # The session is the stream's own clone: other queries keep their settings.
    changes.sparkSession.conf.set("spark.sql.join.preferSortMergeJoin", "false")
    last_changes = (
        changes.where("row_kind <> '-U'")
        .groupBy("id")
        .agg(F.max_by(F.struct("row_kind", *columns), "seq").alias("last"))
        .select("id", "last.*")
    )
    last_changes.createOrReplaceTempView("last_changes")


def merge_available(
    spark: SparkSession,
    table: str,
    source: Path,
    checkpoint: Path,
    files_per_batch: int = 2,
    merge: Callable[[DataFrame, str], None] = merge_changes,
) -> list[float]:
    """Merge all change files in `source` that the checkpoint doesn't know yet, `files_per_batch` at a time."""
    stream = read_changes(spark, source, files_per_batch)
    return run_available(stream.writeStream.foreachBatch(lambda changes, _: merge(changes, table)), checkpoint)
