"""Decides which columns are a table's key: the configured ones, else those that its source's messages state.

The table property `rowdelta.<sink id>.key` stores the table's key, and which keys its messages have stated:

    {"columns": ["id"], "configured": false, "messages": [["id"]]}

Each micro-batch is compared with it. If messages begin to state another key, the source has changed its primary key.
From there on, rows that the table holds as one row may be several, or several may be one. So the sink applies nothing
more until the user has decided. The table property `rowdelta.<sink id>.accepted-keys` is the user's word that messages
may state other keys too. The sink itself never sets it, so SQL can in each format: `[["id"], ["id", "line"]]`.

The configuration can't change the key of a table by itself: under a narrower key one change would remove all rows that
share it. `rowdelta.<sink id>.new-key` (`["id"]`) is the user's word for it. Then, and where a table has rows and no
stored key, `sink.spark.duplicate_keys` looks before anything is committed.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from changelog.decoding import StatedKeys
from sink.config import Config, TableSection
from sink.config.options import MisplacedError, did_you_mean
from sink.errors import ConfigError, NoMessagesError, TableError
from sink.table.inference import Sample
from sink.table.patterns import ResolvedTable
from sink.targets.own_state import property_prefix
from sink.targets.seam import TableView

Fields = tuple[str, ...]

WAYS_OUT = (
    "Name the columns that tell rows apart in tables[].key (or in keys, for one topic of a pattern), or set mode: "
    "append for a table that only grows."
)


@dataclass(frozen=True)
class TableKey:
    """A table's key.

    :param columns: key columns of the table. Empty in mode append.
    :param configured: the configuration names the key, so messages may state another key, or none.
    :param messages: keys that messages may state, as names of fields. Empty if no message has stated a key yet.
    """

    columns: tuple[str, ...]
    configured: bool
    messages: tuple[Fields, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> "TableKey":
        stored = json.loads(text)
        messages = tuple(tuple(fields) for fields in stored["messages"])
        return cls(tuple(stored["columns"]), stored["configured"], messages)

    def to_json(self) -> str:
        return json.dumps({"columns": self.columns, "configured": self.configured, "messages": self.messages})

    def warning(self, section: TableSection) -> str | None:
        """A warning if messages state another key than the configured one. The user may want this."""
        own = set(_fields(section, self.columns))
        others = [fields for fields in self.messages if set(fields) != own]
        if not self.configured or not others:
            return None
        more = sorted(own.difference(*others))
        effect = f"The table keeps one of the rows with the same {shown(self.columns)}."
        if more:
            effect = (
                f"A change of {shown(more)} leaves the old row in the table, and a delete may find no row, or another "
                "one, unless messages have whole rows from before each change (in Postgres REPLICA IDENTITY FULL)."
            )
        return (
            f"{section.target}: key is {shown(self.columns)}, but the key of the messages of {section.source} is "
            f"{' or '.join(map(shown, others))}. {effect}"
        )


KEY = "key"
"""Last part of the property that remembers a table's key."""


def property_name(config: Config) -> str:
    return f"{property_prefix(config)}.{KEY}"


def accepted_property(config: Config) -> str:
    """Property by which the user accepts other keys of the messages."""
    return f"{property_prefix(config)}.accepted-keys"


