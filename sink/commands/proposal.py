"""Writes the configuration file of `rowdelta init` from what was found, and says what was left out."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from changelog.recognition import FLATTENED
from sink.commands.discovery import Found, LeftOut
from sink.errors import ConfigError
from sink.printing import one_line, printable

_SINK = """\
# id is a stable identity: each table stores its source position under this name. trigger: available-now applies what is
# there, then stops; with an interval such as 10 seconds it goes on. Records that can't be applied are dead letters."""
_MIRROR = """\
# id is a stable identity: each table stores its source position under this name. With trigger: available-now, a run
# applies what is there, then stops. Records that can't be applied are dead letters."""
_CONNECTOR = """\
# Debezium's own engine reads the database's log, without Kafka, and keeps what the tables haven't applied in buffer. It
# creates the slot and the publication; docs/without-kafka.md says which rights it needs. While no run reads the slot,
# the database keeps its log: drop the slot of a sink that is no longer used."""
_BINLOG = """\
# Debezium's own engine reads the database's binlog, without Kafka, and keeps what the tables haven't applied in buffer.
# docs/without-kafka.md says which rights it needs. The database must keep its binlog for as long as no run reads it."""
_LOAD = """\
# Tables that are empty are copied from the database first, in parts, while it goes on (docs/load.md)."""
_MIRRORED = """\
# An entry may also stand for many tables, later ones too: {source: 'shop[.]public[.](.*)', target: lake.public.$1}.
# Then table.include.list above must take them, but no table without a primary key."""
_CATALOGS = """\
# A folder, to begin with. Any Iceberg catalog will do, or for Delta tables type: delta. For example:
# lake: {type: rest, uri: "https://catalog:8181", warehouse: lake, credential: "${CATALOG_CREDENTIAL}"}"""
_TABLES = """\
# Where no key is written, the messages say it. An entry may also stand for many sources, later ones too:
# {source: 'shop[.]public[.](.*)', target: lake.public.$1}"""
_TYPES = """\
# Messages without a schema don't say which type a column has. So check the types below. If you write another type,
# rowdelta converts the values exactly; a record whose value doesn't fit is a bad record. Columns that were null in all
# messages come when values do."""
_DECIMALS = """\
# Debezium's decimals arrive as base64 text then, its dates and times as numbers: decimal(p,s), date or timestamp_ntz in
# the source. To get exact types without guesses, let the connector send schemas: value.converter.schemas.enable=true,
# or Avro with a schema registry. Or set decimal.handling.mode=string in the connector, and here, under source,
# format_options: {decimal.handling.mode: string}; then decimals arrive as readable text."""


@dataclass(frozen=True)
class Place:
    """Where changes come from.

    :param type: `source.type`.
    :param options: `source.options` or `source.connector` as the file has them: secrets are `${NAME}`.
    :param folder: folder of the configuration file. Paths are relative to it.
    :param format_options: options of the schema registry, likewise.
    :param secrets: names of environment variables that the file refers to and that aren't set.
    :param remark: says what such a variable must have, if that isn't clear, or what the place lacks.
    :param what: the place in words, for messages and comments.
    :param file: the configuration file's name.
    """

    type: str
    options: Mapping[str, str]
    folder: Path
    format_options: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    remark: str = ""
    what: str = ""
    file: str = "sink.yaml"


