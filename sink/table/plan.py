"""Opens target tables before any stream starts: creates them from the configuration, or checks them against it."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from changelog import formats
from changelog.changes import BadOptionError
from changelog.formats.row_kind_parquet import columns_to_read
from changelog.observed_types import MISSING, Observed, is_wider, merged_types
from changelog.rows import PREFIX, SoftDelete
from changelog.spec import ChangelogSpec, ColumnSpec
from changelog.values.defaults import default_of
from changelog.values.encoded import MAYBE_BASE64
from changelog.values.readings import DECIMALS
from changelog.versions import VersionColumns
from deltawriters.order_values import OrderColumns
from deltawriters.ordering import RowOrder
from sink.config import Config, TableSection
from sink.config.options import did_you_mean
from sink.errors import ConfigError, DataError, NoMessagesError, TableError
from sink.sources.source import Position, Source
from sink.spark.computed import check_computed
from sink.spark.conditions import where_of
from sink.spark.duplicate_keys import check_tells_rows_apart
from sink.spark.java_errors import SPARK_ERRORS
from sink.spark.sample import SparkSample
from sink.spark.versions import parse_ddl
from sink.table.columns import (
    added_order_fields,
    check_ordered,
    check_version_time,
    column_type,
    held_order,
    mark_fields,
    order_type,
    parse_type,
    wanted_columns,
)
from sink.table.inference import Sample
from sink.table.keys import TableKey, property_name, table_key, with_key
from sink.table.patterns import ResolvedTable, names_taken
from sink.table.source_tables import SourceTables, source_tables_property
from sink.table.table_plan import LateOrder, TablePlan
from sink.targets.capabilities import Capabilities
from sink.targets.catalogs import Catalogs
from sink.targets.own_state import ORDER, check_owner, creation_properties, property_prefix
from sink.targets.seam import Table, TableView
from sink.targets.values import NO_FLOATS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("rowdelta")

_MOST_NEW = 1000
"""So many columns may a micro-batch add to a table."""
_LONGEST_NAME = 255
_NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that a column's name can't have: those that end a line or steer a terminal, and lone surrogates."""


def plan_table(
    catalogs: Catalogs,
    config: Config,
    resolved: ResolvedTable,
    table: TableView | None,
    types: Mapping[str, str] | None = None,
) -> TablePlan:
    """Check a table's configuration against the target, if it exists.

    :param types: `inferred_columns`, if the table doesn't exist and the configuration doesn't name columns.
    :raises ConfigError: the configuration is wrong.
    :raises TableError: configuration and table contradict each other.
    """
    section, path = resolved.section, resolved.path
    for name, text in section.types.items():
        parse_type(text, f"{path}.types.{name}")
    wanted = wanted_columns(section, path, None if table else types)
    if table is None:
        _check_parent(catalogs, section, path)
        if wanted is None:
            raise ConfigError(
                f"{path}: {section.target} does not exist, and its source has no messages to infer columns from. Add "
                "columns."
            )
        can = config.capabilities(section.target)
        unfit = [name for name in wanted.names if not can_be_column(name, can)]
        if unfit:
            raise ConfigError(
                f"{path}: the source has a field {unfit[0]!r}; a column's name can't have . or ', begin with {PREFIX} "
                f"or be one of {can.name}'s own. Name it in exclude, or write columns."
            )
        named = [("cluster_by", name) for name in section.cluster_by]
        named += [(f"partition_by[{n}]", field.column) for n, field in enumerate(section.partition_fields)]
        for place, name in named:
            if name not in wanted.names:
                raise ConfigError(
                    f"{path}.{place}: there is no column {name!r}. The columns are: {', '.join(wanted.names)}."
                )
        columns = tuple(ColumnSpec(f.name, f.dataType, required=not f.nullable) for f in wanted.fields)
        sources = tuple(dict.fromkeys(field.column for field in section.partition_fields))
        whole = {field.column for field in section.partition_fields if field.transform == "identity"}
        for column in columns:
            if column.name in whole and isinstance(column.type, T.FloatType | T.DoubleType):
                raise ConfigError(f"{path}.partition_by: column {column.name} is floating-point. {NO_FLOATS}")
        catalogs.check_new(section, wanted, path)
    else:
        check_owner(config, section, table)
        table.check_writable(appends=section.mode == "append", copies=section.copies)
        columns = table.columns()
        added = [*_missing_order(table, section, path), *_missing_marks(table, section, path)]
        columns += tuple(ColumnSpec(f.name, f.dataType) for f in added)
        _check_columns(section, wanted, columns)
        table.check_fits(section)
        sources = table.spec.source_columns
    plan = _plan(config, section, path, columns, sources, table is not None)
    plan = replace(plan, changelog=SourceTables.known(config, section, table).of(plan.changelog))
    check_computed(catalogs.spark, plan, path)
    plan = replace(plan, changelog=replace(plan.changelog, where=where_of(catalogs.spark, plan, path)))
    rules = config.capabilities(section.target).properties
    ignored = rules.ignored(section.properties) if table is None else table.not_followed()
    order = _row_order(section, path, columns) or (table.row_order() if table is not None else None)
    warnings = [*ignored, *(_large_files(config, section, table) if table is not None and order is not None else ())]
    warnings += maybe_decimals(config, types or {}) if table is None else _undeclared(section, columns)
    return replace(plan, warnings=tuple(warnings), order=order)


