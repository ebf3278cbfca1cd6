"""The fields of an entry of `tables:`, and what follows from them."""

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from changelog.spec import OF_THE_RECORD
from sink.config.base import Section, Text
from sink.config.intervals import Interval, seconds_of
from sink.config.job_sections import VerifySection
from sink.config.maintenance import MaintenanceSection
from sink.config.options import MisplacedError
from sink.config.table_parts import (
    GROUP_REFERENCE,
    Columns,
    ColumnSection,
    HistorySection,
    IgnoredNulls,
    Metadata,
    OrderColumn,
    PartitionField,
    SoftDeleteSection,
    TableSource,
)


def _source(value: Any) -> Any:
    return value if isinstance(value, dict) else {"topic": value}


def _column(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _ignored_nulls(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return {} if value else None
    if isinstance(value, list) and value:
        return {"columns": value}
    if isinstance(value, dict) and set(value) == {"except"}:
        return value
    raise ValueError("expected true, a list of columns, or {except: [columns]} for all others")


class TableFields(Section):
    """The fields of one entry of `tables:`: a changelog and the table that mirrors it.

    :param feed: `source:` the topic or topics, or the directory.
    :param shard: the key column that tells rows of several topics apart; or `NO_SHARD`. None: the column with the
        record's topic.
    :param key: key columns. Empty if the messages state the key; when the table is opened, it is filled in
        (`sink.table.keys`).
    :param keys: topic or directory -> key columns, for exceptions of a pattern.
    :param types: name, or regular expression for names -> Spark SQL type of columns that `columns` doesn't name.
    :param ignore_null_updates: in which columns the NULL of an insert or update says nothing: the key's row keeps its
        value.
    :param truncate: what a TRUNCATE of the source does. None: `apply` where that is possible.
    :param resnapshot: what a new snapshot of the source's table does to rows that it doesn't have.
    :param source_tables: patterns of the source's tables whose messages are taken. Empty: the one that is named first.
    :param other_tables: what becomes of messages of other tables.
    :param shared_with: ids of other sinks that may write the table too, or have created it.
    :param cluster_by: columns by which Delta Lake clusters a table (liquid clustering).
    :param late: what becomes of a change whose order value is below what the table holds for its key.
    :param where: which rows the table has: a condition in Spark SQL. None: all.
    :param tombstones: so long the order values of deleted keys are kept.
    :param order_column: the table's column for an order value that is in no other one. Further ones have a number after
        it.
    :param soft_delete: a delete marks the row, and removes nothing.
    :param source_deletes: what a delete of the source does. `ignore`: the table keeps the row as it is.
    :param history: the table keeps all versions of its rows.
    """

    model_config = ConfigDict(populate_by_name=True)

    feed: Annotated[TableSource, BeforeValidator(_source)] = Field(alias="source")
    target: str
    shard: str | None = None
    key: Columns = Field(default_factory=list)
    keys: dict[str, Columns] = Field(default_factory=dict)
    columns: dict[str, Annotated[ColumnSection, BeforeValidator(_column)]] | None = None
    types: dict[str, str] = Field(default_factory=dict)
    exclude: list[str] = Field(default_factory=list)
    metadata: list[Metadata] = Field(default_factory=list)
    schema_changes: Literal["evolve", "ignore", "fail"] = "evolve"
    partition_by: list[str] = Field(default_factory=list)
    cluster_by: list[str] = Field(default_factory=list)
    order_by: list[str] = Field(default_factory=list)
    where: str | None = None
    late: Literal["apply", "drop", "dead-letter"] = "apply"
    tombstones: Interval | None = None
    order_column: str = "_order"
    soft_delete: SoftDeleteSection | None = None
    source_deletes: Literal["apply", "ignore"] = "apply"
    history: HistorySection | None = None
    mode: Literal["upsert", "changelog", "append"] = "upsert"
    deletes: Literal["position", "equality", "copy-on-write"] = "position"
    unavailable: Literal["keep", "reject"] | None = None
    ignore_null_updates: Annotated[IgnoredNulls | None, BeforeValidator(_ignored_nulls)] = None
    truncate: Literal["apply", "reject"] | None = None
    resnapshot: Literal["upsert", "reconcile"] = "upsert"
    merge_small_files: bool = True
    properties: dict[str, Text] = Field(default_factory=dict)
    shared_with: list[str] = Field(default_factory=list)
    source_tables: list[str] = Field(default_factory=list)
    other_tables: Literal["reject", "ignore"] = "reject"
    verify: VerifySection | None = None
    maintenance: MaintenanceSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_one_table(cls, values: Any) -> Any:
        """`source: {topic: …, table: …}` means `source_tables`, without those of others."""
        source = values.get("source") if isinstance(values, dict) else None
        if not isinstance(source, dict) or "table" not in source:
            return values
        if "source_tables" in values:
            raise MisplacedError("source names the table too. Keep one of them", "source_tables")
        if "topic" in source and GROUP_REFERENCE.search(str(values.get("target"))):
            return {"other_tables": "ignore"} | values
        table, rest = source["table"], {name: value for name, value in source.items() if name != "table"}
        tables = table if isinstance(table, list) else [table]
        return {"other_tables": "ignore"} | values | {"source": rest, "source_tables": tables}

    @model_validator(mode="before")
    @classmethod
    def _history_has_times(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("history") is not None and not value.get("order_by"):
            return {**value, "order_by": ["_ts"]}
        return value

    @field_validator("target")
    @classmethod
    def _target(cls, value: str) -> str:
        if len(value.split(".")) < 3 or not all(value.split(".")):
            raise ValueError("write catalog.namespace.table")
        return value

    @field_validator("columns")
    @classmethod
    def _columns(cls, value: dict[str, ColumnSection] | None) -> dict[str, ColumnSection] | None:
        for name in value or {}:
            if name.startswith("_rowdelta_"):
                raise ValueError(f"{name}: names beginning with _rowdelta_ are taken")
            if "'" in name or "." in name:
                raise ValueError(f"{name}: a column name may not contain ' or .")
        return value

    @field_validator("where")
    @classmethod
    def _where(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("write a condition in Spark SQL, such as country <> 'US', or leave it out for all rows")
        return value

    @field_validator("types")
    @classmethod
    def _types(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            try:
                re.compile(name)
            except re.error as error:
                raise MisplacedError(
                    f"{name!r} is neither a column's name nor a regular expression for names: {error}", name
                ) from None
        return value

    @field_validator("partition_by")
    @classmethod
    def _partition_by(cls, value: list[str]) -> list[str]:
        for text in value:
            PartitionField.parse(text)
        return value

    @field_validator("cluster_by")
    @classmethod
    def _cluster_by(cls, value: list[str]) -> list[str]:
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"cluster_by names {name!r} twice. Name it once")
        return value

    @property
    def source(self) -> str:
        """The topic or directory, for people. Of several topics all names, or the regular expression for them."""
        topic = self.feed.topic
        return self.feed.pattern or (topic if isinstance(topic, str) else ", ".join(topic or ()))

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics or directory, once `sink.table.patterns` has put names in place of a regular expression."""
        topic = self.feed.topic
        return (topic,) if isinstance(topic, str) else tuple(topic or ())

    @property
    def many_topics(self) -> bool:
        """Whether the table takes several topics, by a list or a regular expression. At the moment it may be one."""
        is_one = self.is_pattern and self.feed.table is None
        return not (is_one or isinstance(self.feed.topic, str))

    @property
    def origin(self) -> str:
        """What the table mirrors, for people: its source, and which table in it if a pattern has found that."""
        table = self.feed.table
        return self.source if table is None else f"{', '.join(self.source_tables) or table} in {self.source}"

    @property
    def id(self) -> str:
        """What tells the tables of a job apart, also those whose target is wrong."""
        return f"{self.origin} -> {self.target}"

    @property
    def is_pattern(self) -> bool:
        """Whether the entry is for a table of each name that a regular expression matches: of topics, or of the
        source's tables in a topic. It is if `target` has a reference such as `$1`. Special characters in `source` don't
        decide, since names of topics contain dots too.
        """
        return GROUP_REFERENCE.search(self.target) is not None

    @property
    def has_pattern(self) -> bool:
        """Whether `source` is a regular expression for names of topics: for a table of each, or for one of all."""
        return self.feed.pattern is not None or (self.is_pattern and self.feed.table is None)

    @property
    def may_find_more(self) -> bool:
        """Whether a pattern may match something that isn't there yet."""
        return self.has_pattern or self.feed.table is not None

    def expand(self, text: str, match: re.Match[str]) -> str:
        """Replace `$1` or `${1}` in `text` by the match's groups. Each group becomes a name of letters, digits and `_`.

        :raises ValueError: a group is empty.
        """

        def name(reference: re.Match[str]) -> str:
            value = match[int(reference[1] or reference[2])]
            if not value:
                raise ValueError(f"{reference[0]} in {text!r} is empty for {match.string!r}")
            return re.sub(r"\W", "_", value)

        return GROUP_REFERENCE.sub(name, text)

    @property
    def catalog(self) -> str:
        return self.target.split(".")[0]

    @property
    def has_index(self) -> bool:
        """Whether a key index finds the table's rows."""
        return self.mode != "append" and self.deletes != "equality"

    @property
    def copies(self) -> bool:
        """Whether rows are deleted copy-on-write."""
        return self.mode != "append" and self.deletes == "copy-on-write"

    @property
    def record_columns(self) -> dict[str, str]:
        """Columns whose values are of the record, such as its topic -> which of `OF_THE_RECORD`."""
        named = {name: column.source for name, column in (self.columns or {}).items() if column.source in OF_THE_RECORD}
        return named | {name: name for name in self.metadata if name in OF_THE_RECORD}

    @property
    def stored_columns(self) -> list[str]:
        """The table's columns that the configuration names."""
        return [*(name for name, column in (self.columns or {}).items() if column.stored), *self.metadata, *self.marks]

    def declared_type(self, column: str) -> str | None:
        """The type that `types` gives a column: by its name, or else by the first expression for its whole name."""
        if column in self.types:
            return self.types[column]
        return next((dtype for name, dtype in self.types.items() if re.fullmatch(name, column)), None)

    @property
    def is_computed(self) -> bool:
        """Whether the configuration has computed columns, or fields for them."""
        return any(column.expression is not None or not column.stored for column in (self.columns or {}).values())

    @property
    def partition_fields(self) -> list[PartitionField]:
        """Current rows and closed versions are in partitions of their own, so that readers of either skip the other."""
        current = [] if self.history is None else [self.history.current]
        return [PartitionField.parse(text) for text in dict.fromkeys([*current, *self.partition_by])]

    @property
    def order_columns(self) -> list[OrderColumn]:
        return [OrderColumn.parse(text) for text in self.order_by]

    @property
    def stores_order(self) -> bool:
        """Whether the table has the order values of its rows."""
        return self.late != "apply" or self.history is not None

    def added_order_columns(self, columns: Collection[str]) -> dict[str, str]:
        """The table's columns that only hold order values, by what `order_by` names. Without `late: drop` there are
        none.

        :param columns: the other columns of the table.
        """
        if not self.stores_order:
            return {}
        fields = {(column.source or name): name for name, column in (self.columns or {}).items() if column.stored}
        known = {*columns, *fields}
        names = [order.name for order in self.order_columns if order.name not in known]
        return {
            name: self.order_column if number == 1 else f"{self.order_column}_{number}"
            for number, name in enumerate(names, 1)
        }

    def may_hold_order(self, column: str) -> bool:
        """Whether a column may be left from a time with `late: drop`, by its name."""
        return re.fullmatch(rf"(_order|{re.escape(self.order_column)})(_\d+)?", column) is not None

    @property
    def tombstone_seconds(self) -> int:
        """How long the order values of deleted keys are kept."""
        return int(seconds_of(self.tombstones or "7 days"))

    @property
    def version_columns(self) -> tuple[str, ...]:
        """The columns by which a row is a version."""
        return () if self.history is None else self.history.columns

    @property
    def keeps_deleted(self) -> bool:
        """Whether a delete of the source removes no row."""
        return self.soft_delete is not None or self.source_deletes == "ignore"

    @property
    def marks(self) -> list[str]:
        """The columns by which a row says that it is deleted."""
        return [] if self.soft_delete is None else self.soft_delete.columns

    @property
    def keeps_unavailable(self) -> bool:
        """Whether updates may lack values, which are then those of the table's row. If late changes are left out, the
        row may have missed such a value, so there the user must say it.
        """
        wanted = self.unavailable or ("keep" if self.late == "apply" else "reject")
        return wanted == "keep" and self.cannot_keep is None

    @property
    def cannot_keep(self) -> str | None:
        """Why `unavailable: keep` isn't possible."""
        if self.mode != "upsert":
            return f"mode {self.mode} takes changes as they are. Write mode: upsert"
        if not self.has_index:
            return "only the key index finds the table's rows. Write deletes: position or copy-on-write"
        if self.is_computed:
            return "a computed column could be computed from a value that wasn't sent. Leave expressions out"
        return None
