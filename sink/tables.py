"""Target tables: created from the configuration, or checked against it, before any stream starts."""

from dataclasses import dataclass

from pyspark.sql import SparkSession
from pyspark.sql import types as T

from changelog import debezium_json, row_kind
from changelog.decoding import ChangelogSpec, ColumnSpec
from deltawriters.partitioning import source_columns
from sink.config import Config, TableSection
from sink.errors import ConfigError, TableError
from sink.iceberg import Catalogs, IcebergTable, column_specs, parse_type, wanted_columns
from sink.mapping import MappedTable

DEAD_LETTER_COLUMNS = T.StructType(
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


@dataclass(frozen=True)
class TablePlan:
    """A target as it will be: what exists or would be created, and how changes are decoded for it."""

    section: TableSection
    changelog: ChangelogSpec
    exists: bool


def plan_table(config: Config, mapped: MappedTable, table: IcebergTable | None) -> TablePlan:
    """Check a table's configuration against the target, if it exists.

    :raises ConfigError: the configuration is at fault. :raises TableError: configuration and table contradict each other.
    """
    section, path = mapped.section, mapped.path
    wanted = wanted_columns(section, path)
    if table is None:
        if wanted is None:
            raise ConfigError(
                f"{path}: {section.target} does not exist and can't be created without columns. Add columns."
            )
        columns = tuple(ColumnSpec(f.name, f.dataType, required=not f.nullable) for f in wanted.fields)
        sources = tuple(dict.fromkeys(field.column for field in section.partition_fields))
    else:
        columns = column_specs(table)
        _check_columns(section, wanted, columns)
        _check_key(section, table)
        _check_partitioning(section, table)
        if table.spec.format_version < 2:
            raise TableError(
                f"{section.target} has format version 1, which has no row-level deletes. Upgrade it to 2 or 3."
            )
        sources = tuple(source_columns(table.spec.current_spec, table.spec.iceberg_schema))
    return TablePlan(section, _changelog(config, section, path, columns, sources), table is not None)


def open_table(spark: SparkSession, config: Config, mapped: MappedTable) -> tuple[IcebergTable, TablePlan]:
    """The target, created if it is missing.

    :raises ConfigError, TableError: see `plan_table`.
    """
    catalogs = Catalogs(spark)
    section = mapped.section
    table = catalogs.load(section.target)
    plan = plan_table(config, mapped, table)
    if table is None:
        wanted = wanted_columns(section, mapped.path)
        assert wanted is not None
        properties = {"format-version": "2"} | section.properties
        table = catalogs.create(section.target, wanted, section.key, section.partition_fields, properties)
    if section.deletes == "equality" and (needs_global_deletes(plan) or table.has_data_under_other_specs()):
        table.ensure_unpartitioned_spec()
    return table, plan


def open_dead_letters(spark: SparkSession, config: Config) -> IcebergTable:
    """The dead-letter table, created if it is missing."""
    catalogs = Catalogs(spark)
    name = config.dead_letter_table
    existing = catalogs.load(name)
    return existing or catalogs.create(name, DEAD_LETTER_COLUMNS, [], [], {"format-version": "2"})


def needs_global_deletes(plan: TablePlan) -> bool:
    """A key's old partition may be unknown: partition values derive from columns outside the key."""
    return not set(plan.changelog.partition_sources) <= set(plan.section.key)


def _changelog(
    config: Config, section: TableSection, path: str, columns: tuple[ColumnSpec, ...], sources: tuple[str, ...]
) -> ChangelogSpec:
    types = {column.name: column.type for column in columns}
    order_by = []
    for number, column in enumerate(section.order_columns):
        if column.type is not None:
            dtype = parse_type(column.type, f"{path}.order_by[{number}]")
        else:
            dtype = types.get(column.name, T.LongType())
        order_by.append((column.name, dtype))
    known = debezium_json.OPTIONS if config.source.format == "debezium-json" else {}
    for name, value in config.source.format_options.items():
        if name not in known:
            raise ConfigError(
                f"source.format_options: unknown key {name!r}. Known for {config.source.format}: {', '.join(known) or 'none'}."
            )
        if value not in known[name]:
            raise ConfigError(f"source.format_options.{name}: got {value!r}, expected one of {', '.join(known[name])}.")
    return ChangelogSpec(
        columns=columns,
        key=tuple(section.key),
        partition_sources=sources,
        order_by=tuple(order_by),
        source_order=config.source.type == "kafka",
        trust_before=section.mode == "changelog",
        options=dict(config.source.format_options),
    )


def deletes_carry_row(config: Config) -> bool:
    """Whether the format's -D rows have more than the key."""
    return debezium_json.DELETES_CARRY_ROW if config.source.format == "debezium-json" else row_kind.DELETES_CARRY_ROW


def _check_columns(section: TableSection, wanted: T.StructType | None, columns: tuple[ColumnSpec, ...]) -> None:
    if wanted is None:
        missing = [name for name in section.key if name not in {c.name for c in columns}]
        if missing:
            raise TableError(
                f"{section.target} has no column {missing[0]!r}, which key names. It has: {_names(columns)}."
            )
        return
    actual = {column.name: column for column in columns}
    for field in wanted.fields:
        if field.name not in actual:
            raise TableError(
                f"{section.target} has no column {field.name!r}. Add it to the table (ALTER TABLE … ADD COLUMN) or remove it "
                f"from columns. The table has: {_names(columns)}."
            )
        have = actual[field.name].type
        if have != field.dataType:
            raise TableError(
                f"{section.target}: column {field.name} is {have.simpleString()}, but columns says "
                f"{field.dataType.simpleString()}. The table rules: correct columns, or leave columns out."
            )
    extra = [name for name in actual if name not in wanted.names]
    if extra:
        raise TableError(
            f"{section.target} has a column {extra[0]!r} that columns doesn't name. Add it, or leave columns out."
        )


def _check_key(section: TableSection, table: IcebergTable) -> None:
    schema = table.spec.iceberg_schema
    identifiers = schema.identifier_field_names()
    if identifiers and identifiers != set(section.key):
        raise TableError(
            f"{section.target} has the identifier fields {sorted(identifiers)}, but key is {section.key}. They must be the same."
        )
    for name in section.key:
        if str(schema.find_type(name)) in ("float", "double"):
            raise TableError(
                f"{section.target}: key column {name} is floating-point, which Iceberg doesn't allow in a key."
            )
        if str(schema.find_type(name)).startswith("fixed"):
            # its Java readers reuse the array of a fixed value, so of an equality delete file only the last key counts
            raise TableError(
                f"{section.target}: key column {name} is {schema.find_type(name)}, of which Iceberg 1.11 applies only one "
                "equality delete a file. Use binary, string or uuid."
            )


def _check_partitioning(section: TableSection, table: IcebergTable) -> None:
    if not section.partition_by:
        return
    schema = table.spec.iceberg_schema
    actual = [(str(f.transform), schema.find_column_name(f.source_id)) for f in table.spec.current_spec.fields]
    wanted = [
        (f.transform if f.parameter is None else f"{f.transform}[{f.parameter}]", f.column)
        for f in section.partition_fields
    ]
    if actual != wanted:
        shown = ", ".join(f"{transform} of {column}" for transform, column in actual) or "not partitioned"
        raise TableError(
            f"{section.target} exists and is partitioned otherwise than partition_by says (it is: {shown}). The table rules: "
            "correct partition_by, or leave it out."
        )


def _names(columns: tuple[ColumnSpec, ...]) -> str:
    return ", ".join(column.name for column in columns)
