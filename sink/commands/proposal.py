"""Writes the configuration file of `rowdelta init` from what was found. Comments in the file say what was guessed, and
what was left out.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from changelog.amounts import amount
from changelog.recognition import FLATTENED
from sink.commands.discovery import Found, LeftOut
from sink.errors import ConfigError
from sink.redaction import is_secret, masked

_REFERENCE = re.compile(r"\$\{(?:file:(?!-)[^}:]+|[A-Za-z_]\w*)\}")
"""One reference without a default value."""
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Line breaks, and characters that YAML reads only if they are escaped."""
_PLAIN = re.compile(r"[A-Za-z_./][\w./:()-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan"}
_DECIMALS = """\
# Messages without a schema don't say which type a column has. Debezium's decimals arrive as base64 text, its dates and
# times as numbers. So check the types below. If you write another type, rowdelta converts the values exactly.
# To get exact types without guesses, let the connector send schemas: value.converter.schemas.enable=true, or Avro with
# a schema registry. Or set decimal.handling.mode=string in the connector, and here, under source,
# format_options: {decimal.handling.mode: string}; then decimals arrive as readable text."""
_TYPES = """\
# Messages without a schema don't say which type a column has. So check the types below. If you write another type,
# rowdelta converts the values exactly; a record whose value doesn't fit is a bad record."""