def open_table(
    spark: "SparkSession", config: Config, resolved: ResolvedTable, source: Source, sample: Sample | None = None
) -> tuple[Table, TablePlan, TableKey]:
    """Open the target. Create it if it is missing.

    :param sample: what is known of the source. By default, the messages tell.
    :raises ConfigError: see `plan_table`.
    :raises TableError: see `plan_table`.
    :raises NoMessagesError: the source has no messages, and only messages would state the columns or the key.
    """
    catalogs = Catalogs(spark, config)
    table = catalogs.load(resolved.section.target)
    sample = sample or SparkSample(spark, config, resolved.section, source)
    key = table_key(config, resolved, table, sample)
    resolved = with_key(resolved, key)
    section = resolved.section
    if table is not None:
        _add_own_columns(config, table, section, resolved.path)
    types = inferred_columns(config, section, table, sample)
    plan = plan_table(catalogs, config, resolved, table, types)
    warning = key.warning(section)
    if warning is not None:
        log.warning("%s", warning)
    for sentence in plan.warnings:
        log.warning("%s: %s", section.target, sentence)
    if table is None:
        wanted = wanted_columns(section, resolved.path, types)
        assert wanted is not None
        properties = dict(section.properties) | creation_properties(config)
        if key.messages:
            properties[property_name(config)] = key.to_json()
        if fields := added_order_fields(section, wanted.names, resolved.path):
            properties[f"{property_prefix(config)}.{ORDER}"] = json.dumps(held_order(section, fields))
        is_inferred = types is not None or (key.columns and not key.configured)
        if is_inferred and not plan.changelog.source_tables and formats.find(config.source.format).NAMES_TABLE:
            tables = SourceTables(tuple(sample.source_tables())[:1], plan.changelog.is_mixed)
            plan = replace(plan, changelog=tables.of(plan.changelog))  # the first micro-batch may begin with another
            properties[source_tables_property(config)] = tables.to_json()
        table = catalogs.create(section, wanted, properties, resolved.path)
        # its location and some of its properties are the catalog's choice
        table.check_writable(appends=section.mode == "append", copies=section.copies)
    else:
        check_tells_rows_apart(config, section, key, table, spark)
    return table, plan, key


def _missing_order(table: TableView, section: TableSection, path: str) -> list[T.StructField]:
    """The columns that only hold order values, of those that the table lacks. `open_table` adds them. Rows that it has
    are earlier than all changes.

    :raises TableError: the table has such a column, but with the values of another field.
    """
    if not section.stores_order:
        return []
    known = {column.name for column in table.columns()}
    fields = added_order_fields(section, known, path)
    for name, field in held_order(section, fields).items():
        held = [json.loads(text).get(name) for text in table.stored(ORDER).values()]
        if name in known and field not in held:
            others = " and ".join(sorted({other for other in held if other})) or "something that rowdelta didn't write"
            raise TableError(
                f"{section.target}: column {name} holds {others}, but order_by has {field}: its values can't be "
                f"compared. Write another order_column in the table's entry, such as {name}_of_"
                f"{re.sub('[^a-z0-9]+', '_', field.lower()).strip('_')}, or drop the column."
            )
    return [field for field in fields if field.name not in known]


