"""The parts of an entry of `tables:` as typed data."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sink.config.base import Section, Text
from sink.config.intervals import Interval, seconds_of
from sink.config.options import MisplacedError

GROUP_REFERENCE = re.compile(r"\$(?:(\d+)|\{(\d+)\})")
NO_SHARD = "none"
"""`shard` of a table to which the same key of several topics is the same row."""
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

Metadata = Literal["_op", "_ts", "_source", "_source_partition", "_offset", "_timestamp"]
Columns = Annotated[list[str], Field(min_length=1)]


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
        return None if self.purge is None else seconds_of(self.purge)

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.column, self.at) if name is not None]


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


class IgnoredNulls(Section):
    """`ignore_null_updates:` true, a list of columns, or `{except: [columns]}`.

    :param columns: None: all but those of `others`.
    """

    columns: Columns | None = None
    others: Annotated[Columns, Field(alias="except")] = Field(default_factory=list)