@dataclass(frozen=True)
class Place:
    """Where changes come from.

    :param type: `source.type`.
    :param options: `source.options` as the file has them: secrets are `${NAME}`.
    :param folder: folder of the configuration file. Paths are relative to it.
    :param format_options: options of the schema registry, likewise.
    :param secrets: names of environment variables that the file refers to and that aren't set.
    :param remark: says what such a variable must have, if that isn't clear.
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


def hidden(name: str, value: str, variable: str) -> str:
    """An option's value as the file may have it. A secret becomes `${variable}`, unless the whole value is a reference
    already. A value with a reference and other text may also contain a secret, so it is replaced too.
    """
    if _REFERENCE.fullmatch(value) or not (is_secret(name) or masked(value) != value):
        return value
    return f"${{{variable}}}"


def main_spelling(found: Sequence[Found]) -> tuple[list[Found], list[Found]]:
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
    left = [each for each in results if isinstance(each, LeftOut)]
    keyless = [each for each in found if not each.key]
    found = [each for each in found if each.key]
    left += [LeftOut(each.name, _no_key(each)) for each in keyless]
    if not found:
        reasons = "\n".join(f"  {each.name}: {each.reason}" for each in left if not each.internal and each.asked_for)
        hint = (
            " Give --registry with its URL." if any(e.needs_registry for e in left) and not place.format_options else ""
        )
        raise ConfigError(f"{place.what} has nothing that can be a table.{hint}\n{reasons}".rstrip())
    chosen, others = main_spelling(found)
    prefixes = {each.name.split(".")[0] for each in results if not _is_internal(each) and each.name.count(".") > 1}
    targets = _targets(chosen, place, with_prefix=place.type == "kafka" and len(prefixes) > 1)
    return "".join(f"{_one_line(line)}\n" for line in _lines(place, chosen, others, left, targets))


def _one_line(text: str) -> str:
    """Remove line breaks from a line. Names come from messages or folders, and a line break in a comment would let the
    rest of the name become configuration.
    """
    return text if text in (_DECIMALS, _TYPES) else _UNPRINTABLE.sub(" ", text)


def told(results: Sequence[Found | LeftOut]) -> Iterator[str]:
    """The lines that `rowdelta init` prints about the results."""
    chosen, others = main_spelling([each for each in results if isinstance(each, Found) and each.key])
    for each in chosen:
        guess = ", a guess" if each.key_is_guess else ""
        tables = f", messages of {_counted(each.tables)}" if each.tables else ""
        yield f"{each.name}: {each.recognized.format}, key {', '.join(each.key)}{guess}{tables}"
    yield from (f"{each.name}: {each.recognized.format}, needs a file of its own" for each in others)
    for result in results:
        if isinstance(result, Found) and not result.key:
            yield f"{result.name}: left out, {_no_key(result)}"
        elif isinstance(result, LeftOut) and not result.internal and result.asked_for:
            yield f"{result.name}: left out, {result.reason}"
    internal = [each.name for each in results if isinstance(each, LeftOut) and each.internal]
    if internal:
        yield f"no changes of tables: {', '.join(internal)}"


def _counted(tables: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in tables.items())


def _no_key(found: Found) -> str:
    kind = found.recognized.format
    if kind in ("debezium-json", "debezium-avro", "avro"):
        return (
            f"{kind}, but its messages have no key: give the source's table a primary key, or name columns with --key"
        )
    return f"{kind}, but its messages don't say which columns are the key; name them with --key"


def _lines(
    place: Place,
    chosen: Sequence[Found],
    others: Sequence[Found],
    left: Sequence[LeftOut],
    targets: Mapping[str, str],
) -> Iterator[str]:
    what = chosen[0].recognized
    sink_id = _sink_id(chosen, place)
    yield f"# Written by rowdelta init, from {place.what}. Read it, then:"
    yield f"#   rowdelta check {place.file}     # is it right? which columns will the tables have?"
    yield f"#   rowdelta run {place.file}"
    if place.secrets:
        yield f"# Secrets are not in this file. Set {' and '.join(place.secrets)} in the environment before."
    if place.remark:
        yield f"# {place.remark}"
    yield "sink:"
    yield f"  id: {_scalar(sink_id):<30} # stable identity: each table stores its source position under this name"
    yield f"  checkpoint: ./state/{sink_id}"
    yield "  trigger: available-now             # apply what is there, then stop; or an interval such as 10 seconds"
    yield f"  dead_letter_table: lake.rowdelta.{_name(sink_id)}_dead_letters   # records that can't be applied"
    yield "source:"
    yield f"  type: {place.type}"
    yield f"  format: {what.format}"
    options = dict(place.options)
    if place.type == "files":
        options["path_format"] = "parquet" if chosen[0].parquet else "json"
    yield from _mapping("options", options)
    registry = place.format_options if what.format in ("avro", "debezium-avro") else {}
    yield from _mapping("format_options", {**dict(what.options), **registry})
    yield "catalogs:"
    yield "  # a folder, to begin with. Any Iceberg catalog will do, or for Delta tables type: delta. For example:"
    yield '  # lake: {type: rest, uri: "https://catalog:8181", warehouse: lake, credential: "${CATALOG_CREDENTIAL}"}'
    yield "  lake: {type: hadoop, warehouse: ./warehouse}"
    yield ""
    without_schema = [each for each in chosen if not each.recognized.has_schema]
    if without_schema:
        yield _DECIMALS if what.format == "debezium-json" else _TYPES
    elif any(each.key_is_guess for each in chosen):
        yield "# The columns come from the messages' schema. Keys were guessed by name."
    else:
        yield "# The columns come from the messages' schema: rowdelta check shows them."
    yield "tables:"
    skipped = [other.name for other in others] + [each.name for each in left]
    yield from _entries(chosen, targets, skipped, place)
    yield from _comments(place, others, left)


def _entries(
    chosen: Sequence[Found], targets: Mapping[str, str], skipped: Sequence[str], place: Place
) -> Iterator[str]:
    """One pattern for tables that differ only in their names, and an entry for each other table."""
    by_prefix: dict[str, list[Found]] = {}
    for each in chosen:
        by_prefix.setdefault(_split(each.name, place)[0], []).append(each)
    patterns = []
    for prefix, group in by_prefix.items():
        regular = [
            each
            for each in group
            if targets[each.name].rpartition(".")[2] == _split(each.name, place)[1]
            and not each.key_is_guess
            and len(each.tables) < 2
        ]
        alike = [each for each in regular if each.recognized.has_schema and not each.excluded]
        ways = [_key_and_order(each) for each in alike]
        way = max(ways, key=ways.count) if ways else ([], [])
        members = [each for each in alike if _key_and_order(each) == way]
        # if the messages state the keys, the pattern also fits tables that will appear later
        is_open = not way[0] and len(regular) > 1 and all(each.key_is_stated for each in regular)
        if prefix and (len(members) > 1 or is_open):
            patterns.append((prefix, members, way, targets[regular[0].name].rpartition(".")[0]))
            group = [each for each in group if each not in members]
        for each in group:
            yield from _entry(each, targets[each.name], place)
    for prefix, members, way, template in patterns:
        yield from _pattern(prefix, members, way, template, skipped, place)


def _key_and_order(found: Found) -> tuple[Sequence[str], Sequence[str]]:
    """The key and order of an entry. The key is empty if the messages state it."""
    return [] if found.key_is_stated else list(found.key), list(found.order_by)


def _pattern(
    prefix: str,
    members: Sequence[Found],
    way: tuple[Sequence[str], Sequence[str]],
    template: str,
    skipped: Sequence[str],
    place: Place,
) -> Iterator[str]:
    inside = sorted(last for first, last in (_split(name, place) for name in skipped) if first == prefix)
    is_path = place.type == "files"
    begin = _relative(prefix, place) + "/" if is_path else re.escape(prefix + ".")
    none = "|".join(f"{re.escape(name)}$" for name in inside)
    # for files, the pattern is compared with the part of a path after the last slash
    name_of_one = ".+" if is_path else "[^.]+"
    group = f"((?!{none}){name_of_one})" if none else f"({name_of_one})"
    if members:
        names = ", ".join(_split(each.name, place)[1] for each in members[:20]) + (", …" if len(members) > 20 else "")
        yield f"  # {names}, and later ones with this prefix that aren't named above"
    else:
        yield "  # later ones with this prefix; when they are there, write their columns down as above"
    if inside:
        yield f"  # without {', '.join(inside[:20])}{', …' if len(inside) > 20 else ''}"
    for note in dict.fromkeys(each.recognized.note for each in members if each.recognized.note):
        yield f"  # {note}"
    yield f"  - source: {_quoted(begin + group)}"
    yield f"    target: {template}.$1"
    key, order_by = way
    if key:
        yield f"    key: {_flow(key)}"
    else:
        keys = " or ".join(sorted({", ".join(each.key) for each in members}))
        yield f"    # key: what each table's messages say{f' ({keys})' if keys else ''}"
    if order_by:
        yield f"    order_by: {_flow(order_by)}   # which change of a key is the last; a guess, by its name"


def _entry(found: Found, target: str, place: Place) -> Iterator[str]:
    name = _relative(found.name, place) if place.type == "files" else found.name
    if found.recognized.note:
        yield f"  # {found.recognized.note}"
    yield f"  - source: {_scalar(name)}"
    yield f"    target: {target}"
    if len(found.tables) > 1:
        own, *rest = found.tables
        yield f"    # The topic holds messages of {_counted(found.tables)}. This entry takes those of one."
        yield "    # Name all that belong together, also as patterns such as *.orders. Without other_tables: ignore,"
        yield f"    # messages of {', '.join(rest)} are bad records."
        yield f"    source_tables: {_flow([own])}"
        yield "    other_tables: ignore"
    remark = "   # A GUESS, by its name: correct it if these columns don't identify a row" if found.key_is_guess else ""
    if found.key_is_stated:
        yield f"    # key: {_flow(found.key)}, as the messages say"
    else:
        yield f"    key: {_flow(found.key)}{remark}"
    if found.order_by:
        yield f"    order_by: {_flow(found.order_by)}   # which change of a key is the last; a guess, by its name"
    if found.excluded:
        yield f"    exclude: {_flow(found.excluded)}   # names that no column can have"
    if found.columns:
        yield f"    columns:   # inferred from {amount(found.looked_at, 'row')} without a schema"
        for column, dtype in found.columns.items():
            remark = found.remarks.get(column, "")
            yield f"      {_scalar(column)}: {_scalar(dtype)}{f'   # a guess: {remark}' if remark else ''}"
    if found.empty:
        yield f"    # NULL in all of them, so no type is known: {', '.join(found.empty)}."
        yield f"    # Columns come when values do; to say their types now: types: {{{_scalar(found.empty[0])}: …}}"


def _comments(place: Place, others: Sequence[Found], left: Sequence[LeftOut]) -> Iterator[str]:
    """Comments on what isn't in this file, and why."""
    formats: dict[str, list[str]] = {}
    for other in others:
        flattened = " (flattened)" if other.recognized.options == FLATTENED else ""
        formats.setdefault(f"{other.recognized.format}{flattened}", []).append(other.name)
    if formats:
        yield ""
        option = "--topics" if place.type == "kafka" else "--files"
        yield f"# Other formats. A configuration has one: run rowdelta init again with {option} and --output for these."
        for name, sources in formats.items():
            wanted = ["|".join(map(re.escape, sources))] if place.type == "kafka" else sources
            yield from (f"#   {name}: {option} {shlex.quote(each)}" for each in wanted)
    kept = [each for each in left if not each.internal and each.asked_for]
    if kept:
        yield ""
        yield "# Left out:"
        yield from (f"#   {each.name}: {each.reason}" for each in kept)
    internal: dict[str, list[str]] = {}
    for each in left:
        if each.internal:
            internal.setdefault(each.reason, []).append(each.name)
    if internal:
        yield ""
        yield "# No changes of tables:"
        yield from (f"#   {', '.join(names)}: {reason}" for reason, names in internal.items())