def _missing_marks(table: TableView, section: TableSection, path: str) -> list[T.StructField]:
    """The columns of `soft_delete`, of those that the table lacks. `open_table` adds them. Rows that it has are not
    deleted: there, these columns are NULL.

    :raises TableError: the table has such a column with another type.
    """
    known, missing = {column.name: column.type for column in table.columns()}, list[T.StructField]()
    for field, name in zip(mark_fields(section), ("column", "at"), strict=False):
        if field.name not in known:
            missing.append(field)
        elif known[field.name] != field.dataType:
            raise TableError(
                f"{path}.soft_delete.{name}: {section.target} has a column {field.name} of type "
                f"{known[field.name].simpleString()}, and expected is {field.dataType.simpleString()}. Name another "
                "column; the sink adds it."
            )
    return missing


def _add_own_columns(config: Config, table: Table, section: TableSection, path: str) -> None:
    """Add the columns that the sink itself sets."""
    if not section.stores_order and not section.marks:
        return
    table.check_writable(copies=section.copies)  # before its columns are looked at
    missing, marks = _missing_order(table, section, path), _missing_marks(table, section, path)
    if missing:
        # first, so that a column is there only with the word for what it holds
        held = json.loads(table.own_state(property_prefix(config)).get(ORDER, "{}")) | held_order(section, missing)
        table.set_property(f"{property_prefix(config)}.{ORDER}", json.dumps(held))
        table.refresh()
    if missing or marks:
        table.evolve({field.name: field.dataType for field in (*missing, *marks)}, {})
        table.refresh()


def deletes_by_value(section: TableSection) -> bool:
    """Whether commits may have equality deletes."""
    return section.mode != "append" and section.deletes == "equality"


def files_last(section: TableSection) -> bool:
    """Whether small data files live long too: the sink doesn't merge them soon after their commits."""
    return not (section.has_index and section.merge_small_files)


def inferred_columns(
    config: Config, section: TableSection, table: TableView | None, sample: Sample
) -> dict[str, str] | None:
    """Columns inferred from messages, if the table doesn't exist and the configuration doesn't name columns; else None.
    Name -> type, as `types` of the configuration says it, or else as in `Observed`.

    :raises NoMessagesError: the source has no messages yet.
    """
    if table is not None or section.columns is not None:
        return None
    found = sample.columns()
    if found is None and config.source.has_topics and sample.is_empty:
        raise NoMessagesError(section.target, section.source)
    return None if found is None else declared_types(section, found)


def declared_types(section: TableSection, found: Mapping[str, str]) -> dict[str, str]:
    """Types of new columns: those that the configuration declares, or else those that were found."""
    return {name: section.declared_type(name) or dtype for name, dtype in found.items()}


def new_defaults(plan: TablePlan, observed: Observed, changes: Mapping[str, T.DataType | None]) -> dict[str, Any]:
    """Defaults that messages declare for new columns: what earlier rows have there in the source.

    :param changes: see `evolved_columns`. A column has no default if the configuration gives it another type.
    """
    known = {column.name for column in plan.columns}
    defaults = {
        name: default_of(observed[name])
        for name, dtype in changes.items()
        if dtype is not None and name not in known and column_type(observed[name]) == dtype.simpleString()
    }
    return {name: default for name, default in defaults.items() if default is not None}


def maybe_decimals(config: Config, new: Mapping[str, str]) -> Iterator[str]:
    """A warning if new columns become text whose values look like base64 decimals. Only Debezium's JSON has such.

    :param new: types of new columns, as in `Observed`.
    """
    names = sorted(name for name, dtype in new.items() if dtype == MAYBE_BASE64)
    source = config.source
    if not names or source.format != "debezium-json":
        return
    if source.format_options.get(DECIMALS, "precise") == "precise":
        yield (
            f"{', '.join(names)}: the text looks like base64, in which Debezium sends decimals without a schema, and "
            f'the column becomes string for good. If it is a decimal, declare it (types: {{{names[0]}: "decimal(p,s)"}}'
            "), or let the connector send text (decimal.handling.mode: string, in source.format_options too); "
            "docs/change-a-table.md says how to correct a column that is there"
        )