def table_key(config: Config, resolved: ResolvedTable, table: TableView | None, sample: Sample) -> TableKey:
    """The key of a table.

    :param table: the table, if it exists.
    :param sample: sample of the source's messages. It is read only if the key isn't known otherwise.
    :raises ConfigError: the messages don't state exactly one key, or the table can't have this key.
    :raises TableError: the writers don't know the type of a column, or a property of the key isn't one.
    :raises NoMessagesError: there are no messages yet.
    """
    section, path = resolved.section, resolved.path
    if section.mode == "append":
        return TableKey((), configured=False)
    text = None if table is None else table.property(property_name(config))
    known = None if text is None else TableKey.from_json(text)
    if section.key:
        if table is not None and known is not None and known.messages:
            known = replace(known, messages=_united(known.messages, _accepted(table, accepted_property(config))))
        key = tuple(section.key)
        if known is None:
            return TableKey(key, configured=True)
        if known.configured and known.columns == key:
            return known
        own = () if table is None else table.identifiers() or known.columns
        if table is not None and set(own) != set(key) and set(own) <= {column.name for column in table.columns()}:
            _check_new_key(config, section, path, table, known)
        # the user has decided for this key, perhaps because the messages' key has changed
        return TableKey(key, True, _united(known.messages, (fields for fields in sample.message_keys() if fields)))
    if table is not None:
        columns = table.identifiers() or (() if known is None else known.columns)
        if columns:
            return TableKey(columns, False, (_fields(section, columns),))
    fields = _stated(section, path, sample)
    known_columns = [column.name for column in table.columns()] if table else list(sample.columns() or ())
    if not known_columns and section.columns is None and sample.is_empty:
        raise NoMessagesError(section.target, section.source)
    columns = _columns(section, path, fields, known_columns)
    return TableKey(columns, False, (_fields(section, columns),))


def _check_new_key(config: Config, section: TableSection, path: str, table: TableView, known: TableKey) -> None:
    """:raises ConfigError: the user hasn't said that the key is to become another one."""
    name, new = f"{property_prefix(config)}.new-key", json.dumps(section.key)
    if table.property(name) == new:
        return
    own = shown(known.columns)
    raise ConfigError(
        f"{path}.key: got {shown(section.key)}, but the rows of {section.target} are told apart by {own}. Under "
        f"another key one change may remove several rows. Write key: [{own}]; or drop the table, so that it is built "
        f"anew under the new key; or, if {shown(section.key)} tells the rows apart that are there, say so "
        f"in SQL and run again: ALTER TABLE {section.target} SET TBLPROPERTIES ('{name}' = '{new}')."
    )


def with_key(resolved: ResolvedTable, key: TableKey) -> ResolvedTable:
    """The table's configuration with the key filled in."""
    return replace(resolved, section=resolved.section.model_copy(update={"key": list(key.columns)}))


def compared(key: TableKey, stated: StatedKeys, section: TableSection, accepted: str) -> TableKey:
    """Compare the keys that a micro-batch's messages state with the table's key. Returns the key with what is new.

    :param stated: keys that the messages state.
    :param accepted: name of the table property by which the user accepts other keys.
    :raises TableError: messages state another key than before. The micro-batch must not be applied.
    """
    if key.configured:
        # if the user has configured the key, messages without a key are fine
        stated = {fields: place for fields, place in stated.items() if fields}
    known = {frozenset(fields) for fields in key.messages}
    others = {fields: place for fields, place in stated.items() if frozenset(fields) not in known}
    if not others:
        return key
    if key.configured and not known:
        return replace(key, messages=_united((), sorted(others, key=lambda fields: others[fields])))
    fields, (partition, offset) = min(others.items(), key=lambda item: item[1])
    before = " or ".join(map(shown, key.messages))
    now = f"it is {shown(fields)}" if fields else "they have none"
    text = (
        f"{section.target}: the key of the messages of {section.source} was {before}, and from partition {partition} "
        f"offset {offset} on {now}. Did the source change its primary key? Nothing of this micro-batch was applied. "
    )
    own = shown(key.columns)
    new = f"set key: [{shown(fields)}]" if fields else "set key, or mode: append,"
    rebuild = f"drop the table and {new} so that it is built anew"
    if not key.configured:
        raise TableError(f"{text}If {own} still tells rows apart, set key: [{own}] and run again; else {rebuild}.")
    allowed = _united(key.messages, sorted(others, key=lambda fields: others[fields]))
    quoted = json.dumps(allowed).replace("\\", "\\\\").replace("'", "\\'")
    raise TableError(
        f"{text}If key: [{own}] still tells rows apart, say so in SQL and run again: ALTER TABLE {section.target} SET "
        f"TBLPROPERTIES ('{accepted}' = '{quoted}'); else {rebuild}."
    )


