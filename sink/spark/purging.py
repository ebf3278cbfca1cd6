"""Finds the rows of a table that were marked as deleted long ago."""

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from sink.spark.exchange import in_arrow
from sink.spark.expressions import binary_uuid, quoted
from sink.spark.job_errors import JOB_ERRORS, job_error
from sink.spark.tasks.purge import Removals
from sink.table.table_plan import TablePlan
from sink.targets.seam import Table


def removals(table: Table, plan: TablePlan, before: datetime) -> tuple[DataFrame, int]:
    """See `sink.table.engine.Engine`. The executors store the changes."""
    soft, marks = plan.section.soft_delete, plan.changelog.soft_delete
    assert soft is not None
    assert soft.at is not None
    assert marks is not None
    made = Removals.of(plan, marks.columns)
    uuids = {column.name for column in plan.columns if column.is_uuid}
    names = dict.fromkeys([*plan.section.key, *made.marks, *made.order.values()])
    rows = (
        table.reader()
        .frame(table.spark)
        .where(F.col(quoted(soft.column)) & (F.col(quoted(soft.at)) < F.lit(before)))
        .select(*(binary_uuid(name) if name in uuids else F.col(quoted(name)) for name in names))
    )
    try:
        changes = in_arrow(rows, made, from_arrow_schema(made.schema)).localCheckpoint()
        return changes, changes.count()
    except JOB_ERRORS as error:
        raise job_error(table.name, error) from error