def _undeclared(section: TableSection, columns: tuple[ColumnSpec, ...]) -> Iterator[str]:
    """A warning for each column that `types` names, and that was there first with another type."""
    for column in columns:
        text = section.types.get(column.name)
        declared = None if text is None else parse_ddl(text)
        if declared is not None and declared != column.type and not is_wider(column.type, declared):
            yield (
                f"column {column.name} is {column.type.simpleString()}, but types says {text}: it says the types of "
                "columns that the table doesn't have yet; docs/change-a-table.md says how to change a column's type"
            )


def needs_global_deletes(plan: TablePlan) -> bool:
    """Whether a key's old partition may be unknown, because partition values come from columns outside the key."""
    return plan.derived_partition or not set(plan.changelog.partition_sources) <= set(plan.section.key)


def evolved_columns(plan: TablePlan, observed: Observed, can: Capabilities) -> dict[str, T.DataType | None]:
    """How the table must change for fields in messages: the types of new and widened columns. None means that the
    column becomes optional.

    :param can: what the table's format can do.
    :raises DataError: the setting is `schema_changes: fail`.
    :raises TableError: a field can't become a column.
    """
    target = plan.section.target
    names = {column.name for column in plan.columns}
    # a field that isn't stored has the type that the configuration gives it
    pinned = {column.name for column in plan.changelog.columns} - names
    observed = {name: dtype for name, dtype in observed.items() if name not in pinned}
    if observed and plan.section.schema_changes == "fail":
        raise DataError(
            f"{target}: the source's schema changed ({shown_changes(observed)}), and schema_changes is fail. Nothing "
            "was applied. Correct table and configuration, or set schema_changes: evolve, or ignore."
        )
    known = {name.lower(): name for name in names}
    new = sorted(observed.keys() - names)
    if len(new) > _MOST_NEW:
        raise TableError(
            f"{target}: messages have {len(new):,} fields that are no columns, such as {new[0][:80]!r} and "
            f"{new[-1][:80]!r}. A micro-batch may add {_MOST_NEW:,}, since such names are probably data. Set "
            "schema_changes: ignore, or name the fields in columns or exclude."
        )
    for name in new:
        shown = name if len(name) <= 80 else f"{name[:80]}…"
        advice = (
            f"Name it in exclude, or give it a column of another name (columns: {{…: {{type: …, from: {shown!r}}}}})."
        )
        if name.lower() in known:
            raise TableError(
                f"{target}: messages have a field {shown!r}, and there is {known[name.lower()]!r} too: Spark can't "
                f"tell them apart. {advice}"
            )
        if not can_be_column(name, can):
            raise TableError(
                f"{target}: messages have a field {shown!r}; a column's name can't have . or ' or control characters, "
                f"be empty or longer than {_LONGEST_NAME}, begin with {PREFIX} or be one of {can.name}'s own. {advice}"
            )
        known[name.lower()] = name
    observed |= declared_types(plan.section, {name: observed[name] for name in new})
    types: dict[str, T.DataType | None] = {}
    for name, dtype in observed.items():
        try:
            types[name] = parse_ddl(column_type(dtype)) if dtype else None
        except SPARK_ERRORS:
            # a name inside the type isn't an identifier, such as `$oid`
            raise TableError(
                f"{target}: messages have a field {name!r} of type {dtype}, which no column can have. Name it in "
                "exclude, or give it a column of type string."
            ) from None
    return types