def may_spread(key: TableKey, stated: Iterable[Fields], section: TableSection) -> bool:
    """Whether messages of one row may be in several partitions of a topic, where nothing says which one is newer.
    Kafka's clients choose a partition by the message's key, and any partition for a message without a key.

    :param stated: keys that messages state.
    """
    own = set(_fields(section, key.columns))
    return not section.order_by and any(not fields or set(fields) - own for fields in stated)


def _accepted(table: TableView, name: str) -> Iterable[Fields]:
    """The keys that the user has accepted by the property.

    :raises TableError: its value is something else.
    """
    text = table.property(name)
    if text is None:
        return ()
    try:
        keys = json.loads(text)
    except ValueError:
        keys = None
    is_list = isinstance(keys, list) and all(isinstance(fields, list) and fields for fields in keys)
    if not is_list or not all(isinstance(field, str) for fields in keys for field in fields):
        raise TableError(
            f'{table.name}: the table property {name} is {text!r}, expected keys such as [["id"], ["id", "line"]].'
        )
    return map(tuple, keys)


def shown(names: Iterable[str]) -> str:
    return ", ".join(names)


def _stated(section: TableSection, path: str, sample: Sample) -> Fields:
    """The only key that messages state."""
    stated = sorted(sample.message_keys(), key=lambda fields: (len(fields), fields))
    if not stated and sample.is_empty:
        raise NoMessagesError(section.target, section.source)
    if len({frozenset(fields) for fields in stated}) > 1:
        keys = " and others ".join(f"the key {shown(fields)}" if fields else "no key" for fields in stated)
        raise ConfigError(
            f"{path}: {section.target} has no key: some messages of {section.source} have {keys}. Did the source "
            f"change its primary key? {WAYS_OUT}"
        )
    if not stated or not stated[0]:
        raise ConfigError(
            f"{path}: {section.target} has no key: key is not configured, and the messages of {section.source} have "
            f"none that names columns. {WAYS_OUT}"
        )
    return stated[0]


def _columns(section: TableSection, path: str, fields: Fields, known: Sequence[str]) -> tuple[str, ...]:
    """The columns that get the key's fields, in the table's order.

    :param fields: the key's fields.
    :param known: the table's columns, if the configuration doesn't name columns.
    :raises ConfigError: a field has no column, or its column can't be part of a key.
    """
    if section.columns is None:
        by_field = {name: name for name in known}
    else:
        by_field = {c.source or name: name for name, c in section.columns.items() if c.expression is None}
    reason = f"the key of the messages of {section.source} is {shown(fields)}"
    for name in fields:
        if name in section.exclude:
            raise ConfigError(f"{path}.exclude: it names {name!r}, and {reason}. Remove it from exclude, or write key.")
        if name not in by_field:
            what = "columns" if section.columns is not None else "the table, or in the messages' values"
            same = next(
                (f", where case counts: {other!r} is" for other in by_field if other.lower() == name.lower()), ""
            )
            raise ConfigError(
                f"{path}: {reason}, and {name!r} is not in {what}{same or did_you_mean(name, by_field)}. Add it to "
                "columns (with from, if the column is to have another name), or write key."
            )
    columns = tuple(by_field[name] for name in by_field if name in fields)
    try:
        section.check_key(columns)
    except MisplacedError as error:
        raise ConfigError(f"{path}: {reason}: {error}.") from None
    return columns


def _fields(section: TableSection, columns: Sequence[str]) -> Fields:
    """The names that messages use for these columns. Values of the record, such as its topic, are none of theirs."""
    named, others = section.columns or {}, section.record_columns
    return tuple(named[name].source or name if name in named else name for name in columns if name not in others)


def _united(first: Iterable[Fields], second: Iterable[Fields]) -> tuple[Fields, ...]:
    """All keys, each once. Keys with the same fields in another order are equal."""
    found = {frozenset(fields): fields for fields in reversed([*first, *second])}
    return tuple(reversed(found.values()))
