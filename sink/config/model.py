"""The whole configuration, and how its sections must fit together."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from changelog import formats
from changelog.spec import HEADERS
from sink.config.base import Section, Text
from sink.config.job_sections import IndexSection, LoadSection, SinkSection, SourceSection, VerifySection
from sink.config.maintenance import MaintenanceSection
from sink.config.options import (
    MisplacedError,
    at,
    check_catalog,
    check_spark,
    check_table,
    did_you_mean,
    is_delta,
)
from sink.config.table_parts import GROUP_REFERENCE, PartitionField
from sink.config.table_section import TableSection
from sink.targets.capabilities import CAPABILITIES, Capabilities, Format


class Config(Section):
    """A whole configuration file. In the file, paths are relative to its folder; in this model, they are absolute."""

    sink: SinkSection
    source: SourceSection
    catalogs: dict[str, dict[str, Text]]
    tables: Annotated[list[TableSection], Field(min_length=1)]
    load: LoadSection = LoadSection()
    index: IndexSection | None = None
    verify: VerifySection | None = None
    maintenance: MaintenanceSection = MaintenanceSection()
    spark: dict[str, Text] = Field(default_factory=dict)

    @field_validator("catalogs")
    @classmethod
    def _catalogs(cls, value: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for name, properties in value.items():
            with at(name):
                check_catalog(properties)
        return value

    @field_validator("spark")
    @classmethod
    def _spark(cls, value: dict[str, str]) -> dict[str, str]:
        check_spark(value)
        return value

    @model_validator(mode="after")
    def _dead_letters_fit(self) -> Self:
        sink = self.sink
        if sink.on_bad_record == "fail":
            for name in ("dead_letter_topic", "max_bad_records"):
                if getattr(sink, name) is not None:
                    raise MisplacedError(
                        f"sink.{name} needs on_bad_record: dead-letter, but on_bad_record is fail", "sink", name
                    )
        if sink.dead_letter_topic is None:
            if sink.dead_letter_options:
                raise MisplacedError(
                    "sink.dead_letter_options needs sink.dead_letter_topic", "sink", "dead_letter_options"
                )
            return self
        if self.source.type != "kafka":
            raise MisplacedError(
                "sink.dead_letter_topic needs source.type: kafka; the dead-letter table has all bad records anyway",
                "sink",
                "dead_letter_topic",
            )
        if any(
            re.fullmatch(t.source, sink.dead_letter_topic) if t.has_pattern else sink.dead_letter_topic in t.topics
            for t in self.tables
        ):
            raise MisplacedError(
                f"sink.dead_letter_topic {sink.dead_letter_topic!r} is also the source of a table. Name another topic, "
                "or the sink would read its own dead letters",
                "sink",
                "dead_letter_topic",
            )
        for name in sink.dead_letter_options:
            if not name.startswith("kafka."):
                raise MisplacedError(
                    f"got {name!r}, expected names that begin with kafka.", "sink", "dead_letter_options"
                )
        if sink.dead_letter_options and "kafka.bootstrap.servers" not in sink.dead_letter_options:
            raise MisplacedError(
                "sink.dead_letter_options replaces the source's options, so it needs kafka.bootstrap.servers",
                "sink",
                "dead_letter_options",
            )
        return self

    @model_validator(mode="after")
    def _loads_fit(self) -> Self:
        database = self.source.database
        if self.load.auto and not (database is not None and self.source.has_topics):
            raise MisplacedError(
                "got true, but tables are loaded only from the database in source.database, before the topics that "
                "have its changes. Name it there, or leave load.auto out",
                *("load", "auto"),
            )
        places = [database.url if database is not None else "", self.load.replica or ""]
        if self.load.replica and not all(place.startswith("jdbc:postgresql:") for place in places):
            raise MisplacedError(
                "only of Postgres a replica is read, whose primary source.database names. Leave it out",
                *("load", "replica"),
            )
        mode = self.source.connector.get("snapshot.mode", "no_data")
        if self.load.auto and mode != "no_data":
            raise MisplacedError(
                f"got {mode}, but load.auto is true: tables are loaded from the database, and the connector sends what "
                "changes. Leave it out, or leave load.auto out",
                *("source", "connector", "snapshot.mode"),
            )
        return self

    @model_validator(mode="after")
    def _orders_are_of_tables(self) -> Self:
        columns = self.maintenance.rewrite.sort
        if columns is not None:
            raise MisplacedError(
                f"got [{', '.join(columns)}], but columns are those of one table, and here all tables are meant. Write "
                f"it into the table's entry: maintenance: {{rewrite: {{sort: [{', '.join(columns)}]}}}}",
                *("maintenance", "rewrite", "sort"),
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # Two patterns may have the same target: the names of their tables are known only when their sources are.
        targets = [table.target for table in self.tables if not table.is_pattern]
        for number, table in enumerate(self.tables):
            if table.catalog not in self.catalogs:
                raise MisplacedError(
                    f"target {table.target} is in catalog {table.catalog!r}, which catalogs does not define"
                    f"{did_you_mean(table.catalog, self.catalogs)}",
                    *("tables", number, "target"),
                )
            if self.source.type == "files" and not table.order_by and table.mode != "append":
                raise MisplacedError(
                    f"table {table.target}: files have no order of their own; name an order_by column",
                    *("tables", number),
                )
            if self.source.type == "files" and any(o.name.startswith(HEADERS) for o in table.order_columns):
                raise MisplacedError(
                    f"table {table.target}: files have no headers; name a field of the rows",
                    *("tables", number, "order_by"),
                )
            if self.source.type == "files" and not isinstance(table.feed.topic, str):
                raise MisplacedError(
                    f"got {table.source}, expected one directory, or a regular expression for several with a target "
                    "such as lake.shop.$1: a table has its position in one directory. With recursiveFileLookup among "
                    "source.options that is also the folder in which several directories are",
                    *("tables", number, "source"),
                )
            if self.source.type == "files" and (record := next(iter(set(table.record_columns) & set(table.key)), None)):
                raise MisplacedError(
                    f"got {record}, which is the path of the change file: another one for each change of a row",
                    *("tables", number, "key"),
                )
            if table.late == "dead-letter" and self.sink.on_bad_record == "fail":
                raise MisplacedError(
                    "got dead-letter, but sink.on_bad_record is fail, so that the first late change would stop the "
                    "table. Write late: drop, or on_bad_record: dead-letter",
                    *("tables", number, "late"),
                )
            is_marked = self.source.has_topics and formats.find(self.source.format).MARKS_SNAPSHOTS
            if table.resnapshot == "reconcile" and not is_marked:
                raise MisplacedError(
                    "got reconcile, but only Debezium's messages, of topics, say where a snapshot begins and ends. "
                    "Write resnapshot: upsert",
                    *("tables", number, "resnapshot"),
                )
            self._check_key_given(table, number)
            self._check_source_tables(table, number)
            self._check_format(table, number)
        mend = {
            "target": "Give each entry a target of its own: a table has one position",
            "source": "Keep one of the entries: files are read once",
        }
        directories = [table.source for table in self.tables] if self.source.type == "files" else []
        for name, values in (("target", targets), ("source", directories)):
            repeated = sorted({value for value in values if values.count(value) > 1})
            if repeated:
                last = max(n for n, table in enumerate(self.tables) if getattr(table, name) == repeated[0])
                raise MisplacedError(
                    f"{name} {repeated[0]} is used by more than one table. {mend[name]}", "tables", last, name
                )
        self._check_patterns()
        if self.dead_letter_table.split(".")[0] not in self.catalogs:
            raise MisplacedError(
                f"dead_letter_table {self.dead_letter_table} is in a catalog that catalogs does not define",
                *("sink", "dead_letter_table"),
            )
        self._check_places()
        if self.source.type == "kafka":
            self._check_kafka()
        elif self.source.type == "files":
            self._check_files()
        return self

    def _check_format(self, table: TableSection, number: int) -> None:
        """Check that the target's format has what the table asks for."""
        can = self.capabilities(table.target)
        where = f"{table.catalog} is a catalog of {can.name}"
        if table.deletes not in can.deletes:
            raise MisplacedError(
                f"got {table.deletes!r}, expected {' or '.join(can.deletes)}: {where}, which has no {table.deletes} "
                f"deletes. Write deletes: {can.deletes[0]}, or leave it out",
                *("tables", number, "deletes"),
            )
        for place, text in enumerate(table.partition_by):
            field = PartitionField.parse(text)
            if field.transform not in can.transforms:
                instead = f", or cluster_by: [{field.column}] instead of partition_by" * (can.clustering_columns > 0)
                raise MisplacedError(
                    f"got {text!r}, expected a plain column: {where}, which has no "
                    f"{field.transform}(…). Write a column whose values are the partitions{instead}",
                    *("tables", number, "partition_by", place),
                )
        if len(table.cluster_by) > can.clustering_columns:
            raise MisplacedError(
                f"got {len(table.cluster_by)} columns, expected at most {can.clustering_columns} in {can.name}"
                if can.clustering_columns
                else f"got [{', '.join(table.cluster_by)}], but {where}, which has no clustering. Write partition_by",
                *("tables", number, "cluster_by"),
            )
        if table.cluster_by and table.partition_fields:
            other = "partition_by" if table.partition_by else "history, which partitions it"
            raise MisplacedError(
                f"a table of {can.name} can't have both cluster_by and {other}. Leave out one of them",
                *("tables", number, "cluster_by"),
            )
        for name in table.columns or {}:
            if name in can.reserved_columns:
                raise MisplacedError(f"{name}: {can.why_reserved}", "tables", number, "columns")
        with at("tables", number, "properties"):
            check_table(table.properties, can, appends=table.mode == "append", copies=table.copies)
        is_session_catalog = "spark_catalog" in self.catalogs[table.catalog]
        if is_session_catalog and table.target.count(".") > 2:
            raise MisplacedError(
                f"got {table.target!r}, expected {table.catalog}.namespace.table: Spark's session catalog has no "
                "namespaces in namespaces",
                *("tables", number, "target"),
            )

    def _check_source_tables(self, table: TableSection, number: int) -> None:
        """:raises MisplacedError: the table picks messages by a name that they don't have."""
        by_name = table.feed.table is not None
        given = {
            "source": by_name,
            "source_tables": table.source_tables != [],
            "other_tables": table.other_tables != "reject",
        }
        for name, is_given in given.items():
            if is_given and not formats.find(self.source.format).NAMES_TABLE:
                what = "table out of source" if name == "source" else f"{name} out"
                raise MisplacedError(
                    f"messages of the format {self.source.format} don't say of which table they are. Leave {what}",
                    *("tables", number, name),
                )
        if by_name and self.source.type == "files":
            raise MisplacedError(
                f"got a pattern, {table.feed.table}: the tables in files must be named, each in an entry of its own",
                *("tables", number, "source"),
            )
        if by_name and table.other_tables == "reject":
            raise MisplacedError(
                f"table {table.target}: each table of the pattern would keep the messages of the others as bad "
                "records. Write it in an entry with one table, or leave it out",
                *("tables", number, "other_tables"),
            )

    def _check_key_given(self, table: TableSection, number: int) -> None:
        """Check that a key is configured, or that messages can state it."""
        if table.keys and not table.is_pattern:
            raise MisplacedError(
                f"table {table.target}: keys is for a pattern's exceptions; write key", "tables", number, "keys"
            )
        if table.mode == "append":
            if table.truncate == "apply":
                raise MisplacedError(
                    f"table {table.target}: mode append takes no row away, so it can't apply a TRUNCATE. Write "
                    "truncate: reject, or leave it out",
                    *("tables", number, "truncate"),
                )
            for name in ("key", "keys"):
                if getattr(table, name):
                    raise MisplacedError(
                        f"table {table.target}: mode append compares no rows, so it has no {name}. Leave {name} "
                        "out, or use mode: upsert",
                        *("tables", number, name),
                    )
            return
        if table.key or table.keys:
            return
        if self.source.type == "files":
            reason = "files have no message keys"
        elif not formats.find(self.source.format).STATES_KEY:
            reason = f"messages of the format {self.source.format} don't say which columns are the key"
        else:
            return
        raise MisplacedError(f"key is missing, and {reason}. Add it, for example `key: [id]`", "tables", number)

    def _check_places(self) -> None:
        """Check that the sink's own folders aren't inside a table or a directory of change files."""
        own = {("sink", "checkpoint"): self.sink.checkpoint}
        if self.index is not None and self.index.location is not None:
            own["index", "location"] = self.index.location
        if self.source.buffer is not None:
            own["source", "buffer"] = self.source.buffer
        taken: list[tuple[str, str, tuple[str | int, ...]]] = []
        for number, table in enumerate(self.tables):
            if table.is_pattern:
                continue
            folder = self.table_folder(table.target)
            if folder is not None:
                taken.append((folder, f"table {table.target}", ("tables", number, "target")))
            if self.source.type == "files":
                taken.append((table.source, f"the change files of {table.target}", ("tables", number, "source")))
        for path, place in own.items():
            for folder, what, _ in taken:
                if _is_inside(place, folder):
                    raise MisplacedError(
                        f"{place} is inside {folder}, which is for {what}. Name a folder elsewhere", *path
                    )
        for table in self.tables:
            folder = self.table_folder(table.target)
            if table.is_pattern or folder is None or self.format_of(table.target) != "delta":
                continue
            for inner, what, where in taken:
                if what != f"table {table.target}" and _is_inside(inner, folder):
                    raise MisplacedError(
                        f"{inner}, which is for {what}, is inside {folder}, which is for table {table.target}: VACUUM "
                        "of that table would remove it. Name a place elsewhere",
                        *where,
                    )

    def _check_patterns(self) -> None:
        for number, table in enumerate(self.tables):
            if not table.may_find_more:
                continue
            text = table.source.rpartition("/")[2] if self.source.type == "files" else table.source
            text = text if table.feed.table is None else table.feed.table
            try:
                groups = re.compile(text).groups
            except re.error as error:
                why = "target refers to a group" if table.is_pattern else "source is a pattern"
                raise MisplacedError(
                    f"table {table.target}: {why}, so source must be a regular expression, but {text!r} is not valid: "
                    f"{error}",
                    *("tables", number, "source"),
                ) from None
            for reference in GROUP_REFERENCE.finditer(table.target):
                if not 1 <= int(reference[1] or reference[2]) <= groups:
                    raise MisplacedError(
                        f"table {table.target}: {reference[0]} names a group that source {text!r} does not have; it "
                        f"has {groups}",
                        *("tables", number, "source"),
                    )
            if table.verify is not None and table.verify.table is not None:
                for reference in GROUP_REFERENCE.finditer(table.verify.table):
                    if not 1 <= int(reference[1] or reference[2]) <= groups:
                        raise MisplacedError(
                            f"{reference[0]} names a group that source {text!r} does not have; it has {groups}",
                            *("tables", number, "verify", "table"),
                        )
            for name in table.keys:
                if not re.fullmatch(text, name):
                    raise MisplacedError(
                        f"table {table.target}: keys names {name!r}, which the source {text!r} doesn't match",
                        *("tables", number, "keys"),
                    )
        if (
            self.sink.on_bad_record == "dead-letter"
            and self.sink.dead_letter_table is None
            and GROUP_REFERENCE.search(self.dead_letter_table)
        ):
            raise MisplacedError(
                f"missing. The first table's namespace ({self.tables[0].target}) comes from a pattern, so the "
                "dead-letter table can't be in it. Name one: dead_letter_table: catalog.namespace.table",
                *("sink", "dead_letter_table"),
            )

    def _check_kafka(self) -> None:
        options = self.source.options
        if "kafka.bootstrap.servers" not in options:
            raise MisplacedError(
                "source.options needs kafka.bootstrap.servers for source.type: kafka", "source", "options"
            )
        if "startingoffsetsbytimestamp" in {name.lower() for name in options}:
            raise MisplacedError(
                "source.options.startingOffsetsByTimestamp is not supported; write startingTimestamp",
                "source",
                "options",
            )
        if "assign" in options or "subscribePattern" in options:
            raise MisplacedError(
                "name topics with source.options.subscribe, or leave it out: the tables' sources are subscribed",
                *("source", "options"),
            )
        if any(table.has_pattern for table in self.tables):
            if "subscribe" in options:
                raise MisplacedError(
                    "leave out source.options.subscribe: a table's source is a pattern",
                    "source",
                    "options",
                    "subscribe",
                )
            return
        places = {topic: number for number, table in enumerate(self.tables) for topic in table.topics}
        sources = list(places)
        subscribed = [topic.strip() for topic in options.get("subscribe", ",".join(sources)).split(",")]
        for topic in sources:
            if topic not in subscribed:
                raise MisplacedError(
                    f"table source {topic!r} is not in source.options.subscribe{did_you_mean(topic, subscribed)}",
                    *("tables", places[topic], "source"),
                )
        for topic in subscribed:
            if topic not in sources:
                raise MisplacedError(
                    f"source.options.subscribe names {topic!r}, but no table has it as its source",
                    *("source", "options", "subscribe"),
                )

    def _check_files(self) -> None:
        if self.source.file_format not in ("parquet", "json"):
            raise MisplacedError(
                f"source.options.path_format is {self.source.file_format!r}; write parquet or json",
                *("source", "options", "path_format"),
            )
        if self.source.format in ("avro", "debezium-avro"):
            raise MisplacedError(
                f"source.format: {self.source.format} reads messages of Kafka, and source.type is files",
                *("source", "format"),
            )
        if self.source.format != "row-kind" and self.source.file_format != "json":
            raise MisplacedError(
                f"source.format: {self.source.format} reads path_format: json", "source", "options", "path_format"
            )
        if any(name.lower() == "latestfirst" and value != "false" for name, value in self.source.options.items()):
            raise MisplacedError(
                "source.options.latestFirst is set, and the position in a directory is the newest file that was "
                "applied, so older ones would be left out after a restart; leave the option out",
                *("source", "options"),
            )

    def format_of(self, name: str) -> Format:
        """The format of a catalog's tables.

        :param name: the catalog, or a table `catalog.namespace.table` of it.
        """
        return "delta" if is_delta(self.catalogs[name.split(".")[0]]) else "iceberg"

    @property
    def formats(self) -> set[Format]:
        """The formats of all catalogs."""
        return {self.format_of(name) for name in self.catalogs}

    def capabilities(self, name: str) -> Capabilities:
        """What the format of a catalog's tables can do.

        :param name: as for `format_of`.
        """
        return CAPABILITIES[self.format_of(name)]

    def warehouse(self, catalog: str) -> str | None:
        """The folder of a catalog whose tables are in folders with their names. None for other catalogs."""
        properties = self.catalogs[catalog]
        return properties.get("warehouse") if has_folders(properties) else None

    def verify_of(self, table: TableSection) -> VerifySection | None:
        """With what a table is compared: the source's database, with the values of the global section in place of its,
        and with the table's own values in place of theirs. None if there is none.
        """
        sections = [section for section in (self.source.database, self.verify, table.verify) if section is not None]
        found: dict[str, Any] = {}
        for own in (section.model_dump(exclude_unset=True) for section in sections):
            if "spark_table" in own or "url" in own:  # another source, to which nothing else of the others belongs
                found = {name: value for name, value in found.items() if name == "settle"}
            found |= own
        return VerifySection.model_validate(found) if sections else None

    def maintenance_of(self, table: TableSection) -> MaintenanceSection:
        """What is done for a table: the global section, with the table's own values in place of its."""
        if table.maintenance is None:
            return self.maintenance
        given, own = (section.model_dump(exclude_unset=True) for section in (self.maintenance, table.maintenance))
        for name, value in own.items():
            if isinstance(value, dict) and isinstance(given.get(name), dict):
                own[name] = given[name] | value
        return MaintenanceSection.model_validate(given | own)

    def table_folder(self, target: str) -> str | None:
        """The folder of a table, as path or URI without a slash at the end. None if only the catalog knows it."""
        catalog, *names = target.split(".")
        warehouse = self.warehouse(catalog)
        return None if warehouse is None else "/".join([warehouse.rstrip("/"), *names])

    @property
    def index_location(self) -> str:
        """The folder of this sink's key indexes: inside the configured location, else inside the checkpoint folder."""
        location = self.index.location if self.index is not None else None
        location = location or f"{self.sink.checkpoint.rstrip('/')}/index"
        return f"{location.rstrip('/')}/{self.sink.id}"

    @property
    def dead_letter_table(self) -> str:
        """The table for bad records. If it isn't configured, `dead_letters` in the first table's namespace."""
        return self.sink.dead_letter_table or ".".join([*self.tables[0].target.split(".")[:-1], "dead_letters"])


def _is_inside(place: str, folder: str) -> bool:
    """Whether a path is a folder's, or the folder's own."""
    return f"{place.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def has_folders(catalog: Mapping[str, Any]) -> bool:
    """Whether a catalog's tables are in folders with their names."""
    return str(catalog.get("type", "")).lower() in ("hadoop", "delta")