def declared_changes(plan: TablePlan, files: Mapping[str, T.StructType]) -> Observed:
    """Compare columns of change files with the table. Returns what the table can't store yet.

    :param files: path -> the file's columns.
    :raises DataError: a file can't be read for this table.
    """
    target, changes = plan.section.target, plan.section.schema_changes
    own = columns_to_read(plan.changelog)
    # the kind, the key and the order can't be null
    optional = {c.field: c.name for c in plan.changelog.columns if c.name not in plan.section.key}
    optional = {field: name for field, name in optional.items() if field not in {n for n, _ in plan.changelog.order_by}}
    stored = {column.name for column in plan.columns}
    observed: Observed = {}
    for path, columns in files.items():
        found = {field.name: field.dataType for field in columns}
        for field in own:
            dtype = found.get(field.name)
            if dtype is None and field.name not in optional:
                raise DataError(
                    f"{target}: {path} has no column {field.name!r}. Its columns must be: {', '.join(own.names)}. "
                    "Write the file again with the column, or correct tables[].columns."
                )
            if dtype is None and changes == "fail" and not plan.section.may_hold_order(optional[field.name]):
                observed = merged_types(observed, {optional[field.name]: MISSING})
            if dtype is not None and changes != "ignore" and _has_more(dtype, field.dataType):
                raise DataError(
                    f"{target}: in {path} column {field.name} is {dtype.simpleString()}, with fields that the column "
                    f"({field.dataType.simpleString()}) lacks. New fields inside a column aren't followed: add them to "
                    "the table (ALTER TABLE … ADD COLUMN), or set schema_changes: ignore."
                )
            if dtype is None or not is_wider(dtype, field.dataType):
                continue
            name = optional.get(field.name)
            if name not in stored or changes == "ignore":
                raise DataError(
                    f"{target}: in {path} column {field.name} is {dtype.simpleString()}, wider than "
                    f"{field.dataType.simpleString()}. "
                    + ("A key may not change." if name is None else "Correct its type, or set schema_changes: evolve.")
                )
            observed = merged_types(observed, {name: dtype.simpleString()})
        if changes != "ignore":
            known = {*own.names, *plan.changelog.excluded}
            new = {name: dtype.simpleString() for name, dtype in found.items() if name not in known}
            observed = merged_types(observed, new)
    return observed


def _has_more(dtype: T.DataType, column: T.DataType) -> bool:
    """Whether a struct somewhere in `dtype` has fields that the column doesn't have. Spark would drop these fields."""
    if isinstance(dtype, T.StructType) and isinstance(column, T.StructType):
        known = {field.name: field.dataType for field in column}
        return any(field.name not in known or _has_more(field.dataType, known[field.name]) for field in dtype)
    if isinstance(dtype, T.ArrayType) and isinstance(column, T.ArrayType):
        return _has_more(dtype.elementType, column.elementType)
    if isinstance(dtype, T.MapType) and isinstance(column, T.MapType):
        return _has_more(dtype.valueType, column.valueType)
    return False


def can_be_column(name: str, can: Capabilities) -> bool:
    """Whether a table can have a column of this name."""
    if not 0 < len(name) <= _LONGEST_NAME or _NOT_IN_NAMES.search(name):
        return False
    return not ("." in name or "'" in name or name.startswith(PREFIX) or name in can.reserved_columns)


def shown_changes(observed: Observed) -> str:
    """Text for people: `note string, amount bigint, region may be null`."""
    words = {"": "may be null", MISSING: "is missing"}
    return ", ".join(f"{name} {words.get(dtype) or column_type(dtype)}" for name, dtype in sorted(observed.items()))


def _plan(
    config: Config,
    section: TableSection,
    path: str,
    columns: tuple[ColumnSpec, ...],
    sources: tuple[str, ...],
    exists: bool,
) -> TablePlan:
    named = section.columns or {}
    decoded = []
    computed = []
    # the table may have them already, so a name among its columns doesn't mean that messages have it as a field
    added = section.added_order_columns([column.name for column in columns])
    own = {*section.metadata, *section.marks, *added.values(), *section.version_columns}
    for column in columns:
        origin = named.get(column.name)
        if origin is not None and origin.expression is not None:
            computed.append((column.name, origin.expression))
        elif column.name in section.metadata and column.name in section.key:
            decoded.append(replace(column, source=column.name))
        elif column.name not in own:
            decoded.append(replace(column, source=origin.source if origin else None))
    for name, origin in named.items():
        if not origin.stored:
            decoded.append(ColumnSpec(name, parse_type(origin.type, f"{path}.columns.{name}"), source=origin.source))
    derived = {*own, *(name for name, _ in computed)} - set(section.key)
    kept = tuple(name for name in sources if name not in derived)
    spec = _changelog(config, section, path, tuple(decoded), kept, added)
    spec = replace(spec, excluded=spec.excluded | {column.name for column in columns})
    spec = replace(spec, history=_versions(section, columns, spec.order_by, path))
    try:
        formats.find(config.source.format)(spec.of_messages)
    except BadOptionError as error:
        raise ConfigError(f"source.{error}") from None
    late = _late_order(section, spec, path)
    spec = replace(spec, ignored_nulls=_ignored_nulls(section, spec, path))
    return TablePlan(section, spec, exists, columns, tuple(computed), len(kept) < len(sources), late=late)