def _is_internal(result: Found | LeftOut) -> bool:
    return isinstance(result, LeftOut) and result.internal


def _targets(chosen: Sequence[Found], place: Place, *, with_prefix: bool) -> dict[str, str]:
    """Source -> table. The last part of the source's name becomes the table's name, the part before it the namespace.

    If two sources would get the same table, the namespace takes more parts of the name.

    :param with_prefix: the broker has topics of several prefixes, such as two connectors'. Then the namespace has the
        prefix, so that another file for the other prefix has other tables.
    """
    result: dict[str, str] = {}
    most = max(len(re.split(r"[./]", each.name)) for each in chosen)
    for parts in range(most if with_prefix else 1, 1 + most):
        result = {}
        for each in chosen:
            prefix, table = _split(each.name, place)
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


def _split(name: str, place: Place) -> tuple[str, str]:
    """Split a topic's name or a path into the part before the last separator, and the last part."""
    prefix, _, last = name.rpartition("/" if place.type == "files" else ".")
    return prefix, last


def _relative(path: str, place: Place) -> str:
    """A path as the file has it. If it is below the file's folder, it begins with `./`."""
    try:
        return f"./{Path(path).resolve().relative_to(place.folder)}"
    except ValueError:
        return str(Path(path).resolve())


def _name(text: str) -> str:
    return re.sub(r"\W", "_", text)


def _mapping(name: str, values: Mapping[str, str | tuple[str, ...]]) -> Iterator[str]:
    if not values:
        return
    yield f"  {name}:"
    for key, value in values.items():
        yield f"    {key}: {_flow(value) if isinstance(value, tuple) else _scalar(value)}"


def _flow(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_scalar, values))}]"


def _scalar(text: str) -> str:
    """YAML for a text: plain if YAML then reads the same text, else in double quotes."""
    plain = _PLAIN.fullmatch(text) and not text.endswith(":") and text.lower() not in _WORDS
    if plain:
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=sys.maxsize)
    return quoted.rstrip("\n")


def _quoted(text: str) -> str:
    """A regular expression in single quotes. YAML then leaves its backslashes as they are."""
    return f"'{text.replace(chr(39), 2 * chr(39))}'"
