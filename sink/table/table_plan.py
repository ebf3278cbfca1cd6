"""What a target table is, or would be, and how changes are decoded for it."""

from dataclasses import dataclass

from changelog.spec import ChangelogSpec, ColumnSpec
from deltawriters.order_values import OrderColumns
from deltawriters.ordering import RowOrder
from sink.config import TableSection


@dataclass(frozen=True)
class LateOrder:
    """How late changes are told: their order value is below what the table holds for their key.

    :param columns: the table's columns with the order values.
    :param tombstone_seconds: how long the order values of deleted keys are kept.
    """

    columns: OrderColumns
    tombstone_seconds: int


@dataclass(frozen=True)
class TablePlan:
    """A target that exists or would be created, and how changes are decoded for it.

    :param section: the table's section of the configuration.
    :param changelog: how changes are decoded. Its columns are the decoded ones: it lacks computed and metadata columns,
        and has fields that only expressions need.
    :param exists: whether the table exists.
    :param columns: the table's columns.
    :param computed: (name, Spark SQL expression) of computed columns.
    :param derived_partition: the table is partitioned by a computed or metadata column, so a change doesn't say in
        which partition the old row is.
    :param warnings: sentences for people about properties and features of the table that the sink doesn't follow.
    :param order: in which rows are written.
    :param late: None if late changes are applied as all others.
    """

    section: TableSection
    changelog: ChangelogSpec
    exists: bool
    columns: tuple[ColumnSpec, ...] = ()
    computed: tuple[tuple[str, str], ...] = ()
    derived_partition: bool = False
    warnings: tuple[str, ...] = ()
    order: RowOrder | None = None
    late: LateOrder | None = None

    @property
    def is_decoded_whole(self) -> bool:
        """Whether decoded changes have exactly the table's columns: no column is computed, no field is decoded only for
        an expression, and Spark has no `where` to evaluate.
        """
        columns, where = {column.name for column in self.columns}, self.changelog.where
        if where is not None:
            if where.condition is None:
                return False
            columns |= where.only
        return not self.computed and all(column.name in columns for column in self.changelog.columns)