def _ignored_nulls(section: TableSection, spec: ChangelogSpec, path: str) -> frozenset[str]:
    """The columns in which the NULL of a change says nothing.

    :raises ConfigError: a column can't be one of them.
    """
    ignored = section.ignore_null_updates
    if ignored is None:
        return frozenset()
    fields = {name for name, _ in spec.order_by}
    why = {column.name: "is in order_by" for column in spec.columns if column.field in fields}
    why |= dict.fromkeys(spec.key, "is in key")
    allowed = [column.name for column in spec.columns if column.name not in why]
    for name in ignored.columns or ignored.others:
        if name not in allowed and not (name in ignored.others and name in why):
            raise ConfigError(
                f"{path}.ignore_null_updates: got {name!r}, which {why.get(name, 'is no field of the messages')}; "
                f"expected some of {', '.join(allowed)}."
            )
    return frozenset(ignored.columns or allowed).difference(ignored.others)


def _late_order(section: TableSection, spec: ChangelogSpec, path: str) -> LateOrder | None:
    """How late changes are told. None if they are applied as all others.

    :raises ConfigError: a column doesn't hold the order value as the message has it.
    """
    if not section.stores_order:
        return None
    by_field = {column.field: column for column in spec.columns}
    names, texts, descending = [], [], []
    for number, (name, dtype) in enumerate(spec.order_by):
        column, place = by_field.get(name), f"{path}.order_by[{number}]"
        stored = spec.stored_order.get(number) or (name if column is None else column.name)
        origin = (section.columns or {}).get(name)
        if origin is not None and (origin.expression is not None or (origin.source or name) != name):
            raise ConfigError(
                f"{place}: got {name}, a column whose values aren't those of the messages' field {name}, and late: "
                f"{section.late} compares them. Name a field of the messages that no column is named after."
            )
        if column is not None and column.is_uuid:
            raise ConfigError(f"{place}: got {name}, a uuid, whose text and bytes differ. Name another field.")
        if column is not None and number not in spec.stored_order and column.type != dtype:
            raise ConfigError(
                f"{place}: got {name} {dtype.simpleString()}, but the column {stored} is "
                f"{column.type.simpleString()}, and late: {section.late} compares its values. Write order_by: {name}."
            )
        names.append(stored)
        descending += [stored] if name in spec.descending else []
        of = f" of {name}" if number in spec.stored_order else ""
        texts.append(f"{stored}{of} {_compared_as(dtype)}{' desc' if name in spec.descending else ''}")
    columns = OrderColumns(tuple(names), ", ".join(texts), frozenset(descending))
    return LateOrder(columns, section.tombstone_seconds)


def _compared_as(dtype: T.DataType) -> str:
    """How values of a type are encoded to be compared (`changelog.order_values`): a wider type may be the same."""
    if isinstance(dtype, T.IntegralType):
        return "integer"
    if isinstance(dtype, T.FractionalType) and not isinstance(dtype, T.DecimalType):
        return "floating"
    return f"decimal scale {dtype.scale}" if isinstance(dtype, T.DecimalType) else dtype.simpleString()