def main_format(found: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """The tables with the most frequent format, and the others. A configuration has only one format."""
    groups: dict[object, list[Found]] = {}
    for each in found:
        groups.setdefault((each.recognized.format, each.recognized.options, each.parquet), []).append(each)
    chosen = max(groups.values(), key=lambda group: (len(group), sum(each.looked_at for each in group)))
    return chosen, [each for each in found if each not in chosen]


def write(place: Place, results: Sequence[Found | LeftOut]) -> str:
    """The text of a configuration file.

    :raises ConfigError: nothing was found that can be a table.
    """
    found = [each for each in results if isinstance(each, Found)]
    if not found:
        left = [each for each in results if isinstance(each, LeftOut)]
        reasons = "\n".join(f"  {each.name}: {each.reason}" for each in left if not each.internal)
        needs_registry = any(each.needs_registry for each in left) and not place.format_options
        hint = " Give --registry with its URL." if needs_registry else ""
        raise ConfigError(f"{place.what} has nothing that can be a table.{hint}\n{reasons}".rstrip())
    return "\n".join(_lines(place, results, main_format(found)[0])) + "\n"


def told(place_type: str, results: Sequence[Found | LeftOut]) -> Iterator[str]:
    """The lines that `rowdelta init` prints about the results."""
    chosen, others = main_format([each for each in results if isinstance(each, Found)])
    for each in chosen:
        tables = f", messages of {_counted(each.tables)}" if each.tables else ""
        order = f", ordered by {', '.join(each.order_by)}" if each.order_by else ""
        yield f"{each.name}: {each.recognized.format}, key {', '.join(each.key)}{order}{tables}"
    for each in others:
        option = f"--topics {shlex.quote(re.escape(each.name))}" if place_type == "kafka" else f"--files {each.name}"
        flattened = " (flattened)" if each.recognized.options == FLATTENED else ""
        yield f"{each.name}: {each.recognized.format}{flattened}, needs a file of its own: init again with {option}"
    left = [each for each in results if isinstance(each, LeftOut)]
    yield from (f"{each.name}: left out, {each.reason}" for each in left if not each.internal)
    internal = [each.name for each in left if each.internal]
    if internal:
        yield f"no changes of tables: {', '.join(internal)}"


def _counted(tables: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in tables.items())


def _lines(place: Place, results: Sequence[Found | LeftOut], chosen: Sequence[Found]) -> Iterator[str]:
    what, sink_id = chosen[0].recognized, _sink_id(chosen, place)
    yield f"# Written by rowdelta init, from {_comment(place.what)}. Read it, then:"
    yield f"#   rowdelta check {_comment(place.file)}     # is it right? which columns will the tables have?"
    how = "     # copies the tables, then follows their changes until Ctrl-C" if place.type == "debezium" else ""
    yield f"#   rowdelta run {_comment(place.file)}{how}"
    if place.secrets:
        yield f"# Secrets are not in this file. Set {' and '.join(place.secrets)} in the environment before."
    if place.remark:
        yield f"# {place.remark}"
    is_mirror = place.type == "debezium"
    yield _MIRROR if is_mirror else _SINK
    trigger = "10 seconds" if is_mirror else "available-now"
    sink = {"id": sink_id, "checkpoint": f"./state/{sink_id}", "trigger": trigger}
    yield _yaml({"sink": sink | {"dead_letter_table": f"lake.rowdelta.{_name(sink_id)}_dead_letters"}})
    options = dict(place.options)
    if place.type == "files":
        options["path_format"] = "parquet" if chosen[0].parquet else "json"
    registry = place.format_options if what.format in ("avro", "debezium-avro") else {}
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in what.options}
    source = {"type": place.type, "format": what.format, "options": options, "format_options": {**own, **registry}}
    if is_mirror:
        source = {"type": place.type, "buffer": f"./state/{sink_id}-buffer", "connector": options}
        yield _CONNECTOR if "slot.name" in options else _BINLOG
    yield _yaml({"source": {name: value for name, value in source.items() if value}})
    if is_mirror:
        yield _LOAD
        yield _yaml({"load": {"auto": True}})
    yield _CATALOGS
    yield _yaml({"catalogs": {"lake": {"type": "hadoop", "warehouse": "./warehouse"}}})
    yield _MIRRORED if is_mirror else _TABLES
    if any(each.columns for each in chosen):
        yield _TYPES
        if what.format == "debezium-json":
            yield _DECIMALS
    yield "tables:"
    targets = _targets(chosen, place, results)
    for each in chosen:
        if each.recognized.note:
            yield f"  # {_comment(each.recognized.note)}"
        if len(each.tables) > 1:
            yield f"  # Has messages of {_comment(_counted(each.tables))}. This entry takes those of one table."
            yield "  # Name all that belong together, also as patterns such as *.orders. Others would be bad records."
        first, *rest = _yaml(_entry(each, targets[each.name], place)).split("\n")
        yield "\n".join([f"  - {first}", *(f"    {line}" for line in rest)])


def _entry(found: Found, target: str, place: Place) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "source": _relative(found.name, place) if place.type == "files" else found.name,
        "target": target,
        "key": [] if found.key_is_stated else list(found.key),
        "order_by": list(found.order_by),
        "exclude": list(found.excluded),
        "columns": dict(found.columns),
    }
    if len(found.tables) > 1:
        entry |= {"source_tables": list(found.tables)[:1], "other_tables": "ignore"}
    return {name: value for name, value in entry.items() if value}


def _targets(chosen: Sequence[Found], place: Place, results: Sequence[Found | LeftOut]) -> dict[str, str]:
    """Source -> table. The last part of the source's name becomes the table's name, the part before it the namespace.

    If two sources would get the same table, the namespace takes more parts of the name. So it does if a broker has
    topics of several prefixes, such as two connectors': another file for the other prefix has other tables then.
    """
    result: dict[str, str] = {}
    topics = [each.name for each in results if isinstance(each, Found) or not each.internal]
    several = place.type == "kafka" and len({name.split(".")[0] for name in topics if name.count(".") > 1}) > 1
    most = max(len(re.split(r"[./]", each.name)) for each in chosen)
    for parts in range(most if several else 1, 1 + most):
        result = {}
        for each in chosen:
            prefix, _, table = each.name.rpartition("/" if place.type == "files" else ".")
            levels = [level for level in re.split(r"[./]", prefix) if level][-parts:] or ["cdc"]
            result[each.name] = f"lake.{_name('_'.join(levels))}.{_name(table) or '_'}"
        if len({target.lower() for target in result.values()}) == len(result):
            return result
    # the names differ only in characters that a table's name can't have
    return {name: f"{target}_{number}" for number, (name, target) in enumerate(result.items())}


def _sink_id(chosen: Sequence[Found], place: Place) -> str:
    if place.type == "files":
        name = Path(chosen[0].name).parent.name if len(chosen) > 1 else Path(chosen[0].name).name
    else:
        name = chosen[0].name.split(".")[0] if "." in chosen[0].name else "rowdelta"
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9_-]", "", name) or "rowdelta"


def _relative(path: str, place: Place) -> str:
    """A path as the file has it. If it is below the file's folder, it begins with `./`."""
    try:
        return f"./{Path(path).resolve().relative_to(place.folder)}"
    except ValueError:
        return str(Path(path).resolve())


def _name(text: str) -> str:
    return re.sub(r"\W", "_", text)


def _comment(text: str) -> str:
    """A text from messages or folders: a line break in it would let the rest become configuration."""
    return one_line(printable(text))


class _Dumper(yaml.SafeDumper):
    """Lists in one line, mappings with a line for each value, and escapes for what a YAML reader might fold."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"'),
)
_Dumper.add_representer(list, lambda dumper, each: dumper.represent_sequence("tag:yaml.org,2002:seq", each, True))


def _yaml(values: Mapping[str, Any]) -> str:
    dumped: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return dumped.rstrip("\n")
