"""Reads the configuration file: YAML in, a typed model out. An error names file, line, key and value, and says what was
expected.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from changelog import formats
from sink.config.maintenance import ExpireSection, MaintenanceSection, OrphansSection, RewriteSection
from sink.config.options import (
    MisplacedError,
    check_catalog,
    check_source,
    check_spark,
    check_table,
    did_you_mean,
    is_delta,
)
from sink.config.references import REFERENCE, resolve
from sink.config.removed import REMOVED
from sink.config.section import Section, Text, as_text
from sink.errors import ConfigError
from sink.redaction import MASK, is_secret, masked, remember
from sink.targets.capabilities import CAPABILITIES, Capabilities, Format

_INTERVAL = re.compile(r"(\d+) (millisecond|second|minute|hour)s?")
_READY_SECONDS = 600.0
_UNIT_SECONDS = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0}
_REFERENCE = re.compile(r"\$(?:(\d+)|\{(\d+)\})")
_PARTITION = re.compile(
    r"(?:(bucket|truncate)\(\s*(\d+)\s*,\s*([^\s(),]+)\s*\)|(\w+)\(\s*([^\s(),]+)\s*\)|([^\s(),]+))"
)
_TIME_TRANSFORMS = {
    "year": "year",
    "years": "year",
    "month": "month",
    "months": "month",
    "day": "day",
    "days": "day",
    "hour": "hour",
    "hours": "hour",
}


@contextmanager
def _at(*path: str | int) -> Iterator[None]:
    """Put `path` before the path of a `MisplacedError` that is raised inside this context."""
    try:
        yield
    except MisplacedError as error:
        raise MisplacedError(str(error), *path, *error.path) from None


class PartitionField(Section):
    """One parsed entry of `partition_by`: a transform, its parameter if it has one, and the source column."""

    transform: Literal["identity", "bucket", "truncate", "year", "month", "day", "hour"]
    column: str
    parameter: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse texts such as `region`, `bucket(8, id)`, `truncate(4, name)`, `day(created_at)`.

        :raises ValueError: the text has another form.
        """
        match = _PARTITION.fullmatch(text.strip())
        if match:
            wide, parameter, wide_column, function, function_column, column = match.groups()
            if wide and int(parameter) > 0:
                return cls.model_validate({"transform": wide, "column": wide_column, "parameter": int(parameter)})
            if function == "identity":
                return cls(transform="identity", column=function_column)
            if function in _TIME_TRANSFORMS:
                return cls.model_validate({"transform": _TIME_TRANSFORMS[function], "column": function_column})
            if column:
                return cls(transform="identity", column=column)
        raise ValueError(
            f"{text!r} is not a partition field; write a column name, bucket(N, column), truncate(N, column), "
            "year(column), month(column), day(column) or hour(column)"
        )


class OrderColumn(Section):
    """One parsed entry of `order_by`: a column (or a dotted path into the message) and its Spark SQL type, if given."""

    name: str
    type: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, dtype = text.strip().partition(" ")
        return cls(name=name, type=dtype.strip() or None)


def _seconds(interval: str) -> float:
    match = _INTERVAL.fullmatch(interval)
    assert match is not None
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def _intervals(value: str) -> str:
    number = value if value.isdecimal() else "10"
    return f'"{number} seconds" or "1 minute"'


def _interval(value: str) -> str:
    if not _INTERVAL.fullmatch(value):
        raise ValueError(f"write an interval such as {_intervals(value)}")
    return value


Interval = Annotated[Text, AfterValidator(_interval)]


def _http(value: Any) -> Any:
    return value if isinstance(value, dict) else {"address": as_text(value)}