def _changelog(
    config: Config,
    section: TableSection,
    path: str,
    columns: tuple[ColumnSpec, ...],
    sources: tuple[str, ...],
    added: Mapping[str, str],
) -> ChangelogSpec:
    types = {column.name: column.type for column in columns}
    by_field = types | {column.field: column.type for column in columns}
    order_by = []
    for number, order in enumerate(section.order_columns):
        dtype = order_type(order, by_field.get(order.name), f"{path}.order_by[{number}]")
        order_by.append((order.name, dtype))
    return ChangelogSpec(
        columns=columns,
        key=tuple(section.key),
        partition_sources=sources,
        order_by=tuple(order_by),
        descending=frozenset(order.name for order in section.order_columns if order.descending),
        stored_order={number: added[name] for number, (name, _) in enumerate(order_by) if name in added},
        trust_before=section.mode == "changelog",
        inserts_only=section.mode == "append",
        options=dict(config.source.format_options),
        schema_changes=section.schema_changes,
        metadata=tuple(name for name in section.metadata if name not in section.key),
        excluded=frozenset(section.exclude),
        truncate_refused=truncate_refused(section, None),
        ignores_other_tables=section.other_tables == "ignore",
        taken_elsewhere=_taken_elsewhere(config, section),
        many_topics=section.many_topics,
        show_values=config.sink.show_values,
        empty_is_null=frozenset(
            name
            for name in (sources if config.capabilities(section.target).empty_partition_is_null else ())
            if isinstance(types.get(name), T.StringType | T.BinaryType)
        ),
        keeps_late=section.late == "dead-letter",
        soft_delete=_soft_delete(section, columns, added),
        finds_snapshots=section.resnapshot == "reconcile",
        keeps_unavailable=section.keeps_unavailable and formats.find(config.source.format).MAY_LACK_VALUES,
    )


def _soft_delete(section: TableSection, columns: tuple[ColumnSpec, ...], added: Mapping[str, str]) -> SoftDelete | None:
    if section.soft_delete is None:
        return None
    held = {} if not section.stores_order else {column.field: column.name for column in columns} | dict(added)
    names = [order.name for order in section.order_columns]
    order = {number: held[name] for number, name in enumerate(names) if name in held}
    return SoftDelete(section.soft_delete.column, section.soft_delete.at, order)


def _taken_elsewhere(config: Config, section: TableSection) -> tuple[str | re.Pattern[str], ...]:
    """Patterns of the source's tables that other entries with the same topic take."""
    others = (table for table in config.tables if table.target != section.target)
    return tuple(
        dict.fromkeys(
            name for table in others if set(table.topics) & set(section.topics) for name in names_taken(table)
        )
    )


def _versions(
    section: TableSection, columns: Sequence[ColumnSpec], order_by: Sequence[tuple[str, T.DataType]], path: str
) -> VersionColumns | None:
    """:raises ConfigError: the configuration names columns that aren't there."""
    history = section.history
    if history is None:
        return None
    check_version_time(section.order_columns[0], order_by[0][1], path)
    names, time = {column.name: column.type for column in columns}, order_by[0][1]
    for name, dtype in zip(history.columns, (time, time, T.BooleanType()), strict=True):
        if names.get(name) != dtype:
            raise _lacks_history(section, name, dtype, names.get(name))
    if any(column.required and column.name == history.end for column in columns):
        raise TableError(
            f"{section.target}: column {history.end} can't be NULL, and it is in current rows (history). Write ALTER "
            f"TABLE {section.target} ALTER COLUMN {history.end} DROP NOT NULL."
        )
    for key, listed in (("track", () if history.track == "all" else history.track), ("except", history.ignore)):
        for name in listed:
            if name not in names:
                raise ConfigError(
                    f"{path}.history.{key}: there is no column {name!r}{did_you_mean(name, names)}. The columns are: "
                    f"{', '.join(sorted(names))}."
                )
    tracked = None if history.track == "all" else tuple(history.track)
    untracked, last_only = (*history.ignore, *section.metadata), history.granularity == "micro-batch"
    return VersionColumns(*history.columns, tracked, untracked, last_only)


def _lacks_history(section: TableSection, name: str, wanted: T.DataType, found: T.DataType | None) -> TableError:
    assert section.history is not None
    needs = f"{section.target}: history needs a column {name} of type {wanted.simpleString()}"
    if found is not None:
        return TableError(f"{needs}, and it is {found.simpleString()}. Change its type (ALTER TABLE … ALTER COLUMN).")
    return TableError(
        f"{needs}, and it has no such column. A table can't get history later: let the sink create another one, or "
        f"create one with these columns and partition it by {section.history.current}."
    )


