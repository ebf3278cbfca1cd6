"""The sections of the configuration as typed data, and what each value must be like."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from changelog import formats
from changelog.spec import OF_THE_RECORD
from sink.config.base import Section, Text, as_text
from sink.config.maintenance import MaintenanceSection
from sink.config.options import (
    MisplacedError,
    check_source,
    did_you_mean,
)

_INTERVAL = re.compile(r"(\d+) (millisecond|second|minute|hour|day)s?")
_READY_SECONDS = 600.0
_UNIT_SECONDS = {"millisecond": 0.001, "second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
GROUP_REFERENCE = re.compile(r"\$(?:(\d+)|\{(\d+)\})")
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
def at(*path: str | int) -> Iterator[None]:
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
    """One parsed entry of `order_by`: a column (or a dotted path into the message), its Spark SQL type, if given, and
    whether its smaller values are the later ones.
    """

    name: str
    type: str | None = None
    descending: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, rest = text.strip().partition(" ")
        words = rest.split()
        direction = words.pop().lower() if words and words[-1].lower() in ("asc", "desc") else "asc"
        return cls(name=name, type=" ".join(words) or None, descending=direction == "desc")


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
        with at("options"):
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
    :param source: `from:` the message's field, if its name differs from the column's; or what the record has
        (`OF_THE_RECORD`).
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


class IgnoredNulls(Section):
    """`ignore_null_updates:` true, a list of columns, or `{except: [columns]}`.

    :param columns: None: all but those of `others`.
    """

    columns: Columns | None = None
    others: Annotated[Columns, Field(alias="except")] = Field(default_factory=list)


def _ignored_nulls(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return {} if value else None
    if isinstance(value, list) and value:
        return {"columns": value}
    if isinstance(value, dict) and set(value) == {"except"}:
        return value
    raise ValueError("expected true, a list of columns, or {except: [columns]} for all others")


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


class SoftDeleteSection(Section):
    """`soft_delete:` a delete marks the row as deleted, and its other values stay.

    :param column: the table's column that says whether the row is deleted. The sink adds and sets it.
    :param at: likewise, the time of the delete.
    :param purge: rows that were deleted so long ago are removed.
    """

    column: Text
    at: Text | None = None
    purge: Interval | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in self.columns:
            if not name or name.startswith("_rowdelta_") or "'" in name or "." in name:
                raise ValueError(f"got the column {name!r}; a name has no ' or ., and doesn't begin with _rowdelta_")
        if self.at is not None and self.at.lower() == self.column.lower():
            raise MisplacedError(f"got {self.at!r}, which is the flag's column too. Name another column", "at")
        if self.purge is not None and self.at is None:
            raise MisplacedError(
                "nothing says when a row was deleted. Write at too, with the name of a column, or leave purge out",
                "purge",
            )
        return self

    @property
    def purge_seconds(self) -> float | None:
        return None if self.purge is None else _seconds(self.purge)

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.column, self.at) if name is not None]


class TableSource(Section):
    """`source:` of a table's entry: only a topic or directory, or a list of topics, or a mapping.

    :param topic: one topic or directory; or several topics, whose changes all go to one table.
    :param pattern: a regular expression for the names of topics instead. If the table's target is one name, all of them
        go to this table.
    :param table: a regular expression for the names of the source's tables in the topic. Each that it matches gets a
        table. (Without a group in the target, `table` means `source_tables`.)
    """

    topic: str | Annotated[list[str], Field(min_length=1)] | None = None
    pattern: str | None = None
    table: str | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.topic is None) == (self.pattern is None):
            raise ValueError(
                "write a topic, a list of topics, {topic: a topic, table: a table of the source's}, or {pattern: a "
                "regular expression for topics}"
            )
        if isinstance(self.topic, list) and (twice := [name for name in self.topic if self.topic.count(name) > 1]):
            raise ValueError(f"it names {twice[0]!r} twice. Name it once")
        return self


def _source(value: Any) -> Any:
    return value if isinstance(value, dict) else {"topic": value}


NO_SHARD = "none"
"""`shard` of a table to which the same key of several topics is the same row."""


class HistorySection(Section):
    """`history:` the table keeps the versions of each row (slowly changing dimension, type 2).

    :param start: `from:` the column with the time from which a version holds.
    :param end: `to:` the column with the time from which it no longer holds; NULL in the current version.
    :param current: the column that is true in the current version. The table is partitioned by it.
    :param track: the columns whose changes make another version.
    :param ignore: `except:` with `track: all`, the columns whose changes don't.
    :param granularity: `micro-batch`: of a key's changes in a micro-batch, only the last one counts.
    """

    start: str = Field(default="valid_from", alias="from")
    end: str = Field(default="valid_to", alias="to")
    current: str = "is_current"
    track: Literal["all"] | Columns = "all"
    ignore: list[str] = Field(default_factory=list, alias="except")
    granularity: Literal["change", "micro-batch"] = "change"

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.start, self.end, self.current

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if len({name.lower() for name in self.columns}) < 3:
            raise ValueError("from, to and current are three columns. Give each a name of its own")
        if self.ignore and self.track != "all":
            raise MisplacedError("track names the columns already. Leave one of them out", "except")
        return self


class TableSection(Section):
    """One entry of `tables:`: a changelog and the table that mirrors it.

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
        is_one = isinstance(self.feed.topic, str) or (self.is_pattern and self.feed.table is None)
        return not is_one

    @property
    def id(self) -> str:
        """What tells the tables of a job apart, also those whose target is wrong."""
        return f"{self.origin} -> {self.target}"

    @property
    def origin(self) -> str:
        """What the table mirrors, for people: its source, and which table in it if a pattern has found that."""
        table = self.feed.table
        return self.source if table is None else f"{', '.join(self.source_tables) or table} in {self.source}"

    @property
    def record_columns(self) -> dict[str, str]:
        """Columns whose values are of the record, such as its topic -> which of `OF_THE_RECORD`."""
        named = {name: column.source for name, column in (self.columns or {}).items() if column.source in OF_THE_RECORD}
        return named | {name: name for name in self.metadata if name in OF_THE_RECORD}

    @model_validator(mode="after")
    def _topics_fit(self) -> Self:
        """:raises MisplacedError: nothing tells rows of several topics apart."""
        if self.shard is not None and (not self.many_topics or self.mode == "append"):
            why = "mode append compares no rows" if self.many_topics else "the table takes one topic"
            raise MisplacedError(f"got {self.shard}, but {why}. Leave shard out", "shard")
        if not self.many_topics or self.mode == "append":
            return self
        several = f"table {self.target} takes several topics"
        if self.shard == NO_SHARD:
            if not self.order_by:
                raise MisplacedError(
                    f"{several}, in which the same key is the same row, and nothing says which topic's change is "
                    "newer. Write order_by, with fields that say when a row was changed",
                    "order_by",
                )
            return self
        topics = [name for name, field in self.record_columns.items() if field == "_source"]
        if self.shard is not None and self.shard not in self.key:
            raise MisplacedError(f"got {self.shard}, which key doesn't name. Write it into key too", "shard")
        if self.shard is None and not set(topics) & set(self.key):
            column = topics[0] if topics else "_source"
            add = "" if topics else "metadata: [_source] and "
            raise MisplacedError(
                f"{several}, and nothing in its key tells their rows apart. Write {add}key: "
                f"[{', '.join([column, *(self.key or ['…'])])}]; or shard: with the key's column that does; or shard: "
                f"{NO_SHARD}, if the same key is the same row in all of them",
                "key",
            )
        return self

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
    def partition_fields(self) -> list[PartitionField]:
        """Current rows and closed versions are in partitions of their own, so that readers of either skip the other."""
        current = [] if self.history is None else [self.history.current]
        return [PartitionField.parse(text) for text in dict.fromkeys([*current, *self.partition_by])]

    @property
    def stores_order(self) -> bool:
        """Whether the table has the order values of its rows."""
        return self.late != "apply" or self.history is not None

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
        """Whether updates may lack values, which are then those of the table's row. If late changes are left out, the
        row may have missed such a value, so there the user must say it.
        """
        wanted = self.unavailable or ("keep" if self.late == "apply" else "reject")
        return wanted == "keep" and self._cannot_keep is None

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
    def _ignored_nulls_fit(self) -> Self:
        ignored = self.ignore_null_updates
        if ignored is None:
            return self
        if self._cannot_keep is not None:
            raise MisplacedError(
                f"table {self.target}: an ignored NULL leaves the value of the table's row in place, but "
                f"{self._cannot_keep}, or leave ignore_null_updates out",
                "ignore_null_updates",
            )
        if self.soft_delete is not None:
            raise MisplacedError(
                f"table {self.target}: a row that soft_delete has marked would give its values to the next insert of "
                "its key. Leave one of them out",
                "ignore_null_updates",
            )
        for name in (ignored.columns or ignored.others) if self.columns is not None else ():
            if name not in self._stored:
                raise MisplacedError(
                    f"it names {name!r}, which is not in columns{did_you_mean(name, self._stored)}",
                    "ignore_null_updates",
                )
        return self

    @model_validator(mode="after")
    def _late_fits(self) -> Self:
        if not self.stores_order:
            if self.tombstones is not None:
                raise MisplacedError(
                    "it is for late: drop, late: dead-letter and history. Write one of them too, or leave it out",
                    "tombstones",
                )
            return self
        why = None
        if self.mode != "upsert":
            why = f"mode {self.mode} takes changes as they are. Write mode: upsert"
        elif not self.has_index:
            why = "with deletes: equality nothing tells what the table holds. Write deletes: position or copy-on-write"
        elif not self.order_by:
            why = "nothing says which changes are late. Write order_by, with fields that say when a row was changed"
        if why is not None and self.late != "apply":
            raise MisplacedError(f"table {self.target}: got {self.late}, but {why}, or late: apply", "late")
        if why is not None:
            raise MisplacedError(f"table {self.target}: got history, but {why}, or leave history out", "history")
        return self

    @property
    def keeps_deleted(self) -> bool:
        """Whether a delete of the source removes no row."""
        return self.soft_delete is not None or self.source_deletes == "ignore"

    @property
    def marks(self) -> list[str]:
        """The columns by which a row says that it is deleted."""
        return [] if self.soft_delete is None else self.soft_delete.columns

    @model_validator(mode="after")
    def _deletes_fit(self) -> Self:
        if not self.keeps_deleted:
            return self
        name, got = ("source_deletes", "ignore") if self.soft_delete is None else ("soft_delete", "it")
        others = "leave it out" if self.soft_delete is not None else "source_deletes: apply"
        why = None
        if self.mode != "upsert":
            why = f"mode {self.mode} takes changes as they are. Write mode: upsert"
        elif self.soft_delete is not None and not self.has_index:
            why = "with deletes: equality nothing finds the row. Write deletes: position or copy-on-write"
        elif self.soft_delete is not None and self.source_deletes == "ignore":
            why = "with source_deletes: ignore no row is deleted. Keep one of the two"
        elif self.soft_delete is not None and self.history is not None:
            why = "history closes the row of a deleted key. Keep one of the two"
        elif self.source_deletes == "ignore" and self.where is not None:
            why = "where removes the rows that it isn't true for any more. Leave where out"
        elif self.truncate == "apply":
            why = "truncate: apply removes rows. Write truncate: reject"
        if why is not None:
            raise MisplacedError(f"table {self.target}: got {got}, but {why}, or {others}", name)
        for column in self.marks:
            field = "at" if column != self.marks[0] else "column"
            taken = next(
                (part for part in ("columns", "metadata", "key") if column in (getattr(self, part) or ())), None
            )
            taken = "order_column" if taken is None and self.may_hold_order(column) else taken
            if taken is not None:
                raise MisplacedError(
                    f"table {self.target}: got {column!r}, which is in {taken} too, and the sink sets this column. "
                    "Name another one",
                    name,
                    field,
                )
        return self

    @property
    def tombstone_seconds(self) -> int:
        """How long the order values of deleted keys are kept."""
        return int(_seconds(self.tombstones or "7 days"))

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

    @property
    def version_columns(self) -> tuple[str, ...]:
        """The columns by which a row is a version."""
        return () if self.history is None else self.history.columns

    def may_hold_order(self, column: str) -> bool:
        """Whether a column may be left from a time with `late: drop`, by its name."""
        return re.fullmatch(rf"(_order|{re.escape(self.order_column)})(_\d+)?", column) is not None

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

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        if self.key:
            self.check_key(self.key, "key")
        for name, key in self.keys.items():
            self.check_key(key, "keys", name)
        if self.columns is not None:
            stored = self._stored
            for field in map(PartitionField.parse, self.partition_by):
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
            names = (*self.columns, *self.metadata, *self.marks)
            lower = [name.lower() for name in names]
            for name in names:
                if lower.count(name.lower()) > 1:
                    raise MisplacedError(
                        f"{name!r} is a column twice in columns, metadata and soft_delete; Spark does not tell upper "
                        "from lower case",
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
        return [*(name for name, column in (self.columns or {}).items() if column.stored), *self.metadata, *self.marks]

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
            record = self.record_columns.get(name)
            if (name in self.metadata and record is None) or record not in (None, "_source"):
                raise MisplacedError(
                    f"key names {name!r}, which is a metadata column; a key must be a field of the messages, or the "
                    "topic (_source)",
                    *path,
                )
            if self.columns is None or name in self.metadata:
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