class HttpSection(Section):
    """`sink.http:` only an address, or a mapping with more.

    :param address: `host:port`. The host must be written, so that nobody listens to the world unawares.
    :param ready_within: a table may have something to apply for so long without a commit, and the sink is still ready.
    :param hosts: names by which browsers and other clients may call it, besides addresses and names without a dot.
    """

    address: Text
    ready_within: Interval | None = None
    hosts: list[str] = Field(default_factory=list)

    @field_validator("address")
    @classmethod
    def _address(cls, value: str) -> str:
        host, port = cls._parts(value)
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(
                'write an address of this machine and a port, such as "127.0.0.1:8088" for this machine alone, '
                '"0.0.0.0:8088" for all who can reach it, or "[::1]:8088"'
            )
        return value

    @staticmethod
    def _parts(address: str) -> tuple[str, str]:
        host, _, port = address.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            return host[1:-1], port
        return ("", port) if ":" in host or "/" in host else (host, port)

    @property
    def host(self) -> str:
        return self._parts(self.address)[0]

    @property
    def port(self) -> int:
        return int(self._parts(self.address)[1])


class SinkSection(Section):
    """`sink:` the sink's name and how it runs."""

    id: str
    checkpoint: str
    trigger: Text = "available-now"
    on_bad_record: Literal["dead-letter", "fail"] = "dead-letter"
    dead_letter_table: str | None = None
    dead_letter_topic: str | None = None
    dead_letter_options: dict[str, Text] = Field(default_factory=dict)
    max_bad_records: Annotated[int, Field(ge=0)] | None = None
    on_table_error: Literal["continue", "stop"] = "continue"
    parallel_tables: Annotated[int, Field(ge=1)] | None = None
    http: Annotated[HttpSection, BeforeValidator(_http)] | None = None
    log_format: Literal["text", "json"] = "text"
    show_values: bool = True

    @field_validator("id")
    @classmethod
    def _id(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", value):
            raise ValueError("use letters, digits, '-' and '_'; the id becomes part of a table property's name")
        return value

    @field_validator("trigger")
    @classmethod
    def _trigger(cls, value: str) -> str:
        if value != "available-now" and not _INTERVAL.fullmatch(value):
            raise ValueError(f'write "available-now", or an interval such as {_intervals(value)}')
        return value

    @property
    def ready_seconds(self) -> float:
        """The limit of `http.ready_within`; by default ten minutes, or three times the trigger if that is longer."""
        if self.http is not None and self.http.ready_within is not None:
            return _seconds(self.http.ready_within)
        return max(_READY_SECONDS, 0.0 if self.trigger == "available-now" else 3 * _seconds(self.trigger))


class SourceSection(Section):
    """`source:` where changes come from, and their format."""

    type: Literal["kafka", "files"]
    format: str
    options: dict[str, Text] = Field(default_factory=dict)
    format_options: dict[str, Text | Annotated[tuple[Text, ...], Field(min_length=1)]] = Field(default_factory=dict)
    discovery_interval: Interval = "1 minute"

    @field_validator("format")
    @classmethod
    def _format(cls, value: str) -> str:
        if value not in formats.OURS and value not in formats.names():  # `names` searches all installed packages
            raise ValueError(
                f"there is no format {value!r}{did_you_mean(value, formats.names())}; write one of "
                f"{', '.join(formats.names())}"
            )
        return value

    @model_validator(mode="after")
    def _format_options_fit(self) -> Self:
        made = formats.find(self.format)
        for name, value in self.format_options.items():
            if name not in made.OPTIONS:
                known = f"Known for {self.format}: {', '.join(made.OPTIONS) or 'none'}"
                raise MisplacedError(f"unknown key{did_you_mean(name, made.OPTIONS)}. {known}", "format_options", name)
            choices = made.OPTIONS[name]
            if choices and value not in choices:
                raise MisplacedError(f"got {value!r}, expected one of {', '.join(choices)}", "format_options", name)
        for name in made.REQUIRED:
            if not self.format_options.get(name):
                raise MisplacedError(f"format: {self.format} needs {name}", "format_options")
        return self

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        with _at("options"):
            check_source(self.options, files=self.type == "files")
        return self

    @property
    def discovery_seconds(self) -> float:
        """Seconds between two searches for new topics or directories."""
        return _seconds(self.discovery_interval)

    @property
    def file_format(self) -> str:
        """Format of change files: `parquet` or `json` (one object a line)."""
        return self.options.get("path_format", "parquet" if self.format == "row-kind" else "json")


class ColumnSection(Section):
    """One entry of `columns:`: only a type, or a mapping with more.

    :param type: Spark SQL type.
    :param source: `from:` the message's field, if its name differs from the column's.
    :param expression: Spark SQL over the other columns and metadata columns. The column then isn't a field.
    :param stored: False for a field that only expressions need.
    """

    type: str
    source: str | None = Field(default=None, alias="from")
    expression: str | None = None
    stored: bool = True

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.expression is not None and (self.source is not None or not self.stored):
            raise ValueError("a column with an expression is computed: it has no from, and is always stored")
        return self


def _column(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


Metadata = Literal["_op", "_ts", "_source", "_source_partition", "_offset", "_timestamp"]


Columns = Annotated[list[str], Field(min_length=1)]


class VerifySection(Section):
    """`verify:` the source with which `rowdelta verify` compares a table. A table's own values replace the global ones.

    :param url: JDBC URL of the database (`jdbc:postgresql:`, `jdbc:mysql:` or `jdbc:mariadb:`).
    :param table: the database's table; in an entry that is a pattern, with `$1` for a group of its source. By default
        what the topic's name has after its first part.
    :param spark_table: any table that Spark reads, in place of a database.
    :param slot: Debezium's replication slot in Postgres.
    :param settle: how long a change takes from the connector into the topic, at most.
    """

    url: Text | None = None
    user: Text | None = None
    password: Text | None = None
    table: Text | None = None
    spark_table: Text | None = None
    slot: Text | None = None
    settle: Interval = "5 seconds"

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"jdbc:(postgresql|mysql|mariadb):", value):
            raise ValueError(
                "expected jdbc:postgresql://host:5432/database, jdbc:mysql://host:3306/database or "
                "jdbc:mariadb://host:3306/database; for anything else that Spark can read, write spark_table"
            )
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.spark_table is not None:
            for name in ("url", "user", "password", "table", "slot"):
                if getattr(self, name) is not None:
                    raise MisplacedError(f"{name} is of a database, and spark_table is given too. Keep one", name)
        if self.slot is not None and self.url is not None and not self.url.startswith("jdbc:postgresql:"):
            raise MisplacedError("only Postgres has replication slots; leave it out", "slot")
        return self

    @property
    def settle_seconds(self) -> float:
        return _seconds(self.settle)


class TableSection(Section):
    """One entry of `tables:`: a changelog and the table that mirrors it.

    :param key: key columns. Empty if the messages state the key; when the table is opened, it is filled in
        (`sink.run.keys`).
    :param keys: topic or directory -> key columns, for exceptions of a pattern.
    :param types: name, or regular expression for names -> Spark SQL type of columns that `columns` doesn't name.
    :param truncate: what a TRUNCATE of the source does. None: `apply` where that is possible.
    :param source_tables: patterns of the source's tables whose messages are taken. Empty: the one that is named first.
    :param other_tables: what becomes of messages of other tables.
    :param shared_with: ids of other sinks that may write the table too, or have created it.
    :param cluster_by: columns by which Delta Lake clusters a table (liquid clustering).
    """

    source: str
    target: str
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
    mode: Literal["upsert", "changelog", "append"] = "upsert"
    deletes: Literal["position", "equality", "copy-on-write"] = "position"
    unavailable: Literal["keep", "reject"] | None = None
    truncate: Literal["apply", "reject"] | None = None
    merge_small_files: bool = True
    properties: dict[str, Text] = Field(default_factory=dict)
    shared_with: list[str] = Field(default_factory=list)
    source_tables: list[str] = Field(default_factory=list)
    other_tables: Literal["reject", "ignore"] = "reject"
    verify: VerifySection | None = None
    maintenance: MaintenanceSection | None = None

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
    def partition_fields(self) -> list[PartitionField]:
        return [PartitionField.parse(text) for text in self.partition_by]

    @property
    def order_columns(self) -> list[OrderColumn]:
        return [OrderColumn.parse(text) for text in self.order_by]

    def declared_type(self, column: str) -> str | None:
        """The type that `types` gives a column: by its name, or else by the first expression for its whole name."""
        if column in self.types:
            return self.types[column]
        return next((dtype for name, dtype in self.types.items() if re.fullmatch(name, column)), None)

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
    def is_computed(self) -> bool:
        """Whether the configuration has computed columns, or fields for them."""
        return any(column.expression is not None or not column.stored for column in (self.columns or {}).values())

    @property
    def keeps_unavailable(self) -> bool:
        """Whether updates may lack values, which are then those of the table's row."""
        return self.unavailable != "reject" and self._cannot_keep is None

    @property
    def _cannot_keep(self) -> str | None:
        """Why `unavailable: keep` isn't possible."""
        if self.mode != "upsert":
            return f"mode {self.mode} takes changes as they are. Write mode: upsert"
        if not self.has_index:
            return "only the key index finds the table's rows. Write deletes: position or copy-on-write"
        if self.is_computed:
            return "a computed column could be computed from a value that wasn't sent. Leave expressions out"
        return None

    @model_validator(mode="after")
    def _unavailable_fits(self) -> Self:
        if self.unavailable == "keep" and (why := self._cannot_keep) is not None:
            raise MisplacedError(f"table {self.target}: got keep, but {why}, or unavailable: reject", "unavailable")
        return self

    @model_validator(mode="after")
    def _order_fits(self) -> Self:
        columns = self.maintenance.rewrite.sort if self.maintenance is not None else None
        if columns is None:
            return self
        path = ("maintenance", "rewrite", "sort")
        if self.mode != "append" and self.deletes == "equality":
            raise MisplacedError(
                f"table {self.target}: got sort, but with deletes: equality Iceberg's procedure rewrites its files, "
                f"which isn't told an order. Write deletes: position or copy-on-write, or leave sort out",
                *path,
            )
        for column in columns if self.columns is not None else ():
            if column not in self._stored:
                raise MisplacedError(
                    f"sort names {column!r}, which is not in columns{did_you_mean(column, self._stored)}", *path
                )
        return self

    @property
    def is_pattern(self) -> bool:
        """Whether `source` is a regular expression. It is one if `target` has a reference such as `$1`. Special
        characters in `source` don't decide, since names of topics contain dots too.
        """
        return _REFERENCE.search(self.target) is not None

    def expand(self, text: str, match: re.Match[str]) -> str:
        """Replace `$1` or `${1}` in `text` by the match's groups. Each group becomes a name of letters, digits and `_`.

        :raises ValueError: a group is empty.
        """

        def name(reference: re.Match[str]) -> str:
            value = match[int(reference[1] or reference[2])]
            if not value:
                raise ValueError(f"{reference[0]} in {text!r} is empty for {match.string!r}")
            return re.sub(r"\W", "_", value)

        return _REFERENCE.sub(name, text)

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        if self.key:
            self.check_key(self.key, "key")
        for name, key in self.keys.items():
            self.check_key(key, "keys", name)
        if self.columns is not None:
            stored = self._stored
            for field in self.partition_fields:
                if field.column not in stored:
                    raise MisplacedError(
                        f"partition_by names {field.column!r}, which is not in columns"
                        f"{did_you_mean(field.column, stored)}",
                        "partition_by",
                    )
            for name in self.cluster_by:
                if name not in stored:
                    raise MisplacedError(
                        f"cluster_by names {name!r}, which is not in columns{did_you_mean(name, stored)}", "cluster_by"
                    )
            lower = [name.lower() for name in (*self.columns, *self.metadata)]
            for name in (*self.columns, *self.metadata):
                if lower.count(name.lower()) > 1:
                    raise MisplacedError(
                        f"{name!r} is a column twice in columns and metadata; Spark does not tell upper from lower "
                        "case",
                        "columns",
                    )
            for name in self.types:
                if name in self.columns:
                    raise MisplacedError(
                        f"types names {name!r}, whose type columns says; remove it from one of them", "types", name
                    )
            for name in self.exclude:
                if name in self.columns:
                    raise MisplacedError(
                        f"exclude names {name!r}, which columns names too; remove it from one of them", "exclude"
                    )
        return self

    @property
    def _stored(self) -> list[str]:
        """The table's columns that the configuration names."""
        return [*(name for name, column in (self.columns or {}).items() if column.stored), *self.metadata]

    def check_key(self, key: Sequence[str], *path: str) -> None:
        """Check whether these columns can be the key, as far as the configuration says.

        :param path: where the key is configured, for messages.
        :raises MisplacedError: they can't be the key.
        """
        if len(set(key)) != len(key):
            raise MisplacedError(f"key names a column twice: {list(key)}", *path)
        for name in key:
            if name in self.exclude:
                raise MisplacedError(f"exclude names {name!r}, which is in key; remove it from exclude", "exclude")
            if name in self.metadata:
                raise MisplacedError(
                    f"key names {name!r}, which is a metadata column; a key must be a field of the messages", *path
                )
            if self.columns is None:
                continue
            if name not in self._stored:
                raise MisplacedError(
                    f"key names {name!r}, which is not in columns{did_you_mean(name, self._stored)}", *path
                )
            if self.columns[name].expression is not None:
                raise MisplacedError(
                    f"key names {name!r}, which is computed; a key must be a field of the messages", *path
                )


class IndexSection(Section):
    """`index:` where the tables' key indexes are stored.

    Tasks use `properties` (`s3.endpoint`, …) to reach this place, instead of the catalog's properties.
    """

    location: str | None = None
    properties: dict[str, Text] | None = None


class Config(Section):
    """A whole configuration file. In the file, paths are relative to its folder; in this model, they are absolute."""

    sink: SinkSection
    source: SourceSection
    catalogs: dict[str, dict[str, Text]]
    tables: Annotated[list[TableSection], Field(min_length=1)]
    index: IndexSection | None = None
    verify: VerifySection | None = None
    maintenance: MaintenanceSection = MaintenanceSection()
    spark: dict[str, Text] = Field(default_factory=dict)

    @field_validator("catalogs")
    @classmethod
    def _catalogs(cls, value: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for name, properties in value.items():
            with _at(name):
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
            re.fullmatch(t.source, sink.dead_letter_topic) if t.is_pattern else t.source == sink.dead_letter_topic
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
        sources = [table.source for table in self.tables]
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
            self._check_key_given(table, number)
            self._check_source_tables(table, number)
            self._check_format(table, number)
        mend = {
            "target": "Give each entry a target of its own: a table has one position",
            "source": "Keep one of the entries",
        }
        for name, values in (("target", targets), ("source", sources)):
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
            self._check_kafka(sources)
        else:
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
        for place, field in enumerate(table.partition_fields):
            if field.transform not in can.transforms:
                instead = f", or cluster_by: [{field.column}] instead of partition_by" * (can.clustering_columns > 0)
                raise MisplacedError(
                    f"got {table.partition_by[place]!r}, expected a plain column: {where}, which has no "
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
        if table.cluster_by and table.partition_by:
            raise MisplacedError(
                f"a table of {can.name} can't have both cluster_by and partition_by. Leave out one of them",
                *("tables", number, "cluster_by"),
            )
        for name in table.columns or {}:
            if name in can.reserved_columns:
                raise MisplacedError(f"{name}: {can.why_reserved}", "tables", number, "columns")
        with _at("tables", number, "properties"):
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
        given = {"source_tables": table.source_tables != [], "other_tables": table.other_tables != "reject"}
        for name, is_given in given.items():
            if is_given and not formats.names_table(self.source.format):
                raise MisplacedError(
                    f"messages of the format {self.source.format} don't say of which table they are. Leave {name} out",
                    *("tables", number, name),
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
        elif not formats.states_key(self.source.format):
            reason = f"messages of the format {self.source.format} don't say which columns are the key"
        else:
            return
        raise MisplacedError(f"key is missing, and {reason}. Add it, for example `key: [id]`", "tables", number)

    def _check_places(self) -> None:
        """Check that the sink's own folders aren't inside a table or a directory of change files."""
        own = {("sink", "checkpoint"): self.sink.checkpoint}
        if self.index is not None and self.index.location is not None:
            own["index", "location"] = self.index.location
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
            if not table.is_pattern:
                continue
            text = table.source.rpartition("/")[2] if self.source.type == "files" else table.source
            try:
                groups = re.compile(text).groups
            except re.error as error:
                raise MisplacedError(
                    f"table {table.target}: target refers to a group, so source must be a regular expression, but "
                    f"{text!r} is not valid: {error}",
                    *("tables", number, "source"),
                ) from None
            for reference in _REFERENCE.finditer(table.target):
                if not 1 <= int(reference[1] or reference[2]) <= groups:
                    raise MisplacedError(
                        f"table {table.target}: {reference[0]} names a group that source {text!r} does not have; it "
                        f"has {groups}",
                        *("tables", number, "source"),
                    )
            if table.verify is not None and table.verify.table is not None:
                for reference in _REFERENCE.finditer(table.verify.table):
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
            and _REFERENCE.search(self.dead_letter_table)
        ):
            raise MisplacedError(
                f"missing. The first table's namespace ({self.tables[0].target}) comes from a pattern, so the "
                "dead-letter table can't be in it. Name one: dead_letter_table: catalog.namespace.table",
                *("sink", "dead_letter_table"),
            )

    def _check_kafka(self, sources: list[str]) -> None:
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
        if any(table.is_pattern for table in self.tables):
            if "subscribe" in options:
                raise MisplacedError(
                    "leave out source.options.subscribe: a table's source is a pattern",
                    "source",
                    "options",
                    "subscribe",
                )
            return
        subscribed = [topic.strip() for topic in options.get("subscribe", ",".join(sources)).split(",")]
        for topic in sources:
            if topic not in subscribed:
                raise MisplacedError(
                    f"table source {topic!r} is not in source.options.subscribe{did_you_mean(topic, subscribed)}",
                    *("tables", sources.index(topic), "source"),
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
        return properties.get("warehouse") if _has_folders(properties) else None

    def verify_of(self, table: TableSection) -> VerifySection | None:
        """With what a table is compared: the global section, with the table's own values in place of its. None if
        there is none.
        """
        if self.verify is None or table.verify is None:
            return table.verify or self.verify
        given, own = (section.model_dump(exclude_unset=True) for section in (self.verify, table.verify))
        if "spark_table" in own or "url" in own:  # another source, to which nothing else of the global one belongs
            given = {name: value for name, value in given.items() if name == "settle"}
        return VerifySection.model_validate(given | own)

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


def _has_folders(catalog: Mapping[str, Any]) -> bool:
    """Whether a catalog's tables are in folders with their names."""
    return str(catalog.get("type", "")).lower() in ("hadoop", "delta")


def load(path: str | Path) -> Config:
    """Read, put values in place of references, validate.

    :raises ConfigError: the message names file, line, key and value, and says what was expected. It has all mistakes.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}). Give the path of a configuration file.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8, as a configuration file must be. Save it as UTF-8.") from None
    lines: dict[tuple[str | int, ...], int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = _construct(node, (), lines, file)
    except yaml.MarkedYAMLError as error:
        # the error's own text quotes the line, which may hold a secret
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = _yaml_hint(text.splitlines()[line - 1 : line], error)
        # an unquoted secret may begin like an alias, an anchor or a tag
        problem = re.sub(r"(alias|anchor|tag|tag handle) '.*'", r"\1", str(error.problem), flags=re.DOTALL)
        raise ConfigError(f"{path}:{line}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected the sections sink, source, catalogs and tables, found "
            f"{_shown(values) if text.strip() else 'an empty file'}."
        )
    for options in _mappings(values):
        remember(options)
    try:
        return Config.model_validate(_absolute_paths(values, file.resolve().parent))
    except ValidationError as error:
        # if a value fits none of several types, pydantic reports it several times; show it once
        problems = dict.fromkeys(_explain(problem, lines) for problem in error.errors())
        raise ConfigError("\n".join(f"{path}{problem}" for problem in problems)) from None


def _mappings(values: Any) -> Iterator[dict[str, str]]:
    """The texts of all mappings in a value, by their names."""
    if isinstance(values, dict):
        yield {name: value for name, value in values.items() if isinstance(value, str)}
    for inner in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _mappings(inner)


def _yaml_hint(line: list[str], error: yaml.MarkedYAMLError) -> str:
    """A hint for a frequent mistake. It doesn't show the line itself, which may have a secret."""
    if "'\\t'" in str(error.problem):
        return ". This is a tab; YAML is indented with spaces"
    if re.search(r"\b(alias|anchor|tag)\b", str(error.problem)):
        return ". Quote a value that begins with *, & or !"
    if "got '{'" in str(error.problem) and line and "${" in line[0]:
        return '. Between { and } or [ and ], quote what has ${…} in it: "${NAME}/x"'
    return ""


def _construct(
    node: yaml.Node | None, path: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int], file: Path
) -> Any:
    if node is None:
        return None
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in result:
                raise ConfigError(
                    f"{file}:{key_node.start_mark.line + 1}: {_dotted((*path, key))} is given twice. Keep one."
                )
            result[key] = _construct(value_node, (*path, key), lines, file)
            lines[(*path, key)] = key_node.start_mark.line + 1
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(child, (*path, i), lines, file) for i, child in enumerate(node.value)]
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except ValueError:  # such as 2026-02-30, which only looks like a date
        value = str(node.value)
    if isinstance(value, bool | int | float) and path and is_secret(str(path[-1])):
        if isinstance(value, bool) and node.value.lower() not in ("true", "false"):
            raise ConfigError(
                f"{file}:{lines[path]}: {_dotted(path)}: got {MASK}, which is not text in YAML, expected text. "
                "Write it in quotes."
            )
        # as it is written, since YAML's 0123 is 83; and as text, so that it is masked
        return str(node.value)
    if isinstance(value, str):
        return REFERENCE.sub(lambda reference: _resolved(reference, path, lines[path], file), value)
    return value if isinstance(value, bool | int | float | None) else str(node.value)


def _resolved(reference: re.Match[str], path: tuple[str | int, ...], line: int, file: Path) -> str:
    try:
        return resolve(reference, file.resolve().parent)
    except ValueError as error:
        raise ConfigError(f"{file}:{line}: {_dotted(path)} {error}") from None


def _absolute_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make local paths absolute. Relative ones start at the configuration file's folder, not at the current folder."""

    def absolute(path: Any) -> Any:
        if not isinstance(path, str) or not path or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
            return path
        return os.path.normpath(folder / Path(path).expanduser())

    for section, entry in _path_entries(values):
        section[entry] = absolute(section[entry])
    return values


def _path_entries(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    sink, source, catalogs = values.get("sink"), values.get("source"), values.get("catalogs")
    if isinstance(sink, dict) and "checkpoint" in sink:
        yield sink, "checkpoint"
    if isinstance(values.get("index"), dict) and "location" in values["index"]:
        yield values["index"], "location"
    if isinstance(catalogs, dict):
        for catalog in catalogs.values():
            if isinstance(catalog, dict) and "warehouse" in catalog and _has_folders(catalog):
                yield catalog, "warehouse"
    if isinstance(source, dict) and source.get("type") == "files" and isinstance(values.get("tables"), list):
        for table in values["tables"]:
            if isinstance(table, dict) and "source" in table:
                yield table, "source"


def _explain(problem: Any, lines: dict[tuple[str | int, ...], int]) -> str:
    """One pydantic problem as `:LINE: key: what is wrong`."""
    error = problem.get("ctx", {}).get("error")
    path = tuple(part for part in problem["loc"] if not _ALTERNATIVE.match(str(part)))
    is_one_of = len(path) < len(problem["loc"])
    path += error.path if isinstance(error, MisplacedError) else ()
    line = next((lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in lines), 1)
    where = f":{line}: {_dotted(path)}: " if path else f":{line}: "
    kind, value = problem["type"], problem.get("input")
    shown = MASK if any(is_secret(str(part)) for part in path) else masked(_shown(value))
    if kind == "extra_forbidden":
        instead = REMOVED.get(".".join(str(part) for part in path if not isinstance(part, int)))
        if instead is not None:
            return f"{where}this key is gone. {instead}."
        known = _known_keys(path[:-1])
        return f"{where}unknown key{did_you_mean(str(path[-1]), known)}. Known here: {', '.join(known)}."
    if kind == "missing":
        return f"{where}missing. Add it{_example(path)}."
    if kind == "literal_error":
        return f"{where}got {shown}, expected {problem['ctx']['expected']}."
    if isinstance(error, MisplacedError):
        return f"{where}{error}."
    if error is not None:
        return f"{where}{error}." if isinstance(value, dict | list) or not path else f"{where}got {shown}; {error}."
    if is_one_of:
        return f"{where}got {shown}, expected text, or a list of texts that is not empty."
    if kind == "model_type" and path[-2:-1] == ("columns",):
        return f"{where}got {shown}, expected a type such as bigint, or a mapping with type."
    if kind in _LIST_KINDS and isinstance(value, str | int | float) and shown != MASK:
        return f"{where}got {shown}, expected a list: [{masked(str(value))}]."
    if kind == "string_type" and isinstance(value, int | float) and shown != MASK:
        return f'{where}got {shown}, expected text: "{shown}".'
    if kind == "greater_than_equal" and isinstance(problem["ctx"]["ge"], float):
        kind = "at_least"
    expected = _EXPECTED.get(kind, problem["msg"][0].lower() + problem["msg"][1:])
    return f"{where}got {shown}, expected {expected.format(**problem.get('ctx', {}))}."


_ALTERNATIVE = re.compile(r"(function-\w+|tuple)\[")
"""Part of a path that pydantic adds where a value may have several types."""
_LIST_KINDS = ("list_type", "tuple_type")
_EXPECTED = {
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping (name: value)",
    "model_type": "a mapping (name: value)",
    "model_attributes_type": "a mapping (name: value)",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "greater_than_equal": "a whole number of at least {ge}",
    "at_least": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "too_short": "at least {min_length} in it",
    "string_too_short": "text that is not empty",
}
"""Pydantic's kind of a problem -> our words. Pydantic's own messages use Python's terms."""


def _shown(value: Any) -> str:
    """`value` for a message. The contents of lists and mappings aren't shown, since they may be secret."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else repr(value)


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "sink": SinkSection,
        "source": SourceSection,
        "tables": TableSection,
        "index": IndexSection,
        "verify": VerifySection,
        "maintenance": MaintenanceSection,
    }
    model = Config if not path else models[str(path[0])]
    if path[-1:] == ("verify",):
        model = VerifySection
    if "maintenance" in path:
        model = _maintenance_section(path)
    if path[-2:-1] == ("columns",):
        model = ColumnSection
    if path == ("sink", "http"):
        model = HttpSection
    return [field.alias or name for name, field in model.model_fields.items()]


def _maintenance_section(path: tuple[str | int, ...]) -> type[BaseModel]:
    sections: dict[str, type[BaseModel]] = {
        "expire": ExpireSection,
        "orphans": OrphansSection,
        "rewrite": RewriteSection,
    }
    return sections.get(str(path[-1]), MaintenanceSection)


def _example(path: tuple[str | int, ...]) -> str:
    examples: dict[tuple[str, ...], str] = {
        ("sink", "id"): ", for example `id: shop`",
        ("sink", "checkpoint"): ", for example `checkpoint: ./state/shop`",
        ("source", "type"): ": kafka or files",
        ("source", "format"): ", for example `format: debezium-json`",
    }
    return examples.get(tuple(str(p) for p in path), "")


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