def truncate_refused(section: TableSection, position: Position | None) -> str:
    """Why a TRUNCATE of the source can't be applied to a table: the reason of a bad record. Empty if it can.

    :param position: the position that a micro-batch reaches. Kafka's has all partitions of the topic.
    """
    by_hand = "empty the table by hand"
    if section.mode == "append":
        return f"TRUNCATE: a table in mode append loses no rows; {by_hand}, if it should"
    if section.keeps_deleted:
        what = "source_deletes is ignore" if section.soft_delete is None else "with soft_delete a row stays"
        return f"TRUNCATE: {what}, and this would remove all of them; {by_hand}, if it should"
    if section.truncate == "reject":
        return f"TRUNCATE: truncate is reject; {by_hand}, or set truncate: apply"
    if section.many_topics:
        return (
            f"TRUNCATE: {section.target} takes several topics, and this message empties the table of one of them; "
            f"delete its rows by hand"
        )
    partitions = [name for name in position or {} if name.isdigit()]
    if len(partitions) > 1:
        return (
            f"TRUNCATE: {section.source} has {len(partitions)} partitions, and nothing says which messages of the "
            f"others came before it; {by_hand}. A topic with one partition has an order"
        )
    return ""


def deletes_carry_row(config: Config) -> bool:
    """Whether the format's -D rows have other columns than the key too."""
    return formats.find(config.source.format).DELETES_CARRY_ROW


def _check_parent(catalogs: Catalogs, section: TableSection, path: str) -> None:
    """Check that the target's namespace isn't a table. A name inside a table is one of its branches or tags.

    :raises ConfigError: the target is inside a table.
    """
    parent = section.target.rpartition(".")[0]
    if parent.count(".") >= 2 and catalogs.load(parent) is not None:
        raise ConfigError(
            f"{path}.target: {parent} is a table, and rowdelta does not write to its branches or tags: commits go to "
            f"main. Write {parent}."
        )


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
        if field.name not in actual and field.name in section.version_columns:
            raise _lacks_history(section, field.name, field.dataType, None)
        if field.name not in actual:
            raise TableError(
                f"{section.target} has no column {field.name!r}. Add it to the table (ALTER TABLE … ADD COLUMN) or "
                f"remove it from columns. The table has: {_names(columns)}."
            )
        have = actual[field.name].type
        evolved = section.schema_changes == "evolve" and is_wider(have, field.dataType)
        if have != field.dataType and not evolved:
            raise TableError(
                f"{section.target}: column {field.name} is {have.simpleString()}, but columns says "
                f"{field.dataType.simpleString()}. Correct columns to fit the table, or leave columns out."
            )
    extra = [name for name in actual if name not in wanted.names and not section.may_hold_order(name)]
    if extra and section.schema_changes != "evolve":
        raise TableError(
            f"{section.target} has a column {extra[0]!r} that columns doesn't name. Add it, or leave columns out."
        )


def _row_order(section: TableSection, path: str, columns: tuple[ColumnSpec, ...]) -> RowOrder | None:
    """In which order rows are written.

    :raises ConfigError: not all of the columns are there, or have an order.
    """
    names = section.maintenance.rewrite.sort if section.maintenance is not None else None
    if names is None:
        return None
    types = {column.name: column.type for column in columns}
    for number, name in enumerate(names):
        place = f"{path}.maintenance.rewrite.sort[{number}]"
        if name not in types:
            raise ConfigError(
                f"{place}: there is no column {name!r}{did_you_mean(name, types)}. The columns are: {_names(columns)}."
            )
        check_ordered(name, types[name], place)
    return RowOrder(tuple(names))


def _large_files(config: Config, section: TableSection, table: TableView) -> Iterator[str]:
    """A warning if the order of rows is of no use to readers: each file has rows of the whole range of values."""
    rewrite = config.maintenance_of(section).rewrite
    together, size = rewrite.max_file_group_size_bytes, rewrite.target_file_size_bytes or table.spec.target_file_size
    if size * 2 > together:
        yield (
            f"maintenance.rewrite sorts {together / 2**20:.0f} MB of files together (max-file-group-size-bytes), and "
            f"they become files of {size / 2**20:.0f} MB, so that readers hardly skip any: set the table's property "
            "write.target-file-size-bytes (Delta: delta.targetFileSize) to an eighth of it, such as 33554432"
        )


def _names(columns: tuple[ColumnSpec, ...]) -> str:
    return ", ".join(column.name for column in columns)
