"""Which task gets which row: all changes of a key meet in one task."""

from pyiceberg.transforms import BucketTransform
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from changelog.row_kind_columns import quoted
from deltawriters import TableSpec
from sink.tables import TablePlan


def routing_columns(plan: TablePlan, table: TableSpec, tasks: int, spark: SparkSession) -> list[Column]:
    """What to shuffle by where there is no key index.

    By key; but if the table has buckets of a key column, by bucket: then each bucket is written by one task only, in
    `tasks` times fewer files.
    """
    bucket = bucket_of_key(plan, table)
    if bucket is None or bucket[1] < tasks:
        return [F.col(quoted(name)) for name in plan.section.key]
    # key columns that are null belong to bad records; they go to the first task
    return [to_task(F.coalesce(bucket_number(plan, *bucket) % tasks, F.lit(0)), tasks, spark)]


def bucket_of_key(plan: TablePlan, table: TableSpec) -> tuple[str, int] | None:
    """A key column that the table is partitioned by in buckets, and how many buckets there are."""
    for field in table.current_spec.fields:
        source = table.iceberg_schema.find_column_name(field.source_id)
        if isinstance(field.transform, BucketTransform) and source in plan.section.key:
            return source, field.transform.num_buckets
    return None


def bucket_number(plan: TablePlan, column: str, count: int) -> Column:
    """The number of the bucket, by Iceberg's own function."""
    return F.expr(f"{quoted(plan.section.catalog)}.system.bucket({count}, {quoted(column)})")


def to_task(number: Column, tasks: int, spark: SparkSession) -> Column:
    """What to repartition by, so that a row goes to task `number` of `tasks`.

    Spark hashes what it is given once more, so each task is named by an integer that hashes to its number.
    """
    numbers = spark.range(100 * tasks).select("id", F.pmod(F.hash(F.col("id").cast("int")), F.lit(tasks)).alias("task"))
    chosen = {row.task: row.id for row in numbers.groupBy("task").agg(F.min("id").alias("id")).collect()}
    return F.array(*(F.lit(int(chosen[i])) for i in range(tasks)))[number]
